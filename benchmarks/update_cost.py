"""The price of an update: time, memory and compilation, beside its peers and beside a mere copy.

    python benchmarks/update_cost.py

All updates run in one process, in turns, warm, donated and blocked; a ratio is to
`optax.sgd(0.1, 0.9)` in the same round. The floor is what must move, params, gradients and state
read once, params and state written once, at the bandwidth of x ← −x, measured in the same rounds.
"""

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

from spa_optax import spa, spa_from_sgdm
from spa_optax.diagnostics import track_momentum

REFERENCE = "optax.sgd(0.1, 0.9)"
COMPILED = ("must_move", "bytes_accessed", "temporary", "peak", "compile_seconds")
GROUP = 5  # so many updates at a time, besides the reference: each has its own params


# ------------------------------------------------------------------------------------------- trees


def gpt2() -> Any:
    """The smallest GPT-2: 124,439,808 params in 148 leaves."""
    norm, dense = lambda n: [(n,), (n,)], lambda n, m: [(n, m), (m,)]
    attention = [*norm(768), *dense(768, 3 * 768), *dense(768, 768)]
    mlp = [*norm(768), *dense(768, 4 * 768), *dense(4 * 768, 768)]
    return [(50_257, 768), (1_024, 768), *12 * [*attention, *mlp], *norm(768)]


