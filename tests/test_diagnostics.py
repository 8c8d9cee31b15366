"""The gauge, against iterates kept in float64 and against noise."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    batches,
    lenient,
    logistic_regression,
    optimized,
    quick,
    run,
    slow,
    unchecked,
    x64,
)
from scipy import stats

import spa_optax
from spa_optax import (
    eval_params,
    in_float32,
    primal_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
)
from spa_optax.diagnostics import MomentumReport, momentum_report, track_momentum
from spa_optax.diagnostics._gauge import Measurement, Sums, init_gauge, update_gauge

COSINE = lenient(optax.warmup_cosine_decay_schedule(0.0, 3.0, 50, 400))
RISING = lenient(lambda k: jnp.clip(0.1 + 0.9 * k / 350, 0.1, 1.0))
FALL = lenient(optax.piecewise_constant_schedule(0.3, {200: 0.01}))
WARMUP = lenient(optax.linear_schedule(0.0, 1.0, 200))
TRANSFORMS: dict[str, Any] = {
    "schedules": lambda: spa(COSINE, RISING),
    "sgdm, re-anchored": lambda: spa_from_sgdm(FALL, 0.9, horizon=3),
    "gpa, μ_y in steps": lambda: spa(
        COSINE, 0.1, lambda k: jnp.where(k < 200, 0.9, 0.5)
    ),
}


def history(
    tx: Any, num_steps: int = 400, dtype: Any = jnp.float32
) -> dict[str, np.ndarray]:
    """A run on digits: its iterates, its gradients, and the report after every step."""
    loss = logistic_regression(jnp.float32)

    def body(carry: Any, batch: Any) -> Any:
        params, state = carry
        g = jax.grad(lambda w: loss(w.astype(jnp.float32), batch))(params)
        updates, new = tx.update(g, state, params)
        seen = {
            "x": eval_params(state, params),
            "g": g,
            "eta": new.inner_state.eta,
            "c": new.inner_state.c,
        }
        seen |= momentum_report(new)._asdict()
        return (optax.apply_updates(params, updates), new), seen

    params = jnp.zeros((65, 10), dtype)
    _, seen = jax.lax.scan(
        body, (params, tx.init(params)), jnp.asarray(batches())[:num_steps]
    )
    return {k: np.asarray(v.astype(jnp.float32), np.float64) for k, v in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_term_is_that_of_the_iterates(name: str) -> None:
    """At every step, without any buffer, from iterates and gradients in float64."""

    def square(a: np.ndarray) -> np.ndarray:
        return (a**2).sum((1, 2))

    h = history(track_momentum(TRANSFORMS[name](), decay=0.0))
    u, g = np.diff(h["x"], axis=0), h["g"][1:]  # u[k − 1] = x_k − x_{k−1}
    scale = (h["eta"] ** 2 * h["c"])[:-1]
    now = {name: values[1:] for name, values in h.items()}
    seen = scale > 0
    # x and z are rounded, each to half of 1.2e-7: it counts twice in a square. (And x =
    # y/μ_y …)
    size = np.sqrt(square(h["x"])[1:]) * (6 if "gpa" in name else 1)
    rounding = 2 * 1.2e-7 * size / np.sqrt(np.maximum(square(u), 1e-30))
    error = np.abs(now["iterate_term"][seen] * scale[seen] / square(u)[seen] - 1)
    np.testing.assert_array_less(error, (rounding + 1e-5)[seen])
    np.testing.assert_allclose(
        now["gradient_term"][seen], square(g)[seen] / 2, rtol=1e-5
    )
    assert seen.sum() > 390


def f32(value: float) -> jax.Array:
    return jnp.asarray(value, jnp.float32)


@pytest.mark.parametrize(("delta", "r"), [(0.0, 1.0), (0.3, 1.0), (0.0, 0.5)])
def test_the_averages_are_those_of_the_formulas(delta: float, r: float) -> None:
    """In float64, from vectors g_k and d_k, with steps that do not count in between."""
    rng, decay = np.random.default_rng(0), 0.8
    gauge, update = init_gauge(), jax.jit(update_gauge, static_argnums=2)
    means, last = np.zeros(4), None
    total, error, p = 0.0, 0.0, 0.0
    numbers, num_not_finite = [0, 0, 0], 0
    for k in range(30):
        g, d = rng.normal(size=(2, 5))
        eta, c = rng.uniform(0.5, 2), rng.uniform(0.05, 1)
        eta = {6: 0.0, 27: 100.0}.get(k, eta)
        g *= 1e19 / np.sqrt(g @ g) if k == 27 else 1  # so that ‖u‖² overflows
        b = c * eta + delta
        u = c * d - b * g
        # At 12 rounding may be 11 % of ‖u‖², and the step does not count; at 15 it is 9
        # %.
        limit = {12: 0.11, 15: 0.09}.get(k, 0.0) * (u @ u) / c**2
        sums = [g @ g, d @ d, g @ d, limit]
        faults = {9: (0, math.inf), 20: (0, math.inf)}
        faults |= {21: (1, math.inf), 24: (2, math.nan)}
        fault = faults.get(k)
        if fault:
            sums[fault[0]] = fault[1]
        step = Measurement(
            sums=Sums(*map(f32, sums)),
            eta=f32(eta),
            c=f32(c),
            delta=f32(delta),
            r=f32(r),
        )
        gauge = update(gauge, step, decay)

        if not fault and last is not None:
            term = np.array([*last, g @ g / 2, 1])
            means = decay * means + (1 - decay) * term
        before = d @ d if k == 0 else r**2 * p
        level = c**2 * before + b**2 * sums[0]
        left = 1 - c
        spread = left**2 * before + (left * eta - delta) ** 2 * sums[0]
        p = spread if spread < 3.4e38 else p
        kind = 1 if fault or k == 27 else 2 if eta == 0 or k == 12 else 0
        numbers[kind] += 1
        num_not_finite = num_not_finite + 1 if kind == 1 else 0
        last = None
        if kind == 0:
            last = (u @ u / (eta**2 * c), level / (eta**2 * c))
            a, memory = -2 * b * (g @ d) / eta**2, max(decay, (1 - c) ** 2)
            total, error = memory * total + a, math.hypot(memory * error, a)
        np.testing.assert_allclose(gauge.means, means, rtol=1e-4)
        np.testing.assert_allclose(gauge.cross_sum, total, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gauge.cross_error, error, rtol=1e-4)
        assert gauge.num_not_finite == num_not_finite
    assert (gauge.num_steps, gauge.num_measured) == (30, numbers[0])
    assert numbers[1:] == [5, 2]  # not finite, rounded


@functools.cache
def normal(num_steps: int, size: int = 20_000) -> np.ndarray:
    """Independent, standard normal noise."""
    return np.random.default_rng(0).standard_normal((num_steps, size), np.float32)


def scanned(tx: Any, gradients: Any) -> Any:
    """The reports after every step, from params 0 under given trees of gradients."""

    def body(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), momentum_report(state)

    params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), gradients)
    return jax.lax.scan(body, (params, tx.init(params)), gradients)[1]


def reports(tx: Any, gradients: Any) -> Any:
    return optimized(functools.partial(scanned, tx))(gradients)


def assert_at_noise_level(report: Any) -> None:
    """Cross terms of two steps are N(0, 1/20,000) of their size, over 1/c steps a few
    times so."""
    ratio = np.asarray(report.gain / report.noise_level)[5:]
    np.testing.assert_allclose(ratio, 1, atol=0.05)
    assert np.abs(np.mean(ratio) - 1) < 0.01


NOISY: dict[str, Any] = {
    "warm-up": lambda: spa(WARMUP, 0.1),
    "gradual drop": lambda: spa(
        *spa_optax.stagewise(1.0, 0.1, [300], step_divisor=1.02)
    ),
    "without momentum": lambda: spa(1.0, 1.0),
    "sgdm, re-anchored": lambda: spa_from_sgdm(FALL, 0.9, horizon=1),
    "nesterov": lambda: spa_from_sgdm(FALL, 0.9, nesterov=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY)
def test_noise_is_at_noise_level(name: str) -> None:
    report = reports(track_momentum(NOISY[name](), decay=0.95), normal(600))
    assert_at_noise_level(report)


@pytest.mark.slow
def test_the_step_of_params_of_16_bits() -> None:
    """It counts as it is before it is rounded to the 8 bits of x."""
    exact = history(track_momentum(spa(1.0, 0.1), decay=0.0), 50, jnp.bfloat16)
    z = -np.cumsum(exact["g"], 0)  # from z_0 = 0
    expected = ((0.1 * (z - exact["x"]))[:-1] ** 2).sum((1, 2)) / (1.0 * 0.1)
    np.testing.assert_allclose(exact["iterate_term"][1:], expected, rtol=1e-4)


@pytest.mark.slow
def test_steps_that_are_rounding() -> None:
    """They make no gain of 200."""
    uniform = jax.random.uniform(key := jax.random.key(0), (2_000,))
    for tx, params in (
        (spa(1e-3, state_dtype=jnp.bfloat16), 1 + uniform),
        (spa(3e-9), 1 + uniform),  # below the rounding of x, which does not move
        (spa_adamw(1e-4, rounding_key=key), jnp.ones(2_000, jnp.bfloat16)),
        (
            spa_adamw(1e-4, state_dtype=jnp.bfloat16, rounding_key=key),
            uniform.astype(jnp.bfloat16),
        ),
        # Below float8's normal range, where its spacing stays.
        (spa(1e-6, state_dtype=jnp.float8_e4m3fn, rounding_key=key), uniform),
    ):
        tracked = track_momentum(tx)
        state, update = tracked.init(params), jax.jit(tracked.update)
        for g in normal(40, 2_000):
            updates, state = update(jnp.asarray(g, params.dtype), state, params)
            params = params + updates
        report = momentum_report(state)
        assert np.isnan(report.gain) or report.gain < 1.2 * report.noise_level


def test_nothing_in_the_state_is_nan() -> None:
    """So that `jax_debug_nans` can be used."""
    with jax.debug_nans(True):
        run(track_momentum(spa(1.0, 1.0)), jnp.ones(3), [jnp.ones(3)] * 3)


C = 0.2
ADAM: dict[str, Any] = {"b2": 0.9, "eps": 1e-12, "weight_decay": 0.0}
RMS = optax.scale_by_rms(0.9, 1e-12, eps_in_sqrt=False, bias_correction=True)
ADAM_OF_Z = optax.chain(
    in_float32(RMS), optax.add_decayed_weights(1e-4), optax.sgd(0.1)
)


def chain(tx: Any) -> Any:
    return optax.chain(optax.clip(10.0), optax.add_decayed_weights(0.0), tx)


TRACKED: dict[str, Any] = {
    "spa": spa(0.1, C),
    "sgdm": spa_from_sgdm(0.1, 1 - C),
    "gpa": spa(0.1, C, 0.7),
    "spa_adamw": spa_adamw(0.1, C, **ADAM),
    "gpa_adamw": spa_adamw(0.1, C, 0.9, **ADAM),
    "around Adam with decay of z": primal_averaging(
        ADAM_OF_Z, C, 0.9, params_of_base="z"
    ),
    "chain": chain(spa(0.1, C)),
    "masked": optax.masked(spa(0.1, C), True),
}
QUICK = ("spa", "gpa_adamw", "chain")


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(TRACKED, *QUICK))
@pytest.mark.usefixtures("standard_promotion")
def test_noise_and_a_constant_direction(name: str) -> None:
    """Exact expectations: noise is at its level, 2/(2 − c), and a constant direction at
    2/c."""
    tracked, noise = track_momentum(TRACKED[name], 0.95), normal(400)
    # Otherwise Adam's ν would go with g.
    report = reports(tracked, np.sign(noise) if "adam" in name.lower() else noise)
    assert_at_noise_level(report)
    one_way = reports(tracked, jnp.ones((400, 10)))
    np.testing.assert_allclose(report.noise_level[-1], 2 / (2 - C), rtol=0.01)
    np.testing.assert_allclose(one_way.gain[-1], 2 / C, rtol=1e-2)


@pytest.mark.parametrize("name", quick(TRACKED, *QUICK))
@pytest.mark.usefixtures("standard_promotion")
def test_tracking_changes_nothing(name: str) -> None:
    """To the bit, of params and states, where gradients are given: XLA would fuse their
    making."""
    params = {"w": jax.random.normal(jax.random.key(0), (7, 5)), "b": jnp.ones(3)}
    grads = [{"w": g[3:].reshape(7, 5), "b": g[:3]} for g in normal(10, 38)]
    expected, state = run(TRACKED[name], params, grads)
    found, tracked_state = run(track_momentum(TRACKED[name]), params, grads)
    if name == "around Adam with decay of z":
        # XLA for CPUs rounds two products otherwise: ulps below 4.
        chex.assert_trees_all_close(found, expected, atol=10 * 2**-21)
        return
    chex.assert_trees_all_equal((found, tracked_state.inner_state), (expected, state))


def test_the_step_of_a_wrapped_optimizer_counts_as_gradient() -> None:
    """With its rate, and its decay of z."""
    base = optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1))
    tx = track_momentum(primal_averaging(base, C, params_of_base="z"), decay=0.0)
    params, g = jnp.array([2.0, -1.0]), jnp.array([1.0, 3.0])
    _, state = tx.update(g, tx.init(params), params)
    step = 0.1 * (np.asarray(g) + 0.3 * np.asarray(state.inner_state.spa_state.z))
    _, state = tx.update(g, state, params)
    np.testing.assert_allclose(
        momentum_report(state).gradient_term, (step**2).sum() / 2, rtol=1e-5
    )


ONES = optax.stateless(lambda grads, _: optax.tree.ones_like(grads))
BASES = (
    *(optax.sgd(0.1, 0.9), optax.adamw(0.1), optax.lion(0.1), optax.adabelief(0.1)),
    optax.contrib.sophia(0.1, gamma=1.0, hessian_diagonal_fn=ONES),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [primal_averaging(base, C) for base in BASES]
    + [optax.chain(optax.trace(0.9), spa(0.1, C))],
)
def test_beside_other_momentum_there_is_no_noise_level(tx: Any) -> None:
    """Steps add up in pure noise."""
    last = jax.tree.map(
        lambda values: values[-1], reports(track_momentum(tx), normal(20, 50))
    )
    assert np.isfinite(last.gain)
    assert np.isnan([last.noise_level, last.t_statistic]).all()
    assert "base's own momentum" in last.verdict()


@pytest.mark.slow
def test_without_what_is_not_trained() -> None:
    """Integers, None, and gradients of None and of 0."""
    params = {"w": jnp.ones((4, 3)), "n": jnp.arange(2), "still": jnp.ones(2)}
    params |= {"none": None, "frozen": jnp.ones(3)}
    grads = [
        {
            "w": (k % 5) * jax.random.normal(jax.random.key(k), (4, 3)),
            "n": jnp.zeros(2, jnp.int32),
            "still": jnp.zeros(2),
            "none": None,
            "frozen": None,
        }
        for k in range(28)
    ]
    tx = track_momentum(spa(1.0, 0.1), 0.0)
    alone = run(tx, params["w"], [g["w"] for g in grads])[1]
    found = momentum_report(run(tx, params, grads)[1])
    chex.assert_trees_all_close(found, momentum_report(alone), rtol=1e-5)
    sq_norm = jnp.sum(grads[-1]["w"] ** 2)
    np.testing.assert_allclose(found.gradient_term, sq_norm / 2, rtol=1e-5)


def test_replaced_params_are_where_z_starts() -> None:
    """A float32 state holds z itself, which the first step takes from the params."""
    g, params = jnp.array([1.0, -2.0]), jnp.array([5.0, 5.0])
    tx = track_momentum(spa(1.0, 0.1), decay=0.0)
    found = []
    for start in (params, jnp.zeros(2)):
        state = tx.init(start)
        _, state = tx.update(g, state, params)
        _, state = tx.update(g, state, params)
        found.append(state.gauge)
    chex.assert_trees_all_equal(*found)


REPORT: Any = MomentumReport(  # 1/c is 10, after 10 steps
    gain=2.0,  # pyright: ignore
    noise_level=1.0,  # pyright: ignore
    t_statistic=3.0,  # pyright: ignore
    iterate_term=1.0,  # pyright: ignore
    gradient_term=0.5,  # pyright: ignore
    num_steps=10,  # pyright: ignore
    num_measured=10,  # pyright: ignore
    num_not_finite=0,  # pyright: ignore
)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "Steps add up: the gain is 2.00 times that of pure noise"),
        (
            {"gain": 0.5, "t_statistic": -3.0},
            "Steps do not add up: the gain is 0.50 times",
        ),
        ({"gain": 1.5, "t_statistic": -3.0}, "Cannot be told from pure noise"),
        ({"num_measured": 9}, "Nothing to report yet: 10 steps must count"),
        ({"gain": math.nan}, "Nothing to report yet"),
        ({"num_measured": 4}, "Of 10 steps 4 count."),
        ({"num_not_finite": 3}, "the last 3 steps were not finite"),
    ],
)
def test_verdict(changes: dict[str, Any], says: str) -> None:
    verdict = REPORT._replace(**changes).verdict()
    assert says in verdict
    assert ("last 3" in verdict) == ("last 3" in says)


def test_what_a_report_says_of_the_run() -> None:
    """Its length, and both terms."""
    params = {"w": jnp.ones(1_000)}
    grads = [{"w": jnp.asarray(g)} for g in normal(20, 1_000)]
    for averaging in (0.1, spa_optax.schedule_free_averaging(1.0)):
        state = run(track_momentum(spa(1.0, averaging, 0.9)), params, grads)[1]
        report = momentum_report(state)
        assert (report.num_steps, report.num_measured) == (20, 20)
        iterate_term = report.gain * report.gradient_term
        np.testing.assert_allclose(report.iterate_term, iterate_term, rtol=1e-5)


def test_no_verdict_on_a_run_that_is_nan() -> None:
    """Its averages are those of the steps before."""
    grads = [jnp.ones(3)] * 40 + [jnp.full(3, jnp.nan)] + [jnp.ones(3)] * 9
    before = run(track_momentum(spa(1.0)), jnp.ones(3), grads[:40])[1]
    after = run(track_momentum(spa(1.0)), jnp.ones(3), grads)[1]
    assert momentum_report(before).verdict().startswith("Steps add up")
    report = momentum_report(after)
    assert report.gain == momentum_report(before).gain
    assert (report.num_steps - report.num_measured, report.num_not_finite) == (10, 10)
    assert report.verdict().startswith("Nothing to report: the last 10 steps were not")


def verdicts(
    tx: Any, num_runs: int, drift: float = 0.0, last: float = 0.0
) -> list[str]:
    """Of runs on g_k = e_k + last · e_{k−1} + drift, with standard normal noise e_k."""
    e = jax.random.normal(jax.random.key(0), (num_runs, 401, 10))

    def final(g: Any) -> Any:
        return jax.tree.map(lambda values: values[-1], scanned(tx, g))

    found = optimized(jax.vmap(final))(e[:, 1:] + last * e[:, :-1] + drift)
    each = zip(*map(np.asarray, found), strict=True)
    return [MomentumReport(*values).verdict().split(":")[0] for values in each]


@pytest.mark.parametrize(("c", "decay"), [(0.1, 0.9), slow(0.1, 0.0), slow(0.02, 0.99)])
def test_verdicts_on_pure_noise(c: float, decay: float) -> None:
    """False alarms are no more than chance makes of their level, P(|t| ≥ 3)."""
    found = verdicts(track_momentum(spa(1.0, c), decay), 300)
    false_alarms = sum(text != "Cannot be told from pure noise" for text in found)
    assert false_alarms <= stats.binom.isf(
        1e-6, 300, 2 * stats.norm.sf(3)
    )  # 9 runs of 300


@pytest.mark.slow
def test_verdicts_on_an_effect() -> None:
    """In all runs, above and below.

    For terms −⟨g, d⟩ of mean μ and deviation σ, t is about √(199/(1 + (σ/μ)²)), with
    199 = (1 + decay)/(1 − decay). Under a drift of a in each of 10 params −d has a mean
    of 9a and a variance of 81/19: μ = 90a², σ² = 10 (81/19 (1 + a²) + 81a²), and t =
    8.4 ± 1 at a = 0.3. With half the last gradient taken away μ = −4.5, σ² = 10 (1.25 ·
    1.49 + 0.45²), and t = −9.9 ± 1."""
    tx = track_momentum(spa(1.0, 0.1))
    assert set(verdicts(tx, 100, drift=0.3)) == {"Steps add up"}
    assert set(verdicts(tx, 100, last=-0.5)) == {"Steps do not add up"}


WRAPPERS: dict[str, Any] = {
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(chain(tx), 3),
    "inject": lambda _: optax.inject_hyperparams(
        lambda rate: track_momentum(spa(rate, 0.1))
    )(rate=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.usefixtures("standard_promotion")
def test_report_from_inside_a_wrapper(name: str) -> None:
    """In a jitted step, as a metric."""
    tx = WRAPPERS[name](track_momentum(spa(1.0, 0.1)))
    found = reports(tx, {"w": normal(60, 500), "b": normal(60, 3)})
    report = MomentumReport(*(values[-1] for values in found))
    assert all(np.isfinite(value) for value in report)
    assert 0.8 < report.gain / report.noise_level < 1.2


PAIR = {"w": jnp.zeros(3), "v": jnp.zeros(3)}


@pytest.mark.parametrize(
    ("inner", "options", "message"),
    [
        (1.0, {}, "`inner`.*1.0"),
        (spa(1.0), {"decay": 1.0}, "`decay`.*1.0"),
        (optax.scale(0.1), {}, "`inner`.*`SPAState`.*got 0.*EmptyState"),
        (optax.adamw(0.1), {}, "`inner`.*`SPAState`.*got 0.*ScaleByAdamState"),
        (optax.sgd(0.1, 0.9), {}, "`inner`.*got 0.*TraceState.*`spa_from_sgdm`"),
        (optax.chain(spa(1.0), spa(1.0)), {}, "`inner`.*`SPAState`.*got 2"),
        (
            optax.masked(spa(1.0), {"w": True, "v": False}),
            {},
            "`inner`.*all 2 arrays.*got 1",
        ),
        (track_momentum(spa(1.0)), {}, "`inner`.*`TrackMomentumState`"),
        (optax.apply_if_finite(spa(1.0), 3), {}, "`inner`.*`ApplyIfFiniteState`"),
        (
            optax.MultiSteps(spa(1.0), 2).gradient_transformation(),
            {},
            "`inner`.*`MultiStepsState`",
        ),
    ],
)
def test_bad_arguments(inner: Any, options: dict[str, Any], message: str) -> None:
    """What the factory and `init` refuse."""
    with pytest.raises(ValueError, match=message):
        unchecked(track_momentum)(inner, **options).init(PAIR)


def test_bad_state() -> None:
    """What `update`, `momentum_report` and `verdict` refuse."""
    params, tx = jnp.zeros(3), track_momentum(spa(1.0))
    state, batch = tx.init(params), jax.vmap(tx.init)(jnp.zeros((4, 3)))
    with pytest.raises(ValueError, match=r"`state`.*`TrackMomentumState`"):
        tx.update(params, state.inner_state, params)
    with pytest.raises(ValueError, match=r"`params`.*None"):
        tx.update(params, state)
    without_extra = optax.GradientTransformation(
        spa(1.0).init, lambda g, s, p=None: (g, s)
    )
    with pytest.raises(ValueError, match=r"`inner`.*`observe`"):
        track_momentum(without_extra).update(params, state, params)
    with pytest.raises(ValueError, match=r"`opt_state`.*`TrackMomentumState`.*SPAStat"):
        momentum_report(state.inner_state)
    with pytest.raises(ValueError, match=r"`opt_state`.*batch"):
        momentum_report(batch)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        jax.vmap(momentum_report)(batch).verdict()


def test_a_decay_of_numpy_keeps_the_dtypes_of_the_state() -> None:
    with x64():
        tx, x = track_momentum(spa(0.1), decay=np.float64(0.9)), jnp.ones(2, float)
        _, state = run(tx, x, [x])
        chex.assert_trees_all_equal_shapes_and_dtypes(state, tx.init(x))
