"""Dropping momentum by its own gauge. It did no better than dropping it at a fixed step."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from spa_optax import spa
from spa_optax.diagnostics import TrackMomentumState, momentum_report, track_momentum


class UntilNoiseState(NamedTuple):
    """State of `until_noise`."""

    tracked: TrackMomentumState
    num_quiet: Array  # steps in a row with the gain at noise level
    dropped_at: Array  # the count from which c rises; −1 while momentum is kept


def until_noise(
    learning_rate: optax.ScalarOrSchedule,
    averaging: float,
    *,
    tolerance: float = 0.05,
    patience: int = 100,
    step_factor: float = 1.01,
) -> optax.GradientTransformationExtraArgs:
    """SPA at a constant c, which rises by `step_factor` per step to 1 once the gain is noise.

    That is after `patience` steps in a row with gain ≤ (1 + tolerance) · noise level. The first 5/c
    steps, in which the gain settles, do not count.
    """

    def init_fn(params: Any) -> UntilNoiseState:
        tracked: Any = track_momentum(spa(learning_rate, averaging)).init(params)
        return UntilNoiseState(tracked, jnp.zeros([], jnp.int32), jnp.full([], -1, jnp.int32))

    def update_fn(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        count = state.tracked.count
        num_rises = jnp.where(state.dropped_at >= 0, count - state.dropped_at + 1, 0)
        c = jnp.minimum(averaging * jnp.asarray(step_factor, jnp.float32) ** num_rises, 1)
        tx = track_momentum(spa(learning_rate, lambda _: c))
        tracked: Any
        updates, tracked = tx.update(updates, state.tracked, params)
        report = momentum_report(tracked)
        is_quiet = report.gain <= (1 + tolerance) * report.noise_level
        is_quiet &= count * averaging >= 5
        num_quiet = jnp.where(is_quiet, state.num_quiet + 1, 0)
        drops = (state.dropped_at < 0) & (num_quiet >= patience)
        dropped_at = jnp.where(drops, count + 1, state.dropped_at)
        return updates, UntilNoiseState(tracked, num_quiet, dropped_at)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]
