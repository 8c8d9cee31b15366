"""The CIFAR-10 example: data, models, recipe, and that a run can be stopped and split."""

import dataclasses
import hashlib
import http.server
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import cifar10
import figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import (
    assert_apart_by_rounding,
    free_address,
    host_devices,
    last_checkpoint,
    metrics,
    noisy_optimizers,
    num_epochs,
)
from jax.sharding import Mesh
from tqdm import tqdm

from spa_optax import SPAState

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "cifar10.py"
SMALL = ["--model", "small", "--subset", "64", "--batch", "32", "--averaging", "0.2"]


@pytest.fixture(autouse=True)
def _standard_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # what users have
        yield


# ------------------------------------------------------------------------------------------- data


def records(seed: int, num: int = 10_000) -> np.ndarray:
    """Records as in the files, (num, 3073): images of one colour, which compress well."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num, np.uint8)
    planes = np.stack([25 * labels, 255 - 25 * labels, np.full(num, 9 * seed, np.uint8)], 1)
    return np.hstack([labels[:, None], np.repeat(planes, 1024, axis=1)])


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {name: records(i).tobytes() for i, name in enumerate(cifar10.FILES)}


@pytest.fixture(scope="module")
def archive(files: dict[str, bytes]) -> bytes:
    return tar({f"{cifar10.FOLDER}/{name}": content for name, content in files.items()})


@pytest.fixture(scope="module")
def data_dir(archive: bytes, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    (folder / cifar10.ARCHIVE).write_bytes(archive)
    return ["--data-dir", str(folder), "--md5", md5(archive)]


@pytest.mark.parametrize("form", ["files", "folder", "archive"])
def test_load(form: str, files: dict[str, bytes], archive: bytes, tmp_path: Path) -> None:
    if form == "archive":
        (tmp_path / cifar10.ARCHIVE).write_bytes(archive)
    else:
        place = tmp_path / cifar10.FOLDER if form == "folder" else tmp_path
        place.mkdir(exist_ok=True)
        for name, content in files.items():
            (place / name).write_bytes(content)
    train, test = cifar10.load(tmp_path, md5(archive))
    assert train.images.shape == (50_000, 32, 32, 3)
    assert test.images.shape == (10_000, 32, 32, 3)
    assert train.images.dtype == np.uint8
    assert np.bincount(train.labels).shape == (10,)
    # By the published layout: a label, then the red, the green and the blue plane, by rows.
    one = records(3)[7]
    assert train.labels[30_007] == one[0]
    for row, column, channel in [(0, 0, 0), (0, 31, 1), (5, 6, 2), (31, 31, 1)]:
        expected = one[1 + 1024 * channel + 32 * row + column]
        assert train.images[30_007, row, column, channel] == expected


def test_planes_and_rows() -> None:
    content = np.zeros((cifar10.NUM_RECORDS, cifar10.RECORD), np.uint8)
    content[4, 1 + 1024 * 2 + 32 * 5 + 6] = 77
    images = cifar10.parse("a file", content.tobytes()).images
    assert images[4, 5, 6, 2] == 77
    assert images.sum() == 77


def test_corrupt_data(files: dict[str, bytes], archive: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no CIFAR-10, binary version, in .*no cifar-10-batches"):
        cifar10.load(tmp_path)
    path = tmp_path / cifar10.ARCHIVE
    path.write_bytes(archive[:-1000])
    with pytest.raises(ValueError, match="must have the MD5 checksum c32a1d4ab5d03f1284b67883e8d8"):
        cifar10.load(tmp_path)
    prefix = cifar10.FOLDER
    whole = {f"{prefix}/{name}": content for name, content in files.items()}
    lacking = dict(list(whole.items())[:-1])
    a_folder = io.BytesIO()
    with tarfile.open(fileobj=a_folder, mode="w:gz") as foreign:
        for name in whole:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            foreign.addfile(info)
    broken = {
        "cut": archive[:-1000],
        "foreign": b"<html>not found</html>",
        "empty": b"",
        "lacking": tar(lacking),
        "folders": a_folder.getvalue(),
        "short": tar({**whole, f"{prefix}/test_batch.bin": files["test_batch.bin"][:-1]}),
        "long": tar({**whole, f"{prefix}/test_batch.bin": files["test_batch.bin"] + b"1"}),
    }
    for content in broken.values():
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"is no archive of CIFAR-10|must be 10,000 records of"
        ):
            cifar10.load(tmp_path, md5(content))
    label = bytearray(files["test_batch.bin"])
    label[3073 * 17] = 10
    with pytest.raises(ValueError, match="a file must have labels from 0 to 9, got 10"):
        cifar10.parse("a file", bytes(label))


class Server:
    """Serves one file from loopback, with ranges or without, and may break off."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges = True
        self.break_at: list[int] = []  # after how many bytes, for one answer each
        self.status = 200
        self.requests: list[str | None] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers["Range"]
                server.requests.append(wanted)
                start = int(wanted[len("bytes=") : -1]) if wanted and server.ranges else 0
                if server.status != 200:
                    self.send_error(server.status)
                    return
                if start and start >= len(server.content):
                    self.send_error(416)
                    return
                body = server.content[start:]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: server.break_at.pop(0)] if server.break_at else body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/cifar-10-binary.tar.gz"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(archive: bytes) -> Iterator[Server]:
    server = Server(archive)
    yield server
    server.http.shutdown()
    server.http.server_close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download(server: Server, archive: bytes, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "new" / cifar10.ARCHIVE
    cifar10.download(server.url, path, md5(archive))
    assert path.read_bytes() == archive
    assert names(path.parent) == [cifar10.ARCHIVE]
    assert server.requests == [None]
    assert "100%" in capfd.readouterr().err


def test_download_goes_on_after_breaks(server: Server, archive: bytes, tmp_path: Path) -> None:
    server.break_at = [70_000, 1_000, 0]
    path = tmp_path / cifar10.ARCHIVE
    cifar10.download(server.url, path, md5(archive), wait=0)
    assert path.read_bytes() == archive
    assert names(tmp_path) == [cifar10.ARCHIVE]
    assert server.requests == [None, "bytes=70000-", "bytes=71000-", "bytes=71000-"]


def test_download_goes_on_in_another_process(
    server: Server, archive: bytes, tmp_path: Path
) -> None:
    server.break_at = [50_000]
    path = tmp_path / cifar10.ARCHIVE
    with pytest.raises(ConnectionError, match=r"broke off at byte 50,000 .* run again"):
        cifar10.download(server.url, path, md5(archive), num_attempts=1)
    assert not path.exists()
    cifar10.download(server.url, path, md5(archive), num_attempts=1)
    assert path.read_bytes() == archive
    assert server.requests == [None, "bytes=50000-"]


def test_download_from_a_server_without_ranges(
    server: Server, archive: bytes, tmp_path: Path
) -> None:
    server.ranges, server.break_at = False, [len(archive) - 5]
    path = tmp_path / cifar10.ARCHIVE
    cifar10.download(server.url, path, md5(archive), wait=0)
    assert path.read_bytes() == archive


def test_download_that_was_complete(server: Server, archive: bytes, tmp_path: Path) -> None:
    path = tmp_path / cifar10.ARCHIVE
    path.with_name(path.name + ".part").write_bytes(archive)  # killed before the renaming
    cifar10.download(server.url, path, md5(archive))
    assert path.read_bytes() == archive


@pytest.mark.parametrize("wrong", [b"<html>log in first</html>", b""])
def test_download_of_something_else(wrong: bytes, server: Server, tmp_path: Path) -> None:
    server.content = wrong
    with pytest.raises(ValueError, match=f"must have the MD5 checksum .*, got {md5(wrong)}"):
        cifar10.download(server.url, tmp_path / cifar10.ARCHIVE)
    assert names(tmp_path) == []


def test_download_of_nothing(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(ConnectionError, match="404"):
        cifar10.download(server.url, tmp_path / cifar10.ARCHIVE)
    assert len(server.requests) == 1  # no use in asking again
    server.status = 503
    with pytest.raises(ConnectionError, match="503"):
        cifar10.download(server.url, tmp_path / cifar10.ARCHIVE, num_attempts=3, wait=0)
    assert len(server.requests) == 4
    assert names(tmp_path) == []


def test_augment() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (32, 32, 3), np.uint8)
    augmented = jax.jit(cifar10.augment)(jax.random.key(0), np.stack([image] * 3_000))
    framed = [np.pad(way, ((4, 4), (4, 4), (0, 0))) for way in (image, image[:, ::-1])]
    crops = {
        frame[i : i + 32, j : j + 32].tobytes(): (flipped, i, j)
        for flipped, frame in enumerate(framed)
        for i in range(9)
        for j in range(9)
    }
    found = [crops[one.tobytes()] for one in np.asarray(augmented)]  # each is one of the 162
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == 162
    # Uniform: χ² of 161 degrees of freedom is within 6 standard deviations of its mean.
    expected = 3_000 / 162
    chi2 = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi2 - 161) < 6 * np.sqrt(2 * 161)