def resnet152() -> Any:
    """The PreAct ResNet-152 of the paper's experiment."""
    model = nnx.eval_shape(lambda: PREACT_RESNETS["resnet152"](rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda p: p.shape, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


TREES: dict[str, Callable[[], Any]] = {
    "one leaf": lambda: [(16_000_000 if jax.default_backend() == "cpu" else 100_000_000,)],
    "ResNet-152": resnet152,
    "GPT-2": gpt2,
    "1,000 leaves of 64": lambda: [(64,)] * 1_000,
}


def filled(shapes: Any, value: float, dtype: Any) -> Any:
    is_shape = lambda node: isinstance(node, tuple)
    full = jax.jit(
        lambda: jax.tree.map(lambda s: jnp.full(s, value, dtype), shapes, is_leaf=is_shape)
    )
    return full()


# ----------------------------------------------------------------------------------------- updates


def optimizers() -> dict[str, tuple[optax.GradientTransformation, Any]]:
    """Each with the dtype of its params and gradients."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 500, 10_000)
    f32, bf16, key = jnp.float32, jnp.bfloat16, jax.random.key(0)
    return {
        REFERENCE: (optax.sgd(0.1, 0.9), f32),
        "spa(1.0, 0.1)": (spa(1.0, 0.1), f32),
        "optax.sgd(schedule, 0.9)": (optax.sgd(schedule, 0.9), f32),
        "spa(schedule, 0.1)": (spa(schedule, 0.1), f32),
        "spa_from_sgdm(schedule, 0.9)": (spa_from_sgdm(schedule, 0.9), f32),
        "spa_from_sgdm(schedule, 0.99)": (spa_from_sgdm(schedule, 0.99), f32),
        "spa_from_sgdm(schedule, 0.999)": (spa_from_sgdm(schedule, 0.999), f32),
        "optax.sgd(schedule, 0.9, nesterov=True)": (optax.sgd(schedule, 0.9, True), f32),
        "spa_from_sgdm(schedule, 0.9, True)": (spa_from_sgdm(schedule, 0.9, True), f32),
        "optax.contrib.schedule_free_sgd(0.1)": (optax.contrib.schedule_free_sgd(0.1), f32),
        "track_momentum(spa(1.0, 0.1))": (track_momentum(spa(1.0, 0.1)), f32),
        "spa(1.0, 0.1), bfloat16 params": (spa(1.0, 0.1), bf16),
        "the same with rounding_key": (spa(1.0, 0.1, rounding_key=key), bf16),
        "the same with bfloat16 z": (spa(1.0, 0.1, state_dtype=bf16, rounding_key=key), bf16),
    }


class Timed:
    """A compiled call, donated what it returned before."""

    carry: Any
    call: Callable[[Any], Any]

    def run(self) -> float:
        """The seconds that one call takes."""
        start = time.perf_counter()
        self.carry = jax.block_until_ready(self.call(self.carry))
        return time.perf_counter() - start


class Copy(Timed):
    """x ← −x in place: what the memory can do."""

    def __init__(self, size: int) -> None:
        """Of `size` float32."""
        self.num_bytes, self.carry = 8 * size, jnp.ones(size)
        self.call = jax.jit(lambda x: -x, donate_argnums=0)


class Update(Timed):
    """An update with its own params and state."""

    def __init__(self, tx: optax.GradientTransformation, shapes: Any, dtype: Any) -> None:
        """Compiles it."""
        grads, params = filled(shapes, 0.01, dtype), filled(shapes, 0.1, dtype)
        self.carry = jax.block_until_ready((params, tx.init(params)))
        self.size = optax.tree.size(params)

        def step(carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(self.carry, grads).compile()
        self.compile_seconds = time.perf_counter() - start
        self.call = lambda carry: compiled(carry, grads)
        count = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / self.size
        self.must_move = 2 * count(self.carry) + count(grads)
        cost: Any = compiled.cost_analysis()
        memory: Any = compiled.memory_analysis()
        self.bytes_accessed = cost["bytes accessed"] / self.size
        self.temporary = memory.temp_size_in_bytes
        peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + self.temporary
        self.peak = (peak - memory.alias_size_in_bytes) / self.size


def measure(shapes: Any, num_rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of all updates of a tree."""
    make = {
        name: lambda tx=tx, dtype=dtype: Update(tx, shapes, dtype)
        for name, (tx, dtype) in optimizers().items()
    }
    figures: dict[str, dict[str, Any]] = {}
    others = [name for name in make if name != REFERENCE]
    for i in range(0, len(others), GROUP):
        names = others[i : i + GROUP]
        running: dict[str, Any] = {name: make[name]() for name in (REFERENCE, *names)}
        running["x ← −x"] = Copy(max(running[REFERENCE].size, 10_000_000))
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for k in tqdm(range(num_rounds + 3), desc=", ".join(names), leave=False):
            for name, update in running.items():
                took = update.run()
                if k >= 3:  # warm
                    seconds[name].append(took)
        bandwidth = running["x ← −x"].num_bytes / np.array(seconds.pop("x ← −x"))
        for name, of_name in seconds.items():
            update, taken = running[name], np.array(of_name)
            ratio = taken / np.array(seconds[REFERENCE])
            floor = update.must_move * update.size / bandwidth
            figures.setdefault(
                name,
                {
                    "milliseconds": float(1e3 * np.median(taken)),
                    "ratio": [float(f(ratio)) for f in (np.median, np.min, np.max)],
                    "bandwidth": float(np.median(bandwidth)),
                    "to_floor": float(np.median(taken / floor)),
                    **{key: getattr(update, key) for key in COMPILED},
                },
            )
    return figures


# ------------------------------------------------------------------------------------------ report


def table(figures: dict[str, dict[str, Any]]) -> str:
    header = ["update", "ms", "ratio", "min–max", "× floor", "must move", "compiled"]
    header += ["peak", "temporary", "trace+compile, s"]
    rows = []
    for name, of_name in figures.items():
        ratio, low, high = of_name["ratio"]
        row = [f"`{name}`" if "(" in name else name, f"{of_name['milliseconds']:.2f}"]
        row += [f"{ratio:.2f}", f"{low:.2f}–{high:.2f}"]
        row += [f"{of_name['to_floor']:.2f}"]
        row += [f"{of_name[key]:.1f}" for key in ("must_move", "bytes_accessed", "peak")]
        row += [f"{of_name['temporary']:,} B", f"{of_name['compile_seconds']:.2f}"]
        rows.append(row)
    return common.markdown(header, rows)


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--tree", nargs="+", choices=TREES, default=list(TREES), help="shapes of the params")
    add("--rounds", type=int, default=30, help="of timing")
    arguments = common.parse(parser, argv, "rounds")
    title = common.device()
    text, everything = [title], {}
    for name in arguments.tree:
        shapes = TREES[name]()
        figures = everything[name] = measure(shapes, arguments.rounds)
        leaves = jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))
        size = sum(int(np.prod(shape)) for shape in leaves)
        gigabytes = figures[REFERENCE]["bandwidth"] / 1e9
        text.append(
            f"{name}: {size:,} params, {len(leaves):,} leaves; x ← −x at {gigabytes:.1f} GB/s"
        )
        text.append(table(figures))
    common.write_json(arguments.json, {"device": title, **everything})
    print("\n\n".join(text))
    return "\n\n".join(text)


if __name__ == "__main__":
    common.command_line.run(main)
