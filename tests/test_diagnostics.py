"""The gauge, against iterates kept in float64 and against noise."""

import functools
import math
import re
from pathlib import Path
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
    lenient,
    logistic_regression,
    optimized,
    quick_names,
    slow,
    unchecked,
)
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX import SummaryWriter

from spa_optax import (
    convert,
    eval_params,
    momentum_drop,
    primal_averaging,
    scale_by_second_moment,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
)
from spa_optax.diagnostics import (
    MomentumReport,
    TrackMomentumState,
    momentum_report,
    plot_momentum,
    track_momentum,
)

COSINE = lenient(optax.warmup_cosine_decay_schedule(0.0, 3.0, 50, 400))
RISING = lenient(lambda k: jnp.clip(0.1 + 0.9 * k / 350, 0.1, 1.0))
FALL = lenient(optax.piecewise_constant_schedule(0.3, {200: 0.01}))
TRANSFORMS: dict[str, Any] = {
    "spa": lambda: spa(1.0, 0.1),
    "spa, schedules": lambda: spa(COSINE, RISING),
    "spa, dropped by 10": lambda: spa(*stagewise(3.0, 0.1, [150, 300])),
    "sgdm": lambda: spa_from_sgdm(0.1, 0.9),
    "sgdm, foreseen": lambda: spa_from_sgdm(FALL, 0.9),
    "sgdm, re-anchored": lambda: spa_from_sgdm(FALL, 0.9, horizon=3),
    "sgdm, β in steps": lambda: spa_from_sgdm(
        0.1, lambda k: jnp.where(k < 200, 0.5, 0.95), horizon=5
    ),
}


def run(tx: Any, num_steps: int = 400, dtype: Any = jnp.float32) -> dict[str, np.ndarray]:
    """A run on digits: its iterates, its gradients, and the report after every step."""
    loss = logistic_regression(jnp.float32)

    def body(carry: Any, batch: Any) -> Any:
        params, state = carry
        g = jax.grad(lambda w: loss(w.astype(jnp.float32), batch))(params)
        updates, state = tx.update(g, state, params)
        report = momentum_report(state)._asdict()
        spa_state = optax.tree.get(state, "inner")
        scalars = {"eta": spa_state.eta, "c": spa_state.c}
        return (optax.apply_updates(params, updates), state), {
            "x": params,
            "g": g,
            "u": updates,
            **report,
            **scalars,
        }

    params = jnp.zeros((65, 10), dtype)
    _, history = jax.lax.scan(body, (params, tx.init(params)), jnp.asarray(batches())[:num_steps])
    return {k: np.asarray(v.astype(jnp.float32), np.float64) for k, v in history.items()}


@pytest.mark.parametrize("name", quick_names(TRANSFORMS, "spa, schedules", "sgdm, foreseen"))
def test_every_term_is_that_of_the_iterates(name: str) -> None:
    """At every step, without any buffer, from iterates and gradients in float64."""
    h = run(track_momentum(TRANSFORMS[name](), decay=0.0))
    square = lambda a: (a**2).sum((1, 2))
    u, g = np.diff(h["x"], axis=0), h["g"]  # u[k − 1] = x_k − x_{k−1}
    k = slice(1, None)
    scale = (h["eta"] ** 2 * h["c"])[:-1]
    with np.errstate(invalid="ignore", divide="ignore"):
        iterate_term = square(u) / scale
    seen = scale > 0
    # x and z are rounded, each to half of 1.2e-7: it counts twice in a square.
    rounding = 2 * 1.2e-7 * np.sqrt(square(h["x"])[k] / np.maximum(square(u), 1e-30))
    error = np.abs(h["iterate_term"][k][seen] / iterate_term[seen] - 1)
    np.testing.assert_array_less(error, (rounding + 1e-5)[seen])
    np.testing.assert_allclose(h["gradient_term"][k][seen], square(g)[k][seen] / 2, rtol=1e-5)
    inner_product = (u * g[1:]).sum((1, 2))
    bound = np.sqrt(square(u) * square(g)[k])  # Cauchy and Schwarz
    known = ~np.isnan(h["inner_product"][k])
    # Three squares, each known to some 1e-6, over 2ab; and the rounding of x.
    error = np.abs(h["inner_product"][k] - inner_product)[known] / bound[known]
    assert error.max() < 1e-3
    cosine = -inner_product[known] / bound[known]
    np.testing.assert_allclose(h["alignment"][k][known], cosine, atol=2e-3)
    # It is NaN at the first step, and where z − x = (1/c − 1) u is within 100 eps of x.
    assert np.isnan(h["inner_product"][0])
    distance = (1 / np.maximum(h["c"][:-1], 1e-9) - 1) * np.sqrt(square(u))
    certain = (distance > 110 * 1.2e-7 * np.sqrt(square(h["x"])[k])) & (h["c"][:-1] > 0)
    assert certain.sum() > 140
    assert known[certain].all()
    assert known[h["c"][:-1] == 1].sum() == 0


@functools.cache
def normal(num_steps: int, size: int = 20_000) -> np.ndarray:
    """Independent, standard normal noise."""
    return np.random.default_rng(0).standard_normal((num_steps, size), np.float32)


def reports(tx: Any, gradients: Any) -> Any:
    """After every step, from params 0 under gradients that do not depend on them."""

    def body(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), momentum_report(state)

    params = jnp.zeros(gradients.shape[1:])
    return optimized(lambda g: jax.lax.scan(body, (params, tx.init(params)), g)[1])(gradients)


