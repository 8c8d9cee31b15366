"""The memory that training takes with each optimizer, by XLA, for decoders as large as
Llama 3.

    pip install libtpu        # or 'jax[cuda12]', some 5 GB, for NVIDIA cards
    python benchmarks/memory.py --target "8B on v5e-8" --json OUT
    python benchmarks/memory.py --largest "RTX 4090" H100 --json OUT

XLA's compilers run without the hardware. The program is a whole training step, with
params, gradients and state split over all devices (FSDP). results/memory.md says more,
and what the columns are. The decoder, and the update in the backward pass, are those of
`examples/one_card.py`.

--largest is the largest model that each optimizer trains on one card. The need for an
H100 stands for that of all cards, except within 5 % of a limit. With --json a program
is not compiled again.
"""

import functools
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import common
import compiled
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from low_precision import BF16, F32, with_master
from tqdm import tqdm

from spa_optax import float8_momentum, spa_adamw, stochastic_rounding

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import one_card
from in_backward import Trainer, make_trainer
from one_card import Model, shapes

LENGTH = 2_048  # tokens of a sequence, of which every device has one
MODELS = {name: model for name, model in one_card.MODELS.items() if name != "tiny"}
MODELS["70B"] = Model(80, 8_192, 64, 8, 28_672)
SIZES = ["8B", "3B", "1B"]  # for one card, the largest first
IN_BACKWARD = ", updated in the backward pass"


def narrow(w: jax.Array) -> jax.Array:
    """In bfloat16, one layer at a time: XLA for TPUs casts all layers at once in a mere
    cast.
    """
    return w if w.dtype == BF16 else jax.lax.reduce_precision(w, 8, 7).astype(BF16)


