"""The paper's theory as functions: Defazio, Momentum via Primal Averaging, arXiv:2010.00406.

Notation: the SPA step k uses η_k and c_{k+1}; f is L-smooth (`smoothness`) with infimum f*
(`f_star`); g_k is the stochastic gradient at x_k; `gap` is f(x_0) − f*. Scalars and arrays
broadcast. All functions but `forward_recursion` and the audits can be jitted and vmapped. At c = 1
infinite limits are inf, and nothing is NaN.

The paper prints several formulas with slips. The functions have the corrected forms: each docstring
says what the paper prints, and the tests check the inequalities themselves.
"""

from spa_optax.theory._audit import Audit as Audit, audit as audit, audit_sgdm as audit_sgdm
from spa_optax.theory._formulas import (
    augmentation as augmentation,
    augmented_lyapunov as augmented_lyapunov,
    balanced_averaging as balanced_averaging,
    conservative_learning_rate as conservative_learning_rate,
    estimate_smoothness as estimate_smoothness,
    forward_recursion as forward_recursion,
    lyapunov as lyapunov,
    max_decay_ratio as max_decay_ratio,
    max_learning_rate as max_learning_rate,
    noise_weight as noise_weight,
    optimal_learning_rate as optimal_learning_rate,
    remainder as remainder,
    sgd_bound as sgd_bound,
    sgd_lyapunov as sgd_lyapunov,
    sgd_optimal_learning_rate as sgd_optimal_learning_rate,
    sgd_remainder as sgd_remainder,
    sgdm_bound as sgdm_bound,
    sgdm_variance_bound as sgdm_variance_bound,
    step_weight as step_weight,
)
