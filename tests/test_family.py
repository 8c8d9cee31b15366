"""`spa` below an interpolation of 1, and `eval_params`, against published equations."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    batches,
    digits,
    mean_of_all,
    relative_difference,
    run,
    slow,
    table,
    trajectory,
    x64,
    z_of,
)

from spa_optax import (
    SPAState,
    convert,
    eval_params,
    primal_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

NUM_STEPS = 300
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
GRADS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)
KEY = jax.random.key(1)
ROUNDED = stochastic_rounding(optax.sgd(0.1), KEY)
GPA = spa(0.1, 0.1, 0.5)


def published(gamma: Any, c: Any, mu_y: Any) -> np.ndarray:
    """y and x after every step, by the three sequences as they are published."""
    images, labels = digits()
    x = z = y = np.full((65, 10), 0.1)
    steps = []
    for k, batch in enumerate(batches(NUM_STEPS)):
        logits = images[batch] @ y
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = images[batch].T @ (p - labels[batch]) / len(batch) + 2e-4 * y
        eta, c_k, mu = (h(k) if callable(h) else h for h in (gamma, c, mu_y))
        z = z - eta * gradient
        x = (1 - c_k) * x + c_k * z
        y = mu * x + (1 - mu) * z
        steps.append((y, x))
    return np.array(steps).swapaxes(0, 1)


def gamma(k: int) -> float:
    """With gaps of 0."""
    return 0.2 * abs(np.sin(k / 40)) * (k % 100 > 20)


def averaging(k: int) -> float:
    return 0.1 + 0.9 * (k % 70 == 0)


def interpolation(k: int) -> float:
    return 0.9 - 0.4 * (k % 50 > 25)


SCHEDULES = {
    "constant": (0.1, 0.05, 0.8),
    "at x": (gamma, averaging, 1.0),
    "schedules": (gamma, averaging, interpolation),
}


def as_jax(hyperparam: Any) -> Any:
    """A number, or a function of Python integers as a schedule."""
    if not callable(hyperparam):
        return hyperparam
    return table(np.array([float(hyperparam(k)) for k in range(NUM_STEPS)]))


@pytest.mark.parametrize("schedules", SCHEDULES.values(), ids=SCHEDULES)
def test_published_update(schedules: Any) -> None:
    """Three sequences, of which two are kept, with μ_y constant or not."""
    expected = published(*schedules)
    with x64():
        found = trajectory(spa(*map(as_jax, schedules)), eval_params, jnp.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)  # y and x


ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
MUON = optax.contrib.muon(0.01)
free = optax.contrib.schedule_free
SCHEDULE_FREE: dict[str, tuple[Any, Any]] = {  # Optax's, and ours
    "spa, 0.5": (free(optax.sgd(0.5), 0.5, 0.5, 0.0), spa(0.5, mean_of_all, 0.5)),
    "spa, 0.9": (free(optax.sgd(0.5), 0.5), spa(0.5, mean_of_all, 0.9)),
    "spa, 1": (free(optax.sgd(0.5), 0.5, 1.0, 0.0), spa(0.5, mean_of_all)),
    "spa_adamw": (
        optax.contrib.schedule_free_adamw(0.01, b1=0.9, **ADAMW),
        spa_adamw(0.01, mean_of_all, 0.9, **ADAMW),
    ),
    "muon": (free(MUON, 0.01), primal_averaging(MUON, mean_of_all, 0.9)),
}


@pytest.mark.parametrize(
    ("reference", "tx"),
    [
        (slow if name == "muon" else pytest.param)(*pair, id=name)
        for name, pair in SCHEDULE_FREE.items()
    ],
)
def test_schedule_free(reference: Any, tx: Any) -> None:
    """At a constant rate every weight is the same, whatever their power of the rate."""
    with x64():
        expected = trajectory(
            reference, optax.contrib.schedule_free_eval_params, jnp.float64
        )
        found = trajectory(tx, eval_params, jnp.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)  # y and x


def test_quasi_hyperbolic_momentum() -> None:
    """m ← β m + (1 − β) g, y ← y − α((1 − ν) g + ν m), with constants."""
    alpha, beta, nu = 0.3, 0.9, 0.7
    gradients = np.random.default_rng(0).normal(size=(50, 5))
    y, m = np.ones(5), np.zeros(5)
    for g in gradients:
        m = beta * m + (1 - beta) * g
        y = y - alpha * ((1 - nu) * g + nu * m)
    grads = list(jnp.asarray(gradients, jnp.float32))
    params, _ = run(spa(alpha, 1 - beta, nu), jnp.ones(5), grads)
    np.testing.assert_allclose(params, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rate", [0.1, lambda k: 0.1 / (k + 1).astype(float)])
def test_a_traced_interpolation_of_1_is_the_number(rate: Any, dtype: Any) -> None:
    """To the bit, x and z, though one program has no term in μ_y, and the other has."""
    params, grads = optax.tree.cast((PARAMS, GRADS), dtype)
    key = KEY if dtype == jnp.bfloat16 else None
    x, state = run(spa(rate, 0.1, 1.0, rounding_key=key), params, [grads] * 20)
    make = optax.inject_hyperparams(spa, "rounding_key", hyperparam_dtype=jnp.float32)
    for found, injected in (
        run(make(rate, 0.1, 1.0, rounding_key=key), params, [grads] * 20),
        run(make(rate, 0.1, rounding_key=key), params, [grads] * 20),
    ):
        chex.assert_trees_all_equal((found, injected.inner_state), (x, state))
        chex.assert_trees_all_equal(eval_params(injected, found), x)


def test_interpolation_may_change_unforeseen() -> None:
    """Injected, or edited before a run is resumed: x and z go on as they would have."""
    grads = [GRADS] * 3
    mu_y = table([0.9, 0.9, 0.9, 0.5])
    scheduled = run(spa(0.1, 0.2, mu_y), PARAMS, grads * 2)
    injected = optax.inject_hyperparams(spa)(
        learning_rate=0.1, averaging=0.2, interpolation=0.9
    )
    params, state = run(injected, PARAMS, grads)
    state = optax.tree.set(state, interpolation=jnp.array(0.5))
    params, state = run(injected, params, grads, state)
    chex.assert_trees_all_close((params, state.inner_state), scheduled, rtol=1e-6)
    params, state = run(spa(0.1, 0.2, 0.9), PARAMS, grads)
    params, state = run(spa(0.1, 0.2, 0.5), params, grads, state)
    chex.assert_trees_all_close((params, state), scheduled, rtol=1e-6)
    np.testing.assert_allclose(state.c, 0.2, rtol=1e-6)  # not what the change makes
    key = jax.random.key(0)
    for tx in (spa(0.1, 0.2), spa_from_sgdm(0.1), spa(0.1, 0.2, rounding_key=key)):
        # They take the params for x.
        with pytest.raises(ValueError, match=r"`state`.*interpolation of 1.*0\.5"):
            tx.update(GRADS, state, params)
        assert np.isnan(jax.jit(tx.update)(GRADS, state, params)[0]["w"]).all()


def test_no_gradient_while_interpolation_changes() -> None:
    """The param would have to move for x to stay, so it must get an update."""
    start = {"w": jnp.ones(2), "b": jnp.ones(3)}
    grads = {"w": jnp.ones(2), "b": None}
    for mu_y, is_refused in (
        (0.9, False),
        (lambda k: 0.9 / (k + 1).astype(float), True),
    ):
        tx = spa(0.1, 0.2, mu_y)
        params, state = run(tx, start, [start])
        x = eval_params(state, params)
        if is_refused:
            with pytest.raises(ValueError, match=r"`updates`.*None at \['b'\]"):
                tx.update(grads, state, params)
        else:
            params, state = run(tx, params, [grads], state)
            np.testing.assert_array_equal(eval_params(state, params)["b"], x["b"])


def test_no_gradient_as_a_number_for_interpolation_changes() -> None:
    """Between two runs, so that no schedule says so."""
    start = {"w": jnp.ones(2), "b": jnp.ones(3)}
    grads = {"w": jnp.ones(2), "b": None}
    params, state = run(spa(0.1, 0.2, 0.9), start, [start] * 2)
    tx = spa(0.1, 0.2, 0.5)
    with pytest.raises(ValueError, match=r"`updates`.*None.*0\.9 to 0\.5"):
        tx.update(grads, state, params)
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert np.isnan(updates["w"]).all()
    assert np.isnan(after.eta)
    run(spa(0.1, 0.2, 0.9), params, [grads], state)


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16])
def test_integers_need_no_gradient(state_dtype: Any) -> None:
    """They do not move, so they need no update while the interpolation changes."""
    params = {"w": jnp.ones(2), "steps": jnp.arange(3)}
    grads = {"w": jnp.ones(2), "steps": None}
    for mu_y in (1.0, lambda k: 0.9 / (k + 1).astype(float)):
        tx = spa_adamw(
            0.1, 0.2, mu_y, state_dtype=state_dtype, rounding_key=jax.random.key(0)
        )
        new, state = run(tx, params, [grads] * 2)
        zeros = grads | {"steps": jnp.zeros(3, int)}
        expected, _ = run(tx, params, [zeros] * 2)
        np.testing.assert_array_equal(new["w"], expected["w"])
        np.testing.assert_array_equal(eval_params(state, new)["steps"], params["steps"])


def test_a_frozen_param_at_an_interpolation_of_1() -> None:
    """With a `rounding_key`, too, the number 1 cannot change."""
    params = {"w": jnp.ones(2), "b": jnp.ones(3)}
    grads = {"w": jnp.ones(2), "b": None}
    for options in ({}, {"rounding_key": jax.random.key(0)}):
        new, _ = run(spa_adamw(0.1, **options), params, [grads] * 2)
        np.testing.assert_array_equal(new["b"], params["b"])


def test_derivative_with_respect_to_interpolation() -> None:
    """At the μ_y that the state holds, too: x_2 = 5, z_2 = 2, and y_2 is 5 μ_y + 2 (1 −
    μ_y)."""

    def y_2(mu_y: Any) -> Any:
        y, state = run(spa(1.0, 0.5, 0.5), jnp.array(10.0), [jnp.array(4.0)])
        return run(spa(1.0, 0.5, mu_y), y, [jnp.array(4.0)], state)[0]

    for mu_y in (0.5, 0.6):
        np.testing.assert_allclose(y_2(mu_y), 2 + 3 * mu_y, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(y_2)(mu_y), 3, rtol=1e-5)


@pytest.mark.parametrize(
    "tx", [spa(0.1), GPA, spa_adamw(0.1), spa_adamw(0.1, 0.05, 0.9)]
)
def test_a_state_of_zeros_is_one_at_the_start(tx: Any) -> None:
    """As that of `optax.adamw` is."""
    state = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, PARAMS)
    )
    updates, _ = tx.update(GRADS, state, PARAMS)
    expected, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_equal(updates, expected)
    for evaluate in (eval_params, jax.jit(eval_params)):
        chex.assert_trees_all_equal(evaluate(state, PARAMS), PARAMS)
    into = optax.sgd(0.1, 0.9).init(PARAMS)
    if isinstance(state, SPAState):
        chex.assert_trees_all_equal(convert(state, PARAMS, into=into), into)


WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e3), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e3)), ("it", tx)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_eval_params_finds_the_state(wrap: Any) -> None:
    y, state = run(GPA, PARAMS, [GRADS] * 3)
    expected = eval_params(state, y)
    assert relative_difference(expected, y) > 1e-3
    with jax.numpy_dtype_promotion("standard"):  # for MultiSteps
        wrapped_y, wrapped_state = run(wrap(GPA), PARAMS, [GRADS] * 3)
    x = jax.jit(eval_params)(wrapped_state, wrapped_y)
    chex.assert_trees_all_close(x, expected, rtol=1e-6)
    chex.assert_trees_all_equal_structs(x, PARAMS)


def test_eval_params_where_params_are_shared() -> None:
    expected = eval_params(*run(GPA, PARAMS, [GRADS] * 3)[::-1])
    y, state = run(
        optax.masked(GPA, {"w": True, "b": {"c": False}}), PARAMS, [GRADS] * 3
    )
    x = eval_params(state, y)
    np.testing.assert_allclose(x["w"], expected["w"], rtol=1e-6)
    np.testing.assert_array_equal(x["b"]["c"], y["b"]["c"])
    for fast in (optax.adam(0.1), spa(0.1), spa(0.2, 0.3, 0.4)):
        tx = optax.partition(
            {"slow": GPA, "fast": fast}, {"w": "slow", "b": {"c": "fast"}}
        )
        with jax.numpy_dtype_promotion("standard"):  # for Adam
            y, state = run(tx, PARAMS, [GRADS] * 3)
            alone_x, alone_state = run(fast, PARAMS["b"], [GRADS["b"]] * 3)
        if isinstance(alone_state, SPAState):
            alone_x = eval_params(alone_state, alone_x)
        x = eval_params(state, y)
        np.testing.assert_allclose(x["w"], expected["w"], rtol=1e-6)
        np.testing.assert_allclose(x["b"]["c"], alone_x["c"], rtol=1e-6)


@pytest.mark.parametrize("tx", [spa_from_sgdm(0.1), optax.chain(spa(0.1)), ROUNDED])
def test_eval_params_at_interpolation_1_are_params(tx: Any) -> None:
    params, state = run(tx, PARAMS, [GRADS] * 3)
    assert eval_params(state, params)["w"] is params["w"]


@pytest.mark.slow
def test_eval_params_of_nnx() -> None:
    model = nnx.Sequential(
        nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    )
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip(1e3), GPA), wrt=nnx.Param)
    inputs = jax.random.normal(jax.random.key(0), (8, 3))
    for _ in range(6):
        optimizer.update(
            model, nnx.grad(lambda model: jnp.mean((model(inputs) - 1) ** 2))(model)
        )
    y = nnx.state(model, nnx.Param)
    z = nnx.to_pure_dict(optax.tree.get(optimizer.opt_state, "z"))
    at_x = jax.tree.map(lambda y, z: 2 * y - z, nnx.to_pure_dict(y), z)  # μ_y = 1/2
    x = nnx.to_pure_dict(eval_params(optimizer.opt_state, y))
    chex.assert_trees_all_close(x, at_x, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"`params`.*`nnx\.state\(model, nnx\.Param\)`"
    ):
        eval_params(optimizer.opt_state, model)


SHORTER = jax.tree.map(lambda leaf: leaf[..., :2], PARAMS)
FOREIGN = {
    "EmptyState, ScaleByAdamState": optax.adamw(0.1).init(PARAMS),
    "ScheduleFreeState": optax.contrib.schedule_free_sgd(0.1).init(PARAMS),
    "dict": PARAMS,  # swapped arguments
    r"\(3,\) at \['other'\]": GPA.init({"other": jnp.ones(3)}),
    r"\(2,\) at": GPA.init(SHORTER),
    r"\(3,\) at \['b'\]\['c'\]": optax.chain(spa(0.1), GPA).init(PARAMS),
    "`ScheduleFreeState`": optax.contrib.schedule_free(GPA, 0.1).init(PARAMS),
    "`SAMState`": optax.contrib.sam(GPA, optax.sgd(0.1)).init(PARAMS),
    "`params`.*`SAMState`": optax.contrib.sam(ROUNDED, optax.sgd(0.1)).init(PARAMS),
    "`MechanicState`": optax.contrib.mechanize(GPA).init(PARAMS),
    "`LookaheadState`": optax.LookaheadState(GPA.init(PARAMS), jnp.array(0)),
}


@pytest.mark.parametrize("got", FOREIGN)
def test_eval_params_of_a_foreign_state(got: str) -> None:
    with pytest.raises(ValueError, match=rf"`opt_state`.*{got}"):
        eval_params(FOREIGN[got], PARAMS)


def test_eval_params_of_a_state_hidden_in_two_wrappers() -> None:
    """An opaque SAM moves no params, but what it wraps may."""
    fast = GPA.init(PARAMS)
    lookahead = optax.LookaheadState(fast_state=fast, steps_since_sync=jnp.array(0))
    outer = optax.contrib.SAMState(
        steps_since_sync=jnp.array(0), opt_state=lookahead, adv_state=(), cache=None
    )
    with pytest.raises(ValueError, match=r"`opt_state`.*LookaheadState"):
        eval_params(outer, PARAMS)


def test_eval_params_of_an_ensemble() -> None:

    def one_step(mu_y: Any) -> Any:
        return run(spa(1.0, 0.1, mu_y), jnp.ones(2), [jnp.ones(2)])

    params, states = jax.vmap(one_step)(jnp.array([0.3, 0.9]))
    np.testing.assert_allclose(jax.vmap(eval_params)(states, params), 0.9, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`opt_state`.*`jax\.vmap`"):
        eval_params(states, params)


def test_eval_params_before_the_first_step() -> None:
    loaded = jax.tree.map(lambda p: p + 5, PARAMS)  # pretrained, put in after `init`
    for tx in (GPA, optax.contrib.sam(GPA, optax.sgd(0.1), opaque_mode=True)):
        chex.assert_trees_all_equal(eval_params(tx.init(PARAMS), loaded), loaded)


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "shapes"])
def test_frozen_in_the_first_step_after_params_were_replaced(
    abstract: bool, state_dtype: Any
) -> None:
    """Then z is the new params of a frozen leaf, too: 5, and not those of `init`."""
    key = None if state_dtype is None else jax.random.key(0)
    tx = spa(0.1, 0.2, 0.5, state_dtype=state_dtype, rounding_key=key)
    old = {"w": jnp.ones(2), "b": jnp.ones(3)}
    state: Any = tx.init(jax.eval_shape(lambda: old) if abstract else old)
    loaded = {"w": jnp.full(2, 5.0), "b": jnp.full(3, 5.0)}
    params, state = run(tx, loaded, [{"w": jnp.ones(2), "b": None}] * 2, state)
    chex.assert_trees_all_equal(eval_params(state, params)["b"], loaded["b"])
    chex.assert_trees_all_equal(z_of(state, params)["b"], loaded["b"])
    params, _ = run(tx, params, [jax.tree.map(jnp.zeros_like, old)], state)
    chex.assert_trees_all_equal(params["b"], loaded["b"])


def test_eval_params_of_all_kinds_of_leaves() -> None:
    floats = {
        "bfloat16": jnp.ones(4, jnp.bfloat16),
        "complex": jnp.array([1 + 2j, 3 - 1j]),
    }
    params = floats | {"integer": jnp.arange(3), "None": None}
    y, state = run(
        spa(0.5, 0.1, 0.5), params, [jax.tree.map(jnp.ones_like, params)] * 3
    )
    x, z = eval_params(state, y), z_of(state, y)
    chex.assert_trees_all_equal_shapes_and_dtypes(x, params)
    for name in floats:
        y_wide, x_wide = (
            np.asarray(tree[name]).astype(np.complex64) for tree in (y, x)
        )
        expected = 2 * y_wide - np.asarray(z[name])  # μ_y = 1/2
        np.testing.assert_allclose(
            x_wide, expected, rtol=float(jnp.finfo(y[name].dtype).eps)
        )
    np.testing.assert_array_equal(x["integer"], params["integer"])


def test_eval_params_checks_and_moves_more_than_the_first() -> None:
    """The second array of a group, and the second group of a partition."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = spa(0.1, interpolation=0.5).init(params)
    with pytest.raises(ValueError, match=r"(?s)`opt_state`.*\(3,\).*'b'"):
        eval_params(state, params | {"b": jnp.ones(4)})

    groups = {"a": spa(0.1), "b": spa(0.1, averaging=0.5, interpolation=0.5)}
    tx = optax.partition(groups, {"a": "a", "b": "b"})
    updates, state = tx.update(params, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    x = eval_params(state, params)
    np.testing.assert_array_equal(x["a"], params["a"])
    # z is 1 − 0.1, x is halfway from 1 to z, and y halfway from x to z.
    np.testing.assert_allclose(x["b"], 0.95, rtol=1e-6)
    np.testing.assert_allclose(params["b"], 0.925, rtol=1e-6)
