"""Fully sharded params, several processes, other numbers of devices after a restart; long runs."""

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
    COLLECTIVE,
    assert_apart_by_rounding,
    environment,
    free_address,
    rounding_noise,
    slow,
    table,
)
from jax.sharding import Mesh
from transformer import make_init, on_host, optimizer, sharding, train

from spa_optax import spa, spa_adamw, spa_from_sgdm

pytestmark = pytest.mark.usefixtures("standard_promotion")


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("all",))


def result(params: Any, state: Any, losses: list[float]) -> tuple[Any, Any, list[float]]:
    return on_host(params), on_host(optax.tree.get(state, "z")), losses


@functools.cache
def on_one_device() -> tuple[Any, Any]:
    """The results of a run, and of one with the rounding noise of sums: some ulps."""
    noisy = optax.chain(optimizer(), rounding_noise(4))
    return tuple(result(*train(mesh_of(1), tx)) for tx in (optimizer(), noisy))


def assert_same_as_on_one_device(params: Any, z: Any, losses: Any) -> None:
    """Only the order of sums is another."""
    one, noisy = on_one_device()
    for found, expected, with_noise in ((params, one[0], noisy[0]), (z, one[1], noisy[1])):
        assert_apart_by_rounding(found, expected, with_noise, at_most=1e-3)
    # A sum of n positive numbers is rounded n times, by half an ulp of it at most.
    rtol = transformer.BATCH * transformer.LENGTH * 2.0**-24
    np.testing.assert_allclose(losses, one[2], rtol=rtol)


@pytest.mark.slow
def test_sharded_over_eight_devices_is_one_device() -> None:
    params, state, losses = train(mesh_of(8), optimizer())
    sharded = [x for x in jax.tree.leaves(params) if not x.sharding.is_fully_replicated]
    assert len(sharded) == len(jax.tree.leaves(params)) > 10
    for x, z in zip(*map(jax.tree.leaves, (params, state.z)), strict=True):
        assert z.sharding == x.sharding
        assert x.sharding.is_equivalent_to(sharding(mesh_of(8), x), x.ndim)
    assert_same_as_on_one_device(*result(params, state, losses))
    assert losses[-1] < losses[0] - 0.5
    # And it is SGD with momentum.
    schedule = optax.cosine_decay_schedule(0.05, transformer.NUM_STEPS)
    sgd, _, _ = train(mesh_of(8), optax.sgd(schedule, 0.9))
    (one, *_), (noisy, *_) = on_one_device()
    assert_apart_by_rounding(on_host(sgd), one, noisy, at_most=1e-3)


@pytest.mark.parametrize(
    "kind",
    [
        "float32",
        slow("bfloat16"),
        slow("bfloat16, stochastic"),
        slow("gpa_adamw, bfloat16, stochastic"),
    ],
)
def test_no_collective_inside_the_update(kind: str) -> None:
    key = jax.random.key(0) if "stochastic" in kind else None
    make = functools.partial(spa_adamw, 0.1, 0.05, 0.9) if "gpa_adamw" in kind else optimizer
    tx = make(rounding_key=key)
    dtype = jnp.bfloat16 if "bfloat16" in kind else jnp.float32
    params, state = make_init(mesh_of(8), tx, dtype)()
    compiled = jax.jit(tx.update).lower(params, state, params).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    updates, after = compiled(params, state, params)
    kept = [optax.tree.get(after, name, params) for name in ("z", "nu")]  # ν, where there is one
    for x, *leaves in zip(*map(jax.tree.leaves, (params, updates, *kept)), strict=True):
        assert all(leaf.sharding == x.sharding for leaf in leaves)
    # The positive control: clipping must add one.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), tx)
    compiled = jax.jit(clipped.update).lower(params, clipped.init(params), params).compile()
    assert COLLECTIVE.search(compiled.as_text())


