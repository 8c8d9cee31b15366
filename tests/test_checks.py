"""Bad input: a ValueError that names the argument, the rule and the value."""

import re
import warnings
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import (
    unchecked,
)

from spa_optax import (
    convert,
    eval_params,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    primal_averaging,
    scale_by_factored_second_moment,
    scale_by_second_moment,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
    stochastic_rounding,
    theory,
)
from spa_optax._checks import B2, EPS, NOT_NEGATIVE_INTEGER, POSITIVE_INTEGER, STATE_DTYPE

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spa(-0.1), "`learning_rate` must be finite and >= 0, got -0.1"),
        (lambda: spa(NAN), "`learning_rate` must be finite and >= 0, got nan"),
        (lambda: spa(INF), "`learning_rate` must be finite and >= 0, got inf"),
        (lambda: spa(np.float64(-1)), "`learning_rate` must be finite and >= 0, got np.float64(-1"),
        (lambda: spa(jnp.ones(3)), "`learning_rate` must be a scalar or a schedule, got Array([1"),
        (lambda: spa(1.0, 1.5), "`averaging` must be in [0, 1], got 1.5"),
        (lambda: spa(1.0, -0.5), "`averaging` must be in [0, 1], got -0.5"),
        (lambda: spa(1.0, NAN), "`averaging` must be in [0, 1], got nan"),
        (lambda: spa(1.0, state_dtype="floaty"), "`state_dtype` must be a floating"),
        (lambda: spa(1.0, state_dtype=jnp.int32), "`state_dtype` must be a floating"),
        (lambda: spa(1.0, state_dtype=jnp.complex64), "`state_dtype` must be a floating"),
        (
            lambda: spa(1.0, state_dtype=jnp.float8_e8m0fnu),
            "`state_dtype` must be a floating",
        ),
        (
            lambda: spa(10**400),
            "`learning_rate` must be finite and >= 0, got an integer of 1329 bits",
        ),
        (lambda: spa(-(10**5_000)), "`learning_rate` must be finite and >= 0, got an integer of"),
        (
            lambda: stagewise(1.0, 0.1, [10**5_000]),
            "`boundaries` must be a concrete integer >= 1 and below",
        ),
        (lambda: stagewise(1.0, 0.1, [1], 10**400), "`factor` must be finite and > 1, got an int"),
        (
            lambda: unchecked(spa)(1.0, rounding_key=jnp.zeros(5, jnp.uint32)),
            "`rounding_key` must be one key of `jax.random`, got Array([0, 0, 0, 0, 0], dtype=",
        ),
        (
            lambda: unchecked(spa)(1.0, rounding_key=jax.random.split(jax.random.key(0))),
            "`rounding_key` must be one key of `jax.random`, got Array((2,), dtype=key<fry>)",
        ),
        (
            lambda: optax.inject_hyperparams(spa)(1.0, state_dtype=jnp.bfloat16).init(jnp.ones(3)),
            ": in `optax.inject_hyperparams`, name it in `static_args`",
        ),
        (
            lambda: spa(0.1).init(3),
            "`params` must be floating-point arrays, got one of dtype int32",
        ),
        (
            lambda: theory.estimate_smoothness(
                lambda p: p["a"] ** 2, {"a": 1.0, "n": 3}, key=jax.random.key(0)
            ),
            "`params` must be real floating-point arrays, got int32 at ['n']",
        ),
        (lambda: spa_from_sgdm(-1), "`learning_rate` must be finite and >= 0, got -1"),
        (lambda: spa_from_sgdm(0.1, 1.0), "`momentum` must be in [0, 1), got 1.0"),
        (lambda: spa_from_sgdm(0.1, -0.1), "`momentum` must be in [0, 1), got -0.1"),
        (lambda: spa_from_sgdm(0.1, NAN), "`momentum` must be in [0, 1), got nan"),
        (
            lambda: spa_from_sgdm(0.1, horizon=0),
            "`horizon` must be a concrete integer >= 1",
        ),
        (lambda: spa_from_sgdm(0.1, state_dtype="int8"), "`state_dtype` must be a floating"),
        (lambda: hyperparams_from_sgdm(-1.0, 0.9), "`learning_rate` must be finite and >= 0"),
        (lambda: hyperparams_from_sgdm(0.1, 1.0), "`momentum` must be in [0, 1), got 1.0"),
        (lambda: hyperparams_from_sgdm(0.1, 0.9, horizon=-2), "`horizon` must be a concrete"),
        (lambda: hyperparams_to_sgdm(NAN, 0.1), "`learning_rate` must be finite and >= 0, got nan"),
        (lambda: hyperparams_to_sgdm(1.0, 2.0), "`averaging` must be in [0, 1], got 2.0"),
        (lambda: theory.forward_recursion(1.0, 0.9), "`alphas` must have shape (n,), got ()"),
        (lambda: theory.forward_recursion([1.0, 1.0], [0.9]), "`betas` must be a number or have"),
    ],
)
def test_bad_hyperparameters(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    "tx",
    [
        spa(0, 0),
        spa(0.0, 1),
        spa(np.float64(0.1), np.float64(0.5)),
        spa(jnp.array(-1.0)),  # may be traced: not looked at
        spa_from_sgdm(1, 0, horizon=3),
        spa_from_sgdm(optax.constant_schedule(0.1), lambda _: 0.9, state_dtype="float32"),
    ],
)
def test_good_hyperparameters(tx: Any) -> None:
    params = jnp.ones(2)
    tx.update(params, tx.init(params), params)


