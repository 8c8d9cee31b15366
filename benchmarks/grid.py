"""Tunes bases × forms on a task, and compares them: training, tuning, tables and a picture.

Hyper-parameters are tuned by the validation loss of seed 0: from a start to a neighbour in the grid
that is better, until none is. Then other seeds run. With --json each run is a line of OUT, and is
not repeated; tuning begins at the best setting in OUT of the most similar length and batches.
"""

import argparse
import bisect
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import matplotlib.pyplot as plt
import optax
from bases import BASES, BF16, CELLS, F32, FORMS, GRIDS, Hypers, Run, Scheme, scheme
from flax import nnx
from scipy import stats

NUM_EVALUATIONS = 10
EVALUATION_BATCHES = 32
REFERENCE = ("AdamW", "float32")
CONTROLS = (REFERENCE, ("Muon", "float32"), ("AdamW", "EMA"))
ALSO_TOLD = (("Adam, factored", "averaged, 8 bits"), ("Adam, factored", "Schedule-Free"))
# Cells to compare directly.
PAIRS = (
    ("Muon × bfloat16", "Muon × float32"),
    ("Muon × Schedule-Free", "Muon × float32"),
    ("Muon × averaged", "Muon × float32"),
    ("Muon × Schedule-Free", "Muon × EMA"),
    ("Muon × Schedule-Free", "Muon × EMA, bfloat16"),
    ("Adam, factored × Schedule-Free", "AdamW × EMA"),
    ("AdamW × EMA, bfloat16", "AdamW × EMA"),
    ("Muon × EMA, bfloat16", "Muon × EMA"),
    *(
        (f"{base}, float8 m × bfloat16", f"{base} × bfloat16")
        for base in ("Muon", "Lion", "AdamW, factored")
    ),
    ("Muon, float8 m × Schedule-Free, 8 bits", "Muon × Schedule-Free"),
    ("Muon, float8 m × averaged, 8 bits", "Muon × averaged"),
    ("Muon, float8 m × averaged, 8 bits", "Muon × float32"),
    ("Muon without momentum × averaged", "Muon without momentum × Schedule-Free"),
    ("Muon without momentum × averaged, 8 bits", "Muon without momentum × averaged"),
)
# Controls that are not in the tables of cells.
ASIDE = ("averaged, 32 bits", "bfloat16, to nearest", "EMA, cosine")
# Named in the picture, with the controls and the best forms of Adam.
NAMED = (
    ("Muon without momentum", "averaged, 8 bits"),
    ("Muon, float8 m", "bfloat16"),
    ("Muon, float8 m", "averaged, 8 bits"),
    ("Muon", "averaged"),
)
NUM_BYTES_AT_THE_RIGHT = 10  # names of points are left of them there
BYTE_CLASSES = (2, 3.5, 5, 7, 9, 13, math.inf)  # the upper end of each
Record = dict[str, Any]
Cell = tuple[str, str]  # base and form
Runs = dict[Cell, dict[int, Record]]  # by seed


Batch = tuple[jax.Array, jax.Array]  # inputs of the network, and what its logits are for


class Task(NamedTuple):
    """What to train, and batches from a key: to train on, and held out."""

    name: str
    make_network: Callable[[nnx.Rngs], nnx.Module]
    seen: Callable[[jax.Array], Batch]
    unseen: Callable[[jax.Array], Batch]
    rate_scale: float = 1.0  # of the rates with which tuning begins


