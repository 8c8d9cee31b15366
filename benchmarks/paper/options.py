"""The options that `train_cifar10.py` and `train_imagenet.py` share."""

import argparse
import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import jax
from optimizers import OPTIMIZERS, Config, Recipe

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead


def make_parser(
    description: str | None, models: Sequence[str], model: str, out: str
) -> argparse.ArgumentParser:
    epilog = "optimizers:\n" + "\n".join(
        f"  {name:14} {text}" for name, text in OPTIMIZERS.items()
    )
    parser = command_line.make_parser(description, epilog)
    add = parser.add_argument
    optimizers = [*OPTIMIZERS, "all"]
    add("--optimizer", nargs="+", action="extend", choices=optimizers, help="see below")
    add("--model", choices=models, default=model, help="the network")
    add("--bfloat16", action="store_true", help="compute convolutions in bfloat16")
    add("--epochs", type=int, help="shortens the whole schedule to so many epochs")
    add("--seeds", type=int, default=1, help="how many")
    add("--batch", type=int, default=128, help="of all devices together")
    add("--learning-rate", type=float, default=1.0, help="η; α of SGD+M is η c")
    add("--averaging", type=float, default=0.1, help="c; β of SGD+M is 1 − c")
    add("--weight-decay", type=float, default=1e-4, help="added to the gradient")
    add("--out", type=Path, default=Path(out), help="a folder for all that is written")
    add("--track", action="store_true", help="write the measurements of track_momentum")
    add(
        "--distributed",
        action="store_true",
        help="one of several processes of a cluster, found",
    )
    add(
        "--coordinator",
        help="HOST:PORT of the first process, where the cluster is not found",
    )
    add("--num-processes", type=int, help="of the cluster, with --coordinator")
    add("--process-id", type=int, help="of this process, from 0, with --coordinator")
    return parser


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    kind: type[Config],
    recipe: Recipe,
) -> tuple[list[Any], argparse.Namespace]:
    """A config for each optimizer, with seed 0, and the options, checked."""
    options = parser.parse_args(argv)
    names = options.optimizer or ["spa-gradual"]
    names = list(OPTIMIZERS if "all" in names else dict.fromkeys(names))
    options.cluster = (options.coordinator, options.num_processes, options.process_id)
    if None in options.cluster and options.cluster != (None, None, None):
        parser.error("--coordinator, --num-processes and --process-id go together")
    if options.track and "sgdm" in names:
        parser.error("--track is for primal averaging, not for sgdm")
    positive = ("epochs", "seeds", "batch", "learning_rate", "averaging")
    command_line.check_positive(
        parser, options, *positive, "subset", "image_size", "threads"
    )
    if options.averaging > 1:
        parser.error(f"--averaging must be <= 1, got {options.averaging}")
    if not 0 <= options.weight_decay < float("inf"):
        parser.error(
            f"--weight-decay must be finite and >= 0, got {options.weight_decay}"
        )
    command_line.check_writable(parser, options, "out", "folder")
    fields = {field.name for field in dataclasses.fields(kind)}
    shared = {key: value for key, value in vars(options).items() if key in fields}
    shared["epochs"] = options.epochs or recipe.epochs
    configs = [kind(**{**shared, "optimizer": name, "seed": 0}) for name in names]
    return configs, options


def join_cluster(options: argparse.Namespace) -> None:
    """If a process dies or fails after all have joined, JAX stops the others within a
    minute.
    """
    if options.distributed or options.coordinator:
        newer: Any = {
            "heartbeat_timeout_seconds": HEARTBEAT,
            "shutdown_timeout_seconds": 30,
        }
        newer = newer if jax.__version_info__ >= (0, 7) else {}
        jax.distributed.initialize(*options.cluster, **newer)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX catches it, and would go on
