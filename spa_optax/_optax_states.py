"""What the package knows of Optax's states: which there are, and momentum as that of SPA.

What is not known is refused where it matters.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from spa_optax._checks import is_surely
from spa_optax._core import Step
from spa_optax._precision import scaled, wide_dtype
from spa_optax._probe import concrete, has_other_moments, steps_of
from spa_optax._storage import OutOfRange
from spa_optax._trees import find, map_trained

# Optax does not export it. (To call `init` here would start JAX at import.)
RMSState: Any = type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ()))
SECOND_MOMENTS = (RMSState, optax.FactoredState)
# The momentum of Optax's optimizers: a state and its field.
MOMENTUM: dict[Any, str] = {
    optax.TraceState: "trace",
    optax.EmaState: "ema",
    optax.ScaleByAdamState: "mu",
    optax.ScaleByLionState: "mu",
    optax.contrib.MuonState: "mu",
}
# The momentum that `track_momentum` can measure and `convert` can move.
ADAM_OR_TRACE = (optax.TraceState, optax.ScaleByAdamState)
INJECTED = (optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState)
# Wrappers that skip updates, or keep gradients of several batches.
SKIPS_UPDATES = (
    optax.MultiStepsState,
    optax.ApplyIfFiniteState,
    optax.ConditionallyTransformState,
    optax.ConditionallyMaskState,
)
# Directions, whose states depend on the updates alone.
_of_optax = lambda names: [getattr(optax, f"{name}State") for name in names.split()]
DIRECTIONS = (
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


def c_and_b2(state: PyTree, averaging: float | None, b2: float) -> tuple[Any, Any]:
    """The c = 1 − β and the β₂ of Optax's own momentum, as given or injected."""
    found = {name: v for node in find(state, INJECTED) for name, v in node.hyperparams.items()}
    beta = found.get("momentum", found.get("b1"))
    if averaging is None and beta is None:
        raise ValueError("`averaging` must be 1 − β if `inner` does not hold β, got None")
    return 1 - jnp.asarray(beta) if averaging is None else averaging, found.get("b2", b2)


def step_of_optax(before: PyTree, after: PyTree, averaging: float | None, b2: float) -> Step:
    """The step of `optax.trace` or `optax.scale_by_adam` as one of SPA with η = 1.

    From m_{k+1} = (1 − c) m_k + g_k, which is −u_k/c. Under Adam m_{k+1} = (1 − c) m_k + c g_k, and
    all is divided by √ν̂_{k+1}. (Adam's ε is left out.)
    """
    old, new = (next(iter(find(of, ADAM_OR_TRACE)), None) for of in (before, after))
    if old is None or new is None:
        raise ValueError("`inner` must pass extra arguments to its member, got one that does not")
    c, beta2 = (jnp.asarray(value, jnp.float32) for value in c_and_b2(after, averaging, b2))
    wide = lambda leaf: jnp.asarray(leaf).astype(wide_dtype(leaf))
    m, m_next = (map_trained(wide, getattr(of, MOMENTUM[type(of)])) for of in (old, new))
    if isinstance(new, optax.TraceState):
        scale = map_trained(lambda _: jnp.ones([]), m)
    else:  # 1/(c √ν̂)
        bias = 1 - beta2 ** jnp.asarray(new.count).astype(jnp.float32)
        rsqrt = lambda v: jnp.where(v > 0, v, jnp.inf) ** -0.5
        nu_hat = map_trained(lambda v: wide(v) / bias.astype(wide(v).dtype), new.nu)
        scale = map_trained(lambda v: scaled(1 / c, rsqrt(v), v.dtype), nu_hat)
    kept = map_trained(lambda m: scaled(1 - c, m, m.dtype), m)
    g = map_trained(lambda s, m, kept: scaled(s, m - kept, m.dtype), scale, m_next, kept)
    d = map_trained(lambda s, kept: scaled(-s, kept, kept.dtype), scale, kept)
    # m is stored, not a difference: it is neither rounding error nor out of range.
    exact, in_range = (map_trained(lambda _, of=of: of, m) for of in (jnp.zeros([]), OutOfRange()))
    return Step(g, d, exact, in_range, jnp.ones([]), c, None, {}, c)


@concrete()
def check_moments(inner: Any, params: PyTree, averaging: float | None, b2: float) -> None:
    """Raises unless μ' = β₁μ + (1 − β₁)g and ν' = β₂ν + (1 − β₂)g², in a step of tiny params.

    Adamax, Yogi and others keep something else in the state of Adam.
    """
    try:
        steps = steps_of(inner, params)
        c, b2 = c_and_b2(steps[0].state, averaging, b2)
    except Exception:  # it needs extra arguments, the shapes of the params, a mesh's axis, …
        return
    if is_surely(has_other_moments(steps, 1 - c, b2)):
        raise ValueError(
            "`inner` must hold the moments of `optax.adam` or `optax.adamw`, with the given"
            " `averaging` and `b2`, got others"
        )
