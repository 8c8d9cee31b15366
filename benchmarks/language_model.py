"""Every optimizer on nanoGPT's recipe for Tiny Shakespeare on a CPU: loss by bytes a
parameter.

    python benchmarks/language_model.py --json benchmarks/results/language_model.jsonl

Runs the rows of language_rows.py. nanoGPT's README has a validation loss of 1.88 after
2,000 steps, from a sample of batches. Here the loss in the end is that of the whole
validation text. All runs of a seed have the same initial params and batches. Computed
in float32, unless a row's name says bfloat16, with gradients in the params' dtype.
"""

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import language_rows
import nanogpt
import numpy as np
import optax
from common import Watch
from language_rows import ROWS, Row
from scipy import stats

from spa_optax import eval_params, in_float32

# Steps between two validations, by an eighth of the text; the last is by all of it.
EVERY = 200
# Averages of the weights that training does not see, each in float32: by its decay, or
# with Schedule-Free's own weights.
DECAYS = {"EMA 0.99": 0.99, "EMA 0.995": 0.995, "EMA 0.999": 0.999}
SCHEDULE_FREE = "Schedule-Free's mean"
SEARCH = (0, 6)  # the seeds by which settings are chosen
OF_PARAMS, OF_AVERAGE = "of the params", "of their best average"  # columns
KEYS = ("optimizer", "settings", "steps", "seed")
Record = dict[str, Any]
Settings = dict[str, float]


def losses_of(row: Row) -> Callable[..., jax.Array]:
    return functools.partial(nanogpt.losses, dtype=row.compute)


def make_steps(
    row: Row, settings: Settings, num_steps: int, key: jax.Array
) -> tuple[Any, Any]:
    """From initial params to the carry; and a step, from carry and batch to carry and
    loss.

    The carry is params, the optimizer's state, and averages of the params by name.
    """
    others = dict(settings)
    rate = nanogpt.schedule(others.pop("rate"), num_steps, row.floor)
    clip = in_float32(optax.clip_by_global_norm(nanogpt.CLIP))
    tx = optax.chain(clip, row.make(rate, key, **others))
    schedule_free = language_rows.schedule_free(rate)

    def loss(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        return losses_of(row)(params, inputs, labels).mean()

    def start(params: Any) -> Any:
        params = optax.tree.cast(params, row.dtype)
        wide = optax.tree.cast(params, jnp.float32)
        names = (*DECAYS, SCHEDULE_FREE)
        averages = {name: jax.tree.map(jnp.copy, wide) for name in names}
        return params, tx.init(params), averages

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, k: Any, *batch: jax.Array) -> Any:
        params, state, averages = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        params, state = common.update(tx, grads, params, state)
        wide = optax.tree.cast(params, jnp.float32)
        # At first each is the mean of the params.
        shares: dict[str, Any] = {
            name: jnp.maximum(1 - decay, 1 / (k + 1)) for name, decay in DECAYS.items()
        }
        shares[SCHEDULE_FREE] = schedule_free(k)
        averages = {
            name: optax.incremental_update(wide, averages[name], share)
            for name, share in shares.items()
        }
        return (params, state, averages), value

    return start, step


