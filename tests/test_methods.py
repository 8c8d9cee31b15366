"""Published methods, each in a line of this package, against the recursions of their
papers.

In float64, for 200 noisy steps around finished optimizers of Optax.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import slow, x64

from spa_optax import (
    eval_params,
    primal_averaging,
    schedule_free_averaging,
    spa,
)

NUM_STEPS = 200
BASES: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "SGD": optax.sgd,
    "SGD+M": lambda rate: optax.sgd(rate, 0.8),
    "Adam": lambda rate: optax.adam(rate, 0.8),
    "AdamW": lambda rate: optax.adamw(rate, 0.0, weight_decay=0.1),
    "Muon": lambda rate: optax.contrib.muon(rate, weight_decay=0.1),
}
RATE = optax.warmup_cosine_decay_schedule(0.0, 0.05, 20, NUM_STEPS)
START, HESSIAN = np.random.default_rng(0).normal(size=(2, 4, 3))


def gradient(k: int, y: Any) -> jax.Array:
    """Of a quadratic, with noise as large as it is."""
    return jnp.asarray(HESSIAN**2 * y + np.random.default_rng(k).normal(size=y.shape))


def ours(tx: optax.GradientTransformation) -> Iterator[tuple[Any, Any]]:
    """y and the state after every step."""
    y = jnp.asarray(START)
    state = tx.init(y)
    update = jax.jit(tx.update)
    for k in range(NUM_STEPS):
        u, state = update(gradient(k, y), state, y)
        y = optax.apply_updates(y, u)
        yield y, state


def schedule(values: np.ndarray) -> optax.Schedule:
    """In float64, as Optax's own would not be."""
    return lambda k: jnp.asarray(values)[k]


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", [BASES["Muon"], slow(BASES["SGD+M"]), slow(BASES["AdamW"])]
)
def test_ema_nesterov(base: Any) -> None:
    """θ ← A(θ + β m), m ← γ m + (1 − γ)(θ' − θ); x is the average of θ.

    A's rate is what `primal_averaging` wraps, times 1/(1 − β). The authors evaluate
    θ = x + γ (y − x)/(γ + (1 − γ) β), not x (arXiv:2605.25395).
    """
    gamma, beta = 0.9, 0.6
    with x64(), jax.numpy_dtype_promotion("standard"):
        tx = optax.chain(base(RATE), optax.scale(1 / (1 - beta)))
        steps = ours(primal_averaging(tx, (1 - gamma) * (1 - beta), beta))
        a = base(RATE)
        theta = average = jnp.asarray(START)
        m, state = jnp.zeros_like(theta), a.init(theta)
        update = jax.jit(a.update)
        for k, (y, state_of_ours) in enumerate(steps):
            y_k = theta + beta * m
            u, state = update(gradient(k, y_k), state, y_k)
            theta, before = y_k + u, theta
            m = gamma * m + (1 - gamma) * (theta - before)
            average = gamma * average + (1 - gamma) * theta
            equal(y, theta + beta * m)
            equal(eval_params(state_of_ours, y), average)


@pytest.mark.slow
def test_amuse() -> None:
    """Schedule-Free around Muon, with weights η² and β_t rising to 1 (arXiv:2605.22432,
    Eq. 1)."""
    n, first, rho = 20, 0.6, 0.8
    t = np.arange(1, NUM_STEPS + 1)  # k + 1, as in the paper
    etas = 0.05 * np.minimum(t / n, 1)
    betas = 1 - (1 - first) * np.where(t > n, (n - 1) / np.maximum(t - 1, 1), 1) ** rho
    cs = etas**2 / np.cumsum(etas**2)
    with x64(), jax.numpy_dtype_promotion("standard"):
        muon = optax.contrib.muon(schedule(etas), weight_decay=0.1)
        averaging = schedule_free_averaging(0.05, n)
        tx = primal_averaging(muon, averaging, schedule(betas), params_of_base="z")
        x = y = z = jnp.asarray(START)
        state, update = muon.init(z), jax.jit(muon.update)
        for k, (found, of_ours) in enumerate(ours(tx)):
            u, state = update(
                gradient(k, y), state, z
            )  # the decay is that of z, as the authors'
            z = z + u
            x = (1 - cs[k]) * x + cs[k] * z
            y = betas[k] * x + (1 - betas[k]) * z
            equal(found, y)
            equal(eval_params(of_ours, found), x)


@pytest.mark.parametrize("r", [slow(0.0), slow(0.5), slow(1.0), 2.0])
def test_schedule_free_plus(r: float) -> None:
    """Weights (k + 1)^r γ^p after n steps at z, and μ_y annealed (arXiv:2605.19095)."""
    start, first, last = 30, 0.9, 0.965
    k = np.arange(NUM_STEPS)
    gammas = 0.05 * np.minimum((k + 1) / 20, 1)
    weights = np.where(k < start, 0, (k + 1) ** r * gammas**2)
    cs = np.where(k < start, 1, weights / np.maximum(np.cumsum(weights), 1e-9))
    progress = np.minimum(k / 120, 1)
    betas = 1 - (1 - first) ** (1 - progress) * (1 - last) ** progress
    with x64(), jax.numpy_dtype_promotion("standard"):
        adam = optax.scale_by_adam(0.9, 0.95)
        x = y = z = jnp.asarray(START)
        state, update = adam.init(y), jax.jit(adam.update)
        tx = optax.chain(adam, spa(schedule(gammas), schedule(cs), schedule(betas)))
        for k, (found, of_ours) in enumerate(ours(tx)):
            d, state = update(gradient(k, y), state)
            z = z - gammas[k] * d
            x = (1 - cs[k]) * x + cs[k] * z
            y = betas[k] * x + (1 - betas[k]) * z
            equal(found, y)
            equal(eval_params(of_ours, found), x)


@pytest.mark.slow
def test_diloco_with_one_worker() -> None:
    """H steps of AdamW, then one of Nesterov momentum along the way that they went."""
    h, rate, momentum = 7, 0.7, 0.6
    outer = primal_averaging(optax.sgd(rate / (1 - momentum)), 1 - momentum, momentum)
    with x64(), jax.numpy_dtype_promotion("standard"):
        ends = []
        for tx in (optax.sgd(rate, momentum, nesterov=True), outer):
            start, inner = jnp.asarray(START), optax.adamw(0.01)
            state, of_inner = tx.init(start), inner.init(start)
            for k in range(0, NUM_STEPS, h):
                y = start
                for j in range(k, k + h):
                    u, of_inner = inner.update(gradient(j, y), of_inner, y)
                    y = optax.apply_updates(y, u)
                u, state = tx.update(start - y, state, start)
                start = optax.apply_updates(start, u)
            ends.append(start)
        equal(*ends)
