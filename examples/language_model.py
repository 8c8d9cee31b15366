"""A language model of bytes, at 4 bytes a parameter, on any text: one file, to read and to fork.

    pip install '.[examples]' && python examples/language_model.py

Trains a small GPT on the modules of Python's own library, an eighth of which are held out, with
bfloat16 params and `spa_adamw`. After 5,000 steps, five minutes on two CPU cores, the validation
loss is 1.270 nats a byte (one seed, Python 3.11.7). `--text FILE` trains on a file, whose last
tenth is held out. `--steps 20` only shows that everything runs.

The folder --out gets checkpoints, the losses and the gauge of momentum in `log.csv`, and a picture
of both. If a run was stopped, the same command with `--resume` finishes it, and gets the numbers of
a run that was not.
"""

import argparse
import csv
import functools
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

import spa_optax
from spa_optax.diagnostics import momentum_report, track_momentum

WIDTH, HEADS, LAYERS = 128, 4, 2
LENGTH, BATCH = 128, 8  # bytes of a text, texts of a step
NUM_REPORTS = 20  # in a run: losses, gauge and checkpoint
VALIDATION_BATCHES = 64
SEED = 0


# -------------------------------------------------------------------------------------- optimizers


def optimizers(num_steps: int) -> dict[str, Callable[[], optax.GradientTransformation]]:
    """For bfloat16 params. `stochastic_rounding` and `primal_averaging` take any other as well."""
    key, bf16 = jax.random.key(SEED), jnp.bfloat16
    rate = lambda peak: optax.warmup_cosine_decay_schedule(0.0, peak, num_steps // 10, num_steps)
    gauge = functools.partial(track_momentum, decay=0.95, every=max(1, num_steps // 500))
    return {
        "spa_adamw": lambda: gauge(  # 4 bytes: params and z
            spa_optax.spa_adamw(
                rate(0.008),
                averaging=0.025,
                interpolation=0.9,
                b2=0.99,
                weight_decay=0.1,
                second_moment="factored",
                state_dtype=bf16,
                rounding_key=key,
            )
        ),
        "adamw": lambda: gauge(  # 8 bytes: params, m, and ν in float32
            spa_optax.stochastic_rounding(
                optax.adamw(rate(0.004), b1=0.8, b2=0.99, weight_decay=0.1, mu_dtype=bf16), key
            ),
            averaging=1 - 0.8,
            b2=0.99,
        ),
        # 4.5 bytes: params and m. The gauge does not know Muon's momentum.
        "muon": lambda: spa_optax.stochastic_rounding(muon(rate(0.016)), key),
    }


def muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """For the kernels of layers, with AdamW for the rest. Needs optax 0.2.6 or newer."""
    dimensions = optax.contrib.MuonDimensionNumbers
    numbers = lambda path, _: dimensions() if path[-1].key == "kernel" else None
    kernels = functools.partial(jax.tree_util.tree_map_with_path, numbers)
    adam = {"adam_b1": 0.8, "adam_b2": 0.99, "adam_weight_decay": 0.1}
    options = {"consistent_rms": 0.2, "muon_weight_dimension_numbers": kernels, **adam}
    return optax.contrib.muon(rate, beta=0.8, weight_decay=0.1, mu_dtype=jnp.bfloat16, **options)


# -------------------------------------------------------------------------------------------- text


def read_library() -> list[np.ndarray]:
    """The bytes of Python's modules to train on, and those of every eighth, to validate."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    paths = sorted(
        path for path in root.rglob("*.py") if others.isdisjoint(path.relative_to(root).parts)
    )
    files = [path.read_bytes() for path in paths]
    training = [file for i, file in enumerate(files) if i % 8]
    return [np.frombuffer(b"\0".join(part), np.uint8) for part in (training, files[::8])]


def read_file(path: Path) -> list[np.ndarray]:
    """All but the last tenth, and that."""
    text = np.frombuffer(path.read_bytes(), np.uint8)
    return np.split(text, [len(text) * 9 // 10])


def batch(text: np.ndarray, index: int) -> np.ndarray:
    """Random parts of a text, (BATCH, LENGTH + 1), which the index determines."""
    starts = np.random.default_rng((SEED, index)).integers(0, len(text) - LENGTH, (BATCH, 1))
    return text[starts + np.arange(LENGTH + 1)]


# ----------------------------------------------------------------------------------------- network


class Block(nnx.Module):
    """Attention to the bytes before, then a perceptron, each behind a LayerNorm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.queries_keys_values = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.join = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From (n, length, WIDTH) to the same."""
        heads = self.queries_keys_values(self.norm_1(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x += self.join(attended.reshape(x.shape))
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x))))


class GPT(nnx.Module):
    """Logits of the next byte, computed in the dtype of the params."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(LAYERS)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (n, length ≤ LENGTH) to (n, length, 256)."""
        x = self.bytes(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.bytes.attend(self.norm(self.blocks(x)))


# ---------------------------------------------------------------------------------------- training


def train(name: str, texts: list[np.ndarray], num_steps: int, out: Path) -> list[dict[str, float]]:
    """Trains from the last checkpoint in `out`, if there is one; the rows of `log.csv`."""
    training, validation = texts
    tx = optax.chain(optax.clip_by_global_norm(1.0), optimizers(num_steps)[name]())
    graphdef, start = nnx.split(GPT(nnx.Rngs(SEED)))
    params = optax.tree.cast(nnx.to_pure_dict(start), jnp.bfloat16)
    run = {"params": params, "opt_state": tx.init(params)}
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in run.values()]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{num_params:,} params, {sum(sizes) / num_params:.1f} bytes each with their state")

    @jax.jit
    def loss(params: Any, text: jax.Array) -> jax.Array:
        text = text.astype(jnp.int32)
        logits = nnx.merge(graphdef, params)(text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(run: Any, text: jax.Array) -> Any:
        params, opt_state = run["params"], run["opt_state"]
        value, gradient = jax.value_and_grad(loss)(params, text)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, value

    def report(step: int, run: Any, losses: list[jax.Array]) -> dict[str, float]:
        params, opt_state = run["params"], run["opt_state"]
        if optax.tree.get(opt_state, "z") is not None:  # train at y, evaluate at x
            params = spa_optax.eval_params(opt_state, params)
        unseen = [loss(params, batch(validation, i)) for i in range(VALIDATION_BATCHES)]
        row = {"step": step, "training loss": np.mean(losses), "validation loss": np.mean(unseen)}
        if optax.tree.get(opt_state, "gauge") is not None:
            momentum: Any = momentum_report(opt_state)
            row["gain / noise level"] = momentum.gain / momentum.noise_level
        return {key: float(value) for key, value in row.items()}

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager((out / "checkpoints").absolute(), options=options) as manager:
        first, rows, losses = manager.latest_step() or 0, [], []
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
            rows = [row for row in read_log(out / "log.csv") if row["step"] <= first]
        bar = tqdm(range(first + 1, num_steps + 1), initial=first, total=num_steps)
        for step in bar:
            run, value = train_step(run, batch(training, step))
            losses.append(value)
            if step % max(1, num_steps // NUM_REPORTS) == 0 or step == num_steps:
                rows, losses = [*rows, report(step, run, losses)], []
                write_log(out / "log.csv", rows)
                manager.save(step, args=ocp.args.StandardSave(run))
                bar.set_postfix(loss=f"{rows[-1]['validation loss']:.3f}")
    return rows


def read_log(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def write_log(path: Path, rows: list[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """The losses, and whether steps add up: gain / noise level is then above 1.

    That stays as it was once steps are smaller than the rounding of the params.
    """
    column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for label in ("training loss", "validation loss"):
        axes[0].plot(column["step"], column[label], label=label)
    axes[0].set(xlabel="step", ylabel="nats a byte")
    axes[0].legend(frameon=False)
    if (label := "gain / noise level") in column:
        axes[1].plot(column["step"], column[label])
        axes[1].axhline(1, color="0.5", linestyle="--")
        axes[1].set(xlabel="step", ylabel=label)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--text", type=Path, help="a file to train on (default: Python's own library)")
    add("--optimizer", choices=optimizers(1), default="spa_adamw", help=default)
    add("--steps", type=int, default=5_000, help=f"how many {default}")
    add("--out", type=Path, default=Path("results/language_model"), help=f"folder {default}")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    options = parser.parse_args(argv)
    if (options.out / "checkpoints").exists() and not options.resume:
        parser.error(f"--out must be new without --resume, got {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)

    texts = read_file(options.text) if options.text else read_library()
    rows = train(options.optimizer, texts, options.steps, options.out)
    print(f"Validation loss: {rows[-1]['validation loss']:.4f} nats a byte, in {options.out}")
    draw(rows, options.out / "language_model.png")


if __name__ == "__main__":
    # Ctrl-C ends at once. As an exception, while XLA compiles, it may end in a segmentation fault.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
