"""`gpa` and its evaluation point, against implementations and equations by others."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    UNIFORM,
    apply,
    batches,
    digits,
    lenient,
    relative_difference,
    trajectory,
    x64,
)

from spa_optax import (
    SPAState,
    eval_params,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

NUM_STEPS = 300
PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
GRADS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)


def published(direction: Any, gamma: Any, c: Any, mu_y: Any) -> tuple[np.ndarray, np.ndarray]:
    """y and x after every step, in float64, by the three sequences as they are published."""
    images, labels = digits()
    x = z = y = np.full((65, 10), 0.1)
    ys, xs = [], []
    for k, batch in enumerate(batches(NUM_STEPS)):
        logits = images[batch] @ y
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        gradient = images[batch].T @ (p - labels[batch]) / len(batch) + 2e-4 * y
        z = z - gamma(k) * direction(gradient, k, y)
        x = (1 - c(k)) * x + c(k) * z
        y = mu_y(k) * x + (1 - mu_y(k)) * z
        ys.append(y)
        xs.append(x)
    return np.array(ys), np.array(xs)


@pytest.mark.parametrize(
    ("b1", "weight_lr_power"), [(0.5, 0.0), (0.9, 0.0), (0.9, 2.0), (0.95, 2.0), (1.0, 0.0)]
)
def test_schedule_free(b1: float, weight_lr_power: float) -> None:
    """At a constant rate every weight is the same, whatever their power of the rate."""
    with x64():
        reference = optax.contrib.schedule_free(optax.sgd(0.5), 0.5, b1, weight_lr_power)
        evaluate = optax.contrib.schedule_free_eval_params
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        y, x = trajectory(spa(0.5, UNIFORM, b1), eval_params, jnp.float64)
    # Rounding, over 300 steps.
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-12)
    # The state keeps μ_y as a float32.
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-12 if b1 in (0.5, 1) else 1e-7)
    assert (np.abs(x - y).max() > 1e-3) == (b1 < 1)


def test_schedule_free_under_warm_up() -> None:
    """It weights z by the square of the largest rate so far: no mean with equal weights then."""
    warm_up = lenient(optax.linear_schedule(0.0, 0.5, 100))
    with x64():
        counts = jnp.arange(NUM_STEPS, dtype=jnp.int32)
        # optax reads the rate of the next step for its weights.
        weights = np.maximum.accumulate(np.asarray(jax.vmap(warm_up)(counts + 1), float)) ** 2
        shares = jnp.asarray(weights / np.cumsum(weights))
        reference = optax.contrib.schedule_free(optax.sgd(warm_up), warm_up, 0.9)
        evaluate = optax.contrib.schedule_free_eval_params
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        y, x = trajectory(spa(warm_up, lambda k: shares[k], 0.9), eval_params, jnp.float64)
        equal, _ = trajectory(spa(warm_up, UNIFORM, 0.9), eval_params, jnp.float64)
    # Rates and weights are float32 in optax: 6e-8 each.
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-6)
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-6)
    assert relative_difference(equal[-1], y_reference[-1]) > 0.01


def test_an_integer_count_divides_to_a_float32() -> None:
    """Also under x64, where a schedule of float64 would make the state's scalars float64."""
    with x64():
        k = jnp.array(2, jnp.int32)
        assert (1 / (k + 1)).dtype == jnp.float32
        with jax.numpy_dtype_promotion("standard"):
            assert (1 / (k + 1.0)).dtype == jnp.float64


