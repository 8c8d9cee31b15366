"""The step that all members share: its terms, dtypes, rounding and memory."""

import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FLOAT8, FLOAT16, compiled_step, lenient, run, table, x64, z_of

from spa_optax import SPAState, eval_params, spa, spa_from_sgdm
from spa_optax._coefficients import XZCoefficients
from spa_optax._core import member_from_rule
from spa_optax._state import is_initial

COSINE = lenient(optax.cosine_decay_schedule(0.1, 100))
TRANSFORMS = {
    "eta=1": spa(1.0, 0.1),
    "eta=0.7": spa(0.7, 0.1),
    "sgdm": spa_from_sgdm(0.1, 0.9),
    "nesterov": spa_from_sgdm(COSINE, 0.9, True),
    "injected": optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9),
    "gpa": spa(0.1, 0.1, 0.9),
}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16, FLOAT8])
@pytest.mark.parametrize("name", ["eta=1", "nesterov", "gpa"])
def test_z_itself_beside_params_that_were_cast_is_refused(
    name: str, dtype: Any
) -> None:
    """`convert` keeps the digits: tests/test_storage.py."""
    tx, master = TRANSFORMS[name], jnp.array([1.001, 2.003, -3.007])
    params, state = master.astype(dtype), tx.init(master)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=r"`state\.z`.*state_dtype=None"):
            update(jnp.zeros(3, dtype), state, params)


def test_a_state_is_new_only_while_eta_c_and_w_are_0() -> None:
    new = spa(1.0).init(jnp.ones(2))
    for eta, c, w in itertools.product((0.0, 1.0), repeat=3):
        state = new._replace(eta=jnp.array(eta), c=jnp.array(c), w=jnp.array(w))
        assert is_initial(state) == (eta + c + w == 0)


@pytest.mark.parametrize("tx", TRANSFORMS.values(), ids=TRANSFORMS)
def test_no_temporary_of_parameter_size(tx: Any) -> None:
    params, size = [jnp.ones((64, 64, 3, 3)) for _ in range(4)], 4 * 64 * 64 * 9
    compiled, reference = (compiled_step(t, params) for t in (tx, optax.sgd(0.1, 0.9)))
    memory, expected = compiled.memory_analysis(), reference.memory_analysis()
    # What is left is a few scalars, and the rates that lie ahead.
    assert memory.temp_size_in_bytes < 4_000 < size
    assert 0 <= memory.alias_size_in_bytes - expected.alias_size_in_bytes < 100
    # optax.sgd moves 24 bytes a parameter. z_0 = x_0 costs a read of x more, Nesterov
    # one of g; η = 1 folded away, or u from the old z, would cost 8 to 16.
    extra = (
        compiled.cost_analysis()["bytes accessed"]
        - reference.cost_analysis()["bytes accessed"]
    )
    assert extra < 8.2 * size


@pytest.mark.parametrize("dtype", [jnp.bfloat16, FLOAT16])
def test_updates_round_x_once(dtype: Any) -> None:
    """In 16 bits too, adding the update gives x_{k+1} rounded to nearest: NumPy,
    exactly."""
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=1000), dtype)
    grads = jnp.asarray(rng.normal(size=1000) / 64, dtype)
    tx = spa(1.0, 0.25)  # powers of two: nothing but x_{k+1} itself needs rounding
    state = tx.init(params)
    x = np.asarray(params, np.float64)
    for step in (tx.update, jax.jit(tx.update)):
        updates, after = step(grads, state, params)
        z = x - np.asarray(grads, np.float64)
        found = z_of(after, params + updates)
        np.testing.assert_allclose(found, z, rtol=0, atol=2.0**-23 * abs(x).max())
        expected = jnp.asarray(x + 0.25 * (z - x), dtype)
        assert jnp.array_equal(params + updates, expected)


@pytest.mark.float16
@pytest.mark.usefixtures("standard_promotion")  # dtypes meet in optax here
def test_a_leaf_of_16_bits_costs_the_others_no_momentum() -> None:
    # How much of a rise re-anchoring bears is a matter of each leaf's own dtype.
    dtypes = {"a": jnp.float32, "b": jnp.bfloat16, "empty": jnp.float16}
    params = {
        name: jnp.ones(3 * (name != "empty"), dtype) for name, dtype in dtypes.items()
    }
    alpha = table([0.005] * 10 + [0.1] * 10)
    make = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    found, expected = (
        run(make(factory)(alpha, 0.9), params, [params] * 20)[0]["a"]
        for factory in (spa_from_sgdm, optax.sgd)
    )
    np.testing.assert_allclose(found, expected, rtol=20 * 6e-8 * 10)


@pytest.mark.parametrize(
    "tx",
    [
        spa(0.5, state_dtype=jnp.bfloat16),
        spa(0.5, 0.1, 0.9),
        spa_from_sgdm(0.1, 0.9, True),
    ],
)
def test_a_step_as_it_is_observed(tx: Any) -> None:
    """x_{k+1} − x_k = c (d_k − η g_k) − δ g_k, where d_k = r (z_k − x_k)."""
    y = jnp.linspace(1.0, 2.0, 5)
    state, steps = tx.init(y), []

    def observe(*step: Any) -> None:
        steps.append(step)

    for _ in range(3):
        x, z, g = eval_params(state, y), z_of(state, y), jnp.cos(y)
        updates, after = tx.update(g, state, y, observe=observe)
        observed_g, observed_state, observed_y, s = steps[-1]
        chex.assert_trees_all_equal(
            (observed_g, observed_y, observed_state), (g, y, state)
        )
        r = 1.0 if s.r is None else s.r
        delta = 0.0 if s.delta is None else s.delta
        u = s.c * (r * (z - x) - s.eta * g) - delta * g
        y, state = y + updates, after
        np.testing.assert_allclose(eval_params(state, y) - x, u, atol=2e-6)
    assert len(steps) == 3


def test_all_terms_of_a_step() -> None:
    """The equations of `XZCoefficients`, in NumPy."""
    rng = np.random.default_rng(0)
    values, gradients = rng.uniform(0.1, 0.9, (6, 4)), rng.normal(size=(6, 5))
    x = z = y = np.ones(5)
    for (eta, c, mu_y, delta), g in zip(values, gradients, strict=True):
        z = z - eta * g
        x = x + c * (z - x) - delta * g
        y = mu_y * x + (1 - mu_y) * z
    with x64():
        rows = jnp.asarray(values)

        def rule(state: SPAState) -> XZCoefficients:
            eta, c, mu_y, delta = rows[state.count]
            return XZCoefficients(eta, c, next_w=c, next_mu_y=mu_y, delta=delta)

        tx = member_from_rule(rule, None, None, nominal_averaging=0.1)
        params, state = run(tx, jnp.ones(5), list(jnp.asarray(gradients)))
        np.testing.assert_allclose(
            (params, eval_params(state, params)), (y, x), rtol=1e-12
        )


def test_a_rule_that_rescales_while_the_params_are_not_x() -> None:
    def rule(state: SPAState) -> XZCoefficients:
        return XZCoefficients(*jnp.ones(4), r=jnp.float32(2.0))

    tx = member_from_rule(rule, None, None, nominal_averaging=0.1)
    with pytest.raises(ValueError, match=r"`r`.*`next_mu_y`"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))


def test_z_is_an_array_of_its_own() -> None:
    """Otherwise a step could not donate both the params and the state."""
    x = jnp.ones(3)
    z = spa(0.1).init(x).z
    assert z.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
