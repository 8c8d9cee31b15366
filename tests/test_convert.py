"""Runs of SGD with momentum and of the family that move, and what else states may
hold."""

import re
from typing import Any, NamedTuple

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import logistic_regression, run, sgdm, slow, trained, x64

from spa_optax import (
    convert,
    float8_momentum,
    hyperparams_to_sgdm,
    in_float32,
    primal_averaging,
    scale_by_second_moment,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)
from spa_optax._core import Scalars, transformation

KEY = jax.random.key(0)
NUM_STEPS, BATCHES = 300, helpers.batches(300)
pytestmark = pytest.mark.usefixtures(
    "standard_promotion"
)  # dtypes meet in `MultiSteps`
# Evaluated once: Optax's cosine is in float32, which XLA rounds differently in the two
# runs.
ALPHA = helpers.evaluated(
    optax.warmup_cosine_decay_schedule(0.0, 0.3, 50, NUM_STEPS), NUM_STEPS
)


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-13), slow("float32", 2e-6)]
)
def test_states_move_in_the_middle_of_a_run(
    nesterov: bool, dtype: str, tolerance: float
) -> None:
    """At a random step of warm-up and cosine, to SPA and, later on, back: as if never
    moved."""
    there, back = sorted(
        np.random.default_rng(3).integers(20, NUM_STEPS - 20, 2).tolist()
    )
    with x64(dtype == "float64"):
        sgd = optax.chain(
            optax.clip_by_global_norm(1.0), optax.sgd(ALPHA, 0.9, nesterov)
        )
        tx = optax.chain(
            optax.clip_by_global_norm(1.0), spa_from_sgdm(ALPHA, 0.9, nesterov)
        )
        gradient, start = (
            jax.grad(logistic_regression(dtype)),
            jnp.zeros((65, 10), dtype),
        )
        never_moved, _ = trained(sgd, gradient, start, BATCHES)
        params, sgd_state = trained(sgd, gradient, start, BATCHES[:there])
        sgdm: Any = {"learning_rate": ALPHA, "momentum": 0.9, "nesterov": nesterov}
        state = convert(sgd_state, params, into=tx.init(params), **sgdm)
        assert state[1].count == there
        params, state = trained(tx, gradient, params, BATCHES[there:back], state)
        assert state[1].count == back
        sgd_state = convert(state, params, into=sgd.init(params))
        assert optax.tree.get(sgd_state, "count") == back
        params, _ = trained(sgd, gradient, params, BATCHES[back:], sgd_state)
        assert helpers.relative_difference(params, never_moved) < tolerance


@pytest.mark.parametrize(
    "new", [optax.sgd(0.05, 0.9), spa_from_sgdm(0.05, 0.9), spa(0.5, 0.1)]
)
def test_sgdm_inside_a_wrapper_moves_out_of_it(new: Any) -> None:
    """Its updates have the rate in them, and the wrapper's η is 1."""
    tx, x, grads = (
        primal_averaging(optax.sgd(0.5), 0.1),
        jnp.ones(2),
        list(jnp.eye(2)) * 3,
    )
    there, state = run(tx, x, grads)
    moved = convert(state, there, into=new.init(there), learning_rate=0.5)
    expected = run(tx, there, grads, state)[0]
    chex.assert_trees_all_close(run(new, there, grads, moved)[0], expected, rtol=1e-5)
    job: Any = {"learning_rate": 0.05, "momentum": 0.9, "count": 6}
    inside = convert(moved, there, into=tx.init(there), **job)
    home = convert(inside, there, into=new.init(there), learning_rate=0.5)
    chex.assert_trees_all_close(home, moved, rtol=1e-5)
    with pytest.raises(ValueError, match="`learning_rate` must be given"):
        convert(state, there, into=new.init(there))


def test_a_schedule_is_not_evaluated_before_count_0() -> None:
    noam = lambda k: 0.1 * jnp.minimum(k.astype(float) ** -0.5, k * 4**-1.5)
    sgd, tx, x = optax.sgd(noam, 0.9), spa_from_sgdm(noam, 0.9), jnp.ones(2)
    state = convert(
        sgd.init(x), x, into=tx.init(x), learning_rate=noam, momentum=0.9, count=0
    )
    chex.assert_trees_all_close(
        run(tx, x, [x] * 5, state)[0], run(sgd, x, [x] * 5)[0], rtol=1e-5
    )


