"""The tables of results/language_model.jsonl, for render.py."""

import itertools
import statistics
from operator import itemgetter
from typing import Any

import common
import jax.numpy as jnp
import language_model
from language_rows import LADDERS, ROWS

# The rows by what they are to answer: the tables of both pages of records.
QUESTIONS = {
    "float32": (
        "AdamW, as published",
        "AdamW",
        "NAdamW",
        "factored NAdamW",
        "spa_adamw",
        "spa_adamw, factored ν",
        "Muon",
        "Adafactor",
        "Lion",
        "SGD+M",
        "spa_from_sgdm",
    ),
    "AdamW": (
        "NAdamW, bfloat16 m, float32 params",
        "NAdamW, bfloat16 m",
        "AdamW, bfloat16 m",
        "AdamW, float8 copy",
        "NAdamW, rounded to nearest",
        "AdamW, rounded to nearest",
        "AdamW, rounded to nearest, float32 moments",
        "AdamW, bitsandbytes moments",
        "AdamW, FlashOptim moments",
    ),
    "z or momentum": (
        "spa_adamw, bfloat16 params",
        "spa_adamw, bfloat16 z",
        "spa_adamw, float8 z",
        "factored NAdamW, bfloat16 params",
        "factored NAdamW, bfloat16 m",
        "factored NAdamW, float8 m",
        "factored NAdamW, bitsandbytes m",
    ),
    "Muon and Adafactor": (
        "Muon, float8 m",
        "Muon, linear m",
        "Adafactor, bfloat16 params",
        "Adafactor with momentum, bfloat16 params",
    ),
    "averages": ("AdamW", "AdamW averaged", "Muon", "Muon averaged"),
    "computed in bfloat16": tuple(name for name in ROWS if "computed in" in name),
    "no decay": tuple(name for name in ROWS if name.endswith(", constant")),
}
# What the names of rows leave out. m is the momentum, and ν the second moment.
TEXTS = {
    "AdamW, as published": "AdamW, as nanoGPT has it",
    "factored NAdamW": "`factored_nadamw`",
    "spa_adamw": "`spa_adamw`",
    "spa_adamw, factored ν": "`spa_adamw`, ν factored",
    "SGD+M": "SGD with momentum",
    "spa_from_sgdm": "`spa_from_sgdm`",
    "NAdamW, bfloat16 m, float32 params": "NAdamW, m in bfloat16",
    "NAdamW, bfloat16 m": "NAdamW, m in bfloat16, rounded at random",
    "AdamW, bfloat16 m": "AdamW, m in bfloat16, rounded at random",
    "AdamW, bfloat16 params": "AdamW, rounded at random",
    "AdamW, low half": "AdamW, the other half of the bits in its state",
    "AdamW, bfloat16 copy": "AdamW, a master copy in bfloat16",
    "AdamW, float8 copy": "AdamW, a master copy in float8",
    "NAdamW, rounded to nearest": "NAdamW, m and ν in bfloat16, rounded to nearest",
    "AdamW, rounded to nearest": "AdamW, ν in bfloat16, rounded to nearest",
    "AdamW, rounded to nearest, float32 moments": "AdamW, rounded to nearest",
    "AdamW, bitsandbytes moments": "AdamW, m and ν as in bitsandbytes",
    "AdamW, FlashOptim moments": "AdamW, m and ν as in FlashOptim",
    "spa_adamw, bfloat16 params": "`spa_adamw`, z in float32",
    "spa_adamw, bfloat16 z": "`spa_adamw`, z in bfloat16",
    "spa_adamw, float8 z": "`spa_adamw`, z in float8",
    "factored NAdamW, bfloat16 params": "`factored_nadamw`, m in float32",
    "factored NAdamW, bfloat16 m": "`factored_nadamw`, m in bfloat16",
    "factored NAdamW, float8 m": "`factored_nadamw`, m in float8",
    "factored NAdamW, bitsandbytes m": "`factored_nadamw`, m as in bitsandbytes",
    "Muon, float8 m": "Muon, m in float8",
    "Muon, linear m": "Muon, m as in 8-bit Muon",
    "Adafactor, bfloat16 params": "Adafactor",
    "Adafactor with momentum, bfloat16 params": "Adafactor, m in bfloat16",
    "AdamW averaged": "AdamW in `primal_averaging`",
    "Muon averaged": "Muon in `primal_averaging`",
    "spa_adamw, Schedule-Free": "`spa_adamw`, Schedule-Free",
}
# The rows of docs/results.md, the reference first.
PRETRAINED = {
    "NAdamW": "AdamW, `nesterov=True`",
    "Muon": "Muon",
    "Muon, float8 m": "Muon in `float8_momentum` and `stochastic_rounding`",
    "NAdamW, bfloat16 m": "AdamW, bfloat16 momentum, in `stochastic_rounding`",
    "NAdamW, rounded to nearest": "AdamW, rounded to nearest",
    "NAdamW, bfloat16 m, float32 params": "AdamW, bfloat16 momentum",
    "spa_adamw, float8 z": "`spa_adamw`, z in float8",
    "spa_adamw, bfloat16 z": "`spa_adamw`, z in bfloat16",
    "factored NAdamW, float8 m": (
        "[`factored_nadamw`](recipes.md#nesterov-momentum-in-3-bytes), float8 momentum"
    ),
    "Adafactor, bfloat16 params": "Adafactor in `stochastic_rounding`",
}
# A sixteenth of the best rate, and its rows there, the reference first.
SMALL_RATE = 2.5e-4
AT_SMALL_RATE = (
    "NAdamW",
    "NAdamW, bfloat16 m",
    "spa_adamw, bfloat16 z",
    "NAdamW, rounded to nearest",
)
# What changes from one row of a ladder to the next.
CHANGES = (
    "AdamW with a b1 of 0.7, its best",
    "Nesterov momentum with a b1 of 0.9; in z an `interpolation` of 0.9",
    "the second moment is factored; params still in float32",
    "params in bfloat16, rounded at random",
    "z or momentum in bfloat16",
    "z or momentum in float8",
)
# The rows of docs/averages.md, with what users type.
AVERAGED = {
    "AdamW": "`optax.adamw(…, b1=0.7)`",
    "AdamW averaged": "`primal_averaging` around `optax.adamw(…, b1=0.7)`",
    "NAdamW": "`optax.adamw(…, nesterov=True)`",
    "spa_adamw": "`spa_adamw(…, interpolation=0.9)`",
    "Muon": "`optax.contrib.muon(…)`",
    "Muon averaged": "`primal_averaging` around `optax.contrib.muon(…)`",
}
# The differences in the text of docs/results.md: a row at its settings minus another at
# its own, or at those that are given.
PAIRS: list[tuple[str, dict[str, float], str, dict[str, float]]] = [
    ("AdamW", {}, "NAdamW", {}),
    ("spa_adamw, float8 z", {"mu_y": 1.0}, "spa_adamw, float8 z", {}),
    ("spa_adamw, bfloat16 z", {}, "factored NAdamW, bfloat16 m", {}),
    ("spa_adamw, float8 z", {}, "factored NAdamW, float8 m", {}),
    ("spa_adamw, float8 z", {}, "spa_adamw", {}),
    ("factored NAdamW, float8 m", {}, "NAdamW", {}),
    ("spa_adamw, bfloat16 z", {"c": 0.05}, "spa_adamw", {"c": 0.05}),
]
# Those in the text of docs/averages.md, each at a point.
POINTS = [
    (("AdamW averaged", "x"), ("AdamW", "EMA 0.99")),
    (("AdamW averaged", "x"), ("NAdamW", "EMA 0.99")),
    (("Muon averaged", "x"), ("Muon", "EMA 0.99")),
]
NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a cell on one line
Record = dict[str, Any]


