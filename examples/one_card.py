"""Trains as large a language model as one card holds: each layer is updated in the
backward pass.

    pip install '.[examples]' && python examples/one_card.py

Trains a small Llama on the modules of Python's own library, as bytes, with bfloat16
params and `spa_adamw`: 4 bytes a parameter with its state. No gradient of the whole
model ever exists, as `in_backward.py` updates each layer as soon as its gradient is
known. (LOMO: Lv et al., Full Parameter Fine-tuning for Large Language Models with
Limited Resources, 2023, arXiv:2306.09782.) After 500 steps, two minutes on two CPU
cores, the validation loss is 1.652 nats a byte (one seed).

`--model 8B --batch 1 --length 2048` has the shapes of Llama 3 8B. By XLA's own figures
a step takes 33.0 GiB, and so fits an A100 of 40 GB if XLA_PYTHON_CLIENT_MEM_FRACTION is
0.95. With `--optimizer adafactor` it takes 17.7 GiB, and so fits an RTX 4090 of 24 GB.
No card has run it yet. `--text FILE` trains on a file, whose last tenth is held out. To
fork: copy `in_backward.py`, too, and replace `read_text` and `batch`; for checkpoints
see `language_model.py`.

Gradients cannot be clipped by the norm of all of them. Clip in `optimizers`, by the
norm of each layer. To add up those of several batches, all must be stored.
"""

import argparse
import functools
import math
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from in_backward import make_trainer
from tqdm import tqdm

from spa_optax import eval_params, in_float32, spa_adamw, stochastic_rounding

CHUNK = 256  # tokens of a sequence at a time in attention, and at most in the loss
VALIDATION_BATCHES = 16
SEED = 0


class Model(NamedTuple):
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128_256
    head: int = 128


# 1B and 3B are Llama 3.2's layers, with a smaller vocabulary, not shared by the head
MODELS = {
    "tiny": Model(4, 128, 4, 4, 384, vocabulary=256, head=32),
    "1B": Model(16, 2_048, 32, 8, 8_192, vocabulary=32_000, head=64),
    "3B": Model(28, 3_072, 24, 8, 8_192, vocabulary=32_000),
    "8B": Model(32, 4_096, 32, 8, 14_336),
}


# --------------------------------------------------------------------------------------
# optimizers


def optimizers(rate: Any) -> dict[str, Callable[[Any], optax.GradientTransformation]]:
    """For bfloat16 params: from the place of a layer to its optimizer, with a key of
    its own.
    """
    bf16 = jnp.bfloat16
    key_of = functools.partial(jax.random.fold_in, jax.random.key(SEED))
    options: dict[str, Any] = {"b2": 0.99, "weight_decay": 0.1}
    return {
        "spa_adamw": lambda i: optax.chain(  # 4 bytes: params and z
            in_float32(optax.clip_by_global_norm(1.0)),  # of one layer
            spa_adamw(
                rate,
                averaging=0.05,
                interpolation=0.9,
                second_moment="factored",
                state_dtype=bf16,
                rounding_key=key_of(i),
                **options,
            ),
        ),
        # 2 bytes: params. Its own clipping is by layer, too.
        "adafactor": lambda i: stochastic_rounding(
            optax.adafactor(rate, multiply_by_parameter_scale=False), key_of(i)
        ),
    }


# --------------------------------------------------------------------------------------
# decoder


