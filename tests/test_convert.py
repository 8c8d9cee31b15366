"""Conversions both ways, of hyper-parameters and of states in the middle of a run."""

import re
from typing import Any, NamedTuple

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    apply,
    batches,
    evaluated,
    lenient,
    logistic_regression,
    optimized,
    relative_difference,
    sgdm,
    slow,
    table,
    x64,
)

from spa_optax import (
    SPAState,
    convert,
    eval_params,
    float8_momentum,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    in_float32,
    primal_averaging,
    reanchor,
    scale_by_second_moment,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
    theory,
)
from spa_optax._core import Scalars, transformation
from spa_optax._hyperparams import SGDMHyperparams, SPAHyperparams
from spa_optax._trees import find

KEY = jax.random.key(0)
schedule_free = lambda base: optax.contrib.schedule_free(base, 0.1, b1=0.9)


def test_numbers_in_numbers_out() -> None:
    assert hyperparams_from_sgdm(0.5, 0.75) == SPAHyperparams(2.0, 0.25)
    assert hyperparams_to_sgdm(2.0, 0.25) == SGDMHyperparams(0.5, 0.75)
    assert all(type(h) is float for h in hyperparams_from_sgdm(0.5, 0.75))
    assert hyperparams_from_sgdm(0.5, 0) == SPAHyperparams(0.5, 1)
    spa(*hyperparams_from_sgdm(0.1, 0.9))
    spa_from_sgdm(*hyperparams_to_sgdm(1.0, 0.1))


@pytest.mark.parametrize(
    "hyperparams",
    [
        hyperparams_from_sgdm(lambda k: jnp.where(k < 5, 0.1, 0.01), 0.9),
        hyperparams_from_sgdm(0.1, lambda k: jnp.where(k < 5, 0.9, 0.5)),
        hyperparams_to_sgdm(lambda k: jnp.where(k < 5, 0.1, 0.01), 0.1),
        hyperparams_to_sgdm(1.0, lambda k: jnp.where(k < 5, 0.1, 0.5)),
    ],
)
def test_schedules_in_schedules_out(hyperparams: Any) -> None:
    """Ordinary optax schedules: a Python int, an array, under jit, under vmap."""
    for schedule in hyperparams:
        counts = jnp.arange(10, dtype=jnp.int32)
        values = jax.jit(jax.vmap(schedule))(counts)
        for k in (0, 5):
            chex.assert_shape(schedule(k), ())
            np.testing.assert_allclose(schedule(k), values[k], rtol=1e-6)
        np.testing.assert_allclose(jax.jit(schedule)(counts[7]), values[7], rtol=1e-6)
        square = np.arange(10, dtype=np.int32).reshape(2, 5)  # an array of counts, for plotting
        np.testing.assert_allclose(schedule(square), np.reshape(values, (2, 5)), rtol=1e-6)
        joined = optax.join_schedules([optax.constant_schedule(2.0), schedule], [3])
        with jax.numpy_dtype_promotion("standard"):
            np.testing.assert_allclose(joined(5), values[2], rtol=1e-6)


def _numpy_look_ahead(alphas: np.ndarray, betas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """η and c by the backward recursion w_k = β_k (α_k + w_{k+1}), the last α and β for ever."""
    w = alphas[-1] * betas[-1] / (1 - betas[-1])
    eta = np.empty(len(alphas))
    for k in reversed(range(len(alphas))):
        eta[k] = alphas[k] + w
        w = betas[k] * eta[k]
    return eta, alphas / eta


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.99, 0.999])
def test_look_ahead_is_the_backward_recursion(momentum: float) -> None:
    rng = np.random.default_rng(0)
    alphas = np.where(np.arange(400) % 100 < 50, 0.1, 0.01) * rng.uniform(0.5, 2, 400)
    betas = np.full(400, momentum)
    eta, c = _numpy_look_ahead(alphas, betas)
    with x64():
        counts = jnp.arange(400, dtype=jnp.int32)
        for second in (momentum, table(jnp.asarray(betas))):
            from_sgdm = hyperparams_from_sgdm(table(jnp.asarray(alphas)), second, horizon=20_000)
            both = lambda k, h=from_sgdm: (h.learning_rate(k), h.averaging(k))
            found = optimized(lambda counts, f=both: jax.lax.map(f, counts))(counts)
            np.testing.assert_allclose(found[0], eta, rtol=1e-7)
            np.testing.assert_allclose(found[1], c, rtol=1e-7)
        # The default horizon leaves out less than β^H = 1e-8 of it.
        from_sgdm = hyperparams_from_sgdm(table(jnp.asarray(alphas)), momentum)
        np.testing.assert_allclose(jax.lax.map(from_sgdm.learning_rate, counts), eta, rtol=1e-7)


def test_c_anticipates_a_drop() -> None:
    # 10× at step 500, β = 0.9: w_k = 0.09 + (0.9 − 0.09)(1 − 0.9^(500 − k)), c = 0.1/(0.1 + w).
    c = hyperparams_from_sgdm(lambda k: jnp.where(k < 500, 0.1, 0.01), 0.9).averaging
    np.testing.assert_allclose(
        [c(k) for k in (300, 480, 495, 499, 500)], [0.1, 0.11, 0.21, 0.53, 0.1], atol=0.005
    )