def test_nesterov_momentum_of_keras() -> None:
    """v ← βv − αg, x ← x + βv − αg, under a schedule: NumPy; and not the form of optax."""
    alphas = 0.2 * np.abs(np.sin(np.arange(NUM_STEPS) / 40)) + 0.01
    images, labels = digits()
    x, v, xs = np.full((65, 10), 0.1), 0.0, []
    for alpha, batch in zip(alphas, batches(NUM_STEPS), strict=True):
        logits = images[batch] @ x
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        g = images[batch].T @ (p - labels[batch]) / len(batch) + 2e-4 * x
        v = 0.9 * v - alpha * g
        x = x + 0.9 * v - alpha * g
        xs.append(x)
    itself = lambda state, params: params
    with x64():
        alpha = lambda k: jnp.asarray(alphas)[k]
        eta = lambda k: jnp.asarray(alphas / (1 - 0.9))[k]
        y, _ = trajectory(spa(eta, 1 - 0.9, 0.9), itself, jnp.float64)
        other, _ = trajectory(optax.sgd(alpha, 0.9, nesterov=True), itself, jnp.float64)
    np.testing.assert_allclose(y, xs, rtol=0, atol=1e-12)
    assert relative_difference(other[-1], xs[-1]) > 0.01


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.99])
def test_nesterov(beta: float) -> None:
    with x64():
        itself = lambda state, params: params
        reference, _ = trajectory(optax.sgd(0.05, beta, nesterov=True), itself, jnp.float64)
        y, _ = trajectory(spa(0.05 / (1 - beta), 1 - beta, beta), itself, jnp.float64)
    np.testing.assert_allclose(y, reference, rtol=0, atol=1e-12)


def sgd_direction(gradient: Any, k: int, y: Any) -> Any:
    del k, y
    return gradient


class AdamWDirection:
    """That of Adam without a first moment, and decoupled weight decay."""

    def __init__(self) -> None:
        self.nu: Any = 0.0

    def __call__(self, gradient: Any, k: int, y: Any) -> Any:
        self.nu = 0.98 * self.nu + 0.02 * gradient**2
        return gradient / (np.sqrt(self.nu / (1 - 0.98 ** (k + 1))) + 1e-6) + 0.1 * y


ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
SCHEDULES = {
    "constant": (lambda k: 0.1 + 0 * k, lambda k: 0.05 + 0 * k, lambda k: 0.8 + 0 * k),
    "schedules": (
        lambda k: 0.2 * abs(np.sin(k / 40)) * (k % 100 > 20),  # and gaps of 0
        lambda k: 0.1 + 0.9 * (k % 70 == 0),
        lambda k: 0.9 - 0.4 * (k % 50 > 25),
    ),
}


@pytest.mark.parametrize("method", ["sgd", "adamw"])
@pytest.mark.parametrize("schedules", SCHEDULES.values(), ids=SCHEDULES)
def test_published_update(schedules: Any, method: str) -> None:
    """Three sequences, of which two are kept, with μ_y constant or not."""
    gamma, c, mu_y = schedules
    scale = 1.0 if method == "sgd" else 0.02
    direction = sgd_direction if method == "sgd" else AdamWDirection()
    y_reference, x_reference = published(direction, lambda k: scale * gamma(k), c, mu_y)
    with x64():
        counts = np.arange(NUM_STEPS)
        as_jax = lambda f: lambda k: jnp.asarray(np.array([f(i) for i in counts], float))[k]
        hyperparams = as_jax(lambda k: scale * gamma(k)), as_jax(c), as_jax(mu_y)
        tx = spa(*hyperparams) if method == "sgd" else spa_adamw(*hyperparams, **ADAMW)
        y, x = trajectory(tx, eval_params, jnp.float64)
    is_constant = schedules is SCHEDULES["constant"]
    # A μ_y that has changed is compared with the float32 that the state keeps.
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-11 if is_constant else 1e-6)
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-6)
    assert np.abs(y_reference[-1] - 0.1).max() > 0.1


