"""`stagewise`, `momentum_drop` and `schedule_free_averaging`, to the step."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply, lenient, unchecked, x64

from spa_optax import (
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    momentum_drop,
    schedule_free_averaging,
    spa,
    spa_from_sgdm,
    stagewise,
)
from spa_optax._hyperparams import SPAHyperparams

AT_LEAST_1 = "must be a concrete integer >= 1 and below 2^31, the limit of counts"


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


def numpy_gradual(boundaries: list[int], factor: float, s: float, num_steps: int) -> np.ndarray:
    """η by its own recursion, with s the step factor: η_k = max(η_{k−1}/s, η of the stage)."""
    eta = [1.0]
    for k in range(1, num_steps):
        target = factor ** -sum(k >= b for b in boundaries)
        eta.append(max(eta[-1] / s, target) if eta[-1] > target else target)
    return np.array(eta)


@pytest.mark.parametrize("boundaries", [[20], [20, 60], [20, 25, 90], [1, 2, 3]])
@pytest.mark.parametrize("step_factor", [1.01, 1.1, 1.7, 50.0])
def test_gradual_stages_to_the_step(boundaries: list[int], step_factor: float) -> None:
    gaps = [after - before for before, after in itertools.pairwise(boundaries)]
    num_steps = math.ceil(math.log(10) / math.log(step_factor))
    if min(gaps, default=num_steps) < num_steps:
        with pytest.raises(ValueError, match=r"`step_factor` must be at least .* to end between"):
            stagewise(1.0, 0.03, boundaries, step_factor=step_factor)
        return
    expected = numpy_gradual(boundaries, 10.0, step_factor, 1_500)
    eta, c = values(stagewise(1.0, 0.03, boundaries, step_factor=step_factor), 1_499)
    np.testing.assert_allclose(eta, expected[:-1], rtol=1e-9)
    np.testing.assert_allclose(c, np.minimum(0.03 / expected[1:], 1), rtol=1e-9)
    eta, c = values(
        stagewise(1.0, 0.03, boundaries, step_factor=step_factor, averaging_rule="balance"), 1_499
    )
    np.testing.assert_allclose(1 / c - 1, (1 / 0.03 - 1) * expected[1:], rtol=1e-9)


@pytest.mark.parametrize("step_factor", [None, 1.1])
def test_balance_keeps_the_first_coefficient_of_the_remainder_at_0(
    step_factor: float | None,
) -> None:
    """Insight 2: (1/c_k − 1)/η_k does not change, η_k and c_k being the paper's."""
    eta, c = values(
        stagewise(0.7, 0.1, [10, 50], averaging_rule="balance", step_factor=step_factor), 200
    )
    ratio = (1 / c[:-1] - 1) / eta[1:]  # c_k is `averaging` at count k − 1
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
    eta, c = values(stagewise(0.7, 0.1, [10, 50], step_factor=step_factor), 200)
    ratio = (1 / c[:-1] - 1) / eta[1:]
    assert ratio.max() > 1.5 * ratio.min()


def test_the_step_factor_of_the_paper() -> None:
    # ln 10/ln 1.0005 = 4,606.3: the division that arrives is the 4,607th, and a short one.
    eta, _ = values(stagewise(1.0, 0.1, [100], step_factor=1.0005), 5_000)
    assert eta[99] == 1
    np.testing.assert_allclose(eta[100], 1 / 1.0005, rtol=1e-9)
    np.testing.assert_allclose(eta[100 + 4_605], 1.0005**-4_606, rtol=1e-9)
    assert eta[100 + 4_605] > 0.1
    np.testing.assert_allclose(eta[100 + 4_606 :], 0.1, rtol=1e-12)


