"""Bad input: a ValueError that names the argument and the value."""

import functools
import inspect
import itertools
import re
import warnings
from pathlib import Path
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
    eval_params,
    float8_momentum,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    in_float32,
    primal_averaging,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
    stochastic_rounding,
)

NAN, INF = float("nan"), float("inf")
KEY = jax.random.key(0)
SGD_STATE = optax.sgd(0.1, 0.9).init(jnp.ones(3))
PARAMS16 = jnp.ones(3, jnp.bfloat16)
MEMBERS = (spa, spa_adamw, spa_from_sgdm)
AVERAGES = (spa, spa_adamw, primal_averaging)
SCHEDULES = (stagewise, hyperparams_to_sgdm)
WRAPPERS = (primal_averaging, stochastic_rounding, float8_momentum)
OF_A_RATE = (*SCHEDULES, hyperparams_from_sgdm, schedule_free_averaging)
NO_SCALARS = [None, "a", [0.5], np.ones(1), jnp.ones(1), 1j, True]
NO_KEYS = [0, jnp.ones(2), jnp.zeros(5, jnp.uint32), jax.random.split(KEY)]
NO_STATE_DTYPES = [
    "floaty",
    int,
    jnp.complex64,
    jnp.float16,
    jnp.float8_e5m2,
    jnp.float8_e8m0fnu,
    jnp.float8_e5m2fnuz,
    jnp.ones(3),
]
NO_COUNTS = [-1, True, 3.0, "3", jnp.ones(1, int), jnp.array(1.0), 2**31, 10**5_000]


def call(function: Any, **arguments: Any) -> Any:
    """Calls a function, with a value for each other argument that must be given."""
    values = {
        "learning_rate": 0.1,
        "averaging": 0.1,
        "momentum": 0.9,
        "boundaries": [5, 9],
        "base": optax.sgd(0.1, 0.9),
        "rounding_key": KEY,
        "inner": optax.sgd(0.1),
    }
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name: values[p.name] for p in parameters if p.default is p.empty}
    return unchecked(function)(**needed | arguments)


def half(count: Any) -> float:
    return 0.5


