"""Finds, matches and replaces the nodes and leaves of trees."""

import reprlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

is_none = lambda leaf: leaf is None  # optax's mark for a parameter without a gradient


def is_array(x: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return hasattr(x, "dtype") or isinstance(x, (bool, int, float, complex))


def is_trained(x: Any) -> bool:
    """Whether a leaf is a real or complex floating-point array; other leaves are not
    trained.
    """
    return is_array(x) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def map_trained(function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """`jax.tree.map` over floating-point leaves that all other trees have too; None
    elsewhere.
    """
    has_all = lambda first, *rest: is_trained(first) and not any(map(is_none, rest))
    leaf = lambda *leaves: function(*leaves) if has_all(*leaves) else None
    return jax.tree.map(leaf, tree, *trees, is_leaf=is_none)


def fill_none(tree: PyTree, otherwise: PyTree) -> PyTree:
    """A tree with leaves from another where it has None."""
    choose = lambda leaf, other: other if leaf is None or other is None else leaf
    return jax.tree.map(choose, tree, otherwise, is_leaf=is_none)


def unzip(tree: PyTree, kind: type) -> list[PyTree]:
    """For each field of a kind of leaf, a NamedTuple, the tree of that field."""

    def is_pair(node: Any) -> bool:
        return isinstance(node, kind)

    def field_of(name: str) -> PyTree:
        return jax.tree.map(lambda pair: getattr(pair, name), tree, is_leaf=is_pair)

    return [field_of(name) for name in kind._fields]


def scalar_of(value: PyTree) -> Array:
    """A scalar of a state as an array. Flax nnx keeps it in a variable."""
    return jnp.asarray(*jax.tree.leaves(value))


def copy(state: PyTree) -> PyTree:
    """A state that shares no buffer with another, so that both can be donated."""
    return jax.tree.map(
        lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state
    )


def find(state: PyTree, kinds: Any) -> list[Any]:
    """The nodes of some kinds in a state."""
    is_kind = lambda node: isinstance(node, kinds)
    return [node for node in jax.tree.leaves(state, is_leaf=is_kind) if is_kind(node)]


def find_one(state: PyTree, name: str, *kinds: Any) -> Any:
    """The one node of the first of some kinds that a state holds."""
    found = next(filter(None, (find(state, kind) for kind in kinds)), [])
    if len(found) != 1:
        names = " or ".join(f"`{kind.__name__}`" for kind in jax.tree.leaves(kinds))
        raise ValueError(
            f"`{name}` must hold one {names}, got {len(found) or kinds_of(state)}"
        )
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


def check_kind(name: str, state: Any, kind: type) -> None:
    """Raises ValueError unless a state is of a type and not cast: in bfloat16 256 + 1
    is 256.
    """
    if not isinstance(state, kind):
        raise ValueError(
            f"`{name}` must be of type `{kind.__name__}`, got {type(state).__name__}"
        )
    dtype = scalar_of(state._asdict().get("count", 0)).dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"`{name}.count` must be an integer, whatever the params, got {dtype}"
        )


def leaves_with_path(tree: PyTree) -> list[tuple[str, Any]]:
    """The leaves, None among them, with their paths as strings."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_none)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves that are not None, by their paths; numbers as arrays."""
    leaves = ((path, leaf) for path, leaf in leaves_with_path(tree) if leaf is not None)
    return {
        path: jnp.asarray(leaf) if is_array(leaf) else leaf for path, leaf in leaves
    }


def with_leaves(node: PyTree, leaves: PyTree) -> PyTree:
    """New leaves in the structure (under Flax nnx, the variables) and the dtypes of a
    node.
    """

    def cast(leaf: Any, old: Any) -> Any:
        if not is_array(old) or jnp.issubdtype(
            jnp.result_type(old), jax.dtypes.prng_key
        ):
            return leaf
        leaf = leaf if jnp.iscomplexobj(old) else jnp.real(leaf)
        return jnp.asarray(leaf, jnp.asarray(old).dtype)

    pairs = zip(jax.tree.leaves(leaves), jax.tree.leaves(node), strict=True)
    return jax.tree.unflatten(jax.tree.structure(node), [cast(*pair) for pair in pairs])


def check_paths(name: str, trees: Sequence[PyTree], params: PyTree) -> None:
    """Raises ValueError unless each leaf's path occurs once, and in `params`, with its
    shape.
    """
    shapes = {path: np.shape(leaf) for path, leaf in leaves_with_path(params)}
    for key, leaf in (item for tree in trees for item in by_path(tree).items()):
        if shapes.pop(key, None) != np.shape(leaf):
            hint = (
                "; `params` are `nnx.state(model, nnx.Param)`"
                if key.endswith(".value")
                else ""
            )
            rule = "leaves of the paths and shapes of `params`, or of some, each once"
            got = f"{np.shape(leaf)} at {key or 'its root'}{hint}"
            raise ValueError(f"`{name}` must have {rule}, got {got}")


def check_same_tree(
    name: str, tree: PyTree, like_name: str, like: PyTree, *, same_nodes: bool = True
) -> None:
    """Raises ValueError, naming what differs, unless two trees agree in structure and
    shapes.

    None counts as a leaf of any shape. Without `same_nodes` types of nodes may differ,
    as in nnx.
    """
    leaves, others = dict(leaves_with_path(tree)), dict(leaves_with_path(like))
    nodes, other_nodes = (jax.tree.structure(t, is_leaf=is_none) for t in (tree, like))
    in_both = [
        p
        for p, leaf in leaves.items()
        if leaf is not None and others.get(p) is not None
    ]
    rule = "structure"
    if odd := sorted(leaves.keys() ^ others.keys()):
        owner = name if odd[0] in leaves else like_name
        found = f"only `{owner}` has a leaf at {odd[0] or 'its root'}"
    elif same_nodes and nodes != other_nodes:
        found = _first_difference(nodes, other_nodes)
    elif odd := [
        path for path in in_both if np.shape(leaves[path]) != np.shape(others[path])
    ]:
        shapes = f"{np.shape(leaves[odd[0]])} against {np.shape(others[odd[0]])}"
        rule, found = "shapes", f"{shapes} at {odd[0] or 'its root'}"
    else:
        return
    raise ValueError(f"`{name}` must have the {rule} of `{like_name}`: {found}")


def _first_difference(nodes: Any, others: Any) -> str:
    """The first node that differs between two trees whose leaves have the same
    paths.
    """
    (kind, kept), (other_kind, other_kept) = nodes.node_data(), others.node_data()
    if kind is not other_kind:
        return f"a {kind.__name__} against a {other_kind.__name__}"
    if kept == other_kept:  # the metadata of a node, such as the keys of a dict
        for pair in zip(nodes.children(), others.children(), strict=False):
            if pair[0] != pair[1]:
                return _first_difference(*pair)
    return (
        f"{reprlib.repr(kept)} against {reprlib.repr(other_kept)} in a {kind.__name__}"
    )
