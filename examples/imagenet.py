"""ResNet-50 on ImageNet, by the recipe of the paper's second experiment, on any number of hosts.

    python examples/imagenet.py --data-dir DIR

where DIR has the usual folders, train/CLASS/*.JPEG and val/CLASS/*.JPEG. The recipe is the paper's
(Defazio, arXiv:2010.00406, "Details of experiments"): 100 epochs, weight decay 1e-4, η = 1 and
c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 every 30 epochs, random resized crops of 224 and flips, batches
of 8 × 32, with BatchNorm within each 32. On several hosts start it on each, with --distributed (or
--coordinator and its companions) and --out on a disk that they share. To try it without ImageNet:

    python examples/photographs.py photographs
    python examples/imagenet.py --data-dir photographs --model small --scale-epochs 0.05

A file that cannot be decoded does not count in the loss (BatchNorm takes it as black), and is told
of and counted; a class without images is an error. A run that was stopped, however, is taken up
again by the same command and ends as if it had not been. Command line, results and optimizers are
those of `cifar10.py`.
"""

import dataclasses
import hashlib
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cifar10
import command_line
import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
from cifar10 import State, convolution
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from PIL import Image
from tqdm import tqdm

EPOCHS, DROPS = 100, (30, 60, 90)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green and blue, from 0 to 1
SUFFIXES = {".jpeg", ".jpg", ".png"}
UNDECODABLE = (OSError, RuntimeError, SyntaxError, ValueError, Image.DecompressionBombError)


# ------------------------------------------------------------------------------------------- data


class Files(NamedTuple):
    """Images that are read when they are wanted."""

    paths: list[Path]
    labels: np.ndarray  # (n,) int32, the places of their folders in the order of names
    classes: list[str]


def find(folder: Path, classes: list[str] | None = None) -> Files:
    """The images in the folders of their classes, all in the order of names."""
    if not folder.is_dir():
        raise ValueError(f"--data-dir must have a folder {folder.name}, got none at {folder}")
    visible = lambda path: not path.name.startswith(".")
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and visible(path))
    if not found:
        raise ValueError(f"{folder} must have a folder of images for each class, got none")
    if classes is None:
        classes = found
    for problem, names in (("no", set(classes) - set(found)), ("also", set(found) - set(classes))):
        if names:
            raise ValueError(f"{folder} must have the training classes, got {problem} {min(names)}")
    paths, labels = [], []
    for label, name in enumerate(classes):
        inside = filter(visible, (folder / name).iterdir())
        of_class = sorted(path for path in inside if path.suffix.lower() in SUFFIXES)
        if not of_class:
            raise ValueError(f"{folder / name} must have images ({', '.join(sorted(SUFFIXES))})")
        paths += of_class
        labels += [label] * len(of_class)
    return Files(paths, np.array(labels, np.int32), classes)


def digest(*parts: Files) -> str:
    """Of all names, and of the size of the first file of each class.

    To tell one set of images from another; a million sizes are slow to come from a network's disk.
    """
    result = hashlib.sha256()
    for part in parts:
        for path in part.paths:
            result.update(os.fsencode(f"{path.parent.name}/{path.name}\n"))
        for first in np.unique(part.labels, return_index=True)[1]:
            result.update(f"{part.paths[first].lstat().st_size}\n".encode())
    return result.hexdigest()


