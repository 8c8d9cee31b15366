"""Runs in folders, resumed with the same bits; figures and tables of them; how scripts
end."""

import contextlib
import functools
import signal
from pathlib import Path
from typing import Any

import chex
import command_line
import figures
import orbax.checkpoint as ocp
import pytest
import runs
from paper_helpers import (
    arithmetic,
    bits,
    config,
    fake_runs,
    metrics,
    num_epochs,
    tiny_run,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """State and metrics of a run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole")
    return bits(tiny_run(run)), metrics(run)


def test_another_run_in_the_same_folder(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    with pytest.raises(ValueError, match="batch 128 and not 16"):
        runs.run(config(epochs=4, batch=16), arithmetic(), "data", tmp_path)
    with pytest.raises(ValueError, match="data 'data' and not 'other data'"):
        runs.run(config(epochs=4), arithmetic(), "other data", tmp_path)


@pytest.mark.parametrize(
    ("content", "stops_in"), [("cut", 4), ("twice", None), (None, 4)]
)
def test_lost_or_broken_metrics(
    content: Any, stops_in: Any, whole: Any, tmp_path: Path
) -> None:
    """They are restored from the checkpoint."""
    run = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt):
        tiny_run(run, stops_in=stops_in)
    path = run / "metrics.jsonl"
    before = path.read_text()
    path.unlink()
    if content is not None:
        path.write_text({"cut": before[:-9], "twice": 2 * before}[content])
    tiny_run(run)
    assert metrics(run) == whole[1]


def test_stopped_before_the_first_checkpoint(
    whole: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """The metrics of epoch 1 are there, and come again."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            tiny_run(tmp_path)
    assert num_epochs(tmp_path) == 1
    chex.assert_trees_all_equal(bits(tiny_run(tmp_path)), whole[0])
    assert metrics(tmp_path) == whole[1]


@pytest.mark.long
def test_figures_2_3_and_4(tmp_path: Path, capsys: Any) -> None:
    """From runs whose numbers are known: 6 epochs of 200 steps, so that the drop is at
    step 600."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    fake_runs(runs)
    figures.main(
        ["--runs", str(runs), "--tracked", str(runs), "--seeds", "2", "--out", str(out)]
    )
    for i in (2, 3, 4):
        assert (out / f"figure{i}.png").read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for expected in (
        # spa-eta, i = 2, over 2 seeds 1 apart: ± 0.5. Its spike is 2 over 5 of the
        # first 20 steps.
        "spa-eta 2.5000 ± 0.5000 2.0000 ± 0.5000"
        + 3 * " 1.5000 ± 0.5000"
        + " 3.5000 ± 0.5000",
        "spa-eta 1.5000 ± 0.5000 53.0000 ± 1.0000 2.0000 ± 0.0000",
        # Figure 3: the error of tenth, i = 7, is 5 points below that of spa-eta.
        "kept, η ÷ 10 after epoch 1 1.5000 ± 0.5000 42.0000 ± 1.0000 -5.0000 ± 0.0000",
        # Figure 2: the gain is 3 or 4, the noise level 4 or 5.
        "100 3.5000 ± 0.5000 4.5000 ± 0.5000 0.7750 ± 0.0250",
    ):
        assert expected.split() in rows


def test_runs_that_lack_something(tmp_path: Path) -> None:
    """Another seed, or epochs."""
    read = functools.partial(runs.read_runs, tmp_path, ["spa-gradual"], 2)
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    with pytest.raises(ValueError, match="spa-gradual with seed 1"):
        read()
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "spa-gradual" / "seed1", stops_in=3, seed=1)
    with pytest.raises(
        ValueError, match=r"seed1/.* must have 4 epochs, as the first, got 2"
    ):
        read()


def test_errors_of_the_user_and_bugs(capsys: pytest.CaptureFixture[str]) -> None:
    """Only errors that the user can correct come without a traceback; Ctrl-C raises
    nothing."""

    def main(error: Exception) -> None:
        raise error

    for error in (command_line.UserError("wrong"), OSError("wrong")):
        with pytest.raises(SystemExit, match=r"^error: wrong$"):
            command_line.run(lambda error=error: main(error))
    with pytest.raises(ValueError, match="a bug"):
        command_line.run(lambda: main(ValueError("a bug")))
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
