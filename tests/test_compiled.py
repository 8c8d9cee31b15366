"""What XLA for TPUs makes of every transform, by benchmarks/compiled.py; without a TPU."""

import math
from typing import Any

import compiled
import jax
import jax.numpy as jnp
import optax
import pytest
from test_optax_contract import ALL

from spa_optax import spa

pytest.importorskip("libtpu", reason="it is XLA's compiler for TPUs: pip install libtpu")
pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = [(1024, 768), (768, 1024), (3, 3, 256, 512)]
SIZE = sum(map(math.prod, SHAPES))
every_transform = pytest.mark.parametrize("name", ALL)
every_dtype = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])


def program(tx: Any, dtype: Any = jnp.float32, num_devices: int = 1) -> compiled.Program:
    devices = compiled.devices_of("v5e", pod=num_devices > 8)[:num_devices]
    assert len(devices) == num_devices
    return compiled.analyse(compiled.compile_update(tx, SHAPES, dtype, devices))


def size_of_state(tx: Any, dtype: Any) -> int:
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES]
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@every_dtype
@every_transform
def test_one_kernel_a_leaf_that_moves_what_must_move(name: str, dtype: Any) -> None:
    """Gradients are read; params and state are read and written in place; nothing else is."""
    tx = ALL[name]()
    found = program(tx, dtype)
    # Small ones compute the look-ahead of a schedule, and random words.
    assert len([size for size in found.kernels if size > 100_000]) == len(SHAPES)
    must_move = 3 * SIZE * dtype.dtype.itemsize + 2 * size_of_state(tx, dtype)
    assert must_move <= found.num_bytes + 100  # XLA leaves out scalars that are not read
    assert found.num_bytes <= 1.001 * must_move
    assert found.temporary <= 0.001 * SIZE
    assert found.aliased > 0.999


def test_no_more_bytes_than_sgd() -> None:
    sgd, ours = program(optax.sgd(0.1, 0.9)), program(spa(1.0, 0.1))
    assert ours.num_bytes == pytest.approx(sgd.num_bytes, rel=1e-4)
    assert len(ours.kernels) == len(sgd.kernels) == len(SHAPES)


def test_a_second_kernel_is_seen() -> None:
    """The positive control: the norm must be known before the update can be."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda g: -g / norm, updates), jax.tree.map(jnp.add, state, updates)

    tx = optax.GradientTransformation(optax.tree.zeros_like, update)
    found = program(tx)
    assert len(found.kernels) >= 2 * len(SHAPES)
    assert found.num_bytes > 1.05 * 20 * SIZE


@pytest.mark.parametrize("num_devices", [8, 256])
@every_transform
def test_no_collective(name: str, num_devices: int) -> None:
    """But for the two squares of `track_momentum`, which are summed over all devices at once."""
    found = program(ALL[name](), num_devices=num_devices)
    assert found.num_collectives == (1 if name in ("tracked", "until noise") else 0)
    assert found.temporary <= 0.01 * SIZE


@pytest.mark.parametrize("num_devices", [8, 256])
def test_a_collective_is_seen(num_devices: int) -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), spa(1.0, 0.1))
    assert program(tx, num_devices=num_devices).num_collectives > 0


def test_the_256_devices_are_of_many_hosts() -> None:
    hosts = {device.process_index for device in compiled.devices_of("v5e", pod=True)}
    assert len(hosts) > 8
