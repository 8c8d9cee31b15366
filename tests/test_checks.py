"""Bad input: a ValueError that names the argument, the rule and the value."""

import inspect
import itertools
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
from helpers import run, unchecked

from spa_optax import (
    convert,
    eval_params,
    float8_momentum,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    in_float32,
    primal_averaging,
    scale_by_factored_second_moment as factored,
    scale_by_second_moment as full,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
    stochastic_rounding,
    theory,
)
from spa_optax.theory import momentum_drop

NAN, INF = float("nan"), float("inf")
KEY, STATE = jax.random.key(0), optax.sgd(0.1, 0.9).init(jnp.ones(3))
PARAMS16 = jnp.ones(3, jnp.bfloat16)
MEMBERS, AVERAGES = (spa, spa_adamw, spa_from_sgdm), (spa, spa_adamw, primal_averaging)
SCHEDULES = (stagewise, momentum_drop, hyperparams_to_sgdm)
WRAPPERS = (primal_averaging, stochastic_rounding, float8_momentum)
OF_A_RATE = (*SCHEDULES, hyperparams_from_sgdm, schedule_free_averaging)
NO_SCALARS = [None, "a", [0.5], np.ones(1), jnp.ones(1), 1j, True]
NO_KEYS = [0, jnp.ones(2), jnp.zeros(5, jnp.uint32), jax.random.split(KEY)]
NO_STATE_DTYPES = [
    "floaty",
    int,
    jnp.complex64,
    jnp.float8_e8m0fnu,
    jnp.float8_e5m2fnuz,
]
NO_STATE_DTYPES += [jnp.ones(3)]
NO_COUNTS = [-1, True, 3.0, "3", jnp.ones(1, int), jnp.array(1.0), 2**31, 10**5_000]


def call(function: Any, **arguments: Any) -> Any:
    """With some value for each argument that must be given."""
    some = {
        "learning_rate": 0.1,
        "averaging": 0.1,
        "momentum": 0.9,
        "boundaries": [5, 9],
    }
    some |= {
        "step": 5,
        "base": optax.sgd(0.1, 0.9),
        "key": KEY,
        "inner": optax.sgd(0.1),
    }
    some |= {"old_state": STATE, "params": jnp.ones(3), "into": STATE}
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name: some[p.name] for p in parameters if p.default is p.empty}
    return unchecked(function)(**needed | arguments)


