"""Runs in folders: resumed with the same bits, wherever they were stopped."""

import contextlib
from pathlib import Path
from typing import Any

import chex
import orbax.checkpoint as ocp
import pytest
import runs
from paper_helpers import arithmetic, bits, config, metrics, num_epochs, tiny_run


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


@pytest.mark.parametrize(("content", "stops_in"), [("cut", 4), ("twice", None), (None, 4)])
def test_lost_or_broken_metrics(
    content: str | None, stops_in: int | None, whole: Any, tmp_path: Path
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


def test_stopped_before_the_first_checkpoint(whole: Any, tmp_path: Path, monkeypatch: Any) -> None:
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
