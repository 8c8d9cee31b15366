"""Momentum via primal averaging for JAX: Optax gradient transformations."""

from spa_optax import diagnostics, theory
from spa_optax._adam import (
    scale_by_factored_second_moment,
    scale_by_second_moment,
    spa_adamw,
)
from spa_optax._convert import convert
from spa_optax._core import SPAState
from spa_optax._evaluate import eval_params, reanchor
from spa_optax._family import spa, spa_from_sgdm
from spa_optax._schedules import (
    ema_nesterov,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    schedule_free_averaging,
    stagewise,
)
from spa_optax._wrappers import (
    float8_momentum,
    in_float32,
    primal_averaging,
    stochastic_rounding,
)

__all__ = [
    "SPAState",
    "convert",
    "diagnostics",
    "ema_nesterov",
    "eval_params",
    "float8_momentum",
    "hyperparams_from_sgdm",
    "hyperparams_to_sgdm",
    "in_float32",
    "primal_averaging",
    "reanchor",
    "scale_by_factored_second_moment",
    "scale_by_second_moment",
    "schedule_free_averaging",
    "spa",
    "spa_adamw",
    "spa_from_sgdm",
    "stagewise",
    "stochastic_rounding",
    "theory",
]

__version__ = "0.1.0"
