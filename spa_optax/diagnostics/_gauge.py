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
from spa_optax._storage import OutOfRange
from spa_optax._trees import map_trained


class Means(NamedTuple):
    """Moving averages before division by `weight`, the sum of their weights."""

    iterate: Float[Array, "*n"]  # of ‖u_{k−1}‖²/(η_{k−1}²c_k)
    noise: Float[Array, "*n"]  # of the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # of ½‖g_k‖²
    subnormal: Float[
        Array, "*n"
    ]  # of the share of nonzero z_k − y_k below the normal range
    weight: Float[Array, "*n"]


class AlignmentMeans(NamedTuple):
    """Like `Means`, over the steps at which u_{k−1} can be computed from z_k − x_k."""

    inner_product: Float[Array, "*n"]  # of ⟨g_k, u_{k−1}⟩
    step: Float[Array, "*n"]  # of ‖u_{k−1}‖²
    gradient: Float[Array, "*n"]  # of ‖g_k‖²
    weight: Float[Array, "*n"]


class Sums(NamedTuple):
    """The measurements of a step."""

    sq_gradient: Float[Array, "*n"]  # ‖g_k‖²
    sq_distance: Float[Array, "*n"]  # ‖d_k‖², with d_k = z_k − x_k
    inner_product: Float[Array, "*n"]  # ⟨g_k, d_k⟩
    sq_rounding: Float[Array, "*n"]  # the most that rounding adds to ‖d_k‖²
    out_of_range: OutOfRange  # how many elements of z_k are


class Gauge(NamedTuple):
    """The stored measurements: scalars, or vectors over the labels and then over all
    params.

    The cross term of ‖u_k‖²/(η_k²c_{k+1}) is a_k = −2(c_{k+1}η_k + δ_k)⟨g_k, d_k⟩/η_k².
    Under pure noise its mean is 0 given the steps before k, so the variance of Σ a_k is
    the mean of Σ a_k².
    """

    iterate: Float[
        Array, "*n"
    ]  # ‖u‖²/(η²c) of the last measured step; −1 if there is none
    noise: Float[Array, "*n"]  # the same, if every cross term vanished
    gradient: Float[Array, "*n"]  # ‖g‖² of the last measured step
    spread: Float[Array, "*n"]  # ‖z_k − x_k‖², if every cross term vanished
    cross_sum: Float[Array, "*n"]  # Σ a_k, with weights that fall
    cross_error: Float[Array, "*n"]  # √(Σ a_k²), with the same weights
    means: Means
    alignment: AlignmentMeans
    num_measured: Int[Array, "*n"]  # measured steps that count; the next three do not:
    num_skipped: Int[Array, "*n"]  # not finite, or the squares overflow
    num_zero: Int[Array, "*n"]  # 0, or the squares underflow
    num_rounded: Int[Array, "*n"]  # within the rounding error of x and z
    num_saturated: Int[Array, "*n"]  # the most elements of z in any measured step


def new_gauge(shape: tuple[int, ...]) -> Gauge:
    """The gauge before the first step, of separate arrays, so that all can be
    donated.
    """
    zeros = lambda number, dtype=jnp.float32: [
        jnp.zeros(shape, dtype) for _ in range(number)
    ]
    means, alignment = Means(*zeros(5)), AlignmentMeans(*zeros(4))
    return Gauge(*[zeros(1)[0] - 1, *zeros(5), means, alignment, *zeros(5, jnp.int32)])


def sums_of(step: Step, labels: dict[str, str] | None) -> Sums:
    """The measurements over all params, or for each label and then over all."""

    def of_leaf(d: Array, g: Array, rounding: Array, out_of_range: OutOfRange) -> Sums:
        g = g.astype(wide_dtype(g, d))
        dot = lambda a, b: jnp.sum(jnp.real(a * jnp.conj(b))).astype(jnp.float32)
        return Sums(
            dot(g, g), dot(d, d), dot(g, d), dot(rounding, rounding), out_of_range
        )

    tree = map_trained(
        of_leaf, step.distance, step.gradient, step.rounding, step.out_of_range
    )
    leaves = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, Sums)
    )
    by_path = {keystr(path): sums for path, sums in leaves}
    zeros = lambda num: [jnp.zeros([], jnp.float32)] * num
    zero = Sums(*zeros(4), out_of_range=OutOfRange(*zeros(3)))
    total = lambda of: functools.reduce(
        lambda a, b: jax.tree.map(jnp.add, a, b), of, zero
    )
    whole = total(by_path.values())
    if labels is None:
        return whole
    if odd := by_path.keys() - labels.keys():
        at = min(odd) or "its root"
        raise ValueError(
            f"`per_leaf` must be False if `inner` changes the tree, got {at}"
        )
    of_label = lambda name: total(
        sums for path, sums in by_path.items() if labels[path] == name
    )
    groups = map(of_label, sorted(set(labels.values())))
    return jax.tree.map(lambda *sums: jnp.stack(sums), *groups, whole)


