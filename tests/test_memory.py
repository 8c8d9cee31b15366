"""Sharding, collectives and memory of a whole training step (benchmarks/memory.py)."""

import functools
import math
import re
from collections import Counter
from typing import Any

import compiled
import in_backward
import jax
import jax.numpy as jnp
import memory
import optax
import pytest
from helpers import long
from test_compiled import for_tpus

from spa_optax import spa_adamw

pytestmark = pytest.mark.usefixtures("standard_promotion")

TINY = memory.Model(
    layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, head=16
)


def size(model: memory.Model) -> int:
    shapes = jax.tree.leaves(
        memory.shapes(model), is_leaf=lambda node: isinstance(node, tuple)
    )
    return sum(map(math.prod, shapes))


SIZE = size(TINY)
ADAMW = "AdamW, float32 master copy"
OURS = [name for name in memory.optimizers() if name.startswith("spa_adamw")]


def trainer(kind: str, params: Any, model: memory.Model = TINY) -> memory.Trainer:

    def make_tx(i: Any) -> optax.GradientTransformation:
        key = jax.random.fold_in(jax.random.key(0), i)
        return spa_adamw(1e-2, rounding_key=key)

    mesh = params["embedding"].sharding.mesh
    if kind == "in the backward pass":
        return in_backward.make_trainer(
            model.layers, *memory.decoder(model, mesh), make_tx
        )
    return memory.ordinary(make_tx(0), model, mesh)


@for_tpus
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["ordinary", "in the backward pass"])
def test_no_gradient_of_the_model_in_memory(kind: str) -> None:
    """20 layers more take memory for inputs, and in an ordinary step for gradients."""

    def temporary(num_layers: int) -> tuple[int, int]:
        model = TINY._replace(layers=num_layers, width=1_024, hidden=4_096)
        params = memory.split_params(
            model, jnp.bfloat16, compiled.devices_of("v5e")[:1]
        )
        made = trainer(kind, params, model)
        state, _ = memory.split_state(made, model, params)
        step = memory.compile_step(made, params, state, length=128).compile()
        return step.memory_analysis().temp_size_in_bytes, size(model)

    (few, small), (many, large) = temporary(20), temporary(40)
    gradients = 2 * (large - small)  # in bfloat16
    if kind == "in the backward pass":
        inputs = 20 * 2 * 128 * 1_024
        one_vector_a_layer = 20 * 4 * 1_024
        assert many - few <= inputs + one_vector_a_layer < gradients / 8
    else:
        assert gradients <= many - few < 1.5 * gradients


def collectives(text: str) -> dict[str, int]:
    """How many of each kind are in a program. XLA may copy one into many fusions."""
    found = re.findall(rf" {compiled.COLLECTIVE}\(.*?channel_id=(\d+)", text)
    return dict(sorted(Counter(kind for kind, _, _ in set(found)).items()))


@functools.cache
def collectives_on_v5e(name: str) -> dict[str, int]:
    tx, dtype = memory.optimizers()[name]
    params = memory.split_params(TINY, dtype, compiled.devices_of("v5e"))
    state, whole = memory.split_state(tx, TINY, params)
    assert (whole < 200) == (name in OURS)
    made = memory.ordinary(tx, TINY, params["embedding"].sharding.mesh)
    return collectives(
        memory.compile_step(made, params, state, 128).compile().as_text()
    )


@for_tpus
@pytest.mark.parametrize(
    "name",
    [long("spa_adamw, z in float32, ν whole"), "spa_adamw, z in bfloat16, ν whole"],
)
def test_no_collective_but_the_models(name: str) -> None:
    found = collectives_on_v5e(name)
    assert found == collectives_on_v5e(ADAMW)
    assert found["all-gather"] > 0


def test_sizes_are_those_of_llama_3() -> None:
    published = {"8B": 8_030_261_248, "70B": 70_553_706_496}
    assert {name: size(memory.MODELS[name]) for name in published} == published


def test_collectives_are_counted_once() -> None:
    """XLA copies one into the fusions that it overlaps with."""
    lines = [
        "  %a.1 = bf16[8,64]{1,0} all-gather(%x), channel_id=3, dimensions={0}",
        "  %a.2 = bf16[8,64]{1,0} all-gather(%y), channel_id=3, dimensions={0}",
        "  %a.3 = (bf16[64]{0}, bf16[64]{0}) all-gather-start(%z), "
        "channel_id=4, dimensions={0}",
        "  %r = f32[] all-reduce(%l), channel_id=5, to_apply=%add",
    ]
    assert collectives("\n".join(lines)) == {"all-gather": 2, "all-reduce": 1}
