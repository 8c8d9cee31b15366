"""The paper's theory as functions: Defazio, Momentum via Primal Averaging,
arXiv:2010.00406.

The functions have corrected formulas. Each docstring says what the paper prints, and
the tests check the inequalities themselves. The notation is at the top of
`spa_optax.theory._formulas`.
"""

from spa_optax._schedules import momentum_drop
from spa_optax.theory._audit import Audit, audit, audit_sgdm
from spa_optax.theory._formulas import (
    forward_recursion,
    lyapunov,
    max_decay_ratio,
    max_learning_rate,
    noise_weight,
    remainder,
    sgdm_bound,
    step_weight,
)

__all__ = [
    "Audit",
    "audit",
    "audit_sgdm",
    "forward_recursion",
    "lyapunov",
    "max_decay_ratio",
    "max_learning_rate",
    "momentum_drop",
    "noise_weight",
    "remainder",
    "sgdm_bound",
    "step_weight",
]
