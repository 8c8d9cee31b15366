"""Stochastic rounding has no bias, and the same key and count give the same bits."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import COLLECTIVE, FLOAT8, FLOAT16, long, run, x64
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from spa_optax import (
    _rounding,
    float8_momentum,
    spa,
    stochastic_rounding,
)
from spa_optax._codec import stored_tree
from spa_optax._rounding import (
    FOR_FIRST_MOMENTUM,
    FOR_PARAMS_AND_Z,
    random_bits,
    round_to,
    seeds_like,
)

KEY = jax.random.key(0)
BF16 = jnp.bfloat16
SEED = jnp.uint32(0x12345678)
every_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16, FLOAT8])


def some_values(dtype: Any, num: int = 60) -> np.ndarray:
    """Float32, of all sizes that the dtype has, the subnormal ones too."""
    info = jnp.finfo(dtype)
    rng = np.random.default_rng(0)
    low, high = (
        np.log2(float(info.smallest_subnormal)) - 2,
        np.log2(float(info.max)) - 1,
    )
    low = max(low, -125)  # XLA on CPU takes float32 below 2^-126 for 0
    return np.float32(rng.choice([-1, 1], num) * 2 ** rng.uniform(low, high, num))


def neighbours(x: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: the numbers of the dtype next below and above `x`, or `x` itself,
    twice."""
    near, info = x.astype(dtype), ml_dtypes.finfo(dtype)
    down, up = (
        np.nextafter(near, np.array(end, dtype)) for end in (info.min, info.max)
    )
    lower = np.where(near.astype(np.float64) <= x, near, down).astype(np.float64)
    upper = np.where(near.astype(np.float64) >= x, near, up).astype(np.float64)
    return lower, upper


@pytest.mark.parametrize("low_bits", [False, True])
@every_dtype
def test_the_mean_over_all_bits_is_exact(
    dtype: Any, low_bits: bool, monkeypatch: Any
) -> None:
    """Every string of random bits once: the mean is x, for every x, to the last bit.

    Whatever the other bits of the word are, which are for another array.
    """
    x = some_values(dtype)
    num_extra = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    num_strings = min(2**num_extra, 2**16)
    # With 20 or more bits, only the first 16 are run through, and the last are held in
    # the middle.
    strings = np.arange(num_strings, dtype=np.uint32)
    if num_extra > 16:
        strings = (strings << (num_extra - 16)) + 2 ** (num_extra - 17)

    def all_strings(seed: Any, shape: Any) -> Array:
        place = 0 if low_bits else 32 - num_extra
        used = np.uint32((2**num_extra - 1) << place)
        others = (
            np.random.default_rng(0).integers(0, 2**32, num_strings, np.uint32) & ~used
        )
        return jnp.broadcast_to(
            jnp.asarray(strings << place | others, jnp.uint32), shape
        )

    monkeypatch.setattr(_rounding, "random_bits", all_strings)
    every = jnp.broadcast_to(x[:, None], (len(x), num_strings))
    round_it = jax.jit(lambda x, seed: round_to(x, dtype, seed, low_bits))
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
def test_what_needs_no_rounding(dtype: Any) -> None:
    info = jnp.finfo(dtype)
    inf, tiny = float("inf"), float(info.smallest_subnormal)
    if dtype == jnp.bfloat16:
        tiny = float(info.tiny)
    on_grid = jnp.array(
        [0, 1, -1.5, float(info.max), float(info.min), inf, -inf, tiny, -tiny]
    )
    for seed in (SEED, ~SEED):
        np.testing.assert_array_equal(
            np.float32(round_to(on_grid, dtype, seed)),
            np.float32(on_grid.astype(dtype)),
        )
    # NaN with all bits set, as GPUs make it, would run over to −0; with only the last,
    # to infinity.
    for bits in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001):
        nan = jax.lax.bitcast_convert_type(
            jnp.full(1000, bits, jnp.uint32), jnp.float32
        )
        assert jnp.isnan(round_to(nan, dtype, SEED)).all()


