"""Flax' example `lm1b` trains its transformer on bytes, split over 8 devices.

The transformer, the steps, the shardings and the schedule are those of the example. It
is in Flax' source, which `run` puts into the environment.
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
import shared
from flax.training import checkpoints
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import eval_params

VERSION = importlib.metadata.version("flax")
sys.path.append(str(Path(sys.prefix, f"flax-{VERSION}", "examples", "lm1b")))
import models  # noqa: E402
import train as lm1b  # noqa: E402
import utils  # noqa: E402
from configs import default  # noqa: E402

RATE, LENGTH = 4e-3, 64
SIZES = {
    "emb_dim": 128,
    "num_heads": 8,
    "num_layers": 2,
    "qkv_dim": 128,
    "mlp_dim": 512,
}


class Narrow(models.TransformerLM):
    """With params in bfloat16."""

    def init(self, *args: Any) -> Any:
        return optax.tree.cast(super().init(*args), jnp.bfloat16)


def batches(num: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    for text in shared.batches(num, seed, 8, LENGTH):
        yield {"inputs": text}


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    config = default.get_config()
    config.per_device_batch_size, config.max_target_length = 1, LENGTH
    mesh = Mesh(utils.create_device_mesh(config), config.mesh_axes)
    of_model = {
        "vocab_size": 256,
        "output_vocab_size": 256,
        "dtype": jnp.bfloat16,
        **SIZES,
    }
    train_config = models.TransformerConfig(**of_model, max_len=LENGTH)
    eval_config = train_config.replace(deterministic=True)
    key, init_key = jax.random.split(jax.random.key(config.seed))
    rate = lm1b.create_learning_rate_schedule(RATE, 50)
    own = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    tx = shared.make(name, rate, own)
    state, shardings = utils.setup_initial_state(
        Narrow(eval_config), tx, config, init_key, mesh
    )
    state = checkpoints.restore_checkpoint(folder, state)
    last = int(state.step)
    of_data = NamedSharding(mesh, PartitionSpec(config.data_sharding))
    step = jax.jit(
        lm1b.train_step,
        in_shardings=(shardings, of_data, None),
        out_shardings=(shardings, None),
        static_argnums=(2, 3, 4),
        donate_argnums=0,
    )
    numbered = enumerate(batches(shared.STEPS, 0), 1)
    for num, batch in itertools.islice(numbered, last, None):
        state, _ = step(state, batch, train_config, rate, 0.0, key)
        if num % shared.SAVE_EVERY == 0:
            checkpoints.save_checkpoint_multiprocess(folder, state, num)
        if num == kill_at:
            shared.die()
    x = eval_params(state.opt_state, state.params)
    checkpoints.save_checkpoint_multiprocess(folder / "x", x, shared.STEPS)
    evaluate = jax.jit(lm1b.eval_step, static_argnums=2)
    found = [evaluate(x, batch, eval_config) for batch in batches(20, 1)]
    total = jax.tree.map(lambda *leaves: np.sum(leaves), *found)
    loss = total["loss"] / total["denominator"]
    return shared.result(loss, last + 1, state.params, state.opt_state)


if __name__ == "__main__":
    shared.main(__file__, VERSION, train)
