"""The price of an update, as a ratio to `optax.sgd` with momentum: both in one process, in turns.

    python benchmarks/update_cost.py

On 300 leaves of 64×64×3×3, the size of a large residual network's convolutions. What moves is told
by the compiler: bytes a parameter, and bytes of temporaries.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spa_optax import spa, spa_from_sgdm
from spa_optax.diagnostics import track_momentum

NUM_LEAVES, SHAPE = 300, (64, 64, 3, 3)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 500, 10_000)
PEERS: dict[str, optax.GradientTransformation] = {
    "optax.sgd(0.1, 0.9)": optax.sgd(0.1, 0.9),
    "spa(1.0, 0.1)": spa(1.0, 0.1),
    "track_momentum(spa(1.0, 0.1))": track_momentum(spa(1.0, 0.1)),
    "spa_from_sgdm(0.1, 0.9)": spa_from_sgdm(0.1, 0.9),
    "spa_from_sgdm(schedule, 0.9)": spa_from_sgdm(SCHEDULE, 0.9),
    "spa_from_sgdm(schedule, 0.999)": spa_from_sgdm(SCHEDULE, 0.999),
    "optax.sgd(schedule, 0.9)": optax.sgd(SCHEDULE, 0.9),
    "optax.sgd(schedule, 0.9, nesterov=True)": optax.sgd(SCHEDULE, 0.9, nesterov=True),
    "spa_from_sgdm(schedule, 0.9, True)": spa_from_sgdm(SCHEDULE, 0.9, nesterov=True),
}


class Peer:
    """One compiled update with its own params and state, donated from call to call."""

    def __init__(self, tx: optax.GradientTransformation, num_leaves: int) -> None:
        """Compiles the update."""
        params = [jnp.full(SHAPE, 0.1) for _ in range(num_leaves)]
        self.carry: Any = (params, tx.init(params))

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        start = time.perf_counter()
        self.step = jax.jit(step, donate_argnums=0).lower(self.carry, params).compile()
        self.compile_seconds = time.perf_counter() - start

    def run(self, grads: Any) -> float:
        """The seconds that one update takes."""
        start = time.perf_counter()
        self.carry = jax.block_until_ready(self.step(self.carry, grads))
        return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--leaves", type=int, default=NUM_LEAVES)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args(argv)

    grads = [jnp.full(SHAPE, 0.01) for _ in range(arguments.leaves)]
    peers = {name: Peer(tx, arguments.leaves) for name, tx in PEERS.items()}
    times: dict[str, list[float]] = {name: [] for name in peers}
    for k in range(arguments.rounds + 5):
        for name, peer in peers.items():
            seconds = peer.run(grads)
            if k >= 5:  # warm
                times[name].append(seconds)

    device = jax.devices()[0]
    size = arguments.leaves * np.prod(SHAPE)
    print(
        f"{device.device_kind or platform.processor()}, jax {jax.__version__}, {size:,} parameters"
    )
    print("| update | median ms | ratio | of 8 in 10 rounds | bytes/param | temporaries |")
    print("|---|---|---|---|---|---|")
    reference = np.array(times["optax.sgd(0.1, 0.9)"])
    figures = {}
    for name, peer in peers.items():
        milliseconds = 1e3 * np.array(times[name])
        low, ratio, high = np.quantile(milliseconds / (1e3 * reference), [0.1, 0.5, 0.9])
        cost: Any = peer.step.cost_analysis()
        memory: Any = peer.step.memory_analysis()
        figures[name] = {
            "milliseconds": float(np.median(milliseconds)),
            "ratio": float(ratio),
            "ratio_quantiles": [float(low), float(high)],
            "bytes_per_parameter": cost["bytes accessed"] / float(size),
            "temporary_bytes": memory.temp_size_in_bytes,
            "compile_seconds": peer.compile_seconds,
        }
        print(
            f"| `{name}` | {np.median(milliseconds):.2f} | {ratio:.2f} | {low:.2f}–{high:.2f} "
            f"| {cost['bytes accessed'] / size:.1f} | {memory.temp_size_in_bytes:,} B |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
