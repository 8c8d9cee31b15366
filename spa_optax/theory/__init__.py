"""The audit of a schedule by the paper's theory: Defazio, Momentum via Primal
Averaging, arXiv:2010.00406.
"""

from spa_optax.theory._audit import Audit, audit, audit_sgdm

__all__ = ["Audit", "audit", "audit_sgdm"]
