"""One step of training: BatchNorm by groups, and images that do not count."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from flax import nnx
from helpers import x64
from models import convolution
from paper_helpers import imagenet_config


class Network(nnx.Module):
    """One convolution, BatchNorm and a linear layer."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.stem = convolution(3, 4, 3, 1, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(4, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.stem(x))).mean((1, 2)))


def make_steps(group: int | None, dtype: Any = jnp.float32) -> Any:
    model, tx = lambda key: Network(dtype, nnx.Rngs(key)), optax.identity()  # the gradient itself
    return training.make_steps(imagenet_config(), model, tx, group)


def test_batch_norm_by_groups() -> None:
    """Each group as if it were alone; statistics are the mean of theirs.

    In float64, where rounding puts no activation on the other side of 0.
    """
    with x64():
        x = np.random.default_rng(0).normal(size=(8, 6, 6, 3))
        x *= np.arange(1.0, 9)[:, None, None, None]
        labels = np.arange(8) % 3
        state = jax.jit(make_steps(None).init)(0)
        kept = {name: getattr(state, name) for name in ("params", "batch_stats")}
        state = state._replace(**optax.tree.cast(kept, jnp.float64))

        def update(group: int | None, part: slice) -> Any:
            return jax.jit(make_steps(group, jnp.float64).update)(state, x[part], labels[part])

        whole, whole_metrics = update(None, slice(None))
        as_one, _ = update(8, slice(None))
        grouped, metrics = update(4, slice(None))
        halves = [update(None, part) for part in (slice(4), slice(4, 8))]
        close = functools.partial(chex.assert_trees_all_close, rtol=1e-12, atol=1e-13)
        close(as_one.params, whole.params)
        mean = lambda *values: sum(values) / 2
        for name in kept:
            expected = jax.tree.map(mean, *(getattr(half, name) for half, _ in halves))
            close(getattr(grouped, name), expected)
        close(metrics["loss"], mean(*(m["loss"] for _, m in halves)))
        assert abs(metrics["loss"] - whole_metrics["loss"]) > 1e-4
