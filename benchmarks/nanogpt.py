"""nanoGPT's network, text and recipe in JAX, as its README gives them for a CPU.

Karpathy, nanoGPT, https://github.com/karpathy/nanoGPT at commit 3adf61e: `model.py`,
`train.py` and `config/train_shakespeare_char.py`. nanogpt_parity.py compares this file
with that code.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pooch

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BATCH, STEPS = 12, 2_000
RATE, WARM_UP = 1e-3, 100
B1, B2, DECAY, CLIP = 0.9, 0.99, 0.1, 1.0


class Sizes(NamedTuple):
    """Of the network."""

    vocabulary: int = 65
    length: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128


SIZES = Sizes()
NAMES = ("wte", "wpe", "h", "ln_f")  # of the params, at their root


def init(key: jax.Array, sizes: Sizes = SIZES) -> dict[str, Any]:
    """GPT-2's initial params, by nanoGPT's names; matrices are (inputs, outputs)."""
    keys = iter(jax.random.split(key, 2 + 4 * sizes.layers))

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    d, ones = sizes.width, jnp.ones(sizes.width)
    std = 0.02 / math.sqrt(2 * sizes.layers)  # of what is added to the residual stream

    def layer() -> dict[str, Any]:
        attention = {"c_attn": normal(d, 3 * d), "c_proj": normal(d, d, std=std)}
        mlp = {"c_fc": normal(d, 4 * d), "c_proj": normal(4 * d, d, std=std)}
        return {"ln_1": ones, "attn": attention, "ln_2": ones, "mlp": mlp}

    embeddings = {"wte": normal(sizes.vocabulary, d), "wpe": normal(sizes.length, d)}
    params = embeddings | {"h": [layer() for _ in range(sizes.layers)], "ln_f": ones}
    return jax.tree.map(
        jnp.array, params
    )  # separate arrays, so that all can be donated


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x -= x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def logits(params: Any, tokens: jax.Array, heads: int) -> jax.Array:
    """Of the next token: from (n, length) to (n, length, vocabulary)."""
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for w in params["h"]:
        h = layer_norm(x, w["ln_1"]) @ w["attn"]["c_attn"]
        q, k, v = jnp.moveaxis(h.reshape(*x.shape[:2], 3, heads, -1), 2, 0)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += h.reshape(x.shape) @ w["attn"]["c_proj"]
        h = jax.nn.gelu(layer_norm(x, w["ln_2"]) @ w["mlp"]["c_fc"], approximate=False)
        x += h @ w["mlp"]["c_proj"]
    return layer_norm(x, params["ln_f"]) @ params["wte"].T


def losses(
    params: Any,
    inputs: jax.Array,
    labels: jax.Array,
    sizes: Sizes = SIZES,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """The cross-entropy of each label in nats. The network computes in `dtype`, and
    the cross-entropy in float32.
    """
    scores = logits(optax.tree.cast(params, dtype), inputs, sizes.heads)
    return optax.softmax_cross_entropy_with_integer_labels(
        scores.astype(jnp.float32), labels
    )


def read(folder: Path) -> tuple[np.ndarray, ...]:
    """Tiny Shakespeare as numbers of characters, and its last tenth; downloaded if not
    there.
    """
    path = pooch.retrieve(URL, f"sha256:{SHA256}", "tinyshakespeare.txt", folder)
    text = np.frombuffer(Path(path).read_bytes(), np.uint8)
    text = np.searchsorted(np.unique(text), text).astype(np.int32)
    return tuple(np.split(text, [int(len(text) * 0.9)]))


def batch(
    text: jax.Array, key: jax.Array, sizes: Sizes = SIZES, size: int = BATCH
) -> Any:
    """Random parts of a text and, as labels, what follows each character."""
    starts = jax.random.randint(key, (size, 1), 0, len(text) - sizes.length)
    part = text[starts + jnp.arange(sizes.length + 1)]
    return part[:, :-1], part[:, 1:]


def windows(
    text: np.ndarray, sizes: Sizes = SIZES, size: int = 64
) -> tuple[np.ndarray, ...]:
    """A whole text in batches of parts: inputs, labels, and 1 where there is a
    label.
    """
    count = len(text) - 1
    pad = -count % (sizes.length * size)
    columns = text[:-1], text[1:], np.ones(count, np.float32)
    return tuple(np.pad(x, (0, pad)).reshape(-1, size, sizes.length) for x in columns)


def schedule(peak: float, num_steps: int = STEPS, floor: float = 0.1) -> optax.Schedule:
    """Warm-up, then a cosine to `floor` times the peak; at a floor of 1 the rate is
    constant.
    """

    def rate(k: Any) -> jax.Array:
        progress = jnp.clip((k - WARM_UP) / max(1, num_steps - WARM_UP), 0, 1)
        cosine = floor + (1 - floor) * (1 + jnp.cos(jnp.pi * progress)) / 2
        return peak * jnp.where(k < WARM_UP, (k + 1) / (WARM_UP + 1), cosine)

    return rate


def is_matrix(params: Any) -> Any:
    """The params that decay."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)
