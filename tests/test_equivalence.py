"""The iterates of `spa_from_sgdm` are those of `optax.sgd`: 2,000 steps on digits."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import chex
import helpers
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    NUM_STEPS,
    batches,
    long,
    optimized,
    run,
    sgdm,
    slow,
    table,
    trained,
    trajectory,
    x64,
)
from jaxtyping import Array

from spa_optax import hyperparams_from_sgdm, spa, spa_from_sgdm

# float32: each of two runs rounds x 2,000 times, by half an ulp (6e-8) or less. At
# random that adds up to √2 √2,000 6e-8/√3 = 2.2e-6 of ‖x‖, and twice that is allowed. β
# near 1 adds the rounding of 1 − β, which is 6e-8/(1 − β) of the length of every step:
# 6e-5 at 0.999.
TOLERANCES = {"float64": {1.0: 1e-10}, "float32": {0.95: 4.4e-6, 0.999: 6.4e-5}}

injected = optax.inject_hyperparams(spa_from_sgdm)


def params_of(state: Any, params: Any) -> Any:
    return params


def digits_runs(
    dtype: str, momentum: float | None, nesterov: bool
) -> Callable[..., Any]:
    """Runs of SGD+M and SPA, for many schedules at once (schedules, counts).

    SPA foresees its schedules, has them injected, has a short horizon, or has them
    edited halfway. With a number `momentum` its horizon follows from it; with None it
    is the default.
    """

    @optimized
    @jax.vmap
    def run(alphas: Array, betas: Array, edits: Array) -> list[Array]:
        alpha, beta = table(alphas), table(betas) if momentum is None else momentum
        edit = table(edits)
        txs = [
            sgdm(alpha, beta, nesterov),
            spa_from_sgdm(alpha, beta, nesterov),
            injected(learning_rate=alpha, momentum=beta, nesterov=nesterov),
            spa_from_sgdm(alpha, beta, nesterov, horizon=7),
        ]
        gradient, start = (
            jax.grad(helpers.logistic_regression(dtype)),
            jnp.zeros((65, 10), dtype),
        )
        ends = [trained(tx, gradient, start, batches())[0] for tx in txs]
        for make, tx in zip((sgdm, spa_from_sgdm), txs, strict=False):
            x, state = trained(tx, gradient, start, batches()[: NUM_STEPS // 2])
            edited = make(edit, beta, nesterov)
            ends.append(
                trained(edited, gradient, x, batches()[NUM_STEPS // 2 :], state)[0]
            )
        return ends

    return run


@pytest.mark.parametrize(
    ("dtype", "momentum", "nesterov"),
    [
        slow("float64", 0.9, True),
        long("float32", 0.9, False),
        long("float64", None, False),
        long("float64", None, True),
        long("float64", 0.0, False),
        long("float64", 0.999, False),
        long("float32", None, True),
        long("float32", 0.999, True),
    ],
)
def test_sgdm(dtype: str, momentum: float | None, nesterov: bool) -> None:
    """For each of RATES and `momentum`, or each of MOMENTA; tolerances by the largest
    β."""
    counts = np.arange(NUM_STEPS + 100)
    momenta = {name: values(counts) for name, values in helpers.MOMENTA.items()}
    momenta = (
        momenta if momentum is None else {str(momentum): np.full(len(counts), momentum)}
    )
    names, alphas, betas, tolerances = [], [], [], []
    for rate, (name, beta) in itertools.product(helpers.RATES, momenta.items()):
        names.append(f"{rate}, β {name}")
        # Long memories take small rates: α/(1 − β) is the length of the stride.
        longest = np.nanmax(beta)
        alphas.append(min(1.0, (1 - longest) / 0.05) * helpers.RATES[rate](counts))
        betas.append(beta)
        tolerances.append(
            next(most for to, most in TOLERANCES[dtype].items() if longest <= to)
        )
    edited = 3 * np.roll(alphas, 90, axis=1)
    with x64(dtype == "float64"):
        train_all = digits_runs(dtype, momentum, nesterov)
        runs = jax.device_get(train_all(*jnp.asarray([alphas, betas, edited], dtype)))
    for name, allowed, *xs in zip(names, tolerances, *runs, strict=True):
        sgd, foreseen, unforeseen, short, sgd_edited, spa_edited = xs
        for kind, x, reference in (
            ("foreseen", foreseen, sgd),
            ("injected", unforeseen, sgd),
            ("horizon of 7", short, sgd),
            ("edited", spa_edited, sgd_edited),
        ):
            assert helpers.relative_difference(x, reference) < allowed, (name, kind)


def test_a_rise_that_was_not_foreseen_magnifies_the_rounding_of_x_and_no_more() -> None:
    # z − x = −w m is known to within an ulp of x; when w must grow r-fold, so does
    # that. Beyond 1/√eps = 2,896 nothing of m would be left, and momentum restarts from
    # 0.
    grads, x_0 = [jnp.full(100, 0.01)] * 3, jnp.linspace(0.5, 1.0, 100)
    for rise in (100.0, 2_800.0):
        found, expected = (
            run(make(1e-4 * rise, 0.9), x, grads[:1], state)[0]
            for make in (spa_from_sgdm, optax.sgd)
            for x, state in [run(make(1e-4, 0.9), x_0, grads)]
        )
        chex.assert_trees_all_close(found, expected, rtol=rise * 6e-8)
    x, state = run(spa_from_sgdm(0.1 / 3_000, 0.9), x_0, grads)
    updates, _ = spa_from_sgdm(0.1, 0.9).update(grads[0], state, x)
    chex.assert_trees_all_close(updates, -0.1 * grads[0], rtol=1e-5)


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
def test_any_hyperparameters(seed: int, nesterov: bool) -> None:
    """Against NumPy straight from the equations, float64: rates, zeros, runs and β at
    random."""
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
        for result in quadratic(nesterov, alphas, betas, hessian, x_0):
            # 2e-15 where all is foreseen (3,000 seeds). A rise that was not, from β
            # near 0 to near 1, magnifies rounding up to 1e5-fold: 1.4e-11 with the
            # horizon of 3.
            assert np.linalg.norm(result - x) < 1e-10 * np.linalg.norm(x_0)


@functools.partial(jax.jit, static_argnums=0)
def quadratic(
    nesterov: bool, alphas: Array, betas: Array, hessian: Array, x: Array
) -> list[Array]:
    alpha, beta = table(alphas), table(betas)
    txs = [
        spa_from_sgdm(alpha, beta, nesterov),
        spa_from_sgdm(alpha, beta, nesterov, horizon=3),
        injected(learning_rate=alpha, momentum=beta, nesterov=nesterov),
    ]
    return [trained(tx, lambda x, _: hessian @ x, x, alphas)[0] for tx in txs]


@pytest.mark.parametrize(
    "nesterov", [slow(False, id="heavy ball"), pytest.param(True, id="nesterov")]
)
def test_constants_and_the_keras_form(nesterov: bool) -> None:
    """`spa` with μ_y = 1, or β for Nesterov's: `optax.sgd`; with a schedule Keras's
    form of it.

    That has the rate inside the buffer: v ← β v + α g, x ← x − v, or x − β v − α g.
    """
    mu_y = 0.9 if nesterov else 1.0

    def alpha(k: Array) -> Array:
        return 0.05 * jnp.exp(-k.astype(float) / 100)

    rate_inside = optax.chain(
        optax.scale_by_learning_rate(alpha), optax.trace(0.9, nesterov)
    )
    with x64():
        for tx, oracle in (
            (spa(0.5, 0.1, mu_y), optax.sgd(0.05, 0.9, nesterov)),
            (spa(lambda k: alpha(k) / 0.1, 0.1, mu_y), rate_inside),
        ):
            x, _ = trajectory(tx, params_of, jnp.float64)
            np.testing.assert_allclose(
                x, trajectory(oracle, params_of, jnp.float64)[0], atol=1e-12
            )
        other, _ = trajectory(sgdm(alpha, 0.9, nesterov), params_of, jnp.float64)
    # And not the PyTorch form.
    assert helpers.relative_difference(x[-1], other[-1]) > 1e-2


def test_foreseen_hyperparameters_leave_z_to_the_gradient() -> None:
    """`spa` with the hyper-parameters looked ahead is `spa_from_sgdm`, z included."""

    def alpha(k: Array) -> Array:
        return 0.2 * jnp.cos(k.astype(float) / 200) ** 2

    with x64():
        reference, _ = trajectory(sgdm(alpha, 0.9), params_of, jnp.float64)
        foreseen = spa(*hyperparams_from_sgdm(alpha, 0.9))
        x, z = trajectory(foreseen, helpers.z_of, jnp.float64)
        _, z_from = trajectory(spa_from_sgdm(alpha, 0.9), helpers.z_of, jnp.float64)
        # The look-ahead leaves out 1e-8 of w.
        np.testing.assert_allclose(x, reference, rtol=0, atol=1e-8)
        # w is float32 in the state: z differs by that rounding, and x does not.
        np.testing.assert_allclose(z_from, z, rtol=0, atol=1e-6)
    # In float32 to the last bit: z_{k+1} − z_k is −η_k g_k, and no step re-anchors.
    tx = spa_from_sgdm(alpha, 0.9)
    params = jnp.array([1.0, -3.0])
    state = tx.init(params)
    for _ in range(30):
        g, z = 0.45 * params, state.z  # z comes near 0
        updates, state = tx.update(g, state, params)  # one operation at a time
        np.testing.assert_array_equal(z - state.eta * g, state.z)
        params = optax.apply_updates(params, updates)
