"""ResNet-50 on ImageNet, by the recipe of the paper's second experiment, on any number of hosts.

    python examples/imagenet.py --data-dir DIR

where DIR has the usual folders, train/CLASS/*.JPEG and val/CLASS/*.JPEG. The recipe is the paper's
(Defazio, arXiv:2010.00406, "Details of experiments"): 100 epochs, weight decay 1e-4, η = 1 and
c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 every 30 epochs, random resized crops of 224 and flips, batches
of 8 × 32, with BatchNorm within each 32. On several hosts start it on each, with --distributed (or
--coordinator and its companions) and --out on a disk that they share. To try it without ImageNet:

    python examples/photographs.py photographs
    python examples/imagenet.py --data-dir photographs --model small --scale-epochs 0.05

Images are JPEGs and PNGs. One that cannot be decoded is left out of the loss (BatchNorm sees a
black image), reported and counted. It is an error if their share exceeds --max-left-out, if a class
has no images, or if a file cannot be read. However a run was interrupted, the same command resumes
it, with the same result. Command line, results and optimizers are those of `cifar10.py`.
"""

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import threading
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
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

EPOCHS, DROPS = 100, (30, 60, 90)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of red, green and blue, from 0 to 1
SUFFIXES = {".jpeg", ".jpg", ".png"}
FORMATS = ("JPEG", "PNG")  # of the content; other formats may start programs (EPS: Ghostscript)
MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK"}  # of 8 bits or fewer, as Pillow has them
WAITS = (0.1, 1.0, 5.0)  # seconds, before a file that cannot be read is tried again
MAX_LEFT_OUT = 0.01
NUM_REPORTED = 10  # files that are left out; further ones are only counted


# ------------------------------------------------------------------------------------------- data


class Files(NamedTuple):
    """Images that are read when they are wanted."""

    paths: list[Path]
    labels: np.ndarray  # (n,) int32, the places of their folders in the order of names
    classes: list[str]
    left_out: dict[Path, str]  # files that this process could not decode, and why


def entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder has in the order of names, except for hidden names.

    An entry knows its type. To ask the disk about each of a million files takes minutes.
    """
    with os.scandir(folder) as found:
        visible = (entry for entry in found if not entry.name.startswith("."))
        result = sorted(visible, key=lambda entry: entry.name)
    for entry in result:
        if not (entry.is_file() or entry.is_dir()):  # reading from a pipe would not end
            raise cifar10.UserError(
                f"{entry.path} must be a file, a folder or a link to one, got neither"
            )
    return result


def find(folder: Path, classes: list[str] | None = None) -> Files:
    """The images in the folders of their classes, all in the order of names."""
    if not folder.is_dir():
        raise cifar10.UserError(
            f"--data-dir must have a folder {folder.name}, got none at {folder}"
        )
    found = [entry.name for entry in entries(folder) if entry.is_dir()]
    if not found:
        raise cifar10.UserError(f"{folder} must have a folder of images for each class, got none")
    if classes is None:
        classes = found
    for problem, names in (("no", set(classes) - set(found)), ("also", set(found) - set(classes))):
        if names:
            raise cifar10.UserError(
                f"{folder} must have the training classes, got {problem} {min(names)}"
            )
    paths, labels = [], []
    for label, name in enumerate(classes):
        suffix = lambda entry: os.path.splitext(entry.name)[1].lower()
        of_class = [entry for entry in entries(folder / name) if suffix(entry) in SUFFIXES]
        if not of_class:
            raise cifar10.UserError(
                f"{folder / name} must have images ({', '.join(sorted(SUFFIXES))})"
            )
        for entry in of_class:
            if entry.is_dir():
                raise cifar10.UserError(f"{entry.path} must be a file, got a folder")
            paths.append(Path(entry.path))
        labels += [label] * len(of_class)
    return Files(paths, np.array(labels, np.int32), classes, {})


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


def decode(content: bytes, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """An image (size, size, 3) uint8: cropped and flipped at random, or with no `rng` the middle.

    That is the middle 7/8 of an image whose shorter side is 8/7 of `size`: of 256 at 224. Alpha is
    dropped and EXIF orientation is ignored, both as in torchvision.
    """
    try:
        file = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"must be a JPEG or PNG, got {content[:12]} at its start") from None
    with file:
        width, height = file.size
        # Pillow warns of these, and raises for twice as many.
        if Image.MAX_IMAGE_PIXELS and width * height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(
                f"must have at most {Image.MAX_IMAGE_PIXELS:,} pixels, got {width}×{height}"
            )
        if rng is None:
            side = min(width, height) * 7 / 8
            left, upper = (width - side) / 2, (height - side) / 2
            box, flip = (left, upper, left + side, upper + side), False
        else:
            box, flip = random_crop(width, height, rng), rng.random() < 0.5
        # JPEGs are decoded at a half, a quarter or an eighth where that is still large enough.
        wanted = (width * size / (box[2] - box[0]), height * size / (box[3] - box[1]))
        drafted = file.draft("RGB", (math.ceil(wanted[0]), math.ceil(wanted[1])))
        _, (_, _, across, down) = drafted or (None, (0, 0, width, height))  # what they are now
        across, down = across / width, down / height
        box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        image = to_rgb(file).resize((size, size), Image.Resampling.BILINEAR, box)
        pixels = np.asarray(image)
    return pixels[:, ::-1] if flip else pixels


def to_rgb(image: Image.Image) -> Image.Image:
    """The same with 8 bits a channel, without alpha."""
    if image.mode == "I;16":  # a gray PNG of 16 bits; `convert` clips at 255 instead of scaling
        image = Image.fromarray(((np.asarray(image, np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode not in MODES:
        raise ValueError(f"the mode must be one of {', '.join(sorted(MODES))}, got {image.mode}")
    image.info.pop("transparency", None)  # `convert` warns of some kinds
    return image if image.mode == "RGB" else image.convert("RGB")


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
        self.lock, self.has_failed = threading.Lock(), False

    def __len__(self) -> int:
        """Of the order."""
        return len(self.order)

    def __getitem__(self, k: Any) -> dict[str, Any]:
        """Image and label, −1 for none and for what cannot be decoded: it does not count."""
        index = int(self.order[k])
        if index >= 0:
            seeds = None if self.seed is None else (*self.seed, int(self.places[k]))
            rng = None if seeds is None else np.random.default_rng(seeds)
            path = self.files.paths[index]
            content = self.read(path)  # not in `try`: if this fails the image may still be good
            try:
                image = decode(content, self.size, rng)
            except MemoryError:  # the size of images is limited, so this machine has too little
                raise
            except Exception as error:
                # A decoder may raise anything for a broken file. A mistake in `decode` itself would
                # leave out all files, which `check_left_out` does not allow.
                self.leave_out(path, error)
            else:
                return {"images": image, "labels": self.files.labels[index]}
        return {
            "images": np.zeros((self.size, self.size, 3), np.uint8),
            "labels": np.int32(-1),
        }

    def read(self, path: Path) -> bytes:
        """The content of a file, tried again on failure: a network's disk may come back.

        After the first final failure nothing waits any more, and the threads end soon.
        """
        for wait in WAITS:
            with contextlib.suppress(OSError):
                return path.read_bytes()
            if not self.has_failed:
                time.sleep(wait)
        try:
            return path.read_bytes()
        except OSError as error:  # an error after opening does not name the file
            self.has_failed = True
            raise OSError(error.errno, error.strerror, str(path)) from error

    def leave_out(self, path: Path, error: Exception) -> None:
        """Reports the first files, each once."""
        left_out, reason = self.files.left_out, f"{type(error).__name__}: {error}"
        with self.lock:
            if path in left_out:
                return
            left_out[path] = reason
            number = len(left_out)
        if number <= NUM_REPORTED:
            warnings.warn(f"{path} is left out: {reason}", stacklevel=1)
        elif number == NUM_REPORTED + 1:
            warnings.warn("more files are left out; metrics.jsonl has their number", stacklevel=1)


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


def check_left_out(files: Files, part: str, num: int, total: int, max_left_out: float) -> None:
    """Raises if too many are left out. `num` is of all processes, so all of them stop."""
    if num > max_left_out * total:
        examples = (f"{path}: {reason}" for path, reason in files.left_out.items())
        raise cifar10.UserError(
            f"--data-dir must have at most {100 * max_left_out:.3g} % of {part} images that cannot"
            f" be decoded (--max-left-out), got {num:,} of {total:,} ({100 * num / total:.3g} %),"
            f" such as {next(examples, 'those that another process reports')}"
        )


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
    cifar10.check_batch(config, mesh)
    of_processes = Counter(device.process_index for device in mesh.devices.flat)
    if len(set(of_processes.values())) > 1:
        raise cifar10.UserError(
            f"processes must have equally many devices, got {dict(of_processes)}"
        )
    group = config.batch_norm_group or None
    if config.batch % (group or 1):
        raise cifar10.UserError(
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
    add(
        "--max-left-out",
        type=float,
        default=MAX_LEFT_OUT,
        help="the share of images that may be left out because they cannot be decoded",
    )
    add("--measure", action="store_true", help="how fast images are read and trained on, no more")
    arguments = cifar10.parse_arguments(parser, argv)
    if arguments.batch_norm_group < 0:
        parser.error(f"--batch-norm-group must be >= 0, got {arguments.batch_norm_group}")
    if not 0 <= arguments.max_left_out < 1:
        parser.error(f"--max-left-out must be >= 0 and < 1, got {arguments.max_left_out}")
    cifar10.join_cluster(arguments)
    training = find(arguments.data_dir / "train")
    parts = training, find(arguments.data_dir / "val", training.classes)
    # Each process has its part of a batch, in their order, which is not that of ids on every TPU.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices), ("data",))
    configs = cifar10.make_configs(Config, arguments, EPOCHS)
    limits = arguments.threads, arguments.max_left_out
    programs = [make_program(config, *parts, mesh, *limits) for config in configs]
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
