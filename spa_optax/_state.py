"""The state of the family: of every optimizer that `member_from_rule` makes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._trees import Count, Flag, Scalar, as_scalar


class SPAState(NamedTuple):
    """State of `spa` and `spa_from_sgdm`; `spa_adamw` and `primal_averaging` hold one.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k at the default
    interpolation of 1. Scalars are float32, or float64 if a parameter is float64 or
    complex128. `eval_params` returns x.

    `z` is z itself where the params and z have 32 bits or more. Otherwise it is a
    `ZMinusParams` or a `ZMinusParamsTimes256`, which hold z − params or 256 times that.
    w says which momentum z stands for, m = (x − z)/w: `spa_from_sgdm` rescales z − x by
    it, and `convert` reads m by it. `eta` and `c` record the last step. If η, c and w
    are all 0, as `init` makes them, the state is the initial one, and z is read as the
    params. So never clear them.
    """

    count: Count  # k, the number of steps taken
    z: PyTree[Array]  # z_k itself, or a node with z_k − y_k or 256 (z_k − y_k)
    eta: Scalar  # η_{k−1}, of the last step
    c: Scalar  # c_k, of the last step
    w: Scalar  # w_k, which relates z to momentum: m_k = (x_k − z_k) / w_k
    mu_y: Scalar  # μ_y, of y_k


def is_initial(state: SPAState) -> Flag:
    """Whether η, c and w are all 0, as `init` makes them. Then z is read as y.

    The count does not tell, since users set it to shift a schedule. Nor does η: at
    η = 0 and c > 0 x still moves to z.
    """
    eta, c, w = map(as_scalar, (state.eta, state.c, state.w))
    return (eta == 0) & (c == 0) & (w == 0)


def mu_y_of(state: SPAState) -> Scalar:
    """μ_y, of y_k. It is 1 in the initial state, also in a state of zeros."""
    return jnp.where(is_initial(state), 1, as_scalar(state.mu_y))