def decoder(model: Model, mesh: Mesh) -> tuple[Any, Any, Any]:
    """The example's functions, in bfloat16, with the sequences split over the
    devices.
    """

    def place(x: jax.Array, *axes: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def layer(x: jax.Array, w: Any) -> jax.Array:
        x = one_card.layer(place(x, "devices"), jax.tree.map(narrow, w), model.head)
        return place(x, "devices")

    def loss(x: jax.Array, top: Any, labels: jax.Array) -> jax.Array:
        return one_card.cross_entropy(x, jax.tree.map(narrow, top), labels, place)

    return lambda embedding, tokens: narrow(embedding)[tokens], layer, loss


def ordinary(tx: optax.GradientTransformation, model: Model, mesh: Mesh) -> Trainer:
    """All gradients first, then the update."""
    embed, layer, loss_of = decoder(model, mesh)

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = embed(params["embedding"], tokens)
        body = jax.checkpoint(lambda x, w: (layer(x, w), None))
        x, _ = jax.lax.scan(body, x, params["layers"])
        return loss_of(x, params["top"], labels)

    def step(params: Any, state: Any, *batch: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return *common.update(tx, grads, params, state), value

    return Trainer(tx.init, step)


def muon_dimensions(params: Any) -> Any:
    """Matrices of layers, stacked or not, are Muon's; vectors, embedding and head are
    AdamW's.
    """

    def leaf(path: Any, leaf: Any) -> Any:
        name = path[-1].key if path else ""
        is_matrix = name in shapes(MODELS["8B"])["layers"] and "norm" not in name
        return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(leaf, params)


def optimizers(place: Any = 0) -> dict[str, Any]:
    """Each with the dtype of its params; for the update in the backward pass, of a
    place.
    """
    key = jax.random.fold_in(jax.random.key(0), place)

    def in_16_bits(tx: optax.GradientTransformation) -> tuple[Any, Any]:
        return stochastic_rounding(tx, key), BF16

    def spa(**options: Any) -> tuple[Any, Any]:
        return spa_adamw(1e-3, 0.05, 0.9, rounding_key=key, **options), BF16

    factored = functools.partial(spa, second_moment="factored")
    adamw = optax.adamw(1e-3)
    result = {
        "AdamW": (adamw, F32),
        "AdamW, m in bfloat16": (optax.adamw(1e-3, mu_dtype=BF16), F32),
        "AdamW, float32 master copy": (with_master(adamw), BF16),
        "Adafactor": (optax.adafactor(1e-3), F32),
        "Adafactor, rounded to nearest": (optax.adafactor(1e-3), BF16),
        "NAdamW, m in bfloat16, rounded at random": in_16_bits(
            optax.adamw(1e-3, nesterov=True, mu_dtype=BF16)
        ),
        "Adafactor, rounded at random": in_16_bits(
            optax.adafactor(1e-3, multiply_by_parameter_scale=False)
        ),
    }
    if hasattr(optax.contrib, "MuonDimensionNumbers"):  # optax 0.2.6 or newer
        options: Any = {
            "mu_dtype": BF16,
            "muon_weight_dimension_numbers": muon_dimensions,
        }
        muon = float8_momentum(optax.contrib.muon(1e-3, **options), key)
        result["Muon, m in float8"] = in_16_bits(muon)
    return result | {
        "spa_adamw, z in float32, ν whole": spa(),
        "spa_adamw, z in bfloat16, ν whole": spa(state_dtype=BF16),
        "spa_adamw, z in bfloat16": factored(state_dtype=BF16),
        "spa_adamw, z in float8": factored(state_dtype=jnp.float8_e4m3fn),
    }


BY_CARD = [
    "AdamW",
    "AdamW, m in bfloat16",
    "Adafactor",
    "NAdamW, m in bfloat16, rounded at random",
    "spa_adamw, z in bfloat16",
    "spa_adamw, z in float8",
    "Adafactor, rounded at random",
    "Muon, m in float8",
]


def both_ways(names: Iterable[str]) -> list[str]:
    """Each optimizer with an ordinary step, and updated in the backward pass."""
    return [name + how for name in names for how in ("", IN_BACKWARD)]


class Target(NamedTuple):
    """What to train, on what."""

    model: str
    device: str
    topology: str | None  # None: one device
    limit: float  # GiB of a device, as XLA has it


V5E, V5P = 15.75, 95.73
CARDS = {"L4": "l4", "RTX 4090": "rtx4090", "RTX 5090": "rtx5090"}
CARDS |= {"A100 of 40 GB": "a100-40", "L40S": "l40s", "H100": "h100"}
# XLA for NVIDIA cards refuses nothing. Of what CUDA leaves, JAX takes 95 % if told to.
TARGETS = {
    f"{model} on one {name}": Target(
        model, card, None, 0.95 * compiled.CARDS[card].memory / 2**30
    )
    for model in SIZES
    for name, card in CARDS.items()
}
BY_OPTIMIZER = {
    "8B on v5e-8": Target("8B", "v5e", "v5e:2x4", V5E),
    "8B on one v5p chip": Target("8B", "v5p", None, V5P),
    "8B on one H100": TARGETS["8B on one H100"],
    "70B on v5p-64": Target(
        "70B", "v5p", "v5p:2x4x4", V5P
    ),  # of 64 cores, which are 32 devices
    "70B on v5e-256": Target("70B", "v5e", "v5e:16x16", V5E),
}
TARGETS |= BY_OPTIMIZER


def split_params(model: Model, dtype: Any, devices: list[Any]) -> Any:
    """Split along the second axis: the first is often that of the layers. A vector has
    but one.
    """
    mesh = Mesh(np.array(devices), "devices")

    def leaf(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        axis = min(1, len(shape) - 1)
        spec = PartitionSpec(*[None] * axis, "devices")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(
        leaf, shapes(model), is_leaf=lambda node: isinstance(node, tuple)
    )


@mock.patch.dict(os.environ, compiled.TPU_ENVIRONMENT)
def split_state(tx: Any, model: Model, params: Any) -> tuple[Any, int]:
    """The state, split as `jax.jit(tx.init)` does, and the bytes that it leaves whole.

    Of these, arrays that are shaped like a parameter are then split like it. `tx` may
    be a trainer.
    """
    mesh, dtype = params["embedding"].sharding.mesh, params["embedding"].dtype
    # Of one layer: with all, `init` itself may run out of memory, where it leaves the
    # state whole.
    small = split_params(
        model._replace(layers=1, vocabulary=1_024), dtype, mesh.devices
    )
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
    trainer: Trainer, params: Any, state: Any, length: int = LENGTH
) -> Any:
    """A step of training, with a sequence for each device."""
    mesh = params["embedding"].sharding.mesh
    batch = NamedSharding(mesh, PartitionSpec("devices"))
    tokens = jax.ShapeDtypeStruct((mesh.size, length), jnp.int32, sharding=batch)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        return trainer.step(params, state, tokens, jnp.roll(tokens, -1, 1))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    out = (*shardings, NamedSharding(mesh, PartitionSpec()))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(
        params, state, tokens
    )


def measure(target_name: str, optimizer: str) -> dict[str, Any]:
    target, name = TARGETS[target_name], optimizer.removesuffix(IN_BACKWARD)
    tx, dtype = optimizers()[name]
    devices = compiled.devices_of(target.device, topology=target.topology)
    model = MODELS[target.model]
    params = split_params(model, dtype, devices if target.topology else devices[:1])
    mesh = params["embedding"].sharding.mesh
    trainer = ordinary(tx, model, mesh)
    if name != optimizer:

        def make_tx(place: Any) -> optax.GradientTransformation:
            return optimizers(place)[name][0]

        trainer = make_trainer(model.layers, *decoder(model, mesh), make_tx)
    state, _ = split_state(trainer, model, params)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    num_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))
    )
    result = {
        "bytes": num_bytes / size,
        "versions": compiled.versions(target.device),
        "refused": True,
        "GiB": None,
    }
    if num_bytes / mesh.size > target.limit * 2**30:  # needs no compiler
        return result
    try:
        program = compile_step(trainer, params, state).compile()
        memory = program.memory_analysis()
        new = memory.output_size_in_bytes - memory.alias_size_in_bytes
        total = memory.argument_size_in_bytes + new + memory.temp_size_in_bytes
        result |= {"refused": False, "GiB": total / 2**30}
    except jax.errors.JaxRuntimeError as error:
        if "Ran out of memory" not in str(error):
            raise
        result["GiB"] = gigabytes(str(error))
    return result


