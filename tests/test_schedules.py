"""Schedules to the step, and conversions of hyper-parameters, both ways."""

import functools
import itertools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import forward_recursion
from helpers import long, optimized, table, x64

from spa_optax import (
    SGDMHyperparams,
    SPAHyperparams,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    schedule_free_averaging,
    spa,
    spa_from_sgdm,
    stagewise,
)


def values(hyperparams: Any, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Both schedules at counts 0, …, num_steps − 1, in float64."""
    with x64():
        counts = np.arange(num_steps, dtype=np.int32)
        return tuple(np.asarray(h(counts)) for h in hyperparams)  # pyright: ignore


def test_boundaries_of_numpy() -> None:
    """Their dtype would meet that of the count."""
    found = values(stagewise(1.0, 0.1, np.array([2, 5])), 8)  # pyright: ignore
    np.testing.assert_array_equal(found, values(stagewise(1.0, 0.1, [2, 5]), 8))


@pytest.mark.parametrize("boundaries", [[20], [20, 25, 90], [1, 2, 3]])
@pytest.mark.parametrize("s", [None, 1.1, 1.7, 50.0])
def test_gradual_stages_to_the_step(boundaries: list[int], s: float | None) -> None:
    """η_k = max(η_{k−1}/s, η of the stage); c in proportion, or so that Insight 2
    holds."""
    gaps = [after - before for before, after in itertools.pairwise(boundaries)]
    num_steps = math.ceil(math.log(10) / math.log(s)) if s else 1
    if min(gaps, default=num_steps) < num_steps:
        with pytest.raises(ValueError, match=rf"`step_divisor`.*{s}"):
            stagewise(1.0, 0.03, boundaries, step_divisor=s)
        return
    expected = [1.0]
    for k in range(1, 151):
        stage = 10.0 ** -sum(k >= b for b in boundaries)
        expected.append(max(expected[-1] / (s or 10), stage))
    eta, c = values(stagewise(1.0, 0.03, boundaries, step_divisor=s), 150)
    np.testing.assert_allclose(eta, expected[:-1], rtol=1e-9)
    np.testing.assert_allclose(
        c, np.minimum(0.03 / np.array(expected[1:]), 1), rtol=1e-9
    )
    _, c = values(
        stagewise(1.0, 0.03, boundaries, step_divisor=s, averaging_mode="balance"), 150
    )
    # (1/c_k − 1)/η_k does not change; c_k is `averaging` at count k − 1.
    np.testing.assert_allclose(
        (1 / c - 1) / np.array(expected[1:]), 1 / 0.03 - 1, rtol=1e-9
    )


@pytest.mark.parametrize("c", [1e-30, 0.1])
def test_no_nan_where_the_factor_overflows(c: float) -> None:
    """In float32 e^89 is inf, and a ratio of 10^-46 is 0."""
    for rule in ("constant", "scale", "balance"):
        hyperparams = stagewise(1.0, c, range(10, 900, 10), averaging_mode=rule)
        _, found = (h(np.array([5, 500, 1_000])) for h in hyperparams)
        np.testing.assert_allclose(found[0], c, rtol=1e-6)
        np.testing.assert_allclose(
            found[2], c if rule == "constant" else c > 0, rtol=1e-6
        )


def authors_averaging(rates: np.ndarray, power: float) -> list[float]:
    """The loop of the authors' own code, from the rate of every step."""
    largest = total = 0.0
    averaging = []
    for rate in rates:
        largest = max(largest, float(rate))
        weight = largest**power
        total += weight
        averaging.append(weight / total if total else 0.0)
    return averaging


RISES: dict[str, tuple[Any, int]] = {
    "none": (0.3, 0),
    "the authors' warm-up": (0.3, 7),
    "from 0": (lambda k: 0.1 * (jnp.minimum(k, 5) / 5), 5),
    "0, then a decay": (
        lambda k: jnp.where(k < 3, 0, 0.2 * 0.9 ** (k - 3).astype(float)),
        3,
    ),
    "NaN past its end": (lambda k: 0.1 * jnp.sqrt(1 - k.astype(float) / 500), 0),
}


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", RISES)
def test_schedule_free_averaging(name: str, power: float) -> None:
    rate, warmup_steps = RISES[name]
    counts = np.arange(40, dtype=np.int32)
    rates = 0.3 * np.minimum((counts + 1) / max(warmup_steps, 1), 1)
    with x64():
        c = schedule_free_averaging(rate, warmup_steps, weight_lr_power=power)
        rates = np.array([rate(k) for k in counts]) if callable(rate) else rates
        np.testing.assert_allclose(
            c(counts), authors_averaging(rates, power), rtol=1e-12
        )


@pytest.mark.parametrize(
    ("rate", "warmup_steps", "got"),
    [
        (lambda k: -1.0, 3, r"-1\.0"),
        (lambda k: 0.0, 3, "count 3"),
        (lambda k: 0.1 * (k + 1).astype(float), 0, r"0\.2 at 1"),
        (lambda k: jnp.ones(2), 3, r"\(2,\)"),
    ],
)
def test_schedule_free_averaging_of_bad_rates(
    rate: Any, warmup_steps: int, got: str
) -> None:
    with pytest.raises(ValueError, match=f"`learning_rate`.*{got}"):
        schedule_free_averaging(rate, warmup_steps)


@pytest.mark.parametrize("warmup_steps", [0, 30])
def test_a_rise_after_the_warm_up_is_seen(warmup_steps: int) -> None:
    """One that lasts for 4 % of the time since the warm-up, in the first million
    steps."""
    for after in (1, 2, 49, 100, 997, 12_345, 10**6):
        start = warmup_steps + after
        last = start + after // 25

        def rate(k: Any, start: int = start, last: int = last) -> Any:
            return jnp.where((k >= start) & (k <= last), 0.2, 0.1)

        with pytest.raises(ValueError, match=r"`learning_rate`.*0\.2 at \d+"):
            schedule_free_averaging(rate, warmup_steps)


def test_schedule_free_averaging_under_jit() -> None:
    def averaging_at_5(peak: Any) -> Any:
        def rate(k: Any) -> Any:
            return peak * jnp.minimum(k + 1, 4).astype(float)

        return schedule_free_averaging(rate, 3)(5)

    expected = authors_averaging(np.array([1, 2, 3, 4, 4, 4]), 2.0)[5]
    found = jax.jit(lambda: averaging_at_5(0.1))()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`learning_rate`.*traced"):
        jax.jit(averaging_at_5)(0.1)


def test_numbers_in_numbers_out() -> None:
    assert hyperparams_from_sgdm(0.5, 0.75) == SPAHyperparams(2.0, 0.25)
    assert hyperparams_to_sgdm(2.0, 0.25) == SGDMHyperparams(0.5, 0.75)
    assert all(type(h) is float for h in hyperparams_from_sgdm(0.5, 0.75))
    assert hyperparams_from_sgdm(0.5, 0) == SPAHyperparams(0.5, 1)
    spa(*hyperparams_from_sgdm(0.1, 0.9))
    spa_from_sgdm(*hyperparams_to_sgdm(1.0, 0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "hyperparams",
    [
        long(hyperparams_from_sgdm(lambda k: jnp.where(k < 5, 0.1, 0.01), 0.9)),
        hyperparams_from_sgdm(0.1, lambda k: jnp.where(k < 5, 0.9, 0.5)),
        hyperparams_to_sgdm(lambda k: jnp.where(k < 5, 0.1, 0.01), 0.1),
        hyperparams_to_sgdm(1.0, lambda k: jnp.where(k < 5, 0.1, 0.5)),
    ],
)
def test_ordinary_schedules(hyperparams: Any) -> None:
    """Of a Python int, of an array for plotting, and under jit and vmap."""
    for schedule in hyperparams[:2]:
        counts = np.arange(10, dtype=np.int32)
        values = jax.jit(jax.vmap(schedule))(counts)
        found = schedule(7)
        assert jnp.shape(found) == ()
        np.testing.assert_allclose(found, values[7], rtol=1e-6)
        np.testing.assert_allclose(
            schedule(counts.reshape(2, 5)).ravel(), values, rtol=1e-6
        )


def _numpy_look_ahead(
    alphas: np.ndarray, betas: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """η and c by w_k = β_k (α_k + w_{k+1}), where the last α and β stay for ever."""
    w = alphas[-1] * betas[-1] / (1 - betas[-1])
    eta = np.empty(len(alphas))
    for k in reversed(range(len(alphas))):
        eta[k] = alphas[k] + w
        w = betas[k] * eta[k]
    return eta, alphas / eta


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_look_ahead_is_the_backward_recursion(momentum: float) -> None:
    rng = np.random.default_rng(0)
    alphas = np.where(np.arange(400) % 100 < 50, 0.1, 0.01) * rng.uniform(0.5, 2, 400)
    betas = np.full(400, momentum)
    eta, c = _numpy_look_ahead(alphas, betas)
    with x64():
        counts = jnp.arange(400, dtype=jnp.int32)
        for second in (momentum, table(jnp.asarray(betas))):
            from_sgdm = hyperparams_from_sgdm(
                table(jnp.asarray(alphas)), second, horizon=20_000
            )

            def both(k: Any, pair: Any = from_sgdm) -> Any:
                return pair.learning_rate(k), pair.averaging(k)

            found = optimized(functools.partial(jax.lax.map, both))(counts)
            np.testing.assert_allclose(found[0], eta, rtol=1e-7)
            np.testing.assert_allclose(found[1], c, rtol=1e-7)
        # The default horizon leaves out less than β^H = 1e-8 of it.
        from_sgdm = hyperparams_from_sgdm(table(jnp.asarray(alphas)), momentum)
        np.testing.assert_allclose(
            jax.lax.map(from_sgdm.learning_rate, counts), eta, rtol=1e-7
        )


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_there_and_back(seed: int) -> None:
    """SPA → SGD+M → SPA, with η and c at random: α and β as Theorem 1 says."""
    rng = np.random.default_rng(seed)
    etas, cs = rng.uniform(0.5, 2, 60), rng.uniform(0.05, 0.95, 60)
    with x64():
        eta, c = table(jnp.asarray(etas)), table(jnp.asarray(cs))
        to_sgdm = hyperparams_to_sgdm(eta, c)
        counts = jnp.arange(60, dtype=jnp.int32)
        alphas, betas = (np.asarray(jax.vmap(h)(counts)) for h in to_sgdm[:2])
        np.testing.assert_allclose(alphas, etas * cs, rtol=1e-12)
        np.testing.assert_allclose(
            betas[1:], etas[:-1] / etas[1:] * (1 - cs[:-1]), rtol=1e-12
        )
        np.testing.assert_allclose(betas[0], 1 - cs[0], rtol=1e-12)
    # β may be over 1 here, which no SGD+M needs to forbid.
    again_eta, again_c = forward_recursion(alphas, betas, eta0=etas[0])
    # Each step of the recursion multiplies rounding by 1/β: compare where that is still
    # small.
    near = np.cumprod(1 / betas) < 1e6
    np.testing.assert_allclose(again_eta[near], etas[near], rtol=1e-6)
    np.testing.assert_allclose(again_c[near], cs[near], rtol=1e-6)


def test_rates_of_0_have_no_nan() -> None:
    to_sgdm = hyperparams_to_sgdm(table(jnp.array([0.0, 0.0, 1.0, 0.0, 0.0, 1.0])), 0.1)
    alphas, betas = ([float(h(k)) for k in range(6)] for h in to_sgdm[:2])
    np.testing.assert_allclose(alphas, [0, 0, 0.1, 0, 0, 0.1], rtol=1e-6)
    # inf where there is no counterpart: η_k = 0 < η_{k−1}.
    np.testing.assert_allclose(betas, [0.9, 0, 0, np.inf, 0, 0], rtol=1e-6)
    from_sgdm = hyperparams_from_sgdm(table(jnp.array([0.0, 1.0, 0.0])), 0.5)
    eta, c = ([float(h(k)) for k in range(4)] for h in from_sgdm)
    np.testing.assert_allclose(eta, [0.5, 1, 0, 0], atol=1e-7)
    np.testing.assert_allclose(c, [0, 1, 1, 1], atol=1e-7)  # no later rate: x is z
    # η = 0 after η > 0, but z = x: nothing is carried on, and β = 0 does as well as
    # any.
    _, beta, _ = hyperparams_to_sgdm(lambda k: jnp.where(k < 2, 1.0, 0.0), 1.0)
    np.testing.assert_array_equal([float(beta(k)) for k in range(4)], 0)