WARMUP = lenient(optax.linear_schedule(0.0, 1.0, 200))
NOISY: dict[str, Any] = {
    "constants": lambda: spa(1.0, 0.1),
    "warm-up": lambda: spa(WARMUP, 0.1),
    "drop": lambda: spa(*stagewise(1.0, 0.1, [300])),
    "gradual drop": lambda: spa(*stagewise(1.0, 0.1, [300], step_factor=1.02)),
    "η alone": lambda: spa(*stagewise(1.0, 0.1, [300], averaging_rule="constant")),
    "cosine": lambda: spa(lenient(optax.cosine_decay_schedule(1.0, 700)), 0.05),
    "without momentum": lambda: spa(1.0, 1.0),
    "momentum dropped": lambda: spa(*momentum_drop(1.0, 0.1, 300)),
    "sgdm, drop": lambda: spa_from_sgdm(FALL, 0.9),
    "sgdm, re-anchored": lambda: spa_from_sgdm(FALL, 0.9, horizon=1),
    "nesterov": lambda: spa_from_sgdm(FALL, 0.9, nesterov=True),
    "nesterov, re-anchored": lambda: spa_from_sgdm(FALL, 0.9, nesterov=True, horizon=1),
}


@pytest.mark.parametrize(
    "name",
    quick_names(NOISY, "constants", "warm-up", "gradual drop", "nesterov", "sgdm, re-anchored"),
)
def test_noise_is_at_noise_level(name: str) -> None:
    report = reports(track_momentum(NOISY[name](), decay=0.95), normal(600))
    ratio = np.asarray(report.gain / report.noise_level)[5:]
    # The cross terms of two steps are N(0, 1/size) of their size: a sum over 1/c steps stays within
    # some multiple of 1/√20,000 = 0.007.
    np.testing.assert_allclose(ratio, 1, atol=0.05)
    assert np.abs(np.mean(ratio) - 1) < 0.01
    if "nesterov" not in name and name != "without momentum":
        assert np.nanmax(np.abs(report.alignment)) < 0.05  # as small, for noise
    if name == "constants":
        np.testing.assert_allclose(report.noise_level[-1], 2 / 1.9, rtol=0.01)
    if name == "without momentum":
        np.testing.assert_allclose(report.noise_level[-1], 2, rtol=0.02)
        assert np.isnan(report.alignment).all()
    if "nesterov" in name:
        assert np.isnan(report.alignment).all()
    # A gauge against the constant 2/(2 − c) would misfire.
    if name in ("warm-up", "η alone"):
        assert np.ptp(report.noise_level[20:]) > 0.2


def test_a_quadratic_without_noise_is_well_above() -> None:
    curvature = jnp.logspace(-3, 0, 50)
    tx, params = track_momentum(spa(1.0, 0.1)), jnp.ones(50)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(40):
        updates, state = update(curvature * params, state, params)
        params = params + updates
    report = momentum_report(state)
    assert report.gain > 3 * report.noise_level
    assert report.alignment > 0.2


@pytest.mark.parametrize("name", quick_names(TRANSFORMS, "spa, schedules", "sgdm, re-anchored"))
def test_updates_are_untouched_to_the_bit(name: str) -> None:
    inner = TRANSFORMS[name]()
    plain, tracked = inner, track_momentum(inner)
    loss = logistic_regression(jnp.float32)

    def trained(tx: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        params = jnp.zeros((65, 10))
        state = tx.init(params)
        for batch in batches()[:50]:
            params, state = step(params, state, jnp.asarray(batch))
        return params, state

    (params, state), (tracked_params, tracked_state) = trained(plain), trained(tracked)
    chex.assert_trees_all_equal(params, tracked_params)
    chex.assert_trees_all_equal(state, tracked_state.inner)


def test_params_of_16_bits_have_no_alignment_once_they_are_rounded() -> None:
    h = run(track_momentum(spa(0.1, 0.1)), 50, jnp.bfloat16)
    assert np.isfinite(h["alignment"][1:4]).all()  # z − x is as large as x so far
    assert np.isnan(h["alignment"][30:]).all()
    assert np.isfinite(h["gain"][1:]).all()
    # What counts is the step before it is rounded to the 8 bits of x.
    exact = run(track_momentum(spa(1.0, 0.1), decay=0.0), 50, jnp.bfloat16)
    z = -np.cumsum(exact["g"], 0)  # from z_0 = 0
    u = 0.1 * (z - exact["x"])
    np.testing.assert_allclose(
        exact["iterate_term"][1:], (u[:-1] ** 2).sum((1, 2)) / (1.0 * 0.1), rtol=1e-4
    )


def test_gradients_that_are_not_finite_are_skipped() -> None:
    tx = track_momentum(spa(1.0, 0.1))
    params, rng = jnp.zeros(100), np.random.default_rng(0)
    state = tx.init(params)
    gradients = rng.normal(size=(30, 100)).astype(np.float32)
    for g in gradients[:20]:
        updates, state = tx.update(jnp.asarray(g), state, params)
        params = params + updates
    before = momentum_report(state)
    _, bad = tx.update(jnp.full(100, jnp.nan), state, params)
    after = momentum_report(bad)
    assert after.num_skipped == 1
    chex.assert_trees_all_equal(
        after._replace(num_skipped=before.num_skipped),
        before._replace(
            alignment=after.alignment,
            inner_product=after.inner_product,
            num_steps=after.num_steps,
        ),
    )
    # Params and z come back from a checkpoint, the averages stay.
    state = bad._replace(inner=state.inner)
    for g in gradients[20:]:
        updates, state = tx.update(jnp.asarray(g), state, params)
        params = params + updates
    report = momentum_report(state)
    assert report.num_skipped == 1
    assert all(np.isfinite(value) for value in report)
    assert 0.8 < report.gain / report.noise_level < 1.2


@pytest.mark.parametrize("by_label", [False, True])
def test_an_average_longer_than_the_run_is_said(by_label: bool) -> None:
    said = {}
    for name, averaging in (("short", 0.1), ("long", 0.01), ("mean", schedule_free_averaging(1.0))):
        tx = track_momentum(spa(1.0, averaging, 0.9), per_leaf=by_label)
        params, state = {"w": jnp.zeros(5)}, tx.init({"w": jnp.zeros(5)})
        for _ in range(20):
            updates, state = tx.update({"w": jnp.ones(5)}, state, params)
            params = optax.apply_updates(params, updates)
        report = momentum_report(state, by_label=by_label)
        report = report["w"] if isinstance(report, dict) else report
        said[name] = report.verdict()
        assert report.num_steps == 20
    assert said["long"].endswith("The average is longer than the run: 1/c is 100, after 20 steps.")
    assert "longer" not in said["short"] + said["mean"]


def test_an_overflow_does_not_stay() -> None:
    """‖g‖² and ‖u‖² are finite again before ‖u‖²/(η²c) is."""
    tx = track_momentum(spa(0.1, 0.1), decay=0.9)
    params, rng = jnp.zeros(50), np.random.default_rng(0)
    grads = rng.normal(size=(400, 50))
    grads[20] *= 1e20

    def body(state: Any, g: Any) -> Any:
        _, state = tx.update(g, state, params)
        return state, momentum_report(state)

    _, reports = jax.lax.scan(body, tx.init(params), jnp.asarray(grads, jnp.float32))
    assert np.isfinite(reports.gain[1:]).all()
    assert reports.num_skipped[-1] > 0
    assert reports.gain[-1] < 1e3


@pytest.mark.parametrize(
    ("tx", "x"),
    [
        (lambda: spa(1e-3, state_dtype=jnp.bfloat16), 1.0),
        (lambda: spa(3e-9), 1.0),  # below the rounding of x, which does not move
    ],
)
def test_steps_that_are_rounding_have_no_alignment(tx: Any, x: float) -> None:
    tracked = track_momentum(tx())
    params = x + jax.random.uniform(jax.random.key(0), (2_000,))
    state = tracked.init(params)
    for k in range(60):
        g = jax.random.normal(jax.random.key(k), (2_000,))
        updates, state = jax.jit(tracked.update)(g, state, params)
        params = params + updates
        alignment = momentum_report(state).alignment
        assert np.isnan(alignment) or abs(alignment) <= 1.001


def test_gradients_of_other_params_do_not_count() -> None:
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "none": None}
    grads = {"w": jnp.ones(3), "n": jnp.full(2, 7.0), "none": None}
    tx = track_momentum(spa(1.0, 0.1), decay=0.0)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(grads, state, params)
    assert momentum_report(state).gradient_term == 1.5


