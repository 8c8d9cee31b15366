"""The audit of a schedule by the paper's theory: Defazio, Momentum via Primal
Averaging, arXiv:2010.00406.
"""

from spa_optax.theory._audit import audit, audit_sgdm
from spa_optax.theory._findings import Audit

__all__ = ["Audit", "audit", "audit_sgdm"]
