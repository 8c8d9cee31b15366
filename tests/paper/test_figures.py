"""Figures and tables, from runs whose numbers are known."""

from pathlib import Path
from typing import Any

import figures
import pytest
import report
from optimizers import OPTIMIZERS
from paper_helpers import fake_runs, tiny_run


@pytest.mark.slow
def test_figures_2_3_and_4(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """From runs whose numbers are known: 6 epochs of 200 steps, so that the drop is at step 600."""
    drawn = {}
    monkeypatch.setattr(report.plt, "close", lambda figure: drawn.update({len(drawn): figure}))
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
    assert [
        "spa-eta",
        "1.5000",
        "±",
        "0.5000",
        "53.0000",
        "±",
        "1.0000",
        "2.0000",
        "±",
        "0.0000",
    ] in rows
    # Figure 3: the error of tenth, i = 7, is 5 points below that of spa-eta.
    expected = "1.5000 ± 0.5000 42.0000 ± 1.0000 -5.0000 ± 0.0000"
    assert f"kept, η ÷ 10 after epoch 1 {expected}".split() in rows
    # Figure 2: the gain is 3 or 4, the noise level 4 or 5.
    expected = "3.5000 ± 0.5000 4.5000 ± 0.5000 0.7750 ± 0.0250 5.5000 ± 0.5000"
    assert f"100 {expected}".split() in rows
    # Every axis says what is on it, and every curve which it is.
    monkeypatch.undo()
    report.plt.close("all")
    *_, figure_3, figure_4, figure_2 = drawn.values()
    assert all(axis.get_ylabel() for axis in figure_2.axes)
    assert "2 seeds" in figure_3.get_suptitle()
    assert not any(axis.get_title() for axis in figure_3.axes)
    names = [text.get_text() for text in figure_4.axes[1].get_legend().get_texts()]
    assert names == list(OPTIMIZERS)


def test_figures_of_runs_that_were_not_tracked(tmp_path: Path) -> None:
    tiny_run(tmp_path / "runs" / "spa-eta" / "seed0")
    arguments = ["--tracked", str(tmp_path / "runs"), "--seeds", "1", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="runs must have iterate_term of every step"):
        figures.main(arguments)
