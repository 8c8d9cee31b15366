"""PreAct ResNets on CIFAR-10, by the recipe of the paper's experiment.

    python examples/cifar10.py --optimizer sgdm spa-gradual --seeds 5

downloads CIFAR-10 into `data`, trains on all devices, and prints a table. The recipe is the paper's
(Defazio, arXiv:2010.00406, "Details of experiments"): 300 epochs, batches of 128, weight decay
1e-4, η = 1 and c = 0.1 (α = 0.1, β = 0.9), η ÷ 10 at epochs 150 and 225, flips and crops. On a CPU:

    python examples/cifar10.py --model small --epochs 12

However a run was interrupted, the same command resumes it, and it ends as if it had not been
interrupted. If the newest checkpoint is damaged, the one before is resumed. --help says what the
optimizers are.
"""

import argparse
import dataclasses
import hashlib
import http.client
import io
import itertools
import json
import os
import signal
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError, plus_minus
from filelock import FileLock, Timeout
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from spa_optax import diagnostics, momentum_drop, spa, spa_from_sgdm, stagewise

EPOCHS, DROPS, FACTOR = 300, (150, 225), 10.0
RATE = 1.0005  # a step, where η falls gradually: a factor of 10 takes 4,606 steps, 11.8 epochs


# ------------------------------------------------------------------------------------------- data

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
NUM_CLASSES = 10
FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
NUM_RECORDS, RECORD = 10_000, 1 + 3 * 32 * 32  # a file's; a label, and a red, green and blue plane


class Images(NamedTuple):
    """Images (n, 32, 32, 3) uint8 and labels (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


def parse(name: str, content: bytes) -> Images:
    """One file of the binary version."""
    if len(content) != NUM_RECORDS * RECORD:
        raise UserError(
            f"{name} must be {NUM_RECORDS:,} records of {RECORD:,} bytes,"
            f" got {len(content):,} bytes"
        )
    records = np.frombuffer(content, np.uint8).reshape(NUM_RECORDS, RECORD)
    labels = records[:, 0].astype(np.int32)
    check_labels(name, labels)
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(images), labels)


def check_labels(name: str, labels: Any) -> None:
    """A larger label would make the loss NaN, and −1 would not count in it."""
    wrong = [label for label in np.unique(labels) if not 0 <= label < NUM_CLASSES]
    if wrong:
        raise UserError(f"{name} must have labels from 0 to {NUM_CLASSES - 1}, got {wrong[0]}")


def load(folder: Path, md5: str = MD5) -> tuple[Images, Images]:
    """The training and the test images, from the files of the binary version or their archive."""
    for place in (folder / FOLDER, folder):
        if (place / FILES[0]).exists():
            contents = {name: (place / name).read_bytes() for name in FILES}
            break
    else:
        contents = unpack(folder / ARCHIVE, md5)
    *train, test = [parse(name, contents[name]) for name in FILES]
    return Images(*(np.concatenate(arrays) for arrays in zip(*train, strict=True))), test


def unpack(archive: Path, md5: str) -> dict[str, bytes]:
    """The files in the archive, whose checksum is checked first."""
    if not archive.exists():
        raise UserError(
            f"no CIFAR-10, binary version, in {archive.parent}: no {FOLDER}, no {ARCHIVE}"
        )
    content = archive.read_bytes()
    check_md5(archive, content, md5)
    contents = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for name in FILES:
                file = tar.extractfile(f"{FOLDER}/{name}")
                contents[name] = file.read() if file else b""
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise UserError(f"{archive} is no archive of CIFAR-10, binary version: {error}") from error
    return contents


def check_md5(path: Path, content: bytes, md5: str) -> None:
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise UserError(f"{path} must have the MD5 checksum {md5}, got {found}")


def download(
    url: str, path: Path, md5: str = MD5, num_attempts: int = 5, wait: float = 2.0
) -> None:
    """Downloads a file beside its place, and puts it there once it is all there and the right one.

    After a break the download goes on where it broke off, also in another process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for attempt in range(1, num_attempts + 1):
        try:
            fetch(url, part)
            break
        except (OSError, http.client.HTTPException) as error:
            gone = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if gone or attempt == num_attempts:
                raise ConnectionError(
                    f"{url}: {error}. To go on from here, run again; or fetch it by any other means"
                    f" and put it at {path}"
                ) from error
            time.sleep(wait)
    try:
        check_md5(part, part.read_bytes(), md5)
    except UserError:
        part.unlink()  # whatever this is, there is no going on from it
        raise
    part.replace(path)


