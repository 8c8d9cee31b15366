"""`eval_params` returns x; `shift_z` shifts z when params were edited."""

import operator

import jax
from jaxtyping import PyTree

from ._checks import (
    check_paths,
    check_same_tree,
    check_spa_state,
)
from ._codec import codec_of, stored_tree
from ._optax_states import PARAMS_MOVING_STATES, is_opaque_sam
from ._state import SPAState, is_initial, mu_y_of
from ._trees import (
    arrays_by_path,
    compute_dtype,
    copy_arrays,
    find_nodes,
    is_inexact,
    is_known_true,
    node_type_names,
    place,
    replace_leaves,
    replace_nodes,
)
from ._wrappers import StochasticRoundingState


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to export: x, from a state that averages.

        x_k = y_k − (1/μ_y − 1)(z_k − y_k)

    At an interpolation of 1, and under `stochastic_rounding`, x is `params`. To resume
    a run save `params`, not x. To keep x, copy it, `jax.tree.map(jnp.copy, x)`, since
    its arrays may be those of `params`, which a step may donate.

    Args:
      opt_state: a state that holds an `SPAState`, or several that divide the params,
        or a state of `stochastic_rounding`. It may lie in any chain, and in any wrapper
        that does not flatten the params or move them itself.
      params: y_k, the current params of that run.

    Returns:
      x_k, a tree like `params` of JAX arrays. Leaves of another optimizer, or of none,
      keep their values.

    Raises:
      ValueError: if `opt_state` holds no such state, or a batch of them, or one inside
        a wrapper that moves the params; if z does not fit `params`; or if the state was
        cast.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import eval_params, spa
      >>> tx, y = spa(1.0, averaging=0.5, interpolation=0.5), jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> y += updates
      >>> print(state.z, y, eval_params(state, y))  # y is midway from z to x
      6.0 7.0 8.0
    """
    # By path, since under `optax.partition` each state has only some of the params.
    leaves = arrays_by_path(params)
    _check_opt_state(opt_state, params)
    for state in find_nodes(opt_state, SPAState):
        mu_y = mu_y_of(state)
        if is_known_true(mu_y == 1):
            continue
        if is_known_true(mu_y <= 0):
            raise ValueError(
                f"`opt_state` must have a μ_y > 0, got {mu_y:g}: x is lost"
            )
        codec, state_is_initial = codec_of(state.z), is_initial(state)
        for path, stored in arrays_by_path(stored_tree(state.z)).items():
            y = leaves[path]
            if not is_inexact(y):
                continue
            d = codec.decode_difference(y, stored, state_is_initial)
            x = y.astype(d.dtype) - (1 / mu_y.astype(d.dtype) - 1) * d
            leaves[path] = x.astype(y.dtype)
    return jax.tree.unflatten(jax.tree.structure(params), leaves.values())


def shift_z(opt_state: PyTree, old_params: PyTree, new_params: PyTree) -> PyTree:
    """Shifts z along with params that were edited outside the optimizer.

        z ← z + (y_new − y_old)

    Otherwise z would pull them back. With Flax nnx, call it before `nnx.update`.

    Args:
      opt_state: a state that holds an `SPAState`, as for `eval_params`.
      old_params: the params as the last update left them.
      new_params: the params that replace them.

    Returns:
      `opt_state` with z shifted; momentum is unchanged.

    Raises:
      ValueError: if `opt_state` holds neither an `SPAState` nor a state of
        `stochastic_rounding`, the trees differ, or both are the same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import shift_z, spa
      >>> params, pruned = jnp.array([3.0, -1.0]), jnp.array([3.0, 0.0])
      >>> print(shift_z(spa(1.0).init(params), params, pruned).z)
      [3. 0.]
    """
    check_same_tree(
        "new_params", new_params, "old_params", old_params, same_nodes=False
    )
    _check_opt_state(opt_state, old_params, new_params)
    old_leaves, new_leaves = map(jax.tree.leaves, (old_params, new_params))
    if old_leaves and all(map(operator.is_, old_leaves, new_leaves)):
        raise ValueError(
            "`new_params` must not be the arrays of `old_params` (nnx.state is live)"
        )
    old, new = arrays_by_path(old_params), arrays_by_path(new_params)

    def shift(path, z):
        if not is_inexact(z):
            return new[path]
        if not is_inexact(new[path]):
            raise ValueError(
                "`new_params` must be floating-point where z is, got "
                f"{new[path].dtype} at {place(path)}"
            )
        dtype = compute_dtype(z, old[path])
        edit = new[path].astype(dtype) - old[path].astype(dtype)
        return (z.astype(dtype) + edit).astype(z.dtype)

    def shift_state(state):
        if codec_of(state.z).stores_difference:  # z − y stays, so z moves along
            return state
        z = [shift(path, leaf) for path, leaf in arrays_by_path(state.z).items()]
        return state._replace(z=replace_leaves(state.z, z))

    return copy_arrays(replace_nodes(opt_state, SPAState, shift_state))


def _check_opt_state(opt_state: PyTree, *params: PyTree) -> None:
    """Raises ValueError unless a state has states of the family that fit the params."""
    states = find_nodes(opt_state, SPAState)
    holders = (SPAState, StochasticRoundingState)
    if not find_nodes(opt_state, holders):
        raise ValueError(
            "`opt_state` must hold an `SPAState` or a `StochasticRoundingState`, got "
            f"{node_type_names(opt_state)}"
        )
    for moving_type in PARAMS_MOVING_STATES:  # one may hide another inside it
        for outer in find_nodes(opt_state, moving_type):
            if find_nodes(outer, holders) and not is_opaque_sam(outer):
                raise ValueError(
                    "`opt_state` must hold a state of `params`, got one in a "
                    f"`{type(outer).__name__}`, which moves them"
                )
    for tree in params:
        check_paths("opt_state", [stored_tree(state.z) for state in states], tree)
    for state in states:
        check_spa_state("opt_state", state)
