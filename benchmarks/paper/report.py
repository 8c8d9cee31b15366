"""Tables and pictures of finished runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import jax
import matplotlib.pyplot as plt
import numpy as np
from command_line import UserError, plus_minus
from jax.sharding import Mesh
from options import Experiment
from runs import read, read_epochs, run_folder

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


def report(experiment: Experiment, mesh: Mesh, picture: str) -> str:
    """Prints a table of an experiment's runs and draws a picture, in the first process only."""
    if jax.process_index() > 0:
        return ""
    config, out = experiment.configs[0], experiment.out
    runs = read_runs(out, [c.optimizer for c in experiment.configs], experiment.num_seeds)
    text = table(runs)
    devices = f"{mesh.size} × {mesh.devices.flat[0].device_kind}"
    epochs = command_line.count(config.epochs, "epoch")
    seeds = command_line.count(experiment.num_seeds, "seed")
    print(f"\n{config.model}, {epochs}, {seeds}, {devices}\n{text}")
    draw(runs, out / picture)
    print(f"\nCurves: {out / picture}")
    return text
