"""What the script of every trainer does: optimizers, each killed and resumed.

A script has `train(name, folder, kill_at)`, and calls `main`. That runs itself three
times for each optimizer: to the end; killed on the way; and resumed from the trainer's
own checkpoints. If the optimizer has a `state_dtype`, a fourth run resumes with another
one, which must raise an error. With --json each optimizer is a line of OUT, and what
OUT has is not run again.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spa_optax import (
    float8_momentum,
    primal_averaging,
    spa_adamw,
    stochastic_rounding,
)
from spa_optax.diagnostics import momentum_report, track_momentum

STEPS, KILLED_AT, SAVE_EVERY = 300, 170, 50
KEY = jax.random.key(0)
NARROW: dict[str, Any] = {"state_dtype": jnp.bfloat16, "rounding_key": KEY}
ANOTHER_DTYPE = "float8_e4m3fn"
FACTORED = "spa_adamw, 4 bytes"


# From the learning rate and the trainer's own optimizer.
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    FACTORED: lambda rate, own: spa_adamw(
        rate, 0.05, 0.9, second_moment="factored", **NARROW
    ),
    "primal_averaging": lambda rate, own: primal_averaging(own, 0.05, 0.9, **NARROW),
    "stochastic_rounding": lambda rate, own: stochastic_rounding(own, KEY),
}
# These fail where a trainer shards each array of a state like its parameter, so they
# run only by name.
BY_NAME: dict[str, Callable[[Any, Any], Any]] = {
    "adafactor": lambda rate, own: stochastic_rounding(
        optax.adafactor(rate, multiply_by_parameter_scale=False), KEY
    ),
    "float8_momentum": lambda rate, own: stochastic_rounding(
        float8_momentum(optax.sgd(rate, 0.9), KEY), KEY
    ),
}
AVERAGE = (FACTORED, "primal_averaging")


def make(name: str, rate: Any, own: Any) -> Any:
    """One of them, with the gauge where it averages."""
    tx = (OPTIMIZERS | BY_NAME)[name](rate, own)
    return track_momentum(tx) if name in AVERAGE else tx


def batches(
    num: int, seed: int, size: int = 8, length: int = 64
) -> Iterator[np.ndarray]:
    """Texts of Python's own library, `length` bytes. The last tenth is for seeds that
    are odd.
    """
    names = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"))
    data = np.frombuffer(b"".join(name.read_bytes() for name in names), np.uint8)
    random, (begin, end) = (
        np.random.default_rng(seed),
        (0.9, 1.0) if seed % 2 else (0.0, 0.9),
    )
    for _ in range(num):
        low, high = int(begin * len(data)), int(end * len(data)) - length
        starts = random.integers(low, high, (size, 1))
        yield data[starts + np.arange(length)].astype(np.int32)


def num_bytes(params: Any, state: Any) -> float:
    """Of params and state, a parameter."""
    of_both = sum(array.nbytes for array in arrays_of((params, state)))
    return of_both / sum(array.size for array in arrays_of(params))


def arrays_of(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]


def result(loss: Any, first_step: int, params: Any, state: Any) -> dict[str, Any]:
    """What `train` returns."""
    found = {
        "losses": [float(loss)],
        "first step": first_step,
        "bytes": num_bytes(params, state),
    }
    return found | {"devices": jax.device_count()}


def gain(state: Any) -> Any:
    """Of the gauge, over that of pure noise. NaN where there is no gauge."""
    if optax.tree.get(state, "gauge") is None:
        return np.float32(np.nan)
    report = momentum_report(state)
    return report.gain / report.noise_level


def die() -> None:
    """As if the machine failed."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(script: str, name: str, folder: Path, *options: str) -> dict[str, Any] | None:
    """The result of a process, or None if it was killed."""
    command = [
        sys.executable,
        script,
        "--optimizer",
        name,
        "--folder",
        str(folder),
        *options,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(script: str, name: str, version: str) -> dict[str, Any]:
    """Runs an optimizer to the end, and killed and resumed, also with another
    `state_dtype`.
    """
    start = time.time()
    with tempfile.TemporaryDirectory() as root:
        whole = run(script, name, Path(root, "whole"))
        killed, other = Path(root, "killed"), Path(root, "other", "killed")
        if run(script, name, killed, "--kill-at", str(KILLED_AT)) is not None:
            raise SystemExit(f"{name} was not killed")
        shutil.copytree(killed, other)
        resumed = run(script, name, killed)
        changed = None
        if name in AVERAGE:
            changed = run(script, name, other, "--state-dtype", ANOTHER_DTYPE)
    assert whole is not None
    assert resumed is not None
    same = {
        "resumed": resumed["losses"] == whole["losses"],
        "resumed at": resumed["first step"],
    }
    if changed is not None and "raises" in changed:
        same["another state_dtype"] = changed["raises"]
    elif changed is not None:
        first_step, (loss, *_) = changed["first step"], changed["losses"]
        same["another state_dtype"] = f"goes on at {first_step}, to {loss:.4f}"
    trainer = Path(script).stem.removeprefix("with_")
    names = {"trainer": trainer, "version": version, "optimizer": name}
    return names | whole | same | {"minutes": round((time.time() - start) / 60, 1)}


Train = Callable[[str, Path, int], dict[str, Any]]


def main(script: str, version: str, train: Train) -> None:
    """`train` takes the name of an optimizer, a folder and a step to die at."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS | BY_NAME, help="only this one, once"
    )
    parser.add_argument("--folder", type=Path, help="of its checkpoints")
    parser.add_argument("--kill-at", type=int, default=0, help="die after this step")
    parser.add_argument("--state-dtype", help="another one; an error is a result, too")
    parser.add_argument("--json", type=Path, help="where to add the results")
    options = parser.parse_args()
    if options.folder:
        if options.state_dtype:
            NARROW["state_dtype"] = jnp.dtype(options.state_dtype)
        try:
            result = train(
                options.optimizer, options.folder.absolute(), options.kill_at
            )
        except Exception as error:
            if not options.state_dtype:
                raise
            traceback.print_exc()
            result = {"raises": f"raises {type(error).__name__}"}
        print(json.dumps(result))
        return
    lines = (
        options.json.read_text().splitlines()
        if options.json and options.json.exists()
        else []
    )
    done = [json.loads(line) for line in lines]
    trainer = Path(script).stem.removeprefix("with_")
    known = {record["optimizer"] for record in done if record["trainer"] == trainer}
    for name in [name for name in OPTIMIZERS if name not in known]:
        result = compare(script, name, version)
        print(result, flush=True)
        if options.json:
            with options.json.open("a") as out:
                out.write(json.dumps(result) + "\n")
