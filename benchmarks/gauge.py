"""When and where momentum pays: the gauge of each layer, on three tasks, and dropping by it.

    python benchmarks/gauge.py --data-dir DIR

Trains a perceptron on the digits of scikit-learn, a convolutional network on 2,560 images of
CIFAR-10 (those of low_precision.py, with SGD+M as SPA, β = 0.9), and the decoder of bytes of
language_model.py (with `spa_adamw`), each with a warm-up and a cosine. Prints gain over noise level
and alignment of each layer, in the first twentieth of the steps, in the middle and in the last
tenth: above 1 momentum pays there. Then the loss with momentum kept, dropped after 150 steps, and
without it. With --plot the curves are drawn. With --json a run that is in OUT, a line each, is not
run again.
"""

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bases
import common
import grid
import jax
import jax.numpy as jnp
import language_model
import low_precision
import numpy as np
import optax
from tqdm import tqdm

from spa_optax import momentum_drop, scale_by_second_moment, spa, spa_adamw
from spa_optax.diagnostics import MomentumReport, momentum_report, plot_momentum, track_momentum

TASKS = {"digits": 0.3, "images": 0.1, "text": 0.004}  # with the rate η
C = {"digits": 0.1, "images": 0.1, "text": 0.2}
PHASES = {"early": (0.0, 0.05), "middle": (0.3, 0.6), "late": (0.9, 1.0)}
WAYS = ("kept", "dropped at 150", "without")
Make = Callable[[optax.Schedule, float], optax.GradientTransformation]
Watch = Callable[[int, Any], None]


def train(task: str, make: Make, seed: int, watch: Watch, arguments: argparse.Namespace) -> float:
    """The final loss. `make` is given η and c; `watch` is shown the count and the state."""
    if task != "text":
        of_task = low_precision.make_task(task, arguments.data_dir, arguments.epochs)
        beta = 1 - C[task]
        eta = lambda alpha: lambda k: alpha(k) / (1 - beta)
        scheme = low_precision.Scheme(jnp.float32, lambda a, b, key: make(eta(a), 1 - beta))
        run = low_precision.make_train(of_task, scheme, beta, "cosine", watch)
        return run(TASKS[task], seed)["loss"]
    rate = lambda h, run: lambda k: h["rate"] * bases.cosine(run)(k)
    scheme = bases.Scheme(jnp.float32, lambda h, run: make(rate(h, run), C[task]))
    of_text = language_model.make_task(
        {"width": 128, "heads": 4, "layers": 2, "length": 128, "batch": 8}
    )
    run = grid.make_train(scheme, of_text, arguments.steps, watch)
    return grid.final(run({"rate": TASKS[task]}, seed))


def optimizer(task: str, way: str, eta: optax.Schedule, c: float) -> optax.GradientTransformation:
    """Of a task, with momentum in one of the ways."""
    if way == "dropped at 150":
        last = spa(*momentum_drop(eta, c, 150, step_factor=1.01))
    else:
        last = spa(eta, c if way == "kept" else 1.0)
    if task != "text":
        return last
    decay = optax.add_decayed_weights(bases.DECAY)
    return optax.chain(scale_by_second_moment(bases.B2), decay, last)


def layer_of(params: Any) -> Any:
    """The label of each array: its layer, without the number of the array in it."""
    label = lambda path, _: ".".join(str(entry.key) for entry in path[:-1])
    return jax.tree_util.tree_map_with_path(label, params)


def gauged(task: str, eta: optax.Schedule, c: float) -> optax.GradientTransformation:
    adam: dict[str, Any] = {"b2": bases.B2, "weight_decay": bases.DECAY}
    tx = spa_adamw(eta, c, **adam) if task == "text" else spa(eta, c)
    return track_momentum(tx, 0.9, every=5, per_leaf=layer_of)


