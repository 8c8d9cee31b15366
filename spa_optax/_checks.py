"""Checks arguments when a transform is built: `RULE.check(argument=value)`. Traced values pass."""

import contextlib
import operator
import warnings
from collections.abc import Callable
from math import inf, nan
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from optax import GradientTransformation, MultiSteps

from spa_optax._trees import is_array, is_trained, leaves_with_path


class Rule(NamedTuple):
    """What an argument must be."""

    text: str
    holds: Callable[[Any], Any]  # a test that raises has failed
    is_number: bool = False  # of Python, NumPy or JAX
    may_be_schedule: bool = False
    may_be_none: bool = False
    is_averaging: bool = False  # a c of 0.8 or more is probably meant as the momentum
    needs_32_bits: bool = False  # also of an array: in bfloat16 a b2 of 0.999 is 1

    def check(self, **arguments: Any) -> None:
        """Raises ValueError, with the argument, the rule and the value, unless each fits."""
        for name, value in arguments.items():
            self._check(name, value)
            if self.is_averaging and 0.8 <= _as_float(value) < 1:
                warnings.warn(
                    f"`{name}` {value} means a momentum of {1 - value:g}. For a momentum of {value}"
                    f" pass {1 - value:g}.",
                    stacklevel=3,
                )

    def optional(self) -> "Rule":
        """The rule for an argument that may be None."""
        return self._replace(may_be_none=True)

    def _check(self, name: str, value: Any) -> None:
        if (value is None and self.may_be_none) or (callable(value) and self.may_be_schedule):
            return
        text, array = self.text, value if isinstance(value, jax.Array) else None
        if self.is_number and not _is_real(value):
            text = "a scalar or a schedule" if self.may_be_schedule else "a scalar"
        elif (
            array is not None
            and self.is_number
            and not (self.needs_32_bits and array.itemsize <= 2)
        ):
            return  # perhaps traced
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if self.holds(value):
                return
        bits = value.bit_length() if isinstance(value, int) else 0  # Python may not print many
        got = f"an integer of {bits} bits" if bits > 100 else repr(value)
        if array is not None and array.shape == ():
            how = "name it in `static_args`"
            if self.needs_32_bits:
                how = "set `hyperparam_dtype=jnp.float32`"
            got += f": in `optax.inject_hyperparams`, {how}"
        if isinstance(value, MultiSteps):
            got = "`optax.MultiSteps`: put its `gradient_transformation()` around this"
        if hasattr(value, "averaging"):
            got = "a pair of hyper-parameters: unpack it, as in `spa(*stagewise(...))`"
        raise ValueError(f"`{name}` must be {text}, got {got}")


def is_plain_number(value: object) -> bool:
    """Whether a hyper-parameter is a plain number: neither a schedule nor possibly traced."""
    return not callable(value) and not isinstance(value, jax.Array)


def is_surely(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        return bool(condition)
    return False


def check_one_run(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes: the state is then a batch of states."""
    if any(jnp.shape(leaf) for leaf in jax.tree.leaves(counts)):
        raise ValueError(f"`{name}` must be of one run, got a batch of them: use `jax.vmap`")


def check_params(params: PyTree, are_trained: bool = False) -> None:
    """Raises ValueError unless params are arrays; the only one, or all, must be floating-point."""
    for path, leaf in leaves_with_path(params):
        is_typed, trained = hasattr(leaf, "dtype"), is_trained(leaf)
        fits = trained and is_typed if are_trained else trained or (path and is_array(leaf))
        if leaf is not None and not fits:
            got = f"{leaf.dtype if is_typed else repr(type(leaf))} at {path or 'its root'}"
            hint = "" if is_array(leaf) else ": for Equinox use `eqx.filter(model, eqx.is_array)`"
            raise ValueError(f"`params` must be floating-point arrays, got {got}{hint}")


def check_above_0(name: str, schedule: Any) -> None:
    """Raises ValueError where a schedule is 0 at one of 550 counts, and above 0 later.

    One that falls to 0 may end there, or after the run.
    """
    if not callable(schedule):
        return
    counts = np.append(0, np.unique(np.geomspace(1, 10**6, 700).astype(np.int32)))
    try:
        with jax.ensure_compile_time_eval():
            values = np.asarray(jax.vmap(schedule)(jnp.asarray(counts)), float)
    except Exception:  # it is traced, or has an error of its own, which its first use raises
        return
    if values.shape != counts.shape:
        return
    last = np.max(np.flatnonzero(values > 0), initial=0)
    if (values[: last + 1] <= 0).any():  # past its end it may be NaN
        k = np.argmax(values <= 0)
        raise ValueError(f"`{name}` must be > 0 at every count, got {values[k]:g} at {counts[k]}")


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    return is_number and type(value) is not bool and np.isrealobj(value) and np.shape(value) == ()


def _as_float(value: Any) -> float:
    """A real number of Python or NumPy as a float, and otherwise NaN, which fits no rule."""
    return float(value) if _is_real(value) and not isinstance(value, jax.Array) else nan


def _is_state_dtype(value: Any) -> bool:
    is_dtype = isinstance(value, (str, type, np.dtype))  # `inject_hyperparams` makes it an array
    is_wide = is_dtype and jnp.issubdtype(value, jnp.floating) and jnp.finfo(value).bits >= 16
    return is_wide or (is_dtype and jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2))


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.eval_shape(jax.random.bits, value).shape == ()


def one_of(*choices: Any) -> Rule:
    """The rule for an argument with a few values."""
    return Rule(f"one of {choices}", lambda v: v in choices)


def _number(text: str, holds: Callable[[float], Any], **kwargs: Any) -> Rule:
    return Rule(text, lambda v: holds(_as_float(v)), **kwargs)


def _integer(least: int) -> Rule:
    text = f"a concrete integer >= {least} and below 2^31, the limit of counts"
    return Rule(text, lambda v: not isinstance(v, bool) and least <= operator.index(v) < 2**31)


_SCHEDULE: Any = {"is_number": True, "may_be_schedule": True}
RATE = _number("finite and >= 0", lambda v: 0 <= v < inf, **_SCHEDULE)
AVERAGING = _number("in [0, 1]", lambda v: 0 <= v <= 1, is_averaging=True, **_SCHEDULE)
INTERPOLATION = _number("in (0, 1]", lambda v: v <= 1 and np.float32(v) > 0, **_SCHEDULE)
MOMENTUM = _number("in [0, 1)", lambda v: 0 <= v < 1, **_SCHEDULE)
B1 = MOMENTUM._replace(may_be_schedule=False)
B2 = _number(
    "in [0, 1) as float32",
    lambda v: v >= 0 and np.float32(v) < 1,
    is_number=True,
    needs_32_bits=True,
)
EPS = RATE._replace(may_be_schedule=False)
POWER = INTERPOLATION._replace(may_be_schedule=False).optional()
DECAY = B1._replace(is_number=False)
NOT_NEGATIVE = EPS._replace(is_number=False)
ABOVE_1 = _number("finite and > 1", lambda v: 1 < v < inf)
NOT_NEGATIVE_INTEGER, POSITIVE_INTEGER = _integer(0), _integer(1)
FLAG = Rule("True or False", lambda v: np.asarray(v).dtype == bool and np.ndim(v) == 0)
STATE_DTYPE = Rule(
    "a floating-point dtype of 16 bits or more, float8_e4m3fn or float8_e5m2", _is_state_dtype
).optional()
KEY = Rule("one key of `jax.random`", _is_key)
TRANSFORMATION = Rule("a gradient transformation", lambda v: isinstance(v, GradientTransformation))
