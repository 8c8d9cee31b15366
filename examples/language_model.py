"""nanoGPT on Tiny Shakespeare or any text, at 4 bytes a parameter: one file, to read
and to fork.

    pip install '.[examples]' && python examples/language_model.py

Trains the GPT that the README of nanoGPT (https://github.com/karpathy/nanoGPT) has for
a CPU, with bfloat16 params and `spa_adamw`, on characters: 2,000 steps of 12 texts of
64. nanoGPT's AdamW has a validation loss of 1.88 there. The command downloads the text
(1 MB) into the folder `data`. `--text FILE` trains on a file instead, whose last tenth
is held out. `--steps 20` only shows that everything runs.

The folder --out gets checkpoints, the losses and the gauge of momentum in `log.csv`,
and a picture of both. If a run was stopped, the same command with `--resume` finishes
it, and gets the numbers of a run that was not.
"""

import argparse
import csv
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
import pooch
from flax import nnx
from tqdm import tqdm

import spa_optax
from spa_optax.diagnostics import momentum_report, track_momentum

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
WIDTH, HEADS, LAYERS = 128, 4, 4
LENGTH, BATCH = 64, 12  # characters of a text, texts of a step
COMPUTE_DTYPE = (
    jnp.float32
)  # of activations; a GPU or TPU is faster in bfloat16, a CPU slower
WARM_UP = 100  # steps
NUM_REPORTS = 20  # in a run: losses, gauge and checkpoint
VALIDATION_BATCHES = 64
SEED = 0


# --------------------------------------------------------------------------------------
# optimizers


def optimizers(num_steps: int) -> dict[str, Callable[[], optax.GradientTransformation]]:
    """For bfloat16 params. `stochastic_rounding` and `primal_averaging` take any other
    as well.
    """
    key, bf16 = jax.random.key(SEED), jnp.bfloat16
    recipe: dict[str, Any] = {"b2": 0.99, "weight_decay": 0.1, "mask": is_matrix}

    def rate(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            peak / WARM_UP,
            peak,
            min(WARM_UP, num_steps // 2),
            num_steps,
            end_value=peak / 10,
        )

    return {
        "spa_adamw": lambda: track_momentum(  # 4 bytes: params and z
            spa_optax.spa_adamw(
                rate(0.004),
                averaging=0.05,
                interpolation=0.9,
                second_moment="factored",
                state_dtype=bf16,
                rounding_key=key,
                **recipe,
            )
        ),
        # 8 bytes: params, m, and ν in float32. The gauge measures z, and there is none.
        "adamw": lambda: spa_optax.stochastic_rounding(
            optax.adamw(rate(0.004), b1=0.9, mu_dtype=bf16, **recipe), key
        ),
        # 4 bytes: params and m.
        "muon": lambda: spa_optax.stochastic_rounding(muon(rate(0.008)), key),
    }


def is_matrix(params: Any) -> Any:
    """The params that decay; under Muon, the kernels."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def muon(rate: optax.Schedule) -> optax.GradientTransformation:
    """For the kernels of layers, with NAdam for the rest. Needs optax 0.2.7 or
    newer.
    """
    dimensions = optax.contrib.MuonDimensionNumbers

    def numbers(path: Any, _: Any) -> Any:
        return dimensions() if path[-1].key == "kernel" else None

    options = {
        "consistent_rms": 0.2,
        "muon_weight_dimension_numbers": functools.partial(
            jax.tree_util.tree_map_with_path, numbers
        ),
        "adam_b2": 0.99,
    }
    return optax.contrib.muon(rate, weight_decay=0.1, mu_dtype=jnp.bfloat16, **options)


# --------------------------------------------------------------------------------------
# text


class Text(NamedTuple):
    """A text as numbers of its characters: all but the last tenth to train on, and
    that.
    """

    num_characters: int
    training: np.ndarray
    validation: np.ndarray


def download(folder: Path) -> Path:
    return Path(pooch.retrieve(URL, f"sha256:{SHA256}", "tinyshakespeare.txt", folder))


def read(path: Path) -> Text:
    characters = np.array(list(path.read_text(encoding="utf-8")))
    vocabulary, text = np.unique(characters, return_inverse=True)
    return Text(
        len(vocabulary), *np.split(text.astype(np.int32), [len(text) * 9 // 10])
    )


def batch(text: np.ndarray, index: int) -> np.ndarray:
    """Random parts of a text, (BATCH, LENGTH + 1), which the index determines."""
    starts = np.random.default_rng((SEED, index)).integers(
        0, len(text) - LENGTH, (BATCH, 1)
    )
    return text[starts + np.arange(LENGTH + 1)]


# --------------------------------------------------------------------------------------
# network


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, std: float = 0.02) -> nnx.Linear:
    initial = nnx.initializers.normal(std)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=initial, rngs=rngs)


def norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(WIDTH, epsilon=1e-5, use_bias=False, rngs=rngs)


def embed(number: int, rngs: nnx.Rngs) -> nnx.Embed:
    initial = nnx.initializers.normal(0.02)
    return nnx.Embed(
        number, WIDTH, dtype=COMPUTE_DTYPE, embedding_init=initial, rngs=rngs
    )


class Block(nnx.Module):
    """Attention to the characters before, then a perceptron, each behind a
    LayerNorm.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        std = 0.02 / (2 * LAYERS) ** 0.5  # of what is added to the residual stream
        self.norm_1, self.norm_2 = norm(rngs), norm(rngs)
        self.queries_keys_values = linear(WIDTH, 3 * WIDTH, rngs)
        self.join = linear(WIDTH, WIDTH, rngs, std)
        self.widen = linear(WIDTH, 4 * WIDTH, rngs)
        self.narrow = linear(4 * WIDTH, WIDTH, rngs, std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """From (n, length, WIDTH) to the same."""
        heads = self.queries_keys_values(self.norm_1(x)).reshape(
            *x.shape[:2], 3, HEADS, -1
        )
        attended = jax.nn.dot_product_attention(
            *jnp.moveaxis(heads, 2, 0), is_causal=True
        )
        x += self.join(attended.reshape(x.shape))
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x)), approximate=False))


