"""DiLoCo's outer step by `optax.sgd`, and by `spa_from_sgdm` in half of its state.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/trainers/diloco.py
    python benchmarks/trainers/diloco.py --processes 2    # of four devices each

Two replicas take H steps of AdamW, each over four devices. Then their mean change is the gradient
of an outer SGD with Nesterov momentum: rate 0.3 and momentum 0.9, as in MaxText. `gpa` is its form
for one worker, with c = 1 − 0.9^(1/H).

Douillard et al., DiLoCo, 2023, arXiv:2311.08105, Algorithm 1.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.append(str(Path(__file__).parents[1]))
import common
import grid
import language_model

from spa_optax import eval_params, gpa_adamw, spa_from_sgdm

REPLICAS, H, ROUNDS, RATE = 2, 30, 10, 4e-3
SIZES = {"width": 64, "heads": 4, "layers": 2, "length": 64, "batch": 8}
OUTER: dict[str, Callable[[], Any]] = {
    "optax.sgd(0.3, 0.9, nesterov=True)": lambda: optax.sgd(0.3, 0.9, nesterov=True),
    "spa_from_sgdm(0.3, 0.9, True)": lambda: spa_from_sgdm(0.3, 0.9, True),
    "spa_from_sgdm(0.3, 0.9, True, state_dtype=bfloat16)": lambda: spa_from_sgdm(
        0.3, 0.9, True, state_dtype=jnp.bfloat16, rounding_key=jax.random.key(0)
    ),
}


def all_reduces(compiled: Any) -> int:
    """How many, of arrays, in a program."""
    return len(re.findall(r"\ball-reduce(?:-start)?\(", compiled.as_text()))


class Run:
    """A language model, its inner optimizer, and the devices: replicas × data."""

    def __init__(self) -> None:
        """Over all devices."""
        self.key = jax.random.key(0)
        self.mesh = Mesh(np.array(jax.devices()).reshape(REPLICAS, -1), ("replica", "data"))
        self.task = language_model.make_task(SIZES)
        self.loss = grid.make_loss(self.task.make_network)
        self.inner = optax.adamw(RATE, 0.9, 0.99, weight_decay=0.1)
        self.params = jax.jit(self.new_params, out_shardings=self.split())(self.key)

    def split(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def new_params(self, key: jax.Array) -> Any:
        from flax import nnx

        network = self.task.make_network(nnx.Rngs(key))
        return nnx.to_pure_dict(nnx.state(network, nnx.Param))

    def inner_step(self, params: Any, state: Any, keys: Any) -> Any:
        """Of every replica: they share nothing."""

        def step(params: Any, state: Any, key: Any) -> Any:
            batch = self.task.seen(key)
            place = lambda x: jax.lax.with_sharding_constraint(x, self.split("data"))
            grads = jax.grad(self.loss)(params, jax.tree.map(place, batch))
            updates, state = self.inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return jax.vmap(step, spmd_axis_name="replica")(params, state, keys)

    def validation_loss(self, params: Any) -> float:
        keys = jax.random.split(jax.random.key(1), 16)
        mean = lambda params: jax.lax.map(lambda k: self.loss(params, self.task.unseen(k)), keys)
        return float(jax.jit(mean, out_shardings=self.split())(params).mean())

    def diloco(self, outer: Any) -> dict[str, Any]:
        """The loss in the end, the size of the outer state, and all-reduces of each program."""
        of_replica = self.split("replica")

        def start(params: Any) -> Any:
            copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), params)
            return copies, jax.vmap(self.inner.init)(copies)

        def outer_step(params: Any, state: Any, copies: Any) -> Any:
            # One array, so that its mean over the replicas is one all-reduce.
            changes = jax.tree.map(lambda x, of_all: x - of_all, params, copies)
            leaves, structure = jax.tree.flatten(changes)
            flat = jnp.concatenate([leaf.reshape(REPLICAS, -1) for leaf in leaves], 1).mean(0)
            ends = np.cumsum([leaf.size // REPLICAS for leaf in leaves])[:-1]
            parts = zip(jnp.split(flat, ends), leaves, strict=True)
            grads = structure.unflatten([part.reshape(leaf.shape[1:]) for part, leaf in parts])
            updates, state = outer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            spread = lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape))
            return params, state, jax.tree.map(spread, params)

        params, state = self.params, jax.jit(outer.init, out_shardings=self.split())(self.params)
        copies, of_inner = jax.jit(start, out_shardings=of_replica)(params)
        split_key = lambda: jax.random.split(self.key, REPLICAS)
        keys = jax.jit(split_key, out_shardings=of_replica)()
        inner = jax.jit(self.inner_step, out_shardings=of_replica)
        inner = inner.lower(copies, of_inner, keys).compile()
        whole = self.split()
        outer_jit = jax.jit(outer_step, out_shardings=(whole, whole, of_replica))
        outer_jit = outer_jit.lower(params, state, copies).compile()
        fold = jax.jit(
            lambda k: jax.random.split(jax.random.fold_in(self.key, k), REPLICAS),
            out_shardings=of_replica,
        )
        early = params
        for k in range(ROUNDS * H):
            # One step at a time: on a CPU collectives of several could wait for each other.
            copies, of_inner = jax.block_until_ready(inner(copies, of_inner, fold(k)))
            if (k + 1) % H == 0:
                params, state, copies = outer_jit(params, state, copies)
                early = early if k + 1 > 2 * H else params
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        return {
            "loss": self.validation_loss(
                eval_params(state, params) if hasattr(state, "z") else params
            ),
            "early": early,
            "bytes": state_bytes / size,
            "all-reduces, inner": all_reduces(inner),
            "all-reduces, outer": all_reduces(outer_jit),
            "across replicas": across_replicas(str(inner.as_text())),
        }

    def gpa(self) -> float:
        """One worker with both replicas' batches, and no outer step."""
        tx = gpa_adamw(RATE, 1 - 0.9 ** (1 / H), 0.9, b2=0.99, weight_decay=0.1)

        @jax.jit
        def step(params: Any, state: Any, k: Any) -> Any:
            keys = jax.random.split(jax.random.fold_in(self.key, k), REPLICAS)
            both = jax.vmap(self.task.seen)(keys)
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), both)
            updates, state = tx.update(jax.grad(self.loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        params, state = self.params, tx.init(self.params)
        for k in range(ROUNDS * H):
            params, state = step(params, state, k)
        return self.validation_loss(eval_params(state, params))


def across_replicas(text: str) -> int:
    """All-reduces among more devices than a replica has."""
    groups = re.findall(r"\ball-reduce(?:-start)?\(.*?replica_groups=(\S+)", text)
    sizes = [len(group.split("}")[0].split(",")) for group in groups if group.startswith("{")]
    sizes += [int(re.match(r"\[\d+,(\d+)\]", group)[1]) for group in groups if group[0] == "["]  # pyright: ignore[reportOptionalSubscript]
    return sum(size > jax.device_count() // REPLICAS for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1, help="of four devices each, if 2")
    parser.add_argument("--process", help="HOST:PORT,INDEX of this one")
    options = parser.parse_args()
    if options.process:
        address, index = options.process.split(",")
        jax.distributed.initialize(address, 2, int(index))
    elif options.processes == 2:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = "--xla_force_host_platform_device_count=4"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, __file__, "--process"]
        workers = [
            subprocess.Popen([*command, f"{address},{i}"], env=environment) for i in range(2)
        ]
        sys.exit(max(worker.wait() for worker in workers))
    run, rows = Run(), []
    found = {name: run.diloco(make()) for name, make in OUTER.items()}
    exact = next(iter(found.values()))["early"]
    for name, of_name in found.items():
        gap = jax.jit(lambda a, b: optax.tree.norm(optax.tree.sub(a, b)) / optax.tree.norm(a))
        counts = (of_name[f"all-reduces, {which}"] for which in ("inner", "outer"))
        distance = float(gap(exact, of_name["early"]))
        cells = [f"{of_name['loss']:.4f}", f"{of_name['bytes']:.1f}", f"{distance:.1e}"]
        rows.append([f"`{name}`", *cells, *map(str, counts), str(of_name["across replicas"])])
    rows.append(["`gpa_adamw`, one worker", f"{run.gpa():.4f}", "", "", "", "", ""])
    if jax.process_index() == 0:
        header = ["outer step", "loss", "bytes of its state", "distance from the first, after two"]
        header += ["all-reduces of an inner step", "of an outer step", "across replicas, inner"]
        print(f"{jax.process_count()} processes, {jax.device_count()} devices, H = {H}\n")
        print(common.markdown(header, rows))


if __name__ == "__main__":
    main()
