"""nanoGPT on bytes, fully sharded: all devices share the params of each layer.

Run as a script, with `benchmarks` on the path, by each of several processes:
`transformer.py HOST:PORT NUM_PROCESSES PROCESS_ID OUT`.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import nanogpt
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import spa_from_sgdm

LENGTH, BATCH, NUM_STEPS = 32, 16, 8
SIZES = nanogpt.Sizes(vocabulary=256, length=LENGTH, layers=1, heads=4, width=64)


def sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Split along the largest axis that the devices divide, or else on all of them."""
    axes = [
        axis for axis, size in enumerate(leaf.shape) if size and size % mesh.size == 0
    ]
    spec: list[Any] = [None] * len(leaf.shape)
    if axes:
        spec[max(axes, key=lambda axis: leaf.shape[axis])] = "all"
    return NamedSharding(mesh, PartitionSpec(*spec))


def make_init(mesh: Mesh, tx: Any) -> Any:
    """Params and state, made where they belong."""

    def init_params() -> Any:
        return nanogpt.init(jax.random.key(0), SIZES)

    shapes = jax.eval_shape(init_params)
    shardings = jax.tree.map(lambda leaf: sharding(mesh, leaf), shapes)

    def init() -> Any:
        params = jax.lax.with_sharding_constraint(init_params(), shardings)
        return params, tx.init(params)

    return jax.jit(init)


def batches(mesh: Mesh) -> Any:
    """Text: this file's own, NUM_STEPS batches of it, split among the devices."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(
        0, len(text) - LENGTH - 1, (NUM_STEPS, BATCH)
    )
    tokens = text[starts[..., None] + np.arange(LENGTH + 1)]
    split = NamedSharding(
        mesh, PartitionSpec(None, "all" if BATCH % mesh.size == 0 else None)
    )
    return jax.make_array_from_callback(
        tokens.shape, split, lambda index: tokens[index]
    )


def optimizer() -> Any:
    return spa_from_sgdm(optax.cosine_decay_schedule(0.05, NUM_STEPS), 0.9)


def train(
    mesh: Mesh, tx: Any, carry: Any = None, start: int = 0, stop: int = NUM_STEPS
) -> Any:
    """Params, state, and the losses of the steps from `start` to `stop`."""
    params, state = carry or make_init(mesh, tx)()
    tokens, losses = batches(mesh), []

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        return nanogpt.losses(params, inputs, targets, sizes=SIZES).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

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
    leaves = jax.tree.leaves(on_host((params, state.z)))
    if jax.process_index() == 0:
        np.savez(out, *leaves, losses=losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