class GPT(nnx.Module):
    """Logits of the next character, computed in COMPUTE_DTYPE."""

    def __init__(self, num_characters: int, rngs: nnx.Rngs) -> None:
        self.characters, self.places = embed(num_characters, rngs), embed(LENGTH, rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(LAYERS)))
        self.norm = norm(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (n, length ≤ LENGTH) to (n, length, num_characters)."""
        x = self.characters(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.characters.attend(self.norm(self.blocks(x)))


# --------------------------------------------------------------------------------------
# training


def train(name: str, text: Text, num_steps: int, out: Path) -> list[dict[str, float]]:
    """Trains from the last checkpoint in `out`, if there is one; the rows of
    `log.csv`.
    """
    num_characters, training, validation = text
    clip = spa_optax.in_float32(optax.clip_by_global_norm(1.0))
    tx = optax.chain(clip, optimizers(num_steps)[name]())
    graphdef, start = nnx.split(GPT(num_characters, nnx.Rngs(SEED)))
    params = optax.tree.cast(nnx.to_pure_dict(start), jnp.bfloat16)
    run = {
        "params": params,
        "opt_state": tx.init(params),
        "num_steps": jnp.asarray(num_steps),
    }
    sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in run.values()]
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(
        f"{num_params:,} params, {sum(sizes) / num_params:.1f} bytes each "
        f"with their state"
    )

    @jax.jit
    def loss(params: Any, text: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, text[:, 1:]
        ).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(run: Any, text: jax.Array) -> Any:
        params, opt_state = run["params"], run["opt_state"]
        value, gradient = jax.value_and_grad(loss)(params, text)
        updates, opt_state = tx.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {**run, "params": params, "opt_state": opt_state}, value

    def report(step: int, run: Any, losses: list[jax.Array]) -> dict[str, float]:
        params, opt_state = run["params"], run["opt_state"]
        if optax.tree.get(opt_state, "z") is not None:  # train at y, evaluate at x
            params = spa_optax.eval_params(opt_state, params)
        unseen = [loss(params, batch(validation, i)) for i in range(VALIDATION_BATCHES)]
        row = {
            "step": step,
            "training loss": np.mean(losses),
            "validation loss": np.mean(unseen),
        }
        if optax.tree.get(opt_state, "gauge") is not None:
            momentum: Any = momentum_report(opt_state)
            row["gain / noise level"] = momentum.gain / momentum.noise_level
        return {key: float(value) for key, value in row.items()}

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(
        (out / "checkpoints").absolute(), options=options
    ) as manager:
        first, rows, losses = manager.latest_step() or 0, [], []
        if first:
            run = manager.restore(first, args=ocp.args.StandardRestore(run))
            if run["num_steps"] != num_steps:  # the rate of a step depends on it
                raise SystemExit(
                    f"--steps must be {run['num_steps']}, as before, got {num_steps}"
                )
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
        return [
            {key: float(value) for key, value in row.items()}
            for row in csv.DictReader(file)
        ]


def write_log(path: Path, rows: list[dict[str, float]]) -> None:
    with (new := path.with_suffix(".new")).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    new.replace(path)  # at once, so that a stop leaves no half


def draw(rows: list[dict[str, float]], path: Path) -> None:
    """The losses, and whether steps add up: gain / noise level is then above 1.

    That stays as it was once steps are smaller than the rounding of the params.
    """
    column = {key: np.array([row[key] for row in rows]) for key in rows[0]}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for label in ("training loss", "validation loss"):
        axes[0].plot(column["step"], column[label], label=label)
    axes[0].set(xlabel="step", ylabel="nats a character")
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
    add("--text", type=Path, help="a file to train on (default: Tiny Shakespeare)")
    add(
        "--data-dir",
        type=Path,
        default=Path("data"),
        help=f"of Tiny Shakespeare {default}",
    )
    add("--optimizer", choices=optimizers(1), default="spa_adamw", help=default)
    add("--steps", type=int, default=2_000, help=f"how many {default}")
    add(
        "--out",
        type=Path,
        default=Path("results/language_model"),
        help=f"folder {default}",
    )
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    options = parser.parse_args(argv)
    if (options.out / "checkpoints").exists() and not options.resume:
        parser.error(f"--out must be new without --resume, got {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)

    text = read(options.text or download(options.data_dir))
    rows = train(options.optimizer, text, options.steps, options.out)
    print(
        f"Validation loss: {rows[-1]['validation loss']:.4f} nats a "
        f"character, in {options.out}"
    )
    draw(rows, options.out / "language_model.png")


if __name__ == "__main__":
    # Ctrl-C ends at once. As an exception, while XLA compiles, it may end in a
    # segmentation fault.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
