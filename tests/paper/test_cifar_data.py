"""CIFAR-10: its files, their download, and augmentation."""

import http.server
import io
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import cifar_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import UserError
from paper_helpers import md5, records, tar


@pytest.mark.parametrize("form", ["files", "folder", "archive"])
def test_load(form: str, files: dict[str, bytes], archive: bytes, tmp_path: Path) -> None:
    if form == "archive":
        (tmp_path / cifar_data.ARCHIVE).write_bytes(archive)
    else:
        place = tmp_path / cifar_data.FOLDER if form == "folder" else tmp_path
        place.mkdir(exist_ok=True)
        for name, content in files.items():
            (place / name).write_bytes(content)
    train, test = cifar_data.load(tmp_path, md5(archive))
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
    content = np.zeros((cifar_data.NUM_RECORDS, cifar_data.RECORD), np.uint8)
    content[4, 1 + 1024 * 2 + 32 * 5 + 6] = 77
    images = cifar_data.parse("a file", content.tobytes()).images
    assert images[4, 5, 6, 2] == 77
    assert images.sum() == 77


def test_corrupt_data(files: dict[str, bytes], archive: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no CIFAR-10, binary version, in .*no cifar-10-batches"):
        cifar_data.load(tmp_path)
    path = tmp_path / cifar_data.ARCHIVE
    path.write_bytes(archive[:-1000])
    with pytest.raises(ValueError, match="must have the MD5 checksum c32a1d4ab5d03f1284b67883e8d8"):
        cifar_data.load(tmp_path)
    prefix = cifar_data.FOLDER
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
            cifar_data.load(tmp_path, md5(content))
    label = bytearray(files["test_batch.bin"])
    label[3073 * 17] = 10
    with pytest.raises(ValueError, match="a file must have labels from 0 to 9, got 10"):
        cifar_data.parse("a file", bytes(label))


class Server:
    """Serves one file from loopback, and may break off."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.break_at: list[int] = []  # after how many bytes, for one answer each
        self.status = 200
        self.num_requests = 0
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.num_requests += 1
                if server.status != 200:
                    self.send_error(server.status)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(server.content)))
                self.end_headers()
                end = server.break_at.pop(0) if server.break_at else None
                self.wfile.write(server.content[:end])

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


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_download(server: Server, archive: bytes, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "new"
    assert not cifar_data.is_in(folder)
    cifar_data.download(folder, server.url, md5(archive))
    assert (folder / cifar_data.ARCHIVE).read_bytes() == archive
    assert names(folder) == [cifar_data.ARCHIVE]
    assert cifar_data.is_in(folder)
    assert server.num_requests == 1
    assert "100%" in capfd.readouterr().err


@pytest.mark.usefixtures("_no_waits")
def test_download_after_breaks(server: Server, archive: bytes, tmp_path: Path) -> None:
    server.break_at = [70_000, 0, len(archive) - 5]
    cifar_data.download(tmp_path, server.url, md5(archive))
    assert (tmp_path / cifar_data.ARCHIVE).read_bytes() == archive
    assert names(tmp_path) == [cifar_data.ARCHIVE]
    assert server.num_requests == 4


@pytest.mark.usefixtures("_no_waits")
def test_download_that_always_breaks_off(server: Server, archive: bytes, tmp_path: Path) -> None:
    """A part of the archive is not taken for all of it, now or in the next process."""
    server.break_at = [50_000] * 5
    with pytest.raises(ValueError, match=r"gz: .* Run again, or fetch it .* put it at .*\.tar\.gz"):
        cifar_data.download(tmp_path, server.url, md5(archive))
    assert names(tmp_path) == []
    assert not cifar_data.is_in(tmp_path)


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize("wrong", [b"<html>log in first</html>", b""])
def test_download_of_something_else(wrong: bytes, server: Server, tmp_path: Path) -> None:
    server.content = wrong
    with pytest.raises(ValueError, match=f"does not match the known hash.* {md5(wrong)}"):
        cifar_data.download(tmp_path, server.url)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize("status", [404, 503])
def test_download_of_nothing(status: int, server: Server, tmp_path: Path) -> None:
    server.status = status
    with pytest.raises(ValueError, match=str(status)):
        cifar_data.download(tmp_path, server.url)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("_no_waits")
def test_offline(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # but does not listen
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/cifar-10-binary.tar.gz"
        with pytest.raises(UserError, match="refused"):
            cifar_data.download(tmp_path, url)
    assert names(tmp_path) == []


def test_augment() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(1, 256, (32, 32, 3), np.uint8)
    augmented = jax.jit(cifar_data.augment)(jax.random.key(0), np.stack([image] * 3_000))
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
        cifar_data.normalize(jnp.array([0, 51, 255], jnp.uint8)),
        jnp.array([-1.0, -0.6, 1.0]),
        rtol=1e-6,
    )
