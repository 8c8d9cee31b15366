"""ResNet-50 on ImageNet, by the recipe of the paper's second experiment, on any number of hosts.

    python benchmarks/paper/train_imagenet.py --data-dir DIR

where DIR has the usual folders, train/CLASS/*.JPEG and val/CLASS/*.JPEG. The recipe is the paper's
(Defazio, arXiv:2010.00406, "Details of experiments"): 100 epochs, weight decay 1e-4, η = 1 and
c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 every 30 epochs, random resized crops of 224 and flips, batches
of 8 × 32, with BatchNorm within each 32. On several hosts start it on each, with --distributed (or
--coordinator and its companions) and --out on a disk that they share. To try it without ImageNet:

    python benchmarks/paper/photographs.py photographs
    python benchmarks/paper/train_imagenet.py --data-dir photographs --model small --epochs 5

Images are JPEGs and PNGs. One that cannot be decoded is left out of the loss (BatchNorm sees a
black image), reported and counted. It is an error if their share exceeds --max-left-out, if a class
has no images, or if a file cannot be read. However a run was interrupted, the same command resumes
it, with the same result. Command line, results and optimizers are those of `train_cifar10.py`.
"""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from imagenet_data import Files, batches, check_left_out, digest, find, normalize
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import RESNETS
from optimizers import IMAGENET, make_optimizer
from report import report
from runs import run_all
from tqdm import tqdm
from training import State

MAX_LEFT_OUT = 0.01


@dataclasses.dataclass(frozen=True)
class Config(optimizers.Config):
    """All settings that the result of a run depends on."""

    batch_norm_group: int  # images; 0 for the whole batch
    image_size: int


@dataclasses.dataclass(frozen=True)
class Program(training.Program):
    """With its parts, whose speeds `measure` reports."""

    step: Any  # jitted, from state, images and labels
    to_devices: Callable[[Any], Any]


