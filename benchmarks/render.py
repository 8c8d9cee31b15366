"""Writes the tables of results/*.jsonl as results/*.md, and those of README.md and
some pages of docs.

    python benchmarks/render.py [--check]

With --check it writes nothing, and fails if a page is not that of its records.
"""

import json
import operator
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import fidelity
import language_model
import memory
from language_rows import ADAMW, LADDERS, ROWS

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
OF_SPA = ROWS["spa_adamw"].settings
AT_MU_Y_1 = OF_SPA | {"mu_y": 1.0}
AT_C_OF_005 = OF_SPA | {"c": 0.05}
# The rows of docs/results.md, with the dtype of their params; first the reference.
PRETRAINED = {
    "NAdamW": ("AdamW, `nesterov=True`", "float32"),
    "Muon": ("Muon", "float32"),
    "Muon, float8 m": (
        "Muon in `float8_momentum` and `stochastic_rounding`",
        "bfloat16",
    ),
    "NAdamW, bfloat16 m": (
        "AdamW, bfloat16 momentum, in `stochastic_rounding`",
        "bfloat16",
    ),
    "NAdamW, rounded to nearest": ("AdamW, rounded to nearest", "bfloat16"),
    "NAdamW, bfloat16 m, float32 params": ("AdamW, bfloat16 momentum", "float32"),
    "spa_adamw, float8 z": ("`spa_adamw`, z in float8", "bfloat16"),
    "spa_adamw, bfloat16 z": ("`spa_adamw`, z in bfloat16", "bfloat16"),
    "factored NAdamW, float8 m": (
        "[`factored_nadamw`](recipes.md#nesterov-momentum-in-3-bytes), float8 momentum",
        "bfloat16",
    ),
    "Adafactor, bfloat16 params": ("Adafactor in `stochastic_rounding`", "bfloat16"),
}
FINE_TUNED = {
    "float32": "AdamW, float32 params",
    "float32, bfloat16 m": "AdamW, bfloat16 momentum, float32 params",
    "bfloat16": "AdamW, bfloat16 params, rounded to nearest",
    "stochastic_rounding": "AdamW, bfloat16 momentum, in `stochastic_rounding`",
    "z in bfloat16": "`spa_adamw`, z in bfloat16",
    "z in float8": "`spa_adamw`, z in float8",
    "Adafactor, stochastic_rounding": "Adafactor in `stochastic_rounding`",
}
# The rows of docs/averages.md, with what users type.
AVERAGED = {
    "AdamW": "`optax.adamw(…, b1=0.7)`",
    "AdamW averaged": "`primal_averaging` around `optax.adamw(…, b1=0.7)`",
    "NAdamW": "`optax.adamw(…, nesterov=True)`",
    "spa_adamw": "`spa_adamw(…, interpolation=0.9)`",
    "Muon": "`optax.contrib.muon(…)`",
    "Muon averaged": "`primal_averaging` around `optax.contrib.muon(…)`",
}
# The rows of the ladders in docs/results.md: what changes from one to the next.
CHANGES = (
    "AdamW with a b1 of 0.7, its best",
    "Nesterov momentum with a b1 of 0.9; in z an `interpolation` of 0.9",
    "the second moment is factored; params still in float32",
    "params in bfloat16, rounded at random",
    "z or momentum in bfloat16",
    "z or momentum in float8",
)
# A sixteenth of the best rate, and its rows in docs/results.md, the reference first.
SMALL_RATE = 2.5e-4
AT_SMALL_RATE = (
    "NAdamW",
    "NAdamW, bfloat16 m",
    "spa_adamw, bfloat16 z",
    "NAdamW, rounded to nearest",
)
# The rows of README.md, by the names of their records of both tasks.
IN_SHORT = {
    ("NAdamW", "float32"): "`optax.adamw`, float32 params",
    ("NAdamW, bfloat16 m, float32 params", "float32, bfloat16 m"): (
        "`optax.adamw` with a bfloat16 momentum, float32 params"
    ),
    ("NAdamW, bfloat16 m", "stochastic_rounding"): (
        "`optax.adamw` with a bfloat16 momentum, in `stochastic_rounding`"
    ),
    ("NAdamW, rounded to nearest", "bfloat16"): "`optax.adamw`, bfloat16 params",
    ("spa_adamw, bfloat16 z", "z in bfloat16"): "`spa_adamw`, z in bfloat16",
    ("spa_adamw, float8 z", "z in float8"): "`spa_adamw`, z in float8",
    ("Adafactor, bfloat16 params", "Adafactor, stochastic_rounding"): (
        "`optax.adafactor` in `stochastic_rounding`"
    ),
}
FINE_TUNING_RATES = (1e-4, 2e-5)  # of their accuracies: the best of AdamW, a small one
# The rows of docs/fit.md, with their bytes per parameter.
SCALED = {
    "AdamW, float32 master copy": "AdamW, float32 master copy, 14",
    "AdamW": "AdamW, float32 params, 12",
    "AdamW, bfloat16 m, float32 params": "AdamW, float32 params, bfloat16 momentum, 10",
    "Adafactor": "Adafactor, float32 params, 4",
    "NAdamW, bfloat16 m": "AdamW in `stochastic_rounding`, 8",
    "spa_adamw, bfloat16 z": "`spa_adamw`, z in bfloat16, 4",
    "spa_adamw, float8 z": "`spa_adamw`, z in float8, 3",
    "Muon, float8 m": (
        "Muon in `float8_momentum` and `stochastic_rounding`, 3.1 to 3.7"
    ),
    "Adafactor, bfloat16 params": "Adafactor in `stochastic_rounding`, 2",
}
SCALED_TO = {
    "8B on v5e-8": "8B on v5e-8",
    "70B on v5p-64": "70B on v5p-64 (32 devices)",
}
# Losses in the text of pages: rows that a page quotes at their own settings.
QUOTED = {
    "docs/compared.md": (
        "Muon",
        "Muon, float8 m",
        "NAdamW",
        "NAdamW, bfloat16 m, float32 params",
        "NAdamW, bfloat16 m",
        "NAdamW, rounded to nearest",
        "AdamW, FlashOptim moments",
        "AdamW, bitsandbytes moments",
        "factored NAdamW, float8 m",
        "spa_adamw, bfloat16 z",
        "spa_adamw, float8 z",
        "Adafactor",
        "Adafactor, bfloat16 params",
    ),
    "docs/muon.md": ("Muon", "Muon, float8 m"),
    "docs/start.md": ("AdamW, bfloat16 m", "NAdamW, bfloat16 m"),
}
# And at others.
QUOTED_AT: list[tuple[str, str, dict[str, float]]] = [
    ("docs/compared.md", "AdamW", ADAMW),
    ("docs/compared.md", "spa_adamw, float8 z", AT_MU_Y_1),
    ("docs/results.md", "Adafactor, bfloat16 params", {"rate": 8e-3}),
    ("docs/results.md", "spa_adamw", AT_C_OF_005),
    ("docs/results.md", "spa_adamw, float8 z", AT_MU_Y_1),
]
SOURCE = "python benchmarks/render.py"
TITLES = {  # of the pages of records
    "language_model": "Loss by bytes, in pretraining",
    "language_model_search": "Loss by settings, in pretraining",
    "memory": "What fits on a device",
    "trainers": "Trainers, killed and resumed",
    "finetune": "Fine-tuning in bfloat16",
    "fidelity": "How long few bits stay close to float32",
}
TASKS = {"sst2": "SST-2", "trec": "TREC"}
NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a cell on one line
Record = dict[str, Any]


