"""The AdamW aliases, against `optax.adamw` and `optax.contrib`."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    UNIFORM,
    WARMUP_COSINE,
    apply,
    compiled_step,
    trajectory,
    x64,
)

from spa_optax import (
    eval_params,
    gpa_adamw,
    spa,
    spa_adamw,
)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_spa_adamw_has_no_temporary_of_parameter_size(dtype: Any) -> None:
    """(`gpa_adamw` has, on CPU: the direction, which z and y both need. So has Schedule-Free.)"""
    compiled = compiled_step(spa_adamw(0.1), [jnp.ones((64, 64, 3, 3), dtype) for _ in range(4)])
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
GRADS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)


def test_schedule_free_adamw() -> None:
    with x64():
        kwargs: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
        reference = optax.contrib.schedule_free_adamw(0.01, b1=0.9, **kwargs)
        evaluate = optax.contrib.schedule_free_eval_params
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        y, x = trajectory(gpa_adamw(0.01, UNIFORM, 0.9, **kwargs), eval_params, jnp.float64)
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-12)
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-7)


ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
MASK = {"w": True, "b": {"c": False}}


def test_adamw_is_optax_adam_without_first_moment() -> None:
    """Of optax's own parts, and at c = 1 `optax.adamw` itself; in float64."""
    itself = lambda state, params: params
    with x64():
        chain = optax.chain(
            optax.scale_by_adam(b1=0, b2=0.98, eps=1e-6),
            optax.add_decayed_weights(0.1),
            spa(WARMUP_COSINE, 0.1),
        )
        expected, _ = trajectory(chain, itself, jnp.float64)
        x, _ = trajectory(spa_adamw(WARMUP_COSINE, **ADAMW), eval_params, jnp.float64)
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)
        expected, _ = trajectory(optax.adamw(0.01, b1=0, **ADAMW), itself, jnp.float64)
        for tx in (spa_adamw(0.01, 1.0, **ADAMW), gpa_adamw(0.01, 1.0, **ADAMW)):
            _, x = trajectory(tx, eval_params, jnp.float64)
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


ALIASES = {"spa_adamw": spa_adamw, "gpa_adamw": gpa_adamw}
both_aliases = pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)


@both_aliases
def test_bytes_of_adamw(alias: Any) -> None:
    """10 bytes a parameter with bfloat16 params, where AdamW takes 14; 12 with float32."""
    for dtype, expected in ((jnp.bfloat16, 10), (jnp.float32, 12)):
        params = {"w": jnp.zeros((100, 1_000), dtype)}
        state = alias(0.1).init(params)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
        assert expected <= num_bytes / 1e5 < expected + 0.001
    # A direction of float32 gradients does not depend on the params' dtype.
    narrow = {"w": jax.ShapeDtypeStruct((3,), jnp.float16)}
    for leaf in jax.tree.leaves(jax.eval_shape(alias(0.1).init, narrow)):
        assert leaf.dtype in (jnp.float32, jnp.int32)


@both_aliases
def test_second_moment_of_narrow_gradients(alias: Any) -> None:
    """In bfloat16 0.999 is 1, and ν would never move."""
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    grads = {"w": jnp.full(4, 0.1, jnp.bfloat16)}
    _, state = apply(alias(0.1, b2=0.999), params, [grads] * 50)
    g = float(grads["w"][0])
    nu = optax.tree.get(state, "nu")["w"]
    np.testing.assert_allclose(nu, g**2 * (1 - 0.999**50), rtol=1e-4)


@both_aliases
@pytest.mark.parametrize("scalar", [np.float64, np.asarray, float])
def test_scalars_of_numpy_do_not_widen_the_second_moment(alias: Any, scalar: Any) -> None:
    with x64():
        tx, params = alias(0.1, b2=scalar(0.99), eps=scalar(1e-8)), jnp.ones(3, jnp.float32)
        _, state = tx.update(params, tx.init(params), params)
    assert optax.tree.get(state, "nu").dtype == jnp.float32


@both_aliases
def test_integers_and_their_gradients(alias: Any) -> None:
    params = {"w": jnp.ones(2), "step": jnp.arange(2), "on": jnp.array(True)}
    tx = alias(0.1, mask={"w": True, "step": False, "on": False})
    loss = lambda params: jnp.sum(params["w"] ** 2) * jnp.where(params["on"], 1.0, 2.0)
    grads = jax.grad(loss, allow_int=True)(params)
    state = tx.init(params)
    types = jax.eval_shape(lambda: state)
    for g in (grads, jax.tree.map(jnp.zeros_like, params)):
        updates, state = tx.update(g, state, params)
        assert jax.eval_shape(lambda state=state: state) == types
        after = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(after["step"], params["step"])
        assert np.all(after["w"] < params["w"])


@both_aliases
def test_mask_and_decay_schedule(alias: Any) -> None:
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    for mask in (MASK, lambda params: MASK):
        params, _ = apply(alias(0.1, weight_decay=0.5, mask=mask), PARAMS, [zeros] * 3)
        np.testing.assert_array_equal(params["b"]["c"], PARAMS["b"]["c"])
        assert np.all(np.asarray(params["w"]).ravel()[1:] < np.asarray(PARAMS["w"]).ravel()[1:])


@both_aliases
def test_injected_adamw(alias: Any) -> None:
    params, grads = optax.tree.cast((PARAMS, GRADS), jnp.bfloat16)
    expected, _ = apply(alias(0.1, b2=0.999), params, [grads] * 5)
    injected = optax.inject_hyperparams(alias, hyperparam_dtype=jnp.float32)
    x, state = apply(injected(learning_rate=0.1, b2=0.999), params, [grads] * 5)
    chex.assert_trees_all_close(x, expected, rtol=1e-2)
    chex.assert_trees_all_equal_shapes_and_dtypes(eval_params(state, x), x)
    assert float(state.hyperparams["b2"]) == pytest.approx(0.999)