def test_bounded_where_the_forward_recursion_is_not() -> None:
    alphas = np.where(np.arange(100) < 20, 1.0, 0.1)
    eta, _ = theory.forward_recursion(alphas, 0.9)
    assert eta[-1] > 1e4
    bounded = [float(hyperparams_from_sgdm(table(jnp.asarray(alphas)), 0.9)[0](k)) for k in (0, 99)]
    np.testing.assert_allclose(bounded, [10 - 9 * 0.9**20, 1.0], rtol=1e-6)
    # From the one η_0 that is right, the paper's recursion agrees: it is the same solution.
    eta_0, _ = _numpy_look_ahead(alphas, np.full(100, 0.9))
    eta, c = theory.forward_recursion(alphas, 0.9, eta0=float(eta_0[0]))
    np.testing.assert_allclose(eta[:50], eta_0[:50], rtol=1e-9)
    np.testing.assert_allclose(c[:50], (alphas / eta_0)[:50], rtol=1e-9)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_there_and_back(seed: int) -> None:
    """SPA → SGD+M → SPA, with η and c at random: the same iterates, and β as Theorem 1 says."""
    rng = np.random.default_rng(seed)
    etas, cs = rng.uniform(0.5, 2, 60), rng.uniform(0.05, 0.95, 60)
    with x64():
        eta, c = table(jnp.asarray(etas)), table(jnp.asarray(cs))
        to_sgdm = hyperparams_to_sgdm(eta, c)
        counts = jnp.arange(60, dtype=jnp.int32)
        alphas, betas = (np.asarray(jax.vmap(h)(counts)) for h in to_sgdm)
        np.testing.assert_allclose(alphas, etas * cs, rtol=1e-12)
        np.testing.assert_allclose(betas[1:], etas[:-1] / etas[1:] * (1 - cs[:-1]), rtol=1e-12)
        np.testing.assert_allclose(betas[0], 1 - cs[0], rtol=1e-12)
    # β may be over 1 here, which no SGD+M needs to forbid.
    again_eta, again_c = theory.forward_recursion(alphas, betas, eta0=etas[0])
    # Each step of the recursion multiplies rounding by 1/β: compare where that is still small.
    near = np.cumprod(1 / betas) < 1e6
    np.testing.assert_allclose(again_eta[near], etas[near], rtol=1e-6)
    np.testing.assert_allclose(again_c[near], cs[near], rtol=1e-6)
    x = z = m = np.ones(3)
    y, m = x, 0 * m
    for k in range(60):
        g, h = x + k, y + k
        z = z - etas[k] * g
        x = (1 - cs[k]) * x + cs[k] * z
        m = betas[k] * m + h
        y = y - alphas[k] * m
        if np.abs(x).max() > 1e6:
            break
        np.testing.assert_allclose(y, x, rtol=1e-7, atol=1e-7 * np.abs(z).max())


def test_rates_of_0_have_no_nan() -> None:
    to_sgdm = hyperparams_to_sgdm(table(jnp.array([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])), 0.1)
    alphas, betas = ([float(h(k)) for k in range(6)] for h in to_sgdm)
    np.testing.assert_allclose(alphas, [0, 0, 0.1, 0, 0, 0.1], rtol=1e-6)
    # inf where there is no counterpart: η_k = 0 < η_{k−1}.
    np.testing.assert_allclose(betas, [0.9, 0, 0, np.inf, 0, 0], rtol=1e-6)
    from_sgdm = hyperparams_from_sgdm(table(jnp.array([0.0, 1.0, 0.0])), 0.5)
    eta, c = ([float(h(k)) for k in range(4)] for h in from_sgdm)
    np.testing.assert_allclose(eta, [0.5, 1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(c, [0, 1, 0, 0], atol=1e-7)


NUM_STEPS = 300
# Evaluated once: Optax's cosine is in float32, which XLA rounds differently in the two runs.
ALPHA = evaluated(optax.warmup_cosine_decay_schedule(0.0, 0.3, 50, NUM_STEPS), NUM_STEPS)


def _run(tx: Any, carry: Any, steps: slice, dtype: str) -> Any:
    """Trains on the digits from (params, state), or from the start if the state is None."""
    loss = logistic_regression(dtype)

    def body(carry: Any, batch: Any) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    carry = carry or (jnp.zeros((65, 10), dtype), tx.init(jnp.zeros((65, 10), dtype)))
    return jax.jit(lambda carry: jax.lax.scan(body, carry, batches(NUM_STEPS)[steps])[0])(carry)


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), slow("float32", 2e-6)])
def test_states_move_in_the_middle_of_a_run(nesterov: bool, dtype: str, tolerance: float) -> None:
    """At a random step of warm-up and cosine, to SPA and, later on, back: as if never moved."""
    there, back = sorted(np.random.default_rng(3).integers(20, NUM_STEPS - 20, 2).tolist())
    with x64(dtype == "float64"):
        sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(ALPHA, 0.9, nesterov))
        tx = optax.chain(optax.clip_by_global_norm(1.0), spa_from_sgdm(ALPHA, 0.9, nesterov))
        never_moved, _ = _run(sgd, None, slice(None), dtype)

        params, sgd_state = _run(sgd, None, slice(there), dtype)
        sgdm: Any = {"learning_rate": ALPHA, "momentum": 0.9, "nesterov": nesterov}
        state = convert(sgd_state, params, into=tx.init(params), **sgdm)
        assert state[1].count == there
        params, state = _run(tx, (params, state), slice(there, back), dtype)
        assert state[1].count == back
        sgd_state = convert(state, params, into=sgd.init(params))
        assert optax.tree.get(sgd_state, "count") == back
        params, _ = _run(sgd, (params, sgd_state), slice(back, None), dtype)
        assert relative_difference(params, never_moved) < tolerance


