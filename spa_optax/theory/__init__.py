"""The paper's theory as functions: Defazio, Momentum via Primal Averaging, arXiv:2010.00406.

The functions have corrected formulas. Each docstring says what the paper prints, and the tests
check the inequalities themselves. The notation is at the top of `spa_optax.theory._formulas`.
"""

from spa_optax._schedules import momentum_drop as momentum_drop
from spa_optax.theory._audit import Audit as Audit, audit as audit, audit_sgdm as audit_sgdm
from spa_optax.theory._formulas import (
    forward_recursion as forward_recursion,
    lyapunov as lyapunov,
    max_decay_ratio as max_decay_ratio,
    max_learning_rate as max_learning_rate,
    noise_weight as noise_weight,
    remainder as remainder,
    sgdm_bound as sgdm_bound,
    step_weight as step_weight,
)
