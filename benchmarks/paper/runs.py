"""Runs in folders: training from checkpoint to checkpoint, and the metrics that it writes.

Each run has a folder OUT/OPTIMIZER/seedN with `config.json`, `checkpoints` and `metrics.jsonl`, one
line per epoch. A checkpoint holds the metrics as well, so that both always agree.
"""

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils
from optimizers import Config
from tqdm import tqdm
from training import Program, State

# orbax logs the traceback of each error of a checkpoint, which it raises as well.
logging.getLogger("absl").addFilter(lambda record: record.levelno != logging.ERROR)


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

    It is an error if `folder` has another run, or if another process is training there.
    """
    name = f"{config.optimizer}, seed {config.seed}"
    with opened(config, data_digest, folder) as manager:
        state, first, metrics = restore(manager, lambda: program.init(config.seed))
        write_metrics(folder, metrics, first)
        for epoch in manager.all_steps():
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
        with tqdm(
            desc=f"{config.optimizer} {config.seed}",
            initial=first * program.steps_per_epoch,
            total=config.epochs * program.steps_per_epoch,
            unit="step",
            disable=jax.process_index() > 0,
        ) as bar:
            was_finite = True
            for epoch in range(first + 1, config.epochs + 1):
                start = time.perf_counter()
                state, of_steps = program.epoch(config.seed, state, epoch, bar)
                speed = program.steps_per_epoch * config.batch / (time.perf_counter() - start)
                line, shown = summarize(epoch, state, of_steps, program.evaluate(state), speed)
                metrics += json.dumps(line) + "\n"
                write_metrics(folder, metrics, epoch)
                record = {"metrics": metrics, "sha256": sha256(state, metrics)}
                saved = {"state": ocp.args.StandardSave(state), "record": ocp.args.JsonSave(record)}
                manager.save(epoch, args=ocp.args.Composite(**saved))
                bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None})
                if was_finite and not np.isfinite(shown["train_loss"]):
                    say(f"{name}: the training loss of epoch {epoch} is {shown['train_loss']}")
                    was_finite = False
    return state


def summarize(
    epoch: int,
    state: State,
    of_steps: dict[str, np.ndarray],
    tested: dict[str, float],
    speed: float,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics of an epoch: its line of `metrics.jsonl`, and those that the progress bar shows.

    The line is rounded, and has null in place of NaN.
    """
    counts = {name: int(v.sum()) for name, v in of_steps.items() if name == "left_out"}
    lists = {k: [as_json(v) for v in vs] for k, vs in of_steps.items() if k not in counts}
    # Those of the last step; SGD+M has neither.
    eta, c = (optax.tree.get(state.opt_state, name) for name in ("eta", "c"))
    train_loss = of_steps["loss"].mean(dtype=np.float64)
    line = {
        "epoch": epoch,
        "train_loss": as_json(train_loss),
        **tested,
        "test_loss": as_json(tested["test_loss"]),
        "eta": None if eta is None else as_json(eta),
        "c": None if c is None else as_json(c),
        "images_per_second": as_json(speed),
        "losses": lists.pop("loss"),
        "momentum": lists,
        **counts,
    }
    shown = {"train_loss": train_loss, "test_accuracy": tested["test_accuracy"]}
    return line, shown | {"eta": eta, "c": c, "images_per_second": speed, **counts}


def say(text: str) -> None:
    """Prints a line above a progress bar, in the first process only."""
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
        try:
            with ocp.CheckpointManager(path, options=options) as manager:
                yield manager
        except ValueError as error:
            if not str(error).startswith("RESOURCE_EXHAUSTED"):  # orbax's word for a full disk
                raise
            reason = str(error).rpartition(": ")[2]
            raise UserError(f"checkpoints cannot be written to {path}: {reason}") from error


def sha256(state: Any, metrics: str) -> str:
    """SHA-256 of the metrics and of all arrays in a state, with their names, shapes and dtypes."""
    result = hashlib.sha256(metrics.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaf = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        result.update(leaf.tobytes())
    return result.hexdigest()


def restore(manager: ocp.CheckpointManager, init: Callable[[], State]) -> tuple[State, int, str]:
    """State, epoch and metrics of the newest undamaged checkpoint; without any, of epoch 0."""
    state, damaged = init(), {}
    args = ocp.args.Composite(state=ocp.args.StandardRestore(state), record=ocp.args.JsonRestore())
    for epoch in sorted(manager.all_steps(), reverse=True):
        try:
            found = manager.restore(epoch, args=args)
            metrics = found["record"]["metrics"]
            if found["record"]["sha256"] != sha256(found["state"], metrics):
                raise UserError("its content does not have the checksum that it was saved with")
        except Exception as error:  # damage shows in many ways
            damaged[epoch] = error
            reason = str(error).partition("\n")[0][:100]
            say(f"{manager.directory / str(epoch)} is damaged: {type(error).__name__}: {reason}")
        else:
            return found["state"], epoch, metrics
    if damaged:
        raise UserError(
            f"{manager.directory} must have a checkpoint that can be restored, got"
            f" {' and '.join(map(str, damaged))}, which cannot. To train this run from its start,"
            f" delete {manager.directory.parent}"
        ) from next(iter(damaged.values()))
    return state, 0, ""


def write_metrics(folder: Path, metrics: str, epoch: int) -> None:
    """Makes `metrics.jsonl` that of a checkpoint, by the first process.

    The file of a run without checkpoints is kept; only the first epochs may come before one.
    """
    if jax.process_index() > 0:
        return
    path = folder / "metrics.jsonl"
    if epoch == 0 and path.exists() and (number := len(read(path).splitlines())) > 2:
        raise UserError(f"{path} has {number} epochs, but there are no checkpoints in {folder}")
    write(path, metrics)


def as_json(value: Any) -> float | None:
    """Seven digits; null for what is not finite, which JSON has no word for."""
    return float(f"{value:.7g}") if np.isfinite(value) else None


def check_config(config: Config, data_digest: str, folder: Path) -> None:
    """A folder holds one run: the first process writes its config, and all processes compare."""
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
    """The text of a file, even if it is not UTF-8: the checks of its content name the problem."""
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
    """Replaces a file atomically."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
