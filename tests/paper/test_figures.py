"""Figures and tables, from runs whose numbers are known."""

from pathlib import Path
from typing import Any

import figures
import pytest
import report
from paper_helpers import fake_runs, tiny_run


def test_figures_2_3_and_4(tmp_path: Path, capsys: Any) -> None:
    """From runs whose numbers are known: 6 epochs of 200 steps, so that the drop is at step 600."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    fake_runs(runs)
    arguments = ["--runs", str(runs), "--tracked", str(runs), "--seeds", "2", "--out", str(out)]
    figures.main(arguments)
    for i in (2, 3, 4):
        assert (out / f"figure{i}.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    # spa-eta, i = 2, over 2 seeds 1 apart: ± 0.5. Its spike is 2 over 5 of the first 20 steps.
    expected = "2.5000 ± 0.5000 2.0000 ± 0.5000 1.5000 ± 0.5000 1.5000 ± 0.5000 1.5000 ± 0.5000"
    assert f"spa-eta {expected} 3.5000 ± 0.5000".split() in rows
    expected = "1.5000 ± 0.5000 53.0000 ± 1.0000 2.0000 ± 0.0000"
    assert f"spa-eta {expected}".split() in rows
    # Figure 3: the error of tenth, i = 7, is 5 points below that of spa-eta.
    expected = "1.5000 ± 0.5000 42.0000 ± 1.0000 -5.0000 ± 0.0000"
    assert f"kept, η ÷ 10 after epoch 1 {expected}".split() in rows
    # Figure 2: the gain is 3 or 4, the noise level 4 or 5.
    expected = "3.5000 ± 0.5000 4.5000 ± 0.5000 0.7750 ± 0.0250 5.5000 ± 0.5000"
    assert f"100 {expected}".split() in rows


def test_runs_that_lack_something(tmp_path: Path) -> None:
    """Another seed, epochs, or numbers that were not tracked."""
    read = lambda: report.read_runs(tmp_path, ["spa-gradual"], 2)
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    with pytest.raises(ValueError, match="spa-gradual with seed 1"):
        read()
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "spa-gradual" / "seed1", stops_in=3, seed=1)
    with pytest.raises(ValueError, match=r"seed1/.* must have 4 epochs, as the first, got 2"):
        read()
    tiny_run(tmp_path / "spa-eta" / "seed0")
    arguments = ["--tracked", str(tmp_path), "--seeds", "1", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="iterate_term of every step"):
        figures.main(arguments)
