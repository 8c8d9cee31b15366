"""The price of an update: time, memory and compilation, beside its peers and beside a
mere copy.

    python benchmarks/update_cost.py

All updates run in one process, in turns, warm, donated and blocked; a ratio is to
`optax.sgd(0.1, 0.9)` in the same round. The floor is what must move, params, gradients
and state read once, params and state written once, at the bandwidth of x ← −x, measured
in the same rounds.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from paper.models import PREACT_RESNETS
from tqdm import tqdm

import spa_optax
from spa_optax.diagnostics import track_momentum

REFERENCE, COPY = "optax.sgd(0.1, 0.9)", "x ← −x"
GROUP, WARM_UP = 5, 3  # so many updates at a time, besides the reference; and rounds


def gpt2() -> Any:
    """The smallest GPT-2: 124,439,808 params in 148 leaves."""
    norm = [(768,), (768,)]
    attention = [*norm, (768, 3 * 768), (3 * 768,), (768, 768), (768,)]
    mlp = [*norm, (768, 4 * 768), (4 * 768,), (4 * 768, 768), (768,)]
    return [(50_257, 768), (1_024, 768), *12 * [*attention, *mlp], *norm]


def resnet152() -> Any:
    """The PreAct ResNet-152 of the paper's experiment."""
    model = nnx.eval_shape(lambda: PREACT_RESNETS["resnet152"](rngs=nnx.Rngs(0)))
    return jax.tree.map(
        lambda p: p.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )


TREES: dict[str, Callable[[], Any]] = {
    "one leaf": lambda: [
        (16_000_000 if jax.default_backend() == "cpu" else 100_000_000,)
    ],
    "ResNet-152": resnet152,
    "GPT-2": gpt2,
    "1,000 leaves of 64": lambda: [(64,)] * 1_000,
}


def map_shapes(function: Callable[[tuple[int, ...]], Any], shapes: Any) -> Any:
    return jax.tree.map(function, shapes, is_leaf=lambda node: isinstance(node, tuple))


def sizes(shapes: Any) -> list[int]:
    return jax.tree.leaves(map_shapes(math.prod, shapes))


ROWS = [
    REFERENCE,
    "spa(1.0, 0.1)",
    "optax.sgd(schedule, 0.9)",
    "spa(schedule, 0.1)",
    "spa_from_sgdm(schedule, 0.9)",
    "spa_from_sgdm(schedule, 0.99)",
    "spa_from_sgdm(schedule, 0.999)",
    "optax.sgd(schedule, 0.9, nesterov=True)",
    "spa_from_sgdm(schedule, 0.9, True)",
    "optax.contrib.schedule_free_sgd(0.1)",
    "track_momentum(spa(1.0, 0.1))",
    "spa(1.0, 0.1), bfloat16 params",
    "the same with rounding_key",
    "the same with bfloat16 z",
]
# The others are named by their code.
CODE = {
    "the same with rounding_key": "spa(1.0, 0.1, rounding_key=key)",
    "the same with bfloat16 z": "spa(1.0, 0.1, **narrow)",
    "the same with float8_e4m3fn z": "spa(1.0, 0.1, **eight)",
    "spa_adamw, bfloat16 params, 10 bytes": "spa_adamw(1e-3, rounding_key=key)",
    "the same, 8 bytes": "spa_adamw(1e-3, **narrow)",
    "the same, 4 bytes": 'spa_adamw(1e-3, second_moment="factored", **narrow)',
    "the same, 4 bytes, μ_y = 0.9": (
        'spa_adamw(*gpa, second_moment="factored", **narrow)'
    ),
    "the same, 3 bytes, μ_y = 0.9": (
        'spa_adamw(*gpa, second_moment="factored", **eight)'
    ),
}


def update_of(row: str) -> tuple[optax.GradientTransformation, Any]:
    """What a row names, with the dtype of its params and gradients."""
    bf16, key = jnp.bfloat16, jax.random.key(0)
    names = (
        vars(optax)
        | vars(spa_optax)
        | {"optax": optax, "track_momentum": track_momentum}
    )
    names |= {
        "schedule": optax.warmup_cosine_decay_schedule(0.0, 0.1, 500, 10_000),
        "key": key,
    }
    names |= {"bfloat16": bf16, "float32": jnp.float32, "gpa": (1e-3, 0.05, 0.9)}
    names["narrow"] = {"state_dtype": bf16, "rounding_key": key}
    names["eight"] = {"state_dtype": jnp.float8_e4m3fn, "rounding_key": key}
    is_narrow = "bfloat16 params" in row or row in CODE
    code = CODE.get(row, row.removesuffix(", bfloat16 params"))
    return eval(code, names), bf16 if is_narrow else jnp.float32


