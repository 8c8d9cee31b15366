"""Matches the nodes of two optimizer states. What both hold goes on as it is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from spa_optax._optax_states import SECOND_MOMENTS, SKIPS_UPDATES
from spa_optax._trees import kinds_of
from spa_optax._wrappers import PrimalAveragingState, StochasticRoundingState
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
    PrimalAveragingState: ("base average", None),
    StochasticRoundingState: ("base", "count"),
    TrackMomentumState: ("inner", None),
}
_MAY_DIFFER = (*SECOND_MOMENTS, *SKIPS_UPDATES)


def map_nodes(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """A state with a function of each node, inner states first.

    Wrappers are passed without the states inside them.
    """

    def replaced(node: Any) -> Any:
        fields = _WRAPPERS.get(type(node), ("", None))[0].split()
        inner = {field: map_nodes(function, getattr(node, field)) for field in fields}
        own = function(node._replace(**dict.fromkeys(fields)) if fields else node)
        return own._replace(**inner) if fields else own

    return jax.tree.map(replaced, state, is_leaf=lambda node: hasattr(node, "_fields"))


def nodes_of(name: str, state: PyTree, momentum: type) -> list[Any]:
    """The nodes of a state, without the momentum. Raises ValueError if that is out of reach."""
    nodes: list[Any] = []
    map_nodes(lambda node: nodes.append(node) or node, state)
    if momentum not in map(type, nodes):
        rule = "must hold its momentum in wrappers that `convert` knows"
        raise ValueError(f"`{name}` {rule}, got one in {kinds_of(state)}")
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
            raise ValueError(
                "`into` must have the other states of `old_state`, in the same shapes, got"
                f" {len(news)} `{kind.__name__}` for {len(olds)}"
            )
    return kept, dropped, added
