"""What the package knows of Optax's states; what is not known is refused where it matters."""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from spa_optax._trees import find

# Optax does not export it. (To call `init` here would start JAX at import.)
RMSState: Any = type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ()))

# The momentum of Optax's optimizers: a state and its field.
MOMENTUM: dict[Any, str] = {
    optax.TraceState: "trace",
    optax.EmaState: "ema",
    optax.ScaleByAdamState: "mu",
    optax.ScaleByLionState: "mu",
    optax.contrib.MuonState: "mu",
}
SECOND_MOMENTS = (RMSState, optax.FactoredState)
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
_MAY_SKIP = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
# Wrappers that skip updates, or keep gradients of several batches.
SKIPS_UPDATES = (optax.MultiStepsState, *_MAY_SKIP)
# Wrappers, and their fields that hold the states of what they wrap.
INNER: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((optax.MaskedState, *INJECTED, *_MAY_SKIP), ("inner_state",)),
    optax.PartitionState: ("inner_states",),
    optax.InjectStatefulHyperparamsState: ("hyperparams_states", "inner_state"),
    optax.MultiStepsState: ("inner_opt_state",),
}
# Fields that count the steps taken. (States with `count` alone belong to schedules.)
COUNTS: dict[Any, str] = {
    **dict.fromkeys(INJECTED, "count"),
    optax.MultiStepsState: "gradient_step",
    optax.ConditionallyTransformState: "step",
    optax.ConditionallyMaskState: "step",
}
# The momentum that `track_momentum` can measure and `convert` can move.
ADAM_OR_TRACE = (optax.TraceState, optax.ScaleByAdamState)
# Transforms whose states depend on the incoming updates alone, not on where the params are.
_of_optax = lambda names: [getattr(optax, f"{name}State") for name in names.split()]
DIRECTIONS = (
    *MOMENTUM,
    *_of_optax("AddNoise ScaleByAdaDelta ScaleByAdan ScaleByAmsgrad ScaleByBelief ScaleByNovograd"),
    *_of_optax("ScaleByRms ScaleByRprop ScaleByRss ScaleByRStdDev ScaleBySM3"),
    optax.ApplyEvery,
    optax.contrib.DifferentiallyPrivateAggregateState,
    optax.contrib.ReduceLROnPlateauState,
    optax.contrib.ScaleByAdemamixState,
    optax.contrib.ScaleBySimplifiedAdEMAMixState,
)
# Measurements, on which no update depends; some are newer than the oldest Optax.
_NAMES = ("MonitorState", "SnapshotState", "ZeroNansState")
MONITORS = tuple(getattr(optax, name) for name in _NAMES if hasattr(optax, name))


def visible_sam(state: PyTree) -> list[Any]:
    """The nodes of `optax.contrib.sam` whose updates move params aside, and later back.

    They keep these params. With `opaque_mode=True` they do not, and only its real steps are seen.
    """
    return [node for node in find(state, optax.contrib.SAMState) if node.cache is not None]
