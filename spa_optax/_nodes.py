"""Matches the nodes of two optimizer states; whatever is not in the registry is refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import PyTree

from spa_optax import _optax_states as known
from spa_optax._trees import find, is_array, replace
from spa_optax._wrappers import Float8MomentumState, PrimalAveragingState, StochasticRoundingState
from spa_optax.diagnostics._track import TrackMomentumState

# The registry, with our own states.
_BASES = {optax.contrib.ScheduleFreeState: "base_optimizer_state", PrimalAveragingState: "base"}
_INNER = {
    **known.INNER,
    optax.contrib.ScheduleFreeState: ("base_optimizer_state",),
    PrimalAveragingState: ("base", "average"),
    StochasticRoundingState: ("base",),
    TrackMomentumState: ("inner",),  # whose gauge starts anew
}
_COUNTS = {**known.COUNTS, StochasticRoundingState: "count"}
_DIRECTIONS = (*known.DIRECTIONS, Float8MomentumState)  # both runs must have the same
# These go on as they are if both runs have the same.
_KEPT = (*_DIRECTIONS, *known.SECOND_MOMENTS, *known.SKIPS_UPDATES, *known.MONITORS)


def map_nodes(function: Callable[[str, Any], Any], state: PyTree, path: str = "") -> PyTree:
    """A state with a function of the path and the value of each node, inner states first.

    Wrappers are passed without the states inside them.
    """

    def replaced(keys: Any, node: Any) -> Any:
        here, fields = path + keystr(keys), _INNER.get(type(node), ())
        inner = {f: map_nodes(function, getattr(node, f), f"{here}.{f}") for f in fields}
        own = function(here, node._replace(**dict.fromkeys(fields)) if fields else node)
        return own._replace(**inner) if fields else own

    return tree_map_with_path(replaced, state, is_leaf=lambda node: hasattr(node, "_fields"))


def is_momentum(node: Any, momentum: Any) -> bool:
    """Whether a node is the one with the momentum; of Schedule-Free there is only one."""
    return node is momentum or isinstance(node, optax.contrib.ScheduleFreeState)


def count_field(node: Any) -> str | None:
    return "count" if getattr(node, "_fields", 0) == ("count",) else _COUNTS.get(type(node))


def nodes_of(name: str, state: PyTree, momentum: Any) -> list[Any]:
    """The nodes of a state, None for the momentum. Raises ValueError at an unknown one."""
    nodes = []

    def add(path: str, node: Any) -> Any:
        is_known = isinstance(node, (*_KEPT, *_INNER)) or count_field(node)
        nodes.append(None if is_momentum(node, momentum) else node)
        if nodes[-1] is not None and not is_known and any(map(is_array, jax.tree.leaves(node))):
            at = f"`{type(node).__name__}` at {path or 'its root'}"
            raise ValueError(f"`{name}` must hold only states that `convert` knows, got a {at}")
        return node

    map_nodes(add, state)
    return nodes


def signature(nodes: list[Any]) -> Any:
    return jax.tree.structure(nodes), list(map(np.shape, jax.tree.leaves(nodes)))


def base_of(state: PyTree) -> PyTree:
    """The state of a base optimizer, if there is one."""
    return next((getattr(node, _BASES[type(node)]) for node in find(state, tuple(_BASES))), None)


def with_base(state: PyTree, base: PyTree) -> PyTree:
    return replace(state, tuple(_BASES), lambda node: node._replace(**{_BASES[type(node)]: base}))


def matched(old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
    """For each new node the old one that goes on in its place or None, and the other old ones."""
    kept, others = [None] * len(new), []
    for kind in _KEPT:
        olds = [node for node in old if type(node) is kind]
        places = [place for place, node in enumerate(new) if type(node) is kind]
        if signature(olds) == signature([new[place] for place in places]):
            for place, node in zip(places, olds, strict=True):
                kept[place] = node
        elif kind in _DIRECTIONS:
            raise ValueError(
                f"`into` must have the other directions of `old_state`, in the same shapes, got"
                f" {len(places)} `{kind.__name__}` for {len(olds)}"
            )
        else:
            others += olds
    return kept, others
