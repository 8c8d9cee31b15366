"""`stagewise`, `momentum_drop` and `schedule_free_averaging`, to the step."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply, x64

from spa_optax import (
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    momentum_drop,
    schedule_free_averaging,
    spa,
    stagewise,
)
from spa_optax._hyperparams import SPAHyperparams


def values(hyperparams: Any, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Both schedules at counts 0, …, num_steps − 1, in float64."""
    with x64():
        counts = np.arange(num_steps, dtype=np.int32)
        return tuple(np.asarray(h(counts)) for h in hyperparams)  # pyright: ignore


def test_abrupt_stages_to_the_step() -> None:
    # η_b is the first divided, at count b; c_b the first multiplied, at count b − 1.
    eta, c = values(stagewise(1.0, 0.05, [5, 9]), 12)
    np.testing.assert_allclose(eta, [1] * 5 + [0.1] * 4 + [0.01] * 3, rtol=1e-12)
    np.testing.assert_allclose(c, [0.05] * 4 + [0.5] * 4 + [1.0] * 4, rtol=1e-12)
    eta, c = values(stagewise(1.0, 0.05, [5, 9], 4.0, averaging_rule="constant"), 12)
    np.testing.assert_allclose(eta, [1] * 5 + [1 / 4] * 4 + [1 / 16] * 3, rtol=1e-12)
    np.testing.assert_allclose(c, [0.05] * 12, rtol=1e-12)


@pytest.mark.parametrize("boundaries", [[20], [20, 25, 90], [1, 2, 3]])
@pytest.mark.parametrize("s", [None, 1.1, 1.7, 50.0])
def test_gradual_stages_to_the_step(boundaries: list[int], s: float | None) -> None:
    """η_k = max(η_{k−1}/s, η of the stage); c in proportion, or so that Insight 2 holds."""
    gaps = [after - before for before, after in itertools.pairwise(boundaries)]
    num_steps = math.ceil(math.log(10) / math.log(s)) if s else 1
    if min(gaps, default=num_steps) < num_steps:
        with pytest.raises(ValueError, match=r"`step_factor` must be at least .* to end between"):
            stagewise(1.0, 0.03, boundaries, step_factor=s)
        return
    expected = [1.0]
    for k in range(1, 151):
        stage = 10.0 ** -sum(k >= b for b in boundaries)
        expected.append(max(expected[-1] / (s or 10), stage))
    eta, c = values(stagewise(1.0, 0.03, boundaries, step_factor=s), 150)
    np.testing.assert_allclose(eta, expected[:-1], rtol=1e-9)
    np.testing.assert_allclose(c, np.minimum(0.03 / np.array(expected[1:]), 1), rtol=1e-9)
    balanced = stagewise(1.0, 0.03, boundaries, step_factor=s, averaging_rule="balance")
    _, c = values(balanced, 150)
    # (1/c_k − 1)/η_k does not change; c_k is `averaging` at count k − 1.
    np.testing.assert_allclose((1 / c - 1) / np.array(expected[1:]), 1 / 0.03 - 1, rtol=1e-9)


@pytest.mark.parametrize("step_factor", [None, 1.5])
@pytest.mark.parametrize("hold", ["eta", "alpha"])
def test_momentum_drop_to_the_step(hold: Any, step_factor: float | None) -> None:
    eta, c = values(momentum_drop(2.0, 0.25, 6, hold=hold, step_factor=step_factor), 20)
    risen = np.minimum(0.25 * 1.5 ** np.arange(1, 16), 1) if step_factor else np.ones(15)
    np.testing.assert_allclose(c, [0.25] * 5 + [*risen], rtol=1e-12)  # c_6 is the first
    kept = eta if hold == "eta" else eta * c / 0.25
    np.testing.assert_allclose(kept, np.full(20, 2.0), rtol=1e-12)


def test_from_sgdm_and_back() -> None:
    """Theorem 1, both ways; β_0 is free."""
    hyperparams = hyperparams_from_sgdm(lambda k: 0.1 / (k + 1).astype(float), 0.5)
    alpha, beta = values(hyperparams_to_sgdm(*hyperparams), 20)
    np.testing.assert_allclose(alpha, 0.1 / np.arange(1, 21), rtol=1e-7)  # β^horizon < 1e-8
    np.testing.assert_allclose(beta[1:], 0.5, rtol=1e-7)
    np.testing.assert_allclose(hyperparams_from_sgdm(0.1, 0.75), (0.4, 0.25), rtol=1e-12)
    np.testing.assert_allclose(hyperparams_to_sgdm(0.4, 0.25), (0.1, 0.75), rtol=1e-12)


def test_two_ways_to_drop_momentum() -> None:
    """What α and β of SGD+M become: the paper's Figure 1(d), and the cut. From then on x is z."""
    to_sgdm = lambda hyperparams: values(hyperparams_to_sgdm(*hyperparams), 12)
    alpha, beta = to_sgdm(momentum_drop(1.0, 0.1, 6, hold="eta"))
    np.testing.assert_allclose(alpha, [0.1] * 5 + [1.0] * 7, rtol=1e-12)
    np.testing.assert_allclose(beta, [0.9] * 6 + [0.0] * 6, atol=1e-12)
    alpha, beta = to_sgdm(momentum_drop(1.0, 0.1, 6, hold="alpha"))
    np.testing.assert_allclose(alpha, [0.1] * 12, rtol=1e-12)
    np.testing.assert_allclose(beta, [0.9] * 5 + [9.0] + [0.0] * 6, atol=1e-12)
    grads = [jnp.array([1.0, -1.0])] * 7
    tx = spa(*momentum_drop(1.0, 0.1, 4))
    for k in range(1, 8):
        x, state = apply(tx, jnp.zeros(2), grads[:k])
        assert np.allclose(x, state.z, rtol=1e-6) == (k >= 4)