def test_a_state_from_sgdm_is_as_foreseen() -> None:
    # The state that `spa_from_sgdm` would have had at the same step, and no re-anchoring.
    tx, sgd = spa_from_sgdm(ALPHA, 0.9), optax.sgd(ALPHA, 0.9)
    _, native = _run(tx, None, slice(80), "float32")
    params, sgd_state = _run(sgd, None, slice(80), "float32")
    into = tx.init(params)
    moved = convert(sgd_state, params, into=into, learning_rate=ALPHA, momentum=0.9)
    chex.assert_trees_all_close(moved, native, rtol=1e-5, atol=1e-5)
    _, after = tx.update(jnp.zeros_like(params), moved, params)
    np.testing.assert_array_equal(after.z, moved.z)


@pytest.mark.parametrize("wrap", ["plain", "injected", "masked", "multi_steps"])
def test_the_buffer_is_found_in_any_wrapper(wrap: str) -> None:
    params, grads = {"a": jnp.ones(2)}, {"a": jnp.array([1.0, -1.0])}
    sgd: Any = {
        "plain": optax.sgd(lambda _: 0.5, 0.5),
        "injected": optax.inject_hyperparams(optax.sgd)(0.5, 0.5),
        "masked": optax.masked(optax.sgd(lambda _: 0.5, 0.5), {"a": True}),
        "multi_steps": optax.MultiSteps(optax.sgd(lambda _: 0.5, 0.5), 1),
    }[wrap]
    state = sgd.init(params)
    for _ in range(3):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = sgd.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    into = spa_from_sgdm(0.5, 0.5).init(params)
    moved = convert(state, params, into=into, learning_rate=lambda _: 0.5, momentum=0.5)
    # m = 1.75 g after three steps, w = αβ/(1 − β) = 0.5.
    np.testing.assert_allclose(moved.z["a"], params["a"] - 0.5 * 1.75 * grads["a"])
    assert (moved.count, moved.eta, moved.c, moved.w) == (3, 1.0, 0.5, 0.5)
    # And under jit.
    again = jax.jit(convert, static_argnames=("learning_rate", "momentum"))(
        state, params, into=into, learning_rate=lambda _: 0.5, momentum=0.5
    )
    chex.assert_trees_all_close(again, moved)


def _step(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):  # for `MultiSteps`
        updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


INTO = {
    "chain": lambda tx: optax.chain(optax.clip(1e3), tx),
    "masked": lambda tx: optax.masked(tx, {"a": True, "b": False}),
    "partition": lambda tx: optax.partition(
        {"it": tx, "other": optax.set_to_zero()}, {"a": "it", "b": "other"}
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e3)), ("it", tx)),
    "flatten inside": lambda tx: optax.chain(optax.flatten(optax.clip(1e3)), tx),
}


@pytest.mark.parametrize("name", INTO)
def test_whole_states_move(name: str) -> None:
    """Into wrappers, and out of them: the run goes on as if it had never moved."""
    alpha = lambda k: 0.1 / (k + 1).astype(float)
    sgd, tx = INTO[name](optax.sgd(alpha, 0.5)), INTO[name](spa_from_sgdm(alpha, 0.5))
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([3.0])}
    gradient = lambda params, k: jax.tree.map(lambda p: jnp.cos(p + k), params)
    x, sgd_state = params, sgd.init(params)
    y, state, moved = params, sgd.init(params), sgd
    for k in range(12):
        if k == 4:
            state = convert(state, y, into=tx.init(y), learning_rate=alpha, momentum=0.5)
            assert jax.tree.structure(state) == jax.tree.structure(tx.init(y))
            moved = tx
        if k == 8:
            state = convert(state, y, into=sgd.init(y))
            assert jax.tree.structure(state) == jax.tree.structure(sgd.init(y))
            moved = sgd
        x, sgd_state = _step(sgd, x, sgd_state, gradient(x, k))
        y, state = _step(moved, y, state, gradient(y, k))
    # Rounding of x − z over w ≥ 0.01, twice, in m; and of 12 steps.
    chex.assert_trees_all_close(y, x, atol=4 * 6e-8 / 0.01 * 0.1)


def test_injected_states_move() -> None:
    """Their wrapper counts the steps for the schedules."""
    alpha = lambda k: 0.1 / (k + 1).astype(float)
    make = lambda factory: optax.inject_hyperparams(factory)(learning_rate=alpha, momentum=0.5)
    sgd, tx = make(optax.sgd), make(spa_from_sgdm)
    x = y = jnp.array([1.0, -2.0])
    sgd_state = state = sgd.init(x)
    for k in range(8):
        if k == 4:
            state = convert(state, y, into=tx.init(y), learning_rate=alpha, momentum=0.5)
            assert state.count == state.inner_state.count == 4
        x, sgd_state = _step(sgd, x, sgd_state, jnp.cos(x))
        y, state = _step(sgd if k < 4 else tx, y, state, jnp.cos(y))
    np.testing.assert_allclose(y, x, rtol=1e-6)
    assert convert(state, y, into=sgd.init(y)).count == 8


