"""Stochastic rounding: exactly unbiased, reproducible, the same on any number of devices."""

import functools
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import (
    COLLECTIVE,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    compiled_step,
    quick,
    x64,
)
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from spa_optax import _precision, spa, spa_from_sgdm
from spa_optax._precision import Stream, random_bits, rounded, seeds_like
from spa_optax._storage import map_stored, z_of

KEY = jax.random.key(0)
BF16 = jnp.bfloat16
SEED = jnp.uint32(0x12345678)
every_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2])


def some_values(dtype: Any, num: int = 60) -> np.ndarray:
    """Float32, of all sizes that the dtype has, the subnormal ones too."""
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(0)
    low, high = np.log2(float(info.smallest_subnormal)) - 2, np.log2(float(info.max)) - 1
    low = max(low, -125)  # XLA on CPU takes float32 below 2^-126 for 0
    return np.float32(rng.choice([-1, 1], num) * 2 ** rng.uniform(low, high, num))


def neighbours(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: the numbers of the dtype next below and above `x`, or `x` itself, twice."""
    near = x.astype(dtype)
    down, up = (np.nextafter(near, np.array(bound, dtype)) for bound in limits(dtype))
    lower = np.where(near.astype(np.float64) <= x, near, down).astype(np.float64)
    upper = np.where(near.astype(np.float64) >= x, near, up).astype(np.float64)
    return lower, upper


def limits(dtype: Any) -> tuple[float, float]:
    info = ml_dtypes.finfo(dtype)
    return float(info.min), float(info.max)


@pytest.mark.parametrize("low_bits", [False, True])
@every_dtype
def test_the_mean_over_all_random_bits_is_exact(
    dtype: Any, low_bits: bool, monkeypatch: Any
) -> None:
    """Every string of random bits once: the mean is x, for every x, to the last bit.

    Whatever the other bits of the word are, which are for another array.
    """
    x = some_values(dtype)
    num_extra = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    num_strings = min(2**num_extra, 2**16)
    # With 20 or more bits, only the first 16 are run through, and the last are held in the middle.
    strings = np.arange(num_strings, dtype=np.uint32)
    if num_extra > 16:
        strings = (strings << (num_extra - 16)) + 2 ** (num_extra - 17)

    def all_strings(seed: Any, shape: Any) -> Array:
        place = 0 if low_bits else 32 - num_extra
        used = np.uint32((2**num_extra - 1) << place)
        others = np.random.default_rng(0).integers(0, 2**32, num_strings, np.uint32) & ~used
        return jnp.broadcast_to(jnp.asarray(strings << place | others, jnp.uint32), shape)

    monkeypatch.setattr(_precision, "random_bits", all_strings)
    every = jnp.broadcast_to(x[:, None], (len(x), num_strings))
    round_it = jax.jit(lambda x, seed: rounded(x, dtype, seed, low_bits))
    result = np.asarray(round_it(every, SEED), np.float64)
    lower, upper = neighbours(x, dtype)
    assert ((result == lower[:, None]) | (result == upper[:, None])).all()
    # Of subnormal numbers, float32 itself loses digits when they are put on the grid.
    is_normal = np.abs(x) >= float(jnp.finfo(dtype).tiny)
    assert is_normal.sum() > 20
    error = (result.mean(1) - x) / np.where(upper > lower, upper - lower, 1)
    tolerance = 0 if num_extra <= 16 else 2.0**-16
    assert (np.abs(error)[is_normal] <= tolerance).all()
    assert (np.abs(error) <= 2.0 ** -(num_extra - 7)).all()
    assert (result == lower[:, None]).any()
    assert (result == upper[:, None]).any()


@every_dtype
def test_frequencies(dtype: Any) -> None:
    """The upper neighbour as often as it should, within five standard deviations."""
    x, num = some_values(dtype), 20_000
    result = np.asarray(rounded(jnp.broadcast_to(x[:, None], (len(x), num)), dtype, SEED))
    lower, upper = neighbours(x, dtype)
    p = (x - lower) / np.where(upper > lower, upper - lower, 1)
    deviation = np.sqrt(num * p * (1 - p)) + 1e-3
    count = (result.astype(np.float64) == upper[:, None]).sum(1)
    assert (np.abs(count - num * p)[upper > lower] < 5 * deviation[upper > lower]).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
def test_what_needs_no_rounding(dtype: Any) -> None:
    info = jnp.finfo(dtype)
    inf, tiny = float("inf"), float(info.smallest_subnormal)
    if dtype == jnp.bfloat16:
        tiny = float(info.tiny)
    on_grid = jnp.array([0, 1, -1.5, float(info.max), float(info.min), inf, -inf, tiny, -tiny])
    for seed in (SEED, ~SEED):
        np.testing.assert_array_equal(
            np.float32(rounded(on_grid, dtype, seed)), np.float32(on_grid.astype(dtype))
        )
    # NaN with all bits set, as GPUs make it, would run over to −0; with only the last, to infinity.
    for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001):
        nan = jax.lax.bitcast_convert_type(jnp.full(1000, bits, jnp.uint32), jnp.float32)
        assert jnp.isnan(rounded(nan, dtype, SEED)).all()


def test_float64_and_complex() -> None:
    with x64():
        x = jnp.full(10_000, 1 + 2.0**-25)  # an eighth of the way between two float32
        result = np.asarray(rounded(x, jnp.float32, SEED), np.float64)
        assert set(result) == {1.0, 1 + 2.0**-23}
        assert abs((result > 1).mean() - 1 / 4) < 5 * np.sqrt(1 / 4 * 3 / 4 / 10_000)
        narrow = np.asarray(rounded(x, jnp.bfloat16, SEED), np.float64)
        assert set(narrow) <= {1.0, 1 + 2.0**-7}
        middle = np.asarray(rounded(jnp.full(10_000, 1 + 2.0**-9), BF16, SEED), np.float64)
        assert abs((middle > 1).mean() - 1 / 4) < 5 * np.sqrt(1 / 4 * 3 / 4 / 10_000)
        np.testing.assert_array_equal(
            rounded(jnp.full(3, 1 + 1e-9j), jnp.complex64, SEED),
            np.full(3, np.complex64(1 + 1e-9j)),
        )


def test_the_derivative_is_that_of_a_cast() -> None:
    x = jnp.linspace(0.1, 3, 100)
    square = lambda x, seed: jnp.sum(rounded(x, BF16, seed).astype(jnp.float32) * x)
    # That of the factor to the right, and the cast's of 1 times the factor, which comes back in
    # bfloat16 itself.
    factors = rounded(x, BF16, SEED), x.astype(BF16)
    expected = sum(factor.astype(jnp.float32) for factor in factors)
    np.testing.assert_allclose(jax.grad(square)(x, SEED), expected, rtol=1e-6)


def test_random_bits() -> None:
    """Of neighbouring places, and of seeds as they are drawn: no correlation of any two bits."""
    n = 40_000
    seeds = seeds_like(KEY, jnp.int32(0), [jnp.zeros(n)] * 3, Stream.PARAMS_AND_Z)
    seeds += seeds_like(KEY, jnp.int32(1), [jnp.zeros(n)] * 2, Stream.PARAMS_AND_Z)
    seeds += seeds_like(KEY, jnp.int32(0), [jnp.zeros(n)] * 2, Stream.SECOND_MOMENT)
    seeds += [jnp.uint32(0)]
    words = [np.asarray(random_bits(seed, (n,))) for seed in seeds]
    bits = [2.0 * np.unpackbits(word.view(np.uint8)).reshape(n, 32) - 1 for word in words]
    # 32 means and 1024 correlations each time: 5.5 standard deviations are for one in 2e7.
    bound = 5.5 / np.sqrt(n)
    for i, of_seed in enumerate(bits):
        assert np.abs(of_seed.mean(0)).max() < bound
        others = [np.roll(of_seed, shift, 0) for shift in (1, 2, 64, 512)]
        for other in [*bits[:i], *others]:
            assert np.abs(of_seed.T @ other / n).max() < bound
        # From the other end each product of a bit with itself counts twice.
        assert np.abs(of_seed.T @ of_seed[::-1] / n).max() < bound * np.sqrt(2)
        between_bits = of_seed.T @ of_seed / n - np.eye(32)
        assert np.abs(between_bits).max() < bound
    # A place in a matrix is its place in memory; and an array of no dimensions has one.
    np.testing.assert_array_equal(random_bits(seeds[0], (40, n // 40)).ravel(), words[0])
    assert random_bits(seeds[0], ()) == words[0][0]


def test_one_hash_rounds_two_arrays_independently() -> None:
    """By its high bits z, by its low bits x: up or down, over many places."""
    n = 100_000
    x = jnp.full(n, 1 + 2.0**-8)  # in the middle between two numbers of bfloat16
    high, low = (np.asarray(rounded(x, BF16, SEED, b), np.float64) > 1 for b in (False, True))
    correlation = np.corrcoef(high, low)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(n)


# -------------------------------------------------------------------------------- in transforms


PARAMS = {"w": jnp.linspace(-1, 1, 64).reshape(16, 4), "b": jnp.linspace(0.5, 2, 8)}
PARAMS = jax.tree.map(lambda p: p.astype(BF16), PARAMS)
GRADS = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)).astype(BF16) / 64, PARAMS)
FACTORIES = {
    "spa": functools.partial(spa, 0.1, 0.1),
    "sgdm": functools.partial(spa_from_sgdm, lambda k: 0.01 / (1 + k.astype(jnp.float32)), 0.9),
    "gpa": functools.partial(spa, 0.1, 0.1, 0.9),
    "16-bit z": functools.partial(spa, 0.1, 0.1, state_dtype=BF16),
}
every_transform = pytest.mark.parametrize("make", quick(FACTORIES, "gpa"))


@functools.cache
def made(make: Any, stochastic: bool = True) -> Any:
    """Once for all tests, which share its compiled updates."""
    return make(rounding_key=KEY if stochastic else None)


def run(tx: Any, num_steps: int = 6, params: Any = PARAMS, grads: Any = GRADS) -> Any:
    """Params and state after some jitted steps."""
    state = tx.init(params)
    for _ in range(num_steps):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@every_transform
def test_reproducible_from_key_and_count(make: Any) -> None:
    tx = made(make)
    params, state = run(tx)
    again, _ = run(make(rounding_key=jax.random.wrap_key_data(jax.random.key_data(KEY))))
    chex.assert_trees_all_equal(again, params)
    old_kind, _ = run(make(rounding_key=jax.random.key_data(KEY)))
    chex.assert_trees_all_equal(old_kind, params)
    other, _ = run(make(rounding_key=jax.random.key(1)))
    nearest, nearest_state = run(made(make, stochastic=False))
    chex.assert_trees_all_equal_shapes_and_dtypes(nearest_state, state)  # no key in the state
    for different in (other, nearest):
        assert not np.array_equal(different["w"], params["w"])
    # Another count rounds otherwise; and two leaves of one shape do.
    (spa_state,) = [s for s in jax.tree.leaves(state, is_leaf=_is_spa) if _is_spa(s)]
    later = jax.tree.map(
        lambda s: spa_state._replace(count=s.count + 1) if _is_spa(s) else s, state, is_leaf=_is_spa
    )
    update = jax.jit(tx.update)
    updates, _ = update(GRADS, state, params)
    updates_later, _ = update(GRADS, later, params)
    assert not np.array_equal(updates["w"], updates_later["w"])


def _is_spa(node: Any) -> bool:
    return type(node).__name__ == "SPAState"


def test_leaves_and_streams_are_independent() -> None:
    """Correlations of what rounding adds, between leaves, steps, x and z: below 5/√n."""
    n = 40_000
    params = {name: jnp.ones(n, BF16) for name in "ab"}
    grads = jax.tree.map(lambda p: p / 256, params)
    tx = spa(0.7, 0.5, state_dtype=BF16, rounding_key=KEY)
    update = jax.jit(tx.update)
    draws = []
    for count, names in ((0, "ab"), (7, "a")):
        state = tx.init(params)._replace(count=jnp.array(count))
        updates, state = update(grads, state, params)
        for name in names:
            # In units of 1/256 x goes from 0 to −0.35: down to −1, or not. Then z − x is 0.3 or
            # −0.7, which are 153.6/512 and 179.2/256.
            moved, z = np.asarray(updates[name]) < 0, 256 * np.float64(state.z.bfloat16[name])
            away = np.abs(z) > np.where(moved, 0.3, 0.7)
            for draw, p in ((moved, 0.35), (away, np.where(moved, 0.6, 0.2))):
                draws.append((draw - p) / np.sqrt(p * (1 - p)))
    assert np.abs(np.mean(draws, 1)).max() < 5 / np.sqrt(n)
    correlation = np.array(draws) @ np.array(draws).T / n
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 5 / np.sqrt(n)


@pytest.mark.parametrize("state_dtype", [jnp.float32, BF16])
def test_the_mean_of_a_step(state_dtype: Any) -> None:
    """Over places and steps, x_{k+1} is what NumPy has for it in float64."""
    n, rng = 4_000, np.random.default_rng(0)
    x_0, g = rng.normal(size=8), rng.normal(size=8)
    params = jnp.broadcast_to(jnp.asarray(x_0, BF16)[:, None], (8, n))
    grads = jnp.broadcast_to(jnp.asarray(g, BF16)[:, None], (8, n))
    x, g = (np.asarray(a[:, 0], np.float64) for a in (params, grads))
    tx = spa(0.01, 0.2, state_dtype=state_dtype, rounding_key=KEY)
    params, state = run(tx, 5, params, grads)
    z = x.copy()
    for _ in range(5):
        z = z - np.float64(np.float32(0.01)) * g
        x = x + np.float64(np.float32(0.2)) * (z - x)
    for found, expected in ((params, x), (map_stored(z_of, params, state.z), z)):
        found = np.asarray(found, np.float64)
        error = found.std(1) / np.sqrt(n) + 1e-6
        assert (np.abs(found.mean(1) - expected) < 5 * error).all()
    assert np.asarray(params, np.float64).std(1).min() > 1e-4


def test_no_dead_zone() -> None:
    """At c = 0.01 nearest rounding moves x only 50 ulps behind z; stochastic rounding at once."""
    grads = jnp.full(4096, 1e-3, BF16)
    for state_dtype in (None, BF16):
        far = []
        for key in (None, KEY):
            tx = spa(0.1, 0.01, state_dtype=state_dtype, rounding_key=key)

            def body(carry: Any, _: None, tx: Any = tx) -> Any:
                params, state = carry
                updates, state = tx.update(grads, state, params)
                return (optax.apply_updates(params, updates), state), None

            params = jnp.ones(4096, BF16)
            carry, _ = jax.lax.scan(body, (params, tx.init(params)), length=1_000)
            # x = 1 − Σ_j ηg (1 − 0.99^(1000−j)), j from 0
            exact = 1 - 0.1 * float(grads[0]) * (1_000 - 0.99 * (1 - 0.99**1000) / 0.01)
            far.append(abs(float(carry[0].astype(jnp.float32).mean()) - exact))
        assert far[0] > 0.05
        # A place wanders by an ulp, 2^-8, over the 100 steps of memory, or for z by all 1,000.
        assert far[1] < 5 * 2.0**-8 * np.sqrt(1_000) / np.sqrt(4096)


@every_transform
def test_any_sharding_gives_the_same_bits(make: Any) -> None:
    tx = made(make)
    expected, _ = run(tx, 3)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(("a", "b")), PartitionSpec()):
        sharding = NamedSharding(mesh, spec)
        params, grads = jax.device_put((PARAMS, GRADS), sharding)
        sharded, state = run(tx, 3, params, grads)
        chex.assert_trees_all_equal(jax.device_get(sharded), jax.device_get(expected))
        assert sharded["w"].sharding.is_equivalent_to(sharding, 2)
        if _is_spa(state):
            text = jax.jit(tx.update).lower(grads, state, params).compile().as_text()
            assert not COLLECTIVE.search(text)


def test_shards_and_replicas_share_their_bits_unless_each_has_a_key() -> None:
    """As the docstring says: within `shard_map` and `vmap` places start anew."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    n = 4_096
    x = jnp.ones((8, n), BF16)  # z goes to 1 − 2^-10, and x a quarter of the way to 1 − 2^-8

    def step(x: Array, key: Array) -> Array:
        tx = spa(1.0, 1.0, rounding_key=key)
        g = jnp.full_like(x, 2.0**-10)
        return tx.update(g, tx.init(x), x)[0]

    def sharded(x: Array) -> Array:
        return step(x, jax.random.fold_in(KEY, jax.lax.axis_index("data")))

    spec = PartitionSpec("data")
    split = lambda f: jax.jit(shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    for shared in (split(lambda x: step(x, KEY)), jax.vmap(step, (0, None))(x, KEY)):
        np.testing.assert_array_equal(shared, jnp.broadcast_to(shared[:1], shared.shape))
    for own in (split(sharded), jax.vmap(step)(x, jax.random.split(KEY, 8))):
        signs = 2.0 * (np.asarray(own, np.float32) < 0) - 1
        np.testing.assert_allclose(signs.mean(1), -0.5, atol=5 / np.sqrt(n))
        correlation = np.cov(signs)
        assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 5 / np.sqrt(n)


@pytest.mark.skipif(jax.__version_info__ < (0, 7), reason="XLA made two kernels of it")
def test_no_temporary_of_parameter_size() -> None:
    params = [jnp.ones((64, 64, 3, 3), BF16) for _ in range(4)]
    compiled = compiled_step(spa(1.0, rounding_key=KEY), params)
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


@every_transform
def test_wrappers(make: Any) -> None:
    """The bits of the transform alone, in whatever it is put into."""
    tx = made(make)
    expected, _ = run(tx)
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
    wrapped = optax.apply_if_finite(optax.chain(optax.identity(), tx), 3)
    updates, state = wrapped.update(bad, wrapped.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    params = PARAMS
    for _ in range(6):
        updates, state = jax.jit(wrapped.update)(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(params, expected)

    def body(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = tx.update(GRADS, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), length=6)
    chex.assert_trees_all_equal(params, expected)
    # Members of a vmap share their bits.
    both = lambda params: body((params, tx.init(params)), None)[0][0]
    stacked = jax.jit(jax.vmap(both))(jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS))
    one = jax.jit(both)(PARAMS)
    chex.assert_trees_all_equal(jax.tree.map(lambda p: p[1], stacked), one)


@every_transform
def test_accumulated_masked_and_partitioned(make: Any) -> None:
    tx = made(make)
    expected, _ = run(tx, 1)
    with jax.numpy_dtype_promotion("standard"):
        params, _ = run(optax.MultiSteps(tx, 2), 2)
    chex.assert_trees_all_equal(params, expected)
    labels = {"w": "spa", "b": "rest"}
    masked = optax.masked(tx, {"w": True, "b": False})
    for wrapped in (masked, optax.partition({"spa": tx, "rest": optax.identity()}, labels)):
        params, _ = run(wrapped)
        nearest, _ = run(made(make, stochastic=False))
        assert not np.array_equal(params["w"], nearest["w"])
        chex.assert_trees_all_close(params["w"], nearest["w"], atol=0.05)


@pytest.mark.parametrize("static_args", [(), ("rounding_key",)])
def test_injected(static_args: Any) -> None:
    factory = optax.inject_hyperparams(spa, static_args=static_args)
    tx = factory(learning_rate=0.1, averaging=0.1, rounding_key=KEY)
    expected, _ = run(spa(jnp.float32(0.1), jnp.float32(0.1), rounding_key=KEY))
    params, state = run(tx)
    # The injected rates are bfloat16, like the params.
    chex.assert_trees_all_close(params, expected, atol=0.02)
    assert ("rounding_key" in state.hyperparams) == (not static_args)


@every_transform
def test_saved_and_resumed(make: Any, tmp_path: Path) -> None:
    tx = made(make)
    expected, _ = run(tx, 6)
    params, state = run(tx, 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        params, state = checkpointer.restore(tmp_path / "state", (PARAMS, tx.init(PARAMS)))
    for _ in range(3):
        updates, state = jax.jit(tx.update)(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    chex.assert_trees_all_equal(params, expected)


@every_transform
def test_nnx_and_export(make: Any) -> None:
    tx = made(make)
    model = nnx.Linear(4, 16, param_dtype=BF16, rngs=nnx.Rngs(0))
    start = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(lambda p: p / 64, nnx.state(model, nnx.Param))
    nnx.jit(lambda model, optimizer: optimizer.update(model, grads))(model, optimizer)
    expected, _ = run(tx, 1, start, nnx.to_pure_dict(grads))
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model, nnx.Param)), expected)
    exported = export.export(jax.jit(tx.update), platforms=("cpu", "cuda", "tpu"))(
        GRADS, tx.init(PARAMS), PARAMS
    )
    updates, _ = exported.call(GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)[0])


def test_wide_params_are_not_touched() -> None:
    params, grads = jax.tree.map(lambda p: p.astype(jnp.float32), (PARAMS, GRADS))
    expected = run(spa(0.1, 0.1), 6, params, grads)
    found = run(spa(0.1, 0.1, rounding_key=KEY), 6, params, grads)
    chex.assert_trees_all_equal(found, expected)
