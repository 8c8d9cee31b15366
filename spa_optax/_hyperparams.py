"""Hyper-parameters: pairs of scalars or schedules, and their values at a count."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int


class SPAHyperparams(NamedTuple):
    """Hyper-parameters of SPA, scalars or schedules: `spa(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # η_k at count k
    averaging: optax.ScalarOrSchedule  # c_{k+1} at count k


class SGDMHyperparams(NamedTuple):
    """Hyper-parameters of SGD+M, scalars or schedules: `spa_from_sgdm(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # α_k at count k
    momentum: optax.ScalarOrSchedule  # β_k at count k


@dataclasses.dataclass(frozen=True)
class FromSGDM:
    """A schedule of SPA with the hyper-parameters of SGD+M that it was made from.

    `theory.audit` reads `sgdm`, so that it need not look ahead at each step.
    """

    schedule: optax.Schedule
    sgdm: SGDMHyperparams

    def __call__(self, count: ArrayLike) -> Any:
        """The value at a count, or at an array of counts."""
        return self.schedule(count)


AtCount = Callable[[Int[Array, ""]], Float[Array, ""]]


def at_count(name: str, hyperparam: optax.ScalarOrSchedule) -> AtCount:
    """A hyper-parameter as a function of the count, in the default floating-point dtype.

    The function raises ValueError, with the name, where a schedule does not return a scalar.
    """

    def value(count: Int[Array, ""]) -> Float[Array, ""]:
        value = jnp.asarray(hyperparam(count) if callable(hyperparam) else hyperparam)
        if value.shape != ():
            raise ValueError(
                f"`{name}` must be a scalar or a schedule of scalars, got an array of shape"
                f" {value.shape}"
            )
        # `inject_hyperparams` casts to the params' dtype, which may be complex.
        return jnp.real(value).astype(jnp.result_type(float))

    return value


def as_schedule(function: Callable[[Array], Array]) -> optax.Schedule:
    """Makes a schedule, of a count or an array of counts, from a function of an int32 count."""

    def schedule(count: ArrayLike) -> Array:
        # int32, as for counts in states, so that schedules compute the same values.
        counts = jnp.asarray(count).astype(jnp.int32)
        return jnp.vectorize(function)(counts)

    return schedule