def test_a_state_keeps_the_dtype_of_z() -> None:
    params = jnp.ones(3)
    sgd, tx = optax.sgd(0.1, 0.9), spa_from_sgdm(0.1, 0.9, state_dtype=jnp.bfloat16)
    _, sgd_state = sgd.update(params, sgd.init(params))
    kwargs: Any = {"learning_rate": 0.1, "momentum": 0.9, "count": 1}
    state = convert(sgd_state, params, into=tx.init(params), **kwargs)
    assert state.z.bfloat16.dtype == jnp.bfloat16


def test_states_that_do_not_fit() -> None:
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    masked = lambda tx: optax.masked(tx, {"a": True, "b": False})
    sgd = optax.sgd(0.1, 0.9)
    move = lambda old, new: convert(
        old.init(params), params, into=new.init(params), learning_rate=0.1, momentum=0.9
    )
    for old, new in ((masked(sgd), spa_from_sgdm(0.1)), (masked(spa(0.1)), sgd)):
        at = re.escape("of `old_state`, got ['b']")
        with pytest.raises(ValueError, match=f"`into` must hold only params {at}"):
            move(old, new)
    with pytest.raises(ValueError, match=r"`into` must hold one .*, got EmptyState"):
        move(spa(0.1), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"`into` must hold one .*, got 2"):
        move(sgd, optax.chain(spa(0.1), spa(0.1)))
    with pytest.raises(ValueError, match=r"`into` must hold one .*, got GradientTransformation"):
        convert(sgd.init(params), params, into=spa(0.1), learning_rate=0.1, momentum=0.9)


def test_what_the_states_do_not_hold_must_be_given() -> None:
    x = jnp.ones(2)
    sgd, adam, sf = optax.sgd(0.1, 0.9), optax.adam(0.1), optax.contrib.schedule_free_adamw(0.1)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (sgd, spa(0.1), {"momentum": 0.9}, "learning_rate"),
        (sgd, spa(0.1), {"learning_rate": 0.1}, "momentum"),
        (adam, spa_adamw(0.1), {}, "learning_rate"),
        (spa_adamw(0.1), adam, {}, "learning_rate"),
        (spa_adamw(0.1, 0.05, 0.9), sf, {}, "learning_rate"),
    ]
    for old, new, kwargs, name in cases:
        match = f"`{name}` must be given for these states, got None"
        with pytest.raises(ValueError, match=match):
            convert(old.init(x), x, into=new.init(x), adam=adam, **kwargs)


SCHEDULE_FREE = optax.contrib.schedule_free_adamw(0.1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (spa(0.1), spa(0.1, 0.05, 0.9)),
        (spa(0.1, 0.05, 0.9), spa(0.1)),
        (optax.sgd(0.1, 0.9), spa(0.1, 0.05, 0.9)),
        (spa(0.1, 0.05, 0.9), optax.sgd(0.1, 0.9)),
        (optax.adam(0.1), spa_adamw(0.1, 0.05, 0.9)),
        (spa_adamw(0.1, 0.05, 0.9), optax.adam(0.1)),
        (SCHEDULE_FREE, spa_adamw(0.1)),
        (spa_adamw(0.1), SCHEDULE_FREE),
        (spa_adamw(0.1, 0.05, interpolation=0.7), SCHEDULE_FREE),  # whose b1 is 0.9, and constant
    ],
)
def test_x_and_y_as_params_do_not_mix(old: Any, new: Any) -> None:
    """Traced, a μ_y cannot raise: z, or the momentum, is NaN."""
    y, g = jnp.ones(2), jnp.array([1.0, -2.0])
    with jax.numpy_dtype_promotion("standard"):  # for optax's
        _, state = old.update(g, old.init(y), y)
    kwargs: Any = {"learning_rate": 0.1, "momentum": 0.9, "count": 1}
    move = lambda state, into: convert(state, y, into=into, adam=optax.adam(0.1), **kwargs)
    with pytest.raises(ValueError, match="`into` must train at the params of `old_state`"):
        move(state, new.init(y))
    moved, momentum_tree = jax.jit(move)(state, new.init(y)), ("z", "mu", "trace")
    assert any(np.isnan(optax.tree.get(moved, name, 0)).all() for name in momentum_tree)


def test_adamw_does_not_become_a_base_optimizer() -> None:
    """Nothing is advised that is refused too."""
    x, adam = jnp.ones(2), optax.adamw(0.1)
    for mu_y in (0.9, 1.0):
        into = primal_averaging(adam, 0.1, mu_y).init(x)
        with pytest.raises(ValueError, match="`into` must have the other directions of"):
            convert(adam.init(x), x, into=into, adam=adam, learning_rate=0.1)


