"""Checks arguments when a transform is built. Traced values are skipped."""

import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Check = Callable[[str, Any], Any]


def check(**arguments: Any) -> None:
    """Raises ValueError, with the argument, the rule and the value, unless each fits its rule."""
    for name, value in arguments.items():
        _RULES[name](name, value)


def is_plain_number(value: object) -> bool:
    """Whether a hyper-parameter is a plain number: neither a schedule nor possibly traced."""
    return not callable(value) and not isinstance(value, jax.Array)


def is_surely(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    try:
        return bool(condition)
    except jax.errors.ConcretizationTypeError:
        return False


def check_one_run(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes: the state is then a batch of states."""
    if any(jnp.shape(leaf) for leaf in jax.tree.leaves(counts)):
        raise ValueError(f"`{name}` must be of one run, got a batch of them: use `jax.vmap`")


def _fail(name: str, rule: str, value: Any) -> None:
    """Python refuses to print integers of more than 4,300 digits."""
    is_long = isinstance(value, int) and value.bit_length() > 100
    got = f"an integer of {value.bit_length()} bits" if is_long else repr(value)
    if isinstance(value, jax.Array):
        got = f"an array of shape {value.shape} and dtype {value.dtype}"
        if value.shape == ():
            got += ": name it in the `static_args` of `optax.inject_hyperparams`"
    if isinstance(value, tuple) and hasattr(value, "averaging"):
        got = "a pair of hyper-parameters: unpack it, as in `spa(*stagewise(...))`"
    raise ValueError(f"`{name}` must be {rule}, got {got}")


def _number(
    rule: str, holds: Callable[[float], Any], kind: str = "a scalar or a schedule"
) -> Check:
    """A number for which `holds`, or a traced scalar, or, for that kind, a schedule."""

    def check_number(name: str, value: Any) -> None:
        if callable(value) and "schedule" in kind:
            return
        is_number = isinstance(value, (int, float, np.ndarray, np.number, jax.Array))
        if not is_number or isinstance(value, bool) or np.iscomplexobj(value) or np.shape(value):
            _fail(name, kind, value)
        if not isinstance(value, jax.Array) and not holds(as_float(value)):  # NaN fails
            _fail(name, rule, value)

    return check_number


def _concrete(rule: str, holds: Callable[[float], Any]) -> Check:
    """A number that is neither traced nor a schedule."""

    def check_number(name: str, value: Any) -> None:
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        if not is_number or np.iscomplexobj(value) or not holds(as_float(value)):
            _fail(name, rule, value)

    return check_number


def _integer(least: int) -> Check:
    rule = f"a concrete integer >= {least} and below 2^31, the limit of counts"

    def check_integer(name: str, value: Any) -> None:
        try:
            number = operator.index(value)
        except TypeError:
            number = least - 1
        if not least <= number < 2**31 or isinstance(value, bool):
            _fail(name, rule, value)

    return check_integer


def _optional(rule: Check) -> Check:
    return lambda name, value: None if value is None else rule(name, value)


def _each(rule: Check) -> Check:
    return lambda name, values: all(rule(name, value) is None for value in values)


def _choice(*choices: Any) -> Check:
    rule = f"one of {choices}"

    def check_choice(name: str, value: Any) -> None:
        if not any(value is choice or value == choice for choice in choices):
            _fail(name, rule, value)

    return check_choice


def as_float(value: Any) -> float:
    """A number as a float; an integer too large for one becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_averaging(name: str, value: Any) -> None:
    _number("in [0, 1]", lambda v: 0 <= v <= 1)(name, value)
    if is_plain_number(value) and 0.8 <= value < 1:
        beta = round(1 - float(value), 6)
        warnings.warn(
            f"`averaging` is 1 − momentum: {value!r} means a momentum of {beta:g}. For a momentum"
            f" of {value!r} pass {beta:g}, or use `spa_from_sgdm`.",
            stacklevel=4,
        )


def _check_b2(name: str, value: Any) -> None:
    is_decay = lambda v: v >= 0 and np.float32(v) < 1
    _number("in [0, 1) as float32", is_decay, "a scalar")(name, value)
    if isinstance(value, jax.Array) and value.dtype.itemsize <= 2:  # 0.999 is 1 in bfloat16
        raise ValueError(
            f"`b2` must have 32 bits or more, got {value.dtype}: give `optax.inject_hyperparams`"
            " the argument `hyperparam_dtype=jnp.float32`"
        )


def _check_dtype(name: str, value: Any) -> None:
    # float8_e8m0fnu, which has no mantissa, holds powers of two only. `inject_hyperparams` turns
    # dtypes into arrays.
    try:
        dtype = None if isinstance(value, (jax.Array, np.ndarray)) else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant > 0):
        _fail(name, "None or a signed floating-point dtype such as bfloat16", value)


def _check_key(name: str, value: Any) -> None:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            is_key = value.shape == ()
        else:  # the old kind: two uint32, or as many as the default implementation takes
            old_kind = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
            is_key = (value.shape, value.dtype) == (old_kind.shape, old_kind.dtype)
        if is_key:
            return
    _fail(name, f"{'' if name == 'key' else 'None or '}one key of `jax.random`", value)


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        _fail(name, "True or False", value)


def _check_function(name: str, value: Any) -> None:
    if not callable(value):
        _fail(name, "a function", value)


def _check_transformation(name: str, value: Any) -> None:
    if not isinstance(value, optax.GradientTransformation):
        _fail(name, "a gradient transformation", value)


_rate = _number("finite and >= 0", lambda v: 0 <= v < math.inf)
_above_1 = _concrete("finite and > 1", lambda v: 1 < v < math.inf)
_RULES: dict[str, Check] = {
    "learning_rate": _rate,
    "weight_decay": _rate,
    "averaging": _check_averaging,
    # As float32, the dtype of the state.
    "interpolation": _number("in (0, 1]", lambda v: np.float32(v) > 0 and v <= 1),
    "momentum": _number("in [0, 1)", lambda v: 0 <= v < 1),
    "b1": _number("in [0, 1)", lambda v: 0 <= v < 1, "a scalar"),
    "b2": _check_b2,
    "eps": _number("finite and >= 0", lambda v: 0 <= v < math.inf, "a scalar"),
    "power": _optional(_number("in (0, 1]", lambda v: 0 < v <= 1, "a scalar")),
    "decay": _concrete("in [0, 1)", lambda v: 0 <= v < 1),
    "factor": _above_1,
    "step_factor": _optional(_above_1),
    "weight_power": _concrete("finite and >= 0", lambda v: 0 <= v < math.inf),
    "smoothness": _optional(_concrete("None or finite and > 0", lambda v: 0 < v < math.inf)),
    "count": _optional(_integer(0)),
    "num_warmup_steps": _integer(0),
    "num_steps": _integer(1),
    "num_iterations": _integer(1),
    "boundaries": _each(_integer(1)),
    "step": _integer(1),
    "every": _integer(1),
    "horizon": _optional(_integer(1)),
    "min_dim_size_to_factor": _integer(1),
    "nesterov": _check_bool,
    "second_moment": _choice("full", "bfloat16", "factored"),
    "params_of_base": _choice("params", "z"),
    "averaging_rule": _choice("constant", "scale", "balance"),
    "hold": _choice("eta", "alpha"),
    "state_dtype": _optional(_check_dtype),
    "dtype": _optional(_choice(jnp.bfloat16, "bfloat16")),
    "rounding_key": _optional(_check_key),
    "key": _check_key,
    "layer": _check_function,
    "make_tx": _check_function,
    "base": _check_transformation,
    "inner": _check_transformation,
}