def read(name: str) -> list[Record]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


class FinishedRuns(common.Records):
    """Records alone: a program that has none is not compiled, but an error."""

    def get(self, key: tuple[Any, ...], _: Any) -> Record:
        """The record; raises KeyError if there is none."""
        return self.found[self.identity(dict(zip(self.keys, key, strict=True)))]


def read_memory() -> FinishedRuns:
    return FinishedRuns(RESULTS / "memory.jsonl", ("target", "optimizer"))


def groups(records: list[Record], *keys: str) -> dict[Any, list[Record]]:
    """By one field or more, in the order in which their values come."""
    value_of = operator.itemgetter(*keys)
    values = dict.fromkeys(map(value_of, records))
    return {value: [r for r in records if value_of(r) == value] for value in values}


def seeds_of(runs: list[Record]) -> str:
    """Such as "seed 0", or "seeds 0 and 6"."""
    seeds = [str(seed) for seed in sorted({run["seed"] for run in runs})]
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(seeds[:-1])} and {seeds[-1]}"


def of_language_model(records: list[Record]) -> Iterator[tuple[str, str]]:
    """For each length of the runs: the best settings, and the ladders."""
    for title, runs in by_length([r for r in records if not is_of_search(r)]):
        best = language_model.best_settings(runs)
        shown = [r for r in runs if is_shown(r) and r not in best]
        yield f"{title}, {seeds_of(runs)}", language_model.table(best + shown)
        for name, names in LADDERS.items():
            if {run["optimizer"] for run in best} >= set(names):
                ladder = language_model.ladder(best, names)
                yield f"{title}: from AdamW to 3 bytes by {name}", ladder


