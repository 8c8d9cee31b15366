"""The iterates of `spa_from_sgdm` are those of `optax.sgd`: 2,000 steps on real digits."""

import functools
import itertools
import pickle
from collections.abc import Callable
from typing import Any

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
    MOMENTA,
    NUM_STEPS,
    RATES,
    WARMUP_COSINE,
    apply,
    assert_apart_by_rounding,
    batches,
    digits,
    logistic_regression,
    optimized,
    quick_names,
    relative_difference,
    rounding_noise,
    sgdm,
    slow,
    table,
    train,
    x64,
)
from jaxtyping import Array

from spa_optax import hyperparams_from_sgdm, spa, spa_from_sgdm

# float32: each of two runs rounds x 2,000 times, by half an ulp (6e-8) or less. At random that adds
# up to √2 √2,000 6e-8/√3 = 2.2e-6 of ‖x‖, and twice that is allowed. β near 1 adds the rounding of
# 1 − β, which is 6e-8/(1 − β) of the length of every step: 6e-5 at 0.999.
FLOAT32_TOLERANCE = {0.95: 4.4e-6, 0.999: 6.4e-5}
FLOAT64_TOLERANCE = 1e-10

injected = optax.inject_hyperparams(spa_from_sgdm)


@functools.cache
def digits_runs(dtype: str, momentum: float | None, nesterov: bool) -> Callable[..., Any]:
    """SGD+M and SPA side by side: foreseen, injected, short-sighted, and edited halfway.

    For many schedules at once, (s, n) over the counts; `momentum` is a number for the look-ahead
    over a horizon that follows from it, None for one over the default.
    """

    @optimized
    @jax.vmap
    def run(alphas: Array, betas: Array, edited: Array) -> list[Array]:
        alpha, beta = table(alphas), table(betas) if momentum is None else momentum
        edit = table(edited)
        txs = [
            sgdm(alpha, beta, nesterov),
            spa_from_sgdm(alpha, beta, nesterov),
            injected(learning_rate=alpha, momentum=beta, nesterov=nesterov),
            spa_from_sgdm(alpha, beta, nesterov, horizon=7),
        ]
        edits = {0: sgdm(edit, beta, nesterov), 1: spa_from_sgdm(edit, beta, nesterov)}
        return train(logistic_regression(dtype), txs, jnp.zeros((65, 10), dtype), edits)

    return run


def assert_same_iterates(
    dtype: str, momentum: float | None, nesterov: bool, tolerance: dict[float, float]
) -> None:
    """For each of RATES and `momentum`, or each of MOMENTA; tolerances by the largest β."""
    counts = np.arange(NUM_STEPS + 100)
    momenta = {name: values(counts) for name, values in MOMENTA.items()}
    momenta = momenta if momentum is None else {str(momentum): np.full(len(counts), momentum)}
    names, alphas, betas, tolerances = [], [], [], []
    for rate, (name, beta) in itertools.product(RATES, momenta.items()):
        names.append(f"{rate}, β {name}")
        # Long memories take small rates: α/(1 − β) is the length of the stride.
        longest = np.nanmax(beta)
        alphas.append(min(1.0, (1 - longest) / 0.05) * RATES[rate](counts))
        betas.append(beta)
        tolerances.append(next(allowed for to, allowed in tolerance.items() if longest <= to))
    edited = 3 * np.roll(alphas, 90, axis=1)
    run = digits_runs(dtype, momentum, nesterov)
    runs = run(*(jnp.asarray(values, dtype) for values in (alphas, betas, edited)))
    for name, allowed, *xs in zip(names, tolerances, *runs, strict=True):
        sgd, foreseen, unforeseen, short, sgd_edited, spa_edited = xs
        for kind, x, reference in (
            ("foreseen", foreseen, sgd),
            ("injected", unforeseen, sgd),
            ("horizon of 7", short, sgd),
            ("edited", spa_edited, sgd_edited),
        ):
            assert relative_difference(x, reference) < allowed, (name, kind)


@pytest.mark.parametrize(
    ("momentum", "nesterov"),
    [
        (0.9, True),
        slow(None, False),
        slow(0.9, False),
        slow(None, True),
        slow(0.999, False),
        slow(0.999, True),
    ],
)
def test_sgdm_in_float64(momentum: float | None, nesterov: bool) -> None:
    with x64():
        assert_same_iterates("float64", momentum, nesterov, {1.0: FLOAT64_TOLERANCE})


