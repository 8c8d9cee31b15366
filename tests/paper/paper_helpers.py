"""Shared by the tests of the paper's experiments: small networks, data, configs and
runs."""

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import orbax.checkpoint as ocp
import runs
import train_imagenet
import worker
from cifar_data import Images
from helpers import environment, rounding_noise
from jax.sharding import Mesh
from tqdm import tqdm
from training import Program, State

CIFAR10 = ["--model", "small", "--subset", "64", "--batch", "32", "--averaging", "0.2"]
IMAGENET = [
    "--model",
    "small",
    "--image-size",
    "32",
    "--batch",
    "16",
    "--batch-norm-group",
    "4",
]
IMAGENET += ["--threads", "2", "--learning-rate", "0.1"]
FIELDS = {
    "optimizer": "spa-gradual",
    "seed": 0,
    "model": "small",
    "bfloat16": False,
    "averaging": 0.1,
    "weight_decay": 1e-4,
    "track": False,
}


def config(optimizer: str = "spa-gradual", **kwargs: Any) -> optimizers.Config:
    """The paper's for CIFAR-10, but of the small network."""
    fields = {**FIELDS, "epochs": 300, "batch": 128, "learning_rate": 1.0}
    return optimizers.Config(**{**fields, "optimizer": optimizer, **kwargs})


def imagenet_config(**kwargs: Any) -> train_imagenet.Config:
    """The paper's for ImageNet, but of the small network, with small images and
    batches."""
    fields = {**FIELDS, "epochs": 100, "batch": 16, "learning_rate": 0.1}
    fields |= {"batch_norm_group": 4, "image_size": 32}
    return train_imagenet.Config(**{**fields, **kwargs})


def mesh_of(num_devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), ("data",))


def records(seed: int, num: int = 10_000) -> np.ndarray:
    """Records as in CIFAR-10's files, (num, 3073): images of one colour, which compress
    well."""
    labels = np.random.default_rng(seed).integers(0, 10, num, np.uint8)
    planes = np.stack(
        [25 * labels, 255 - 25 * labels, np.full(num, 9 * seed, np.uint8)], 1
    )
    return np.hstack([labels[:, None], np.repeat(planes, 1024, axis=1)])


def small_data() -> tuple[Images, Images]:
    """Random images of CIFAR-10's size: 24 to train on, 37 to test on."""
    rng = np.random.default_rng(0)

    def random_images(n: int) -> Images:
        images = rng.integers(0, 256, (n, 32, 32, 3), np.uint8)
        return images, rng.integers(0, 10, n).astype(np.int32)

    return random_images(24), random_images(37)


def arithmetic(stops_in: int | None = None) -> Program:
    """Arithmetic in place of training, three steps per epoch; Ctrl-C in epoch
    `stops_in`."""

    def init(seed: int) -> State:
        params = jax.random.normal(jax.random.key(seed), (5_000,))
        return State(params, {}, optax.EmptyState(), jnp.int32(0), jax.random.key(seed))

    def epoch(seed: int, state: State, number: int, bar: tqdm) -> Any:
        if number == stops_in:
            raise KeyboardInterrupt
        bar.update(3)
        state = state._replace(params=1.1 * state.params + number, step=state.step + 3)
        return state, {"loss": np.full(3, 1 / number, np.float32)}

    def evaluate(state: State) -> dict[str, float]:
        return {"test_loss": 1.0, "test_accuracy": float(state.params[0])}

    return Program(3, init, epoch, evaluate)


def tiny_run(folder: Path, seed: int = 0, **kwargs: Any) -> State:
    """Four epochs of `arithmetic`, saved as real runs are."""
    return runs.run(config(epochs=4, seed=seed), arithmetic(**kwargs), "data", folder)


def num_epochs(run: Path) -> int:
    """The number of epochs that a run has written."""
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, without those that depend on the clock."""
    lines = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    for line in lines:
        assert line.pop("images_per_second") > 0
    return lines


def last_checkpoint(run: Path, target: Any) -> State:
    """What a run has saved last, placed like `target`."""
    with ocp.CheckpointManager(run / "checkpoints") as manager:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return bits(manager.restore(manager.latest_step(), args=args)["state"])


def bits(state: State) -> State:
    """On the host, with the bits of the key."""
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


@contextlib.contextmanager
def noisy_optimizers(module: Any, ulps: float) -> Iterator[None]:
    """A script's optimizers with the noise of float32 sums: some ulps."""
    make = module.make_optimizer

    def noisy(*arguments: Any) -> optax.GradientTransformation:
        return optax.chain(make(*arguments), rounding_noise(ulps))

    with mock.patch.object(module, "make_optimizer", noisy):
        yield


def start(
    *commands: list[str], devices: int | None = None, **kwargs: Any
) -> subprocess.Popen[str]:
    """A process that runs scripts one after the other, each a path and its options.

    It has the networks of `worker.small_networks`, and by default the devices and XLA
    flags of this process, so that its results have the same bits."""
    command = [sys.executable, worker.__file__, json.dumps(commands)]
    return subprocess.Popen(command, env=environment(devices), text=True, **kwargs)


GAUGE = ("iterate_term", "gradient_term", "gain", "noise_level")


def fake_runs(folder: Path) -> None:
    """Two runs of each optimizer, whose numbers are known: 6 epochs of 200 steps.

    The drop is in the middle, as it is of all of CIFAR-10's runs.
    """
    for (i, name), seed in itertools.product(
        enumerate(optimizers.OPTIMIZERS), range(2)
    ):
        losses = np.where(np.arange(1_200) < 600, 2.0, 1.0) + seed
        losses[600:605] += i  # the spike
        lines = []
        for epoch, of_epoch in enumerate(losses.reshape(6, 200), 1):
            gauge: dict[str, Any] = {
                key: [1.0 + j + seed] * 200 for j, key in enumerate(GAUGE)
            }
            if epoch == 1:
                gauge["gain"][0] = None  # there is no step before
            line = {
                "epoch": epoch,
                "losses": of_epoch.tolist(),
                "train_loss": of_epoch.mean(),
                "test_accuracy": 0.5 + 0.01 * i + 0.02 * seed,
                "momentum": gauge,
            }
            lines.append(json.dumps(line) + "\n")
        run = folder / name / f"seed{seed}"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("".join(lines))
