"""Matches the nodes of two optimizer states; whatever is not in these tables is refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import PyTree

from spa_optax._optax_states import MOMENTUM, SECOND_MOMENTS, SKIPS_UPDATES
from spa_optax._trees import find, is_array, replace
from spa_optax._wrappers import Float8MomentumState, PrimalAveragingState, StochasticRoundingState
from spa_optax.diagnostics._track import TrackMomentumState

# Wrappers: their fields with the states of what they wrap, and the one that counts the steps taken.
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
    TrackMomentumState: ("inner", None),  # whose gauge starts anew
}
_BASES = {optax.contrib.ScheduleFreeState: "base_optimizer_state", PrimalAveragingState: "base"}
# Some are newer than the oldest Optax.
_named = lambda module, names: [getattr(module, n) for n in names.split() if hasattr(module, n)]
# Transforms whose states depend on the incoming updates alone, not on where the params are.
_DIRECTIONS = (
    *MOMENTUM,
    Float8MomentumState,
    *_named(optax, "AddNoiseState ApplyEvery ScaleByAdaDeltaState ScaleByAdanState"),
    *_named(optax, "ScaleByAmsgradState ScaleByBeliefState ScaleByNovogradState ScaleByRmsState"),
    *_named(optax, "ScaleByRpropState ScaleByRssState ScaleByRStdDevState ScaleBySM3State"),
    *_named(optax.contrib, "DifferentiallyPrivateAggregateState ReduceLROnPlateauState"),
    *_named(optax.contrib, "ScaleByAdemamixState ScaleBySimplifiedAdEMAMixState"),
)
_MONITORS = _named(optax, "MonitorState SnapshotState ZeroNansState")  # no update depends on them
# These go on as they are if both runs have the same; both must have the same directions.
_KEPT = (*_DIRECTIONS, *SECOND_MOMENTS, *SKIPS_UPDATES, *_MONITORS)


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


def count_field(node: Any) -> str | None:
    """The field that counts the steps taken. States with `count` alone belong to schedules."""
    is_of_schedule = getattr(node, "_fields", 0) == ("count",)
    return "count" if is_of_schedule else _WRAPPERS.get(type(node), ("", None))[1]


def nodes_of(name: str, state: PyTree, momentum: type) -> list[Any]:
    """The nodes of a state, without the momentum. Raises ValueError at an unknown one."""
    nodes = []

    def add(path: str, node: Any) -> Any:
        is_known = type(node) in (momentum, *_KEPT, *_WRAPPERS) or count_field(node)
        if not is_known and any(map(is_array, jax.tree.leaves(node))):
            at = f"`{type(node).__name__}` at {path or 'its root'}"
            raise ValueError(f"`{name}` must hold only states that `convert` knows, got a {at}")
        nodes.extend([] if type(node) is momentum else [node])
        return node

    map_nodes(add, state)
    return nodes


def matched(old: list[Any], new: list[Any]) -> tuple[dict[Any, list[Any]], list[Any], list[Any]]:
    """By their type, the old nodes that go on; and the other old and new ones that might."""
    kept, dropped, added = {}, [], []
    for kind in _KEPT:
        olds, news = ([node for node in of if type(node) is kind] for of in (old, new))
        if same_form(olds, news):
            kept[kind] = olds
        elif kind in _DIRECTIONS:
            raise ValueError(
                "`into` must have the other directions of `old_state`, in the same shapes, got"
                f" {len(news)} `{kind.__name__}` for {len(olds)}"
            )
        else:
            dropped, added = dropped + olds, added + news
    return kept, dropped, added


def same_form(*trees: PyTree) -> bool:
    """Whether two trees have the same structure and shapes."""
    one, other = ((jax.tree.structure(t), *map(np.shape, jax.tree.leaves(t))) for t in trees)
    return one == other


def base_of(state: PyTree) -> PyTree:
    """The state of a base optimizer, if there is one."""
    return next((getattr(node, _BASES[type(node)]) for node in find(state, tuple(_BASES))), None)


def with_base(state: PyTree, base: PyTree) -> PyTree:
    """A state with another one of the base optimizer."""
    return replace(state, tuple(_BASES), lambda node: node._replace(**{_BASES[type(node)]: base}))