def test_a_state_from_sgdm_is_as_foreseen() -> None:
    # The state that `spa_from_sgdm` would have had at the same step, and no
    # re-anchoring.
    tx, sgd = spa_from_sgdm(ALPHA, 0.9), optax.sgd(ALPHA, 0.9)
    gradient, start = jax.grad(logistic_regression("float32")), jnp.zeros((65, 10))
    _, native = trained(tx, gradient, start, BATCHES[:80])
    params, sgd_state = trained(sgd, gradient, start, BATCHES[:80])
    into = tx.init(params)
    moved = convert(sgd_state, params, into=into, learning_rate=ALPHA, momentum=0.9)
    chex.assert_trees_all_close(moved, native, rtol=1e-5, atol=1e-5)
    _, after = tx.update(jnp.zeros_like(params), moved, params)
    np.testing.assert_array_equal(after.z, moved.z)


INTO = {
    "chain": lambda tx: optax.chain(optax.clip(1e3), tx),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "partition": lambda tx: optax.partition(
        {"it": tx, "other": optax.set_to_zero()}, {"a": "it", "b": "other"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e3)), ("it", tx)),
}


@pytest.mark.parametrize("name", INTO)
def test_whole_states_move(name: str) -> None:
    """Into wrappers, and out of them: the run goes on as if it had never moved."""
    alpha = lambda k: 0.1 / (k + 1).astype(float)
    sgd, tx = INTO[name](optax.sgd(alpha, 0.5)), INTO[name](spa_from_sgdm(alpha, 0.5))
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    grads = [jax.tree.map(lambda p, k=k: jnp.cos(p + k), params) for k in range(12)]
    x, _ = run(sgd, params, grads)
    y, state = run(sgd, params, grads[:4])
    there = convert(state, y, into=tx.init(y), learning_rate=alpha, momentum=0.5)
    assert jax.tree.structure(there) == jax.tree.structure(tx.init(y))
    y, there = run(tx, y, grads[4:8], there)
    back = convert(there, y, into=sgd.init(y))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    y, _ = run(sgd, y, grads[8:], back)
    # Rounding of x − z over w ≥ 0.01, twice, in m; and of 12 steps.
    chex.assert_trees_all_close(y, x, atol=4 * 6e-8 / 0.01 * 0.1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (optax.sgd(0.1, 0.9), spa(0.1, 0.05, 0.9)),
        (spa(0.1, 0.05, 0.9), optax.sgd(0.1, 0.9)),
        (optax.adam(0.1), spa_adamw(0.1, 0.05, 0.9)),
        (optax.contrib.schedule_free_adamw(0.1), spa_adamw(0.1)),
        (spa_adamw(0.1), optax.contrib.schedule_free_adamw(0.1)),
        (
            spa_adamw(0.1, 0.05, 0.905),
            optax.contrib.schedule_free_adamw(0.1),
        ),  # whose b1 is 0.9
    ],
)
def test_x_and_y_as_params_do_not_mix(old: Any, new: Any) -> None:
    """Traced, a μ_y cannot raise: z, or the momentum, is NaN."""
    y = jnp.ones(2)
    _, state = run(old, y, [jnp.array([1.0, -2.0])])
    kwargs: Any = {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "count": 1,
        "adam": optax.adam(0.1),
    }
    move = lambda state, into: convert(state, y, into=into, **kwargs)
    with pytest.raises(
        ValueError, match="`into` must have the `interpolation` of `old_state`"
    ):
        move(state, new.init(y))
    moved, fields = jax.jit(move)(state, new.init(y)), ("z", "mu", "trace")
    assert any(np.isnan(optax.tree.get(moved, name, 0)).all() for name in fields)


