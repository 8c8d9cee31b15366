"""What XLA's compilers need to be told, apart from the equations."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from spa_optax._trees import is_array


def behind_a_barrier(tree: PyTree) -> PyTree:
    """The same arrays, but XLA treats them as different ones."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(jax.lax.optimization_barrier([leaf for leaf in leaves if is_array(leaf)]))
    return structure.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])


def shared(scalars: PyTree) -> PyTree:
    """The scalars of a step, hidden from XLA's constant folding.

    At η = 1, the paper's own value, XLA on CPU would fold the multiplication away and no longer
    update z in place, which takes three times as long. On a GPU they are slices of one array, since
    XLA merges the kernels of leaves only where these read the same array.
    """
    leaves, structure = jax.tree.flatten(scalars)

    def slices(leaves: list[Array]) -> list[Array]:
        array = behind_a_barrier(jnp.stack([leaf.astype(leaves[0].dtype) for leaf in leaves]))
        return [array[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    on_gpu = {"cuda": slices, "rocm": slices}
    leaves = jax.lax.platform_dependent(leaves, **on_gpu, default=behind_a_barrier)
    return structure.unflatten(leaves)


def select(predicate: Bool[Array, "..."], x: Array, y: Array) -> Array:
    """`jnp.where`; on a mesh with explicit axes shardings may differ, as those of a sum may."""
    if jax.typeof(x).sharding.spec != jax.typeof(y).sharding.spec:
        if hasattr(jax.sharding, "reshard"):
            sharding = jax.typeof(x + y).sharding
            x, y = (jax.sharding.reshard(array, sharding) for array in (x, y))
        else:  # before jax 0.7
            x, y = x + jnp.zeros_like(y), y + jnp.zeros_like(x)
    return jnp.where(predicate, x, y)


def sharded_like(zeros: Array, x: Any) -> Array:
    """Zeros with the sharding of a parameter of their shape, which `zeros_like` drops under jit.

    Without it every device would hold all of them. XLA would fold a constant predicate before it
    propagates shardings, hence the barrier.
    """
    if not isinstance(x, jax.Array) or x.shape != zeros.shape:
        return zeros
    never = jax.lax.optimization_barrier(jnp.zeros([], bool))
    return select(never, jnp.real(x).astype(zeros.dtype), zeros)
