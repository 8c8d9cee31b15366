"""What the benchmarks share: their command line, and where their figures go."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax


def example(name: str) -> Any:
    """A module of `examples`, whose networks and data are used."""
    folder = str(Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def parser(description: str | None) -> argparse.ArgumentParser:
    """--json and --platform, which every benchmark has."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--json", type=Path, metavar="OUT", help="where to write the figures")
    result.add_argument("--platform", help="cpu, gpu or tpu; by default what jax finds")
    return result


def parse(result: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Before anything is computed, since a platform cannot be changed later."""
    arguments = result.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs some, too
    if arguments.platform:
        jax.config.update("jax_platforms", arguments.platform)
    return arguments


def device() -> str:
    """What the figures were measured on."""
    kind = jax.devices()[0].device_kind
    if kind == "cpu":
        kind = f"CPU, {os.cpu_count()} cores"
    return f"{kind}, jax {jax.__version__}"


def write_json(path: Path | None, figures: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