def fetch(url: str, part: Path) -> None:
    """Appends to `part` what it lacks."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is lacking; the checksum will tell
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            start = 0  # the server sends it all
        length = response.headers["Content-Length"]
        end = None if length is None else start + int(length)
        with (
            part.open("r+b" if start else "wb") as file,
            tqdm(desc=url, initial=start, total=end, unit="B", unit_scale=True) as bar,
        ):
            file.seek(start)
            while chunk := response.read(1 << 16):
                file.write(chunk)
                bar.update(len(chunk))
            if end is not None and file.tell() != end:
                raise ConnectionError(f"broke off at byte {file.tell():,} of {end:,}")


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Random flips, then random crops out of a black frame of 4 pixels; uint8 (b, 32, 32, 3)."""
    flip_key, crop_key = jax.random.split(key)
    flip = jax.random.bernoulli(flip_key, shape=(len(images), 1, 1, 1))
    images = jnp.where(flip, images[:, :, ::-1], images)
    framed = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 9)
    crop = lambda image, corner: jax.lax.dynamic_slice(image, (*corner, 0), (32, 32, 3))
    return jax.vmap(crop)(framed, corners)


def normalize(images: jax.Array) -> jax.Array:
    """From 0…255 to −1…1."""
    return (images.astype(jnp.float32) / 255 - 0.5) / 0.5


# ------------------------------------------------------------------------------------------ models


class Block(nnx.Module):
    """A pre-activation residual block: BatchNorm and ReLU before each convolution.

    The kernels are 3×3, 3×3, or in a bottleneck 1×1, 3×3, 1×1. Where the shape changes, the
    shortcut is a 1×1 convolution of what the first BatchNorm and ReLU make of the input.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        strides: int,
        *,
        bottleneck: bool,
        dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        """Of `width` filters, four times as many out of a bottleneck."""
        conv = partial(convolution, dtype=dtype, rngs=rngs)
        if bottleneck:
            shapes = [(width, 1, 1), (width, 3, strides), (4 * width, 1, 1)]
        else:
            shapes = [(width, 3, strides), (width, 3, 1)]
        layers, before = [], width_in
        for width_out, kernel, stride in shapes:
            norm = nnx.BatchNorm(before, momentum=0.9, dtype=dtype, rngs=rngs)
            layers += [norm, nnx.relu, conv(before, width_out, kernel, stride)]
            before = width_out
        self.activate = nnx.Sequential(*layers[:2])
        self.residual = nnx.Sequential(*layers[2:])
        self.width_out = before
        reshapes = strides != 1 or width_in != before
        self.shortcut = conv(width_in, before, 1, strides) if reshapes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, h, w, width_in) to (b, h / strides, w / strides, width_out)."""
        h = self.activate(x)
        return (x if self.shortcut is None else self.shortcut(h)) + self.residual(h)


class PreActResNet(nnx.Module):
    """He et al., Identity Mappings in Deep Residual Networks, 2016, for images of 32×32.

    With `dtype=jnp.bfloat16` the convolutions are computed in bfloat16; params, and the statistics
    and the arithmetic of BatchNorm, stay float32.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        widths: Sequence[int],
        *,
        bottleneck: bool = False,
        stem_strides: int = 1,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        """Stages of `num_blocks` blocks; each stage but the first halves height and width."""
        self.stem = convolution(3, widths[0], 3, stem_strides, dtype=dtype, rngs=rngs)
        blocks, before = [], widths[0]
        for stage, (depth, width) in enumerate(zip(num_blocks, widths, strict=True)):
            for i in range(depth):
                strides = 2 if stage > 0 and i == 0 else 1
                blocks.append(
                    Block(before, width, strides, bottleneck=bottleneck, dtype=dtype, rngs=rngs)
                )
                before = blocks[-1].width_out
        self.blocks = nnx.Sequential(*blocks)
        self.norm = nnx.BatchNorm(before, momentum=0.9, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(before, NUM_CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (b, 32, 32, 3) to logits (b, NUM_CLASSES)."""
        x = nnx.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((1, 2), dtype=jnp.float32))


def convolution(
    width_in: int, width_out: int, kernel: int, strides: int, *, dtype: Any, rngs: nnx.Rngs
) -> nnx.Conv:
    return nnx.Conv(
        width_in,
        width_out,
        (kernel, kernel),
        strides=strides,
        padding=kernel // 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
        rngs=rngs,
    )


WIDTHS = (64, 128, 256, 512)
MODELS: dict[str, Callable[..., PreActResNet]] = {
    "small": partial(PreActResNet, (1, 1, 1), (16, 32, 64), stem_strides=2),  # for a CPU
    "resnet18": partial(PreActResNet, (2, 2, 2, 2), WIDTHS),
    "resnet50": partial(PreActResNet, (3, 4, 6, 3), WIDTHS, bottleneck=True),
    "resnet152": partial(PreActResNet, (3, 8, 36, 3), WIDTHS, bottleneck=True),  # the paper's
}


# -------------------------------------------------------------------------------------- optimizers

