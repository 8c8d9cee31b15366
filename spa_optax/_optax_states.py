"""What the package knows of Optax's states; what is not known is refused where it matters."""

from typing import Any

import jax
import optax

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
