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
    evaluated,
    trajectory,
    x64,
)

from spa_optax import (
    SPAState,
    eval_params,
    gpa_adamw,
    schedule_free_averaging,
    spa,
    spa_adamw,
    state_from_adamw,
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


@pytest.mark.parametrize("num_warmup_steps", [40, 500])
def test_schedule_free_adamw_after_a_warmup(num_warmup_steps: int) -> None:
    """optax reads the rate for its weights one count later than for its steps."""
    with x64():
        rate = evaluated(optax.warmup_constant_schedule(0.0, 0.01, num_warmup_steps))
        # As `optax.contrib.schedule_free_adamw`, which makes a schedule of its own, makes it.
        base = optax.chain(
            optax.scale_by_rms(0.98, 1e-6, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(rate),
        )
        reference = optax.contrib.schedule_free(base, rate, b1=0.9)
        evaluate = optax.contrib.schedule_free_eval_params
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        c = schedule_free_averaging(lambda k: rate(k + 1), num_warmup_steps)
        y, x = trajectory(gpa_adamw(rate, c, 0.9, **ADAMW), eval_params, jnp.float64)
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-9)
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


# ------------------------------------------------------------------------------- decay at z


def gpa_with_decay_of_z(gradients: Any, x: Any, decay: float, mu_y: float, c: float) -> Any:
    """GPA from its three equations, with λ z in the direction: y and x."""
    b2, eps = ADAMW["b2"], ADAMW["eps"]
    z, nu = x, np.zeros_like(x)
    for k, g in enumerate(gradients):
        rate = float(WARMUP_COSINE(k))
        nu = b2 * nu + (1 - b2) * g * g
        z = z - rate * (g / (np.sqrt(nu / (1 - b2 ** (k + 1))) + eps) + decay * z)
        x = (1 - c) * x + c * z
        yield mu_y * x + (1 - mu_y) * z, x


@pytest.mark.parametrize("decay", [0.1, 3.0])
def test_decay_at_z(decay: float) -> None:
    gradients, y = np.random.default_rng(0).normal(size=(300, 50)), np.full(50, 0.1)
    expected = np.array(list(gpa_with_decay_of_z(gradients, y, decay, mu_y=0.8, c=0.05)))
    kwargs: Any = ADAMW | {"weight_decay": decay}

    def run(tx: optax.GradientTransformation) -> Any:
        def step(carry: Any, g: Any) -> Any:
            y, state = carry
            updates, state = tx.update(g, state, y)
            y = optax.apply_updates(y, updates)
            return (y, state), jnp.stack([y, eval_params(state, y)])

        carry = jnp.asarray(y), tx.init(jnp.asarray(y))
        return np.asarray(jax.lax.scan(step, carry, gradients)[1])

    with x64():
        at_z = run(gpa_adamw(WARMUP_COSINE, 0.05, 0.8, decay_at="z", **kwargs))
        at_params = run(gpa_adamw(WARMUP_COSINE, 0.05, 0.8, **kwargs))
    np.testing.assert_allclose(at_z, expected, rtol=0, atol=1e-7)  # μ_y is kept as float32
    np.testing.assert_allclose(at_z[:, 0], expected[:, 0], rtol=0, atol=1e-11)
    assert np.abs(at_params - expected).max() > 1e-3  # so the comparison could have failed


@both_aliases
def test_decay_at_z_of_params_replaced_after_init(alias: Any) -> None:
    """z_0 is what the params are at the first step: it is they that decay, and where masked."""
    tx = alias(0.1, 0.5, weight_decay=0.5, mask=MASK, decay_at="z")
    state = tx.init(jax.tree.map(jnp.zeros_like, PARAMS))
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
    z = optax.tree.get(state, "z")
    np.testing.assert_allclose(z["w"], 0.95 * PARAMS["w"], rtol=1e-6)
    # x goes half of the way to z, and y is there too, or at 0.9 x + 0.1 z.
    way = 0.5 if alias is spa_adamw else 0.9 * 0.5 + 0.1
    np.testing.assert_allclose(updates["w"], -0.05 * way * PARAMS["w"], rtol=1e-5)
    np.testing.assert_array_equal(z["b"]["c"], PARAMS["b"]["c"])
    np.testing.assert_array_equal(updates["b"]["c"], 0)


@both_aliases
def test_decay_at_z_of_a_master_copy(alias: Any) -> None:
    master = {"w": jnp.array([1.001, 2.003])}
    params = optax.tree.cast(master, jnp.bfloat16)
    decay = lambda k: 0.5 / (k + 1).astype(float)
    try:
        scheduled: Any = optax.add_decayed_weights(decay)
        scheduled.update(master, scheduled.init(master), master)
    except TypeError:
        pytest.skip("this Optax has no schedules of weight decay")
    tx = alias(0.1, 0.5, weight_decay=decay, decay_at="z")
    state = tx.init(master)
    for factor in (0.95, 0.95 * 0.975):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        z = optax.tree.get(state, "z")["w"]
        np.testing.assert_allclose(z, factor * master["w"], rtol=1e-6)


# --------------------------------------------------------------------- the second moment in less

WIDE = {
    "matrix": jnp.linspace(-1, 1, 12 * 20).reshape(12, 20),
    "stack": jnp.linspace(1, 2, 3 * 16 * 10).reshape(3, 16, 10),
    "bias": jnp.linspace(-1, 1, 30),
}


def random_grads(num_steps: int) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), num_steps)
    return [optax.tree.random_like(key, WIDE) for key in keys]


