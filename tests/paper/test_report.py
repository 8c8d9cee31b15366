"""Runs that lack something."""

from pathlib import Path

import pytest
import report
from paper_helpers import tiny_run


def test_what_is_lacking_in_runs(tmp_path: Path) -> None:
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    with pytest.raises(
        ValueError, match=r"a run of spa-gradual with seed 1, got no .*metrics.json"
    ):
        report.read_runs(tmp_path, ["spa-gradual"], 2)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "spa-gradual" / "seed1", stops_in=3, seed=1)
    with pytest.raises(ValueError, match=r"seed1/.* must have 4 epochs, as the first, got 2"):
        report.read_runs(tmp_path, ["spa-gradual"], 2)
