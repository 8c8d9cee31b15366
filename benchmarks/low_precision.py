"""What params of 16 bits cost in quality, under each scheme that one could choose.

    python benchmarks/low_precision.py --data-dir DIR

Trains a perceptron on the digits of scikit-learn, and a convolutional network on 2,560
images of CIFAR-10, with SGD with momentum. Params are only kept in 16 bits: losses and
gradients are computed in float32, and gradients come back rounded to the dtype of the
params. The tables have the loss over the training images, the mean over the last five
epochs, as a ratio to that of float32 at the same rate. With --json each run is a line
of OUT, and is not repeated.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Watch
from flax import nnx
from paper.cifar_data import TRAIN, normalize, read
from sklearn.datasets import load_digits
from tqdm import tqdm

from spa_optax import (
    float8_momentum,
    in_float32,
    spa_from_sgdm,
    stochastic_rounding,
)

mean_and_error, plus_minus = (
    common.command_line.mean_and_error,
    common.command_line.plus_minus,
)
F32, BF16 = jnp.float32, jnp.bfloat16
TASKS, MOMENTA = ("digits", "images"), (0.9, 0.99)
SCHEDULES = ("constant", "cosine")  # the latter with a warm-up
Tx = optax.GradientTransformation


class Scheme(NamedTuple):
    """How params and momentum are kept."""

    dtype: Any  # of the params
    make: Callable[
        [optax.Schedule, float, jax.Array], Tx
    ]  # from learning rate, momentum and key


def with_master(tx: Tx) -> Tx:
    """A float32 copy of the params, which are that, rounded."""

    def init(params: Any) -> Any:
        master = optax.tree.cast(params, F32)
        return master, tx.init(master)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        master, inner = state
        master, inner = common.update(tx, optax.tree.cast(updates, F32), master, inner)
        return jax.tree.map(lambda m, p: m.astype(BF16) - p, master, params), (
            master,
            inner,
        )

    return Tx(init, update)


def with_kahan(tx: Tx) -> Tx:
    """What rounding took from the sum at one step, in bfloat16, is added at the
    next.
    """

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params), tx.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        lost, inner = state
        updates, inner = tx.update(updates, inner, params)
        owed = jax.tree.map(lambda u, e: u.astype(F32) + e.astype(F32), updates, lost)
        step = jax.tree.map(
            lambda o, p: (p.astype(F32) + o).astype(BF16) - p, owed, params
        )
        lost = jax.tree.map(lambda o, s: (o - s.astype(F32)).astype(BF16), owed, step)
        return step, (lost, inner)

    return Tx(init, update)


def with_bfloat16_m(alpha: optax.Schedule, beta: float) -> Tx:
    """SGD+M that computes in float32, and keeps m in bfloat16; `optax.sgd` makes β
    0.898.
    """

    def init(params: Any) -> Any:
        return optax.tree.zeros_like(params, dtype=BF16)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        m = jax.tree.map(
            lambda g, m: g.astype(F32) + beta * m.astype(F32), updates, state
        )
        return m, optax.tree.cast(m, BF16)

    trace = Tx(init, update)
    return optax.chain(trace, optax.scale_by_learning_rate(alpha))


def spa_in(dtype: Any) -> Scheme:
    """Stochastically rounded, with z in a dtype."""
    return Scheme(
        BF16, lambda a, b, key: spa_from_sgdm(a, b, state_dtype=dtype, rounding_key=key)
    )


sgd = functools.partial(optax.sgd, accumulator_dtype=F32)
REFERENCE, MASTER = "SGD+M in float32", "SGD+M, float32 m and master copy"
SCHEMES = {
    REFERENCE: Scheme(F32, lambda a, b, key: sgd(a, b)),
    "SPA, float32 z": Scheme(BF16, lambda a, b, key: spa_from_sgdm(a, b)),
    "SPA, float32 z, stochastic": spa_in(F32),
    "SPA, bfloat16 z, stochastic": spa_in(BF16),
    "SGD+M, float32 m": Scheme(BF16, lambda a, b, key: in_float32(sgd(a, b))),
    "SGD+M, float32 m, stochastic": Scheme(
        BF16, lambda a, b, k: stochastic_rounding(sgd(a, b), k)
    ),
    "SGD+M, bfloat16 m, stochastic": Scheme(
        BF16,
        lambda a, b, k: stochastic_rounding(optax.sgd(a, b, accumulator_dtype=BF16), k),
    ),
    "SGD+M, float8 m, stochastic": Scheme(
        BF16,
        lambda a, b, k: stochastic_rounding(float8_momentum(optax.sgd(a, b), k), k),
    ),
    MASTER: Scheme(BF16, lambda a, b, key: with_master(sgd(a, b))),
    "SGD+M, bfloat16 m, Kahan": Scheme(
        BF16, lambda a, b, key: with_kahan(with_bfloat16_m(a, b))
    ),
    "SGD+M, bfloat16 m, float32 params": Scheme(
        F32, lambda a, b, key: with_bfloat16_m(a, b)
    ),
}


class ConvNet(nnx.Module):
    """Three convolutions and a linear layer, without BatchNorm: 33,834 params."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        """For images of 32×32."""
        layers = []
        for n, m in ((3, 16), (16, 32), (32, 64)):
            layers += [nnx.Conv(n, m, (3, 3), strides=2, rngs=rngs), nnx.relu]
        self.layers = nnx.Sequential(*layers)
        self.head = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        return self.head(self.layers(x).reshape(len(x), -1))


class Task(NamedTuple):
    """What to train, on what, and for how long."""

    network: Callable[[nnx.Rngs], nnx.Module]
    images: jax.Array
    labels: jax.Array
    batch: int
    num_epochs: int
    rates: tuple[float, ...]  # η, that is, α/(1 − β)


def perceptron(rngs: nnx.Rngs) -> nnx.Module:
    """One hidden layer, for digits of 8×8: 9,610 params."""
    return nnx.Sequential(
        nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs)
    )


def make_task(name: str, folder: Path, num_epochs: int | None) -> Task:
    if name == "digits":
        images, labels = load_digits(return_X_y=True)
        rates = (0.01, 0.03, 0.1, 0.3, 1.0)
        data = jnp.asarray(images / 16, F32), jnp.asarray(labels)
        return Task(perceptron, *data, 64, num_epochs or 107, rates)
    images, labels = (array[:2_560] for array in read(folder, TRAIN[:1]))
    data = normalize(images), jnp.asarray(labels, jnp.int32)
    return Task(ConvNet, *data, 32, num_epochs or 25, (0.01, 0.03, 0.1, 0.3))


def schedule(name: str, peak: Any, num_steps: int) -> optax.Schedule:
    if name == "constant":
        return lambda count: peak
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, num_steps // 10, num_steps)
    return lambda count: peak * shape(count)


def make_train(
    task: Task,
    scheme: Scheme,
    beta: float,
    schedule_name: str,
    watch: Watch = common.ignore,
) -> Callable[[float, int], dict[str, Any]]:
    """From a rate η and a seed to the loss, and to the bytes a parameter of params and
    state.
    """
    num_batches = len(task.labels) // task.batch
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: task.network(nnx.Rngs(0))))

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, optax.tree.cast(params, F32))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_tx(eta: Any, key: jax.Array) -> Tx:
        alpha = schedule(schedule_name, eta * (1 - beta), task.num_epochs * num_batches)
        return scheme.make(alpha, beta, key)

    @jax.jit
    def init(eta: Any, key: jax.Array) -> Any:
        params = nnx.to_pure_dict(nnx.state(task.network(nnx.Rngs(key)), nnx.Param))
        params = optax.tree.cast(
            optax.tree.cast(params, BF16), scheme.dtype
        )  # the same for all
        return params, make_tx(eta, key).init(params)

    @jax.jit
    def shuffle(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, task.num_epochs)
        num_images = num_batches * task.batch
        orders = jax.vmap(lambda key: jax.random.permutation(key, num_images))(keys)
        return orders.reshape(-1, task.batch)

    def step(carry: Any, k: Any, batches: jax.Array, eta: Any, key: jax.Array) -> Any:
        params, state = carry
        batch = batches[k]
        grads = jax.grad(loss)(params, task.images[batch], task.labels[batch])
        return common.update(make_tx(eta, key), grads, params, state)

    step, loss_jitted = jax.jit(step, donate_argnums=0), jax.jit(loss)

    def train(eta: float, seed: int) -> dict[str, Any]:
        key = jax.random.key(seed)
        carry, batches, losses = init(eta, key), shuffle(key), []
        for k in range(task.num_epochs * num_batches):
            carry = step(carry, k, batches, eta, key)
            watch(k, carry[1])
            if (
                k % num_batches == num_batches - 1
                and k // num_batches >= task.num_epochs - 5
            ):
                losses.append(loss_jitted(carry[0], task.images, task.labels))
        size = optax.tree.size(carry[0])
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))
        return {"loss": float(np.mean(losses)), "bytes": num_bytes / size}

    return train


KEYS = ("task", "scheme", "momentum", "schedule", "rate", "seed")
Spread = tuple[
    list[float], list[float]
]  # ratios to float32 at the same rate, and losses, by seed
Losses = dict[str, dict[float, Spread]]  # by scheme and rate


def by_setting(records: list[dict[str, Any]]) -> dict[Any, Losses]:
    """By task, momentum and schedule."""
    losses = {tuple(record[key] for key in KEYS): record["loss"] for record in records}
    result: dict[Any, Losses] = {}
    for (task, scheme, *setting, rate, seed), loss in losses.items():
        of_scheme = result.setdefault((task, *setting), {}).setdefault(scheme, {})
        ratios, of_rate = of_scheme.setdefault(rate, ([], []))
        ratios.append(loss / losses[task, REFERENCE, *setting, rate, seed])
        of_rate.append(loss)
    return result


def summary(found: dict[Any, Losses], num_bytes: dict[str, str]) -> str:
    """The largest ratio over the rates that tell something.

    At large constant rates training is chaotic: one rounding makes another run of it,
    with another loss. How far two runs part that differ by no more is seen from the
    scheme with a master copy.
    """
    header, rows = (
        ["scheme", "bytes/param"],
        {name: [name, of] for name, of in num_bytes.items()},
    )
    for (task, beta, name), losses in found.items():
        chaos = {
            r: mean_and_error(ratios)[1] for r, (ratios, _) in losses[MASTER].items()
        }
        rates = [rate for rate, error in chaos.items() if error <= 0.02]
        limit = (
            f"η ≤ {max(rates):g}" if rates else "no η to compare"
        )  # as with one seed
        header.append(f"{task}, β = {beta:g}, {name}, {limit}")
        for scheme, of_rates in losses.items():
            worst = max(
                (mean_and_error(of_rates[rate][0]) for rate in rates), default=None
            )
            rows[scheme].append(plus_minus(*worst, ".3f") if worst else "")
    return common.markdown(header, list(rows.values()))


def table(setting: Any, losses: Losses, num_bytes: dict[str, str]) -> str:
    """Ratios to float32 at every rate, and the loss at the best."""
    rows = []
    for scheme, of_rates in losses.items():
        cells = [
            plus_minus(*mean_and_error(ratios), ".3f")
            for ratios, _ in of_rates.values()
        ]
        best, rate = min(
            (float(np.mean(of)), rate) for rate, (_, of) in of_rates.items()
        )
        rows.append([scheme, num_bytes[scheme], *cells, f"{best:.4g} at {rate:g}"])
    rates = [f"η = {rate:g}" for rate in losses[REFERENCE]]
    task, beta, name = setting
    header = ["scheme", "bytes/param", *rates, "lowest loss"]
    return f"{task}, β = {beta:g}, {name}:\n\n{common.markdown(header, rows)}"


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--task", nargs="+", choices=TASKS, default=TASKS, help="what to train on")
    add("--momentum", nargs="+", type=float, choices=MOMENTA, default=MOMENTA, help="β")
    add(
        "--schedule",
        nargs="+",
        choices=SCHEDULES,
        default=SCHEDULES,
        help="of the rate",
    )
    add(
        "--scheme",
        nargs="+",
        choices=SCHEMES,
        default=list(SCHEMES),
        help="beside the reference",
    )
    add("--seeds", type=int, default=5, help="how many")
    add("--epochs", type=int, help="by default 107 of 28 steps, and 25 of 80")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="of CIFAR-10, binary version",
    )
    arguments = common.parse(parser, argv, "seeds", "epochs")

    tasks = {
        name: make_task(name, arguments.data_dir, arguments.epochs)
        for name in arguments.task
    }
    schemes = [
        name for name in SCHEMES if name in (REFERENCE, MASTER, *arguments.scheme)
    ]
    settings = itertools.product(tasks, arguments.momentum, arguments.schedule, schemes)
    runs: Any = [
        (task, scheme, beta, shape, rate, seed)
        for task, beta, shape, scheme in settings
        for rate, seed in itertools.product(tasks[task].rates, range(arguments.seeds))
    ]

    @functools.lru_cache(1)  # one is compiled at a time
    def train_of(task: str, scheme: str, beta: float, shape: str) -> Any:
        return make_train(tasks[task], SCHEMES[scheme], beta, shape)

    def train(
        task: str, scheme: str, beta: float, shape: str, rate: float, seed: int
    ) -> dict[str, Any]:
        return train_of(task, scheme, beta, shape)(rate, seed)

    records = common.Records(arguments.json, (*KEYS, "epochs"))

    wanted = [
        records.get((*run, arguments.epochs), functools.partial(train, *run))
        for run in tqdm(runs)
    ]
    num_bytes = {record["scheme"]: f"{record['bytes']:.1f}" for record in wanted}
    found = by_setting(wanted)
    tables = [table(setting, losses, num_bytes) for setting, losses in found.items()]
    text = "\n\n".join([summary(found, num_bytes), *tables])
    count = common.command_line.count(arguments.seeds, "seed")
    print(f"{common.device()}, {count}\n\n{text}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
