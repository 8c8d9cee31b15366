"""The state of the family, what it says of z, and the checks of an update."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from . import _checks
from ._codec import Z_ITSELF, choose_codec, codec_of, stored_dtype, unwrap
from ._coefficients import XZCoefficients
from ._trees import (
    Count,
    Flag,
    Scalar,
    by_path,
    check_params_passed,
    check_same_tree,
    check_type,
    fill_none,
    has_narrow_leaves,
    is_inexact,
    map_inexact,
    scalar_of,
)


class SPAState(NamedTuple):
    """State of a member of the family, which `transformation` makes of a rule.

    The params are y_k = μ_y x_k + (1 − μ_y) z_k, which is x_k at the default
    interpolation of 1. Scalars are float32, or float64 if a parameter has 64 bits.
    """

    count: Count  # k, the number of steps taken
    z: PyTree[Array]  # z_k, or a node with z_k − y_k or 256 times that instead
    eta: Scalar  # η_{k−1}, of the last step
    c: Scalar  # c_k, of the last step
    w: Scalar  # w_k, the scale of momentum: m_k = (x_k − z_k) / w_k
    mu_y: Scalar  # μ_y, of y_k


def z_is_still_y(state: SPAState) -> Flag:
    """Whether z is y, as before the first step.

    The count does not tell, since users set it to shift a schedule. η, c and w do: they
    are those of the last step, and are all 0 only where z is y.
    """
    eta, c, w = scalar_of(state.eta), scalar_of(state.c), scalar_of(state.w)
    return (eta == 0) & (c == 0) & (w == 0)


def current_z(state: SPAState, params: PyTree) -> PyTree:
    """z_k in the dtype to compute in; before the first step it is the params."""
    check_fits_params(state, params)
    codec = codec_of(state.z)
    z_is_y = z_is_still_y(state)

    def value(y, stored):
        return codec.z(jnp.asarray(y), jnp.asarray(stored), z_is_y)

    return fill_none(map_inexact(value, params, unwrap(state.z)), params)


def check_fits_params(state: Any, params: PyTree | None) -> None:
    """Raises ValueError unless a state is of the family and fits the params."""
    check_params_passed(params)
    check_spa_state("state", state)
    check_same_tree("state.z", unwrap(state.z), "params", params)


def check_spa_state(name: str, state: Any) -> None:
    """Raises ValueError if a state is of another type, or was cast to 16 bits."""
    check_type(name, state, SPAState)
    for field in ("eta", "c", "w", "mu_y"):
        dtype = scalar_of(getattr(state, field)).dtype
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"`{name}.{field}` must be float32 or float64, whatever the params, "
                f"got {dtype}"
            )
    if codec_of(state.z) is Z_ITSELF and has_narrow_leaves(state.z):
        raise ValueError(
            f"`{name}.z` must hold z in 32 bits or more, got 16 or fewer. Use "
            "`convert(state, params, into=tx.init(params))`."
        )


def check_update(
    updates: PyTree, state: Any, params: PyTree | None, state_dtype: Any
) -> None:
    """Raises ValueError unless the arguments of an update fit each other."""
    check_fits_params(state, params)
    _check_storage(state.z, params, state_dtype)
    check_same_tree("updates", updates, "params", params)
    stored = by_path(unwrap(state.z))
    for name, leaves in (("state.z", stored), ("params", by_path(params))):
        without_leaf = by_path(updates).keys() - leaves.keys()
        if without_leaf:
            path = min(without_leaf) or "its root"
            raise ValueError(
                f"`updates` must be None where `{name}` is, got a gradient at {path}"
            )


def _check_storage(stored_z: PyTree, params: PyTree, state_dtype: Any) -> None:
    """Raises ValueError unless z is stored as `init` would store it beside params."""
    found, expected = codec_of(stored_z), choose_codec(params, state_dtype)
    if found is not expected:
        raise ValueError(
            f"`state.z` must hold {expected.name}, for the dtypes of `params` and for "
            f"`state_dtype={state_dtype}`, got {found.name}. Use `convert(state, "
            "params, into=tx.init(new_params), new_params=new_params)`, where `params` "
            "are those that the state was made for."
        )
    params_by_path = by_path(params)
    for path, leaf in by_path(unwrap(stored_z)).items():
        y = params_by_path.get(path, leaf)
        if not is_inexact(y):
            continue
        dtype = jnp.result_type(stored_dtype(y, state_dtype))
        # Without a `state_dtype` params may have been cast to fewer bits afterwards.
        may_stay = state_dtype is None and leaf.dtype.itemsize >= dtype.itemsize
        if leaf.dtype != dtype and not may_stay:
            raise ValueError(
                f"`state.z` must be in {dtype}, for `state_dtype={state_dtype}`, got "
                f"{leaf.dtype} at {path or 'its root'}. Use `convert(state, params, "
                "into=tx.init(params))`."
            )


def checked_coefficients(
    updates: PyTree, state: SPAState, xz: XZCoefficients, mu_y_may_change: bool
) -> XZCoefficients:
    """A step, with NaN for η where its μ_y does not fit the state or frozen params.

    Raises ValueError if that is known outside `jax.jit`, or where μ_y may change beside
    frozen params.
    """
    have_stepped = ~z_is_still_y(state)
    if xz.mu_y is None:
        # Such a step takes the params for x.
        message = (
            "`state` must be of a run at an interpolation of 1, got one at {:g}, whose "
            "params are not x. Begin anew at `eval_params(state, params)`, or pass the "
            "schedule `interpolation=lambda k: 1.0`."
        )
        is_wrong = have_stepped & (state.mu_y != 1)
        eta = _checks.nan_or_raise(is_wrong, xz.eta, message, state.mu_y)
        return xz._replace(eta=eta)
    stored = by_path(unwrap(state.z))
    have_z = {path for path, leaf in stored.items() if is_inexact(leaf)}
    frozen = have_z - by_path(updates).keys()
    if not frozen:
        return xz
    # A change of μ_y moves all params, but frozen ones, which have a z, get no update.
    if mu_y_may_change:
        raise ValueError(
            "`updates` must not be None where `interpolation` may change, which moves "
            f"the params, got None at {min(frozen) or 'its root'}"
        )
    message = (
        "`updates` must not be None where `interpolation` changes, which moves the "
        "params, got None and a change from {:g} to {:g}"
    )
    next_mu_y = xz.mu_y.astype(state.mu_y.dtype)
    is_wrong = have_stepped & (next_mu_y != state.mu_y)
    eta = _checks.nan_or_raise(is_wrong, xz.eta, message, state.mu_y, next_mu_y)
    return xz._replace(eta=eta)