def test_normalize() -> None:
    # (x − 0.5)/0.5 with x = byte/255
    chex.assert_trees_all_close(
        cifar10.normalize(jnp.array([0, 51, 255], jnp.uint8)),
        jnp.array([-1.0, -0.6, 1.0]),
        rtol=1e-6,
    )


# ------------------------------------------------------------------------------------------ models


def shapes(name: str, **kwargs: Any) -> Any:
    return nnx.eval_shape(lambda: cifar10.MODELS[name](rngs=nnx.Rngs(0), **kwargs))


@pytest.mark.parametrize(
    ("name", "expected"),
    # 11.17 M and 58.15 M are what is usually quoted.
    [("resnet18", 11.17), ("resnet50", 23.51), ("resnet152", 58.15)],
)
def test_number_of_parameters(name: str, expected: float) -> None:
    params = nnx.state(shapes(name), nnx.Param)
    assert round(sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6, 2) == expected


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet50"])
def test_shape_of_a_model(name: str) -> None:
    forward = lambda x: cifar10.MODELS[name](rngs=nnx.Rngs(0))(x)
    assert jax.eval_shape(forward, jnp.zeros((2, 32, 32, 3))).shape == (2, 10)
    widths = {"small": (64, 8), "resnet18": (512, 4), "resnet50": (2048, 4)}[name]
    body = lambda x: (model := cifar10.MODELS[name](rngs=nnx.Rngs(0))).blocks(model.stem(x))
    width, size = widths
    if name == "small":
        size = 4
    assert jax.eval_shape(body, jnp.zeros((2, 32, 32, 3))).shape == (2, size, size, width)


