"""Diagnostics: whether momentum pays, and whether something else moved the params."""

from ._guard import guard_params
from ._track import MomentumReport, momentum_report, track_momentum

__all__ = ["MomentumReport", "guard_params", "momentum_report", "track_momentum"]
