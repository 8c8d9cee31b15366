"""The shardings of a state's arrays, which `jax.jit` drops."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, Bool, PyTree

from ._trees import leaves_with_path


def where_sharded(predicate: Bool[Array, "..."], x: Array, y: Array) -> Array:
    """`jnp.where`; on a mesh with explicit axes the shardings of x and y may differ."""
    if jax.typeof(x).sharding.spec != jax.typeof(y).sharding.spec:
        if hasattr(jax.sharding, "reshard"):
            sharding = jax.typeof(x + y).sharding
            x, y = (jax.sharding.reshard(array, sharding) for array in (x, y))
        else:  # before jax 0.7
            x, y = x + jnp.zeros_like(y), y + jnp.zeros_like(x)
    return jnp.where(predicate, x, y)


def sharded_like(leaf: Any, x: Any) -> Any:
    """An array of a state with the sharding of its parameter, which jit drops.

    Without it every device would hold all of the array. The choice below always falls
    on `leaf`, but it reads x too. So XLA gives its result the sharding of x. XLA must
    not know the predicate, or it would remove the choice before it propagates
    shardings.
    """
    is_like = isinstance(leaf, jax.Array) and isinstance(x, jax.Array)
    if not is_like or x.shape != leaf.shape:
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.number):  # a key of `jax.random`
        return leaf
    if not isinstance(leaf, Tracer) and not isinstance(x, Tracer):
        is_split = len(x.sharding.device_set) > 1
        return jax.device_put(leaf, x.sharding) if is_split else leaf
    never = jax.lax.optimization_barrier(jnp.zeros([], bool))
    return where_sharded(never, jnp.real(x).astype(leaf.dtype), leaf)


def with_shardings(state: PyTree, params: PyTree) -> PyTree:
    """A state whose arrays have the shardings of their params, by path.

    `jnp.zeros_like` in a jitted `init` drops them. An array of a state belongs to the
    parameter whose path its own path ends with: `[0].nu['w']` ends with `['w']`. It
    must have the shape of the parameter too.
    """
    owners = dict(leaves_with_path(params))

    def shard(path, leaf):
        ends = (keystr(path[i:]) for i in range(len(path) + 1))
        owner = next((owners[end] for end in ends if end in owners), None)
        return sharded_like(leaf, owner)

    return tree_map_with_path(shard, state)
