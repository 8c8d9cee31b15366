"""Hyper-parameters: pairs of scalars or schedules, and their values at a count."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike


class SPAHyperparams(NamedTuple):
    """Hyper-parameters of SPA, scalars or schedules: `spa(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # η_k at count k
    averaging: optax.ScalarOrSchedule  # c_{k+1} at count k


class SGDM(NamedTuple):
    """Hyper-parameters of SGD with momentum: `optax.sgd(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # α_k at count k
    momentum: optax.ScalarOrSchedule  # β_k at count k
    nesterov: bool = False


class AdamW(NamedTuple):
    """The hyper-parameters of `optax.adamw` or `optax.adam`, for `convert`."""

    learning_rate: optax.ScalarOrSchedule
    b1: ArrayLike = 0.9
    b2: ArrayLike = 0.999
    eps: ArrayLike = 1e-8


def vectorized(at: Callable[[Array], Array]) -> optax.Schedule:
    """A schedule of a count, or of an array of counts.

    Counts are int32, as in states, so that values are the same there.
    """
    return lambda count: jnp.vectorize(at)(jnp.asarray(count).astype(jnp.int32))


def as_schedule(
    name: str, hyperparam: optax.ScalarOrSchedule
) -> Callable[[Array], Array]:
    """A hyper-parameter as a function of the count, in the default floating dtype."""

    def at(count):
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

    return at