OPTIMIZERS = {
    "sgdm": "optax.sgd with momentum, in PyTorch's form: α ÷ 10 at the drops",
    "spa_from_sgdm": "the same, as primal averaging",
    "spa-eta": "primal averaging, η ÷ 10 at the drops",
    "spa-abrupt": "η ÷ 10 and c × 10, at once",
    "spa-gradual": "η ÷ 10 and c × 10, by 1.0005 a step (more where the schedule is shortened)",
    "drop-eta": "spa-eta without momentum (c = 1) after epoch 1, η held",
    "drop-alpha": "spa-eta without momentum after epoch 1, α held, which divides η by 10 as well",
    "tenth": "spa-eta with momentum, but η ÷ 10 after epoch 1: the control for drop-alpha",
    "until-noise": "spa-eta, whose momentum is dropped once it no longer pays (spa_until_noise)",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What decides the result of a run."""

    optimizer: str
    seed: int
    model: str
    bfloat16: bool
    epochs: int
    batch: int
    learning_rate: float
    averaging: float
    weight_decay: float
    track: bool


def make_optimizer(
    config: Config,
    steps_per_epoch: int,
    epochs: int = EPOCHS,
    epochs_of_drops: Sequence[int] = DROPS,
) -> optax.GradientTransformationExtraArgs:
    """One of `OPTIMIZERS`; the schedule is the recipe's, shortened in proportion."""
    eta, c = config.learning_rate, config.averaging
    alpha, beta = eta * c, 1 - c
    scale = config.epochs / epochs
    drops = [round(epoch * scale * steps_per_epoch) for epoch in epochs_of_drops]
    if drops[0] < 1 or any(after <= before for before, after in itertools.pairwise(drops)):
        raise UserError(
            f"--epochs or --scale-epochs must leave steps between the drops,"
            f" got drops at steps {drops}"
        )
    # As slow as the recipe's, but each drop must arrive before the next.
    shortest = min(after - before for before, after in itertools.pairwise(drops))
    rate = max(RATE ** (1 / scale), FACTOR ** (1 / shortest))
    alphas = optax.piecewise_constant_schedule(alpha, dict.fromkeys(drops, 1 / FACTOR))
    eta_only = stagewise(eta, c, drops, FACTOR, averaging_rule="constant")
    make: dict[str, Callable[[], optax.GradientTransformation]] = {
        "sgdm": lambda: optax.sgd(alphas, momentum=beta),
        "spa_from_sgdm": lambda: spa_from_sgdm(alphas, momentum=beta),
        "spa-eta": lambda: spa(*eta_only),
        "spa-abrupt": lambda: spa(*stagewise(eta, c, drops, FACTOR)),
        "spa-gradual": lambda: spa(*stagewise(eta, c, drops, FACTOR, rate=rate)),
        "drop-eta": lambda: spa(*momentum_drop(*eta_only, steps_per_epoch, hold="eta")),
        "drop-alpha": lambda: spa(*momentum_drop(*eta_only, steps_per_epoch, hold="alpha")),
        "tenth": lambda: spa(
            *stagewise(eta, c, [steps_per_epoch, *drops], FACTOR, averaging_rule="constant")
        ),
        "until-noise": lambda: diagnostics.spa_until_noise(*eta_only),
    }
    if config.optimizer == "tenth" and drops[0] <= steps_per_epoch:
        raise UserError(
            f"tenth needs a first drop after epoch 1, got {config.epochs} epochs in all"
        )
    tx = make[config.optimizer]()
    if config.track:
        tx = diagnostics.track_momentum(tx)
    return optax.chain(optax.add_decayed_weights(config.weight_decay), tx)


# ---------------------------------------------------------------------------------------- training


class State(NamedTuple):
    """All that changes in a run, and all that a checkpoint holds."""

    params: Any
    batch_stats: Any
    opt_state: Any
    step: jax.Array
    key: jax.Array


class Steps(NamedTuple):
    """What is done with one batch, x (b, h, w, 3) and labels (b,); a label of −1 does not count."""

    init: Callable[[Any], State]  # from a seed
    update: Callable[..., tuple[State, dict[str, jax.Array]]]  # from state, x and labels
    totals: Callable[..., tuple[jax.Array, jax.Array]]  # from params, batch_stats, x and labels


def make_steps(
    config: Config,
    make_model: Callable[[jax.Array], nnx.Module],
    tx: optax.GradientTransformation,
    group: int | None = None,
) -> Steps:
    """To be jitted.

    Args:
      config: what to train.
      make_model: from a key to a network with BatchNorm.
      tx: the optimizer.
      group: how many images BatchNorm takes its statistics from; None means the whole batch.

    Returns:
      init: from a seed to the state at step 0.
      update: from a state, x and labels to the state after a step, and the loss, and what
        `momentum_report` said.
      totals: from params, batch_stats, x and labels to the sums of losses and of right answers.
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
        return State(params, batch_stats, tx.init(params), jnp.zeros([], jnp.int32), key)

    def forward(params: Any, batch_stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        model = nnx.merge(train_graph, params, batch_stats)
        return model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def by_groups(params: Any, batch_stats: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        if group is None:
            return forward(params, batch_stats, x)
        x = x.reshape(-1, group, *x.shape[1:])
        logits, batch_stats = jax.vmap(forward, (None, None, 0))(params, batch_stats, x)
        return logits.reshape(-1, logits.shape[-1]), jax.tree.map(lambda s: s.mean(0), batch_stats)

    def update(state: State, x: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            logits, batch_stats = by_groups(params, state.batch_stats, x)
            loss, _ = sums(logits, labels)
            return loss / jnp.maximum((labels >= 0).sum(), 1), batch_stats

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss}
        if config.track or config.optimizer == "until-noise":
            metrics |= diagnostics.momentum_report(opt_state)._asdict()
            metrics["c"] = optax.tree.get(opt_state, "c")
        return State(params, batch_stats, opt_state, state.step + 1, state.key), metrics

    def totals(params: Any, batch_stats: Any, x: jax.Array, labels: jax.Array) -> Any:
        return sums(nnx.merge(eval_graph, params, batch_stats)(x), labels)

    return Steps(init, update, totals)


def sums(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of losses, and of right answers."""
    real = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(real, labels, 0))
    return jnp.where(real, losses, 0).sum(), (real & (logits.argmax(-1) == labels)).sum()


