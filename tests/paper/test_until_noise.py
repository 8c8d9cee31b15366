"""Momentum that is dropped by its own gauge."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from helpers import lenient, relative_difference
from until_noise import until_noise

from spa_optax import momentum_drop, spa


def trained(tx: Any, params: Any, gradient: Any, num_steps: int) -> Any:
    """The last state and all params, with `gradient` a function of the count and the params."""

    def body(carry: Any, k: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient(k, params), state, params)
        params = params + updates
        return (params, state), params

    (_, state), xs = jax.lax.scan(body, (params, tx.init(params)), jnp.arange(num_steps))
    return state, xs


def test_noise_drops_momentum() -> None:
    noise = jax.random.normal(jax.random.key(0), (300, 1_000))
    eta = lenient(optax.cosine_decay_schedule(1.0, 400))
    run = lambda tx: trained(tx, jnp.zeros(1_000), lambda k, _: noise[k], 300)
    state, xs = run(until_noise(eta, 0.1, tolerance=0.2, patience=20, step_factor=1.05))
    # 5/c steps do not count: 50, …, 69 are the first 20 that do.
    assert state.dropped_at == 70
    # c at count 70 is c_71.
    _, expected = run(spa(*momentum_drop(eta, 0.1, 71, step_factor=1.05)))
    assert relative_difference(xs, expected) < 1e-6
    assert state.tracked.inner.c == 1


def test_momentum_that_pays_is_kept() -> None:
    curvature = jnp.logspace(-4, -2, 50)
    tx = until_noise(1.0, 0.1, patience=20)
    state, _ = trained(tx, jnp.ones(50), lambda _, x: curvature * x, 300)
    assert state.dropped_at == -1
    assert state.tracked.inner.c == jnp.float32(0.1)


def test_nothing_measured_is_not_quiet() -> None:
    """Without a gradient there is no gain."""
    state, _ = trained(until_noise(1.0, 0.1), jnp.ones(3), lambda _, x: jnp.zeros_like(x), 200)
    assert (int(state.dropped_at), int(state.num_quiet)) == (-1, 0)
