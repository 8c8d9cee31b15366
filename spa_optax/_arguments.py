"""Arguments: what they must be, hyper-parameters as schedules, and warnings.

They are checked when a transform is built: `REQUIREMENT.check(argument=value)`. Traced
values pass where a scalar or a schedule may stand, and as keys.
"""

import operator
import sys
import warnings
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array
from optax import GradientTransformation, MultiSteps, ScalarOrSchedule

# The kinds of value that an argument may have, in the words of messages. Each allows
# what the one before it does.
NUMBER = "a number"  # of Python or NumPy
SCALAR = "a scalar"  # or of JAX, perhaps traced
SCALAR_OR_SCHEDULE = "a scalar or a schedule"
# The counts at which a schedule is sampled for a check.
SAMPLE_COUNTS = np.append(
    np.arange(10**4), np.unique(np.geomspace(10**4, 10**7, 700).astype(int))
)


class Requirement(NamedTuple):
    """What an argument must be."""

    text: str
    # Gets float(value) if `value_type` is set, else the value. A TypeError, ValueError
    # or OverflowError refuses the value; a traced scalar passes.
    predicate: Callable[[Any], Any]
    value_type: str | None = None  # one of the kinds above. None: any value
    may_be_none: bool = False
    needs_32_bits: bool = False  # refuses arrays of 16 bits: a b2 of 0.999 is 1 there

    def with_type(self, value_type: str) -> "Requirement":
        """The same requirement for values of another type."""
        return self._replace(value_type=value_type)

    def optional(self) -> "Requirement":
        """The requirement for an argument that may be None."""
        return self._replace(may_be_none=True)

    def check(self, **arguments: Any) -> None:
        """Raises ValueError with the argument, the requirement and the value."""
        for name, value in arguments.items():
            if not self._allows(value):
                has_type = not self.value_type or _is_real_scalar(value)
                text = self.text if has_type else self.value_type
                raise ValueError(
                    f"`{name}` must be {text}, got {_describe(value, self.value_type)}"
                )

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.may_be_none
        if callable(value) and self.value_type == SCALAR_OR_SCHEDULE:
            return True
        if self.value_type and not _is_real_scalar(value):
            return False
        if isinstance(value, jax.Array):
            is_narrow = self.needs_32_bits and value.itemsize <= 2
            if is_narrow or self.value_type == NUMBER:
                return False
        try:
            return bool(self.predicate(float(value) if self.value_type else value))  # pyright: ignore[reportArgumentType]
        except (TypeError, ValueError, OverflowError):
            # A traced scalar has no value to check.
            return bool(self.value_type) and isinstance(value, Tracer)


def _describe(value: Any, value_type: str | None) -> str:
    """A value in a message, with what to do if it is one that users often pass."""
    if isinstance(value, int) and value.bit_length() > 100:
        # Python prints at most 4,300 digits, and a message should have fewer.
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, MultiSteps):
        return "`optax.MultiSteps`: put its `gradient_transformation()` around this"
    if isinstance(value, tuple) and value_type == SCALAR_OR_SCHEDULE:
        return "a tuple: unpack hyper-parameters, as in `spa(*stagewise(...))`"
    if isinstance(value, jax.Array) and value.shape == ():
        if value_type in (None, NUMBER):
            return f"{value!r}: in `optax.inject_hyperparams`, name it in `static_args`"
        if value.itemsize <= 2:
            return (
                f"{value!r}: in `optax.inject_hyperparams`, set "
                "`hyperparam_dtype=jnp.float32`"
            )
    return repr(value)


def _is_real_scalar(value: Any) -> bool:
    if type(value) is bool:
        return False
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    return is_number and np.isrealobj(value) and np.shape(value) == ()


def _integer(least: int) -> Requirement:
    def predicate(value):
        return not isinstance(value, bool) and least <= operator.index(value) < 2**31

    return Requirement(
        f"a concrete integer >= {least} and below 2^31, the limit of counts", predicate
    )


def one_of(*choices: Any) -> Requirement:
    """The requirement for an argument with a few values."""
    return Requirement(f"one of {choices}", lambda value: value in choices)


def _is_state_dtype(value: Any) -> bool:
    # A number is refused too: `inject_hyperparams` makes an array of this argument.
    is_dtype = isinstance(value, (str, type, np.dtype))
    return is_dtype and jnp.dtype(value) in (
        jnp.float8_e4m3fn,
        jnp.bfloat16,
        jnp.float32,
        jnp.float64,
    )


