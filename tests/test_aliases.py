"""The AdamW alias, against `optax.adamw`, `optax.contrib` and chains of the pieces."""

import functools
from typing import Any

import chex
import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compiled_step, run, trajectory, x64

from spa_optax import (
    eval_params,
    in_float32,
    primal_averaging,
    scale_by_factored_second_moment,
    scale_by_second_moment,
    spa,
    spa_adamw,
)

ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
ALIASES = {"at x": spa_adamw, "at y": functools.partial(spa_adamw, interpolation=0.9)}
both_aliases = pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
KEY = jax.random.key(0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_temporary_of_parameter_size(dtype: Any) -> None:
    """(Below μ_y = 1 there is, on CPU: the direction, which z and y need. So has
    Schedule-Free.)"""
    compiled = compiled_step(
        spa_adamw(0.1), [jnp.ones((64, 64, 3, 3), dtype) for _ in range(4)]
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


def test_without_averaging_it_is_optax_adamw_without_first_moment() -> None:
    """At c = 1, in float64."""
    itself = lambda state, params: params
    with x64():
        expected, _ = trajectory(optax.adamw(0.01, b1=0, **ADAMW), itself, jnp.float64)
        for alias in ALIASES.values():
            _, x = trajectory(
                alias(0.01, averaging=1.0, **ADAMW), eval_params, jnp.float64
            )
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


@both_aliases
@pytest.mark.parametrize("second_moment", ["full", "bfloat16", "factored"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_alias_is_a_chain_of_the_pieces(
    alias: Any, second_moment: str, dtype: Any
) -> None:
    """To the bit, state and all, as the docstring writes it."""
    params = {"w": jnp.linspace(-1, 1, 130 * 140).reshape(130, 140), "b": jnp.ones(3)}
    params, mask = optax.tree.cast(params, dtype), {"w": True, "b": False}
    grads = jax.tree.map(jnp.cos, params)
    direction = {
        "full": scale_by_second_moment(0.98, 1e-6),
        "bfloat16": scale_by_second_moment(
            0.98, 1e-6, dtype=jnp.bfloat16, rounding_key=KEY
        ),
        "factored": scale_by_factored_second_moment(0.98, 1e-6),
    }[second_moment]
    key = KEY if second_moment == "bfloat16" else None
    average = spa(0.1, 0.2, 1.0 if alias is spa_adamw else 0.9, rounding_key=key)
    pieces = optax.chain(direction, optax.add_decayed_weights(0.1, mask))
    expected = run(optax.chain(in_float32(pieces), average), params, [grads] * 3)
    full = functools.partial(alias, 0.1, averaging=0.2, mask=mask, **ADAMW)
    found = run(
        full(second_moment=second_moment, rounding_key=key), params, [grads] * 3
    )
    chex.assert_trees_all_equal(found, expected)
    # In less memory ν is another.
    if second_moment != "full":
        assert not np.array_equal(
            found[0]["w"], run(full(), params, [grads] * 3)[0]["w"]
        )


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
    6: {"state_dtype": jnp.bfloat16, "second_moment": "bfloat16"},
    4: {"state_dtype": jnp.bfloat16, "second_moment": "factored"},
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
    """It is z_0 that decays first: params replaced after `init`, or the master copy of
    narrow ones.

    x goes half of the way to z, and y is at μ_y x + (1 − μ_y) z.
    """
    base = optax.chain(
        scale_by_second_moment(), optax.add_decayed_weights(0.5), optax.scale(-0.1)
    )
    tx = primal_averaging(base, 0.5, mu_y, params_of_base="z")
    master = {"w": jnp.array([1.001, 2.003]), "integers": jnp.arange(2)}
    zeros = jax.tree.map(jnp.zeros_like, master)
    updates, state = tx.update(zeros, tx.init(zeros), master)
    np.testing.assert_allclose(state.average.z["w"], 0.95 * master["w"], rtol=1e-6)
    way = mu_y * 0.5 + (1 - mu_y)
    np.testing.assert_allclose(updates["w"], -0.05 * way * master["w"], rtol=1e-5)
    narrow = master | {"w": master["w"].astype(jnp.bfloat16)}
    state = tx.init(master)
    for factor in (0.95, 0.95**2):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, narrow), state, narrow)
        np.testing.assert_allclose(
            state.average.z["w"], factor * master["w"], rtol=1e-6
        )
