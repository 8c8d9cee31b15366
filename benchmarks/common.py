"""Shared by the benchmarks: their command line, and where their figures go."""

import argparse
import json
import operator
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import optax
from paper import command_line

NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a cell of a table on one line
Watch = Callable[[int, Any], None]  # is shown the optimizer's state after every step


def ignore(count: int, state: Any) -> None:
    """Watches nothing."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """--json and --platform, which every benchmark has."""
    result = command_line.make_parser(description)
    result.add_argument(
        "--json", type=Path, metavar="OUT", help="where to write the figures"
    )
    result.add_argument("--platform", help="cpu, gpu or tpu; by default what jax finds")
    return result


def parse(
    result: argparse.ArgumentParser, argv: Any, *positive: str
) -> argparse.Namespace:
    """The options named in `positive` must be > 0 where they are given."""
    arguments = result.parse_args(argv)
    command_line.check_positive(result, arguments, *positive)
    command_line.check_writable(result, arguments, "json")
    if arguments.platform:
        jax.config.update("jax_platforms", arguments.platform)
    return arguments


def check_new(path: Path | None) -> None:
    """Before a run whose figures are written whole: they must replace no others."""
    if path is not None and path.exists():
        raise command_line.UserError(f"--json must be a new file, but {path} exists")


def update(
    tx: optax.GradientTransformation, grads: Any, params: Any, state: Any
) -> Any:
    """The new params and state."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def device() -> str:
    """What the figures were measured on."""
    kind = jax.devices()[0].device_kind
    if kind == "cpu":
        kind = f"CPU, {os.cpu_count()} cores"
    return f"{kind}, jax {jax.__version__}"


def write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(rows: list[dict[str, str]], without: Iterable[str] = ()) -> str:
    """Of rows by column. Columns that have no entry are left out, too."""
    full = [name for name in rows[0] if any(row[name] for row in rows)]
    names = [name for name in full if name not in without]
    return markdown(names, [[row[name] for name in names] for row in rows])


def groups(records: list[Any], *keys: str) -> dict[Any, list[Any]]:
    """By one field or more, in the order in which their values come."""
    value_of = operator.itemgetter(*keys)
    values = dict.fromkeys(map(value_of, records))
    return {value: [r for r in records if value_of(r) == value] for value in values}


class Records:
    """Results of runs, a line of JSON each in a file, so that none is run again."""

    def __init__(self, path: Path | None, keys: tuple[str, ...]) -> None:
        """What `path` has so far; None keeps nothing."""
        self.path, self.keys = path, keys
        self.found = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for i, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.found[self.identity(record)] = record
            except (ValueError, KeyError, TypeError) as error:
                raise command_line.UserError(
                    f"--json must be new or of this benchmark, but line {i} "
                    f"of {path} is no record"
                    f" with {', '.join(keys)}"
                ) from error

    def identity(self, record: dict[str, Any]) -> str:
        """Its keys, as text, since they may be lists and dictionaries."""
        return json.dumps([record[key] for key in self.keys], sort_keys=True)

    def get(
        self, key: tuple[Any, ...], run: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The record of a run, which is run if it is not there."""
        record = dict(zip(self.keys, key, strict=True))
        identity = self.identity(record)
        if identity not in self.found:
            self.found[identity] = record | run()
            if self.path:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a") as file:
                    file.write(json.dumps(self.found[identity]) + "\n")
        return self.found[identity]
