"""Helpers for command lines: checks of options, errors without a traceback, numbers as
text.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


class UserError(ValueError):
    """An error that the user can correct at the command line; `run` shows no
    traceback.
    """


def run(main: Callable[[], Any]) -> None:
    """Calls `main`; errors of the user, of files and of the network end as one line
    `error: …`.

    Ctrl-C ends the process at once. As an exception it can be lost in a callback of
    JAX, and can end in a segmentation fault while XLA compiles, in a thread that it
    does not stop.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        main()
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")


class HelpFormatter(
    argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
    """Keeps the lines of the description, and adds defaults to the help of the
    options.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        # "(default: None)" and "(default: False)" say nothing.
        unset = action.default is None or action.default is False
        return action.help if unset else super()._get_help_string(action)


def make_parser(
    description: str | None, epilog: str | None = None
) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=HelpFormatter
    )


def check_positive(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str
) -> None:
    """Ends with an error unless each option is > 0 and finite; None is for options not
    given.
    """
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"{option(name)} must be finite and > 0, got {value}")


def check_writable(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    name: str,
    kind: str = "file",
) -> None:
    """Ends with an error unless the option's file or folder can be written; creates
    nothing.
    """
    path = getattr(arguments, name)
    if path is None:
        return
    there = next(place for place in (path, *path.parents) if place.exists())
    fits = there.is_dir() == (kind == "folder" or there != path)
    if not fits or not os.access(there, os.W_OK):
        parser.error(f"{option(name)} must be a {kind} that can be written, got {path}")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def count(number: int, noun: str) -> str:
    """1 seed, 2 seeds."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def mean_and_error(values: Any) -> tuple[Any, Any]:
    """Over seeds, the first axis, with the standard error, which is NaN for one
    seed.
    """
    values = np.asarray(values)
    one = len(values) == 1
    spread = np.full(values.shape[1:], np.nan) if one else values.std(0, ddof=1)
    return values.mean(0), spread / np.sqrt(len(values))


def plus_minus(mean: float, spread: float, spec: str = ".4f", unit: str = "") -> str:
    """Mean ± spread; the mean alone where there is no spread, which is NaN for one
    seed.
    """
    error = "" if math.isnan(spread) else f" ± {spread:{spec}}{unit}"
    return f"{mean:{spec}}{unit}{error}"
