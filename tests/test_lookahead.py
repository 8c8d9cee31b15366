"""`spa_from_sgdm` under schedules, injected numbers and extreme values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, long, run, sgdm, table, trained, x64

from spa_optax import spa, spa_from_sgdm
from spa_optax._sgdm import evaluate_sgdm, sgdm_coefficients

injected = optax.inject_hyperparams(spa_from_sgdm)


def test_look_ahead_in_the_dtype_of_the_count() -> None:
    # Under x64 an int64 count would have schedules computed in float64 ahead and
    # float32 now, off by 3e-8, and the iterates by as much.
    schedule, dtypes = lenient(optax.cosine_decay_schedule(0.3, 200)), set()

    def spy(count: jax.Array) -> jax.Array:
        dtypes.add(str(count.dtype))
        return schedule(count)

    with x64():
        grads = [jnp.array([1.0, -2.0])] * 50
        x, _ = run(spa_from_sgdm(spy, 0.9), jnp.zeros(2), grads)
        reference, _ = run(optax.sgd(schedule, 0.9), jnp.zeros(2), grads)
        np.testing.assert_allclose(x, reference, rtol=1e-14)
    assert dtypes == {"int32"}


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_alpha_of_0_gives_no_nan(beta: float, nesterov: bool) -> None:
    params = jnp.ones(3)
    for tx in (
        spa(0.0, 1 - beta),
        spa_from_sgdm(0.0, beta, nesterov),
        spa_from_sgdm(lambda _: 0.0, lambda _: beta, nesterov),
        injected(0.0, beta, nesterov=nesterov),
    ):
        with jax.debug_nans(True):
            x, state = run(tx, params, [params] * 4)
        np.testing.assert_array_equal(x, params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_without_momentum_c_is_a_half() -> None:
    _, state = run(spa_from_sgdm(0.1, 0.0), jnp.ones(3), [jnp.ones(3)] * 2)
    np.testing.assert_allclose(
        [state.eta, state.c, state.w], [0.2, 0.5, 0.1], rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"state_dtype": jnp.bfloat16}])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, lambda k: jnp.where(k < 90, 0.0, 0.5)])
def test_without_momentum_z_is_the_master_copy(
    momentum: Any, nesterov: bool, options: Any
) -> None:
    """Steps of a sixteenth of an ulp move the params, with errors of at most ulp/c."""
    tx = spa_from_sgdm(
        1.0, momentum, nesterov, rounding_key=jax.random.key(0), **options
    )
    x, expected = (
        run(
            optimizer, jnp.ones(1_000, dtype), [jnp.full(1_000, 2.0**-12, dtype)] * 100
        )[0]
        for optimizer, dtype in (
            (tx, jnp.bfloat16),
            (sgdm(1.0, momentum, nesterov), jnp.float32),
        )
    )
    np.testing.assert_allclose(x.astype(float), expected, rtol=0, atol=2.0**-8 / 0.5)


@pytest.mark.parametrize("end", [0.0, jnp.nan, -0.1])
def test_rates_past_the_end_count_as_0_ahead(end: float) -> None:
    """η_0 = α Σ β^j, over the four rates there are. A present NaN is not hidden."""
    tx = spa_from_sgdm(lambda k: jnp.where(k < 4, 0.1, end), 0.9)
    _, state = run(tx, jnp.ones(3), [jnp.ones(3)])
    np.testing.assert_allclose(state.eta, 0.1 * (1 + 0.9 + 0.81 + 0.729), rtol=1e-6)
    x, _ = run(tx, jnp.ones(3), [jnp.ones(3)] * 5)
    assert np.isnan(x).all() == np.isnan(end)


@pytest.mark.slow
@pytest.mark.parametrize(
    "nesterov", [long(False, id="heavy ball"), pytest.param(True, id="nesterov")]
)
def test_gradients_through_the_learning_rate(nesterov: bool) -> None:
    """Meta-learning differentiates through rates, as through `optax.sgd`."""

    def loss(rates: Any, make: Any) -> Any:
        x = jnp.array([1.0, 2.0])
        state = make(rates[0]).init(x)
        for rate in rates:
            updates, state = make(rate).update(x * jnp.array([1.0, 3.0]), state, x)
            x = optax.apply_updates(x, updates)
        return jnp.sum(x**2)

    with x64():
        rates = jnp.full(4, 0.1)
        expected = jax.jit(jax.grad(loss), static_argnums=1)(
            rates, lambda rate: optax.sgd(rate, 0.9, nesterov)
        )
        for make in (
            lambda rate: spa_from_sgdm(rate, 0.9, nesterov),
            lambda rate: spa_from_sgdm(rate, jnp.array(0.9), nesterov),
        ):
            for derivative in (jax.grad, jax.jacfwd):
                found = jax.jit(derivative(loss), static_argnums=1)(rates, make)
                np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_setting_the_count_back_keeps_momentum() -> None:
    # A schedule that has ended at 0 is started again like this, and `optax.sgd` keeps
    # its trace.
    schedule, grads = lenient(optax.cosine_decay_schedule(0.1, 10)), [jnp.ones(3)] * 12
    for rate in (schedule, 0.1):
        (x, state), (reference, sgd_state) = (
            run(factory(rate, 0.9), jnp.ones(3), grads)
            for factory in (spa_from_sgdm, optax.sgd)
        )
        if callable(rate):
            sgd_state = optax.tree.set(sgd_state, count=jnp.zeros([], jnp.int32))
        state = state._replace(count=jnp.zeros([], jnp.int32))
        x, _ = run(spa_from_sgdm(rate, 0.9), x, grads, state)
        reference, _ = run(optax.sgd(rate, 0.9), reference, grads, sgd_state)
        np.testing.assert_allclose(x, reference, rtol=1e-5)


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_negative_and_tiny_rates(beta: float, nesterov: bool) -> None:
    """Schedules may return them, and `optax.sgd` makes the best of it."""
    k, grads = np.arange(300), [jnp.array([1.0, -2.0])] * 6
    rates = [
        np.full(300, -1.0),
        np.where(k < 2, 0.1, -0.1),
        np.where(k < 3, 1e-38, 1e-3),
        np.where(k % 2 == 0, 1e-20, 1e-35),
    ]

    def train(make: Any) -> Any:
        def train_at(rates: Any) -> Any:
            return run(make(table(rates), beta, nesterov), jnp.ones(2), grads)

        return jax.vmap(train_at)(jnp.array(rates, jnp.float32))

    x, state = train(spa_from_sgdm)
    np.testing.assert_allclose(x, train(optax.sgd)[0], rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_a_w_of_float64_that_float32_cannot_hold() -> None:
    # After a long way of β near 0 w is positive in float64, and 0 in the state.
    with x64():
        beta, alpha = table([0.05] * 40 + [0.9]), table([0.0] * 40 + [0.1])
        grads = [jnp.array([1.0, -2.0])] * 60
        x, _ = run(spa_from_sgdm(alpha, beta), jnp.ones(2), grads)
        reference, _ = run(sgdm(alpha, beta), jnp.ones(2), grads)
        np.testing.assert_allclose(x, reference, rtol=1e-13)


@pytest.mark.parametrize(
    ("alphas", "betas", "atol"),
    [
        # In float32 w stays where it was when the rate was high; else 1e4 × 6e-8 would
        # be lost.
        ([0.1, 0.1, 1e-5, 1e-5, 0.1, 0.1], [0.9], 1e-6),
        # And it is α/100 at least: x/w is rounded, but z − x, 900 times as large, is
        # not lost.
        ([0.1], [1e-3, 1e-3, 0.9], 1e-4),
    ],
)
def test_injected_numbers_that_rise_again(alphas: Any, betas: Any, atol: float) -> None:
    grads, x_0 = [jnp.linspace(0.5, 1.5, 50)] * 6, jnp.linspace(1.0, 2.0, 50)
    x, _ = run(injected(table(alphas), table(betas)), x_0, grads)
    reference, _ = run(sgdm(table(alphas), table(betas)), x_0, grads)
    np.testing.assert_allclose(x, reference, atol=atol)


@pytest.mark.parametrize("in_64_bits", [False, True])
def test_a_foreseen_schedule_never_rescales_z(in_64_bits: bool) -> None:
    """The state rounds w to float32, also where schedules are in float64."""
    rate = lenient(optax.cosine_decay_schedule(0.1, 150, alpha=0.1))
    with x64(in_64_bits):
        w = jnp.zeros([], jnp.float32)
        for k in range(150):
            sgdm = evaluate_sgdm(rate, 0.9, jnp.int32(k))
            xz = sgdm_coefficients(sgdm, w, stores_difference=False)
            assert xz.r == 1
            w = xz.next_w.astype(w.dtype)


def test_w_follows_a_foreseen_rate_down() -> None:
    """To the sum that it is for constants, w = α β / (1 − β)."""
    tx = spa_from_sgdm(table([0.1] * 3 + [1e-3]), 0.9)
    _, state = run(tx, jnp.ones(2), [jnp.ones(2)] * 5)
    np.testing.assert_allclose(state.w, 1e-3 * 0.9 / 0.1, rtol=1e-5)


def test_an_injected_rate_that_falls_leaves_the_master_copy_of_16_bits_alone() -> None:
    # With bfloat16 params w follows the rate down: z must still add up steps of 1e-5.
    rates = table([0.1] * 10 + [1e-3])

    def gradient(params: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.full_like(params, jnp.where(k < 10, 0.0, 1e-2))

    params = jnp.ones(4, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.inject_hyperparams(spa_from_sgdm, hyperparam_dtype=jnp.float32)
        params, _ = trained(tx(rates, 0.9), gradient, params, jnp.arange(2_010))
    # 2,000 steps of 1e-3 · 1e-2 / (1 − 0.9): 0.2 in all, but for half an ulp over c.
    np.testing.assert_allclose(
        params.astype(float), 0.8, atol=2.0**-8 / (2 * 0.1) + 2.0**-8
    )


@pytest.mark.parametrize("rate", [0.1, lambda k: jnp.where(k < 0, 0.0, 0.1)])
def test_an_injected_momentum_that_rises(rate: Any) -> None:
    """Its rise is not foreseen, whether the rate is a number or a schedule.

    The momentum m = (x − z)/w must not drown in the rounding of x.
    """
    betas = [1e-4, 1e-4, 0.9, 0.9, 0.9]
    x, reference = jnp.linspace(0.5, 1.0, 100), jnp.linspace(0.5, 1.0, 100)
    state, m = spa_from_sgdm(rate, 0.9).init(x), jnp.zeros(100)
    for beta in betas:
        g = jnp.cos(50 * reference)
        tx = spa_from_sgdm(rate, jnp.array(beta))
        updates, state = jax.jit(tx.update)(g, state, x)
        x = optax.apply_updates(x, updates)
        m = beta * m + g
        reference = reference - 0.1 * m
    # w ≥ α leaves α m with two ulps of x, and β + β² + β³ = 2.5 of these add up. Each
    # of five steps rounds x as well.
    np.testing.assert_allclose(x, reference, rtol=0, atol=(2.5 * 2 + 5) * 2.0**-23)


def test_an_injected_momentum_that_rises_from_0_does_not_restart() -> None:
    """x = −α after a gradient of 1; then it coasts by −α β."""
    injected = optax.inject_hyperparams(spa_from_sgdm, static_args="nesterov")
    for beta in (0.9, 0.99, 0.999):
        tx, x = injected(0.05, 0.0), jnp.zeros([])
        x, state = run(tx, x, [jnp.ones([])])
        state = optax.tree.set(state, momentum=jnp.array(beta))
        x, _ = run(tx, x, [jnp.zeros([])], state)
        np.testing.assert_allclose(x, -0.05 * (1 + beta), rtol=1e-5)
