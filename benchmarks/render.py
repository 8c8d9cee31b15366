"""Writes the tables of results/*.jsonl as results/*.md.

    python benchmarks/render.py [--check]

With --check it writes nothing, and fails if a page is not that of its records.
"""

import json
import operator
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import language_model
import memory
from language_rows import LADDERS

RESULTS = Path(__file__).parent / "results"
SOURCE = "python benchmarks/render.py"
Record = dict[str, Any]


def read(name: str) -> list[Record]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def groups(records: list[Record], *keys: str) -> dict[Any, list[Record]]:
    """By one field or more, in the order in which their values come."""
    value_of = operator.itemgetter(*keys)
    values = dict.fromkeys(map(value_of, records))
    return {value: [r for r in records if value_of(r) == value] for value in values}


def of_language_model(records: list[Record]) -> Iterator[tuple[str, str]]:
    """For each length of the runs: the best settings, ladders, and the search."""
    for num_steps, runs in sorted(groups(records, "steps").items()):
        search = [run for run in runs if run["seed"] in language_model.SEARCH]
        others = [run for run in runs if run["seed"] not in language_model.SEARCH]
        best = language_model.best_settings(others)
        title = f"{num_steps:,} steps"
        if best:
            yield f"{title}: the best settings, other seeds", language_model.table(best)
        for name, names in LADDERS.items():
            if {run["optimizer"] for run in best} >= set(names):
                ladder = language_model.ladder(best, names)
                yield f"{title}: from AdamW to 3 bytes by {name}", ladder
        if search:
            table = language_model.table(search)
            yield f"{title}: the search, seeds 0 and 6", table


def of_memory(path: Path) -> Iterator[tuple[str, str]]:
    """The largest models, then each target that has a table of its own."""
    found = common.Records(path, ("target", "optimizer"))
    names = {record["optimizer"] for record in found.found.values()}
    by_card = memory.choices(memory.NOT_BY_CARD)
    trained = [name for name in by_card if name in names and "8-bit" not in name]
    largest = memory.largest(list(memory.CARDS), trained, found)
    yield "The largest model on one card, and the GiB of its step", largest
    for target in memory.BY_OPTIMIZER:
        records = [
            record for record in found.found.values() if record["target"] == target
        ]
        yield f"{target}; {records[0]['versions']}", memory.table(records)


def of_trainers(records: list[Record]) -> Iterator[tuple[str, str]]:
    header = ["trainer", "optimizer", "bytes/param", "devices", "loss at x", "resumed"]
    header += ["resumed with another `state_dtype`", "minutes"]
    rows = []
    for record in records:
        same = "to the same loss" if record["resumed"] else "TO ANOTHER LOSS"
        losses = ", ".join(f"{loss:.4f}" for loss in record["losses"])
        row = [f"{record['trainer']} {record['version']}", record["optimizer"]]
        row += [f"{record['bytes']:.1f}", str(record["devices"]), losses]
        row += [
            f"at {record['resumed at']}, {same}",
            record.get("another state_dtype", ""),
        ]
        rows.append([*row, str(record["minutes"])])
    yield "Killed after step 170 of 300", common.markdown(header, rows)


def of_finetune(records: list[Record]) -> Iterator[tuple[str, str]]:
    """Means over seeds, for each rate."""
    keys = ("accuracy", "loss", "moved", "cosine", "length", "distance")
    for (task, num_steps, rate), runs in groups(
        records, "task", "steps", "rate"
    ).items():
        rows, of_rows = [], groups(runs, "row")
        for name, of_row in of_rows.items():
            means = [
                f"{statistics.mean(run[key] for run in of_row):.3f}" for key in keys
            ]
            less = language_model.minus(
                of_row, of_rows["float32"], operator.itemgetter("accuracy")
            )
            rows.append(
                [name, f"{of_row[0]['bytes']:.2f}", str(len(of_row)), *means, less]
            )
        header = ["row", "bytes/param", "seeds", *keys, "accuracy − float32's"]
        yield f"{task}, {num_steps:,} steps at {rate:g}", common.markdown(header, rows)


def pages() -> dict[str, str]:
    """From the name of a page to its text."""
    sections = {
        "language_model": of_language_model(read("language_model.jsonl")),
        "memory": of_memory(RESULTS / "memory.jsonl"),
        "trainers": of_trainers(read("trainers.jsonl")),
        "finetune": of_finetune(read("finetune.jsonl")),
    }
    result = {}
    for name, of_page in sections.items():
        parts = [f"# Results: {name}", f"Written by `{SOURCE}`."]
        parts += [f"## {title}\n\n{text}" for title, text in of_page]
        result[name] = "\n\n".join(parts) + "\n"
    return result


def main(argv: list[str] | None = None) -> None:
    parser = common.command_line.make_parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="whether the pages are up to date"
    )
    check = parser.parse_args(argv).check
    for name, text in pages().items():
        path = RESULTS / f"{name}.md"
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"error: {path} is not up to date: run `{SOURCE}`")


if __name__ == "__main__":
    main()
