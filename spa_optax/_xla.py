"""What XLA's compilers need to be told."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._dtypes import wide_dtype
from ._trees import is_array


def behind_a_barrier(tree: PyTree) -> PyTree:
    """The same arrays, but XLA treats them as different ones."""
    leaves, structure = jax.tree.flatten(tree)
    hidden = iter(jax.lax.optimization_barrier(list(filter(is_array, leaves))))
    return structure.unflatten([next(hidden) if is_array(x) else x for x in leaves])


def hide_from_xla(used: PyTree, stored: PyTree) -> tuple[PyTree, PyTree]:
    """The scalars of a step that kernels use, and those that the new state stores.

    XLA must not know their values. If it knows that η is 1, the paper's value, XLA on
    CPU folds the product away and no longer updates z in place, which takes three times
    as long.
    """
    one = jnp.ones([], jnp.float32)
    leaves, structure = jax.tree.flatten((used, stored, one))

    def as_slices(leaves):
        # XLA for GPUs merges the kernels of leaves only where these read one array.
        dtype = wide_dtype(*leaves)
        vector = behind_a_barrier(jnp.stack([x.astype(dtype) for x in leaves]))
        return [vector[i].astype(x.dtype) for i, x in enumerate(leaves)]

    leaves = jax.lax.platform_dependent(
        leaves, cuda=as_slices, rocm=as_slices, default=behind_a_barrier
    )
    used, stored, one = structure.unflatten(leaves)
    # XLA for GPUs makes one kernel of all stored scalars only if each is computed. So
    # each is multiplied by a 1 that XLA does not know.
    return used, jax.tree.map(lambda scalar: scalar * one.astype(scalar.dtype), stored)
