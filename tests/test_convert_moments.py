"""Runs of AdamW, Schedule-Free and the family that move, against the same runs
unmoved."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import evaluated, quick, x64

from spa_optax import (
    convert,
    eval_params,
    in_float32,
    primal_averaging,
    scale_by_factored_second_moment,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

ADAM: Any = {"b2": 0.999, "eps": 1e-6}
RATE = lambda k: 0.1 * helpers.WARMUP_COSINE(k)  # rises until step 200, then falls
LOSS = helpers.logistic_regression(jnp.float32)
MASK = {"w": True, "b": False}


def loss(params: Any, batch: Any) -> Any:
    return LOSS(params["w"] + params["b"], batch)


def start(dtype: Any = jnp.float32) -> Any:
    return {"w": jnp.full((65, 10), 0.1, dtype), "b": jnp.zeros((1, 10), dtype)}


def run(tx: Any, params: Any, state: Any, steps: slice) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # for optax's
        return helpers.trained(
            tx, jax.grad(loss), params, helpers.batches()[steps], state
        )


CLIP = optax.clip_by_global_norm(1.0)
ADAMW = optax.chain(CLIP, optax.adamw(RATE, **ADAM, weight_decay=0.01, mask=MASK))


def factored(rate: Any, weight_decay: float = 1e-4) -> Any:
    """`spa_adamw` with a factored second moment, also of the small matrices of these
    tests."""
    scale = scale_by_factored_second_moment(**ADAM, min_dim_size_to_factor=10)
    add_decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(in_float32(optax.chain(scale, add_decay)), spa(rate, 0.1))


KEY = jax.random.key(0)
FORMS: dict[str, Callable[..., Any]] = {
    "full": functools.partial(spa_adamw, **ADAM),
    "16 bits": functools.partial(
        spa_adamw, **ADAM, second_moment="bfloat16", rounding_key=KEY
    ),
    "factored": factored,
}


def moved(state: Any, params: Any, tx: Any, adam: Any = ADAMW) -> Any:
    return convert(
        state, params, into=tx.init(params), adam=adam, learning_rate=RATE, **ADAM
    )


@pytest.mark.parametrize("num_steps", [1, 50])
def test_the_momentum_of_the_next_step_is_adamws(num_steps: int) -> None:
    """Without a gradient that step is momentum alone. AdamW divides it by the next
    √ν̂."""
    given: Any = {"learning_rate": 0.1, "b2": 0.99, "eps": 0.0}
    with x64(), jax.numpy_dtype_promotion("standard"):
        x, g = jnp.arange(5.0), jnp.array([1.0, -2.0, 0.5, 3.0, 4.0])
        adam, tx = (
            make(**given, weight_decay=0.0) for make in (optax.adamw, spa_adamw)
        )
        state = adam.init(x)
        for _ in range(num_steps):
            updates, state = adam.update(g, state, x)
            x += updates
        new = convert(state, x, into=tx.init(x), adam=adam, **given)
        expected, _ = adam.update(jnp.zeros(5), state, x)
        found, _ = tx.update(jnp.zeros(5), new, x)
    bias = lambda k: 1 - 0.99**k
    ratio = np.sqrt(0.99 * bias(num_steps) / bias(num_steps + 1))
    # Scalars are kept as float32.
    np.testing.assert_allclose(found, np.asarray(expected) * ratio, rtol=1e-6)


@pytest.mark.parametrize(
    ("form", "ulp"), [("full", 1e-6), ("16 bits", 2**-8), ("factored", None)]
)
def test_there_and_back(form: str, ulp: float | None) -> None:
    """The moments that AdamW had, but for what ν lost on the way."""
    params, state = run(ADAMW, start(), None, slice(300))
    back = moved(
        moved(state, params, optax.chain(CLIP, FORMS[form](RATE))), params, ADAMW
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(back, state)
    old, new = (optax.tree.get(s, "nu") for s in (state, back))
    if ulp is None:  # the same means over rows and over columns
        for axis in (0, 1):
            np.testing.assert_allclose(
                new["w"].mean(axis), old["w"].mean(axis), rtol=1e-3
            )
        return
    chex.assert_trees_all_close(new, old, rtol=ulp)
    old, new = (optax.tree.get(s, "mu") for s in (state, back))
    # x − z is rounded to that of x, of up to 1, over w, of about 0.2.
    assert helpers.relative_difference(new, old) < max(ulp, 1e-4)


@pytest.mark.parametrize("form", quick(FORMS, "16 bits"))
def test_leaves_of_all_kinds(form: str) -> None:
    """Vectors, scalars, stacks of matrices, integers, and a dtype of 16 bits."""
    params = {
        "stack": jnp.ones((2, 12, 11)),
        "vector": jnp.ones(30, jnp.bfloat16),
        "one": jnp.ones(1),
        "scalar": jnp.array(2.0),
        "count": jnp.arange(3),
    }
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(float)).astype(p.dtype), params)
    old, new = optax.adamw(0.1, **ADAM), FORMS[form](0.1)
    with jax.numpy_dtype_promotion("standard"):
        _, state = old.update(grads, old.init(params), params)
    into = new.init(params)
    kwargs: Any = {"adam": old, "learning_rate": 0.1, **ADAM}
    there = convert(state, params, into=into, **kwargs)
    chex.assert_trees_all_equal_shapes_and_dtypes(there, into)
    new.update(grads, there, params)
    back = convert(there, params, into=old.init(params), **kwargs)
    chex.assert_trees_all_equal_shapes_and_dtypes(back, old.init(params))
    for name in ("mu", "nu"):
        found, expected = (optax.tree.get(s, name) for s in (back, state))
        for key in ("stack", "one", "scalar"):
            np.testing.assert_allclose(found[key], expected[key], rtol=2**-7)


def test_injected_hyperparams_and_jit() -> None:
    old = optax.inject_hyperparams(optax.adamw)(RATE, **ADAM)
    new = optax.inject_hyperparams(spa_adamw)(RATE, 0.1, **ADAM)
    params, state = run(old, start(), None, slice(20))
    move = lambda state, params: moved(state, params, new, old)
    there = move(state, params)
    assert jax.tree.structure(there) == jax.tree.structure(new.init(params))
    z, x = optax.tree.get(there, "z")["w"], params["w"]
    m, nu = (optax.tree.get(state, name)["w"] for name in ("mu", "nu"))
    d = m / (1 - 0.9**21) / (np.sqrt(nu / (1 - 0.999**20)) + 1e-6)
    np.testing.assert_allclose(z, x - 9 * float(RATE(20)) * d, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(
        jax.jit(move)(state, params), there, rtol=1e-5, atol=1e-6
    )


def test_a_first_moment_of_16_bits_and_a_master_copy() -> None:
    """z takes over from the float32 copy, and not from the params that it was rounded
    to.

    In 16 bits it takes its distance from the params that go on, with the digits that
    these lost."""
    tx = optax.adamw(RATE, mu_dtype=jnp.bfloat16, **ADAM)
    master, state = run(tx, start(), None, slice(50))
    params = optax.tree.cast(master, jnp.bfloat16)
    for kwargs in ({}, {"state_dtype": jnp.bfloat16, "rounding_key": KEY}):
        new = spa_adamw(RATE, 0.1, **ADAM, **kwargs)
        given: Any = {"adam": tx, "learning_rate": RATE, "new_params": params, **ADAM}
        there = convert(state, master, into=new.init(params), **given)
        z = there[1].z.bfloat16 if kwargs else there[1].z
        y = params["w"].astype(jnp.float32)
        assert z["w"].dtype == (jnp.bfloat16 if kwargs else jnp.float32)
        m, nu = (
            optax.tree.get(state, name)["w"].astype(jnp.float32)
            for name in ("mu", "nu")
        )
        d = m / (1 - 0.9**51) / (np.sqrt(nu / (1 - 0.999**50)) + 1e-6)
        exact = master["w"] - 9 * float(RATE(50)) * d
        if kwargs:
            np.testing.assert_allclose(z["w"], exact - y, rtol=2**-8, atol=2**-16)
        else:
            np.testing.assert_allclose(z["w"], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of_adam", [True, False])
def test_narrow_params_beside_wide_moments_warn(of_adam: bool) -> None:
    """They are probably rounded from a master copy, of which z should be made."""
    x, narrow = start(), start(jnp.bfloat16)
    tx = optax.adamw(RATE) if of_adam else optax.sgd(0.1, 0.9)
    into = (spa_adamw if of_adam else spa_from_sgdm)(RATE, rounding_key=KEY).init(
        narrow
    )
    given: Any = {"adam": tx} if of_adam else {"momentum": 0.9, "count": 0}
    for state, params, warns in (
        (tx.init(x), narrow, True),
        (tx.init(x), x, False),
        (tx.init(narrow), narrow, False),
        (stochastic_rounding(tx, KEY).init(narrow), narrow, False),
    ):
        message = "`params` should be the float32 master copy of the run if it has one"
        with pytest.warns(UserWarning, match=message) if warns else nullcontext():
            convert(state, params, into=into, learning_rate=RATE, **given)


def test_adamw_goes_on_under_stochastic_rounding() -> None:
    """With the moments that it had, in float32, and its count."""
    adam = optax.adamw(RATE, **ADAM)
    params, state = run(adam, start(), None, slice(20))
    narrow, tx = optax.tree.cast(params, jnp.bfloat16), stochastic_rounding(adam, KEY)
    moved = convert(state, params, into=tx.init(narrow))
    chex.assert_trees_all_equal(moved.base, state)
    assert moved.count == 20
    chex.assert_trees_all_equal(convert(moved, narrow, into=adam.init(params)), state)


# Optimizers with a state of Adam's type, which are another.
NOT_ADAM: dict[str, Any] = {
    **{
        name: getattr(optax, name)(0.1)
        for name in ("adamax", "lamb", "nadamw", "optimistic_adam_v2", "yogi")
    },
    "radam at once": optax.radam(0.1, threshold=-100.0),
    "adopt": optax.contrib.adopt(0.1),
    "galore": optax.contrib.galore(0.1),
    "b1": optax.adam(0.1, b1=0.91),
    "b2": optax.adam(0.1, b2=0.9985),
    "eps": optax.adam(0.1, eps=2e-8),
    "eps_root": optax.adam(0.1, eps_root=1e-8),
    "trace": optax.chain(optax.adam(0.1), optax.trace(0.9)),
    "two rates": optax.chain(optax.adam(0.1), optax.masked(optax.scale(0.1), MASK)),
    "rate of 0": optax.adam(0.0),
    "sgd": optax.sgd(0.1),
}


@pytest.mark.parametrize("name", NOT_ADAM)
@pytest.mark.usefixtures("standard_promotion")
def test_optimizers_that_are_not_adam_are_refused(name: str) -> None:
    """From and to them, also under `jax.jit`."""
    x, adam, new = start(), optax.adam(0.1).init(start()), spa_adamw(0.1).init(start())
    move = lambda x: convert(adam, x, into=new, adam=NOT_ADAM[name], learning_rate=0.1)
    back = lambda x: convert(new, x, into=adam, adam=NOT_ADAM[name], learning_rate=0.1)
    for call in (move, back, jax.jit(move)):
        with pytest.raises(ValueError, match="`adam` must be the optimizer of the run"):
            call(x)


late = lambda k: jnp.where(k < 100, 0.0, 0.1)
IS_ADAM: dict[str, Any] = {
    "clipped": optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(0.1)),
    "decay": optax.adamw(0.1, weight_decay=1.0, mask=MASK),
    "L2": optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1)),
    "noise": optax.chain(optax.add_noise(0.1, 0.55, 0), optax.adam(0.1)),
    "plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "injected": optax.inject_hyperparams(optax.adamw)(late),
    "accumulated": optax.MultiSteps(optax.adamw(0.1), 4),
    "apply_if_finite": optax.apply_if_finite(optax.adamw(late), 3),
    "bfloat16": optax.adamw(0.1, mu_dtype=jnp.bfloat16),
    "masked": optax.masked(optax.adamw(0.1), MASK),
    "partition": optax.partition(
        {True: optax.adamw(0.1), False: optax.set_to_zero()}, {"w": True, "b": False}
    ),
}


@pytest.mark.parametrize("name", IS_ADAM)
@pytest.mark.usefixtures("standard_promotion")
def test_adam_is_accepted(name: str) -> None:
    x = start()
    old, new = optax.adam(0.1).init(x), spa_adamw(0.1).init(x)
    convert(old, x, into=new, adam=IS_ADAM[name], learning_rate=0.1)


@pytest.mark.parametrize(
    ("b1", "b2", "eps"), [(0, 0.9, 1e-8), (0.99, 0.9, 0), (0.5, 0.99999, 1)]
)
def test_adam_is_accepted_with_any_hyperparams(
    b1: float, b2: float, eps: float
) -> None:
    x, adam, new = start(), optax.adamw(1e-5, b1, b2, eps), spa_adamw(0.1).init(start())
    given: Any = {
        "learning_rate": 0.1,
        "averaging": 0.1,
        "b1": b1,
        "b2": b2,
        "eps": eps,
    }
    convert(adam.init(x), x, into=new, adam=adam, **given)


def test_states_of_nnx_move() -> None:
    """There and back, as those without nnx do."""
    old, new = optax.adamw(RATE, **ADAM), spa_adamw(RATE, 0.1, **ADAM)
    model = nnx.Linear(20, 10, rngs=nnx.Rngs(0))
    loss = lambda model: jnp.mean((model(jnp.ones((2, 20))) - 1) ** 2)
    optimizer, other = (nnx.Optimizer(model, tx, wrt=nnx.Param) for tx in (old, new))
    with jax.numpy_dtype_promotion("standard"):  # for optax's
        optimizer.update(model, nnx.grad(loss)(model))
    of_model = nnx.state(model, nnx.Param)
    params = nnx.to_pure_dict(of_model)
    without = jax.tree.unflatten(
        jax.tree.structure(old.init(params)), jax.tree.leaves(optimizer.opt_state)
    )
    given: Any = {"adam": old, "learning_rate": RATE, **ADAM}
    there = convert(optimizer.opt_state, of_model, into=other.opt_state, **given)
    expected = moved(without, params, new, old)
    chex.assert_trees_all_equal(*map(jax.tree.leaves, (there, expected)))
    back = convert(there, of_model, into=optimizer.opt_state, **given)
    chex.assert_trees_all_equal(
        *map(jax.tree.leaves, (back, moved(expected, params, old, old)))
    )


def test_schedule_free_there_and_back() -> None:
    """As if it had never moved."""
    with x64():
        rate = evaluated(optax.warmup_constant_schedule(0.0, 0.01, 40))
        base = optax.chain(
            optax.scale_by_rms(
                ADAM["b2"], ADAM["eps"], eps_in_sqrt=False, bias_correction=True
            ),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(rate),
        )
        old = optax.contrib.schedule_free(base, rate, b1=0.9)
        c = schedule_free_averaging(lambda k: rate(k + 1), 40)
        new = spa_adamw(rate, c, 0.9, **ADAM, weight_decay=0.1)
        x = start(jnp.float64)
        unmoved, at_end = run(old, x, old.init(x), slice(90))
        y, state = run(old, x, old.init(x), slice(30))
        expected = optax.contrib.schedule_free_eval_params(state, y)
        state = convert(state, y, into=new.init(y), **ADAM)
        chex.assert_trees_all_close(eval_params(state, y), expected, rtol=0, atol=1e-7)
        y, state = run(new, y, state, slice(30, 60))
        assert jax.tree.structure(state) == jax.tree.structure(new.init(y))
        back = convert(state, y, into=old.init(y), learning_rate=rate, **ADAM)
        chex.assert_trees_all_equal_shapes_and_dtypes(back, old.init(y))
        y, back = run(old, y, back, slice(60, 90))
    # μ_y and c are kept as float32.
    chex.assert_trees_all_close(y, unmoved, rtol=0, atol=1e-8)
    np.testing.assert_allclose(back.weight_sum, at_end.weight_sum, rtol=1e-6)
    assert back.step_count == at_end.step_count == 91


@pytest.mark.usefixtures("standard_promotion")
def test_schedule_free_keeps_its_base_and_its_largest_rate() -> None:
    """The rate has fallen to a tenth. There and back, or to the same, as if it had
    never moved."""
    with x64():
        rate = evaluated(optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 40, 0.01), 60)
        base = optax.adamw(rate, b1=0.5, **ADAM, weight_decay=0.1)
        old = optax.contrib.schedule_free(base, rate, b1=0.9)
        new = primal_averaging(base, 0.1, 0.9)
        x = start(jnp.float64)
        y, state = run(old, x, old.init(x), slice(40))
        chex.assert_trees_all_equal(convert(state, y, into=old.init(y)), state)
        there = convert(state, y, into=new.init(y))
        chex.assert_trees_all_equal(there.base, state.base_optimizer_state)
        chex.assert_trees_all_equal(there.average.z, state.z)
        assert (there.average.count, there.average.mu_y) == (40, 0.9)
        np.testing.assert_allclose(
            there.average.w, there.average.eta * (1 - there.average.c), 1e-6
        )
        for move in (convert, jax.jit(convert, static_argnames="learning_rate")):
            back = move(there, y, into=old.init(y), learning_rate=rate)
            chex.assert_trees_all_close(back, state, rtol=1e-6)  # c and μ_y are float32
        for at in (1, 40):  # step k of Optax reads the rate of count k + 1
            peak = lambda k, at=at: jnp.where(
                (k < 1) | (k > 40), 4, jnp.where(k == at, 2, 1.0)
            )
            assert convert(there, y, into=old.init(y), learning_rate=peak).max_lr == 2


def test_schedule_free_keeps_b1_in_the_dtype_of_params() -> None:
    """0.9 is 0.8984 in bfloat16, which is not another b1."""
    x, old = start(jnp.bfloat16), optax.contrib.schedule_free_adamw(0.1)
    new = spa_adamw(0.1, 0.05, 0.9, rounding_key=KEY).init(x)
    move = functools.partial(convert, learning_rate=0.1)
    for either in (move, jax.jit(move)):
        back = either(new, x, into=old.init(x))
        assert back.b1.dtype == jnp.bfloat16
        assert not np.isnan(back.z["w"]).any()


def test_a_full_second_moment_becomes_factored() -> None:
    """As the means of ν, free of bias, over rows and over columns; z stays."""
    old, new = (FORMS[form](RATE) for form in ("full", "factored"))
    params, state = run(old, start(), None, slice(50))
    there = convert(state, params, into=new.init(params), **ADAM)
    chex.assert_trees_all_equal(there[1], state[1])
    nu = optax.tree.get(state, "nu")
    nu_hat = {key: np.asarray(v, np.float64) / (1 - 0.999**50) for key, v in nu.items()}
    found: Any = optax.tree.get(there, "FactoredState")
    assert found.count == 50
    # ε² is 1e-12. β₂ as float32 is off by up to 3e-8, and 1 − β₂^50 = 0.05 by 50 times
    # that.
    rtol = 2 * 50 * 3e-8 / 0.05
    np.testing.assert_allclose(found.v_row["w"], nu_hat["w"].mean(0) + 1e-12, rtol=rtol)
    np.testing.assert_allclose(found.v_col["w"], nu_hat["w"].mean(1) + 1e-12, rtol=rtol)
    np.testing.assert_allclose(
        found.v["b"], nu_hat["b"] + 1e-12, rtol=rtol
    )  # too short a side
    run(new, params, there, slice(50, 51))


def test_before_the_first_step() -> None:
    x = start()
    new = spa_adamw(RATE).init(x)
    old, kwargs = (
        optax.adamw(RATE).init(x),
        {"adam": optax.adamw(RATE), "learning_rate": RATE},
    )
    chex.assert_trees_all_equal(convert(old, x, into=new, **kwargs), new)
    chex.assert_trees_all_equal(convert(new, x, into=old, **kwargs), old)
    replaced = jax.tree.map(lambda leaf: leaf + 1, x)  # has no momentum either
    chex.assert_trees_all_equal(convert(new, replaced, into=old, **kwargs), old)
    narrow = spa_adamw(RATE, state_dtype=jnp.bfloat16, rounding_key=KEY).init(replaced)
    chex.assert_trees_all_equal(convert(new, replaced, into=narrow), narrow)
    wide = {"w": jnp.ones((128, 128))}
    factored, full = (
        spa_adamw(RATE, second_moment=of).init(wide) for of in ("factored", "full")
    )
    chex.assert_trees_all_equal(convert(factored, wide, into=full), full)


def test_what_does_not_fit() -> None:
    x, adam, sf = start(), optax.adamw(0.1), optax.contrib.schedule_free_sgd(0.1)
    new, at_y, sgd = spa_adamw(0.1), spa_adamw(0.1, 0.05, 0.9), optax.sgd(0.1, 0.9)
    sf_adamw, two = optax.contrib.schedule_free_adamw(0.1), optax.chain(adam, adam)
    two_nus = optax.chain(new, optax.scale_by_rms(bias_correction=True))
    second_moment = (
        "`old_state` and `into` must both hold one second moment to convert, or none, "
    )
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (optax.sgd(0.1), new, {}, "`old_state` must hold one .*, got EmptyState"),
        (two, new, {}, "`old_state` must hold one .*, got 2"),
        (adam, optax.sgd(0.1), {}, "`into` must hold one .*, got EmptyState"),
        (adam, new, {"into": new}, "`into` must .* got GradientTransformation"),
        (adam, spa(0.1), {}, second_moment + "got 1 and 0"),
        (adam, two_nus, {}, second_moment + "got 1 and 2"),
        (adam, primal_averaging(adam, 0.1), {}, "`into` must have the other states of"),
        (sgd, new, {"momentum": 0.9}, second_moment + "got 0 and 1"),
        (sf, at_y, {}, second_moment + "got 0 and 1"),
        (optax.masked(adam, MASK), new, {}, r"only params of `old_state`, got \['b'\]"),
        (adam, new, {"b1": 1.0}, r"`b1` must be in \[0, 1\), got 1.0"),
        (
            adam,
            new,
            {"averaging": lambda _: 0.0},
            "`averaging` and .* must be > 0, .* got 0.0 and",
        ),
        (
            adam,
            new,
            {"weight_power": -1.0},
            "`weight_power` must be finite and >= 0, got -1.0",
        ),
        (sgd, spa(0.1), {}, "`momentum` must be given for these states, got None"),
        (adam, new, {"adam": None}, "`adam` must be given for these states, got None"),
        *(
            (
                old,
                into,
                {"learning_rate": None},
                "`learning_rate` must be given for these states",
            )
            for old, into in (
                (sgd, spa(0.1)),
                (adam, new),
                (new, adam),
                (at_y, sf_adamw),
            )
        ),
    ]
    for old, into, given, match in cases:
        kwargs: Any = {
            "into": into.init(x),
            "adam": adam,
            "learning_rate": 0.1,
            **given,
        }
        with pytest.raises(ValueError, match=match):
            convert(old.init(x), x, **kwargs)


def test_a_batch_of_runs() -> None:
    """Under `jax.vmap` each moves; without it, no other argument is blamed."""
    x, xs = start(), jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), start())
    init = lambda tx: jax.vmap(tx.init)(xs)
    sf, at_y = optax.contrib.schedule_free_adamw(0.1), spa_adamw(0.1, 0.05, 0.9)
    adam, new = optax.adamw(RATE), spa_adamw(RATE)
    given: Any = {"adam": adam, "learning_rate": RATE}
    for old, into in ((adam, new), (new, adam), (sf, at_y), (at_y, sf)):
        with pytest.raises(
            ValueError, match="`old_state` must be of one run, got a batch of them"
        ):
            convert(init(old), xs, into=init(into), **given)
    shapes = jax.eval_shape(new.init, x)
    for into, rule in (
        (init(new), "be of one run, got a batch of them"),
        (shapes, "hold arrays"),
    ):
        with pytest.raises(ValueError, match=f"`into` must {rule}"):
            convert(new.init(x), x, into=into)
    move = lambda state, x: convert(state, x, into=new.init(x), **given)
    chex.assert_trees_all_equal_shapes_and_dtypes(
        jax.vmap(move)(init(adam), xs), init(new)
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("standard_promotion")
def test_a_moved_state_shares_no_buffer(compiled: bool) -> None:
    """So it can be donated, and the old one still be used."""
    pointers = lambda tree: [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)
    ]
    x, adam, new = start(), optax.adamw(RATE), spa_adamw(RATE)
    sf, at_y = optax.contrib.schedule_free_adamw(0.1), spa_adamw(0.1, 0.05, 0.9)
    sgd = optax.inject_hyperparams(optax.sgd)(RATE, 0.9)
    counts = optax.chain(optax.scale_by_schedule(RATE), spa_from_sgdm(RATE, 0.9))
    given: Any = {"adam": adam, "learning_rate": RATE, "momentum": 0.9}
    move = lambda state, x, into: convert(state, x, into=into, **given)
    pairs = (
        (sgd, counts),
        (counts, sgd),
        (adam, new),
        (new, adam),
        (sf, at_y),
        (at_y, sf),
    )
    for old, tx in (*pairs, (new, new)):
        _, state = old.update(x, old.init(x), x)
        arguments = (state, x, tx.init(x))
        moved = (jax.jit(move) if compiled else move)(*arguments)
        assert len(set(pointers(moved))) == len(pointers(moved))
        assert not set(pointers(moved)) & set(pointers(arguments))
        jax.jit(tx.update, donate_argnums=1)(x, moved, x)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments))
