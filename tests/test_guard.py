"""`guard_params`: what moves the params besides the updates, and what does not."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import run, unchecked

from spa_optax import (
    primal_averaging,
    shift_z,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)
from spa_optax.diagnostics import guard_params

pytestmark = pytest.mark.usefixtures("standard_promotion")
KEY = jax.random.key(0)
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 6).reshape(2, 3), "b": jnp.full(3, 1e-3)}
GRADS = [jax.tree.map(lambda x, k=k: jnp.cos(3 * x + k), PARAMS) for k in range(12)]
MEMBERS: dict[str, Any] = {
    "spa": spa(0.5, 0.2),
    "gpa": spa(0.5, 0.2, 0.7),
    "spa_from_sgdm": spa_from_sgdm(lambda k: 0.1 / (k + 1), 0.9),
    "spa_adamw": spa_adamw(0.1),
    "primal_averaging": primal_averaging(optax.adamw(0.1), 0.2, 0.7),
    "bfloat16 z": spa(0.5, 0.2, state_dtype=jnp.bfloat16, rounding_key=KEY),
    "stochastic_rounding": stochastic_rounding(optax.adamw(0.1), KEY),
}
MESSAGE = r"`params` must be those that the last update made, got others at \['b'\]"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", MEMBERS)
def test_nothing_is_raised_in_an_ordinary_run(name: str, dtype: Any) -> None:
    """Also where the step and the addition to the params are one program."""
    cast = jax.tree.map(lambda x: x.astype(dtype), (PARAMS, GRADS))
    params, grads = cast
    tx = optax.chain(optax.clip(1.0), guard_params(MEMBERS[name]))
    expected, _ = run(optax.chain(optax.clip(1.0), MEMBERS[name]), params, grads)
    found, _ = run(tx, params, grads)
    for path, leaf in found.items():
        assert (leaf == expected[path]).all()

    @jax.jit
    def step(params: Any, state: Any, g: Any) -> Any:
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    jax.effects_barrier()


def train(tx: Any, params: Any) -> None:
    """Steps outside `jax.jit`."""
    state = tx.init(params)
    for g in GRADS:
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)


def moved_by(kind: str, tx: Any) -> Any:
    """A transformation in which something else moves the params."""
    return {
        "apply_every": lambda: optax.chain(tx, optax.apply_every(4)),
        "scale": lambda: optax.chain(tx, optax.scale(0.5)),
        "decay": lambda: optax.chain(tx, optax.add_decayed_weights(-0.1)),
        "clip": lambda: optax.chain(tx, optax.clip(1e-3)),
        "nonnegative": lambda: optax.chain(tx, optax.keep_params_nonnegative()),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["apply_every", "scale", "decay", "clip", "nonnegative"]
)
@pytest.mark.parametrize("name", ["spa_from_sgdm", "spa_adamw", "gpa"])
def test_what_comes_after_a_member_is_found(name: str, kind: str) -> None:
    params = jax.tree.map(jnp.abs, PARAMS)
    tx = moved_by(kind, guard_params(MEMBERS[name]))
    with pytest.raises(ValueError, match=r"`params` must be .* last in its chain"):
        train(tx, params)


def test_a_compiled_step_raises_too() -> None:
    tx = optax.chain(guard_params(spa_from_sgdm(0.1, 0.8)), optax.apply_every(4))

    def train_compiled() -> None:
        run(tx, PARAMS, GRADS[:3])
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match=MESSAGE):
        train_compiled()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_biases_moved_by_a_trainer_are_found(dtype: Any) -> None:
    """As those of a router in a mixture of experts, by 0.01 a step."""
    params = {"w": jnp.ones(3, dtype), "bias": jnp.zeros(4, dtype)}
    tx = guard_params(spa_adamw(1e-3, rounding_key=KEY))
    zeros, state = jax.tree.map(jnp.zeros_like, params), tx.init(params)
    updates, state = tx.update(zeros, state, params)
    params = optax.apply_updates(params, updates)
    edited = {**params, "bias": params["bias"] + jnp.asarray(0.01, dtype)}
    with pytest.raises(ValueError, match=r"got others at \['bias'\]"):
        tx.update(zeros, state, edited)
    inner = shift_z(state.inner_state, params, edited)
    updates, _ = spa_adamw(1e-3, rounding_key=KEY).update(zeros, inner, edited)
    assert (optax.apply_updates(edited, updates)["bias"] == edited["bias"]).all()


def test_the_weights_of_a_wrapper_are_found() -> None:
    """`optax.lookahead` sets its fast params back."""
    tx = optax.lookahead(guard_params(spa(0.5, 0.2)), 3, 0.5)
    with pytest.raises(ValueError, match="`params` must be"):
        train(tx, optax.LookaheadParams.init_synced(PARAMS))


@pytest.mark.parametrize("wrap", [optax.MultiSteps, optax.apply_if_finite])
def test_steps_that_are_skipped_are_no_moves(wrap: Any) -> None:
    wrapped = wrap(guard_params(spa(0.5, 0.2)), 3)
    nan = jax.tree.map(lambda g: g * jnp.nan, GRADS[0])
    middle = [nan] if wrap is optax.apply_if_finite else []
    run(wrapped, PARAMS, [*GRADS[:4], *middle, *GRADS[4:]])
    jax.effects_barrier()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="`inner` must be a gradient transformation"):
        unchecked(guard_params)(0.1)
    tx = guard_params(spa(1.0))
    with pytest.raises(ValueError, match="`params` must be passed"):
        tx.update(GRADS[0], tx.init(PARAMS))
    with pytest.raises(ValueError, match="`state` must be of type `GuardParamsState`"):
        tx.update(GRADS[0], spa(1.0).init(PARAMS), PARAMS)


def test_params_that_become_nan_are_found_and_a_run_that_diverges_is_not() -> None:
    tx, nan = guard_params(spa(0.5, 0.2)), jnp.array([jnp.nan, 1.0, 1.0])
    params, state = run(tx, PARAMS, GRADS[:2])
    with pytest.raises(ValueError, match="`params` must be"):
        tx.update(GRADS[2], state, {**params, "b": params["b"].at[1].set(jnp.nan)})
    run(tx, params, [{**GRADS[2], "b": nan}, *GRADS[3:6]], state)
    jax.effects_barrier()


def test_params_without_gradients_stay() -> None:
    tx = guard_params(spa(0.5, 0.2))
    params, _ = run(tx, PARAMS, [{**g, "b": None} for g in GRADS[:3]])
    assert (params["b"] == PARAMS["b"]).all()
    jax.effects_barrier()


def test_params_may_be_numbers() -> None:
    tx = guard_params(spa(0.5))
    params = {"w": 1.0}
    updates, state = tx.update({"w": jnp.ones([])}, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    tx.update({"w": jnp.ones([])}, state, params)
    with pytest.raises(ValueError, match=r"`params` .* \['w'\]"):
        tx.update({"w": jnp.ones([])}, state, {"w": 2.0})
