"""The dtypes of params and of a state's scalars, and the dtype to compute in."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ._trees import is_inexact, map_inexact


def has_narrow_leaves(tree: PyTree) -> bool:
    """Whether a tree has trained leaves of 16 bits or fewer, other than empty ones."""
    trained = filter(is_inexact, jax.tree.leaves(tree))
    return any(
        jnp.result_type(x).itemsize <= 2 and 0 not in np.shape(x) for x in trained
    )


def scalar_dtype(params: PyTree) -> Any:
    """The dtype of a state's scalars: float64 if any parameter is, else float32."""
    trained = filter(is_inexact, jax.tree.leaves(params))
    return jnp.finfo(wide_dtype(*trained)).dtype  # of complex numbers the real one


def wide_dtype(*arrays: Any) -> Any:
    """The dtype to compute in: that of the widest array, and at least float32."""
    dtypes = [x.dtype if hasattr(x, "dtype") else jnp.result_type(x) for x in arrays]
    with jax.numpy_dtype_promotion("standard"):  # whatever the user has set
        return jnp.result_type(*(d for d in dtypes if d.itemsize > 2), jnp.float32)


def widen(tree: PyTree) -> PyTree:
    """Floating-point leaves in 32 bits or more, and None for others."""

    def widen_leaf(x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, wide_dtype(x))
        return jnp.asarray(x, wide_dtype(x))

    return map_inexact(widen_leaf, tree)


def as_dtype(tree: PyTree, dtype: Any) -> PyTree:
    """Numbers in a dtype. Flags stay."""
    return jax.tree.map(lambda x: x if x.dtype == bool else x.astype(dtype), tree)
