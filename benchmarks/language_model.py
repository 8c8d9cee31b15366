r"""AdamW beside its averaging forms, at 4 to 14 bytes a parameter, on a small language model.

    python benchmarks/language_model.py

Trains a decoder of bytes on the modules of Python's own standard library, an eighth of whose files
are held out. All schemes have the same networks, batches, weight decay and second moment, and
compute in bfloat16; they differ in what is kept of a parameter, and in how momentum is made. Each
is tuned by the validation loss of seed 0, from the middle of a grid of rates and momenta towards
the best of the neighbours until none is better, and then run with other seeds. The rate is warmed
up and decays by a cosine to 0, but for Schedule-Free, whose rate is warmed up and stays.

On a GPU, with 25 million params:

    python benchmarks/language_model.py --width 512 --heads 8 --layers 8 --length 512 --batch 64 \
        --steps 10000

With --json a run that is in OUT, a line each, is not run again.
"""

import argparse
import functools
import re
import statistics
import sysconfig
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from low_precision import BF16, F32, stochastic, with_kahan, with_master
from tqdm import tqdm

from spa_optax import (
    eval_params,
    gpa,
    in_float32,
    scale_by_factored_second_moment,
    scale_by_second_moment,
    schedule_free_averaging,
    spa,
)

RATES = tuple(0.00025 * 2**i for i in range(11))
ADAM: dict[str, Any] = {"b2": 0.99, "weight_decay": 0.1}
MIN_SIZE = 32  # of the axes of what is factored: the heads of attention
NUM_EVALUATIONS = 20
EVALUATION_BATCHES = 32


# ----------------------------------------------------------------------------------------- schemes


class Rate(NamedTuple):
    """The learning rate of a count."""

    peak: Any
    shape: optax.Schedule  # from 0 to 1 in the warm-up
    warm_up: int  # steps

    def __call__(self, count: Any) -> Any:
        """As Optax calls a schedule."""
        return self.peak * self.shape(count)


Make = Callable[[Rate, Any, jax.Array], optax.GradientTransformation]


class Scheme(NamedTuple):
    """What is kept of a parameter, and how momentum is made."""

    dtype: Any  # of the params
    momenta: tuple[float, ...]  # to choose from
    make: Make  # from learning rate, momentum and key
    evaluate: Callable[[Any, Any], Any] = eval_params
    start: tuple[float, float] = (0.004, 0.8)  # rate and momentum
    decays: bool = True  # the rate, by a cosine


def adamw(
    rate: Rate, b1: Any, key: jax.Array, mu_dtype: Any = None
) -> optax.GradientTransformation:
    del key
    return optax.adamw(rate, b1, mu_dtype=mu_dtype, **ADAM)


def adafactor(rate: Rate, b1: Any, key: jax.Array) -> optax.GradientTransformation:
    """With momentum, decay, and rates on the scale of the others'."""
    del key
    tx = optax.adafactor(
        rate, min_dim_size_to_factor=MIN_SIZE, multiply_by_parameter_scale=False, momentum=b1
    )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, inner = state
        updates, inner = tx.update(updates, inner, params)
        decayed = lambda u, x: u - rate(count) * ADAM["weight_decay"] * x
        return jax.tree.map(decayed, updates, params), (count + 1, inner)

    return optax.GradientTransformation(
        lambda params: (jnp.zeros([], jnp.int32), tx.init(params)), update
    )


def averaged(
    average: Callable[..., optax.GradientTransformation], num_bytes: int, key: jax.Array | None
) -> optax.GradientTransformation:
    """`spa_adamw` or `gpa_adamw`, from `spa` or `gpa`, that factors from an axis of 32 on."""
    if num_bytes == 4:
        scale = scale_by_factored_second_moment(ADAM["b2"], min_dim_size_to_factor=MIN_SIZE)
    else:
        dtype = BF16 if num_bytes == 6 else None
        scale = scale_by_second_moment(ADAM["b2"], dtype=dtype, rounding_key=key)
    direction = optax.chain(scale, optax.add_decayed_weights(ADAM["weight_decay"]))
    return optax.chain(in_float32(direction), average(**of_z(num_bytes, key)))


def of_z(num_bytes: int, key: jax.Array | None) -> dict[str, Any]:
    """Its dtype and its rounding, where params, z and the second moment take so many bytes."""
    return {"state_dtype": BF16 if num_bytes <= 8 else None, "rounding_key": key}


