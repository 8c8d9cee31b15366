"""What fine-tuning loses in bfloat16, by how params and the optimizer's state are
stored.

    python benchmarks/finetune.py --data-dir DIR \
        --json benchmarks/results/finetune.jsonl

Fine-tunes MiniLM-L6 as examples/finetune.py does, on SST-2, or on TREC: questions, and
which of six kinds of answer each asks for. A record has the validation accuracy and
loss in the end, and the share of params that the run has moved.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import minilm
import optax
import pooch
from rivals import BF16, F32, with_low_half

from spa_optax import (
    in_float32,
    primal_averaging,
    spa_adamw,
    stochastic_rounding,
)

COMMIT = "656a7ea29de3409aca87bb17935cf93c537527fa"
TREC = (
    f"https://raw.githubusercontent.com/harvardnlp/sent-conv-torch/{COMMIT}/data/TREC."
)
MD5 = {
    "train": "c62c403d02ef12ad46da9bfb308473d4",
    "test": "0e43dfe89110e97af7e7d5c5dbc55293",
}
RATES = (1e-5, 2e-5, 5e-5)
RANK, LORA_SCALE = 8, 2.0
REFERENCE = "AdamW"
Optimizer = tuple[Any, optax.GradientTransformation]  # with the dtype of the params
Record = dict[str, Any]


class Run(NamedTuple):
    """What an optimizer needs of a run."""

    rate: float
    num_steps: int
    seed: int

    @property
    def key(self) -> jax.Array:
        """For stochastic rounding."""
        return jax.random.key(self.seed)

    def schedule(self, count: Any) -> Any:
        """That of the example: to the peak in the first tenth, then linearly to 0."""
        part = count / self.num_steps
        return self.rate * jnp.minimum(10 * part, (1 - part) / 0.9)


class Row(NamedTuple):
    """What is compared: an optimizer, and the dtype to compute the loss in."""

    make: Callable[[Run], Optimizer]
    compute_dtype: Any = F32
    is_lora: bool = False


def matrices(params: Any) -> Any:
    """What is decayed."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in ("bias", "scale"), params
    )


decay: Any = {"weight_decay": 0.01, "mask": matrices}
with_narrow_m: Any = {"mu_dtype": BF16, **decay}
adafactor: Any = {"multiply_by_parameter_scale": False}  # with Adam's rates


def adamw(run: Run, **options: Any) -> optax.GradientTransformation:
    return optax.adamw(run.schedule, **decay, **options)


def averaged(run: Run, c: float = 0.1, mu_y: float = 1.0, **options: Any) -> Optimizer:
    return BF16, spa_adamw(
        run.schedule, c, mu_y, rounding_key=run.key, **decay, **options
    )


def rounded(run: Run, make: Any, factor: float = 1.0, **options: Any) -> Optimizer:
    return BF16, stochastic_rounding(
        make(lambda k: factor * run.schedule(k), **options), run.key
    )


def with_float8_copy(run: Run) -> Optimizer:
    """z at c = 1 is a master copy of the params in float8, around any optimizer."""
    return BF16, primal_averaging(
        adamw(run, mu_dtype=BF16),
        1.0,
        state_dtype=jnp.float8_e4m3fn,
        rounding_key=run.key,
    )


def lora(make: Callable[[Run], Optimizer]) -> Row:
    """At ten times the rate, as is usual."""

    def trained_only(run: Run) -> Optimizer:
        dtype, tx = make(run._replace(rate=10 * run.rate))
        return dtype, optax.partition(
            {True: tx, False: optax.set_to_zero()}, is_inexact
        )

    return Row(trained_only, is_lora=True)


factored = partial(averaged, second_moment="factored")
ROWS = {
    "AdamW": Row(lambda run: (F32, adamw(run))),
    "AdamW, m in bfloat16": Row(lambda run: (F32, adamw(run, mu_dtype=BF16))),
    "AdamW, m and ν in bfloat16, rounded to nearest": Row(
        lambda run: (BF16, adamw(run))
    ),
    "AdamW, m in bfloat16, rounded at random": Row(
        partial(rounded, make=optax.adamw, **with_narrow_m)
    ),
    "AdamW, m in bfloat16, a master copy in float8": Row(with_float8_copy),
    "spa_adamw, z in bfloat16": Row(partial(factored, state_dtype=BF16)),
    "spa_adamw, z in float8": Row(partial(factored, state_dtype=jnp.float8_e4m3fn)),
    # A control: what is lost is not lost in the moments.
    "AdamW, rounded to nearest": Row(lambda run: (BF16, in_float32(adamw(run)))),
    "AdamW, computed in bfloat16": Row(
        lambda run: (F32, adamw(run)), compute_dtype=BF16
    ),
    "AdamW, the other half of the bits in its state": Row(
        lambda run: (BF16, with_low_half(adamw(run)))
    ),
    "spa_adamw, z in float32, ν whole": Row(averaged),
    "spa_adamw, z in float8, averaging 0.05, interpolation 0.9": Row(
        partial(factored, c=0.05, mu_y=0.9, state_dtype=jnp.float8_e4m3fn)
    ),
    # Lion at a fifth of the rate, since every element of its step has its size.
    "Lion, m in bfloat16, rounded at random": Row(
        partial(rounded, make=optax.lion, factor=0.2, **with_narrow_m)
    ),
    "Adafactor, rounded at random": Row(
        partial(rounded, make=optax.adafactor, **adafactor)
    ),
    "LoRA, AdamW": lora(lambda run: (F32, adamw(run))),
    "LoRA, AdamW, m and ν in bfloat16, rounded to nearest": lora(
        lambda run: (BF16, adamw(run))
    ),
    "LoRA, spa_adamw, z in float8": lora(
        partial(factored, state_dtype=jnp.float8_e4m3fn)
    ),
}


