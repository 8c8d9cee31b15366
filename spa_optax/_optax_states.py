"""What this package must know of Optax's states, by their types.

A new state of Optax that averages, skips steps, moves params or has momentum belongs
in a table here, for wrappers, `eval_params` and `track_momentum`. A wrapper adds the
states of this package that it refuses. What `convert` must know is in
`_convert_states.py`.
"""

from typing import Any, Protocol, runtime_checkable

import optax
from jaxtyping import PyTree
from optax import contrib

from ._state import SPAState
from ._trees import find_nodes


@runtime_checkable
class AnyScheduleFreeState(Protocol):
    """A state of Schedule-Free, whichever package it is from."""

    z: PyTree
    weight_sum: Any


# Wrappers that do not step in every update.
SKIPPING_STATES = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
# Wrappers that move the params apart from those of what they wrap.
PARAMS_MOVING_STATES = (
    optax.LookaheadState,
    contrib.MechanicState,
    contrib.SAMState,  # unless it is opaque
    AnyScheduleFreeState,
)
# Other momentum, in which noise adds up too. Inside `track_momentum` it hides what
# pure noise would do.
MOMENTUM_STATES = (
    optax.ApplyEvery,
    optax.EmaState,
    optax.ScaleByAdamState,
    optax.ScaleByAdanState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLionState,
    optax.ScaleByNovogradState,
    optax.ScaleBySM3State,
    optax.TraceState,
    contrib.MomoAdamState,
    contrib.MomoState,
    contrib.MuonState,
    contrib.ScaleByAdemamixState,
    contrib.ScaleBySimplifiedAdEMAMixState,
    contrib.SophiaState,
)
# The momentum of SGD, Lion and Muon, with its field. One power of two scales a whole
# array of it to 8 bits. Adam's needs another scale for each element.
FLOAT8_MOMENTUM_FIELDS: dict[type, str] = {
    optax.TraceState: "trace",
    optax.ScaleByLionState: "mu",
    contrib.MuonState: "mu",
}
# What a wrapper refuses as its `base`: a message for each type of state, with a place
# for the type's name. All wrappers refuse what averages.
Refusals = dict[type, str]
AVERAGING_REFUSALS: Refusals = {
    SPAState: (
        "`base` must not average, got a `{}`. Pass the `rounding_key` and the "
        "`state_dtype` to the optimizer itself."
    ),
    AnyScheduleFreeState: (
        "`base` must not average, got a `{}`. Take an optimizer that does not, and "
        "keep an EMA of the params."
    ),
}
PRIMAL_AVERAGING_REFUSALS: Refusals = {
    **dict.fromkeys(
        SKIPPING_STATES,
        "`base` must not skip updates, got a `{}`. Put that wrapper around this one.",
    ),
    optax.ApplyEvery: (
        "`base` must not skip updates, got a `{}`. Put `optax.MultiSteps` around this."
    ),
    **dict.fromkeys(
        (
            optax.ScaleByBacktrackingLinesearchState,
            optax.ScaleByZoomLinesearchState,
        ),
        "`base` must not search along a line, got a `{}`. Use it alone.",
    ),
    optax.LookaheadState: (
        "`base` must not move the params back, got a `{}`. Average instead."
    ),
    **dict.fromkeys(
        (contrib.ProdigyState, contrib.DAdaptAdamWState),
        "`base` must not estimate its learning rate from how far the params went, got "
        "a `{}`: averaging changes that. Use another base.",
    ),
}
if hasattr(contrib, "MadgradState"):  # not in Optax 0.2.5
    PRIMAL_AVERAGING_REFUSALS[contrib.MadgradState] = (
        "`base` must not average, got a `{}`. Use it alone."
    )
# `primal_averaging(params_of_base="params")` also refuses what compares the params with
# the first ones.
REFUSALS_AT_PARAMS: Refusals = dict.fromkeys(
    (
        contrib.COCOBState,
        contrib.MechanicState,
        contrib.DoGState,
        contrib.DoWGState,
    ),
    "`base` must not compare the params with the first ones, got a `{}`. Set "
    '`params_of_base="z"`.',
)
# `primal_averaging(params_of_base="z")` also refuses what relates the params to their
# gradients, which are at y and not at z.
REFUSALS_AT_Z: Refusals = {
    **dict.fromkeys(
        (
            optax.ScaleByLBFGSState,
            contrib.MomoState,
            contrib.MomoAdamState,
        ),
        "`base` must not relate the params to gradients, got a `{}`. Set "
        '`params_of_base="params"`.',
    ),
    contrib.SAMState: (
        "`base` must not take gradients at its own params, got a `{}`. Set "
        '`params_of_base="params"`.'
    ),
}


def check_base(base_state: PyTree, refusals: Refusals) -> None:
    """Raises ValueError where the state of a base holds what is refused."""
    for node_type, message in refusals.items():
        for node in find_nodes(base_state, node_type):
            raise ValueError(message.format(type(node).__name__))


def check_sam_is_opaque(base_state: PyTree) -> None:
    """Raises ValueError where the state of a base holds a SAM that is not opaque."""
    for node in find_nodes(base_state, contrib.SAMState):
        if not is_opaque_sam(node):
            raise ValueError(
                "`base` must not move the params aside, got a `SAMState`. Set "
                "`opaque_mode=True`."
            )


def is_opaque_sam(node: Any) -> bool:
    """Whether a state is that of a SAM in `opaque_mode`, which keeps no params."""
    return isinstance(node, contrib.SAMState) and node.cache is None