def rival(factored: bool) -> Make:
    """Ordinary momentum of the same direction, in bfloat16. It and params round stochastically."""

    def make(rate: Rate, b1: Any, key: jax.Array) -> optax.GradientTransformation:
        direction = in_float32(factored_rms() if factored else rms())

        def init(params: Any) -> Any:
            m = jax.tree.map(jnp.zeros_like, params)
            return jnp.zeros([], jnp.int32), direction.init(params), m

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            count, inner, m = state
            d, inner = direction.update(updates, inner, params)
            m = jax.tree.map(lambda m, d: b1 * m.astype(F32) + (1 - b1) * d, m, d)
            decayed = lambda x, m: x - rate(count) * (m + ADAM["weight_decay"] * x)
            new = jax.tree.map(lambda x, m: decayed(x.astype(F32), m), params, m)
            keys = jax.random.split(jax.random.fold_in(key, count))
            m, new = (
                jax.tree.map(stochastic, tree, optax.tree.split_key_like(key, tree))
                for key, tree in zip(keys, (m, new), strict=True)
            )
            return jax.tree.map(jnp.subtract, new, params), (count + 1, inner, m)

        return optax.GradientTransformation(init, update)

    return make


def rms() -> optax.GradientTransformation:
    return optax.scale_by_rms(ADAM["b2"], eps_in_sqrt=False, bias_correction=True)


def factored_rms() -> optax.GradientTransformation:
    """That of `spa_adamw`."""
    return optax.scale_by_factored_rms(
        decay_rate=ADAM["b2"],
        min_dim_size_to_factor=MIN_SIZE,
        epsilon=1e-16,
        decay_rate_fn=lambda k, b2: b2 * (1 - b2**k) / (1 - b2 ** (k + 1)),
    )


def schedule_free(rate: Rate, b1: Any, key: jax.Array) -> optax.GradientTransformation:
    """`optax.contrib.schedule_free_adamw`, which takes no schedule but a length of the warm-up."""
    del key
    base = optax.chain(
        rms(),
        optax.add_decayed_weights(ADAM["weight_decay"]),
        optax.scale_by_learning_rate(rate),
    )
    return optax.contrib.schedule_free(base, rate, b1)


def gpa_schedule_free(rate: Rate, b1: Any, key: jax.Array) -> optax.GradientTransformation:
    """The same rule as a member of `gpa`'s family, at 4 bytes."""
    c = schedule_free_averaging(rate.shape, rate.warm_up)
    return averaged(functools.partial(gpa, rate, c, b1), 4, key)


