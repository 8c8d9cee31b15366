"""Runs of SGD with momentum, of AdamW and of the family that move, against the same
runs unmoved.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import flax
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import logistic_regression, long, run, sgdm, slow, trained, x64, z_of

from spa_optax import (
    AdamWHyperparams,
    SGDMHyperparams,
    convert,
    eval_params,
    float8_momentum,
    hyperparams_to_sgdm,
    in_float32,
    primal_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)
from spa_optax.diagnostics import guard_params, track_momentum

KEY = jax.random.key(0)
NUM_STEPS, BATCHES = 300, helpers.batches(300)
# Dtypes meet in Optax's Adam and `MultiSteps`.
pytestmark = pytest.mark.usefixtures("standard_promotion")
# Evaluated once: Optax's cosine is in float32, which XLA rounds differently in two
# programs.
ALPHA = helpers.evaluated(
    optax.warmup_cosine_decay_schedule(0.0, 0.3, 50, NUM_STEPS), NUM_STEPS
)


def decaying(count: Any) -> Any:
    """The learning rate 0.1, 0.1/2, 0.1/3, …"""
    return 0.1 / (count + 1).astype(float)


# SGD with momentum.


@pytest.mark.parametrize(
    "nesterov", [slow(False), True], ids=["heavy ball", "nesterov"]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-13), long("float32", 2e-6)]
)
def test_sgdm_moves_to_spa_and_back(
    nesterov: bool, dtype: str, tolerance: float
) -> None:
    """At random steps of a warm-up and cosine. The params are as if it never moved."""
    first, second = sorted(
        np.random.default_rng(3).integers(20, NUM_STEPS - 20, 2).tolist()
    )
    with x64(dtype == "float64"):
        clip = optax.clip_by_global_norm(1.0)
        sgd = optax.chain(clip, optax.sgd(ALPHA, 0.9, nesterov))
        tx = optax.chain(clip, spa_from_sgdm(ALPHA, 0.9, nesterov))
        gradient = jax.grad(logistic_regression(dtype))
        start = jnp.zeros((65, 10), dtype)
        never_moved, _ = trained(sgd, gradient, start, BATCHES)
        params, sgd_state = trained(sgd, gradient, start, BATCHES[:first])
        other = SGDMHyperparams(ALPHA, 0.9, nesterov)
        state = convert(sgd_state, params, into=tx.init(params), hyperparams=other)
        assert state[1].count == first
        params, state = trained(tx, gradient, params, BATCHES[first:second], state)
        assert state[1].count == second
        sgd_state = convert(state, params, into=sgd.init(params))
        assert optax.tree.get(sgd_state, "count") == second
        params, _ = trained(sgd, gradient, params, BATCHES[second:], sgd_state)
        assert helpers.relative_difference(params, never_moved) < tolerance


@pytest.mark.slow
def test_a_schedule_is_not_evaluated_before_count_0() -> None:
    def noam(count: Any) -> Any:
        k = count.astype(float)
        return 0.1 * jnp.minimum(k**-0.5, k * 4**-1.5)

    sgd, tx, x = optax.sgd(noam, 0.9), spa_from_sgdm(noam, 0.9), jnp.ones(2)
    state = convert(
        sgd.init(x), x, into=tx.init(x), hyperparams=SGDMHyperparams(noam, 0.9)
    )
    found, _ = run(tx, x, [x] * 5, state)
    expected, _ = run(sgd, x, [x] * 5)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_a_state_from_sgdm_is_as_foreseen() -> None:
    """It is the state of `spa_from_sgdm` at that step, and z is not rescaled."""
    tx, sgd = spa_from_sgdm(ALPHA, 0.9), optax.sgd(ALPHA, 0.9)
    gradient, start = jax.grad(logistic_regression("float32")), jnp.zeros((65, 10))
    _, native = trained(tx, gradient, start, BATCHES[:80])
    params, sgd_state = trained(sgd, gradient, start, BATCHES[:80])
    moved = convert(
        sgd_state, params, into=tx.init(params), hyperparams=SGDMHyperparams(ALPHA, 0.9)
    )
    chex.assert_trees_all_close(moved, native, rtol=1e-5, atol=1e-5)
    _, after = tx.update(jnp.zeros_like(params), moved, params)
    np.testing.assert_array_equal(after.z, moved.z)


def test_the_w_of_spa_is_that_of_sgdm() -> None:
    """SGD with momentum can take over, also from `spa` with schedules."""

    def rate(count: Any) -> Any:
        return 2.0 - count.astype(float) / 10

    with x64():
        g = jnp.array([1.0, -2.0])
        x, state = run(spa(rate, 0.25), jnp.ones(2), [g] * 5)
        _, sgd_state = run(sgdm(*hyperparams_to_sgdm(rate, 0.25)), jnp.ones(2), [g] * 5)
        into, trace = optax.trace(0.75).init(x), optax.tree.get(sgd_state, "trace")
        np.testing.assert_allclose(convert(state, x, into=into).trace, trace, rtol=1e-6)
        # At c = 1 there is no momentum.
        _, state = spa(1.0, 1.0).update(g, state, x)
        np.testing.assert_array_equal(convert(state, x, into=into).trace, jnp.zeros(2))


# Wrappers.


def in_chain(tx: Any) -> Any:
    return optax.chain(optax.clip(1e3), tx)


def in_named_chain(tx: Any) -> Any:
    return optax.named_chain(("clip", optax.clip(1e3)), ("it", tx))


def in_masked(tx: Any) -> Any:
    return optax.masked(tx, {"a": True, "b": False})


def in_partition(tx: Any) -> Any:
    labels = {"a": "it", "b": "frozen"}
    return optax.partition({"it": tx, "frozen": optax.set_to_zero()}, labels)


def in_apply_if_finite(tx: Any) -> Any:
    return optax.apply_if_finite(tx, 3)


def in_multi_steps(tx: Any) -> Any:
    return optax.MultiSteps(tx, 1).gradient_transformation()


@pytest.mark.parametrize(
    "wrap",
    [
        in_chain,
        in_named_chain,
        in_masked,
        in_partition,
        in_apply_if_finite,
        in_multi_steps,
    ],
)
def test_wrapped_states_move(wrap: Callable[[Any], Any]) -> None:
    """There and back. The params are as if the run had never moved."""
    sgd, tx = wrap(optax.sgd(decaying, 0.5)), wrap(spa_from_sgdm(decaying, 0.5))
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    grads = [jax.tree.map(lambda p, k=k: jnp.cos(p + k), params) for k in range(12)]
    x, _ = run(sgd, params, grads)
    y, state = run(sgd, params, grads[:4])
    moved = convert(
        state, y, into=tx.init(y), hyperparams=SGDMHyperparams(decaying, 0.5)
    )
    chex.assert_trees_all_equal_structs(moved, tx.init(y))
    y, moved = run(tx, y, grads[4:8], moved)
    back = convert(moved, y, into=sgd.init(y))
    chex.assert_trees_all_equal_structs(back, state)
    y, _ = run(sgd, y, grads[8:], back)
    # Rounding of x − z over w ≥ 0.01, twice, in m; and of 12 steps.
    chex.assert_trees_all_close(y, x, atol=4 * 6e-8 / 0.01 * 0.1)


def test_injected_schedules_go_on_from_the_count() -> None:
    """Each injects another number of schedules, which have counts of their own."""
    old = optax.inject_hyperparams(optax.sgd)(decaying, 0.5)
    new = optax.inject_hyperparams(spa_from_sgdm)(decaying, decaying)
    x, state = run(old, jnp.ones(2), [jnp.ones(2)] * 3)
    moved = convert(
        state, x, into=new.init(x), hyperparams=SGDMHyperparams(decaying, 0.5)
    )
    assert moved.count == moved.inner_state.count == 3
    assert [s.count for s in moved.hyperparams_states.values()] == [3, 3]
    assert moved.hyperparams["momentum"] == new.init(x).hyperparams["momentum"]


def accumulating(step: Any) -> Any:
    """Numbers of batches with which steps end at batches 1, 2, 5, 8 and 11."""
    return jnp.where(step < 2, 1, 3)


@pytest.mark.slow
def test_accumulated_gradients_are_not_lost() -> None:
    grads = [jnp.cos(jnp.arange(6.0) + k).reshape(3, 2) for k in range(12)]
    sgd, tx = optax.sgd(decaying, 0.5), spa_from_sgdm(decaying, 0.5)
    accumulated = optax.MultiSteps(optax.apply_if_finite(sgd, 2), accumulating)
    new = optax.MultiSteps(optax.apply_if_finite(tx, 2), accumulating)
    other = SGDMHyperparams(decaying, 0.5)
    for num_batches in (1, 5):
        x, state = run(accumulated, jnp.ones((3, 2)), grads[:num_batches])
        moved = convert(state, x, into=new.init(x), hyperparams=other)
        expected, _ = run(accumulated, x, grads[num_batches:], state)
        found, _ = run(new, x, grads[num_batches:], moved)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        alone = convert(state, x, into=tx.init(x), hyperparams=other)
        assert alone.count == state.gradient_step
        again = convert(alone, x, into=accumulated.init(x))
        assert again.gradient_step == state.gradient_step
    for num_batches in (6, 7):
        x, state = run(accumulated, jnp.ones((3, 2)), grads[:num_batches])
        for into in (tx, new):
            match = f"`old_state` must not .* {num_batches - 5} batches"
            with pytest.raises(ValueError, match=match):
                convert(state, x, into=into.init(x), hyperparams=other)


def test_the_new_optimizer_may_freeze_params() -> None:
    """Both ways, and for a momentum that is copied. The others train on as before."""

    def partly(tx: Any) -> Any:
        labels = {"a": "trained", "b": "frozen"}
        return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)

    sgd, tx = optax.sgd(0.1, 0.9), spa_from_sgdm(0.1, 0.9)
    x = {"a": jnp.ones(2), "b": jnp.ones(3)}
    g = {"a": jnp.array([1.0, -2.0]), "b": jnp.ones(3)}
    given: Any = {"hyperparams": SGDMHyperparams(0.1, 0.9), "count": 1}
    x, old = run(sgd, x, [g])
    expected, later = run(sgd, x, [g], old)
    for new in (partly(tx), partly(sgd)):
        y, _ = run(new, x, [g], convert(old, x, into=new.init(x), **given))
        chex.assert_trees_all_close(y, {"a": expected["a"], "b": x["b"]}, rtol=1e-6)
    whole = convert(later, expected, into=tx.init(expected), **given)
    back = convert(whole, expected, into=partly(sgd).init(expected))
    trace, m = (optax.tree.get(state, "trace")["a"] for state in (later, back))
    np.testing.assert_allclose(m, trace, rtol=1e-5)
    with pytest.raises(ValueError, match=r"`into` .* got \['b'\]"):
        convert(partly(tx).init(x), x, into=tx.init(x))


def test_groups_of_a_partition_move_one_by_one() -> None:
    labels = {"a": "fast", "b": "slow"}
    old = optax.partition(
        {"fast": optax.sgd(0.1, 0.9), "slow": optax.sgd(decaying, 0.5)}, labels
    )
    new = optax.partition(
        {"fast": spa_from_sgdm(0.1, 0.9), "slow": spa_from_sgdm(decaying, 0.5)}, labels
    )
    x = {"a": jnp.ones(2), "b": jnp.ones(3)}
    x, state = run(old, x, [x] * 3)
    into = new.init(x)
    with pytest.raises(ValueError, match=r"`old_state`.* got 2.*`state.inner_states"):
        convert(state, x, into=into)
    others = {"fast": SGDMHyperparams(0.1, 0.9), "slow": SGDMHyperparams(decaying, 0.5)}
    groups = {}
    for label, other in others.items():
        group, new_group = state.inner_states[label], into.inner_states[label]
        groups[label] = convert(group, x, into=new_group, hyperparams=other, count=3)
    found, _ = run(new, x, [x] * 3, into._replace(inner_states=groups))
    expected, _ = run(old, x, [x] * 3, state)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


def test_one_group_of_a_partition_moves() -> None:
    """The other one keeps its AdamW."""
    labels = {"a": "sgd", "b": "adamw"}

    def with_group(tx: Any) -> Any:
        return optax.partition({"sgd": tx, "adamw": optax.adamw(decaying)}, labels)

    old, new = with_group(optax.sgd(decaying, 0.5)), with_group(spa_from_sgdm(decaying))
    x = {"a": jnp.ones(2), "b": jnp.ones(3)}
    x, state = run(old, x, [x] * 3)
    moved = convert(
        state, x, into=new.init(x), hyperparams=SGDMHyperparams(decaying, 0.5)
    )
    chex.assert_trees_all_equal(
        moved.inner_states["adamw"], state.inner_states["adamw"]
    )
    back = convert(moved, x, into=old.init(x))
    chex.assert_trees_all_close(back, state, rtol=1e-5)


@pytest.mark.parametrize("in_old", [True, False])
def test_an_average_on_one_side_is_refused(in_old: bool) -> None:
    """And the message names a line that begins it."""
    sgd, x = optax.sgd(0.5, 0.5), jnp.ones(2)
    averaged = primal_averaging(sgd, 0.1)
    x, base = run(sgd, x, [x])
    state = averaged.init(x)._replace(base_state=base)
    old, into = (state, sgd.init(x)) if in_old else (base, averaged.init(x))
    with pytest.raises(
        ValueError, match=r"`primal_averaging`.*_replace\(base_state=old_sta"
    ):
        convert(old, x, into=into, count=None if in_old else 1)
    for count in (1, 2):
        x, state = run(averaged, x, [x], state)
        assert state.spa_state.count == count


def test_averages_move_with_their_base() -> None:
    """Here to another dtype of z, and with a new gauge around them."""
    x = jnp.ones(2)
    old = primal_averaging(optax.adamw(0.1), 0.1, 0.9)
    new = track_momentum(
        primal_averaging(
            optax.adamw(0.1), 0.1, 0.9, state_dtype=jnp.bfloat16, rounding_key=KEY
        )
    )
    y, state = run(old, x, [jnp.array([1.0, -2.0])] * 3)
    moved = convert(state, y, into=new.init(y))
    chex.assert_trees_all_equal(moved.inner_state.base_state, state.base_state)
    chex.assert_trees_all_equal(
        moved._replace(inner_state=None), new.init(y)._replace(inner_state=None)
    )
    np.testing.assert_allclose(z_of(moved, y), state.spa_state.z, rtol=2**-8)
    assert (moved.inner_state.spa_state.count, moved.inner_state.spa_state.mu_y) == (
        3,
        0.9,
    )


# The other states of a chain.


class Custom(NamedTuple):
    buffer: Any


def custom(make: Callable[[Any], Any]) -> optax.GradientTransformation:
    """A transformation with a state of one's own, which passes gradients on."""
    return optax.GradientTransformation(make, lambda g, state, params=None: (g, state))


