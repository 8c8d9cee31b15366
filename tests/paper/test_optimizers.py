"""The schedules and the weight decay of the recipes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import CIFAR10, IMAGENET, make_optimizer
from paper_helpers import config, imagenet_config


def hyperparams(tx: Any, counts: list[int]) -> list[tuple[float, float]]:
    """The η and c that SPA uses at these counts."""
    params, found = jnp.ones(2), []
    for count in counts:
        state = optax.tree.set(tx.init(params), count=jnp.int32(count))
        _, state = jax.jit(tx.update)(params, state, params)
        found.append((float(optax.tree.get(state, "eta")), float(optax.tree.get(state, "c"))))
    return found


@pytest.mark.parametrize("epochs", [300, 30])
def test_recipe(epochs: int) -> None:
    steps, scale = 391, epochs / 300
    first, second, last = 150 * 391 * scale, 225 * 391 * scale, 300 * 391 * scale
    counts = [0, int(first) - 2, int(first), round(second), round(last) - 1]
    make = lambda name: make_optimizer(config(name, epochs=epochs), CIFAR10, steps)
    # (η, c); `averaging` at count k is c_{k+1}, so c has changed one count ahead of η.
    expected = {
        "spa-eta": [(1, 0.1), (1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.01, 0.1)],
        "spa-abrupt": [(1, 0.1), (1, 0.1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-eta": [(1, 0.1), (1, 1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-alpha": [(1, 0.1), (0.1, 1), (0.01, 1), (0.001, 1), (0.001, 1)],
        "tenth": [(1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.001, 0.1), (0.001, 0.1)],
    }
    for name, pairs in expected.items():
        np.testing.assert_allclose(hyperparams(make(name), counts), pairs, rtol=1e-5, err_msg=name)
    # 1.0005 a step at full length: a factor of 10 in 4,606 steps, or 11.8 epochs.
    halfway = round(first + 2303 * scale)
    found = hyperparams(make("spa-gradual"), [int(first) - 2, halfway, int(first + 4_700 * scale)])
    np.testing.assert_allclose(found[0], (1, 0.1), rtol=1e-5)
    np.testing.assert_allclose(found[1], (10**-0.5, 0.1 * 10**0.5), rtol=0.01)
    np.testing.assert_allclose(found[2], (0.1, 1), rtol=1e-5)

    # ImageNet's: 100 epochs, drops by 10 at 30, 60 and 90.
    tx = make_optimizer(imagenet_config(optimizer="spa-eta"), IMAGENET, 10)
    found = hyperparams(tx, [0, 299, 300, 600, 900])
    np.testing.assert_allclose([eta for eta, _ in found], [0.1, 0.1, 0.01, 1e-3, 1e-4], rtol=1e-5)


def test_weight_decay_is_a_gradient() -> None:
    """As in `torch.optim.SGD(weight_decay=...)`: g + 1e-4 x goes through the momentum."""
    params, grads = jnp.array([2.0]), jnp.array([0.5])
    tx = make_optimizer(config("sgdm", weight_decay=0.1), CIFAR10, 391)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 * 0.7], rtol=1e-6)
    updates, state = tx.update(grads, state, params)
    np.testing.assert_allclose(updates, [-0.1 * (0.9 * 0.7 + 0.7)], rtol=1e-6)
