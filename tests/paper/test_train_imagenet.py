"""ImageNet: evaluation, broken images, a run stopped and resumed, and the command line."""

import warnings
from collections.abc import Iterator
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
from tqdm import tqdm
from training import sums

pytestmark = pytest.mark.usefixtures("_small_networks")


def test_defaults(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's."""
    found = []

    def stop(config: Any, *_: Any) -> None:
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
    expected = {"test_loss": loss / 21, "test_accuracy": correct / 21, "test_left_out": 0}
    chex.assert_trees_all_close(program.evaluate(state), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* left out:UserWarning")
def test_too_many_left_out_in_the_last_step(broken: Path) -> None:
    files = [find(broken / part) for part in ("train", "val")]
    mesh = mesh_of(4)
    program = train_imagenet.make_program(imagenet_config(batch=4), *files, mesh, 2)
    (index,) = (i for i, path in enumerate(files[0].paths) if path.match("flower/4.jpg"))
    last = lambda epoch: np.random.default_rng((0, epoch)).permutation(36)[-4:]
    epoch = next(epoch for epoch in range(2, 1_000) if index in last(epoch))
    with pytest.raises(ValueError, match=r"train images .*, got 1 of 36 .*/train/flower/4.jpg: "):
        program.epoch(0, program.init(0), epoch, tqdm(disable=True))


@pytest.mark.filterwarnings("ignore:.* left out:UserWarning")
def test_too_many_left_out_is_found_early(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Of the training images within the epoch; of val before any training."""
    files = [find(tree / part) for part in ("train", "val")]
    (tmp_path / "0.jpg").write_bytes(b"")
    nothing = [part._replace(paths=[tmp_path / "0.jpg"] * len(part.paths)) for part in files]
    mesh = mesh_of(4)
    batches, of_train = train_imagenet.batches, []

    def count(files: Any, *arguments: Any) -> Iterator[Any]:
        for batch in batches(files, *arguments):
            if files.paths == nothing[0].paths:
                of_train.append(batch)
            yield batch

    monkeypatch.setattr(train_imagenet, "batches", count)
    program = train_imagenet.make_program(imagenet_config(batch=4), nothing[0], files[1], mesh, 2)
    with pytest.raises(
        ValueError, match=r"at most 1 % of train images .*, got 4 of 36 .*, such as"
    ):
        program.epoch(0, program.init(0), 1, tqdm(disable=True))
    assert len(of_train) == 2  # of 9: one more is on its way
    program = train_imagenet.make_program(imagenet_config(batch=4), *nothing, mesh, 2)
    with pytest.raises(ValueError, match=r"at most 1 % of val images .*, got 21 of 21 \(100 %\)"):
        program.epoch(0, program.init(0), 1, tqdm(disable=True))
    assert len(of_train) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 18}, "--batch must be a multiple of 4 devices, got 18"),
        ({"batch_norm_group": 5}, "--batch must be a multiple of --batch-norm-group 5, got 16"),
        ({"epochs": 1, "batch": 36}, r"--scale-epochs must .*, got drops at steps \[0, 1, 1\]"),
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
def test_command_line(broken: Path, tmp_path: Path) -> None:
    """End to end, with two broken files."""
    arguments = [*SMALL, "--data-dir", str(broken), "--out", str(tmp_path / "out")]
    arguments += ["--scale-epochs", "0.02", "--batch", "16"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ValueError, match=r"at most 1 % of val images .*, got 1 of 21"):
            train_imagenet.main(arguments)
        arguments += ["--max-left-out", "0.05"]  # with which the same run goes on
        text = train_imagenet.main(arguments)
    lines = metrics(tmp_path / "out" / "spa-gradual" / "seed0")
    assert [line["epoch"] for line in lines] == [1, 2]
    # 36 images fill 48 places, so that the broken one comes up once or twice.
    assert all(line["left_out"] in (1, 2) and len(line["losses"]) == 3 for line in lines)
    assert all(line["test_left_out"] == 1 for line in lines)
    assert (tmp_path / "out" / "imagenet.png").read_bytes().startswith(b"\x89PNG")
    assert "spa-gradual" in text
    with pytest.raises(ValueError, match=r"has another run in .*, with image_size 32 and not 24"):
        train_imagenet.main([*arguments, "--image-size", "24"])


@pytest.mark.slow
def test_stopped_and_resumed(tree: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """In the middle of anything: the same bits in the end."""
    arguments = [*SMALL, "--data-dir", str(tree), "--scale-epochs", "0.03", "--out"]
    write_metrics = runs.write_metrics

    def stops(folder: Path, metrics: str, epoch: int) -> None:
        if epoch == 2:
            raise KeyboardInterrupt
        write_metrics(folder, metrics, epoch)

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


@pytest.mark.slow
def test_measure(tree: Path, capsys: Any) -> None:
    train_imagenet.main([*SMALL, "--data-dir", str(tree), "--measure"])
    out = capsys.readouterr().out
    assert out.startswith("images/s: ")
    speeds = [float(word.replace(",", "")) for word in out.split() if word[0].isdigit()]
    assert len(speeds) == 2
    assert min(speeds) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image-size", "0"], "--image-size must be finite and > 0, got 0"),
        (["--threads", "0"], "--threads must be finite and > 0, got 0"),
        (["--weight-decay", "nan"], "--weight-decay must be finite and >= 0, got nan"),
        (["--max-left-out", "1"], "--max-left-out must be >= 0 and < 1, got 1.0"),
        (["--max-left-out", "nan"], "--max-left-out must be >= 0 and < 1, got nan"),
        (["--batch-norm-group", "-1"], "--batch-norm-group must be >= 0, got -1"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        (["--optimizer", "adam"], "invalid choice: 'adam'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        train_imagenet.main(["--data-dir", "nowhere", *arguments])
    assert message in capsys.readouterr().err
