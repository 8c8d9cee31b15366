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
# Wrappers that skip updates, or keep gradients of several batches.
SKIPS_UPDATES = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)


def visible_sam(state: PyTree) -> list[Any]:
    """The nodes of `optax.contrib.sam` whose updates move params aside, and later back.

    They keep these params. With `opaque_mode=True` they do not, and only its real steps are seen.
    """
    return [node for node in find(state, optax.contrib.SAMState) if node.cache is not None]