def measure(task: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Reports at every tenth step, by layer and of the whole."""
    reports: dict[str, list[list[float]]] = {}
    read = jax.jit(
        lambda state: {**momentum_report(state, by_label=True), "all": momentum_report(state)}
    )

    def watch(count: int, state: Any) -> None:
        if count % 10 == 0:
            for label, report in jax.device_get(read(state)).items():
                reports.setdefault(label, []).append([count, *map(float, report)])

    loss = train(task, functools.partial(gauged, task), seed, watch, arguments)
    return {"loss": loss, "reports": reports}


def drop(task: str, way: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The final loss."""
    make = functools.partial(optimizer, task, way)
    return {"loss": train(task, make, seed, lambda count, state: None, arguments)}


def ratios(reports: list[list[float]], phase: str) -> tuple[float, float]:
    """Gain over noise level and alignment in a phase of the run, means."""
    begin, end = PHASES[phase]
    last = reports[-1][0]
    of_phase = [r for r in reports if begin * last <= r[0] <= end * last]
    values = np.array([[gain / level, cosine] for _, gain, level, cosine, *_ in of_phase])
    return tuple(np.nanmean(values, axis=0).tolist())


def mean_and_error(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return common.command_line.plus_minus(statistics.mean(values), error).replace("-", "−")


def layer_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for task, records in runs.items():
        for label in records[0]["reports"]:
            cells = []
            for phase in PHASES:
                found = [ratios(record["reports"][label], phase) for record in records]
                gain, cosine = (statistics.mean(values) for values in zip(*found, strict=True))
                cells.append(f"{gain:.2f} ({cosine:+.2f})".replace("-", "−"))
            rows.append([task, label, *cells])
    return common.markdown(["task", "layer", *PHASES], rows)


def drop_table(runs: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    rows = []
    for task, by_way in runs.items():
        kept = [record["loss"] for record in by_way["kept"]]
        for way, records in by_way.items():
            losses = [record["loss"] for record in records]
            less_kept = [loss - before for loss, before in zip(losses, kept, strict=True)]
            rows.append([task, way, *map(mean_and_error, (losses, less_kept))])
    return common.markdown(["task", "momentum", "final loss", "− kept"], rows)


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=list(TASKS), help="what to train")
    add("--seeds", type=int, default=3, help="how many")
    add("--epochs", type=int, help="of digits and images, by default 107 and 25")
    add("--steps", type=int, default=1_000, help="of the decoder")
    add("--data-dir", type=Path, default=Path("data"), help="of CIFAR-10, binary version")
    add("--plot", type=Path, help="where to draw the gauges of seed 0, a picture a task")
    arguments = common.parse(parser, argv, "seeds", "epochs", "steps")

    records = common.Records(arguments.json, ("task", "way", "seed"))
    layers, ways = {}, {}
    seeds, bar = range(arguments.seeds), tqdm()

    def run(task: str, way: str, seed: int) -> dict[str, Any]:
        bar.set_description(f"{task} {way}")
        bar.update()
        new = measure if way == "measured" else functools.partial(drop, way=way)
        return records.get(
            (task, way, seed), lambda: new(task=task, seed=seed, arguments=arguments)
        )

    for task in arguments.task:
        layers[task] = [run(task, "measured", seed) for seed in seeds]
        ways[task] = {way: [run(task, way, seed) for seed in seeds] for way in WAYS}
    bar.close()
    count = common.command_line.count(arguments.seeds, "seed")
    text = f"Gain over noise level (alignment), {count}:\n\n{layer_table(layers)}\n\n"
    text += drop_table(ways)
    print(text)
    if arguments.plot:
        arguments.plot.mkdir(parents=True, exist_ok=True)
        for task, (first, *_) in layers.items():
            of_count = lambda i, first=first: {
                label: MomentumReport(*map(jnp.asarray, values[i][1:]))
                for label, values in first["reports"].items()
            }
            counts = [values[0] for values in next(iter(first["reports"].values()))]
            figure = plot_momentum({count: of_count(i) for i, count in enumerate(counts)})
            figure.savefig(arguments.plot / f"gauge_{task}.png", dpi=100)
    return text


if __name__ == "__main__":
    common.command_line.run(main)
