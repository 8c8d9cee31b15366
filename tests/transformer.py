"""A decoder of bytes, fully sharded: the params of each layer are spread over all devices.

Run as a script, one of several processes: `transformer.py HOST:PORT NUM_PROCESSES PROCESS_ID OUT`.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import spa_from_sgdm

WIDTH, NUM_HEADS, NUM_LAYERS, LENGTH, BATCH = 64, 4, 2, 32, 16
NUM_STEPS = 8


class Block(nnx.Module):
    """Attention, then a perceptron, each behind a LayerNorm."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(NUM_HEADS, WIDTH, decode=False, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        causal = nnx.make_causal_mask(x[..., 0])
        x += self.attention(self.norm_1(x), mask=causal)
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x))))


class Decoder(nnx.Module):
    """Logits of the next byte."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(rngs) for _ in range(NUM_LAYERS)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.tokens.attend(self.norm(self.blocks(x)))


def sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Along the largest axis that the devices divide; what has none is on all of them."""
    axes = [axis for axis, size in enumerate(leaf.shape) if size and size % mesh.size == 0]
    spec: list[Any] = [None] * len(leaf.shape)
    if axes:
        spec[max(axes, key=lambda axis: leaf.shape[axis])] = "all"
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_init(mesh: Mesh, tx: Any, dtype: Any = jnp.float32) -> Any:
    """Params and state, made where they belong."""

    def params() -> Any:
        made = nnx.to_pure_dict(nnx.state(Decoder(nnx.Rngs(0)), nnx.Param))
        return optax.tree.cast(made, dtype)

    of_params = jax.tree.map(lambda leaf: sharding(mesh, leaf), jax.eval_shape(params))

    def init() -> Any:
        made = jax.lax.with_sharding_constraint(params(), of_params)
        return made, tx.init(made)

    return jax.jit(init)


def batches(mesh: Mesh) -> Any:
    """Text: this file's own, NUM_STEPS batches of it, split among the devices."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - LENGTH - 1, (NUM_STEPS, BATCH))
    tokens = text[starts[..., None] + np.arange(LENGTH + 1)]
    split = NamedSharding(mesh, PartitionSpec(None, "all" if BATCH % mesh.size == 0 else None))
    return jax.make_array_from_callback(tokens.shape, split, lambda index: tokens[index])


def make_step(tx: Any) -> Any:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def optimizer(**kwargs: Any) -> Any:
    return spa_from_sgdm(optax.cosine_decay_schedule(0.05, NUM_STEPS), 0.9, **kwargs)


def train(mesh: Mesh, tx: Any, carry: Any = None, start: int = 0, stop: int = NUM_STEPS) -> Any:
    """Params, state, and the losses of the steps from `start` to `stop`."""
    params, state = carry or make_init(mesh, tx)()
    step, tokens, losses = make_step(tx), batches(mesh), []
    for k in range(start, stop):
        params, state, loss = step(params, state, tokens[k])
        losses.append(float(loss))
    return params, state, losses


def on_host(tree: Any) -> Any:
    """All of it, on every process."""
    return multihost_utils.process_allgather(tree, tiled=True)


def main(coordinator: str, num_processes: str, process_id: str, out: str) -> None:
    jax.distributed.initialize(coordinator, int(num_processes), int(process_id))
    mesh = Mesh(np.array(jax.devices()), ("all",))
    params, state, losses = train(mesh, optimizer())
    assert mesh.size == 8
    for x, z in zip(*map(jax.tree.leaves, (params, state.z)), strict=True):
        assert z.sharding == x.sharding
        assert not x.is_fully_addressable
        assert 8 * x.addressable_data(0).size == x.size
    whole = on_host((params, state.z))
    if jax.process_index() == 0:
        leaves = jax.tree.leaves(whole)
        np.savez(out, *leaves, losses=losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
