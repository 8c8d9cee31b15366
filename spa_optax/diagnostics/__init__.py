"""Whether momentum pays: the gauge of the paper's Insight 1. Whether params moved."""

from ._guard import guard_params
from ._track import MomentumReport, momentum_report, track_momentum

__all__ = ["MomentumReport", "guard_params", "momentum_report", "track_momentum"]
