"""When momentum pays: the gauge of the paper's Insight 1."""

from spa_optax.diagnostics._report import MomentumReport, momentum_report
from spa_optax.diagnostics._track import track_momentum

__all__ = ["MomentumReport", "momentum_report", "track_momentum"]
