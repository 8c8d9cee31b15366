"""Argument checks: eager, on concrete values only, so that nothing traced is ever inspected."""

import math
import operator
import reprlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from spa_optax._precision import is_array, is_float


def is_none(leaf: object) -> bool:
    """Whether a leaf is None, optax's mark for a parameter without a gradient."""
    return leaf is None


def is_plain_number(value: object) -> bool:
    """Whether a hyper-parameter is a plain number: neither a schedule nor possibly traced."""
    return not callable(value) and not isinstance(value, jax.Array)


def is_surely(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    try:
        return bool(condition)
    except jax.errors.ConcretizationTypeError:
        return False


def _check_number(
    name: str,
    value: Any,
    rule: str,
    holds: Callable[[float], bool],
    kind: str = "a scalar or a schedule",
) -> None:
    if callable(value) and "schedule" in kind:
        return
    if isinstance(value, tuple) and hasattr(value, "averaging"):
        raise ValueError(
            f"`{name}` must be {kind}, got a pair of hyper-parameters: unpack it, as in"
            " `spa(*stagewise(...))`"
        )
    if isinstance(value, jax.Array):  # may be traced or on another device: check only its shape
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
    if not holds(_as_float(value)):  # written so that NaN fails
        raise ValueError(f"`{name}` must be {rule}, got {_shown(value)}")


def _as_float(value: Any) -> float:
    """A number as a float; an integer too large for one becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _shown(value: Any) -> str:
    """A value for a message. Python refuses to print integers of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def check_rate(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a finite number >= 0."""
    _check_number(name, value, "finite and >= 0", lambda v: 0 <= v < float("inf"))


def check_averaging(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in [0, 1].

    Warns if a number looks like a momentum.
    """
    _check_number("averaging", value, "in [0, 1]", lambda v: 0 <= v <= 1)
    if is_plain_number(value) and 0.8 <= value < 1:  # pyright: ignore[reportOperatorIssue]
        beta = round(1 - float(value), 6)  # pyright: ignore[reportArgumentType]
        warnings.warn(
            f"`averaging` is 1 − momentum: {value!r} means a momentum of {beta:g}. For a momentum"
            f" of {value!r} pass {beta:g}, or use `spa_from_sgdm`.",
            stacklevel=3,
        )


def check_interpolation(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in (0, 1]."""
    # As float32, the dtype of the state.
    _check_number("interpolation", value, "in (0, 1]", lambda v: bool(np.float32(v) > 0) and v <= 1)


def check_b1(value: Any) -> None:
    """Raises ValueError unless `value` is in [0, 1), or a traced scalar."""
    _check_number("b1", value, "in [0, 1)", lambda v: 0 <= v < 1, "a scalar")


def check_second_moment(b2: Any, eps: Any) -> None:
    """Raises ValueError unless `b2` is in [0, 1) and `eps` finite and >= 0, or traced scalars."""
    is_decay = lambda v: bool(v >= 0 and np.float32(v) < 1)
    _check_number("b2", b2, "in [0, 1) as float32", is_decay, "a scalar")
    _check_number("eps", eps, "finite and >= 0", lambda v: 0 <= v < float("inf"), "a scalar")
    if isinstance(b2, jax.Array) and b2.dtype.itemsize <= 2:  # 0.999 is 1 in bfloat16
        raise ValueError(
            f"`b2` must have 32 bits or more, got {b2.dtype}: give `optax.inject_hyperparams` the"
            " argument `hyperparam_dtype=jnp.float32`"
        )


def check_factored(is_factored: bool, decay_rate: Any, min_dim_size_to_factor: Any) -> None:
    """Raises ValueError unless both are None or valid for a factored second moment."""
    for name, value in (
        ("decay_rate", decay_rate),
        ("min_dim_size_to_factor", min_dim_size_to_factor),
    ):
        if value is not None and not is_factored:
            raise ValueError(f'`{name}` must be None unless `second_moment` is "factored"')
    if decay_rate is not None:
        _check_number("decay_rate", decay_rate, "in (0, 1]", lambda v: 0 < v <= 1, "a scalar")
    if min_dim_size_to_factor is not None:
        check_steps("min_dim_size_to_factor", min_dim_size_to_factor)


def check_clipping_threshold(value: Any) -> None:
    """Raises ValueError unless `value` is None, a traced scalar, or a number > 0."""
    if value is not None:
        _check_number("clipping_threshold", value, "> 0", lambda v: v > 0, "a scalar")


def check_momentum(value: optax.ScalarOrSchedule) -> None:
    """Raises ValueError unless `value` is a schedule, a traced scalar, or a number in [0, 1)."""
    _check_number("momentum", value, "in [0, 1)", lambda v: 0 <= v < 1)


def check_horizon(value: Any) -> None:
    """Raises ValueError unless `value` is None or a concrete integer >= 1."""
    if value is not None:
        check_steps("horizon", value)


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
    rule = "`state_dtype` must be None or a real floating-point dtype, with zero and signs"
    # float8_e8m0fnu, which has no mantissa, holds powers of two only.
    is_real = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant > 0
    _check_dtype(value, rule, is_real)


def check_second_moment_dtype(value: Any, is_factored: bool, rounding_key: Any) -> None:
    """Raises ValueError unless `value` is None, or bfloat16 for a full ν with a key."""
    rule = "`second_moment_dtype` must be None or bfloat16, which has the range of float32"
    _check_dtype(value, rule, lambda dtype: dtype == jnp.bfloat16)
    if value is not None and is_factored:
        raise ValueError('`second_moment_dtype` must be None where `second_moment` is "factored"')
    if value is not None and rounding_key is None:
        raise ValueError(
            "`rounding_key` must be given with a 16-bit `second_moment_dtype`, got None:"
            " rounded to nearest, the second moment would not change"
        )


def _check_dtype(value: Any, rule: str, holds: Callable[[Any], bool]) -> None:
    if value is None:
        return
    if isinstance(value, (jax.Array, np.ndarray)):  # `inject_hyperparams` turns dtypes into arrays
        raise ValueError(
            f"{rule}, got an array: name it in the `static_args` of `optax.inject_hyperparams`"
        )
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = jnp.dtype(int)
    if not holds(dtype):
        raise ValueError(f"{rule}, got {value!r}")


def check_key(value: Any) -> None:
    """Raises ValueError unless `value` is None or a key of `jax.random`, of the new or old kind."""
    if value is None:
        return
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            is_key = value.shape == ()
        else:  # the old kind: two uint32, or as many as the default implementation takes
            old_kind = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
            is_key = (value.shape, value.dtype) == (old_kind.shape, old_kind.dtype)
        if is_key:
            return
        value = f"an array of shape {value.shape} and dtype {value.dtype}"
    raise ValueError(f"`rounding_key` must be None or one key of `jax.random`, got {value}")


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        got = f"an array of shape {value.shape}" if isinstance(value, jax.Array) else repr(value)
        raise ValueError(f"`{name}` must be True or False, got {got}")


def check_steps(name: str, value: Any, least: int = 1) -> int:
    """Raises ValueError unless `value` is a concrete integer >= `least`, which it returns."""
    try:
        steps = operator.index(value)
    except TypeError:
        steps = least - 1
    if steps < least or isinstance(value, bool):
        got = _shown(value)
        if isinstance(value, jax.Array):
            got = "an array: name it in the `static_args` of `optax.inject_hyperparams`"
        raise ValueError(f"`{name}` must be a concrete integer >= {least}, got {got}")
    if steps >= 2**31:
        raise ValueError(f"`{name}` must be below 2^31, the limit of counts, got {_shown(value)}")
    return steps


def check_concrete(name: str, value: Any, rule: str, holds: Callable[[float], bool]) -> float:
    """Raises ValueError unless `value` is a concrete number for which `holds`; returns a float."""
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or np.iscomplexobj(value) or not holds(_as_float(value)):
        raise ValueError(f"`{name}` must be {rule}, got {_shown(value)}")
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

    None counts as a leaf of any shape. Without `same_nodes` only paths must agree, not node types:
    the optimizer state of Flax nnx holds variables of another type than the params.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    like_leaves, like_structure = jax.tree.flatten(like, is_leaf=is_none)
    if structure != like_structure:
        paths, like_paths = ({path for path, _ in _leaves_with_path(t)} for t in (tree, like))
        if odd := sorted(paths ^ like_paths):
            owner = name if odd[0] in paths else like_name
            what = f"only `{owner}` has a leaf at {odd[0] or 'its root'}"
        else:
            what = _first_difference(structure, like_structure)
        if odd or same_nodes:
            raise ValueError(f"`{name}` must have the structure of `{like_name}`: {what}")
    for i, (leaf, other) in enumerate(zip(leaves, like_leaves, strict=True)):
        if leaf is not None and other is not None and np.shape(leaf) != np.shape(other):
            at = _leaves_with_path(tree)[i][0] or "its root"
            what = f"{np.shape(leaf)} against {np.shape(other)} at {at}"
            raise ValueError(f"`{name}` must have the shapes of `{like_name}`: {what}")


def check_params(params: PyTree) -> None:
    """Raises ValueError unless all leaves are arrays or numbers, and a lone leaf is trained."""
    for path, leaf in _leaves_with_path(params):
        if not (leaf is None or is_array(leaf)):
            raise ValueError(
                f"`params` must be a tree of arrays, got a `{type(leaf).__name__}` at"
                f" {path or 'its root'}. For an Equinox model use `eqx.filter(model, eqx.is_array)`"
            )
        if not path and not is_float(leaf):
            dtype = jnp.result_type(leaf)
            raise ValueError(f"`params` must be floating-point arrays, got one of dtype {dtype}")


def check_mask(mask: Any, params: PyTree) -> None:
    """Raises ValueError unless a mask is None, or gives booleans for the tree of params."""
    mask = mask(params) if callable(mask) else mask
    rule = "`mask` must be a tree of booleans with the structure of `params`, or a prefix of it"
    for leaf in jax.tree.leaves(mask):
        if not (is_array(leaf) and jnp.result_type(leaf) == jnp.bool_):
            raise ValueError(f"{rule}, got a leaf {leaf!r}")
    if mask is None:
        return
    try:
        jax.tree.map(lambda _, leaf: leaf, mask, params)
    except ValueError as error:
        raise ValueError(f"{rule}, got another structure: {error}") from None


def check_one_run(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes: the state is then a batch of states."""
    if any(jnp.shape(leaf) for leaf in jax.tree.leaves(counts)):
        raise ValueError(f"`{name}` must be of one run, got a batch of them: use `jax.vmap`")


def check_none_without_z(updates: PyTree, z: PyTree) -> None:
    """Raises ValueError if there is a gradient for a parameter that `init` did not see."""
    for (path, g), z_leaf in zip(
        _leaves_with_path(updates), jax.tree.leaves(z, is_leaf=is_none), strict=True
    ):
        if g is not None and z_leaf is None:
            at = path or "its root"
            raise ValueError(f"`updates` must be None where `state.z` is, got a gradient at {at}")


def check_arrays_differ(name: str, tree: PyTree, other_name: str, other: PyTree) -> None:
    """Raises ValueError if all arrays of two trees are the same objects."""
    leaves, other_leaves = jax.tree.leaves(tree), jax.tree.leaves(other)
    if leaves and all(map(operator.is_, leaves, other_leaves)):
        raise ValueError(
            f"`{other_name}` must not be the arrays of `{name}` themselves. `nnx.state` and"
            " `nnx.split` return live variables: call this before `nnx.update`, or copy the old"
            " params first"
        )


def keys_of(name: str, trees: Sequence[PyTree], params: PyTree) -> list[list[str]]:
    """The path of each leaf of each tree, as a string.

    Raises ValueError unless each occurs once and is in `params`, with the same shape. Node types
    may differ, as under Flax nnx.
    """
    shapes = {path: np.shape(leaf) for path, leaf in _leaves_with_path(params)}
    keys = []
    for tree in trees:
        keys.append([])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            key = jax.tree_util.keystr(path)
            if shapes.pop(key, None) != np.shape(leaf):
                found = f"{np.shape(leaf)} at {key or 'its root'}"
                if key.endswith(".value"):
                    found += "; of a Flax nnx model `params` are `nnx.state(model, nnx.Param)`"
                raise ValueError(
                    f"`{name}` must have leaves of the paths and shapes of `params`, or of some of"
                    f" them, each once, got {found}"
                )
            keys[-1].append(key)
    return keys


def _first_difference(structure: Any, like: Any) -> str:
    """The first node that differs between two trees whose leaves have the same paths."""
    if structure.node_data() == like.node_data():
        for child, like_child in zip(structure.children(), like.children(), strict=True):
            if child != like_child:
                return _first_difference(child, like_child)
    # A node has a type and metadata, such as the keys of a dict.
    (kind, kept), (like_kind, like_kept) = structure.node_data(), like.node_data()
    if kind is like_kind:
        return reprlib.repr(kept) + " against " + reprlib.repr(like_kept) + f" in a {kind.__name__}"
    return f"a {kind.__name__} against a {like_kind.__name__}"


def _leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_none)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
