"""Runs in folders: resumed with the same bits, whatever was stopped, lost or damaged."""

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import command_line
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import runs
from paper_helpers import arithmetic, bits, config, metrics, num_epochs, tiny_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    """State and metrics of a run that nothing interrupts."""
    run = tmp_path_factory.mktemp("whole")
    return bits(tiny_run(run)), metrics(run)


def test_words_of_a_run(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "seed0"
    with pytest.raises(KeyboardInterrupt):
        tiny_run(run, stops_in=4)
    assert capsys.readouterr().out == f"spa-gradual, seed 0: 4 epochs, written to {run}\n"
    tiny_run(run)
    assert f"spa-gradual, seed 0: resuming from epoch 4 of 4, in {run}" in capsys.readouterr().out
    tiny_run(run)
    assert capsys.readouterr().out == f"spa-gradual, seed 0: already done, in {run}\n"


def test_a_loss_that_is_not_finite_is_shown(tmp_path: Path, capsys: Any) -> None:
    tiny_run(tmp_path / "run", losses=lambda epoch: 1.0 if epoch < 3 else np.nan)
    out, err = capsys.readouterr()
    assert "train_loss=nan" in err
    assert out.count("nan") == 1
    assert "spa-gradual, seed 0: the training loss of epoch 3 is nan" in out


def damaged(how: str, content: bytes) -> bytes:
    half = len(content) // 2
    return {
        "truncated": content[:half],
        "zeroed": bytes(len(content)),
        "flipped": content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :],
    }[how]


@pytest.mark.parametrize("how", ["truncated", "zeroed", "flipped", "incomplete", "empty", "edited"])
def test_a_damaged_checkpoint(how: str, whole: Any, tmp_path: Path, capsys: Any) -> None:
    """The one before is resumed, and the run ends with the same bits."""
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        tiny_run(run, stops_in=4)
    newest = run / "checkpoints" / "3"
    files = [path for path in newest.rglob("*") if path.is_file()]
    if how == "empty":
        shutil.rmtree(newest)
        newest.mkdir()
    elif how == "incomplete":
        shutil.rmtree(newest / "state")
    elif how == "edited":
        (path,) = (path for path in (newest / "record").iterdir() if b"losses" in path.read_bytes())
        path.write_bytes(path.read_bytes().replace(b"0.5", b"0.6"))
    else:
        largest = max(files, key=lambda path: path.stat().st_size)
        assert largest.stat().st_size > 10_000  # the params
        largest.write_bytes(damaged(how, largest.read_bytes()))
    capsys.readouterr()
    chex.assert_trees_all_equal(bits(tiny_run(run)), whole[0])
    out = capsys.readouterr().out
    assert f"{newest} is damaged: " in out
    assert "resuming from epoch 3 of 4" in out
    assert metrics(run) == whole[1]
    # The epoch was saved again, whole.
    shutil.rmtree(run / "checkpoints" / "4")
    chex.assert_trees_all_equal(bits(tiny_run(run)), whole[0])
    assert "resuming from epoch 4 of 4" in capsys.readouterr().out


def test_damaged_checkpoints_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        tiny_run(run, stops_in=4)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    there = sorted(path for path in run.rglob("*"))
    with pytest.raises(ValueError, match=f"can be restored, got 3 and 2, .* delete {run}"):
        tiny_run(run)
    assert sorted(path for path in run.rglob("*")) == there


def test_any_bit_of_the_state_is_checked(tmp_path: Path) -> None:
    """Whatever was flipped: either the state is what was saved, or an error is found."""
    state = {"params": jnp.arange(3.0), "half": jnp.ones(2, jnp.bfloat16), "key": jax.random.key(3)}
    others = [
        {**state, "params": state["params"].at[2].set(2.0000002)},
        {**state, "half": jnp.ones((2, 1), jnp.bfloat16)},
        {**state, "half": jnp.ones(2, jnp.float16)},
        {**state, "key": jax.random.key(4)},
        {**state, "params": -state["params"]},  # a zero's sign, too
    ]
    found = [runs.sha256(tree, "") for tree in (state, *others)]
    assert len(set(found)) == len(found)
    assert runs.sha256(jax.tree.map(jnp.copy, state), "") == found[0]
    assert runs.sha256(state, " ") != found[0]


def test_a_folder_in_use(tmp_path: Path) -> None:
    """A second command is refused at once; when the first is killed, its lock is gone."""
    run = tmp_path / "run"
    run.mkdir()
    script = "import filelock, sys, time; lock = filelock.FileLock(sys.argv[1]); lock.acquire();"
    script += "print('locked', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script, str(run / "lock")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    message = f"--out must not be in use: another process is training in {run}"
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=message):
            tiny_run(run)
        assert num_epochs(run) == 0
    finally:
        process.kill()
        process.communicate()
    with runs.opened(config(epochs=4), "data", run), pytest.raises(ValueError, match=message):
        tiny_run(run)
    tiny_run(run)
    assert num_epochs(run) == 4


def test_another_run_in_the_same_folder(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    other = config(epochs=4, batch=16)
    with pytest.raises(ValueError, match=r"has another run in .*, with batch 128 and not 16"):
        runs.run(other, arithmetic(), "data", tmp_path)
    with pytest.raises(ValueError, match="with data 'data' and not 'other data'"):
        runs.run(config(epochs=4), arithmetic(), "other data", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has a run without its config.json in"),
        ("{", "config.json must be JSON, got '{'"),
        ("[1]", r"config.json must be a JSON object, got '\[1\]'"),
    ],
)
def test_a_lost_or_broken_config(content: str | None, message: str, tmp_path: Path) -> None:
    tiny_run(tmp_path)
    path = tmp_path / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=message):
        tiny_run(tmp_path)
    assert (path.read_text() if path.exists() else None) == content
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("content", ["cut", "twice", None])
@pytest.mark.parametrize("stops_in", [4, None])
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


def test_metrics_without_checkpoints_are_kept(tmp_path: Path) -> None:
    """Of a finished run, one may delete the checkpoints; it is not trained again by mistake."""
    tiny_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"metrics\.jsonl has 4 epochs, but there are no ch"):
        tiny_run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


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


def test_a_full_disk(whole: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """One line. With room again, the run ends with the same bits."""
    save = ocp.CheckpointManager.save

    def full(manager: Any, epoch: int, **kwargs: Any) -> None:
        if epoch == 3:  # as orbax says it on a full tmpfs
            raise ValueError(
                'RESOURCE_EXHAUSTED: Error writing "params/0" in OCDBT database at local file'
                ' "/x/": Failed writing: "/x/2e": Failed to write 545237 bytes to file 5:'
                " No space left on device [os_error_code='28']"
            )
        save(manager, epoch, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        message = "^error: checkpoints cannot be written to .*checkpoints: No space left on device"
        with pytest.raises(SystemExit, match=message):
            command_line.run(lambda: tiny_run(tmp_path))
    assert num_epochs(tmp_path) == 3
    chex.assert_trees_all_equal(bits(tiny_run(tmp_path)), whole[0])
    assert metrics(tmp_path) == whole[1]


def test_old_checkpoints_are_deleted(tmp_path: Path) -> None:
    tiny_run(tmp_path)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        assert manager.all_steps() == [3, 4]


def test_a_disk_that_is_not_shared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="--out must be on a disk that all processes share, got"):
        runs.check_config(config(), "digest", tmp_path / "run")
    assert not any(tmp_path.iterdir())
