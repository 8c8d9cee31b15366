"""ResNet-50 on ImageNet, by the recipe of the paper's second experiment, on any number
of hosts.

    python benchmarks/paper/train_imagenet.py --data-dir DIR

where DIR has the usual folders, train/CLASS/*.JPEG and val/CLASS/*.JPEG. The recipe is
the paper's (Defazio, arXiv:2010.00406, "Details of experiments"): 100 epochs, weight
decay 1e-4, η = 1 and c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 every 30 epochs, random resized
crops of 224 and flips, batches of 8 × 32, with BatchNorm within each 32. The rest is as
in `train_cifar10.py`.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optimizers
import options
import training
from command_line import UserError
from flax import nnx
from imagenet_data import Files, batches, digest, find, normalize
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import RESNETS
from optimizers import IMAGENET, make_optimizer
from runs import run_all
from tqdm import tqdm
from training import Program, State


@dataclasses.dataclass(frozen=True)
class Config(optimizers.Config):
    """All settings that the result of a run depends on."""

    batch_norm_group: int  # images; 0 for the whole batch
    image_size: int


def make_program(
    config: Config, train: Files, test: Files, mesh: Mesh, num_threads: int
) -> Program:
    """Data-parallel over a mesh; images are split among the devices, and the state is
    on each.

    The order of images, and what is random about them, follow from seed and epoch,
    whatever the number of processes and devices.
    """
    training.check_batch(config, mesh)
    of_processes = Counter(device.process_index for device in mesh.devices.flat)
    if len(set(of_processes.values())) > 1:
        raise UserError(
            f"processes must have equally many devices, got {dict(of_processes)}"
        )
    group = config.batch_norm_group or None
    if config.batch % (group or 1):
        rule = f"--batch must be a multiple of --batch-norm-group {group}"
        raise UserError(f"{rule}, got {config.batch}")
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    steps_per_epoch = -(
        -len(train.paths) // config.batch
    )  # the last batch is filled up
    tx = make_optimizer(config, IMAGENET, steps_per_epoch)
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32
    make = partial(RESNETS[config.model], num_classes=len(train.classes), dtype=dtype)
    steps = training.make_steps(config, lambda key: make(rngs=nnx.Rngs(key)), tx, group)

    @partial(jax.jit, out_shardings=replicated, donate_argnums=0)
    def step(state: State, images: jax.Array, labels: jax.Array) -> Any:
        return steps.update(state, normalize(images), labels)

    @partial(jax.jit, out_shardings=replicated)
    def totals(
        params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array
    ) -> Any:
        return steps.totals(params, batch_stats, normalize(images), labels)

    def to_devices(batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
        put = partial(jax.make_array_from_process_local_data, split)
        return put(batch["images"]), put(batch["labels"])

    def epoch(seed: int, state: State, number: int, bar: tqdm) -> Any:
        order = np.random.default_rng((seed, number)).permutation(len(train.paths))
        order = np.resize(order, steps_per_epoch * config.batch)
        of_steps, seeds = [], (seed, number)
        for batch in batches(
            train, order, config.batch, config.image_size, seeds, num_threads
        ):
            state, metrics = step(state, *to_devices(batch))
            of_steps.append(metrics)
            jax.block_until_ready(
                of_steps[-2:][0]
            )  # no more than two batches on the devices
            bar.update()
        return state, training.stacked(of_steps)

    def evaluate(state: State) -> dict[str, float]:
        short = (
            -len(test.paths) % config.batch
        )  # filled up with images that do not count
        order = np.pad(np.arange(len(test.paths)), (0, short), constant_values=-1)
        parts = []
        for batch in batches(
            test, order, config.batch, config.image_size, None, num_threads
        ):
            parts.append(totals(state.params, state.batch_stats, *to_devices(batch)))
            jax.block_until_ready(parts[-2:][0])
        loss, correct = np.sum(jax.device_get(parts), 0) / len(test.paths)
        return {"test_loss": float(loss), "test_accuracy": float(correct)}

    init = jax.jit(steps.init, out_shardings=replicated)
    return Program(steps_per_epoch, init, epoch, evaluate)


def main(argv: Sequence[str] | None = None) -> str:
    parser = options.make_parser(__doc__, list(RESNETS), "resnet50", "results/imagenet")
    parser.set_defaults(batch=256)
    add = parser.add_argument
    add(
        "--data-dir",
        type=Path,
        required=True,
        help="has train/CLASS/*.JPEG and val/CLASS/*.JPEG",
    )
    add("--image-size", type=int, default=224, help="height and width in pixels")
    of_group = (
        "images that BatchNorm takes statistics of; 0: the batch, of all devices "
        "together"
    )
    add("--batch-norm-group", type=int, default=32, help=of_group)
    # Those that this process may use, where the system can tell.
    cpus = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    add("--threads", type=int, default=cpus, help="that decode images, a process")
    configs, own = options.parse(parser, argv, Config, IMAGENET)
    if own.batch_norm_group < 0:
        parser.error(f"--batch-norm-group must be >= 0, got {own.batch_norm_group}")
    options.join_cluster(own)
    train = find(own.data_dir / "train")
    test = find(own.data_dir / "val", train.classes)
    # Each process has its part of a batch, in their order, which is not that of ids on
    # every TPU.
    devices = sorted(
        jax.devices(), key=lambda device: (device.process_index, device.id)
    )
    mesh = Mesh(np.array(devices), ("data",))
    programs = [
        make_program(config, train, test, mesh, own.threads) for config in configs
    ]
    return run_all(configs, programs, own.seeds, digest(train, test), own.out)


if __name__ == "__main__":
    command_line.run(main)