@pytest.mark.parametrize(
    ("functions", "argument", "rule", "bad"),
    [
        (
            MEMBERS,
            "learning_rate",
            "finite and >= 0",
            [-0.1, NAN, INF, np.float64(-1), 10**400],
        ),
        (
            MEMBERS,
            "learning_rate",
            "finite and >= 0",
            [jnp.array(-1.0), jnp.array(INF)],
        ),
        ([spa, spa_from_sgdm], "learning_rate", "a scalar or a schedule", NO_SCALARS),
        ([spa_adamw], "interpolation", "a scalar or a schedule", [True]),
        (OF_A_RATE, "learning_rate", "finite and >= 0", [-0.1]),
        (AVERAGES, "averaging", "in [0, 1]", [-0.5, 1.5, NAN]),
        (SCHEDULES, "averaging", "in [0, 1]", [1.5]),
        (AVERAGES, "interpolation", "in (0, 1]", [0.0, 1e-46, 1.1, NAN]),
        (
            [spa_from_sgdm, hyperparams_from_sgdm],
            "momentum",
            "in [0, 1)",
            [-0.1, 1.0, NAN],
        ),
        (
            [*MEMBERS, primal_averaging],
            "state_dtype",
            "a floating-point dtype",
            NO_STATE_DTYPES,
        ),
        (
            [spa, spa_from_sgdm, full],
            "rounding_key",
            "one key of `jax.random`",
            NO_KEYS,
        ),
        (
            [stochastic_rounding, float8_momentum],
            "key",
            "one key of `jax.random`",
            NO_KEYS,
        ),
        (WRAPPERS, "base", "a gradient transformation", [0.1, optax.sgd]),
        ([in_float32], "inner", "a gradient transformation", [0.1]),
        (
            [spa_from_sgdm, hyperparams_from_sgdm],
            "horizon",
            "a concrete integer >= 1",
            [0],
        ),
        ([spa_from_sgdm, convert], "nesterov", "True or False", ["no", 1, None, KEY]),
        (
            [spa_adamw, full, factored],
            "b2",
            "in [0, 1) as float32",
            [-0.1, -1e-50, 1.0, 1 - 2e-8],
        ),
        ([full, factored], "b2", "in [0, 1) as float32", [jnp.array(1.0)]),
        ([full, factored], "b2", "a scalar", [lambda k: 0.5, *NO_SCALARS]),
        ([spa_adamw, full, factored], "eps", "finite and >= 0", [-1e-8, INF]),
        ([full, factored], "eps", "a scalar", [lambda k: 0.5, *NO_SCALARS]),
        ([spa_adamw], "weight_decay", "finite and >= 0", [-1]),
        (
            [spa_adamw],
            "second_moment",
            "one of ('full', 'bfloat16', 'factored')",
            ["row"],
        ),
        ([full], "dtype", "one of (", [jnp.float16]),
        ([factored], "power", "in (0, 1]", [0.0, 1.1]),
        (
            [factored],
            "min_dim_size_to_factor",
            "a concrete integer >= 1",
            [0, *NO_COUNTS],
        ),
        ([primal_averaging], "params_of_base", "one of ('params', 'z')", ["x"]),
        (
            [stagewise],
            "boundaries",
            "a concrete integer >= 1",
            [[0], "5", [2.5], [10**5_000]],
        ),
        ([stagewise], "boundaries", "ascending", [[9, 5], [5, 5]]),
        ([stagewise], "boundaries", "a sequence of steps", [5, {5: 0.1, 9: 0.5}]),
        ([stagewise], "factor", "finite and > 1", [1, 1.0, INF, 10**400]),
        ([stagewise, momentum_drop], "step_factor", "finite and > 1", [1.0]),
        (
            [stagewise],
            "step_factor",
            "at least 1.77828, to end before the next boundary",
            [1.7],
        ),
        (
            [stagewise],
            "averaging_rule",
            "one of ('constant', 'scale', 'balance')",
            ["x"],
        ),
        ([stagewise], "learning_rate", "a scalar", [lambda k: 0.1]),
        ([stagewise], "averaging", "a scalar", [lambda k: 0.1]),
        ([momentum_drop], "step", "a concrete integer >= 1", [0]),
        ([momentum_drop], "hold", "one of ('eta', 'alpha')", ["x"]),
        (
            [schedule_free_averaging],
            "num_warmup_steps",
            "a concrete integer >= 0",
            NO_COUNTS,
        ),
        (
            [schedule_free_averaging],
            "weight_power",
            "finite and >= 0",
            [-1.0, jnp.array(1.0)],
        ),
        ([schedule_free_averaging], "count_power", "in [0, 4]", [-1, 4.1]),
    ],
)
def test_bad_arguments(
    functions: Any, argument: str, rule: str, bad: list[Any]
) -> None:
    match = re.escape(f"`{argument}` must be {rule}") + ".*, got "
    for function, value in itertools.product(functions, bad):
        with pytest.raises(ValueError, match=match):
            call(function, **{argument: value})


@pytest.mark.parametrize(
    ("functions", "argument", "good"),
    [
        (
            MEMBERS,
            "learning_rate",
            [0, 1e30, np.float64(0.1), lambda k: 0.1, jnp.array(1.0)],
        ),
        (AVERAGES, "averaging", [0, 0.5, 1]),
        (AVERAGES, "interpolation", [1e-45, 1]),
        ([spa_from_sgdm], "horizon", [None, 1, np.int64(3), jnp.array(3), 2**31 - 1]),
        ([spa_from_sgdm], "nesterov", [np.bool_(False), jnp.array(True)]),
        ([spa], "state_dtype", [None, "bfloat16", jnp.float16, np.dtype("float64")]),
        ([stochastic_rounding], "key", [jax.random.key_data(KEY)]),
        ([full, factored], "b2", [0, 0.999, jnp.array(0.5)]),
        ([full, factored], "eps", [0, jnp.array(1.0)]),
        ([factored], "power", [None, 1, jnp.array(1.0)]),
    ],
)
def test_good_arguments(functions: Any, argument: str, good: list[Any]) -> None:
    """Those that are traced pass, whatever they are."""
    for function, value in itertools.product(functions, good):
        call(function, **{argument: value})
        if isinstance(value, jax.Array) and value.dtype == float:
            jax.jit(lambda v, make=function: [call(make, **{argument: v}), v][1])(
                -9 * value
            )


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: spa(10**400), "got an integer of 1329 bits"),
        (
            lambda: call(spa, learning_rate=stagewise(1.0, 0.1, [5])),
            "got a pair .*: unpack it",
        ),
        (
            lambda: call(primal_averaging, base=optax.MultiSteps(optax.sgd(0.1), 2)),
            "got `optax.MultiSteps`: put its `gradient_transformation",
        ),
        (
            lambda: optax.inject_hyperparams(spa)(1.0, state_dtype=jnp.bfloat16).init(
                jnp.ones(3)
            ),
            "`state_dtype` must .* in `optax.inject_hyperparams`, name it in "
            "`static_args`",
        ),
        (  # numbers are cast to the params' dtype, and in bfloat16 0.999 is 1
            lambda: optax.inject_hyperparams(spa_adamw)(0.1).init(PARAMS16),
            "`b2` must be .* as float32, got .* `hyperparam_dtype=jnp.float32`",
        ),
        (
            lambda: optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.999).init(PARAMS16),
            "`momentum` must be in .0, 1., got .* `hyperparam_dtype=jnp.float32`",
        ),
        (lambda: spa(0.1).init(3), "`params` must be floating-point .*, got .*int"),
        (
            lambda: spa_adamw(0.1, second_moment="bfloat16"),
            "`rounding_key` must be given with",
        ),
        (lambda: theory.max_learning_rate(2.0, 1.0), "`c` must be in"),
        (
            lambda: theory.noise_weight(np.nan, 0.1, 1.0),
            r"`eta` must be in \[0, inf\], got nan",
        ),
        (
            lambda: theory.forward_recursion(1.0, 0.9),
            r"`alphas` must have .* got \(\) and \(\)",
        ),
    ],
)
def test_hints(function: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        function()


def test_injected_as_the_hints_say() -> None:
    x = jnp.ones((4, 4), jnp.bfloat16)
    kwargs: Any = {"horizon": 5, "state_dtype": jnp.bfloat16, "rounding_key": KEY}
    static = optax.inject_hyperparams(spa_from_sgdm, static_args=tuple(kwargs))(
        0.1, 0.9, **kwargs
    )
    wide: Any = optax.inject_hyperparams(spa_adamw, hyperparam_dtype=jnp.float32)
    flag: Any = optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9, nesterov=True)
    with jax.numpy_dtype_promotion("standard"):
        for tx in (static, wide(0.1, rounding_key=KEY), flag):
            updates, _ = tx.update(x, tx.init(x), x)
            assert np.isfinite(updates).all()
    (z,) = jax.tree.leaves(optax.tree.get(static.init(jnp.ones(3)), "z"))
    assert z.dtype == jnp.bfloat16


