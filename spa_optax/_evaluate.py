"""What operates on the states of all members: `eval_params` and `reanchor`."""

import jax
import optax
from jaxtyping import Array, PyTree

from spa_optax import _checks as checks, _optax_states as of_optax, _trees as trees
from spa_optax._core import SPAState, check_scalars, is_at_start
from spa_optax._precision import wide_dtype
from spa_optax._storage import check_stored, form_of, tree_of
from spa_optax._wrappers import StochasticRoundingState
from spa_optax._xla import select

# Wrappers that move the params apart from those of what they wrap (SAM, if it is not
# opaque).
_MOVE_PARAMS = (
    *of_optax.states("ScheduleFree Mechanic SAM", optax.contrib),
    optax.LookaheadState,
)


def eval_params(opt_state: PyTree, params: PyTree) -> PyTree:
    """The params to evaluate and to save: x, for any member of the family.

        x_k = y_k + (1/μ_y − 1)(y_k − z_k)

    At an interpolation of 1, and under `stochastic_rounding`, x is `params`. To keep x,
    copy it, `jax.tree.map(jnp.copy, x)`, since its arrays may be those of `params`,
    which a step may donate.

    Args: opt_state: a state that holds one of the family, or several that divide the
      params, in any
        chain, and any wrapper that does not flatten the params or move them itself.
      params: y_k, the current params of that run.

    Returns: x_k, like `params`. Leaves of another optimizer, or of none, are returned
      unchanged.

    Raises: ValueError: if `opt_state` has no `SPAState`, or a batch, or its z does not
      fit, or was cast.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import eval_params, spa
      >>> tx, y = spa(1.0, averaging=0.5, interpolation=0.5), jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(4.0), tx.init(y), y)
      >>> # y is midway from z to x
      >>> print(state.z, y + updates, eval_params(state, y + updates))
      6.0 7.0 8.0
    """
    x = trees.by_path(params)
    for state in _states("opt_state", opt_state, params):
        checks.check_one_run("opt_state", state.count, state.mu_y)
        mu_y = trees.scalar_of(state.mu_y)
        if checks.is_surely(mu_y == 1):
            continue
        if checks.is_surely(mu_y <= 0):
            raise ValueError(
                "`opt_state` must have a μ_y > 0, got 0: params are z, and x is lost"
            )
        stored = trees.by_path(tree_of(state.z))
        for key in filter(lambda key: trees.is_trained(x[key]), stored):
            z = form_of(state.z).value(x[key], stored[key])
            y = x[key].astype(z.dtype)
            average = y + (1 / mu_y.astype(z.dtype) - 1) * (y - z)
            # Before the first step params may have been replaced, which z does not
            # follow.
            x[key] = select(is_at_start(state), x[key], average.astype(x[key].dtype))
    return jax.tree.unflatten(jax.tree.structure(params), x.values())


def reanchor(spa_state: PyTree, old_params: PyTree, new_params: PyTree) -> PyTree:
    """Shifts z along with params that were edited outside the optimizer.

        z ← z + (x_new − x_old)

    Otherwise z would pull them back. With Flax nnx, call it before `nnx.update`.

    Args:
      spa_state: a state that holds one of the family, as for `eval_params`.
      old_params: the params as the last update left them.
      new_params: the params that replace them.

    Returns:
      `spa_state` with z shifted; momentum is unchanged.

    Raises: ValueError: if `spa_state` holds no `SPAState`, the trees differ, or both
      are the same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import reanchor, spa
      >>> params, pruned = jnp.array([3.0, -1.0]), jnp.array([3.0, 0.0])
      >>> print(reanchor(spa(1.0).init(params), params, pruned).z)
      [3. 0.]
    """
    trees.check_same_tree(
        "new_params", new_params, "old_params", old_params, same_nodes=False
    )
    _states("spa_state", spa_state, old_params, new_params)
    pairs = list(
        zip(jax.tree.leaves(old_params), jax.tree.leaves(new_params), strict=True)
    )
    if pairs and all(old is new for old, new in pairs):
        raise ValueError(
            "`new_params` must not be the arrays of `old_params` (nnx.state is live)"
        )
    old, new = trees.by_path(old_params), trees.by_path(new_params)

    def shifted(key: str, z: Array) -> Array:
        if not trees.is_trained(z):
            return new[key]
        if not trees.is_trained(new[key]):
            got = f"{new[key].dtype} at {key or 'its root'}"
            raise ValueError(
                f"`new_params` must be floating-point where z is, got {got}"
            )
        dtype = wide_dtype(z, old[key])
        return (
            z.astype(dtype) + (new[key].astype(dtype) - old[key].astype(dtype))
        ).astype(z.dtype)

    def move(state: SPAState) -> SPAState:
        if form_of(state.z).follows_params:
            return state
        z = [shifted(key, z) for key, z in trees.by_path(state.z).items()]
        return state._replace(z=trees.with_leaves(state.z, z))

    return trees.copy(trees.replace(spa_state, SPAState, move))


def _states(
    name: str, opt_state: PyTree, params: PyTree, *others: PyTree
) -> list[SPAState]:
    """The states of the family. Raises ValueError unless they fit the params, and other
    params.
    """
    states, kinds = trees.find(opt_state, SPAState), (SPAState, StochasticRoundingState)
    if not trees.find(opt_state, kinds):
        raise ValueError(
            f"`{name}` must hold an `SPAState`, got {trees.kinds_of(opt_state)}"
        )
    for outer in trees.find(opt_state, _MOVE_PARAMS):
        if trees.find(outer, kinds) and not of_optax.is_opaque_sam(outer):
            got = f"one in a `{type(outer).__name__}`, which moves them"
            raise ValueError(f"`{name}` must hold a state of `params`, got {got}")
    for tree in (params, *others):
        trees.check_paths(name, [tree_of(state.z) for state in states], tree)
    for state in states:
        check_stored(name, state.z, params)
        check_scalars(name, state)
    return states
