"""Tables and pictures of finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import jax
import matplotlib.pyplot as plt
import numpy as np
from command_line import UserError, mean_and_error, plus_minus
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


def table(titles: Sequence[str], rows: dict[str, Sequence[np.ndarray]]) -> str:
    """Mean ± standard error over seeds of each cell."""
    cell = lambda values: f"{plus_minus(*mean_and_error(values)):>18}"
    lines = [" " * 30 + "".join(f"{title:>18}" for title in titles)]
    return "\n".join(lines + [f"{n:30}" + "".join(map(cell, cells)) for n, cells in rows.items()])


def band(axis: Any, x: np.ndarray, values: np.ndarray, label: str) -> None:
    """The mean over seeds, and a band of one standard error."""
    mean, error = mean_and_error(values)
    axis.plot(x, mean, marker="." if len(x) < 20 else "", label=label)
    axis.fill_between(x, mean - error, mean + error, alpha=0.2)


def save(figure: Any, path: Path) -> None:
    for axis in figure.axes:
        if axis.get_xlabel() == "epoch":
            axis.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def report(configs: Sequence[Config], num_seeds: int, out: Path, mesh: Mesh, picture: str) -> str:
    """Prints a table of runs and draws a picture, in the first process only."""
    if jax.process_index() > 0:
        return ""
    config = configs[0]
    runs = read_runs(out, [config.optimizer for config in configs], num_seeds)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = {}
    for name, of_seeds in runs.items():
        loss, accuracy = (of_epochs(of_seeds, key) for key in ("train_loss", "test_accuracy"))
        rows[name] = loss[:, -1], 100 * accuracy[:, -1]
        epochs = np.arange(1, loss.shape[1] + 1)
        band(axes[0], epochs, loss, name)
        band(axes[1], epochs, 100 * accuracy, name)
    axes[0].set(xlabel="epoch", ylabel="training loss", yscale="log")
    axes[1].set(xlabel="epoch", ylabel="test accuracy, %")
    axes[1].legend(frameon=False)
    save(figure, out / picture)
    text = table(("training loss", "test accuracy, %"), rows)
    devices = f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    epochs = command_line.count(config.epochs, "epoch")
    seeds = command_line.count(num_seeds, "seed")
    print(f"\n{config.model}, {epochs}, {seeds}, {devices}\n{text}\n\nCurves: {out / picture}")
    return text