def with_lora(params: Any, seed: int) -> Any:
    """Beside the params matrices a (layers, width, RANK) and b, which begins at 0."""

    def pair(key: jax.Array, kernel: jax.Array) -> dict[str, jax.Array]:
        layers, width, out = kernel.shape
        a = jax.random.normal(key, (layers, width, RANK)) / width**0.5
        return {"a": a, "b": jnp.zeros((layers, RANK, out))}

    keys = dict(
        zip(("query", "value"), jax.random.split(jax.random.key(seed)), strict=True)
    )
    pairs = {
        name: pair(key, params["layers"][name]["kernel"]) for name, key in keys.items()
    }
    return {"base": params, "lora": pairs}


def is_inexact(params: Any) -> Any:
    def leaf(path: Any, _: Any) -> bool:
        return not {"lora", "head"}.isdisjoint(entry.key for entry in path)

    return jax.tree_util.tree_map_with_path(leaf, params)


def merged(params: Any) -> Any:
    """The kernels with a b added to them in float32; only what is trained has
    gradients.
    """
    params = jax.tree.map(
        lambda leaf, trained: leaf if trained else jax.lax.stop_gradient(leaf),
        params,
        is_inexact(params),
    )
    layers = dict(params["base"]["layers"])
    for name, pair in params["lora"].items():
        kernel, a, b = (
            x.astype(F32) for x in (layers[name]["kernel"], pair["a"], pair["b"])
        )
        layers[name] = layers[name] | {"kernel": kernel + LORA_SCALE * a @ b}
    return params["base"] | {"layers": layers}


def finetune(row: Row, run: Run, data: Any, model_dir: Path) -> Record:
    """What the run reached, and the share of params that it moved."""
    training, validation = data
    graphdef, params = minilm.load_model(model_dir, run.seed, 1 + training[1].max())
    loss = minilm.make_loss(graphdef, row.compute_dtype)
    if row.is_lora:
        params, loss = with_lora(params, run.seed), of_merged(loss)
    dtype, tx = row.make(run)
    start = optax.tree.cast(params, dtype)
    state = None
    steps = minilm.train((dtype, tx), loss, params, training, run.num_steps, run.seed)
    for _, new_params, new_state in steps:
        params, state = new_params, new_state
    x = minilm.at_x(params, state)
    found = minilm.validate(jax.jit(loss), x, validation)
    whole = merged if row.is_lora else lambda params: params
    return {
        "accuracy": round(found["accuracy"], 5),
        "loss": round(found["loss"], 5),
        "bytes": round(minilm.bytes_of(params, state), 4),
        "moved": round(share_moved(whole(x), whole(start)), 5),
    }


def of_merged(loss: Any) -> Any:
    """The loss of params with LoRA's pairs beside them."""
    return lambda params, *batch: loss(merged(params), *batch)


def share_moved(params: Any, others: Any) -> float:
    """Of all params."""
    moved = jax.tree.map(lambda x, y: jnp.sum(x != y), params, others)
    return float(sum(jax.tree.leaves(moved)) / optax.tree.size(params))


def measure(name: str, run: Run, *of_all: Any) -> Record:
    """The record of a run."""
    start = time.perf_counter()
    figures = finetune(ROWS[name], run, *of_all)
    minutes = (time.perf_counter() - start) / 60
    return figures | {"minutes": round(minutes, 1)}


def download_trec(folder: Path) -> None:
    """Writes it as files like SST-2's. The last is renamed when it is whole."""
    for there, name in {"train": "train.tsv", "test": "validation.tsv"}.items():
        path = pooch.retrieve(f"{TREC}{there}.all", f"md5:{MD5[there]}", path=folder)
        lines = Path(path).read_text(encoding="latin-1").strip("\n").split("\n")
        swapped = ["\t".join(reversed(line.split(" ", 1))) for line in lines]
        whole = folder / f"{name}.part"
        whole.write_text("\n".join(["sentence\tlabel", *swapped]), encoding="utf-8")
        whole.replace(folder / name)


def main(argv: list[str] | None = None) -> list[Record]:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--task", choices=["sst2", "trec"], default="sst2", help="what to learn")
    add("--row", nargs="+", choices=ROWS, default=list(ROWS), help="what to compare")
    add("--rate", nargs="+", type=float, default=RATES, help="at its peak")
    add("--seeds", type=int, default=3, help="how many")
    add("--steps", type=int, default=150, help="how many")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help="has sst2 and trec, or gets them",
    )
    add(
        "--model-dir",
        type=Path,
        default=Path("data/minilm"),
        help="the model's; one for each OUT",
    )
    arguments = common.parse(parser, argv, "seeds", "steps")

    records = common.Records(arguments.json, ("task", "row", "rate", "seed", "steps"))
    task, folder = arguments.task, arguments.data_dir / arguments.task
    if task == "trec" and not (folder / "validation.tsv").exists():
        download_trec(folder)
    model_dir = arguments.model_dir
    if not model_dir.exists():
        minilm.download_model(model_dir)
    data = minilm.load_data(folder, model_dir)
    result: list[Record] = []
    runs: Any = itertools.product(range(arguments.seeds), arguments.rate, arguments.row)
    for seed, rate, name in runs:
        run = Run(rate, arguments.steps, seed)
        measured = partial(measure, name, run, data, model_dir)
        result.append(records.get((task, name, rate, seed, arguments.steps), measured))
        print(result[-1], flush=True)
    return result


if __name__ == "__main__":
    common.command_line.run(main)
