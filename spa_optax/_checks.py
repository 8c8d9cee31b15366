"""Argument checks: eager, on concrete values only, so that nothing traced is ever inspected."""

import operator
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree


def is_none(leaf: object) -> bool:
    """Whether a leaf is None, optax's mark for a parameter without a gradient."""
    return leaf is None


def is_plain_number(value: object) -> bool:
    """Whether a hyper-parameter is a plain number: no schedule, and nothing that may be traced."""
    return not callable(value) and not isinstance(value, jax.Array)


def _check_number(
    name: str,
    value: Any,
    rule: str,
    holds: Callable[[float], bool],
    kind: str = "a scalar or a schedule",
) -> None:
    if callable(value) and "schedule" in kind:
        return
    if isinstance(
        value, jax.Array
    ):  # may be traced or on another device: its shape is all that is looked at
        if value.shape != ():
            raise ValueError(f"`{name}` must be {kind}, got an array of shape {value.shape}")
        return
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.ndarray, np.number))
        or np.iscomplexobj(value)
        or np.shape(value) != ()
    ):
        raise ValueError(f"`{name}` must be {kind}, got {value!r}")
    if not holds(float(value)):  # written so that NaN fails
        raise ValueError(f"`{name}` must be {rule}, got {value!r}")


def check_rate(name: str, value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a finite number >= 0."""
    _check_number(name, value, "finite and >= 0", lambda v: 0 <= v < float("inf"))


def check_averaging(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in [0, 1]."""
    _check_number("averaging", value, "in [0, 1]", lambda v: 0 <= v <= 1)


def check_interpolation(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in (0, 1]."""
    # As float32, in which the state keeps it.
    _check_number("interpolation", value, "in (0, 1]", lambda v: bool(np.float32(v) > 0) and v <= 1)


def check_second_moment(b2: Any, eps: Any) -> None:
    """Raises ValueError unless `b2` is in [0, 1) and `eps` finite and >= 0, or traced scalars."""
    _check_number("b2", b2, "in [0, 1)", lambda v: 0 <= v < 1, "a scalar")
    _check_number("eps", eps, "finite and >= 0", lambda v: 0 <= v < float("inf"), "a scalar")


def check_momentum(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in [0, 1)."""
    _check_number("momentum", value, "in [0, 1)", lambda v: 0 <= v < 1)


def check_horizon(value: Any) -> None:
    """Raises ValueError unless `value` is None or a concrete integer >= 1."""
    if value is None:
        return
    try:
        horizon = operator.index(value)
    except TypeError:  # a float; or a tracer, when `horizon` was not named in `static_args`
        horizon = 0
    if horizon < 1 or isinstance(value, bool):
        raise ValueError(f"`horizon` must be None or a concrete integer >= 1, got {value!r}")


def check_count(value: Any) -> None:
    """Raises ValueError unless `value` is an integer scalar, and >= 0 if it is a plain number."""
    if isinstance(value, jax.Array):
        good = value.shape == () and jnp.issubdtype(value.dtype, jnp.integer)
    else:
        good = isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= 0
    if not good:
        raise ValueError(f"`count` must be None or an integer >= 0, got {value!r}")


def check_dtype(value: Any) -> None:
    """Raises ValueError unless `value` is None or a real floating-point dtype."""
    if value is None:
        return
    try:  # an array is what `inject_hyperparams` makes of a dtype, which is callable
        dtype = None if isinstance(value, (jax.Array, np.ndarray)) else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"`state_dtype` must be None or a real floating-point dtype, got {value!r}"
        )


def check_key(value: Any) -> None:
    """Raises ValueError unless `value` is None or a key of `jax.random`, of the new or old kind."""
    if value is None:
        return
    if isinstance(value, jax.Array):
        is_key = value.shape == () and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        if is_key or (value.ndim == 1 and value.dtype == jnp.uint32):
            return
    raise ValueError(f"`rounding_key` must be None or a key of `jax.random`, got {value!r}")


def check_steps(name: str, value: Any) -> int:
    """Raises ValueError unless `value` is a concrete integer >= 1, which it returns."""
    try:
        steps = operator.index(value)
    except TypeError:
        steps = 0
    if steps < 1 or isinstance(value, bool):
        raise ValueError(f"`{name}` must be a concrete integer >= 1, got {value!r}")
    if steps >= 2**31:
        raise ValueError(f"`{name}` must be below 2^31, where counts end, got {value!r}")
    return steps


def check_concrete(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """Raises ValueError unless `value` is a concrete number for which `holds`; returns a float."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or np.iscomplexobj(value) or not holds(float(value)):
        raise ValueError(f"`{name}` must be {rule}, got {value!r}")
    return float(value)


def check_above_1(name: str, value: Any) -> float:
    """Raises ValueError unless `value` is a concrete number, finite and > 1."""
    return check_concrete(name, value, "finite and > 1", lambda v: 1 < v < float("inf"))


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ValueError unless `value` is one of a `Literal`."""
    if value not in get_args(choices):
        raise ValueError(f"`{name}` must be one of {get_args(choices)}, got {value!r}")


def check_same_tree(
    name: str, tree: PyTree, like_name: str, like: PyTree, *, same_nodes: bool = True
) -> None:
    """Raises ValueError, naming what differs, unless two trees agree in structure and shapes.

    None counts as a leaf of any shape. Without `same_nodes` paths must agree, but not types: the
    optimizer state of Flax nnx holds variables of another type than the params.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    like_leaves, like_structure = jax.tree.flatten(like, is_leaf=is_none)
    if structure != like_structure:
        paths, like_paths = ({path for path, _ in _leaves_with_path(t)} for t in (tree, like))
        if odd := sorted(paths ^ like_paths):
            owner = name if odd[0] in paths else like_name
            what = f"only `{owner}` has a leaf at {odd[0] or 'its root'}"
        else:
            what = f"{structure} against {like_structure}"
        if odd or same_nodes:
            raise ValueError(f"`{name}` must have the structure of `{like_name}`: {what}")
    for i, (leaf, other) in enumerate(zip(leaves, like_leaves, strict=True)):
        if leaf is not None and other is not None and jnp.shape(leaf) != jnp.shape(other):
            at = _leaves_with_path(tree)[i][0] or "its root"
            what = f"{jnp.shape(leaf)} against {jnp.shape(other)} at {at}"
            raise ValueError(f"`{name}` must have the shapes of `{like_name}`: {what}")


def _leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_none)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