@pytest.mark.slow
def test_bfloat16() -> None:
    model = cifar10.MODELS["small"](dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    wide = cifar10.MODELS["small"](rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (8, 32, 32, 3))
    text = str(jax.make_jaxpr(lambda x: nnx.clone(model)(x))(x))
    convolutions = [line for line in text.splitlines() if "conv_general_dilated" in line]
    assert convolutions
    assert all(":bf16[" in line for line in convolutions)
    assert all(":f32[" in line for line in text.splitlines() if " rsqrt " in line)
    logits = jax.jit(lambda x: nnx.clone(model)(x))(x)
    chex.assert_trees_all_close(logits, jax.jit(lambda x: nnx.clone(wide)(x))(x), atol=0.1)
    assert logits.dtype == jnp.float32
    for kind in (nnx.Param, nnx.BatchStat):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(model, kind))} == {"float32"}


# ---------------------------------------------------------------------------------- recipe and run


def config(optimizer: str = "spa-gradual", **kwargs: Any) -> Any:
    fields = {
        "optimizer": optimizer,
        "seed": 0,
        "model": "small",
        "bfloat16": False,
        "epochs": 300,
        "batch": 128,
        "learning_rate": 1.0,
        "averaging": 0.1,
        "weight_decay": 1e-4,
        "track": False,
    }
    return cifar10.Config(**{**fields, **kwargs})


def hyperparams(tx: Any, counts: list[int]) -> list[tuple[float, float]]:
    """The η and c that SPA uses at these counts."""
    params = jnp.ones(2)
    found = []
    for count in counts:
        state = tx.init(params)
        count = jnp.asarray(count, jnp.int32)
        state = jax.tree.map(
            lambda s, count=count: s._replace(count=count),
            state,
            is_leaf=lambda s: isinstance(s, SPAState),
        )
        _, state = jax.jit(tx.update)(params, state, params)
        found.append((float(optax.tree.get(state, "eta")), float(optax.tree.get(state, "c"))))
    return found


@pytest.mark.parametrize("epochs", [300, 30])
def test_recipe(epochs: int) -> None:
    steps, scale = 391, epochs / 300
    first, second, last = 150 * 391 * scale, 225 * 391 * scale, 300 * 391 * scale
    counts = [0, int(first) - 2, int(first), round(second), round(last) - 1]
    make = lambda name: cifar10.make_optimizer(config(name, epochs=epochs), steps)
    # (η, c); `averaging` at count k is c_{k+1}, so c has changed one count ahead of η.
    expected = {
        "spa-eta": [(1, 0.1), (1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.01, 0.1)],
        "spa-abrupt": [(1, 0.1), (1, 0.1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-eta": [(1, 0.1), (1, 1), (0.1, 1), (0.01, 1), (0.01, 1)],
        "drop-alpha": [(1, 0.1), (0.1, 1), (0.01, 1), (0.001, 1), (0.001, 1)],
        "tenth": [(1, 0.1), (0.1, 0.1), (0.01, 0.1), (0.001, 0.1), (0.001, 0.1)],
    }
    for name, pairs in expected.items():
        np.testing.assert_allclose(hyperparams(make(name), counts), pairs, rtol=1e-5, err_msg=name)
    # 1.0005 a step at full length: a factor of 10 in 4,606 steps, or 11.8 epochs.
    halfway = round(first + 2303 * scale)
    found = hyperparams(make("spa-gradual"), [int(first) - 2, halfway, int(first + 4_700 * scale)])
    np.testing.assert_allclose(found[0], (1, 0.1), rtol=1e-5)
    np.testing.assert_allclose(found[1], (10**-0.5, 0.1 * 10**0.5), rtol=0.01)
    np.testing.assert_allclose(found[2], (0.1, 1), rtol=1e-5)


def test_weight_decay_is_a_gradient() -> None:
    """As in `torch.optim.SGD(weight_decay=...)`: g + 1e-4 x goes through the momentum."""
    params, grads = jnp.array([2.0]), jnp.array([0.5])
    tx = cifar10.make_optimizer(config("sgdm", weight_decay=0.1), 391)
    updates, state = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 * 0.7], rtol=1e-6)
    updates, state = tx.update(grads, state, params)
    np.testing.assert_allclose(updates, [-0.1 * (0.9 * 0.7 + 0.7)], rtol=1e-6)


