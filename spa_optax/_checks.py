"""Checks of states and params: that trees fit each other, and that x stays right.

Other arguments of factories are checked by `_arguments.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import DTypeLike, PRNGKeyArray, PyTree

from . import _arguments
from ._codec import choose_codec, codec_of, stored_tree, z_dtype
from ._coefficients import XZCoefficients
from ._state import SPAState, is_initial
from ._trees import (
    Scalar,
    arrays_by_path,
    as_scalar,
    field_of,
    has_narrow_leaves,
    is_array_like,
    is_inexact,
    is_known_true,
    is_none,
    leaves_by_path,
    place,
)

LARGEST_ERROR_OF_X = 10  # times that of one rounding of a parameter of 16 bits
LEAST_AVERAGING_OF_8_BITS = 0.0125  # docs/background.md#how-much-noise-rounding-adds
PARAMS_ARE_NOT_X = (
    "`state` must be of a run at an interpolation of 1, got one at {old:g}, whose "
    "params are not x. Begin anew at `eval_params(state, params)`, or pass the "
    "schedule `interpolation=lambda k: 1.0`."
)
FROZEN_WOULD_MOVE = (
    "`updates` must not be None where `interpolation` changes, which moves the params, "
    "got None and a change from {old:g} to {new:g}"
)


def check_state_dtype(
    state_dtype: DTypeLike | None,
    rounding_key: PRNGKeyArray | None,
    averaging: optax.ScalarOrSchedule,
) -> None:
    """Raises ValueError unless a dtype of z fits the key and the averaging.

    The longer the average, the larger z − params grows, and its rounding error with it.
    """
    _arguments.STATE_DTYPE.optional().check(state_dtype=state_dtype)
    _arguments.KEY.optional().check(rounding_key=rounding_key)
    if state_dtype is None or jnp.dtype(state_dtype).itemsize > 1:
        return
    if rounding_key is None:
        raise ValueError(
            "`rounding_key` must be given with a `state_dtype` of 8 bits, got None"
        )
    values = _arguments.sample(averaging, _arguments.SAMPLE_COUNTS)
    last = values[~np.isnan(values)][-1:]  # as past the end of a schedule
    if np.any((last > 0) & (last < (1 - 1e-6) * LEAST_AVERAGING_OF_8_BITS)):
        raise ValueError(
            f"`averaging` must stay >= {LEAST_AVERAGING_OF_8_BITS} with a "
            f"`state_dtype` of 8 bits, got a final value of {last[0]:.4g}. Use "
            "bfloat16."
        )


def check_state_dtype_of_sgd(state_dtype: DTypeLike | None) -> None:
    """Raises ValueError for a z of 8 bits, which clips z − params at 1.75: steps of
    plain gradients may be as large.
    """
    _arguments.STATE_DTYPE.optional().check(state_dtype=state_dtype)
    if state_dtype is not None and jnp.dtype(state_dtype).itemsize == 1:
        raise ValueError(
            "`state_dtype` must have 16 bits or more beside plain gradients, got "
            f"{jnp.dtype(state_dtype).name}. For SGD in 8 bits put `float8_momentum` "
            "around `optax.sgd`."
        )


def warn_of_missing_key(
    params: PyTree,
    z_field: PyTree,
    rounding_key: PRNGKeyArray | None,
    params_are_z: bool,
) -> None:
    """Warns if params or z have 16 bits or fewer, and there is no key to round them."""
    if rounding_key is not None:
        return
    # A z of 32 bits that is the params is their master copy: no step is lost.
    if has_narrow_leaves(z_field) or (has_narrow_leaves(params) and not params_are_z):
        _arguments.warn(
            "`rounding_key` should be given, such as `jax.random.key(0)`: params "
            "or z have 16 bits or fewer. Rounded to nearest they lose every step "
            "below half an ulp."
        )


def warn_of_rough_x(
    params: PyTree,
    averaging: optax.ScalarOrSchedule,
    interpolation: optax.ScalarOrSchedule,
) -> None:
    """Warns if rounding errors of params of 16 bits or fewer add up in x.

    In each step x gets 1/μ_y times the error of one rounding of y, and keeps 1 − c of
    what it had. So its variance is that of one rounding, divided by μ_y² c (2 − c), or
    less where steps are far below an ulp.
    """
    static = _arguments.is_static_number
    if not (static(averaging) and static(interpolation) and has_narrow_leaves(params)):
        return
    c, mu_y = float(averaging), float(interpolation)  # pyright: ignore[reportArgumentType]
    if mu_y == 1 or c == 0:
        return
    factor = 1 / (mu_y * math.sqrt(c * (2 - c)))
    if factor > LARGEST_ERROR_OF_X:
        _arguments.warn(
            "`interpolation` or `averaging` should be larger beside params of 16 "
            "bits: their rounding errors add up, in x to those of some "
            f"{factor:.3g} roundings. Or keep the params in float32."
        )


def check_params(params: PyTree) -> None:
    """Raises ValueError unless params are arrays.

    Integer arrays pass inside a tree, but not as the whole of `params`.
    """
    for path, leaf in leaves_by_path(params).items():
        if leaf is None or is_inexact(leaf) or (path and is_array_like(leaf)):
            continue
        raise ValueError(
            f"`params` must be floating-point arrays, got {leaf!r} at "
            f"{place(path)}. For Equinox use `eqx.filter(model, eqx.is_array)`."
        )


def check_params_passed(params: PyTree) -> None:
    """Raises ValueError if an update has no params."""
    if params is None:
        raise ValueError("`params` must be passed to `update`, got None")


def check_update(
    updates: PyTree, state: Any, params: PyTree | None, state_dtype: Any
) -> None:
    """Raises ValueError unless the arguments of an update fit each other."""
    check_state_fits(state, params)
    _check_stored_z(state.z, params, state_dtype)
    check_same_tree("updates", updates, "params", params)
    with_gradient = arrays_by_path(updates).keys()
    for name, tree in (("state.z", stored_tree(state.z)), ("params", params)):
        unmatched = with_gradient - arrays_by_path(tree).keys()
        if unmatched:
            raise ValueError(
                f"`updates` must be None where `{name}` is, got a gradient at "
                f"{place(min(unmatched))}"
            )


def _check_stored_z(z_field: PyTree, params: PyTree, state_dtype: Any) -> None:
    """Raises ValueError unless z is stored as `init` would store it beside params."""
    found, expected = codec_of(z_field), choose_codec(params, state_dtype)
    if found != expected:
        raise ValueError(
            f"`state.z` must hold {expected.description}, for the dtypes of `params` "
            f"and for `state_dtype={state_dtype}`, got {found.description}. Use "
            "`convert(state, params, into=tx.init(new_params), new_params=new_params)`,"
            " where `params` are those that the state was made for."
        )
    params_by_path = arrays_by_path(params)
    for path, leaf in arrays_by_path(stored_tree(z_field)).items():
        y = params_by_path.get(path, leaf)
        if not is_inexact(y):
            continue
        dtype = jnp.result_type(z_dtype(y, state_dtype))
        # Without a `state_dtype` params may have been cast to fewer bits afterwards.
        was_cast_later = (
            state_dtype is None
            and is_inexact(leaf)
            and leaf.dtype.itemsize >= dtype.itemsize
        )
        if leaf.dtype != dtype and not was_cast_later:
            raise ValueError(
                f"`state.z` must be in {dtype}, for `state_dtype={state_dtype}`, got "
                f"{leaf.dtype} at {place(path)}. Use `convert(state, params, "
                "into=tx.init(params))`."
            )


def nan_or_error_if_x_wrong(
    xz: XZCoefficients, updates: PyTree, state: SPAState, mu_y_may_change: bool
) -> XZCoefficients:
    """The coefficients, with η NaN where x would be wrong.

    Raises ValueError if that is known now; compiled code cannot raise. x would be wrong

    - without a `next_mu_y`, which claims that y is x, if the state's μ_y is not 1;
    - with one, if μ_y changes and a parameter with a z gets no update, since a change
      moves all params. With `mu_y_may_change` such updates are refused at once.
    """
    if xz.next_mu_y is None:
        next_mu_y = jnp.ones_like(state.mu_y)
        return _nan_or_error_if_mu_y_differs(xz, next_mu_y, state, PARAMS_ARE_NOT_X)
    frozen = _frozen_paths(updates, state)
    if not frozen:
        return xz
    if mu_y_may_change:
        raise ValueError(
            "`updates` must not be None where `interpolation` may change, which "
            f"moves the params, got None at {place(min(frozen))}"
        )
    next_mu_y = xz.next_mu_y.astype(state.mu_y.dtype)
    return _nan_or_error_if_mu_y_differs(xz, next_mu_y, state, FROZEN_WOULD_MOVE)


def _frozen_paths(updates: PyTree, state: SPAState) -> set[str]:
    """Of params that have a z, and get no update."""
    stored_by_path = arrays_by_path(stored_tree(state.z))
    trained = {path for path, leaf in stored_by_path.items() if is_inexact(leaf)}
    return trained - arrays_by_path(updates).keys()


def _nan_or_error_if_mu_y_differs(
    xz: XZCoefficients, next_mu_y: Scalar, state: SPAState, message: str
) -> XZCoefficients:
    # In the initial state z is y, so x is right at any μ_y.
    is_wrong = ~is_initial(state) & (next_mu_y != state.mu_y)
    if is_known_true(is_wrong):
        raise ValueError(message.format(old=float(state.mu_y), new=float(next_mu_y)))
    return xz._replace(eta=jnp.where(is_wrong, jnp.nan, xz.eta))


def check_state_type(name: str, state: Any, expected: type) -> None:
    """Raises ValueError unless a state is of a type, and its count an integer.

    A count that was cast to bfloat16 would stop at 256.
    """
    if not isinstance(state, expected):
        raise ValueError(
            f"`{name}` must be of type `{expected.__name__}`, got "
            f"{type(state).__name__}"
        )
    dtype = as_scalar(field_of(state, "count", default=0)).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"`{name}.count` must be an integer, whatever the params, got {dtype}"
        )


def check_spa_state(name: str, state: Any) -> None:
    """Raises ValueError if a state is of another type, batched, or cast to 16 bits."""
    check_state_type(name, state, SPAState)
    check_not_batched(name, state.count, state.mu_y)
    check_wide_scalars(name, state)
    if not codec_of(state.z).stores_difference and has_narrow_leaves(state.z):
        raise ValueError(
            f"`{name}.z` must hold z in 32 bits or more, got 16 or fewer. Use "
            "`convert(state, params, into=tx.init(params))`."
        )


def check_wide_scalars(name: str, state: SPAState) -> None:
    """Raises ValueError if the scalars of a state were cast to 16 bits."""
    for field in ("eta", "c", "w", "mu_y"):
        dtype = as_scalar(getattr(state, field)).dtype
        if dtype not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"`{name}.{field}` must be float32 or float64, whatever the params, "
                f"got {dtype}"
            )


def check_state_fits(state: Any, params: PyTree | None) -> None:
    """Raises ValueError unless a state is of the family and fits the params."""
    check_params_passed(params)
    check_spa_state("state", state)
    check_same_tree("state.z", stored_tree(state.z), "params", params)


def check_not_batched(
    name: str, *scalars: Any, advice: str = "use `jax.vmap` for a batch"
) -> None:
    """Raises ValueError if a scalar has axes, as in a batch of states, or no value."""
    for leaf in jax.tree.leaves(scalars):
        if isinstance(leaf, jax.ShapeDtypeStruct) or np.shape(leaf):
            raise ValueError(
                f"`{name}` must hold the arrays of one run, got {leaf} for a scalar: "
                f"{advice}"
            )


def check_paths(name: str, trees: Sequence[PyTree], params: PyTree) -> None:
    """Raises ValueError unless leaves are at paths of `params`, once, in its shapes."""
    shapes = {path: np.shape(leaf) for path, leaf in arrays_by_path(params).items()}
    for tree in trees:
        for path, leaf in arrays_by_path(tree).items():
            if shapes.pop(path, None) == np.shape(leaf):
                continue
            raise ValueError(
                f"`{name}` must have leaves of the paths and shapes of `params`, each "
                f"once, got {np.shape(leaf)} at {place(path)}. With Flax nnx "
                "`params` are `nnx.state(model, nnx.Param)`."
            )


def check_same_tree(
    name: str, tree: PyTree, like_name: str, like: PyTree, *, same_nodes: bool = True
) -> None:
    """Raises ValueError unless two trees agree in structure and shapes.

    None counts as a leaf of any shape. Without `same_nodes` types of nodes may differ,
    as in nnx.
    """
    leaves, others = leaves_by_path(tree), leaves_by_path(like)
    unmatched = leaves.keys() ^ others.keys()
    if unmatched:
        path = min(unmatched)
        owner = name if path in leaves else like_name
        raise ValueError(
            f"`{name}` must have the structure of `{like_name}`: only `{owner}` has a "
            f"leaf at {place(path)}"
        )
    structure = jax.tree.structure(tree, is_leaf=is_none)
    other_structure = jax.tree.structure(like, is_leaf=is_none)
    if same_nodes and structure != other_structure:
        raise ValueError(
            f"`{name}` must have the structure of `{like_name}`, {other_structure}, "
            f"got {structure}"
        )
    for path, leaf in leaves.items():
        other = others[path]
        if leaf is None or other is None or np.shape(leaf) == np.shape(other):
            continue
        raise ValueError(
            f"`{name}` must have the shapes of `{like_name}`: {np.shape(leaf)} against "
            f"{np.shape(other)} at {place(path)}"
        )
