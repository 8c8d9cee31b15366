"""Conversions of hyper-parameters, both ways."""

from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import optimized, table, x64

from spa_optax import hyperparams_from_sgdm, hyperparams_to_sgdm, spa, spa_from_sgdm, theory
from spa_optax._hyperparams import SGDMHyperparams, SPAHyperparams


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
    # At c = 1 z = x: η = 0 after η > 0 carries nothing on, and β = 0 does as well as any.
    _, beta = hyperparams_to_sgdm(lambda k: jnp.where(k < 2, 1.0, 0.0), 1.0)
    np.testing.assert_array_equal([float(beta(k)) for k in range(4)], 0)