def small_data(num: int = 24) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    part = lambda n: cifar10.Images(
        rng.integers(0, 256, (n, 32, 32, 3), np.uint8), rng.integers(0, 10, n).astype(np.int32)
    )
    return part(num), part(37)


def run_epochs(
    cfg: Any,
    num_devices: int = 1,
    num_epochs: int = 2,
    scan: bool | None = None,
) -> Any:
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    train, test = small_data()
    program = cifar10.make_program(cfg, len(train.labels), mesh, scan=scan)
    state, losses = program.init(cfg.seed), []
    images, labels = cifar10.on_all(tuple(train), mesh)
    for _ in range(num_epochs):
        state, of_epoch = program.epoch(state, images, labels, tqdm(disable=True))
        losses.append(of_epoch["loss"])
    scores = program.evaluate(state.params, state.batch_stats, test)
    return jax.device_get(state._replace(key=0)), np.concatenate(losses), scores


@pytest.mark.slow
def test_other_ways_to_run_the_same() -> None:
    """Over both drops: as SPA, in a scan, and on eight devices, whose sums are in another order."""
    cfg = config("sgdm", batch=8, epochs=2, learning_rate=0.1)
    reference = run_epochs(cfg)
    with noisy_optimizers(cifar10):
        noisy = run_epochs(cfg)
    spa = dataclasses.replace(cfg, optimizer="spa_from_sgdm")
    for other in (run_epochs(spa), run_epochs(cfg, scan=True), run_epochs(cfg, 8)):
        assert other[0].step == reference[0].step == 6
        for part in (
            lambda run: run[0].params,
            lambda run: run[0].batch_stats,
            lambda run: run[1:],  # losses
        ):
            assert_apart_by_rounding(*map(part, (other, reference, noisy)), at_most=1e-3)


@pytest.mark.slow
def test_evaluation() -> None:
    """Against the model itself, on a set that no batch divides."""
    cfg = config(batch=8, learning_rate=0.01)
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    train, test = small_data()
    program = cifar10.make_program(cfg, len(train.labels), mesh)
    state = program.init(0)
    model = cifar10.MODELS["small"](rngs=nnx.Rngs(1))
    nnx.update(model, state.params, state.batch_stats)
    model.eval()
    logits = model(cifar10.normalize(jnp.asarray(test.images)))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, test.labels).mean()
    accuracy = (np.asarray(logits).argmax(-1) == test.labels).mean()
    np.testing.assert_allclose(
        program.evaluate(state.params, state.batch_stats, test), (loss, accuracy), rtol=1e-5
    )


@pytest.mark.parametrize("part", ["training", "test"])
@pytest.mark.parametrize("label", [10, -1])
def test_labels_that_the_head_does_not_have(part: str, label: int, tmp_path: Path) -> None:
    """Their cross entropy would be NaN, or left out."""
    cfg, mesh = config(batch=32, epochs=2), Mesh(np.array(jax.devices()[:1]), ("data",))
    data = dict(zip(("training", "test"), small_data(), strict=True))
    data[part].labels[5] = label
    program = cifar10.make_program(cfg, len(data["training"].labels), mesh)
    message = f"{part} data must have labels from 0 to 9, got {label}"
    with pytest.raises(ValueError, match=message):
        cifar10.train(program, cfg, tuple(data.values()), tmp_path / "run")
    assert not any(tmp_path.iterdir())  # found before anything is trained or written
    state = program.init(0)
    enter = {
        "training": lambda: program.epoch(state, *data[part], tqdm(disable=True)),
        "test": lambda: program.evaluate(state.params, state.batch_stats, data[part]),
    }
    with pytest.raises(ValueError, match=message):
        enter[part]()


def test_batch_that_does_not_divide() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    with pytest.raises(ValueError, match="--batch must be a multiple of 8 devices, got 20"):
        cifar10.make_program(config(batch=20), 96, mesh)


# ------------------------------------------------------------------------- runs and their folders


def tiny_run(
    folder: Path,
    *,
    stops_in: int | None = None,
    losses: Callable[[int], float] = lambda epoch: 1 / epoch,
    seed: int = 0,
) -> cifar10.State:
    """Four epochs of arithmetic in place of training, saved as the real ones are."""

    def init() -> cifar10.State:
        params = jax.random.normal(jax.random.key(seed), (5_000,))
        opt_state = optax.EmptyState()
        return cifar10.State(params, {}, opt_state, jnp.int32(0), jax.random.key(seed))

    def do_epoch(state: Any, epoch: int, bar: tqdm) -> Any:
        if epoch == stops_in:
            raise KeyboardInterrupt
        bar.update(3)
        state = state._replace(params=1.1 * state.params + epoch, step=state.step + 3)
        return state, {"loss": np.full(3, losses(epoch), np.float32)}

    evaluate = lambda state: {"test_loss": 1.0, "test_accuracy": float(state.params[0])}
    cfg = config(epochs=4, seed=seed)
    return cifar10.run(cfg, "data", folder, 3, init, do_epoch, evaluate)


