"""Runs in folders: training from checkpoint to checkpoint, and the metrics that it writes.

Each run has a folder OUT/OPTIMIZER/seedN with `config.json`, `checkpoints` and `metrics.jsonl`, one
line per epoch. A checkpoint holds the metrics as well, so that both always agree.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError
from jax.experimental import multihost_utils
from optimizers import Config
from tqdm import tqdm
from training import Program, State


def run_all(
    configs: Sequence[Config],
    programs: Sequence[Program],
    num_seeds: int,
    data_digest: str,
    out: Path,
) -> None:
    """Trains every config with every seed; each run has a folder in `out`."""
    for config, program in zip(configs, programs, strict=True):
        for seed in range(num_seeds):
            of_seed = dataclasses.replace(config, seed=seed)
            run(of_seed, program, data_digest, run_folder(out, config.optimizer, seed))


def run_folder(out: Path, optimizer: str, seed: int) -> Path:
    return out / optimizer / f"seed{seed}"


def run(config: Config, program: Program, data_digest: str, folder: Path) -> State:
    """Trains for all epochs, or resumes from the last checkpoint in `folder`.

    It is an error if `folder` has another run.
    """
    name = f"{config.optimizer}, seed {config.seed}"
    check_config(config, data_digest, folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        state, metrics, first = program.init(config.seed), "", manager.latest_step() or 0
        if first:
            args = {"state": ocp.args.StandardRestore(state), "record": ocp.args.JsonRestore()}
            found = manager.restore(first, args=ocp.args.Composite(**args))
            state, metrics = found["state"], found["record"]["metrics"]
        write_metrics(folder, metrics)
        if first == config.epochs:
            say(f"{name}: already done, in {folder}")
            return state
        say(f"{name}: epochs {first + 1} to {config.epochs}, in {folder}")
        with tqdm(
            desc=f"{config.optimizer} {config.seed}",
            initial=first * program.steps_per_epoch,
            total=config.epochs * program.steps_per_epoch,
            unit="step",
            disable=jax.process_index() > 0,
        ) as bar:
            for epoch in range(first + 1, config.epochs + 1):
                start = time.perf_counter()
                state, of_steps = program.epoch(config.seed, state, epoch, bar)
                speed = program.steps_per_epoch * config.batch / (time.perf_counter() - start)
                line = summarize(epoch, state, of_steps, program.evaluate(state), speed)
                metrics += json.dumps(line) + "\n"
                write_metrics(folder, metrics)
                record = ocp.args.JsonSave({"metrics": metrics})
                saved = {"state": ocp.args.StandardSave(state), "record": record}
                manager.save(epoch, args=ocp.args.Composite(**saved))
                bar.set_postfix({key: line[key] for key in ("train_loss", "test_accuracy")})
    return state


def summarize(
    epoch: int,
    state: State,
    of_steps: dict[str, np.ndarray],
    tested: dict[str, float],
    speed: float,
) -> dict[str, Any]:
    """The metrics of an epoch: its line of `metrics.jsonl`, rounded, with null in place of NaN."""
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
    """A folder holds one run: the first process writes its config, and all processes compare."""
    found = {**dataclasses.asdict(config), "data": data_digest}
    path = folder / "config.json"
    if jax.process_index() == 0 and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("config")
    if not path.exists():
        raise UserError(f"--out must be on a disk that all processes share, got {folder}")
    there = json.loads(path.read_text())
    if there != found:
        keys = [key for key in {**there, **found} if there.get(key) != found.get(key)]
        differences = ", ".join(f"{k} {there.get(k)!r} and not {found.get(k)!r}" for k in keys)
        raise UserError(f"--out has another run in {folder}, with {differences}")


def read_epochs(path: Path) -> list[dict[str, Any]]:
    """The metrics of each epoch."""
    return [json.loads(line) for line in path.read_text().splitlines()]