def random_crop(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, upper, right and lower of 8 to 100 % of the area, from 3:4 to 4:3 (RandomResizedCrop).

    After ten that do not fit, the largest in the middle of such a shape.
    """
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, upper = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(upper), int(left) + w, int(upper) + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def decode(path: Path, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """An image (size, size, 3) uint8: cropped and flipped at random, or with no `rng` the middle.

    That is the middle 7/8 of an image whose shorter side is 8/7 of `size`: of 256 at 224.
    """
    with Image.open(path) as file:
        if rng is None:
            side = min(file.size) * 7 / 8
            left, upper = ((length - side) / 2 for length in file.size)
            box, flip = (left, upper, left + side, upper + side), False
        else:
            box, flip = random_crop(*file.size, rng), rng.random() < 0.5
        # JPEGs are decoded at a half, a quarter or an eighth where that is still large enough.
        width, height = file.size
        wanted = (width * size / (box[2] - box[0]), height * size / (box[3] - box[1]))
        drafted = file.draft("RGB", (math.ceil(wanted[0]), math.ceil(wanted[1])))
        _, (_, _, across, down) = drafted or (None, (0, 0, width, height))  # what they are now
        across, down = across / width, down / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        image = file.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels


class Reader:
    """Decodes what an order asks for: a source of records for grain."""

    def __init__(
        self, files: Files, size: int, order: np.ndarray, places: np.ndarray, seed: Any
    ) -> None:
        """`order` has indices of images, or −1 for none; a seed of None is for the middle.

        What is random about an image depends on its place in the whole order and on nothing else.
        """
        self.files, self.size, self.order, self.places = files, size, order, places
        self.seed = seed

    def __len__(self) -> int:
        """Of the order."""
        return len(self.order)

    def __getitem__(self, k: Any) -> dict[str, Any]:
        """Image and label, −1 for none and for what cannot be read: it does not count."""
        index = int(self.order[k])
        if index >= 0:
            seeds = None if self.seed is None else (*self.seed, int(self.places[k]))
            rng = None if seeds is None else np.random.default_rng(seeds)
            path = self.files.paths[index]
            try:
                image = decode(path, self.size, rng)
            except UNDECODABLE as error:
                warnings.warn(f"{path} is left out: {error}", stacklevel=1)
            else:
                return {"images": image, "labels": self.files.labels[index]}
        return {
            "images": np.zeros((self.size, self.size, 3), np.uint8),
            "labels": np.int32(-1),
        }


def batches(
    files: Files, order: np.ndarray, batch: int, size: int, seed: Any, num_threads: int
) -> Iterator[dict[str, np.ndarray]]:
    """This process's part of each batch; an equal part for each, in the order of processes."""
    part = batch // jax.process_count()
    places = np.arange(len(order)).reshape(-1, jax.process_count(), part)[:, jax.process_index()]
    reader = Reader(files, size, order[places.ravel()], places.ravel(), seed)
    ahead = max(4 * part, num_threads)
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=ahead)
    records = grain.MapDataset.source(reader).to_iter_dataset(options)  # pyright: ignore[reportArgumentType]
    return iter(records.batch(part))


def normalize(images: jax.Array) -> jax.Array:
    """From 0…255 to mean 0 and standard deviation 1, or so."""
    return (images.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)


# ------------------------------------------------------------------------------------------ models


