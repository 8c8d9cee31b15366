"""ImageNet: evaluation, a run stopped and resumed, and the command line."""

from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import runs
import train_imagenet
from flax import nnx
from imagenet_data import decode, find, normalize
from models import RESNETS
from paper_helpers import (
    IMAGENET as SMALL,
    imagenet_config,
    last_checkpoint,
    mesh_of,
    metrics,
)
from training import sums

pytestmark = pytest.mark.usefixtures("_small_networks")


def test_defaults(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's."""
    found = []

    def stop(config: Any, **_: Any) -> None:
        found.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_imagenet, "make_program", stop)
    with pytest.raises(KeyboardInterrupt):
        train_imagenet.main(["--data-dir", str(tree)])
    paper = {"epochs": 100, "batch": 256, "batch_norm_group": 32, "image_size": 224}
    paper |= {"learning_rate": 1.0, "averaging": 0.1, "weight_decay": 1e-4}
    assert found == [imagenet_config(model="resnet50", **paper)]


@pytest.mark.slow
def test_evaluation(tree: Path) -> None:
    """Against the model itself, on a set that no batch divides."""
    files = [find(tree / part) for part in ("train", "val")]
    program = train_imagenet.make_program(imagenet_config(), *files, mesh_of(4), 2)
    images = np.stack([decode(path.read_bytes(), 32, None) for path in files[1].paths])

    @jax.jit
    def totals(params: Any, batch_stats: Any) -> Any:
        model = RESNETS["small"](num_classes=3, rngs=nnx.Rngs(1))
        nnx.update(model, params, batch_stats)
        model.eval()
        return sums(model(normalize(images)), files[1].labels)

    state = program.init(0)
    loss, correct = totals(state.params, state.batch_stats)
    expected = {"test_loss": loss / 21, "test_accuracy": correct / 21}
    chex.assert_trees_all_close(program.evaluate(state), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 18}, "--batch must be a multiple of 4 devices, got 18"),
        ({"batch_norm_group": 5}, "--batch must be a multiple of --batch-norm-group 5, got 16"),
        ({"epochs": 1, "batch": 36}, r"--epochs must .*, got drops at steps \[0, 1, 1\]"),
    ],
)
def test_batches_that_do_not_divide(fields: Any, message: str, tree: Path) -> None:
    files = [find(tree / part) for part in ("train", "val")]
    mesh = mesh_of(4)
    with pytest.raises(ValueError, match=message):
        train_imagenet.make_program(imagenet_config(**fields), *files, mesh, 2)


def final(run: Path, tree: Path) -> Any:
    """What the last checkpoint of a run holds, on the one device of this process."""
    files = [find(tree / part) for part in ("train", "val")]
    mesh = mesh_of(1)
    return last_checkpoint(
        run, train_imagenet.make_program(imagenet_config(), *files, mesh, 1).init(0)
    )


@pytest.mark.slow
def test_command_line(tree: Path, tmp_path: Path) -> None:
    arguments = [*SMALL, "--data-dir", str(tree), "--out", str(tmp_path / "out"), "--epochs", "2"]
    text = train_imagenet.main(arguments)
    lines = metrics(tmp_path / "out" / "spa-gradual" / "seed0")
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(len(line["losses"]) == 3 for line in lines)
    assert (tmp_path / "out" / "imagenet.png").read_bytes().startswith(b"\x89PNG")
    assert "spa-gradual" in text
    with pytest.raises(ValueError, match=r"has another run in .*, with image_size 32 and not 24"):
        train_imagenet.main([*arguments, "--image-size", "24"])


@pytest.mark.slow
def test_stopped_and_resumed(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In the middle of anything: the same bits in the end."""
    arguments = [*SMALL, "--data-dir", str(tree), "--epochs", "3", "--out"]
    write_metrics = runs.write_metrics

    def stops(folder: Path, metrics: str) -> None:
        if metrics.count("\n") == 2:
            raise KeyboardInterrupt
        write_metrics(folder, metrics)

    monkeypatch.setattr(runs, "write_metrics", stops)
    with pytest.raises(KeyboardInterrupt):
        train_imagenet.main([*arguments, str(tmp_path / "stopped")])
    monkeypatch.undo()
    for name in ("stopped", "whole"):
        train_imagenet.main([*arguments, str(tmp_path / name)])
    whole, stopped = (tmp_path / name / "spa-gradual" / "seed0" for name in ("whole", "stopped"))
    chex.assert_trees_all_equal(final(whole, tree), final(stopped, tree))
    assert metrics(whole) == metrics(stopped)
    assert len(metrics(whole)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "0"], "--image-size must be finite and > 0, got 0"),
        (["--threads", "0"], "--threads must be finite and > 0, got 0"),
        (["--weight-decay", "nan"], "--weight-decay must be finite and >= 0, got nan"),
        (["--batch-norm-group", "-1"], "--batch-norm-group must be >= 0, got -1"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        (["--optimizer", "adam"], "invalid choice: 'adam'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        train_imagenet.main(["--data-dir", "nowhere", *arguments])
    assert message in capsys.readouterr().err
