"""`spa_adamw`, against `optax.adamw` and chains of its pieces."""

import functools
from typing import Any

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled_step, run, trajectory, x64, z_of

from spa_optax import eval_params, in_float32, primal_averaging, spa, spa_adamw

ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
ALIASES = {"at x": spa_adamw, "at y": functools.partial(spa_adamw, interpolation=0.9)}
both_aliases = pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
KEY = jax.random.key(0)


def test_no_temporary_of_parameter_size() -> None:
    """On a CPU there is one below μ_y = 1, or beside bfloat16 params: the direction.

    tests/test_compiled.py has what XLA for TPUs makes of them.
    """
    compiled = compiled_step(spa_adamw(0.1), [jnp.ones((64, 64, 3, 3))] * 4)
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


def test_without_averaging_it_is_optax_adamw_without_first_moment() -> None:
    """At c = 1, in float64."""
    adamw = optax.adamw(0.01, b1=0, **ADAMW)
    with x64():
        expected, _ = trajectory(adamw, lambda state, params: params, jnp.float64)
        for alias in ALIASES.values():
            _, x = trajectory(
                alias(0.01, averaging=1.0, **ADAMW), eval_params, jnp.float64
            )
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@both_aliases
@pytest.mark.parametrize("second_moment", ["full", "factored"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_alias_is_a_chain_of_the_pieces(
    alias: Any, second_moment: str, dtype: Any
) -> None:
    """To the bit, state and all, as the docstring writes it."""
    params = {"w": jnp.linspace(-1, 1, 130 * 140).reshape(130, 140), "b": jnp.ones(3)}
    params, mask = optax.tree.cast(params, dtype), {"w": True, "b": False}
    grads = [jax.tree.map(jnp.cos, params)] * 3
    if second_moment == "full":
        direction = optax.scale_by_rms(
            0.98, 1e-6, eps_in_sqrt=False, bias_correction=True
        )
    else:
        direction = optax.scale_by_factored_rms(
            decay_rate=0.98, epsilon=1e-12, decay_rate_fn=unbiased_decay
        )
    average = spa(0.1, 0.2, 1.0 if alias is spa_adamw else 0.9)
    pieces = optax.chain(direction, optax.add_decayed_weights(0.1, mask))
    expected = run(optax.chain(in_float32(pieces), average), params, grads)
    full = functools.partial(alias, 0.1, averaging=0.2, mask=mask, **ADAMW)
    found = run(full(second_moment=second_moment), params, grads)
    if second_moment == "full":
        chex.assert_trees_all_equal(found, expected)
    else:  # its means stand in dicts, by the paths of the params
        chex.assert_trees_all_equal(found[0], expected[0])
        chex.assert_trees_all_equal(*map(jax.tree.leaves, (found, expected)))
        w_of_full = run(full(), params, grads)[0]["w"]
        assert not np.array_equal(found[0]["w"], w_of_full)


def unbiased_decay(count: Any, b2: Any) -> Any:
    """The decay with which ν has no bias."""
    k = count.astype(float)
    return b2 * (1 - b2**k) / (1 - b2 ** (k + 1))


@pytest.mark.slow
@both_aliases
def test_masks(alias: Any) -> None:
    """A tree of booleans, a function, and an Equinox module of booleans, which is
    callable."""
    model = equinox.filter(
        equinox.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), equinox.is_array
    )
    mask = jax.tree.map(lambda x: x.ndim > 1, model)
    assert callable(mask)
    leaves = jax.tree.leaves(model)
    for params, given in ((model, mask), (leaves, lambda ps: [p.ndim > 1 for p in ps])):
        zeros = jax.tree.map(jnp.zeros_like, params)
        after, _ = run(alias(0.1, weight_decay=0.5, mask=given), params, [zeros])
        moved = jax.tree.leaves(
            jax.tree.map(lambda x, y: bool(jnp.any(x != y)), params, after)
        )
        assert moved == jax.tree.leaves(mask)


BYTES = {
    10: {},
    8: {"state_dtype": jnp.bfloat16},
    6: {"second_moment": "factored"},
    4: {"state_dtype": jnp.bfloat16, "second_moment": "factored"},
    3: {"state_dtype": jnp.float8_e4m3fn, "second_moment": "factored"},
}


@both_aliases
@pytest.mark.parametrize("expected", BYTES)
def test_bytes_a_parameter(alias: Any, expected: int) -> None:
    params = {"w": jnp.zeros((1_000, 1_000), jnp.bfloat16)}
    state = jax.eval_shape(alias(0.1, **BYTES[expected], rounding_key=KEY).init, params)
    num_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))
    )
    assert expected <= num_bytes / 1e6 < expected + 0.01


@pytest.mark.parametrize("mu_y", [1.0, 0.9])
def test_decay_of_z(mu_y: float) -> None:
    """z decays, from params that were put in after `init`.

    x goes half of the way to z, and y is at μ_y x + (1 − μ_y) z.
    """
    base = optax.chain(
        optax.scale_by_rms(eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(0.5),
        optax.scale(-0.1),
    )
    tx = primal_averaging(base, 0.5, mu_y, params_of_base="z")
    params = {"w": jnp.array([1.001, 2.003]), "integers": jnp.arange(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zeros, tx.init(zeros), params)
    np.testing.assert_allclose(state.spa_state.z["w"], 0.95 * params["w"], rtol=1e-6)
    way = mu_y * 0.5 + (1 - mu_y)
    np.testing.assert_allclose(updates["w"], -0.05 * way * params["w"], rtol=1e-5)


def test_decay_of_a_master_copy() -> None:
    """Beside bfloat16 params a decay of half an ulp moves z at every step."""
    base = optax.chain(optax.add_decayed_weights(0.5), optax.scale(-(2.0**-8)))
    key = jax.random.key(0)
    tx = primal_averaging(base, 0.5, params_of_base="z", rounding_key=key)
    y = jnp.ones(4, jnp.bfloat16)
    state: Any = tx.init(y)
    for k in range(1, 5):
        updates, state = tx.update(jnp.zeros_like(y), state, y)
        y = optax.apply_updates(y, updates)
        expected = (1 - 2.0**-9) ** k
        np.testing.assert_allclose(z_of(state, y), expected, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_a_mask_that_is_taken_for_a_schedule_is_refused(jit: bool) -> None:
    """`optax.inject_hyperparams` calls it with the count, and gets one boolean."""

    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}

    def mask(params: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim > 1, params)

    injected = optax.inject_hyperparams(spa_adamw)(0.1, weight_decay=0.5, mask=mask)
    init = jax.jit(injected.init) if jit else injected.init
    with pytest.raises(ValueError, match=r"`mask`.*`static_args`"):
        init(params)
    static = optax.inject_hyperparams(spa_adamw, static_args="mask")
    static(0.1, weight_decay=0.5, mask=mask).init(params)
