"""Draws what averages are for: validation loss during a run, with and without lr decay.

python docs/averages.py benchmarks/results/language_model.jsonl docs/averages.png
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

# Of each panel: optimizer, and which of its curves (0 the weights, 1 their EMA, 2 x).
PANELS = {
    "the rate falls to a tenth": {
        "AdamW": ("AdamW", 0),
        "EMA of its weights": ("AdamW", 1),
        "spa_adamw": ("spa_adamw", 2),
    },
    "constant rate": {
        "AdamW": ("AdamW, constant", 0),
        "EMA of its weights": ("AdamW, constant", 1),
        "spa_adamw, Schedule-Free": ("spa_adamw, Schedule-Free, constant", 2),
    },
}


def main(records: str, path: str) -> None:
    """Draws to a file; seed 0, 2,000 steps, the lowest loss of those rates that were tried."""
    lines = map(json.loads, Path(records).read_text().splitlines())
    runs = [run for run in lines if (run["seed"], run["steps"]) == (0, 2_000)]
    figure, all_axes = plt.subplots(1, 2, figsize=(7.5, 3.4), sharey=True, layout="constrained")
    for axes, (title, lines_of) in zip(all_axes, PANELS.items(), strict=True):
        for label, (optimizer, which) in lines_of.items():
            of_optimizer = [run["curve"] for run in runs if run["optimizer"] == optimizer]
            curve = min(of_optimizer, key=lambda curve: curve[-1][1 + which])
            axes.plot([k for k, *_ in curve], [row[1 + which] for row in curve], label=label)
        axes.set(title=title, xlabel="step", ylim=(1.7, 2.5))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    all_axes[0].set_ylabel("validation loss")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