def test_nothing_in_the_state_is_nan() -> None:
    """So that `jax_debug_nans` can be used."""
    with jax.debug_nans(True):
        tx, params = track_momentum(spa(1.0, 1.0)), jnp.ones(3)
        state = jax.jit(tx.init)(params)
        for _ in range(3):
            _, state = jax.jit(tx.update)(params, state, params)


def test_a_run_that_was_converted_has_a_last_step() -> None:
    """That of SGD+M: it follows from z − x."""
    sgd, params = optax.sgd(0.1, momentum=0.9), jnp.ones(10)
    state = sgd.init(params)
    for _ in range(5):
        last, state = sgd.update(params, state, params)
        params = params + last
    tx = track_momentum(spa_from_sgdm(0.1, 0.9), decay=0.0)
    state = tx.init(params)._replace(
        inner=convert(
            state,
            params,
            into=spa_from_sgdm(0.1, 0.9).init(params),
            learning_rate=0.1,
            momentum=0.9,
            count=5,
        )
    )
    for _ in range(3):
        updates, state = tx.update(params, state, params)
        report = momentum_report(state)
        np.testing.assert_allclose(report.inner_product, last @ params, rtol=1e-4)
        params, last = params + updates, updates


# ------------------------------------------------------------------ of every member, and of Optax's

C, ADAM = 0.2, {"b2": 0.9, "eps": 1e-12, "weight_decay": 0.0}
CHAIN = lambda tx: optax.chain(optax.clip(10.0), optax.add_decayed_weights(0.0), tx)
INJECTED_SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=1 - C)
INJECTED_ADAM = optax.inject_hyperparams(optax.adamw)(learning_rate=0.1, b1=1 - C, b2=0.9)
ADAM_OF_Z = optax.chain(
    scale_by_second_moment(0.9, 1e-12), optax.add_decayed_weights(1e-4), optax.sgd(0.1)
)
WATCHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "spa": (spa(0.1, C), {}),
    "sgdm": (spa_from_sgdm(0.1, 1 - C), {}),
    "gpa": (spa(0.1, C, 0.7), {}),
    "gpa, c as Schedule-Free": (spa(0.1, schedule_free_averaging(0.1), 0.9), {}),
    "spa_adamw": (spa_adamw(0.1, C, **ADAM), {}),
    "gpa_adamw": (spa_adamw(0.1, C, 0.9, **ADAM), {}),
    "spa_adamw, decay": (spa_adamw(0.1, C, **ADAM | {"weight_decay": 1e-4}), {}),
    "around optax.adamw": (primal_averaging(optax.adamw(0.1, 0.0, 0.9, 1e-12), C, 0.9), {}),
    "around Adam with decay of z": (primal_averaging(ADAM_OF_Z, C, 0.9, params_of_base="z"), {}),
    "chain": (CHAIN(spa(0.1, C)), {}),
    "chain of Adam": (CHAIN(spa_adamw(0.1, C, 0.9, **ADAM)), {}),
    "masked": (optax.masked(spa(0.1, C), True), {}),
    "injected": (optax.inject_hyperparams(spa)(learning_rate=0.1, averaging=C), {}),
    "optax.sgd": (optax.sgd(0.1, 1 - C), {"averaging": C}),
    "optax.sgd in a chain": (CHAIN(optax.sgd(0.1, 1 - C)), {"averaging": C}),
    "optax.sgd, bfloat16 m": (
        optax.sgd(0.1, 1 - C, accumulator_dtype=jnp.bfloat16),
        {"averaging": C},
    ),
    "optax.sgd, injected": (INJECTED_SGD, {}),
    "optax.adamw": (optax.adamw(0.1, 1 - C, 0.9), {"averaging": C, "b2": 0.9}),
    "optax.adamw, injected": (INJECTED_ADAM, {}),
}
QUICK = ("spa", "gpa", "gpa_adamw", "around optax.adamw", "chain", "optax.sgd", "optax.adamw")


