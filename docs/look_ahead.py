"""Draws what z is: where x would come to rest if every later gradient were zero.

python docs/look_ahead.py docs/look_ahead.png
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from spa_optax import spa_from_sgdm

STEEPNESS = jnp.array([0.05, 1.0])
STEPS, STOPS = 60, (4, 8, 16)
BLUE, RED = "#3b7dd8", "#d1495b"


def train(params: jax.Array, gradients_until: int) -> tuple[np.ndarray, np.ndarray]:
    """The x and z of SGD with momentum on a long valley, whose gradients end at a
    step.
    """
    tx = spa_from_sgdm(optax.constant_schedule(0.12), 0.85)

    def step(carry: Any, k: jax.Array) -> Any:
        x, state = carry
        gradient = jnp.where(k < gradients_until, STEEPNESS * x, 0)
        updates, state = tx.update(gradient, state, x)
        return (optax.apply_updates(x, updates), state), (x, state.z)

    _, (xs, zs) = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(STEPS))
    return np.asarray(xs), np.asarray(zs)


def main(path: str) -> None:
    """Draws to a file."""
    start = jnp.array([-4.0, 1.5])
    xs, zs = train(start, STEPS)
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    a, b = np.meshgrid(np.linspace(-4.4, 2.2, 200), np.linspace(-2.3, 1.7, 200))
    valley = STEEPNESS[0] * a**2 + STEEPNESS[1] * b**2
    axes.contour(a, b, valley, 10, colors="0.85", linewidths=0.8, zorder=0)
    axes.plot(
        *xs.T,
        "o-",
        color=BLUE,
        markersize=3,
        linewidth=1,
        label="x, with its gradients",
    )
    for stop in STOPS:
        coasting, _ = train(start, stop)
        last = stop - 1  # row k has x_{k+1} and z_{k+1}
        label = "x, if the gradients end here" if stop == STOPS[0] else None
        axes.plot(*coasting[last:].T, ".:", color="0.35", markersize=4, label=label)
        axes.plot(*xs[last], "o", color=BLUE, markersize=7)
        axes.plot(
            *zs[last],
            "*",
            color=RED,
            markersize=13,
            label="z of that step" if label else None,
        )
    axes.legend(loc="lower right", frameon=False)
    axes.set(xticks=[], yticks=[], title="z is where momentum is heading")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main(*sys.argv[1:])