DIRECTIONS: dict[str, Any] = {
    "trace": optax.trace(0.9),
    "float8": float8_momentum(optax.trace(0.9), KEY),
    "adam": optax.scale_by_adam(),
    "ema": optax.chain(optax.ema(0.9), optax.clip(1.0)),
    "unbiased rms": optax.scale_by_rms(0.9, bias_correction=True),
    "factored": optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "in_float32": in_float32(optax.scale_by_rms(0.9)),
    "noise": optax.add_noise(0.1, 0.55, jax.random.key(1)),
    "params among moments": optax.contrib.cocob(),
    "own": custom(Custom),
    "bare array": custom(jnp.zeros_like),
    "named": optax.named_chain(("my.base", custom(Custom))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIRECTIONS)
def test_other_states_are_kept(name: str) -> None:
    """The run goes on as if nothing had happened, or `convert` refuses."""
    last, x = spa(0.1, 0.5), jnp.ones((3, 2))
    tx = optax.chain(DIRECTIONS[name], last)
    g = jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]])
    x, state = run(tx, x, [g * (k + 1) for k in range(5)])
    moved = convert(state, x, into=tx.init(x))
    chex.assert_trees_all_equal(tx.update(g, moved, x), tx.update(g, state, x))
    for old, into in ((state, last.init(x)), (state[1], tx.init(x))):
        with pytest.raises(ValueError, match="`into` must hold"):
            convert(old, x, into=into)


