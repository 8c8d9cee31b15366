"""Finds, matches and replaces the nodes and leaves of trees."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree


def is_none(leaf: object) -> bool:
    """Whether a leaf is None, optax's mark for a parameter without a gradient."""
    return leaf is None


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def is_float(x: Any) -> bool:
    """Whether a leaf is a real or complex floating-point array; other leaves are not trained."""
    return is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def map_floats(
    function: Callable[..., Any], tree: PyTree, *trees: PyTree, otherwise: PyTree = None
) -> PyTree:
    """`jax.tree.map` over floating-point leaves of the first tree that all others have too.

    Integers, and leaves that are None in one of the trees, come from `otherwise`.
    """

    def leaf(first: Any, other: Any, *rest: Any) -> Any:
        is_trained = is_float(first) and not any(map(is_none, rest))
        return function(first, *rest) if is_trained else other

    if otherwise is None:
        otherwise = jax.tree.map(lambda _: None, tree, is_leaf=is_none)
    return jax.tree.map(leaf, tree, otherwise, *trees, is_leaf=is_none)


def scalar_of(value: PyTree) -> Array:
    """A scalar of a state as an array. Flax nnx keeps it in a variable."""
    return jnp.asarray(*jax.tree.leaves(value))


def behind_a_barrier(tree: PyTree) -> PyTree:
    """The same arrays, but XLA treats them as different ones."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = iter(jax.lax.optimization_barrier([leaf for leaf in leaves if is_array(leaf)]))
    return structure.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])


# ------------------------------------------------------------------------------------------- nodes


def find(state: PyTree, kinds: Any) -> list[Any]:
    """The nodes of some kinds in a state."""
    is_kind = lambda node: isinstance(node, kinds)
    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def only(state: PyTree, kind: Any, name: str) -> Any:
    """The one node of a kind in a state."""
    found = find(state, kind)
    if len(found) != 1:
        is_transformation = isinstance(state, optax.GradientTransformation)
        got = "a transformation, not its state" if is_transformation else len(found)
        raise ValueError(f"`{name}` must hold one `{kind.__name__}`, got {got}")
    return found[0]


def replace(state: PyTree, kinds: Any, new: Callable[[Any], Any]) -> PyTree:
    """A state with the nodes of some kinds replaced."""
    is_kind = lambda node: isinstance(node, kinds)
    return jax.tree.map(lambda n: new(n) if is_kind(n) else n, state, is_leaf=is_kind)


def kinds_of(state: PyTree) -> str:
    """The names of the outermost nodes of a state that are not plain tuples."""
    is_node = lambda node: hasattr(node, "_fields") or not isinstance(node, tuple)
    names = {type(node).__name__ for node in jax.tree.leaves(state, is_leaf=is_node)}
    return ", ".join(sorted(names)) or "none"


# ------------------------------------------------------------------------------------------- leaves


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves, by their paths as strings; numbers as arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    array = lambda leaf: jnp.asarray(leaf) if is_array(leaf) else leaf
    return {jax.tree_util.keystr(path): array(leaf) for path, leaf in leaves}


def like(node: PyTree, leaves: PyTree) -> PyTree:
    """New leaves in the structure (under Flax nnx, the variables) and the dtypes of a node."""

    def cast(leaf: Any, old: Any) -> Array:
        dtype = jnp.asarray(old).dtype
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        return (jnp.asarray(leaf) if is_complex else jnp.real(leaf)).astype(dtype)

    new = map(cast, jax.tree.leaves(leaves), jax.tree.leaves(node))
    return jax.tree.unflatten(jax.tree.structure(node), new)


def copy(state: PyTree) -> PyTree:
    """A state that shares no buffer with another, so that both can be donated."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def keys_of(name: str, trees: Sequence[PyTree], params: PyTree) -> list[list[str]]:
    """The path of each leaf of each tree, as a string.

    Raises ValueError unless each occurs once and is in `params`, with the same shape. Node types
    may differ, as under Flax nnx.
    """
    shapes = {path: np.shape(leaf) for path, leaf in leaves_with_path(params)}
    keys = []
    for tree in trees:
        keys.append([])
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            key = jax.tree_util.keystr(path)
            if shapes.pop(key, None) != np.shape(leaf):
                found = f"{np.shape(leaf)} at {key or 'its root'}"
                if key.endswith(".value"):
                    found += "; of a Flax nnx model `params` are `nnx.state(model, nnx.Param)`"
                raise ValueError(
                    f"`{name}` must have leaves of the paths and shapes of `params`, or of some of"
                    f" them, each once, got {found}"
                )
            keys[-1].append(key)
    return keys


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves, None among them, with their paths as strings."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_none)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def check_same_tree(
    name: str, tree: PyTree, like_name: str, like: PyTree, *, same_nodes: bool = True
) -> None:
    """Raises ValueError, naming what differs, unless two trees agree in structure and shapes.

    None counts as a leaf of any shape. Without `same_nodes` only paths must agree, not node types:
    the optimizer state of Flax nnx holds variables of another type than the params.
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_none)
    like_leaves, like_structure = jax.tree.flatten(like, is_leaf=is_none)
    if structure != like_structure:
        paths, like_paths = ({path for path, _ in leaves_with_path(t)} for t in (tree, like))
        if odd := sorted(paths ^ like_paths):
            owner = name if odd[0] in paths else like_name
            what = f"only `{owner}` has a leaf at {odd[0] or 'its root'}"
        else:
            what = _first_difference(structure, like_structure)
        if odd or same_nodes:
            raise ValueError(f"`{name}` must have the structure of `{like_name}`: {what}")
    for i, (leaf, other) in enumerate(zip(leaves, like_leaves, strict=True)):
        if leaf is not None and other is not None and np.shape(leaf) != np.shape(other):
            at = leaves_with_path(tree)[i][0] or "its root"
            what = f"{np.shape(leaf)} against {np.shape(other)} at {at}"
            raise ValueError(f"`{name}` must have the shapes of `{like_name}`: {what}")


def _first_difference(structure: Any, like: Any) -> str:
    """The first node that differs between two trees whose leaves have the same paths."""
    if structure.node_data() == like.node_data():
        for child, like_child in zip(structure.children(), like.children(), strict=True):
            if child != like_child:
                return _first_difference(child, like_child)
    # A node has a type and metadata, such as the keys of a dict.
    (kind, kept), (like_kind, like_kept) = structure.node_data(), like.node_data()
    if kind is like_kind:
        return reprlib.repr(kept) + " against " + reprlib.repr(like_kept) + f" in a {kind.__name__}"
    return f"a {kind.__name__} against a {like_kind.__name__}"
