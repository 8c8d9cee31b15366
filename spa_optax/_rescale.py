"""z_k ← y_k + r (z_k − y_k), and z_0 = y_0, in the form that XLA compiles best."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from spa_optax._precision import rounds_to, scaled
from spa_optax._storage import Form
from spa_optax._trees import map_trained
from spa_optax._xla import select

Ratio = tuple[Float[Array, ""], Float[Array, ""]]  # r as a fraction
Ratios = dict[str, Float[Array, ""]]  # r for each dtype of y; empty: 1


def ratios(r: Ratio | None, params: PyTree, form: Form, at_start: Bool[Array, ""]) -> Ratios:
    """The r for each precision of z − y; 0 at the start and where momentum restarts.

    Rescaling multiplies the rounding error of y in z − y by r. At r = 1/√eps that would cost half
    the digits of y, so momentum restarts from 0 instead. A stored difference has no such error.
    """
    if r is None:
        return {}
    (numerator, denominator), result = r, {}
    dtypes = map_trained(lambda y: "float32" if form.follows_params else str(y.dtype), params)
    # Sorted, since every process must compile the same program.
    for dtype in sorted(set(jax.tree.leaves(dtypes))):
        restarts = at_start | (numerator * float(jnp.finfo(dtype).eps) ** 0.5 > denominator)
        # With the division last, XLA on CPU does it once, not in every kernel.
        result[dtype] = jnp.where(restarts, 0, numerator) / denominator
    return result


def rescale(form: Form, y: PyTree, z: PyTree, r: Ratios, at_start: Bool[Array, ""]) -> PyTree:
    """y_k + r (z_k − y_k), or y_0; of a difference, r (z_k − y_k)."""
    if not form.follows_params:
        return (_select_or_rescale if r else _select)(y, z, r, at_start)
    return map_trained(lambda d: scaled(r["float32"], d, d.dtype), z) if r else z


def _rescale(y: PyTree, z: PyTree, r: Ratios, at_start: Bool[Array, ""]) -> PyTree:
    """y_k + r (z_k − y_k), or y_0 without an r."""

    def leaf(z: Array, y: Array) -> Array:
        new = y.astype(z.dtype)
        if r:
            new += scaled(r[str(y.dtype)], z - new, z.dtype)
        if y.dtype == z.dtype:
            return new
        # Params may be replaced between `init` and the first step: z_0 then comes from the new
        # ones. But z stays where it rounds to y, since master weights are made by calling `init` on
        # float32 params that are cast afterwards.
        return select(at_start & rounds_to(z, y), z, new)

    return map_trained(leaf, z, y)


def _select(y: PyTree, z: PyTree, r: Ratios, at_start: Bool[Array, ""]) -> PyTree:
    """`_rescale`, but z_k itself where r = 1 or, without an r, after the start.

    The predicate is a scalar, so XLA on CPU makes two loops and nearly always runs the one that
    does not read y. It is as fast as `optax.sgd`; reading y took 1.1 to 1.3 times as long.
    `lax.cond` is as fast if everything is donated, but otherwise copies z (1.23 to 1.30), and on a
    GPU the host would wait for it.
    """

    def leaf(z: Array, y: Array, rescaled: Array) -> Array:
        # Not `~at_start`: with one operand more, XLA for TPU gave a kernel smaller windows.
        moves = r[str(y.dtype)] != 1 if r else at_start
        return select(moves, rescaled, z)

    return map_trained(leaf, z, y, _rescale(y, z, r, at_start))


_select_or_rescale = jax.custom_jvp(_select)


@_select_or_rescale.defjvp
def _(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """The derivative of `_rescale`, since z_k depends on r at r = 1 too."""
    _, tangent = jax.jvp(_rescale, primals, tangents)
    return _select_or_rescale(*primals), tangent