def test_float64_and_complex() -> None:
    with x64():
        x = jnp.full(10_000, 1 + 2.0**-25)  # an eighth of the way between two float32
        result = np.asarray(round_to(x, jnp.float32, SEED), np.float64)
        assert set(result) == {1.0, 1 + 2.0**-23}
        assert abs((result > 1).mean() - 1 / 4) < 5 * np.sqrt(1 / 4 * 3 / 4 / 10_000)
        narrow = np.asarray(round_to(x, jnp.bfloat16, SEED), np.float64)
        assert set(narrow) <= {1.0, 1 + 2.0**-7}
        middle = np.asarray(
            round_to(jnp.full(10_000, 1 + 2.0**-9), BF16, SEED), np.float64
        )
        assert abs((middle > 1).mean() - 1 / 4) < 5 * np.sqrt(1 / 4 * 3 / 4 / 10_000)
        np.testing.assert_array_equal(
            round_to(jnp.full(3, 1 + 1e-9j), jnp.complex64, SEED),
            np.full(3, np.complex64(1 + 1e-9j)),
        )


def test_the_derivative_is_that_of_a_cast() -> None:
    x = jnp.linspace(0.1, 3, 100)

    def square(x: Array, seed: Any) -> Array:
        return jnp.sum(round_to(x, BF16, seed).astype(jnp.float32) * x)

    # That of the factor to the right, and the cast's of 1 times the factor, which comes
    # back in bfloat16 itself.
    factors = round_to(x, BF16, SEED), x.astype(BF16)
    expected = sum(factor.astype(jnp.float32) for factor in factors)
    np.testing.assert_allclose(jax.grad(square)(x, SEED), expected, rtol=1e-6)


@pytest.mark.slow
def test_random_bits() -> None:
    """Of neighbouring places, and of seeds as they are drawn: no correlation of any two
    bits."""
    n = 40_000
    seeds = seeds_like(KEY, jnp.int32(0), [jnp.zeros(n)] * 3, FOR_PARAMS_AND_Z)
    seeds += seeds_like(KEY, jnp.int32(1), [jnp.zeros(n)] * 2, FOR_PARAMS_AND_Z)
    seeds += seeds_like(KEY, jnp.int32(0), [jnp.zeros(n)] * 2, FOR_FIRST_MOMENTUM)
    seeds += [jnp.uint32(0)]
    words = [np.asarray(random_bits(seed, (n,))) for seed in seeds]
    bits = [
        2 * np.unpackbits(word.view(np.uint8)).reshape(n, 32).astype(np.float32) - 1
        for word in words
    ]
    # 32 means and 1024 correlations each time: 5.5 standard deviations are for one in
    # 2e7.
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
    np.testing.assert_array_equal(
        random_bits(seeds[0], (40, n // 40)).ravel(), words[0]
    )
    assert random_bits(seeds[0], ()) == words[0][0]


def test_a_later_release_rounds_to_the_same_bits() -> None:
    """So a run may be resumed under it."""
    words = []
    for purpose in (FOR_PARAMS_AND_Z, FOR_FIRST_MOMENTUM):
        for seed in seeds_like(KEY, jnp.int32(3), [0, 1], purpose):
            words.append(random_bits(seed, (5, 9))[4, 7])
    expected = [2921342607, 3429326606, 2520656659, 1795556000]
    assert [int(word) for word in words] == expected


PARAMS = {"w": jnp.linspace(-1, 1, 64).reshape(16, 4), "b": jnp.linspace(0.5, 2, 8)}
PARAMS = optax.tree.cast(PARAMS, BF16)
GRADS = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)).astype(BF16) / 64, PARAMS)


def falling_rate(count: Any) -> Any:
    return 0.01 / (1 + count.astype(float))


def make_gpa(key: Any = KEY) -> Any:
    return spa(0.1, 0.1, 0.9, rounding_key=key)


def make_8_bit_z(key: Any = KEY) -> Any:
    return spa(falling_rate, 0.1, state_dtype="float8_e4m3fn", rounding_key=key)


def make_8_bit_m(key: Any = KEY) -> Any:
    return stochastic_rounding(float8_momentum(optax.sgd(0.1, 0.5), key), key)


every_member = pytest.mark.parametrize(
    "make", [long(make_gpa), make_8_bit_z, long(make_8_bit_m)]
)


@every_member
def test_reproducible_from_key_and_count(make: Any) -> None:
    params, state = run(make(), PARAMS, [GRADS] * 6)
    for same in (
        jax.random.wrap_key_data(jax.random.key_data(KEY)),
        jax.random.key_data(KEY),
    ):
        chex.assert_trees_all_equal(run(make(same), PARAMS, [GRADS] * 6)[0], params)
    other, other_state = run(make(jax.random.key(1)), PARAMS, [GRADS] * 6)
    chex.assert_trees_all_equal_shapes_and_dtypes(other_state, state)
    assert not np.array_equal(other["w"], params["w"])
    updates, _ = make().update(GRADS, state, params)  # another count rounds otherwise
    later, _ = make().update(GRADS, state._replace(count=state.count + 1), params)
    assert not np.array_equal(updates["w"], later["w"])


