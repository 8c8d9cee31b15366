"""What a base optimizer must not do inside a wrapper, and what to do instead."""

from typing import Any

import optax
from jaxtyping import PyTree

from spa_optax import _trees as trees
from spa_optax._core import SPAState

# Types of states, each with a message that has a place for the type's name.
Refusals = list[tuple[tuple[type, ...], str]]

# Wrappers that do not step in every update.
SKIPPING_STATES = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
AVERAGES: Refusals = [
    (
        (SPAState, optax.contrib.ScheduleFreeState),
        "`base` must not average, got a `{}`. Average once, and pass `rounding_key` "
        "there.",
    ),
]
SKIPS_UPDATES: Refusals = [
    (
        SKIPPING_STATES,
        "`base` must not skip updates, got a `{}`. Put that wrapper around this one.",
    ),
    (
        (optax.ApplyEvery,),
        "`base` must not skip updates, got a `{}`. Put `optax.MultiSteps` around this.",
    ),
]
UNFIT: Refusals = [
    (
        (
            optax.ScaleByBacktrackingLinesearchState,
            optax.ScaleByZoomLinesearchState,
        ),
        "`base` must not search along a line, got a `{}`. Use it alone.",
    ),
    (
        (optax.LookaheadState,),
        "`base` must not move the params back, got a `{}`. Average instead.",
    ),
    (
        (optax.contrib.SAMState,),
        "`base` must not move the params aside, got a `{}`. Set `opaque_mode=True`.",
    ),
    (
        (optax.contrib.ProdigyState, optax.contrib.DAdaptAdamWState),
        "`base` must not find its rate by how far the params went, got a `{}`. It "
        "cannot see z. Use another base.",
    ),
    (
        # Optax 0.2.5 has none.
        tuple(filter(None, [getattr(optax.contrib, "MadgradState", None)])),
        "`base` must not average, got a `{}`. Use it alone.",
    ),
]
NEEDS_FIRST_PARAMS: Refusals = [
    (
        (
            optax.contrib.COCOBState,
            optax.contrib.MechanicState,
            optax.contrib.DoGState,
            optax.contrib.DoWGState,
        ),
        "`base` must not compare the params with the first ones, got a `{}`. Set "
        '`params_of_base="z"`.',
    ),
]
NEEDS_GRADIENTS_OF_ITS_PARAMS: Refusals = [
    (
        (
            optax.ScaleByLBFGSState,
            optax.contrib.MomoState,
            optax.contrib.MomoAdamState,
        ),
        "`base` must not relate the params to gradients, got a `{}`. Set "
        '`params_of_base="params"`.',
    ),
]


def refuse(state: PyTree, refusals: Refusals) -> None:
    """Raises ValueError where the state of a base holds what is refused."""
    for types, message in refusals:
        for node in trees.find(state, types):
            if not is_opaque_sam(node):
                raise ValueError(message.format(type(node).__name__))


def is_opaque_sam(node: Any) -> bool:
    """Whether a state is that of a SAM in `opaque_mode`, which keeps no params."""
    return isinstance(node, optax.contrib.SAMState) and node.cache is None
