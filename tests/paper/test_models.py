"""Sizes and shapes of the networks, and what bfloat16 changes in them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import PREACT_RESNETS, RESNETS


def traced(make: Callable[[], Any], size: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of params, and the shapes of the logits and of the last block's output."""

    def forward(x: jax.Array) -> tuple[Any, Any, Any]:
        model = make()
        model.blocks = nnx.Sequential(*model.blocks.layers, Kept())
        logits = model(x)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), logits, model.blocks.layers[-1].kept

    params, logits, body = jax.eval_shape(forward, jnp.zeros((2, size, size, 3)))
    return sum(leaf.size for leaf in jax.tree.leaves(params)), logits.shape, body.shape


class Kept(nnx.Module):
    """Keeps its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.kept = nnx.data(x) if hasattr(nnx, "data") else x
        return x


@pytest.mark.parametrize(
    ("name", "millions", "width", "size"),
    [
        ("small", 0.08, 64, 4),
        ("resnet18", 11.17, 512, 4),  # as usually quoted
        pytest.param("resnet50", 23.51, 2048, 4, marks=pytest.mark.slow),
    ],
)
def test_preact_resnets(name: str, millions: float, width: int, size: int) -> None:
    found = traced(lambda: PREACT_RESNETS[name](rngs=nnx.Rngs(0)), 32)
    assert round(found[0] / 1e6, 2) == millions
    assert found[1:] == ((2, 10), (2, size, size, width))


@pytest.mark.slow
def test_resnet50() -> None:
    found = traced(lambda: RESNETS["resnet50"](num_classes=1_000, rngs=nnx.Rngs(0)), 224)
    assert found == (25_557_032, (2, 1_000), (2, 7, 7, 2_048))  # torchvision's


@pytest.mark.slow
@pytest.mark.usefixtures("_small_networks")
def test_bfloat16() -> None:
    def forward(x: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
        model = PREACT_RESNETS["small"](dtype=dtype, rngs=nnx.Rngs(0))
        return model(x), [nnx.to_pure_dict(nnx.state(model, k)) for k in (nnx.Param, nnx.BatchStat)]

    x = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype(np.float32)
    text = str(jax.make_jaxpr(partial(forward, dtype=jnp.bfloat16))(x))
    convolutions = [line for line in text.splitlines() if "conv_general_dilated" in line]
    assert convolutions
    assert all(":bf16[" in line for line in convolutions)
    assert all(":f32[" in line for line in text.splitlines() if " rsqrt " in line)
    jitted = jax.jit(forward, static_argnames="dtype")
    (logits, kept), (wide, _) = (jitted(x, dtype) for dtype in (jnp.bfloat16, jnp.float32))
    chex.assert_trees_all_close(logits, wide, atol=0.1)
    assert (logits != wide).any()
    assert {leaf.dtype.name for leaf in jax.tree.leaves((logits, kept))} == {"float32"}
