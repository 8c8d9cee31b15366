"""Wrappers around finished optimizers, against NumPy, Optax's Schedule-Free and `gpa`."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FLOAT16, UNIFORM, WARMUP_COSINE, apply, slow, trajectory, unchecked, x64

from spa_optax import (
    eval_params,
    in_float32,
    primal_averaging,
    scale_by_second_moment,
    spa,
    stochastic_rounding,
)
from spa_optax._precision import round_update

KEY = jax.random.key(0)
PARAMS = {"w": jnp.linspace(-1.0, 2.0, 48).reshape(6, 8), "b": jnp.ones(8)}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p), PARAMS)
BASES: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(WARMUP_COSINE, 0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(0.01),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
itself = lambda state, params: params


# ------------------------------------------------------------------------------- primal averaging


@pytest.mark.parametrize("params_of_base", ["params", "z"])
def test_from_the_equations(params_of_base: str) -> None:
    """In NumPy, around SGD with momentum 0.9 and a decay of 0.1 of what the base sees."""
    rate, c, mu_y, decay = 0.05, 0.2, 0.7, 0.1
    gradients = np.random.default_rng(0).normal(size=(100, 20))
    x = z = y = np.linspace(-1, 1, 20)
    m = np.zeros(20)
    expected = []
    for g in gradients:
        m = 0.9 * m + g + decay * (y if params_of_base == "params" else z)
        z = z - rate * m
        x = (1 - c) * x + c * z
        y = mu_y * x + (1 - mu_y) * z
        expected.append((y, x))
    with x64():
        base = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, 0.9))
        tx = primal_averaging(base, c, mu_y, params_of_base=params_of_base)  # pyright: ignore[reportArgumentType]
        params = jnp.linspace(-1, 1, 20)
        state = tx.init(params)
        for g, (y, x) in zip(gradients, expected, strict=True):
            updates, state = tx.update(jnp.asarray(g), state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(params, y, rtol=0, atol=1e-13)
            # μ_y is kept as float32.
            np.testing.assert_allclose(eval_params(state, params), x, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_gpa_behind_the_same_direction(dtype: Any) -> None:
    """z + (−γ d) against z − γ d. The loss is convex, so rounding of each step does not grow."""
    with x64(dtype == jnp.float64):
        wrapped = primal_averaging(optax.adamw(0.01, b1=0.0, weight_decay=0.1), 0.1, 0.9)
        direction = in_float32(
            optax.chain(scale_by_second_moment(), optax.add_decayed_weights(0.1))
        )
        chain = optax.chain(direction, spa(0.01, 0.1, 0.9))
        y, x = trajectory(wrapped, eval_params, dtype, num_steps=200)
        expected_y, expected_x = trajectory(chain, eval_params, dtype, num_steps=200)
    # Some ten roundings a step of numbers below 2, all in one direction.
    atol = 200 * 10 * float(jnp.finfo(dtype).eps)
    assert np.abs(np.diff(expected_y, axis=0)).max() > 1e-3  # it moves
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=atol)
    np.testing.assert_allclose(x, expected_x, rtol=0, atol=atol + (1e-7 if atol < 1e-7 else 0))


@pytest.mark.parametrize("base", ["sgd", slow("adamw"), slow("lion"), "muon"])
def test_schedule_free_around_any_base(base: str) -> None:
    """Optax's own wrapper, at a constant rate."""
    with x64():
        reference = optax.contrib.schedule_free(BASES[base](), 0.01, b1=0.9)
        evaluate = optax.contrib.schedule_free_eval_params
        expected_y, expected_x = trajectory(reference, evaluate, jnp.float64, num_steps=100)
        tx = primal_averaging(BASES[base](), UNIFORM, 0.9)
        y, x = trajectory(tx, eval_params, jnp.float64, num_steps=100)
    # Lion's sign is at most one update of 0.01 away where its argument rounds to 0: none here.
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-11)
    np.testing.assert_allclose(x, expected_x, rtol=0, atol=1e-6)  # of b1 and μ_y in float32


