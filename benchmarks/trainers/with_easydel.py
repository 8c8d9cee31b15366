"""EasyDeL's `Trainer` trains a small Llama of its own, split over 8 devices."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import datasets
import easydel as ed
import jax.numpy as jnp
import numpy as np
import shared

from spa_optax import eval_params

SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def at_x(state):
    """The state with the params to evaluate and to export."""
    return state.replace(graphstate=eval_params(state.opt_state, state.graphstate))


class Trainer(ed.Trainer):
    """Evaluates at x, and logs the gauge."""

    def eval(self, model_state):
        yield from super().eval(at_x(model_state))

    def on_step_end(self, state, metrics, step):
        self.gain = float(shared.gain(state.opt_state))
        return super().on_step_end(state, metrics, step)

    def log_metrics(self, metrics, pbar, step, mode="train", **options):
        metrics |= {"train/gain": self.gain} if mode == "train" else {}
        super().log_metrics(metrics, pbar, step, mode, **options)


@dataclasses.dataclass
class Arguments(ed.TrainingArguments):
    """With one of `shared` over the optimizer of these arguments."""

    ours: str = shared.FACTORED

    def get_optimizer_and_scheduler(self, steps: int | None = None) -> Any:
        own, schedule = super().get_optimizer_and_scheduler(steps)
        return shared.make(self.ours, schedule, own), schedule


class Killed(Trainer):
    """Dies when it is told to."""

    kill_at = 0

    def log_metrics(
        self, metrics: Any, pbar: Any, step: int, mode: str = "train", **rest: Any
    ) -> None:
        super().log_metrics(metrics, pbar, step, mode, **rest)
        if mode == "train" and step == self.kill_at > 0:
            shared.die()


def dataset(num: int, seed: int) -> datasets.Dataset:
    texts = np.concatenate(list(shared.batches(num, seed)))
    mask = np.ones_like(texts)
    return datasets.Dataset.from_dict(
        {"input_ids": texts, "attention_mask": mask, "labels": texts}
    ).with_format("numpy")


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    config = ed.LlamaConfig(
        vocab_size=256,
        **SIZES,
        **HEADS,
        tie_word_embeddings=False,
        sharding_axis_dims=(1, -1, 1, 1, 1),
    )
    model = ed.LlamaForCausalLM(
        config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=ed.Rngs(0)
    ).shard_model()
    arguments = Arguments(
        ours=name,
        save_directory=str(folder),
        learning_rate=4e-3,
        optimizer="adamw",
        scheduler="cosine",
        max_training_steps=shared.STEPS,
        num_train_epochs=1,
        total_batch_size=8,
        max_length=64,
        do_eval=True,
        evaluation_steps=100,
        save_steps=shared.SAVE_EVERY,
        resume_if_possible=True,
        use_wandb=False,
        track_memory=False,
        do_last_save=False,
        shuffle_train_dataset=False,
    )
    trainer = Killed(
        arguments=arguments,
        model=model,
        dataset_train=dataset(shared.STEPS, 0),
        dataset_eval=dataset(20, 1),
    )
    trainer.kill_at = kill_at
    first_step = int(trainer.model_state.step)
    state = trainer.train().state
    evaluations = list(trainer.eval(state))
    at_x(state).model.save_pretrained(folder / "x")
    loss = np.mean([e["eval/loss"] for e in evaluations])
    return shared.result(loss, first_step, state.graphstate, state.opt_state)


if __name__ == "__main__":
    shared.main(__file__, importlib.metadata.version("easydel"), train)