def test_states_of_other_shapes_are_refused() -> None:
    tx, x = optax.chain(custom(Custom), spa(0.1)), jnp.ones((3, 2))
    old, new = tx.init(x), tx.init(x)
    for buffer in (jnp.ones((2, 3)), {"a": x}, [x, x]):
        into = (Custom(buffer), new[1])
        with pytest.raises(ValueError, match=r"`into` must hold only .* `Custom`"):
            convert(old, x, into=into)


def test_adamw_goes_on_under_stochastic_rounding() -> None:
    """With its moments in float32 and its count, whatever kind of Adam it is."""
    adam, x = optax.nadamw(decaying), jnp.ones(3)
    x, state = run(adam, x, [jnp.array([1.0, -2.0, 3.0])] * 20)
    narrow, tx = x.astype(jnp.bfloat16), stochastic_rounding(adam, KEY)
    moved = convert(state, x, into=tx.init(narrow))
    chex.assert_trees_all_equal(moved.base_state, state)
    assert moved.count == 20
    chex.assert_trees_all_equal(convert(moved, narrow, into=adam.init(x)), state)


@pytest.mark.parametrize(
    "wrap",
    [
        guard_params,
        lambda tx: optax.conditionally_mask(tx, lambda k: k >= 0),
        lambda tx: optax.GradientTransformation(
            lambda x: Custom(tx.init(x)),
            lambda g, state, x: (lambda u, new: (u, Custom(new)))(
                *tx.update(g, state.buffer, x)
            ),
        ),
    ],
)
def test_z_in_an_unknown_wrapper_is_refused(wrap: Any) -> None:
    """It would be copied, without the digits that a cast cuts off."""
    tx = wrap(spa_from_sgdm(0.1, 0.5, state_dtype=jnp.bfloat16, rounding_key=KEY))
    x = jnp.full(3, 1.001)
    y = x.astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"in wrappers that `convert` knows, got a `"):
        convert(tx.init(x), x, into=tx.init(y), new_params=y, count=1)


def test_a_momentum_without_a_second_moment_is_refused() -> None:
    """AdamW would divide it by the root of 0."""
    rms = optax.scale_by_rms(0.99, bias_correction=True)
    old = optax.chain(optax.masked(rms, {"a": True, "b": False}), spa(1e-2, 0.1))
    x = {"a": jnp.ones(2), "b": jnp.ones(2)}
    x, state = run(old, x, [x] * 3)
    into = optax.adam(1e-2).init(x)
    with pytest.raises(ValueError, match=r"second moment of every .*none of \['b'\]"):
        convert(state, x, into=into, hyperparams=AdamWHyperparams(1e-2))


def test_a_state_whose_scalars_were_cast_is_refused() -> None:
    tx, x = spa_from_sgdm(0.1, 0.9), jnp.ones(2)
    x, state = run(tx, x, [x] * 3)
    cast = state._replace(w=state.w.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"`old_state.w` must be float32 or float64"):
        convert(cast, x, into=optax.sgd(0.1, 0.9).init(x))


# Counts.


