"""Matches the nodes of two optimizer states. What both hold goes on as it is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import PyTree

from spa_optax import _optax_states as of_optax, _trees as trees, _wrappers as wrappers
from spa_optax._core import SPAState
from spa_optax.diagnostics._track import TrackMomentumState

# Wrappers: their fields with the states of what they wrap, and the one that counts the steps taken.
# Other fields are of `into`: injected hyper-parameters, gauges.
_WRAPPERS: dict[Any, tuple[str, str | None]] = {
    optax.MaskedState: ("inner_state", None),
    optax.PartitionState: ("inner_states", None),
    optax.InjectHyperparamsState: ("inner_state", "count"),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states inner_state", "count"),
    optax.MultiStepsState: ("inner_opt_state", "gradient_step"),
    optax.ApplyIfFiniteState: ("inner_state", None),
    optax.ConditionallyTransformState: ("inner_state", "step"),
    optax.ConditionallyMaskState: ("inner_state", "step"),
    optax.contrib.ScheduleFreeState: ("base_optimizer_state", None),
    wrappers.PrimalAveragingState: ("base average", None),
    wrappers.StochasticRoundingState: ("base", "count"),
    TrackMomentumState: ("inner", None),
}
# Those of a base optimizer, and the field that holds its state.
_BASES = {kind: of[0].split()[0] for kind, of in _WRAPPERS.items() if of[0].startswith("base")}
_MAY_DIFFER = (*of_optax.SECOND_MOMENTS, *of_optax.SKIPS_UPDATES)
_KNOWN = (*of_optax.MOMENTUM, *of_optax.DIRECTIONS, *of_optax.MONITORS)
_KNOWN += (*_WRAPPERS, *_MAY_DIFFER, SPAState, wrappers.Float8MomentumState)


def map_nodes(function: Callable[[str, Any], Any], state: PyTree, path: str = "") -> PyTree:
    """A state with a function of the path and the value of each node, inner states first.

    Wrappers are passed without the states inside them.
    """

    def replaced(keys: Any, node: Any) -> Any:
        here, fields = path + keystr(keys), _WRAPPERS.get(type(node), ("", None))[0].split()
        inner = {f: map_nodes(function, getattr(node, f), f"{here}.{f}") for f in fields}
        own = function(here, node._replace(**dict.fromkeys(fields)) if fields else node)
        return own._replace(**inner) if fields else own

    return tree_map_with_path(replaced, state, is_leaf=lambda node: hasattr(node, "_fields"))


def nodes_of(name: str, state: PyTree, momentum: type) -> list[Any]:
    """The nodes of a state, without the momentum.

    Raises ValueError if that is out of reach, and at a state that is not known, which may depend on
    anything. Inside a base optimizer any may go on.
    """

    def check(path: str, node: Any) -> Any:
        is_known = isinstance(node, _KNOWN) or count_field(type(node))
        if not is_known and any(map(trees.is_array, jax.tree.leaves(node))):
            got = f"a `{type(node).__name__}` at {path or 'its root'}"
            raise ValueError(f"`{name}` must hold only states that `convert` knows, got {got}")
        return node

    without_base = lambda node: node._replace(**{_BASES[type(node)]: None})
    map_nodes(check, trees.replace(state, tuple(_BASES), without_base))
    nodes: list[Any] = []
    map_nodes(lambda _, node: nodes.append(node) or node, state)
    if momentum not in map(type, nodes):
        rule = "must hold its momentum in wrappers that `convert` knows"
        raise ValueError(f"`{name}` {rule}, got one in {trees.kinds_of(state)}")
    return [node for node in nodes if type(node) is not momentum]


def kind_of(node: Any) -> Any:
    """The type of a node; one for all arrays, JAX's and NumPy's."""
    return type(node) if hasattr(node, "_fields") else jax.Array


def count_field(kind: Any) -> str | None:
    """The field that counts the steps taken. States with `count` alone belong to schedules."""
    is_of_schedule = getattr(kind, "_fields", ()) == ("count",)
    return "count" if is_of_schedule else _WRAPPERS.get(kind, ("", None))[1]


def matched(old: list[Any], new: list[Any]) -> tuple[dict[Any, list[Any]], list[Any], list[Any]]:
    """By their kind, the old nodes that go on; and other old and new ones, which may differ."""
    kept, dropped, added = {}, [], []
    form = lambda nodes: (jax.tree.structure(nodes), list(map(np.shape, jax.tree.leaves(nodes))))
    for kind in dict.fromkeys(map(kind_of, [*old, *new])):
        olds, news = ([node for node in of if kind_of(node) is kind] for of in (old, new))
        if kind not in _MAY_DIFFER and (kind in _WRAPPERS or count_field(kind)):
            continue
        if form(olds) == form(news):
            kept[kind] = olds
        elif kind in _MAY_DIFFER:
            dropped, added = dropped + olds, added + news
        elif jax.tree.leaves([olds, news]):
            rule = "must have the other states of `old_state`, in the same shapes"
            got = f"{len(news)} `{kind.__name__}` for {len(olds)}"
            raise ValueError(f"`into` {rule}, got {got}")
    return kept, dropped, added
