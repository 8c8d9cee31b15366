"""ImageNet: the defaults, evaluation and batches."""

from pathlib import Path
from typing import Any

import pytest
import train_imagenet
from imagenet_data import find
from paper_helpers import imagenet_config, mesh_of

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 18}, "multiple of 4 devices, got 18"),
        ({"batch_norm_group": 5}, "multiple of --batch-norm-group 5, got 16"),
        ({"epochs": 1, "batch": 36}, r"--epochs must .*, got drops at steps \[0, 1, 1\]"),
    ],
)
def test_batches_that_do_not_divide(fields: Any, message: str, tree: Path) -> None:
    files = [find(tree / part) for part in ("train", "val")]
    with pytest.raises(ValueError, match=message):
        train_imagenet.make_program(imagenet_config(**fields), *files, mesh_of(4), 2)