def test_quasi_hyperbolic_momentum() -> None:
    """m ← β m + (1 − β) g, y ← y − α((1 − ν) g + ν m), with constants."""
    alpha, beta, nu = 0.3, 0.9, 0.7
    tx = spa(alpha, 1 - beta, nu)
    rng = np.random.default_rng(0)
    y, m = np.ones(5), np.zeros(5)
    params, state = jnp.ones(5), tx.init(jnp.ones(5))
    for _ in range(50):
        g = rng.normal(size=5)
        m = beta * m + (1 - beta) * g
        y = y - alpha * ((1 - nu) * g + nu * m)
        updates, state = jax.jit(tx.update)(jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        # What optax.trace would hold, which is not divided by 1/(1 − β).
        trace = (eval_params(state, params) - state.z) / state.w
        np.testing.assert_allclose(trace, m / (1 - beta), atol=1e-4)
    np.testing.assert_allclose(params, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_interpolation_1_is_spa(dtype: Any) -> None:
    """To the bit, state and all."""
    cosine = lenient(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100))
    params, grads = optax.tree.cast((PARAMS, GRADS), dtype)
    key = jax.random.key(1)
    for rate, c, rounding_key in ((0.1, 0.1, None), (cosine, UNIFORM, key), (0.3, 0.0033, key)):
        x, expected = apply(spa(rate, c, rounding_key=rounding_key), params, [grads] * 20)
        y, state = apply(spa(rate, c, 1.0, rounding_key=rounding_key), params, [grads] * 20)
        chex.assert_trees_all_equal((y, state), (x, expected))
        chex.assert_trees_all_equal(eval_params(state, y), y)


def test_interpolation_may_change_unforeseen() -> None:
    """Injected, or edited before a run is resumed: x and z go on as they would have."""
    mu_y = lambda k: jnp.where(k < 3, 0.9, 0.5)
    scheduled = apply(spa(0.1, 0.2, mu_y), PARAMS, [GRADS] * 6)
    injected = optax.inject_hyperparams(spa)(learning_rate=0.1, averaging=0.2, interpolation=0.9)
    params, state = apply(injected, PARAMS, [GRADS] * 3)
    state = optax.tree.set(state, interpolation=jnp.array(0.5))
    params_1, state_1 = resume(injected, params, state, 3)
    chex.assert_trees_all_close(params_1, scheduled[0], rtol=1e-6)
    chex.assert_trees_all_close(state_1.inner_state, scheduled[1], rtol=1e-6)
    first, second = spa(0.1, 0.2, 0.9), spa(0.1, 0.2, 0.5)
    params_2, state_2 = resume(second, *apply(first, PARAMS, [GRADS] * 3), 3)
    chex.assert_trees_all_close((params_2, state_2), scheduled, rtol=1e-6)
    # It matters: without it x would be off.
    wrong = state_1.inner_state._replace(mu_y=jnp.array(0.9))
    assert relative_difference(eval_params(wrong, params_1), eval_params(state_1, params_1)) > 1e-3


def resume(tx: Any, params: Any, state: Any, num_steps: int) -> tuple[Any, Any]:
    for _ in range(num_steps):
        updates, state = jax.jit(tx.update)(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_the_state_tells_c_and_not_what_a_change_makes_of_it() -> None:
    _, state = apply(spa(0.1, 0.2, lambda k: 0.5 + 0.1 * k.astype(float)), PARAMS, [GRADS] * 4)
    np.testing.assert_allclose(state.c, 0.2, rtol=1e-6)


def test_a_state_of_zeros_is_one_at_the_start() -> None:
    """As that of `optax.adamw` and `spa` are."""
    for tx in (spa(0.1), spa(0.1, 0.05, 0.9), spa_adamw(0.1), spa_adamw(0.1, 0.05, 0.9)):
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, PARAMS))
        updates, _ = tx.update(GRADS, state, PARAMS)
        expected, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        chex.assert_trees_all_equal(updates, expected)


def test_derivative_with_respect_to_interpolation() -> None:
    """At the μ_y that the state holds, too: x_2 = 5, z_2 = 2, and y_2 is 5 μ_y + 2 (1 − μ_y)."""

    def y_2(mu_y: Any) -> Any:
        first, second = spa(1.0, 0.5, 0.5), spa(1.0, 0.5, mu_y)
        y, d = jnp.array(10.0), jnp.array(4.0)
        updates, state = first.update(d, first.init(y), y)
        y += updates
        return y + second.update(d, state, y)[0]

    for mu_y in (0.5, 0.6):
        np.testing.assert_allclose(y_2(mu_y), 2 + 3 * mu_y, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(y_2)(mu_y), 3, rtol=1e-5)


