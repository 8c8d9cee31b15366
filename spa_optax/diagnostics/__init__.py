"""Whether momentum pays: the gauge of the paper's Insight 1. Whether params moved."""

from spa_optax.diagnostics._guard import guard_params
from spa_optax.diagnostics._report import MomentumReport, momentum_report
from spa_optax.diagnostics._track import track_momentum

__all__ = ["MomentumReport", "guard_params", "momentum_report", "track_momentum"]
