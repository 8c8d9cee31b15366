"""The shardings of a state, which follow those of the params."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, PyTree

from ._trees import leaves_by_path


def where_sharded(predicate: Any, if_true: Array, if_false: Array) -> Array:
    """`jnp.where`; on a mesh with explicit axes the two shardings may differ."""
    if jax.typeof(if_true).sharding.spec != jax.typeof(if_false).sharding.spec:
        sharding = jax.typeof(if_true + if_false).sharding
        if_true, if_false = (
            jax.sharding.reshard(array, sharding) for array in (if_true, if_false)
        )
    return jnp.where(predicate, if_true, if_false)


def shard_like(leaf: Any, param: Any) -> Any:
    """An array of a state with the sharding of its parameter, which jit drops.

    Without it every device would hold all of the array. The choice below always falls
    on `leaf`, but it reads the parameter too. So XLA gives its result that sharding.
    XLA must not know the predicate, or it would remove the choice before it propagates
    shardings.
    """
    if not (isinstance(leaf, jax.Array) and isinstance(param, jax.Array)):
        return leaf
    if param.shape != leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.number):
        return leaf  # of another shape, or a key of `jax.random`
    if isinstance(leaf, Tracer) or isinstance(param, Tracer):
        never = jax.lax.optimization_barrier(jnp.zeros([], bool))
        return where_sharded(never, jnp.real(param).astype(leaf.dtype), leaf)
    is_on_one_device = len(param.sharding.device_set) == 1  # it stays uncommitted
    return leaf if is_on_one_device else jax.device_put(leaf, param.sharding)


def shard_state_like(state: PyTree, params: PyTree) -> PyTree:
    """A state whose arrays have the shardings of their params, by path.

    `jnp.zeros_like` in a jitted `init` drops them. An array of a state belongs to the
    parameter whose path its own path ends with: `[0].nu['w']` ends with `['w']`. It
    must have the shape of the parameter too.
    """
    owners = leaves_by_path(params)

    def shard(path, leaf):
        ends = (keystr(path[i:]) for i in range(len(path) + 1))
        owner = next((owners[end] for end in ends if end in owners), None)
        return shard_like(leaf, owner)

    return tree_map_with_path(shard, state)