def test_a_member_keeps_the_scalars_of_its_rule() -> None:
    def rule(state: Any, _: Any) -> Scalars:
        one, own = jnp.ones([]), {"s": state.rule_state["s"] + 1}
        return Scalars(one, one / 4, one, rule_state=own)

    x = jnp.ones(2)
    member = lambda dtype: transformation(
        rule, dtype, KEY, rule_state={"s": jnp.ones([])}
    )
    _, state = member(None).update(x, member(None).init(x), x)
    assert convert(state, x, into=member(jnp.bfloat16).init(x)).rule_state == {"s": 2}
    plain, sgd = spa(1.0).init(x), optax.sgd(0.1, 0.9).init(x)
    for old, into in ((state, plain), (plain, state), (state, sgd), (sgd, state)):
        with pytest.raises(
            ValueError, match=r"`into.rule_state` must have the structure of"
        ):
            convert(old, x, into=into, learning_rate=0.1, momentum=0.9, count=0)


def test_z_takes_the_dtype_of_another_member() -> None:
    """As z − x, rounded to nearest, with all else as it was."""
    params, old = jnp.array([1.0, -2.0, 3.0]), spa(0.5, 0.25)
    x, state = run(old, params, [jnp.cos(params)] * 3)
    tx = spa(0.5, 0.25, state_dtype=jnp.bfloat16, rounding_key=jax.random.key(0))
    moved = convert(state, x, into=tx.init(x))
    np.testing.assert_array_equal(moved.z.bfloat16, (state.z - x).astype(jnp.bfloat16))
    chex.assert_trees_all_equal(moved._replace(z=state.z), state)
    chex.assert_trees_all_equal(
        convert(state, x, into=spa_from_sgdm(0.125, 0.75).init(x)), state
    )
    back = convert(moved, x, into=old.init(x))
    np.testing.assert_array_equal(back.z, x + moved.z.bfloat16.astype(jnp.float32))


def test_the_new_optimizer_may_freeze_params() -> None:
    """Both ways. The others train on as before."""
    sgd, tx, label = (
        optax.sgd(0.1, 0.9),
        spa_from_sgdm(0.1, 0.9),
        {"a": "trained", "b": "frozen"},
    )
    some = lambda tx: optax.partition(
        {"trained": tx, "frozen": optax.set_to_zero()}, label
    )
    x, g = (
        {"a": jnp.ones(2), "b": jnp.ones(3)},
        {"a": jnp.array([1.0, -2.0]), "b": jnp.ones(3)},
    )
    x, old = run(sgd, x, [g])
    kwargs: Any = {"learning_rate": 0.1, "momentum": 0.9, "count": 1}
    y, _ = run(some(tx), x, [g], convert(old, x, into=some(tx).init(x), **kwargs))
    expected, old = run(sgd, x, [g], old)
    chex.assert_trees_all_close(y, {"a": expected["a"], "b": x["b"]}, rtol=1e-6)
    whole = convert(old, expected, into=tx.init(expected), **kwargs)
    back = convert(whole, expected, into=some(sgd).init(expected))
    trace, m = (optax.tree.get(state, "trace")["a"] for state in (old, back))
    np.testing.assert_allclose(m, trace, rtol=1e-5)


def test_a_count_that_no_state_holds_must_be_given() -> None:
    """The new optimizer may have a schedule, which would start over at the count of
    1."""
    x, sgd, tx = jnp.ones(2), optax.sgd(0.5, 0.5), spa_from_sgdm(0.5, 0.5)
    move = lambda state, into=tx, **kwargs: convert(
        state, x, into=into.init(x), **{"learning_rate": 0.5, "momentum": 0.5, **kwargs}
    )
    chex.assert_trees_all_equal(move(sgd.init(x)), tx.init(x))
    _, state = sgd.update(x, sgd.init(x))
    for into in (
        tx,
        optax.sgd(lambda _: 0.5, 0.5),
        optax.inject_hyperparams(optax.sgd)(0.5, 0.5),
    ):
        for either in (move, jax.jit(move, static_argnums=1)):
            with pytest.raises(
                ValueError, match="`count` must be given where `old_state`"
            ):
                either(state, into)
    assert move(state, count=7).count == 7
    _, counted = run(optax.sgd(lambda _: 0.5, 0.5), x, [x] * 3)
    with pytest.raises(ValueError, match="or be one of several"):
        move(counted, count=7)
    with pytest.raises(
        ValueError, match="`count` must be >= 1 where `old_state` holds momentum"
    ):
        move(state, count=0)
    chex.assert_trees_all_equal(
        move(state, sgd, count=7), state
    )  # where nothing counts
    # Wrappers count too.
    for wrap in (
        lambda tx: optax.MultiSteps(tx, 1),
        lambda tx: stochastic_rounding(tx, KEY),
    ):
        _, state = run(wrap(sgd), x, [x] * 3)
        assert move(state).count == 3