@pytest.mark.parametrize("name", quick_names(WATCHED, *QUICK))
@pytest.mark.usefixtures("standard_promotion")
def test_noise_and_a_constant_direction(name: str) -> None:
    """Exact expectations: noise is at its level, 2/(2 − c), and a constant direction at 2/c."""
    tx, options = WATCHED[name]
    tracked = track_momentum(tx, 0.95, **options)
    noise = normal(400)
    if "adam" in name.lower():  # whose ν would go with g
        noise = np.sign(noise)
    report = reports(tracked, noise)
    ratio = report.gain / report.noise_level
    # As in `test_noise_is_at_noise_level`; m of 8 bits is known to 2^-9.
    np.testing.assert_allclose(ratio[5:], 1, atol=0.05)
    assert jnp.abs(ratio[5:].mean() - 1) < 0.01
    assert jnp.abs(report.alignment[5:]).max() < 0.05
    if "Schedule-Free" in name:
        return
    one_way = reports(tracked, jnp.ones((400, 10)))
    np.testing.assert_allclose(report.noise_level[-1], 2 / (2 - C), rtol=0.01)
    np.testing.assert_allclose(one_way.gain[-1], 2 / C, rtol=1e-2)
    np.testing.assert_allclose(one_way.alignment[-1], 1, rtol=1e-4)


@pytest.mark.parametrize("name", quick_names(WATCHED, *QUICK))
def test_watching_changes_nothing(name: str) -> None:
    """To the bit, of updates and states, where gradients are given: XLA would fuse their making."""
    tx, options = WATCHED[name]
    params = {"w": jax.random.normal(jax.random.key(0), (7, 5)), "b": jnp.ones(3)}
    noise = {"w": normal(10, 35).reshape(-1, 7, 5), "b": normal(10, 3)}

    def train(tx: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, g: Any) -> Any:
            with jax.numpy_dtype_promotion("standard"):
                return tx.update(g, state, params)

        now, state, all_updates = params, tx.init(params), []
        for k in range(10):
            updates, state = step(now, state, jax.tree.map(lambda g, k=k: g[k], noise))
            now = optax.apply_updates(now, updates)
            all_updates.append(updates)
        return (now, state), all_updates

    (plain, state), updates = train(tx)
    for every in (1, 3):
        tracked = track_momentum(tx, every=every, per_leaf=True, **options)
        (watched, tracked_state), tracked_updates = train(tracked)
        if name == "around Adam with decay of z":  # XLA for CPUs rounds two products otherwise
            chex.assert_trees_all_close(updates, tracked_updates, atol=2**-21)  # an ulp below 4
            continue
        chex.assert_trees_all_equal(updates, tracked_updates)
        chex.assert_trees_all_equal(plain, watched)
        chex.assert_trees_all_equal(state, tracked_state.inner)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_in_one_jit_with_the_gradients_a_step_differs_by_ulps(every: int) -> None:
    """XLA may fuse gradient and update otherwise, and rounds in other places.

    Of AdamW: 2 roundings for g = p³, 4 for m̂, 7 for the root of ν̂ (half of its 9, 1, and 1 for
    ε), 1 for the ratio, 2 for decay and rate, and 1 if XLA multiplies by a reciprocal. So each of
    two ways to compute it is within 17 half ulps of the sum of the terms' sizes.
    """
    rate, b1, b2, eps, decay = 1e-2, 0.9, 0.999, 1e-8, 1e-4
    inner = optax.adamw(rate, b1, b2, eps, weight_decay=decay)

    def jitted(tx: Any) -> Any:
        def step(params: Any, state: Any) -> Any:
            g = jax.grad(lambda p: jnp.sum(p**4) / 4)(params)
            with jax.numpy_dtype_promotion("standard"):
                updates, state = tx.update(g, state, params)
            return optax.apply_updates(params, updates), state, updates

        return optimized(step)

    tx = track_momentum(inner, every=every, averaging=1 - b1)
    plain, tracked = jitted(inner), jitted(tx)
    params = jax.random.normal(jax.random.key(0), (2_000,))
    state, tracked_state = inner.init(params), tx.init(params)
    wide = lambda array: np.asarray(array, np.float64)
    for k in range(1, 31):
        x, m, v = wide(params), wide(state[0].mu), wide(state[0].nu)
        g = x**3
        root = np.sqrt((b2 * v + (1 - b2) * g**2) / (1 - b2**k)) + eps
        size = (b1 * np.abs(m) + (1 - b1) * np.abs(g)) / (1 - b1**k) / root + decay * np.abs(x)
        _, tracked_state, got = tracked(params, tracked_state._replace(inner=state))
        params, state, expected = plain(params, state)
        np.testing.assert_array_less(
            np.abs(wide(got) - wide(expected)), 2 * 17 * 2.0**-24 * rate * size
        )


def test_of_gpa_it_is_x_that_is_watched() -> None:
    """Against x in float64, with μ_y in steps."""
    mu_y = lambda k: jnp.where(k < 30, 0.9, 0.5)
    tx = track_momentum(spa(COSINE, 0.1, mu_y), decay=0.0)
    loss = logistic_regression(jnp.float32)
    params = jnp.zeros((65, 10))
    state, update = tx.init(params), jax.jit(tx.update)
    x, previous = np.zeros((65, 10)), (0.0, 0.0)
    for k, batch in enumerate(batches()[:80]):
        g = jax.grad(loss)(params, jnp.asarray(batch))
        updates, state = update(g, state, params)
        params = params + updates
        report, (u, scale) = momentum_report(state), previous
        if k > 2:  # the rate of step 0 is 0
            np.testing.assert_allclose(report.iterate_term, (u**2).sum() / scale, rtol=1e-3)
            np.testing.assert_allclose(report.inner_product, (u * g).sum(), rtol=1e-2, atol=1e-6)
        new = np.asarray(eval_params(state, params), np.float64)
        previous, x = (new - x, float(state.inner.eta**2 * state.inner.c)), new


