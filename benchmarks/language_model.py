"""Every optimizer on nanoGPT's recipe for Tiny Shakespeare on a CPU: loss by bytes a
parameter.

    python benchmarks/language_model.py --json benchmarks/results/language_model.jsonl

nanoGPT's README has a validation loss of 1.88 after 2,000 steps, from a sample of
batches. Here the loss in the end is that of the whole validation text. All runs of a
seed have the same initial params and batches. Computed in float32, with gradients in
the params' dtype.
"""

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import nanogpt
import numpy as np
import optax
from common import Watch
from ema_nesterov import ema_nesterov_schedules
from nanogpt import B1, B2, DECAY
from optax.contrib import MuonDimensionNumbers
from rivals import BF16, COMPANDED, DYNAMIC, F32, LINEAR, Tx, in_codes, with_low_half
from scipy import stats

from spa_optax import (
    eval_params,
    float8_momentum,
    in_float32,
    primal_averaging,
    schedule_free_averaging,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

# steps between two validations, by an eighth of the text; the last is by all of it
EVERY = 100
EMA = 0.99  # the decay of an average of the weights, which training does not see
PEER = ("AdamW", 4e-3, ())
E4M3 = jnp.float8_e4m3fn
OF_ADAM = (0.05, 0.9)  # c and μ_y
Record = dict[str, Any]


class Row(NamedTuple):
    """An optimizer, from its schedule, a key and, where it averages, c and μ_y."""

    rate: float  # at its peak
    make: Callable[..., Tx]
    dtype: Any = F32  # of the params
    average: tuple[float, ...] = ()
    floor: float = 0.1  # the last rate over the peak
    ema_dtype: Any = None  # by default that of the params
    has_x: bool = True  # if it averages


matrices: dict[str, Any] = {"mask": nanogpt.is_matrix}
schedule_free = functools.partial(
    schedule_free_averaging, num_warmup_steps=nanogpt.WARM_UP
)
recipe: dict[str, Any] = {"b2": B2, "weight_decay": DECAY, **matrices}
adamw = functools.partial(optax.adamw, b1=B1, **recipe)
averaged_adamw = functools.partial(spa_adamw, **recipe)
factored_adamw = functools.partial(averaged_adamw, second_moment="factored")


def with_decay(direction: Tx, rate: optax.Schedule, decay: float = DECAY) -> Tx:
    of_matrices = optax.add_decayed_weights(decay, **matrices)
    return optax.chain(direction, of_matrices, optax.scale_by_learning_rate(rate))


def muon(rate: optax.Schedule, dtype: Any = None) -> Tx:
    """With steps of Adam's size, and NAdam for what is no matrix of a layer."""

    def axes(path: Any, x: jax.Array) -> MuonDimensionNumbers | None:
        return MuonDimensionNumbers() if x.ndim == 2 and path[0].key == "h" else None

    numbers = functools.partial(jax.tree_util.tree_map_with_path, axes)
    options: dict[str, Any] = {
        "muon_weight_dimension_numbers": numbers,
        "consistent_rms": 0.2,
    }
    return with_decay(
        optax.contrib.muon(-1.0, adam_b2=B2, mu_dtype=dtype, **options), rate
    )


def adafactor(rate: optax.Schedule) -> Tx:
    descent = optax.adafactor(None, multiply_by_parameter_scale=False)
    return with_decay(optax.chain(descent, optax.scale(-1.0)), rate)


def sgdm(momentum: Tx) -> Tx:
    """Rates are far larger than Adam's, so the decay is smaller."""
    return optax.chain(optax.add_decayed_weights(DECAY / 1_000, **matrices), momentum)


def rounded(rate: float, make: Callable[[optax.Schedule], Tx]) -> Row:
    return Row(rate, lambda rate, key: stochastic_rounding(make(rate), key), BF16)


def muon_in_8_bits(
    rate: optax.Schedule, *average: float, rounding_key: Any, **options: Any
) -> Tx:
    momentum = float8_momentum(muon(rate), rounding_key)
    return primal_averaging(momentum, *average, rounding_key=rounding_key, **options)


def with_z(
    dtype: Any, average: Any = OF_ADAM, rate: Any = 4e-3, make: Any = factored_adamw
) -> Row:
    def make_tx(rate: optax.Schedule, key: jax.Array, *average: float) -> Tx:
        return make(rate, *average, state_dtype=dtype, rounding_key=key)

    return Row(rate, make_tx, BF16, average)


def ema_nesterov_muon(rate: optax.Schedule, key: jax.Array) -> Tx:
    """With the settings of the record at 124M params, for runs of nanogpt.STEPS."""

    def beta(k: Any) -> jax.Array:
        is_on = (k >= 0.16 * nanogpt.STEPS) & (k < 0.76 * nanogpt.STEPS)
        return jnp.where(is_on, 0.6 * rate(k) / rate(nanogpt.WARM_UP), 0.0)

    eta, *averaging = ema_nesterov_schedules(0.99, beta, nanogpt.STEPS)
    return primal_averaging(
        optax.chain(muon(rate), optax.scale_by_schedule(eta)), *averaging
    )


ROWS = {
    "AdamW, as published": Row(nanogpt.RATE, lambda rate, key: adamw(rate)),
    "AdamW": Row(4e-3, lambda rate, key: adamw(rate)),
    "NAdamW": Row(4e-3, lambda rate, key: adamw(rate, nesterov=True)),
    "AdamW to 0": Row(4e-3, lambda rate, key: adamw(rate), floor=0.0),
    "AdamW, EMA in bfloat16": Row(4e-3, lambda rate, key: adamw(rate), ema_dtype=BF16),
    "AdamW, bfloat16 m": rounded(4e-3, lambda rate: adamw(rate, mu_dtype=BF16)),
    "AdamW, companded moments, low half": Row(
        4e-3, lambda rate, key: with_low_half(in_codes(adamw(rate), COMPANDED)), BF16
    ),
    "AdamW, companded moments, error bits": Row(
        4e-3,
        lambda rate, key: with_low_half(in_codes(adamw(rate), COMPANDED), jnp.int8),
        BF16,
    ),
    "AdamW, companded moments": rounded(
        4e-3, lambda rate: in_codes(adamw(rate), COMPANDED)
    ),
    "AdamW, 8-bit moments": rounded(4e-3, lambda rate: in_codes(adamw(rate), DYNAMIC)),
    "spa_adamw": Row(
        4e-3, lambda rate, key, *c: averaged_adamw(rate, *c), average=OF_ADAM
    ),
    "spa_adamw, bfloat16 z": with_z(BF16),
    "spa_adamw, 8-bit z": with_z(E4M3, (0.1, 0.9)),
    "Muon": Row(8e-3, lambda rate, key: muon(rate)),
    "Muon averaged": Row(
        8e-3,
        lambda rate, key, *c: primal_averaging(muon(rate), *c),
        average=(0.003125, 0.4),
    ),
    "Muon averaged, 8-bit m": with_z(BF16, (0.003125, 0.4), 8e-3, muon_in_8_bits),
    "Muon averaged, 8-bit m and z": with_z(E4M3, (0.0125, 0.4), 8e-3, muon_in_8_bits),
    "Muon, EMA-Nesterov": Row(
        8e-3, ema_nesterov_muon, has_x=False
    ),  # it evaluates about y
    "Muon, float8 m": Row(
        8e-3,
        lambda rate, key: stochastic_rounding(float8_momentum(muon(rate), key), key),
        BF16,
    ),
    "Muon, bfloat16 m, low half": Row(
        8e-3, lambda rate, _: with_low_half(muon(rate, BF16)), BF16
    ),
    "Muon, 8-bit m, linear": rounded(8e-3, lambda rate: in_codes(muon(rate), LINEAR)),
    "SGD+M": Row(0.25, lambda rate, key: sgdm(optax.sgd(rate, 0.9))),
    "spa_from_sgdm": Row(0.25, lambda rate, key: sgdm(spa_from_sgdm(rate, 0.9))),
    "Lion": Row(
        1e-3,
        lambda rate, key: with_decay(optax.scale_by_lion(0.9, B2), rate, 5 * DECAY),
    ),
    "Adafactor": Row(8e-3, lambda rate, key: adafactor(rate)),
    "Adafactor, bfloat16": rounded(8e-3, adafactor),
}
at_constant_rate = ("AdamW", "spa_adamw", "spa_adamw, 8-bit z", "Muon", "Muon averaged")
ROWS |= {
    f"{name}, constant": ROWS[name]._replace(floor=1.0) for name in at_constant_rate
}
ROWS["AdamW averaged, constant"] = Row(
    8e-3,
    lambda rate, key: primal_averaging(adamw(rate), schedule_free(rate), 0.8),
    floor=1.0,
)
ROWS["spa_adamw, Schedule-Free, constant"] = Row(
    4e-3, lambda rate, key: averaged_adamw(rate, schedule_free(rate), 0.9), floor=1.0
)


def make_steps(
    row: Row, rate: float, num_steps: int, key: jax.Array
) -> tuple[Any, Any]:
    """From initial params to the carry; and a step, from carry and batch to carry and
    loss.

    The carry is params, the optimizer's state, and e with its state: the mean of the
    params so far, and later e ← e + (1 − EMA) (params − e).
    """
    schedule = nanogpt.schedule(rate, num_steps, row.floor)
    clip = in_float32(optax.clip_by_global_norm(nanogpt.CLIP))
    tx = optax.chain(clip, row.make(schedule, key, *row.average))
    mean = stochastic_rounding(optax.identity(), jax.random.fold_in(key, 1))

    def loss(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        return nanogpt.losses(params, inputs, labels).mean()

    def start(params: Any) -> Any:
        e = jax.tree.map(jnp.copy, optax.tree.cast(params, row.ema_dtype or row.dtype))
        params = optax.tree.cast(params, row.dtype)
        return params, tx.init(params), e, mean.init(e)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, k: Any, *batch: jax.Array) -> Any:
        params, state, e, of_mean = carry
        value, grads = jax.value_and_grad(loss)(params, *batch)
        params, state = common.update(tx, grads, params, state)
        c = jnp.maximum(1 - EMA, 1 / (k + 1))
        change = jax.tree.map(
            lambda x, e: c * (x.astype(F32) - e.astype(F32)), params, e
        )
        change, of_mean = mean.update(change, of_mean, e)
        return (params, state, optax.apply_updates(e, change), of_mean), value

    return start, step


def train(
    row: Row,
    rate: float,
    num_steps: int,
    seed: int,
    texts: Any,
    watch: Watch = common.ignore,
) -> Record:
    """Bytes, and losses of the weights, of their EMA and of x by steps, until one is
    not finite.
    """
    keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(3)]
    start, step = make_steps(row, rate, num_steps, keys[2])
    carry = start(nanogpt.init(keys[0]))
    seen, unseen = (
        jnp.asarray(texts[0]),
        [jnp.asarray(x) for x in nanogpt.windows(texts[1])],
    )
    batch = jax.jit(lambda k: nanogpt.batch(seen, jax.random.fold_in(keys[1], k)))

    @jax.jit
    def mean_loss(params: Any, batches: Any) -> jax.Array:
        def total(batch: Any) -> jax.Array:
            inputs, labels, counts = batch
            return (nanogpt.losses(params, inputs, labels) * counts).sum()

        return jax.lax.map(total, batches).sum() / batches[2].sum()

    def validate(carry: Any, every: int) -> list[float | None]:
        params, state, e, _ = carry
        points = [params, e]
        if row.has_x and optax.tree.get(state, "mu_y", 0) > 0:
            points.append(eval_params(state, params))
        of_points = [float(mean_loss(x, [y[::every] for y in unseen])) for x in points]
        return [round(loss, 6) if np.isfinite(loss) else None for loss in of_points]

    begin, curve = time.perf_counter(), []
    for k in range(num_steps):
        carry, _ = step(carry, k, *batch(k))
        watch(k, carry[1])
        if (is_last := k + 1 == num_steps) or (k + 1) % EVERY == 0:
            curve.append([k + 1, *validate(carry, 1 if is_last else 8)])
            if curve[-1][1] is None:
                break
    params, state, e, _ = carry
    return {
        "bytes": num_bytes((params, state)) / optax.tree.size(params),
        "of EMA": num_bytes(e) / optax.tree.size(params),
        "curve": curve,
        "seconds": round(time.perf_counter() - begin),
    }


