"""Flax' example `mnist` trains its convolutional network on digits, with nnx, on one
device.

The network and the steps are those of the example. It is in Flax' source, which `run`
puts into the environment. The example has no checkpoints; these are Orbax'. The digits
are scikit-learn's.
"""

import importlib.metadata
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import shared
from flax import nnx
from sklearn.datasets import load_digits

from spa_optax import eval_params

VERSION = importlib.metadata.version("flax")
sys.path.append(str(Path(sys.prefix, f"flax-{VERSION}", "examples", "mnist")))
import train as mnist  # noqa: E402

RATE, BATCH = 2e-3, 32


def at_x(model, optimizer, batches, rngs):
    """A clone to evaluate, with BatchNorm's statistics of x."""
    average = nnx.clone(model)
    nnx.update(average, eval_params(optimizer.opt_state, nnx.state(model, nnx.Param)))
    average.train()
    for batch in batches:  # a few hundred, with Flax' momentum of 0.99
        average(batch["image"], rngs)
    average.eval()
    return average


def batches(num: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Digits of 8 × 8 in images of 28 × 28. The last 300 are for seeds that are odd."""
    digits, random = load_digits(), np.random.default_rng(seed)
    images = np.pad(np.kron(digits.images, np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    images = np.float32(images / 16)[..., None]
    rows = np.arange(1497, 1797) if seed % 2 else np.arange(1497)
    for _ in range(num):
        index = random.choice(rows, BATCH)
        yield {"image": images[index], "label": digits.target[index]}


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    rate = optax.cosine_decay_schedule(RATE, 2 * shared.STEPS)
    model, rngs = mnist.CNN(rngs=nnx.Rngs(0)), nnx.Rngs(0)
    nnx.update(model, optax.tree.cast(nnx.state(model, nnx.Param), jnp.bfloat16))
    optimizer = nnx.Optimizer(
        model, shared.make(name, rate, optax.adamw(rate)), wrt=nnx.Param
    )
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    everything = (model, optimizer, rngs)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=shared.SAVE_EVERY, max_to_keep=2
    )
    with ocp.CheckpointManager(folder, options=options) as saved:
        last = saved.latest_step() or 0
        if last:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(everything))
            restored = saved.restore(last, args=ocp.args.StandardRestore(like))
            nnx.update(everything, restored)
        model.train()
        for num, batch in itertools.islice(
            enumerate(batches(shared.STEPS, 0), 1), last, None
        ):
            mnist.train_step(model, optimizer, metrics, batch, rngs)
            if saved.should_save(num):
                saved.save(num, args=ocp.args.StandardSave(nnx.state(everything)))
            if num == kill_at:
                shared.die()
        average = at_x(model, optimizer, batches(300, 2), rngs)
        saved.wait_until_finished()
    metrics.reset()
    for batch in batches(20, 1):
        mnist.eval_step(average, metrics, batch)
    params, state = nnx.state(model, nnx.Param), nnx.state(optimizer)
    return shared.result(metrics.compute()["loss"], last + 1, params, state) | {
        "devices": 1
    }


if __name__ == "__main__":
    shared.main(__file__, VERSION, train)