PARAMS = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}


@pytest.mark.parametrize("tx", [spa(0.1), spa_from_sgdm(0.1)])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        (
            {"layer": {"kernel": jnp.ones((2, 3))}},
            "`updates` must have the structure of `params`: only `params` has a leaf at "
            "['layer']['bias']",
        ),
        (
            {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3), "scale": jnp.ones(3)}},
            "`updates` must have the structure of `params`: only `updates` has a leaf at "
            "['layer']['scale']",
        ),
        (
            {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(1)}},
            "`updates` must have the shapes of `params`: (1,) against (3,) at ['layer']['bias']",
        ),
        (
            [PARAMS["layer"]],
            "`updates` must have the structure of `params`: only `params` has a leaf at "
            "['layer']['bias']",
        ),
    ],
)
def test_trees_that_differ(tx: Any, grads: Any, message: str) -> None:
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=re.escape(message)):
            update(grads, tx.init(PARAMS), PARAMS)


def test_a_mismatch_of_a_large_tree_has_a_short_message() -> None:
    params = {f"layer {i}": {"kernel": jnp.ones(2)} for i in range(300)}
    tx = spa(0.1)
    frozen = flax.core.freeze(params)
    with pytest.raises(ValueError, match=r"`params`: a FrozenDict against a dict$"):
        tx.update(frozen, tx.init(params), params)
    reverse = nnx.State(dict(list(params.items())[::-1]))
    for other in (list(params.values()), {**params, "one": 1.0}, reverse):
        with pytest.raises(ValueError, match="`updates` must have the structure") as error:
            tx.update(other, tx.init(params), params)
        assert len(str(error.value)) < 300


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (spa, "learning_rate"),
        (lambda h: spa(0.1, h), "averaging"),
        (spa_from_sgdm, "learning_rate"),
        (lambda h: spa_from_sgdm(0.1, h), "momentum"),
        (lambda h: spa(0.1, 0.1, h), "interpolation"),
        (spa_adamw, "learning_rate"),
    ],
)
def test_schedules_that_are_not_scalar(make: Any, name: str, shape: Any) -> None:
    """A rate for each column would train, and change the shapes of the state."""
    params = jnp.ones((4, 3))
    match = re.escape(f"`{name}` must be a scalar or a schedule of scalars, got an array of shape")
    tx = make(lambda count: jnp.full(shape, 0.1))
    with pytest.raises(ValueError, match=match):
        tx.update(params, tx.init(params), params)
    with pytest.raises(
        ValueError, match="`learning_rate` must be a scalar or a schedule of scalars"
    ):
        hyperparams_from_sgdm(lambda count: jnp.full(shape, 0.1), 0.9).learning_rate(3)
    with pytest.raises(ValueError, match="`averaging` must be a scalar or a schedule of scalars"):
        theory.audit(0.1, lambda count: jnp.full(shape, 0.1), 10)