def tables(records: list[Record]) -> dict[str, dict[str, str]]:
    """By page, and by its name there."""
    chosen = [r for r in records if not is_of_search(r)]
    of_row = pretrained(records)
    small = {name: PRETRAINED[name] for name in AT_SMALL_RATE}
    return {
        "benchmarks/results/language_model.md": of_records(chosen),
        "benchmarks/results/language_model_search.md": of_search(
            [r for r in records if is_of_search(r)]
        ),
        "docs/results.md": {
            "pretraining": of_losses(of_row, PRETRAINED),
            "small rate": of_losses(at_small_rate(records), small),
            "ladder": of_ladders(of_row),
        },
        "docs/averages.md": {"averages": of_averages(of_row)},
    }


def is_of_search(record: Record) -> bool:
    """Whether its seed chose settings."""
    return record["seed"] in language_model.SEARCH


def is_at_small_rate(record: Record) -> bool:
    rate, name = record["settings"]["rate"], record["optimizer"]
    return rate == SMALL_RATE and name in AT_SMALL_RATE


def of_length(records: list[Record], num_steps: int) -> list[Record]:
    return [r for r in records if r["steps"] == num_steps and not is_at_small_rate(r)]


def of_records(records: list[Record]) -> dict[str, str]:
    of_row = pretrained(records)
    small = [r for r in records if is_at_small_rate(r)]
    result = by_question(of_length(records, 2_000)) | {"small rate": table(small)}
    for name, rows in LADDERS.items():
        ladder = language_model.ladder(of_row, rows, text_of_row)
        result[f"from AdamW to 3 bytes by {name}"] = ladder
    for num_steps in (5_000, 20_000):
        result[f"{num_steps:,} steps"] = table(of_length(records, num_steps))
    return result | {"names": names()}


def names() -> str:
    """What `--optimizers` calls rows that have another name in the tables."""
    rows = [
        [text_of_row(name), f"`{name}`"]
        for name in all_rows()
        if text_of_row(name) != name and not name.endswith(", constant")
    ]
    return common.markdown(["in the tables", "for `--optimizers`"], rows)


def of_search(records: list[Record]) -> dict[str, str]:
    result = by_question(of_length(records, 2_000))
    for num_steps in (500, 5_000):
        result[f"{num_steps:,} steps"] = table(of_length(records, num_steps))
    return result