@every_base
def test_no_averaging_is_the_base(base: Callable[[], Any]) -> None:
    """c = 1: z = x = y. In float64, since x + (x' − x) rounds."""
    with x64():
        params, grads = optax.tree.cast((PARAMS, GRADS), jnp.float64)
        with jax.numpy_dtype_promotion("standard"):
            expected, _ = apply(base(), params, [grads] * 20)
            found, _ = apply(primal_averaging(base(), 1.0), params, [grads] * 20)
    chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-13)


def test_a_finished_optimizer_descends() -> None:
    """In a chain before `spa` it climbs: it has the minus sign already."""
    gradient = lambda x: 2 * (x - 1)
    params = jnp.array([3.0])
    for tx, descends in (
        (primal_averaging(optax.sgd(0.1), 0.1), True),
        (optax.chain(optax.sgd(0.1), spa(1.0, 0.1)), False),
    ):
        x, state = params, tx.init(params)
        for _ in range(20):
            updates, state = tx.update(gradient(x), state, x)
            x = optax.apply_updates(x, updates)
        assert (float(jnp.abs(x[0] - 1)) < 1.0) == descends


@every_base
def test_moments_of_narrow_params_are_float32(base: Callable[[], Any]) -> None:
    params, grads = optax.tree.cast((PARAMS, GRADS), jnp.bfloat16)
    wide = base().init(PARAMS)
    for tx in (
        primal_averaging(base(), 0.1, 0.9, state_dtype=jnp.bfloat16, rounding_key=KEY),
        stochastic_rounding(base(), KEY),
    ):
        state = tx.init(params)
        chex.assert_trees_all_equal_shapes_and_dtypes(state.base, wide)
        updates, after = jax.jit(tx.update)(grads, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


def test_eta_of_a_base_is_1() -> None:
    """What reads η: w is 1 − c, and the state's z − x is a sum of updates."""
    tx, c = primal_averaging(optax.sgd(0.5), 0.25), 0.25
    _, state = apply(tx, PARAMS, [GRADS] * 3)
    assert (state.average.eta, state.average.w, state.average.mu_y) == (1.0, 1 - c, 1.0)


def test_extra_arguments_reach_the_base() -> None:
    loss = lambda p: jnp.sum((p - 1) ** 2)
    polyak = lambda: optax.polyak_sgd(max_learning_rate=1.0)
    for wrap in (lambda tx: primal_averaging(tx, 1.0), lambda tx: stochastic_rounding(tx, KEY)):
        x, tx = jnp.zeros(3), wrap(polyak())
        value, g = jax.value_and_grad(loss)(x)
        found, _ = tx.update(g, tx.init(x), x, value=value)
        expected, _ = polyak().update(g, polyak().init(x), x, value=value)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        search = wrap(optax.lbfgs())
        extra: Any = {"value": value, "grad": g, "value_fn": loss}
        updates, _ = search.update(g, search.init(x), x, **extra)
        assert loss(x + updates) < value


def test_refused() -> None:
    refused = {
        "which averages": [
            optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
            spa(0.1),
            optax.chain(optax.clip(1.0), spa(0.1, 0.05, 0.9)),
            primal_averaging(optax.sgd(0.1), 0.1),
        ],
        "which rounds: pass `rounding_key` instead": [stochastic_rounding(optax.sgd(0.1), KEY)],
        "which skips updates: put it around": [
            optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
            optax.apply_if_finite(optax.sgd(0.1), 3),
        ],
    }
    for match, bases in refused.items():
        for base in bases:
            with pytest.raises(ValueError, match=f"`base` must neither average, .* {match}"):
                primal_averaging(base, 0.1).init(PARAMS)
    for base in refused["which averages"]:  # `eval_params` would be y
        with pytest.raises(ValueError, match=r"must not average, .*: use `primal_averaging.base, "):
            stochastic_rounding(base, KEY).init(PARAMS)
    for base, params in (
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), PARAMS),
        (optax.chain(optax.lookahead(optax.sgd(0.1), 5, 0.5)), optax.LookaheadParams(1.0, 1.0)),
    ):
        with pytest.raises(ValueError, match=r"`base` must not move params aside or back, got a `"):
            primal_averaging(base, 0.1).init(params)
    tx = primal_averaging(optax.sgd(0.1), 0.1)
    with pytest.raises(ValueError, match="`state` must be of type `PrimalAveragingS"):
        tx.update(GRADS, optax.sgd(0.1).init(PARAMS), PARAMS)
    for wrapped in (tx, stochastic_rounding(optax.sgd(0.1), KEY)):
        with pytest.raises(ValueError, match="`params` must be passed to `update`, got None"):
            wrapped.update(GRADS, wrapped.init(PARAMS))
    with pytest.raises(ValueError, match=r"`params_of_base` must be one of .* got 'x'"):
        unchecked(primal_averaging)(optax.sgd(0.1), 0.1, params_of_base="x")
    multi_steps = optax.MultiSteps(optax.sgd(0.1), 2)
    with pytest.raises(ValueError, match="put its `gradient_transformation"):
        unchecked(primal_averaging)(multi_steps, 0.1)
    for make in (unchecked(in_float32), lambda base: unchecked(stochastic_rounding)(base, KEY)):
        with pytest.raises(ValueError, match=r"must be a gradient transformation, got 0\.1"):
            make(0.1)
    with pytest.raises(ValueError, match=r"`key` must be one key of `jax.random`, got 0"):
        unchecked(stochastic_rounding)(optax.sgd(0.1), 0)