def test_a_member_keeps_the_scalars_of_its_rule() -> None:
    x, g = jnp.ones(2), jnp.array([1.0, -2.0])
    rule = lambda state, _: spa_rule(state, state.rule_state["s"] + 1)
    spa_rule = lambda state, s: Scalars(
        jnp.ones([]), jnp.ones([]) / 4, jnp.ones([]), rule_state={"s": s}
    )
    own = transformation(rule, None, None, rule_state={"s": 1.0})
    narrow = transformation(rule, jnp.bfloat16, KEY, rule_state={"s": 1.0})
    _, state = own.update(g, own.init(x), x)
    moved = convert(state, x, into=narrow.init(x))
    assert moved.rule_state == {"s": 2.0}
    plain, sgd = spa(1.0).init(x), optax.sgd(0.1, 0.9).init(x)
    for old, into in ((state, plain), (plain, state), (state, sgd), (sgd, state)):
        with pytest.raises(ValueError, match="`into` must have the `rule_state` of `old_state`"):
            convert(old, x, into=into, learning_rate=0.1, momentum=0.9, count=0)


def test_at_an_interpolation_of_1_y_is_x() -> None:
    y, tx = jnp.ones(2), spa(0.5, 0.25, 1.0)
    _, state = tx.update(y, tx.init(y), y)
    for move in (convert, jax.jit(convert)):
        moved = move(state, y, into=spa(0.5, 0.25).init(y))
        chex.assert_trees_all_equal(moved, state)


def test_z_takes_the_dtype_of_another_member() -> None:
    """As z − x, rounded to nearest, with all else as it was."""
    params, old = jnp.array([1.0, -2.0, 3.0]), spa(0.5, 0.25)
    x, state = apply(old, params, [jnp.cos(params)] * 3)
    tx = spa(0.5, 0.25, state_dtype=jnp.bfloat16, rounding_key=jax.random.key(0))
    moved = convert(state, x, into=tx.init(x))
    np.testing.assert_array_equal(moved.z.bfloat16, (state.z - x).astype(jnp.bfloat16))
    chex.assert_trees_all_equal(moved._replace(z=state.z), state)
    as_sgdm = convert(state, x, into=spa_from_sgdm(0.125, 0.75).init(x))
    chex.assert_trees_all_equal(as_sgdm, state)
    back = convert(moved, x, into=old.init(x))
    np.testing.assert_array_equal(back.z, x + moved.z.bfloat16.astype(jnp.float32))


def test_integers_of_8_bits_are_no_momentum_of_8_bits() -> None:
    sgd, tx = optax.sgd(0.1, 0.5), spa_from_sgdm(0.1, 0.5)
    x = {"w": jnp.ones(2), "i": jnp.ones(2, jnp.int8)}
    moved = convert(sgd.init(x), x, into=tx.init(x), learning_rate=0.1, momentum=0.5, count=0)
    chex.assert_trees_all_equal(moved.z, x)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_new_optimizer_may_freeze_params(nesterov: bool) -> None:
    """Both ways. The others train on as before."""
    sgd, tx = optax.sgd(0.1, 0.9, nesterov), spa_from_sgdm(0.1, 0.9, nesterov)
    label = {"a": "trained", "b": "frozen"}
    some = lambda tx: optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, label)
    x, g = {"a": jnp.ones(2), "b": jnp.ones(3)}, {"a": jnp.array([1.0, -2.0]), "b": jnp.ones(3)}
    x, old = _step(sgd, x, sgd.init(x), g)
    kwargs: Any = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": nesterov, "count": 1}
    y, _ = _step(some(tx), x, convert(old, x, into=some(tx).init(x), **kwargs), g)
    expected, old = _step(sgd, x, old, g)
    np.testing.assert_allclose(y["a"], expected["a"], rtol=1e-6)
    np.testing.assert_array_equal(y["b"], x["b"])
    whole = convert(old, expected, into=tx.init(expected), **kwargs)
    back = convert(whole, expected, into=some(sgd).init(expected))
    np.testing.assert_allclose(
        optax.tree.get(back, "trace")["a"], optax.tree.get(old, "trace")["a"], rtol=1e-5
    )


def test_the_way_back_is_lossy_where_alpha_has_all_but_vanished() -> None:
    """In float32 too: m = (x − z)/w to within ulp(x)/w, 0.8 % two steps before the end."""
    schedule = lenient(optax.cosine_decay_schedule(0.1, NUM_STEPS))
    params, state = _run(spa_from_sgdm(schedule, 0.9), None, slice(NUM_STEPS - 2), "float32")
    sgd = optax.sgd(schedule, 0.9)
    _, sgd_state = _run(sgd, None, slice(NUM_STEPS - 2), "float32")
    trace = np.asarray(optax.tree.get(sgd_state, "trace"))
    back = convert(state, params, into=sgd.init(params))
    error = np.abs(np.asarray(optax.tree.get(back, "trace")) - trace)
    assert np.linalg.norm(error) > 1e-3 * np.linalg.norm(trace)
    ulp = float(jnp.finfo(jnp.float32).eps) * np.abs(params).max()
    assert error.max() < 4 * ulp / float(state.w) + 1e-4 * np.abs(trace).max()