class Program(NamedTuple):
    """What runs of a `Config`, whatever the seed, do on the devices of a mesh."""

    mesh: Mesh
    steps_per_epoch: int
    init: Callable[[int], State]
    epoch: Callable[..., tuple[State, dict[str, np.ndarray]]]
    evaluate: Callable[..., tuple[float, float]]


def make_program(
    config: Config, num_train: int, mesh: Mesh, *, scan: bool | None = None
) -> Program:
    """Data-parallel over a mesh of one device or more; images and state are on every device.

    A batch is split among the devices, and BatchNorm's statistics are those of the whole batch, so
    that the result does not depend on how many there are.

    Args:
      config: what to train.
      num_train: the number of training images.
      mesh: the devices, along one axis named "data".
      scan: whether an epoch is one `lax.scan`, or a loop over jitted steps. By default a loop on
        CPUs only, where XLA is some 30 times slower at a convolution inside of a scan.

    Returns:
      init: from a seed to the state at step 0.
      epoch: from a state, images, labels and a progress bar to the state after one more epoch, and
        the loss of every step, and what `momentum_report` said; the state that goes in is donated.
      evaluate: from params, batch_stats, images and labels to the mean loss and accuracy.
    """
    check_batch(config, mesh)
    if scan is None:
        scan = mesh.devices.flat[0].platform != "cpu"
    replicated = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("data"))
    steps_per_epoch = -(-num_train // config.batch)  # the last batch is filled up
    dtype = jnp.bfloat16 if config.bfloat16 else jnp.float32
    make_model = lambda key: MODELS[config.model](dtype=dtype, rngs=nnx.Rngs(key))
    steps = make_steps(config, make_model, make_optimizer(config, steps_per_epoch))

    def step(state: State, k: Any, order: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        batch = jax.lax.with_sharding_constraint(order[k], split)
        x = normalize(augment(jax.random.fold_in(state.key, state.step), images[batch]))
        return steps.update(state, x, labels[batch])

    def shuffle(state: State) -> jax.Array:
        """The batches of the epoch to come, (steps_per_epoch, batch)."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, 0), state.step)
        order = jax.random.permutation(key, num_train)
        return jnp.resize(order, (steps_per_epoch, config.batch))

    def scanned(state: State, images: jax.Array, labels: jax.Array) -> Any:
        body = partial(step, order=shuffle(state), images=images, labels=labels)
        return jax.lax.scan(body, state, jnp.arange(steps_per_epoch))

    jitted = partial(jax.jit, out_shardings=replicated)
    step_jitted, shuffle_jitted = jitted(step, donate_argnums=0), jitted(shuffle)
    scanned_jitted = jitted(scanned, donate_argnums=0)

    def epoch(state: State, images: jax.Array, labels: jax.Array, bar: tqdm) -> Any:
        check_labels("training data", labels)
        if scan:
            state, metrics = scanned_jitted(state, images, labels)
            metrics = jax.device_get(metrics)
            bar.update(steps_per_epoch)
            return state, metrics
        order, of_steps = shuffle_jitted(state), []
        for k in range(steps_per_epoch):
            state, metrics = step_jitted(state, k, order, images, labels)
            of_steps.append(jax.device_get(metrics))
            bar.update()
        return state, jax.tree.map(lambda *values: np.stack(values), *of_steps)

    @jitted
    def totals(params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        images, labels = jax.lax.with_sharding_constraint((images, labels), split)
        return steps.totals(params, batch_stats, normalize(images), labels)

    def evaluate(params: Any, batch_stats: Any, data: Images) -> tuple[float, float]:
        check_labels("test data", data.labels)
        size = 8 * config.batch
        parts = []
        for start in range(0, len(data.labels), size):
            images, labels = (array[start : start + size] for array in data)
            short = size - len(labels)  # filled up with images that do not count
            images = np.pad(images, [(0, short), (0, 0), (0, 0), (0, 0)])
            labels = np.pad(labels, (0, short), constant_values=-1)
            parts.append(totals(params, batch_stats, *on_all((images, labels), mesh)))
        loss, correct = np.sum(jax.device_get(parts), 0)
        return float(loss) / len(data.labels), float(correct) / len(data.labels)

    return Program(mesh, steps_per_epoch, jitted(steps.init), epoch, evaluate)


def check_batch(config: Config, mesh: Mesh) -> None:
    if config.batch % mesh.size:
        raise UserError(f"--batch must be a multiple of {mesh.size} devices, got {config.batch}")


def on_all(arrays: Any, mesh: Mesh) -> Any:
    """NumPy arrays that every process has, on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    put = lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])
    return jax.tree.map(put, arrays)