# ------------------------------------------------------------------------------------ eval_params
WRAPPERS = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e3), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e3)), ("it", tx)),
    "partition": lambda tx: optax.partition({"all": tx}, jax.tree.map(lambda _: "all", PARAMS)),
    "masked": lambda tx: optax.masked(tx, jax.tree.map(lambda _: True, PARAMS)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_eval_params_finds_the_state(wrap: Any) -> None:
    y, state = apply(spa(0.1, 0.1, 0.5), PARAMS, [GRADS] * 3)
    expected = eval_params(state, y)
    assert relative_difference(expected, y) > 1e-3
    with jax.numpy_dtype_promotion("standard"):  # for MultiSteps
        wrapped_y, wrapped_state = apply(wrap(spa(0.1, 0.1, 0.5)), PARAMS, [GRADS] * 3)
    x = jax.jit(eval_params)(wrapped_state, wrapped_y)
    chex.assert_trees_all_close(x, expected, rtol=1e-6)
    chex.assert_trees_all_equal_structs(x, PARAMS)


def test_eval_params_where_params_are_shared() -> None:
    mask = {"w": True, "b": {"c": False}}
    y, state = apply(spa(0.1, 0.1, 0.5), PARAMS, [GRADS] * 3)
    expected = eval_params(state, y)
    masked_y, masked_state = apply(optax.masked(spa(0.1, 0.1, 0.5), mask), PARAMS, [GRADS] * 3)
    x = eval_params(masked_state, masked_y)
    np.testing.assert_allclose(x["w"], expected["w"], rtol=1e-6)
    np.testing.assert_array_equal(x["b"]["c"], masked_y["b"]["c"])
    labels = {"w": "slow", "b": {"c": "fast"}}
    for fast in (optax.adam(0.1), spa(0.1), spa(0.2, 0.3, 0.4)):
        tx = optax.partition({"slow": spa(0.1, 0.1, 0.5), "fast": fast}, labels)
        with jax.numpy_dtype_promotion("standard"):  # for Adam
            both_y, both_state = apply(tx, PARAMS, [GRADS] * 3)
            alone_y, alone_state = apply(fast, PARAMS["b"], [GRADS["b"]] * 3)
        x = eval_params(both_state, both_y)
        np.testing.assert_allclose(x["w"], expected["w"], rtol=1e-6)
        is_family = isinstance(alone_state, SPAState)
        alone_x = eval_params(alone_state, alone_y) if is_family else alone_y
        np.testing.assert_allclose(x["b"]["c"], alone_x["c"], rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        spa(0.1),
        spa_from_sgdm(0.1, nesterov=True),
        spa_adamw(0.1),
        optax.chain(spa(0.1)),
        stochastic_rounding(optax.sgd(0.1), jax.random.key(0)),
    ],
)
def test_eval_params_of_spa_are_params(tx: Any) -> None:
    params, state = apply(tx, PARAMS, [GRADS] * 3)
    chex.assert_trees_all_equal(eval_params(state, params), params)


def test_eval_params_of_nnx() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.clip(1e3), spa(0.1, 0.1, 0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    start = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    grads = jax.tree.map(jnp.cos, start)
    of_model = jax.tree.map(jnp.cos, nnx.state(model, nnx.Param))
    for _ in range(3):
        optimizer.update(model, of_model)
    x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    assert type(x) is type(nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match=r"`params` are `nnx.state\(model, nnx.Param\)`"):
        eval_params(optimizer.opt_state, model)
    y, state = apply(tx, start, [grads] * 3)
    expected = eval_params(state, y)
    chex.assert_trees_all_close(nnx.to_pure_dict(x), expected, rtol=1e-6)
    nnx.update(model, x)
    np.testing.assert_allclose(model.kernel[...], expected["kernel"], rtol=1e-6)


def test_evaluating_a_model_of_nnx_between_steps() -> None:
    """By the recipe of the docstring training goes on as if nothing had been evaluated."""

    def train(evaluates: bool, restores: bool = False) -> Any:
        model = nnx.Sequential(
            nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        )
        optimizer = nnx.Optimizer(model, spa(0.1, 0.1, 0.5), wrt=nnx.Param)
        inputs = jax.random.normal(jax.random.key(0), (8, 3))
        loss = lambda model: jnp.mean((model(inputs) - 1) ** 2)
        for _ in range(6):
            optimizer.update(model, nnx.grad(loss)(model))
            y = nnx.state(model, nnx.Param)
            x = eval_params(optimizer.opt_state, y)
            if evaluates:
                average = nnx.clone(model)
                nnx.update(average, x)
                average.eval()
                assert jnp.isfinite(loss(average))
            if restores:  # does not: y is live, and holds x by now
                nnx.update(model, x)
                nnx.update(model, y)
        return nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))

    expected = train(False)
    assert relative_difference(train(True), expected) < 1e-6
    assert relative_difference(train(False, restores=True), expected) > 1e-3


