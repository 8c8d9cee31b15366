"""The state of the family, what it says of z, and checks of states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from . import _checks
from ._codec import codec_of, unwrap
from ._trees import (
    Count,
    Flag,
    Scalar,
    check_same_tree,
    fill_none,
    has_narrow_leaves,
    map_inexact,
    scalar_of,
)


class SPAState(NamedTuple):
    """State of a member of the family, which `transformation` makes of a rule.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k at the default
    interpolation of 1. Scalars are float32, or float64 if a parameter is float64 or
    complex128. `eval_params` returns x.

    `z` holds z itself where the params and z have 32 bits or more, as in the examples.
    Otherwise it is a node that holds a difference, not z.
    """

    count: Count  # k, the number of steps taken
    z: PyTree[Array]  # z_k, or a node with z_k − y_k or 256 times that instead
    eta: Scalar  # η_{k−1}, of the last step
    c: Scalar  # c_k, of the last step
    w: Scalar  # w_k, the scale of momentum: m_k = (x_k − z_k) / w_k
    mu_y: Scalar  # μ_y, of y_k


def has_stepped(state: SPAState) -> Flag:
    """Whether a step has been taken that may have moved z. Until then z is y.

    The count does not tell, since users set it to shift a schedule. η, c and w do: they
    are those of the last step, and are all 0 only until then.
    """
    eta, c, w = map(scalar_of, (state.eta, state.c, state.w))
    return (eta != 0) | (c != 0) | (w != 0)


def current_z(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the dtype to compute in; before the first step it is the params."""
    check_fits_params(state, params)
    codec = codec_of(state.z)
    stepped = has_stepped(state)

    def value(y, stored):
        return codec.z(jnp.asarray(y), jnp.asarray(stored), stepped)

    return fill_none(map_inexact(value, params, unwrap(state.z)), params)


def check_fits_params(state: Any, params: PyTree | None) -> None:
    """Raises ValueError unless a state is of the family and fits the params."""
    _checks.PARAMS.check(params=params)
    check_spa_state("state", state)
    check_same_tree("state.z", unwrap(state.z), "params", params)


def check_state(name: str, state: Any, expected: type) -> None:
    """Raises ValueError unless a state is of a type, and its count an integer.

    A count that was cast to bfloat16 would stop at 256.
    """
    if not isinstance(state, expected):
        raise ValueError(
            f"`{name}` must be of type `{expected.__name__}`, got "
            f"{type(state).__name__}"
        )
    dtype = scalar_of(state._asdict().get("count", 0)).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"`{name}.count` must be an integer, whatever the params, got {dtype}"
        )


def check_spa_state(name: str, state: Any) -> None:
    """Raises ValueError if a state is of another type, or was cast to 16 bits."""
    check_state(name, state, SPAState)
    for field in ("eta", "c", "w", "mu_y"):
        dtype = scalar_of(getattr(state, field)).dtype
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"`{name}.{field}` must be float32 or float64, whatever the params, "
                f"got {dtype}"
            )
    if not codec_of(state.z).stores_difference and has_narrow_leaves(state.z):
        raise ValueError(
            f"`{name}.z` must hold z in 32 bits or more, got 16 or fewer. Use "
            "`convert(state, params, into=tx.init(params))`."
        )


def check_not_batched(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes, as in a batch of states, or no value."""
    for leaf in jax.tree.leaves(counts):
        if isinstance(leaf, jax.ShapeDtypeStruct) or np.shape(leaf):
            raise ValueError(
                f"`{name}` must hold the arrays of one run, got a count {leaf}: use "
                "`jax.vmap` for a batch"
            )
