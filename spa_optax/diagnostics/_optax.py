"""Optax's own momentum, read as primal averaging."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from spa_optax._checks import is_surely
from spa_optax._core import Step
from spa_optax._optax_states import ADAM_OR_TRACE, INJECTED, MOMENTUM
from spa_optax._precision import scaled, wide_dtype
from spa_optax._probe import concrete, has_other_moments, trials
from spa_optax._trees import find, map_trained


def averaging_of(state: PyTree, averaging: float | None) -> Any:
    """The c = 1 − β of Optax's own momentum, as given or injected."""
    beta = _injected(state, ("momentum", "b1"), None)
    if averaging is None and beta is None:
        raise ValueError("`averaging` must be 1 − β if `inner` does not hold β, got None")
    return 1 - jnp.asarray(beta) if averaging is None else averaging


def _injected(state: PyTree, names: tuple[str, ...], otherwise: Any) -> Any:
    """A hyper-parameter of `optax.inject_hyperparams`."""
    found = (node.hyperparams for node in find(state, INJECTED))
    return next((values[name] for values in found for name in names if name in values), otherwise)


def step_of_optax(before: PyTree, after: PyTree, averaging: float | None, b2: float) -> Step:
    """The step of `optax.trace` or `optax.scale_by_adam` as one of SPA with η = 1.

    From m_{k+1} = (1 − c) m_k + g_k, which is −u_k/c. Under Adam m_{k+1} = (1 − c) m_k + c g_k, and
    all is divided by √ν̂_{k+1}. (Adam's ε is left out.)
    """
    old, new = (next(iter(find(of, ADAM_OR_TRACE)), None) for of in (before, after))
    if old is None or new is None:
        raise ValueError("`inner` must pass extra arguments to its member, got one that does not")
    c = jnp.asarray(averaging_of(after, averaging), jnp.float32)
    wide = lambda leaf: jnp.asarray(leaf).astype(wide_dtype(leaf))
    m, m_next = (map_trained(wide, getattr(of, MOMENTUM[type(of)])) for of in (old, new))
    if isinstance(new, optax.TraceState):
        weight, scale = jnp.ones([]), jax.tree.map(lambda m: jnp.ones([]), m)
    else:
        weight, b2 = c, _injected(after, ("b2",), b2)
        unbiased = 1 - jnp.asarray(b2, jnp.float32) ** jnp.asarray(new.count).astype(jnp.float32)
        rsqrt = lambda v: jnp.where(v > 0, v, jnp.inf) ** -0.5
        scale = jax.tree.map(lambda v: rsqrt(wide(v) / unbiased.astype(wide(v).dtype)), new.nu)

    def gradient(m: Array, m_next: Array, s: Array) -> Array:
        return scaled(1 / weight, s, m.dtype) * (m_next - scaled(1 - c, m, m.dtype))

    distance = lambda m, s: scaled(-(1 - c) / weight, s, m.dtype) * m
    g, d = map_trained(gradient, m, m_next, scale), map_trained(distance, m, scale)
    # m is stored, not a difference: it is neither rounding error nor saturated.
    zeros = lambda dtype: map_trained(lambda m: jnp.zeros([], dtype), m)
    return Step(g, d, zeros(jnp.float32), zeros(jnp.int32), jnp.ones([]), c, None, {}, c)


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