def of_search(records: list[Record]) -> Iterator[tuple[str, str]]:
    """For each length of the runs, all that chose settings."""
    for title, runs in by_length(list(filter(is_of_search, records))):
        yield f"{title}, {seeds_of(runs)}", language_model.table(runs)


def by_length(records: list[Record]) -> Iterator[tuple[str, list[Record]]]:
    """A title with the runs of each length, 2,000 steps first."""
    runs_of = groups(records, "steps")
    for num_steps in sorted(runs_of, key=lambda steps: (steps != 2_000, steps)):
        yield f"{num_steps:,} steps", runs_of[num_steps]


def is_of_search(record: Record) -> bool:
    """Whether its seed chose settings."""
    return record["seed"] in language_model.SEARCH


def is_shown(record: Record) -> bool:
    """Whether a page shows it, though its settings are not the best."""
    row = record["optimizer"], record["settings"]
    return row in (
        ("AdamW", ADAMW),
        ("spa_adamw, float8 z", AT_MU_Y_1),
        ("spa_adamw", AT_C_OF_005),
        ("spa_adamw, bfloat16 z", AT_C_OF_005),
        ("Adafactor", {"rate": 8e-3}),
        ("Adafactor, bfloat16 params", {"rate": 8e-3}),
        ("AdamW averaged", {"rate": 4e-3, "b1": 0.7, "c": 0.00625, "mu_y": 0.4}),
    ) or is_at_small_rate(record)


def is_at_small_rate(record: Record) -> bool:
    """Whether of 2,000 steps at the small rate, and one of the rows of results.md."""
    found = record["steps"], record["settings"].get("rate")
    return found == (2_000, SMALL_RATE) and record["optimizer"] in AT_SMALL_RATE


def of_memory(found: common.Records) -> Iterator[tuple[str, str]]:
    """The largest models, then each target that has a table of its own."""
    names = memory.both_ways(memory.BY_CARD)
    largest = memory.largest(list(memory.CARDS), names, found)
    yield "The largest model on one card, and the GiB of its step", largest
    for target in memory.BY_OPTIMIZER:
        records = [
            record for record in found.found.values() if record["target"] == target
        ]
        yield f"{target}; {records[0]['versions']}", memory.table(records)


def of_trainers(records: list[Record]) -> Iterator[tuple[str, str]]:
    header = ["trainer", "optimizer", "bytes/param", "devices", "loss at x", "resumed"]
    header += ["resumed with another `state_dtype`"]
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
        rows.append(row)
    yield "Killed after step 170 of 300", common.markdown(header, rows)


def of_finetune(records: list[Record]) -> Iterator[tuple[str, str]]:
    """Means over seeds, for each rate."""
    keys = ("accuracy", "loss", "moved", "distance")
    for (task, num_steps, rate), runs in sorted(
        groups(records, "task", "steps", "rate").items()
    ):
        rows, of_rows = [], groups(runs, "row")
        for name, of_row in of_rows.items():
            means = [
                f"{statistics.mean(run[key] for run in of_row):.3f}" for key in keys
            ]
            less = language_model.minus(
                of_row, of_rows["float32"], operator.itemgetter("accuracy")
            )
            # The last entry of a curve: step, accuracy and loss of x, and of an EMA.
            of_ema = [
                run["curve"][-1][3] for run in of_row if len(run["curve"][-1]) > 3
            ]
            ema = f"{statistics.mean(of_ema):.3f}" if of_ema else ""
            num_bytes = f"{of_row[0]['bytes']:.2f}"
            seeds = ", ".join(str(seed) for seed in sorted(r["seed"] for r in of_row))
            rows.append([name, num_bytes, seeds, *means, less, ema])
        rows.sort(key=lambda row: -float(row[1]))
        header = ["row", "bytes/param", "seeds", *keys, "accuracy − float32's"]
        header.append("accuracy of an EMA")
        if not any(row[-1] for row in rows):
            header, rows = header[:-1], [row[:-1] for row in rows]
        title = f"{TASKS[task]}, {num_steps:,} steps at {as_text(rate)}"
        yield title, common.markdown(header, rows)


