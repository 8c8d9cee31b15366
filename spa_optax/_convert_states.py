"""The states of transforms inside a state, and how `convert` copies them.

Momentum is not copied but translated. What wrappers must know of Optax's states is in
`_optax_states.py`.
"""

import dataclasses
from collections.abc import Callable
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
    is_array_like,
    node_type_names,
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


def _is_state(node: Any) -> bool:
    """Whether a node is the state of one transformation.

    Chains are tuples, and named chains dicts of states. A dict of arrays is a state.
    """
    if isinstance(node, dict):
        return bool(node) and all(map(is_array_like, node.values()))
    is_dataclass = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return is_dataclass or hasattr(node, "_fields")


def _map_states(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """A tree with a function of each state. A wrapper comes after its inner states.

    The function sees a wrapper with None in place of its inner states.
    """

    def map_state(state):
        fields = INNER_FIELDS.get(type(state), ())
        inner = {
            field: _map_states(function, getattr(state, field)) for field in fields
        }
        if not inner:
            return function(state)
        without_inner = state._replace(**dict.fromkeys(fields))
        return function(without_inner)._replace(**inner)

    return jax.tree.map(map_state, tree, is_leaf=_is_state)


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
            f"for its {node_type_names(tuple(remaining))}. Build it from an optimizer "
            "with the same chain."
        )
    return filled


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
        is_same_type = type(state) is type(new) or not _is_state(new)  # bare arrays
        if is_same_type and shapes.items() <= _shapes(state).items():
            leaves = arrays_by_path(old_states.pop(i))
            return replace_leaves(new, [leaves[path] for path in shapes])
    raise ValueError(
        "`into` must hold only states of `old_state` beside the momentum, in the same "
        f"shapes, got a `{type(new).__name__}` with {shapes}. Build it from an "
        "optimizer with the same chain, masks and options."
    )