def make_program(
    config: Config,
    train: Files,
    test: Files,
    mesh: Mesh,
    num_threads: int,
    max_left_out: float = MAX_LEFT_OUT,
) -> Program:
    """Data-parallel over a mesh; images are split among the devices, and the state is on each.

    The order of images, and what is random about them, follow from seed and epoch, whatever the
    number of processes and devices. Epoch 1 begins with an evaluation: errors in the validation
    images show before any training.
    """
    training.check_batch(config, mesh)
    of_processes = Counter(device.process_index for device in mesh.devices.flat)
    if len(set(of_processes.values())) > 1:
        raise UserError(f"processes must have equally many devices, got {dict(of_processes)}")
    group = config.batch_norm_group or None
    if config.batch % (group or 1):
        raise UserError(
            f"--batch must be a multiple of --batch-norm-group {group}, got {config.batch}"
        )
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    steps_per_epoch = -(-len(train.paths) // config.batch)  # the last batch is filled up
    tx = make_optimizer(config, IMAGENET, steps_per_epoch)
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32
    make = partial(RESNETS[config.model], num_classes=len(train.classes), dtype=dtype)
    steps = training.make_steps(config, lambda key: make(rngs=nnx.Rngs(key)), tx, group)

    @partial(jax.jit, out_shardings=replicated, donate_argnums=0)
    def step(state: State, images: jax.Array, labels: jax.Array) -> Any:
        state, metrics = steps.update(state, normalize(images), labels)
        return state, metrics | {"left_out": (labels < 0).sum()}

    @partial(jax.jit, out_shardings=replicated)
    def totals(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        sums = steps.totals(params, batch_stats, normalize(images), labels)
        return *sums, (labels >= 0).sum()

    def to_devices(batch: dict[str, np.ndarray]) -> tuple[jax.Array, jax.Array]:
        put = partial(jax.make_array_from_process_local_data, split)
        return put(batch["images"]), put(batch["labels"])

    def epoch(seed: int, state: State, number: int, bar: tqdm) -> Any:
        if number == 1:
            evaluate(state)
        order = np.random.default_rng((seed, number)).permutation(len(train.paths))
        order = np.resize(order, steps_per_epoch * config.batch)
        of_steps, seeds, left_out = [], (seed, number), 0
        for batch in batches(train, order, config.batch, config.image_size, seeds, num_threads):
            state, metrics = step(state, *to_devices(batch))
            of_steps.append(metrics)
            for before in of_steps[-2:-1]:  # waits: no more than two batches on the devices
                left_out += int(before["left_out"])
                check_left_out(train, "train", left_out, len(order), max_left_out)
            bar.update()
        metrics = jax.tree.map(lambda *values: np.stack(values), *jax.device_get(of_steps))
        left_out = int(metrics["left_out"].sum())
        check_left_out(train, "train", left_out, len(order), max_left_out)
        return state, metrics

    def evaluate(state: State) -> dict[str, float]:
        short = -len(test.paths) % config.batch  # filled up with images that do not count
        order = np.pad(np.arange(len(test.paths)), (0, short), constant_values=-1)
        parts = []
        for batch in batches(test, order, config.batch, config.image_size, None, num_threads):
            parts.append(totals(state.params, state.batch_stats, *to_devices(batch)))
            jax.block_until_ready(parts[-2:][0])
        loss, correct, count = np.sum(jax.device_get(parts), 0)
        left_out = len(test.paths) - int(count)
        check_left_out(test, "val", left_out, len(test.paths), max_left_out)
        return {
            "test_loss": float(loss / count),
            "test_accuracy": float(correct / count),
            "test_left_out": left_out,
        }

    init = jax.jit(steps.init, out_shardings=replicated)
    return Program(steps_per_epoch, init, epoch, evaluate, step, to_devices)


def measure(program: Program, config: Config, train: Files, num_threads: int) -> str:
    """Images a second of reading alone, and of training steps alone, over some batches."""
    num_batches = 20
    order = np.resize(np.arange(len(train.paths)), (num_batches + 1) * config.batch)
    reading = batches(train, order, config.batch, config.image_size, (0, 0), num_threads)
    next(reading)  # while threads start
    start = time.perf_counter()
    *_, batch = reading
    seconds = time.perf_counter() - start
    on_devices = program.to_devices(batch)
    state, _ = jax.block_until_ready(program.step(program.init(0), *on_devices))
    start = time.perf_counter()
    for _ in range(num_batches):
        state, _ = program.step(state, *on_devices)
    jax.block_until_ready(state)
    speeds = (num_batches * config.batch / s for s in (seconds, time.perf_counter() - start))
    return "images/s: {:,.1f} of reading alone, {:,.1f} of training steps alone".format(*speeds)


def main(argv: Sequence[str] | None = None) -> str:
    parser = options.make_parser(__doc__, list(RESNETS), "resnet50", "results/imagenet")
    parser.set_defaults(batch=256)
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="has train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    add("--image-size", type=int, default=224, help="height and width in pixels")
    add(
        "--batch-norm-group",
        type=int,
        default=32,
        help="images that BatchNorm takes its statistics of; 0: the batch, of all devices together",
    )
    # Those that this process may use, where the system can tell.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--threads", type=int, default=cpus, help="that decode images, a process")
    add(
        "--max-left-out",
        type=float,
        default=MAX_LEFT_OUT,
        help="the share of images that may be left out because they cannot be decoded",
    )
    add("--measure", action="store_true", help="how fast images are read and trained on, no more")
    experiment, own = options.parse(parser, argv, Config, IMAGENET)
    if own.batch_norm_group < 0:
        parser.error(f"--batch-norm-group must be >= 0, got {own.batch_norm_group}")
    if not 0 <= own.max_left_out < 1:
        parser.error(f"--max-left-out must be >= 0 and < 1, got {own.max_left_out}")
    options.join_cluster(experiment)
    train = find(own.data_dir / "train")
    data = train, find(own.data_dir / "val", train.classes)
    # Each process has its part of a batch, in their order, which is not that of ids on every TPU.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices), ("data",))
    programs = [
        make_program(config, *data, mesh, own.threads, own.max_left_out)
        for config in experiment.configs
    ]
    if own.measure:
        text = measure(programs[0], experiment.configs[0], train, own.threads)
        if jax.process_index() == 0:
            print(text)
        return text
    run_all(experiment.configs, programs, experiment.num_seeds, digest(*data), experiment.out)
    return report(experiment, mesh, "imagenet.png")


if __name__ == "__main__":
    command_line.run(main)