def train(program: Program, config: Config, data: tuple[Images, Images], folder: Path) -> State:
    """Trains, or goes on from the last checkpoint in `folder`; see `run`."""
    train_data, test_data = data
    check_labels("training data", train_data.labels)
    check_labels("test data", test_data.labels)
    digest = hashlib.sha256()
    for array in jax.tree.leaves(data):
        digest.update(array)
    on_devices = cache(lambda: on_all(tuple(train_data), program.mesh))

    def evaluate(state: State) -> dict[str, float]:
        loss, accuracy = program.evaluate(state.params, state.batch_stats, test_data)
        return {"test_loss": loss, "test_accuracy": accuracy}

    return run(
        config,
        digest.hexdigest(),
        folder,
        program.steps_per_epoch,
        lambda: program.init(config.seed),
        lambda state, _, bar: program.epoch(state, *on_devices(), bar),
        evaluate,
    )


# From a state, the number of the epoch and a progress bar to the state after it, and metrics.
Epoch = Callable[[State, int, tqdm], tuple[State, dict[str, np.ndarray]]]


def run(
    config: Config,
    data_digest: str,
    folder: Path,
    steps_per_epoch: int,
    init: Callable[[], State],
    do_epoch: Epoch,
    evaluate: Callable[[State], dict[str, float]],
) -> State:
    """Trains for all epochs, or goes on from the last checkpoint in `folder`.

    Writes `config.json`, `metrics.jsonl` with one line an epoch, and `checkpoints`. If another run
    has been there, or is training there now, that is an error.
    """
    with opened(config, data_digest, folder) as manager:
        name = f"{config.optimizer}, seed {config.seed}"
        state, first = restore(manager, init)
        saved = manager.all_steps()
        lines = Lines(folder / "metrics.jsonl", first, max(saved, default=0))
        for epoch in saved:
            if epoch > first:
                manager.delete(epoch)  # damaged, and about to be saved again
        if first == config.epochs:
            say(f"{name}: already done, in {folder}")
            return state
        say(
            f"{name}: resuming from epoch {first + 1} of {config.epochs}, in {folder}"
            if first
            else f"{name}: {command_line.count(config.epochs, 'epoch')}, written to {folder}"
        )
        bar = tqdm(
            desc=f"{config.optimizer} {config.seed}",
            initial=first * steps_per_epoch,
            total=config.epochs * steps_per_epoch,
            unit="step",
            disable=jax.process_index() > 0,
        )
        was_finite = True
        for epoch in range(first + 1, config.epochs + 1):
            start = time.perf_counter()
            state, metrics = do_epoch(state, epoch, bar)
            seconds = time.perf_counter() - start
            tested = evaluate(state)
            # What the last step used; SGD+M has neither.
            eta, c = (optax.tree.get(state.opt_state, name) for name in ("eta", "c"))
            left_out = metrics.pop("left_out", None)
            of_steps = {name: [as_json(v) for v in values] for name, values in metrics.items()}
            train_loss = metrics["loss"].mean(dtype=np.float64)
            speed = steps_per_epoch * config.batch / seconds
            line = {
                "epoch": epoch,
                "train_loss": as_json(train_loss),
                "test_loss": as_json(tested.pop("test_loss")),
                **tested,
                "eta": None if eta is None else as_json(eta),
                "c": None if c is None else as_json(c),
                "images_per_second": as_json(speed),
                "losses": of_steps.pop("loss"),
                "momentum": of_steps,
            }
            if left_out is not None:
                line["left_out"] = int(left_out.sum())
            lines.append(line)
            checksum = ocp.args.JsonSave({"sha256": sha256(state)})
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), checksum=checksum)
            manager.save(epoch, args=args)
            # In JSON a NaN is null, but a person should see it.
            shown = {"train_loss": train_loss, "test_accuracy": tested["test_accuracy"]}
            shown |= {"eta": eta, "c": c, "images_per_second": speed}
            shown["left_out"] = line.get("left_out")
            bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None})
            if was_finite and not np.isfinite(train_loss):
                say(f"{name}: the training loss of epoch {epoch} is {train_loss}")
                was_finite = False
        bar.close()
    return state


