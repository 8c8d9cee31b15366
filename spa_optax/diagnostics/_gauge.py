"""The measurements of a step, and their moving averages."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr
from jaxtyping import Array, Float, Int

from spa_optax._core import Step
from spa_optax._precision import wide_dtype
from spa_optax._trees import map_trained


class Means(NamedTuple):
    """Moving averages before division by `weight`, the sum of their weights."""

    iterate: Float[Array, "*n"]  # of ‖u_{k−1}‖²/(η_{k−1}²c_k)
    noise: Float[Array, "*n"]  # of the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # of ½‖g_k‖²
    weight: Float[Array, "*n"]


class AlignmentMeans(NamedTuple):
    """Like `Means`, over the steps at which u_{k−1} can be computed from z_k − x_k."""

    inner_product: Float[Array, "*n"]  # of ⟨g_k, u_{k−1}⟩
    step: Float[Array, "*n"]  # of ‖u_{k−1}‖²
    gradient: Float[Array, "*n"]  # of ‖g_k‖²
    weight: Float[Array, "*n"]


class CrossTerms(NamedTuple):
    """Of −2c_{k+1}(c_{k+1}η_k + δ_k)⟨g_k, d_k⟩/(η_k²c_{k+1}), what ‖u_k‖²/(η²c) has beyond noise.

    Under pure noise ⟨g_k, d_k⟩ has mean 0 given the steps before k. So these terms are uncorrelated
    from step to step, and the variance of their sum is that of their squares.
    """

    total: Float[Array, "*n"]
    error: Float[Array, "*n"]  # the root of the sum of squares
    number: Int[Array, "*n"]  # of terms


class Uncounted(NamedTuple):
    """Measured steps that do not count, by reason."""

    skipped: Int[Array, "*n"]  # not finite, or the squares overflow
    zero: Int[Array, "*n"]  # 0, or the squares underflow
    rounded: Int[Array, "*n"]  # within the rounding error of x and z


class Sums(NamedTuple):
    """The measurements of a step."""

    sq_gradient: Float[Array, "*n"]  # ‖g_k‖²
    sq_distance: Float[Array, "*n"]  # ‖d_k‖², with d_k = z_k − x_k
    inner_product: Float[Array, "*n"]  # ⟨g_k, d_k⟩
    sq_rounding: Float[Array, "*n"]  # the most that rounding adds to ‖d_k‖²
    saturated: Int[Array, "*n"]  # elements of z at the limit of what can be stored


class Gauge(NamedTuple):
    """The stored measurements: numbers, or vectors over groups of params."""

    iterate: Float[Array, "*n"]  # ‖u‖²/(η²c) of the last measured step; −1 if there is none
    noise: Float[Array, "*n"]  # the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # ‖g‖² of the last measured step
    spread: Float[Array, "*n"]  # what ‖z_k − x_k‖² would be if every cross term vanished
    means: Means
    alignment: AlignmentMeans
    cross: CrossTerms
    uncounted: Uncounted
    saturated: Int[Array, "*n"]  # the most elements of z at the limit of what can be stored


def new_gauge(shape: tuple[int, ...]) -> Gauge:
    """The gauge before the first step."""
    zero = lambda: jnp.zeros(shape, jnp.float32)  # separate, so that all can be donated
    zeros = lambda kind: kind(*(zero() for _ in kind._fields))
    means, alignment = zeros(Means), zeros(AlignmentMeans)
    number, saturated, *uncounted = (jnp.zeros(shape, jnp.int32) for _ in range(5))
    cross, uncounted = CrossTerms(zero(), zero(), number), Uncounted(*uncounted)
    return Gauge(zero() - 1, zero(), zero(), zero(), means, alignment, cross, uncounted, saturated)


def sums_of(step: Step, labels: dict[str, str] | None) -> Sums:
    """‖g_k‖², ‖d_k‖² and ⟨g_k, d_k⟩ over all params, or for each group and then over all."""

    def of_leaf(d: Array, g: Array, rounding: Array, saturated: Array) -> Sums:
        g = g.astype(wide_dtype(g, d))
        dot = lambda a, b: jnp.sum(jnp.real(a * jnp.conj(b))).astype(jnp.float32)
        return Sums(dot(g, g), dot(d, d), dot(g, d), dot(rounding, rounding), saturated)

    by_leaf = jax.tree_util.tree_leaves_with_path(
        map_trained(of_leaf, step.distance, step.gradient, step.rounding, step.saturated),
        is_leaf=lambda n: isinstance(n, Sums),
    )
    zero = Sums(*(jnp.zeros([], field) for field in [jnp.float32] * 4 + [jnp.int32]))
    add = lambda a, b: jax.tree.map(jnp.add, a, b)
    whole = functools.reduce(add, (sums for _, sums in by_leaf), zero)
    if labels is None:
        return whole
    totals = dict.fromkeys(sorted(set(labels.values())), zero)
    for path, sums in by_leaf:
        if keystr(path) not in labels:
            at = keystr(path) or "its root"
            raise ValueError(f"`per_leaf` must be False if `inner` changes the tree, got {at}")
        label = labels[keystr(path)]
        totals[label] = add(totals[label], sums)
    return jax.tree.map(lambda *sums: jnp.stack(sums), *totals.values(), whole)


def update_gauge(
    gauge: Gauge, step: Step, sums: Sums, count: Int[Array, ""], decay: float, every: int
) -> Gauge:
    """The gauge after a step."""
    is_measured = count % every == 0
    f32 = lambda scalar: jnp.asarray(0 if scalar is None else scalar, jnp.float32)
    eta, c, delta, c_before = map(f32, (step.eta, step.c, step.delta, step.c_before))
    # r is the same for all dtypes, unless momentum restarts for some.
    r = f32(functools.reduce(jnp.minimum, step.r.values() or [jnp.ones([])]))
    sq_g, sq_d, g_d, sq_rounding, saturated = sums
    is_finite = jnp.isfinite(sq_g) & jnp.isfinite(sq_d) & jnp.isfinite(g_d)
    is_known = is_measured & is_finite
    one = jnp.ones_like(sq_g)

    def averaged(means: Any, terms: Any, counts: Array) -> Any:
        average = lambda mean, term: decay * mean + (1 - decay) * term
        new = lambda mean, term: jnp.where(counts, average(mean, term), mean)
        return jax.tree.map(new, means, terms)

    # The last step, or the last measured one.
    terms = Means(gauge.iterate, gauge.noise, sq_g / 2, one)
    means = averaged(gauge.means, terms, is_known & (gauge.iterate >= 0))

    # u_{k−1} = c_k/(1 − c_k) d_k, if d_k is more than rounding error.
    follows = is_known & (c_before > 0) & (c_before < 1) & (r > 0) & (step.delta is None)
    follows &= sq_rounding < 1e-4 * sq_d
    s = c_before / jnp.where(c_before < 1, 1 - c_before, 1) / jnp.where(r > 0, r, 1)
    alignment = averaged(gauge.alignment, AlignmentMeans(s * g_d, s**2 * sq_d, sq_g, one), follows)
    # Otherwise the average restarts.
    alignment = jax.tree.map(lambda a: jnp.where(is_measured & ~follows, 0, a), alignment)

    # ‖u_k‖² for u_k = c d_k − (c η + δ) g_k, and its value without cross terms.
    b = c * eta + delta
    square = jnp.maximum(c**2 * sq_d - 2 * c * b * g_d + b**2 * sq_g, 0)
    gradient = jnp.where(is_known, sq_g, gauge.gradient)
    before = jnp.where((count == 0) & is_known, sq_d, r**2 * gauge.spread)
    noise = c**2 * before + b**2 * gradient
    spread = (1 - c) ** 2 * before + ((1 - c) * eta - delta) ** 2 * gradient
    # In units of η²c, unless η or c is 0.
    scale = eta**2 * c
    unit = jnp.where(scale > 0, scale, 1)
    iterate, level = square / unit, noise / unit
    fits = is_finite & jnp.isfinite(iterate) & jnp.isfinite(level)
    is_zero = (scale <= 0) | (square < jnp.finfo(jnp.float32).tiny)
    is_rounded = c**2 * sq_rounding > 0.1 * square  # it may be only rounding error
    has_unit = is_measured & fits & ~is_zero & ~is_rounded
    reasons = Uncounted(~fits, fits & is_zero, fits & ~is_zero & is_rounded)
    counted = lambda number, reason: number + (is_measured & reason).astype(jnp.int32)

    # ‖u‖² has the cross terms of the last 1/(2c) steps, so their sum forgets no faster.
    slow = jnp.maximum(decay, (1 - c) ** (2 * every))
    term = -2 * c * b * g_d / unit
    total, error = slow * gauge.cross.total + term, jnp.hypot(slow * gauge.cross.error, term)
    new = CrossTerms(total, error, jnp.asarray(optax.safe_increment(gauge.cross.number)))
    cross = jax.tree.map(lambda new, old: jnp.where(has_unit, new, old), new, gauge.cross)
    return Gauge(
        iterate=jnp.where(is_measured, jnp.where(has_unit, iterate, -1), gauge.iterate),
        noise=jnp.where(has_unit, level, gauge.noise),
        gradient=gradient,
        spread=jnp.where(jnp.isfinite(spread), spread, gauge.spread),
        means=means,
        alignment=alignment,
        cross=cross,
        uncounted=jax.tree.map(counted, gauge.uncounted, reasons),
        saturated=jnp.where(is_measured, jnp.maximum(saturated, gauge.saturated), gauge.saturated),
    )
