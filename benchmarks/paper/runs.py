"""Runs in folders: training from checkpoint to checkpoint, its metrics, and tables of
them.

Each run has a folder OUT/OPTIMIZER/seedN with `config.json`, `checkpoints` and
`metrics.jsonl`, one line per epoch. A checkpoint holds the metrics as well, so that
both always agree.
"""

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError, count, mean_and_error, plus_minus
from jax.experimental import multihost_utils
from optimizers import Config
from tqdm import tqdm
from training import Program, State

Runs = dict[
    str, list[list[dict[str, Any]]]
]  # of an optimizer: of a seed: of an epoch: its metrics


def run_all(
    configs: Sequence[Config],
    programs: Sequence[Program],
    num_seeds: int,
    digest: str,
    out: Path,
) -> str:
    """Trains every config with every seed, each in a folder in `out`, and prints a
    table.
    """
    for config, program in zip(configs, programs, strict=True):
        for seed in range(num_seeds):
            of_seed = dataclasses.replace(config, seed=seed)
            run(of_seed, program, digest, run_folder(out, config.optimizer, seed))
    if jax.process_index() > 0:
        return ""
    runs = read_runs(out, [config.optimizer for config in configs], num_seeds)
    keys = ("train_loss", "test_accuracy")
    rows = {name: [last(runs, name, key) for key in keys] for name in runs}
    text = table(("training loss", "test accuracy, %"), rows)
    devices = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    of = (
        configs[0].model,
        count(configs[0].epochs, "epoch"),
        count(num_seeds, "seed"),
        devices,
    )
    print(f"\n{', '.join(of)}\n{text}")
    return text


def run_folder(out: Path, optimizer: str, seed: int) -> Path:
    return out / optimizer / f"seed{seed}"


def run(config: Config, program: Program, data_digest: str, folder: Path) -> State:
    """Trains for all epochs, or resumes from the last checkpoint in `folder`.

    It is an error if `folder` has another run.
    """
    name = f"{config.optimizer}, seed {config.seed}"
    check_config(config, data_digest, folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(
        (folder / "checkpoints").absolute(), options=options
    ) as manager:
        state, metrics, first = (
            program.init(config.seed),
            "",
            manager.latest_step() or 0,
        )
        if first:
            args = {
                "state": ocp.args.StandardRestore(state),
                "record": ocp.args.JsonRestore(),
            }
            found = manager.restore(first, args=ocp.args.Composite(**args))
            state, metrics = found["state"], found["record"]["metrics"]
        write_metrics(folder, metrics)
        if first == config.epochs:
            say(f"{name}: already done, in {folder}")
            return state
        say(f"{name}: epochs {first + 1} to {config.epochs}, in {folder}")
        initial, total = (n * program.steps_per_epoch for n in (first, config.epochs))
        hidden, title = jax.process_index() > 0, f"{config.optimizer} {config.seed}"
        with tqdm(
            None, title, total, initial=initial, unit="step", disable=hidden
        ) as bar:
            for epoch in range(first + 1, config.epochs + 1):
                start = time.perf_counter()
                state, of_steps = program.epoch(config.seed, state, epoch, bar)
                speed = (
                    program.steps_per_epoch
                    * config.batch
                    / (time.perf_counter() - start)
                )
                line = summarize(epoch, state, of_steps, program.evaluate(state), speed)
                metrics += json.dumps(line) + "\n"
                write_metrics(folder, metrics)
                record = ocp.args.JsonSave({"metrics": metrics})
                saved = {"state": ocp.args.StandardSave(state), "record": record}
                manager.save(epoch, args=ocp.args.Composite(**saved))
                bar.set_postfix(
                    {key: line[key] for key in ("train_loss", "test_accuracy")}
                )
    return state


def summarize(
    epoch: int, state: State, of_steps: Any, tested: Any, speed: float
) -> dict[str, Any]:
    """The metrics of an epoch: its line of `metrics.jsonl`, rounded, with null in place
    of NaN.
    """
    lists = {k: [as_json(v) for v in vs] for k, vs in of_steps.items()}
    # Those of the last step; SGD+M has neither.
    eta, c = (optax.tree.get(state.opt_state, name) for name in ("eta", "c"))
    return {
        "epoch": epoch,
        "train_loss": as_json(of_steps["loss"].mean(dtype=np.float64)),
        **tested,
        "test_loss": as_json(tested["test_loss"]),
        "eta": None if eta is None else as_json(eta),
        "c": None if c is None else as_json(c),
        "images_per_second": as_json(speed),
        "losses": lists.pop("loss"),
        "momentum": lists,
    }


def as_json(value: Any) -> float | None:
    """Seven digits; null for what is not finite, which JSON has no word for."""
    return float(f"{value:.7g}") if np.isfinite(value) else None


def say(text: str) -> None:
    """Prints a line above a progress bar, in the first process only."""
    if jax.process_index() == 0:
        tqdm.write(text)


def write_metrics(folder: Path, metrics: str) -> None:
    """Replaces `metrics.jsonl` atomically, by the first process."""
    if jax.process_index() == 0:
        new = folder / "metrics.jsonl.new"
        new.write_text(metrics)
        new.replace(folder / "metrics.jsonl")


def check_config(config: Config, data_digest: str, folder: Path) -> None:
    """A folder holds one run: the first process writes its config, and all processes
    compare.
    """
    found = {**dataclasses.asdict(config), "data": data_digest}
    path = folder / "config.json"
    if jax.process_index() == 0 and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("config")
    if not path.exists():
        raise UserError(
            f"--out must be on a disk that all processes share, got {folder}"
        )
    there = json.loads(path.read_text())
    if there != found:
        keys = [key for key in {**there, **found} if there.get(key) != found.get(key)]
        differences = ", ".join(
            f"{k} {there.get(k)!r} and not {found.get(k)!r}" for k in keys
        )
        raise UserError(f"--out has another run in {folder}, with {differences}")


def read_runs(out: Path, names: Sequence[str], num_seeds: int) -> Runs:
    """The metrics that runs left in their folders, all of equally many epochs."""
    runs: Runs = {}
    for name in names:
        runs[name] = []
        for seed in range(num_seeds):
            path = run_folder(out, name, seed) / "metrics.jsonl"
            if not path.exists():
                raise UserError(
                    f"{out} must have a run of {name} with seed {seed}, got no {path}"
                )
            runs[name].append(
                [json.loads(line) for line in path.read_text().splitlines()]
            )
            found, num_epochs = len(runs[name][-1]), len(runs[names[0]][0])
            if found != num_epochs:
                raise UserError(
                    f"{path} must have {num_epochs} epochs, as the first, got {found}"
                )
    return runs


def of_epochs(runs: list[list[dict[str, Any]]], key: str) -> np.ndarray:
    """A metric, (seeds, epochs)."""
    return np.array([[line[key] for line in run] for run in runs], float)


def last(runs: Runs, name: str, key: str) -> np.ndarray:
    """A metric of the last epoch, of each seed; accuracy in %."""
    return of_epochs(runs[name], key)[:, -1] * (100 if key == "test_accuracy" else 1)


def table(titles: Sequence[str], rows: Mapping[str, Sequence[np.ndarray]]) -> str:
    """Mean ± standard error over seeds of each cell."""
    lines = [" " * 30 + "".join(f"{title:>18}" for title in titles)]
    for name, of_cells in rows.items():
        cells = [plus_minus(*mean_and_error(values)) for values in of_cells]
        lines.append(f"{name:30}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
