"""The examples and benchmarks run, at a small size, and come to what they claim."""

import json
import math
from pathlib import Path

import digits
import equivalence
import jax
import low_precision
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


def test_update_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_cost, "TREES", {"two": lambda: [(64, 64, 3, 3)] * 2})
    out = tmp_path / "cost.json"
    text = update_cost.main(["--rounds", "2", "--compiles", "1", "--json", str(out)])
    cost = json.loads(out.read_text())["two"]
    assert cost["optax.sgd(0.1, 0.9)"]["must_move"] == pytest.approx(20)
    assert cost["spa(1.0, 0.1)"]["must_move"] == pytest.approx(20, abs=0.01)
    assert cost["spa(1.0, 0.1), bfloat16 params"]["must_move"] == pytest.approx(14, abs=0.01)
    assert cost["the same with bfloat16 z"]["must_move"] == pytest.approx(10, abs=0.01)
    assert 23 < cost["optax.sgd(0.1, 0.9)"]["bytes_accessed"] < 25
    assert 27 < cost["spa(1.0, 0.1)"]["bytes_accessed"] < 29
    for name in ("spa(1.0, 0.1)", "the same with rounding_key"):
        assert cost[name]["temporary"] < 4_000
    assert "two: 73,728 params, 2 leaves" in text
    sizes = {name: sum(map(math.prod, leaves_of(make()))) for name, make in TREES.items()}
    assert sizes["GPT-2"] == 124_439_808
    assert round(sizes["ResNet-152"] / 1e6, 2) == 58.15
    assert len(leaves_of(TREES["ResNet-152"]())) == 459


TREES = dict(update_cost.TREES)


def leaves_of(shapes: object) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))


def test_low_precision(tmp_path: Path) -> None:
    arguments = ["--task", "digits", "--momentum", "0.9", "--schedule", "constant"]
    arguments += ["--seeds", "1", "--epochs", "6", "--json", str(tmp_path / "out")]
    text = low_precision.main(arguments)
    lines = (tmp_path / "out").read_text()
    assert low_precision.main(arguments) == text  # nothing is run again
    assert (tmp_path / "out").read_text() == lines
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    ratios = {row[1]: float(row[3].split()[0]) for row in rows if "±" in row[3]}  # at η = 0.01
    num_bytes = {row[1]: float(row[2]) for row in rows if "±" in row[3]}
    assert ratios["SGD+M in float32"] == 1
    for name in ("SPA, float32 z", "SPA, bfloat16 z"):
        assert abs(ratios[f"{name}, stochastic"] - 1) < 0.02
    assert ratios["SGD+M, float32 m"] > ratios["SPA, float32 z"]
    assert set(num_bytes.values()) == {4, 6, 8, 10}
    assert num_bytes["SPA, bfloat16 z, stochastic"] == 4


def test_equivalence(tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    equivalence.main(["--steps", "500", "--momentum", "0.9", "--json", str(out)])
    assert not jax.config.jax_enable_x64
    for drift in json.loads(out.read_text()).values():
        assert max(drift["SPA from SGD+M"]) < 1e-5
        assert 0 < max(drift["SPA from float64"]) < 2 * max(drift["SGD+M from float64"]) + 1e-6
