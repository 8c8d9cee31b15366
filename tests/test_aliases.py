"""The AdamW aliases, against `optax.adamw`, `optax.contrib` and chains of the pieces."""

import functools
from typing import Any

import chex
import equinox
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
    convert,
    eval_params,
    in_float32,
    primal_averaging,
    scale_by_factored_second_moment,
    scale_by_second_moment,
    schedule_free_averaging,
    spa,
    spa_adamw,
)

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
GRADS = jax.tree.map(lambda p: jnp.cos(p) / 3, PARAMS)
MASK = {"w": True, "b": {"c": False}}
ADAMW: Any = {"b2": 0.98, "eps": 1e-6, "weight_decay": 0.1}
GPA = {"averaging": 0.05, "interpolation": 0.9}
ALIASES = {"at x": spa_adamw, "at y": functools.partial(spa_adamw, **GPA)}
both_aliases = pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
KEY = jax.random.key(0)
SECOND_MOMENTS: dict[str, Any] = {
    "full": {},
    "bfloat16": {"second_moment": "bfloat16", "rounding_key": KEY},
    "factored": {"second_moment": "factored"},
}
every_second_moment = pytest.mark.parametrize("kwargs", SECOND_MOMENTS.values(), ids=SECOND_MOMENTS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_spa_adamw_has_no_temporary_of_parameter_size(dtype: Any) -> None:
    """(`gpa_adamw` has, on CPU: the direction, which z and y both need. So has Schedule-Free.)"""
    compiled = compiled_step(spa_adamw(0.1), [jnp.ones((64, 64, 3, 3), dtype) for _ in range(4)])
    assert compiled.memory_analysis().temp_size_in_bytes < 4_000


# --------------------------------------------------------------------------------------- iterates


def test_schedule_free_adamw() -> None:
    with x64():
        reference = optax.contrib.schedule_free_adamw(0.01, b1=0.9, **ADAMW)
        evaluate = optax.contrib.schedule_free_eval_params
        y_reference, x_reference = trajectory(reference, evaluate, jnp.float64)
        y, x = trajectory(spa_adamw(0.01, UNIFORM, 0.9, **ADAMW), eval_params, jnp.float64)
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
        y, x = trajectory(spa_adamw(rate, c, 0.9, **ADAMW), eval_params, jnp.float64)
    np.testing.assert_allclose(y, y_reference, rtol=0, atol=1e-9)
    np.testing.assert_allclose(x, x_reference, rtol=0, atol=1e-7)


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
        for tx in (spa_adamw(0.01, 1.0, **ADAMW), spa_adamw(0.01, 1.0, 0.9, **ADAMW)):
            _, x = trajectory(tx, eval_params, jnp.float64)
            np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


@both_aliases
@every_second_moment
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_alias_is_a_chain_of_the_pieces(alias: Any, kwargs: Any, dtype: Any) -> None:
    """To the bit, state and all, as the docstring writes it."""
    params = {"w": jnp.linspace(-1, 1, 130 * 140).reshape(130, 140), "b": jnp.ones(3)}
    params = optax.tree.cast(params, dtype)
    grads = jax.tree.map(jnp.cos, params)
    b2, eps, decay = ADAMW.values()
    direction = {
        "full": scale_by_second_moment(b2, eps),
        "bfloat16": scale_by_second_moment(b2, eps, dtype=jnp.bfloat16, rounding_key=KEY),
        "factored": scale_by_factored_second_moment(b2, eps),
    }[kwargs.get("second_moment", "full")]
    mask = {"w": True, "b": False}
    key = kwargs.get("rounding_key")
    mu_y = 1.0 if alias is spa_adamw else 0.9
    average = spa(0.1, 0.2, mu_y, rounding_key=key)
    pieces = optax.chain(direction, optax.add_decayed_weights(decay, mask))
    chain = optax.chain(in_float32(pieces), average)
    expected = apply(chain, params, [grads] * 3)
    found = apply(alias(0.1, averaging=0.2, **ADAMW, mask=mask, **kwargs), params, [grads] * 3)
    chex.assert_trees_all_equal(found, expected)
    # In less memory ν is another.
    if kwargs:
        full, _ = apply(alias(0.1, averaging=0.2, **ADAMW, mask=mask), params, [grads] * 3)
        assert not np.array_equal(found[0]["w"], full["w"])


@both_aliases
def test_a_mask_may_be_callable(alias: Any) -> None:
    """As for Optax: a tree of booleans shaped like an Equinox module, whose leaves are bools."""
    model = equinox.filter(equinox.nn.MLP(2, 2, 3, 1, key=jax.random.key(0)), equinox.is_array)
    mask = jax.tree.map(lambda x: x.ndim > 1, model)
    assert callable(mask)
    zeros = jax.tree.map(jnp.zeros_like, model)
    params, _ = apply(alias(0.1, weight_decay=0.5, mask=mask), model, [zeros])
    chex.assert_trees_all_equal(jax.tree.map(lambda x, y: jnp.any(x != y), params, model), mask)


@both_aliases
def test_frozen_params_are_frozen_in_x_too(alias: Any) -> None:
    """Divided, or with their direction set to 0, just before the average, and not their update."""
    params, frozen = {"head": jnp.ones(3), "trunk": jnp.ones(3)}, {"head": False, "trunk": True}
    freeze = optax.masked(optax.set_to_zero(), frozen)
    labels = {"head": "trained", "trunk": "frozen"}
    divided = optax.partition({"trained": alias(0.1), "frozen": optax.set_to_zero()}, labels)
    before = optax.chain(in_float32(optax.add_decayed_weights(0.1)), freeze, spa(0.1, 0.05, 0.9))
    for tx, moves in (
        (divided, False),
        (before, False),
        (optax.chain(spa(0.1, 0.05, 0.9), freeze), True),
    ):
        y, state = apply(tx, params, [params] * 3)
        x = eval_params(state, y)
        assert jnp.all(y["trunk"] == 1)
        assert jnp.any(x["trunk"] != 1) == moves
        assert jnp.all(x["head"] < 1)


@both_aliases
def test_mask_and_decay(alias: Any) -> None:
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


@pytest.mark.parametrize("alias", ALIASES)
@every_second_moment
def test_complex_params(alias: str, kwargs: Any) -> None:
    """Their second moment is real, in any form. Casts from complex to real would warn."""
    params = {"w": jnp.ones((128, 129), jnp.complex64)}
    tx = ALIASES[alias](0.1, **kwargs)
    state = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        _, adam = optax.adamw(0.1).update(params, optax.adamw(0.1).init(params), params)
    if alias == "at x":
        state = convert(adam, params, into=state, adam=optax.adamw(0.1), learning_rate=0.1)
    updates, after = tx.update(params, state, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert updates["w"].dtype == jnp.complex64
    moment = jax.tree.leaves(after[0][0])
    assert not any(jnp.iscomplexobj(leaf) for leaf in moment)


# ----------------------------------------------------------------------------------------- memory


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
    state = alias(0.1, **BYTES[expected], rounding_key=KEY).init(params)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert expected <= num_bytes / 1e6 < expected + 0.01
    if expected == 8:  # 16 bits of z leave ν as it is
        assert optax.tree.get(state, "nu")["w"].dtype == jnp.float32


def test_the_structure_of_the_state() -> None:
    """That of z says how it is kept; other options of dtype may change between runs."""
    params = {"w": jnp.ones((2, 3))}
    (direction, decay), last = spa_adamw(0.1).init(params)  # pyright: ignore
    assert type(direction).__name__ == "ScaleByRmsWithCountState"
    assert isinstance(decay, optax.EmptyState)
    assert isinstance(last, SPAState)
    structure = jax.tree.structure(spa_adamw(0.1).init(params))
    of = lambda **kwargs: jax.tree.structure(
        spa_adamw(0.1, rounding_key=KEY, **kwargs).init(params)
    )
    assert of(second_moment="bfloat16") == structure
    assert of(state_dtype=jnp.bfloat16) != structure


@both_aliases
@every_second_moment
def test_second_moment_stays_without_gradient(alias: Any, kwargs: Any) -> None:
    tx, params = alias(0.1, **kwargs), {"a": jnp.ones((128, 130)), "b": jnp.ones((129, 128))}
    grads = jax.tree.map(lambda p: p / 3, params)
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    updates, after = tx.update({"a": None, "b": 2 * grads["b"]}, state, params)
    assert updates["a"] is None
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    names = ("v_row", "v_col") if kwargs.get("second_moment") == "factored" else ("nu",)
    for name in names:
        before, now = optax.tree.get(state, name), optax.tree.get(after, name)
        assert before["a"].size > 1
        chex.assert_trees_all_equal(now["a"], before["a"])
        assert np.any(np.asarray(now["b"] != before["b"]))


# ------------------------------------------------------------------------------------- decay of z


def adam_that_decays(rate: Any, b2: float, eps: float, decay: Any, mask: Any = None) -> Any:
    """AdamW without its first moment, as a finished optimizer."""
    return optax.chain(
        scale_by_second_moment(b2, eps),
        optax.add_decayed_weights(decay, mask),
        optax.scale_by_learning_rate(rate),
    )


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
def test_decay_of_z(decay: float) -> None:
    gradients, y = np.random.default_rng(0).normal(size=(300, 50)), np.full(50, 0.1)
    expected = np.array(list(gpa_with_decay_of_z(gradients, y, decay, mu_y=0.8, c=0.05)))

    def run(tx: optax.GradientTransformation) -> Any:
        def step(carry: Any, g: Any) -> Any:
            y, state = carry
            updates, state = tx.update(g, state, y)
            y = optax.apply_updates(y, updates)
            return (y, state), jnp.stack([y, eval_params(state, y)])

        carry = jnp.asarray(y), tx.init(jnp.asarray(y))
        return np.asarray(jax.lax.scan(step, carry, gradients)[1])

    with x64():
        base = adam_that_decays(WARMUP_COSINE, ADAMW["b2"], ADAMW["eps"], decay)
        at_z = run(primal_averaging(base, 0.05, 0.8, params_of_base="z"))
        of_alias = run(spa_adamw(WARMUP_COSINE, 0.05, 0.8, **ADAMW | {"weight_decay": decay}))
    np.testing.assert_allclose(at_z, expected, rtol=0, atol=1e-7)  # μ_y is kept as float32
    np.testing.assert_allclose(at_z[:, 0], expected[:, 0], rtol=0, atol=1e-11)
    assert np.abs(of_alias - expected).max() > 1e-3  # so the comparison could have failed


@pytest.mark.parametrize("mu_y", [1.0, 0.9])
def test_decay_of_z_of_params_replaced_after_init(mu_y: float) -> None:
    """z_0 is what the params are at the first step: it is they that decay, and where masked."""
    base = adam_that_decays(0.1, 0.999, 1e-8, 0.5, MASK)
    tx = primal_averaging(base, 0.5, mu_y, params_of_base="z")
    state = tx.init(jax.tree.map(jnp.zeros_like, PARAMS))
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), state, PARAMS)
    z = optax.tree.get(state, "z")
    np.testing.assert_allclose(z["w"], 0.95 * PARAMS["w"], rtol=1e-6)
    # x goes half of the way to z, and y is at μ_y x + (1 − μ_y) z.
    way = mu_y * 0.5 + (1 - mu_y)
    np.testing.assert_allclose(updates["w"], -0.05 * way * PARAMS["w"], rtol=1e-5)
    np.testing.assert_array_equal(z["b"]["c"], PARAMS["b"]["c"])
    np.testing.assert_array_equal(updates["b"]["c"], 0)


@pytest.mark.parametrize("mu_y", [1.0, 0.9])
def test_decay_of_z_of_a_master_copy(mu_y: float) -> None:
    master = {"w": jnp.array([1.001, 2.003])}
    params = optax.tree.cast(master, jnp.bfloat16)
    decay = lambda k: 0.5 / (k + 1).astype(float)
    try:
        scheduled: Any = optax.add_decayed_weights(decay)
        scheduled.update(master, scheduled.init(master), master)
    except TypeError:
        pytest.skip("this Optax has no schedules of weight decay")
    tx = primal_averaging(adam_that_decays(0.1, 0.999, 1e-8, decay), 0.5, mu_y, params_of_base="z")
    state = tx.init(master)
    for factor in (0.95, 0.95 * 0.975):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        z = optax.tree.get(state, "z")["w"]
        np.testing.assert_allclose(z, factor * master["w"], rtol=1e-6)
