"""What XLA makes of every transform for TPUs and an NVIDIA card, without either."""

import importlib.util
import math
from typing import Any

import compiled
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import long
from test_optax_contract import FACTORIES

from spa_optax import (
    primal_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

has_libtpu = importlib.util.find_spec("libtpu") is not None
has_cuda = importlib.util.find_spec("jax_cuda12_plugin") is not None
for_tpus = pytest.mark.skipif(
    not has_libtpu, reason="needs XLA for TPUs: pip install libtpu"
)
for_cards = pytest.mark.skipif(
    not has_cuda, reason="needs XLA for NVIDIA: jax-cuda12-plugin"
)
pytestmark = pytest.mark.usefixtures("standard_promotion")

NARROW: dict[str, Any] = {
    "state_dtype": jnp.bfloat16,
    "rounding_key": jax.random.key(0),
}
EIGHT = NARROW | {"state_dtype": jnp.float8_e4m3fn}
SHAPES = [(1024, 768), (3, 3, 256, 512)]
SIZE = sum(map(math.prod, SHAPES))
every_transform = pytest.mark.parametrize("name", FACTORIES)


def program(
    tx: Any, dtype: Any = jnp.float32, num_devices: int = 1, target: str = "v5e"
) -> compiled.Program:
    devices = compiled.devices_of(target, pod=num_devices > 8)[:num_devices]
    assert len(devices) == num_devices
    return compiled.analyse(compiled.compile_update(tx, SHAPES, dtype, devices))


@for_tpus
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@every_transform
def test_one_kernel_a_leaf_that_moves_what_must_move(name: str, dtype: Any) -> None:
    """Gradients are read; params and state are read and written in place."""
    tx = FACTORIES[name]()
    found = program(tx, dtype)
    params = [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES]
    state = jax.tree.leaves(jax.eval_shape(tx.init, params))
    size_of_state = sum(leaf.size * leaf.dtype.itemsize for leaf in state)
    must_move = 3 * SIZE * dtype.dtype.itemsize + 2 * size_of_state
    num_kernels, at_most = len(SHAPES), must_move
    if name == "watched":
        # The sums take a second kernel, which reads g, x, z and ν.
        num_kernels *= 2
        at_most = must_move + (2 * dtype.dtype.itemsize + 8) * SIZE
    elif name == "factored":
        # Means of g² come first, then the update: g is read twice.
        num_kernels, at_most = 2 * num_kernels, must_move + dtype.dtype.itemsize * SIZE
    # Small ones compute the look-ahead of a schedule, and random words.
    assert len([size for size in found.kernels if size > 100_000]) == num_kernels
    # XLA leaves out scalars that are not read.
    assert must_move <= found.num_bytes + 100
    assert found.num_bytes <= 1.001 * at_most
    assert found.temporary <= 0.001 * SIZE
    assert found.aliased > 0.999


@for_tpus
def test_gpa_at_4_bytes_takes_no_longer_than_spa() -> None:
    """With one scalar more a kernel it did: XLA then took smaller windows."""
    of_spa, of_gpa = (
        program(
            spa_adamw(1e-3, 0.1, mu_y, second_moment="factored", **NARROW), jnp.bfloat16
        )
        for mu_y in (1.0, 0.9)
    )
    assert of_gpa.cycles < 1.05 * of_spa.cycles


@for_tpus
@pytest.mark.parametrize("mu_y", [1.0, long(0.9)])
@pytest.mark.parametrize(
    ("make", "options", "num_bytes", "target"),
    [
        # With a number 1.0 in place of an array they were two, at 1.5 times the cycles.
        (spa_adamw, NARROW, 18, "7x"),
        # From z − y_{k+1}, which takes y_{k+1}; from the update of y XLA makes two
        # kernels.
        (spa, EIGHT, 8, "v5e"),
    ],
    ids=["8 bytes", "8 bits"],
)
def test_one_kernel_a_leaf(
    make: Any, options: dict[str, Any], num_bytes: int, target: str, mu_y: float
) -> None:
    found = program(make(1e-3, 0.1, mu_y, **options), jnp.bfloat16, target=target)
    assert len([size for size in found.kernels if size > 100_000]) == len(SHAPES)
    assert found.num_bytes <= 1.001 * num_bytes * SIZE
    assert found.temporary <= 0.001 * SIZE
    if make is spa:
        assert (
            found.cycles < program(spa(1e-3, 0.1, mu_y, **NARROW), jnp.bfloat16).cycles
        )


@for_tpus
def test_a_second_kernel_is_seen() -> None:
    """The positive control: the norm must be known before the update can be."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = optax.tree.norm(updates)
        return jax.tree.map(lambda g: -g / norm, updates), jax.tree.map(
            jnp.add, state, updates
        )

    found = program(optax.GradientTransformation(optax.tree.zeros_like, update))
    assert len(found.kernels) >= 2 * len(SHAPES)
    assert found.num_bytes > 1.05 * 20 * SIZE


@for_tpus
@pytest.mark.parametrize("num_devices", [8, 256])
@every_transform
def test_no_collective(name: str, num_devices: int) -> None:
    """But for the two squares of `track_momentum`, and the means of a factored ν."""
    found = program(FACTORIES[name](), num_devices=num_devices)
    if name == "factored":  # of leaves that are split along a factored axis, each
        assert 0 < found.num_collectives <= 2 * len(SHAPES)
    else:
        assert found.num_collectives == (1 if name in ("tracked", "watched") else 0)
    assert found.temporary <= 0.01 * SIZE


@for_tpus
@pytest.mark.parametrize("num_devices", [8, 256])
def test_a_collective_is_seen(num_devices: int) -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), spa(1.0, 0.1))
    assert program(tx, num_devices=num_devices).num_collectives > 0
    assert (
        len({device.process_index for device in compiled.devices_of("v5e", pod=True)})
        > 8
    )


OF_MANY_LEAVES = {
    "spa": lambda: spa(1.0, 0.1),
    "schedule": lambda: spa_from_sgdm(optax.cosine_decay_schedule(0.1, 1000), 0.9),
    "gpa": lambda: spa(1.0, 0.1, 0.9),
    "averaging": lambda: primal_averaging(optax.sgd(0.1), 0.1, 0.9),
    "rounding": lambda: stochastic_rounding(optax.sgd(0.1), jax.random.key(0)),
    "adamw": lambda: spa_adamw(1e-3),
    "8 bytes": lambda: spa_adamw(1e-3, 0.05, 0.9, **NARROW),
    "8 bits": lambda: spa(1e-3, **EIGHT),
}


@for_cards
@pytest.mark.parametrize(
    "name", [long(name) if name == "8 bytes" else name for name in OF_MANY_LEAVES]
)
def test_leaves_share_kernels_on_a_card(name: str) -> None:
    """Up to 96 arrays a kernel; small ones compute scalars. `optax.sgd` takes one for
    each leaf."""
    is_narrow = name in ("rounding", "8 bytes", "8 bits")
    dtype = jnp.bfloat16 if is_narrow else jnp.float32

    def of_30_leaves(tx: Any) -> compiled.Program:
        card = compiled.devices_of("h100")
        shapes = [(64, 96)] * 30
        return compiled.analyse(compiled.compile_update(tx, shapes, dtype, card))

    found = of_30_leaves(OF_MANY_LEAVES[name]())
    large = [size for size in found.kernels if size > 10_000]
    assert len(large) <= math.ceil(30 / (96 // 7))
    assert len(found.kernels) <= len(large) + 11
    assert found.temporary <= 0.01 * 30 * 64 * 96
    assert found.aliased > 0.999
    assert len(of_30_leaves(optax.sgd(0.1, 0.9)).kernels) >= 30
