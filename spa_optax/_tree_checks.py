"""What trees of params, updates and states must be."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from spa_optax._trees import (
    by_path,
    is_array,
    is_inexact,
    is_none,
    leaves_with_path,
    scalar_of,
)


def check_kind(name: str, state: Any, kind: type) -> None:
    """Raises ValueError unless a state is of a type, and its count an integer.

    A count that was cast to bfloat16 would stop at 256.
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


def check_paths(name: str, trees: Sequence[PyTree], params: PyTree) -> None:
    """Raises ValueError unless leaves are at paths of `params`, once, in its shapes."""
    shapes = {path: np.shape(leaf) for path, leaf in by_path(params).items()}
    for tree in trees:
        for path, leaf in by_path(tree).items():
            if shapes.pop(path, None) == np.shape(leaf):
                continue
            raise ValueError(
                f"`{name}` must have leaves of the paths and shapes of `params`, each "
                f"once, got {np.shape(leaf)} at {path or 'its root'}. With Flax nnx "
                "`params` are `nnx.state(model, nnx.Param)`."
            )


def check_same_tree(
    name: str, tree: PyTree, like_name: str, like: PyTree, *, same_nodes: bool = True
) -> None:
    """Raises ValueError unless two trees agree in structure and shapes.

    None counts as a leaf of any shape. Without `same_nodes` types of nodes may differ,
    as in nnx.
    """
    leaves, others = dict(leaves_with_path(tree)), dict(leaves_with_path(like))
    in_one = leaves.keys() ^ others.keys()
    if in_one:
        path = min(in_one)
        owner = name if path in leaves else like_name
        raise ValueError(
            f"`{name}` must have the structure of `{like_name}`: only `{owner}` has a "
            f"leaf at {path or 'its root'}"
        )
    nodes = jax.tree.structure(tree, is_leaf=is_none)
    other_nodes = jax.tree.structure(like, is_leaf=is_none)
    if same_nodes and nodes != other_nodes:
        raise ValueError(
            f"`{name}` must have the structure of `{like_name}`, {other_nodes}, got "
            f"{nodes}"
        )
    for path, leaf in leaves.items():
        other = others[path]
        if leaf is None or other is None or np.shape(leaf) == np.shape(other):
            continue
        raise ValueError(
            f"`{name}` must have the shapes of `{like_name}`: {np.shape(leaf)} against "
            f"{np.shape(other)} at {path or 'its root'}"
        )


def check_not_batched(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes, as in a batch of states, or no value."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(counts)):
        raise ValueError(
            f"`{name}` must hold arrays, got shapes: use `jax.eval_shape` on the call"
        )
    if any(jnp.shape(leaf) for leaf in jax.tree.leaves(counts)):
        raise ValueError(
            f"`{name}` must be of one run, got a batch of them: use `jax.vmap`"
        )


def check_params_passed(params: PyTree) -> None:
    """Raises ValueError if an update has no params."""
    if params is None:
        raise ValueError("`params` must be passed to `update`, got None")


def check_params(params: PyTree) -> None:
    """Raises ValueError unless params are arrays; one alone must be floating-point."""
    for path, leaf in leaves_with_path(params):
        if leaf is None or is_inexact(leaf) or (path and is_array(leaf)):
            continue
        if is_array(leaf):
            raise ValueError(
                "`params` must be floating-point arrays, got "
                f"{jnp.result_type(leaf)} at {path or 'its root'}"
            )
        raise ValueError(
            f"`params` must be floating-point arrays, got {type(leaf)!r} at "
            f"{path or 'its root'}. For Equinox use `eqx.filter(model, eqx.is_array)`."
        )
