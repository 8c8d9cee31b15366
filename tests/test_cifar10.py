"""examples/cifar10.py: its data, its network, every optimizer, several devices, the
command."""

from pathlib import Path
from typing import Any

import cifar10
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spa_optax import eval_params

BATCH = 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, standard_promotion: None) -> None:
    del standard_promotion
    monkeypatch.setattr(cifar10, "BATCH", BATCH)
    monkeypatch.setattr(cifar10, "COMPONENTS", 4)
    monkeypatch.setattr(cifar10, "BLOCKS", ((8, True),))


def two_shades(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Dark images of class 0 and bright ones of class 1, all with noise."""
    rng = np.random.default_rng(n)
    y = rng.integers(0, 2, n)
    return np.uint8(
        rng.integers(0, 100, (n, 32, 32, 3)) + 100 * y[:, None, None, None]
    ), y


DATA = cifar10.Data(*two_shades(8 * BATCH), *two_shades(2 * BATCH + 5))


def test_files_as_published(tmp_path: Path) -> None:
    """Of images, each a label, then a red, a green and a blue plane, by rows."""
    rng, records = np.random.default_rng(0), {}
    (tmp_path / cifar10.FOLDER).mkdir()
    for name, num in {
        **{f"data_batch_{i}": 4 for i in range(1, 6)},
        "test_batch": 3,
    }.items():
        labels = rng.integers(0, 10, (num, 1), np.uint8)
        records[name] = np.hstack([labels, rng.integers(0, 256, (num, 3072), np.uint8)])
        (tmp_path / cifar10.FOLDER / f"{name}.bin").write_bytes(records[name].tobytes())
    data = cifar10.load_cifar10(tmp_path)
    assert data.x_train.shape == (20, 32, 32, 3)
    assert data.x_test.shape == (3, 32, 32, 3)
    record = records["data_batch_2"][1]  # the sixth image in all
    assert data.y_train[5] == record[0]
    for row, column, channel in [(0, 0, 0), (0, 31, 1), (5, 6, 2), (31, 31, 1)]:
        place = 1 + 1024 * channel + 32 * row + column
        assert data.x_train[5, row, column, channel] == record[place]


def test_every_shift_and_mirror_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), "reflect")
    views = [padded[i : i + 32, j : j + 32] for i in range(5) for j in range(5)]
    possible = {view.tobytes() for view in views} | {
        view[:, ::-1].tobytes() for view in views
    }
    images = cifar10.augment(np.stack([image] * 1000), np.random.default_rng(1))
    assert {image.tobytes() for image in images} == possible
    assert len(possible) == 50


@pytest.mark.parametrize(
    "changes",
    [
        {"x_test": DATA.x_test / 255},
        {"y_test": DATA.y_test[:-1]},
        {"y_train": DATA.y_train - 1},
        {"x_train": DATA.x_train[:9], "y_train": DATA.y_train[:9]},
    ],
)
def test_own_images_that_cannot_be(changes: dict[str, Any], tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", **{**DATA._asdict(), **changes})
    with pytest.raises(SystemExit, match=r"^error: --npz must hold uint8 images"):
        cifar10.main(["--npz", str(tmp_path / "own.npz")])


def test_whitening() -> None:
    """Of images with correlated pixels, the main components have variance 1 and no
    correlation."""
    noise = np.random.default_rng(0).normal(size=(200, 32, 32, 3)).cumsum(1).cumsum(2)
    images = np.uint8(np.clip(128 + 8 * noise, 0, 255))
    kernel = cifar10.whitening(images)
    assert kernel.shape == (4, 4, 3, 4)
    features = jax.lax.conv_general_dilated(
        cifar10.scale(images),
        kernel,
        (4, 4),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ).reshape(-1, 4)
    # Of variance v / (v + 0.001), where v is that of the component.
    np.testing.assert_allclose(
        features.T @ features / len(features), np.eye(4), atol=0.05
    )


def network(seed: int = 0) -> cifar10.Network:
    return cifar10.Network(cifar10.whitening(DATA.x_train), 2, nnx.Rngs(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "spa_from_sgdm",
        "sgd",
        "spa",
        "stagewise",
        "gpa",
        "adamw",
        "spa_adamw",
    ],
)
def test_every_optimizer_learns(name: str) -> None:
    result = cifar10.train(name, DATA, 2, num_seeds=1, num_epochs=4)
    assert result["loss"].shape == result["accuracy"].shape == (1, 4)
    assert result["loss"][0, -1] < result["loss"][0, 0]
    assert result["accuracy"][0, -1] > 0.9
    assert result["final"][0] > 0.9


@pytest.mark.slow
def test_gpa_is_evaluated_at_x() -> None:
    """And batch normalization knows the features of x, and the trained model stays as
    it is."""
    model = network()
    optimizer = nnx.Optimizer(model, cifar10.optimizers(10)["gpa"], wrt=nnx.Param)
    batches = [DATA.x_train[i : i + BATCH] for i in range(0, len(DATA.x_train), BATCH)]
    for i, x in enumerate(batches):
        cifar10.train_step(
            model, optimizer, x, DATA.y_train[i * BATCH : (i + 1) * BATCH]
        )
    before = jax.tree.map(np.asarray, nnx.state(model))
    at_x = cifar10.to_evaluate(model, optimizer, 40 * batches[:1])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(at_x, nnx.Param), x)
    assert np.any(np.asarray(at_x.head.kernel) != np.asarray(model.head.kernel))
    # Of one batch the moving averages are its statistics, by which it is normalized in
    # training.
    in_training = cifar10.logits(at_x, batches[0])
    at_x.eval()
    np.testing.assert_allclose(
        cifar10.logits(at_x, batches[0]), in_training, rtol=0.05, atol=0.05
    )
    model.eval()
    assert (
        np.abs(np.asarray(cifar10.logits(model, batches[0]) - in_training)).max() > 0.05
    )


@pytest.mark.slow
def test_the_last_batch_is_not_whole() -> None:
    """Repeated images do not count."""
    model = network()
    model.eval()
    whole = NamedSharding(
        Mesh(np.array(jax.devices()), "batch"), PartitionSpec("batch")
    )

    def mirrored(images: Any) -> list[Any]:
        return [images, images[:, :, ::-1]]

    total = sum(model(jnp.asarray(view)) for view in mirrored(DATA.x_test))
    expected = np.mean(np.argmax(total, -1) == DATA.y_test)
    assert cifar10.accuracy(model, DATA, whole, mirrored) == pytest.approx(
        float(expected)
    )


def test_views_of_an_image() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    views = cifar10.views(images)
    inside = np.s_[:, 1:-1, 1:-1]
    for view, mirror, shift in zip(views[:3], views[3:], (0, 1, -1), strict=True):
        shifted = np.roll(images, (shift, shift), (1, 2))
        np.testing.assert_array_equal(view[inside], shifted[inside])
        np.testing.assert_array_equal(view[:, :, ::-1], mirror)


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "cifar10.png"
    names = ["gpa", "spa_from_sgdm"]
    text = cifar10.main(["--smoke", "--optimizer", *names, "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [line.split()[0] for line in text.splitlines()[1:]] == names
    assert "nan" not in text
