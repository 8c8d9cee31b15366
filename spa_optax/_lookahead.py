"""SGD with momentum as primal averaging, for any hyper-parameters, by a look ahead in
schedules.

Write z_k = x_k − w_k m_k, with m the momentum buffer and w_k > 0 its scale. With a_k =
α_k (heavy ball) or α_k β_k (Nesterov), one step of SGD with momentum is, for any
w_{k+1} > 0,

    z_k     ← x_k + r (z_k − x_k)                        r = β_k (a_k + w_{k+1}) / w_k
    z_{k+1} = z_k − η_k g_k                     η_k = a_k + w_{k+1}    (Nesterov: + α_k)
    x_{k+1} = x_k + c_{k+1} (z_{k+1} − x_k) − δ_k g_k    c_{k+1} = a_k / (a_k + w_{k+1})

with δ_k = 0 (Nesterov: α_k (1 − c_{k+1})). If r = 1 at every step, only its gradient
step moves z. Only one such w stays bounded, the one that looks ahead: w_k = Σ_{j≥k} a_j
Π_{i=k..j} β_i.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from spa_optax._checks import is_plain_number
from spa_optax._core import Scalars
from spa_optax._hyperparams import at_count

Scalar = Float[Array, ""]


class LookAhead(NamedTuple):
    """The hyper-parameters of step k, and w_{k+1} from those of later steps."""

    alpha: Scalar  # α_k
    beta: Scalar  # β_k
    a: Scalar  # a_k
    w: Scalar  # w_{k+1}; 0 if all its terms are
    unseen: Scalar  # weight in w_{k+1} of terms past the horizon; 1 for traced numbers
    ends: Bool[Array, ""] | bool  # whether β_{k+1} is surely 0, so that momentum ends


def in_range(alpha: Array, beta: Array) -> tuple[Array, Array]:
    """Later α and β, with 0 for values that are NaN or out of range, as past a
    schedule's end.
    """
    alpha = jnp.where((alpha > 0) & jnp.isfinite(alpha), alpha, 0)
    return alpha, jnp.where((beta > 0) & (beta < 1), beta, 0)


def _default_horizon(momentum: optax.ScalarOrSchedule) -> int:
    """The H at which β^H < 1e-8, at most 2^15 (0.999 needs 18,412); 2,000 if β is a
    schedule.
    """
    if not is_plain_number(momentum):
        return 2_000
    beta = float(momentum)  # pyright: ignore[reportArgumentType]  # concrete, so no schedule
    return min(math.ceil(math.log(1e-8) / math.log(beta)), 2**15) if beta > 0 else 1


def look_ahead(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    count: Int[Array, ""],
    *,
    nesterov: bool = False,
    horizon: int | None = None,
) -> LookAhead:
    """The hyper-parameters of step k, the count, and w_{k+1}. Numbers need no sum: H =
    0.

    w_{k+1} = Σ_{j=k+1..k+H} a_j Π_{i=k+1..j} β_i, plus the tail for a and β constant
    from k + H on.
    """
    alpha_at, beta_at = (
        at_count("learning_rate", learning_rate),
        at_count("momentum", momentum),
    )
    a_of = lambda alpha, beta: alpha * beta if nesterov else alpha
    alpha, beta = alpha_at(count), beta_at(count)
    a = a_of(alpha, beta)
    ends = (
        not isinstance(momentum, jax.Array)
        and beta_at(jnp.maximum(count, count + 1)) == 0
    )
    if callable(learning_rate) or callable(momentum):
        horizon = _default_horizon(momentum) if horizon is None else horizon
        # Counts keep the dtype of `count`, since schedules compute in it, and do not
        # overflow.
        after = lambda steps: (
            count + jnp.minimum(steps, jnp.iinfo(count.dtype).max - count)
        )
        counts = after(jnp.arange(1, horizon + 1, dtype=count.dtype))
        alphas, betas = in_range(jax.vmap(alpha_at)(counts), jax.vmap(beta_at)(counts))
        # Evaluated again, since slicing the arrays above costs a kernel and keeps them
        # alive.
        last = after(jnp.asarray(horizon, count.dtype))
        alpha_last, beta_last = in_range(alpha_at(last), beta_at(last))
        if is_plain_number(momentum):  # powers in float64, of β rounded as in `betas`
            powers = np.asarray(momentum, a.dtype).astype(float) ** np.arange(
                1, horizon + 1
            )
            reach = jnp.asarray(powers, a.dtype)
        else:
            reach = jnp.cumprod(betas)
        seen = jnp.sum(a_of(alphas, betas) * reach)
        reach_last = unseen = reach[-1]
    else:
        foreknown = is_plain_number(learning_rate) and is_plain_number(momentum)
        seen, reach_last, unseen = 0, 1, jnp.full_like(a, 0 if foreknown else 1)
        alpha_last, beta_last = in_range(alpha, beta)
    for_ever = a_of(alpha_last, beta_last) * beta_last / (1 - beta_last)
    return LookAhead(alpha, beta, a, seen + reach_last * for_ever, unseen, ends)


def eta_and_c(
    ahead: LookAhead, w: Scalar | None = None, *, nesterov: bool = False
) -> tuple[Scalar, Scalar]:
    """η_k and c_{k+1}, perhaps with another w for w_{k+1}."""
    total = ahead.a + (ahead.w if w is None else w)
    return (total + ahead.alpha if nesterov else total), ahead.a / jnp.where(
        total == 0, 1, total
    )


def sgdm_scalars(
    ahead: LookAhead, w_old: Scalar, *, is_master: bool, nesterov: bool
) -> Scalars:
    """The scalars of a step. `is_master`: z is the master copy of params of 16 bits or
    fewer.
    """
    alpha, beta, a, w, unseen, ends = ahead
    w_k = w_old.astype(a.dtype)
    foreseen = unseen <= 1e-7
    if not is_master:
        # m = (x − z) / w has the rounding error of x over w. If α or β may rise
        # unforeseen, w stays large. But in a master copy that would cost digits.
        w = jnp.where(foreseen, w, jnp.maximum(w, jnp.maximum(w_k, alpha / 100)))
    ends &= is_master  # x then goes to z, which keeps what x loses by rounding
    w = (
        jnp.where(ends, 0, nonzero_w(w, a, w_k)).astype(w_old.dtype).astype(a.dtype)
    )  # as stored
    # r − 1, in the form that loses the fewest digits where r is close to 1.
    w_k = jnp.where(w_k > 0, w_k, 1)
    shift = ((w - w_k) + (beta * a - (1 - beta) * w)) / w_k
    # A smaller shift is rounding error: some tens of eps for sums over a horizon, (1 −
    # β) eps for unchanged traced numbers. Its derivative is not, and is kept.
    rounding = jnp.where(foreseen, 64, 4 * (1 - beta)) * float(jnp.finfo(a.dtype).eps)
    shift -= jnp.where(jnp.abs(shift) > rounding, 0, jax.lax.stop_gradient(shift))
    shift = jnp.where(w_old > 0, shift, 0)
    eta, c = eta_and_c(ahead, w, nesterov=nesterov)
    c = jnp.where(ends, 1, c)
    delta = alpha * (1 - c) if nesterov else None
    return Scalars(eta, c, w, delta=delta, r=(w_k + shift * w_k, w_k))


def nonzero_w(w: Scalar, a: Scalar, w_k: Scalar) -> Scalar:
    """A w_{k+1} that is safe to divide by.

    If it is 0 (β or every later α is), any positive number will do: a_k makes c = 1/2,
    and w_k keeps m through a gap of α = 0. Below 1e-30, where float32 loses bits,
    numbers count as 0. A negative a_k must not cancel w_{k+1} in a_k + w_{k+1}.
    """
    zero = 1e-30
    fallback = jnp.where(a > zero, a, jnp.where(w_k > zero, w_k, 1))
    return jnp.maximum(jnp.where(w > zero, w, fallback), -2 * a)