def test_a_count_that_no_state_holds_must_be_given() -> None:
    """A schedule of the new optimizer would start over at a count of 0."""
    x, sgd, tx = jnp.ones(2), optax.sgd(0.5, 0.5), spa_from_sgdm(0.5, 0.5)
    given: Any = {"into": tx.init(x), "hyperparams": SGDMHyperparams(0.5, 0.5)}
    chex.assert_trees_all_equal(convert(sgd.init(x), x, **given, count=0), tx.init(x))
    _, state = sgd.update(x, sgd.init(x))
    for new in (tx, optax.sgd(decaying, 0.5), sgdm(0.5, 0.5)):
        with pytest.raises(ValueError, match=r"`count` must be .* got None"):
            convert(state, x, into=new.init(x), hyperparams=SGDMHyperparams(0.5, 0.5))
    assert convert(state, x, **given, count=7).count == 7
    with pytest.raises(ValueError, match=r"`count` must be >= 1 .* got 0"):
        convert(state, x, **given, count=0)
    _, counted = run(optax.sgd(decaying, 0.5), x, [x] * 3)
    assert convert(counted, x, **given).count == 3
    _, counted = run(stochastic_rounding(sgd, KEY), x, [x] * 3)
    assert convert(counted, x, **given).count == 3
    float8 = float8_momentum(sgd, KEY)
    _, counted = run(float8, x, [x] * 3)
    rounding = stochastic_rounding(float8, KEY)
    moved = convert(counted, x, into=rounding.init(x))
    chex.assert_trees_all_equal(moved.base_state, counted)
    assert moved.count == 3


def test_counts_that_differ_are_refused() -> None:
    """As after a restart of a schedule alone."""
    x, rate = jnp.ones(2), optax.cosine_decay_schedule(0.1, 100)
    adam, tx = optax.adamw(rate), spa_adamw(rate)
    given: Any = {"into": tx.init(x), "hyperparams": AdamWHyperparams(rate)}
    _, (of_adam, *rest) = run(adam, x, [x] * 9)
    _, (of_nu, of_spa) = run(tx, x, [x] * 9)
    restarted = (*rest[:-1], rest[-1]._replace(count=0))
    for state in ((of_adam, *restarted), (of_nu, of_spa._replace(count=0))):
        with pytest.raises(ValueError, match=r"`count`.* got \[0, 9\]"):
            convert(state, x, **given)
    for state in ((of_adam, *rest), (of_nu, of_spa)):
        with pytest.raises(ValueError, match=r"`count`.* got \[8, 9\]"):
            convert(state, x, **given, count=8)


def test_injected_hyperparameters_must_be_those_of_the_other_optimizer() -> None:
    x = jnp.ones(2)
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.2, momentum=0.9)
    _, state = run(sgd, x, [x])
    tx = spa_from_sgdm(0.2, 0.9)
    for other, name in (
        (SGDMHyperparams(0.1, 0.9), "learning_rate"),
        (SGDMHyperparams(0.2, 0.8), "momentum"),
    ):
        with pytest.raises(
            ValueError, match=f"`hyperparams`.*{name}.*0\\.[29].*got 0\\.[18]"
        ):
            convert(state, x, into=tx.init(x), hyperparams=other)
    convert(state, x, into=tx.init(x), hyperparams=SGDMHyperparams(0.2, 0.9))
    convert(state, x, into=tx.init(x), hyperparams=SGDMHyperparams(lambda k: 0.2, 0.9))
    with pytest.raises(
        ValueError, match=r"`hyperparams`.*learning_rate"
    ):  # by four ulps
        convert(
            state,
            x,
            into=tx.init(x),
            hyperparams=SGDMHyperparams(0.2 * (1 + 4e-7), 0.9),
        )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_injected_hyperparameters_are_compared_in_their_dtype(dtype: Any) -> None:
    """A decay near 1, and a small ε, must not pass for another; rounding may."""
    x = jnp.ones(2)
    make = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=dtype)
    with jax.numpy_dtype_promotion("standard"):
        _, state = run(make(1e-3, b2=0.98, eps=1e-10), x, [x])
    tx = spa_adamw(1e-3)
    convert(
        state,
        x,
        into=tx.init(x),
        hyperparams=AdamWHyperparams(1e-3, b2=0.98, eps=1e-10),
    )
    for other, name in (
        (AdamWHyperparams(1e-3, b2=0.999, eps=1e-10), "b2"),
        (AdamWHyperparams(1e-3, b2=0.98, eps=1e-8), "eps"),
    ):
        with pytest.raises(ValueError, match=f"`hyperparams`.*{name}.*got"):
            convert(state, x, into=tx.init(x), hyperparams=other)


def test_an_injected_integer_is_a_number() -> None:
    x = jnp.ones(2)
    inject = optax.inject_hyperparams
    _, state = run(inject(optax.sgd)(1, momentum=0.5), x, [x])
    tx = spa_from_sgdm(1.0, momentum=0.5)
    convert(state, x, into=tx.init(x), hyperparams=SGDMHyperparams(1, 0.5))
    with pytest.raises(ValueError, match=r"`hyperparams`.*learning_rate.*got 2"):
        convert(state, x, into=tx.init(x), hyperparams=SGDMHyperparams(2, 0.5))
    tx = inject(spa)(1)
    _, state = run(tx, x, [x])
    chex.assert_trees_all_equal(convert(state, x, into=tx.init(x)), state)


# The family.


def test_a_run_at_y_does_not_go_on_in_optax() -> None:
    y = jnp.ones(2)
    cases = (
        (spa(0.1, 0.05, 0.9), optax.sgd(0.1, 0.9), SGDMHyperparams(0.1, 0.9)),
        (spa_adamw(0.1, 0.05, 0.9), optax.adam(0.1), AdamWHyperparams(0.1)),
    )
    for old, new, other in cases:
        _, state = run(old, y, [jnp.array([1.0, -2.0])])
        with pytest.raises(ValueError, match=r"`old_state`.*interpolation of 1.* 0.9"):
            convert(state, y, into=new.init(y), hyperparams=other)


def test_a_run_of_sgd_goes_on_at_y() -> None:
    """From the equations of `spa`, with z where the momentum would come to rest."""
    alpha, beta, mu_y, num_steps = 0.1, 0.5, 0.8, 3
    eta, c = alpha / (1 - beta), 1 - beta
    x = m = np.zeros(2)
    gradients = np.random.default_rng(0).normal(size=(2 * num_steps, 2))
    for g in gradients[:num_steps]:
        m = beta * m + g
        x = x - alpha * m
    z, y = x - beta * eta * m, x
    for g in gradients[num_steps:]:
        z = z - eta * g
        x = (1 - c) * x + c * z
        y = mu_y * x + (1 - mu_y) * z
    with x64():
        at_x, state = run(
            optax.sgd(alpha, beta), jnp.zeros(2), list(gradients[:num_steps])
        )
        tx = spa(eta, c, mu_y)
        state = convert(
            state,
            at_x,
            into=tx.init(at_x),
            hyperparams=SGDMHyperparams(alpha, beta),
            count=num_steps,
        )
        at_y, state = run(tx, at_x, list(gradients[num_steps:]), state)
        np.testing.assert_allclose(at_y, y, rtol=0, atol=1e-14)
        np.testing.assert_allclose(eval_params(state, at_y), x, rtol=0, atol=1e-14)


