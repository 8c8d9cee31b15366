"""The paper's theory as functions: Defazio, Momentum via Primal Averaging, arXiv:2010.00406.

The paper prints several formulas with slips. The functions have the corrected forms: each docstring
says what the paper prints, and the tests check the inequalities themselves. The notation, with
units and ranges, is at the top of `spa_optax.theory._formulas`.
"""

from spa_optax.theory._audit import Audit as Audit, audit as audit, audit_sgdm as audit_sgdm
from spa_optax.theory._formulas import (
    estimate_smoothness as estimate_smoothness,
    forward_recursion as forward_recursion,
    lyapunov as lyapunov,
    max_decay_ratio as max_decay_ratio,
    max_learning_rate as max_learning_rate,
    noise_weight as noise_weight,
    remainder as remainder,
    sgdm_bound as sgdm_bound,
    step_weight as step_weight,
)
