"""Sizes and shapes of the networks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from models import PREACT_RESNETS, RESNETS


class Kept(nnx.Module):
    """Keeps its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.kept = nnx.data(x) if hasattr(nnx, "data") else x
        return x


@pytest.mark.parametrize(
    ("make", "num_classes", "size", "num_params", "last_block"),
    [
        # 11.17 and 23.51 million, as usually quoted; and torchvision's.
        (PREACT_RESNETS["resnet18"], 10, 32, 11_172_170, (4, 4, 512)),
        (PREACT_RESNETS["resnet50"], 10, 32, 23_513_162, (4, 4, 2_048)),
        (partial(RESNETS["resnet50"], num_classes=1_000), 1_000, 224, 25_557_032, (7, 7, 2_048)),
    ],
)
def test_sizes(make: Any, num_classes: int, size: int, num_params: int, last_block: Any) -> None:
    def forward(x: jax.Array) -> tuple[Any, Any, Any]:
        model = make(rngs=nnx.Rngs(0))
        model.blocks = nnx.Sequential(*model.blocks.layers, Kept())
        logits = model(x)
        return nnx.to_pure_dict(nnx.state(model, nnx.Param)), logits, model.blocks.layers[-1].kept

    params, logits, body = jax.eval_shape(forward, jnp.zeros((2, size, size, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_params
    assert (logits.shape, body.shape) == ((2, num_classes), (2, *last_block))
