"""When momentum pays: the gauge over a run, on three tasks.

    python benchmarks/gauge.py --data-dir DIR

Trains a perceptron on the digits of scikit-learn, a convolutional network on 2,560
images of CIFAR-10 (those of low_precision.py, with Keras' SGD+M as SPA, β = 0.9), and
nanoGPT on a text (that of language_model.py, with `spa_adamw`), each with a warm-up and
a cosine. Prints gain over noise level in the first twentieth of the steps, in the
middle and in the last tenth: above 1 momentum pays there. With --json runs in OUT are
not repeated.
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
import language_rows
import low_precision
import nanogpt
import numpy as np
import optax

from spa_optax import spa, spa_adamw
from spa_optax.diagnostics import momentum_report, track_momentum

TASKS = {"digits": 0.3, "images": 0.1, "text": 0.004}  # with the rate η
PHASES = {"early": (0.0, 0.05), "middle": (0.3, 0.6), "late": (0.9, 1.0)}
DECAY = 0.98  # the gauge averages 50 steps
Tx = optax.GradientTransformation


def gauged_adamw(rate: optax.Schedule, key: jax.Array) -> Tx:
    del key
    return track_momentum(spa_adamw(rate, 0.2, **language_rows.recipe), DECAY)


def gauged_spa(alpha: optax.Schedule, beta: float, key: jax.Array) -> Tx:
    """Keras' SGD with momentum, η = α/(1 − β)."""
    del key
    return track_momentum(spa(lambda k: alpha(k) / (1 - beta), 1 - beta), DECAY)


def measure(task: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The final loss, and the count and the report of every tenth step."""
    reports: list[list[float]] = []
    report_of = jax.jit(momentum_report)

    def watch(count: int, state: Any) -> None:
        if count % 10 == 0:
            report = jax.device_get(report_of(state))
            reports.append([count, *map(float, report)])

    rate = TASKS[task]
    if task == "text":
        row = language_rows.Row(gauged_adamw, {"rate": rate})
        texts = nanogpt.read(arguments.data_dir)
        settings, num_steps = row.settings, arguments.steps
        run = language_model.train(row, settings, num_steps, seed, texts, watch)
        loss = language_model.best(run)
    else:
        of_task = low_precision.make_task(task, arguments.data_dir, arguments.epochs)
        scheme = low_precision.Scheme(jnp.float32, gauged_spa)
        train = low_precision.make_train(of_task, scheme, 0.9, "cosine", watch)
        loss = train(rate, seed)["loss"]
    return {"loss": loss, "reports": reports}


def ratio(reports: list[list[float]], phase: str) -> float:
    """The mean of gain over noise level in a phase of the run."""
    begin, end = PHASES[phase]
    last = reports[-1][0]
    of_phase = [r for r in reports if begin * last <= r[0] <= end * last]
    return float(np.nanmean([gain / level for _, gain, level, *_ in of_phase]))


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for task, records in runs.items():
        rows.append([task])
        for phase in PHASES:
            ratios = [ratio(record["reports"], phase) for record in records]
            rows[-1].append(f"{statistics.mean(ratios):.2f}")
    return common.markdown(["task", *PHASES], rows)


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
    runs: dict[str, list[dict[str, Any]]] = {task: [] for task in arguments.task}
    for task, of_task in runs.items():
        for seed in range(arguments.seeds):
            run = functools.partial(measure, task, seed, arguments)
            key = (task, seed, arguments.epochs, arguments.steps)
            of_task.append(records.get(key, run))
    count = common.command_line.count(arguments.seeds, "seed")
    print(text := f"Gain over noise level, {count}:\n\n{table(runs)}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
