"""Writes the tables that come from results/*.jsonl into README.md and the pages of docs
and results. Each stands behind a comment with its name.

    python benchmarks/render.py [--check]

With --check it writes nothing, and fails if a page is not that of its records.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import common
import fidelity
import render_finetuning
import render_memory
import render_pretraining
from language_rows import ADAMW, ROWS
from render_finetuning import as_text

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
# The rows of README.md, by the names of their records of both tasks.
IN_SHORT = {
    ("NAdamW", "AdamW"): "`optax.adamw`, float32 params",
    ("NAdamW, m in bfloat16", "AdamW, m in bfloat16"): (
        "`optax.adamw` with a bfloat16 momentum, float32 params"
    ),
    (
        "NAdamW, m in bfloat16, rounded at random",
        "AdamW, m in bfloat16, rounded at random",
    ): ("`optax.adamw` with a bfloat16 momentum, in `stochastic_rounding`"),
    (
        "NAdamW, m and ν in bfloat16, rounded to nearest",
        "AdamW, m and ν in bfloat16, rounded to nearest",
    ): "`optax.adamw`, bfloat16 params",
    (
        "spa_adamw, z in bfloat16",
        "spa_adamw, z in bfloat16",
    ): "`spa_adamw`, z in bfloat16",
    ("spa_adamw, z in float8", "spa_adamw, z in float8"): "`spa_adamw`, z in float8",
    ("factored_nadamw, m in bfloat16", ""): (
        "[Nesterov momentum](docs/recipes.md#nesterov-momentum-in-3-bytes) in "
        "bfloat16, factored second moment"
    ),
    ("Adafactor, rounded at random", "Adafactor, rounded at random"): (
        "`optax.adafactor` in `stochastic_rounding`"
    ),
}
FINE_TUNING_RATES = (1e-4, 2e-5)  # of their accuracies: the best of AdamW, a small one
# Losses in the text of pages: rows that a page quotes at their own settings.
QUOTED = {
    "docs/compared.md": (
        "Muon",
        "Muon, m in float8",
        "NAdamW",
        "NAdamW, m in bfloat16",
        "NAdamW, m in bfloat16, rounded at random",
        "NAdamW, m and ν in bfloat16, rounded to nearest",
        "AdamW, m and ν as in FlashOptim",
        "AdamW, m and ν as in bitsandbytes",
        "spa_adamw, z in bfloat16",
        "spa_adamw, z in float8",
        "Adafactor",
        "Adafactor, rounded at random",
    ),
    "docs/muon.md": ("Muon", "Muon, m in float8"),
    "docs/start.md": (
        "AdamW, m in bfloat16, rounded at random",
        "NAdamW, m in bfloat16, rounded at random",
    ),
}
# And at others.
OF_SPA = ROWS["spa_adamw"].settings
AT_INTERPOLATION_1 = OF_SPA | {"interpolation": 1.0}
AT_AVERAGING_005 = OF_SPA | {"averaging": 0.05}
QUOTED_AT: list[tuple[str, str, dict[str, float]]] = [
    ("docs/compared.md", "AdamW", ADAMW),
    ("docs/compared.md", "spa_adamw, z in float8", AT_INTERPOLATION_1),
    ("docs/results.md", "spa_adamw", AT_AVERAGING_005),
    ("docs/results.md", "spa_adamw, z in float8", AT_INTERPOLATION_1),
]
SOURCE = "python benchmarks/render.py"
Record = dict[str, Any]
Tables = dict[str, dict[str, str]]  # by page, and by its name there


def read(name: str) -> list[Record]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class FinishedRuns(common.Records):
    """Records alone: a program that has none is not compiled, but an error."""

    def get(self, key: tuple[Any, ...], _: Any) -> Record:
        """The record; raises KeyError if there is none."""
        return self.found[self.identity(dict(zip(self.keys, key, strict=True)))]


def tables(pretraining: list[Record], fine_tuning: list[Record]) -> Tables:
    found = FinishedRuns(RESULTS / "memory.jsonl", ("target", "optimizer"))
    result: Tables = {
        "README.md": {"in short": in_short(pretraining, fine_tuning)},
        "benchmarks/results/trainers.md": {
            "trainers": of_trainers(read("trainers.jsonl"))
        },
        "benchmarks/results/fidelity.md": fidelity.tables(read("fidelity.jsonl")),
    }
    for more in (
        render_pretraining.tables(pretraining),
        render_finetuning.tables(fine_tuning),
        render_memory.tables(found),
    ):
        for page, of_page in more.items():
            result[page] = result.get(page, {}) | of_page
    return result


def in_short(pretraining: list[Record], fine_tuning: list[Record]) -> str:
    """The loss of one task, and accuracies of the other."""
    losses = render_pretraining.pretrained(pretraining)
    short = render_finetuning.short_runs(fine_tuning)
    accuracies, rows = common.groups(short, "row", "rate"), []
    for (name, of_fine_tuning), text in IN_SHORT.items():
        loss = render_pretraining.mean_loss(losses[name])
        of_rates = [
            render_finetuning.cell_of(accuracies.get((of_fine_tuning, rate), []))
            for rate in FINE_TUNING_RATES
        ]
        rows.append([text, f"{losses[name][0]['bytes']:.0f}", f"{loss:.3f}", *of_rates])
    header = ["optimizer", "bytes", "loss"]
    header += [f"accuracy at {as_text(rate)}" for rate in FINE_TUNING_RATES]
    return common.markdown(header, rows)


def of_trainers(records: list[Record]) -> str:
    """A row for each trainer."""
    rows = []
    for (trainer, version), runs in common.groups(
        records, "trainer", "version"
    ).items():
        same = "yes" if all(run["resumed"] for run in runs) else "NO"
        ends = [run.get("another state_dtype", "") for run in runs]
        fails = any(end.startswith("raises") for end in ends)
        row = [f"{trainer} {version}", str(runs[0]["devices"]), same]
        rows.append([*row, "raises an error" if fails else "goes on, silently"])
    header = ["trainer", "devices", "resumed to the same loss"]
    return common.markdown([*header, "z from bfloat16 to float8"], rows)


def missing_losses(pretraining: list[Record]) -> list[str]:
    """What of QUOTED and QUOTED_AT does not stand in its page."""
    quoted = [
        (page, name, ROWS[name].settings)
        for page, names in QUOTED.items()
        for name in names
    ]
    missing = []
    for page, name, settings in quoted + QUOTED_AT:
        runs = render_pretraining.of_others(pretraining, name, settings)
        number = f"{render_pretraining.mean_loss(runs):.3f}"
        if number not in (ROOT / page).read_text():
            missing.append(f"{page} lacks the {number} of {name}")
    return missing


def missing_differences(
    pretraining: list[Record], fine_tuning: list[Record]
) -> list[str]:
    """Which intervals do not stand in the text of their page, in either direction."""
    differences = {
        "benchmarks/results/averages.md": render_pretraining.of_points(pretraining),
        "docs/results.md": render_pretraining.of_pairs(pretraining)
        | render_finetuning.of_pairs(fine_tuning),
    }
    missing = []
    for page, of_page in differences.items():
        text = " ".join((ROOT / page).read_text().replace("+", "").split())
        for name, figures in of_page.items():
            texts = in_prose(figures), in_prose(reversed_difference(figures))
            if not any(difference in text for difference in texts):
                missing.append(f"{page} lacks the {texts[0]} of {name}")
    return missing


def in_prose(figures: list[float]) -> str:
    """Such as "0.010 [−0.003, 0.023]"."""
    mean, low, high = (f"{figure:z.3f}".replace("-", "−") for figure in figures)
    return f"{mean} [{low}, {high}]"


def reversed_difference(figures: list[float]) -> list[float]:
    """Of what was subtracted, minus the other."""
    mean, low, high = figures
    return [-mean, -high, -low]


def pages(of_pages: Tables) -> dict[Path, str]:
    """With their tables."""
    result = {}
    for page, of_page in of_pages.items():
        text = (ROOT / page).read_text()
        for name, table in of_page.items():
            before, comment, after = text.partition(f"<!-- {name} -->\n")
            if not comment:
                sys.exit(f"error: {page} lacks the comment <!-- {name} -->")
            after = re.sub(r"\A\n*(\|.*\n)*\n*", "", after)
            text = f"{before}{comment}\n{table}\n\n{after}"
        result[ROOT / page] = text.rstrip() + "\n"
    return result


def main(argv: list[str] | None = None) -> None:
    parser = common.command_line.make_parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="whether the pages are up to date"
    )
    check = parser.parse_args(argv).check
    tasks = read("language_model.jsonl"), read("finetune.jsonl")
    if missing := missing_losses(tasks[0]) + missing_differences(*tasks):
        sys.exit("error: " + "; ".join(missing))
    for path, text in pages(tables(*tasks)).items():
        if not check:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"error: {path} is not up to date: run `{SOURCE}`")


if __name__ == "__main__":
    main()
