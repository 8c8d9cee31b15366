"""SGD with momentum as primal averaging, for any hyper-parameters, by a look ahead.

Write z_k = x_k − w_k m_k, with m the momentum buffer and w_k its scale. With
a_k = α_k (heavy ball) or α_k β_k (Nesterov), a step of SGD with momentum is, for any
w_{k+1} > 0,

    z_k     ← x_k + r (z_k − x_k)                    r = β_k (a_k + w_{k+1}) / w_k
    z_{k+1} = z_k − η_k g_k                          η_k = a_k + w_{k+1}
    x_{k+1} = x_k + c_{k+1} (z_{k+1} − x_k)          c_{k+1} = a_k / (a_k + w_{k+1})

Nesterov's η_k is larger by α_k, and x_{k+1} has a term −δ_k g_k, with
δ_k = α_k (1 − c_{k+1}).

If r = 1 at every step, only the gradient moves z. Only one such w stays bounded, the
one that looks ahead: w_k = Σ_{j≥k} a_j Π_{i=k..j} β_i. With it z is the point at which
x comes to rest, so its w_{k+1} is called `next_resting_w` here. It may be 0, or wrong
where hyper-parameters change unforeseen. So `next_w`, the w_{k+1} of a step, is chosen
from it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from . import _arguments
from ._coefficients import XZCoefficients, zero_where
from ._trees import Count, Flag, Scalar


class SGDMValues(NamedTuple):
    """The hyper-parameters of step k, and the resting w_{k+1} of later steps."""

    alpha: Scalar  # α_k
    beta: Scalar  # β_k
    a: Scalar  # a_k: α_k, or α_k β_k with Nesterov momentum
    next_resting_w: Scalar  # w_{k+1} with which z is where x comes to rest
    is_foreseen: Flag | bool  # all later α and β are known, so next_resting_w is final
    next_beta_is_0: Flag | bool  # whether β_{k+1} is 0 for certain
    nesterov: bool


def evaluate_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    count: Count,
    *,
    nesterov: bool = False,
    horizon: int | None = None,
) -> SGDMValues:
    """The hyper-parameters at `count`, which is k, and the resting w_{k+1}.

    w_{k+1} = Σ_{j=k+1..k+H} a_j Π_{i=k+1..j} β_i, and a tail for a and β constant from
    k + H on. Numbers need no sum: H = 0.
    """
    alpha_at = _arguments.as_schedule("learning_rate", learning_rate)
    beta_at = _arguments.as_schedule("momentum", momentum)

    def a_at(k):
        return alpha_at(k) * beta_at(k) if nesterov else alpha_at(k)

    def valid_a_and_beta_at(k):
        return _valid_a_and_beta(a_at(k), beta_at(k))

    if callable(learning_rate) or callable(momentum):
        if horizon is None:
            horizon = default_horizon(momentum)
        next_resting_w, has_all_terms = _next_resting_w_of_schedules(
            valid_a_and_beta_at, count, momentum, horizon
        )
    else:
        next_resting_w = _resting_w_of_constants(*valid_a_and_beta_at(count))
        has_all_terms = True
    # An array is an injected number, which may change at any step.
    momentum_may_change = isinstance(momentum, jax.Array)
    may_change = momentum_may_change or isinstance(learning_rate, jax.Array)
    next_beta = beta_at(jnp.asarray(optax.safe_increment(count)))
    return SGDMValues(
        alpha=alpha_at(count),
        beta=beta_at(count),
        a=a_at(count),
        next_resting_w=next_resting_w,
        is_foreseen=has_all_terms & (not may_change),
        next_beta_is_0=(next_beta == 0) & (not momentum_may_change),
        nesterov=nesterov,
    )


def _next_resting_w_of_schedules(
    valid_a_and_beta_at: Callable[[Array], tuple[Array, Array]],
    count: Count,
    momentum: optax.ScalarOrSchedule,
    horizon: int,
) -> tuple[Scalar, Flag]:
    """The resting w_{k+1}, and whether terms past the horizon have no weight in it."""

    def count_after(num_steps):
        # Counts keep their dtype, since schedules compute in it, and do not overflow.
        return count + jnp.minimum(num_steps, jnp.iinfo(count.dtype).max - count)

    counts = count_after(jnp.arange(1, horizon + 1, dtype=count.dtype))
    a, betas = jax.vmap(valid_a_and_beta_at)(counts)
    # Evaluated again: to slice the arrays above costs a kernel and keeps them alive.
    end = count_after(jnp.asarray(horizon, count.dtype))
    tail = _resting_w_of_constants(*valid_a_and_beta_at(end))
    if _arguments.is_static_number(momentum):
        # Powers of β in float64: a product of rounded numbers collects their errors.
        beta = np.asarray(momentum, betas.dtype).astype(float)
        products = jnp.asarray(beta ** np.arange(1, horizon + 1), betas.dtype)
    else:
        products = jnp.cumprod(betas)
    # The default horizon aims at 1e-8, and the products are rounded.
    has_all_terms = products[-1] <= 1e-7
    return jnp.sum(a * products) + products[-1] * tail, has_all_terms


def _resting_w_of_constants(a: Scalar, beta: Scalar) -> Scalar:
    """The resting w for a and β that stay for ever."""
    return a * beta / (1 - beta)


def default_horizon(momentum: optax.ScalarOrSchedule) -> int:
    """The H at which β^H < 1e-8, at most 2^15 (0.999 needs 18,412).

    It is 2,000 if β is a schedule or an array.
    """
    if not _arguments.is_static_number(momentum):
        return 2_000
    beta = float(momentum)  # pyright: ignore[reportArgumentType]  # no schedule
    if beta <= 0:
        return 1
    return min(math.ceil(math.log(1e-8) / math.log(beta)), 2**15)


def _valid_a_and_beta(a: Array, beta: Array) -> tuple[Array, Array]:
    """a and β, with 0 for NaN and values out of range, as past a schedule's end."""
    valid_a = jnp.where((a > 0) & jnp.isfinite(a), a, 0)
    return valid_a, jnp.where((beta > 0) & (beta < 1), beta, 0)