NOT_NEGATIVE = Requirement(
    "finite and >= 0", lambda value: 0 <= value < inf, SCALAR_OR_SCHEDULE
)
FRACTION = Requirement("in [0, 1]", lambda value: 0 <= value <= 1, SCALAR_OR_SCHEDULE)
# Above 0 in float32, too.
POSITIVE_FRACTION = Requirement(
    "in (0, 1]", lambda value: value <= 1 and np.float32(value) > 0, SCALAR_OR_SCHEDULE
)
FRACTION_BELOW_1 = Requirement(
    "in [0, 1)", lambda value: 0 <= value < 1, SCALAR_OR_SCHEDULE, needs_32_bits=True
)
B2 = Requirement(
    "in [0, 1) as float32",
    lambda value: 0 <= value < 1 - 2**-25,
    SCALAR,
    needs_32_bits=True,
)
ABOVE_1 = Requirement("finite and > 1", lambda value: 1 < value < inf, NUMBER)
NOT_NEGATIVE_INTEGER = _integer(0)
POSITIVE_INTEGER = _integer(1)
BOOLEAN = Requirement(
    "True or False",
    lambda value: np.asarray(value).dtype == bool and np.ndim(value) == 0,
)
STATE_DTYPE = Requirement(
    "float8_e4m3fn, bfloat16, float32 or float64", _is_state_dtype
)
KEY = Requirement(
    "one key of `jax.random`",
    lambda value: jax.eval_shape(jax.random.bits, value).shape == (),
)
TRANSFORMATION = Requirement(
    "a gradient transformation", lambda value: isinstance(value, GradientTransformation)
)


def is_static_number(value: object) -> bool:
    """Whether a hyper-parameter is neither a schedule nor possibly traced."""
    return not callable(value) and not isinstance(value, jax.Array)


def is_always(value: Any, expected: int) -> bool:
    """Whether a hyper-parameter is known to be `expected` when a transform is built."""
    return is_static_number(value) and bool(value == expected)


def as_schedule(name: str, hyperparam: ScalarOrSchedule) -> Callable[[Any], Array]:
    """A hyper-parameter as a function of the count, in the default floating dtype."""

    def schedule(count):
        try:
            value = hyperparam(count) if callable(hyperparam) else hyperparam
            value = jnp.asarray(value)
        except jax.errors.UnexpectedTracerError:  # it has leaked from elsewhere
            raise
        except jax.errors.JAXTypeError as error:
            raise ValueError(
                f"`{name}` must be a schedule that can be traced, with `jnp.where` in "
                f"place of `if`, got a {type(error).__name__}"
            ) from error
        if value.shape != ():
            raise ValueError(
                f"`{name}` must be a scalar or a schedule of scalars, got an array of "
                f"shape {value.shape}"
            )
        # `inject_hyperparams` casts to the params' dtype, which may be complex.
        return jnp.real(value).astype(jnp.result_type(float))

    return schedule


def sample(hyperparam: Any, counts: np.ndarray) -> np.ndarray:
    """The values of a schedule at counts, or the one of a number.

    Empty if it cannot be evaluated yet.
    """
    try:
        if not callable(hyperparam):
            return np.asarray([hyperparam], float)
        with jax.ensure_compile_time_eval():
            values = jax.vmap(hyperparam)(jnp.asarray(counts, jnp.int32))
        values = np.asarray(values, float)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return np.empty(0)  # it depends on traced values, or cannot be traced
    return values if values.shape == counts.shape else np.empty(0)


def check_averaging(averaging: Any) -> None:
    """Raises ValueError unless in [0, 1]; warns where it looks like a momentum."""
    FRACTION.check(averaging=averaging)
    if is_static_number(averaging) and 0.8 <= averaging < 1:
        momentum = 1 - averaging
        warn(
            f"`averaging` should be 1 − momentum, got {averaging}, which means a "
            f"momentum of {momentum:g}. For a momentum of {averaging} pass "
            f"{momentum:g}."
        )


def check_interpolation(interpolation: Any) -> None:
    """Raises ValueError unless in (0, 1], or a schedule begins above 0 and stays there.

    Past the end of a run it may fall to anything.
    """
    POSITIVE_FRACTION.check(interpolation=interpolation)
    values = sample(interpolation, SAMPLE_COUNTS)
    largest_later = np.fmax.accumulate(values[::-1])[::-1]  # NaN past its end
    is_bad = (values <= 0) & (largest_later > 0)
    is_bad[:1] |= values[:1] <= 0
    if is_bad.any():
        k = np.argmax(is_bad)
        raise ValueError(
            "`interpolation` must be > 0 at every count, got "
            f"{values[k]:g} at {SAMPLE_COUNTS[k]}"
        )


def warn(message: str) -> None:
    """Warns at the line that called the package, perhaps through Optax or JAX."""
    frame, level = sys._getframe(1), 2
    libraries = ("spa_optax.", "optax.", "jax.", "flax.")
    # Code that `exec` runs may have no name.
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(libraries):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
