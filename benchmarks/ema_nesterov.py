"""EMA-Nesterov (arXiv:2605.25395) with a look-ahead that changes, as primal averaging.

    y_k = θ_k + β_k m_k     θ_{k+1} = y_k + u_k
    m_{k+1} = γ m_k + (1 − γ)(θ_{k+1} − θ_k)

These are EMA-Nesterov, with u_k a base optimizer's update at the params y_k. Primal
averaging gives the same y with the base's rate times η_k, and the μ_y of y_k:

    η_k = 1 − γ + (γ + (1 − γ) β_{k+1}) η_{k+1}
    c_{k+1} = (1 − γ)/η_k     μ_y = 1 − 1/η_k

For a constant β they are the numbers 1/(1 − β), (1 − γ)(1 − β) and β.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def ema_nesterov_schedules(
    decay: float, lookahead: optax.Schedule, num_steps: int
) -> tuple[optax.Schedule, optax.Schedule, optax.Schedule]:
    """Schedules of η, c and μ_y for a γ and a β that is constant from a count on.

    If all later β are 0, so is μ_y, and x is lost.
    """
    counts = jnp.arange(num_steps + 1, dtype=jnp.int32)
    beta = np.asarray(jax.vmap(lookahead)(counts), np.float64)
    # η_k − 1, in float64, from the last to the first.
    excess = np.full(num_steps + 1, beta[-1] / (1 - beta[-1]))
    for k in reversed(range(num_steps)):
        kept = decay + (1 - decay) * beta[k + 1]
        excess[k] = (1 - decay) * beta[k + 1] + kept * excess[k + 1]
    # Before β rises, μ_y must not be 0.
    excess[: np.max(np.flatnonzero(excess), initial=0)] += 1e-30

    def excess_at(k: Any) -> jax.Array:
        return jnp.asarray(excess, float)[jnp.minimum(k, num_steps)]

    def eta(k: Any) -> jax.Array:
        return 1 + excess_at(k)

    def averaging(k: Any) -> jax.Array:
        return (1 - decay) / (1 + excess_at(k))

    def interpolation(k: Any) -> jax.Array:
        return excess_at(k + 1) / (1 + excess_at(k + 1))

    return eta, averaging, interpolation
