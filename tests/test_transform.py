"""What `spa` and `spa_from_sgdm` must not get wrong; the pitfalls are numbered as they were met."""

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, apply, lenient, x64

import spa_optax
from spa_optax import gpa, spa, spa_adamw, spa_from_sgdm

CONSTANT = lambda **kwargs: spa(1.0, 0.1, **kwargs)
SCHEDULED = lambda **kwargs: spa_from_sgdm(lambda k: 0.1 / (k + 1).astype(float), 0.9, **kwargs)
GENERAL = lambda **kwargs: gpa(0.5, 0.1, 0.9, **kwargs)
FACTORIES = {"spa": CONSTANT, "spa_from_sgdm": SCHEDULED, "gpa": GENERAL}
every_transform = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)


@every_transform
def test_pitfall_3_params_replaced_after_init(make: Any) -> None:
    tx = make()
    old, new = {"w": jnp.zeros(3)}, {"w": jnp.array([5.0, -2.0, 3.0])}
    grads = {"w": jnp.ones(3)}
    state = tx.init(old)
    updates, state = tx.update(grads, state, new)
    expected_updates, expected_state = tx.update(grads, tx.init(new), new)
    chex.assert_trees_all_equal((updates, state), (expected_updates, expected_state))


@every_transform
def test_pitfall_3_master_weights(make: Any) -> None:
    # z keeps what bfloat16 params lose of the float32 params that `init` saw; but where params are
    # others altogether, it is theirs.
    tx = make()
    master = jnp.array([1.001, 2.003, -3.007])
    params = master.astype(jnp.bfloat16)
    assert not np.array_equal(params.astype(float), master)
    zero, other = jnp.zeros(3, jnp.bfloat16), params + 1
    for update in (tx.update, jax.jit(tx.update)):  # a compiler may drop a cast there and back
        _, state = update(zero, tx.init(master), params)
        np.testing.assert_array_equal(optax.tree.get(state, "z"), master)
        _, state = update(zero, tx.init(master), other)
        np.testing.assert_array_equal(optax.tree.get(state, "z"), other.astype(jnp.float32))


def test_pitfall_4_scalars_of_the_state_count_on() -> None:
    # In bfloat16 a count would stick at 256, and a decay of 0.999 be 1.
    params = jnp.ones(2, jnp.bfloat16)
    tx = spa(1e-3, 1e-3)
    state = tx.init(params)._replace(count=jnp.array(256, jnp.int32))
    _, state = tx.update(params, state, params)
    assert int(state.count) == 257
    np.testing.assert_array_equal([state.eta, state.c], np.float32([1e-3, 1e-3]))


def test_pitfall_5_hyperparameters_may_be_traced() -> None:
    params = jnp.ones(2)

    @jax.jit
    def step(learning_rate: Any, averaging: Any) -> Any:
        tx = spa(learning_rate, averaging)
        return tx.update(params, tx.init(params), params)[0]

    np.testing.assert_allclose(step(0.5, 0.1), -0.05 * params, rtol=1e-6)
    np.testing.assert_allclose(step(0.5, 1.0), -0.5 * params, rtol=1e-6)


def _compiled(tx: Any, params: Any) -> Any:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params)
    return lowered.compile()


@pytest.mark.parametrize(
    "tx",
    [
        spa(1.0, 0.1),
        spa(0.7, 0.1),
        spa_from_sgdm(0.1, 0.9),
        spa_from_sgdm(lenient(optax.cosine_decay_schedule(0.1, 100)), 0.9),
        spa_from_sgdm(lenient(optax.cosine_decay_schedule(0.1, 100)), 0.9, True),
        optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9),
        gpa(0.1, 0.1, 0.9),
    ],
    ids=["eta=1", "eta=0.7", "sgdm", "schedule", "nesterov", "injected", "gpa"],
)
def test_pitfalls_7_and_8_no_temporary_of_parameter_size(tx: Any) -> None:
    params = [jnp.ones((64, 64, 3, 3)) for _ in range(4)]
    size = 4 * 64 * 64 * 9
    compiled = _compiled(tx, params)
    reference = _compiled(optax.sgd(0.1, 0.9), params)
    memory, expected = compiled.memory_analysis(), reference.memory_analysis()
    # What is left is a few scalars, and the rates that lie ahead.
    assert memory.temp_size_in_bytes < 4_000 < size
    assert 0 <= memory.alias_size_in_bytes - expected.alias_size_in_bytes < 100
    # optax.sgd moves 24 bytes a parameter. z_0 = x_0 costs a read of x more, Nesterov one of g;
    # η = 1 folded away, or u from the old z, would cost 8 to 16.
    extra = compiled.cost_analysis()["bytes accessed"] - reference.cost_analysis()["bytes accessed"]
    assert extra < 8.2 * size


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_spa_adamw_has_no_temporary_of_parameter_size(dtype: Any) -> None:
    """(`gpa_adamw` has, on CPU: the direction, which z and y both need. So has Schedule-Free.)"""
    compiled = _compiled(spa_adamw(0.1), [jnp.ones((64, 64, 3, 3), dtype) for _ in range(4)])
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


