r"""Can weights be float8, without a master copy?

    python benchmarks/float8_weights.py --json benchmarks/results/float8_weights.jsonl

Trains the network of language_model.py by Adam's factored direction with momentum 0.8. Matrices and
embeddings are numbers of float8_e4m3fn, times a power of two for each array; vectors are float32.
The rate is tuned by seed 0, and decays by a cosine. What differs is where rounding errors go:

- nowhere: weights are rounded at random, and nothing remembers the errors;
- into a master copy in float32;
- into momentum in float32 (ECO, arXiv:2601.22101): m ← m + (1/η) (1 − 1/β) error;
- into z − x: primal averaging with x in float8, and z in bfloat16, which no rounding of x enters.

At a constant rate the last two have the same iterates, but for the rounding of z
(tests/test_equivalence.py).
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import bases
import common
import grid
import jax
import jax.numpy as jnp
import language_model
import optax

from spa_optax import primal_averaging, stochastic_rounding

MOMENTUM = 0.8
F8 = jnp.float8_e4m3fn
LIMIT = 256.0  # no random rounding of it exceeds the maximum, 448
KEYS = ("scheme", "h", "seed")


def in_float8(tree: Any, key: jax.Array | None = None) -> Any:
    """Arrays of two axes or more, rounded to nearest, or at random with a key."""
    largest = lambda x: jnp.maximum(jnp.max(jnp.abs(x)), 1e-6)
    scale_of = lambda x: jnp.exp2(jnp.ceil(jnp.log2(largest(x) / LIMIT)))
    scale = jax.tree.map(scale_of, tree)
    scaled = jax.tree.map(jnp.divide, tree, scale)
    narrow = optax.tree.cast(scaled, F8)
    if key is not None:
        zeros = optax.tree.zeros_like(narrow)
        tx = stochastic_rounding(optax.identity(), key)
        narrow = tx.update(scaled, tx.init(zeros), zeros)[0]
    widen = lambda x, q, scale: q.astype(x.dtype) * scale if x.ndim > 1 else x
    return jax.tree.map(widen, tree, narrow, scale)


def float8(
    tx: optax.GradientTransformation,
    key: jax.Array | None = None,
    keep: Callable[[Any, Any, Any], Any] = lambda state, error, count: state,
) -> optax.GradientTransformation:
    """Rounds the params of `tx`. `keep` puts the errors into its state."""

    def init(params: Any) -> Any:
        return jnp.zeros([], jnp.int32), tx.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, of_tx = state
        u, of_tx = tx.update(updates, of_tx, params)
        x = optax.apply_updates(params, u)
        q = in_float8(x, None if key is None else jax.random.fold_in(key, count))
        minus = functools.partial(jax.tree.map, jnp.subtract)
        return minus(q, params), (count + 1, keep(of_tx, minus(x, q), count))

    return optax.GradientTransformation(init, update)


def master_copy(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The params are the copy in the state, rounded to nearest."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        of_tx, copy = state
        u, of_tx = tx.update(updates, of_tx, copy)
        copy = optax.apply_updates(copy, u)
        return jax.tree.map(jnp.subtract, in_float8(copy), params), (of_tx, copy)

    return optax.GradientTransformation(lambda params: (tx.init(params), params), update)


def into_momentum(rate: optax.Schedule) -> Callable[[Any, Any, Any], Any]:
    """With the next rate: what momentum will add is −η β / (1 − β) m, if the rate is constant."""
    is_ema = lambda node: isinstance(node, optax.EmaState)

    def keep(state: Any, error: Any, count: Any) -> Any:
        share = (1 - 1 / MOMENTUM) / jnp.maximum(rate(count + 1), 1e-12)
        add = lambda node: node._replace(
            ema=jax.tree.map(lambda m, e: m + share * e, node.ema, error)
        )
        return jax.tree.map(lambda n: add(n) if is_ema(n) else n, state, is_leaf=is_ema)

    return keep


def schemes() -> dict[str, grid.Scheme]:
    def make(h: bases.Hypers, run: bases.Run, kind: str, random: bool) -> bases.Tx:
        rate = lambda k: h["rate"] * bases.cosine(run)(k)
        with_momentum = bases.adam_factored(rate, MOMENTUM, None, run.key)
        key = run.key if random else None
        if kind == "averaging":
            direction = bases.adam_factored(rate, None, None, run.key)
            averaged = primal_averaging(
                direction, 1 - MOMENTUM, state_dtype=jnp.bfloat16, rounding_key=run.key
            )
            return float8(averaged, key)
        if kind == "ECO":
            return float8(with_momentum, key, into_momentum(rate))
        return {"float32": with_momentum, "copy": master_copy(with_momentum)}.get(
            kind, float8(with_momentum, key)
        )

    kinds = {
        "float32 weights": ("float32", False),
        "float32 master copy": ("copy", False),
        "errors forgotten, rounded at random": ("", True),
        "ECO, rounded at random": ("ECO", True),
        "ECO, rounded to nearest": ("ECO", False),
        "primal averaging, rounded at random": ("averaging", True),
        "primal averaging, rounded to nearest": ("averaging", False),
    }
    scheme = lambda kind, random: grid.Scheme(
        jnp.float32, functools.partial(make, kind=kind, random=random), {"rate": 0.004}
    )
    return {name: scheme(*kind) for name, kind in kinds.items()}


def table(records: list[grid.Record]) -> str:
    """The loss of each scheme, and its differences from two others, seed by seed."""
    runs = {
        name: grid.by_seed(of_name)
        for name in schemes()
        if (of_name := [record for record in records if record["scheme"] == name])
    }
    others = [runs[name] for name in ("float32 weights", "float32 master copy") if name in runs]
    row = lambda name, of_name: [
        name,
        f"{next(iter(of_name.values()))['h']['rate']:g}",
        f"{statistics.mean(map(grid.final, of_name.values())):.4f}",
        str(len(of_name)),
        *(grid.less(of_name, other) for other in others),
    ]
    header = ["weights in float8", "rate", "loss", "seeds", "− float32 weights", "− master copy"]
    return common.markdown(header[: 4 + len(others)], [row(*item) for item in runs.items()])


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1_000, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="how many, with that of tuning")
    arguments = common.parse(parser, argv, "steps", "seeds")
    sizes = {"width": 128, "heads": 4, "layers": 2, "length": 128, "batch": 8}
    task = language_model.make_task(sizes)
    records = common.Records(arguments.json, KEYS)
    for name, scheme in schemes().items():
        train = grid.make_train(scheme, task, arguments.steps)

        def run(h: bases.Hypers, seed: int = 0, name: str = name, train: Any = train) -> Any:
            curve = lambda: {"curve": train(h, seed)["curve"]}
            record = records.get((name, h, seed), curve)
            print(f"{name}, {h}, seed {seed}: {grid.final(record):.4f}", flush=True)
            return record

        h = grid.tune(scheme.start, run, {})
        for seed in range(arguments.seeds):
            run(h, seed)
    text = table(list(records.found.values()))
    print(f"{common.device()}\n\n{text}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
