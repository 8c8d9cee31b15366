"""The shared update: dtypes, leaves, master weights and memory."""

import inspect
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, compiled_step, lenient

import spa_optax
from spa_optax import spa, spa_from_sgdm

CONSTANT = lambda **kwargs: spa(1.0, 0.1, **kwargs)
SCHEDULED = lambda **kwargs: spa_from_sgdm(lambda k: 0.1 / (k + 1).astype(float), 0.9, **kwargs)
GENERAL = lambda **kwargs: spa(0.5, 0.1, 0.9, **kwargs)
FACTORIES = {"spa": CONSTANT, "spa_from_sgdm": SCHEDULED, "gpa": GENERAL}
every_transform = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)


@every_transform
def test_params_replaced_after_init(make: Any) -> None:
    tx = make()
    old, new = {"w": jnp.zeros(3)}, {"w": jnp.array([5.0, -2.0, 3.0])}
    grads = {"w": jnp.ones(3)}
    state = tx.init(old)
    updates, state = tx.update(grads, state, new)
    expected_updates, expected_state = tx.update(grads, tx.init(new), new)
    chex.assert_trees_all_equal((updates, state), (expected_updates, expected_state))


@every_transform
def test_master_weights_made_by_init_on_wider_params(make: Any) -> None:
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


def test_scalars_of_the_state_are_32_bits_wide() -> None:
    # In bfloat16 a count would stick at 256, and a decay of 0.999 be 1.
    params = jnp.ones(2, jnp.bfloat16)
    tx = spa(1e-3, 1e-3)
    state = tx.init(params)._replace(count=jnp.array(256, jnp.int32))
    _, state = tx.update(params, state, params)
    assert int(state.count) == 257
    np.testing.assert_array_equal([state.eta, state.c], np.float32([1e-3, 1e-3]))


def test_hyperparameters_may_be_traced() -> None:
    params = jnp.ones(2)

    @jax.jit
    def step(learning_rate: Any, averaging: Any) -> Any:
        tx = spa(learning_rate, averaging)
        return tx.update(params, tx.init(params), params)[0]

    np.testing.assert_allclose(step(0.5, 0.1), -0.05 * params, rtol=1e-6)
    np.testing.assert_allclose(step(0.5, 1.0), -0.5 * params, rtol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        spa(1.0, 0.1),
        spa(0.7, 0.1),
        spa_from_sgdm(0.1, 0.9),
        spa_from_sgdm(lenient(optax.cosine_decay_schedule(0.1, 100)), 0.9),
        spa_from_sgdm(lenient(optax.cosine_decay_schedule(0.1, 100)), 0.9, True),
        optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9),
        spa(0.1, 0.1, 0.9),
    ],
    ids=["eta=1", "eta=0.7", "sgdm", "schedule", "nesterov", "injected", "gpa"],
)
def test_no_temporary_of_parameter_size(tx: Any) -> None:
    params = [jnp.ones((64, 64, 3, 3)) for _ in range(4)]
    size = 4 * 64 * 64 * 9
    compiled = compiled_step(tx, params)
    reference = compiled_step(optax.sgd(0.1, 0.9), params)
    memory, expected = compiled.memory_analysis(), reference.memory_analysis()
    # What is left is a few scalars, and the rates that lie ahead.
    assert memory.temp_size_in_bytes < 4_000 < size
    assert 0 <= memory.alias_size_in_bytes - expected.alias_size_in_bytes < 100
    # optax.sgd moves 24 bytes a parameter. z_0 = x_0 costs a read of x more, Nesterov one of g;
    # η = 1 folded away, or u from the old z, would cost 8 to 16.
    extra = compiled.cost_analysis()["bytes accessed"] - reference.cost_analysis()["bytes accessed"]
    assert extra < 8.2 * size


def test_annotations_are_objects() -> None:
    # optax's schedule tests, and beartype, need them to be.
    for function in (spa, spa_from_sgdm, spa_optax.hyperparams_from_sgdm):
        for parameter in inspect.signature(function).parameters.values():
            assert not isinstance(parameter.annotation, str)


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
    tx = make(state_dtype=dtype, rounding_key=jax.random.key(0))
    _, state = tx.update(params, tx.init(params), params)
    assert jax.tree.leaves(optax.tree.get(state, "z"))[0].dtype == dtype


def test_debugging_of_nans_finds_none() -> None:
    with jax.debug_nans(True):
        for tx in (spa(0.1), spa_from_sgdm(0.1, 0.0), spa_from_sgdm(lambda _: 0.0, 0.9, True)):
            tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))
