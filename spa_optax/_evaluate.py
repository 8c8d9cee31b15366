"""What operates on the states of all members: `eval_params` and `reanchor`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from spa_optax._checks import check_one_run, is_surely
from spa_optax._core import SPAState, check_scalars, is_at_start
from spa_optax._precision import wide_dtype
from spa_optax._storage import check_stored, form_of, tree_of
from spa_optax._trees import (
    by_path,
    check_same_tree,
    copy,
    find,
    is_trained,
    keys_of,
    kinds_of,
    replace,
    scalar_of,
    with_leaves,
)
from spa_optax._wrappers import StochasticRoundingState
from spa_optax._xla import select


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to save: x, for any member of the family.

        x_k = y_k + (1/μ_y − 1)(y_k − z_k)

    At an interpolation of 1, and under `stochastic_rounding`, x is `params`. Leaves handled by
    another optimizer, or by none, are returned unchanged. Arrays that are unchanged are those of
    `params`, so a step that donates them deletes them: to keep x, copy it,
    `jax.tree.map(jnp.copy, x)`.

    With Flax nnx, evaluate a clone, since `nnx.state` and `nnx.split` return live variables:

        average = nnx.clone(model)
        x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
        nnx.update(average, x)
        average.eval()

    Args:
      opt_state: a state that holds one of the family, or several that divide the params, in any
        chain or wrapper except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: y_k, the current params of that run.

    Returns:
      x_k, shaped like `params` and of their dtype.

    Raises:
      ValueError: if `opt_state` has no `SPAState`, or batched ones, or z does not fit `params`, or
        was cast to a dtype in which it is stored otherwise.

    Examples:
      Under Schedule-Free averaging x is the mean of all z so far: here of 9 and 7.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import eval_params, schedule_free_averaging, spa
      >>> tx = spa(1.0, averaging=schedule_free_averaging(1.0), interpolation=0.5)
      >>> params = jnp.array(10.0)
      >>> state = tx.init(params)
      >>> for gradient in (1.0, 2.0):
      ...     updates, state = tx.update(jnp.array(gradient), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, eval_params(state, params))
      7.5 8.0

    References:
      Defazio et al., Smoothing DiLoCo with Primal Averaging, 2025, arXiv:2512.17131.
    """
    if find(opt_state, StochasticRoundingState) and not find(opt_state, SPAState):
        return params
    states = _states("opt_state", opt_state)
    check_one_run("opt_state", [(state.count, state.mu_y) for state in states])
    x = by_path(params)
    trees = [jax.tree.map(jnp.asarray, tree_of(state.z)) for state in states]
    keys = keys_of("opt_state", trees, params)
    for state, of_state, tree in zip(states, keys, trees, strict=True):
        check_stored("opt_state", state.z, params)
        check_scalars("opt_state", state)
        if is_surely(scalar_of(state.mu_y) == 1):
            continue
        if is_surely(scalar_of(state.mu_y) <= 0):
            raise ValueError("`opt_state` must have a μ_y > 0, got 0: params are z, and x is lost")
        for key, stored in zip(of_state, jax.tree.leaves(tree), strict=True):
            if is_trained(x[key]):
                x[key] = _x(x[key], form_of(state.z).value(x[key], stored), state)
    return jax.tree.unflatten(jax.tree.structure(params), x.values())


def _states(name: str, state: PyTree) -> list[SPAState]:
    states = find(state, SPAState)
    if not states:
        raise ValueError(f"`{name}` must hold an `SPAState`, got {kinds_of(state)}")
    return states


def _x(y: Array, z: Array, state: SPAState) -> Array:
    mu_y = scalar_of(state.mu_y).astype(z.dtype)
    y_wide = y.astype(z.dtype)
    x = y_wide + (1 / mu_y - 1) * (y_wide - z)
    # Params may have been replaced before the first step, and z is not updated until then.
    return select(is_at_start(state), y, x.astype(y.dtype))


def reanchor(spa_state: PyTree, old_params: PyTree, new_params: PyTree) -> PyTree:
    """Shifts z along with params that were edited outside the optimizer.

        z ← z + (x_new − x_old)

    Use it after params were pruned, projected, averaged or reloaded: z would pull them back to
    their old values. With Flax nnx, call it before `nnx.update`.

    Args:
      spa_state: a state that holds one of the family, as for `eval_params`.
      old_params: the params as the last update left them.
      new_params: the params that replace them.

    Returns:
      `spa_state` with z shifted; momentum is unchanged.

    Raises:
      ValueError: if `spa_state` holds no `SPAState`, the trees differ, or both are the same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import reanchor, spa
      >>> params = jnp.array([3.0, -1.0])
      >>> pruned = jnp.array([3.0, 0.0])
      >>> print(reanchor(spa(1.0).init(params), params, pruned).z)
      [3. 0.]
    """
    check_same_tree("new_params", new_params, "old_params", old_params, same_nodes=False)
    states = _states("spa_state", spa_state)
    for state in states:
        check_stored("spa_state", state.z, old_params)
        check_scalars("spa_state", state)
    zs = [tree_of(state.z) for state in states]
    keys, _ = (iter(keys_of("spa_state", zs, params)) for params in (old_params, new_params))
    old_leaves, new_leaves = jax.tree.leaves(old_params), jax.tree.leaves(new_params)
    if old_leaves and all(old is new for old, new in zip(old_leaves, new_leaves, strict=True)):
        raise ValueError("`new_params` must not be the arrays of `old_params`: nnx.state is live")
    old, new = by_path(old_params), by_path(new_params)

    def shifted(key: str, z: Array) -> Array:
        if not is_trained(z):
            return new[key]
        if not is_trained(new[key]):
            got = f"{new[key].dtype} at {key or 'its root'}"
            raise ValueError(f"`new_params` must be floating-point where z is, got {got}")
        dtype = wide_dtype(z, old[key])
        return (z.astype(dtype) + (new[key].astype(dtype) - old[key].astype(dtype))).astype(z.dtype)

    def move(node: SPAState) -> SPAState:
        of_node = next(keys)
        if form_of(node.z).follows_params:
            return node
        z = map(jnp.asarray, jax.tree.leaves(node.z))
        return node._replace(z=with_leaves(node.z, list(map(shifted, of_node, z))))

    return copy(replace(spa_state, SPAState, move))