class Bottleneck(nnx.Module):
    """Convolutions of 1×1, 3×3 (with the strides) and 1×1, each with BatchNorm, and a shortcut."""

    def __init__(
        self, width_in: int, width: int, strides: int, *, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Of `width` filters, four times as many in the end."""
        conv = partial(convolution, dtype=dtype, rngs=rngs)
        norm = partial(nnx.BatchNorm, momentum=0.9, dtype=dtype, rngs=rngs)
        self.residual = nnx.Sequential(
            *(conv(width_in, width, 1, 1), norm(width), nnx.relu),
            *(conv(width, width, 3, strides), norm(width), nnx.relu),
            *(conv(width, 4 * width, 1, 1), norm(4 * width)),
        )
        project = lambda: nnx.Sequential(conv(width_in, 4 * width, 1, strides), norm(4 * width))
        reshapes = strides != 1 or width_in != 4 * width
        self.shortcut = project() if reshapes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, h, w, width_in) to (b, h / strides, w / strides, 4 width)."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(shortcut + self.residual(x))


class ResNet(nnx.Module):
    """He et al., Deep Residual Learning, 2015, with the strides at the 3×3 convolutions."""

    def __init__(
        self,
        num_blocks: Sequence[int],
        width: int,
        num_classes: int,
        *,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Stages of `num_blocks` blocks, each of twice the width of the one before."""
        self.stem = convolution(3, width, 7, 2, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)
        blocks, before = [], width
        for stage, depth in enumerate(num_blocks):
            for i in range(depth):
                strides, inner = (2 if stage > 0 and i == 0 else 1), width * 2**stage
                blocks.append(Bottleneck(before, inner, strides, dtype=dtype, rngs=rngs))
                before = 4 * inner
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(before, num_classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (b, h, w, 3) to logits (b, num_classes)."""
        x = nnx.relu(self.norm(self.stem(x)))
        pad: Any = ((1, 1), (1, 1))  # which flax takes, but has no type for
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=pad)
        return self.head(self.blocks(x).mean((1, 2), dtype=jnp.float32))


MODELS: dict[str, Callable[..., ResNet]] = {
    "small": partial(ResNet, (1, 1), 8),  # for a CPU
    "resnet50": partial(ResNet, (3, 4, 6, 3), 64),  # the paper's
}


# ---------------------------------------------------------------------------------------- training


@dataclasses.dataclass(frozen=True)
class Config(cifar10.Config):
    """What decides the result of a run."""

    batch_norm_group: int  # images; 0 for the whole batch
    image_size: int


class Program(NamedTuple):
    """What runs of a `Config`, whatever the seed, do on the devices of a mesh."""

    steps_per_epoch: int
    init: Callable[[int], State]
    epoch: Callable[..., tuple[State, dict[str, np.ndarray]]]
    evaluate: Callable[[State], dict[str, float]]
    step: Any  # jitted, from state, images and labels
    to_devices: Callable[[Any], Any]


def make_program(
    config: Config, train: Files, test: Files, mesh: Mesh, num_threads: int
) -> Program:
    """Data-parallel over a mesh; images are split among the devices, and the state is on each.

    The order of images, and what is random about them, follow from seed and epoch, whatever the
    number of processes and devices.
    """
    cifar10.check_batch(config, mesh)
    of_processes = Counter(device.process_index for device in mesh.devices.flat)
    if len(set(of_processes.values())) > 1:
        raise ValueError(f"processes must have equally many devices, got {dict(of_processes)}")
    group = config.batch_norm_group or None
    if config.batch % (group or 1):
        raise ValueError(
            f"--batch must be a multiple of --batch-norm-group {group}, got {config.batch}"
        )
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    steps_per_epoch = -(-len(train.paths) // config.batch)  # the last batch is filled up
    tx = cifar10.make_optimizer(config, steps_per_epoch, EPOCHS, DROPS)
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32
    make = partial(MODELS[config.model], num_classes=len(train.classes), dtype=dtype)
    steps = cifar10.make_steps(config, lambda key: make(rngs=nnx.Rngs(key)), tx, group)

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
        order = np.random.default_rng((seed, number)).permutation(len(train.paths))
        order = np.resize(order, steps_per_epoch * config.batch)
        of_steps, seeds = [], (seed, number)
        for batch in batches(train, order, config.batch, config.image_size, seeds, num_threads):
            state, metrics = step(state, *to_devices(batch))
            of_steps.append(metrics)
            jax.block_until_ready(of_steps[-2:][0])  # no more than two batches on the devices
            bar.update()
        metrics = jax.tree.map(lambda *values: np.stack(values), *jax.device_get(of_steps))
        if metrics["left_out"].sum() == len(order):
            raise ValueError("--data-dir must have training images that can be decoded, got none")
        return state, metrics

    def evaluate(state: State) -> dict[str, float]:
        short = -len(test.paths) % config.batch  # filled up with images that do not count
        order = np.pad(np.arange(len(test.paths)), (0, short), constant_values=-1)
        parts = []
        for batch in batches(test, order, config.batch, config.image_size, None, num_threads):
            parts.append(totals(state.params, state.batch_stats, *to_devices(batch)))
            jax.block_until_ready(parts[-2:][0])
        loss, correct, count = np.sum(jax.device_get(parts), 0)
        if not count:
            raise ValueError("--data-dir must have val images that can be decoded, got none")
        return {
            "test_loss": float(loss / count),
            "test_accuracy": float(correct / count),
            "test_left_out": len(test.paths) - int(count),
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


# -------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> str:
    parser = cifar10.make_parser(__doc__, list(MODELS), "resnet50", "results/imagenet")
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
    add("--measure", action="store_true", help="how fast images are read and trained on, no more")
    arguments = cifar10.parse_arguments(parser, argv)
    if arguments.batch_norm_group < 0:
        parser.error(f"--batch-norm-group must be >= 0, got {arguments.batch_norm_group}")
    cifar10.join_cluster(arguments)
    training = find(arguments.data_dir / "train")
    parts = training, find(arguments.data_dir / "val", training.classes)
    # Each process has its part of a batch, in their order, which is not that of ids on every TPU.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices), ("data",))
    configs = cifar10.make_configs(Config, arguments, EPOCHS)
    programs = [make_program(config, *parts, mesh, arguments.threads) for config in configs]
    if arguments.measure:
        text = measure(programs[0], configs[0], training, arguments.threads)
        if jax.process_index() == 0:
            print(text)
        return text
    data_digest = digest(*parts)
    for config, program in zip(configs, programs, strict=True):
        for seed in range(arguments.seeds):
            cifar10.run(
                dataclasses.replace(config, seed=seed),
                data_digest,
                arguments.out / config.optimizer / f"seed{seed}",
                program.steps_per_epoch,
                partial(program.init, seed),
                partial(program.epoch, seed),
                program.evaluate,
            )
    return cifar10.report(arguments, configs[0].epochs, mesh, "imagenet.png")


if __name__ == "__main__":
    command_line.run(main)
