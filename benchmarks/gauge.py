"""When and where momentum pays: the gauge of each layer, on three tasks.

    python benchmarks/gauge.py --data-dir DIR

Trains a perceptron on the digits of scikit-learn, a convolutional network on 2,560
images of CIFAR-10 (those of low_precision.py, with Keras' SGD+M as SPA, β = 0.9), and
nanoGPT on a text (that of language_model.py, with `spa_adamw`), each with a warm-up and
a cosine. Prints gain over noise level and alignment of each layer, in the first
twentieth of the steps, in the middle and in the last tenth: above 1 momentum pays
there. With --json runs in OUT are not repeated.
"""

import argparse
import functools
import statistics
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import language_model
import low_precision
import nanogpt
import numpy as np

from spa_optax import spa, spa_adamw
from spa_optax.diagnostics import momentum_report, track_momentum

TASKS = {"digits": 0.3, "images": 0.1, "text": 0.004}  # with the rate η
PHASES = {"early": (0.0, 0.05), "middle": (0.3, 0.6), "late": (0.9, 1.0)}


def layer_of(params: Any) -> Any:
    """The label of each array: its layer in Flax, and in nanoGPT its name."""

    def label(path: Any, _: Any) -> str:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        return ".".join(names if names[0] in nanogpt.NAMES else names[:-1])

    return jax.tree_util.tree_map_with_path(label, params)


def measure(task: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The final loss, and reports at every tenth step, by layer and of the whole."""
    reports: dict[str, list[list[float]]] = {}
    read = jax.jit(
        lambda s: {**momentum_report(s, by_label=True), "all": momentum_report(s)}
    )

    def watch(count: int, state: Any) -> None:
        if count % 10 == 0:
            for label, report in jax.device_get(read(state)).items():
                reports.setdefault(label, []).append([count, *map(float, report)])

    gauged = functools.partial(track_momentum, decay=0.9, every=5, per_leaf=layer_of)
    if task == "text":
        make = lambda rate, key: gauged(spa_adamw(rate, 0.2, **language_model.recipe))
        row, texts = (
            language_model.Row(TASKS[task], make),
            nanogpt.read(arguments.data_dir),
        )
        run = language_model.train(
            row, TASKS[task], arguments.steps, seed, texts, watch
        )
        loss = language_model.best(run)
    else:
        of_task = low_precision.make_task(task, arguments.data_dir, arguments.epochs)
        eta = lambda alpha, beta: lambda k: alpha(k) / (1 - beta)
        make_spa = lambda alpha, beta, key: gauged(spa(eta(alpha, beta), 1 - beta))
        scheme = low_precision.Scheme(jnp.float32, make_spa)
        run = low_precision.make_train(of_task, scheme, 0.9, "cosine", watch)
        loss = run(TASKS[task], seed)["loss"]
    return {"loss": loss, "reports": reports}


def ratios(reports: list[list[float]], phase: str) -> tuple[float, float]:
    """Gain over noise level and alignment in a phase of the run, means."""
    begin, end = PHASES[phase]
    last = reports[-1][0]
    of_phase = [r for r in reports if begin * last <= r[0] <= end * last]
    values = np.array(
        [[gain / level, cosine] for _, gain, level, cosine, *_ in of_phase]
    )
    return tuple(np.nanmean(values, axis=0).tolist())


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for task, records in runs.items():
        for label in records[0]["reports"]:
            rows.append([task, label])
            for phase in PHASES:
                found = [ratios(record["reports"][label], phase) for record in records]
                gain, cosine = (
                    statistics.mean(values) for values in zip(*found, strict=True)
                )
                rows[-1].append(f"{gain:.2f} ({cosine:+.2f})".replace("-", "−"))
    return common.markdown(["task", "layer", *PHASES], rows)


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=list(TASKS), help="what to train")
    add("--seeds", type=int, default=3, help="how many")
    add("--epochs", type=int, help="of digits and images, by default 107 and 25")
    add("--steps", type=int, default=1_000, help="of nanoGPT")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="of CIFAR-10 and Tiny Shakespeare",
    )
    arguments = common.parse(parser, argv, "seeds", "epochs", "steps")
    records = common.Records(arguments.json, ("task", "seed", "epochs", "steps"))
    of = lambda task, seed: (task, seed, arguments.epochs, arguments.steps)
    run = lambda task, seed: records.get(
        of(task, seed), lambda: measure(task, seed, arguments)
    )
    runs = {
        task: [run(task, seed) for seed in range(arguments.seeds)]
        for task in arguments.task
    }
    count = common.command_line.count(arguments.seeds, "seed")
    print(text := f"Gain over noise level (alignment), {count}:\n\n{table(runs)}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
