"""The paper's recursion."""

import jax.numpy as jnp
import numpy as np
import optax
from helpers import apply, table, x64

from spa_optax import spa, theory


def test_forward_recursion_gives_the_iterates_of_sgdm() -> None:
    """Theorem 1, while η is finite: from the default η_0, and from any other."""
    rng = np.random.default_rng(0)
    alphas = rng.uniform(0.05, 0.2, 12)
    grads = rng.normal(size=(12, 4))
    with x64():
        reference, _ = apply(
            optax.sgd(table(jnp.asarray(alphas)), 0.9), jnp.zeros(4), list(jnp.asarray(grads))
        )
        for eta0 in (None, 3.0, 0.7):
            eta, c = theory.forward_recursion(alphas, 0.9, eta0=eta0)
            # Past the first negative η the recursion goes on, and so may we.
            tx = spa(table(jnp.asarray(eta)), table(jnp.asarray(c)))
            x, _ = apply(tx, jnp.zeros(4), list(jnp.asarray(grads)))
            np.testing.assert_allclose(x, reference, rtol=1e-10)


def test_forward_recursion_multiplies_deviations() -> None:
    # By 1/β a step, which is why no schedule can be run this way: the figures of the design.
    warm_up = 0.1 * np.arange(101) / 100
    assert theory.forward_recursion(warm_up, 0.9)[0][100] < -1e3
    drop = np.where(np.arange(1020) < 20, 1.0, 0.1)
    assert theory.forward_recursion(drop, 0.9)[0][1019] > 1e45
    near, far = (theory.forward_recursion(np.full(50, 0.1), 0.9, eta0=e)[0] for e in (1.0, 1.1))
    np.testing.assert_allclose((far - near)[1:] / (far - near)[:-1], 1 / 0.9, rtol=1e-6)


def test_forward_recursion_on_arrays() -> None:
    eta, c = theory.forward_recursion([1, 1, 1], [0.9, 0.8, 0.0])
    np.testing.assert_allclose(eta, [10, 9 / 0.8, np.inf], rtol=1e-12)
    np.testing.assert_allclose(c, [0.1, 0.8 / 9, 0], rtol=1e-12)
    assert (eta.dtype, c.dtype) == (np.float64, np.float64)
    assert [a.shape for a in theory.forward_recursion([], 0.9)] == [(0,), (0,)]
