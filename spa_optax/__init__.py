"""Momentum via primal averaging for JAX: Optax gradient transformations."""

from . import diagnostics, theory
from ._adamw import spa_adamw
from ._convert import convert
from ._float8_momentum import float8_momentum
from ._params import eval_params, shift_z
from ._schedules import (
    AdamWHyperparams,
    SGDMHyperparams,
    SPAHyperparams,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    schedule_free_averaging,
    stagewise,
)
from ._spa import spa, spa_from_sgdm
from ._state import SPAState
from ._wrappers import in_float32, primal_averaging, stochastic_rounding

__all__ = [
    "AdamWHyperparams",
    "SGDMHyperparams",
    "SPAHyperparams",
    "SPAState",
    "convert",
    "diagnostics",
    "eval_params",
    "float8_momentum",
    "hyperparams_from_sgdm",
    "hyperparams_to_sgdm",
    "in_float32",
    "primal_averaging",
    "schedule_free_averaging",
    "shift_z",
    "spa",
    "spa_adamw",
    "spa_from_sgdm",
    "stagewise",
    "stochastic_rounding",
    "theory",
]

__version__ = "0.1.0"