def test_a_count_that_no_state_holds_must_be_given() -> None:
    """The new optimizer may have a schedule, which would start over at the count of 1."""
    params = jnp.ones(2)
    sgd, tx = optax.sgd(0.5, 0.5), spa_from_sgdm(0.5, 0.5)
    move = lambda state, into=tx, **kwargs: convert(
        state, params, into=into.init(params), learning_rate=0.5, momentum=0.5, **kwargs
    )
    at_start = move(sgd.init(params))
    assert at_start.count == 0
    np.testing.assert_array_equal(at_start.z, params)
    _, state = sgd.update(params, sgd.init(params))
    for into in (tx, optax.sgd(lambda _: 0.5, 0.5), optax.inject_hyperparams(optax.sgd)(0.5, 0.5)):
        for either in (move, jax.jit(move, static_argnums=1)):
            with pytest.raises(ValueError, match="`count` must be given where `old_state` does"):
                either(state, into)
    assert move(state, count=7).count == 7
    chex.assert_trees_all_equal(move(state, sgd), state)  # where nothing counts
    # Wrappers count too.
    for wrap in (lambda tx: optax.MultiSteps(tx, 1), lambda tx: stochastic_rounding(tx, KEY)):
        state = wrap(sgd).init(params)
        for _ in range(3):
            _, state = _step(wrap(sgd), params, state, params)
        assert move(state).count == 3


def test_spa_states_convert_too() -> None:
    """`spa` keeps the w of its z, so that SGD+M can take over from it."""
    with x64():
        grads, params = jnp.array([1.0, -2.0]), jnp.ones(2)
        tx = spa(lambda k: 2.0 - k.astype(float) / 10, 0.25)
        sgd = sgdm(*hyperparams_to_sgdm(lambda k: 2.0 - k.astype(float) / 10, 0.25))
        state, sgd_state = tx.init(params), sgd.init(params)
        x = y = params
        for _ in range(5):
            updates, state = tx.update(grads * x, state, x)
            x = optax.apply_updates(x, updates)
            updates, sgd_state = sgd.update(grads * y, sgd_state, y)
            y = optax.apply_updates(y, updates)
        trace = optax.tree.get(sgd_state, "trace")
        into = optax.trace(0.75).init(x)
        m = convert(state, x, into=into).trace
        np.testing.assert_allclose(m, trace, rtol=1e-6)  # w is float32
        # At c = 1 there is none.
        _, state = spa(1.0, 1.0).update(grads, state, x)
        np.testing.assert_array_equal(convert(state, x, into=into).trace, jnp.zeros(2))


DIRECTIONS: dict[str, Any] = {
    "trace": lambda: optax.trace(0.9),
    "float8": lambda: float8_momentum(optax.trace(0.9), jax.random.key(0)),
    "rms": lambda: optax.scale_by_rms(0.9),
    "adam": optax.scale_by_adam,
    "outside a base": lambda: optax.chain(optax.ema(0.9), optax.clip(1.0)),
    "unbiased rms": lambda: optax.scale_by_rms(0.9, bias_correction=True),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=2),
    "in_float32": lambda: in_float32(scale_by_second_moment(0.9)),
    "noise": lambda: optax.add_noise(0.1, 0.55, jax.random.key(1)),
    "plateau": lambda: optax.chain(optax.zero_nans(), optax.scale_by_belief()),
    **{
        name: getattr(optax, f"scale_by_{name}")
        for name in ("amsgrad", "rss", "sm3", "stddev", "adan", "novograd", "adadelta", "yogi")
    },
}


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.usefixtures("standard_promotion")
def test_directions_in_a_chain_are_kept(name: str) -> None:
    """The run goes on as if nothing had happened, or `convert` refuses."""
    last = primal_averaging(optax.sgd(0.1, 0.9), 0.5) if "base" in name else spa(0.1, 0.5)
    tx, x = optax.chain(DIRECTIONS[name](), last), jnp.ones((3, 2))
    g, state = jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]]), tx.init(x)
    for k in range(5):
        updates, state = tx.update(g * (k + 1), state, x)
        x = optax.apply_updates(x, updates)
    moved = convert(state, x, into=tx.init(x))
    chex.assert_trees_all_equal(tx.update(g, moved, x), tx.update(g, state, x))
    for old, into in ((state, last.init(x)), (last.init(x), tx.init(x))):
        with pytest.raises(ValueError, match=r"must have the other directions of|a second moment"):
            convert(old, x, into=into)


TWO = {"trace", "float8", "adam", "yogi"}  # momenta, of which `convert` cannot choose


def _way_of(tx: Any, x: Any, state: Any, grads: list[Any]) -> tuple[Any, Any]:
    for g in grads:
        x, state = _step(tx, x, state, g)
    return x, state


GRADS = [jnp.cos(jnp.arange(6.0) + k).reshape(3, 2) for k in range(12)]


@pytest.mark.parametrize("name", sorted({*DIRECTIONS} - TWO))
def test_directions_go_on_before_another_momentum(name: str) -> None:
    """SGD+M behind one of them, moved to SPA, as if it had never moved."""
    make = lambda tx: optax.chain(DIRECTIONS[name](), tx)
    rate = lambda k: 0.1 / (k + 1).astype(float)
    sgd, tx, x = make(optax.sgd(rate, 0.5)), make(spa_from_sgdm(rate, 0.5)), jnp.ones((3, 2))
    x, state = _way_of(sgd, x, sgd.init(x), GRADS[:5])
    expected, _ = _way_of(sgd, x, state, GRADS[5:])
    moved = convert(state, x, into=tx.init(x), learning_rate=rate, momentum=0.5)
    found, _ = _way_of(tx, x, moved, GRADS[5:])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Custom(NamedTuple):
    buffer: Any