@pytest.mark.parametrize("step_factor", [None, 1.5])
def test_momentum_drop_to_the_step(step_factor: float | None) -> None:
    for hold in ("eta", "alpha"):
        hyperparams = momentum_drop(2.0, 0.25, 6, hold=hold, step_factor=step_factor)
        eta, c = values(hyperparams, 20)
        risen = np.minimum(0.25 * 1.5 ** np.arange(1, 15), 1) if step_factor else np.ones(14)
        np.testing.assert_allclose(c, [0.25] * 5 + [*risen, 1], rtol=1e-12)  # c_6 is the first
        kept = eta if hold == "eta" else eta * c / 0.25
        np.testing.assert_allclose(kept, np.full(20, 2.0), rtol=1e-12)


def test_three_ways_to_drop_momentum() -> None:
    """What α and β of SGD+M become: the paper's Figure 1(d), the cut, and the foreseen drop."""
    to_sgdm = lambda hyperparams: values(hyperparams_to_sgdm(*hyperparams), 12)
    alpha, beta = to_sgdm(momentum_drop(1.0, 0.1, 6, hold="eta"))
    np.testing.assert_allclose(alpha, [0.1] * 5 + [1.0] * 7, rtol=1e-12)
    np.testing.assert_allclose(beta, [0.9] * 6 + [0.0] * 6, atol=1e-12)
    alpha, beta = to_sgdm(momentum_drop(1.0, 0.1, 6, hold="alpha"))
    np.testing.assert_allclose(alpha, [0.1] * 12, rtol=1e-12)
    np.testing.assert_allclose(beta, [0.9] * 5 + [9.0] + [0.0] * 6, atol=1e-12)
    grads = [jnp.array([1.0, -1.0])] * 12
    drop = lambda k: jnp.where(k < 6, 0.9, 0.0)
    x, _ = apply(spa_from_sgdm(0.1, drop), jnp.zeros(2), grads)
    reference, _ = apply(optax.inject_hyperparams(optax.sgd)(0.1, drop), jnp.zeros(2), grads)
    np.testing.assert_allclose(x, reference, rtol=1e-6)


def test_from_the_drop_on_x_is_z() -> None:
    tx = spa(*momentum_drop(1.0, 0.1, 4))
    params = jnp.array([1.0, -2.0])
    state = tx.init(params)
    for k in range(1, 8):
        updates, state = tx.update(jnp.sin(params), state, params)
        params = optax.apply_updates(params, updates)
        assert np.allclose(params, state.z, rtol=1e-6) == (k >= 4)


@pytest.mark.parametrize(
    "hyperparams",
    [
        stagewise(1.0, 0.1, [5], step_factor=1.1),
        stagewise(1.0, 0.1, [5], averaging_rule="balance"),
        momentum_drop(1.0, 0.1, 5, step_factor=1.1, hold="alpha"),
        momentum_drop(
            lambda k: 1 / (k + 1).astype(float), lambda k: jnp.full_like(k, 0.1, float), 5
        ),
        momentum_drop(*stagewise(1.0, 0.1, [5]), 9),
    ],
)
def test_ordinary_schedules(hyperparams: SPAHyperparams) -> None:
    assert type(hyperparams) is SPAHyperparams
    for schedule in hyperparams:
        values = [float(schedule(k)) for k in range(12)]
        counts = jnp.arange(12)
        np.testing.assert_allclose(schedule(counts), values, rtol=1e-6)
        np.testing.assert_allclose(jax.vmap(jax.jit(schedule))(counts), values, rtol=1e-6)
        with jax.numpy_dtype_promotion("standard"):
            joined = optax.join_schedules([optax.constant_schedule(3.0), schedule], [4])
            assert (float(joined(3)), float(joined(10))) == (3.0, pytest.approx(values[6]))
    # By count alone: a state that is restored goes on where it was.
    tx = spa(*hyperparams)
    params = jnp.ones(2)
    _, whole = apply(tx, params, [params] * 8)
    x, state = apply(tx, params, [params] * 5)
    for _ in range(3):
        updates, state = tx.update(params, jax.device_get(state), x)
        x = optax.apply_updates(x, updates)
    np.testing.assert_allclose(state.z, whole.z, rtol=1e-6)


