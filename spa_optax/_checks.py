"""Checks arguments when a transform is built: `RULE.check(argument=value)`. Traced
values pass.
"""

import contextlib
import operator
import warnings
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree
from optax import GradientTransformation, MultiSteps

from spa_optax._trees import is_array, is_trained, leaves_with_path

# Kinds of values. A number is of Python or NumPy; a scalar may also be of JAX.
NUMBER, SCALAR, SCHEDULE = "a number", "a scalar", "a scalar or a schedule"


class Rule(NamedTuple):
    """What an argument must be."""

    text: str
    holds: Callable[
        [Any], Any
    ]  # of the value, or of a number as a float; if it raises, it fails
    kind: str = ""  # any, or one of the above
    may_be_none: bool = False
    is_averaging: bool = False  # a c of 0.8 or more is probably meant as the momentum
    needs_32_bits: bool = False  # also of an array: in bfloat16 a b2 of 0.999 is 1

    def optional(self) -> "Rule":
        """The rule for an argument that may be None."""
        return self._replace(may_be_none=True)

    def check(self, **arguments: Any) -> None:
        """Raises ValueError, with the argument, the rule and the value, unless each
        fits.
        """
        for name, value in arguments.items():
            if not self._allows(value):
                is_of_kind = not self.kind or _is_real(value)
                text, got = (
                    self.text if is_of_kind else self.kind,
                    self._described(value),
                )
                raise ValueError(f"`{name}` must be {text}, got {got}")
            if self.is_averaging and is_plain_number(value) and 0.8 <= (value or 0) < 1:
                hint = f"for a momentum of {value} pass {1 - value:g}"
                text = f"`{name}` {value} means a momentum of {1 - value:g}: {hint}"
                warnings.warn(text, stacklevel=3)

    def _allows(self, value: Any) -> bool:
        if (value is None and self.may_be_none) or (
            callable(value) and self.kind == SCHEDULE
        ):
            return True
        is_odd = self.kind and not _is_real(value)
        is_narrow = (
            isinstance(value, jax.Array) and self.needs_32_bits and value.itemsize <= 2
        )
        if (
            is_odd
            or is_narrow
            or (isinstance(value, jax.Array) and self.kind == NUMBER)
        ):
            return False
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return bool(self.holds(float(value) if self.kind else value))  # pyright: ignore[reportArgumentType]  # real
        return bool(self.kind) and isinstance(value, Tracer)

    def _described(self, value: Any) -> str:
        if isinstance(value, int) and (bits := value.bit_length()) > 100:
            return f"an integer of {bits} bits"  # Python may not print many
        if isinstance(value, MultiSteps):
            return "`optax.MultiSteps`: put its `gradient_transformation()` around this"
        if hasattr(value, "averaging"):
            return "a pair of hyper-parameters: unpack it, as in `spa(*stagewise(...))`"
        if isinstance(value, jax.Array) and value.shape == ():
            static = "name it in `static_args`"
            how = (
                static
                if self.kind in ("", NUMBER)
                else "set `hyperparam_dtype=jnp.float32`"
            )
            return f"{value!r}: in `optax.inject_hyperparams`, {how}"
        return repr(value)


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    return (
        is_number
        and type(value) is not bool
        and np.isrealobj(value)
        and np.shape(value) == ()
    )


def _integer(least: int) -> Rule:
    text = f"a concrete integer >= {least} and below 2^31, the limit of counts"
    return Rule(
        text, lambda v: not isinstance(v, bool) and least <= operator.index(v) < 2**31
    )


def one_of(*choices: Any) -> Rule:
    """The rule for an argument with a few values."""
    return Rule(f"one of {choices}", lambda v: v in choices)


def _is_state_dtype(value: Any) -> bool:
    if not isinstance(
        value, (str, type, np.dtype)
    ):  # `inject_hyperparams` makes it an array
        return False
    is_wide = jnp.issubdtype(value, jnp.floating) and jnp.finfo(value).bits >= 16
    return is_wide or jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2)


