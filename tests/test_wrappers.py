"""Wrappers around finished optimizers, against NumPy and Optax's Schedule-Free."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FLOAT16, WARMUP_COSINE, run, x64

from spa_optax import (
    eval_params,
    float8_momentum,
    in_float32,
    primal_averaging,
    spa,
    spa_adamw,
    stochastic_rounding,
)
from spa_optax._rounding import round_update

KEY = jax.random.key(0)
PARAMS = {"w": jnp.linspace(-1.0, 2.0, 48).reshape(6, 8), "b": jnp.ones(8)}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p), PARAMS)
BASES: dict[str, Callable[[], Any]] = {
    "momentum": lambda: optax.sgd(WARMUP_COSINE, 0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(0.01),
}
every_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


@pytest.mark.parametrize("params_of_base", ["params", "z"])
def test_from_the_equations(params_of_base: Any) -> None:
    """In NumPy, around SGD with momentum 0.9 and a decay of 0.1 of what the base
    sees."""
    rate, c, mu_y, decay = 0.05, 0.2, 0.7, 0.1
    gradients = np.random.default_rng(0).normal(size=(100, 20))
    x = z = y = np.linspace(-1, 1, 20)
    m = np.zeros(20)
    with x64():
        base = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, 0.9))
        tx = primal_averaging(base, c, mu_y, params_of_base=params_of_base)
        params = jnp.asarray(y)
        state: Any = tx.init(params)
        for g in gradients:
            m = 0.9 * m + g + decay * (y if params_of_base == "params" else z)
            z = z - rate * m
            x = (1 - c) * x + c * z
            y = mu_y * x + (1 - mu_y) * z
            updates, state = tx.update(jnp.asarray(g), state, params)
            params = optax.apply_updates(params, updates)
            np.testing.assert_allclose(params, y, rtol=0, atol=1e-13)
            np.testing.assert_allclose(
                eval_params(state, params), x, rtol=0, atol=1e-12
            )
    scalars = (
        state.spa_state.eta,
        state.spa_state.c,
        state.spa_state.w,
        state.spa_state.mu_y,
    )
    np.testing.assert_array_equal(scalars, [1, c, 1 - c, mu_y])


@every_base
@pytest.mark.usefixtures("standard_promotion")
def test_no_averaging_is_the_base(base: Callable[[], Any]) -> None:
    """c = 1: z = x = y. In float64, since x + (x' − x) rounds. Nor does float32
    round."""
    with x64():
        params, grads = optax.tree.cast((PARAMS, GRADS), jnp.float64)
        expected, _ = run(base(), params, [grads] * 20)
        found, _ = run(primal_averaging(base(), 1.0), params, [grads] * 20)
        chex.assert_trees_all_close(found, expected, rtol=0, atol=1e-13)
    expected, _ = run(base(), PARAMS, [GRADS] * 5)
    found, _ = run(stochastic_rounding(base(), KEY), PARAMS, [GRADS] * 5)
    chex.assert_trees_all_equal(found, expected)


def test_moments_of_narrow_params_are_float32() -> None:
    """Within `in_float32` too, whose updates of integers are the gradients."""
    narrow = optax.tree.cast((PARAMS, GRADS), jnp.bfloat16)
    params, grads = ({**tree, "n": jnp.array(3), "none": None} for tree in narrow)
    base = optax.adamw(0.01)
    wide = base.init(PARAMS | {"n": None, "none": None})
    tx = primal_averaging(base, 0.1, 0.9, state_dtype=jnp.bfloat16, rounding_key=KEY)
    state: Any = tx.init(params)
    chex.assert_trees_all_equal_shapes_and_dtypes(state.base_state, wide)
    updates, after = jax.jit(tx.update)(grads, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (params, state))
    updates, _ = in_float32(base).update(grads, wide, params)
    assert (updates["n"], updates["none"]) == (3, None)
    chex.assert_trees_all_equal_dtypes(updates["w"], PARAMS["w"])
    with pytest.raises(ValueError, match=r"`updates`.*`params`.*\['n'\]"):
        in_float32(base).update(GRADS, wide, params)


SGD = optax.sgd(0.1)
AVERAGES = [
    optax.contrib.schedule_free(SGD, 0.1),
    optax.chain(optax.clip(1.0), spa(0.1, 0.05, 0.9)),
    primal_averaging(SGD, 0.1),
]
# The states that `primal_averaging` refuses, by the argument that its message names.
REFUSED: list[tuple[str, str, Any]] = [
    ("ScheduleFreeState", "keep an EMA", AVERAGES[0]),
    ("SPAState", "`rounding_key`", AVERAGES[1]),
    ("SPAState", "`rounding_key`", AVERAGES[2]),
    ("StochasticRoundingState", "`rounding_key`", stochastic_rounding(SGD, KEY)),
    ("MultiStepsState", "", optax.MultiSteps(SGD, 2).gradient_transformation()),
    ("ApplyIfFiniteState", "", optax.apply_if_finite(SGD, 3)),
    ("ApplyEvery", r"`optax\.MultiSteps`", optax.apply_every(2)),
    ("SAMState", "`opaque_mode=True`", optax.contrib.sam(SGD, SGD)),
    ("ScaleByZoomLinesearchState", "", optax.lbfgs()),
    ("LookaheadState", "", optax.lookahead(SGD, 5, 0.5)),
    ("ProdigyState", "", optax.contrib.prodigy()),
    ("DAdaptAdamWState", "", optax.contrib.dadapt_adamw()),
    ("COCOBState", '`params_of_base="z"`', optax.contrib.cocob()),
    ("MechanicState", '`params_of_base="z"`', optax.contrib.mechanize(SGD)),
    ("DoGState", '`params_of_base="z"`', optax.contrib.dog()),
    ("DoWGState", '`params_of_base="z"`', optax.contrib.dowg()),
]
if hasattr(optax.contrib, "madgrad"):
    REFUSED.append(("MadgradState", "", optax.contrib.madgrad(0.1)))


@pytest.mark.parametrize(("state", "remedy", "base"), REFUSED)
def test_refused_by_primal_averaging(state: str, remedy: str, base: Any) -> None:
    params: Any = PARAMS
    if state == "LookaheadState":
        params = optax.LookaheadParams(PARAMS, PARAMS)
    with pytest.raises(ValueError, match=f"`base`.*`{state}`.*{remedy}"):
        primal_averaging(base, 0.1).init(params)


def test_refused_at_z() -> None:
    """Where pairs of params and gradients would not belong together."""
    for base in (optax.contrib.cocob(), optax.contrib.mechanize(SGD)):
        primal_averaging(base, 0.1, params_of_base="z").init(PARAMS)
    lbfgs = primal_averaging(optax.scale_by_lbfgs(), 0.1, params_of_base="z")
    match = '`base`.*`ScaleByLBFGSState`.*`params_of_base="params"`'
    with pytest.raises(ValueError, match=match):
        lbfgs.init(PARAMS)
    sam = optax.contrib.sam(SGD, SGD, opaque_mode=True)
    match = '`base`.*`SAMState`.*`params_of_base="params"`'
    with pytest.raises(ValueError, match=match):
        primal_averaging(sam, 0.1, params_of_base="z").init(PARAMS)


class OtherScheduleFreeState(NamedTuple):
    """As a copy of Schedule-Free in another package has it."""

    b1: Any
    weight_sum: Any
    z: Any


def test_schedule_free_of_another_package_is_refused() -> None:
    other = optax.GradientTransformation(
        lambda params: OtherScheduleFreeState(0.9, 0.0, params), optax.identity().update
    )
    for wrapped in (primal_averaging(other, 0.1), stochastic_rounding(other, KEY)):
        with pytest.raises(ValueError, match=r"`base`.*`OtherScheduleFreeState`"):
            wrapped.init(PARAMS)


def test_a_key_in_the_state_of_a_base() -> None:
    """It has no sharding of a parameter, also where that is a scalar like the key."""
    tx = in_float32(optax.add_noise(0.1, 0.55, jax.random.key(0)))
    for init in (tx.init, jax.jit(tx.init)):
        assert init(jnp.ones([])).rng_key.shape == ()


def test_sam_in_opaque_mode_is_not_refused() -> None:
    sam = optax.contrib.sam(SGD, SGD, opaque_mode=True)
    primal_averaging(sam, 0.1).init(PARAMS)


@pytest.mark.parametrize(("state", "remedy", "base"), REFUSED[:3])
def test_refused_by_stochastic_rounding(state: str, remedy: str, base: Any) -> None:
    """`eval_params` would be y."""
    with pytest.raises(ValueError, match=rf"`base`.*`{state}`.*{remedy}"):
        stochastic_rounding(base, KEY).init(PARAMS)


@pytest.mark.parametrize(
    "inner", [*AVERAGES[1:], stochastic_rounding(SGD, KEY)], ids=itertools.count()
)
def test_refused_by_in_float32(inner: Any) -> None:
    """It would see params of 16 bits in float32, and not round them."""
    tx = in_float32(optax.chain(optax.identity(), inner))
    tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"`inner` must not be an optimizer.*State"):
        tx.init(optax.tree.cast(PARAMS, jnp.bfloat16))


@pytest.mark.parametrize(
    ("tx", "state"),
    [
        (primal_averaging(SGD, 0.1), "PrimalAveragingState"),
        (stochastic_rounding(SGD, KEY), "StochasticRoundingState"),
    ],
)
def test_refused_by_update(tx: Any, state: str) -> None:
    with pytest.raises(ValueError, match=f"`state`.*`{state}`.*tuple"):
        tx.update(GRADS, SGD.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"`params`.*None"):
        tx.update(GRADS, tx.init(PARAMS))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16, jnp.float32])
def test_updates_of_any_dtype_are_added_in_float32(dtype: Any) -> None:
    """A base casts them itself. The mean is right, and 3e4 + 6e4 is not infinite."""
    params = jnp.concatenate([jnp.full(10_000, 1.0), jnp.full(9, 3e4)]).astype(dtype)
    tx = stochastic_rounding(
        optax.stateless(lambda g, _: optax.tree.cast(g, jnp.bfloat16)), KEY
    )
    updates, _ = tx.update(
        jnp.where(params == 1, -0.0009765625, 3e4), tx.init(params), params
    )
    x = optax.apply_updates(params, updates)
    assert x.dtype == dtype
    # In bfloat16 the neighbours are 1/256 apart: 5 standard errors.
    np.testing.assert_allclose(
        x[:10_000].astype(float).mean(), 1 - 2**-10, atol=5 * 2**-8 / 200
    )
    assert jnp.all(x[10_000:].astype(float) > 5.9e4)


def test_where_a_step_is_rounded_once() -> None:
    """By Sterbenz: x to x' from x/2 to 2x. All x' from x/4 to 4x, for all x from 1 to
    2."""
    mantissas = 1 + jnp.arange(128) / 128
    x, new = jnp.meshgrid(
        mantissas, jnp.concatenate([mantissas * 2.0**e for e in (-2, -1, 0, 1)])
    )
    narrow = x.astype(jnp.bfloat16)
    found = (narrow + round_update(new - x, narrow, None)).astype(float)
    ratio, ulp = new / x, jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(new, x))) - 7)
    once = (ratio >= 1 / 2) & (ratio <= 2)
    assert jnp.all(found[once] == new[once])
    assert 0.1 < jnp.mean(found[~once] != new[~once]) < 0.5
    assert jnp.max(jnp.abs(found - new) / ulp) == 1


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
def test_a_step_goes_to_a_neighbour_and_is_right_in_the_mean(dtype: Any) -> None:
    """Over places, and over steps of which nearest rounding would see none."""
    num_places, num_steps, rate = 400, 20, 2.0**-14
    params, g = (jnp.linspace(*ends, 64)[:, None] for ends in ((0.5, 2.0), (-1.0, 1.0)))
    shape = (64, num_places)
    params, grads = (
        jnp.broadcast_to(params.astype(dtype), shape),
        jnp.broadcast_to(g, shape),
    )
    assert np.all((params.astype(jnp.float32) - rate * grads).astype(dtype) == params)
    x, tx = params, stochastic_rounding(optax.sgd(rate), KEY)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(num_steps):
        updates, state = update(grads, state, x)
        assert np.abs(np.float64(updates)).max() <= 2 * float(jnp.finfo(dtype).eps)
        x = optax.apply_updates(x, updates)
    exact = np.float64(params[:, 0]) - num_steps * rate * np.float64(g[:, 0])
    error = np.float64(x).std(1) / num_places**0.5
    moved = error > 0
    assert moved.sum() > 60
    # 64 of them: 5 standard errors are passed once in 30,000 times.
    assert np.all(np.abs(np.float64(x).mean(1) - exact)[moved] < 5 * error[moved])
    # Steps are independent, so their variances add up: ulp · rate |g| or less. Else 20
    # times that.
    sq_error = num_steps * float(jnp.finfo(dtype).eps) * rate * np.abs(g).mean()
    assert np.float64(x).var(1).mean() < 1.5 * sq_error


@pytest.mark.parametrize("second_moment", ["full", "factored"])
def test_integer_gradients_count_as_numbers(second_moment: Any) -> None:
    """And gradients of integers do not: the params stay."""
    params = {"w": jnp.linspace(0.5, 1.0, 3), "n": jnp.arange(3)}
    tx = spa_adamw(0.1, weight_decay=0.1, second_moment=second_moment)
    expected, _ = run(tx, params, [{"w": jnp.full(3, 2.0), "n": None}] * 2)
    for other in (None, jnp.zeros(3, int), jnp.ones(3)):
        grads = [{"w": jnp.full(3, 2), "n": other}] * 2
        chex.assert_trees_all_equal(run(tx, params, grads)[0], expected)


def test_a_frozen_param_in_8_bits() -> None:
    """A None gradient, as `optax.sgd` takes it."""
    base = optax.sgd(0.5, 0.9)
    tx = float8_momentum(base, jax.random.key(0))
    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    grads = [{"w": jnp.ones(3), "b": None}] * 2
    expected, _ = run(base, params, grads)
    found, _ = run(tx, params, grads)
    chex.assert_trees_all_close(found, expected, rtol=2**-3)
    np.testing.assert_array_equal(found["b"], params["b"])


def test_8_bits_twice_are_refused() -> None:
    key = jax.random.key(0)
    tx = float8_momentum(float8_momentum(optax.sgd(0.1, 0.9), key), key)
    with pytest.raises(ValueError, match=r"`base`.*`Float8MomentumState`"):
        tx.init(jnp.ones(3))
