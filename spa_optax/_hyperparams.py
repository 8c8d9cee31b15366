"""Hyper-parameters: pairs of scalars or schedules, and their values at a count."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int


class SPAHyperparams(NamedTuple):
    """Hyper-parameters of SPA, scalars or schedules: `spa(*hyperparams)`."""

    learning_rate: optax.ScalarOrSchedule  # η_k at count k
    averaging: optax.ScalarOrSchedule  # c_{k+1} at count k


class SGDMHyperparams(NamedTuple):
    """Hyper-parameters of SGD+M, scalars or schedules:
    `spa_from_sgdm(*hyperparams)`.
    """

    learning_rate: optax.ScalarOrSchedule  # α_k at count k
    momentum: optax.ScalarOrSchedule  # β_k at count k


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule, of a count or an array of counts, from a function of an int32
    count.
    """

    at: Callable[[Array], Array]
    sgdm: SGDMHyperparams | None = (
        None  # spares `theory.audit` the look-ahead at each step
    )

    def __call__(self, count: ArrayLike) -> Array:
        """The values; counts are int32, as in states, so that schedules compute the
        same there.
        """
        return jnp.vectorize(self.at)(jnp.asarray(count).astype(jnp.int32))


def at_count(name: str, hyperparam: optax.ScalarOrSchedule) -> Callable[[Array], Array]:
    """A hyper-parameter as a function of the count, a scalar of the default floating
    dtype.
    """

    def at(count: Int[Array, ""]) -> Float[Array, ""]:
        try:
            value = jnp.asarray(
                hyperparam(count) if callable(hyperparam) else hyperparam
            )
        except (
            jax.errors.JAXTypeError
        ) as error:  # a traced count must be a number there
            if isinstance(
                error, jax.errors.UnexpectedTracerError
            ):  # it has leaked from elsewhere
                raise
            rule = (
                "must be a schedule that can be traced, with `jnp.where` in "
                "place of `if`"
            )
            raise ValueError(
                f"`{name}` {rule}, got a {type(error).__name__}"
            ) from error
        if value.shape != ():
            rule = "must be a scalar or a schedule of scalars"
            raise ValueError(f"`{name}` {rule}, got an array of shape {value.shape}")
        # `inject_hyperparams` casts to the params' dtype, which may be complex.
        return jnp.real(value).astype(jnp.result_type(float))

    return at
