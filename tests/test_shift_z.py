"""Params that something other than the optimizer moves."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import quick, relative_difference, run, x64

from spa_optax import (
    SPAState,
    eval_params,
    primal_averaging,
    shift_z,
    spa,
    spa_adamw,
    spa_from_sgdm,
)
from spa_optax._trees import find_nodes


def test_a_run_of_spa_resumed_as_sgdm() -> None:
    # The state is the same, so no conversion at all: z is re-anchored at the first
    # step.
    with x64():
        grads, start = (
            [jnp.array([1.0, -2.0]) / k for k in (1.0, 2.0, 3.0, 4.0)],
            jnp.ones(2),
        )
        x, state = run(spa(1.0, 0.1), start, grads)
        x, _ = run(spa_from_sgdm(0.03, 0.8), x, grads, state)
        y, state = run(optax.sgd(0.1, 0.9), start, grads)
        y, _ = run(optax.sgd(0.03, 0.8), y, grads, state)
        np.testing.assert_allclose(
            x, y, atol=1e-7
        )  # η (1 − c) is float32 in the state of `spa`


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shift_z(dtype: Any) -> None:
    """Params pruned in the middle of a run go on as `optax.sgd` goes on from there."""
    tx = optax.chain(optax.add_decayed_weights(1e-3), spa_from_sgdm(0.25, 0.5))
    sgd = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.25, 0.5))
    params = {"w": jnp.array([1.0, -2.0, 3.0, 0.5], dtype)}
    grads = jax.tree.map(lambda p: (p / 4).astype(dtype), params)

    def prune(x: Any) -> Any:
        return {"w": x["w"].at[1].set(0.0)}

    with jax.numpy_dtype_promotion("standard"):
        (x, state), (y, sgd_state) = (
            run(one, params, [grads] * 3) for one in (tx, sgd)
        )
        state = shift_z(state, x, prune(x))
        assert isinstance(state[1], SPAState)
        x, _ = run(tx, prune(x), [grads] * 3, state)
        y, _ = run(sgd, prune(y), [grads] * 3, sgd_state)
    chex.assert_trees_all_close(x, y, rtol=1e-6 if dtype == jnp.float32 else 2e-2)


def test_states_of_nnx() -> None:
    """nnx keeps variables of other types in the optimizer's state than in the model."""
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), spa_from_sgdm(0.5, 0.5))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    grads = jax.tree.map(lambda p: 0.1 * jnp.ones_like(p), nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    params = nnx.state(model, nnx.Param)
    pruned = jax.tree.map(lambda p: 0 * p, params)
    before = jax.tree.map(jnp.copy, params)
    optimizer.opt_state = shift_z(optimizer.opt_state, params, pruned)
    nnx.update(model, pruned)
    # In the other order `params`, live variables, would hold the new values already.
    with pytest.raises(ValueError, match=r"`new_params`.*`old_params`"):
        shift_z(optimizer.opt_state, params, pruned)
    shifted = shift_z(
        optimizer.opt_state, before, pruned
    )  # a copy is safe in any order
    assert relative_difference(shifted[1].z, optimizer.opt_state[1].z) > 0.1
    optimizer.update(model, grads)
    # m = 1.5 g: x goes on from 0 by −α m.
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        np.testing.assert_allclose(leaf, -0.5 * 0.15, rtol=1e-5)


LABELS = {"a": "it", "b": "other"}
SHARED = {
    "masked": optax.masked(spa(0.1, 0.1, 0.5), {"a": True, "b": False}),
    "partition": optax.partition({"it": spa(0.1), "other": optax.sgd(0.1)}, LABELS),
    "several": optax.partition({"it": spa(0.1), "other": spa(0.2, 0.05, 0.9)}, LABELS),
}


@pytest.mark.parametrize("tx", SHARED.values(), ids=SHARED)
def test_shift_z_of_some_params(tx: Any) -> None:
    """As `eval_params` does: params of another optimizer, or of none, have no z."""
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    edited = {"a": jnp.array([0.0, 2.0]), "b": jnp.array([5.0])}
    state = shift_z(tx.init(params), params, edited)
    for name, found in zip("ab", find_nodes(state, SPAState), strict=False):
        np.testing.assert_array_equal(found.z[name], edited[name])
    chex.assert_trees_all_equal_structs(state, tx.init(params))
    with pytest.raises(ValueError, match=r"`opt_state`.*`params`.*\(2,\) at \['a'\]"):
        shift_z(tx.init(params), {"b": params["b"]}, {"b": edited["b"]})
    with pytest.raises(ValueError, match=r"`new_params`.*`old_params`.*\['b'\]"):
        shift_z(tx.init(params), params, {"a": edited["a"]})


def test_shift_z_moves_x_along() -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
    grads = jax.tree.map(lambda p: jnp.cos(p) / 3, params)
    y, state = run(spa(0.1, 0.1, 0.5), params, [grads] * 3)
    edited = jax.tree.map(lambda leaf: leaf - 1, y)
    shifted = shift_z(state, y, edited)

    def pointers(tree: Any) -> set[int]:
        return {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)}

    assert not pointers(shifted) & pointers((state, y, edited))  # it can be donated
    x = eval_params(shifted, edited)
    expected = jax.tree.map(lambda leaf: leaf - 1, eval_params(state, y))
    chex.assert_trees_all_close(x, expected)


MOVED = {
    "spa": functools.partial(spa, 0.1, 0.1),
    "gpa": functools.partial(spa, 0.1, 0.1, 0.9),
    "sgdm": functools.partial(spa_from_sgdm, 0.1, 0.9),
    "adamw": functools.partial(spa_adamw, 0.1, weight_decay=0.0),
    "primal_averaging": functools.partial(primal_averaging, optax.sgd(0.1), 0.1),
}


@pytest.mark.parametrize("name", quick(MOVED, "gpa", "sgdm"))
@pytest.mark.parametrize(
    "state_dtype", [None, jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn]
)
def test_z_follows_params_of_16_bits_that_something_else_moves(
    name: str, state_dtype: Any
) -> None:
    """Biases of a mixture of experts rise by 0.001 a step, with a gradient of 0.

    A z that stayed would pull them back. As in `optax.sgd`, nothing does.
    """
    if name == "sgdm" and state_dtype == jnp.float8_e4m3fn:
        pytest.skip("spa_from_sgdm refuses float8")
    tx = MOVED[name](state_dtype=state_dtype, rounding_key=jax.random.key(0))
    positions = jnp.linspace(0.0, 0.5, 501).astype(jnp.bfloat16)
    y = jnp.zeros(3, jnp.bfloat16)

    def step(carry: Any, move: Any) -> Any:
        y, state = carry
        updates, state = tx.update(jnp.zeros_like(y), state, y)
        return (optax.apply_updates(y, updates) + move, state), None

    (y, state), _ = jax.lax.scan(step, (y, tx.init(y)), jnp.diff(positions))
    np.testing.assert_array_equal(y, 0.5)
    np.testing.assert_array_equal(eval_params(state, y), 0.5)
