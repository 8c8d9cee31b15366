"""How far bfloat16 training departs from the same optimizer in float32.

    python benchmarks/fidelity.py --json benchmarks/results/fidelity.jsonl

On the task of language_model.py, with its rows. All of a group begin with the same
params, rounded to bfloat16, and see the same batches. The distance is that of x, or of
the params without an average, relative to the length of the float32 run's update so
far. Logits are compared on a batch of the validation text: the root mean square of
their difference over that of the float32 run's change.
"""

import functools
import itertools
import time
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import language_model
import nanogpt
import numpy as np
import optax
from language_rows import ROWS

from spa_optax import eval_params

F32, BF16 = jnp.float32, jnp.bfloat16
AT = (10, 30, 100, 300, 1_000, 2_000)  # the steps after which runs are compared
# The float32 run of each group, and those that are compared with it. The first has the
# same arrays, and differs by rounding alone at the start.
GROUPS = {
    "spa_adamw": (
        "spa_adamw, ν factored",
        (
            "spa_adamw, z in float32",
            "spa_adamw, z in bfloat16",
            "spa_adamw, z in float8",
        ),
    ),
    "factored_nadamw": (
        "factored_nadamw",
        (
            "factored_nadamw, m in float32",
            "factored_nadamw, m in bfloat16",
            "factored_nadamw, m as in bitsandbytes",
        ),
    ),
    "AdamW": (
        "AdamW",
        (
            "AdamW, rounded at random",
            "AdamW, a master copy in float8",
            "AdamW, a master copy in bfloat16",
            "AdamW, the other half of the bits in its state",
        ),
    ),
}
CONTROL = "float32, one ulp off"  # what chaos alone does
Record = dict[str, Any]


@jax.jit
def compared(x: Any, reference: Any, first: Any, tokens: jax.Array) -> Any:
    """The distances of params and of logits."""
    heads, norm = nanogpt.SIZES.heads, optax.tree.norm
    x, reference, first = (optax.tree.cast(p, F32) for p in (x, reference, first))
    of_x, of_reference, of_first = (
        nanogpt.logits(params, tokens, heads) for params in (x, reference, first)
    )
    params = norm(optax.tree.sub(x, reference)) / norm(optax.tree.sub(reference, first))
    logits = norm(of_x - of_reference) / norm(of_reference - of_first)
    return params, logits


def point(carry: Any) -> Any:
    """x, or the params."""
    params, state, _ = carry
    has_x = optax.tree.get(state, "mu_y", 0) > 0
    return eval_params(state, params) if has_x else params


def train(group: str, num_steps: int, seed: int, texts: Any) -> Record:
    """The record of a group, whose runs go on side by side."""
    reference, others = GROUPS[group]
    keys = [jax.random.fold_in(jax.random.key(seed), i) for i in range(3)]
    first = optax.tree.cast(nanogpt.init(keys[0]), BF16)
    off_by_an_ulp = jax.tree.map(lambda x: x.astype(F32) * (1 + 2**-23), first)
    rows = {name: ROWS[name] for name in (reference, *others)}
    rows[CONTROL] = rows[reference]
    carries, steps = {}, {}
    for name, row in rows.items():
        start, steps[name] = language_model.make_steps(
            row, row.settings, num_steps, keys[2]
        )
        params = off_by_an_ulp if name == CONTROL else first
        carries[name] = start(jax.tree.map(jnp.copy, params))
    seen = jnp.asarray(texts[0])
    tokens = jnp.asarray(nanogpt.windows(texts[1])[0][0])
    batch = jax.jit(lambda k: nanogpt.batch(seen, jax.random.fold_in(keys[1], k)))
    begin, curves = time.perf_counter(), {name: [] for name in (*others, CONTROL)}
    for k in range(num_steps):
        for name in rows:
            carries[name], _ = steps[name](carries[name], k, *batch(k))
        if k + 1 in AT or k + 1 == num_steps:
            of_reference = point(carries[reference])
            for name, curve in curves.items():
                found = compared(point(carries[name]), of_reference, first, tokens)
                curve.append([k + 1, *(round(float(value), 5) for value in found)])
    of_rows = {
        name: {
            "bytes": language_model.bytes_of(*carries[name][:2]),
            "settings": rows[name].settings,
            "curve": curve,
        }
        for name, curve in curves.items()
    }
    return {"rows": of_rows, "seconds": round(time.perf_counter() - begin)}


def tables(records: list[Record]) -> dict[str, str]:
    """By group: mean distances of params and of logits after each step."""
    of_group = common.groups(records, "group")
    return {group: table(group, runs) for group, runs in of_group.items()}


def table(group: str, records: list[Record]) -> str:
    rows = []
    reference, others = GROUPS[group]
    for name in (*others, CONTROL):
        runs = [record["rows"][name] for record in records]
        steps, params, logits = np.mean([run["curve"] for run in runs], axis=0).T
        text = f"{reference}, first params one ulp off" if name == CONTROL else name
        row = {"optimizer": text, "bytes": f"{runs[0]['bytes']:.0f}"}
        for of_what, distances in (("params", params), ("logits", logits)):
            for step, distance in zip(steps, distances, strict=True):
                row[f"{of_what}, step {step:,.0f}"] = f"{distance:.2f}"
        rows.append(row)
    return common.table(rows, without=[f"logits, step {step}" for step in AT[:4]])


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--groups", nargs="+", choices=GROUPS, default=list(GROUPS), help="to compare")
    add("--seed", nargs="+", type=int, default=[1, 2, 3], help="as language_model.py")
    add("--steps", type=int, default=nanogpt.STEPS, help="of each run")
    add("--data-dir", type=Path, default=Path("data"), help="of Tiny Shakespeare")
    arguments = common.parse(parser, argv, "steps")
    records = common.Records(arguments.json, ("group", "steps", "seed"))
    texts, chosen = nanogpt.read(arguments.data_dir), []
    for seed, group in itertools.product(arguments.seed, arguments.groups):
        run = functools.partial(train, group, arguments.steps, seed, texts)
        chosen.append(records.get((group, arguments.steps, seed), run))
        print(f"{group}, seed {seed}", flush=True)
    text = "\n\n".join(f"{name}\n\n{it}" for name, it in tables(chosen).items())
    print(f"\n{common.device()}\n\n{text}")
    return text


if __name__ == "__main__":
    common.command_line.run(main)