@pytest.mark.usefixtures("standard_promotion")
def test_sam_in_opaque_mode() -> None:
    """Its steps aside are none of its updates, so it finds the minimum: of a quadratic at 1."""
    grad = lambda x, i=0: jnp.array([0.1, 1.0, 2.0]) * (x - 1)
    aside = optax.chain(optax.contrib.normalize(), optax.sgd(0.01))
    sam = optax.contrib.sam(optax.sgd(0.5), aside, opaque_mode=True)
    tx = primal_averaging(sam, 0.1, 0.9)
    x, state = jnp.zeros(3), tx.init(jnp.zeros(3))
    for _ in range(200):
        updates, state = tx.update(grad(x), state, x, grad_fn=grad)
        x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(eval_params(state, x), 1.0, atol=0.03)


# ---------------------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("of", [jnp.bfloat16, FLOAT16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16, jnp.float32])
def test_updates_of_any_dtype_are_added_in_float32(dtype: Any, of: Any) -> None:
    """Of a base that casts them itself: the mean is right, and 3e4 + 6e4 no infinity on the way."""
    params = jnp.concatenate([jnp.full(10_000, 1.0), jnp.full(9, 3e4)]).astype(dtype)
    base = optax.stateless(lambda g, _: optax.tree.cast(g, of))
    tx = stochastic_rounding(base, KEY)
    updates, _ = tx.update(jnp.where(params == 1, -0.0009765625, 3e4), tx.init(params), params)
    x = optax.apply_updates(params, updates)
    assert x.dtype == dtype
    # In bfloat16 the neighbours are 1/256 apart: 5 standard errors.
    np.testing.assert_allclose(x[:10_000].astype(float).mean(), 1 - 2**-10, atol=5 * 2**-8 / 200)
    assert jnp.all(x[10_000:].astype(float) > 5.9e4)


