"""Converts hyper-parameters and states to and from SGD with momentum."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from spa_optax._checks import (
    check_arrays_differ,
    check_averaging,
    check_bool,
    check_count,
    check_horizon,
    check_momentum,
    check_one_run,
    check_rate,
    check_same_tree,
    is_surely,
    keys_of,
)
from spa_optax._coast import eta_and_c, look_ahead, safe_coast
from spa_optax._core import GPAState, SPAState, find, only, scalar_of, z_0
from spa_optax._hyperparams import (
    FromSGDM,
    SGDMHyperparams,
    SPAHyperparams,
    as_schedule,
    at_count,
)
from spa_optax._precision import is_array, is_float, wide_dtype

INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# The states of optax that hold the count of their schedules.
_COUNTED = (optax.ScaleByScheduleState, *INJECTED)


def hyperparams_from_sgdm(
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    *,
    horizon: int | None = None,
) -> SPAHyperparams:
    """The SPA hyper-parameters that give the iterates of heavy-ball SGD+M.

        w_k = Σ_{j≥k} α_j Π_{i=k..j} β_i      η_k = α_k + w_{k+1}      c_{k+1} = α_k / η_k

    For constants, η = α/(1 − β) and c = 1 − β. This is the bounded solution of Theorem 1;
    `theory.forward_recursion` is the paper's own. For Nesterov momentum, and for
    hyper-parameters that cannot be evaluated ahead of time, use `spa_from_sgdm`.

    Args:
      learning_rate: α_k ≥ 0, a scalar or a schedule of the count k. A schedule is evaluated under
        `jax.vmap` for counts ahead of k, where NaN and negative values count as 0.
      momentum: β_k in [0, 1), a scalar or a schedule of the count k.
      horizon: how many steps to look ahead, at least 1; as for `spa_from_sgdm`.

    Returns:
      Numbers if both arguments are numbers, else schedules; c_{k+1} is 0 where α_k is. The
      schedules have an attribute `sgdm` for `theory.audit`: the given `SGDMHyperparams`.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from spa_optax import hyperparams_from_sgdm
      >>> hyperparams_from_sgdm(learning_rate=0.5, momentum=0.75)
      SPAHyperparams(learning_rate=2.0, averaging=0.25)

      Where α falls from 4 to 1 at step 2, with β = 0.5, c rises beforehand:
      w_1 = 4·½ + 1·½·(½ + ¼ + …) = 2.5, w_2 = 1.

      >>> import jax.numpy as jnp
      >>> hyperparams = hyperparams_from_sgdm(lambda k: jnp.where(k < 2, 4.0, 1.0), 0.5)
      >>> for k in range(3):
      ...     print(*(f"{h(k):.3f}" for h in hyperparams))
      6.500 0.615
      5.000 0.800
      2.000 0.500

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1.
    """
    check_rate("learning_rate", learning_rate)
    check_momentum(momentum)
    check_horizon(horizon)
    if not (callable(learning_rate) or callable(momentum)):
        return SPAHyperparams(learning_rate / (1 - momentum), 1 - momentum)

    def at(count: Array) -> tuple[Float[Array, ""], Float[Array, ""]]:
        ahead = look_ahead(learning_rate, momentum, count, horizon=horizon)
        return eta_and_c(ahead, ahead.coast)

    sgdm = SGDMHyperparams(learning_rate, momentum)
    eta, c = as_schedule(lambda count: at(count)[0]), as_schedule(lambda count: at(count)[1])
    return SPAHyperparams(FromSGDM(eta, sgdm), FromSGDM(c, sgdm))


def hyperparams_to_sgdm(
    learning_rate: optax.ScalarOrSchedule, averaging: optax.ScalarOrSchedule
) -> SGDMHyperparams:
    """The hyper-parameters of SGD+M that give the iterates of SPA.

        α_k = η_k c_{k+1}      β_k = (η_{k−1} / η_k)(1 − c_k)

    Args:
      learning_rate: η_k ≥ 0, a scalar or a schedule of the count k.
      averaging: c_{k+1} in [0, 1], a scalar or a schedule of the count k.

    Returns:
      Numbers if both arguments are numbers, else schedules. β_0 is free because m_0 = 0; it is set
      to 1 − c_1. β_k may exceed 1 where η falls fast. It is inf where η_k = 0 < η_{k−1}: x then
      moves on towards a fixed z, which SGD+M cannot do.

    Raises:
      ValueError: if a number is out of range.

    Examples:
      >>> from spa_optax import hyperparams_to_sgdm
      >>> hyperparams_to_sgdm(learning_rate=2.0, averaging=0.25)
      SGDMHyperparams(learning_rate=0.5, momentum=0.75)

      Dividing η by 10 makes β spike for one step, to 10 · 0.9 (the paper's Figure 1(c)).

      >>> import jax.numpy as jnp
      >>> hyperparams = hyperparams_to_sgdm(lambda k: jnp.where(k < 2, 10.0, 1.0), 0.1)
      >>> for k in range(1, 4):
      ...     print(*(f"{h(k):.1f}" for h in hyperparams))
      1.0 0.9
      0.1 9.0
      0.1 0.9

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1.
    """
    check_rate("learning_rate", learning_rate)
    check_averaging(averaging)
    if not (callable(learning_rate) or callable(averaging)):
        return SGDMHyperparams(learning_rate * averaging, 1 - averaging)
    eta_at, c_at = at_count("learning_rate", learning_rate), at_count("averaging", averaging)

    def alpha(k: Array) -> Float[Array, ""]:
        return eta_at(k) * c_at(k)

    def beta(k: Array) -> Float[Array, ""]:
        before = jnp.maximum(k - 1, 0)  # `averaging` at count k − 1 is c_k
        eta, eta_before = eta_at(k), eta_at(before)
        decay = 1 - c_at(before)
        ratio = jnp.where((eta_before == 0) | (decay == 0), 0, eta_before / eta)
        return jnp.where(k == 0, 1, ratio) * decay

    return SGDMHyperparams(as_schedule(alpha), as_schedule(beta))


def state_from_sgdm(
    sgd_state: PyTree,
    params: PyTree,
    *,
    learning_rate: optax.ScalarOrSchedule,
    momentum: optax.ScalarOrSchedule,
    nesterov: bool = False,
    count: int | None = None,
    into: PyTree | None = None,
) -> PyTree:
    """The state with which `spa_from_sgdm` continues a run of `optax.sgd(..., momentum=...)`.

        z_k = x_k − w_k m_k

    Args:
      sgd_state: a state that holds the one momentum buffer of `optax.sgd` or `optax.trace`, in any
        chain or wrapper except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      params: x_k, the current params of that run.
      learning_rate: α_k as it will be passed to `spa_from_sgdm`.
      momentum: β_k as it will be passed to `spa_from_sgdm`.
      nesterov: whether that run, and the one that continues it, use Nesterov momentum.
      count: k, the number of steps taken. None reads it from `sgd_state`. `optax.sgd` stores none
        if the learning rate is a number; if momentum is a number too, none is needed.
      into: the new optimizer's state from `init`: any chain or wrapper, also under Flax nnx, that
        holds one `spa_from_sgdm`. It may train fewer params, with the others frozen. None returns
        only the `SPAState`.

    Returns:
      `into` with z, and k as the count of its schedules; the rest is unchanged. If `into` is None,
      an `SPAState` with z in the default dtype of `spa_from_sgdm`.

    Raises:
      ValueError: if `sgd_state` does not hold exactly one momentum buffer, or `into` one
        `SPAState`; if the buffer does not fit `params`; if the count is missing, or 0 despite
        momentum.

    Examples:
      α = 1, β = 0.5 and a gradient of 2: x is at 8, and would coast to 6.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import state_from_sgdm
      >>> sgd = optax.sgd(1.0, momentum=0.5)
      >>> params = jnp.array(10.0)
      >>> updates, state = sgd.update(jnp.array(2.0), sgd.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> state_from_sgdm(state, params, learning_rate=1.0, momentum=0.5).z
      Array(6., dtype=float32)

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its proof.
    """
    check_rate("learning_rate", learning_rate)
    check_momentum(momentum)
    check_bool("nesterov", nesterov)
    buffers = find(sgd_state, optax.TraceState)
    if len(buffers) != 1:
        raise ValueError(
            "`sgd_state` must hold one momentum buffer, an `optax.TraceState`, got"
            f" {len(buffers)}: was `optax.sgd` made with `momentum`?"
        )
    m = buffers[0].trace
    check_one_run("sgd_state", [node.count for node in find(sgd_state, _COUNTED)])
    (keys,) = keys_of("sgd_state", [m], params)
    moving = jnp.any(jnp.array([jnp.any(leaf != 0) for leaf in jax.tree.leaves(m)]))
    if count is not None:
        check_count(count)
        k = jnp.asarray(count, jnp.int32)
    elif len(counts := find(sgd_state, _COUNTED)) == 1:
        k = jnp.asarray(counts[0].count)
    elif not (callable(learning_rate) or callable(momentum)):
        k = jnp.where(moving, 1, 0)
    else:
        raise ValueError(
            f"`count` must be given where `sgd_state` does not hold one count, got {len(counts)}"
        )
    if is_surely(moving & (k == 0)):
        raise ValueError("`count` must be >= 1 where `sgd_state` holds momentum, got 0")
    # w_k, as step k − 1 would have computed it.
    ahead = look_ahead(learning_rate, momentum, k - 1, nesterov=nesterov)
    w = safe_coast(ahead.coast, ahead.a, held=jnp.zeros_like(ahead.a))
    eta, c = eta_and_c(ahead, w, nesterov=nesterov)
    last = lambda scalar: jnp.where(k == 0, 0, scalar).astype(jnp.float32)
    x = by_path(params)

    def z_k(key: str, m: Array) -> Array:
        z = z_0(x[key], None)
        return z if not is_float(z) else z - w.astype(z.dtype) * m.astype(z.dtype)

    z = dict(zip(keys, map(z_k, keys, map(jnp.asarray, jax.tree.leaves(m))), strict=True))
    state = SPAState(
        count=k.astype(jnp.int32),
        z=jax.tree.unflatten(jax.tree.structure(m), z.values()),
        eta=last(eta),
        c=last(c),
        coast=last(w),
    )
    if into is None:
        return copied(state)
    (of_into,) = keys_of("into", [only(into, SPAState, "into").z], params)
    if not set(of_into) <= set(keys) or find(into, GPAState):
        raise ValueError(
            "`into` must be a state of `spa_from_sgdm` for params whose momentum is in `sgd_state`,"
            " got one of another optimizer or for other params"
        )
    place = lambda node: like(node, state._replace(z=[z[key] for key in of_into]))
    return copied(with_count(replace_nodes(into, SPAState, place), state.count))


def state_to_sgdm(spa_state: PyTree, params: PyTree, *, into: PyTree | None = None) -> PyTree:
    """The momentum with which `optax.sgd` continues a run of `spa` or `spa_from_sgdm`.

        m_k = (x_k − z_k) / w_k

    m has the rounding error of x_k over w_k, ulp(x)/w. It is large for params of 16 bits or fewer,
    and in float32 where α is almost 0 (0.8 % of m, two steps before the end of a cosine).

    Args:
      spa_state: a state that holds one `SPAState`, in any chain or wrapper except `optax.flatten`.
        For Flax nnx, `optimizer.opt_state`.
      params: x_k, the current params of that run.
      into: the new optimizer's state from `init`: any chain or wrapper, also under Flax nnx, that
        holds one `optax.sgd` with momentum, or one `optax.trace`. It may train fewer params. None
        returns only m_k.

    Returns:
      `into` with m_k, and k as the count of its schedules; the rest is unchanged. If `into` is
      None, m_k, shaped like z and with the dtype of `params`; 0 where c = 1 has left no momentum.

    Raises:
      ValueError: if `spa_state` does not hold exactly one `SPAState`, or `into` one momentum
        buffer, or if z does not fit `params`.

    Examples:
      After one step m is the gradient.

      >>> import jax.numpy as jnp
      >>> import optax
      >>> from spa_optax import spa_from_sgdm, state_to_sgdm
      >>> tx = spa_from_sgdm(learning_rate=1.0, momentum=0.5)
      >>> params = jnp.array(10.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> state_to_sgdm(state, optax.apply_updates(params, updates))
      Array(2., dtype=float32)

    References:
      Defazio, Momentum via Primal Averaging, 2020, arXiv:2010.00406, Theorem 1 and its proof.
    """
    state = only(spa_state, SPAState, "spa_state")
    check_one_run("spa_state", state.count)
    (keys,) = keys_of("spa_state", [state.z], params)
    count, coast = scalar_of(state.count), scalar_of(state.coast)
    known = (count > 0) & (coast > 0)
    w = jnp.where(known, coast, 1)
    x = by_path(params)

    def m_k(key: str, z: Array) -> Array:
        if not is_float(x[key]):
            return jnp.zeros_like(x[key])
        dtype = wide_dtype(x[key], z)
        m = (x[key].astype(dtype) - z.astype(dtype)) / w.astype(dtype)
        return jnp.where(known, m, 0).astype(x[key].dtype)

    m = dict(zip(keys, map(m_k, keys, map(jnp.asarray, jax.tree.leaves(state.z))), strict=True))
    if into is None:
        return copied(jax.tree.unflatten(jax.tree.structure(state.z), m.values()))
    (of_into,) = keys_of("into", [only(into, optax.TraceState, "into").trace], params)
    if not set(of_into) <= set(keys):
        raise ValueError(
            "`into` must have momentum only for params that have a z in `spa_state`, got others"
        )
    place = lambda node: like(node, [m[key] for key in of_into])
    return copied(with_count(replace_nodes(into, optax.TraceState, place), count))


def reanchor(spa_state: PyTree, old_params: PyTree, new_params: PyTree) -> PyTree:
    """Shifts z along with params that were edited outside the optimizer.

        z ← z + (x_new − x_old)

    With `optax.sgd`, params may be pruned, projected, averaged or reloaded between steps. Here z
    would pull them back to their old values.

    With Flax nnx, call it before `nnx.update`: `nnx.state` returns live variables, which then hold
    the new params.

    Args:
      spa_state: a state that holds one of the family, or several that divide the params among them,
        in any chain or wrapper except `optax.flatten`. For Flax nnx, `optimizer.opt_state`.
      old_params: the params as the last update left them.
      new_params: the params that replace them.

    Returns:
      `spa_state` with z shifted; momentum is unchanged.

    Raises:
      ValueError: if `spa_state` holds no state of the family, the trees differ, or both params are
        the very same arrays.

    Examples:
      >>> import jax.numpy as jnp
      >>> from spa_optax import reanchor, spa
      >>> params = jnp.array([3.0, -1.0])
      >>> pruned = jnp.array([3.0, 0.0])
      >>> print(reanchor(spa(1.0).init(params), params, pruned).z)
      [3. 0.]
    """
    check_same_tree("new_params", new_params, "old_params", old_params, same_nodes=False)
    zs = [state.z for state in find(spa_state, SPAState)]
    if not zs:
        raise ValueError("`spa_state` must hold an `SPAState`, got none")
    keys, _ = (iter(keys_of("spa_state", zs, params)) for params in (old_params, new_params))
    check_arrays_differ("old_params", old_params, "new_params", new_params)
    old, new = by_path(old_params), by_path(new_params)

    def shifted(key: str, z: Array) -> Array:
        if not is_float(z):
            return new[key]
        dtype = wide_dtype(z, old[key])
        return (z.astype(dtype) + (new[key].astype(dtype) - old[key].astype(dtype))).astype(z.dtype)

    def move(node: SPAState) -> SPAState:
        z = map(jnp.asarray, jax.tree.leaves(node.z))
        return node._replace(z=like(node.z, list(map(shifted, next(keys), z))))

    return copied(replace_nodes(spa_state, SPAState, move))


def by_path(params: PyTree) -> dict[str, Any]:
    """The leaves, by their paths as strings; numbers as arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    array = lambda leaf: jnp.asarray(leaf) if is_array(leaf) else leaf
    return {jax.tree_util.keystr(path): array(leaf) for path, leaf in leaves}


def like(node: PyTree, leaves: PyTree) -> PyTree:
    """New leaves in the structure (under Flax nnx, the variables) and the dtypes of a node."""

    def cast(leaf: Any, old: Any) -> Array:
        dtype = jnp.asarray(old).dtype
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return (jnp.asarray(leaf) if is_complex else jnp.real(leaf)).astype(dtype)

    new = map(cast, jax.tree.leaves(leaves), jax.tree.leaves(node))
    return jax.tree.unflatten(jax.tree.structure(node), new)


def replace_nodes(state: PyTree, kinds: Any, new: Callable[[Any], Any]) -> PyTree:
    """A state with the nodes of some kinds replaced."""
    is_kind = lambda node: isinstance(node, kinds)
    return jax.tree.map(lambda n: new(n) if is_kind(n) else n, state, is_leaf=is_kind)


def copied(state: PyTree) -> PyTree:
    """A state that shares no buffer with another, so that both can be donated."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def with_count(state: PyTree, count: Array) -> PyTree:
    """A state with a new count for its schedules."""
    # Also states with no other field, such as that of `optax.WrappedSchedule`.
    is_counted = lambda node: (
        isinstance(node, _COUNTED) or getattr(node, "_fields", None) == ("count",)
    )

    def counted(node: Any) -> Any:
        if not is_counted(node):
            return node
        inside = {name: with_count(field, count) for name, field in node._asdict().items()}
        return node._replace(**{**inside, "count": like(node.count, count)})

    return jax.tree.map(counted, state, is_leaf=is_counted)