def update_gauge(
    gauge: Gauge,
    step: Step,
    sums: Sums,
    count: Int[Array, ""],
    decay: float,
    every: int,
) -> Gauge:
    """The gauge after a step."""
    f32 = lambda scalar: jnp.asarray(0 if scalar is None else scalar, jnp.float32)
    eta, c, delta, c_before = map(f32, (step.eta, step.c, step.delta, step.c_before))
    # r is the same for all dtypes, unless momentum restarts for some.
    r = f32(functools.reduce(jnp.minimum, step.r.values() or [jnp.ones([])]))
    sq_g, sq_d, g_d, sq_rounding, (saturated, subnormal, nonzero) = sums
    is_measured = count % every == 0
    is_finite = jnp.isfinite(sq_g) & jnp.isfinite(sq_d) & jnp.isfinite(g_d)
    one = jnp.ones_like(sq_g)

    def averaged(means: Any, terms: Any, counts: Array) -> Any:
        new = lambda mean, term: jnp.where(
            counts, decay * mean + (1 - decay) * term, mean
        )
        return jax.tree.map(new, means, terms)

    # Of the last measured u_{k−1}, and the gradient after it.
    terms = Means(
        gauge.iterate, gauge.noise, sq_g / 2, subnormal / jnp.maximum(nonzero, 1), one
    )
    means = averaged(gauge.means, terms, is_finite & (gauge.iterate >= 0))

    # u_{k−1} = c_k/(1 − c_k) d_k, if d_k is more than rounding error. Otherwise
    # restart.
    follows = (
        is_finite & (c_before > 0) & (c_before < 1) & (r > 0) & (step.delta is None)
    )
    follows &= sq_rounding < 1e-4 * sq_d
    s = c_before / jnp.where(c_before < 1, 1 - c_before, 1) / jnp.where(r > 0, r, 1)
    alignment = averaged(
        gauge.alignment, AlignmentMeans(s * g_d, s**2 * sq_d, sq_g, one), follows
    )
    alignment = jax.tree.map(lambda a: jnp.where(follows, a, 0), alignment)

    # ‖u_k‖² for u_k = c d_k − (c η + δ) g_k, and its value without cross terms.
    b = c * eta + delta
    square = jnp.maximum(c**2 * sq_d - 2 * c * b * g_d + b**2 * sq_g, 0)
    gradient = jnp.where(is_measured & is_finite, sq_g, gauge.gradient)
    before = jnp.where((count == 0) & is_finite, sq_d, r**2 * gauge.spread)
    noise = c**2 * before + b**2 * gradient
    spread = (1 - c) ** 2 * before + ((1 - c) * eta - delta) ** 2 * gradient
    scale = eta**2 * c  # the unit, unless η or c is 0
    unit = jnp.where(scale > 0, scale, 1)
    iterate, level, term = square / unit, noise / unit, -2 * c * b * g_d / unit
    fits = is_finite & jnp.isfinite(iterate) & jnp.isfinite(level)
    is_zero = fits & ((scale <= 0) | (square < jnp.finfo(jnp.float32).tiny))
    is_rounded = (
        fits & ~is_zero & (c**2 * sq_rounding > 0.1 * square)
    )  # perhaps rounding error
    has_unit = fits & ~is_zero & ~is_rounded

    # ‖u‖² has the cross terms of the last 1/(2c) steps, so their sum forgets no faster.
    slow = jnp.maximum(decay, (1 - c) ** (2 * every))
    if_unit = lambda new, old: jnp.where(has_unit, new, old)
    counted = lambda number, is_so: jnp.where(
        is_so, optax.safe_increment(number), number
    )
    new = gauge._replace(
        iterate=if_unit(iterate, -1),
        noise=if_unit(level, gauge.noise),
        gradient=gradient,
        cross_sum=if_unit(slow * gauge.cross_sum + term, gauge.cross_sum),
        cross_error=if_unit(
            jnp.hypot(slow * gauge.cross_error, term), gauge.cross_error
        ),
        means=means,
        alignment=alignment,
        num_measured=counted(gauge.num_measured, has_unit),
        num_skipped=counted(gauge.num_skipped, ~fits),
        num_zero=counted(gauge.num_zero, is_zero),
        num_rounded=counted(gauge.num_rounded, is_rounded),
        num_saturated=jnp.maximum(
            jnp.asarray(saturated, jnp.int32), gauge.num_saturated
        ),
    )
    new = jax.tree.map(lambda new, old: jnp.where(is_measured, new, old), new, gauge)
    return new._replace(spread=jnp.where(jnp.isfinite(spread), spread, gauge.spread))