def shown(value: Any) -> str:
    """A value as a message shows it. Python may not print an integer of many digits."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"{value.bit_length()} bits"
    return repr(value)


@pytest.mark.parametrize(
    ("functions", "argument", "bad"),
    [
        (MEMBERS, "learning_rate", [-0.1, NAN, INF, np.float64(-1), 10**400]),
        (MEMBERS, "learning_rate", [jnp.array(-1.0), jnp.array(INF)]),
        ([spa, spa_from_sgdm], "learning_rate", NO_SCALARS),
        (OF_A_RATE, "learning_rate", [-0.1]),
        ([stagewise], "learning_rate", [half]),
        (AVERAGES, "averaging", [-0.5, 1.5, NAN]),
        (SCHEDULES, "averaging", [1.5]),
        ([stagewise], "averaging", [half]),
        (AVERAGES, "interpolation", [0.0, 1e-46, 1.1, NAN]),
        ([spa_adamw], "interpolation", [True]),
        ([spa_from_sgdm, hyperparams_from_sgdm], "momentum", [-0.1, 1.0, NAN]),
        ([*MEMBERS, primal_averaging], "state_dtype", NO_STATE_DTYPES),
        ([spa, spa_from_sgdm], "rounding_key", NO_KEYS),
        ([stochastic_rounding, float8_momentum], "rounding_key", NO_KEYS),
        (WRAPPERS, "base", [0.1, optax.sgd]),
        ([in_float32], "inner", [0.1]),
        ([spa_from_sgdm, hyperparams_from_sgdm], "horizon", [0]),
        ([spa_from_sgdm], "nesterov", ["no", 1, None, KEY]),
        ([spa_adamw], "b2", [-0.1, -1e-50, 1.0, 1 - 2e-8]),
        ([spa_adamw], "b2", [jnp.array(1.0), half, *NO_SCALARS]),
        ([spa_adamw], "eps", [-1e-8, INF, half, *NO_SCALARS]),
        ([spa_adamw], "weight_decay", [-1]),
        ([spa_adamw], "second_moment", ["row", "bfloat16"]),
        ([primal_averaging], "params_of_base", ["x"]),
        ([stagewise], "boundaries", ["5", 5, {5: 0.1, 9: 0.5}, [9, 5], [5, 5]]),
        ([stagewise], "divisor", [1, 1.0, INF, 10**400]),
        ([stagewise], "step_divisor", [1.0, 1.7]),
        ([stagewise], "averaging_mode", ["x"]),
        ([schedule_free_averaging], "warmup_steps", NO_COUNTS),
        ([schedule_free_averaging], "weight_lr_power", [-1.0, jnp.array(1.0)]),
    ],
)
def test_bad_arguments(functions: Any, argument: str, bad: list[Any]) -> None:
    for function, value in itertools.product(functions, bad):
        match = f"(?s)`{argument}`.*{re.escape(shown(value))}"
        with pytest.raises(ValueError, match=match):
            call(function, **{argument: value})


@pytest.mark.parametrize("boundary", [0, 2.5, 10**5_000], ids=shown)
def test_one_bad_boundary(boundary: Any) -> None:
    with pytest.raises(ValueError, match=f"`boundaries`.*{shown(boundary)}"):
        call(stagewise, boundaries=[boundary])


def test_a_step_factor_that_is_too_small_is_told_the_least_one() -> None:
    """10^(1/4), from boundary 5 to 9."""
    with pytest.raises(ValueError, match=r"`step_divisor`.*1\.77828.*1\.7$"):
        call(stagewise, step_divisor=1.7)


@pytest.mark.parametrize(
    ("functions", "argument", "good"),
    [
        (MEMBERS, "learning_rate", [0, 1e30, np.float64(0.1), half, jnp.array(1.0)]),
        (AVERAGES, "averaging", [0, 0.5, 1]),
        (AVERAGES, "interpolation", [1e-45, 1]),
        ([spa_from_sgdm], "horizon", [None, 1, np.int64(3), jnp.array(3), 2**31 - 1]),
        ([spa_from_sgdm], "nesterov", [np.bool_(False), jnp.array(True)]),
        ([spa], "state_dtype", [None, "bfloat16", jnp.float32, np.dtype("float64")]),
        ([stochastic_rounding], "rounding_key", [jax.random.key_data(KEY)]),
        ([spa_adamw], "b2", [0, 0.999, jnp.array(0.5)]),
        ([spa_adamw], "eps", [0, jnp.array(1.0)]),
    ],
)
def test_good_arguments(functions: Any, argument: str, good: list[Any]) -> None:
    """Traced ones pass, whatever they are."""
    for function, value in itertools.product(functions, good):
        call(function, **{argument: value})
        if not isinstance(value, jax.Array) or value.dtype != float:
            continue

        def call_traced(value: Any, function: Any = function) -> Any:
            call(function, **{argument: value})
            return value

        jax.jit(call_traced)(-9 * value)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: spa(10**400), "`learning_rate`.*1329 bits"),
        (
            lambda: call(spa, learning_rate=stagewise(1.0, 0.1, [5])),
            r"`learning_rate`.*`spa\(\*stagewise",
        ),
        (
            lambda: call(primal_averaging, base=optax.MultiSteps(optax.sgd(0.1), 2)),
            r"`base`.*`optax\.MultiSteps`.*`gradient_transformation\(\)`",
        ),
        (
            lambda: optax.inject_hyperparams(spa)(1.0, state_dtype=jnp.bfloat16).init(
                jnp.ones(3)
            ),
            r"`state_dtype`.*`optax\.inject_hyperparams`.*`static_args`",
        ),
        (  # numbers are cast to the params' dtype, and in bfloat16 0.999 is 1
            lambda: optax.inject_hyperparams(spa_adamw)(0.1).init(PARAMS16),
            "`b2`.*1.*`hyperparam_dtype=jnp.float32`",
        ),
        (
            lambda: optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.999).init(PARAMS16),
            "`momentum`.*1.*`hyperparam_dtype=jnp.float32`",
        ),
        (  # and 0.99 is 0.988
            lambda: optax.inject_hyperparams(spa_adamw)(0.1, b2=0.99).init(PARAMS16),
            "`b2`.*0.988.*`hyperparam_dtype=jnp.float32`",
        ),
        (  # and 0.9 is 0.898, so that 1 − β is 1.6 % off
            lambda: optax.inject_hyperparams(spa_from_sgdm)(0.1, 0.9).init(PARAMS16),
            "`momentum`.*0.898.*`hyperparam_dtype=jnp.float32`",
        ),
        (lambda: spa(0.1).init(3), "`params`.*int"),
    ],
)
def test_hints(function: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        function()


@pytest.mark.slow
def test_injected_as_the_hints_say() -> None:
    x = jnp.ones((4, 4), jnp.bfloat16)
    kwargs: Any = {"horizon": 5, "state_dtype": jnp.bfloat16, "rounding_key": KEY}
    inject = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    static = inject(spa_from_sgdm, static_args=tuple(kwargs))(0.1, 0.9, **kwargs)
    wide: Any = inject(spa_adamw)
    flag: Any = inject(spa_from_sgdm)(0.1, 0.9, nesterov=True)
    with jax.numpy_dtype_promotion("standard"):
        for tx in (static, wide(0.1, rounding_key=KEY), flag):
            updates, _ = tx.update(x, tx.init(x), x)
            assert np.isfinite(updates).all()
    (z,) = jax.tree.leaves(optax.tree.get(static.init(jnp.ones(3)), "z"))
    assert z.dtype == jnp.bfloat16


@pytest.mark.parametrize("make", MEMBERS)
def test_storage_without_a_key(make: Any) -> None:
    """In 16 bits it warns, in 8 it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(0.1).init(jnp.ones(3))
        with_key = make(0.1, state_dtype=jnp.bfloat16, rounding_key=KEY)
        with_key.init(jnp.ones(3, jnp.float16))
        for tx, params in (
            (make(0.1, state_dtype=jnp.bfloat16), jnp.ones(3)),
            (make(0.1), jax.ShapeDtypeStruct((3,), jnp.bfloat16)),
            (make(0.1), jax.ShapeDtypeStruct((3,), jnp.float16)),
        ):
            with pytest.raises(UserWarning, match=r"`rounding_key`.*16 bits"):
                tx.init(params)
    refused = r"`rounding_key`.*`state_dtype`.*None|`state_dtype`.*16 bits"
    with pytest.raises(ValueError, match=refused):
        make(0.1, state_dtype=jnp.float8_e4m3fn)