def eta_and_c(sgdm: SGDMValues, next_w: Scalar) -> tuple[Scalar, Scalar]:
    """η_k and c_{k+1}, for a w_{k+1}. Without momentum x goes to z: c is 1."""
    total = sgdm.a + next_w
    c = jnp.where(next_w == 0, 1, sgdm.a / jnp.where(total == 0, 1, total))
    return (total + sgdm.alpha if sgdm.nesterov else total), c


def sgdm_coefficients(
    sgdm: SGDMValues, w: Scalar, *, stores_difference: bool
) -> XZCoefficients:
    """The coefficients of a step of SGD with momentum, from w_k, that of the state."""
    next_w = _choose_next_w(sgdm, w, stores_difference)
    next_w = next_w.astype(w.dtype).astype(next_w.dtype)  # as the state stores it
    eta, c = eta_and_c(sgdm, next_w)
    return XZCoefficients(
        eta=eta,
        c=c,
        next_w=next_w,
        delta=sgdm.alpha * (1 - c) if sgdm.nesterov else None,
        r=_choose_r(sgdm, next_w, w),
    )


def _choose_next_w(sgdm: SGDMValues, w: Scalar, stores_difference: bool) -> Scalar:
    """The w_{k+1} of a step: the resting one wherever it can be trusted.

        the state stores   later α and β   w_{k+1}
        z − x              known or not    the resting one; 0 where β_{k+1} is 0
        z                  known           the resting one
        z                  not known       the largest of the resting one, w_k and α_k

    Every w_{k+1} > 0 gives the same iterates, since z − x is rescaled to it. It only
    decides how precisely the state keeps m = (x − z)/w.
    """
    w = w.astype(sgdm.a.dtype)
    if stores_difference:
        # The state stores −w m, to the digits of its dtype, and what rounding took from
        # x. Where the rate rises unforeseen, r multiplies both. Where momentum ends w
        # is 0 and c is 1: x is set to z, which has what rounding took.
        next_w = ensure_positive_w(sgdm.next_resting_w, sgdm.a, w)
        return jnp.where(sgdm.next_beta_is_0, 0, next_w)
    # The state stores z to an ulp of x. That is ulp/w of m, so a small w loses digits.
    # A resting w that was not foreseen may prove too small once α or β rises. There w
    # never falls, and is at least α, with which α m is right to an ulp of x.
    cautious_w = jnp.maximum(sgdm.next_resting_w, jnp.maximum(w, sgdm.alpha))
    next_w = jnp.where(sgdm.is_foreseen, sgdm.next_resting_w, cautious_w)
    return ensure_positive_w(next_w, sgdm.a, w)


def _choose_r(sgdm: SGDMValues, next_w: Scalar, w: Scalar) -> Scalar:
    """r = β_k (a_k + w_{k+1}) / w_k, or 1 within rounding error, and where m is 0.

    It is 0 where it would be too large to keep digits.
    """
    m_is_0 = w <= 0  # at the start, and after momentum has ended
    w_or_1 = jnp.where(m_is_0, 1, w).astype(next_w.dtype)
    eps = float(jnp.finfo(w.dtype).eps)  # the state rounds every w to this dtype
    # r − 1, in the form that loses the fewest digits where r is close to 1.
    a, beta = sgdm.a, sgdm.beta
    r_minus_1 = ((next_w - w_or_1) + (beta * a - (1 - beta) * next_w)) / w_or_1
    # Where all went as foreseen, r is 1 but for rounding: some tens of eps for a sum
    # over the horizon, (1 − β) eps for traced numbers that stay. To rescale by that
    # would only add noise.
    rounding_error = jnp.where(sgdm.is_foreseen, 64, 4 * (1 - beta)) * eps
    r_minus_1 = zero_where(jnp.abs(r_minus_1) <= rounding_error, r_minus_1)
    r = jnp.where(m_is_0, 1, 1 + r_minus_1)
    # r also multiplies the rounding error of x in z − x. From 1/√eps on, which costs
    # half the digits of x, momentum restarts from 0.
    return jnp.where(r > eps**-0.5, 0, r)


def ensure_positive_w(next_w: Scalar, a: Scalar, w: Scalar) -> Scalar:
    """A w_{k+1} > 0 with a_k + w_{k+1} > 0, also where a has fallen below 0.

    The resting one is 0 if β or every later α is. Then any positive number will do: a_k
    makes c = 1/2, and w_k keeps m through a gap of α = 0. Numbers below 1e-30 count as
    0, since near there float32 begins to lose bits.
    """
    least = 1e-30
    any_positive = jnp.where(a > least, a, jnp.where(w > least, w, 1))
    next_w = jnp.where(next_w > least, next_w, any_positive)
    # Past its end a schedule may be negative. Then a + w is at least −a.
    return jnp.maximum(next_w, -2 * a)
