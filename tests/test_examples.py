"""The examples and benchmarks run, at a small size, and come to what they claim."""

import json
from pathlib import Path

import digits
import jax
import pytest
import update_cost


@pytest.fixture(autouse=True)
def _standard_promotion() -> object:
    with jax.numpy_dtype_promotion("standard"):  # what users have
        yield


def test_digits(tmp_path: Path) -> None:
    picture = tmp_path / "digits.png"
    text = digits.main(["--epochs", "8", "--seeds", "2", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {line[:23].strip(): line.split() for line in text.splitlines()[1:]}
    accuracy = {name: float(row[row.index("%") - 1]) for name, row in rows.items()}
    assert accuracy["optax.sgd"] > 90
    assert abs(accuracy["spa_from_sgdm"] - accuracy["optax.sgd"]) < 0.5
    assert float(rows["optax.sgd"][-1]) == 0
    loss = {name: float(row[row.index("±") - 1]) for name, row in rows.items()}
    assert loss["spa_from_sgdm, bfloat16"] < loss["optax.sgd, bfloat16"]
    assert float(rows["spa_from_sgdm"][-1]) < 1e-4
    assert float(rows["spa_from_sgdm"][-1]) < float(rows["sgd + noise"][-1])


def test_update_cost(tmp_path: Path) -> None:
    figures = tmp_path / "cost.json"
    update_cost.main(["--leaves", "2", "--rounds", "2", "--json", str(figures)])
    cost = json.loads(figures.read_text())
    assert 23 < cost["optax.sgd(0.1, 0.9)"]["bytes_per_parameter"] < 25
    assert 27 < cost["spa(1.0, 0.1)"]["bytes_per_parameter"] < 29