def test_counts_that_differ_are_refused() -> None:
    """As after a restart of a schedule alone. Traced, they give NaN."""
    x, rate = jnp.ones(2), optax.cosine_decay_schedule(0.1, 100)
    adam, tx = optax.adamw(rate), spa_adamw(rate)
    (*first, of_rate), (of_nu, of_spa) = (run(a, x, [x] * 9)[1] for a in (adam, tx))
    for state in (
        (*first, of_rate._replace(count=0)),
        (of_nu, of_spa._replace(count=0)),
    ):
        move = lambda state: convert(
            state, x, into=tx.init(x), adam=adam, learning_rate=rate
        )
        with pytest.raises(
            ValueError, match=r"another must hold one, got \[[09], [09]\]"
        ):
            move(state)
        assert np.isnan(jax.jit(move)(state)[1].z).all()
    with pytest.raises(ValueError, match=r"another must hold one, got \[9, 9, 0\]"):
        convert((of_nu, of_spa), x, into=tx.init(x), count=0)


def test_a_rate_of_0_holds_no_momentum() -> None:
    """That of AdamW, after three steps, would be lost."""
    x, rate = jnp.ones(2), lambda k: jnp.where(k == 3, 0.0, 0.1)
    adam, tx = optax.adamw(rate), spa_adamw(rate)
    _, state = run(adam, x, [x] * 3)
    with pytest.raises(ValueError, match=r"`learning_rate` must be > 0, .* and 0.0"):
        convert(state, x, into=tx.init(x), adam=adam, learning_rate=rate)


def test_a_schedule_of_the_interpolation_may_begin_at_1() -> None:
    """Unlike `into`, which is at its first step, the run may be below."""
    mu_y = lambda k: jnp.where(k < 2, 1.0, 0.5)
    y, state = run(spa(0.5, 0.25, mu_y), jnp.ones(2), [jnp.ones(2)] * 3)
    narrow = spa(0.5, 0.25, mu_y, state_dtype=jnp.bfloat16, rounding_key=KEY)
    assert convert(state, y, into=narrow.init(y)).mu_y == state.mu_y == 0.5


def test_spa_states_convert_too() -> None:
    """`spa` keeps the w of its z, so that SGD+M can take over from it."""
    with x64():
        g, x = jnp.array([1.0, -2.0]), jnp.ones(2)
        rate = lambda k: 2.0 - k.astype(float) / 10
        x, state = run(spa(rate, 0.25), x, [g] * 5)
        _, sgd_state = run(sgdm(*hyperparams_to_sgdm(rate, 0.25)), jnp.ones(2), [g] * 5)
        into = optax.trace(0.75).init(x)
        trace = optax.tree.get(sgd_state, "trace")
        np.testing.assert_allclose(convert(state, x, into=into).trace, trace, rtol=1e-6)
        # At c = 1 there is none.
        _, state = spa(1.0, 1.0).update(g, state, x)
        np.testing.assert_array_equal(convert(state, x, into=into).trace, jnp.zeros(2))


DIRECTIONS: dict[str, Any] = {
    "trace": lambda: optax.trace(0.9),
    "float8": lambda: float8_momentum(optax.trace(0.9), jax.random.key(0)),
    "adam": optax.scale_by_adam,
    "outside a base": lambda: optax.chain(optax.ema(0.9), optax.clip(1.0)),
    "unbiased rms": lambda: optax.scale_by_rms(0.9, bias_correction=True),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "in_float32": lambda: in_float32(scale_by_second_moment(0.9)),
    "noise": lambda: optax.add_noise(0.1, 0.55, jax.random.key(1)),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_directions_in_a_chain_are_kept(name: str) -> None:
    """The run goes on as if nothing had happened, or `convert` refuses."""
    last = (
        primal_averaging(optax.sgd(0.1, 0.9), 0.5) if "base" in name else spa(0.1, 0.5)
    )
    tx, x = optax.chain(DIRECTIONS[name](), last), jnp.ones((3, 2))
    g = jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]])
    x, state = run(tx, x, [g * (k + 1) for k in range(5)])
    moved = convert(state, x, into=tx.init(x))
    chex.assert_trees_all_equal(tx.update(g, moved, x), tx.update(g, state, x))
    for old, into in ((state, last.init(x)), (last.init(x), tx.init(x))):
        with pytest.raises(
            ValueError, match=r"must have the other states of|second moment"
        ):
            convert(old, x, into=into)


