"""Matches the nodes of two optimizer states; whatever is not in the registry is refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import PyTree

from spa_optax._optax_states import (
    COUNTS,
    DIRECTIONS,
    INNER,
    MONITORS,
    SECOND_MOMENTS,
    SKIPS_UPDATES,
)
from spa_optax._trees import find, is_array, replace
from spa_optax._wrappers import Float8MomentumState, PrimalAveragingState, StochasticRoundingState
from spa_optax.diagnostics._track import TrackMomentumState

# The registry, with our own states.
_BASES = {optax.contrib.ScheduleFreeState: "base_optimizer_state", PrimalAveragingState: "base"}
INNER_STATES = {
    **INNER,
    optax.contrib.ScheduleFreeState: ("base_optimizer_state",),
    PrimalAveragingState: ("base", "average"),
    StochasticRoundingState: ("base",),
    TrackMomentumState: ("inner",),  # whose gauge starts anew
}
COUNT_FIELDS = {**COUNTS, StochasticRoundingState: "count"}
_DIRECTIONS = (*DIRECTIONS, Float8MomentumState)  # both runs must have the same
# What goes on as it is if both runs have the same.
_KEPT = (*_DIRECTIONS, *SECOND_MOMENTS, *SKIPS_UPDATES, *MONITORS)


def map_nodes(function: Callable[[str, Any], Any], state: PyTree, path: str = "") -> PyTree:
    """A state with a function of the path and the value of each node, inner states first.

    Wrappers are passed without the states inside them.
    """

    def node(keys: Any, of: Any) -> Any:
        here = path + keystr(keys)
        fields = INNER_STATES.get(type(of), ())
        inner = {f: map_nodes(function, getattr(of, f), f"{here}.{f}") for f in fields}
        own = function(here, of._replace(**dict.fromkeys(fields)) if fields else of)
        return own._replace(**inner) if fields else own

    return tree_map_with_path(node, state, is_leaf=lambda of: hasattr(of, "_fields"))


def is_momentum(of: Any, node: Any) -> bool:
    """Whether a node is the one with the momentum; of Schedule-Free there is only one."""
    return of is node or isinstance(of, optax.contrib.ScheduleFreeState)


def count_field(of: Any) -> str | None:
    return "count" if getattr(of, "_fields", 0) == ("count",) else COUNT_FIELDS.get(type(of))


def nodes_of(name: str, state: PyTree, momentum: Any) -> list[Any]:
    """The nodes of a state, None for the momentum. Raises ValueError at an unknown one."""
    nodes = []

    def add(path: str, of: Any) -> Any:
        is_known = isinstance(of, (*_KEPT, *INNER_STATES)) or count_field(of)
        is_known = is_known or is_momentum(of, momentum)
        if not is_known and any(map(is_array, jax.tree.leaves(of))):
            at = f"`{type(of).__name__}` at {path or 'its root'}"
            raise ValueError(f"`{name}` must hold only states that `convert` knows, got a {at}")
        nodes.append(None if is_momentum(of, momentum) else of)
        return of

    map_nodes(add, state)
    return nodes


def signature(nodes: list[Any]) -> Any:
    return jax.tree.structure(nodes), list(map(np.shape, jax.tree.leaves(nodes)))


def base_of(state: PyTree) -> PyTree:
    """The state of a base optimizer, if there is one."""
    return next((getattr(of, _BASES[type(of)]) for of in find(state, tuple(_BASES))), None)


def with_base(state: PyTree, base: PyTree) -> PyTree:
    return replace(state, tuple(_BASES), lambda of: of._replace(**{_BASES[type(of)]: base}))


def matched(old: list[Any], new: list[Any]) -> tuple[dict[int, Any], list[Any]]:
    """The nodes of `old_state` that go on as they are, by their places in `into`, and the rest."""
    kept, rest = {}, []
    for kind in _KEPT:
        olds = [of for of in old if type(of) is kind]
        places = [place for place, of in enumerate(new) if type(of) is kind]
        if signature(olds) == signature([new[place] for place in places]):
            kept |= dict(zip(places, olds, strict=True))
        elif kind in _DIRECTIONS:
            raise ValueError(
                f"`into` must have the other directions of `old_state`, in the same shapes, got"
                f" {len(places)} `{kind.__name__}` for {len(olds)}"
            )
        else:
            rest += olds
    return kept, rest