def of_fidelity(records: list[Record]) -> Iterator[tuple[str, str]]:
    """Distances from the float32 run after each step that is compared."""
    for name, table in fidelity.tables(records).items():
        yield f"Distances of {name}", table


def pages() -> dict[str, str]:
    """From the name of a page to its text."""
    pretraining = read("language_model.jsonl")
    sections = {
        "language_model": of_language_model(pretraining),
        "language_model_search": of_search(pretraining),
        "memory": of_memory(read_memory()),
        "trainers": of_trainers(read("trainers.jsonl")),
        "finetune": of_finetune(read("finetune.jsonl")),
        "fidelity": of_fidelity(read("fidelity.jsonl")),
    }
    result = {}
    for name, of_page in sections.items():
        parts = [f"# {TITLES[name]}", f"<!-- Written by `{SOURCE}`. -->"]
        text = (RESULTS / f"rows_{name}.md").read_text()
        before, after = text.split("<!-- tables -->")
        parts.append(before.strip())
        parts += [f"## {title}\n\n{table}" for title, table in of_page]
        parts.append(after.strip())
        result[name] = "\n\n".join(parts) + "\n"
    return result


def pretrained(records: list[Record]) -> dict[str, list[Record]]:
    """By optimizer, the runs of 2,000 steps at its best settings, of five seeds."""
    best = language_model.best_settings(records)
    chosen = [r for r in best if not is_of_search(r)]
    of_row = groups([r for r in chosen if r["steps"] == 2_000], "optimizer")
    return {name: runs for name, runs in of_row.items() if len(runs) >= 5}


def of_others(
    records: list[Record], optimizer: str, settings: dict[str, float]
) -> list[Record]:
    """Runs of 2,000 steps at some settings, of the seeds that chose none."""
    wanted = optimizer, settings, 2_000
    return [
        r
        for r in records
        if (r["optimizer"], r["settings"], r["steps"]) == wanted and not is_of_search(r)
    ]


def mean_loss(runs: list[Record]) -> float:
    return statistics.mean(map(language_model.best, runs))


def at_small_rate(records: list[Record]) -> dict[str, list[Record]]:
    """By optimizer, the runs at the small rate, of the seeds that all have."""
    of_row = groups(list(filter(is_at_small_rate, records)), "optimizer")
    seeds = set.intersection(*({r["seed"] for r in runs} for runs in of_row.values()))
    return {
        name: [r for r in runs if r["seed"] in seeds] for name, runs in of_row.items()
    }


def of_losses(
    of_row: dict[str, list[Record]], texts: dict[str, tuple[str, str]]
) -> str:
    """Rows of docs/results.md: the first of `texts`, the reference, and the others by
    loss.
    """
    rows = []
    reference, *others = texts
    others.sort(key=lambda name: mean_loss(of_row[name]))
    for name in (reference, *others):
        runs = of_row[name]
        difference = language_model.minus(runs, of_row[reference], digits=3)
        difference = difference.replace(" ", NO_BREAK) or "the reference"
        loss, num_bytes = f"{mean_loss(runs):.3f}", f"{runs[0]['bytes']:.1f}"
        rows.append([*texts[name], num_bytes, loss, difference])
    header = ["optimizer", "params", "bytes", "loss", "− the reference"]
    return common.markdown(header, rows)


def of_ladders(of_row: dict[str, list[Record]]) -> str:
    """The losses of both ladders side by side, in docs/results.md."""
    rows = []
    for change, *names in zip(CHANGES, *LADDERS.values(), strict=True):
        losses = [f"{mean_loss(of_row[name]):.3f}" for name in names]
        num_bytes = f"{of_row[names[0]][0]['bytes']:.0f}"
        rows.append([num_bytes, *losses, change])
    return common.markdown(["bytes", *LADDERS, "the change"], rows)


