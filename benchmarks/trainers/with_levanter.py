"""Levanter's `Trainer` trains a small Llama of its own, split over 8 devices."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
import numpy as np
import shared
from levanter.callbacks import compute_validation_loss
from levanter.checkpoint import CheckpointerConfig, save_checkpoint
from levanter.data.dataset import ListAsyncDataset
from levanter.models.llama import LlamaConfig
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig, OptimizerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from spa_optax import eval_params

SIZES = {"hidden_dim": 128, "intermediate_dim": 512, "num_layers": 2, "num_heads": 4}
LLAMA = LlamaConfig(max_seq_len=64, num_kv_heads=2, **SIZES)
POS, VOCAB = LLAMA.max_Pos, hax.Axis("vocab", 256)


def at_x(info):
    """What a hook gets, with the params to evaluate and to export."""
    state = info.state
    x = eval_params(state.opt_state, state.trainable_model)
    model = eqx.combine(x, state.model)
    return dataclasses.replace(info, state=dataclasses.replace(state, model=model))


@OptimizerConfig.register_subclass("spa_optax")
@dataclasses.dataclass(frozen=True)
class Ours(OptimizerConfig):
    """One of `shared`, for `optimizer.type=spa_optax`."""

    name: str = shared.FACTORED

    def build(self, num_train_steps: int) -> Any:
        adam = AdamConfig(learning_rate=self.learning_rate)
        own, rate = adam.build(num_train_steps), self.lr_scheduler(num_train_steps)
        return shared.make(self.name, rate, own)


def dataset(num: int, seed: int) -> ListAsyncDataset:
    example = LmExample.causal(hax.zeros(POS, int))
    texts = np.concatenate(list(shared.batches(num, seed)))
    named = [hax.named(text, POS) for text in texts]
    return ListAsyncDataset(
        [dataclasses.replace(example, tokens=tokens) for tokens in named]
    )


def loss_of(model: Any, example: LmExample, *, key: Any = None) -> Any:
    return model.compute_next_token_loss(example, key=key)


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    keep = [{"every": shared.SAVE_EVERY}]
    config = TrainerConfig(
        id="run",
        mp=jmp.get_policy("p=bf16,c=bf16"),
        tracker=NoopConfig(),
        log_dir=folder / "logs",
        train_batch_size=8,
        num_train_steps=shared.STEPS,
        checkpointer=CheckpointerConfig(str(folder), save_interval=None, keep=keep),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    config.initialize()
    optimizer = Ours(learning_rate=4e-3, name=name)
    with Trainer(config, optimizer.build(shared.STEPS), loss_of) as trainer:
        key, model_key = jax.random.split(jax.random.PRNGKey(0))
        state = trainer.initial_state(
            key, model_init=lambda: LLAMA.build(VOCAB, key=model_key)
        )
        first_step = int(state.step)
        trainer.add_hook(
            lambda info: shared.die() if info.step == kill_at > 0 else None
        )
        loss = eqx.filter_jit(
            lambda model, example: trainer.loss_fn(model, example, key=None)
        )
        evaluate = compute_validation_loss(loss, trainer.data_loader(dataset(20, 1)))
        trainer.add_hook(lambda info: evaluate(at_x(info)), every=100)
        loader = trainer.data_loader(dataset(shared.STEPS, 0))
        info = trainer.train(state, loader.iter_from_step(first_step))
        save_checkpoint(at_x(info).state.model, info.step, str(folder / "x"))
        return shared.result(
            evaluate(at_x(info)), first_step, info.state.trainable_model, info.opt_state
        )


if __name__ == "__main__":
    shared.main(__file__, importlib.metadata.version("marin-levanter"), train)
