"""Directions by a second moment: full, in 16 bits, and factored as in Adafactor."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import run, x64

from spa_optax import (
    in_float32,
    scale_by_factored_second_moment,
    scale_by_second_moment,
    spa,
)

pytestmark = pytest.mark.usefixtures(
    "standard_promotion"
)  # outside of `in_float32`, as Optax's
KEY = jax.random.key(0)
WIDE = {
    "matrix": jnp.linspace(-1, 1, 12 * 20).reshape(12, 20),
    "stack": jnp.linspace(1, 2, 3 * 16 * 10).reshape(3, 16, 10),
    "bias": jnp.linspace(-1, 1, 30),
}
SCALES: dict[str, Any] = {
    "full": scale_by_second_moment(),
    "16 bits": scale_by_second_moment(dtype=jnp.bfloat16, rounding_key=KEY),
    "factored": scale_by_factored_second_moment(min_dim_size_to_factor=2),
}
every_scale = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


def random_grads(num_steps: int) -> list[Any]:
    return [
        optax.tree.random_like(key, WIDE) for key in jax.random.split(KEY, num_steps)
    ]


@every_scale
def test_leaves_without_gradient_and_complex_ones(scale: Any) -> None:
    """ν stays where there is no gradient; it is real, and casts from complex would
    warn."""
    z = jnp.array([[3 + 4j, -5j], [1.0, 2j]], jnp.complex64)
    params = {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 2)), "z": z, "none": None}
    state = scale.init(params)
    _, state = scale.update(params, state, params)
    d, after = scale.update({**params, "a": None, "b": 2 * params["b"]}, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert not any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(after))
    assert (d["a"], d["none"], d["z"].dtype) == (None, None, z.dtype)
    np.testing.assert_allclose(d["z"] / jnp.abs(d["z"]), z / jnp.abs(z), rtol=1e-5)
    for name in {"nu", "v_row", "v_col"} & set(state._fields):
        before, now = getattr(state, name), getattr(after, name)
        assert before["a"].size > 1
        chex.assert_trees_all_equal(now["a"], before["a"])
        assert np.any(np.asarray(now["b"] != before["b"]))


def test_a_second_moment_in_bfloat16_goes_on_where_it_would_be_float32() -> None:
    """Rounded at random; to the nearest, 0.999 of it would be itself."""
    zeros, wide = jnp.zeros(4_096), scale_by_second_moment(rounding_key=KEY)
    state = SCALES["16 bits"].init(zeros)
    _, state = run(wide, zeros, [zeros] * 300, state._replace(nu=state.nu + 1))
    np.testing.assert_allclose(jnp.mean(state.nu.astype(float)), 0.999**300, rtol=0.01)


@pytest.mark.parametrize("scalar", [np.float64, np.asarray])
def test_scalars_of_numpy_do_not_widen_the_second_moment(scalar: Any) -> None:
    with x64():
        params = jnp.ones((4, 3), jnp.float32)
        b2, eps = scalar(0.99), scalar(1e-8)
        for tx in (
            scale_by_second_moment(b2, eps),
            scale_by_factored_second_moment(b2, eps, min_dim_size_to_factor=2),
            scale_by_factored_second_moment(b2, eps, power=scalar(0.8)),
        ):
            state = tx.init(params)
            d, after = tx.update(params, state, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
            assert d.dtype == jnp.float32


def test_16_bits_of_second_moment_are_right_in_the_mean() -> None:
    """Over places, and over steps of which nearest rounding would see none."""
    num_places, num_steps = 256, 100
    params = jnp.ones((64, num_places), jnp.bfloat16)
    g = params * jnp.linspace(0.5, 1.5, 64)[:, None]
    _, state = run(in_float32(SCALES["16 bits"]), params, [g] * num_steps)
    assert state.nu.dtype == jnp.bfloat16
    nu, g = np.float64(state.nu), np.float64(g[:, 0])
    error = nu.std(1) / num_places**0.5
    # 64 of them: 5 standard errors are passed once in 30,000 times.
    assert np.all(np.abs(nu.mean(1) - g**2 * (1 - 0.999**num_steps)) < 5 * error)
    assert np.all(error > 0)


def test_the_direction_takes_the_second_moment_as_stored() -> None:
    b2, eps = 0.9, 1e-3
    with x64():
        g = jnp.linspace(-1.0, 2.0, 100)
        tx = scale_by_second_moment(b2, eps, dtype=jnp.bfloat16, rounding_key=KEY)
        state: Any = tx.init(g)
        for k in (1, 2, 3):
            d, state = tx.update(g, state, g)
            nu = np.asarray(state.nu, np.float64)
            exact = g / (np.sqrt(nu / (1 - b2**k)) + eps)
            # The 16-bit ν is widened to float32: division, root, sum, inverse round
            # once each.
            np.testing.assert_allclose(
                d, exact, rtol=4 * float(jnp.finfo(jnp.float32).eps) / 2
            )
            wide = (1 - b2**k) * np.asarray(g) ** 2
            assert np.abs(nu / wide - 1).max() > 2**-9  # it was rounded


def test_factored_outside_of_in_float32() -> None:
    x, tx = jnp.ones((128, 128), jnp.bfloat16), scale_by_factored_second_moment()
    with pytest.raises(
        ValueError, match="`state` must have 32 bits or more, got 16: put this in"
    ):
        tx.update(x, tx.init(x), x)


def test_factored_is_adafactor() -> None:
    """`optax.adafactor`, without the scale of the params, is it at c = 1."""
    adafactor = optax.adafactor(
        0.01,
        min_dim_size_to_factor=10,
        multiply_by_parameter_scale=False,
        clipping_threshold=0.9,
    )
    scale = scale_by_factored_second_moment(
        eps=1e-15, power=0.8, min_dim_size_to_factor=10
    )
    tx = optax.chain(
        in_float32(optax.chain(scale, optax.clip_by_block_rms(0.9))), spa(0.01, 1.0)
    )
    expected, _ = run(adafactor, WIDE, random_grads(20))
    found, _ = run(tx, WIDE, random_grads(20))
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("b2", [0.0, 0.999])
def test_factored_second_moment_of_adam(b2: float) -> None:
    """From the equations: means over rows and columns of a ν that is corrected for its
    bias."""
    eps, num_steps = 1e-3, 5
    grads = random_grads(num_steps)
    tx = scale_by_factored_second_moment(b2, eps, min_dim_size_to_factor=10)
    state: Any = tx.init(WIDE)
    for g in grads:
        d, state = jax.jit(tx.update)(g, state, WIDE)
    weights = np.array([(1 - b2) * b2 ** (num_steps - 1 - k) for k in range(num_steps)])
    weights /= 1 - b2**num_steps
    for name, axes in (("matrix", (0, 1)), ("stack", (1, 2)), ("bias", None)):
        g = np.array([g[name] for g in grads], np.float64)
        nu = np.tensordot(weights, g**2 + eps**2, 1)
        if axes:
            mean = lambda axis, nu=nu: nu.mean(axis, keepdims=True)
            nu = mean(axes[0]) * mean(axes[1]) / mean(axes)
        # 1 − β₂^k loses up to 1/(1 − β₂) of its digits: 6e-8 · 1,000 at 0.999.
        np.testing.assert_allclose(d[name], g[-1] / np.sqrt(nu), rtol=1e-4)


@pytest.mark.parametrize("power", [0.8, None])
def test_factored_where_gradients_are_zero_or_huge(power: float | None) -> None:
    """ε² underflows at 1e-30, a sum of squares overflows at 2e18, and their ratio
    underflows."""
    params = (jnp.ones((256, 256)),) * 4  # in as many as a result has fields
    tx = scale_by_factored_second_moment(eps=1e-30, power=power)
    for size in (0.0, 1.0, 2e18):
        g = jnp.full((256, 256), size).at[3].set(0)
        state = tx.init(params)
        for _ in range(3):
            d, state = jax.jit(tx.update)((g, -g, g, g), state, params)
            for sign, direction in zip((1, -1, 1, 1), d, strict=True):
                np.testing.assert_allclose(
                    direction, sign * jnp.sign(g), rtol=1e-5, atol=1e-5
                )
