"""PreAct ResNets on CIFAR-10, by the recipe of the paper's experiment.

    python benchmarks/paper/train_cifar10.py --optimizer sgdm spa-gradual --seeds 5

downloads CIFAR-10 into `data`, trains on all devices, and prints a table. The recipe is
the paper's (Defazio, arXiv:2010.00406, "Details of experiments"): 300 epochs, batches
of 128, weight decay 1e-4, η = 1 and c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 at epochs 150
and 225, flips and crops. On a CPU:

    python benchmarks/paper/train_cifar10.py --model small --epochs 12

However a run was interrupted, the same command resumes it, and it ends as if it had not
been interrupted. --help lists the optimizers.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cifar_data
import command_line
import jax
import jax.numpy as jnp
import numpy as np
import options
from cifar_data import Images, augment, normalize
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import PREACT_RESNETS
from optimizers import CIFAR10, Config, make_optimizer
from runs import run_all
from tqdm import tqdm
from training import Program, State, check_batch, make_steps, on_all, stacked


def make_program(config: Config, train: Images, test: Images, mesh: Mesh) -> Program:
    """Data-parallel over a mesh of one device or more; training images and state are on
    each.

    A batch is split among the devices, and BatchNorm's statistics are those of the
    whole batch, so that the result does not depend on how many there are.
    """
    check_batch(config, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    num_train = len(train[1])
    steps_per_epoch = -(-num_train // config.batch)  # the last batch is filled up
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32

    def make_model(key: jax.Array) -> nnx.Module:
        return PREACT_RESNETS[config.model](dtype=dtype, rngs=nnx.Rngs(key))

    steps = make_steps(
        config, make_model, make_optimizer(config, CIFAR10, steps_per_epoch)
    )

    jitted = partial(jax.jit, out_shardings=replicated)

    @partial(jitted, donate_argnums=0)
    def step(
        state: State, k: Any, order: jax.Array, images: jax.Array, labels: jax.Array
    ) -> Any:
        batch = jax.lax.with_sharding_constraint(order[k], split)
        x = normalize(augment(jax.random.fold_in(state.key, state.step), images[batch]))
        return steps.update(state, x, labels[batch])

    @jitted
    def shuffle(state: State) -> jax.Array:
        """The batches of the epoch to come, (steps_per_epoch, batch)."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), state.step)
        order = jax.random.permutation(key, num_train)
        return jnp.resize(order, (steps_per_epoch, config.batch))

    def epoch(seed: int, state: State, number: int, bar: tqdm) -> Any:
        del seed, number  # the state has the key and the step
        order, of_steps = shuffle(state), []
        for k in range(steps_per_epoch):
            state, metrics = step(state, k, order, *train)
            of_steps.append(metrics)
            jax.block_until_ready(of_steps[-2:][0])  # no more than two steps ahead
            bar.update()
        return state, stacked(of_steps)

    @jitted
    def totals(
        params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array
    ) -> Any:
        images, labels = jax.lax.with_sharding_constraint((images, labels), split)
        return steps.totals(params, batch_stats, normalize(images), labels)

    def evaluate(state: State) -> dict[str, float]:
        size = 8 * config.batch
        parts = []
        for start in range(0, len(test[1]), size):
            images, labels = (array[start : start + size] for array in test)
            short = size - len(labels)  # filled up with images that do not count
            images = np.pad(images, [(0, short), (0, 0), (0, 0), (0, 0)])
            labels = np.pad(labels, (0, short), constant_values=-1)
            batch = on_all((images, labels), mesh)
            parts.append(totals(state.params, state.batch_stats, *batch))
        loss, correct = np.sum(jax.device_get(parts), 0) / len(test[1])
        return {"test_loss": float(loss), "test_accuracy": float(correct)}

    return Program(steps_per_epoch, jitted(steps.init), epoch, evaluate)


def get_data(folder: Path, subset: int | None) -> tuple[Images, ...]:
    """Training and test images, of which `subset` keeps so many and a fifth as many."""
    if jax.process_index() == 0:
        cifar_data.read(
            folder, cifar_data.TEST
        )  # downloads, and the others need not if they share
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("data")
    parts = (
        cifar_data.read(folder, names) for names in (cifar_data.TRAIN, cifar_data.TEST)
    )
    sizes = (subset, subset and -(-subset // 5))
    return tuple(
        (x[:size], labels[:size])
        for (x, labels), size in zip(parts, sizes, strict=True)
    )


def main(argv: Sequence[str] | None = None) -> str:
    parser = options.make_parser(
        __doc__, list(PREACT_RESNETS), "resnet18", "results/cifar10"
    )
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="of CIFAR-10, binary version",
    )
    add(
        "--subset",
        type=int,
        help="only so many training images, and a fifth as many test images",
    )
    configs, own = options.parse(parser, argv, Config, CIFAR10)
    options.join_cluster(own)
    train, test = get_data(own.data_dir, own.subset)
    digest = hashlib.sha256(
        b"".join(array.tobytes() for array in (*train, *test))
    ).hexdigest()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    train = on_all(train, mesh)
    programs = [make_program(config, train, test, mesh) for config in configs]
    return run_all(configs, programs, own.seeds, digest, own.out)


if __name__ == "__main__":
    command_line.run(main)
