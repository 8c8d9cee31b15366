"""One step of training and of evaluation, for any network and any way to place the
images.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import UserError
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optimizers import Config
from tqdm import tqdm

from spa_optax import diagnostics


class State(NamedTuple):
    """All arrays that change in a run."""

    params: Any
    batch_stats: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


class Steps(NamedTuple):
    """Functions of one batch, x (b, h, w, 3) and labels (b,); images labelled −1 do not
    count.
    """

    init: Callable[[Any], State]  # from a seed
    update: Callable[
        ..., tuple[State, dict[str, jax.Array]]
    ]  # from state, x and labels
    totals: Callable[
        ..., tuple[jax.Array, jax.Array]
    ]  # from params, batch_stats, x and labels


def make_steps(
    config: Config,
    make_model: Callable,
    tx: optax.GradientTransformation,
    group: int | None = None,
) -> Steps:
    """Builds the functions of one batch, which the caller jits.

    `make_model` is from a key to a network with BatchNorm, which takes its statistics
    from `group` images, or from the whole batch. Metrics are the loss, and where
    momentum is tracked the fields of `momentum_report` and c.
    """
    model = nnx.eval_shape(lambda: make_model(jax.random.key(0)))
    model.train()
    train_graph = nnx.graphdef(model)
    model.eval()
    eval_graph = nnx.graphdef(model)

    def init(seed: Any) -> State:
        model_key, key = jax.random.split(jax.random.key(seed))
        _, *state = nnx.split(make_model(model_key), nnx.Param, nnx.BatchStat)
        params, batch_stats = map(nnx.to_pure_dict, state)
        return State(
            params, batch_stats, tx.init(params), jnp.zeros([], jnp.int32), key
        )

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(train_graph, params, batch_stats)
        return model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def by_groups(params: Any, batch_stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        if group is None:
            return forward(params, batch_stats, x)
        x = x.reshape(-1, group, *x.shape[1:])
        logits, batch_stats = jax.vmap(forward, (None, None, 0))(params, batch_stats, x)
        return logits.reshape(-1, logits.shape[-1]), jax.tree.map(
            lambda s: s.mean(0), batch_stats
        )

    def update(state: State, x: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            logits, batch_stats = by_groups(params, state.batch_stats, x)
            loss, _ = sums(logits, labels)
            return loss / jnp.maximum((labels >= 0).sum(), 1), batch_stats

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            state.params
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss}
        if config.track:
            metrics |= diagnostics.momentum_report(opt_state)._asdict()
            metrics["c"] = optax.tree.get(opt_state, "c")
        return State(params, batch_stats, opt_state, state.step + 1, state.key), metrics

    def totals(params: Any, batch_stats: Any, x: jax.Array, labels: jax.Array) -> Any:
        return sums(nnx.merge(eval_graph, params, batch_stats)(x), labels)

    return Steps(init, update, totals)


def sums(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of losses and the number of right answers, of images that are not
    labelled −1.
    """
    real = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, jnp.where(real, labels, 0)
    )
    return jnp.where(real, losses, 0).sum(), (
        real & (logits.argmax(-1) == labels)
    ).sum()


@dataclasses.dataclass(frozen=True)
class Program:
    """Trains and evaluates a network on its data, on the devices of a mesh.

    `epoch` takes the seed, a state (which is donated), the number of the epoch, from 1,
    and a progress bar, and returns the state after the epoch, and metrics with one
    value per step.
    """

    steps_per_epoch: int
    init: Callable[[int], State]
    epoch: Callable[[int, State, int, tqdm], tuple[State, dict[str, np.ndarray]]]
    evaluate: Callable[[State], dict[str, float]]


def check_batch(config: Config, mesh: Mesh) -> None:
    if config.batch % mesh.size:
        raise UserError(
            f"--batch must be a multiple of {mesh.size} devices, got {config.batch}"
        )


def on_all(arrays: Any, mesh: Mesh) -> Any:
    """NumPy arrays that every process has, placed on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(
            array.shape, sharding, lambda index: array[index]
        )

    return jax.tree.map(place, arrays)


def stacked(of_steps: list[Any]) -> Any:
    """The metrics of an epoch on the host, from those of each step."""
    return jax.tree.map(lambda *values: np.stack(values), *jax.device_get(of_steps))