def num_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def best(record: Record, validation: int = -1) -> float:
    """The loss, in the end if not said, at the point to evaluate: x, or the weights."""
    _, weights, _, *x = record["curve"][validation]
    loss = (x or [weights])[0]
    return np.inf if loss is None else loss


def minus(
    runs: list[Record], others: list[Record], of: Callable[[Record], float] = best
) -> str:
    """The mean difference of the same seeds, and its 95 % interval by Student's t."""
    of_seed = {record["seed"]: of(record) for record in others}
    both = [of(r) - of_seed[r["seed"]] for r in runs if r["seed"] in of_seed]
    if not both or runs is others:
        return ""
    text = f"{statistics.mean(both):+.4f}"
    if len(both) > 1 and np.all(np.isfinite(both)):
        low, high = stats.ttest_1samp(both, 0).confidence_interval(0.95)
        text += f" [{low:+.4f}, {high:+.4f}]"
    return text.replace("-", "−")


def steps_to(runs: list[Record], others: list[Record]) -> str:
    """The mean step that first has the others' last loss but one: both by an eighth of
    the text.
    """
    last = {
        record["seed"]: best(record, -2) for record in others if record["curve"][1:]
    }

    def first(run: Record) -> int:
        points = enumerate(run["curve"][:-1])
        return next(
            (k for i, (k, *_) in points if best(run, i) <= last[run["seed"]]), 0
        )

    at = [first(run) for run in runs if run["seed"] in last]
    return f"{statistics.mean(at):,.0f}" if at and all(at) else ""