def bits(state: cifar10.State) -> Any:
    return jax.device_get(state._replace(key=jax.random.key_data(state.key)))


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


@pytest.mark.parametrize("how", ["truncated", "zeroed", "flipped", "incomplete", "empty"])
def test_a_damaged_checkpoint(how: str, tmp_path: Path, capsys: Any) -> None:
    """The one before is resumed, and the run ends with the same bits."""
    whole = tiny_run(tmp_path / "whole")
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
    else:
        largest = max(files, key=lambda path: path.stat().st_size)
        assert largest.stat().st_size > 10_000  # the params
        largest.write_bytes(damaged(how, largest.read_bytes()))
    capsys.readouterr()
    chex.assert_trees_all_equal(bits(tiny_run(run)), bits(whole))
    out = capsys.readouterr().out
    assert f"{newest} is damaged: " in out
    assert "resuming from epoch 3 of 4" in out
    assert metrics(run) == metrics(tmp_path / "whole")
    # The epoch was saved again, whole.
    shutil.rmtree(run / "checkpoints" / "4")
    chex.assert_trees_all_equal(bits(tiny_run(run)), bits(whole))
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
    found = [cifar10.sha256(tree) for tree in (state, *others)]
    assert len(set(found)) == len(found)
    assert cifar10.sha256(jax.tree.map(jnp.copy, state)) == found[0]


@pytest.mark.slow
def test_a_folder_in_use(tmp_path: Path) -> None:
    """A second command is refused at once; and when the first is killed, nothing is left of it."""
    run = tmp_path / "run"
    script = """if True:
        import sys, time
        from pathlib import Path
        sys.path[:0] = sys.argv[2:]
        import cifar10, test_cifar10
        with cifar10.opened(test_cifar10.config(epochs=4), "data", Path(sys.argv[1])):
            print("open", flush=True)
            time.sleep(600)
    """
    paths = [str(SCRIPT.parent), str(Path(__file__).parent)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run), *paths], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with pytest.raises(
            ValueError, match=f"--out must not be in use: another process is training in {run}"
        ):
            tiny_run(run)
        assert num_epochs(run) == 0
        tiny_run(tmp_path / "elsewhere")
    finally:
        process.kill()
        process.communicate()
    tiny_run(run)
    assert num_epochs(run) == 4


def test_runs_that_diverged(tmp_path: Path, monkeypatch: Any) -> None:
    """A table and a picture of what there is, without a warning."""
    runs = {}
    for seed, losses in enumerate([lambda _: np.nan, lambda epoch: 1 / epoch]):
        folder = tmp_path / "spa-gradual" / f"seed{seed}"
        tiny_run(folder, losses=losses, seed=seed)
        lines = cifar10.read(folder / "metrics.jsonl").splitlines()
        runs[f"seed {seed}"] = [cifar10.read_epochs(folder, lines)]
    rows = cifar10.table(runs).splitlines()
    assert "±" not in "".join(rows)  # of one seed
    assert rows[1].split()[:3] == ["seed", "0", "nan"]
    assert rows[2].split()[:3] == ["seed", "1", "0.2500"]
    drawn: list[Any] = []
    monkeypatch.setattr(cifar10.plt, "close", drawn.append)
    for names in (["seed 0"], ["seed 0", "seed 1"]):
        cifar10.draw({name: runs[name] for name in names}, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    losses = [figure.axes[0] for figure in drawn]
    assert [axis.get_yscale() for axis in losses] == ["linear", "log"]
    assert [[t.get_text() for t in axis.texts] for axis in losses] == [["not finite: seed 0"]] * 2
    monkeypatch.undo()
    cifar10.plt.close("all")
    both = cifar10.read_runs(tmp_path, ["spa-gradual"], 2)
    assert cifar10.table(both).splitlines()[1].split()[1] == "nan"


def test_what_is_lacking_in_runs(tmp_path: Path) -> None:
    tiny_run(tmp_path / "spa-gradual" / "seed0")
    with pytest.raises(
        ValueError, match=r"a run of spa-gradual with seed 1, got no .*metrics.json"
    ):
        cifar10.read_runs(tmp_path, ["spa-gradual"], 2)
    with pytest.raises(KeyboardInterrupt):
        tiny_run(tmp_path / "spa-gradual" / "seed1", stops_in=3, seed=1)
    with pytest.raises(ValueError, match=r"seed1/.* must have as many epochs .* got 2 and not 4"):
        cifar10.read_runs(tmp_path, ["spa-gradual"], 2)


# -------------------------------------------------------------------------------- the command line


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), *SMALL, "--out", str(out), *arguments]


def environment(**variables: str) -> dict[str, str]:
    """One CPU device a process, and no more."""
    return {**os.environ, **host_devices(1), "MPLBACKEND": "agg", **variables}


def test_a_disk_that_is_not_shared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="--out must be on a disk that all processes share, got"):
        cifar10.check_config(config(), "digest", tmp_path / "run")
    assert not any(tmp_path.iterdir())