@pytest.mark.parametrize(
    "hyperparams",
    [
        stagewise(1.0, 0.1, [5], step_factor=1.1),
        momentum_drop(
            lambda k: 1 / (k + 1).astype(float), lambda k: jnp.full_like(k, 0.1, float), 5
        ),
        momentum_drop(*stagewise(1.0, 0.1, [5], averaging_rule="balance"), 9, hold="alpha"),
    ],
)
def test_ordinary_schedules(hyperparams: SPAHyperparams) -> None:
    """Of a count or of an array of them, under jit, and joined by Optax."""
    for schedule in hyperparams:
        values = [float(schedule(k)) for k in range(12)]
        counts = jnp.arange(12)
        np.testing.assert_allclose(schedule(counts), values, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(jax.jit(schedule))(counts), values, rtol=1e-6)
        with jax.numpy_dtype_promotion("standard"):
            joined = optax.join_schedules([optax.constant_schedule(3.0), schedule], [4])
            assert (float(joined(3)), float(joined(10))) == (3.0, pytest.approx(values[6]))


@pytest.mark.parametrize("c", [0.0, 1e-30, 0.1])
def test_no_nan_where_the_factor_overflows(c: float) -> None:
    """In float32 e^89 is inf, and a ratio of 10^-46 is 0; and c may be 0."""
    for rule in ("constant", "scale", "balance"):
        hyperparams = stagewise(1.0, c, range(10, 900, 10), averaging_rule=rule)
        _, found = (h(np.array([5, 500, 1_000])) for h in hyperparams)
        np.testing.assert_allclose(found[0], c, rtol=1e-6)
        np.testing.assert_allclose(found[2], c if rule == "constant" else c > 0, rtol=1e-6)
    for hold in ("eta", "alpha"):
        eta, late = (h(300) for h in momentum_drop(1.0, c, 1, step_factor=1.5, hold=hold))
        assert float(late) == (c > 0)
        np.testing.assert_allclose(eta, 1 if hold == "eta" or c == 0 else c, rtol=1e-6)


# ---------------------------------------------------------------------------- Schedule-Free's c


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
    "0 for a while, then a decay": (
        lambda k: jnp.where(k < 3, 0, 0.2 * 0.9 ** (k - 3).astype(float)),
        3,
    ),
    "NaN past its end": (lambda k: 0.1 * jnp.sqrt(1 - k.astype(float) / 500), 0),
}


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", RISES)
def test_schedule_free_averaging(name: str, power: float) -> None:
    rate, num_warmup_steps = RISES[name]
    counts = np.arange(40, dtype=np.int32)
    rates = 0.3 * np.minimum((counts + 1) / max(num_warmup_steps, 1), 1)
    with x64():
        c = schedule_free_averaging(rate, num_warmup_steps, weight_power=power)
        rates = np.array([rate(k) for k in counts]) if callable(rate) else rates
        np.testing.assert_allclose(c(counts), authors_averaging(rates, power), rtol=1e-12)


@pytest.mark.parametrize(
    ("rate", "match"),
    [
        (lambda k: -1.0, "finite and >= 0 during its warm-up"),
        (lambda k: jnp.inf, "finite and >= 0 during its warm-up"),
        (lambda k: 0.0, "> 0 and largest by count 3"),
        (lambda k: 0.1 * k.astype(float), "largest by count 3, .* got 0.4 at 4 after 0.3"),
        (lambda k: jnp.ones(2), "a scalar or a schedule of scalars, got an array of shape"),
    ],
)
def test_schedule_free_averaging_of_bad_rates(rate: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"`learning_rate` must be .*{match}"):
        schedule_free_averaging(rate, 3)


def test_without_a_warm_up_no_rate_may_rise() -> None:
    with pytest.raises(ValueError, match=r"largest by count 0, .* got 0.2 at 1 after 0.1"):
        schedule_free_averaging(lambda k: 0.1 * (k + 1).astype(float))


@pytest.mark.parametrize("num_warmup_steps", [0, 30])
def test_a_rise_after_the_warm_up_is_seen(num_warmup_steps: int) -> None:
    """One that lasts for 4 % of the time since the warm-up, in the first million steps."""
    for after in (1, 2, 49, 100, 997, 12_345, 10**6):
        start = num_warmup_steps + after
        last = start + after // 25
        rate = lambda k, start=start, last=last: jnp.where((k >= start) & (k <= last), 0.2, 0.1)
        with pytest.raises(ValueError, match=r"largest by count \d+, .* got 0.2 at \d+ after 0.1"):
            schedule_free_averaging(rate, num_warmup_steps)


def test_schedule_free_averaging_under_jit() -> None:
    rate = lambda peak: lambda k: peak * jnp.minimum(k + 1, 4).astype(float)
    at = lambda peak: schedule_free_averaging(rate(peak), 3)(5)
    expected = authors_averaging(np.array([1, 2, 3, 4, 4, 4]), 2.0)[5]
    np.testing.assert_allclose(jax.jit(lambda: at(0.1))(), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`learning_rate` must not depend on traced values"):
        jax.jit(at)(0.1)
