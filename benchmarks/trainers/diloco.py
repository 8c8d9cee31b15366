"""DiLoCo's outer step by `optax.sgd`, and by `spa_from_sgdm` in half of its state.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \
        python benchmarks/trainers/diloco.py

Two replicas take H steps of AdamW, each over four devices. Then their mean change is
the gradient of an outer SGD with Nesterov momentum: rate 0.3 and momentum 0.9, as in
MaxText. `spa_adamw` with an interpolation below 1 is its form for one worker, with c =
1 − 0.9^(1/H). The network and the text are nanoGPT's; the text is in the folder `data`,
or another argument, or downloaded to it.

Douillard et al., DiLoCo, 2023, arXiv:2311.08105, Algorithm 1.
"""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.append(str(Path(__file__).parents[1]))
import common
import nanogpt

from spa_optax import eval_params, spa_adamw, spa_from_sgdm

REPLICAS, H, ROUNDS, RATE = 2, 30, 10, 4e-3
SIZES, BATCH = nanogpt.Sizes(width=64, layers=2), 8
NARROW: dict[str, Any] = {
    "state_dtype": jnp.bfloat16,
    "rounding_key": jax.random.key(0),
}
OUTER = {
    "optax.sgd(0.3, 0.9, nesterov=True)": optax.sgd(0.3, 0.9, nesterov=True),
    "spa_from_sgdm(0.3, 0.9, True)": spa_from_sgdm(0.3, 0.9, True),
    "the same, bfloat16 z": spa_from_sgdm(0.3, 0.9, True, **NARROW),
}


class Run:
    """A language model, its inner optimizer, and the devices: replicas × data."""

    def __init__(self) -> None:
        """Over all devices."""
        self.key = jax.random.key(0)
        mesh = Mesh(np.array(jax.devices()).reshape(REPLICAS, -1), ("replica", "data"))
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.by_replica = NamedSharding(mesh, PartitionSpec("replica"))
        self.by_data = NamedSharding(mesh, PartitionSpec("data"))
        folder = Path((sys.argv[1:] or ["data"])[0])
        self.training, self.validation = map(jnp.asarray, nanogpt.read(folder))
        self.inner = optax.adamw(RATE, 0.9, 0.99, weight_decay=0.1)
        init = jax.jit(nanogpt.init, static_argnums=1, out_shardings=self.whole)
        self.params = init(self.key, SIZES)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        return nanogpt.losses(params, *batch, sizes=SIZES).mean()

    def seen(self, key: Any) -> Any:
        """A batch to train on."""
        return nanogpt.batch(self.training, key, SIZES, BATCH)

    def keys(self, k: Any) -> Any:
        """Of the batches of step k: one for each replica."""
        return jax.random.split(jax.random.fold_in(self.key, k), REPLICAS)

    def inner_step(self, params: Any, state: Any, keys: Any) -> Any:
        """Of every replica: they share nothing."""

        def step(params: Any, state: Any, key: Any) -> Any:
            batch = jax.lax.with_sharding_constraint(self.seen(key), self.by_data)
            grads = jax.grad(self.loss)(params, batch)
            return common.update(self.inner, grads, params, state)

        return jax.vmap(step, spmd_axis_name="replica")(params, state, keys)

    def validation_loss(self, params: Any) -> str:
        keys = jax.random.split(jax.random.key(1), 16)

        def losses(params: Any) -> jax.Array:
            def loss(key: Any) -> jax.Array:
                batch = nanogpt.batch(self.validation, key, SIZES, BATCH)
                return self.loss(params, batch)

            return jax.lax.map(loss, keys)

        found = jax.jit(losses, out_shardings=self.whole)(params)
        return f"{float(found.mean()):.4f}"

    def diloco(self, outer: Any) -> list[str]:
        """Bytes of the outer state, the loss in the end, and all-reduces of each
        program.
        """

        def outer_step(params: Any, state: Any, copies: Any) -> Any:
            def change(copy: Any) -> jax.Array:
                """One array, so that its mean over the replicas is one all-reduce."""
                return ravel_pytree(jax.tree.map(jnp.subtract, params, copy))[0]

            grads = ravel_pytree(params)[1](jax.vmap(change)(copies).mean(0))
            params, state = common.update(outer, grads, params, state)
            return params, state, replicated(params)

        def start(params: Any) -> Any:
            copies = replicated(params)
            return copies, jax.vmap(self.inner.init)(copies)

        params = self.params
        state = jax.jit(outer.init, out_shardings=self.whole)(params)
        copies, of_inner = jax.jit(start, out_shardings=self.by_replica)(params)
        keys = jax.jit(self.keys, out_shardings=self.by_replica)
        inner = jax.jit(self.inner_step, out_shardings=self.by_replica)
        inner = inner.lower(copies, of_inner, keys(0)).compile()
        shardings = (self.whole, self.whole, self.by_replica)
        outer_jit = jax.jit(outer_step, out_shardings=shardings)
        outer_jit = outer_jit.lower(params, state, copies).compile()
        for k in range(ROUNDS * H):
            # One step at a time: on a CPU collectives of several could wait for each
            # other.
            copies, of_inner = jax.block_until_ready(inner(copies, of_inner, keys(k)))
            if (k + 1) % H == 0:
                params, state, copies = outer_jit(params, state, copies)
        num_bytes = sum(
            leaf.nbytes for leaf in jax.tree.leaves(state)
        ) / optax.tree.size(params)
        x = eval_params(state, params) if hasattr(state, "z") else params
        counts = map(all_reduces, (inner, outer_jit))
        return [f"{num_bytes:.1f}", self.validation_loss(x), *counts]

    def one_worker(self) -> str:
        """The loss of one worker with both replicas' batches, and no outer step."""
        tx = spa_adamw(RATE, 1 - 0.9 ** (1 / H), 0.9, b2=0.99, weight_decay=0.1)

        @jax.jit
        def step(params: Any, state: Any, k: Any) -> Any:
            both = jax.vmap(self.seen)(self.keys(k))
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), both)
            return common.update(tx, jax.grad(self.loss)(params, batch), params, state)

        params, state = self.params, tx.init(self.params)
        for k in range(ROUNDS * H):
            params, state = step(params, state, k)
        return self.validation_loss(eval_params(state, params))


def replicated(params: Any) -> Any:
    """A copy for each replica."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), params)


def all_reduces(compiled: Any) -> str:
    return str(len(re.findall(r"\ball-reduce(?:-start)?\(", compiled.as_text())))


if __name__ == "__main__":
    run = Run()
    rows = [[f"`{name}`", *run.diloco(outer)] for name, outer in OUTER.items()]
    rows.append(["`spa_adamw`, one worker", "", run.one_worker(), "", ""])
    header = ["outer step", "bytes of its state", "loss"]
    header += ["all-reduces of an inner step", "of an outer step"]
    print(f"{jax.device_count()} devices, H = {H}\n\n{common.markdown(header, rows)}")
