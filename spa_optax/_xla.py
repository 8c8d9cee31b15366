"""What `jax.jit` and XLA need to be told, shardings too, and what a trace knows.

What comments say of XLA was seen with jax 0.10.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import Array, PyTree

from ._trees import compute_dtype, is_array_like, leaves_by_path


def tree_barrier(tree: PyTree) -> PyTree:
    """`jax.lax.optimization_barrier` for a tree that may hold other leaves."""
    leaves, structure = jax.tree.flatten(tree)
    hidden = iter(jax.lax.optimization_barrier(list(filter(is_array_like, leaves))))
    return structure.unflatten(
        [next(hidden) if is_array_like(leaf) else leaf for leaf in leaves]
    )


def hide_from_xla(
    kernel_scalars: PyTree, state_scalars: PyTree
) -> tuple[PyTree, PyTree]:
    """Hides the values of scalars from XLA, for the kernels and for the next state.

    If it knows that η is 1, as in `primal_averaging`, XLA on CPU folds the product away
    and no longer updates z in place, which is slower.
    """
    one = jnp.ones([], jnp.float32)
    leaves, structure = jax.tree.flatten((kernel_scalars, state_scalars, one))

    def as_slices(leaves):
        # XLA for GPUs merges the kernels of leaves only where these read one array.
        dtype = compute_dtype(*leaves)
        vector = tree_barrier(jnp.stack([leaf.astype(dtype) for leaf in leaves]))
        return [vector[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    leaves = jax.lax.platform_dependent(
        leaves, cuda=as_slices, rocm=as_slices, default=tree_barrier
    )
    kernel_scalars, state_scalars, one = structure.unflatten(leaves)
    # XLA for GPUs makes one kernel of all stored scalars only if each is computed. So
    # each is multiplied by a 1 that XLA does not know.
    return kernel_scalars, jax.tree.map(
        lambda scalar: scalar * one.astype(scalar.dtype), state_scalars
    )


def split_seeds(seeds: Array, count: Array) -> list[Array]:
    """Seeds, one for each leaf, which XLA must not draw again for every leaf."""
    seeds = jax.lax.optimization_barrier(seeds)

    def on_cpu(seeds):
        # A loop that XLA does not know to be of one step keeps it from fusing the draw
        # into every leaf. Leaves of one shape then share a program, which compiles
        # faster. A second step would change nothing.
        num_loops = 1 + (count == jnp.iinfo(count.dtype).min).astype(jnp.int32)
        zeros = list(jnp.zeros_like(seeds))
        return jax.lax.fori_loop(0, num_loops, lambda *_: list(seeds), zeros)

    return jax.lax.platform_dependent(seeds, cpu=on_cpu, default=list)


def as_stored(array: Array) -> Array:
    """A computed array with the numbers that its dtype stores.

    XLA may compute bfloat16 in float32, and keep digits inside a kernel that are lost
    where the array leaves it.
    """
    if array.dtype != jnp.bfloat16:
        return array
    return jax.lax.reduce_precision(array.astype(jnp.float32), 8, 7).astype(array.dtype)


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
    are_arrays = isinstance(leaf, jax.Array) and isinstance(param, jax.Array)
    if not are_arrays or param.shape != leaf.shape:
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.number):  # a key of `jax.random`
        return leaf
    if not isinstance(leaf, Tracer) and not isinstance(param, Tracer):
        if len(param.sharding.device_set) == 1:
            return leaf
        return jax.device_put(leaf, param.sharding)
    never = jax.lax.optimization_barrier(jnp.zeros([], bool))
    return where_sharded(never, jnp.real(param).astype(leaf.dtype), leaf)


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


def is_known_true(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        return bool(condition)
    return False
