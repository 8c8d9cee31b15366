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
import one_card
import optax
import pytest
from jax.sharding import Mesh
from test_compiled import for_tpus

from spa_optax import spa_adamw

pytestmark = pytest.mark.usefixtures("standard_promotion")

TINY = memory.Model(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=256, head=16)


def size(model: memory.Model) -> int:
    is_shape = lambda node: isinstance(node, tuple)
    return sum(map(math.prod, jax.tree.leaves(memory.shapes(model), is_leaf=is_shape)))


SIZE = size(TINY)
ADAMW = "AdamW, bfloat16, float32 master copy"
OURS = [name for name in memory.optimizers() if name.startswith("spa_adamw")]


def mesh_of(params: Any) -> Mesh:
    return params["embedding"].sharding.mesh


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


def trainer(kind: str, params: Any, model: memory.Model = TINY) -> memory.Trainer:
    make_tx = lambda i: spa_adamw(1e-2, rounding_key=jax.random.fold_in(jax.random.key(0), i))
    if kind == "in the backward pass":
        return memory.in_backward(make_tx, model, mesh_of(params))
    return memory.ordinary(make_tx(0), model, mesh_of(params))


KINDS = ["ordinary", "in the backward pass"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_learns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text by heart, on eight devices, from a loss of log(256), which chunks do not change."""
    shapes = memory.split_params(TINY, jnp.bfloat16, jax.devices())
    made = trainer(kind, shapes)
    state_shapes, _ = memory.split_state(made, TINY, shapes)
    start = lambda x: 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
    tokens = jnp.arange(8 * 16).reshape(8, 16) * 37 % 256

    monkeypatch.setattr(one_card, "CHUNK", 4)
    step = memory.compile_step(made, shapes, state_shapes, length=16).compile()
    values = jax.tree.map(start, shapes)
    place = lambda tree, like: jax.device_put(tree, jax.tree.map(lambda leaf: leaf.sharding, like))
    params, state = place(values, shapes), place(made.init(values), state_shapes)
    curve = []
    for _ in range(20):
        params, state, loss = step(params, state, tokens)
        curve.append(float(loss))
    assert curve[0] == pytest.approx(math.log(256), rel=0.02)
    assert curve[-1] < 0.8 * math.log(256)

    monkeypatch.setattr(one_card, "CHUNK", 16)
    embed, layer, loss_of = memory.decoder(TINY, Mesh(np.array(jax.devices()[:1]), "devices"))
    x = embed(values["embedding"], tokens)
    for i in range(TINY.layers):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], values["layers"]))
    at_once = loss_of(x, values["top"], jnp.roll(tokens, -1, 1))
    assert curve[0] == pytest.approx(float(at_once), rel=1e-3)


@for_tpus
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_of_the_model_in_memory(kind: str) -> None:
    """With 20 layers more only their inputs take more; in an ordinary step gradients do."""

    def temporary(num_layers: int) -> tuple[int, int]:
        model = TINY._replace(layers=num_layers, width=1_024, hidden=4_096)
        params = memory.split_params(model, jnp.bfloat16, compiled.devices_of("v5e")[:1])
        made = trainer(kind, params, model)
        state, _ = memory.split_state(made, model, params)
        step = memory.compile_step(made, params, state, length=128).compile()
        return step.memory_analysis().temp_size_in_bytes, size(model)

    (few, small), (many, large) = temporary(20), temporary(40)
    gradients = 2 * (large - small)  # in bfloat16
    if kind == "in the backward pass":
        assert many - few <= 20 * 2 * 128 * 1_024 < gradients / 8
    else:
        assert gradients <= many - few < 1.5 * gradients


@pytest.mark.skipif(
    not hasattr(optax.contrib, "MuonDimensionNumbers"), reason="needs optax 0.2.6 or newer"
)
def test_muon_takes_stacked_layers_for_adams() -> None:
    """Three axes are not a matrix: the benchmark's Muon says which two are."""
    model = memory.MODELS["8B"]
    params = memory.split_params(model, jnp.float32, jax.devices()[:1])

    def num_bytes(tx: Any, params: Any) -> float:
        leaves = jax.tree.leaves((params, jax.eval_shape(tx.init, params)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / size(model)

    assert num_bytes(optax.contrib.muon(1e-3), params) == pytest.approx(11.48, abs=0.005)
    tx, dtype = memory.optimizers()["Muon, bfloat16"]
    params = memory.split_params(model, dtype, jax.devices()[:1])
    assert num_bytes(tx, params) == pytest.approx(4.52, abs=0.005)


@functools.cache
def collectives_on_v5e(name: str) -> dict[str, int]:
    tx, dtype = memory.optimizers()[name]
    params = memory.split_params(TINY, dtype, compiled.devices_of("v5e"))
    state, whole = memory.split_state(tx, TINY, params)
    assert (whole < 200) == (name in OURS)
    step = memory.compile_step(memory.ordinary(tx, TINY, mesh_of(params)), params, state, 128)
    return memory.collectives(step.compile().as_text())


@for_tpus
@pytest.mark.parametrize("name", ["spa_adamw, bfloat16", "spa_adamw, bfloat16 z"])
def test_no_collective_but_the_models(name: str) -> None:
    found = collectives_on_v5e(name)
    assert found == collectives_on_v5e(ADAMW)
    assert found["all-gather"] > 0


# ------------------------------------------------------------------------------- tables


def record(target: str, optimizer: str, **others: Any) -> dict[str, Any]:
    found = {"bytes": 10.0, "whole": 0.5, "refused": False, "GiB": 12.345, "seconds": 61.2}
    found["versions"] = "jax 1.2.3"
    found["collectives"] = {"all-gather": 14, "all-reduce": 4}
    return {"target": target, "optimizer": optimizer} | found | others


def test_table_from_records(tmp_path: Path) -> None:
    """Nothing that was compiled is compiled again."""
    first, second = list(memory.BY_OPTIMIZER)[:2]
    names = ["AdamW, float32", "spa_adamw, bfloat16"]
    records = [
        record(first, names[0], refused=True, GiB=15.77, collectives={}),
        record(first, names[1]),
        record(second, names[0], refused=True, GiB=None, collectives={}),
        record(second, names[1], GiB=96.0),  # not refused, but too large
    ]
    out = tmp_path / "out"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--target", first, second, "--optimizer", *names]
    text = memory.main([*arguments, "--json", str(out)])
    assert f"{first}; jax 1.2.3" in text
    assert "| AdamW, float32 | 10.0 | 15.77 | out of memory | 0.50 |  | 61 |" in text
    row = "| spa_adamw, bfloat16 | 10.0 | 12.35 |  | 0.50 | 14 all-gather, 4 all-reduce | 61 |"
    assert row in text
    assert "| AdamW, float32 | 10.0 |  | out of memory |" in text
    assert "| spa_adamw, bfloat16 | 10.0 | 96.00 | out of memory |" in text


def test_the_largest_model_on_each_card(tmp_path: Path) -> None:
    """An H100 stands for an L40S, unless it is close, and 3B is not tried where 8B fits."""
    eight, three, one = (f"{model} on one {{}}" for model in ("8B", "3B", "1B"))
    near, own = 0.97 * memory.DEVICES["L40S"].limit, 0.99 * memory.DEVICES["L40S"].limit
    records = []
    for name in memory.OF_LARGEST:
        for target in (eight, three, one):
            records.append(record(target.format("H100"), name, GiB=10.0))
        if name == "Lion, bfloat16":
            records[-3:] = [
                record(eight.format("H100"), name, refused=True, GiB=None),
                record(three.format("H100"), name, GiB=near),
                record(three.format("L40S"), name, GiB=own),
            ]
        if name == "Muon, bfloat16":
            records[-3:] = [record(m.format("H100"), name, GiB=99.0) for m in (eight, three, one)]
    out = tmp_path / "out"
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = memory.main(["--largest", "L40S", "H100", "--json", str(out)])
    assert "| optimizer | bytes/param | L40S, 42.2 | H100, 75.2 |" in text
    assert "| AdamW, float32 | 10.0 | 8B, 10.0 | 8B, 10.0 |" in text
    assert f"| Lion, bfloat16 | 10.0 | 3B, {own:.1f} | 3B, {near:.1f} |" in text
    assert "| Muon, bfloat16 | 10.0 | – | – |" in text
    assert "| spa_adamw, bfloat16 z, updated in the backward pass | 10.0 | 8B, 10.0 |" in text


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
    published = {"8B": 8_030_261_248, "70B": 70_553_706_496}
    assert sizes == {"1B": 1_104_218_112, "3B": 3_015_355_392} | published
