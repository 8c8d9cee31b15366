"""The states of transforms inside a state, and how `convert` copies them.

Momentum is not copied but translated. What wrappers must know of Optax's states is in
`_optax_states.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from . import _arguments
from ._checks import check_not_batched
from ._float8_momentum import Float8MomentumState
from ._state import SPAState
from ._trees import (
    arrays_by_path,
    as_scalar,
    find_nodes,
    replace_leaves,
)
from ._wrappers import PrimalAveragingState, StochasticRoundingState
from .diagnostics._track import TrackMomentumState

# Optax does not export it. (To call `init` here would start JAX at import.)
ScaleByRmsWithCountState: Any = type(
    jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())
)
# What `convert` translates: z of the family, or the momentum of Optax. The order
# matters: it translates the first type that it finds. Others, such as the momentum of a
# base, it copies.
CONVERTED_FIELDS: dict[type, str] = {
    SPAState: "z",
    optax.ScaleByAdamState: "mu",
    optax.TraceState: "trace",
}
# The fields of wrappers that hold other states. Their other fields, such as injected
# hyper-parameters and gauges, are those of `into`. `GuardParamsState` is left out, as a
# guard is for a few steps only.
INNER_FIELDS: dict[type, tuple[str, ...]] = {
    optax.MaskedState: ("inner_state",),
    optax.PartitionState: ("inner_states",),
    optax.InjectHyperparamsState: ("inner_state",),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states", "inner_state"),
    optax.MultiStepsState: ("inner_opt_state",),
    optax.ApplyIfFiniteState: ("inner_state",),
    PrimalAveragingState: ("base_state", "spa_state"),
    StochasticRoundingState: ("base_state",),
    Float8MomentumState: ("base_state",),
    TrackMomentumState: ("inner_state",),
}
# The fields that count the steps taken.
COUNT_FIELDS: dict[type, str] = {
    optax.InjectHyperparamsState: "count",
    optax.InjectStatefulHyperparamsState: "count",
    optax.MultiStepsState: "gradient_step",
    StochasticRoundingState: "count",
    Float8MomentumState: "count",
    SPAState: "count",
    optax.ScaleByAdamState: "count",
    ScaleByRmsWithCountState: "count",
}


def _map_states(function: Callable[[Any], Any], tree: PyTree, name: str = "") -> PyTree:
    """A tree with a function of each state. A wrapper comes after its inner states.

    The function sees a wrapper with None in place of its inner states. It sees an array
    that is in no named tuple as a dict, whose one key is what leads to the array: keys
    of dicts, and fields with the type that has them. Places in tuples do not count,
    since chains differ.
    """
    if hasattr(tree, "_fields"):
        fields = INNER_FIELDS.get(type(tree), ())
        inner = {field: _map_states(function, getattr(tree, field)) for field in fields}
        if not inner:
            return function(tree)
        without_inner = tree._replace(**dict.fromkeys(fields))
        return function(without_inner)._replace(**inner)
    if jax.tree_util.all_leaves([tree]):
        (array,) = function({name: tree}).values()
        return array
    children, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    return structure.unflatten(
        _map_states(function, child, name + _name_of_child(tree, path))
        for path, child in children
    )


def _name_of_child(node: Any, path: Any) -> str:
    """What leads to a child of a node."""
    if isinstance(node, (tuple, list)):
        return ""
    key = jax.tree_util.keystr(path)
    return key if isinstance(node, Mapping) else type(node).__name__ + key


def list_states(tree: PyTree) -> list[Any]:
    """The states in a tree, wrappers among them."""
    states: list[Any] = []

    def collect(state):
        states.append(state)
        return state

    _map_states(collect, tree)
    return states


def filter_states(states: list[Any], state_type: Any) -> list[Any]:
    """The states of a type. `find_nodes` would also look into unknown wrappers."""
    return [state for state in states if isinstance(state, state_type)]


def _is_schedule_state(state: Any) -> bool:
    """Whether a state is the state of a schedule of Optax, which is a count alone."""
    return getattr(state, "_fields", ()) == ("count",)


def _count_field(state: Any) -> str | None:
    """The field that counts the steps taken."""
    return "count" if _is_schedule_state(state) else COUNT_FIELDS.get(type(state))


def check_one_run(name: str, *scalars: Any) -> None:
    """Raises ValueError if a scalar has axes, as in a batch of states."""
    advice = "convert each run by itself, and stack the states"
    check_not_batched(name, *scalars, advice=advice)


def steps_taken(states: list[Any], count: object) -> Array:
    """The count k. Raises ValueError unless all counts agree, between two steps."""
    _arguments.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    counts = [
        getattr(state, field) for state in states if (field := _count_field(state))
    ]
    if count is not None:
        counts.append(count)
    check_one_run("old_state", counts)
    values = sorted({int(as_scalar(value)) for value in counts})
    if len(values) != 1:
        raise ValueError(
            "`count` must be the number of steps taken, and all counts in `old_state` "
            f"must be the same, got {values or None}. Pass `count=k` if `old_state` "
            "has none."
        )
    for state in filter_states(states, optax.MultiStepsState):
        mini_step = as_scalar(state.mini_step)
        if mini_step > 0:
            raise ValueError(
                "`old_state` must not hold accumulated gradients, which would be lost, "
                f"got those of {mini_step} batches. Convert when `mini_step` is 0."
            )
    return jnp.asarray(values[0], jnp.int32)


def copy_into(into: PyTree, old_states: list[Any], k: Array) -> PyTree:
    """A state with the arrays of old states of the same types, and the count k."""
    remaining = list(filter(_is_copied, old_states))

    def fill(state):
        if _is_copied(state):
            return _pop_match(remaining, state)
        field = _count_field(state)
        if field is None:
            return state
        return state._replace(**{field: replace_leaves(getattr(state, field), k)})

    filled = _map_states(fill, into)
    if remaining:
        raise ValueError(
            "`into` must hold all states of `old_state` beside the momentum, got none "
            f"for its {names_of_states(remaining)}. Build it from an optimizer "
            "with the same chain."
        )
    return filled


def check_wrappers(states: list[Any]) -> None:
    """Raises ValueError if an `SPAState` is in a wrapper that `convert` does not know.

    The wrapper would be copied whole, with z as it was stored.
    """
    for state in states:
        if not isinstance(state, SPAState) and find_nodes(state, SPAState):
            raise ValueError(
                "`old_state` and `into` must hold an `SPAState` in wrappers that "
                f"`convert` knows, got a `{type(state).__name__}`. Convert what is "
                "inside."
            )


def names_of_states(states: list[Any]) -> str:
    """The types of states, and what leads to bare arrays."""
    return ", ".join(sorted(set(map(_name_of_state, states)))) or "none"


def _name_of_state(state: Any) -> str:
    if isinstance(state, dict):
        return f"bare array {min(state) or 'at the root'}"
    return f"`{type(state).__name__}`"


def _is_copied(state: Any) -> bool:
    """Whether a state has arrays, and is neither a wrapper nor a schedule's count."""
    if _is_schedule_state(state) or type(state) in INNER_FIELDS:
        return False
    return bool(_shapes(state))


def _shapes(state: Any) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in arrays_by_path(state).items()}


def _pop_match(old_states: list[Any], new: Any) -> Any:
    """Removes from old states the first that fits a new one, which gets its arrays."""
    shapes = _shapes(new)
    for i, state in enumerate(old_states):
        if type(state) is type(new) and shapes.items() <= _shapes(state).items():
            leaves = arrays_by_path(old_states.pop(i))
            return replace_leaves(new, [leaves[path] for path in shapes])
    sizes = list(shapes.values()) if isinstance(new, dict) else shapes
    raise ValueError(
        "`into` must hold only states of `old_state` beside the momentum, in the same "
        f"shapes, got a {_name_of_state(new)} with {sizes}. Build it from an optimizer "
        "with the same chain, masks and options."
    )