def compiled(
    tx: optax.GradientTransformation, dtype: Any, shapes: Any
) -> tuple[Any, Any, Any]:
    """A call of an update; params and state, which it is donated; and what compiling
    tells.
    """
    full = jax.jit(lambda x: map_shapes(lambda s: jnp.full(s, x, dtype), shapes))
    grads, params = full(0.01), full(0.1)
    carry = jax.block_until_ready((params, tx.init(params)))
    step = jax.jit(functools.partial(common.update, tx), donate_argnums=(1, 2))
    start = time.perf_counter()
    program = step.lower(grads, *carry).compile()
    seconds = time.perf_counter() - start
    size = optax.tree.size(params)

    def num_bytes(tree: Any) -> float:
        """A parameter."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / size

    cost: Any = program.cost_analysis()
    memory: Any = program.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    figures = {
        "must_move": 2 * num_bytes(carry) + num_bytes(grads),
        "bytes_accessed": cost["bytes accessed"] / size,
        "temporary": memory.temp_size_in_bytes,
        "peak": (memory.argument_size_in_bytes + new + memory.temp_size_in_bytes)
        / size,
        "compile_seconds": seconds,
    }
    return lambda carry: program(grads, *carry), carry, figures


def measure(shapes: Any, num_rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of all updates of a tree."""
    figures: dict[str, dict[str, Any]] = {}
    size = sum(sizes(shapes))
    copied = max(size, 10_000_000)  # numbers, of 4 bytes each that are read and written
    for i in range(1, len(ROWS), GROUP):
        names = [REFERENCE, *ROWS[i : i + GROUP]]
        running = {name: compiled(*update_of(name), shapes) for name in names}
        running[COPY] = jax.jit(lambda x: -x, donate_argnums=0), jnp.ones(copied), {}
        carries = {name: carry for name, (_, carry, _) in running.items()}
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for _ in tqdm(
            range(WARM_UP + num_rounds), desc=", ".join(names[1:]), leave=False
        ):
            for name, (call, *_) in running.items():
                start = time.perf_counter()
                carries[name] = jax.block_until_ready(call(carries[name]))
                seconds[name].append(time.perf_counter() - start)
        taken = {name: np.array(of_name[WARM_UP:]) for name, of_name in seconds.items()}
        bandwidth = 8 * copied / taken[COPY]
        for name in names:
            *_, of_program = running[name]
            ratio = taken[name] / taken[REFERENCE]
            floor = of_program["must_move"] * size / bandwidth
            of_time = {
                "milliseconds": float(1e3 * np.median(taken[name])),
                "ratio": [float(f(ratio)) for f in (np.median, np.min, np.max)],
                "bandwidth": float(np.median(bandwidth)),
                "to_floor": float(np.median(taken[name] / floor)),
            }
            figures.setdefault(name, of_time | of_program)
    return figures


def label(row: str) -> str:
    """For tables: code in backticks."""
    return f"`{row}`" if "(" in row else row


def table(figures: dict[str, dict[str, Any]]) -> str:
    header = ["update", "ms", "ratio", "min–max", "× floor", "must move", "compiled"]
    header += ["peak", "temporary", "trace+compile, s"]
    rows = []
    for name, of_name in figures.items():
        ratio, low, high = of_name["ratio"]
        row = [label(name), f"{of_name['milliseconds']:.2f}"]
        row += [f"{ratio:.2f}", f"{low:.2f}–{high:.2f}"]
        of_bytes = (
            f"{of_name[key]:.1f}" for key in ("must_move", "bytes_accessed", "peak")
        )
        row += [f"{of_name['to_floor']:.2f}", *of_bytes]
        rows.append(
            [*row, f"{of_name['temporary']:,} B", f"{of_name['compile_seconds']:.2f}"]
        )
    return common.markdown(header, rows)


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add(
        "--tree",
        nargs="+",
        choices=TREES,
        default=list(TREES),
        help="shapes of the params",
    )
    add("--rounds", type=int, default=30, help="of timing")
    arguments = common.parse(parser, argv, "rounds")
    common.check_new(arguments.json)
    text, everything = [common.device()], {}
    for name in arguments.tree:
        shapes = TREES[name]()
        figures = everything[name] = measure(shapes, arguments.rounds)
        leaves, speed = (
            sizes(shapes),
            f"{figures[REFERENCE]['bandwidth'] / 1e9:.1f} GB/s",
        )
        text.append(
            f"{name}: {sum(leaves):,} params, {len(leaves):,} leaves; {COPY} at {speed}"
        )
        text.append(table(figures))
    common.write_json(arguments.json, {"device": text[0], **everything})
    print("\n\n".join(text))
    return "\n\n".join(text)


if __name__ == "__main__":
    common.command_line.run(main)
