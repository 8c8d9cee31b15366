"""The memory that training takes with each optimizer, by XLA, for decoders as large as Llama 3.

    pip install libtpu        # or 'jax[cuda12]', some 5 GB, for the NVIDIA card
    python benchmarks/memory.py --target "8B on v5e-8" --json OUT --picture OUT.png

XLA's compilers run without the hardware, and refuse a program that does not fit. The program is a
whole training step, with params, gradients and state split over all devices (FSDP), and a sequence
of 2,048 tokens for each device. It computes in bfloat16. Each layer is recomputed for the gradient,
and attention and the loss take 256 tokens or fewer at a time, so that activations are little beside
params and state.

- *bytes/param*: params and state.
- *GiB/device*: params, state and temporaries of the step, gradients among them, by XLA. Where it
  refuses the step, what it says that it needs.
- *whole*: the state that `jax.jit(tx.init)` alone does not split, in GiB. The step is compiled with
  all of the state split like the params.
- *collectives*: those of the whole step; in a loop each is one.
- *compile*: seconds.

With --json a program that is in OUT, a line each, is not compiled again.
"""

import argparse
import functools
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import common
import compiled
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from low_precision import BF16, F32, with_master
from tqdm import tqdm

from spa_optax import gpa_adamw, spa_adamw

LENGTH = 2_048  # tokens of a sequence, of which every device has one
CHUNK = 256  # tokens of a sequence at a time in attention, and at most in the loss


