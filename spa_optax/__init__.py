"""Momentum via primal averaging for JAX: Optax gradient transformations."""

from spa_optax import diagnostics as diagnostics, theory as theory
from spa_optax._adamw import gpa_adamw as gpa_adamw, spa_adamw as spa_adamw
from spa_optax._convert import (
    hyperparams_from_sgdm as hyperparams_from_sgdm,
    hyperparams_to_sgdm as hyperparams_to_sgdm,
    reanchor as reanchor,
    state_from_sgdm as state_from_sgdm,
    state_to_sgdm as state_to_sgdm,
)
from spa_optax._convert_adamw import (
    state_from_adamw as state_from_adamw,
    state_from_schedule_free as state_from_schedule_free,
    state_to_adamw as state_to_adamw,
    state_to_schedule_free as state_to_schedule_free,
)
from spa_optax._core import GPAState as GPAState, SPAState as SPAState
from spa_optax._gpa import eval_params as eval_params, gpa as gpa
from spa_optax._hyperparams import (
    SGDMHyperparams as SGDMHyperparams,
    SPAHyperparams as SPAHyperparams,
)
from spa_optax._schedules import (
    momentum_drop as momentum_drop,
    schedule_free_averaging as schedule_free_averaging,
    stagewise as stagewise,
)
from spa_optax._spa import spa as spa, spa_from_sgdm as spa_from_sgdm

__version__ = "0.1.0"
