"""Draws what averages are for: validation loss during a run, of the params, of the best
average of them that training does not see, and of x.

    python docs/averages.py benchmarks/results/language_model.jsonl docs/averages.png
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

NUM_STEPS = 2_000
Settings = dict[str, float]
ADAMW: Settings = {"rate": 0.004, "b1": 0.7}
SPA_ADAMW: Settings = {"rate": 0.004, "averaging": 0.1, "interpolation": 0.9}
MUON: Settings = {"rate": 0.008, "momentum": 0.95}
# Of each panel: its title, and the row and settings without and with primal averaging.
PANELS = [
    (
        "AdamW",
        ("AdamW", ADAMW),
        (
            "AdamW in primal_averaging",
            ADAMW | {"averaging": 0.025, "interpolation": 0.4},
        ),
    ),
    (
        "Muon",
        ("Muon", MUON),
        (
            "Muon in primal_averaging",
            MUON | {"averaging": 0.003125, "interpolation": 0.4},
        ),
    ),
    (
        "spa_adamw, 4 bytes",
        ("spa_adamw, z in bfloat16", SPA_ADAMW),
        ("spa_adamw, z in bfloat16", SPA_ADAMW),
    ),
]
Run = dict[str, Any]
Curve = dict[int, float]  # from the step to the mean loss over seeds


def of_row(runs: list[Run], name: str, settings: Settings) -> list[Run]:
    """The runs of one row of the tables, at some settings."""
    return [r for r in runs if (r["optimizer"], r["settings"]) == (name, settings)]


def curves_of(runs: list[Run]) -> dict[str, Curve]:
    """By point. The last one is left out, since it is by all of the text."""
    result: dict[str, Curve] = {}
    points = [run["curve"][:-1] for run in runs]
    for of_step in zip(*points, strict=True):
        for name in of_step[0].keys() - {"step"}:
            mean = statistics.mean(point[name] for point in of_step)
            result.setdefault(name, {})[of_step[0]["step"]] = mean
    return result


def main(records: str, picture: str) -> None:
    """The means of seeds 1 to 5."""
    runs = [json.loads(line) for line in Path(records).read_text().splitlines()]
    runs = [r for r in runs if r["steps"] == NUM_STEPS and 1 <= r["seed"] <= 5]
    figure, all_axes = plt.subplots(
        1, len(PANELS), figsize=(10, 3.5), layout="constrained"
    )
    for axes, (title, plain, averaged) in zip(all_axes, PANELS, strict=True):
        without = curves_of(of_row(runs, *plain))
        with_x = curves_of(of_row(runs, *averaged))
        averages = [name for name in without if name not in ("weights", "x")]
        best = {
            step: min(without[name][step] for name in averages)
            for step in without["weights"]
        }
        lines = {
            "params": without["weights"],
            "best average of them": best,
            "x": with_x["x"],
        }
        for label, curve in lines.items():
            axes.plot(list(curve), list(curve.values()), label=label)
        axes.set(title=title, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylabel("validation loss")
    all_axes[0].legend(frameon=False)
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
