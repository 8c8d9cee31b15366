"""Checks of `init` and `update`: of params, and that the arguments of a step fit."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from . import _checks
from ._codec import choose_codec, codec_of, stored_dtype, unwrap
from ._coefficients import XZCoefficients
from ._state import SPAState, check_fits_params, has_stepped
from ._trees import (
    by_path,
    check_same_tree,
    is_array_like,
    is_inexact,
    leaves_with_path,
)


def check_params(params: PyTree) -> None:
    """Raises ValueError unless params are arrays; one alone must be floating-point."""
    for path, leaf in leaves_with_path(params):
        if leaf is None or is_inexact(leaf) or (path and is_array_like(leaf)):
            continue
        raise ValueError(
            f"`params` must be floating-point arrays, got {leaf!r} at "
            f"{path or 'its root'}. For Equinox use `eqx.filter(model, eqx.is_array)`."
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


def _check_storage(z_field: PyTree, params: PyTree, state_dtype: Any) -> None:
    """Raises ValueError unless z is stored as `init` would store it beside params."""
    found, expected = codec_of(z_field), choose_codec(params, state_dtype)
    if found is not expected:
        raise ValueError(
            f"`state.z` must hold {expected.name}, for the dtypes of `params` and for "
            f"`state_dtype={state_dtype}`, got {found.name}. Use `convert(state, "
            "params, into=tx.init(new_params), new_params=new_params)`, where `params` "
            "are those that the state was made for."
        )
    params_by_path = by_path(params)
    for path, leaf in by_path(unwrap(z_field)).items():
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
    """The coefficients of a step, with NaN for η where μ_y would give a wrong x.

    Without a `mu_y` the params must be x already, so the state's μ_y must be 1. With
    one, frozen params must not need to move, so μ_y must stay.

    Raises ValueError instead where that is known outside `jax.jit`, and wherever μ_y
    may change beside frozen params.
    """
    stepped = has_stepped(state)
    if xz.mu_y is None:
        message = (
            "`state` must be of a run at an interpolation of 1, got one at {:g}, whose "
            "params are not x. Begin anew at `eval_params(state, params)`, or pass the "
            "schedule `interpolation=lambda k: 1.0`."
        )
        is_wrong = stepped & (state.mu_y != 1)
        return xz._replace(eta=_nan_or_raise(is_wrong, xz.eta, message, state.mu_y))
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
    is_wrong = stepped & (next_mu_y != state.mu_y)
    return xz._replace(
        eta=_nan_or_raise(is_wrong, xz.eta, message, state.mu_y, next_mu_y)
    )


def _nan_or_raise(is_wrong: Any, value: Array, message: str, *found: Any) -> Array:
    """The value, or NaN where something is wrong, which is better than a wrong x.

    If that is known before the program runs, it raises ValueError with the message and
    what was found.
    """
    if _checks.is_surely(is_wrong):
        raise ValueError(message.format(*map(float, found)))
    return jnp.where(is_wrong, jnp.nan, value)
