"""What XLA's compilers need to be told, and z ← y + r (z − y) in the form they compile
best.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from spa_optax._precision import rounds_to, scaled
from spa_optax._trees import is_array, map_trained

Ratios = dict[str, Float[Array, ""]]  # r for each dtype of y; empty: 1


def behind_a_barrier(tree: PyTree) -> PyTree:
    """The same arrays, but XLA treats them as different ones."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(
        jax.lax.optimization_barrier([leaf for leaf in leaves if is_array(leaf)])
    )
    return structure.unflatten(
        [next(arrays) if is_array(leaf) else leaf for leaf in leaves]
    )


def shared(scalars: PyTree) -> PyTree:
    """The scalars of a step, hidden from XLA's constant folding.

    At η = 1, the paper's value, XLA on CPU would fold the product away and no longer
    update z in place, which takes three times as long. On a GPU they are slices of one
    array, since XLA merges the kernels of leaves only where these read the same array.
    """
    leaves, structure = jax.tree.flatten(scalars)

    def slices(leaves: list[Array]) -> list[Array]:
        array = behind_a_barrier(
            jnp.stack([leaf.astype(leaves[0].dtype) for leaf in leaves])
        )
        return [array[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]

    on_gpu = {"cuda": slices, "rocm": slices}
    leaves = jax.lax.platform_dependent(leaves, **on_gpu, default=behind_a_barrier)
    return structure.unflatten(leaves)


def select(predicate: Bool[Array, "..."], x: Array, y: Array) -> Array:
    """`jnp.where`; on a mesh with explicit axes shardings may differ, as those of a sum
    may.
    """
    if jax.typeof(x).sharding.spec != jax.typeof(y).sharding.spec:
        if hasattr(jax.sharding, "reshard"):
            sharding = jax.typeof(x + y).sharding
            x, y = (jax.sharding.reshard(array, sharding) for array in (x, y))
        else:  # before jax 0.7
            x, y = x + jnp.zeros_like(y), y + jnp.zeros_like(x)
    return jnp.where(predicate, x, y)


def sharded_like(zeros: Array, x: Any) -> Array:
    """Zeros with the sharding of a parameter of their shape, which `zeros_like` drops
    under jit.

    Without it every device would hold all of them. XLA would fold a constant predicate
    before it propagates shardings, hence the barrier.
    """
    if not isinstance(x, jax.Array) or x.shape != zeros.shape:
        return zeros
    never = jax.lax.optimization_barrier(jnp.zeros([], bool))
    return select(never, jnp.real(x).astype(zeros.dtype), zeros)


def rescale(
    y: PyTree, z: PyTree, r: Ratios, at_start: Array, of_difference: bool
) -> PyTree:
    """y_k + r (z_k − y_k), or y_0; of a difference, r (z_k − y_k)."""
    if of_difference:
        return map_trained(lambda d: scaled(r["float32"], d, d.dtype), z) if r else z
    return (_select_or_rescale if r else _select)(y, z, r, at_start)


def _rescale(y: PyTree, z: PyTree, r: Ratios, at_start: Bool[Array, ""]) -> PyTree:
    """y_k + r (z_k − y_k), or y_0 without an r."""

    def leaf(z: Array, y: Array) -> Array:
        new = y.astype(z.dtype)
        if r:
            new += scaled(r[str(y.dtype)], z - new, z.dtype)
        if y.dtype == z.dtype:
            return new
        # If params are replaced before the first step, z_0 is theirs. But z stays where
        # it rounds to y: master weights are made by `init` on float32 params that are
        # cast afterwards.
        return select(at_start & rounds_to(z, y), z, new)

    return map_trained(leaf, z, y)


def _select(y: PyTree, z: PyTree, r: Ratios, at_start: Bool[Array, ""]) -> PyTree:
    """`_rescale`, but z_k itself where r = 1 or, without an r, after the start.

    The predicate is a scalar, so XLA on CPU nearly always runs a loop that does not
    read y, as fast as `optax.sgd`. Reading y took 1.1 to 1.3 times as long, and
    `lax.cond` as well.
    """

    def leaf(z: Array, y: Array, rescaled: Array) -> Array:
        # Not `~at_start`: with one operand more, XLA for TPU gave a kernel smaller
        # windows.
        moves = r[str(y.dtype)] != 1 if r else at_start
        return select(moves, rescaled, z)

    return map_trained(leaf, z, y, _rescale(y, z, r, at_start))


_select_or_rescale = jax.custom_jvp(_select)


@_select_or_rescale.defjvp
def _(
    primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> tuple[PyTree, PyTree]:
    """The derivative of `_rescale`, since z_k depends on r at r = 1 too."""
    _, tangent = jax.jvp(_rescale, primals, tangents)
    return _select_or_rescale(*primals), tangent