@pytest.mark.parametrize(
    "opt_state",
    [
        optax.adam(0.1).init(PARAMS),
        optax.contrib.schedule_free_sgd(0.1).init(PARAMS),
        (),
        None,
        spa(0.1, 0.05, 0.9).init({"other": jnp.ones(3)}),
        spa(0.1, 0.05, 0.9).init(jax.tree.map(lambda leaf: leaf[..., :2], PARAMS)),
        optax.chain(spa(0.1, 0.05, 0.9), spa(0.1, 0.05, 0.9)).init(PARAMS),
        optax.chain(spa(0.1), spa(0.1, 0.05, 0.9)).init(PARAMS),
    ],
    ids=["adam", "schedule_free", "empty", "None", "other tree", "shapes", "two", "two kinds"],
)
def test_eval_params_of_a_foreign_state(opt_state: Any) -> None:
    with pytest.raises(ValueError, match=r"`opt_state` must (hold|have)"):
        eval_params(opt_state, PARAMS)


def test_eval_params_names_the_optimizer_found() -> None:
    with pytest.raises(ValueError, match="an `SPAState`, got EmptyState, ScaleByAdamState"):
        eval_params(optax.adamw(0.1).init(PARAMS), PARAMS)


def test_eval_params_with_swapped_arguments() -> None:
    with pytest.raises(ValueError, match="`opt_state` must hold an `SPAState`, got dict"):
        eval_params(PARAMS, spa(0.1, 0.05, 0.9).init(PARAMS))


def test_eval_params_of_an_ensemble() -> None:
    def train(mu_y: Any) -> Any:
        tx = spa(1.0, 0.1, mu_y)
        params = jnp.ones(2)
        updates, state = tx.update(jnp.ones(2), tx.init(params), params)
        return params + updates, state

    params, states = jax.vmap(train)(jnp.array([0.3, 0.9]))
    np.testing.assert_allclose(jax.vmap(eval_params)(states, params), 0.9, rtol=1e-6)
    with pytest.raises(ValueError, match="`opt_state` must be of one run, got a batch"):
        eval_params(states, params)


def test_eval_params_before_the_first_step() -> None:
    state = spa(0.1, 0.05, 0.9).init(PARAMS)
    chex.assert_trees_all_equal(eval_params(state, PARAMS), PARAMS)
    loaded = jax.tree.map(lambda p: p + 5, PARAMS)  # pretrained, put in after `init`
    chex.assert_trees_all_equal(eval_params(state, loaded), loaded)


def test_eval_params_of_all_kinds_of_leaves() -> None:
    params = {
        "bfloat16": jnp.ones(4, jnp.bfloat16),
        "complex": jnp.array([1 + 2j, 3 - 1j]),
        "integer": jnp.arange(3),
        "None": None,
        "scalar": jnp.array(2.0),
    }
    tx = spa(0.5, 0.1, 0.5)
    grads = jax.tree.map(lambda p: jnp.ones_like(p), params)
    y, state = apply(tx, params, [grads] * 3)
    x = eval_params(state, y)
    chex.assert_trees_all_equal_shapes_and_dtypes(x, params)
    z = state.z
    wide = lambda leaf: np.asarray(leaf).astype(np.complex64)
    for name in ("bfloat16", "complex", "scalar"):
        expected = 2 * wide(y[name]) - wide(z[name])  # μ_y = 1/2
        np.testing.assert_allclose(wide(x[name]), expected, rtol=1e-2 if name[0] == "b" else 1e-6)
    np.testing.assert_array_equal(x["integer"], params["integer"])


def test_mu_y_of_the_state() -> None:
    state = spa(0.1, 0.05, interpolation=0.25).init(PARAMS)
    assert type(state) is SPAState
    assert float(state.mu_y) == 0.25
    assert state.mu_y.dtype == jnp.float32
    assert functools.reduce(lambda n, leaf: n + leaf.size, jax.tree.leaves(state), 0) == 9 + 5