def say(text: str) -> None:
    """By the first process, above a progress bar."""
    if jax.process_index() == 0:
        tqdm.write(text)


@contextmanager
def opened(config: Config, data_digest: str, folder: Path) -> Iterator[ocp.CheckpointManager]:
    """The checkpoints of a run; no other process can open them as long as this one is alive."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ExitStack() as stack:
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(folder / "lock", timeout=0))
            except Timeout:
                raise UserError(
                    f"--out must not be in use: another process is training in {folder}"
                ) from None
        check_config(config, data_digest, folder)
        path = (folder / "checkpoints").absolute()
        yield stack.enter_context(ocp.CheckpointManager(path, options=options))


def sha256(state: Any) -> str:
    """SHA-256 of all that is in a state, with names, shapes and dtypes."""
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        result.update(leaf.tobytes())
    return result.hexdigest()


def restore(manager: ocp.CheckpointManager, init: Callable[[], State]) -> tuple[State, int]:
    """The newest checkpoint that is whole, and its epoch; without any, a new state and 0."""
    state, damaged = init(), {}
    args = ocp.args.Composite(
        state=ocp.args.StandardRestore(state), checksum=ocp.args.JsonRestore()
    )
    for epoch in sorted(manager.all_steps(), reverse=True):
        try:
            found = manager.restore(epoch, args=args)
            if found["checksum"] != {"sha256": sha256(found["state"])}:
                raise UserError("its content does not have the checksum that it was saved with")
        except Exception as error:  # damage shows in many ways
            damaged[epoch] = error
            reason = str(error).partition("\n")[0][:100]
            say(f"{manager.directory / str(epoch)} is damaged: {type(error).__name__}: {reason}")
        else:
            return found["state"], epoch
    if damaged:
        raise UserError(
            f"{manager.directory} must have a checkpoint that can be restored, got"
            f" {' and '.join(map(str, damaged))}, which cannot. To train this run from its start,"
            f" delete {manager.directory.parent}"
        ) from next(iter(damaged.values()))
    return state, 0


def as_json(value: Any) -> float | None:
    """Seven digits; null for what is not finite, which JSON has no word for."""
    return float(f"{value:.7g}") if np.isfinite(value) else None


def check_config(config: Config, data_digest: str, folder: Path) -> None:
    """A folder holds one run: the first process writes what it is, and all compare."""
    found = {**dataclasses.asdict(config), "data": data_digest}
    path = folder / "config.json"
    if jax.process_index() == 0 and not path.exists():
        if (folder / "metrics.jsonl").exists():
            raise UserError(f"--out has a run without its config.json in {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps(found, indent=2) + "\n")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("config")
    if not path.exists():
        raise UserError(f"--out must be on a disk that all processes share, got {folder}")
    there = read_object(str(path), read(path))
    if there != found:
        keys = [key for key in {**there, **found} if there.get(key) != found.get(key)]
        differences = ", ".join(f"{k} {there.get(k)!r} and not {found.get(k)!r}" for k in keys)
        raise UserError(f"--out has another run in {folder}, with {differences}")


def read(path: Path) -> str:
    """The text of a file, whatever it is: the checks of its content say what is wrong with it."""
    return path.read_text(encoding="utf-8", errors="replace")


def read_object(name: str, text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        result = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{name} must be JSON, got {text[:40]!r}: {error}") from error
    if not isinstance(result, dict):
        raise UserError(f"{name} must be a JSON object, got {text[:40]!r}")
    return result


def read_epochs(path: Path, lines: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of epochs 1, 2, 3, … in the lines of a file."""
    epochs = [read_object(f"{path}, line {i},", line) for i, line in enumerate(lines, 1)]
    for i, epoch in enumerate(epochs, 1):
        if epoch.get("epoch") != i:
            raise UserError(f"{path}, line {i}, must be of epoch {i}, got {epoch.get('epoch')}")
        if lacking := {"train_loss", "test_accuracy", "losses"} - set(epoch):
            raise UserError(f"{path}, line {i}, must have {min(lacking)}, got none")
    return epochs