def matrices(params: Any) -> Any:
    """Which axes of a kernel are its inputs and its outputs; None for all else."""

    def dimensions(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        *_, layer, name = (entry.key for entry in path)
        num_inputs = x.ndim - 1 if layer == "out" else 1  # "out" joins the heads of attention
        axes = tuple(range(x.ndim))
        result = optax.contrib.MuonDimensionNumbers(axes[:num_inputs], axes[num_inputs:])
        return result if name == "kernel" else None

    return jax.tree_util.tree_map_with_path(dimensions, params)


muon = functools.partial(
    optax.contrib.muon, muon_weight_dimension_numbers=matrices, consistent_rms=0.2
)


def muon_with_adamw(rate: Rate, beta: Any, key: jax.Array) -> optax.GradientTransformation:
    """With steps of Adam's size, and AdamW for what is no kernel of a layer."""
    del key
    decay = ADAM["weight_decay"]
    adam = {"adam_b1": 0.8, "adam_b2": ADAM["b2"], "adam_weight_decay": decay}
    return muon(rate, beta=beta, weight_decay=decay, **adam)


def gpa_muon(
    rate: Rate, c: Any, num_bytes: int, key: jax.Array | None = None
) -> optax.GradientTransformation:
    """`gpa` over Muon's direction without its momentum, and `gpa_adamw` for the rest."""
    average = functools.partial(gpa, rate, c, 0.9)
    kernels = optax.chain(
        without_state(muon(-1.0, beta=0.0, nesterov=False)),
        optax.add_decayed_weights(ADAM["weight_decay"]),
        average(**of_z(num_bytes, key)),
    )
    is_kernel = lambda path, _: "kernels" if path[-1].key == "kernel" else "rest"
    return optax.partition(
        {"kernels": kernels, "rest": averaged(average, num_bytes, key)},
        functools.partial(jax.tree_util.tree_map_with_path, is_kernel),
    )


def without_state(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The first step of `tx`, at every step."""

    def first_step(updates: Any, params: Any) -> Any:
        return tx.update(updates, tx.init(params), params)[0]

    return optax.stateless(first_step)


REFERENCE = "AdamW, float32"
B1 = (0.0, 0.4, 0.6, 0.8, 0.9, 0.95, 0.975)
B1_SLOW = (0.6, 0.8, 0.9, 0.95, 0.98)
C = (1.0, 0.6, 0.4, 0.2, 0.1, 0.05, 0.025)
C_SLOW = (1.0, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)
itself = lambda state, params: params


def spa_scheme(num_bytes: int) -> Scheme:
    make = lambda rate, c, key: averaged(functools.partial(spa, rate, c), num_bytes, key)
    return Scheme(BF16, C, make, start=(0.004, 0.2))


def gpa_scheme(num_bytes: int) -> Scheme:
    make = lambda rate, c, key: averaged(functools.partial(gpa, rate, c, 0.9), num_bytes, key)
    return Scheme(BF16, C_SLOW, make, start=(0.008, 0.1))


SCHEMES = {
    "AdamW, bfloat16, float32 master copy": Scheme(
        BF16, B1, lambda *given: with_master(adamw(*given)), itself
    ),
    REFERENCE: Scheme(F32, B1, adamw, itself),
    "AdamW, float32, bfloat16 m": Scheme(
        F32, B1, lambda *given: adamw(*given, mu_dtype=BF16), itself
    ),
    "AdamW, bfloat16, Kahan": Scheme(
        BF16, B1, lambda *given: with_kahan(in_float32(adamw(*given, mu_dtype=BF16))), itself
    ),
    "schedule_free_adamw, float32": Scheme(
        F32,
        B1_SLOW,
        schedule_free,
        optax.contrib.schedule_free_eval_params,
        start=(0.008, 0.9),
        decays=False,
    ),
    "Adafactor, float32": Scheme(F32, B1, adafactor, itself),
    "Adafactor, bfloat16": Scheme(BF16, B1, adafactor, itself),
    "bfloat16 m": Scheme(BF16, B1, rival(factored=False), itself),
    "bfloat16 m, factored": Scheme(BF16, B1, rival(factored=True), itself),
    **{f"spa_adamw, {n} bytes": spa_scheme(n) for n in (10, 8, 6, 4)},
    **{f"gpa_adamw, {n} bytes": gpa_scheme(n) for n in (10, 8, 6, 4)},
    "gpa_adamw as Schedule-Free, 4 bytes": Scheme(
        BF16, B1_SLOW, gpa_schedule_free, start=(0.008, 0.9), decays=False
    ),
    "Muon, float32": Scheme(F32, B1_SLOW, muon_with_adamw, itself, start=(0.004, 0.9)),
    "gpa over Muon, float32": Scheme(
        F32, C_SLOW, lambda rate, c, _: gpa_muon(rate, c, 12), start=(0.008, 0.1)
    ),
    "gpa over Muon, 4 bytes": Scheme(
        BF16, C_SLOW, lambda rate, c, key: gpa_muon(rate, c, 4, key), start=(0.008, 0.1)
    ),
}


# -------------------------------------------------------------------------------- text and network


@functools.cache
def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and those of an eighth of the files, by a hash of their path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[list[bytes]] = [[], []]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
            files[zlib.crc32(name.as_posix().encode()) % 8 == 0].append(path.read_bytes())
    seen, unseen = (np.frombuffer(b"\0".join(f), np.uint8) for f in files)
    return seen, unseen


class Block(nnx.Module):
    """Attention, then a perceptron, each behind a LayerNorm."""

    def __init__(
        self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs, *, causal: bool = True
    ) -> None:
        """Params are float32, whatever the dtype to compute in."""
        self.causal = causal
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shaped like `x`."""
        mask = nnx.make_causal_mask(x[..., 0]) if self.causal else None
        x += self.attention(self.norm_1(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x))))