def test_leaves_and_streams_are_independent() -> None:
    """What rounding adds to leaves, steps, x and z is not correlated, to 5/√n."""
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
            # In units of 1/256 x goes from 0 to −0.35: down to −1, or not. Then z − x
            # is 0.3 or −0.7, which are 153.6/512 and 179.2/256.
            moved = np.asarray(updates[name]) < 0
            z = 256 * np.float64(stored_tree(state.z)[name])
            away = np.abs(z) > np.where(moved, 0.3, 0.7)
            for draw, p in ((moved, 0.35), (away, np.where(moved, 0.6, 0.2))):
                draws.append((draw - p) / np.sqrt(p * (1 - p)))
    assert np.abs(np.mean(draws, 1)).max() < 5 / np.sqrt(n)
    correlation = np.array(draws) @ np.array(draws).T / n
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 5 / np.sqrt(n)


@pytest.mark.slow
@every_member
def test_any_sharding_gives_the_same_bits(make: Any) -> None:
    """`init` takes it from params. Only the scale of an 8-bit m needs a collective: a
    maximum."""
    expected = run(make(), PARAMS, [GRADS] * 3)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(("a", "b")), PartitionSpec()):
        sharding = NamedSharding(mesh, spec)
        params, grads = jax.device_put((PARAMS, GRADS), sharding)
        is_of_m = make is make_8_bit_m
        state = make().init(params) if is_of_m else jax.jit(make().init)(params)
        found = run(make(), params, [grads] * 3, state)
        chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected))
        large = [leaf for leaf in jax.tree.leaves((state, found)) if leaf.size >= 8]
        assert len(large) == 6  # params, and z or m twice
        for leaf in large:
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        text = jax.jit(make().update).lower(grads, state, params).compile().as_text()
        lines = [line for line in text.splitlines() if COLLECTIVE.search(line)]
        assert is_of_m or not lines
        for line in lines:  # of numbers
            assert re.match(r" *%\S+ = (f32\[\]|\(f32\[\], f32\[\]\)) ", line)
            assert COLLECTIVE.findall(line)[0] == "all-reduce"


@pytest.mark.slow
def test_replicas_share_their_bits_unless_each_has_a_key() -> None:
    """As the docstring says, under `vmap` and, in the same way, `shard_map`."""
    n = 4_096
    x = jnp.ones((8, n), BF16)  # x goes to 1 − 2^-10, a quarter of the way to 1 − 2^-8

    def step(x: Array, key: Array) -> Array:
        tx = spa(1.0, 1.0, rounding_key=key)
        return tx.update(jnp.full_like(x, 2.0**-10), tx.init(x), x)[0]

    shared = jax.vmap(step, (0, None))(x, KEY)
    np.testing.assert_array_equal(shared, jnp.broadcast_to(shared[:1], shared.shape))
    separate = jax.vmap(step)(x, jax.random.split(KEY, 8))
    signs = 2.0 * (np.asarray(separate, np.float32) < 0) - 1
    np.testing.assert_allclose(signs.mean(1), -0.5, atol=5 / np.sqrt(n))
    correlation = np.cov(signs)
    assert np.abs(correlation - np.diag(np.diag(correlation))).max() < 5 / np.sqrt(n)


def test_wide_params_are_not_touched() -> None:
    params, grads = optax.tree.cast((PARAMS, GRADS), jnp.float32)
    expected = run(spa(0.1, 0.1), params, [grads] * 6)
    chex.assert_trees_all_equal(
        run(spa(0.1, 0.1, rounding_key=KEY), params, [grads] * 6), expected
    )


@pytest.mark.parametrize("count", [0, 3, -5, -(2**31), 2**31 - 1])
def test_words_at_any_count(count: int) -> None:
    """Users may set a count, also below 0. On a CPU the words go through a loop."""
    key, count_array = jax.random.key(0), jnp.asarray(count, jnp.int32)
    words = seeds_like(key, count_array, [0.0, 0.0], FOR_FIRST_MOMENTUM)
    folded = jax.random.fold_in(
        jax.random.fold_in(key, count_array), FOR_FIRST_MOMENTUM
    )
    expected = jax.random.bits(folded, (2,), jnp.uint32)
    np.testing.assert_array_equal(jnp.stack(words), expected)
