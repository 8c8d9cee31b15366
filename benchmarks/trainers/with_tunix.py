"""Tunix' `PeftTrainer` trains a small Llama 3 of its own, split over 8 devices."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import shared
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft import checkpoint_manager, hooks, peft_trainer

from spa_optax import eval_params

RATE = 4e-3


class EvaluateAtX(hooks.TrainingHooks):
    """Every evaluation sees x; training goes on from the params."""

    y = None

    def nothing(self, *_):
        """Tunix asks for all of these."""

    on_train_start = on_train_end = on_train_step_start = on_train_step_end = nothing

    def on_eval_step_start(self, trainer):
        if self.y is None:
            self.y = jax.tree.map(jnp.copy, nnx.state(trainer.model, nnx.Param))
            nnx.update(trainer.model, eval_params(trainer.optimizer.opt_state, self.y))

    def on_eval_step_end(self, trainer, eval_loss):
        nnx.update(trainer.model, self.y)
        self.y = None


def export(trainer, folder):
    """A checkpoint of Tunix that holds x alone."""
    average, params = nnx.clone(trainer.model), nnx.state(trainer.model, nnx.Param)
    nnx.update(average, eval_params(trainer.optimizer.opt_state, params))
    saved = checkpoint_manager.CheckpointManager(str(folder))
    saved.save(trainer.train_steps, average, force=True)
    saved.close()


class Watch(EvaluateAtX):
    """Also logs the gauge in Tunix' metrics, and dies when it is told to."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.first_step = kill_at, None

    def on_train_step_end(self, trainer: Any, step: int, loss: float) -> None:
        self.first_step = self.first_step or step
        if step % 50 == 0:
            gain = float(shared.gain(trainer.optimizer.opt_state))
            trainer.metrics_logger.log("", "gain", gain, "train", step)
        if step == self.kill_at:
            shared.die()


def make_model(mesh: jax.sharding.Mesh) -> nnx.Module:
    """A Llama of 1/1000 of the size, in bfloat16."""
    sizes = {"num_layers": 2, "vocab_size": 256, "embed_dim": 128, "hidden_dim": 512}
    heads = {"num_heads": 4, "head_dim": 32, "num_kv_heads": 2}
    config = llama3.ModelConfig(**sizes, **heads, rope_theta=10_000, norm_eps=1e-5)
    model = llama3.Llama3(config, rngs=nnx.Rngs(0))
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model))
    state = jax.device_put(state, nnx.get_named_sharding(state, mesh))
    nnx.update(model, state)
    return model


def inputs(tokens: np.ndarray) -> dict[str, jax.Array]:
    size, length = tokens.shape
    mask = jnp.broadcast_to(
        jnp.tril(jnp.ones((length, length), bool)), (size, length, length)
    )
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    whole = jnp.ones(tokens.shape, bool)
    return {
        "input_tokens": tokens,
        "input_mask": whole,
        "positions": positions,
        "attention_mask": mask,
    }


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices.reshape(-1, 1), ("fsdp", "tp"))
    with mesh:
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=100,
            max_steps=shared.STEPS,
            checkpoint_root_directory=str(folder),
            checkpointing_options=ocp.CheckpointManagerOptions(
                save_interval_steps=shared.SAVE_EVERY, max_to_keep=2
            ),
        )

        def factory(learning_rate: Any) -> Any:
            return shared.make(name, learning_rate, optax.adamw(learning_rate))

        rate = optax.cosine_decay_schedule(RATE, 2 * shared.STEPS)
        tx = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(rate)
        trainer = peft_trainer.PeftTrainer(make_model(mesh), tx, config)
        trainer.with_gen_model_input_fn(inputs)
        trainer.with_training_hooks(watch := Watch(kill_at))
        trainer.train(
            list(shared.batches(shared.STEPS, 0)), list(shared.batches(20, 1))
        )
        losses = trainer.metrics_logger.get_metric_history("", "loss", "eval")
        params = nnx.state(trainer.model, nnx.Param)
        export(trainer, folder / "export")
        loss, state = np.ravel(losses)[-1], nnx.state(trainer.optimizer)
        return shared.result(loss, watch.first_step, params, state)


if __name__ == "__main__":
    shared.main(__file__, importlib.metadata.version("google-tunix"), train)