def test_adamw_goes_on_below_an_interpolation_of_1() -> None:
    """x and z step as at an interpolation of 1. The params go between them."""
    x, adam = jnp.array([1.0, -2.0]), optax.adam(0.1)
    x, state = run(adam, x, [jnp.cos(x)] * 3)
    found = {}
    for mu_y in (1.0, 0.9):
        tx = spa_adamw(0.1, 0.1, mu_y)
        other = AdamWHyperparams(0.1)
        moved = convert(state, x, into=tx.init(x), hyperparams=other)
        chex.assert_trees_all_equal(eval_params(moved, x), x)
        y, after = run(tx, x, [jnp.sin(x)], state=moved)
        z = optax.tree.get(after, "z")
        found[mu_y] = eval_params(after, y), z
        expected = mu_y * found[mu_y][0] + (1 - mu_y) * z
        chex.assert_trees_all_close(y, expected, rtol=1e-6)
    chex.assert_trees_all_close(found[0.9], found[1.0], rtol=1e-6)


def test_z_takes_the_dtype_of_another_member() -> None:
    """As z − x, rounded to nearest, with all else as it was."""
    params, old = jnp.array([1.0, -2.0, 3.0]), spa(0.5, 0.25)
    x, state = run(old, params, [jnp.cos(params)] * 3)
    tx = spa(0.5, 0.25, state_dtype=jnp.bfloat16, rounding_key=KEY)
    moved = convert(state, x, into=tx.init(x))
    stored = moved.z.z_minus_params
    np.testing.assert_array_equal(stored, (state.z - x).astype(jnp.bfloat16))
    chex.assert_trees_all_equal(moved._replace(z=state.z), state)
    same = convert(state, x, into=spa_from_sgdm(0.125, 0.75).init(x))
    chex.assert_trees_all_equal(same, state)
    back = convert(moved, x, into=old.init(x))
    np.testing.assert_array_equal(back.z, x + stored.astype(jnp.float32))


def test_what_a_narrow_z_cannot_hold_is_told() -> None:
    x = jnp.ones(2)
    _, state = run(spa(100.0, 0.001), x, [x])  # z is at −99
    x = x - 0.1
    narrow = spa(1.0, state_dtype=jnp.float8_e4m3fn, rounding_key=KEY)
    with pytest.warns(UserWarning, match="`into` should hold z.*at its root"):
        convert(state, x, into=narrow.init(x))
    near = spa(1.0).init(x)._replace(z=x - 1, w=jnp.ones([]))
    convert(near, x, into=narrow.init(x))


def test_params_cast_to_16_bits_keep_their_digits_in_z() -> None:
    """Before the first step too, as in fine-tuning a float32 checkpoint."""
    x = jnp.array([1.001, -2.002, 3.003])
    y = x.astype(jnp.bfloat16)
    tx = spa(0.1, rounding_key=KEY)
    _, later = run(tx, x, [jnp.cos(x)])
    for state in (tx.init(x), later):
        moved = convert(state, x, into=tx.init(y), new_params=y)
        np.testing.assert_array_equal(z_of(moved, y), state.z)
    replaced = x + 1  # z is that of the params
    moved = convert(tx.init(x), replaced, into=tx.init(y), new_params=y)
    np.testing.assert_array_equal(z_of(moved, y), replaced)


def test_a_schedule_of_the_interpolation_may_begin_at_1() -> None:
    """Unlike `into`, which is at its first step, the run may be below."""

    def mu_y(count: Any) -> Any:
        return jnp.where(count < 2, 1.0, 0.5)

    y, state = run(spa(0.5, 0.25, mu_y), jnp.ones(2), [jnp.ones(2)] * 3)
    narrow = spa(0.5, 0.25, mu_y, state_dtype=jnp.bfloat16, rounding_key=KEY)
    assert convert(state, y, into=narrow.init(y)).mu_y == state.mu_y == 0.5


# AdamW.

ADAM: Any = {"b2": 0.999, "eps": 1e-6}
LOSS = logistic_regression(jnp.float32)
CLIP = optax.clip_by_global_norm(1.0)


def rate(count: Any) -> Any:
    """It rises until step 200 and falls thereafter."""
    return 0.1 * helpers.WARMUP_COSINE(count)


ADAMW = optax.chain(CLIP, optax.adamw(rate, **ADAM, weight_decay=0.01))
OTHER = AdamWHyperparams(rate, **ADAM)


def loss(params: Any, batch: Any) -> Any:
    return LOSS(params["w"] + params["b"], batch)


def start(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.full((65, 10), 0.1, dtype), "b": jnp.zeros((1, 10), dtype)}


def after(tx: Any, num_steps: int) -> Any:
    """The params and the state after so many steps."""
    return trained(tx, jax.grad(loss), start(), helpers.batches()[:num_steps])


@pytest.mark.parametrize("num_steps", [1, 50])
def test_the_momentum_of_the_next_step_is_adamws(num_steps: int) -> None:
    """Without a gradient that step is momentum alone. AdamW divides it by the next
    √ν̂.
    """
    given: Any = {"learning_rate": 0.1, "b2": 0.99, "eps": 0.0}
    with x64():
        x, g = jnp.arange(5.0), jnp.array([1.0, -2.0, 0.5, 3.0, 4.0])
        adam = optax.adamw(**given, weight_decay=0.0)
        tx = spa_adamw(**given, weight_decay=0.0)
        x, state = run(adam, x, [g] * num_steps)
        new = convert(state, x, into=tx.init(x), hyperparams=AdamWHyperparams(**given))
        expected, _ = adam.update(jnp.zeros(5), state, x)
        found, _ = tx.update(jnp.zeros(5), new, x)

    def bias(k: int) -> float:
        return 1 - 0.99**k

    ratio = np.sqrt(0.99 * bias(num_steps) / bias(num_steps + 1))
    # Scalars are kept as float32.
    np.testing.assert_allclose(found, np.asarray(expected) * ratio, rtol=1e-6)