def shapes(model: Model) -> dict[str, Any]:
    """Those of the params. The layers' have an axis of layers in front."""
    n, d, f, v = model.layers, model.width, model.hidden, model.vocabulary
    q, kv = model.heads * model.head, model.kv_heads * model.head
    layers = {
        "attention_norm": (n, d),
        "q": (n, d, q),
        "k": (n, d, kv),
        "v": (n, d, kv),
        "o": (n, q, d),
        "norm": (n, d),
        "gate": (n, d, f),
        "up": (n, d, f),
        "down": (n, f, d),
    }
    return {
        "embedding": (v, d),
        "layers": layers,
        "top": {"norm": (d,), "head": (d, v)},
    }


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding of (batch, length, heads, 2 n)."""
    n = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 500_000.0 ** (-jnp.arange(n) / n)
    a, b, cos, sin = x[..., :n], x[..., n:], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def in_chunks(function: Any, chunk: int, *arrays: jax.Array) -> Any:
    """`function` of some of the tokens (axis 1) at a time, recomputed for the
    gradient.
    """
    b, length = arrays[0].shape[:2]
    chunk = math.gcd(chunk, length)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(b, length // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    return jax.lax.map(
        lambda xs: jax.checkpoint(function)(*xs), tuple(map(split, arrays))
    )


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])

    def of_chunk(q: jax.Array, places: jax.Array) -> jax.Array:
        mask = places[:, None, :, None] >= jnp.arange(k.shape[1])
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    return in_chunks(of_chunk, CHUNK, q, places).swapaxes(0, 1).reshape(q.shape)


def layer(x: jax.Array, w: dict[str, jax.Array], head: int) -> jax.Array:
    """From (batch, length, width) to the same, with heads of that size."""
    h = rms_norm(x, w["attention_norm"])
    q, k, v = (
        (h @ w[name]).reshape(*x.shape[:2], -1, head) for name in ("q", "k", "v")
    )
    h = attention(rotated(q), rotated(k), v)
    x += h.reshape(*x.shape[:2], -1) @ w["o"]
    h = rms_norm(x, w["norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def cross_entropy(
    x: jax.Array, top: Any, labels: jax.Array, place: Any = lambda x, *axes: x
) -> jax.Array:
    """The mean over all tokens. `place` may split an array over devices, by the mesh's
    axes.
    """

    def of_chunk(x: jax.Array, labels: jax.Array) -> jax.Array:
        # Of all sequences, for a part of the vocabulary on each device: the head stays
        # split.
        logits = place(
            (place(x) @ top["head"]).astype(jnp.float32), None, None, "devices"
        )
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, place(labels)
        ).sum()

    x = rms_norm(x, top["norm"])
    return (
        in_chunks(of_chunk, min(CHUNK, 2_048 // len(x)), x, labels).sum() / labels.size
    )


# --------------------------------------------------------------------------------------
# training


def start(model: Model) -> Any:
    """Params in bfloat16: normal, scaled by the number of inputs; scales of norms are
    1.
    """
    leaves, structure = jax.tree.flatten(
        shapes(model), is_leaf=lambda node: isinstance(node, tuple)
    )
    vectors = {shapes(model)["layers"]["norm"], (model.width,)}

    def leaf(i: int, shape: tuple[int, ...]) -> jax.Array:
        if shape in vectors:
            return jnp.ones(shape, jnp.bfloat16)
        key = jax.random.fold_in(jax.random.key(SEED), i)
        num_inputs = model.width if shape[0] == model.vocabulary else shape[-2]
        return jax.random.normal(key, shape, jnp.bfloat16) * num_inputs**-0.5

    return structure.unflatten([leaf(i, shape) for i, shape in enumerate(leaves)])


def read_text(path: Path | None) -> list[np.ndarray]:
    """Bytes to train on, and those held out: the last tenth of a file, or an eighth of
    Python's.
    """
    if path:
        text = np.frombuffer(path.read_bytes(), np.uint8)
        return np.split(text, [len(text) * 9 // 10])
    files = [
        file.read_bytes()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    training = [file for i, file in enumerate(files) if i % 8]
    return [
        np.frombuffer(b"\0".join(part), np.uint8) for part in (training, files[::8])
    ]


def batch(
    text: np.ndarray, index: int, size: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Random parts of a text and, as labels, the bytes that follow each; by the index
    alone.
    """
    starts = np.random.default_rng((SEED, index)).integers(
        0, len(text) - length, (size, 1)
    )
    part = text[starts + np.arange(length + 1)].astype(np.int32)
    return part[:, :-1], part[:, 1:]


def embed(embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    return embedding[tokens]


def train(options: argparse.Namespace) -> float:
    """Trains, and returns the validation loss."""
    model = MODELS[options.model]
    rate = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10, options.steps
    )
    of_layer = functools.partial(layer, head=model.head)
    make_tx = optimizers(rate)[options.optimizer]
    trainer = make_trainer(model.layers, embed, of_layer, cross_entropy, make_tx)

    training, validation = read_text(options.text)
    batch_of = functools.partial(batch, size=options.batch, length=options.length)
    # Sizes come first: they need no memory, and say whether the model fits.
    make_params = jax.jit(functools.partial(start, model))
    params = jax.eval_shape(make_params)
    state = jax.eval_shape(trainer.init, params)
    step = jax.jit(trainer.step, donate_argnums=(0, 1))
    step = step.lower(params, state, *batch_of(training, 0)).compile()
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    num_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))
    )
    memory: Any = step.memory_analysis()
    print(
        f"{num_params:,} params, {num_bytes / num_params:.1f} bytes each with "
        f"their state"
    )
    temporary = memory.temp_size_in_bytes
    print(
        f"{num_bytes / 2**30:.3f} GiB, and {temporary / 2**30:.3f} for a step: "
        f"{(num_bytes + temporary) / 2**30:.3f} together"
    )
    params = make_params()
    state = jax.jit(trainer.init)(params)

    @jax.jit
    def validate(
        params: Any, state: Any, tokens: jax.Array, labels: jax.Array
    ) -> jax.Array:
        """At x, one layer at a time: x of all layers would be a third copy of the
        model.
        """

        def layer_at_x(h: jax.Array, of_layer_i: Any) -> tuple[jax.Array, None]:
            return of_layer(h, eval_params(*of_layer_i)), None

        h = embed(eval_params(state["embedding"], params["embedding"]), tokens)
        h, _ = jax.lax.scan(layer_at_x, h, (state["layers"], params["layers"]))
        return cross_entropy(h, eval_params(state["top"], params["top"]), labels)

    def validation_loss() -> float:
        batches = (batch_of(validation, i) for i in range(VALIDATION_BATCHES))
        return float(np.mean([validate(params, state, *each) for each in batches]))

    bar = tqdm(range(1, options.steps + 1))
    for k in bar:
        params, state, value = step(params, state, *batch_of(training, k))
        if k % max(1, options.steps // 10) == 0:
            bar.set_postfix(loss=f"{value:.3f}", validation=f"{validation_loss():.3f}")
    return validation_loss()


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--model", choices=MODELS, default="tiny", help=f"its size {default}")
    add("--optimizer", choices=optimizers(1.0), default="spa_adamw", help=default)
    add(
        "--rate", type=float, default=0.008, help=f"learning rate at its peak {default}"
    )
    add("--batch", type=int, default=8, help=f"texts of a step {default}")
    add("--length", type=int, default=128, help=f"bytes of a text {default}")
    add("--steps", type=int, default=500, help=f"how many {default}")
    add("--text", type=Path, help="a file to train on (default: Python's own library)")
    loss = train(parser.parse_args(argv))
    print(f"Validation loss: {loss:.4f} nats a byte")
    return loss


if __name__ == "__main__":
    # Ctrl-C ends at once. As an exception, while XLA compiles, it may end in a
    # segmentation fault.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