def all_rows() -> dict[str, None]:
    """In the order of the tables."""
    return dict.fromkeys(itertools.chain(*QUESTIONS.values()))


def by_question(records: list[Record]) -> dict[str, str]:
    """A table for each question that has runs."""
    of_row = common.groups(records, "optimizer")
    if nowhere := of_row.keys() - all_rows().keys():
        raise ValueError(f"QUESTIONS must have all rows, but lack {nowhere}")
    result = {}
    for question, names in QUESTIONS.items():
        if runs := [run for name in names for run in of_row.get(name, [])]:
            result[question] = table(runs, peer_of(records))
    return result


def table(records: list[Record], peer: list[Record] | None = None) -> str:
    """Beside NAdamW at its best settings, or at those of the records."""
    of_row = common.groups(records, "optimizer")
    records = list(itertools.chain(*(of_row[n] for n in all_rows() if n in of_row)))
    return language_model.table(records, peer or peer_of(records), text_of_row)


def peer_of(records: list[Record]) -> list[Record]:
    nadamw = [r for r in records if r["optimizer"] == "NAdamW"]
    return language_model.best_settings(nadamw) or nadamw


def text_of_row(name: str) -> str:
    """In a table that says how it is computed, and whether the rate decays."""
    name = name.partition(", computed in")[0].removesuffix(", constant")
    return TEXTS.get(name, name)


def pretrained(records: list[Record]) -> dict[str, list[Record]]:
    """By optimizer, the runs of 2,000 steps at its best settings, of five seeds."""
    chosen = [r for r in of_length(records, 2_000) if not is_of_search(r)]
    of_row = common.groups(language_model.best_settings(chosen), "optimizer")
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


def of_pairs(records: list[Record]) -> dict[str, list[float]]:
    """Differences after 2,000 steps, and that of the longest runs."""
    result = {}
    for name, changed, other, other_changed in PAIRS:
        runs, others = (
            of_others(records, n, ROWS[n].settings | change)
            for n, change in ((name, changed), (other, other_changed))
        )
        result[f"{name} − {other}"] = language_model.difference(runs, others)
    longest = [r for r in of_length(records, 20_000) if not is_of_search(r)]
    of_row = common.groups(longest, "optimizer")
    spa, nadamw = of_row["spa_adamw, float8 z"], of_row["NAdamW"]
    return result | {"20,000 steps": language_model.difference(spa, nadamw)}


def of_points(records: list[Record]) -> dict[str, list[float]]:
    """Differences of one point from another, such as an EMA of the params."""
    of_row, result = pretrained(records), {}
    for (name, point), (other, other_point) in POINTS:
        runs, others = (
            at_point(of_row[name], point),
            at_point(of_row[other], other_point),
        )
        result[f"{name} − {other}"] = language_model.difference(
            runs, others, itemgetter("loss")
        )
    return result


def at_point(runs: list[Record], point: str) -> list[Record]:
    """Their losses there, by seed."""
    return [{"seed": run["seed"], "loss": run["curve"][-1][point]} for run in runs]


def mean_loss(runs: list[Record]) -> float:
    return statistics.mean(map(language_model.best, runs))


def at_small_rate(records: list[Record]) -> dict[str, list[Record]]:
    """By optimizer, the runs at the small rate, of the seeds that all have."""
    of_row = common.groups(list(filter(is_at_small_rate, records)), "optimizer")
    seeds = set.intersection(*({r["seed"] for r in runs} for runs in of_row.values()))
    return {
        name: [r for r in runs if r["seed"] in seeds] for name, runs in of_row.items()
    }


def of_losses(of_row: dict[str, list[Record]], texts: dict[str, str]) -> str:
    """The first of `texts`, the reference, and the others by loss."""
    rows = []
    reference, *others = texts
    others.sort(key=lambda name: mean_loss(of_row[name]))
    for name in (reference, *others):
        runs, dtype = of_row[name], jnp.dtype(ROWS[name].dtype).name
        difference = language_model.minus(runs, of_row[reference], digits=3)
        difference = difference.replace(" ", NO_BREAK) or "the reference"
        loss, num_bytes = f"{mean_loss(runs):.3f}", f"{runs[0]['bytes']:.1f}"
        rows.append([texts[name], dtype, num_bytes, loss, difference])
    header = ["optimizer", "params", "bytes", "loss", "− the reference"]
    return common.markdown(header, rows)


def of_ladders(of_row: dict[str, list[Record]]) -> str:
    """The losses of both ladders side by side."""
    rows = []
    for change, *names in zip(CHANGES, *LADDERS.values(), strict=True):
        losses = [f"{mean_loss(of_row[name]):.3f}" for name in names]
        num_bytes = f"{of_row[names[0]][0]['bytes']:.0f}"
        rows.append([num_bytes, *losses, change])
    return common.markdown(["bytes", *LADDERS, "the change"], rows)


def of_averages(of_row: dict[str, list[Record]]) -> str:
    """The losses of params, of an EMA of them, and of x."""
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