def test_adamw_there_and_back() -> None:
    """With the moments that it had."""
    params, state = after(ADAMW, 300)
    tx = optax.chain(CLIP, spa_adamw(rate, **ADAM))
    moved = convert(state, params, into=tx.init(params), hyperparams=OTHER)
    back = convert(moved, params, into=ADAMW.init(params), hyperparams=OTHER)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, state)
    old, new = (optax.tree.get(s, "nu") for s in (state, back))
    chex.assert_trees_all_equal(new, old)
    old, new = (optax.tree.get(s, "mu") for s in (state, back))
    # x − z is rounded to that of x, of up to 1, over w, of about 0.2.
    assert helpers.relative_difference(new, old) < 1e-4


@pytest.mark.slow
def test_leaves_of_all_kinds() -> None:
    """Vectors, scalars, stacks of matrices, integers, and a dtype of 16 bits."""
    params = {
        "stack": jnp.ones((2, 12, 11)),
        "vector": jnp.ones(30, jnp.bfloat16),
        "one": jnp.ones(1),
        "scalar": jnp.array(2.0),
        "count": jnp.arange(3),
    }
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(float)).astype(p.dtype), params)
    old, new = optax.adamw(0.1, **ADAM), spa_adamw(0.1, **ADAM, rounding_key=KEY)
    _, state = old.update(grads, old.init(params), params)
    into, other = new.init(params), AdamWHyperparams(0.1, **ADAM)
    moved = convert(state, params, into=into, hyperparams=other)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, into)
    new.update(grads, moved, params)
    back = convert(moved, params, into=old.init(params), hyperparams=other)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, old.init(params))
    for name in ("mu", "nu"):
        found, expected = (optax.tree.get(s, name) for s in (back, state))
        for key in ("stack", "one", "scalar"):
            np.testing.assert_allclose(found[key], expected[key], rtol=1e-5)


@pytest.mark.parametrize("averaging", [None, 0.2])
def test_z_of_injected_adamw(averaging: float | None) -> None:
    """z = x − η (1 − c)/c · m / (1 − β₁^(k+1)) / (√ν̂ + ε)."""
    old = optax.inject_hyperparams(optax.adamw)(rate, **ADAM)
    new = optax.inject_hyperparams(spa_adamw)(rate, averaging or 0.1, **ADAM)
    params, state = after(old, 20)
    into = new.init(params)
    moved = convert(state, params, into=into, hyperparams=OTHER, averaging=averaging)
    chex.assert_trees_all_equal_structs(moved, into)
    c = averaging or 0.1
    m, nu = (optax.tree.get(state, name)["w"] for name in ("mu", "nu"))
    d = m / (1 - 0.9**21) / (np.sqrt(nu / (1 - 0.999**20)) + 1e-6)
    expected = params["w"] - float(rate(20)) * (1 - c) / c * d
    found = optax.tree.get(moved, "z")["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16])
def test_a_first_moment_of_16_bits_and_a_master_copy(state_dtype: Any) -> None:
    """z takes over from the float32 copy, and not from the params that it was rounded
    to.
    """
    tx = optax.adamw(rate, mu_dtype=jnp.bfloat16, **ADAM)
    master, state = after(tx, 50)
    params = optax.tree.cast(master, jnp.bfloat16)
    new = spa_adamw(rate, **ADAM, state_dtype=state_dtype, rounding_key=KEY)
    into = new.init(params)
    moved = convert(state, master, into=into, hyperparams=OTHER, new_params=params)
    chex.assert_trees_all_equal_shapes_and_dtypes(moved, into)
    m, nu = (optax.tree.get(state, name)["w"] for name in ("mu", "nu"))
    bias = 1 - 0.9**51
    d = m.astype(float) / bias / (np.sqrt(nu / (1 - 0.999**50)) + 1e-6)
    exact = master["w"] - 9 * float(rate(50)) * d
    y = params["w"].astype(float)
    rtol, atol = (1e-5, 1e-6) if state_dtype is None else (2**-8, 2**-16)
    found = z_of(moved, params)["w"] - y
    np.testing.assert_allclose(found, exact - y, rtol=rtol, atol=atol)


def test_states_of_nnx_move() -> None:
    """There and back, as those without nnx do."""
    old, new = optax.adamw(rate, **ADAM), spa_adamw(rate, 0.1, **ADAM)
    model = nnx.Linear(20, 10, rngs=nnx.Rngs(0))
    optimizer, other = (nnx.Optimizer(model, tx, wrt=nnx.Param) for tx in (old, new))

    def loss(model: Any) -> Any:
        return jnp.mean((model(jnp.ones((2, 20))) - 1) ** 2)

    optimizer.update(model, nnx.grad(loss)(model))
    of_model = nnx.state(model, nnx.Param)
    params = nnx.to_pure_dict(of_model)
    leaves = jax.tree.leaves(optimizer.opt_state)
    plain = jax.tree.unflatten(jax.tree.structure(old.init(params)), leaves)
    moved = convert(
        optimizer.opt_state, of_model, into=other.opt_state, hyperparams=OTHER
    )
    expected = convert(plain, params, into=new.init(params), hyperparams=OTHER)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (moved, expected)))
    back = convert(moved, of_model, into=optimizer.opt_state, hyperparams=OTHER)
    expected = convert(expected, params, into=old.init(params), hyperparams=OTHER)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (back, expected)))


def test_before_the_first_step() -> None:
    x, adam, tx = start(), optax.adamw(rate), spa_adamw(rate)
    old, new = adam.init(x), tx.init(x)
    chex.assert_trees_all_equal(convert(old, x, into=new, hyperparams=OTHER), new)
    chex.assert_trees_all_equal(convert(new, x, into=old, hyperparams=OTHER), old)
    replaced = jax.tree.map(lambda leaf: leaf + 1, x)  # has no momentum either
    chex.assert_trees_all_equal(
        convert(new, replaced, into=old, hyperparams=OTHER), old
    )
    narrow = spa_adamw(rate, state_dtype=jnp.bfloat16, rounding_key=KEY).init(replaced)
    chex.assert_trees_all_equal(convert(new, replaced, into=narrow), narrow)


# What is refused.


def test_a_rate_of_0_holds_no_momentum() -> None:
    """That of AdamW, after three steps, would be lost."""

    def rate(count: Any) -> Any:
        return jnp.where(count == 3, 0.0, 0.1)

    x, tx = jnp.ones(2), spa_adamw(rate)
    _, state = run(optax.adamw(rate), x, [x] * 3)
    with pytest.raises(ValueError, match=r"`learning_rate` must be > 0.* 0.0"):
        convert(state, x, into=tx.init(x), hyperparams=AdamWHyperparams(rate))
    other = AdamWHyperparams(0.1)
    with pytest.raises(ValueError, match=r"`averaging`.* must be > 0.* 0.0"):
        convert(state, x, into=tx.init(x), hyperparams=other, averaging=lambda _: 0.0)


