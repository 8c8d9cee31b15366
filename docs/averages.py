"""Draws what averages are for: validation loss during a run, with and without lr decay.

python docs/averages.py benchmarks/results docs/averages.png
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

LABELS = ("AdamW", "EMA of its weights", "spa_adamw")
# Of each row: the records, the steps, the columns of a curve with the losses of the
# three, and the last point: nanoGPT's is by all of the text, those before by an eighth.
ROWS = [
    ("language_model.jsonl", "optimizer", 2_000, (1, 2, 3), -1),
    ("finetune.jsonl", "row", 500, (2, 4, 2), None),
]
# Of each panel: its title, and the names of AdamW and of a form of `spa_adamw`.
PANELS = [
    ("nanoGPT, the rate falls to a tenth", "AdamW", "spa_adamw"),
    ("nanoGPT, constant rate", "AdamW, constant", "spa_adamw, Schedule-Free, constant"),
    ("MiniLM, the rate falls to 0", "float32", "z in float8, c = 0.05, μ_y = 0.9"),
    (
        "MiniLM, constant rate",
        "float32, constant",
        "z in bfloat16, Schedule-Free, constant",
    ),
]


def main(folder: str, path: str) -> None:
    """Draws to a file; seed 0, and the lowest loss of those rates that were tried."""
    figure, all_axes = plt.subplots(
        2, 2, figsize=(7.5, 6), sharey="row", layout="constrained"
    )
    for i, (axes, (title, adamw, averaged)) in enumerate(
        zip(all_axes.flat, PANELS, strict=True)
    ):
        name, key, num_steps, columns, last = ROWS[i // 2]
        records = map(json.loads, Path(folder, name).read_text().splitlines())
        runs = [run for run in records if (run["seed"], run["steps"]) == (0, num_steps)]
        lines = zip(LABELS, (adamw, adamw, averaged), columns, strict=True)
        for label, optimizer, column in lines:
            curves = [run["curve"] for run in runs if run[key] == optimizer]
            curve = min(curves, key=lambda curve: curve[-1][column])
            points = [(point[0], point[column]) for point in curve[:last]]
            axes.plot(*zip(*points, strict=True), label=label)
        axes.set(title=title, xlabel="step")
        axes.spines[["top", "right"]].set_visible(False)
    for left in all_axes[:, 0]:
        left.set_ylabel("validation loss")
    all_axes[0, 0].set_ylim(1.7, 2.5)
    all_axes[0, 0].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
