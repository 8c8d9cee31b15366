"""Sharding, collectives and memory of a whole training step, by benchmarks/memory.py."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import compiled
import jax
import jax.numpy as jnp
import memory
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_compiled import for_tpus

from spa_optax import spa_adamw

pytestmark = pytest.mark.usefixtures("standard_promotion")

TINY = memory.Model(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, head=16)


def size(model: memory.Model) -> int:
    is_shape = lambda node: isinstance(node, tuple)
    return sum(map(math.prod, jax.tree.leaves(memory.shapes(model), is_leaf=is_shape)))


SIZE = size(TINY)
ADAMW = "AdamW, bfloat16, float32 master copy"
OURS = [name for name in memory.optimizers() if name.startswith(("spa_adamw", "gpa_adamw"))]


@pytest.mark.parametrize("name", OURS)
def test_init_leaves_nothing_large_whole(name: str) -> None:
    """Everything that is shaped like a parameter is split like it."""
    tx, dtype = memory.optimizers()[name]
    params = memory.split_params(TINY, dtype, jax.devices())
    state, whole = memory.split_state(tx, TINY, params)
    assert whole < 200  # scalars, and placeholders of a factored ν
    of_shape = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(params)}
    split = [leaf for leaf in jax.tree.leaves(state) if leaf.shape in of_shape]
    assert len(split) >= len(jax.tree.leaves(params))
    for leaf in split:
        assert leaf.sharding.is_equivalent_to(of_shape[leaf.shape], leaf.ndim)


def test_init_of_adamw_leaves_both_moments_whole() -> None:
    """The positive control."""
    params = memory.split_params(TINY, jnp.float32, jax.devices())
    _, whole = memory.split_state(optax.adamw(1e-3), TINY, params)
    assert whole >= 8 * SIZE


def test_the_decoder_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text by heart, on eight devices, from a loss of log(256), which chunks do not change."""
    tx = spa_adamw(1e-2, rounding_key=jax.random.key(0))
    shapes = memory.split_params(TINY, jnp.bfloat16, jax.devices())
    state_shapes, _ = memory.split_state(tx, TINY, shapes)
    start = lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
    tokens = jnp.arange(8 * 16).reshape(8, 16) * 37 % 256

    monkeypatch.setattr(memory, "CHUNK", 4)
    step = memory.compile_step(tx, TINY, shapes, state_shapes, length=16).compile()
    values = jax.tree.map(start, shapes)
    place = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, like))
    params, state = place(values, shapes), place(tx.init(values), state_shapes)
    curve = []
    for _ in range(20):
        params, state, loss = step(params, state, tokens)
        curve.append(float(loss))
    assert curve[0] == pytest.approx(math.log(256), rel=0.02)
    assert curve[-1] < 0.8 * math.log(256)

    monkeypatch.setattr(memory, "CHUNK", 16)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), "devices"), PartitionSpec())
    at_once = jax.jit(memory.loss, static_argnums=(2, 3))(values, tokens, TINY, sharding)
    assert curve[0] == pytest.approx(float(at_once), rel=1e-3)


@functools.cache
def collectives_on_v5e(name: str) -> dict[str, int]:
    tx, dtype = memory.optimizers()[name]
    params = memory.split_params(TINY, dtype, compiled.devices_of("v5e"))
    state, whole = memory.split_state(tx, TINY, params)
    assert (whole < 200) == (name in OURS)
    step = memory.compile_step(tx, TINY, params, state, length=128)
    return memory.collectives(step.compile().as_text())


@for_tpus
@pytest.mark.parametrize("name", ["spa_adamw, bfloat16", "gpa_adamw, bfloat16 z"])
def test_no_collective_but_the_models(name: str) -> None:
    found = collectives_on_v5e(name)
    assert found == collectives_on_v5e(ADAMW)
    assert found["all-gather"] > 0


# ------------------------------------------------------------------------------- table and picture


def record(target: str, optimizer: str, **others: Any) -> dict[str, Any]:
    found = {"bytes": 10.0, "whole": 0.5, "refused": False, "GiB": 12.345, "seconds": 61.2}
    found["versions"] = "jax 1.2.3"
    found["collectives"] = {"all-gather": 14, "all-reduce": 4}
    return {"target": target, "optimizer": optimizer} | found | others


def test_table_and_picture_from_records(tmp_path: Path) -> None:
    """Nothing that was compiled is compiled again."""
    first, second = list(memory.TARGETS)[:2]
    names = ["AdamW, float32", "spa_adamw, bfloat16"]
    records = [
        record(first, names[0], refused=True, GiB=15.77, collectives={}),
        record(first, names[1]),
        record(second, names[0], refused=True, GiB=None, collectives={}),
        record(second, names[1], GiB=96.0),  # not refused, but too large
    ]
    out, picture = tmp_path / "out", tmp_path / "picture.png"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--target", first, second, "--optimizer", *names]
    text = memory.main([*arguments, "--json", str(out), "--picture", str(picture)])
    assert f"{first}; jax 1.2.3" in text
    assert "| AdamW, float32 | 10.0 | 15.77 | out of memory | 0.50 |  | 61 |" in text
    row = "| spa_adamw, bfloat16 | 10.0 | 12.35 |  | 0.50 | 14 all-gather, 4 all-reduce | 61 |"
    assert row in text
    assert "| AdamW, float32 | 10.0 |  | out of memory |" in text
    assert "| spa_adamw, bfloat16 | 10.0 | 96.00 | out of memory |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("the total memory required for HLO temporaries (129.83G) exceeds available HBM", 129.83),
        ("Ran out of memory in memory space hbm. Used 15.77G of 15.75G hbm.", 15.77),
        ("Ran out of memory", None),
    ],
)
def test_what_xla_says_where_it_refuses(message: str, size: float | None) -> None:
    assert memory.gigabytes(message) == size


def test_collectives_are_counted_once() -> None:
    """XLA copies one into the fusions that it overlaps with."""
    lines = [
        "  %a.1 = bf16[8,64]{1,0} all-gather(%x), channel_id=3, dimensions={0}",
        "  %a.2 = bf16[8,64]{1,0} all-gather(%y), channel_id=3, dimensions={0}",
        "  %a.3 = (bf16[64]{0}, bf16[64]{0}) all-gather-start(%z), channel_id=4, dimensions={0}",
        "  %r = f32[] all-reduce(%l), channel_id=5, to_apply=%add",
    ]
    assert memory.collectives("\n".join(lines)) == {"all-gather": 2, "all-reduce": 1}


def test_sizes_are_those_of_llama_3() -> None:
    sizes = {name: size(model) for name, model in memory.MODELS.items()}
    assert sizes == {"8B": 8_030_261_248, "70B": 70_553_706_496}  # as published
