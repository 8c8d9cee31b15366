"""Tables of finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from command_line import UserError, count, mean_and_error, plus_minus
from jax.sharding import Mesh
from optimizers import Config
from runs import read_epochs, run_folder

Runs = dict[str, list[list[dict[str, Any]]]]  # of an optimizer: of a seed: of an epoch: its metrics


def read_runs(out: Path, names: Sequence[str], num_seeds: int) -> Runs:
    """The metrics that runs left in their folders, all of equally many epochs."""
    runs: Runs = {}
    for name in names:
        runs[name] = []
        for seed in range(num_seeds):
            path = run_folder(out, name, seed) / "metrics.jsonl"
            if not path.exists():
                raise UserError(f"{out} must have a run of {name} with seed {seed}, got no {path}")
            runs[name].append(read_epochs(path))
            found, num_epochs = len(runs[name][-1]), len(runs[names[0]][0])
            if found != num_epochs:
                raise UserError(f"{path} must have {num_epochs} epochs, as the first, got {found}")
    return runs


def of_epochs(runs: list[list[dict[str, Any]]], key: str) -> np.ndarray:
    """A metric, (seeds, epochs)."""
    return np.array([[line[key] for line in run] for run in runs], float)


def last(runs: Runs, name: str, key: str) -> np.ndarray:
    """A metric of the last epoch, of each seed; accuracy in %."""
    return of_epochs(runs[name], key)[:, -1] * (100 if key == "test_accuracy" else 1)


def table(titles: Sequence[str], rows: dict[str, Sequence[np.ndarray]]) -> str:
    """Mean ± standard error over seeds of each cell."""
    cell = lambda values: f"{plus_minus(*mean_and_error(values)):>18}"
    lines = [" " * 30 + "".join(f"{title:>18}" for title in titles)]
    return "\n".join(lines + [f"{n:30}" + "".join(map(cell, cells)) for n, cells in rows.items()])


def report(configs: Sequence[Config], num_seeds: int, out: Path, mesh: Mesh) -> str:
    """Prints a table of runs, in the first process only."""
    if jax.process_index() > 0:
        return ""
    runs = read_runs(out, [config.optimizer for config in configs], num_seeds)
    keys = ("train_loss", "test_accuracy")
    text = table(
        ("training loss", "test accuracy, %"),
        {name: [last(runs, name, key) for key in keys] for name in runs},
    )
    devices = f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    of = configs[0].model, count(configs[0].epochs, "epoch"), count(num_seeds, "seed"), devices
    print(f"\n{', '.join(of)}\n{text}")
    return text
