"""Trees of arrays, their nodes, leaves and dtypes; and scalars."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

Scalar = Float[Array, ""]
Flag = Bool[Array, ""]
Count = Int[Array, ""]


def is_none(leaf: Any) -> bool:
    """Whether a leaf is None, optax's mark for a parameter without a gradient."""
    return leaf is None


def is_array_like(leaf: Any) -> bool:
    """Whether a leaf is an array, a number or a `ShapeDtypeStruct`."""
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is a real or complex floating-point array."""
    return is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def map_inexact(function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """`jax.tree.map` over floating-point leaves that all trees have; None elsewhere."""

    def map_leaf(first, *others):
        if not is_inexact(first) or any(map(is_none, others)):
            return None
        return function(first, *others)

    return jax.tree.map(map_leaf, tree, *trees, is_leaf=is_none)


def fill_none(tree: PyTree, otherwise: PyTree) -> PyTree:
    """A tree whose None leaves are taken from `otherwise`; None where that has None."""

    def choose(leaf, other):
        return other if leaf is None or other is None else leaf

    return jax.tree.map(choose, tree, otherwise, is_leaf=is_none)


def as_scalar(value: PyTree) -> Array:
    """A scalar of a state as an array."""
    (leaf,) = jax.tree.leaves(value)  # Flax nnx keeps it in a variable
    return jnp.asarray(leaf)


def is_known_true(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        return bool(condition)
    return False


def place(path: str) -> str:
    """A path in words, for messages."""
    return path or "its root"


def field_of(state: Any, name: str, default: Any) -> Any:
    """A field of a named tuple, or the default where it has none.

    `getattr` does not do: every tuple has a method `count`.
    """
    return state._asdict().get(name, default)


def copy_arrays(tree: PyTree) -> PyTree:
    """A tree that shares no buffer with another, so that both can be donated."""
    return jax.tree.map(
        lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree
    )


def find_nodes(tree: PyTree, node_types: Any) -> list[Any]:
    """The nodes of a type, or of some types, anywhere in a tree."""

    def is_wanted(node):
        return isinstance(node, node_types)

    return list(filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)))


def replace_nodes(
    tree: PyTree, node_types: Any, function: Callable[[Any], Any]
) -> PyTree:
    """A tree with the nodes of a type, or of some types, replaced."""

    def is_wanted(node):
        return isinstance(node, node_types)

    return jax.tree.map(
        lambda node: function(node) if is_wanted(node) else node,
        tree,
        is_leaf=is_wanted,
    )


def node_type_names(state: PyTree) -> str:
    """The names of the outermost nodes of a state that are not plain tuples."""
    nodes = jax.tree.leaves(
        state,
        is_leaf=lambda node: hasattr(node, "_fields") or not isinstance(node, tuple),
    )
    return ", ".join(sorted({type(node).__name__ for node in nodes})) or "none"


def leaves_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves, None among them, in order, by their paths as strings."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_none)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def arrays_by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves that are not None, in order, by their paths; numbers as arrays."""
    return {
        path: jnp.asarray(leaf) if is_array_like(leaf) else leaf
        for path, leaf in leaves_by_path(tree).items()
        if leaf is not None
    }


def replace_leaves(node: PyTree, leaves: PyTree) -> PyTree:
    """A node with new leaves in its order and dtypes. Variables of nnx stay."""

    def cast(leaf, old):
        if not is_array_like(old):
            return leaf
        if jnp.issubdtype(jnp.result_type(old), jax.dtypes.prng_key):
            return leaf
        leaf = leaf if jnp.iscomplexobj(old) else jnp.real(leaf)
        return jnp.asarray(leaf, jnp.asarray(old).dtype)

    pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(node), strict=True)
    return jax.tree.unflatten(jax.tree.structure(node), [cast(*pair) for pair in pairs])


def has_narrow_leaves(tree: PyTree) -> bool:
    """Whether a tree has non-empty floating-point leaves of 16 bits or fewer."""
    return any(
        jnp.result_type(leaf).itemsize <= 2 and 0 not in np.shape(leaf)
        for leaf in filter(is_inexact, jax.tree.leaves(tree))
    )


def scalar_dtype(params: PyTree) -> Any:
    """The dtype of a state's scalars: float64 if any parameter is, else float32."""
    dtype = compute_dtype(*filter(is_inexact, jax.tree.leaves(params)))
    return jnp.finfo(dtype).dtype  # of complex numbers the real one


def compute_dtype(*arrays: Any) -> Any:
    """The dtype to compute in: of the widest array or dtype, and at least float32."""
    dtypes = [
        array.dtype if hasattr(array, "dtype") else jnp.result_type(array)
        for array in arrays
    ]
    with jax.numpy_dtype_promotion("standard"):  # whatever the user has set
        return jnp.result_type(
            *(dtype for dtype in dtypes if dtype.itemsize > 2), jnp.float32
        )


def widen(tree: PyTree) -> PyTree:
    """Floating-point leaves in 32 bits or more, and None for others."""

    def widen_leaf(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, compute_dtype(leaf))
        return jnp.asarray(leaf, compute_dtype(leaf))

    return map_inexact(widen_leaf, tree)


def as_dtype(tree: PyTree, dtype: Any) -> PyTree:
    """A tree of numbers in a dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