def step(make: Any, schedule: Any, x: jax.Array) -> Any:
    tx = make(schedule)
    return tx.update(x, tx.init(x), x)


def python_if(count: Any) -> float:
    return 0.1 if count < 3 else 0.01


def python_list(count: Any) -> float:
    return [0.1, 0.2][count]


def numpy_cosine(count: Any) -> Any:
    return np.cos(count) ** 2


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (spa, "learning_rate"),
        (lambda h: spa(0.1, h), "averaging"),
        (lambda h: spa(0.1, 0.1, h), "interpolation"),
        (spa_from_sgdm, "learning_rate"),
        (lambda h: spa_from_sgdm(0.1, h), "momentum"),
        (spa_adamw, "learning_rate"),
        (lambda h: spa_adamw(0.1, weight_decay=h), "weight_decay"),
    ],
)
def test_schedules_of_arrays_or_with_python(make: Any, name: str) -> None:
    """A rate for each column would train, and change the shapes of the state."""
    for schedule, got in (
        (lambda k: jnp.full(3, 0.1), r"\(3,\)"),
        (lambda k: jnp.full((1, 1), 0.1), r"\(1, 1\)"),
        (python_if, "Tracer"),
        (python_list, "Tracer"),
        (numpy_cosine, "Tracer"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`.*{got}"):
            jax.eval_shape(functools.partial(step, make, schedule), jnp.ones((4, 3)))


def test_a_tracer_that_leaked_is_not_the_schedules_fault() -> None:
    leaked: list[jax.Array] = []

    @jax.jit
    def leak(x: jax.Array) -> jax.Array:
        leaked.append(x)
        return x

    leak(jnp.ones([]))
    tx, x = spa(lambda _: leaked[0]), jnp.ones(3)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        tx.update(x, tx.init(x), x)


@pytest.mark.parametrize(
    ("schedule", "got"),
    [
        (optax.linear_schedule(0.0, 0.9, 1_000), "0 at 0"),
        (lambda k: jnp.where(k == 5, 0.0, 0.9), "0 at 5"),
        (lambda k: jnp.zeros(()), "0 at 0"),
        (optax.constant_schedule(-0.5), "-0.5 at 0"),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_interpolation_that_reaches_0(schedule: Any, got: str) -> None:
    """And rises again, or begins there: z as params does not tell x."""
    for function in (spa, spa_adamw, primal_averaging):
        with pytest.raises(ValueError, match=f"`interpolation`.*{got}"):
            call(function, interpolation=schedule)


@pytest.mark.usefixtures("standard_promotion")
def test_interpolation_that_cannot_be_seen() -> None:
    """Traced, NaN or 0 past its end, with a Python `if`, or above 0 for ever: left
    alone."""
    x = jnp.ones(2)
    for schedule in (
        lambda k: 0.9 * jnp.sqrt(1 - k / 1_000.5),
        half,
        python_if,
        optax.exponential_decay(0.9, 1_000, 0.9),
    ):
        spa(0.1, 0.1, schedule)

    @jax.jit
    def make_traced(end: Any) -> Any:
        spa(0.1, 0.1, lambda k: jnp.where(k < 5, 0.9, end))
        return end

    make_traced(0.0)
    tx = spa(0.1, 0.1, optax.linear_schedule(0.9, 0.0, 2))
    _, state = run(tx, x, [x])
    assert jnp.isfinite(eval_params(state, x)).all()
    _, state = run(tx, x, [x] * 2, state)
    with pytest.raises(ValueError, match=r"`opt_state`.*0"):
        eval_params(state, x)


def test_a_mistake_in_a_schedule_is_raised_at_once() -> None:
    def mistaken(k: Any) -> Any:
        raise RuntimeError("a mistake")

    for name in ("interpolation", "averaging"):
        with pytest.raises(RuntimeError, match="a mistake"):
            spa(
                0.1,
                **{name: mistaken},
                state_dtype=jnp.float8_e4m3fn,
                rounding_key=jax.random.key(0),
            )


PARAMS = {"layer": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
LAYER = PARAMS["layer"]
SHORT = {"layer": LAYER | {"bias": jnp.ones(1)}}


@pytest.mark.parametrize(
    ("params", "grads", "got"),
    [
        (PARAMS, {"layer": {"kernel": 1}}, "['layer']['bias']"),
        (PARAMS, {"layer": LAYER | {"a": 1}}, "['layer']['a']"),
        (PARAMS, SHORT, "(1,) against (3,) at ['layer']['bias']"),
        (PARAMS, {"layer": flax.core.freeze(LAYER)}, "FrozenDict"),
        (PARAMS, nnx.State(PARAMS), "State"),
    ],
)
def test_trees_that_differ(params: Any, grads: Any, got: str) -> None:
    tx = spa(0.1)
    with pytest.raises(ValueError, match=f"`updates`.*`params`.*{re.escape(got)}"):
        tx.update(grads, tx.init(params), params)


SMALL = {"layer": LAYER | {"kernel": jnp.ones((1, 3))}}
WITHOUT_BIAS = {"layer": LAYER | {"bias": None}}


@pytest.mark.parametrize(
    ("state", "params", "match"),
    [
        (spa(0.1).init(PARAMS), None, "`params`.*None"),
        (spa(0.1).init(SMALL), PARAMS, r"`state\.z`.*\(1, 3\).*'kernel'"),
        (spa(0.1).init(WITHOUT_BIAS), PARAMS, r"`updates`.*`state\.z`.*'bias'"),
        (spa(0.1).init(PARAMS), WITHOUT_BIAS, r"`updates`.*`params`.*'bias'"),
        (SGD_STATE, PARAMS, "`state`.*`SPAState`.*tuple"),
    ],
)
def test_states_and_params_of_others(state: Any, params: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        spa(0.1).update(PARAMS, state, params)


@pytest.mark.parametrize("leaf", [1, "x"])
def test_params_that_are_not_arrays(leaf: Any) -> None:
    with pytest.raises(ValueError, match=rf"`params`.*{leaf!r}"):
        spa(0.1).init(leaf)
    if leaf == "x":
        with pytest.raises(ValueError, match=r"`params`.*'x' at \['a'\]"):
            spa(0.1).init({"a": leaf} | PARAMS)


@pytest.mark.parametrize(
    "mask",
    [
        {"w": 1},
        {"w": jnp.ones(3, bool)},
        {"v": True},
        [True],
        lambda params: params,
    ],
)
def test_masks_that_are_no_booleans_like_params(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"`mask`.*`params`"):
        spa_adamw(0.1, mask=mask).init({"w": jnp.ones(3)})


@pytest.mark.parametrize(
    "make",
    [
        lambda: spa(0.1, 0.9),
        lambda: spa_adamw(0.1, 0.9),
        lambda: primal_averaging(optax.sgd(0.1), 0.9),
        lambda: hyperparams_to_sgdm(0.1, 0.9),
    ],
)
def test_warnings_point_to_the_line_of_the_user(make: Any) -> None:
    with pytest.warns(UserWarning, match="`averaging` should be 1 − momentum") as found:
        make()
    (name,) = {Path(warning.filename).name for warning in found}
    assert name in (Path(__file__).name, "_decorator.py")  # that of the type checker


def test_a_warning_in_code_without_a_module() -> None:
    match = r"`averaging` should be 1 − momentum.* of 0\.1\. .* of 0\.9 pass 0\.1"
    with pytest.warns(UserWarning, match=match):
        exec("spa(0.1, 0.9)", {"spa": spa})


def test_when_a_rounding_key_is_missed() -> None:
    """Not where the params are z, of which 32 bits are kept; but after a cast too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spa(0.1, 1).init(PARAMS16)
        spa_from_sgdm(0.1, 0.0).init(PARAMS16)
        wide = spa(0.1, 0.5)
        state = wide.init(jnp.ones(3))
    with pytest.warns(UserWarning, match="`rounding_key` should be given"):
        spa(0.1, 0.5).init(PARAMS16)
    with pytest.warns(UserWarning, match="`rounding_key` should be given"):
        spa(0.1, 1, state_dtype=jnp.bfloat16).init(jnp.ones(3))
    difference = spa(0.1, 0.5, rounding_key=KEY).init(PARAMS16)
    with pytest.warns(UserWarning, match="`rounding_key` should be given"):
        wide.update(PARAMS16, state._replace(z=difference.z), PARAMS16)


def test_when_x_is_rough() -> None:
    """Beside params of 16 bits, not of 32, nor where x is the params."""
    match = "their rounding errors add up, in x to those of some 17.7 roundings"
    with pytest.warns(UserWarning, match=match):
        spa(0.1, 0.01, 0.4, rounding_key=KEY).init(PARAMS16)
    base = optax.sgd(0.1)
    with pytest.warns(UserWarning, match=match):
        primal_averaging(base, 0.01, 0.4, rounding_key=KEY).init(PARAMS16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spa(0.1, 0.01, 0.4, rounding_key=KEY).init(jnp.ones(3))
        spa(0.1, 0.01, rounding_key=KEY).init(PARAMS16)
        spa_adamw(0.1, 0.05, 0.9, rounding_key=KEY).init(PARAMS16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`interpolation` or `averaging` should be larger")
@pytest.mark.parametrize(("c", "mu_y"), [(0.01, 0.4), (0.05, 0.2)])
def test_how_rough_x_is(c: float, mu_y: float) -> None:
    """1/(μ_y √(2c − c²)) times the error of y, whose variance is ulp²/6 if steps are
    longer than an ulp.

    In 4,096 numbers the standard error of a root mean square is 1.1 %.
    """
    ulp, num_steps = 2.0**-8, int(10 / c)
    tx = spa(1.0, c, mu_y, state_dtype=jnp.float32, rounding_key=KEY)
    x = np.linspace(0.7, 0.8, 4096).astype(jnp.bfloat16).astype(float)
    y = jnp.asarray(x, jnp.bfloat16)
    state, update, start, last = tx.init(y), jax.jit(tx.update), x, 0.0
    for k in range(num_steps):
        # z is at `start` and some noise, not a random walk, so that y keeps its ulp.
        noise = 0.02 * jax.random.normal(jax.random.fold_in(KEY, k), y.shape)
        updates, state = update(last - noise, state, y)
        y, last = optax.apply_updates(y, updates), noise
        x = x + c * (start + np.asarray(noise, float) - x)
    error = np.sqrt(np.mean((np.asarray(eval_params(state, y), float) - x) ** 2))
    expected = ulp / np.sqrt(6) / (mu_y * np.sqrt(2 * c - c**2))
    assert 0.95 < error / expected < 1.05


def test_a_batch_of_states_outside_vmap_is_refused() -> None:
    """Else the scalars of the runs would meet the elements of the params."""
    tx = spa(0.1, 0.1, 0.5)
    params = jnp.ones((2, 2))  # of two runs
    states = jax.vmap(tx.init)(params)
    jax.vmap(tx.update)(params, states, params)
    with pytest.raises(ValueError, match=r"`state`.*`jax\.vmap`"):
        tx.update(params, states, params)