def of_averages(of_row: dict[str, list[Record]]) -> str:
    """The losses of params, of an EMA of them, and of x, in docs/averages.md."""
    rows = []
    for name, text in AVERAGED.items():
        ends = [run["curve"][-1] for run in of_row[name]]
        losses = [
            f"{statistics.mean(end[point] for end in ends):.3f}"
            if all(point in end for end in ends)
            else ""
            for point in ("weights", "EMA 0.99", "x")
        ]
        rows.append([text, *losses])
    return common.markdown(["optimizer", "params", "EMA of them", "x"], rows)


def fine_tuned(records: list[Record]) -> list[Record]:
    """The runs on SST-2 of 150 steps."""
    return [r for r in records if (r["task"], r["steps"]) == ("sst2", 150)]


def in_short(losses: dict[str, list[Record]], fine_tuning: list[Record]) -> str:
    """The table of README.md: the loss of one task, and accuracies of the other."""
    accuracies, rows = groups(fine_tuned(fine_tuning), "row", "rate"), []
    for (name, of_fine_tuning), text in IN_SHORT.items():
        of_rates = [
            cell_of(accuracies[of_fine_tuning, rate]) for rate in FINE_TUNING_RATES
        ]
        num_bytes = f"{losses[name][0]['bytes']:.0f}"
        rows.append([text, num_bytes, f"{mean_loss(losses[name]):.3f}", *of_rates])
    header = ["optimizer", "bytes", "loss in pretraining"]
    first, second = map(as_text, FINE_TUNING_RATES)
    header += [f"accuracy in fine-tuning at {first}", f"at {second}"]
    return common.markdown(header, rows)


def mean_accuracy(runs: list[Record]) -> float:
    return statistics.mean(run["accuracy"] for run in runs)