class Model(NamedTuple):
    """The sizes of a decoder."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128_256
    head: int = 128


MODELS = {
    "8B": Model(32, 4_096, 32, 8, 14_336),
    "70B": Model(80, 8_192, 64, 8, 28_672),
}


def shapes(model: Model) -> dict[str, Any]:
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
    return {"embedding": (v, d), "layers": layers, "norm": (d,), "head": (d, v)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def rotated(x: jax.Array) -> jax.Array:
    """Rotary embedding of (batch, length, heads, 2 n)."""
    n = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 500_000.0 ** (-jnp.arange(n) / n)
    a, b, cos, sin = x[..., :n], x[..., n:], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def in_chunks(function: Any, chunk: int, *arrays: jax.Array) -> Any:
    """`function` of some of the tokens (axis 1) at a time, recomputed for the gradient."""
    b, length = arrays[0].shape[:2]
    chunk = min(chunk, length)
    split = lambda x: x.reshape(b, length // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)
    return jax.lax.map(lambda xs: jax.checkpoint(function)(*xs), tuple(map(split, arrays)))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    places = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])

    def of_chunk(q: jax.Array, places: jax.Array) -> jax.Array:
        mask = places[:, None, :, None] >= jnp.arange(k.shape[1])
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    return in_chunks(of_chunk, CHUNK, q, places).swapaxes(0, 1).reshape(q.shape)


def narrow(w: jax.Array) -> jax.Array:
    """In bfloat16, one layer at a time: XLA for TPUs casts all layers at once in a mere cast."""
    return w if w.dtype == BF16 else jax.lax.reduce_precision(w, 8, 7).astype(BF16)


def loss(params: Any, tokens: jax.Array, model: Model, sharding: Any) -> jax.Array:
    """The mean cross-entropy of the next token, computed in bfloat16."""
    b, length = tokens.shape
    whole, by_token = (
        NamedSharding(sharding.mesh, PartitionSpec(*axes)) for axes in ((), (None, None, "devices"))
    )
    heads = lambda x: x.reshape(b, length, -1, model.head)

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(narrow, w)
        x = jax.lax.with_sharding_constraint(x, sharding)
        h = rms_norm(x, w["attention_norm"])
        h = attention(rotated(heads(h @ w["q"])), rotated(heads(h @ w["k"])), heads(h @ w["v"]))
        x += h.reshape(b, length, -1) @ w["o"]
        h = rms_norm(x, w["norm"])
        x += (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
        return jax.lax.with_sharding_constraint(x, sharding), None

    x = params["embedding"].astype(BF16)[tokens]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    x = rms_norm(x, params["norm"].astype(BF16))
    head = params["head"].astype(BF16)

    def of_chunk(x: jax.Array, labels: jax.Array) -> jax.Array:
        # Of all sequences, for a part of the vocabulary on each device: the head stays split.
        x, labels = (jax.lax.with_sharding_constraint(a, whole) for a in (x, labels))
        logits = jax.lax.with_sharding_constraint((x @ head).astype(F32), by_token)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()

    chunk = min(CHUNK, 2_048 // b)
    return in_chunks(of_chunk, chunk, x, jnp.roll(tokens, -1, 1)).sum() / tokens.size


# -------------------------------------------------------------------------------------- optimizers


def optimizers() -> dict[str, tuple[optax.GradientTransformation, Any]]:
    """Each with the dtype of its params."""
    key = jax.random.key(0)
    narrow: dict[str, Any] = {"state_dtype": BF16, "rounding_key": key}
    of_16_bits: dict[str, Any] = {"second_moment": "bfloat16"}
    factored: dict[str, Any] = {"second_moment": "factored"}
    return {
        "AdamW, float32": (optax.adamw(1e-3), F32),
        "AdamW, float32, bfloat16 m": (optax.adamw(1e-3, mu_dtype=BF16), F32),
        "AdamW, bfloat16, float32 master copy": (with_master(optax.adamw(1e-3)), BF16),
        "Adafactor, float32": (optax.adafactor(1e-3), F32),
        "Adafactor, bfloat16": (optax.adafactor(1e-3), BF16),
        "spa_adamw, bfloat16": (spa_adamw(1e-3, rounding_key=key), BF16),
        "spa_adamw, bfloat16 z": (spa_adamw(1e-3, **narrow), BF16),
        "spa_adamw, bfloat16 z and ν": (spa_adamw(1e-3, **narrow, **of_16_bits), BF16),
        "spa_adamw, bfloat16 z, factored ν": (spa_adamw(1e-3, **narrow, **factored), BF16),
        "gpa_adamw, bfloat16": (gpa_adamw(1e-3, rounding_key=key), BF16),
        "gpa_adamw, bfloat16 z": (gpa_adamw(1e-3, **narrow), BF16),
        "gpa_adamw, bfloat16 z and ν": (gpa_adamw(1e-3, **narrow, **of_16_bits), BF16),
        "gpa_adamw, bfloat16 z, factored ν": (gpa_adamw(1e-3, **narrow, **factored), BF16),
    }


# ---------------------------------------------------------------------------------------- compiling


class Target(NamedTuple):
    """What to train, on what."""

    model: str
    device: str
    topology: str | None  # None: one device
    limit: float  # GiB of a device, as XLA has it


V5E, V5P, H100 = 15.75, 95.73, compiled.CARDS["h100"].memory / 2**30
TARGETS = {
    "8B on v5e-8": Target("8B", "v5e", "v5e:2x4", V5E),
    "8B on one v5p chip": Target("8B", "v5p", None, V5P),
    "8B on one H100": Target("8B", "h100", None, H100),
    "70B on v5p-64": Target("70B", "v5p", "v5p:2x4x4", V5P),  # of 64 cores, which are 32 devices
    "70B on v5e-256": Target("70B", "v5e", "v5e:16x16", V5E),
}


def split_params(model: Model, dtype: Any, devices: list[Any]) -> Any:
    """Split along the second axis: the first is often that of the layers. A vector has but one."""
    mesh = Mesh(np.array(devices), "devices")

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        axis = min(1, len(shape) - 1)
        spec = PartitionSpec(*[None] * axis, "devices")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(leaf, shapes(model), is_leaf=lambda node: isinstance(node, tuple))


@mock.patch.dict(os.environ, compiled.TPU_ENVIRONMENT)
def split_state(tx: optax.GradientTransformation, model: Model, params: Any) -> tuple[Any, int]:
    """The state, split as `jax.jit(tx.init)` does, and the bytes that it leaves whole.

    Of these, arrays that are shaped like a parameter are then split like it.
    """
    mesh, dtype = params["norm"].sharding.mesh, params["norm"].dtype
    # Of one layer: with all, `init` itself may run out of memory, where it leaves the state whole.
    small = split_params(model._replace(layers=1, vocabulary=1_024), dtype, mesh.devices)
    shardings = jax.jit(tx.init).lower(small).compile().output_shardings
    like = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    whole = 0

    def leaf(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        nonlocal whole
        if sharding.is_fully_replicated:
            whole += leaf.size * leaf.dtype.itemsize * (mesh.size > 1)
            sharding = like.get(leaf.shape, NamedSharding(mesh, PartitionSpec()))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(leaf, jax.eval_shape(tx.init, params), shardings), whole


@mock.patch.dict(os.environ, compiled.TPU_ENVIRONMENT)
def compile_step(
    tx: optax.GradientTransformation, model: Model, params: Any, state: Any, length: int = LENGTH
) -> Any:
    """A step of training, with a sequence for each device."""
    mesh = params["norm"].sharding.mesh
    batch = NamedSharding(mesh, PartitionSpec("devices"))
    tokens = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32, sharding=batch)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, model, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    out = (*shardings, NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(params, state, tokens)


def collectives(text: str) -> dict[str, int]:
    """How many of each kind are in a program. XLA may copy one into many fusions."""
    found = re.findall(rf" {compiled.COLLECTIVE}\(.*?channel_id=(\d+)", text)
    return dict(sorted(Counter(kind for kind, _, _ in set(found)).items()))


def measure(target_name: str, optimizer: str) -> dict[str, Any]:
    target, (tx, dtype) = TARGETS[target_name], optimizers()[optimizer]
    devices = compiled.devices_of(target.device, topology=target.topology)
    model = MODELS[target.model]
    params = split_params(model, dtype, devices if target.topology else devices[:1])
    start = time.perf_counter()
    state, whole = split_state(tx, model, params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state)))
    result = {"bytes": num_bytes / size, "whole": whole / 2**30}
    try:
        program = compile_step(tx, model, params, state).compile()
        memory = program.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
        result |= {
            "refused": False,
            "GiB": total / 2**30,
            "collectives": collectives(compiled.text_of(program)),
        }
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        result |= {"refused": True, "GiB": gigabytes(str(error)), "collectives": {}}
    seconds = time.perf_counter() - start
    return result | {"seconds": seconds, "versions": compiled.versions(target.device)}


def gigabytes(message: str) -> float | None:
    """What XLA says that a program needs, where it refuses it."""
    found = re.search(r"\(([\d.]+)G\) exceeds available|Used ([\d.]+)G of", message)
    return float(found[1] or found[2]) if found else None


# ----------------------------------------------------------------------------------- table, picture


def fits(record: dict[str, Any]) -> bool:
    limit = TARGETS[record["target"]].limit
    return not record["refused"] and record["GiB"] <= limit


def table(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        size = "" if record["GiB"] is None else f"{record['GiB']:.2f}"
        kinds = ", ".join(f"{n} {kind}" for kind, n in record["collectives"].items())
        row = [record["optimizer"], f"{record['bytes']:.1f}", size]
        row += ["" if fits(record) else "out of memory", f"{record['whole']:.2f}", kinds]
        rows.append([*row, f"{record['seconds']:.0f}"])
    header = ["optimizer", "bytes/param", "GiB/device", "", "whole", "collectives", "compile"]
    return common.markdown(header, rows)


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """A panel for each target, a bar for each optimizer."""
    num_bytes = {record["optimizer"]: record["bytes"] for record in records}
    names = [name for name in optimizers() if name in num_bytes]
    targets = list(dict.fromkeys(record["target"] for record in records))
    figure, panels = plt.subplots(
        1,
        len(targets),
        figsize=(3 + 2.4 * len(targets), 1 + 0.32 * len(names)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, target in zip(panels[0], targets, strict=True):
        of_target = [record for record in records if record["target"] == target]
        limit = TARGETS[target].limit
        end = max([limit, *(record["GiB"] or 0 for record in of_target)])
        for record in of_target:
            name, size = record["optimizer"], record["GiB"]
            colour = "tab:blue" if name.startswith(("spa", "gpa")) else "0.45"
            y, fitting = names.index(name), fits(record)
            axes.barh(y, size or end, color=colour, alpha=1 if fitting else 0.25)
            text = "" if size is None else f"{size:.1f}"
            text += "" if fitting else " out of memory"
            axes.text(0.02 * end, y, text, va="center", color="white" if fitting else "tab:red")
        axes.axvline(limit, color="tab:red", linestyle="--")
        axes.set(title=target, xlabel=f"GiB a device, of {limit:.1f}", xlim=(0, 1.04 * end))
    labels = [f"{name}: {num_bytes[name]:.0f} B" for name in names]
    panels[0, 0].set_yticks(range(len(names)), labels)
    panels[0, 0].invert_yaxis()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    jax.config.update("jax_platforms", "cpu")  # to compile on, whatever for
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--target", nargs="+", choices=TARGETS, default=list(TARGETS), help="what to train on what")
    add(
        "--optimizer",
        nargs="+",
        choices=optimizers(),
        default=list(optimizers()),
        help="those to compare",
    )
    add("--picture", type=Path, help="where to draw it")
    arguments = common.parse(parser, argv)
    common.command_line.check_writable(parser, arguments, "picture")
    return arguments


def main(argv: list[str] | None = None) -> str:
    arguments = parse_arguments(argv)
    found = common.Records(arguments.json, ("target", "optimizer"))
    records, text = [], []
    for target in arguments.target:
        of_target = [
            found.get((target, optimizer), functools.partial(measure, target, optimizer))
            for optimizer in tqdm(arguments.optimizer, desc=target, leave=False)
        ]
        text += [f"{target}; {of_target[0]['versions']}", table(of_target)]
        records += of_target
    if arguments.picture:
        draw(records, arguments.picture)
    print("\n\n".join(text))
    return "\n\n".join(text)


if __name__ == "__main__":
    common.command_line.run(main)
