"""Tables and pictures of runs that diverged, or that lack something."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report
import runs
from paper_helpers import tiny_run


def test_runs_that_diverged(tmp_path: Path, monkeypatch: Any) -> None:
    """A table and a picture of what there is, without a warning."""
    found = {}
    for seed, losses in enumerate([lambda _: np.nan, lambda epoch: 1 / epoch]):
        folder = tmp_path / "spa-gradual" / f"seed{seed}"
        tiny_run(folder, losses=losses, seed=seed)
        lines = runs.read(folder / "metrics.jsonl").splitlines()
        found[f"seed {seed}"] = [runs.read_epochs(folder, lines)]
    rows = report.table(found).splitlines()
    assert "±" not in "".join(rows)  # of one seed
    assert rows[1].split()[:3] == ["seed", "0", "nan"]
    assert rows[2].split()[:3] == ["seed", "1", "0.2500"]
    drawn: list[Any] = []
    monkeypatch.setattr(report.plt, "close", drawn.append)
    for names in (["seed 0"], ["seed 0", "seed 1"]):
        report.draw({name: found[name] for name in names}, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    losses = [figure.axes[0] for figure in drawn]
    assert [axis.get_yscale() for axis in losses] == ["linear", "log"]
    assert [[t.get_text() for t in axis.texts] for axis in losses] == [["not finite: seed 0"]] * 2
    monkeypatch.undo()
    report.plt.close("all")
    both = report.read_runs(tmp_path, ["spa-gradual"], 2)
    assert report.table(both).splitlines()[1].split()[1] == "nan"


def test_what_is_lacking_in_runs(tmp_path: Path) -> None:
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    with pytest.raises(
        ValueError, match=r"a run of spa-gradual with seed 1, got no .*metrics.json"
    ):
        report.read_runs(tmp_path, ["spa-gradual"], 2)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "spa-gradual" / "seed1", stops_in=3, seed=1)
    with pytest.raises(ValueError, match=r"seed1/.* must have as many epochs .* got 2 and not 4"):
        report.read_runs(tmp_path, ["spa-gradual"], 2)


def test_broken_metrics(tmp_path: Path) -> None:
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    path = tmp_path / "spa-gradual" / "seed0" / "metrics.jsonl"
    whole = path.read_text()
    for content, message in (
        (whole[:-9] + "\n", "metrics.jsonl, line 4, must be JSON"),
        ("[1]" + whole[whole.index("\n") :], "line 1, must be a JSON object"),
        (whole.replace('"epoch": 2', '"epoch": 1'), "line 2, must be of epoch 2, got 1"),
        (whole.replace("test_acc", "tEst_acc"), "line 1, must have test_accuracy, got none"),
        ("", "must have as many epochs as all runs in .*, got 0"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            report.read_runs(tmp_path, ["spa-gradual"], 1)