def test_pitfall_9_annotations_are_objects() -> None:
    # optax's schedule tests, and beartype, need them to be.
    for function in (spa, spa_from_sgdm, spa_optax.hyperparams_from_sgdm):
        for parameter in inspect.signature(function).parameters.values():
            assert not isinstance(parameter.annotation, str)


def test_pitfall_10_look_ahead_in_the_dtype_of_the_count() -> None:
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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
def test_updates_round_x_once(dtype: Any) -> None:
    """In 16 bits too, adding the update gives x_{k+1} rounded to nearest: NumPy, exactly."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=1000), dtype)
    grads = jnp.asarray(rng.normal(size=1000) / 64, dtype)
    tx = spa(1.0, 0.25)  # powers of two: nothing but x_{k+1} itself needs rounding
    state = tx.init(params)
    for step in (tx.update, jax.jit(tx.update)):
        updates, after = step(grads, state, params)
        x, z = np.asarray(params, np.float64), np.asarray(state.z, np.float64)
        z = z - np.asarray(grads, np.float64)
        np.testing.assert_allclose(after.z, z, rtol=1e-7)
        expected = jnp.asarray(x + 0.25 * (np.asarray(after.z, np.float64) - x), dtype)
        np.testing.assert_array_equal(
            np.asarray(params + updates, np.float32), np.asarray(expected, np.float32)
        )


def test_bfloat16_params_train_like_float32_with_z_as_their_master() -> None:
    # Steps of 1e-4 of x round to nothing in bfloat16 (ulp 2^-8). z adds them up.
    grads = [jnp.full(8, 1e-3)] * 2_000
    narrow = jnp.ones(8, jnp.bfloat16)

    def run(tx: Any, params: Any) -> Any:
        def body(carry: Any, g: Any) -> Any:
            params, state = carry
            updates, state = tx.update(g.astype(params.dtype), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), jnp.stack(grads))[0][0]

    exact = run(optax.sgd(1e-2, 0.9), jnp.ones(8))  # 1 − 2000 · 1e-2 · 1e-3/(1 − 0.9)
    np.testing.assert_allclose(exact, 1 - 0.2 * 0.9955, rtol=1e-3)
    # x moves once c |z − x| is half an ulp of it: it trails by ulp/(2c), and no more in the end.
    for tx in (spa(1e-1, 0.1), spa_from_sgdm(1e-2, 0.9)):
        np.testing.assert_allclose(run(tx, narrow).astype(float), exact, atol=2.0**-8 / (2 * 0.1))
    with jax.numpy_dtype_promotion("standard"):
        assert (run(optax.sgd(1e-2, 0.9, accumulator_dtype=jnp.float32), narrow) == narrow).all()


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


def test_an_edit_behind_spa_is_pulled_back_unless_reanchored() -> None:
    """Why nothing that changes the update may stand behind `spa`, as its docstring says."""
    params = jnp.ones(4)
    tx = spa(1.0, 0.1)
    state = tx.init(params)
    updates, state = tx.update(jnp.zeros(4), state, params)
    pruned = params.at[0].set(0.0)
    updates, _ = tx.update(jnp.zeros(4), state, pruned)
    np.testing.assert_allclose(updates, [0.1, 0, 0, 0], atol=1e-7)
    state = spa_optax.reanchor(state, params, pruned)
    updates, _ = tx.update(jnp.zeros(4), state, pruned)
    np.testing.assert_array_equal(updates, jnp.zeros(4))


@pytest.mark.parametrize("nesterov", [False, True], ids=["heavy ball", "nesterov"])
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
        for derivative in (jax.grad, jax.jacfwd):
            for make in (
                lambda rate: spa_from_sgdm(rate, 0.9, nesterov),
                lambda rate: spa_from_sgdm(rate, jnp.array(0.9), nesterov),
            ):
                np.testing.assert_allclose(derivative(loss)(rates, make), expected, rtol=1e-6)


@pytest.mark.float16
def test_a_leaf_of_16_bits_costs_the_others_no_momentum() -> None:
    # How much of a rise re-anchoring bears is a matter of each leaf's own dtype.
    params = {
        "a": jnp.ones(3),
        "b": jnp.ones(2, jnp.bfloat16),
        "empty": jnp.ones((0,), jnp.float16),
    }
    grads = jax.tree.map(jnp.ones_like, params)

    def run(factory: Any) -> Any:
        tx = optax.inject_hyperparams(factory)(learning_rate=0.005, momentum=0.9)
        x, state = params, tx.init(params)
        for k in range(20):
            state.hyperparams["learning_rate"] = jnp.float32(0.005 if k < 10 else 0.1)
            updates, state = tx.update(grads, state, x)
            x = optax.apply_updates(x, updates)
        return x["a"]

    with jax.numpy_dtype_promotion("standard"):  # dtypes meet in optax here
        np.testing.assert_allclose(run(spa_from_sgdm), run(optax.sgd), rtol=20 * 6e-8 * 10)


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
    grads = [jnp.array([1.0, -2.0])] * 6
    for schedule in (
        lambda k: jnp.full_like(k, -1, float),
        lambda k: jnp.where(k < 2, 0.1, -0.1),
        lambda k: jnp.where(k < 3, 1e-38, 1e-3),
        lambda k: jnp.where(k % 2 == 0, 1e-20, 1e-35),
    ):
        for beta in (0.0, 0.9):
            for nesterov in (False, True):
                x, state = apply(spa_from_sgdm(schedule, beta, nesterov), jnp.ones(2), grads)
                reference, _ = apply(optax.sgd(schedule, beta, nesterov), jnp.ones(2), grads)
                np.testing.assert_allclose(x, reference, rtol=1e-5)
                assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_float64_coasts_that_float32_cannot_hold() -> None:
    # After a long way of β near 0 the coast is positive in float64, and 0 in the state.
    with x64():
        beta = lambda k: jnp.where(k < 40, 0.05, 0.9)
        alpha = lambda k: jnp.where(k < 40, 0.0, 0.1)
        grads = [jnp.array([1.0, -2.0])] * 60
        x, _ = apply(spa_from_sgdm(alpha, beta), jnp.ones(2), grads)
        reference, _ = apply(optax.inject_hyperparams(optax.sgd)(alpha, beta), jnp.ones(2), grads)
        np.testing.assert_allclose(x, reference, rtol=1e-13)


@every_transform
def test_leaves_that_are_not_trained(make: Any) -> None:
    params = {"w": jnp.ones(2), "step": jnp.array(2**24 + 1), "on": jnp.array(True)}
    grads = {"w": jnp.ones(2), "step": jnp.array(0), "on": jnp.array(False)}
    updates, state = make().update(grads, make().init(params), params)
    z = optax.tree.get(state, "z")
    assert int(params["step"] + updates["step"]) == int(z["step"]) == 2**24 + 1
    assert (updates["on"].dtype, bool(z["on"])) == (jnp.dtype(bool), True)


@every_transform
@pytest.mark.parametrize("dtype", [FLOAT8_E4M3FN, FLOAT8_E5M2])
def test_float8(make: Any, dtype: Any) -> None:
    params = jnp.array([1.0, -2.0], dtype)
    updates, state = make().update(params, make().init(params), params)
    assert (updates.dtype, optax.tree.get(state, "z").dtype) == (dtype, jnp.float32)
    tx = make(state_dtype=dtype)
    _, state = tx.update(params, tx.init(params), params)
    assert optax.tree.get(state, "z").dtype == dtype


def test_debugging_of_nans_finds_none() -> None:
    with jax.debug_nans(True):
        for tx in (spa(0.1), spa_from_sgdm(0.1, 0.0), spa_from_sgdm(lambda _: 0.0, 0.9, True)):
            tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))


def test_an_injected_rate_that_falls_and_rises_magnifies_no_rounding() -> None:
    # In float32 the coast stays where it was when the rate was high; else 1e4 × 6e-8 would be lost.
    rates = jnp.array([0.1, 0.1, 1e-5, 1e-5, 0.1, 0.1])
    alpha = lambda k: rates[k]
    grads = [jnp.linspace(0.5, 1.5, 50)] * 6
    x_0 = jnp.linspace(1.0, 2.0, 50)
    x, _ = apply(optax.inject_hyperparams(spa_from_sgdm)(alpha, 0.9), x_0, grads)
    reference, _ = apply(optax.inject_hyperparams(optax.sgd)(alpha, 0.9), x_0, grads)
    np.testing.assert_allclose(x, reference, atol=1e-6)


def test_an_injected_rate_that_falls_leaves_the_master_copy_of_16_bits_alone() -> None:
    # With bfloat16 params the coast follows the rate down: z must still add up steps of 1e-5.
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