ADAMW_NAME = r"`hyperparams` must be `AdamWHyperparams\(.*, got "
SGDM_NAME = r"`hyperparams` must be `SGDMHyperparams\(.*, got "
BOTH_SIDES = 'second_moment="full"'
SPA, SPA_ADAMW = spa(0.1), spa_adamw(0.1)
SGD, ADAM_TX = optax.sgd(decaying, 0.9), optax.adamw(decaying)
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no momentum": (optax.sgd(decaying), SPA, {}, "`old_state` must hold .* momentum"),
    "into no momentum": (SPA, optax.sgd(decaying), {}, "`into` must hold .* momentum"),
    "two": (
        optax.chain(ADAM_TX, ADAM_TX),
        SPA_ADAMW,
        {},
        "`old_state` must hold one .* got 2",
    ),
    "into two": (SPA, optax.chain(SPA, SPA), {}, "`into` must hold one .* got 2"),
    "sgd to adamw": (SGD, ADAM_TX, {}, "`into` must hold only .* `ScaleByAdamState`"),
    "adamw to sgd": (ADAM_TX, SGD, {}, "`into` must hold only .* `TraceState`"),
    "sgd to spa_adamw": (
        SGD,
        SPA_ADAMW,
        {"hyperparams": SGDMHyperparams(0.1, 0.9)},
        "`into` must hold",
    ),
    "spa_adamw to sgd": (SPA_ADAMW, SGD, {}, "none for its `ScaleByRmsWithCountState`"),
    "adamw to spa": (ADAM_TX, SPA, {"hyperparams": AdamWHyperparams(0.1)}, BOTH_SIDES),
    "spa to adamw": (SPA, ADAM_TX, {"hyperparams": AdamWHyperparams(0.1)}, BOTH_SIDES),
    "two second moments": (
        ADAM_TX,
        optax.chain(SPA_ADAMW, optax.scale_by_rms(bias_correction=True)),
        {"hyperparams": AdamWHyperparams(0.1)},
        BOTH_SIDES,
    ),
    "full to factored": (
        SPA_ADAMW,
        spa_adamw(0.1, second_moment="factored"),
        {},
        "`into` must hold only .* `FactoredState`",
    ),
    "adamw to an average": (
        ADAM_TX,
        primal_averaging(ADAM_TX, 0.1),
        {},
        "`primal_averaging`",
    ),
    "an unknown momentum": (
        optax.lion(decaying),
        SPA,
        {},
        "got `EmptyState`, `ScaleByLi",
    ),
    "float8": (
        float8_momentum(SGD, KEY),
        SPA,
        {"hyperparams": SGDMHyperparams(0.1, 0.9)},
        "`old_state` must have leaves .* each",
    ),
    "a wrapper": (
        optax.lookahead(SPA, 2, 0.5),
        SPA,
        {"count": 0},
        "`old_state` must hold .* got `LookaheadState`",
    ),
    "a transform": (SPA, SPA, {"into": SPA}, "`into` must hold .*TransformationExtra"),
    "no other": (SGD, SPA, {}, SGDM_NAME + "None"),
    "no other for adamw": (ADAM_TX, SPA_ADAMW, {}, ADAMW_NAME + "None"),
    "no other to adamw": (SPA_ADAMW, ADAM_TX, {}, ADAMW_NAME + "None"),
    "adamw for sgd": (
        SGD,
        SPA,
        {"hyperparams": AdamWHyperparams(0.1)},
        SGDM_NAME + "AdamW",
    ),
    "sgd for adamw": (
        ADAM_TX,
        SPA_ADAMW,
        {"hyperparams": SGDMHyperparams(0.1, 0.9)},
        ADAMW_NAME + "SGDMHyperparams",
    ),
    "a tuple": (
        SGD,
        SPA,
        {"hyperparams": (0.1, 0.9)},
        r"`hyperparams`.* got \(0.1, 0.9\)",
    ),
    "an optimizer": (SGD, SPA, {"hyperparams": SGD}, "`hyperparams`.* got Gradient"),
    "rate": (
        SGD,
        SPA,
        {"hyperparams": SGDMHyperparams(-0.1, 0.9)},
        "`learning_rate`.* -0.1",
    ),
    "momentum": (
        SGD,
        SPA,
        {"hyperparams": SGDMHyperparams(0.1, 1.0)},
        "`momentum`.* 1.0",
    ),
    "nesterov": (
        SGD,
        SPA,
        {"hyperparams": SGDMHyperparams(0.1, 0.9, "no")},
        "`nesterov`.* 'no'",
    ),
    "b1": (
        ADAM_TX,
        SPA_ADAMW,
        {"hyperparams": AdamWHyperparams(0.1, 1.0)},
        "`b1`.* 1.0",
    ),
    "b2": (
        ADAM_TX,
        SPA_ADAMW,
        {"hyperparams": AdamWHyperparams(0.1, b2=-0.5)},
        "`b2`.* -0.5",
    ),
    "eps": (
        ADAM_TX,
        SPA_ADAMW,
        {"hyperparams": AdamWHyperparams(0.1, eps=-1.0)},
        "`eps`.* -1.0",
    ),
    "averaging": (
        ADAM_TX,
        SPA_ADAMW,
        {"hyperparams": AdamWHyperparams(0.1), "averaging": 1.5},
        "`averaging`.* 1.5",
    ),
    "count": (SGD, SPA, {"count": -1}, "`count`.* -1"),
    "a float as count": (SGD, SPA, {"count": 1.0}, "`count`.* 1.0"),
    "new_params": (SPA, SPA, {"new_params": {"w": 1.0}}, "`new_params`.*'b'"),
    "other shapes of params": (
        SPA,
        SPA,
        {"new_params": {"w": jnp.ones(3), "b": jnp.zeros((1, 10))}},
        r"`new_params`.*\(3,\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    old, new, given, match = REFUSED[name]
    x = start()
    of_old = optax.LookaheadParams(x, x) if name == "a wrapper" else x
    given = {"into": new.init(x), **given}
    with pytest.raises(ValueError, match=match):
        helpers.unchecked(convert)(old.init(of_old), x, **given)


def test_params_of_another_model_are_refused() -> None:
    x = start()
    for params in ({"w": x["w"]}, {"w": x["b"], "b": x["b"]}):
        with pytest.raises(ValueError, match="`old_state` must have leaves"):
            convert(SPA.init(x), params, into=SPA.init(params))
    narrower = {"w": x["b"], "b": x["b"]}
    with pytest.raises(ValueError, match="`into` must have leaves"):
        convert(SPA.init(x), x, into=SPA.init(narrower))


@flax.struct.dataclass
class Fisher:
    value: Any


@flax.struct.dataclass
class Mean:
    value: Any


def chain_of(*states: Any) -> Any:
    """Transformations with these states, which do nothing, and `SPA`."""
    as_arrays = [jax.tree.map(jnp.asarray, state) for state in states]
    txs = [
        optax.GradientTransformation(
            lambda _, state=state: state, lambda u, state, params=None: (u, state)
        )
        for state in as_arrays
    ]
    return optax.chain(*txs, SPA)


def copied(old: tuple[Any, ...], new: tuple[Any, ...]) -> list[Any]:
    """What `convert` makes of the states."""
    x = start()
    result = convert(chain_of(*old).init(x), x, into=chain_of(*new).init(x))
    return list(result[:-1])


def test_arrays_outside_of_named_tuples_are_found_by_their_names() -> None:
    """Of fields, with their types, and of keys, wherever in the chain they are."""
    tree = {"w": 1.0}
    for old, new in (
        ((Fisher(7.0), Mean(8.0)), (Mean(0.0), Fisher(0.0))),
        (({"m": 7.0}, {"n": 8.0}), ({"n": 0.0}, {"m": 0.0})),
        (({"mu": tree}, {"nu": {"w": 2.0}}), ({"nu": tree}, {"mu": tree})),
    ):
        expected = [jax.tree.map(jnp.asarray, state) for state in reversed(old)]
        chex.assert_trees_all_equal(copied(old, new), expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"m": 7.0, "n": 8.0}, {"l": 0.0, "m": 0.0}),
        ({"m": 7.0, "v": 8.0}, {"m": 0.0}),
        (Fisher(7.0), Mean(0.0)),
        ({"mu": {"w": 7.0}}, {"variance": {"w": 0.0}}),
    ],
)
def test_arrays_without_counterpart_are_refused(old: Any, new: Any) -> None:
    with pytest.raises(ValueError, match="`into` must hold"):
        copied((old,), (new,))