@pytest.mark.parametrize("nesterov", [False, slow(True)], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("momentum", [slow(0.0), 0.9, slow(0.999), slow(None)])
def test_sgdm_in_float32(momentum: float | None, nesterov: bool) -> None:
    assert_same_iterates("float32", momentum, nesterov, FLOAT32_TOLERANCE)


def test_a_rise_that_was_not_foreseen_magnifies_the_rounding_of_x_and_no_more() -> None:
    # z − x = −w m is known to within an ulp of x; when w must grow r-fold, so does that. Beyond
    # 1/√eps = 2,896 nothing of m would be left, and momentum restarts from 0.
    grads = [jnp.full(100, 0.01)] * 3
    x_0 = jnp.linspace(0.5, 1.0, 100)
    for rise, tolerance in ((100.0, 100 * 6e-8), (1_000.0, 1_000 * 6e-8)):
        x, state = apply(spa_from_sgdm(1e-4, 0.9), x_0, grads)
        reference, sgd_state = apply(optax.sgd(1e-4, 0.9), x_0, grads)
        updates, _ = spa_from_sgdm(1e-4 * rise, 0.9).update(grads[0], state, x)
        expected, _ = optax.sgd(1e-4 * rise, 0.9).update(grads[0], sgd_state)
        chex.assert_trees_all_close(x + updates, reference + expected, rtol=tolerance)
    x, state = apply(spa_from_sgdm(1e-9, 0.9), x_0, grads)
    updates, _ = spa_from_sgdm(0.1, 0.9).update(grads[0], state, x)
    chex.assert_trees_all_close(updates, -0.1 * grads[0], rtol=1e-5)


def test_the_end_of_a_schedule_leaves_momentum_for_the_next() -> None:
    # A gap of α = 0, of any length and unforeseen: m still decays, and is there when α returns.
    with x64():
        grads = [jnp.array([1.0, -2.0]), jnp.array([0.5, 3.0])] * 10
        for nesterov in (False, True):
            rates = [0.1] * 5 + [0.0] * 10 + [0.2] * 5
            alpha = table(jnp.asarray(rates))
            tx = injected(learning_rate=alpha, momentum=0.9, nesterov=nesterov)
            x, _ = apply(tx, jnp.zeros(2), grads)
            reference, _ = apply(sgdm(alpha, 0.9, nesterov), jnp.zeros(2), grads)
            chex.assert_trees_all_close(x, reference, rtol=1e-14)


OPTAX_SCHEDULES = {
    "cosine": optax.warmup_cosine_decay_schedule(0.0, 0.3, 200, NUM_STEPS),
    "linear": optax.linear_schedule(0.3, 0.0, NUM_STEPS),
    "one cycle": optax.cosine_onecycle_schedule(NUM_STEPS, 0.3),
    "steps": optax.piecewise_constant_schedule(0.3, {1_000: 0.1, 1_500: 0.1}),
    "restarts": optax.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": 0.3, "decay_steps": 500, "warmup_steps": 50}] * 4
    ),
    "exponential": optax.exponential_decay(0.3, 1_000, 0.1),
    "undefined past its end": lambda count: 0.3 * jnp.sqrt(1 - count / NUM_STEPS),
}


@pytest.mark.parametrize("name", quick_names(OPTAX_SCHEDULES, "one cycle", "restarts"))
def test_a_schedule_edited_before_a_resume(name: str) -> None:
    """A run is saved at half time, and resumed with a third of the rate."""
    half = NUM_STEPS // 2
    before = OPTAX_SCHEDULES[name]
    after = lambda count: before(count) / 3
    loss = logistic_regression("float32")

    def run(tx: Any, params: Any, state: Any, steps: slice) -> Any:
        def body(carry: Any, batch: Array) -> Any:
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        with jax.numpy_dtype_promotion("standard"):
            carry = (params, tx.init(params) if state is None else state)
            return jax.lax.scan(body, carry, batches()[steps])[0]

    w_0 = jnp.zeros((65, 10))
    switched = lambda count: jnp.where(count < half, before(count), after(count))
    reference, _ = run(sgdm(switched, 0.9), w_0, None, slice(None))
    saved = pickle.dumps(jax.device_get(run(spa_from_sgdm(before, 0.9), w_0, None, slice(half))))
    params, state = pickle.loads(saved)
    params, state = run(spa_from_sgdm(after, 0.9), params, state, slice(half, None))
    assert relative_difference(params, reference) < FLOAT32_TOLERANCE[0.95]
    assert int(state.count) == NUM_STEPS


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_any_hyperparameters(seed: int, nesterov: bool) -> None:
    """Against NumPy straight from the equations, float64: rates, zeros, runs and β at random."""
    rng = np.random.default_rng(seed)
    num_steps = 120

    def pieces(draw: Callable[[], float]) -> np.ndarray:
        values: list[float] = []
        while len(values) < num_steps:
            values += [draw()] * int(rng.integers(1, 25))
        return np.array(values[:num_steps])

    alphas = pieces(lambda: rng.choice([0.0, 10 ** rng.uniform(-3, -0.5)]))
    betas = pieces(lambda: rng.choice([0.0, rng.uniform(0, 0.99)]))
    hessian = np.diag(rng.uniform(0.01, 1, 5))
    x_0 = rng.normal(size=5)

    x, m = x_0, np.zeros(5)
    for alpha, beta in zip(alphas, betas, strict=True):
        g = hessian @ x
        m = beta * m + g
        x = x - alpha * (g + beta * m if nesterov else m)

    with x64():
        for result in _run_quadratic(nesterov)(alphas, betas, hessian, x_0):
            # 2e-15 where all is foreseen (3,000 seeds). A rise that was not, from β near 0 to near
            # 1, magnifies rounding up to 1e5-fold: 1.4e-11 with the horizon of 3.
            assert np.linalg.norm(result - x) < 1e-10 * np.linalg.norm(x_0)