GRADS = [jnp.cos(jnp.arange(6.0) + k).reshape(3, 2) for k in range(12)]


class Custom(NamedTuple):
    buffer: Any


of_init = lambda init: optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
UNKNOWN: dict[str, tuple[Any, str]] = {
    "custom": (of_init(Custom), "`Custom` at [0]"),
    "bare array": (of_init(lambda params: params), "`ArrayImpl` at [0]"),
    "named a base": (
        optax.named_chain(("my.base", of_init(Custom))),
        "`Custom` at [0]['my.base']",
    ),
    "where params are": (optax.contrib.cocob(), "`COCOBState` at [0]"),
    "wrapper": (optax.contrib.mechanize(optax.sgd(0.1)), "`MechanicState` at [0]"),
    "inside": (
        optax.masked(optax.lookahead(optax.sgd(0.1), 2, 0.5), True),
        "`LookaheadState` at [0].inner_state",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_states_are_refused(name: str) -> None:
    """In both states, with type and path; but a base optimizer may hold them."""
    (unknown, at), x = UNKNOWN[name], jnp.ones(3)
    params = optax.LookaheadParams(x, x) if name == "inside" else x
    full, plain = (unknown.init(params), spa(0.1).init(x)), spa(0.1).init(x)
    for old, into, which in ((full, full, "old_state"), (plain, full, "into")):
        match = re.escape(
            f"`{which}` must hold only states that `convert` knows, got a {at}"
        )
        with pytest.raises(ValueError, match=match):
            convert(old, x, into=into)
    if name != "inside":
        state = optax.contrib.schedule_free(unknown, 0.1, b1=0.9).init(x)
        base = optax.tree.ones_like(state.base_optimizer_state)
        state = state._replace(base_optimizer_state=base)
        wrapped = primal_averaging(unknown, 0.1, 0.9, params_of_base="z")
        moved = convert(state, x, into=wrapped.init(x))
        chex.assert_trees_all_equal(moved.base, base)


ACCUMULATING = lambda step: jnp.where(
    step < 2, 1, 3
)  # steps end at batches 1, 2, 5, 8, 11


@pytest.mark.parametrize("there", [1, 5, 6, 7])
def test_accumulation_goes_on(there: int) -> None:
    """Also in the middle of a step, with the schedule of its length."""
    rate = lambda k: 0.1 / (k + 1).astype(float)
    wrap = lambda tx: optax.MultiSteps(optax.apply_if_finite(tx, 2), ACCUMULATING)
    sgd, tx = optax.sgd(rate, 0.5), spa_from_sgdm(rate, 0.5)
    kwargs: Any = {"learning_rate": rate, "momentum": 0.5}
    x, state = run(wrap(sgd), jnp.ones((3, 2)), GRADS[:there])
    expected, _ = run(wrap(sgd), x, GRADS[there:], state)
    found, _ = run(
        wrap(tx), x, GRADS[there:], convert(state, x, into=wrap(tx).init(x), **kwargs)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    move = lambda state: convert(state, x, into=tx.init(x), **kwargs)
    if there in (1, 5):  # between steps it may end, or begin
        alone = move(state)
        assert alone.count == state.gradient_step
        again = convert(alone, x, into=wrap(sgd).init(x), **kwargs)
        assert again.gradient_step == state.gradient_step
        return
    with pytest.raises(ValueError, match=r"`into` must have the `optax.MultiSteps` of"):
        move(state)
    assert np.isnan(jax.jit(move)(state).z).all()
