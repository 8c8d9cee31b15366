"""A loop of Equinox trains a small decoder of bytes, split over 8 devices."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import shared
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import eval_params

RATE, WIDTH, HEADS, LAYERS, LENGTH = 4e-3, 128, 4, 2, 64
NORM = jax.vmap(eqx.nn.LayerNorm(WIDTH, use_weight=False, use_bias=False))


def at_x(model, state):
    """The model to evaluate and to export."""
    params, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(eval_params(state, params), static)


def split(tree: Any) -> Any:
    """Every array over all devices, by its first axis where that fits."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def sharding(array: jax.Array) -> NamedSharding:
        fits = array.ndim > 0 and array.shape[0] % mesh.size == 0
        return NamedSharding(mesh, PartitionSpec("data") if fits else PartitionSpec())

    arrays, static = eqx.partition(tree, eqx.is_array)
    shardings = jax.tree.map(sharding, arrays)
    return eqx.combine(eqx.filter_shard(arrays, shardings), static)


class Decoder(eqx.Module):
    """From bytes to the logits of the next one, with params in bfloat16."""

    embeddings: list[jax.Array]
    layers: list[tuple[eqx.nn.MultiheadAttention, eqx.nn.MLP]]

    def __init__(self, key: jax.Array, **narrow: Any) -> None:
        *keys, first, second = jax.random.split(key, LAYERS + 2)
        self.embeddings = [
            0.02 * jax.random.normal(key, (num, WIDTH), **narrow)
            for key, num in ((first, 256), (second, LENGTH))
        ]
        self.layers = [
            (
                eqx.nn.MultiheadAttention(HEADS, WIDTH, key=key, **narrow),
                eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=key, **narrow),
            )
            for key in keys
        ]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embeddings[0][tokens] + self.embeddings[1]
        for attention, mlp in self.layers:
            normed = NORM(x)
            x += attention(normed, normed, normed, jnp.tri(LENGTH, dtype=bool))
            x += jax.vmap(mlp)(NORM(x))
        return (NORM(x) @ self.embeddings[0].T).astype(jnp.float32)


def loss_of(model: Decoder, texts: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(texts[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:]).mean()


def batches(num: int, seed: int) -> Iterator[jax.Array]:
    return map(jnp.asarray, shared.batches(num, seed, length=LENGTH + 1))


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    rate = optax.cosine_decay_schedule(RATE, 2 * shared.STEPS)
    tx = shared.make(name, rate, optax.adamw(rate))

    @eqx.filter_jit
    def step(model, state, batch):
        grads = eqx.filter_grad(loss_of)(model, batch)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return split((eqx.apply_updates(model, updates), state))

    model = Decoder(jax.random.key(0), dtype=jnp.bfloat16)
    last, model, state = split((0, model, tx.init(eqx.filter(model, eqx.is_array))))
    folder.mkdir(exist_ok=True)
    saved = folder / "saved.eqx"
    if saved.exists():
        last, model, state = split(
            eqx.tree_deserialise_leaves(saved, (last, model, state))
        )
    numbered = enumerate(batches(shared.STEPS, 0), 1)
    for num, batch in itertools.islice(numbered, last, None):
        model, state = step(model, state, split(batch))
        if num % shared.SAVE_EVERY == 0:
            eqx.tree_serialise_leaves(saved, (num, model, state))
        if num == kill_at:
            shared.die()
    eqx.tree_serialise_leaves(folder / "x.eqx", average := at_x(model, state))
    evaluate = eqx.filter_jit(loss_of)
    losses = [evaluate(average, split(batch)) for batch in batches(20, 1)]
    return shared.result(
        np.mean(losses), last + 1, eqx.filter(model, eqx.is_array), state
    )


if __name__ == "__main__":
    shared.main(__file__, eqx.__version__, train)