UNKNOWN: dict[str, tuple[Any, str]] = {
    "custom": (
        optax.GradientTransformation(Custom, lambda g, s, p=None: (g, s)),
        "`Custom` at [0]",
    ),
    "bare array": (
        optax.GradientTransformation(lambda p: p, lambda g, s, p=None: (g, s)),
        "`ArrayImpl` at [0]",
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
    full = (unknown.init(params), spa(0.1).init(x))
    for old, into, which in (
        (full, full, "old_state"),
        (spa(0.1).init(x), full, "into"),
    ):
        match = re.escape(f"`{which}` must hold only states that `convert` knows, got a {at}")
        with pytest.raises(ValueError, match=match):
            convert(old, x, into=into)
    if name != "inside":
        old, new = (
            wrap(unknown) for wrap in (schedule_free, lambda tx: primal_averaging(tx, 0.1, 0.9))
        )
        state = old.init(x)._replace(
            base_optimizer_state=optax.tree.ones_like(old.init(x).base_optimizer_state)
        )
        moved = convert(state, x, into=new.init(x))
        chex.assert_trees_all_equal(moved.base, state.base_optimizer_state)


ACCUMULATING = lambda step: jnp.where(step < 2, 1, 3)  # steps end at batches 1, 2, 5, 8, 11


@pytest.mark.parametrize("there", [1, 5, 6, 7])
def test_accumulation_goes_on(there: int) -> None:
    """Also in the middle of a step, with the schedule of its length."""
    rate = lambda k: 0.1 / (k + 1).astype(float)
    wrap = lambda tx: optax.MultiSteps(optax.apply_if_finite(tx, 2), ACCUMULATING)
    sgd, tx = optax.sgd(rate, 0.5), spa_from_sgdm(rate, 0.5)
    kwargs: Any = {"learning_rate": rate, "momentum": 0.5}
    x, state = _way_of(wrap(sgd), jnp.ones((3, 2)), wrap(sgd).init(jnp.ones((3, 2))), GRADS[:there])
    expected, _ = _way_of(wrap(sgd), x, state, GRADS[there:])
    moved = convert(state, x, into=wrap(tx).init(x), **kwargs)
    found, _ = _way_of(wrap(tx), x, moved, GRADS[there:])
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


def test_a_run_of_spa_resumed_as_sgdm() -> None:
    # The state is the same, so no conversion at all: z is re-anchored at the first step.
    with x64():
        grads, x = jnp.array([1.0, -2.0]), jnp.ones(2)
        tx, state = spa(1.0, 0.1), spa(1.0, 0.1).init(x)
        sgd, sgd_state = optax.sgd(0.1, 0.9), optax.sgd(0.1, 0.9).init(x)
        y = x
        for k in range(8):
            if k == 4:
                tx, sgd = spa_from_sgdm(0.03, 0.8), optax.sgd(0.03, 0.8)
            updates, state = tx.update(grads * x, state, x)
            x = optax.apply_updates(x, updates)
            updates, sgd_state = sgd.update(grads * y, sgd_state, y)
            y = optax.apply_updates(y, updates)
        np.testing.assert_allclose(x, y, atol=1e-7)  # η (1 − c) is float32 in the state of `spa`


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_reanchor(dtype: Any) -> None:
    """Params pruned in the middle of a run go on as `optax.sgd` goes on from there."""
    tx = optax.chain(optax.add_decayed_weights(1e-3), spa_from_sgdm(0.25, 0.5))
    sgd = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.25, 0.5))
    params = {"w": jnp.array([1.0, -2.0, 3.0, 0.5], dtype)}
    grads = jax.tree.map(lambda p: (p / 4).astype(dtype), params)
    x, y = params, params
    state, sgd_state = tx.init(x), sgd.init(y)
    for k in range(6):
        if k == 3:
            pruned = {"w": x["w"].at[1].set(0.0)}
            state = reanchor(state, x, pruned)
            assert isinstance(state[1], SPAState)
            x, y = pruned, {"w": y["w"].at[1].set(0.0)}
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(grads, state, x)
            x = optax.apply_updates(x, updates)
            updates, sgd_state = sgd.update(grads, sgd_state, y)
            y = optax.apply_updates(y, updates)
    chex.assert_trees_all_close(x, y, rtol=1e-6 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("wrt", [nnx.Param])
def test_states_of_nnx(wrt: Any) -> None:
    """nnx keeps variables of other types in the optimizer's state than in the model."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    make = lambda: optax.chain(optax.clip_by_global_norm(1.0), spa_from_sgdm(0.5, 0.5))
    optimizer = nnx.Optimizer(model, make(), wrt=wrt)
    grads = jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), nnx.state(model, wrt))
    optimizer.update(model, grads)
    params = nnx.state(model, wrt)
    sgd = nnx.Optimizer(model, optax.sgd(0.5, 0.5), wrt=wrt)
    m = optax.tree.get(convert(optimizer.opt_state, params, into=sgd.opt_state), "trace")
    np.testing.assert_allclose(jax.tree.leaves(m)[0], 0.1, rtol=1e-5)  # one gradient
    pruned = jax.tree.map(lambda p: 0 * p, params)
    before = jax.tree.map(jnp.copy, params)
    optimizer.opt_state = reanchor(optimizer.opt_state, params, pruned)
    nnx.update(model, pruned)
    # In the other order `params`, live variables, would hold the new values already.
    with pytest.raises(ValueError, match="`new_params` must not be the arrays of `old_params`"):
        reanchor(optimizer.opt_state, params, pruned)
    shifted = reanchor(optimizer.opt_state, before, pruned)  # a copy is safe in any order
    assert relative_difference(shifted[1].z, optimizer.opt_state[1].z) > 0.1
    optimizer.update(model, grads)
    # m = 1.5 g: x goes on from 0 by −α m.
    for leaf in jax.tree.leaves(nnx.state(model, wrt)):
        np.testing.assert_allclose(leaf, -0.5 * 0.15, rtol=1e-5)


def test_a_run_of_nnx_moves() -> None:
    """To SPA, back, and as if never moved; jitted, in a chain, under a schedule."""
    alpha = lambda k: 0.1 / (k + 1).astype(float)
    chain = lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)
    sgd, tx = chain(optax.sgd(alpha, 0.5)), chain(spa_from_sgdm(alpha, 0.5))
    inputs = jnp.ones((2, 3))
    gradient = nnx.grad(lambda model: jnp.mean((model(inputs) - 1) ** 2))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, gradient(model))

    def train(moves: bool) -> Any:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param)
        for k in range(9):
            if moves and k in (3, 6):
                params, old = nnx.state(model, nnx.Param), optimizer.opt_state
                optimizer = nnx.Optimizer(model, tx if k == 3 else sgd, wrt=nnx.Param)
                new = optimizer.opt_state
                kwargs: Any = {"learning_rate": alpha, "momentum": 0.5} if k == 3 else {}
                optimizer.opt_state = convert(old, params, into=new, **kwargs)
            step(model, optimizer)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    chex.assert_trees_all_close(train(True), train(False), atol=4 * 6e-8 / 0.01 * 0.1)


@pytest.mark.parametrize("share", ["masked", "partition", "several"])
def test_reanchor_of_some_params(share: str) -> None:
    """As `eval_params` does: params of another optimizer, or of none, have no z."""
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    edited = {"a": jnp.array([0.0, 2.0]), "b": jnp.array([5.0])}
    labels = {"a": "it", "b": "other"}
    tx = {
        "masked": lambda: optax.masked(spa(0.1, 0.1, 0.5), {"a": True, "b": False}),
        "partition": lambda: optax.partition({"it": spa(0.1), "other": optax.sgd(0.1)}, labels),
        "several": lambda: optax.partition({"it": spa(0.1), "other": spa(0.2, 0.05, 0.9)}, labels),
    }[share]()
    state = reanchor(tx.init(params), params, edited)
    z = [s.z for s in find(state, SPAState)]
    np.testing.assert_array_equal(z[0]["a"], edited["a"])
    if share == "several":
        np.testing.assert_array_equal(z[1]["b"], edited["b"])
    chex.assert_trees_all_equal_structs(state, tx.init(params))
    with pytest.raises(ValueError, match="`spa_state` must have leaves of the paths and shapes of"):
        reanchor(tx.init(params), {"b": params["b"]}, {"b": edited["b"]})
    with pytest.raises(ValueError, match="`new_params` must have the structure of `old_params`"):
        reanchor(tx.init(params), params, {"a": edited["a"]})


def test_beta_has_no_nan_at_c_of_1() -> None:
    # η = 0 after η > 0, but z = x: nothing is carried on, and β = 0 does as well as any.
    _, beta = hyperparams_to_sgdm(lambda k: jnp.where(k < 2, 1.0, 0.0), 1.0)
    np.testing.assert_array_equal([float(beta(k)) for k in range(4)], 0)


def test_an_edit_behind_spa_is_pulled_back_unless_reanchored() -> None:
    """Why nothing that changes the update may stand behind `spa`, as its docstring says."""
    params = jnp.ones(4)
    tx = spa(1.0, 0.1)
    state = tx.init(params)
    updates, state = tx.update(jnp.zeros(4), state, params)
    pruned = params.at[0].set(0.0)
    updates, _ = tx.update(jnp.zeros(4), state, pruned)
    np.testing.assert_allclose(updates, [0.1, 0, 0, 0], atol=1e-7)
    state = reanchor(state, params, pruned)
    updates, _ = tx.update(jnp.zeros(4), state, pruned)
    np.testing.assert_array_equal(updates, jnp.zeros(4))


def test_reanchor_moves_x_along() -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
    grads = jax.tree.map(lambda p: jnp.cos(p) / 3, params)
    y, state = apply(spa(0.1, 0.1, 0.5), params, [grads] * 3)
    edited = jax.tree.map(lambda leaf: leaf - 1, y)
    x = eval_params(reanchor(state, y, edited), edited)
    chex.assert_trees_all_close(x, jax.tree.map(lambda leaf: leaf - 1, eval_params(state, y)))