def write(path: Path, text: str) -> None:
    """All or nothing."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


class Lines:
    """A file of JSON lines, one an epoch, of which the first process of a run is the keeper."""

    def __init__(self, path: Path, num_epochs: int, newest: int) -> None:
        """Keeps the lines of the first `num_epochs`: what came later will come again.

        The newest checkpoint, which may be damaged, is that of epoch `newest`.
        """
        self.path = path
        if jax.process_index() == 0:
            lines = read(path).splitlines() if path.exists() else []
            # A run is stopped with an epoch or two more than its last checkpoint has.
            most = newest + 2
            if not num_epochs <= len(lines) <= most:
                raise UserError(
                    f"{path} must have the {num_epochs} epochs of the last checkpoint beside it, or"
                    f" up to {most - num_epochs} more, got {len(lines)}"
                )
            read_epochs(path, lines[:num_epochs])
            write(path, "".join(f"{line}\n" for line in lines[:num_epochs]))

    def append(self, line: dict[str, Any]) -> None:
        """Before the checkpoint of the same epoch."""
        if jax.process_index() == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------ report

Runs = dict[str, list[list[dict[str, Any]]]]  # of an optimizer: of a seed: of an epoch: its metrics


def read_runs(out: Path, names: Sequence[str], num_seeds: int) -> Runs:
    """The metrics that runs left in their folders, all of equally many epochs."""
    runs: Runs = {}
    for name in names:
        runs[name] = []
        for seed in range(num_seeds):
            path = out / name / f"seed{seed}" / "metrics.jsonl"
            if not path.exists():
                raise UserError(f"{out} must have a run of {name} with seed {seed}, got no {path}")
            runs[name].append(read_epochs(path, read(path).splitlines()))
            found, num_epochs = len(runs[name][-1]), len(runs[names[0]][0])
            if found != num_epochs or not found:
                raise UserError(
                    f"{path} must have as many epochs as all runs in {out}, got {found}"
                    f" and not {num_epochs}"
                )
    return runs


def mean_and_error(values: np.ndarray) -> tuple[Any, Any]:
    """Over seeds, the first axis, with the standard error, which is NaN for one seed."""
    one = len(values) == 1
    spread = np.full(values.shape[1:], np.nan) if one else values.std(0, ddof=1)
    return values.mean(0), spread / np.sqrt(len(values))


def over_seeds(runs: list[list[dict[str, Any]]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error of a metric, at every epoch."""
    return mean_and_error(np.array([[line[key] for line in run] for run in runs], float))


def table(runs: Runs) -> str:
    """The last epoch: mean ± standard error over seeds."""
    rows = [f"{'':14} {'training loss':>17} {'test accuracy':>18} {'images/s':>9}"]
    for name, of_seeds in runs.items():
        loss, accuracy = (
            [values[-1] for values in over_seeds(of_seeds, key)]
            for key in ("train_loss", "test_accuracy")
        )
        percent = plus_minus(100 * accuracy[0], 100 * accuracy[1], ".2f", " %")
        # An epoch that compiles is not typical.
        speed = [line["images_per_second"] for run in of_seeds for line in run[1:] or run]
        rows.append(
            f"{name:14} {plus_minus(loss[0], loss[1]):>17} {percent:>18} {np.median(speed):9,.0f}"
        )
    return "\n".join(rows)