def test_factored_is_adafactor() -> None:
    """`optax.adafactor`, without the scale of the params, is it at c = 1."""
    adafactor = optax.adafactor(
        0.01, min_dim_size_to_factor=10, multiply_by_parameter_scale=False, clipping_threshold=0.9
    )
    tx = spa_adamw(
        0.01,
        1.0,
        eps=1e-15,
        weight_decay=0.0,
        second_moment="factored",
        decay_rate=0.8,
        clipping_threshold=0.9,
        min_dim_size_to_factor=10,
    )
    expected, _ = apply(adafactor, WIDE, random_grads(20))
    found, _ = apply(tx, WIDE, random_grads(20))
    chex.assert_trees_all_close(found, expected, rtol=1e-5)


@both_aliases
@pytest.mark.parametrize("b2", [0.0, 0.9, 0.999])
def test_factored_second_moment_of_adam(alias: Any, b2: float) -> None:
    """From the equations: means over rows and columns of a ν that is corrected for its bias."""
    eps, num_steps = 1e-3, 5
    grads = random_grads(num_steps)
    kwargs: Any = {"b2": b2, "eps": eps, "weight_decay": 0.0, "min_dim_size_to_factor": 10}
    tx = alias(1.0, 1.0, **kwargs, second_moment="factored")
    before, _ = apply(tx, WIDE, grads[:-1])
    after, _ = apply(tx, WIDE, grads)
    d = jax.tree.map(lambda before, after: before - after, before, after)
    weights = np.array([(1 - b2) * b2 ** (num_steps - 1 - k) for k in range(num_steps)])
    weights /= 1 - b2**num_steps
    for name, axes in (("matrix", (0, 1)), ("stack", (1, 2)), ("bias", None)):
        g = np.array([g[name] for g in grads], np.float64)
        nu = np.tensordot(weights, g**2 + eps**2, 1)
        if axes:
            mean = lambda axis, nu=nu: nu.mean(axis, keepdims=True)
            nu = mean(axes[0]) * mean(axes[1]) / mean(axes)
        np.testing.assert_allclose(d[name], g[-1] / np.sqrt(nu), rtol=3e-4, atol=1e-5)