@functools.cache
def _run_quadratic(nesterov: bool) -> Callable[..., Any]:
    @jax.jit
    def run(alphas: Array, betas: Array, hessian: Array, x_0: Array) -> list[Array]:
        alpha, beta = table(alphas), table(betas)
        results = []
        for tx in (
            spa_from_sgdm(alpha, beta, nesterov),
            spa_from_sgdm(alpha, beta, nesterov, horizon=3),
            injected(learning_rate=alpha, momentum=beta, nesterov=nesterov),
        ):

            def body(carry: Any, _: None, tx: Any = tx) -> Any:
                x, state = carry
                updates, state = tx.update(hessian @ x, state, x)
                return (optax.apply_updates(x, updates), state), None

            carry, _ = jax.lax.scan(body, (x_0, tx.init(x_0)), length=len(alphas))
            results.append(carry[0])
        return results

    return run


def test_the_equations_of_the_paper() -> None:
    """`spa` against NumPy, float64, with η and c at random."""
    rng = np.random.default_rng(0)
    etas, cs, grads = rng.uniform(0, 2, 50), rng.uniform(0, 1, 50), rng.normal(size=(50, 7))
    x = z = rng.normal(size=7)
    with x64():
        tx = spa(table(jnp.asarray(etas)), table(jnp.asarray(cs)))
        params, state = apply(tx, jnp.asarray(x), list(jnp.asarray(grads)))
    for eta, c, g in zip(etas, cs, grads, strict=True):
        z = z - eta * g
        x = (1 - c) * x + c * z
    np.testing.assert_allclose(params, x, rtol=1e-13)
    np.testing.assert_allclose(state.z, z, rtol=1e-13)
    assert (state.count, state.eta, state.c) == (50, np.float32(etas[-1]), np.float32(cs[-1]))


def _trained(tx: Any, num_steps: int = 300) -> tuple[Array, Any]:
    """Params and state after training on the digits in float64, under a context of x64."""
    loss = logistic_regression("float64")

    def body(carry: Any, batch: Array) -> Any:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = jnp.zeros((65, 10))
    return optimized(lambda c: jax.lax.scan(body, c, batches(num_steps))[0])(
        (params, tx.init(params))
    )


def test_constants_are_sgdm() -> None:
    with x64():
        x, state = _trained(spa(1.0, 0.1))
        reference, _ = _trained(optax.sgd(0.1, 0.9))
        chex.assert_trees_all_close(x, reference, rtol=1e-11)
        x_from, state_from = _trained(spa_from_sgdm(0.1, 0.9))
        chex.assert_trees_all_close(x_from, reference, rtol=1e-11)
        # Here w = 0.9, but float32 in the state: z differs by that rounding, and x does not.
        chex.assert_trees_all_close(state_from.z, state.z, atol=1e-7)


def test_constant_averaging_is_the_keras_form_of_momentum() -> None:
    # The learning rate inside the buffer: x ← x − v, v ← β v + α g.
    alpha = lambda k: 0.3 * jnp.exp(-k.astype(float) / 100)
    with x64():
        x, _ = _trained(spa(lambda k: alpha(k) / 0.1, 0.1))
        reference, _ = _trained(optax.chain(optax.scale_by_learning_rate(alpha), optax.trace(0.9)))
        chex.assert_trees_all_close(x, reference, rtol=1e-11)
        other, _ = _trained(optax.sgd(alpha, 0.9))
        assert relative_difference(x, other) > 1e-2  # and not the PyTorch form


