"""Checks arguments when a transform is built. Traced values are skipped."""

import contextlib
import operator
import warnings
from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from optax import GradientTransformation, MultiSteps

from spa_optax._trees import is_trained, leaves_with_path


def check(**arguments: Any) -> None:
    """Raises ValueError, with the argument, the rule and the value, unless each fits its rule."""
    for name, value in arguments.items():
        for each in value if name == "boundaries" else (value,):
            _check(name, each)
    if 0.8 <= _plain(c := arguments.get("averaging", nan)) < 1:
        warnings.warn(
            f"`averaging` {c} means a momentum of {1 - c:g}. For a momentum of {c} pass {1 - c:g}.",
            stacklevel=3,
        )


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


def check_floats(name: str, tree: PyTree) -> None:
    """Raises ValueError unless the leaves are floating-point arrays, or None."""
    for path, leaf in leaves_with_path(tree):
        if leaf is not None and not (hasattr(leaf, "dtype") and is_trained(leaf)):
            got = f"{getattr(leaf, 'dtype', repr(leaf))} at {path or 'its root'}"
            raise ValueError(f"`{name}` must be floating-point arrays, got {got}")


def _check_above_0(name: str, schedule: Callable[[Any], Any]) -> None:
    """Raises ValueError where a schedule is 0 at one of 550 counts, and above 0 later.

    One that falls to 0 may end there, or after the run.
    """
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


def _check(name: str, value: Any) -> None:
    rule, holds = _RULES[name]
    is_jax = isinstance(value, jax.Array)
    if callable(value) and name == "interpolation":
        _check_above_0(name, value)
    if (value is None and name in _OPTIONAL) or (callable(value) and name in _SCHEDULES):
        return
    if name in _SCALARS and not _is_real(value):
        rule = "a scalar or a schedule" if name in _SCHEDULES else "a scalar"
    elif name in _SCALARS and is_jax and (name != "b2" or value.dtype.itemsize > 2):
        return  # perhaps traced; but in bfloat16 a b2 of 0.999 is 1
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if holds(value):
            return
    bits = value.bit_length() if isinstance(value, int) else 0  # Python may refuse to print many
    got = f"an integer of {bits} bits" if bits > 100 else repr(value)
    if is_jax and value.shape == ():
        how = "set `hyperparam_dtype=jnp.float32`" if name == "b2" else "name it in `static_args`"
        got += f": in `optax.inject_hyperparams`, {how}"
    if isinstance(value, MultiSteps):
        got = "`optax.MultiSteps`: put its `gradient_transformation()` around this"
    if hasattr(value, "averaging"):
        got = "a pair of hyper-parameters: unpack it, as in `spa(*stagewise(...))`"
    raise ValueError(f"`{name}` must be {rule}, got {got}")


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
    return is_number and type(value) is not bool and np.isrealobj(value) and np.shape(value) == ()


def _plain(value: Any) -> float:
    """A real number of Python or NumPy as a float, and otherwise NaN, which fits no rule."""
    return float(value) if _is_real(value) and not isinstance(value, jax.Array) else nan


def _is_count(value: Any, least: int = 1) -> bool:
    return not isinstance(value, bool) and least <= operator.index(value) < 2**31


def _is_state_dtype(value: Any) -> bool:
    is_dtype = isinstance(value, (str, type, np.dtype))  # `inject_hyperparams` makes it an array
    is_wide = is_dtype and jnp.issubdtype(value, jnp.floating) and jnp.finfo(value).bits >= 16
    return is_wide or (is_dtype and jnp.dtype(value) in (jnp.float8_e4m3fn, jnp.float8_e5m2))


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.eval_shape(jax.random.bits, value).shape == ()


def _are_reports(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    by_label = (r if isinstance(r, Mapping) else {"": r} for r in value.values())
    return all(isinstance(report, tuple) for labels in by_label for report in labels.values())


def _one_of(name: str, *choices: Any) -> tuple[str, str, Any]:
    return f"one of {choices}", name, lambda v: v in choices


_SCHEDULES = {"learning_rate", "weight_decay", "averaging", "interpolation", "momentum"}
_SCALARS = {*_SCHEDULES, "b1", "b2", "eps", "power"}
_OPTIONAL = {"power", "step_factor", "count", "horizon", "state_dtype", "dtype", "rounding_key"}
_INTEGER = "a concrete integer >= {} and below 2^31, the limit of counts"
_FLOAT = "a floating-point dtype of 16 bits or more, float8_e4m3fn or float8_e5m2"
_COUNTS = "num_steps num_iterations boundaries step every horizon min_dim_size_to_factor"
# Each rule, its arguments and its test. A test that raises has failed.
_TABLE = (
    ("finite and >= 0", "learning_rate weight_decay", lambda v: 0 <= _plain(v) < inf),
    ("finite and >= 0", "eps weight_power", lambda v: 0 <= _plain(v) < inf),
    ("finite and > 1", "factor step_factor", lambda v: 1 < _plain(v) < inf),
    ("in [0, 1]", "averaging", lambda v: 0 <= _plain(v) <= 1),
    ("in [0, 1)", "momentum b1 decay", lambda v: 0 <= _plain(v) < 1),
    ("in [0, 1) as float32", "b2", lambda v: _plain(v) >= 0 and np.float32(v) < 1),
    ("in (0, 1]", "interpolation power", lambda v: _plain(v) <= 1 and np.float32(v) > 0),
    (_INTEGER.format(0), "count num_warmup_steps", lambda v: _is_count(v, 0)),
    (_INTEGER.format(1), _COUNTS, _is_count),
    ("True or False", "nesterov mask", lambda v: np.asarray(v).dtype == bool and np.ndim(v) == 0),
    (_FLOAT, "state_dtype", _is_state_dtype),
    ("one key of `jax.random`", "rounding_key key", _is_key),
    ("a bool or a function", "per_leaf", lambda v: isinstance(v, bool) or callable(v)),
    ("a mapping from steps to reports", "reports", _are_reports),
    ("a gradient transformation", "base inner", lambda v: isinstance(v, GradientTransformation)),
    _one_of("second_moment", "full", "bfloat16", "factored"),
    _one_of("params_of_base", "params", "z"),
    _one_of("averaging_rule", "constant", "scale", "balance"),
    _one_of("hold", "eta", "alpha"),
    _one_of("dtype", jnp.bfloat16, "bfloat16"),
)
_RULES = {name: (rule, holds) for rule, names, holds in _TABLE for name in names.split()}
