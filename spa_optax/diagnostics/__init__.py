"""When momentum pays: the gauge of the paper's Insight 1, and tools to act on it."""

from spa_optax.diagnostics._report import (
    MomentumReport as MomentumReport,
    momentum_report as momentum_report,
)
from spa_optax.diagnostics._track import track_momentum as track_momentum
