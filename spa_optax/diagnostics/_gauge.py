"""The measurements of a step, and their moving averages.

No step Δx_k = x_{k+1} − x_k is stored. It follows from e_k = z_k − x_k, after z was
rescaled by r, with b_k = c_{k+1} η_k + δ_k:

    Δx_k = c_{k+1} e_k − b_k g_k

If gradients were pure noise, all cross terms ⟨g_k, e_k⟩ would vanish in the mean. The
mean of ‖e_k‖² would be p_k, and that of ‖Δx_k‖² would be v_{k+1}:

    v_{k+1} = c_{k+1}² p_k + b_k² ‖g_k‖²
    p_{k+1} = (1 − c_{k+1})² p_k + ((1 − c_{k+1}) η_k − δ_k)² ‖g_k‖²

‖Δx_k‖², v_{k+1} and the cross term are stored divided by η_k² c_{k+1}, as in the
paper's Figure 2, which compares ‖Δx_k‖²/(η_k² c_{k+1}) to ½‖g_k‖². p_k and the squares
of `Sums` are not divided.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from .._codec import codec_of, stored_tree
from .._coefficients import XZCoefficients
from .._state import SPAState, is_initial, mu_y_of
from .._trees import Count, Flag, Scalar, as_dtype, find_nodes, map_inexact


class Sums(NamedTuple):
    """Sums over all params in a step, with e_k = z_k − x_k."""

    sq_gradient: Scalar  # ‖g_k‖²
    sq_distance: Scalar  # ‖e_k‖²
    inner_product: Scalar  # ⟨g_k, e_k⟩
    sq_rounding: Scalar  # an estimate of what rounding adds to ‖e_k‖²


class Measurement(NamedTuple):
    """What is measured of a step, in float32."""

    sums: Sums
    eta: Scalar  # η_k
    c: Scalar  # c_{k+1}
    delta: Scalar  # δ_k
    r: Scalar  # z_k ← x_k + r (z_k − x_k) before the step


class Means(NamedTuple):
    """Moving averages before division by `weight`, the sum of their weights."""

    iterate_term: Scalar  # of ‖Δx_{k−1}‖²/(η_{k−1}² c_k)
    noise_term: Scalar  # of v_k/(η_{k−1}² c_k)
    gradient_term: Scalar  # of ½‖g_k‖²
    weight: Scalar


class Gauge(NamedTuple):
    """The stored measurements.

    The cross term of ‖Δx_k‖²/(η_k² c_{k+1}) is χ_k = −2 b_k ⟨g_k, e_k⟩/η_k². Under pure
    noise its mean is 0 given the steps before k, so the variance of Σ χ_k is the mean
    of Σ χ_k².
    """

    last_iterate_term: Scalar  # ‖Δx‖²/(η² c) of the last step; 0 if not measured
    last_noise_term: Scalar  # v/(η² c) of the last step
    p: Scalar  # p_k; −1 before the first step
    cross_sum: Scalar  # Σ χ_k, with weights that fall
    cross_error: Scalar  # √(Σ χ_k²), with the same weights
    means: Means
    num_steps: Count
    num_measured: Count  # measured steps; the averages have each after the next step
    num_not_finite: Count  # consecutive steps up to the last one


def init_gauge() -> Gauge:
    """The gauge before the first step. Its arrays are separate, and can be donated."""

    def zero(dtype=jnp.float32):
        return jnp.zeros([], dtype)

    return Gauge(
        last_iterate_term=zero(),
        last_noise_term=zero(),
        p=jnp.full([], -1, jnp.float32),
        cross_sum=zero(),
        cross_error=zero(),
        means=Means(zero(), zero(), zero(), zero()),
        num_steps=zero(jnp.int32),
        num_measured=zero(jnp.int32),
        num_not_finite=zero(jnp.int32),
    )


def measure(
    g: PyTree, state: SPAState, params: PyTree, xz: XZCoefficients
) -> Measurement:
    """The measurements of a step of a member, from the state before it."""
    r = jnp.ones([]) if xz.r is None else xz.r
    delta = jnp.zeros([]) if xz.delta is None else xz.delta
    values = xz.eta, xz.c, delta, r, mu_y_of(state)
    eta, c, delta, r, mu_y = as_dtype(values, jnp.float32)
    sums = _sums(g, state, params, factor=r / mu_y)
    return Measurement(sums, eta, c, delta, r)


def _sums(g: PyTree, state: SPAState, params: PyTree, factor: Scalar) -> Sums:
    """The sums with e_k = factor (z_k − y_k): r/μ_y, with the μ_y of y_k."""
    codec, state_is_initial = codec_of(state.z), is_initial(state)

    def sum_array(y, stored, g):
        y = jnp.asarray(y)
        d = codec.decode_difference(y, stored, state_is_initial)
        e = factor.astype(d.dtype) * d
        g = jnp.asarray(g).astype(e.dtype)
        # Errors of y and of what is stored; the larger stands for both.
        rounding = jnp.maximum(
            _rounding_error(y, e.dtype),
            codec.unit * _rounding_error(stored, e.dtype),
        )
        rounding = factor.astype(rounding.dtype) * rounding
        return Sums(
            sq_gradient=_dot(g, g),
            sq_distance=_dot(e, e),
            inner_product=_dot(g, e),
            sq_rounding=_dot(rounding, rounding),
        )

    array_sums = find_nodes(
        map_inexact(sum_array, params, stored_tree(state.z), g), Sums
    )
    zeros = Sums(*jnp.zeros(4, jnp.float32))
    return functools.reduce(optax.tree.add, array_sums, zeros)


def _dot(array: Array, other: Array) -> Scalar:
    return jnp.sum(jnp.real(array * jnp.conj(other))).astype(jnp.float32)


def _rounding_error(array: Array, dtype: Any) -> Array:
    """A bound on the rounding error of each element, to compute with in a dtype."""
    info = jnp.finfo(array.dtype)  # below `tiny` the spacing stays
    return float(info.eps) * jnp.maximum(jnp.abs(array.astype(dtype)), float(info.tiny))


def update_gauge(gauge: Gauge, measured: Measurement, decay: Any) -> Gauge:
    """The gauge after a step."""
    sums, eta, c, delta, r = measured
    sums_are_finite = jnp.isfinite(jnp.stack(sums[:3])).all()
    # At the first step of the gauge p_k is ‖e_k‖² itself.
    p = jnp.where(gauge.p < 0, sums.sq_distance, r**2 * gauge.p)
    terms, is_finite, is_negligible = _step_terms(measured, p)
    is_finite &= sums_are_finite
    is_measured = is_finite & ~is_negligible
    iterate_term, noise_term, cross_term = [
        jnp.where(is_measured, term, 0) for term in terms
    ]
    # A cross term stays in ‖Δx‖² with the factor (1 − c)² a step. The sum of cross
    # terms must not forget it faster, or t would ignore what the gain still has.
    cross_decay = jnp.where(is_measured, jnp.maximum(decay, (1 - c) ** 2), 1)
    gradient_weight = (1 - c) * eta - delta
    next_p = (1 - c) ** 2 * p + gradient_weight**2 * sums.sq_gradient
    return Gauge(
        last_iterate_term=iterate_term,
        last_noise_term=noise_term,
        p=jnp.where(jnp.isfinite(next_p), next_p, gauge.p),
        cross_sum=cross_decay * gauge.cross_sum + cross_term,
        cross_error=jnp.hypot(cross_decay * gauge.cross_error, cross_term),
        means=_update_means(gauge, sums, sums_are_finite, decay),
        num_steps=gauge.num_steps + 1,
        num_measured=gauge.num_measured + is_measured.astype(jnp.int32),
        num_not_finite=jnp.where(is_finite, 0, gauge.num_not_finite + 1),
    )


def _step_terms(
    measured: Measurement, p: Scalar
) -> tuple[tuple[Scalar, Scalar, Scalar], Flag, Flag]:
    """‖Δx_k‖², v_{k+1} and the cross term, each over η² c, and two flags.

    The flags say whether the first two terms are finite, and whether ‖Δx_k‖² is 0 or
    within the rounding error.

        ‖Δx_k‖² = c²‖e_k‖² − 2 c b ⟨g_k, e_k⟩ + b²‖g_k‖²
    """
    sums, eta, c, delta, _ = measured
    denominator = eta**2 * c
    b = c * eta + delta
    cross = -2 * c * b * sums.inner_product
    square = c**2 * sums.sq_distance + cross + b**2 * sums.sq_gradient
    square = jnp.maximum(square, 0)
    is_negligible = (denominator <= 0) | (square < jnp.finfo(jnp.float32).tiny)
    is_negligible |= c**2 * sums.sq_rounding > 0.1 * square
    divisor = jnp.where(denominator > 0, denominator, 1)
    iterate_term = square / divisor
    noise_term = (c**2 * p + b**2 * sums.sq_gradient) / divisor
    is_finite = jnp.isfinite(iterate_term) & jnp.isfinite(noise_term)
    return (iterate_term, noise_term, cross / divisor), is_finite, is_negligible


def _update_means(gauge: Gauge, sums: Sums, sums_are_finite: Flag, decay: Any) -> Means:
    """The means, of ‖Δx_{k−1}‖² if that step counts, and of the gradient after it."""
    terms = Means(
        gauge.last_iterate_term,
        gauge.last_noise_term,
        sums.sq_gradient / 2,
        jnp.float32(1),
    )
    last_is_measured = sums_are_finite & (gauge.last_iterate_term > 0)

    def average(mean, term):
        return jnp.where(last_is_measured, decay * mean + (1 - decay) * term, mean)

    return jax.tree.map(average, gauge.means, terms)