def test_the_step_of_a_wrapped_optimizer_counts_as_gradient() -> None:
    """With its rate, and its decay of z."""
    base = optax.chain(optax.add_decayed_weights(0.3), optax.sgd(0.1))
    tx = track_momentum(primal_averaging(base, C, params_of_base="z"), decay=0.0)
    params, g = jnp.array([2.0, -1.0]), jnp.array([1.0, 3.0])
    state = tx.init(params)
    for _ in range(2):
        z = state.inner.average.z
        _, state = tx.update(g, state, params)
    step = 0.1 * (np.asarray(g) + 0.3 * np.asarray(z))
    np.testing.assert_allclose(momentum_report(state).gradient_term, (step**2).sum() / 2, rtol=1e-5)


def test_sgd_is_watched_as_its_primal_averaging() -> None:
    """`optax.sgd` beside `spa_from_sgdm`, of which it knows neither rate nor scale."""
    noise = jax.random.normal(jax.random.key(0), (100, 50)) + 0.3
    of_sgd = reports(track_momentum(CHAIN(optax.sgd(0.1, 0.8)), averaging=0.2), noise)
    of_spa = reports(track_momentum(CHAIN(spa_from_sgdm(0.1, 0.8))), noise)
    for field in ("gain", "noise_level", "alignment", "gradient_term"):
        ours, theirs = getattr(of_spa, field)[3:], getattr(of_sgd, field)[3:]
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("standard_promotion")
def test_adamw_is_watched_as_its_primal_averaging() -> None:
    """Where ν̂ is constant they are the same."""
    signs = jnp.sign(jax.random.normal(jax.random.key(0), (200, 50)) + 0.5)
    grads = signs * jnp.logspace(-4, 4, 50)  # a scale each, which ν takes away
    of_adamw = reports(track_momentum(optax.adamw(0.1, 0.8, 0.99), averaging=0.2, b2=0.99), grads)
    of_spa = reports(track_momentum(spa_adamw(0.1, 0.2, b2=0.99, weight_decay=0.0)), grads)
    for field in ("gain", "noise_level", "alignment"):
        ours, theirs = getattr(of_spa, field)[3:], getattr(of_adamw, field)[3:]
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    assert of_spa.gain[-1] > 2 * of_spa.noise_level[-1]


NOT_ADAM: dict[str, Any] = {
    "adamax": optax.adamax(0.1),
    "adamax, clipped": optax.chain(optax.clip_by_global_norm(0.01), optax.adamax(0.1)),
    "yogi": optax.yogi(0.1),
    "adopt": optax.contrib.adopt(0.1),
    "another b2": optax.adamw(0.1, b2=0.95),
    "another b1": optax.adamw(0.1, b1=0.5),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", NOT_ADAM)
def test_moments_that_are_not_adams_are_refused(name: str) -> None:
    """Though their states are of the same type."""
    params = {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.zeros(3)}
    tx = track_momentum(NOT_ADAM[name], averaging=0.1)
    for init in (tx.init, jax.jit(tx.init), lambda params: jax.eval_shape(tx.init, params)):
        with pytest.raises(ValueError, match=r"`inner` must hold the moments of `optax.adam` or"):
            init(params)
    plateau = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())  # no probe
    for like_adam in (optax.adam(0.1, mu_dtype=jnp.bfloat16), optax.lamb(0.1), plateau):
        track_momentum(like_adam, averaging=0.1).init(params)


def test_an_injected_schedule_of_momentum() -> None:
    """Each step with its own β."""
    beta = lambda k: jnp.where(k < 10, 0.5, 0.95)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=beta)
    noise = jax.random.normal(jax.random.key(0), (20, 50))
    report = reports(track_momentum(tx, decay=0.0), noise)
    expected = (noise**2).sum(1) / 2
    np.testing.assert_allclose(report.gradient_term[1:], expected[1:], rtol=1e-4)


def test_labels_of_leaves_are_unique() -> None:
    params = {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}
    state = track_momentum(spa(0.1), per_leaf=True).init(params)
    assert sorted(state.groups) == ["['a']['b']", "['a.b']"]


def test_gain_is_not_that_of_rounding() -> None:
    """Steps below the rounding of bfloat16 params: NaN, and no gain of 200."""
    tx = track_momentum(spa_adamw(1e-4, rounding_key=jax.random.key(0)))
    params = jnp.ones(2_000, jnp.bfloat16)
    state, update = tx.init(params), jax.jit(tx.update)
    for k in range(30):
        g = jax.random.normal(jax.random.key(k), (2_000,), jnp.bfloat16)
        updates, state = update(g, state, params)
        params = params + updates
    report = momentum_report(state)
    assert jnp.isnan(report.gain) or report.gain < 1.2 * report.noise_level


