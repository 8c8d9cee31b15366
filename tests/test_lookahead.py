"""`spa_from_sgdm` under schedules, injected numbers and extreme values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import apply, lenient, slow, table, x64

from spa_optax import spa, spa_from_sgdm


def test_look_ahead_in_the_dtype_of_the_count() -> None:
    # Under x64 an int64 count would have schedules computed in float64 ahead and float32 now, off
    # by 3e-8, and the iterates by as much.
    schedule = lenient(optax.cosine_decay_schedule(0.3, 200))
    with x64():
        seen = []

        def spy(count: Any) -> Any:
            seen.append(count.dtype)
            return schedule(count)

        grads = [jnp.array([1.0, -2.0])] * 50
        x, _ = apply(spa_from_sgdm(spy, 0.9), jnp.zeros(2), grads)
        reference, _ = apply(optax.sgd(schedule, 0.9), jnp.zeros(2), grads)
        assert set(seen) == {jnp.dtype(jnp.int32)}
        np.testing.assert_allclose(x, reference, rtol=1e-14)


def test_counts_saturate_and_the_horizon_with_them() -> None:
    last = jnp.array(2**31 - 1, jnp.int32)
    params = jnp.ones(2)
    tx = spa_from_sgdm(lambda k: jnp.where(k < 0, jnp.nan, 0.1), 0.9)  # NaN if a count wraps round
    state = tx.init(params)
    _, state = tx.update(params, state, params)
    for count in (last - 50, last):
        updates, after = tx.update(params, state._replace(count=count), params)
        assert np.isfinite(updates).all()
        assert int(after.count) == min(int(count) + 1, 2**31 - 1)
        np.testing.assert_allclose([after.eta, after.c], [1.0, 0.1], rtol=1e-6)


def test_alpha_of_0_gives_no_nan() -> None:
    params, grads = jnp.ones(3), [jnp.ones(3)] * 4
    for tx in (
        spa(0.0, 0.1),
        spa(0.0, 0.0),
        spa(0.0, 1.0),
        spa_from_sgdm(0.0, 0.9),
        spa_from_sgdm(0.0, 0.0),
        spa_from_sgdm(0.0, 0.0, True),
        spa_from_sgdm(lambda _: 0.0, 0.9),
        spa_from_sgdm(lambda _: 0.0, lambda _: 0.0, True),
        optax.inject_hyperparams(spa_from_sgdm)(0.0, 0.9),
        optax.inject_hyperparams(spa_from_sgdm)(0.0, 0.0),
    ):
        x, state = apply(tx, params, grads)
        np.testing.assert_array_equal(x, params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_nan_of_the_present_rate_is_not_hidden() -> None:
    x, _ = apply(spa_from_sgdm(lambda _: jnp.nan, 0.9), jnp.ones(3), [jnp.ones(3)])
    assert np.isnan(x).all()


@pytest.mark.parametrize("nesterov", [slow(False), True], ids=["heavy ball", "nesterov"])
def test_gradients_through_the_learning_rate(nesterov: bool) -> None:
    """Meta-learning differentiates through rates: as through `optax.sgd`, both modes."""

    def loss(rates: Any, make: Any) -> Any:
        x = jnp.array([1.0, 2.0])
        state = make(rates[0]).init(x)
        for rate in rates:
            updates, state = make(rate).update(x * jnp.array([1.0, 3.0]), state, x)
            x = optax.apply_updates(x, updates)
        return jnp.sum(x**2)

    with x64():
        rates = jnp.full(4, 0.1)
        sgd = lambda rate: optax.sgd(rate, 0.9, nesterov)
        expected = jax.grad(loss)(rates, sgd)
        for make in (
            lambda rate: spa_from_sgdm(rate, 0.9, nesterov),
            lambda rate: spa_from_sgdm(rate, jnp.array(0.9), nesterov),
        ):
            both = lambda rates, make=make: (
                jax.grad(loss)(rates, make),
                jax.jacfwd(loss)(rates, make),
            )
            for derivative in jax.jit(both)(rates):
                np.testing.assert_allclose(derivative, expected, rtol=1e-6)


def test_setting_the_count_back_keeps_momentum() -> None:
    # A schedule is started again like this, and `optax.sgd` keeps its trace.
    schedule = lenient(optax.cosine_decay_schedule(0.1, 10))
    for make in (lambda f: f(schedule, 0.9), lambda f: optax.chain(optax.identity(), f(0.1, 0.9))):
        results = []
        for factory in (optax.sgd, spa_from_sgdm):
            tx = make(factory)
            x, state = apply(tx, jnp.ones(3), [jnp.ones(3)] * 8)
            if optax.tree.get(state, "count") is not None:
                state = optax.tree.set(state, count=jnp.zeros([], jnp.int32))
            for _ in range(3):
                updates, state = tx.update(jnp.ones(3), state, x)
                x = optax.apply_updates(x, updates)
            results.append(x)
        np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


def test_negative_and_tiny_rates() -> None:
    """Schedules may return them, and `optax.sgd` makes the best of it."""
    grad, ones, k = jnp.array([1.0, -2.0]), jnp.ones(2), np.arange(300)
    rates = jnp.array(
        [
            np.full(300, -1.0),
            np.where(k < 2, 0.1, -0.1),
            np.where(k < 3, 1e-38, 1e-3),
            np.where(k % 2 == 0, 1e-20, 1e-35),
        ],
        jnp.float32,
    )

    def run(tx: Any) -> Any:
        params, state = ones, tx.init(ones)
        for _ in range(6):
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    for beta in (0.0, 0.9):
        for nesterov in (False, True):
            for_all = lambda make: jax.jit(jax.vmap(lambda rates: run(make(table(rates)))))(rates)
            x, state = for_all(lambda r, b=beta, n=nesterov: spa_from_sgdm(r, b, n))
            reference, _ = for_all(lambda r, b=beta, n=nesterov: optax.sgd(r, b, n))
            np.testing.assert_allclose(x, reference, rtol=1e-5)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_w_of_float64_that_float32_cannot_hold() -> None:
    # After a long way of β near 0 w is positive in float64, and 0 in the state.
    with x64():
        beta = lambda k: jnp.where(k < 40, 0.05, 0.9)
        alpha = lambda k: jnp.where(k < 40, 0.0, 0.1)
        grads = [jnp.array([1.0, -2.0])] * 60
        x, _ = apply(spa_from_sgdm(alpha, beta), jnp.ones(2), grads)
        reference, _ = apply(optax.inject_hyperparams(optax.sgd)(alpha, beta), jnp.ones(2), grads)
        np.testing.assert_allclose(x, reference, rtol=1e-13)


def test_an_injected_rate_that_falls_and_rises_magnifies_no_rounding() -> None:
    # In float32 w stays where it was when the rate was high; else 1e4 × 6e-8 would be lost.
    rates = jnp.array([0.1, 0.1, 1e-5, 1e-5, 0.1, 0.1])
    alpha = lambda k: rates[k]
    grads = [jnp.linspace(0.5, 1.5, 50)] * 6
    x_0 = jnp.linspace(1.0, 2.0, 50)
    x, _ = apply(optax.inject_hyperparams(spa_from_sgdm)(alpha, 0.9), x_0, grads)
    reference, _ = apply(optax.inject_hyperparams(optax.sgd)(alpha, 0.9), x_0, grads)
    np.testing.assert_allclose(x, reference, atol=1e-6)


def test_an_injected_rate_that_falls_leaves_the_master_copy_of_16_bits_alone() -> None:
    # With bfloat16 params w follows the rate down: z must still add up steps of 1e-5.
    rates = lambda k: jnp.where(k < 10, 0.1, 1e-3)
    params, state = jnp.ones(4, jnp.bfloat16), None
    tx = optax.inject_hyperparams(spa_from_sgdm)(rates, 0.9)
    state = tx.init(params)

    def body(carry: Any, k: Any) -> Any:
        params, state = carry
        g = jnp.where(k < 10, 0.0, 1e-2) * jnp.ones(4)
        updates, state = tx.update(g.astype(jnp.bfloat16), state, params)
        return (optax.apply_updates(params, updates), state), None

    with jax.numpy_dtype_promotion("standard"):
        (params, _), _ = jax.lax.scan(body, (params, state), jnp.arange(2_010))
    # 2,000 steps of 1e-3 · 1e-2 / (1 − 0.9): 0.2 in all, but for half an ulp over c.
    np.testing.assert_allclose(params.astype(float), 0.8, atol=2.0**-8 / (2 * 0.1) + 2.0**-8)