@pytest.mark.parametrize("make", MEMBERS)
def test_storage_without_a_key(make: Any) -> None:
    """In 16 bits and fewer it warns, in 8 it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(0.1).init(jnp.ones(3))
        make(0.1, state_dtype=jnp.bfloat16, rounding_key=KEY).init(
            jnp.ones(3, jnp.float16)
        )
        for dtype in (jnp.bfloat16, jnp.float16):
            narrow = jax.ShapeDtypeStruct((3,), dtype)
            for tx, x in (
                (make(0.1, state_dtype=dtype), jnp.ones(3)),
                (make(0.1), narrow),
            ):
                with pytest.raises(UserWarning, match="`rounding_key` should be given"):
                    tx.init(x)
    with pytest.raises(
        ValueError, match="`rounding_key` must be given with a `state_dtype` of 8"
    ):
        make(0.1, state_dtype=jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (spa, "learning_rate"),
        (lambda h: spa(0.1, h), "averaging"),
        (lambda h: spa(0.1, 0.1, h), "interpolation"),
        (spa_from_sgdm, "learning_rate"),
        (lambda h: spa_from_sgdm(0.1, h), "momentum"),
        (spa_adamw, "learning_rate"),
    ],
)
def test_schedules_of_arrays_or_with_python(make: Any, name: str) -> None:
    """A rate for each column would train, and change the shapes of the state."""
    traced = "a schedule that can be traced, .*, got a Tracer"
    step = lambda tx: jax.eval_shape(
        lambda x: tx.update(x, tx.init(x), x)[0], jnp.ones((4, 3))
    )
    for schedule, match in (
        (lambda k: jnp.full(3, 0.1), r"a scalar or .*, got an array of shape \(3,\)"),
        (
            lambda k: jnp.full((1, 1), 0.1),
            r"a scalar or .*, got an array of shape \(1, 1\)",
        ),
        (lambda k: 0.1 if k < 3 else 0.01, traced),
        (lambda k: [0.1, 0.2][k], traced),
        (lambda k: np.cos(k) ** 2, traced),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be {match}"):
            step(make(schedule))


def test_a_tracer_that_leaked_is_not_the_schedules_fault() -> None:
    leaked: list[jax.Array] = []
    jax.jit(lambda x: leaked.append(x) or x)(jnp.ones([]))
    tx, x = spa(lambda _: leaked[0]), jnp.ones(3)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        tx.update(x, tx.init(x), x)


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
    for function in (spa, spa_adamw, primal_averaging):
        with pytest.raises(
            ValueError, match=f"`interpolation` must be > 0 at every .*, {got}"
        ):
            call(function, interpolation=schedule)


@pytest.mark.usefixtures("standard_promotion")
def test_interpolation_that_cannot_be_seen() -> None:
    """Traced, NaN or 0 past its end, with a Python `if`, or above 0 for ever: left
    alone."""
    x = jnp.ones(2)
    for schedule in (
        lambda k: 0.9 * jnp.sqrt(1 - k / 1_000.5),
        lambda k: 0.9,
        lambda k: 0.9 if k < 3 else 0.8,
        optax.exponential_decay(0.9, 1_000, 0.9),
    ):
        spa(0.1, 0.1, schedule)
    jax.jit(lambda end: [spa(0.1, 0.1, lambda k: jnp.where(k < 5, 0.9, end)), end][1])(
        0.0
    )
    tx = spa(0.1, 0.1, optax.linear_schedule(0.9, 0.0, 2))
    _, state = run(tx, x, [x])
    assert jnp.isfinite(eval_params(state, x)).all()
    _, state = run(tx, x, [x] * 2, state)
    with pytest.raises(ValueError, match="`opt_state` must have a μ_y > 0, got 0"):
        eval_params(state, x)


PARAMS = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
LAYER = PARAMS["layer"]
SHORT = {"layer": LAYER | {"bias": jnp.ones(1)}}
MANY = {f"layer {i}": {"kernel": jnp.ones(2)} for i in range(300)}


@pytest.mark.parametrize(
    ("params", "grads", "message"),
    [
        (
            PARAMS,
            {"layer": {"kernel": 1}},
            "only `params` has a leaf at ['layer']['bias']",
        ),
        (
            PARAMS,
            {"layer": LAYER | {"a": 1}},
            "only `updates` has a leaf at ['layer']['a']",
        ),
        (
            PARAMS,
            SHORT,
            "have the shapes of `params`: (1,) against (3,) at ['layer']['bias']",
        ),
        (
            MANY,
            flax.core.freeze(MANY),
            "structure of `params`: a FrozenDict against a dict",
        ),
        (
            PARAMS,
            {"layer": flax.core.freeze(LAYER)},
            "`params`: a FrozenDict against a dict",
        ),
        (
            MANY,
            nnx.State(dict(list(MANY.items())[::-1])),
            "structure of `params`: a State against",
        ),
    ],
)
def test_trees_that_differ(params: Any, grads: Any, message: str) -> None:
    tx = spa(0.1)
    with pytest.raises(
        ValueError, match=f"`updates` must.*{re.escape(message)}"
    ) as error:
        tx.update(grads, tx.init(params), params)
    assert len(str(error.value)) < 300


def test_states_and_params_of_others() -> None:
    small = {"layer": LAYER | {"kernel": jnp.ones((1, 3))}}
    factored_state, late = factored().init(PARAMS), {"layer": LAYER | {"bias": None}}
    cast, of = lambda tree: optax.tree.cast(tree, jnp.bfloat16), "at .*'kernel'"
    narrow = full().init(PARAMS)._replace(nu=cast(PARAMS))
    for tx, state, params, match in (
        (spa(0.1), spa(0.1).init(PARAMS), None, "`params` must be passed to `update`"),
        (
            spa(0.1),
            spa(0.1).init(small),
            PARAMS,
            "`state.z` must have the shapes of `params`",
        ),
        (spa(0.1), STATE, PARAMS, "`state` must be of type `SPAState`, got tuple"),
        (
            spa(0.1),
            spa(0.1).init(late),
            PARAMS,
            "`updates` must be None where `state.z` .*'bias'",
        ),
        (
            spa(0.1),
            spa(0.1).init(PARAMS)._replace(rule_state=(0.0,)),
            PARAMS,
            r"rule_state` must",
        ),
        (
            full(),
            narrow,
            PARAMS,
            "`rounding_key` must be given where `state.nu` has 16 bits",
        ),
        (full(), cast(full().init(PARAMS)), PARAMS, "`state.count` must be an integer"),
        (factored(), cast(factored_state), PARAMS, "`state.count` must be an integer"),
        (full(), factored_state, PARAMS, "`state` must be of type `ScaleByRms"),
        (
            factored(),
            optax.EmptyState(),
            PARAMS,
            r"`state` must be of type `\w+State`, got Empty",
        ),
        (
            full(),
            full().init(small),
            PARAMS,
            f"`state.* must have the shapes of .* {of}",
        ),
        (
            factored(),
            factored().init(small),
            PARAMS,
            f"`state.* must have the shapes of .* {of}",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            tx.update(PARAMS, state, params)
    for make, leaf in itertools.product((full, factored), (jnp.arange(3), 1.0, "x")):
        with pytest.raises(
            ValueError, match=r"`params` must be floating-point arrays.*\['a'\]"
        ):
            make().init({"a": leaf} | PARAMS)
    for mask in (
        {"w": 1},
        {"w": jnp.ones(3, bool)},
        {"v": True},
        [True],
        lambda params: params,
    ):
        with pytest.raises(
            ValueError, match="`mask` must be a tree of booleans like `params`: "
        ):
            spa_adamw(0.1, mask=mask).init({"w": jnp.ones(3)})
