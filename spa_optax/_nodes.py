"""The nodes of a state, wrappers among them, and how they are carried into another.

Momentum is not carried but translated, by `convert`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from . import _arguments
from ._checks import check_not_batched
from ._state import SPAState
from ._trees import by_path, names_of_nodes, scalar_of, with_leaves
from ._wrappers import (
    Float8MomentumState,
    PrimalAveragingState,
    StochasticRoundingState,
)
from .diagnostics._track import TrackMomentumState

# What `convert` translates: z of the family, or the momentum of Optax. In a state that
# holds several kinds it translates the first. Others, such as the momentum of a base,
# it copies.
CONVERTED_FIELDS: dict[type, str] = {
    SPAState: "z",
    optax.ScaleByAdamState: "mu",
    optax.TraceState: "trace",
}
# Optax does not export it. (To call `init` here would start JAX at import.)
ScaleByRmsWithCountState: Any = type(
    jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())
)
# The fields of wrappers that hold other states. Their other fields, such as injected
# hyper-parameters and gauges, are those of `into`.
INNER_FIELDS: dict[type, tuple[str, ...]] = {
    optax.MaskedState: ("inner_state",),
    optax.PartitionState: ("inner_states",),
    optax.InjectHyperparamsState: ("inner_state",),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states", "inner_state"),
    optax.MultiStepsState: ("inner_opt_state",),
    optax.ApplyIfFiniteState: ("inner_state",),
    PrimalAveragingState: ("base", "average"),
    StochasticRoundingState: ("base",),
    Float8MomentumState: ("base",),
    TrackMomentumState: ("inner",),
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


def _map_nodes(function: Callable[[Any], Any], state: PyTree) -> PyTree:
    """A state with a function of each node. A wrapper comes after its inner states.

    The function sees a wrapper with None in place of its inner states.
    """

    def map_node(node):
        fields = INNER_FIELDS.get(type(node), ())
        inner = {field: _map_nodes(function, getattr(node, field)) for field in fields}
        if not inner:
            return function(node)
        without_inner = node._replace(**dict.fromkeys(fields))
        return function(without_inner)._replace(**inner)

    return jax.tree.map(map_node, state, is_leaf=lambda node: hasattr(node, "_fields"))


def known_nodes(state: PyTree) -> list[Any]:
    """The nodes of a state, wrappers among them."""
    nodes: list[Any] = []

    def collect(node):
        nodes.append(node)
        return node

    _map_nodes(collect, state)
    return nodes


def of_type(nodes: list[Any], kind: Any) -> list[Any]:
    """The nodes of a type. `find_nodes` would also look into unknown wrappers."""
    return [node for node in nodes if isinstance(node, kind)]


def _is_of_schedule(node: Any) -> bool:
    """Whether a node is the state of a schedule of Optax, which is a count alone."""
    return getattr(node, "_fields", ()) == ("count",)


def _count_field(node: Any) -> str | None:
    """The field that counts the steps taken."""
    return "count" if _is_of_schedule(node) else COUNT_FIELDS.get(type(node))


def steps_taken(nodes: list[Any], count: object) -> Array:
    """The count k. Raises ValueError unless all counts agree, between two steps."""
    _arguments.NOT_NEGATIVE_INTEGER.optional().check(count=count)
    counts = [getattr(node, field) for node in nodes if (field := _count_field(node))]
    if count is not None:
        counts.append(count)
    check_not_batched("old_state", counts)
    values = sorted({int(scalar_of(value)) for value in counts})
    if len(values) != 1:
        raise ValueError(
            "`count` must be the number of steps taken, and all counts in `old_state` "
            f"must be the same, got {values or None}. Pass `count=k` if `old_state` "
            "has none."
        )
    for node in of_type(nodes, optax.MultiStepsState):
        mini_step = scalar_of(node.mini_step)
        if mini_step > 0:
            raise ValueError(
                "`old_state` must not hold accumulated gradients, which would be lost, "
                f"got those of {mini_step} batches. Convert when `mini_step` is 0."
            )
    return jnp.asarray(values[0], jnp.int32)


def carried_into(into: PyTree, nodes: list[Any], k: Array) -> PyTree:
    """A state with the arrays of old nodes of the same types, and the count k."""
    remaining = list(filter(_is_copied, nodes))

    def fill(node):
        if _is_copied(node):
            return _take(remaining, node)
        field = _count_field(node)
        if field is None:
            return node
        return node._replace(**{field: with_leaves(getattr(node, field), k)})

    state = _map_nodes(fill, into)
    if remaining:
        raise ValueError(
            "`into` must hold all states of `old_state` beside the momentum, got none "
            f"for its {names_of_nodes(tuple(remaining))}. Build it from an optimizer "
            "with the same chain."
        )
    return state


def _is_copied(node: Any) -> bool:
    """Whether a node has arrays, and is neither a wrapper nor a schedule's count."""
    if _is_of_schedule(node) or type(node) in INNER_FIELDS:
        return False
    return bool(_shapes(node))


def _shapes(node: Any) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in by_path(node).items()}


def _take(nodes: list[Any], new: Any) -> Any:
    """Removes from old nodes the first that fits a new one, which gets its arrays."""
    shapes = _shapes(new)
    for i, node in enumerate(nodes):
        is_same_kind = type(node) is type(new) or not hasattr(new, "_fields")
        if is_same_kind and shapes.items() <= _shapes(node).items():
            leaves = by_path(nodes.pop(i))
            return with_leaves(new, [leaves[path] for path in shapes])
    raise ValueError(
        "`into` must hold only states of `old_state` beside the momentum, in the same "
        f"shapes, got a `{type(new).__name__}` with {shapes}. Build it from an "
        "optimizer with the same chain, masks and options."
    )