class Decoder(nnx.Module):
    """Logits of the next byte."""

    def __init__(
        self, width: int, heads: int, layers: int, length: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """For texts of `length` bytes."""
        self.tokens = nnx.Embed(256, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
        blocks = (Block(width, heads, dtype, rngs) for _ in range(layers))
        self.blocks = nnx.Sequential(*blocks)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (batch, length) to (batch, length, 256)."""
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.tokens.attend(self.norm(self.blocks(x)))


Batch = tuple[jax.Array, jax.Array]  # inputs of the network, and what its logits are for


class Task(NamedTuple):
    """What to train, and batches from a key: to train on, and held out."""

    make_network: Callable[[nnx.Rngs], nnx.Module]
    seen: Callable[[jax.Array], Batch]
    unseen: Callable[[jax.Array], Batch]
    rate_scale: float = 1.0  # of the rates with which tuning begins


def make_task(arguments: argparse.Namespace) -> Task:
    """To foresee the next byte."""

    def batches(text: jax.Array) -> Callable[[jax.Array], Batch]:
        last = text.size - arguments.length - 1

        def batch(key: jax.Array) -> Batch:
            starts = jax.random.randint(key, (arguments.batch, 1), 0, last)
            tokens = text[starts + jnp.arange(arguments.length + 1)].astype(jnp.int32)
            return tokens[:, :-1], tokens[:, 1:]

        return batch

    sizes = (arguments.width, arguments.heads, arguments.layers, arguments.length)
    seen, unseen = (batches(jnp.asarray(text)) for text in read_text())
    return Task(lambda rngs: Decoder(*sizes, BF16, rngs), seen, unseen)


def make_loss(make_network: Callable[[nnx.Rngs], nnx.Module]) -> Callable[[Any, Batch], Any]:
    """The mean cross-entropy, in nats, from params and a batch."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_network(nnx.Rngs(0))))

    def loss(params: Any, batch: Batch) -> jax.Array:
        inputs, labels = batch
        logits = nnx.merge(graphdef, params)(inputs).astype(F32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


# ---------------------------------------------------------------------------------------- training


class Trainer:
    """One scheme: its compiled functions, from rate, momentum and seed."""

    def __init__(
        self,
        scheme: Scheme,
        task: Task,
        num_steps: int,
        watch: Callable[[int, Any], None] = lambda count, state: None,
    ) -> None:
        """Compiles when first called. `watch` is shown the optimizer's state after every step."""
        self.watch = watch
        loss = make_loss(task.make_network)
        self.num_steps = num_steps
        self.every = max(1, num_steps // NUM_EVALUATIONS)

        def make_tx(peak: Any, momentum: Any, key: jax.Array) -> optax.GradientTransformation:
            warm_up = num_steps // 10
            shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, warm_up, num_steps)
            if not scheme.decays:
                shape = optax.warmup_constant_schedule(0.0, 1.0, warm_up)
            return scheme.make(Rate(peak, shape, warm_up), momentum, key)

        def init(peak: Any, momentum: Any, key: jax.Array) -> Any:
            params = nnx.to_pure_dict(nnx.state(task.make_network(nnx.Rngs(key)), nnx.Param))
            params = optax.tree.cast(optax.tree.cast(params, BF16), scheme.dtype)  # same for all
            return params, make_tx(peak, momentum, key).init(params)

        def step(carry: Any, k: Any, peak: Any, momentum: Any, key: jax.Array) -> Any:
            params, state = carry
            grads = jax.grad(loss)(params, task.seen(jax.random.fold_in(key, k)))
            updates, state = make_tx(peak, momentum, key).update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def validation_loss(carry: Any) -> Any:
            params, state = carry
            x = scheme.evaluate(state, params)
            keys = jax.random.split(jax.random.key(0), EVALUATION_BATCHES)  # the same for all
            return jax.lax.map(lambda key: loss(x, task.unseen(key)), keys).mean()

        self.init, self.validation_loss = jax.jit(init), jax.jit(validation_loss)
        self.step = jax.jit(step, donate_argnums=0)

    def __call__(self, rate: float, momentum: float, seed: int) -> dict[str, Any]:
        """Validation losses at every so many steps, and bytes a parameter of params and state."""
        given = (rate, momentum, jax.random.key(seed))
        carry, curve = self.init(*given), []
        for k in range(self.num_steps):
            carry = self.step(carry, k, *given)
            self.watch(k, carry[1])
            if (k + 1) % self.every == 0 or k + 1 == self.num_steps:
                curve.append((k + 1, float(self.validation_loss(carry))))
        size = optax.tree.size(carry[0])
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(carry))
        return {"curve": curve, "bytes": num_bytes / size, "params": size}


def time_steps(trainers: dict[str, Trainer], rounds: int) -> dict[str, float]:
    """Seconds a step, as a ratio to the reference's in the same round: the median."""
    given = (0.001, 0.4, jax.random.key(0))
    carries, seconds = {name: t.init(*given) for name, t in trainers.items()}, []
    for _ in range(rounds + 2):
        seconds.append({})
        for name, trainer in trainers.items():
            start = time.perf_counter()
            carries[name] = jax.block_until_ready(trainer.step(carries[name], 0, *given))
            seconds[-1][name] = time.perf_counter() - start
    warm = seconds[2:]
    reference = statistics.median(s[REFERENCE] for s in warm)
    print(f"{REFERENCE}: {1e3 * reference:.1f} ms a step\n")
    ratio = lambda name: statistics.median(s[name] / s[REFERENCE] for s in warm)
    return {name: ratio(name) for name in trainers}


# ------------------------------------------------------------------------------------------- table


def final(record: dict[str, Any]) -> float:
    """The validation loss at the end; what has diverged is worse than anything."""
    loss = record["curve"][-1][1]
    return loss if loss == loss else float("inf")


def steps_to(record: dict[str, Any], goal: float) -> float:
    """The step at which the validation loss was first no larger."""
    return next((k for k, loss in record["curve"] if loss <= goal), float("inf"))


def mean_and_error(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return common.command_line.plus_minus(statistics.mean(values), error).replace("-", "−")


def table(runs: dict[str, list[dict[str, Any]]], times: dict[str, float]) -> str:
    """Over the seeds, each compared with the reference's run of the same seed."""
    rows, reference = [], {record["seed"]: record for record in runs[REFERENCE]}
    for name, records in runs.items():
        of = lambda record: reference[record["seed"]]
        steps = [steps_to(record, final(of(record))) for record in records]
        end = records[0]["curve"][-1][0]
        reached = [k for k in steps if k <= end]
        rows.append(
            [
                name,
                f"{records[0]['bytes']:.1f}",
                f"{records[0]['rate']:g}, {records[0]['momentum']:g}",
                mean_and_error([final(record) for record in records]),
                mean_and_error([final(record) - final(of(record)) for record in records]),
                f"{statistics.mean(reached):.0f}" if len(reached) == len(steps) else "not reached",
                f"{times[name]:.2f}" if name in times else "",
            ]
        )
    header = ["scheme", "bytes/param", "rate, momentum", "validation loss", "− AdamW"]
    return common.markdown([*header, "steps to AdamW's", "time/step"], rows)


def started(scheme: Scheme, task: Task) -> Scheme:
    """With the start of its tuning where the task wants it."""
    rate, momentum = scheme.start
    return scheme._replace(start=(rate * task.rate_scale, momentum))


def tune(scheme: Scheme, run: Callable[[float, float], dict[str, Any]]) -> list[dict[str, Any]]:
    """From `start` to the best neighbour in the grid, until none is better. The best is last."""
    i, j = RATES.index(scheme.start[0]), scheme.momenta.index(scheme.start[1])
    found = {}
    while True:
        for k, n in ((i, j), (i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
            if (k, n) not in found and 0 <= k < len(RATES) and 0 <= n < len(scheme.momenta):
                found[k, n] = run(RATES[k], scheme.momenta[n])
        best = min(found, key=lambda at: final(found[at]))
        if best == (i, j):
            return [*(found[at] for at in sorted(found) if at != best), found[best]]
        i, j = best


def tuning_table(tuned: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for name, records in tuned.items():
        rates = sorted({record["rate"] for record in records})
        losses = {(r["rate"], r["momentum"]): f"{final(r):.4f}" for r in records}
        for momentum in sorted({record["momentum"] for record in records}):
            at = [
                f"{rate:g}: {losses[rate, momentum]}"
                for rate in rates
                if (rate, momentum) in losses
            ]
            rows.append([name, f"{momentum:g}", ", ".join(at)])
    return common.markdown(["scheme", "momentum", "validation loss by rate"], rows)


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A line for each scheme, by bytes and loss: the mean over the seeds, and its error."""
    mean = lambda records: statistics.mean(map(final, records))
    by_bytes = sorted(runs, key=lambda name: (round(runs[name][0]["bytes"]), -mean(runs[name])))
    figure, axes = plt.subplots(figsize=(8, 1 + 0.3 * len(runs)), layout="constrained")
    for y, name in enumerate(by_bytes):
        losses = [final(record) for record in runs[name]]
        error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0
        color = "tab:blue" if name.startswith(("spa", "gpa")) else "0.35"
        axes.errorbar(mean(runs[name]), y, xerr=error, fmt="o", color=color, capsize=3)
    reference = mean(runs[REFERENCE])
    axes.axvline(reference, color="0.35", linestyle=":", linewidth=1)
    short = lambda name: re.sub(r", \d+ bytes$", "", name)
    labels = [f"{short(name)}: {runs[name][0]['bytes']:.1f} B" for name in by_bytes]
    axes.set_yticks(range(len(runs)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("validation loss (nats a byte), lower is better")
    axes.set_title("By bytes a parameter, of params and optimizer state")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# Of a transformer on the command line: default and help.
NETWORK = {
    "width": (128, "of the network"),
    "heads": (4, "of attention"),
    "layers": (2, "how many"),
}


def parse(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    sizes: dict[str, tuple[int, str]],
) -> argparse.Namespace:
    """The command line, with sizes of the network and of batches: default and help of each."""
    add = parser.add_argument
    add("--scheme", nargs="+", choices=SCHEMES, default=list(SCHEMES), help="what to compare")
    add("--seeds", type=int, default=3, help="how many, beside that of tuning")
    add("--rounds", type=int, default=30, help="of timing; 0 for none")
    add("--steps", type=int, default=1_000, help="of each run")
    for name, (default, about) in sizes.items():
        add(f"--{name}", type=int, default=default, help=about)
    add("--picture", type=Path, help="where to draw the losses")
    arguments = common.parse(parser, argv, "seeds", "steps", *sizes)
    common.command_line.check_writable(parser, arguments, "picture")
    if arguments.rounds < 0:
        parser.error(f"--rounds must be >= 0, got {arguments.rounds}")
    if arguments.width % arguments.heads:
        parser.error(f"--width must be a multiple of --heads, got {arguments.width}")
    if REFERENCE not in arguments.scheme:
        parser.error(f"--scheme must have {REFERENCE!r}, the reference, got {arguments.scheme}")
    return arguments


def compare(task: Task, arguments: argparse.Namespace) -> str:
    """Tunes and runs each scheme, and prints the tables."""
    records = common.Records(arguments.json, ("scheme", "rate", "momentum", "seed"))
    trainers = {name: Trainer(SCHEMES[name], task, arguments.steps) for name in arguments.scheme}
    seeds = range(1, arguments.seeds + 1)
    bar = tqdm()
    tuned, runs = {}, {}
    for name, trainer in trainers.items():
        bar.set_description(name)

        def run(rate: float, momentum: float, seed: int = 0) -> dict[str, Any]:
            bar.update()
            key = (name, rate, momentum, seed)  # noqa: B023  # called in this round
            return records.get(key, lambda: trainer(rate, momentum, seed))  # noqa: B023

        tuned[name] = tune(started(SCHEMES[name], task), run)
        best = tuned[name][-1]
        runs[name] = [run(best["rate"], best["momentum"], seed) for seed in seeds]
    bar.close()
    size = next(iter(runs.values()))[0]["params"]
    num_seeds = common.command_line.count(len(seeds), "seed")
    print(f"{common.device()}; {size:,} params, {arguments.steps} steps, {num_seeds}\n")
    times = time_steps(trainers, arguments.rounds) if arguments.rounds else {}
    if arguments.picture:
        draw(runs, arguments.picture)
    text = f"{table(runs, times)}\n\nTuning, by seed 0:\n\n{tuning_table(tuned)}"
    print(text)
    return text


def main(argv: list[str] | None = None) -> str:
    of_text = {"length": (128, "of a text, in bytes"), "batch": (8, "texts at a step")}
    arguments = parse(common.parser(__doc__), argv, NETWORK | of_text)
    return compare(make_task(arguments), arguments)


if __name__ == "__main__":
    common.command_line.run(main)
