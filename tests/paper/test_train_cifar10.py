"""CIFAR-10: one run computed in different ways, killed and resumed, and the command
line."""

import dataclasses
import random
import signal
import time
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import paper_helpers as paper
import pytest
import train_cifar10
from helpers import assert_apart_by_rounding
from optimizers import Config
from tqdm import tqdm
from training import on_all

pytestmark = pytest.mark.usefixtures("_small_networks")


def make_program(cfg: Config, num_devices: int = 1) -> Any:
    train, test = paper.small_data()
    mesh = paper.mesh_of(num_devices)
    train = on_all(train, mesh)
    return train_cifar10.make_program(cfg, train, test, mesh)


def run_epochs(cfg: Config, num_devices: int = 1) -> Any:
    """State, losses and scores after two epochs."""
    program = make_program(cfg, num_devices)
    state, losses = program.init(cfg.seed), []
    for number in (1, 2):
        state, of_epoch = program.epoch(cfg.seed, state, number, tqdm(disable=True))
        losses.append(of_epoch["loss"])
    return (
        jax.device_get(state._replace(key=0)),
        np.concatenate(losses),
        program.evaluate(state),
    )


def parts_of(run: Any) -> tuple[Any, ...]:
    """What must be the same, of what `run_epochs` returns."""
    state, *results = run
    return state.params, state.batch_stats, results


@pytest.mark.long
def test_other_ways_to_run_the_same() -> None:
    """Over both drops: as SPA, and on eight devices, whose sums are in another
    order."""
    cfg = paper.config("sgdm", batch=8, epochs=2, learning_rate=0.1)
    reference = run_epochs(cfg)
    with paper.noisy_optimizers(train_cifar10, ulps=4):
        noisy = run_epochs(cfg)
    spa = dataclasses.replace(cfg, optimizer="spa_from_sgdm")
    for other in (run_epochs(spa), run_epochs(cfg, 8)):
        assert other[0].step == reference[0].step == 6
        for parts in zip(*map(parts_of, (other, reference, noisy)), strict=True):
            assert_apart_by_rounding(*parts, at_most=1e-3)


@pytest.mark.long
def test_command_line(data_options: list[str], tmp_path: Path, capsys: Any) -> None:
    arguments = [
        *paper.CIFAR10,
        *data_options,
        "--epochs",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--optimizer", "spa-gradual", "--seeds", "2"]
    text = train_cifar10.main(arguments)
    (row,) = text.splitlines()[1:]
    assert row.split()[0] == "spa-gradual"
    assert row.count("±") == 2
    lines = paper.metrics(tmp_path / "out" / "spa-gradual" / "seed1")
    assert [(line["epoch"], len(line["losses"])) for line in lines] == [(1, 2), (2, 2)]
    assert (
        lines[0]["eta"] == lines[0]["c"] == 1
    )  # in one step: the next drop is the next step
    assert "step/s" in capsys.readouterr().err
    assert train_cifar10.main(arguments) == text
    assert "step/s" not in capsys.readouterr().err  # nothing is trained again


@pytest.mark.long
def test_killed_and_resumed(data_options: list[str], tmp_path: Path) -> None:
    """SIGKILL at any moment: the params in the end are the same, to the bit."""
    arguments = [*paper.CIFAR10, *data_options, "--epochs", "8", "--out"]
    whole, killed = (
        tmp_path / name / "spa-gradual" / "seed0" for name in ("whole", "killed")
    )
    train_cifar10.main([*arguments, str(tmp_path / "whole")])
    process = paper.start(["train_cifar10.py", *arguments, str(tmp_path / "killed")])
    while process.poll() is None and paper.num_epochs(killed) == 0:
        time.sleep(0.01)
    time.sleep(random.Random(0).uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert paper.num_epochs(killed) < 8
    train_cifar10.main([*arguments, str(tmp_path / "killed")])
    target = make_program(paper.config()).init(0)
    chex.assert_trees_all_equal(
        *(paper.last_checkpoint(run, target) for run in (whole, killed))
    )
    assert paper.metrics(whole) == paper.metrics(killed)
    assert len(paper.metrics(whole)) == 8
