"""The tables of results/finetune.jsonl, for render.py."""

import statistics
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import common
import finetune
import jax.numpy as jnp
import language_model

# The rows of docs/results.md.
FINE_TUNED = {
    "AdamW": "AdamW, float32 params",
    "AdamW, m in bfloat16": "AdamW, bfloat16 momentum, float32 params",
    "AdamW, m in bfloat16, rounded at random": (
        "AdamW, bfloat16 momentum, in `stochastic_rounding`"
    ),
    "AdamW, m and ν in bfloat16, rounded to nearest": (
        "AdamW, bfloat16 params, rounded to nearest"
    ),
    "spa_adamw, z in bfloat16": "`spa_adamw`, z in bfloat16",
    "spa_adamw, z in float8": "`spa_adamw`, z in float8",
    "Adafactor, rounded at random": "Adafactor in `stochastic_rounding`",
}
IN_8_BYTES = "AdamW, m in bfloat16, rounded at random"
# The differences from AdamW in float32 in the text of docs/results.md.
PAIRS = [
    (IN_8_BYTES, 1e-5, "accuracy"),
    ("AdamW, m and ν in bfloat16, rounded to nearest", 1e-4, "accuracy"),
    ("spa_adamw, z in float8, averaging 0.05, interpolation 0.9", 1e-5, "accuracy"),
    ("spa_adamw, z in float8, averaging 0.05, interpolation 0.9", 5e-5, "accuracy"),
]
SHORT = 150  # steps
DESCRIPTION = ["optimizer", "params", "bytes"]
FIGURES = ("accuracy", "loss")
Record = dict[str, Any]


def tables(records: list[Record]) -> dict[str, dict[str, str]]:
    """By page, and by its name there."""
    short = short_runs(records)
    longer = [r for r in records if r["task"] == "sst2" and r["steps"] != SHORT]
    trec = [r for r in records if r["task"] == "trec"]
    shown = [r for r in short if r["row"] in FINE_TUNED]
    controls = [r for r in short if r["row"] not in FINE_TUNED]
    reference = [r for r in short if r["row"] == finetune.REFERENCE]
    of_accuracy, of_loss = (
        {"reference": reference, "figure": figure} for figure in ("accuracy", "loss")
    )
    return {
        "benchmarks/results/finetune.md": {
            "accuracy": by_rate(shown, **of_accuracy),
            "loss": by_rate(shown, **of_loss),
            "controls": by_rate(controls, **of_accuracy),
            "moved": table_by_rate(shown, lambda runs: mean(runs, "moved")),
            "longer": of_runs(longer),
            "TREC": of_runs(trec),
        },
        "docs/results.md": {"fine-tuning": of_fine_tuning(short)},
    }


def of_pairs(records: list[Record]) -> dict[str, list[float]]:
    of_row = common.groups(short_runs(records), "row", "rate")
    z, accuracy = "spa_adamw, z in float8", itemgetter("accuracy")
    from_8_bytes = {
        f"{z} − AdamW in 8 bytes at {as_text(rate)}": language_model.difference(
            of_row[z, rate], of_row[IN_8_BYTES, rate], accuracy
        )
        for rate in (1e-5, 1e-4)
    }
    return from_8_bytes | {
        f"{figure} of {name} at {as_text(rate)}": language_model.difference(
            of_row[name, rate], of_row[finetune.REFERENCE, rate], itemgetter(figure)
        )
        for name, rate, figure in PAIRS
    }


def short_runs(records: list[Record]) -> list[Record]:
    return [r for r in records if (r["task"], r["steps"]) == ("sst2", SHORT)]


def as_text(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def described(name: str, runs: list[Record]) -> list[str]:
    """What the optimizer is, the dtype of its params, and its bytes."""
    dtype, _ = finetune.ROWS[name].make(finetune.Run(1e-5, SHORT, 0))
    return [name, jnp.dtype(dtype).name, f"{runs[0]['bytes']:.1f}"]


def rows_of(records: list[Record]) -> dict[str, list[Record]]:
    """By name; first what takes most bytes."""
    of_row = common.groups(records, "row")
    names = sorted(of_row, key=lambda name: -round(of_row[name][0]["bytes"]))
    return {name: of_row[name] for name in names}


def mean(runs: list[Record], figure: str) -> str:
    return f"{statistics.mean(run[figure] for run in runs):.3f}" if runs else ""


def less_reference(
    runs: list[Record], reference: list[Record], figure: str = "accuracy"
) -> str:
    return language_model.minus(runs, reference, itemgetter(figure))


def by_rate(records: list[Record], reference: list[Record], figure: str) -> str:
    """Means over seeds, each above its difference from the reference at that rate."""
    at_rate = common.groups(reference, "rate")

    def cell(runs: list[Record]) -> str:
        less = less_reference(runs, at_rate[runs[0]["rate"]], figure)
        less = less.replace(" ", common.NO_BREAK)
        return "<br>".join(filter(None, (mean(runs, figure), less)))

    return table_by_rate(records, cell)


def table_by_rate(
    records: list[Record], cell_of_runs: Callable[[list[Record]], str]
) -> str:
    """A row for each optimizer, and a column for each rate."""
    return of_rates(records, DESCRIPTION, described, cell_of_runs)


def of_rates(
    records: list[Record],
    header: list[str],
    describe: Callable[[str, list[Record]], list[str]],
    cell_of_runs: Callable[[list[Record]], str],
) -> str:
    """What `describe` says of an optimizer, and a cell for each rate; of no runs it is
    empty.
    """
    rates = sorted({record["rate"] for record in records})
    rows = []
    for name, runs in rows_of(records).items():
        at_rate = common.groups(runs, "rate")
        cells = [
            cell_of_runs(at_rate[rate]) if rate in at_rate else "" for rate in rates
        ]
        rows.append([*describe(name, runs), *cells])
    return common.markdown([*header, *map(as_text, rates)], rows)


def of_runs(records: list[Record]) -> str:
    """A row for each optimizer, length and rate: means over seeds."""
    rows = []
    of_setting = common.groups(records, "steps", "rate")
    for (num_steps, rate), at_setting in sorted(of_setting.items()):
        of_row = rows_of(at_setting)
        for name, runs in of_row.items():
            less = less_reference(runs, of_row[finetune.REFERENCE])
            described_as = zip(DESCRIPTION, described(name, runs), strict=True)
            rows.append(
                {"steps": f"{num_steps:,}", "rate": as_text(rate)}
                | dict(described_as)
                | {"seeds": str(len(runs))}
                | {figure: mean(runs, figure) for figure in FIGURES}
                | {"accuracy − AdamW's": less}
            )
    return common.table(rows)


def cell_of(runs: list[Record]) -> str:
    """The mean accuracy, with the number of seeds if there are fewer than five."""
    if not runs or len(runs) >= 5:
        return mean(runs, "accuracy")
    return f"{mean(runs, 'accuracy')} ({num_seeds(len(runs))})"


def num_seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


def of_fine_tuning(records: list[Record]) -> str:
    """Accuracy by rate."""

    def describe(name: str, runs: list[Record]) -> list[str]:
        return [FINE_TUNED[name], f"{runs[0]['bytes']:.1f}"]

    shown = [r for r in records if r["row"] in FINE_TUNED]
    return of_rates(shown, ["optimizer", "bytes"], describe, cell_of)
