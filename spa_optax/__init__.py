"""Momentum via primal averaging for JAX: Optax gradient transformations."""

from spa_optax import diagnostics as diagnostics, theory as theory
from spa_optax._adam import (
    scale_by_factored_second_moment as scale_by_factored_second_moment,
    scale_by_second_moment as scale_by_second_moment,
    spa_adamw as spa_adamw,
)
from spa_optax._convert import convert as convert
from spa_optax._core import SPAState as SPAState
from spa_optax._evaluate import eval_params as eval_params, reanchor as reanchor
from spa_optax._family import spa as spa, spa_from_sgdm as spa_from_sgdm
from spa_optax._schedules import (
    ema_nesterov as ema_nesterov,
    hyperparams_from_sgdm as hyperparams_from_sgdm,
    hyperparams_to_sgdm as hyperparams_to_sgdm,
    schedule_free_averaging as schedule_free_averaging,
    stagewise as stagewise,
)
from spa_optax._wrappers import (
    float8_momentum as float8_momentum,
    in_float32 as in_float32,
    primal_averaging as primal_averaging,
    stochastic_rounding as stochastic_rounding,
)

__version__ = "0.1.0"