def test_where_a_step_is_rounded_once() -> None:
    """By Sterbenz: x to x' from x/2 to 2x. All x' from x/4 to 4x, for all x from 1 to 2."""
    mantissas = 1 + jnp.arange(128) / 128
    all_new = jnp.concatenate([mantissas * 2.0**e for e in (-2, -1, 0, 1)])
    x, new = jnp.meshgrid(mantissas, all_new)
    narrow = x.astype(jnp.bfloat16)
    found = (narrow + round_update(new - x, narrow, None)).astype(float)
    ratio, ulp = new / x, jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(new, x))) - 7)
    once = (ratio >= 1 / 2) & (ratio <= 2)
    assert jnp.all(found[once] == new[once])
    assert 0.1 < jnp.mean(found[~once] != new[~once]) < 0.5
    assert jnp.max(jnp.abs(found - new) / ulp) == 1


@every_base
def test_float32_params_are_trained_by_the_base_alone(base: Callable[[], Any]) -> None:
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = apply(base(), PARAMS, [GRADS] * 5)
        found, _ = apply(stochastic_rounding(base(), KEY), PARAMS, [GRADS] * 5)
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.float16)]
)
def test_a_step_goes_to_a_neighbour_and_is_right_in_the_mean(dtype: Any) -> None:
    """Over keys, and over steps of which nearest rounding would see none."""
    num_keys, num_steps, rate = 400, 20, 2.0**-14
    params = jnp.linspace(0.5, 2.0, 64).astype(dtype)
    grads = jnp.linspace(-1.0, 1.0, 64)
    assert np.all((params.astype(jnp.float32) - rate * grads).astype(dtype) == params)

    def run(key: Any) -> Any:
        tx = stochastic_rounding(optax.sgd(rate), key)

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            return (new, state), new

        return jax.lax.scan(step, (params, tx.init(params)), None, num_steps)[1]

    xs = jax.jit(jax.vmap(run))(jax.random.split(KEY, num_keys))
    assert xs.dtype == dtype
    xs = np.asarray(xs, np.float64)
    ulp = float(jnp.finfo(dtype).eps)
    assert np.abs(np.diff(xs, axis=1)).max() <= ulp * 2  # of params up to 2
    exact = np.asarray(params, np.float64) - num_steps * rate * np.asarray(grads, np.float64)
    error = xs[:, -1].std(0) / num_keys**0.5
    moved = error > 0
    assert moved.sum() > 60
    # 64 of them: 5 standard errors are passed once in 30,000 times.
    assert np.all(np.abs(xs[:, -1].mean(0) - exact)[moved] < 5 * error[moved])


def test_bits_differ_by_step_and_key() -> None:
    params = jnp.ones(1_000, jnp.bfloat16)
    grads = jnp.full(1_000, 2.0**-9)
    step = lambda key, state: stochastic_rounding(optax.sgd(1.0), key).update(grads, state, params)
    state = stochastic_rounding(optax.sgd(1.0), KEY).init(params)
    first, after = step(KEY, state)
    again, _ = step(KEY, state)
    np.testing.assert_array_equal(first, again)
    for other in (step(KEY, after)[0], step(jax.random.key(1), state)[0]):
        # Two independent draws of probability 1/2 (1 − 2^-9 is midway) agree in half of the places.
        assert 0.4 < np.mean(np.asarray(first) == np.asarray(other)) < 0.6


def test_the_loss_of_float32() -> None:
    """At a rate at which nearest rounding stops: a least-squares problem of 50 params."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((200, 50), (200,)))
    loss = lambda x: jnp.mean((a @ x.astype(jnp.float32) - b) ** 2)

    def final(tx: Any, dtype: Any) -> float:
        def step(carry: Any, _: Any) -> Any:
            x, state = carry
            updates, state = tx.update(jax.grad(loss)(x), state, x)
            return (optax.apply_updates(x, updates), state), None

        x = jnp.full(50, 3.0, dtype)
        (x, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, 2_000))((x, tx.init(x)))
        return float(loss(x))

    with jax.numpy_dtype_promotion("standard"):
        base = optax.adam(0.003)
        wide = final(base, jnp.float32)
        nearest = final(in_float32(base), jnp.bfloat16)
        stochastic = final(stochastic_rounding(base, KEY), jnp.bfloat16)
    assert wide < stochastic < 1.1 * wide < nearest