def draw(runs: Runs, path: Path) -> None:
    """Training loss and test error over the epochs, with bands of one standard error."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, key in zip(axes, ("train_loss", "test_accuracy"), strict=True):
        for name, of_seeds in runs.items():
            mean, error = over_seeds(of_seeds, key)
            epochs = np.arange(1, len(mean) + 1)
            axis.plot(epochs, mean, marker="." if len(mean) < 20 else "", label=name)
            axis.fill_between(epochs, mean - error, mean + error, alpha=0.2)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set(xlabel="epoch", ylabel=key.replace("_", " ").replace("train ", "training "))
    if name_lost_curves(axes[0]):
        axes[0].set_yscale("log")
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def name_lost_curves(axis: Any) -> bool:
    """Names curves without a finite value, as those of runs that diverged; is another left?"""
    curves = {line.get_label(): np.asarray(line.get_ydata()) for line in axis.get_lines()}
    lost = [name for name, values in curves.items() if not np.isfinite(values).any()]
    if lost:
        axis.text(0.02, 0.02, f"not finite: {', '.join(lost)}", transform=axis.transAxes, wrap=True)
    return len(lost) < len(curves)


# -------------------------------------------------------------------------------------------- main


def make_parser(
    description: str | None, models: Sequence[str], model: str, out: str
) -> argparse.ArgumentParser:
    """What all examples of this kind have."""
    epilog = "optimizers:\n" + "\n".join(f"  {name:14} {text}" for name, text in OPTIMIZERS.items())
    parser = command_line.make_parser(description, epilog)
    add = parser.add_argument
    optimizers = [*OPTIMIZERS, "all"]
    add("--optimizer", nargs="+", action="extend", choices=optimizers, help="see below")
    add("--model", choices=models, default=model, help="the network")
    add("--bfloat16", action="store_true", help="compute convolutions in bfloat16")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="shortens the whole schedule to so many epochs")
    length.add_argument(
        "--scale-epochs", type=float, default=1.0, help="shortens it by this factor"
    )
    add("--seeds", type=int, default=1, help="how many")
    add("--batch", type=int, default=128, help="of all devices together")
    add("--learning-rate", type=float, default=1.0, help="η; α of SGD+M is η c")
    add("--averaging", type=float, default=0.1, help="c; β of SGD+M is 1 − c")
    add("--weight-decay", type=float, default=1e-4, help="added to the gradient")
    add("--out", type=Path, default=Path(out), help="a folder for all that is written")
    add("--track", action="store_true", help="write what track_momentum finds")
    add("--distributed", action="store_true", help="one of several processes of a cluster, found")
    add("--coordinator", help="HOST:PORT of the first process, where the cluster is not found")
    add("--num-processes", type=int, help="of the cluster, with --coordinator")
    add("--process-id", type=int, help="of this process, from 0, with --coordinator")
    return parser


def parse_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    names = arguments.optimizer or ["spa-gradual"]
    arguments.optimizer = list(OPTIMIZERS if "all" in names else dict.fromkeys(names))
    cluster = (arguments.coordinator, arguments.num_processes, arguments.process_id)
    if None in cluster and cluster != (None, None, None):
        parser.error("--coordinator, --num-processes and --process-id go together")
    if arguments.track and not {"sgdm", "until-noise"}.isdisjoint(arguments.optimizer):
        parser.error("--track is for primal averaging, not for sgdm, and until-noise has it anyway")
    names = ("epochs", "scale_epochs", "seeds", "batch", "learning_rate", "averaging")
    command_line.check_positive(parser, arguments, *names, "subset", "image_size", "threads")
    if arguments.averaging > 1:
        parser.error(f"--averaging must be <= 1, got {arguments.averaging}")
    if not 0 <= arguments.weight_decay < float("inf"):
        parser.error(f"--weight-decay must be finite and >= 0, got {arguments.weight_decay}")
    command_line.check_writable(parser, arguments, "out", "folder")
    return arguments


def join_cluster(arguments: argparse.Namespace) -> None:
    """Where one dies or fails after all have joined, JAX stops the others within a minute."""
    if arguments.distributed or arguments.coordinator:
        newer: Any = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
        newer = newer if jax.__version_info__ >= (0, 7) else {}
        cluster = (arguments.coordinator, arguments.num_processes, arguments.process_id)
        jax.distributed.initialize(*cluster, **newer)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX catches it, and would go on


def make_configs(kind: type[Config], arguments: argparse.Namespace, epochs: int) -> list[Any]:
    """One for each optimizer, for seed 0."""
    fields = {field.name for field in dataclasses.fields(kind)}
    shared = {key: value for key, value in vars(arguments).items() if key in fields}
    shared["epochs"] = arguments.epochs or max(1, round(epochs * arguments.scale_epochs))
    return [kind(**{**shared, "optimizer": name, "seed": 0}) for name in arguments.optimizer]


def report(arguments: argparse.Namespace, epochs: int, mesh: Mesh, picture: str) -> str:
    """A table and a picture of what is in the folders, by the first process."""
    if jax.process_index() > 0:
        return ""
    runs = read_runs(arguments.out, arguments.optimizer, arguments.seeds)
    text = table(runs)
    devices = f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    length, seeds = command_line.count(epochs, "epoch"), command_line.count(arguments.seeds, "seed")
    print(f"\n{arguments.model}, {length}, {seeds}, {devices}\n{text}")
    draw(runs, arguments.out / picture)
    print(f"\nCurves: {arguments.out / picture}")
    return text


def get_data(arguments: argparse.Namespace) -> tuple[Images, Images]:
    folder = arguments.data_dir
    if folder is None:
        folder = Path("data")
        # The first process downloads; the others need to where the folder is not shared.
        for turn in (True, False):
            missing = not (folder / FOLDER).exists() and not (folder / ARCHIVE).exists()
            if missing and turn == (jax.process_index() == 0):
                download(arguments.url, folder / ARCHIVE, arguments.md5)
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"data {turn}")
    train_data, test_data = load(folder, arguments.md5)
    if arguments.subset:
        sizes = (arguments.subset, -(-arguments.subset // 5))
        train_data, test_data = (
            Images(part.images[:size], part.labels[:size])
            for part, size in zip((train_data, test_data), sizes, strict=True)
        )
    return train_data, test_data


def main(argv: Sequence[str] | None = None) -> str:
    parser = make_parser(__doc__, list(MODELS), "resnet18", "results/cifar10")
    add = parser.add_argument
    add(
        "--data-dir", type=Path, help="has CIFAR-10, binary version; else it is downloaded to data/"
    )
    add("--url", default=URL, help="where to download it from")
    add("--md5", default=MD5, help="the checksum of the archive")
    add("--subset", type=int, help="only so many training images, and a fifth as many test images")
    arguments = parse_arguments(parser, argv)
    join_cluster(arguments)
    data = get_data(arguments)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    configs = make_configs(Config, arguments, EPOCHS)
    programs = [make_program(config, len(data[0].labels), mesh) for config in configs]
    for config, program in zip(configs, programs, strict=True):
        for seed in range(arguments.seeds):
            folder = arguments.out / config.optimizer / f"seed{seed}"
            train(program, dataclasses.replace(config, seed=seed), data, folder)
    return report(arguments, configs[0].epochs, mesh, "cifar10.png")


if __name__ == "__main__":
    command_line.run(main)