def train(
    row: Row,
    settings: Settings,
    num_steps: int,
    seed: int,
    texts: Any,
    watch: Watch = common.ignore,
) -> Record:
    """Bytes, and losses of the weights, of their averages and of x by steps, until one
    is not finite.
    """
    keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(3)]
    start, step = make_steps(row, settings, num_steps, keys[2])
    carry = start(nanogpt.init(keys[0]))
    seen = jnp.asarray(texts[0])
    unseen = [jnp.asarray(x) for x in nanogpt.windows(texts[1])]
    batch = jax.jit(lambda k: nanogpt.batch(seen, jax.random.fold_in(keys[1], k)))

    @jax.jit
    def mean_loss(params: Any, batches: Any) -> jax.Array:
        def total(batch: Any) -> jax.Array:
            inputs, labels, counts = batch
            return (losses_of(row)(params, inputs, labels) * counts).sum()

        return jax.lax.map(total, batches).sum() / batches[2].sum()

    def validate(carry: Any, every: int) -> dict[str, float | None]:
        params, state, averages = carry
        points = {"weights": params, **averages}
        if optax.tree.get(state, "mu_y", 0) > 0:
            points["x"] = eval_params(state, params)
        batches = [y[::every] for y in unseen]
        losses = {name: float(mean_loss(x, batches)) for name, x in points.items()}
        return {
            name: round(loss, 6) if np.isfinite(loss) else None
            for name, loss in losses.items()
        }

    begin, curve = time.perf_counter(), []
    for k in range(num_steps):
        carry, _ = step(carry, k, *batch(k))
        watch(k, carry[1])
        if (is_last := k + 1 == num_steps) or (k + 1) % EVERY == 0:
            losses = validate(carry, 1 if is_last else 8)
            curve.append({"step": k + 1, **losses})
            if losses["weights"] is None:
                break
    params, state, _ = carry
    return {
        "bytes": bytes_of(params, state),
        "curve": curve,
        "seconds": round(time.perf_counter() - begin),
    }


def bytes_of(params: Any, state: Any) -> float:
    """Of both, a parameter."""
    num_bytes = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    return round(num_bytes / optax.tree.size(params), 4)


def best(record: Record) -> float:
    """The loss in the end at the point to evaluate: x, or the weights."""
    last = record["curve"][-1]
    loss = last.get("x", last["weights"])
    return np.inf if loss is None else loss


def difference(
    runs: list[Record], others: list[Record], of: Callable[[Record], float] = best
) -> list[float]:
    """The mean difference of the same seeds, and its 95 % interval by Student's t.

    Empty if they have no seed in common; the mean alone if they have one or two.
    """
    of_seed = {record["seed"]: of(record) for record in others}
    both = [of(r) - of_seed[r["seed"]] for r in runs if r["seed"] in of_seed]
    if len(both) < 3 or not np.all(np.isfinite(both)):
        return [statistics.mean(both)] if both else []
    interval = stats.ttest_1samp(both, 0).confidence_interval(0.95)
    return [statistics.mean(both), *interval]


def minus(
    runs: list[Record],
    others: list[Record],
    of: Callable[[Record], float] = best,
) -> str:
    """The difference as text, such as "−0.001 [−0.012, +0.009]".

    A bound that rounds to 0 keeps its sign.
    """
    figures = [] if runs == others else difference(runs, others, of)
    mean = f"{figures[0]:+z.3f}" if figures else ""
    bounds = ", ".join(f"{bound:+.3f}" for bound in figures[1:])
    text = f"{mean} [{bounds}]" if bounds else mean
    return text.replace("-", "−")


def mean_of(runs: list[Record], name: str) -> float | None:
    """Of the last losses at a point; None if one lacks or is not finite."""
    losses = [run["curve"][-1].get(name) for run in runs]
    known = [loss for loss in losses if loss is not None]
    return statistics.mean(known) if len(known) == len(losses) else None