def test_no_averaging_has_no_nan() -> None:
    for rule in ("constant", "scale", "balance"):
        _, c = values(stagewise(1.0, 0.0, [5], averaging_rule=rule), 10)
        np.testing.assert_array_equal(c, 0)
    eta, c = values(momentum_drop(1.0, 0.0, 5, hold="alpha"), 10)
    np.testing.assert_array_equal(eta * c, 0)
    assert np.isfinite([eta, c]).all()


def test_no_averaging_has_no_nan_where_the_factor_overflows() -> None:
    """In float32 e^89 is inf, and a ratio of 10^-46 is 0."""
    for rule in ("constant", "scale", "balance"):
        for c in (0.0, 1e-30, 0.1):
            hyperparams = stagewise(1.0, c, range(10, 900, 10), averaging_rule=rule)
            _, found = (h(np.array([5, 500, 1_000])) for h in hyperparams)
            np.testing.assert_allclose(found[0], c, rtol=1e-6)
            np.testing.assert_allclose(found[2], c if rule == "constant" else c > 0, rtol=1e-6)
    for hold in ("eta", "alpha"):
        eta, c = (h(300) for h in momentum_drop(1.0, 0.0, 1, step_factor=1.5, hold=hold))
        assert (eta, c) == (1, 0)
        eta, c = (h(300) for h in momentum_drop(1.0, 1e-30, 1, step_factor=1.5, hold=hold))
        assert c == 1
        np.testing.assert_allclose(eta, 1 if hold == "eta" else 1e-30, rtol=1e-6)


def test_momentum_dropped_under_a_cosine_that_ends_at_0() -> None:
    """α and c are 0 in float32 for the last steps, and 1.01^99,000 is inf."""
    hyperparams = hyperparams_from_sgdm(lenient(optax.cosine_decay_schedule(0.1, 100_000)), 0.9)
    counts = np.arange(99_980, 100_010)
    assert (hyperparams.averaging(counts) == 0).any()
    for hold in ("eta", "alpha"):
        eta, c = (
            h(counts) for h in momentum_drop(*hyperparams, 1_000, step_factor=1.01, hold=hold)
        )
        assert np.isfinite([eta, c]).all()
        assert set(np.asarray(c).tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stagewise(-1.0, 0.1, [5]), "`learning_rate` must be finite and >= 0, got -1.0"),
        (lambda: stagewise(1.0, 1.1, [5]), "`averaging` must be in [0, 1], got 1.1"),
        (lambda: stagewise(1.0, 0.1, [0]), f"`boundaries` {AT_LEAST_1}, got 0"),
        (lambda: stagewise(1.0, 0.1, [9, 5]), "`boundaries` must be ascending, got [9, 5]"),
        (
            lambda: unchecked(stagewise)(1.0, 0.1, 5),
            "`boundaries` must be a sequence of steps, with one `factor` for all, got 5",
        ),
        (
            lambda: unchecked(stagewise)(1.0, 0.1, "5"),
            f"`boundaries` {AT_LEAST_1}, got '5'",
        ),
        (
            lambda: unchecked(stagewise)(1.0, 0.1, [2.5]),
            f"`boundaries` {AT_LEAST_1}, got 2.5",
        ),
        (
            lambda: unchecked(stagewise)(1.0, 0.1, {5: 0.1, 9: 0.5}),
            "with one `factor` for all, got {5: 0.1, 9: 0.5}",
        ),
        (
            lambda: stagewise(1.0, 0.1, [110, 165], step_factor=1.0005),
            "`step_factor` must be at least 1.042754, to end between boundaries 110 and 165,"
            " got 1.0005",
        ),
        (lambda: stagewise(1.0, 0.1, [5], 1.0), "`factor` must be finite and > 1, got 1.0"),
        (
            lambda: stagewise(1.0, 0.1, [5], step_factor=0.9),
            "`step_factor` must be finite and > 1, got 0.9",
        ),
        (lambda: momentum_drop(1.0, 0.1, 0), f"`step` {AT_LEAST_1}, got 0"),
        (
            lambda: momentum_drop(1.0, 0.1, 5, step_factor=1.0),
            "`step_factor` must be finite and > 1, got 1.0",
        ),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


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
    "up and down": (lambda k: jnp.array([0.1, 0.3, 0.2, 0.5])[jnp.minimum(k, 3)], 3),
}


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", RISES)
def test_schedule_free_averaging(name: str, power: float) -> None:
    rate, num_warmup_steps = RISES[name]
    counts = np.arange(40, dtype=np.int32)
    with x64():
        c = schedule_free_averaging(rate, num_warmup_steps, weight_power=power)
        rates = 0.3 * np.minimum((counts + 1) / max(num_warmup_steps, 1), 1)
        if callable(rate):
            rates = np.array([rate(k) for k in counts])
        expected = authors_averaging(rates, power)
        np.testing.assert_allclose(c(counts), expected, rtol=1e-12)
        np.testing.assert_allclose(jax.jit(c)(counts[5]), expected[5], rtol=1e-12)
    if name == "none":
        np.testing.assert_allclose(c(counts), 1 / (counts + 1.0), rtol=1e-6)