RATE = Rule("finite and >= 0", lambda v: 0 <= v < inf, SCHEDULE)
AVERAGING = Rule("in [0, 1]", lambda v: 0 <= v <= 1, SCHEDULE, is_averaging=True)
INTERPOLATION = Rule("in (0, 1]", lambda v: v <= 1 and np.float32(v) > 0, SCHEDULE)
MOMENTUM = Rule("in [0, 1)", lambda v: 0 <= v < 1, SCHEDULE)
B1, EPS = MOMENTUM._replace(kind=SCALAR), RATE._replace(kind=SCALAR)
B2 = Rule(
    "in [0, 1) as float32", lambda v: 0 <= v < 1 - 2**-25, SCALAR, needs_32_bits=True
)
POWER = INTERPOLATION._replace(kind=SCALAR).optional()
NOT_NEGATIVE = RATE._replace(kind=NUMBER)
ABOVE_1 = Rule("finite and > 1", lambda v: 1 < v < inf, NUMBER)
NOT_NEGATIVE_INTEGER, POSITIVE_INTEGER = _integer(0), _integer(1)
FLAG = Rule("True or False", lambda v: np.asarray(v).dtype == bool and np.ndim(v) == 0)
STATE_DTYPE = Rule(
    "a floating-point dtype: float8_e4m3fn, float8_e5m2 or wider", _is_state_dtype
)
KEY = Rule(
    "one key of `jax.random`", lambda v: jax.eval_shape(jax.random.bits, v).shape == ()
)
TRANSFORMATION = Rule(
    "a gradient transformation", lambda v: isinstance(v, GradientTransformation)
)


def is_plain_number(value: object) -> bool:
    """Whether a hyper-parameter is a plain number: neither a schedule nor possibly
    traced.
    """
    return not callable(value) and not isinstance(value, jax.Array)


def is_surely(condition: Any) -> bool:
    """Whether a scalar condition is true; False if it is traced."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        return bool(condition)
    return False


def check_one_run(name: str, *counts: Any) -> None:
    """Raises ValueError if a count has axes, as in a batch of states, or no value."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(counts)):
        raise ValueError(
            f"`{name}` must hold arrays, got shapes: use `jax.eval_shape` on the call"
        )
    if any(jnp.shape(leaf) for leaf in jax.tree.leaves(counts)):
        raise ValueError(
            f"`{name}` must be of one run, got a batch of them: use `jax.vmap`"
        )


def check_params(params: PyTree, are_trained: bool = False) -> None:
    """Raises ValueError unless params are arrays; the only one, or all, must be
    floating-point.
    """
    for path, leaf in leaves_with_path(params):
        is_typed, trained = hasattr(leaf, "dtype"), is_trained(leaf)
        fits = (
            trained and is_typed
            if are_trained
            else trained or (path and is_array(leaf))
        )
        if leaf is not None and not fits:
            got = (
                f"{leaf.dtype if is_typed else repr(type(leaf))} at "
                f"{path or 'its root'}"
            )
            hint = (
                ""
                if is_array(leaf)
                else ": for Equinox use `eqx.filter(model, eqx.is_array)`"
            )
            raise ValueError(f"`params` must be floating-point arrays, got {got}{hint}")


def check_above_0(name: str, schedule: Any) -> None:
    """Raises ValueError where a schedule is 0 and rises later. Samples it beyond
    10,000.
    """
    counts = np.append(
        np.arange(10**4), np.unique(np.geomspace(10**4, 10**7, 700).astype(int))
    )
    try:
        with jax.ensure_compile_time_eval():
            values = jax.vmap(schedule)(jnp.asarray(counts, jnp.int32))
        values = np.asarray(values, float).reshape(counts.shape)
    except (
        Exception
    ):  # a number, traced, or it has an error, which its first use raises
        return
    later = np.fmax.accumulate(values[::-1])[::-1]  # past its end it may be NaN
    if (is_bad := (values <= 0) & (later > 0)).any():
        k = np.argmax(is_bad)
        raise ValueError(
            f"`{name}` must be > 0 at every count, got {values[k]:g} at {counts[k]}"
        )
