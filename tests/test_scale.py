"""Fully sharded params, several processes, restarts on other devices, and long runs."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import transformer
from helpers import (
    assert_apart_by_rounding,
    environment,
    free_address,
    rounding_noise,
    run,
)
from jax.sharding import Mesh
from transformer import make_init, on_host, optimizer, sharding, train

from spa_optax import spa, spa_from_sgdm

pytestmark = pytest.mark.usefixtures("standard_promotion")


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("all",))


def result(
    params: Any, state: Any, losses: list[float]
) -> tuple[Any, Any, list[float]]:
    return on_host(params), on_host(optax.tree.get(state, "z")), losses


@functools.cache
def on_one_device() -> tuple[Any, Any]:
    """The results of a run, and of one with the rounding noise of sums: some ulps."""
    noisy = optax.chain(optimizer(), rounding_noise(4))
    return tuple(result(*train(mesh_of(1), tx)) for tx in (optimizer(), noisy))


def assert_same_as_on_one_device(params: Any, z: Any, losses: Any) -> None:
    """Only the order of sums is another."""
    one, noisy = on_one_device()
    for found, expected, with_noise in (
        (params, one[0], noisy[0]),
        (z, one[1], noisy[1]),
    ):
        assert_apart_by_rounding(found, expected, with_noise, at_most=1e-3)
    # A sum of n positive numbers is rounded n times, by half an ulp of it at most.
    rtol = transformer.BATCH * transformer.LENGTH * 2.0**-24
    np.testing.assert_allclose(losses, one[2], rtol=rtol)


@pytest.mark.slow
def test_import_does_not_start_jax() -> None:
    """`jax.distributed.initialize` must come before, and may come after the imports."""
    program = (
        "import jax, spa_optax; jax.distributed.initialize("
        f"{free_address()!r}, num_processes=1, process_id=0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(1))


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.slow
def test_two_processes_of_four_devices(tmp_path: Path) -> None:
    command = [sys.executable, transformer.__file__, free_address(), "2"]
    processes = [
        subprocess.Popen(
            [*command, str(i), str(tmp_path / "two.npz")], env=environment(4)
        )
        for i in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    with np.load(tmp_path / "two.npz") as two:
        leaves = [two[f"arr_{i}"] for i in range(len(two.files) - 1)]
        half = len(leaves) // 2  # params, then z
        assert_same_as_on_one_device(leaves[:half], leaves[half:], two["losses"])


@pytest.mark.processes
@pytest.mark.slow
def test_saved_from_eight_devices_restored_on_four_and_on_one(tmp_path: Path) -> None:
    tx = optimizer()
    *carry, first = train(mesh_of(8), tx, stop=3)

    def target_of(x: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh, x))

    for num_devices in (4, 1):
        mesh, folder = mesh_of(num_devices), tmp_path / str(num_devices)
        shapes = jax.eval_shape(make_init(mesh, tx))
        target = jax.tree.map(functools.partial(target_of, mesh=mesh), shapes)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, tuple(carry))
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(folder, target)
        chex.assert_trees_all_equal(on_host(restored), on_host(tuple(carry)))
        for leaf in jax.tree.leaves(restored):
            assert len(leaf.sharding.device_set) == num_devices
        params, state, rest = train(mesh, tx, restored, start=3)
        assert_same_as_on_one_device(*result(params, state, first + rest))
        carry = restored
    assert rest[-1] < first[0] - 0.5


LAST = 2**31 - 1  # where an int32 count stays


@pytest.mark.parametrize(
    ("start", "nesterov"), [(2**24 - 30, False), (LAST - 60, True)]
)
def test_late_in_a_run(start: int, nesterov: bool) -> None:
    """In NumPy. Odd and even counts have other rates, and are one number in float32."""
    rates, momenta = np.array([0.3, 0.1, 0.02]), np.array([0.9, 0.5])
    tx = spa_from_sgdm(
        lambda count: jnp.asarray(rates, jnp.float32)[count % 3],
        lambda count: jnp.asarray(momenta, jnp.float32)[count % 2],
        nesterov,
        horizon=200,
    )
    rng = np.random.default_rng(start)
    x, grads = rng.normal(size=5), rng.normal(size=(50, 5))
    params = jnp.asarray(x, jnp.float32)
    # z_0 = x_0 with whatever w: m is 0
    state = tx.init(params)._replace(
        count=jnp.array(start, jnp.int32), w=jnp.float32(1.0)
    )
    params, state = run(tx, params, list(jnp.asarray(grads, jnp.float32)), state)
    m, largest = np.zeros(5), 0.0
    for k, g in enumerate(grads):
        a, b = rates[(start + k) % 3], momenta[(start + k) % 2]
        m = b * m + g
        x = x - a * (g + b * m if nesterov else m)
        largest = max(largest, np.abs(x).max())
    # Each step rounds x by half an ulp or less: 2^-24 of it.
    np.testing.assert_allclose(params, x, rtol=0, atol=50 * 2.0**-24 * largest)
    assert state.count == start + 50


@pytest.mark.parametrize(
    "make", [lambda a: spa(a, 0.1), lambda a: spa_from_sgdm(a, 0.9)]
)
def test_a_count_at_its_end(make: Any) -> None:
    """The count stays, and with it a schedule; and the horizon does not run over."""
    tx = make(lambda count: jnp.where(count < 0, jnp.nan, 0.1))
    params, state = jnp.ones(3), tx.init(jnp.ones(3))
    state = state._replace(
        count=jnp.array(LAST - 2, jnp.int32), w=jnp.float32(0.9 * 0.5)
    )
    for k in (LAST - 1, LAST, LAST, LAST):
        params, state = run(tx, params, [params], state)
        assert state.count == k
        assert np.isfinite(params).all()