def make_loss(make_network: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[Any, Batch], Any]:
    """The mean cross-entropy, in nats, from params and a batch."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_network(nnx.Rngs(0))))

    def loss(params: Any, batch: Batch) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch[0]).astype(F32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss


def make_train(
    scheme: Scheme,
    task: Task,
    num_steps: int,
    watch: Callable[[int, Any], None] = lambda count, state: None,
) -> Callable[[Hypers, int], Record]:
    """From hyper-parameters and a seed to validation losses, and bytes per parameter.

    Bytes are those of the arrays of params and state. `watch` is shown the optimizer's state after
    every step. A run ends when its loss is not finite.
    """
    loss = make_loss(task.make_network)
    make_tx = lambda h, key: scheme.make(h, Run(num_steps, key))

    @jax.jit
    def init(h: Hypers, key: jax.Array) -> Any:
        params = nnx.to_pure_dict(nnx.state(task.make_network(nnx.Rngs(key)), nnx.Param))
        params = optax.tree.cast(optax.tree.cast(params, BF16), scheme.dtype)  # same for all
        return params, make_tx(h, key).init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, k: Any, h: Hypers, key: jax.Array) -> Any:
        params, state = carry
        grads = jax.grad(loss)(params, task.seen(jax.random.fold_in(key, k)))
        updates, state = make_tx(h, key).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def validation_loss(carry: Any) -> Any:
        params, state = carry
        x = scheme.evaluate(state, params)
        keys = jax.random.split(jax.random.key(0), EVALUATION_BATCHES)  # the same for all
        return jax.lax.map(lambda key: loss(x, task.unseen(key)), keys).mean()

    def train(h: Hypers, seed: int) -> Record:
        key, curve = jax.random.key(seed), []
        carry = init(h, key)
        size = optax.tree.size(carry[0])
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))
        every = max(1, num_steps // NUM_EVALUATIONS)
        for k in range(num_steps):
            carry = step(carry, k, h, key)
            watch(k, carry[1])
            if (k + 1) % every == 0 or k + 1 == num_steps:
                value = float(validation_loss(carry))
                curve.append((k + 1, round(value, 6) if math.isfinite(value) else None))
                if curve[-1][1] is None:
                    break
        return {"bytes": num_bytes / size, "params": size, "curve": curve}

    return train


def final(record: Record) -> float:
    """The validation loss at the end; what has diverged is worse than anything."""
    loss = record["curve"][-1][1]
    return math.inf if loss is None else loss


def neighbours(h: Hypers, fixed: Hypers) -> Iterator[Hypers]:
    """A step up or down in one of the grids."""
    for name in h:
        grid, i = GRIDS[name], GRIDS[name].index(h[name])
        for j in (i + 1, i - 1):
            if name not in fixed and 0 <= j < len(grid):
                yield {**h, name: grid[j]}


def tune(start: Hypers, run: Callable[[Hypers], Record], fixed: Hypers) -> Hypers:
    """To a better neighbour, until none is better. `run` is asked again for what it has run."""
    best = start
    while True:
        loss = final(run(best))
        better = (h for h in neighbours(best, fixed) if final(run(h)) < loss)
        if (h := next(better, None)) is None:
            return best
        best = h


# ------------------------------------------------------------------------------- tables and picture


def best_of(records: list[Record]) -> Hypers | None:
    """The hyper-parameters with the lowest loss of seed 0."""
    tuning = [record for record in records if record["seed"] == 0]
    return min(tuning, key=final)["h"] if tuning else None


def by_seed(records: list[Record]) -> dict[int, Record]:
    """The runs at the best hyper-parameters."""
    h = best_of(records)
    return {record["seed"]: record for record in records if record["h"] == h}


def mean_loss(runs: dict[int, Record]) -> float:
    return statistics.mean(map(final, runs.values()))


def num_bytes(runs: dict[int, Record]) -> float:
    return next(iter(runs.values()))["bytes"]


def differences(runs: dict[int, Record], other: dict[int, Record]) -> list[float]:
    """The loss less that of another cell, seed by seed."""
    return [final(runs[seed]) - final(other[seed]) for seed in runs.keys() & other.keys()]


def less(runs: dict[int, Record], other: dict[int, Record]) -> str:
    """Their mean, and its 95 % interval."""
    both = differences(runs, other)
    if not both or runs is other:
        return ""
    mean = f"{statistics.mean(both):+.4f}"
    if len(both) > 1 and all(map(math.isfinite, both)):
        low, high = stats.ttest_1samp(both, 0).confidence_interval(0.95)
        mean += f" [{low:+.4f}, {high:+.4f}]"
    return mean.replace("-", "−")


def level(runs: Runs, cell: Cell) -> float:
    """The mean loss of AdamW, and the difference from it over the seeds that the cell has."""
    reference = runs.get(REFERENCE, {})
    both = differences(runs[cell], reference)
    return mean_loss(reference) + statistics.mean(both) if both else mean_loss(runs[cell])


def ranked(runs: Runs) -> list[list[Cell]]:
    """The cells of each class of bytes, the best first."""
    classes: list[list[Cell]] = [[] for _ in BYTE_CLASSES]
    for cell in sorted(runs, key=lambda cell: level(runs, cell)):
        classes[bisect.bisect_left(BYTE_CLASSES, round(num_bytes(runs[cell]), 1))].append(cell)
    return classes


def telling(runs: Runs) -> Runs:
    """The best two of every class of bytes, the controls, and the best form of Adam."""
    best = [cell for of_class in ranked(runs) for cell in of_class[:2]]
    return {cell: runs[cell] for cell in (*best, *CONTROLS, *ALSO_TOLD) if cell in runs}


def setting(h: Hypers) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in h.items())


def table(runs: Runs, cells: list[Cell], *, settings: bool) -> str:
    """Each cell compared with AdamW and with its base in bfloat16, not averaged."""
    rows = []
    for cell in cells:
        of_cell, seeds = runs[cell], len(runs[cell])
        others = runs.get(REFERENCE, {}), runs.get((cell[0], "bfloat16"), {})
        row = [*cell, f"{num_bytes(of_cell):.1f}", f"{mean_loss(of_cell):.4f}", str(seeds)]
        row += [less(of_cell, other) for other in others]
        tuned = next(iter(of_cell.values()))["h"]
        row += [setting(tuned)] * settings
        rows.append(row)
    header = ["base", "form", "bytes", "loss", "seeds", "− AdamW", "− base in bfloat16"]
    return common.markdown(header + ["tuned to"] * settings, rows)


def tuning_table(tried: dict[Cell, list[Record]]) -> str:
    """The lowest loss of seed 0 at each value of each hyper-parameter."""
    rows = []
    for cell, records in tried.items():
        for name in records[0]["h"]:
            losses: dict[float, float] = {}
            for record in records:
                if record["seed"] == 0:
                    value = record["h"][name]
                    losses[value] = min(losses.get(value, math.inf), final(record))
            by_value = ", ".join(f"{value:g}: {losses[value]:.4f}" for value in sorted(losses))
            if len(losses) > 1:
                rows.append([*cell, name, by_value])
    return common.markdown(["base", "form", "of", "lowest loss by value"], rows)


def coarser_table(records: list[Record]) -> str:
    """What fewer or more bits change at the same setting, seed by seed."""
    runs: dict[Any, dict[int, Record]] = {}
    for record in records:
        key = (record["base"], record["form"], setting(record["h"]))
        runs.setdefault(key, {})[record["seed"]] = record
    rows = []
    for (base, form, h), coarser in sorted(runs.items()):
        other = runs.get((base, finer := FORMS[form].tuned_as, h), {})
        if both := differences(coarser, other):
            rows.append([base, form, str(finer), h, str(len(both)), less(coarser, other)])
    return common.markdown(["base", "form", "minus", "at", "seeds", "difference"], rows)


def pairs_table(runs: Runs) -> str:
    """The pairs of cells that are compared elsewhere, each at its own setting."""
    named = {" × ".join(cell): of_cell for cell, of_cell in runs.items()}
    rows = []
    for names in PAIRS:
        runs_of_pair = [named.get(name, {}) for name in names]
        if both := differences(*runs_of_pair):
            rows.append([*names, str(len(both)), less(*runs_of_pair)])
    return common.markdown(["cell", "minus", "seeds", "difference"], rows)


def by_cell(records: list[Record]) -> dict[Cell, list[Record]]:
    """In the order of `CELLS`."""
    result: dict[Cell, list[Record]] = {}
    for record in sorted(records, key=lambda record: CELLS.index((record["base"], record["form"]))):
        result.setdefault((record["base"], record["form"]), []).append(record)
    return result


def runs_of(records: list[Record]) -> Runs:
    """The runs at the best setting of each cell, except those aside."""
    cells = by_cell(records).items()
    return {cell: by_seed(tried) for cell, tried in cells if cell[1] not in ASIDE}


def report(records: list[Record]) -> str:
    """The tables of runs of one task and size."""
    runs = runs_of(records)
    by_bytes = sorted(telling(runs), key=lambda cell: num_bytes(runs[cell]))
    ordered = list(itertools.chain(*ranked(runs)))
    best = "The best two of each class of bytes, controls, and the best form of Adam"
    tables = {
        best: table(runs, by_bytes, settings=False),
        "All": table(runs, ordered, settings=True),
        "Between two cells": pairs_table(runs),
        "Fewer or more bits at the same setting": coarser_table(records),
        "Tuning, by seed 0": tuning_table(by_cell(records)),
    }
    has_rows = lambda text: len(text.splitlines()) > 2
    return "\n\n".join(f"{title}:\n\n{of}" for title, of in tables.items() if has_rows(of))


def draw(runs: Runs, path: Path) -> None:
    """Loss by bytes: a line from each base in bfloat16 to its better average, and the frontier."""
    at = {cell: (num_bytes(of_cell), level(runs, cell)) for cell, of_cell in runs.items()}
    at = {cell: point for cell, point in at.items() if math.isfinite(point[1])}
    frontier: list[Cell] = []
    for cell in sorted(at, key=lambda cell: at[cell]):
        if not frontier or at[cell][1] < at[frontier[-1]][1]:
            frontier.append(cell)
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for base in BASES:
        averages = [at[base, form] for form in ("averaged", "Schedule-Free") if (base, form) in at]
        if averages and (base, "bfloat16") in at:
            ends = at[base, "bfloat16"], min(averages, key=lambda point: point[1])
            axes.plot(*zip(*ends, strict=True), color="0.7", linewidth=1, zorder=1)
    for form in FORMS:
        points = [point for cell, point in at.items() if cell[1] == form]
        if points:
            axes.scatter(*zip(*points, strict=True), label=form, s=24, zorder=2)
    steps = [at[cell] for cell in frontier]
    axes.step(*zip(*steps, strict=True), where="post", color="black", linewidth=1, label="frontier")
    named = [cell for cell in (*CONTROLS, *ALSO_TOLD, *NAMED) if cell in at]
    for i, cell in enumerate(sorted(named, key=lambda cell: at[cell][1])):
        axes.annotate(
            ", ".join(cell),
            at[cell],
            (0, (-12, 6)[i % 2]),
            textcoords="offset points",
            fontsize=8,
            horizontalalignment="right" if at[cell][0] > NUM_BYTES_AT_THE_RIGHT else "left",
        )
    axes.set_xscale("log", base=2)
    axes.margins(x=0.12)
    ticks = [2, 3, 4, 6, 8, 12, 16]
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xlabel("bytes per parameter, of params and optimizer state")
    axes.set_ylabel("validation loss (nats), lower is better")
    worst, best = max(at[cell][1] for cell in named), min(y for _, y in at.values())
    axes.set_ylim(top=worst + 0.5 * (worst - best) + 0.01)
    axes.legend(fontsize=8, loc="upper right", ncols=3)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# ------------------------------------------------------------------------------------ command line

# Of a transformer on the command line: default and help.
NETWORK = {"width": (128, "of it"), "heads": (4, "of attention"), "layers": (2, "how many")}
KEYS = ("task", "sizes", "base", "form", "h", "seed")


def parse(
    parser: argparse.ArgumentParser, argv: list[str] | None, sizes: dict[str, tuple[int, str]]
) -> argparse.Namespace:
    """The command line, with `sizes` of the run: its steps, the network and the batches."""
    add = parser.add_argument
    add("--base", nargs="+", choices=BASES, default=list(BASES), help="of the cells")
    add("--form", nargs="+", choices=FORMS, default=list(FORMS), help="of the cells")
    add("--fix", nargs="+", default=[], metavar="NAME=VALUE", help="what is not tuned")
    add("--seeds", type=int, default=5, help="how many, with that of tuning; 0 for no runs")
    add("--jobs", type=int, default=1, help="cells to train at a time")
    sizes = {"steps": (1_000, "of each run"), **sizes}
    for name, (default, about) in sizes.items():
        add(f"--{name}", type=int, default=default, help=about)
    add("--picture", type=Path, help="where to draw the losses")
    arguments = common.parse(parser, argv, "jobs", *sizes)
    common.command_line.check_writable(parser, arguments, "picture")
    if arguments.seeds < 0:
        parser.error(f"--seeds must be >= 0, got {arguments.seeds}")
    if arguments.width % arguments.heads:
        parser.error(f"--width must be a multiple of --heads, got {arguments.width}")
    arguments.fixed = {}
    arguments.sizes = {name: getattr(arguments, name) for name in sizes}
    for pair in arguments.fix:
        name, _, value = pair.partition("=")
        fits = [number for number in GRIDS.get(name, ()) if f"{number:g}" == value]
        if not fits:
            parser.error(f"--fix must be NAME=VALUE of the grids {GRIDS}, got {pair}")
        arguments.fixed[name] = fits[0]
    return arguments


def compare(task: Task, arguments: argparse.Namespace) -> str:
    """Tunes and runs the cells, and prints the tables."""
    records = common.Records(arguments.json, KEYS)
    sizes, fixed = arguments.sizes, arguments.fixed

    def found(cell: Cell, sizes: dict[str, int]) -> list[Record]:
        wanted = [task.name, sizes, *cell]
        return [r for r in list(records.found.values()) if [r[key] for key in KEYS[:4]] == wanted]

    def start_of(cell: Cell) -> Hypers:
        """The best setting of the most similar numbers of steps and examples in a batch."""
        far = lambda other, name: abs(math.log(other[name] / sizes[name]))
        distance = lambda other: far(other, "steps") + far(other, "batch")
        others = sorted((r["sizes"] for r in list(records.found.values())), key=distance)
        cell = (cell[0], FORMS[cell[1]].tuned_as or cell[1])
        bests = (best_of(found(cell, other)) for other in (sizes, *others))
        return next(filter(None, bests), scheme(*cell, task.rate_scale).start) | {
            name: value for name, value in fixed.items() if name in scheme(*cell).start
        }

    def run_cell(cell: Cell) -> None:
        train = make_train(scheme(*cell), task, sizes["steps"])

        def run(h: Hypers, seed: int = 0) -> Record:
            def new() -> Record:
                start, record = time.time(), train(h, seed)
                what = f"{task.name} {sizes['steps']} × {sizes['batch']}, {' × '.join(cell)}"
                cost = f"{record['bytes']:.1f} B, {time.time() - start:.0f} s"
                print(f"{what}, {h}, seed {seed}: {final(record):.4f} ({cost})", flush=True)
                return record

            return records.get((task.name, sizes, *cell, h, seed), new)

        start = start_of(cell)
        h = start if FORMS[cell[1]].tuned_as else tune(start, run, fixed)
        for seed in range(arguments.seeds):
            run(h, seed)

    cells = [(b, f) for b, f in CELLS if b in arguments.base and f in arguments.form]
    if arguments.seeds:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(run_cell, cells))
    fits = lambda record: all(record["h"].get(name, v) == v for name, v in fixed.items())
    chosen = [record for cell in cells for record in found(cell, sizes) if fits(record)]
    if not chosen:
        raise common.command_line.UserError("--seeds 0 needs runs of these sizes in --json")
    if arguments.picture:
        draw(runs_of(chosen), arguments.picture)
    text = report(chosen)
    print(f"{common.device()}; {sizes}\n\n{text}")
    return text