def test_import_does_not_start_jax() -> None:
    """`jax.distributed.initialize` must come before, and may come after the imports."""
    program = (
        "import jax, spa_optax; jax.distributed.initialize("
        f"{free_address()!r}, num_processes=1, process_id=0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(1))


@pytest.mark.slow
def test_two_processes_of_four_devices(tmp_path: Path) -> None:
    command = [sys.executable, transformer.__file__, free_address(), "2"]
    processes = [
        subprocess.Popen([*command, str(i), str(tmp_path / "two.npz")], env=environment(4))
        for i in range(2)
    ]
    assert [process.wait() for process in processes] == [0, 0]
    with np.load(tmp_path / "two.npz") as two:
        leaves = [two[f"arr_{i}"] for i in range(len(two.files) - 1)]
        half = len(leaves) // 2  # params, then z
        assert_same_as_on_one_device(leaves[:half], leaves[half:], two["losses"])


@pytest.mark.slow
def test_saved_from_eight_devices_restored_on_four_and_on_one(tmp_path: Path) -> None:
    tx = optimizer()
    *carry, first = train(mesh_of(8), tx, stop=3)
    for num_devices, before in ((4, 8), (1, 4)):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(before), tuple(carry))
            checkpointer.wait_until_finished()
            mesh = mesh_of(num_devices)
            target = jax.tree.map(
                lambda leaf, mesh=mesh: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding(mesh, leaf)
                ),
                jax.eval_shape(make_init(mesh, tx)),
            )
            restored = checkpointer.restore(tmp_path / str(before), target)
        chex.assert_trees_all_equal(on_host(restored), on_host(tuple(carry)))
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(restored)} == {
            num_devices
        }
        params, state, rest = train(mesh, tx, restored, start=3)
        assert_same_as_on_one_device(*result(params, state, first + rest))
        carry = restored


# --------------------------------------------------------------------------------------- long runs

LAST = 2**31 - 1  # where an int32 count stays


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("start", [2**24 - 30, 2**24 + 1, 1_000_000_007, LAST - 60])
def test_late_in_a_run(start: int, nesterov: bool) -> None:
    """Schedules of odd and even counts, which float32 cannot tell apart there: NumPy, float64."""
    rates, momenta = np.array([0.3, 0.1, 0.02]), np.array([0.9, 0.5])
    alpha = lambda count: jnp.asarray(rates, jnp.float32)[count % 3]
    beta = lambda count: jnp.asarray(momenta, jnp.float32)[count % 2]
    tx = spa_from_sgdm(alpha, beta, nesterov, horizon=200)
    rng = np.random.default_rng(start)
    x, grads = rng.normal(size=5), rng.normal(size=(50, 5))
    params, state = jnp.asarray(x, jnp.float32), tx.init(jnp.asarray(x, jnp.float32))
    m, largest, update = np.zeros(5), 0.0, jax.jit(tx.update)
    for k, g in enumerate(grads):
        if k == 0:  # z_0 = x_0 with whatever w: m is 0
            state = state._replace(count=jnp.array(start, jnp.int32), w=jnp.float32(1.0))
        updates, state = update(jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        a, b = rates[(start + k) % 3], momenta[(start + k) % 2]
        m = b * m + g
        x = x - a * (g + b * m if nesterov else m)
        largest = max(largest, np.abs(x).max())
    # Each step rounds x by half an ulp or less: 2^-24 of it.
    np.testing.assert_allclose(params, x, rtol=0, atol=50 * 2.0**-24 * largest)
    assert state.count == start + 50


@pytest.mark.parametrize("make", [lambda a: spa(a, 0.1), lambda a: spa_from_sgdm(a, 0.9)])
def test_a_count_at_its_end(make: Any) -> None:
    """The count stays, and with it a schedule; and the horizon does not run over."""
    schedule = table(jnp.array([0.1, 0.1, 0.05]))
    tx = make(lambda count: jnp.where(count < 0, jnp.nan, schedule(count)))
    params, state = jnp.ones(3), tx.init(jnp.ones(3))
    state = state._replace(count=jnp.array(LAST - 2, jnp.int32), w=jnp.float32(0.9 * 0.5))
    counts = []
    for _ in range(5):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
        counts.append(int(state.count))
        assert np.isfinite(params).all()
    assert counts == [LAST - 1, LAST, LAST, LAST, LAST]


@pytest.mark.slow
def test_a_million_steps() -> None:
    """In one scan, on a quadratic with noise: SPA beside optax.sgd, and the count is exact."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 10_000, 1_000_000)
    txs = [optax.sgd(schedule, 0.9), spa_from_sgdm(schedule, 0.9)]
    curvature = jnp.array([0.1, 1.0, 3.0])

    def body(carry: Any, k: jax.Array) -> Any:
        noise = jnp.cos(k.astype(jnp.float32) * jnp.array([1.0, 2.0, 3.0]))
        new = []
        for tx, (x, state) in zip(txs, carry, strict=True):
            updates, state = tx.update(curvature * x + noise, state, x)
            new.append((optax.apply_updates(x, updates), state))
        return new, jnp.abs(new[0][0] - new[1][0]).max()

    x_0 = jnp.ones(3)
    carry = [(x_0, tx.init(x_0)) for tx in txs]
    run = jax.jit(lambda c: jax.lax.scan(body, c, jnp.arange(1_000_000)))
    ((_, _), (_, state)), apart = run(carry)
    assert state.count == 1_000_000
    # Each of the last 1/(αλ) or so steps, up to 1e4 of them, rounds x to 3e-8.
    assert apart.max() < 1e-5