def test_groups_add_up() -> None:
    """By leaf, by label and as a whole, at every third step; c and η are the same for all."""
    keys = jax.random.split(jax.random.key(0), 30)
    params = {"a": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}, "n": jnp.arange(2), "o": jnp.ones(5)}
    label = lambda params: {"a": "inner", "n": "inner", "o": "outer"}

    def run(per_leaf: Any) -> Any:
        tx = optax.masked(
            track_momentum(spa(1.0, 0.1), 0.0, every=3, per_leaf=per_leaf),
            {"a": True, "n": False, "o": True},
        )
        state, update = tx.init(params), jax.jit(tx.update)
        for k, key in enumerate(keys):
            of_leaf = lambda p, k=k, key=key: (k % 5) * jax.random.normal(key, p.shape)
            _, state = update(jax.tree.map(of_leaf, params), state, params)
        return momentum_report(state, by_label=bool(per_leaf)), momentum_report(state)

    (by_leaf, together), (whole, _) = run(True), run(False)
    chex.assert_trees_all_close(together, whole, rtol=1e-5)
    assert list(by_leaf) == ["a.b", "a.w", "o"]
    total = sum(report.gradient_term for report in by_leaf.values())
    np.testing.assert_allclose(total, whole.gradient_term, rtol=1e-5)
    total = sum(report.iterate_term for report in by_leaf.values())
    np.testing.assert_allclose(total, whole.iterate_term, rtol=1e-5)
    unmasked = lambda params: {k: v for k, v in label(params).items() if k in params and k != "n"}
    labelled, _ = run(lambda params: unmasked(params) | {"n": params["n"]})
    assert list(labelled) == ["inner", "outer"]
    chex.assert_trees_all_close(labelled["outer"], by_leaf["o"], rtol=1e-5)


def test_a_leaf_without_gradient() -> None:
    """It has no report. That of all params is that without `per_leaf`."""
    params = {"frozen": jnp.ones(3), "w": jnp.ones(20)}

    def run(per_leaf: bool) -> Any:
        tx = track_momentum(spa(1.0, 0.1), per_leaf=per_leaf)
        state, update = tx.init(params), jax.jit(tx.update)
        for k in range(30):
            g = {"frozen": jnp.zeros(3), "w": jax.random.normal(jax.random.key(k), (20,))}
            _, state = update(g, state, params)
        return state

    state = run(per_leaf=True)
    chex.assert_trees_all_close(momentum_report(state), momentum_report(run(False)), rtol=1e-5)
    assert jnp.isfinite(momentum_report(state).gain)
    verdict = momentum_report(state, by_label=True)["frozen"].verdict()
    assert verdict.startswith("Nothing to report: 30 of the measured steps were 0, or their")


@pytest.mark.parametrize("every", [1, 7])
def test_measured_at_every_so_many_steps(every: int) -> None:
    """The same gain, level and alignment as at every step: the statistics are those of a run."""
    noise = jax.random.normal(jax.random.key(0), (1_000, 2_000)) + 0.2
    report = reports(track_momentum(spa(0.1, 0.1), 0.9, every=every), noise)
    expected = reports(track_momentum(spa(0.1, 0.1), 0.99), noise)
    for field in ("gain", "noise_level", "alignment", "gradient_term"):
        got = getattr(report, field)[-1]
        np.testing.assert_allclose(got, getattr(expected, field)[-1], rtol=0.05)
    assert (jnp.diff(report.gradient_term[2 * every :]) != 0).mean() < 1.01 / every


def test_verdict() -> None:
    params = jnp.zeros(100)
    noise = jax.random.normal(jax.random.key(0), (300, 100))
    noise -= jnp.roll(noise, 1, 0) / 2  # each gradient opposes the last
    tx = track_momentum(spa(1.0, averaging=0.1), decay=0.9)
    state, update = tx.init(params), jax.jit(tx.update)
    assert momentum_report(state).verdict() == "Nothing to report: two steps are needed."
    for k, g in enumerate(noise):
        updates, state = update(g, state, params)
        params += updates
        if k == 6:  # the first step has no distance z − x, but counts
            too_few = "Nothing to report yet: 10 measured steps are needed, got 7."
            assert momentum_report(state).verdict().startswith(too_few)
    report = momentum_report(state)
    assert report.num_measured == len(noise)
    assert report.gain < report.noise_level
    times = f"{float(report.gain / report.noise_level):.2f} times that of pure noise"
    assert report.verdict().startswith(f"Steps do not add up: the gain is {times}")


def verdicts(tx: Any, num_runs: int, drift: float = 0.0, last: float = 0.0) -> list[str]:
    """Of runs on g_k = e_k + last · e_{k−1} + drift, with standard normal noise e_k."""

    def run(key: Any) -> Any:
        def body(carry: Any, key: Any) -> Any:
            params, state, before = carry
            e = jax.random.normal(key, params.shape)
            updates, state = tx.update(e + last * before + drift, state, params)
            return (params + updates, state, e), None

        params = jnp.zeros(10)
        start = (params, tx.init(params), params)
        return momentum_report(jax.lax.scan(body, start, jax.random.split(key, 400))[0][1])

    reports = optimized(jax.vmap(run))(jax.random.split(jax.random.key(0), num_runs))
    each = zip(*map(np.asarray, reports), strict=True)
    return [MomentumReport(*report).verdict().split(":")[0] for report in each]


@pytest.mark.parametrize(
    ("c", "decay", "every"),
    [
        (0.1, 0.99, 1),
        (0.1, 0.9, 10),
        slow(0.1, 0.0, 1),
        slow(0.02, 0.9, 1),
        slow(0.5, 0.9, 1),
    ],
)
def test_verdicts_on_pure_noise(c: float, decay: float, every: int) -> None:
    """False alarms are no more than chance makes of their level, P(|t| ≥ 3)."""
    found = verdicts(track_momentum(spa(1.0, c), decay, every=every), 300)
    level = 2 * stats.norm.sf(3)  # 0.0027
    false_alarms = sum(text != "No difference from pure noise" for text in found)
    assert false_alarms <= stats.binom.isf(1e-6, 300, level)  # 9 runs of 300