def record_of(found: common.Records, target: str, optimizer: str) -> dict[str, Any]:
    return found.get((target, optimizer), functools.partial(measure, target, optimizer))


def gigabytes(message: str) -> float | None:
    """What XLA says that a program needs, where it refuses it."""
    found = re.search(r"\(([\d.]+)G\) exceeds available|Used ([\d.]+)G of", message)
    return float(found[1] or found[2]) if found else None


def table(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        size, limit = record["GiB"], TARGETS[record["target"]].limit
        fits = not record["refused"] and size <= limit
        row = [
            record["optimizer"],
            f"{record['bytes']:.1f}",
            "" if size is None else f"{size:.2f}",
            "yes" if fits else "no",
        ]
        rows.append(row)
    header = ["optimizer", "bytes/param", "GiB/device", "fits"]
    return common.markdown(header, rows)


def largest_model(
    optimizer: str, card: str, found: common.Records
) -> tuple[str, float] | None:
    """The largest model that fits a card, and the GiB of its step.

    The need is nearly the same on all cards: it is that of an H100, unless it is close.
    """
    limit = TARGETS[f"8B on one {card}"].limit
    for model in SIZES:
        size = math.inf
        for name in ("H100", card):
            record = record_of(found, f"{model} on one {name}", optimizer)
            size = math.inf if record["refused"] else record["GiB"]
            if abs(size / limit - 1) > 0.05:
                break
        if size <= limit:
            return model, size
    return None


def largest(names: list[str], optimizers: list[str], found: common.Records) -> str:
    """The largest model on each card, with the GiB that its step takes."""
    rows = []
    for optimizer in optimizers:
        num_bytes = record_of(found, "8B on one H100", optimizer)["bytes"]
        row = [optimizer, f"{num_bytes:.1f}"]
        for name in names:
            fits = largest_model(optimizer, name, found)
            row.append("–" if fits is None else f"{fits[0]}, {fits[1]:.1f}")
        rows.append(row)
    limits = {name: TARGETS[f"8B on one {name}"].limit for name in names}
    columns = [f"{name}, {limit:.1f}" for name, limit in limits.items()]
    return common.markdown(["optimizer", "bytes/param", *columns], rows)


def main(argv: list[str] | None = None) -> str:
    jax.config.update("jax_platforms", "cpu")  # to compile on, whatever for
    parser = common.parser(__doc__)
    add = functools.partial(parser.add_argument, nargs="+")
    add(
        "--target",
        choices=TARGETS,
        metavar="NAME",
        help="by default those of the tables",
    )
    add(
        "--optimizer",
        choices=both_ways(optimizers()),
        metavar="NAME",
        help=f"by default those of the tables; any of {'; '.join(optimizers())}, "
        f'or with "{IN_BACKWARD}" behind it',
    )
    add("--largest", choices=CARDS, metavar="CARD", help="the table of these")
    arguments = common.parse(parser, argv)
    found, text = common.Records(arguments.json, ("target", "optimizer")), []
    if arguments.largest:
        names = arguments.optimizer or both_ways(BY_CARD)
        text = [largest(arguments.largest, names, found)]
    for target in [] if arguments.largest else arguments.target or BY_OPTIMIZER:
        names = tqdm(arguments.optimizer or optimizers(), desc=target, leave=False)
        records = [record_of(found, target, name) for name in names]
        text += [f"{target}; {records[0]['versions']}", table(records)]
    print("\n\n".join(text))
    return "\n\n".join(text)


if __name__ == "__main__":
    common.command_line.run(main)