def test_params_missing_or_of_another_model() -> None:
    tx = spa(0.1)
    with pytest.raises(ValueError, match="`params` must be passed to `update`"):
        tx.update(PARAMS, tx.init(PARAMS))
    small = {"layer": {"kernel": jnp.ones((1, 3)), "bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=re.escape("`state.z` must have the shapes of `params`")):
        tx.update(PARAMS, tx.init(small), PARAMS)


@pytest.mark.parametrize(
    "schedule",
    [lambda k: 0.1 if k < 3 else 0.01, lambda k: [0.1, 0.2][k], lambda k: np.cos(k) ** 2],
    ids=["bool", "index", "NumPy"],
)
def test_schedules_that_cannot_be_traced(schedule: Any) -> None:
    match = "must be a schedule that can be traced, with `jnp.where` in place of `if`, got a Tracer"
    params = jnp.ones(2)
    for name in ("learning_rate", "momentum"):
        tx = spa_from_sgdm(**{"learning_rate": 0.1, name: schedule})
        with pytest.raises(ValueError, match=f"`{name}` {match}"):
            tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match=f"`averaging` {match}"):
        theory.audit(0.1, schedule, 10)


@pytest.mark.parametrize(
    ("schedule", "got"),
    [
        (optax.linear_schedule(0.0, 0.9, 1_000), "got 0 at 0"),
        (lambda k: jnp.where(k == 5, 0.0, 0.9), "got 0 at 5"),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_interpolation_that_reaches_0(schedule: Any, got: str) -> None:
    """And rises again: the params would be z, which does not tell x."""
    rule = "`interpolation` must be > 0 at every count, "
    for make in (
        lambda: spa(0.1, 0.1, schedule),
        lambda: spa_adamw(0.1, 0.1, schedule),
        lambda: primal_averaging(optax.sgd(0.1), 0.1, schedule),
    ):
        with pytest.raises(ValueError, match=rule + got):
            make()


def test_interpolation_that_cannot_be_seen() -> None:
    """Traced, NaN or 0 past its end, with a Python `if`, or above 0 for ever: left alone."""
    x, untraceable = jnp.ones(2), lambda k: 0.9 if k < 3 else 0.8
    for schedule in (
        lambda k: 0.9 * jnp.sqrt(1 - k / 1_000.5),
        lambda k: 0.9,
        untraceable,
        optax.linear_schedule(0.9, 0.01, 100),
        optax.exponential_decay(0.9, 1_000, 0.9),
    ):
        spa(0.1, 0.1, schedule)
    tx = spa(0.1, 0.1, optax.linear_schedule(0.9, 0.0, 2))
    _, state = tx.update(x, tx.init(x), x)
    assert jnp.isfinite(eval_params(state, x)).all()
    for _ in range(2):
        _, state = tx.update(x, state, x)
    with pytest.raises(ValueError, match="`opt_state` must have a μ_y > 0, got 0"):
        eval_params(state, x)

    @jax.jit
    def step(end: Any) -> Any:
        tx = spa(0.1, 0.1, lambda k: jnp.where(k < 5, 0.9, end))
        return tx.update(x, tx.init(x), x)[0]

    assert jnp.isfinite(step(0.0)).all()


@pytest.mark.parametrize("count", [-1, True, 3.0, jnp.ones(1, int), jnp.array(1.0), "3"])
def test_counts(count: Any) -> None:
    with pytest.raises(ValueError, match=r"`count` must be a concrete integer >= 0 .*, got"):
        NOT_NEGATIVE_INTEGER.optional().check(count=count)
    for count in (np.int64(3), jnp.array(3), None):
        NOT_NEGATIVE_INTEGER.optional().check(count=count)


def test_states_of_another_optimizer() -> None:
    state = optax.sgd(0.1, 0.9).init(PARAMS)
    with pytest.raises(ValueError, match="`state` must be of type `SPAState`, got tuple"):
        spa(0.1).update(PARAMS, state, PARAMS)


def test_a_horizon_that_is_injected() -> None:
    # `inject_hyperparams` makes a traced array of every number that is not named as static.
    # (The checker of types that these tests run under would be quicker than `spa_from_sgdm` is.)
    with pytest.raises(ValueError, match="`horizon` must be a concrete integer"):
        jax.jit(lambda horizon: POSITIVE_INTEGER.check(horizon=horizon))(5)
    tx = optax.inject_hyperparams(spa_from_sgdm, static_args="horizon")(0.1, 0.9, horizon=5)
    jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


def test_states_that_are_not_there() -> None:
    sgd, into = optax.sgd(0.1, 0.9).init(PARAMS), spa_from_sgdm(0.1).init(PARAMS)
    kinds = "`ScheduleFreeState` or `SPAState` or `ScaleByAdamState` or `TraceState`"
    from_ = lambda state, **kw: convert(state, PARAMS, into=into, momentum=0.9, **kw)
    with pytest.raises(ValueError, match=f"`old_state` must hold one {kinds}, got EmptyState"):
        from_(optax.sgd(0.1).init(PARAMS), learning_rate=0.1)
    with pytest.raises(ValueError, match=r"`old_state` .* got GradientTransformation"):
        from_(optax.sgd(0.1, 0.9), learning_rate=0.1)
    with pytest.raises(ValueError, match=f"`old_state` must hold one {kinds}, got 2"):
        from_((sgd, sgd), learning_rate=0.1)
    with pytest.raises(ValueError, match="`count` must be given where `old_state` does not hold"):
        from_(sgd, learning_rate=lambda _: 0.1)
    _, moving = optax.sgd(0.1, 0.9).update(PARAMS, sgd)
    with pytest.raises(ValueError, match="`count` must be >= 1 where `old_state` holds momentum"):
        from_(moving, learning_rate=0.1, count=0)
    with pytest.raises(ValueError, match=r"`old_state` must have leaves of the paths and shapes"):
        convert(sgd, PARAMS["layer"], into=into, learning_rate=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=f"`into` must hold one {kinds}, got EmptyState"):
        convert(into, PARAMS, into=optax.sgd(0.1).init(PARAMS))
    at = re.escape("got (3,) at ['layer']['bias']")
    with pytest.raises(ValueError, match=f"`old_state` must have leaves of .* each once, {at}"):
        convert(spa(0.1).init(PARAMS), PARAMS["layer"], into=sgd)


@pytest.mark.parametrize(
    ("make", "kwargs", "match"),
    [
        (spa, {"learning_rate": -1.0}, "`learning_rate` must be finite and >= 0, got -1.0"),
        (spa, {"averaging": 1.5}, r"`averaging` must be in \[0, 1\], got 1.5"),
        (spa, {"interpolation": 0.0}, r"`interpolation` must be in \(0, 1\], got 0.0"),
        (spa, {"interpolation": 1e-46}, r"`interpolation` must be in \(0, 1\], got 1e-46"),
        (spa, {"interpolation": 1.1}, r"`interpolation` must be in \(0, 1\], got 1.1"),
        (spa, {"interpolation": float("nan")}, r"`interpolation` must be in \(0, 1\], got nan"),
        (spa, {"state_dtype": int}, "`state_dtype`"),
        (spa_adamw, {"interpolation": 2.0}, r"`interpolation` must be in \(0, 1\], got 2.0"),
        (spa_adamw, {"averaging": -0.1}, r"`averaging` must be in \[0, 1\], got -0.1"),
        (spa_adamw, {"b2": 1.0}, r"`b2` must be in \[0, 1\) as float32, got 1.0"),
        (spa_adamw, {"b2": 1 - 2e-8}, r"`b2` must be in \[0, 1\) as float32, got 0.99999998"),
        (spa_adamw, {"eps": -1e-8}, "`eps` must be finite and >= 0, got -1e-08"),
        (spa_adamw, {"weight_decay": -1}, "`weight_decay` must be finite and >= 0, got -1"),
        (
            spa_adamw,
            {"second_moment": "bfloat16"},
            "`rounding_key` must be given with",
        ),
    ],
)
def test_bad_arguments(make: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        unchecked(make)(**{"learning_rate": 0.1, **kwargs})


@pytest.mark.parametrize(
    ("make", "kwargs", "match"),
    [
        (
            scale_by_second_moment,
            {"dtype": jnp.float16, "rounding_key": jax.random.key(0)},
            "`dtype` must be one of .*bfloat16.*, got <class 'jax.numpy.float16'>",
        ),
        (scale_by_second_moment, {"dtype": jnp.bfloat16}, "`rounding_key` must be given with a"),
        (scale_by_second_moment, {"b2": 1.0}, r"`b2` must be in \[0, 1\) as float32, got 1.0"),
        (scale_by_second_moment, {"eps": -1e-8}, "`eps` must be finite and >= 0, got -1e-08"),
        (
            scale_by_factored_second_moment,
            {"power": 0.0},
            r"`power` must be in \(0, 1\], got 0.0",
        ),
        (
            scale_by_factored_second_moment,
            {"min_dim_size_to_factor": 0},
            "`min_dim_size_to_factor` must be a concrete integer >= 1 .*, got 0",
        ),
        (
            primal_averaging,
            {"base": optax.sgd(0.1), "averaging": 0.1, "params_of_base": "x"},
            r"`params_of_base` must be one of \('params', 'z'\), got 'x'",
        ),
        (
            primal_averaging,
            {"base": 0.1, "averaging": 0.1},
            "`base` must be a gradient transformation, got 0.1",
        ),
        (
            stochastic_rounding,
            {"base": optax.sgd(0.1), "key": 0},
            r"`key` must be .*one key of `jax.random`, got 0",
        ),
        (
            spa_adamw,
            {"learning_rate": 0.1, "second_moment": "row"},
            r"`second_moment` must be one of \('full', 'bfloat16', 'factored'\), got 'row'",
        ),
    ],
)
def test_bad_arguments_of_pieces(make: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        unchecked(make)(**kwargs)


def test_what_no_scalar_is() -> None:
    for value in (lambda k: 0.9, None, "a", [0.9], jnp.array([0.9])):
        for rule in (B2, EPS):
            with pytest.raises(ValueError, match="`x` must be a scalar, got "):
                rule.check(x=value)


def test_an_array_is_no_dtype() -> None:
    """Which is what `inject_hyperparams` makes of `jnp.bfloat16`, since it is callable."""
    with pytest.raises(ValueError, match="`state_dtype` must be a floating"):
        STATE_DTYPE.check(state_dtype=jnp.ones(3))
    named = optax.inject_hyperparams(spa, static_args=("state_dtype", "rounding_key"))
    kwargs: Any = {"state_dtype": jnp.bfloat16, "rounding_key": jax.random.key(0)}
    state = named(learning_rate=0.1, **kwargs).init(jnp.ones(3))
    (z,) = jax.tree.leaves(optax.tree.get(state, "z"))
    assert z.dtype == jnp.bfloat16


@pytest.mark.parametrize("make", [spa, spa_from_sgdm, spa_adamw])
def test_storing_in_16_bits_without_a_key_warns(make: Any) -> None:
    key = jax.random.key(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(0.1).init(jnp.ones(3))
        for dtype in (jnp.bfloat16, jnp.float16):
            make(0.1, state_dtype=dtype, rounding_key=key).init(jnp.ones(3, dtype))
            with pytest.raises(UserWarning, match="`rounding_key` should be given where params or"):
                make(0.1, state_dtype=dtype).init(jnp.ones(3))
            with pytest.raises(UserWarning, match="`rounding_key` should be given where params or"):
                make(0.1).init(jax.ShapeDtypeStruct((3,), dtype))


def test_injected_for_narrow_params() -> None:
    """`inject_hyperparams` casts numbers to the params' dtype, and in bfloat16 0.999 is 1."""
    x = jnp.ones((4, 4), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"`b2` must be .* as float32, got .* `hyperparam_dtype"):
        optax.inject_hyperparams(spa_adamw)(0.1).init(x)
    wide: Any = optax.inject_hyperparams(spa_adamw, hyperparam_dtype=jnp.float32)
    tx = wide(0.1)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(x, tx.init(x), x)
    assert np.isfinite(updates).all()
    with pytest.raises(ValueError, match=r"`horizon` must .* name it in `static_args`"):
        jax.jit(lambda horizon: POSITIVE_INTEGER.check(horizon=horizon))(5)


@pytest.mark.parametrize("value", ["no", 1, None, jax.random.key(0)])
def test_nesterov_is_a_bool(value: Any) -> None:
    x, match = jnp.ones(2), "`nesterov` must be True or False, got"
    with pytest.raises(ValueError, match=match):
        unchecked(spa_from_sgdm)(0.1, 0.9, value)
    state, into = optax.sgd(0.1, 0.9).init(x), spa_from_sgdm(0.1).init(x)
    sgdm: Any = {"learning_rate": 0.1, "momentum": 0.9, "nesterov": value}
    with pytest.raises(ValueError, match=match):
        unchecked(convert)(state, x, into=into, **sgdm)
    injected = optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9, nesterov=True)
    injected.update(x, injected.init(x), x)


@pytest.mark.parametrize(
    "mask", [{"w": 1}, {"w": jnp.ones(3, bool)}, {"v": True}, [True], lambda params: params]
)
def test_masks(mask: Any) -> None:
    with pytest.raises(ValueError, match="`mask` must be a tree of booleans like `params`: "):
        spa_adamw(0.1, mask=mask).init({"w": jnp.ones(3)})


@pytest.mark.parametrize("make", [spa, spa_adamw])
def test_bad_update(make: Any) -> None:
    params = {"w": jnp.arange(6.0).reshape(2, 3) / 4, "b": {"c": jnp.ones(3)}}
    grads = jax.tree.map(jnp.cos, params)
    tx = make(0.1)
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"`params` must be passed|not passing `params`"):
        tx.update(grads, state)
    with pytest.raises(ValueError, match="`updates` must have the structure"):
        tx.update({"w": grads["w"]}, state, params)
    with pytest.raises(ValueError, match="`updates` must have the shapes"):
        tx.update(jax.tree.map(lambda g: g[..., :1], grads), state, params)
    if make is spa:
        with pytest.raises(ValueError, match="`state` must be of type `SPAState`, got tuple"):
            tx.update(grads, spa_adamw(0.1).init(params), params)
    else:
        with pytest.raises(ValueError, match="`state` must hold a full second moment"):
            tx.update(grads, make(0.1, second_moment="factored").init(params), params)