def final(run: Path) -> Any:
    """What the last checkpoint of a run holds, on the one device of another process."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return last_checkpoint(run, cifar10.make_program(config(), 64, mesh).init(0))


@pytest.mark.slow
def test_command_line(data_dir: list[str], tmp_path: Path, capsys: Any) -> None:
    arguments = [*SMALL, *data_dir, "--scale-epochs", "0.007", "--out", str(tmp_path / "out")]
    arguments += ["--optimizer", "spa-gradual", "--seeds", "2"]
    text = cifar10.main(arguments)
    rows = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert set(rows) == {"spa-gradual"}
    assert all(row.count("±") == 2 and "nan" not in row for row in rows.values())
    assert (tmp_path / "out" / "cifar10.png").read_bytes().startswith(b"\x89PNG")
    lines = metrics(tmp_path / "out" / "spa-gradual" / "seed1")
    assert [line["epoch"] for line in lines] == [1, 2]
    assert all(len(line["losses"]) == 2 for line in lines)
    assert lines[0]["eta"] == 1.0
    assert lines[0]["c"] == 1.0  # in one step: the next drop is the next step
    # Once more: nothing is trained again, and the table is the same.
    err = capsys.readouterr().err
    assert "step/s" in err
    assert cifar10.main(arguments) == text
    assert "step/s" not in capsys.readouterr().err
    # Another run in the same place would mix the two.
    with pytest.raises(ValueError, match=r"has another run in .*, with batch 32 and not 16"):
        cifar10.main([*arguments, "--batch", "16"])
    # What is lost or broken is told of, and nothing else is touched.
    run = tmp_path / "out" / "spa-gradual" / "seed0"
    lines, config = ((run / name).read_text() for name in ("metrics.jsonl", "config.json"))
    for name, content, message in [
        ("config.json", None, "has a run without its config.json in"),
        ("config.json", config[:-9], "config.json must be JSON"),
        ("metrics.jsonl", None, "must have the 2 epochs of the last checkpoint beside it"),
        ("metrics.jsonl", lines[: lines.index("\n") + 1], "metrics.jsonl must have the 2 epochs"),
        ("metrics.jsonl", 5 * lines, "or up to 2 more, got 10"),
        ("metrics.jsonl", lines[:-9] + "\n", "metrics.jsonl, line 2, must be JSON"),
        ("metrics.jsonl", "[1]" + lines[lines.index("\n") :], "line 1, must be a JSON object"),
        (
            "metrics.jsonl",
            lines.replace('"epoch": 2', '"epoch": 1'),
            "2, must be of epoch 2, got 1",
        ),
        ("metrics.jsonl", lines.replace("test_acc", "tEst_acc"), "1, must have test_accuracy, got"),
    ]:
        whole = (run / name).read_text()
        (run / name).unlink()
        if content is not None:
            (run / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            cifar10.main(arguments)
        assert (run / name).exists() == (content is not None)
        if content is not None:
            assert (run / name).read_text() == content
        (run / name).write_text(whole)
    (run / "checkpoints").rename(run / "elsewhere")
    arguments_of_three = [*arguments[:-1], "1"]
    (run / "metrics.jsonl").write_text(2 * lines)
    with pytest.raises(ValueError, match="must have the 0 epochs of the last checkpoint"):
        cifar10.main(arguments_of_three)
    assert (run / "metrics.jsonl").read_text() == 2 * lines


def test_tenth_needs_room() -> None:
    with pytest.raises(ValueError, match="tenth needs a first drop after epoch 1, got 2 epochs"):
        cifar10.make_optimizer(config("tenth", epochs=2), 391)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scale-epochs", "0"], "--scale-epochs must be finite and > 0, got 0.0"),
        (["--seeds", "0"], "--seeds must be finite and > 0, got 0"),
        (["--epochs", "0"], "--epochs must be finite and > 0, got 0"),
        (["--epochs", "-3"], "--epochs must be finite and > 0, got -3"),
        (["--epochs", "9", "--scale-epochs", "0.1"], "not allowed with argument --epochs"),
        (["--learning-rate", "nan"], "--learning-rate must be finite and > 0, got nan"),
        (["--averaging", "1.5"], "--averaging must be <= 1, got 1.5"),
        (["--out", "/dev/null/out"], "--out must be a folder that can be written, got /dev/null/"),
        (["--scale-epochs", "nan"], "--scale-epochs must be finite and > 0, got nan"),
        (["--scale-epochs", "inf"], "--scale-epochs must be finite and > 0, got inf"),
        (["--num-processes", "2"], "--coordinator, --num-processes and --process-id go together"),
        (["--track", "--optimizer", "sgdm"], "--track is for primal averaging"),
        (["--track", "--optimizer", "spa-eta", "--optimizer", "sgdm"], "--track is for primal"),
        (["--optimizer", "adam"], "invalid choice: 'adam'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cifar10.main(arguments)
    assert message in capsys.readouterr().err


def test_epochs_are_the_scale() -> None:
    """--epochs 30 is --scale-epochs 0.1 of 300."""
    parser = cifar10.make_parser(None, ["small"], "small", "out")
    configs = [
        cifar10.make_configs(cifar10.Config, cifar10.parse_arguments(parser, argv), 300)
        for argv in (["--epochs", "30"], ["--scale-epochs", "0.1"])
    ]
    assert configs[0] == configs[1]
    assert configs[0][0].epochs == 30


def test_errors_without_a_traceback(tmp_path: Path) -> None:
    """One line that names what is wrong; and a status of failure."""
    (tmp_path / cifar10.ARCHIVE).write_bytes(b"<html>")
    data = ["--data-dir", str(tmp_path), "--epochs", "2"]
    found = subprocess.run(
        command(tmp_path / "out", *data), env=environment(), capture_output=True, text=True
    )
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert found.stderr.splitlines()[-1].startswith(
        f"error: {tmp_path / cifar10.ARCHIVE} must have the MD5 checksum {cifar10.MD5}, got "
    )


@pytest.mark.slow
def test_killed_and_resumed(data_dir: list[str], tmp_path: Path) -> None:
    """SIGKILL at any moment: the params in the end are the same, to the bit."""
    arguments = ["--optimizer", "spa-gradual", "--scale-epochs", "0.06", *data_dir]  # 18 epochs
    cache = environment(  # compiles once
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    run = lambda out: subprocess.Popen(
        command(out, *arguments), env=cache, stderr=subprocess.DEVNULL
    )
    assert run(tmp_path / "whole").wait() == 0
    count = lambda: num_epochs(tmp_path / "killed" / "spa-gradual" / "seed0")
    rng, num_kills = random.Random(0), 0
    for _ in range(4):
        process, before = run(tmp_path / "killed"), count()
        while process.poll() is None and count() <= before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        num_kills += process.wait() == -signal.SIGKILL
    assert num_kills >= 2
    assert run(tmp_path / "killed").wait() == 0
    whole, killed = (tmp_path / name / "spa-gradual" / "seed0" for name in ("whole", "killed"))
    chex.assert_trees_all_equal(final(whole), final(killed))
    assert metrics(whole) == metrics(killed)
    assert len(metrics(whole)) == 18
    with ocp.CheckpointManager(whole / "checkpoints") as manager:
        assert manager.all_steps() == [17, 18]  # the others are pruned


@pytest.mark.slow
def test_two_processes(data_dir: list[str], tmp_path: Path) -> None:
    """`jax.distributed` with one device a process is one process with eight devices."""
    arguments = ["--optimizer", "spa-gradual", "--scale-epochs", "0.01", *data_dir]
    arguments += ["--learning-rate", "0.01"]
    in_this = lambda name: cifar10.main([*SMALL, "--out", str(tmp_path / name), *arguments])
    one, two, noisy = (
        tmp_path / name / "spa-gradual" / "seed0" for name in ("one", "two", "noisy")
    )
    in_this("one")
    with noisy_optimizers(cifar10):
        in_this("noisy")
        noisy_state = final(noisy)
    cluster = ["--coordinator", free_address(), "--num-processes", "2", "--process-id"]
    processes = [
        subprocess.Popen(
            command(tmp_path / "two", *arguments, *cluster, str(i)),
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert "2 × cpu" in outputs[0]
    assert "spa-gradual" not in outputs[1]
    states = [final(two), final(one), noisy_state]
    assert [int(state.step) for state in states] == [6, 6, 6]
    assert_apart_by_rounding(*(state.params for state in states), at_most=1e-2)
    losses = [[line["losses"] for line in metrics(run)] for run in (two, one, noisy)]
    assert_apart_by_rounding(*losses, at_most=1e-2)
    assert np.shape(losses) == (3, 3, 2)


# ------------------------------------------------------------------------------------------ figure


GAUGE = ("iterate_term", "gradient_term", "gain", "noise_level", "alignment")


def fake_runs(
    runs: Path,
    num_seeds: int = 2,
    num_steps: int = 200,
    num_epochs: int = 6,
    diverged: bool = False,
) -> cifar10.Runs:
    """Runs of all optimizers whose numbers are known, read back from a folder.

    The drop is in the middle, as it is of all of `cifar10`'s.
    """
    drop = num_steps * num_epochs // 2
    for i, name in enumerate(cifar10.OPTIMIZERS):
        for seed in range(num_seeds):
            folder = runs / name / f"seed{seed}"
            folder.mkdir(parents=True)
            losses = np.where(np.arange(2 * drop) < drop, 2.0, 1.0) + seed
            losses[drop : drop + 5] += i  # the spike
            c = np.where(np.arange(2 * drop) < drop // 2 + seed, 0.1, 1.0)
            as_json = lambda values: [None] * len(values) if diverged else values.tolist()
            with (folder / "metrics.jsonl").open("w") as file:
                for epoch in range(1, num_epochs + 1):
                    steps = slice(num_steps * (epoch - 1), num_steps * epoch)
                    gauge = {key: np.full(num_steps, 1.0 + j + seed) for j, key in enumerate(GAUGE)}
                    gauge = {key: as_json(values) for key, values in gauge.items()}
                    if epoch == 1:
                        gauge["gain"][0] = None  # there is no step before
                    line = {
                        "epoch": epoch,
                        "losses": as_json(losses[steps]),
                        "train_loss": as_json(losses[steps].mean(keepdims=True))[0],
                        "test_accuracy": 0.5 + 0.01 * i + 0.02 * seed,
                        "momentum": {**gauge, "c": c[steps].tolist()},
                    }
                    file.write(json.dumps(line) + "\n")
    return cifar10.read_runs(runs, list(cifar10.OPTIMIZERS), num_seeds)


@pytest.mark.slow
def test_figures_2_3_and_4(tmp_path: Path, capsys: Any) -> None:
    """From runs whose numbers are known: 6 epochs of 200 steps, so that the drop is at step 600."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    fake_runs(runs)
    arguments = ["--runs", str(runs), "--tracked", str(runs), "--seeds", "2", "--out", str(out)]
    figures.main(arguments)
    for i in (2, 3, 4):
        assert (out / f"figure{i}.png").read_bytes().startswith(b"\x89PNG")
    loss = np.genfromtxt(out / "figure4_loss.csv", delimiter=",", names=True, deletechars="")
    assert list(loss["step"]) == list(range(-100, 400))
    np.testing.assert_allclose(loss["spa-eta"][[0, 99, 100, 104, 105]], [2.5, 2.5, 3.5, 3.5, 1.5])
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
    assert "first step at which the gauge drops momentum: 300, 301" in text
    # Figure 2: the gain is 3 or 4, the noise level 4 or 5.
    expected = "3.5000 ± 0.5000 4.5000 ± 0.5000 0.7750 ± 0.0250 5.5000 ± 0.5000"
    assert f"100 {expected}".split() in rows