def test_verdicts_on_an_effect() -> None:
    """In all runs, above and below.

    For terms −⟨g, d⟩ of mean μ and deviation σ, t is about √(199/(1 + (σ/μ)²)), with 199 =
    (1 + decay)/(1 − decay). Under a drift of a in each of 10 params −d has a mean of 9a and a
    variance of 81/19: μ = 90a², σ² = 10 (81/19 (1 + a²) + 81a²), and t = 8.4 at a = 0.3. With half
    the last gradient taken away μ = −4.5, σ² = 10 (1.25 · 1.49 + 0.45²), and t = −9.9. Its own
    deviation is about 1 or less.
    """
    tx = track_momentum(spa(1.0, 0.1))
    assert set(verdicts(tx, 100, drift=0.3)) == {"Steps add up"}
    assert set(verdicts(tx, 100, last=-0.5)) == {"Steps do not add up"}


def test_verdict_without_a_gain_says_why() -> None:
    """Infinite and zero squares are not called rounding."""
    noise = jax.random.normal(jax.random.key(0), (20, 1_000))

    def verdict(scale: float, tx: Any = track_momentum(spa(1.0, 0.1))) -> str:  # noqa: B008
        params = jnp.ones(1_000)
        state = tx.init(params)
        for g in noise:
            _, state = tx.update(scale * g, state, params)
        return momentum_report(state).verdict()

    of = "Nothing to report: 20 of the measured steps were"
    assert verdict(1e18) == f"{of} not finite, or their squares overflow float32."
    assert verdict(math.nan) == f"{of} not finite, or their squares overflow float32."
    assert verdict(1e-22) == f"{of} 0, or their squares underflow float32."
    assert verdict(1e-12) == f"{of} within the rounding error of params and z."


def test_verdict_without_alignment_says_so() -> None:
    """With z in float32 and params in bfloat16, where z − x is near the rounding of x."""
    make = spa_adamw(
        0.01,
        averaging=0.1,
        interpolation=0.9,
        second_moment="factored",
        rounding_key=jax.random.key(0),
    )
    tx, params = track_momentum(make), 0.01 * jnp.ones((128, 128), jnp.bfloat16)
    state, update = tx.init(params), jax.jit(tx.update)
    for k in range(40):
        g = jax.random.normal(jax.random.key(k), params.shape, jnp.bfloat16)
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    report = momentum_report(state)
    assert jnp.isfinite(report.gain)
    assert jnp.isnan(report.alignment)
    assert "Alignment is unknown: it needs z − x above 100 times the rounding" in report.verdict()


# ---------------------------------------------------------------------------------- in wrappers


def chain(tx: Any) -> Any:
    return optax.chain(optax.add_decayed_weights(1e-3), tx)


