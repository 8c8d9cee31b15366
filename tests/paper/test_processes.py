"""Both experiments in several processes, of which some are killed."""

import functools
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import paper_helpers as paper
import pytest
import train_cifar10
import train_imagenet
from helpers import assert_apart_by_rounding, free_address
from imagenet_data import find

pytestmark = pytest.mark.usefixtures("_small_networks")


def cluster(first: list[str], *others: list[str]) -> list[subprocess.Popen[str]]:
    """Two processes of two devices, which run the same scripts."""
    joined = ["--coordinator", free_address(), "--num-processes", "2", "--process-id"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return [
        paper.start([*first, *joined, str(i)], *others, devices=2, **pipes)
        for i in range(2)
    ]


def run_of(out: Path) -> Path:
    return out / "spa-gradual" / "seed0"


def assert_same_run(
    script: Any, options: Any, program: Any, two: Path, **at_most: float
) -> None:
    """The run in `two` differs by rounding alone from one in this process, on eight
    devices.

    The noise is of many ulps: rounding now and then moves a maximum elsewhere, which
    changes the params a thousand times more than rounding itself, and noise must not
    miss that by chance."""
    one, noisy = (
        two.with_name(f"{two.name} {name}") for name in ("in one", "with noise")
    )
    script.main([*options, "--out", str(one)])
    with paper.noisy_optimizers(script, ulps=16):
        script.main([*options, "--out", str(noisy)])
        noisy_state = paper.last_checkpoint(run_of(noisy), program().init(0))
    states = [
        paper.last_checkpoint(run_of(run), program().init(0)) for run in (two, one)
    ]
    states.append(noisy_state)
    assert len({int(state.step) for state in states}) == 1
    assert_apart_by_rounding(
        *(state.params for state in states), at_most=at_most["params"]
    )
    losses = [
        [line["losses"] for line in paper.metrics(run_of(run))]
        for run in (two, one, noisy)
    ]
    assert np.size(losses[0]) == states[0].step
    assert_apart_by_rounding(*losses, at_most=at_most["losses"])


@pytest.mark.long
def test_two_processes(tree: Path, data_options: list[str], tmp_path: Path) -> None:
    """Two processes of two devices are one of eight; one dies, the other stops, and
    both restart.

    It is the first that dies, to which the other reports, by a signal that JAX would
    catch.

    Rates are small, so that noise grows little.
    """
    small_rate = ["--epochs", "8", "--learning-rate", "0.001"]
    imagenet_options = [*paper.IMAGENET, "--data-dir", str(tree), *small_rate]
    imagenet = [
        "train_imagenet.py",
        *imagenet_options,
        "--out",
        str(tmp_path / "imagenet"),
    ]
    cifar_options = [
        *paper.CIFAR10,
        *data_options,
        "--epochs",
        "3",
        "--learning-rate",
        "0.01",
    ]
    cifar10 = ["train_cifar10.py", *cifar_options, "--out", str(tmp_path / "cifar10")]
    run = run_of(tmp_path / "imagenet")
    dies, other = cluster(imagenet)
    while other.poll() is None and paper.num_epochs(run) == 0:
        time.sleep(0.01)
    dies.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output = other.communicate()[0]
    assert time.monotonic() - began < 150  # 10 without a heartbeat
    assert other.returncode != 0
    dies.communicate()
    assert dies.returncode == -signal.SIGTERM
    assert "another task died" in output
    assert 0 < paper.num_epochs(run) < 8
    processes = cluster(imagenet, cifar10)
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0].count("4 × cpu") == 2
    assert "mean" not in outputs[1]
    files, mesh = [find(tree / part) for part in ("train", "val")], paper.mesh_of(1)
    program = functools.partial(
        train_imagenet.make_program, paper.imagenet_config(), *files, mesh, 1
    )
    two, limits = tmp_path / "imagenet", {"params": 3e-4, "losses": 3e-2}
    assert_same_run(train_imagenet, imagenet_options, program, two, **limits)
    program = functools.partial(
        train_cifar10.make_program, paper.config(), *paper.small_data(), mesh
    )
    two, limits = tmp_path / "cifar10", {"params": 1e-2, "losses": 1e-2}
    assert_same_run(train_cifar10, cifar_options, program, two, **limits)
