"""Optax's own momentum, read as primal averaging."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from spa_optax._checks import is_surely
from spa_optax._core import Step
from spa_optax._optax_states import ADAM_OR_TRACE, INJECTED
from spa_optax._precision import scaled, wide_dtype
from spa_optax._probe import concrete, has_other_moments, trials
from spa_optax._trees import find, map_trained


def averaging_of(state: PyTree, averaging: float | None) -> Any:
    """The c = 1 − β of Optax's own momentum, as given or injected."""
    if averaging is not None:
        return averaging
    beta = _injected(state, ("momentum", "b1"), None)
    if beta is None:
        raise ValueError("`averaging` must be 1 − β if `inner` does not hold β, got None")
    return 1 - jnp.asarray(beta)


def _injected(state: PyTree, names: tuple[str, ...], otherwise: Any) -> Any:
    """A hyper-parameter of `optax.inject_hyperparams`."""
    found = [node.hyperparams for node in find(state, INJECTED)]
    values = [hyperparams[name] for hyperparams in found for name in names if name in hyperparams]
    return values[0] if values else otherwise


def step_of_optax(before: PyTree, after: PyTree, averaging: float | None, b2: float) -> Step:
    """The step of `optax.trace` or `optax.scale_by_adam` as one of SPA with η = 1.

    From m_{k+1} = (1 − c) m_k + g_k, which is −u_k/c. Under Adam m_{k+1} = (1 − c) m_k + c g_k, and
    all is divided by √ν̂_{k+1}. (Adam's ε is left out.)
    """
    if not find(before, ADAM_OR_TRACE):
        raise ValueError("`inner` must pass extra arguments to its member, got one that does not")
    (old,), (new,) = find(before, ADAM_OR_TRACE), find(after, ADAM_OR_TRACE)
    c = jnp.asarray(averaging_of(after, averaging), jnp.float32)
    wide = lambda leaf: jnp.asarray(leaf).astype(wide_dtype(leaf))
    if isinstance(old, optax.TraceState):
        m, m_next, weight = old.trace, new.trace, jnp.ones([])
        scale = jax.tree.map(lambda m: jnp.ones([]), m)
    else:
        m, m_next, weight = old.mu, new.mu, c
        b2 = _injected(after, ("b2",), b2)
        unbiased = 1 - jnp.asarray(b2, jnp.float32) ** jnp.asarray(new.count).astype(jnp.float32)
        rsqrt = lambda v: jnp.where(v > 0, v, jnp.inf) ** -0.5
        scale = jax.tree.map(lambda v: rsqrt(wide(v) / unbiased.astype(wide(v).dtype)), new.nu)

    def gradient(m: Array, m_next: Array, s: Array) -> Array:
        m, m_next = wide(m), wide(m_next)
        return scaled(1 / weight, s, m.dtype) * (m_next - scaled(1 - c, m, m.dtype))

    distance = lambda m, s: scaled(-(1 - c) / weight, s, wide(m).dtype) * wide(m)
    rounding = lambda m: jnp.zeros_like(wide(m))  # m is stored, not a difference
    g, d = map_trained(gradient, m, m_next, scale), map_trained(distance, m, scale)
    none = map_trained(lambda m: jnp.zeros([], jnp.int32), m)
    return Step(g, d, map_trained(rounding, m), none, jnp.ones([]), c, None, {}, c)


@concrete()
def check_adam(
    inner: optax.GradientTransformation, params: PyTree, averaging: float | None, b2: float
) -> None:
    """Raises unless μ' = β₁μ + (1 − β₁)g and ν' = β₂ν + (1 − β₂)g², in a step of tiny params.

    Adamax, Yogi and others keep something else in the state of Adam.
    """
    try:
        steps = trials(inner, params)
        b1 = 1 - averaging_of(steps[0].state, averaging)
        b2 = _injected(steps[0].state, ("b2",), b2)
    except Exception:  # it needs extra arguments, the shapes of the params, a mesh's axis, …
        return
    if is_surely(has_other_moments(steps, b1, b2)):
        raise ValueError(
            "`inner` must hold the moments of `optax.adam` or `optax.adamw`, with the given"
            " `averaging` and `b2`, got others"
        )