def test_a_state_in_a_dataclass_is_converted() -> None:
    """z keeps what the cast cuts off."""
    x = {"w": jnp.full(4, 1.003)}
    y = optax.tree.cast(x, jnp.bfloat16)
    tx = spa(0.1, 0.1, state_dtype=jnp.bfloat16, rounding_key=KEY)
    new = convert(Mean(tx.init(x)), x, into=Mean(tx.init(y)), new_params=y)
    z = y["w"].astype(jnp.float32) + new.value.z.z_minus_params["w"]
    np.testing.assert_allclose(z, x["w"], rtol=1e-5)


def test_traced_calls_and_batches_are_refused() -> None:
    x = start()
    xs = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), x)
    state, into = ADAM_TX.init(x), SPA_ADAMW.init(x)

    def move(state: Any, rate: Any = 0.1) -> Any:
        return convert(state, x, into=into, hyperparams=AdamWHyperparams(rate))

    def move_with_rate(rate: Any) -> Any:
        return move(state, rate)

    for call, argument in (
        (jax.jit(move), state),
        (jax.jit(move_with_rate), 0.1),
        (jax.vmap(move), jax.vmap(ADAM_TX.init)(xs)),
        (move, jax.eval_shape(ADAM_TX.init, x)),
    ):
        with pytest.raises(ValueError, match=r"`old_state`.* `jax.jit`"):
            call(argument)
    batch = jax.vmap(SPA_ADAMW.init)(xs)
    with pytest.raises(ValueError, match="`old_state` must hold the arrays of one run"):
        convert(
            jax.vmap(ADAM_TX.init)(xs),
            xs,
            into=batch,
            hyperparams=AdamWHyperparams(0.1),
        )
    batch = jax.vmap(SPA.init)(xs)
    with pytest.raises(
        ValueError, match=r"`into` must hold the arrays of one run.* stack"
    ):
        convert(SGD.init(xs), xs, into=batch, hyperparams=SGDMHyperparams(0.1, 0.9))
    # What the message advises gives each run its own state.
    hyperparams = SGDMHyperparams(0.1, 0.9)

    def of_run(x: Any) -> Any:
        return convert(SGD.init(x), x, into=SPA.init(x), hyperparams=hyperparams)

    runs = [jax.tree.map(operator.itemgetter(i), xs) for i in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(of_run, runs))
    chex.assert_trees_all_equal_shapes(stacked, batch)


def test_a_count_that_was_cast_is_refused() -> None:
    """In bfloat16 1,001 steps are 1,000."""
    x = start()
    state = SPA.init(x)._replace(count=jnp.asarray(1_001, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"`old_state\.count`.*bfloat16"):
        convert(state, x, into=SPA.init(x))


def test_a_moved_state_shares_no_buffer() -> None:
    """So it can be donated, and the old one still be used."""

    def pointers(tree: Any) -> list[int]:
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]

    x = start()
    sgd = optax.inject_hyperparams(optax.sgd)(rate, 0.9)
    counts = optax.chain(optax.scale_by_schedule(rate), spa_from_sgdm(rate, 0.9))
    adam, new = optax.adamw(rate), spa_adamw(rate)
    cases = (
        (sgd, counts, SGDMHyperparams(rate, 0.9)),
        (counts, sgd, None),
        (adam, new, AdamWHyperparams(rate)),
        (new, adam, AdamWHyperparams(rate)),
        (new, new, None),
        (sgd, sgd, None),
    )
    for old, tx, other in cases:
        _, state = old.update(x, old.init(x), x)
        arguments = (state, x, tx.init(x))
        moved = convert(state, x, into=arguments[2], hyperparams=other)
        assert len(set(pointers(moved))) == len(pointers(moved))
        assert not set(pointers(moved)) & set(pointers(arguments))
        jax.jit(tx.update, donate_argnums=1)(x, moved, x)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments))


def test_a_state_that_began_to_average_in_mid_run() -> None:
    """As docs/primal_averaging.md fills it, with the count of the run."""
    params = {"w": jnp.ones(3)}
    base = optax.adamw(1e-2)
    old_state = run(base, params, [params] * 5)[1]
    wide = primal_averaging(base, 0.1, 0.4)
    state = wide.init(params)
    counted = state.spa_state._replace(count=jnp.int32(5))
    state = state._replace(base_state=old_state, spa_state=counted)
    params, state = run(wide, params, [params] * 3, state)
    narrow = primal_averaging(
        base, 0.1, 0.4, state_dtype=jnp.bfloat16, rounding_key=KEY
    )
    converted = convert(state, params, into=narrow.init(params))
    assert converted.spa_state.count == 8
    chex.assert_trees_all_equal(converted.base_state, state.base_state)