def mean_of(losses: tuple[float | None, ...]) -> str:
    """A dash if one was not finite."""
    known = [loss for loss in losses if loss is not None]
    return f"{statistics.mean(known):.4f}" if len(known) == len(losses) else "–"


def table(records: list[Record]) -> str:
    """Mean losses in the end."""
    cells: dict[tuple[str, float, tuple[float, ...]], list[Record]] = defaultdict(list)

    def order(record: Record) -> Any:
        place = list(ROWS).index(record["optimizer"])
        return place, record["average"], record["rate"]

    for record in sorted(records, key=order):
        cells[record["optimizer"], record["rate"], tuple(record["average"])].append(
            record
        )
    rows = []
    for (name, rate, average), runs in cells.items():
        of_run, of_ema = runs[0]["bytes"], runs[0]["of EMA"]
        ends = zip(*(record["curve"][-1][1:] for record in runs), strict=True)
        weights, ema, *x = map(mean_of, ends)
        settings = ", ".join(f"{value:g}" for value in (rate, *average))
        row = [name, f"{of_run:.1f}", settings, str(len(runs)), weights]
        row += [f"{ema} ({of_run + of_ema:.1f})", *(x or [""])]
        rows.append(
            [*row, *(of(runs, cells.get(PEER, [])) for of in (minus, steps_to))]
        )
    header = [
        "optimizer",
        "bytes",
        "rate, c, μ_y",
        "seeds",
        "weights",
        "EMA (bytes)",
        "x",
    ]
    return common.markdown([*header, "− AdamW", "steps to AdamW's"], rows)


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
        "--rates",
        type=float,
        help="peaks of the learning rate, by default one of each optimizer",
    )
    add(
        "--average",
        type=float,
        nargs=2,
        metavar=("C", "MU"),
        help="of all that average",
    )
    add(
        "--seeds", type=int, default=[0], help="of initial params, batches and rounding"
    )
    parser.add_argument("--steps", type=int, default=nanogpt.STEPS, help="of each run")
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), help="of Tiny Shakespeare"
    )
    arguments = common.parse(parser, argv, "steps")
    if (
        name := "Muon, EMA-Nesterov"
    ) in arguments.optimizers and arguments.steps != nanogpt.STEPS:
        parser.error(
            f"{name} is one of {nanogpt.STEPS:,} --steps, got {arguments.steps:,}"
        )
    records = common.Records(
        arguments.json, ("optimizer", "rate", "average", "steps", "seed")
    )
    texts, chosen = nanogpt.read(arguments.data_dir), []
    for seed, name in itertools.product(arguments.seeds, arguments.optimizers):
        row = ROWS[name]
        if row.average and arguments.average:
            row = row._replace(average=tuple(arguments.average))
        for rate in arguments.rates or [row.rate]:
            run = functools.partial(train, row, rate, arguments.steps, seed, texts)
            key = (name, rate, list(row.average), arguments.steps, seed)
            chosen.append(records.get(key, run))
            print(f"{name}, {rate:g}, seed {seed}: {best(chosen[-1]):.4f}", flush=True)
    print(
        f"\n{common.device()}; {arguments.steps:,} steps\n\n{(text := table(chosen))}"
    )
    return text


if __name__ == "__main__":
    common.command_line.run(main)
