"""The tables of results/language_model.jsonl, for render.py."""

import functools
import itertools
import statistics
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import common
import jax.numpy as jnp
import language_model
from language_rows import ADAMW, LADDERS, ROWS

INTERPOLATION = 0.4  # of the runs by which `averaging` was chosen
OTHER_POINTS = language_model.OF_PARAMS, language_model.OF_AVERAGE
NO_DECAY = tuple(name for name, row in ROWS.items() if row.floor == 1)
# The rows by what they are to answer.
QUESTIONS = {
    "float32": (
        "AdamW, as nanoGPT has it",
        "AdamW",
        "NAdamW",
        "factored_nadamw",
        "spa_adamw",
        "spa_adamw, ν factored",
        "Muon",
        "Adafactor",
        "Lion",
        "SGD with momentum",
        "spa_from_sgdm",
    ),
    "NAdamW": (
        "NAdamW, m in bfloat16",
        "NAdamW, m in bfloat16, rounded at random",
        "NAdamW, m and ν in bfloat16, rounded to nearest",
    ),
    "AdamW": (
        "AdamW, a master copy in float8",
        "AdamW, rounded to nearest",
        "AdamW, m in bfloat16, rounded at random",
        "AdamW, m and ν as in bitsandbytes",
        "AdamW, m and ν as in FlashOptim",
    ),
    "z or momentum": (
        "spa_adamw, z in float32",
        "spa_adamw, z in bfloat16",
        "spa_adamw, z in float8",
        "factored_nadamw, m in float32",
        "factored_nadamw, m in bfloat16",
        "factored_nadamw, m in float8",
        "factored_nadamw, m as in bitsandbytes",
    ),
    "Muon and Adafactor": (
        "Muon, m in float8",
        "Muon, m as in 8-bit Muon",
        "Adafactor, rounded at random",
        "Adafactor, m in bfloat16, rounded at random",
    ),
    "averages": ("AdamW in primal_averaging", "Muon in primal_averaging"),
    "computed in bfloat16": tuple(
        name for name, row in ROWS.items() if row.compute != jnp.float32
    ),
    "no decay": NO_DECAY,
}
# The rows of docs/results.md, the reference first.
PRETRAINED = {
    "NAdamW": "NAdamW",
    "Muon": "Muon",
    "Muon, m in float8": "Muon in `float8_momentum` and `stochastic_rounding`",
    "NAdamW, m in bfloat16, rounded at random": (
        "NAdamW, bfloat16 momentum, in `stochastic_rounding`"
    ),
    "NAdamW, m and ν in bfloat16, rounded to nearest": "NAdamW, rounded to nearest",
    "NAdamW, m in bfloat16": "NAdamW, bfloat16 momentum",
    "spa_adamw, z in float8": "`spa_adamw`, z in float8",
    "spa_adamw, z in bfloat16": "`spa_adamw`, z in bfloat16",
    "factored_nadamw, m in float8": (
        "[`factored_nadamw`](recipes.md#nesterov-momentum-in-3-bytes), float8 momentum"
    ),
    "Adafactor, rounded at random": "Adafactor in `stochastic_rounding`",
}
# A sixteenth of the best rate, and its rows there, the reference first.
SMALL_RATE = 2.5e-4
AT_SMALL_RATE = (
    "NAdamW",
    "NAdamW, m in bfloat16, rounded at random",
    "spa_adamw, z in bfloat16",
    "NAdamW, m and ν in bfloat16, rounded to nearest",
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
# The rows of docs/primal_averaging.md, with what users type.
AVERAGED = {
    "AdamW": "`optax.adamw(…, b1=0.7)`",
    "AdamW in primal_averaging": "`primal_averaging` around `optax.adamw(…, b1=0.7)`",
    "NAdamW": "`optax.adamw(…, nesterov=True)`",
    "spa_adamw": "`spa_adamw(…, interpolation=0.9)`",
    "Muon": "`optax.contrib.muon(…)`",
    "Muon in primal_averaging": "`primal_averaging` around `optax.contrib.muon(…)`",
}
# The differences in the text of docs/results.md: a row at its settings minus another at
# its own, or at those that are given.
PAIRS: list[tuple[str, dict[str, float], str, dict[str, float]]] = [
    ("AdamW", {}, "NAdamW", {}),
    ("AdamW, rounded to nearest", {}, "AdamW", {"b1": 0.9}),
    ("spa_adamw, z in float8", {"interpolation": 1.0}, "spa_adamw, z in float8", {}),
    ("spa_adamw, z in bfloat16", {}, "factored_nadamw, m in bfloat16", {}),
    ("spa_adamw, z in float8", {}, "factored_nadamw, m in float8", {}),
    ("spa_adamw, z in float8", {}, "spa_adamw", {}),
    ("factored_nadamw, m in float8", {}, "NAdamW", {}),
    ("spa_adamw, z in bfloat16", {"averaging": 0.05}, "spa_adamw", {"averaging": 0.05}),
]
# Those in the text of results/averages.md, each at a point.
POINTS = [
    (("AdamW in primal_averaging", "x"), ("AdamW", "EMA 0.99")),
    (("AdamW in primal_averaging", "x"), ("NAdamW", "EMA 0.99")),
    (("Muon in primal_averaging", "x"), ("Muon", "EMA 0.99")),
]
Record = dict[str, Any]


def tables(records: list[Record]) -> dict[str, dict[str, str]]:
    """By page, and by its name there."""
    of_row = pretrained(records)
    small = {name: PRETRAINED[name] for name in AT_SMALL_RATE}
    return {
        "benchmarks/results/language_model.md": of_records(records),
        "benchmarks/results/averages.md": of_average_records(records),
        "docs/results.md": {
            "pretraining": of_losses(of_row, PRETRAINED),
            "small rate": of_losses(at_small_rate(records), small),
            "ladder": of_ladders(of_row),
        },
        "docs/primal_averaging.md": {"averages": in_short(of_row)},
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
    chosen = [r for r in records if not is_of_search(r)]
    by_row = functools.partial(language_model.ladder, pretrained(records))
    searched = [r for r in search(records) if r["optimizer"] not in NO_DECAY]
    return by_question(of_length(chosen, 2_000)) | {
        "small rate": table([r for r in chosen if is_at_small_rate(r)]),
        "from AdamW to 3 bytes by z": by_row(LADDERS["z"]),
        "from AdamW to 3 bytes by momentum": by_row(LADDERS["momentum"]),
        "20,000 steps": table(of_length(chosen, 20_000)),
        "chosen": of_search(searched),
    }


def of_average_records(records: list[Record]) -> dict[str, str]:
    searched = search(records)
    constant = [r for r in searched if r["optimizer"] in NO_DECAY]
    return {
        "averages": of_averages(records),
        "averaging": of_averaging(records),
        "no decay": table(constant, peer_of(searched), without=()),
    }


def search(records: list[Record]) -> list[Record]:
    """The runs that chose settings."""
    return of_length([r for r in records if is_of_search(r)], 2_000)


def of_search(records: list[Record]) -> str:
    """What was tried for each row, its settings, and the nearest of the others, on the
    seeds that both have.
    """
    rows = []
    for name, of_row in common.groups(in_order(records), "optimizer").items():
        of_settings = language_model.of_settings(of_row)
        settings = name, tuple(ROWS[name].settings.items())
        tried = [dict(pairs) for _, pairs in of_settings]
        runs = of_settings.pop(settings, [])
        if runs and of_settings:
            far = {
                key: language_model.difference(others, runs)[0]
                for key, others in of_settings.items()
            }
            nearest = min(far, key=lambda key: far[key])
            texts = [
                language_model.in_words(dict(key[1])) for key in (settings, nearest)
            ]
            less = language_model.minus(of_settings[nearest], runs)
            rows.append([name, values_of(tried), *texts, less])
    header = ["optimizer", "tried", "chosen", "the best other", "its loss − the chosen"]
    return common.markdown(header, rows)


def values_of(tried: list[dict[str, float]]) -> str:
    """Those of each setting that took more than one, such as "rate=0.002,0.004"."""
    texts = []
    for name in tried[0]:
        values = sorted({settings[name] for settings in tried})
        if len(values) > 1:
            texts.append(f"{name}={','.join(f'{value:g}' for value in values)}")
    return " ".join(texts)


def of_averaging(records: list[Record]) -> str:
    """Loss of x minus that of the optimizer by itself, for each `averaging`."""
    columns = list(itertools.product(("AdamW", "Muon"), (500, 2_000, 5_000)))
    found = {
        (value, *column): of_x
        for column in columns
        for value, of_x in less_alone(records, *column).items()
    }
    rows = []
    for value in sorted({value for value, *_ in found}):
        cells = (found.get((value, *column), "") for column in columns)
        rows.append([f"{value:g}", *cells])
    header = [f"{name}, {num_steps:,} steps" for name, num_steps in columns]
    return common.markdown(["`averaging`", *header], rows)


def less_alone(records: list[Record], name: str, num_steps: int) -> dict[float, str]:
    """By `averaging`: the loss of x minus that of the optimizer by itself, and how many
    seeds there are.
    """
    averaged = f"{name} in primal_averaging"
    runs = of_length(records, num_steps)
    alone = ROWS[name].settings
    runs_at: dict[float, list[Record]] = {}
    for run in runs:
        settings = dict(run["settings"])
        averaging = settings.pop("averaging", None)
        if run["optimizer"] == averaged and settings == alone | {
            "interpolation": INTERPOLATION
        }:
            runs_at.setdefault(averaging, []).append(run)
    plain = [r for r in runs if (r["optimizer"], r["settings"]) == (name, alone)]
    result = {}
    for averaging, of_x in runs_at.items():
        mean = language_model.difference(of_x, plain)[0]
        result[averaging] = f"{mean:+.3f} ({len(of_x)})".replace("-", "−")
    return result


def all_rows() -> dict[str, None]:
    """In the order of the tables."""
    return dict.fromkeys(itertools.chain(*QUESTIONS.values()))


def in_order(records: list[Record]) -> list[Record]:
    """That of the tables."""
    names = list(all_rows())
    return sorted(records, key=lambda record: names.index(record["optimizer"]))


def by_question(records: list[Record]) -> dict[str, str]:
    """A table for each question that has runs."""
    of_row = common.groups(records, "optimizer")
    if nowhere := of_row.keys() - all_rows().keys():
        raise ValueError(f"QUESTIONS must have all rows, but lack {nowhere}")
    result = {}
    for question, names in QUESTIONS.items():
        runs = [run for name in names for run in of_row.get(name, [])]
        if question == "z or momentum":
            runs = [run for run in runs if not is_on_ladder(run)]
        if runs and question != "averages":
            peer = "AdamW" if question == "AdamW" else "NAdamW"
            result[question] = table(runs, peer_of(records, peer), peer)
    return result


def is_on_ladder(record: Record) -> bool:
    name, settings = record["optimizer"], record["settings"]
    return settings == ROWS[name].settings and name in itertools.chain(
        *LADDERS.values()
    )


def table(
    records: list[Record],
    peer: list[Record] | None = None,
    name: str = "NAdamW",
    without: tuple[str, ...] = OTHER_POINTS,
) -> str:
    """Beside NAdamW at its best settings, or at those of the records.

    What all rows have in common stands in the text.
    """
    rows = language_model.rows_of(in_order(records), peer or peer_of(records), name)
    in_common = [c for c in ("params", "seeds") if len({row[c] for row in rows}) == 1]
    return common.table(rows, (*without, *in_common))


def peer_of(records: list[Record], name: str = "NAdamW") -> list[Record]:
    """The runs of a row at its default b1, or all of them."""
    runs = [r for r in records if r["optimizer"] == name]
    return [r for r in runs if r["settings"] == ADAMW] or runs


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
    result = {
        f"{first} − {second}": language_model.difference(runs, others)
        for (first, runs), (second, others) in pairs(records)
    }
    longest = [r for r in of_length(records, 20_000) if not is_of_search(r)]
    of_row = common.groups(longest, "optimizer")
    spa, nadamw = of_row["spa_adamw, z in float8"], of_row["NAdamW"]
    return result | {"20,000 steps": language_model.difference(spa, nadamw)}


def pairs(records: list[Record]) -> Iterator[list[tuple[str, list[Record]]]]:
    """Those of `PAIRS`: two rows in words, each with its runs."""
    for name, changed, other, other_changed in PAIRS:
        yield [
            (
                f"{n} {language_model.in_words(change)}".strip(),
                of_others(records, n, ROWS[n].settings | change),
            )
            for n, change in ((name, changed), (other, other_changed))
        ]


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
        runs, dtype = of_row[name], language_model.params_of(name)
        difference = language_model.minus(runs, of_row[reference])
        difference = difference.replace(" ", common.NO_BREAK) or "the reference"
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
    columns = "to `spa_adamw`", "to `factored_nadamw`"
    return common.markdown(["bytes", *columns, "the change"], rows)


def in_short(of_row: dict[str, list[Record]]) -> str:
    """The losses of params, of an EMA of them, and of x."""
    rows = []
    for name, text in AVERAGED.items():
        means = [
            language_model.mean_of(of_row[name], point)
            for point in ("weights", "EMA 0.99", "x")
        ]
        rows.append([text, *("" if m is None else f"{m:.3f}" for m in means)])
    return common.markdown(["optimizer", "params", "EMA of them", "x"], rows)


def of_averages(records: list[Record]) -> str:
    """The same for all lengths, with the best of all averages."""
    rows = []
    for num_steps in (2_000, 5_000, 20_000):
        runs = [r for r in of_length(records, num_steps) if r["optimizer"] in AVERAGED]
        if num_steps != 5_000:  # the other lengths have seeds that chose nothing
            runs = [r for r in runs if not is_of_search(r)]
        num_seeds = max(map(len, language_model.of_settings(runs).values()))
        for row in language_model.rows_of(in_order(runs), []):
            if row["seeds"] == str(num_seeds):
                params, average = (row[point] for point in OTHER_POINTS)
                has_x = bool(params)
                rows.append(
                    {
                        "steps": f"{num_steps:,}",
                        "seeds": row["seeds"],
                        "optimizer": row["optimizer"],
                        "settings": row["settings"],
                        "params": params if has_x else row["loss"],
                        "best average of them": average,
                        "x": row["loss"] if has_x else "",
                    }
                )
    return common.table(rows)