def test_schedule_free_averaging_of_bad_rates() -> None:
    rises = lambda k: 0.1 * k.astype(float)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (-0.1, {}, "`learning_rate` must be finite and >= 0, got -0.1"),
        (lambda k: -1.0, {}, "`learning_rate` must be finite and >= 0 during its warm-up"),
        (
            lambda k: 0.0,
            {"num_warmup_steps": 3},
            "`learning_rate` must be > 0 and largest by count 3",
        ),
        (rises, {"num_warmup_steps": 3}, "largest by count 3, .* got 0.4 at 4 after 0.3"),
        (
            lambda k: jnp.ones(2),
            {},
            "`learning_rate` must be a scalar or a schedule of scalars, got an array of shape",
        ),
        (
            0.1,
            {"num_warmup_steps": -1},
            "`num_warmup_steps` must be a concrete integer >= 0 .*, got -1",
        ),
        (0.1, {"num_warmup_steps": 2.0}, "`num_warmup_steps` must be a concrete integer >= 0"),
        (0.1, {"weight_power": -1.0}, "`weight_power` must be finite and >= 0, got -1.0"),
    ]
    for rate, kwargs, match in cases:
        with pytest.raises(ValueError, match=match):
            unchecked(schedule_free_averaging)(rate, **kwargs)


@pytest.mark.parametrize("num_warmup_steps", [0, 30])
def test_a_rise_after_the_warm_up_is_seen(num_warmup_steps: int) -> None:
    """One that lasts for 4 % of the time since the warm-up, in the first million steps."""
    for after in (1, 2, 49, 100, 997, 12_345, 10**6):
        start = num_warmup_steps + after
        last = start + after // 25
        rate = lambda k, start=start, last=last: jnp.where((k >= start) & (k <= last), 0.2, 0.1)
        with pytest.raises(ValueError, match=r"largest by count \d+, .* got 0.2 at \d+ after 0.1"):
            schedule_free_averaging(rate, num_warmup_steps)


def test_schedule_free_averaging_past_the_end_of_a_schedule() -> None:
    """NaN there is no rise."""
    c = schedule_free_averaging(lambda k: 0.1 * jnp.sqrt(1 - k.astype(float) / 500))
    np.testing.assert_allclose(c(np.arange(9)), 1 / np.arange(1, 10), rtol=1e-6)


def test_schedule_free_averaging_under_jit() -> None:
    rate = lambda peak: lambda k: peak * jnp.minimum(k + 1, 4).astype(float)
    at = lambda peak: schedule_free_averaging(rate(peak), 3)(5)
    expected = authors_averaging(np.array([1, 2, 3, 4, 4, 4]), 2.0)[5]
    np.testing.assert_allclose(jax.jit(lambda: at(0.1))(), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="`learning_rate` must not depend on traced values"):
        jax.jit(at)(0.1)
