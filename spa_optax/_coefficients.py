"""The coefficients of a step: of x and z, as a rule returns it, and of y and z.

Step k leads from index k to k + 1. η_k and c_{k+1}, as the paper counts them, belong to
the step, and the next state records them. w and μ_y belong to a point: the state has
those of index k, and the rule gives `next_w` and `next_mu_y`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._trees import Flag, Scalar


class XZCoefficients(NamedTuple):
    """One step of x and z, as a rule returns it. g are the incoming updates.

    The paper's step, whose params are x, needs only the first two fields:

        z_{k+1} = z_k − η g_k
        x_{k+1} = x_k + c (z_{k+1} − x_k)

    Each further field adds a term or an equation:

        r            z_k ← x_k + r (z_k − x_k)                  before both
        delta        x_{k+1} loses δ g_k
        next_mu_y    y_{k+1} = μ' x_{k+1} + (1 − μ') z_{k+1}    y are the params

    A μ' below 1 makes it generalized primal averaging. Only `spa_from_sgdm` has δ, for
    Nesterov momentum, and r, where hyper-parameters changed in a way that the last step
    could not foresee. r needs y to be x.

    The next state keeps η, c, w and μ_y. `next_w` moves nothing in this step. It is the
    w of the next state, where m = (x − z)/w.

    A step that leaves z apart from y must not have η = c = next_w = 0. The next step
    would take its state for the initial one, and read z as y (`is_initial`).
    """

    eta: Scalar  # η_k
    c: Scalar  # c_{k+1}, the averaging of this step
    next_w: Scalar | None = None  # w_{k+1}. None: (1 − c) η, by `fill_next_w`
    next_mu_y: Scalar | None = None  # μ', of y_{k+1}. None: y is x before and after
    delta: Scalar | None = None  # δ_k. None: no such term
    r: Scalar | None = None  # None: 1, and no such term


class YZCoefficients(NamedTuple):
    """The same step in terms of y and z, since x is not stored.

        z ← y + r (z − y)
        z ← z − η g
        y ← y + c_y (z − y) − δ_y g

    If `delta_y` or `r` is None, its term is left out of the program.
    """

    eta: Scalar
    c_y: Scalar
    delta_y: Scalar | None  # None: 0
    r: Scalar | None  # None: 1

    def step_of_y(self, d: Array, g: Array) -> Array:
        """c_y d − δ_y g, where d is z − y after the step of z."""
        u = self.c_y * d
        return u if self.delta_y is None else u - self.delta_y * g


def fill_next_w(xz: XZCoefficients, w: Scalar) -> XZCoefficients:
    """The coefficients with w_{k+1}, which is (1 − c) η unless the rule gives one.

    w is the scale in x − z = w m, where m is the momentum of SGD. The step fixes x − z,
    and w_{k+1} says which m that is:

        x_{k+1} − z_{k+1} = (1 − c)(w_k m_k + η g_k)

    at r = 1 and δ = 0. With w_{k+1} = (1 − c) η that is w_{k+1} m_{k+1}, where g has
    the weight 1, as in SGD: m_{k+1} = (w_k/η) m_k + g_k. At η ≤ 0 x − z is multiplied
    by 1 − c. There w_k stands in place of η, and m stays.
    """
    if xz.next_w is not None:
        return xz
    if xz.delta is not None or xz.r is not None:
        raise ValueError("`next_w` must be given beside `delta` or `r`, got None")
    eta_or_w = jnp.where(xz.eta > 0, xz.eta, w.astype(xz.eta.dtype))
    return xz._replace(next_w=(1 - xz.c) * eta_or_w)


def eliminate_x(xz: XZCoefficients, mu_y: Scalar) -> YZCoefficients:
    """The coefficients of y and z that make the step of x and z.

    If `xz.next_mu_y` is None, the params are x before and after the step. So c_y = c
    and δ_y = δ, and r may rescale z − x, since that does not move x.

    Else write μ for the μ_y of y_k, and μ' for that of y_{k+1}. Put

        x_k = (y_k − (1 − μ) z_k) / μ        z_k = z_{k+1} + η g_k

    into the equations of `XZCoefficients`. Then

        y_{k+1} = y_k + c_y (z_{k+1} − y_k) − δ_y g_k
        c_y = 1 − (1 − c) μ'/μ
        δ_y = η (1 − c)(μ'/μ − μ') + μ' δ

    Args:
      xz: the step of x and z.
      mu_y: μ, the interpolation of the current params.
    """
    eta, c, next_mu_y = xz.eta, xz.c, xz.next_mu_y
    if next_mu_y is None:
        return YZCoefficients(eta, c, delta_y=xz.delta, r=xz.r)
    if xz.r is not None:
        raise ValueError("`r` must be None beside a `next_mu_y`, got both")
    mu_change = _relative_change(mu_y, next_mu_y)  # μ'/μ − 1
    c_y = c - (1 - c) * mu_change  # exactly c where μ' is μ
    delta_y = eta * (1 - c) * (1 + mu_change - next_mu_y)
    if xz.delta is not None:
        delta_y += next_mu_y * xz.delta
    return YZCoefficients(eta, c_y, delta_y, r=None)


def _relative_change(old: Scalar, new: Scalar) -> Scalar:
    """new / old − 1, and exactly 0 where μ_y does not change.

    They are compared in the state's dtype. In that of `new`, a constant that the state
    has rounded would seem to change at every step.
    """
    # μ_y can be 0 only if it is traced, or past a schedule's end. Then y is z, and x is
    # lost. A divisor of 1 begins x anew at y.
    divisor = jnp.where(old > 0, old, 1).astype(new.dtype)
    return zero_where(new.astype(old.dtype) == old, new / divisor - 1)


def zero_where(condition: Flag, value: Scalar) -> Scalar:
    """A value, but exactly 0 where a condition holds.

    Its derivative stays, so that one can differentiate with respect to
    hyper-parameters.
    """
    return value - jnp.where(condition, jax.lax.stop_gradient(value), 0)