@both_aliases
@pytest.mark.parametrize("kwargs", [{"decay_rate": 0.8}, {}])
def test_factored_where_gradients_are_zero_or_huge(alias: Any, kwargs: Any) -> None:
    """ε² underflows at 1e-30, a sum of squares overflows at 2e18, and their ratio underflows."""
    params = {"w": jnp.ones((256, 256))}
    tx = alias(1.0, 1.0, eps=1e-30, weight_decay=0.0, second_moment="factored", **kwargs)
    for size in (0.0, 1.0, 2e18):
        g = jnp.full((256, 256), size).at[3].set(0)
        x, _ = apply(tx, params, [{"w": g}] * 3)
        np.testing.assert_allclose(x["w"], 1 - 3 * jnp.sign(g), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alias", ALIASES)
def test_complex_params(alias: str) -> None:
    """Their second moment is real, in any form. Casts from complex to real would warn."""
    params = {"w": jnp.ones((4, 6), jnp.complex64)}
    for kwargs in SMALL.values():
        tx = ALIASES[alias](0.1, **kwargs)
        state = tx.init(params)
        with jax.numpy_dtype_promotion("standard"):
            _, adam = optax.adamw(0.1).update(params, optax.adamw(0.1).init(params), params)
        if alias == "spa_adamw":
            state = state_from_adamw(adam, params, learning_rate=0.1, into=state)
        updates, after = tx.update(params, state, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        assert updates["w"].dtype == jnp.complex64
        moment = jax.tree.leaves(after[0][0])
        assert not any(jnp.iscomplexobj(leaf) for leaf in moment)


BYTES = {
    10: {},
    8: {"state_dtype": jnp.bfloat16},
    6: {"state_dtype": jnp.bfloat16, "second_moment_dtype": jnp.bfloat16},
    4: {"state_dtype": jnp.bfloat16, "second_moment": "factored"},
}


@both_aliases
@pytest.mark.parametrize("expected", BYTES)
def test_bytes_a_parameter(alias: Any, expected: int) -> None:
    params = {"w": jnp.zeros((1_000, 1_000), jnp.bfloat16)}
    state = alias(0.1, **BYTES[expected], rounding_key=jax.random.key(0)).init(params)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert expected <= num_bytes / 1e6 < expected + 0.01
    if expected == 8:  # 16 bits of z leave ν as it is
        assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32


def test_the_state_of_earlier_checkpoints() -> None:
    params = {"w": jnp.ones((2, 3))}
    (direction, decay), last = spa_adamw(0.1).init(params)  # pyright: ignore
    assert type(direction).__name__ == "ScaleByRmsWithCountState"
    assert isinstance(decay, optax.EmptyState)
    assert isinstance(last, SPAState)
    structure = jax.tree.structure(spa_adamw(0.1).init(params))
    key = jax.random.key(0)
    for kwargs in (
        {"decay_at": "z"},
        {"second_moment_dtype": jnp.bfloat16, "rounding_key": key},
        {"clipping_threshold": 1.0},
        {"state_dtype": jnp.bfloat16, "rounding_key": key},
    ):
        assert jax.tree.structure(spa_adamw(0.1, **kwargs).init(params)) == structure


@both_aliases
def test_16_bits_of_second_moment_are_right_in_the_mean(alias: Any) -> None:
    """Over keys, and over steps of which nearest rounding would see none."""
    params, g = jnp.ones(64), jnp.linspace(0.5, 1.5, 64)
    num_keys, num_steps = 256, 100

    def run(key: Any) -> Any:
        tx = alias(0.0, second_moment_dtype=jnp.bfloat16, rounding_key=key)
        step = lambda state, _: (tx.update(g, state, params)[1], None)
        state, _ = jax.lax.scan(step, tx.init(params), None, num_steps)
        return optax.tree.get(state, "nu")

    nu = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), num_keys))
    assert nu.dtype == jnp.bfloat16
    nu = np.asarray(nu, np.float64)
    exact = np.asarray(g, np.float64) ** 2 * (1 - 0.999**num_steps)
    error = nu.std(0) / num_keys**0.5
    # 64 of them: 5 standard errors are passed once in 30,000 times.
    assert np.all(np.abs(nu.mean(0) - exact) < 5 * error)
    assert np.all(error > 0)


def test_the_direction_takes_the_second_moment_as_stored() -> None:
    """With η = c = 1 a step is the direction."""
    b2, eps, key = 0.9, 1e-3, jax.random.key(0)
    with x64():
        x, g = jnp.zeros(100), jnp.linspace(-1.0, 2.0, 100)
        tx = spa_adamw(1.0, 1.0, b2, eps, 0.0, second_moment_dtype=jnp.bfloat16, rounding_key=key)
        state = tx.init(x)
        for k in (1, 2, 3):
            step, state = tx.update(g, state, x)
            x += step
            nu = np.asarray(optax.tree.get(state, "nu"), np.float64)
            exact = -g / (np.sqrt(nu / (1 - b2**k)) + eps)
            # The 16-bit ν is widened to float32: division, root, sum, inverse round once each.
            np.testing.assert_allclose(step, exact, rtol=4 * float(jnp.finfo(jnp.float32).eps) / 2)
            wide = (1 - b2**k) * np.asarray(g) ** 2
            assert np.abs(nu / wide - 1).max() > 2**-9  # it was rounded


SMALL: dict[str, Any] = {
    "16 bits": {"second_moment_dtype": jnp.bfloat16, "rounding_key": jax.random.key(0)},
    "factored": {"second_moment": "factored", "min_dim_size_to_factor": 2},
    "full": {},
}


@both_aliases
@pytest.mark.parametrize("kwargs", SMALL.values(), ids=SMALL)
def test_second_moment_stays_without_gradient(alias: Any, kwargs: Any) -> None:
    tx, params = alias(0.1, **kwargs), {"a": jnp.ones((3, 4)), "b": jnp.ones((2, 2))}
    grads = jax.tree.map(lambda p: p / 3, params)
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    updates, after = tx.update({"a": None, "b": 2 * grads["b"]}, state, params)
    assert updates["a"] is None
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    names = ("v_row", "v_col") if "second_moment" in kwargs else ("nu",)
    for name in names:
        before, now = optax.tree.get(state, name), optax.tree.get(after, name)
        chex.assert_trees_all_equal(now["a"], before["a"])
        assert np.any(np.asarray(now["b"] != before["b"]))


@both_aliases
def test_clipping_threshold(alias: Any) -> None:
    """The first direction is the gradient's sign, whose root mean square is 1."""
    tx = alias(1.0, 1.0, weight_decay=0.0, clipping_threshold=0.25)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda g: -0.25 * jnp.sign(g), GRADS), rtol=1e-5
    )
