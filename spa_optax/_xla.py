"""Barriers against optimizations of XLA that make a step slow, or change its rounding.

What comments say of XLA was seen with jax 0.10.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._trees import compute_dtype


def hide_from_xla(
    kernel_scalars: PyTree, state_scalars: PyTree
) -> tuple[PyTree, PyTree]:
    """Hides the values of scalars from XLA, for the kernels and for the next state.

    If it knows that η is 1, as in `primal_averaging`, XLA on CPU folds the product away
    and no longer updates z in place, which is slower.
    """
    hide, one = jax.lax.optimization_barrier, jnp.ones([], jnp.float32)
    leaves, structure = jax.tree.flatten((kernel_scalars, state_scalars, one))

    def as_slices(leaves):
        # XLA for GPUs merges the kernels of leaves only where these read one array.
        dtype = compute_dtype(*leaves)
        vector = hide(jnp.stack([leaf.astype(dtype) for leaf in leaves]))
        return [vector[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    leaves = jax.lax.platform_dependent(
        leaves, cuda=as_slices, rocm=as_slices, default=hide
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
        # XLA would fuse the draw into every leaf. Then leaves of one shape could not
        # share a program, and compiling would take longer. A loop stops it. It has one
        # step, but XLA must not know that. A second one would change nothing.
        num_loops = 1 + (count == jnp.iinfo(count.dtype).min).astype(jnp.int32)
        zeros = list(jnp.zeros_like(seeds))
        return jax.lax.fori_loop(0, num_loops, lambda *_: list(seeds), zeros)

    return jax.lax.platform_dependent(seeds, cpu=on_cpu, default=list)


def as_stored(array: Array) -> Array:
    """A computed bfloat16 array, rounded as it will be stored. Others stay as they are.

    XLA may compute bfloat16 in float32, and keep digits inside a kernel that are lost
    where the array leaves it.
    """
    if array.dtype != jnp.bfloat16:
        return array
    return jax.lax.reduce_precision(array.astype(jnp.float32), 8, 7).astype(array.dtype)