def text_of(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


def best_average(runs: list[Record]) -> str:
    """The lowest loss of an average of the weights, and which it is."""
    means = {name: mean_of(runs, name) for name in (*DECAYS, SCHEDULE_FREE)}
    known = [(loss, name) for name, loss in means.items() if loss is not None]
    return "{:.3f} ({})".format(*min(known)) if known else ""


def of_settings(records: list[Record]) -> dict[Any, list[Record]]:
    """By optimizer and settings; optimizers in the order in which they come."""
    names = list(dict.fromkeys(record["optimizer"] for record in records))

    def order(record: Record) -> Any:
        return names.index(record["optimizer"]), list(record["settings"].values())

    result = defaultdict(list)
    for record in sorted(records, key=order):
        result[record["optimizer"], tuple(record["settings"].items())].append(record)
    return dict(result)


def best_settings(records: list[Record]) -> list[Record]:
    """The runs at the settings of the rows."""
    return [
        record
        for record in records
        if record["settings"] == ROWS[record["optimizer"]].settings
    ]


def params_of(name: str) -> str:
    """The dtype of a row's params."""
    return jnp.dtype(ROWS[name].dtype).name


def rows_of(
    records: list[Record], peer: list[Record], name_of_peer: str = "NAdamW"
) -> list[dict[str, str]]:
    """By column: mean losses in the end, each beside that of the peer."""
    rows = []
    for (name, settings), runs in of_settings(records).items():
        params = mean_of(runs, "weights")
        has_x = "x" in runs[0]["curve"][-1]
        loss = mean_of(runs, "x") if has_x else params
        row = {
            "optimizer": name,
            "params": params_of(name),
            "bytes": f"{runs[0]['bytes']:.1f}",
            "settings": in_words(dict(settings)),
            "seeds": str(len(runs)),
            "loss": text_of(loss),
            f"− {name_of_peer}": minus(runs, peer),
            OF_PARAMS: text_of(params) if has_x else "",
            OF_AVERAGE: best_average(runs),
        }
        rows.append(row)
    return rows


def ladder(of_row: dict[str, list[Record]], names: Iterable[str]) -> str:
    """From the first row to the last, one change a row."""
    rows: list[list[str]] = []
    first = previous = of_row[next(iter(names))]
    for name in names:
        runs = of_row[name]
        loss = statistics.mean(map(best, runs))
        row = [name, params_of(name), f"{runs[0]['bytes']:.1f}", f"{loss:.3f}"]
        rows.append([*row, minus(runs, previous), minus(runs, first)])
        previous = runs
    header = ["optimizer", "params", "bytes", "loss", "− the row above"]
    header.append("− the first row")
    return common.markdown(header, rows)


def in_words(settings: Settings) -> str:
    """As for the option --settings."""
    return " ".join(f"{name}={value:g}" for name, value in settings.items())


def settings_of(row: Row, texts: list[str]) -> list[Settings]:
    """All combinations of values such as "b1=0.8,0.9"; others are the row's."""
    values = {name: [value] for name, value in row.settings.items()}
    for text in texts:
        name, _, numbers = text.partition("=")
        if name not in values:
            raise common.command_line.UserError(
                f"--settings must be of {', '.join(values)}, got {text}"
            )
        values[name] = [float(number) for number in numbers.split(",")]
    products = itertools.product(*values.values())
    return [dict(zip(values, product, strict=True)) for product in products]


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = functools.partial(parser.add_argument, nargs="+")
    add(
        "--optimizers",
        choices=ROWS,
        metavar="NAME",
        default=list(ROWS),
        help="of the table",
    )
    add(
        "--settings",
        metavar="NAME=VALUE,…",
        default=[],
        help="in place of the row's own, such as rate=0.002,0.004 b1=0.8",
    )
    add(
        "--seed",
        type=int,
        default=[1, 2, 3, 4, 5],
        help="of initial params, batches and rounding",
    )
    parser.add_argument("--steps", type=int, default=nanogpt.STEPS, help="of each run")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), help="of Tiny Shakespeare"
    )
    arguments = common.parse(parser, argv, "steps")
    records = common.Records(arguments.json, KEYS)
    texts, chosen = nanogpt.read(arguments.data_dir), []
    for seed, name in itertools.product(arguments.seed, arguments.optimizers):
        row = ROWS[name]
        for settings in settings_of(row, arguments.settings):
            run = functools.partial(train, row, settings, arguments.steps, seed, texts)
            chosen.append(records.get((name, settings, arguments.steps, seed), run))
            end = f"seed {seed}: {best(chosen[-1]):.4f}"
            print(f"{name}, {in_words(settings)}, {end}", flush=True)
    peer = [run for run in best_settings(chosen) if run["optimizer"] == "NAdamW"]
    text = common.table(rows_of(chosen, peer))
    print(f"\n{common.device()}; {arguments.steps:,} steps\n\n{text}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