def test_harmonic_averaging_is_schedule_free() -> None:
    gamma = 0.5
    with x64():
        x, state = _trained(spa(gamma, lambda k: 1 / (k + 1).astype(float)))
        oracle = optax.contrib.schedule_free(
            optax.sgd(gamma), gamma, b1=1.0, weight_lr_power=0.0, state_dtype=jnp.float64
        )
        with jax.numpy_dtype_promotion("standard"):
            reference, reference_state = _trained(oracle)
        chex.assert_trees_all_close(x, reference, rtol=1e-11)
        chex.assert_trees_all_close(state.z, reference_state.z, rtol=1e-11)


def test_rounding_x_keeps_its_error_in_momentum() -> None:
    """With an exact z it is SGD+M with m ← m + (1/α)(1 − 1/β) error, if α is constant."""

    def distance(alpha: optax.Schedule, beta: float = 0.9, num_steps: int = 400) -> float:
        random = np.random.default_rng(0)
        curvature, x = np.geomspace(0.01, 1, 32), random.normal(size=32)
        coarse = lambda x: np.round(16 * x) / 16
        tx = spa_from_sgdm(alpha, beta)
        m, params, update = np.zeros(32), x, jax.jit(tx.update)
        state = tx.init(jnp.array(params))
        largest = 0.0
        for k, noise in enumerate(random.normal(size=(num_steps, 32))):
            m = beta * m + curvature * x + noise
            exact = x - float(alpha(k)) * m
            x = coarse(exact)
            m += (1 - 1 / beta) / float(alpha(k)) * (exact - x)
            updates, state = update(jnp.array(curvature * params + noise), state, params)
            params = coarse(params + np.asarray(updates))
            largest = max(largest, float(np.abs(params - x).max()))
        return largest

    with x64():
        assert distance(lambda k: jnp.full(jnp.shape(k), 0.02)) == 0
        decayed = lambda k: 0.02 * jnp.cos(jnp.asarray(k, float) * jnp.pi / 800) ** 2
        assert distance(decayed) >= 1 / 16  # one place of `coarse`: here they differ


def test_primal_averaging_of_any_direction() -> None:
    # Behind Adam without first moment, the gradient that `spa` sees is Adam's direction.
    with x64():
        direction = optax.scale_by_adam(b1=0.0)
        with jax.numpy_dtype_promotion("standard"):
            x, _ = _trained(optax.chain(direction, spa(0.1, 0.1)))
            reference, _ = _trained(optax.chain(direction, optax.sgd(0.01, 0.9)))
        chex.assert_trees_all_close(x, reference, rtol=1e-9)


def test_foreseen_hyperparameters_leave_z_to_the_gradient() -> None:
    """`spa` with the hyper-parameters looked ahead is `spa_from_sgdm`, z included."""
    alpha = lambda k: 0.2 * jnp.cos(k.astype(float) / 200) ** 2
    with x64():
        reference, _ = _trained(sgdm(alpha, 0.9))
        x, state = _trained(spa(*hyperparams_from_sgdm(alpha, 0.9)))
        assert relative_difference(x, reference) < 1e-10
        _, state_from = _trained(spa_from_sgdm(alpha, 0.9))
        chex.assert_trees_all_close(state_from.z, state.z, atol=1e-6)
    # In float32 to the last bit: z_{k+1} − z_k is −η_k g_k, and no step re-anchors.
    tx = spa_from_sgdm(alpha, 0.9)
    params = jnp.array([1.0, -3.0])
    state = tx.init(params)
    for _ in range(30):
        z = state.z
        updates, state = tx.update(0.1 * params, state, params)
        np.testing.assert_allclose(z - state.eta * (0.1 * params), state.z, rtol=2.4e-7)
        params = optax.apply_updates(params, updates)


def test_a_network_on_digits() -> None:
    """Non-convex, so rounding grows: float64, beside what noise of an ulp a step comes to."""
    graphdef, params = nnx.split(
        nnx.Sequential(
            nnx.Linear(65, 32, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(32, 10, rngs=nnx.Rngs(1))
        )
    )
    with x64(), jax.numpy_dtype_promotion("standard"):
        images, labels = map(jnp.asarray, digits())

        def loss(params: Any, batch: Array) -> Array:
            logits = nnx.merge(graphdef, params)(images[batch])
            return optax.softmax_cross_entropy(logits, labels[batch]).mean()

        sgd = sgdm(WARMUP_COSINE, 0.9)
        txs = [sgd, spa_from_sgdm(WARMUP_COSINE, 0.9), optax.chain(sgd, rounding_noise())]
        run = optimized(lambda params: train(loss, txs, params))
        reference, x, noisy = run(optax.tree.cast(params, jnp.float64))
    assert_apart_by_rounding(x, reference, noisy, at_most=1e-6)