def test_figures_of_short_runs(tmp_path: Path, capsys: Any) -> None:
    """40 steps, with the drop at step 20: the tables have the rows that exist."""
    runs = fake_runs(tmp_path / "runs", num_steps=20, num_epochs=2)
    figures.figures_of_runs(runs, runs, tmp_path)
    loss = np.genfromtxt(tmp_path / "figure4_loss.csv", delimiter=",", names=True)
    assert list(loss["step"]) == list(range(-20 + figures.SMOOTHED - 1, 20))
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "to", "20", "peak"] in rows
    steps = [int(row[0]) for row in rows if row and row[0].isdigit() and row[1] != "to"]
    assert steps == [1, 2, 5, 10, 19, 20, 39]  # the last before the drop, and of all
    for i in (2, 3, 4):
        assert (tmp_path / f"figure{i}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [(1, 2), (2, 1), (3, 2), (200, 6)])
def test_figures_of_one_seed(steps: tuple[int, int], tmp_path: Path, capsys: Any) -> None:
    """However short."""
    num_steps, num_epochs = steps
    runs = fake_runs(tmp_path / "runs", 1, num_steps=num_steps, num_epochs=num_epochs)
    figures.figures_of_runs(runs, runs, tmp_path)
    text = capsys.readouterr().out
    assert "±" not in text.replace("mean ± standard error", "")
    assert "nan" not in text


def test_figures_of_runs_that_diverged(tmp_path: Path, capsys: Any) -> None:
    """All losses are null; a warning would be an error."""
    runs = fake_runs(tmp_path / "runs", diverged=True)
    figures.figures_of_runs(runs, runs, tmp_path)
    assert "nan" in capsys.readouterr().out
    for i in (2, 3, 4):
        assert (tmp_path / f"figure{i}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_have_labels(tmp_path: Path, monkeypatch: Any) -> None:
    """Every axis says what is on it, and every curve which it is."""
    drawn = {}
    monkeypatch.setattr(figures.plt, "close", lambda figure: drawn.update({len(drawn): figure}))
    runs = fake_runs(tmp_path / "runs")
    figures.figures_of_runs(runs, runs, tmp_path)
    figure_3, figure_4, figure_2 = drawn.values()
    assert all(axis.get_ylabel() for axis in figure_2.axes)
    assert "2 seeds" in figure_3.get_suptitle()
    assert not any(axis.get_title() for axis in figure_3.axes)
    names = [text.get_text() for text in figure_4.axes[1].get_legend().get_texts()]
    assert names == list(cifar10.OPTIMIZERS)
    monkeypatch.undo()
    figures.plt.close("all")


def test_figures_of_runs_that_were_not_tracked(tmp_path: Path) -> None:
    tiny_run(tmp_path / "runs" / "spa-eta" / "seed0")
    arguments = ["--tracked", str(tmp_path / "runs"), "--seeds", "1", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="runs must have gain of every step: train with --track"):
        figures.main(arguments)
    assert not (tmp_path / "figure1.png").exists()