WRAPPERS: dict[str, Any] = {
    "chain": chain,
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda learning_rate: track_momentum(spa(learning_rate, 0.1))
    )(learning_rate=1.0),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_report_from_inside_a_wrapper(name: str) -> None:
    """In a jitted step, as a metric."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.zeros(500), "b": jnp.zeros(3)}
    tx = WRAPPERS[name](track_momentum(spa(1.0, 0.1)))

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # which `MultiSteps` needs
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, momentum_report(state)

    state = tx.init(params)
    for _ in range(60):
        grads = {k: jnp.asarray(rng.normal(size=p.shape), jnp.float32) for k, p in params.items()}
        params, state, report = step(params, state, grads)
    assert all(np.isfinite(value) for value in report)
    assert 0.8 < report.gain / report.noise_level < 1.2


def test_report_of_an_nnx_optimizer() -> None:
    model = nnx.Linear(30, 20, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, chain(track_momentum(spa(0.1))), wrt=nnx.Param)
    x = jax.random.normal(jax.random.key(0), (8, 30))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        optimizer.update(model, nnx.grad(lambda model: (model(x) ** 2).mean())(model))
        return momentum_report(optimizer.opt_state)

    for _ in range(5):
        report = step(model, optimizer)
    assert all(np.isfinite(value) for value in report)
    chex.assert_trees_all_close(momentum_report(optimizer.opt_state), report, rtol=1e-6)


# ------------------------------------------------------------------------------- plots and logs


def collected(per_leaf: bool) -> dict[int, Any]:
    """Reports of every tenth step."""
    tx = track_momentum(spa(0.1, 0.1), every=5, per_leaf=per_leaf)
    params = {"b": jnp.zeros(3), "w": jnp.zeros((3, 2))}
    state, update, found = tx.init(params), jax.jit(tx.update), {}
    for k in range(100):
        g = jax.tree.map(lambda p, k=k: jax.random.normal(jax.random.key(k), p.shape) + p, params)
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        if k % 10 == 9:
            found[k] = momentum_report(state, by_label=per_leaf)
    return found


def test_plot() -> None:
    import matplotlib.pyplot as plt

    reports = collected(per_leaf=False)
    figure = plot_momentum(reports)
    top, bottom = figure.axes
    (ratio, at_level), (alignment, at_0) = top.lines, bottom.lines
    assert list(ratio.get_xdata()) == list(reports)
    ratios = [float(report.gain / report.noise_level) for report in reports.values()]
    np.testing.assert_allclose(ratio.get_ydata(), ratios, rtol=1e-6)
    alignments = [float(report.alignment) for report in reports.values()]
    np.testing.assert_allclose(alignment.get_ydata(), alignments, rtol=1e-6)
    assert at_level.get_ydata() == [1, 1]
    assert at_0.get_ydata() == [0, 0]
    assert (top.get_ylabel(), bottom.get_xlabel()) == ("gain / noise level", "step")
    assert not figure.legends
    plt.close(figure)
    figure = plot_momentum(collected(per_leaf=True))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["b", "w"]
    plt.close(figure)
    with pytest.raises(ValueError, match=re.escape("the same labels at every step, got [] first")):
        plot_momentum({})
    with pytest.raises(ValueError, match=re.escape("at every step, got [''] first")):
        plot_momentum({0: reports[9], 1: {"w": reports[9]}})


def test_plot_of_many_layers_names_those_that_differ_most() -> None:
    import matplotlib.pyplot as plt

    reports = collected(per_leaf=False)
    gains = {"all": 9.0, **{f"layer {i}": 1 + 0.1 * i for i in range(8)}}
    scaled = lambda report, gain: report._replace(gain=gain * report.noise_level)
    by_label = {k: {n: scaled(r, gain) for n, gain in gains.items()} for k, r in reports.items()}
    figure = plot_momentum(by_label)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["all", *(f"layer {i}" for i in range(3, 8))]
    assert len(figure.axes[0].lines) == len(gains) + 1  # and the level of noise
    plt.close(figure)


def test_logged_to_tensorboard(tmp_path: Path) -> None:
    """As the README logs it, and read back from the file of events."""
    reports = collected(per_leaf=False)
    with SummaryWriter(str(tmp_path)) as writer:
        for step, report in reports.items():
            for name, value in report._asdict().items():
                writer.add_scalar(f"momentum/{name}", float(value), step)
    events = EventAccumulator(str(tmp_path)).Reload()
    logged = events.Scalars("momentum/gain")
    assert [event.step for event in logged] == list(reports)
    gains = [float(report.gain) for report in reports.values()]
    np.testing.assert_allclose([event.value for event in logged], gains, rtol=1e-6)
    assert len(events.Tags()["scalars"]) == len(MomentumReport._fields)


# --------------------------------------------------------------------------------------- bad input


def test_bad_input() -> None:
    params = jnp.zeros(3)
    state = spa(1.0).init(params)
    tracked = track_momentum(spa(1.0))
    for call, message in [
        (
            lambda: unchecked(track_momentum)(1.0),
            "`inner` must be a gradient transformation, got 1.0",
        ),
        (
            lambda: track_momentum(optax.sgd(0.1)).init(params),
            "`ScaleByAdamState`, got EmptyState",
        ),
        (
            lambda: track_momentum(optax.chain(spa(1.0), spa(1.0))).init(params),
            "`TraceState` or `ScaleByAdamState`, got 2",
        ),
        (
            lambda: track_momentum(optax.masked(spa(1.0), {"a": True, "b": False})).init(
                {"a": params, "b": params}
            ),
            "`inner` must hold a momentum of all 2 arrays of params, got 1",
        ),
        (
            lambda: track_momentum(tracked).init(params),
            "`inner` must not hold a `TrackMomentumState`: put it outside",
        ),
        (
            lambda: momentum_report(jax.vmap(tracked.init)(jnp.zeros((4, 3)))),
            "`opt_state` must be of one run, got a batch of them",
        ),
        (
            lambda: track_momentum(optax.sgd(0.1, 0.9), per_leaf=True, averaging=0.1).update(
                params, tracked.init(params)
            ),
            "`params` must be passed to `update` under `per_leaf`, got None",
        ),
        (
            lambda: (
                dropping := track_momentum(
                    optax.GradientTransformation(spa(1.0).init, lambda g, s, p=None: (g, s))
                )
            ).update(params, dropping.init(params), params),
            "`inner` must pass extra arguments to its member",
        ),
        (
            lambda: track_momentum(optax.apply_if_finite(spa(1.0), 3)).init(params),
            "`inner` must not hold a `ApplyIfFiniteState`: put it outside",
        ),
        (
            lambda: track_momentum(optax.adamw(0.1)).init(params),
            "`averaging` must be 1 − β if `inner` does not hold β, got None",
        ),
        (
            lambda: track_momentum(spa(1.0), averaging=0.1).init(params),
            "`averaging` must be None for an `inner` with its own c, got 0.1",
        ),
        (
            lambda: track_momentum(optax.sgd(0.1, 0.9), averaging=0.0),
            "`averaging` must be None or in (0, 1], got 0.0",
        ),
        (
            lambda: unchecked(plot_momentum)([1]),
            "`reports` must be a mapping from steps to reports, got [1]",
        ),
        (lambda: unchecked(plot_momentum)({1: {"w": 2}}), "steps to reports, got {1: {'w': 2}}"),
        (
            lambda: unchecked(track_momentum)(spa(1.0), per_leaf="w"),
            "`per_leaf` must be a bool or a function, got 'w'",
        ),
        (lambda: track_momentum(spa(1.0), every=0), "`every` must be a concrete integer >= 1"),
        (
            lambda: track_momentum(spa(1.0), per_leaf=lambda params: 1).init(params),
            "a tree of strings like that of the params, or a prefix of it, got 1",
        ),
        (
            lambda: track_momentum(spa(1.0), per_leaf=lambda params: {"v": "a"}).init(
                {"w": params}
            ),
            "`per_leaf` must return a tree of strings like that of the params, or a prefix of it,"
            " got {'v': 'a'}",
        ),
        (
            lambda: jax.vmap(momentum_report)(jax.vmap(tracked.init)(jnp.zeros((4, 3)))).verdict(),
            "the report must be of one run, got a batch of shape (4,)",
        ),
        (
            lambda: plot_momentum(
                {9: jax.vmap(momentum_report)(jax.vmap(tracked.init)(jnp.zeros((4, 3))))}
            ),
            "`reports` must be of one run, got a batch of shape (4,)",
        ),
        (lambda: track_momentum(spa(1.0), decay=1.0), "`decay` must be in [0, 1), got 1.0"),
        (lambda: track_momentum(spa(1.0), decay=math.nan), "`decay` must be in [0, 1), got nan"),
        (
            lambda: momentum_report(state),
            "`opt_state` must hold one `TrackMomentumState`, got SPAState",
        ),
        (
            lambda: momentum_report(tracked.init(params), by_label=True),
            "`opt_state` must be of a gauge with `per_leaf`, got one without",
        ),
        (lambda: momentum_report((tracked.init(params),) * 2), "`TrackMomentumState`, got 2"),
        (lambda: tracked.update(params, state, params), "`state` must be a `TrackMomentumState`"),
        (lambda: tracked.update(params, tracked.init(params)), "`params` must be passed"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert isinstance(tracked.init(params), TrackMomentumState)
