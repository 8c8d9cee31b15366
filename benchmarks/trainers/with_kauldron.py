"""Kauldron's `Trainer` trains a small transformer, split over 8 devices."""

import dataclasses
import importlib.metadata
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import shared
from flax import linen as nn
from kauldron import kd

from spa_optax import eval_params

RATE, WIDTH, HEADS, LAYERS = 4e-3, 128, 4, 2


class UseEvalParams(kd.ckpts.InitTransform):
    """An evaluator sees x."""

    def transform(self, state):
        # Eager operations on numbers are transfers, which Kauldron forbids. So use jit.
        return state.replace(params=jax.jit(eval_params)(state.opt_state, state.params))


def export(state, folder):
    """A checkpoint of x alone."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, UseEvalParams().transform(state).params)


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class Gain(kd.metrics.Metric):
    """Gain over noise level, among Kauldron's metrics."""

    opt_state: kd.kontext.Key = "opt_state"

    @flax.struct.dataclass
    class State(kd.metrics.AverageState):
        """Of one step."""

    def get_state(self, opt_state):
        return self.State.from_values(jnp.asarray(shared.gain(opt_state)))


class Decoder(nn.Module):
    """From bytes to the logits of the next one, with params in bfloat16."""

    tokens: kd.kontext.Key = "batch.tokens"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        # In the model: Kauldron restores what `init` of the model describes.
        narrow = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        embedding = nn.Embed(256, WIDTH, **narrow)
        x = embedding(tokens) + nn.Embed(tokens.shape[1], WIDTH, **narrow)(
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        )
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(LAYERS):
            attention = nn.MultiHeadDotProductAttention(HEADS, **narrow)
            x += attention(nn.LayerNorm(**narrow)(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * WIDTH, **narrow)(nn.LayerNorm(**narrow)(x)))
            x += nn.Dense(WIDTH, **narrow)(hidden)
        return embedding.attend(nn.LayerNorm(**narrow)(x)).astype(jnp.float32)


class DieAt(kd.evals.EvaluatorBase):
    """Also remembers the first step."""

    kill_at: int = 0
    seen: list = dataclasses.field(default_factory=list)

    def maybe_eval(self, *, step: int, state: Any) -> None:
        self.seen.append(step)
        if self.kill_at and step == self.kill_at:
            shared.die()


def pipeline(num: int, seed: int) -> Any:
    texts = np.concatenate(list(shared.batches(num, seed, length=65)))
    source = [{"tokens": text[:-1], "labels": text[1:, None]} for text in texts]
    return kd.data.py.DataSource(
        data_source=source, batch_size=8, num_workers=0, seed=0, shuffle=False
    )


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    rate = optax.cosine_decay_schedule(RATE, 2 * shared.STEPS)
    watch = DieAt(run=kd.evals.EveryNSteps(1), kill_at=kill_at)
    trainer = kd.train.Trainer(
        workdir=folder,
        train_ds=pipeline(shared.STEPS + 1, 0),
        model=Decoder(),
        train_losses={
            "loss": kd.losses.SoftmaxCrossEntropyWithIntLabels(
                logits="preds", labels="batch.labels"
            )
        },
        train_metrics={"gain": Gain()},
        schedules={"learning_rate": rate},
        optimizer=shared.make(name, rate, optax.adamw(rate)),
        num_train_steps=shared.STEPS,
        log_metrics_every=50,
        checkpointer=kd.ckpts.Checkpointer(
            save_interval_steps=shared.SAVE_EVERY, max_to_keep=2
        ),
        sharding=kd.sharding.ShardingStrategy(params=kd.sharding.FSDPSharding()),
        evals={
            "at_x": kd.evals.Evaluator(
                run=kd.evals.EveryNSteps(100),
                ds=pipeline(20, 1),
                num_batches=20,
                metrics={},
                init_transform=UseEvalParams(),
            ),
            "watch": watch,
        },
    )
    state, _ = trainer.train()
    export(state, folder / "export")
    found = trainer.evals["at_x"].evaluate(state, shared.STEPS).compute(flatten=False)
    loss, first_step = found.loss_values["loss"], trainer.evals["watch"].seen[0]
    return shared.result(loss, first_step, state.params, state.opt_state)


if __name__ == "__main__":
    shared.main(__file__, importlib.metadata.version("kauldron"), train)