def as_text(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def cell_of(runs: list[Record]) -> str:
    """The mean accuracy, with the number of seeds if there are fewer than five."""
    if not runs:
        return ""
    mean, num_seeds = f"{mean_accuracy(runs):.3f}", len(runs)
    if num_seeds >= 5:
        return mean
    return f"{mean} ({num_seeds} seed{'s' if num_seeds > 1 else ''})"


def of_fine_tuning(records: list[Record]) -> str:
    """The rows of docs/results.md: accuracy on SST-2 by rate, after 150 steps."""
    runs = fine_tuned(records)
    rates = sorted({run["rate"] for run in runs if run["row"] in FINE_TUNED})
    rows = []
    for name, of_row in groups(runs, "row").items():
        if name not in FINE_TUNED:
            continue
        by_rate = groups(of_row, "rate")
        cells = [cell_of(by_rate.get(rate, [])) for rate in rates]
        rows.append([FINE_TUNED[name], f"{of_row[0]['bytes']:.1f}", *cells])
    rows.sort(key=lambda row: -float(row[1]))
    header = ["optimizer", "bytes", *map(as_text, rates)]
    return common.markdown(header, rows)


def of_longer_fine_tuning(records: list[Record]) -> str:
    """Accuracy and loss on SST-2 after 2,600 steps, in docs/results.md: of the learning
    rates and seeds that all rows have.
    """
    of_row = groups([r for r in records if r["steps"] == 2_600], "row")
    columns = set.intersection(
        *({(r["rate"], r["seed"]) for r in runs} for runs in of_row.values())
    )
    columns = sorted(columns, reverse=True, key=lambda column: (column[0], -column[1]))
    rows = []
    for name, runs in of_row.items():
        of_column = {(r["rate"], r["seed"]): r for r in runs}
        ends = [of_column[column] for column in columns]
        cells = [f"{end['accuracy']:.3f}, {end['loss']:.3f}" for end in ends]
        rows.append([FINE_TUNED[name], f"{runs[0]['bytes']:.0f}", *cells])
    titles = [f"{as_text(rate)}, seed {seed}" for rate, seed in columns]
    return common.markdown(["optimizer", "bytes", *titles], rows)


def of_devices(records: list[Record]) -> str:
    """GiB per device, in docs/fit.md, for what was compiled for every target."""
    of_target = {(r["optimizer"], r["target"]): r for r in records}
    limits = [f"*{memory.TARGETS[name].limit:.4g}*" for name in SCALED_TO]
    rows = [["*what a device has*", *limits]]
    for name, text in SCALED.items():
        keys = [(name, target) for target in SCALED_TO]
        if all(key in of_target for key in keys):
            rows.append([text, *(memory_cell(of_target[key]) for key in keys)])
    return common.markdown(
        ["optimizer, bytes per parameter", *SCALED_TO.values()], rows
    )


def memory_cell(record: Record) -> str:
    limit = memory.TARGETS[record["target"]].limit
    if record["refused"] or record["GiB"] > limit:
        return f"{record['GiB']:.1f}, OOM"
    return f"{record['GiB']:.1f}"


def of_cards(found: common.Records) -> str:
    """The largest model on each card in docs/fit.md, by both ways of a step."""
    limits = {card: memory.TARGETS[f"8B on one {card}"].limit for card in memory.CARDS}
    rows = [["*GiB for a program*", *(f"*{limit:.1f}*" for limit in limits.values())]]
    for name in (name for name in SCALED if name in memory.BY_CARD):
        row = [SCALED[name]]
        for card, limit in limits.items():
            fits = [
                memory.largest_model(way, card, found)
                for way in memory.both_ways([name])
            ]
            # By model: the second way matters only if it fits a larger one.
            sizes = dict(filter(None, reversed(fits)))
            row.append(
                " → ".join(
                    f"{model}\\*" if limit - sizes[model] < 1 else model
                    for model in sorted(sizes)
                )
            )
        rows.append(row)
    return common.markdown(["optimizer, bytes per parameter", *memory.CARDS], rows)


def missing_quotes() -> list[str]:
    """What of QUOTED and QUOTED_AT does not stand in its page."""
    records = read("language_model.jsonl")
    quoted = [
        (page, name, ROWS[name].settings)
        for page, names in QUOTED.items()
        for name in names
    ]
    numbers = [
        (page, name, f"{mean_loss(of_others(records, name, settings)):.3f}")
        for page, name, settings in quoted + QUOTED_AT
    ]
    return [
        f"{page} lacks the {number} of {name}"
        for page, name, number in numbers
        if number not in (ROOT / page).read_text()
    ]


def guides() -> dict[Path, str]:
    """Pages with their tables, each behind a comment with its name."""
    pretraining, fine_tuning = read("language_model.jsonl"), read("finetune.jsonl")
    of_row, found = pretrained(pretraining), read_memory()
    small = {name: PRETRAINED[name] for name in AT_SMALL_RATE}
    tables = {
        "docs/results.md": {
            "pretraining": of_losses(of_row, PRETRAINED),
            "small rate": of_losses(at_small_rate(pretraining), small),
            "fine-tuning": of_fine_tuning(fine_tuning),
            "longer fine-tuning": of_longer_fine_tuning(fine_tuning),
            "ladder": of_ladders(of_row),
        },
        "docs/averages.md": {"averages": of_averages(of_row)},
        "docs/fit.md": {
            "devices": of_devices(list(found.found.values())),
            "cards": of_cards(found),
        },
        "README.md": {"in short": in_short(of_row, fine_tuning)},
    }
    result = {}
    for page, of_page in tables.items():
        text = (ROOT / page).read_text()
        for name, table in of_page.items():
            before, comment, after = text.partition(f"<!-- {name} -->\n\n")
            after = re.sub(r"\A(\|.*\n)*\n*", "", after)
            text = f"{before}{comment}{table}\n\n{after}".rstrip() + "\n"
        result[ROOT / page] = text
    return result


def main(argv: list[str] | None = None) -> None:
    parser = common.command_line.make_parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="whether the pages are up to date"
    )
    check = parser.parse_args(argv).check
    if missing := missing_quotes():
        sys.exit("error: " + "; ".join(missing))
    texts = {RESULTS / f"{name}.md": text for name, text in pages().items()}
    for path, text in (texts | guides()).items():
        if not check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"error: {path} is not up to date: run `{SOURCE}`")


if __name__ == "__main__":
    main()
