"""`examples/digits.py` and the benchmarks run, at a small size, and support their
claims."""

import json
import math
from pathlib import Path

import digits
import gauge
import low_precision
import one_card
import pytest
import update_cost
from helpers import long

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:`rounding_key` should be given")
def test_digits(tmp_path: Path) -> None:
    picture = tmp_path / "digits.png"
    text = digits.main(["--epochs", "8", "--seeds", "2", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {line[:23].strip(): line.split() for line in text.splitlines()[1:]}
    # Before the first of these signs stands the mean.
    accuracy, loss = (
        {name: float(row[row.index(sign) - 1]) for name, row in rows.items()}
        for sign in ("%", "±")
    )
    assert accuracy["optax.sgd"] > 90
    assert abs(accuracy["spa_from_sgdm"] - accuracy["optax.sgd"]) < 0.5
    assert loss["spa_from_sgdm, bfloat16"] < loss["optax.sgd, bfloat16"]
    # `spa(η)` is another form of momentum. Rounding, which a network may amplify, is
    # far below it.
    for name in ("spa_from_sgdm", "sgd + noise"):
        assert float(rows[name][-1]) < float(rows["spa"][-1]) / 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "num_bytes"), [("spa_adamw", 4.1), long("adafactor", 2.1)]
)
def test_one_card(
    optimizer: str, num_bytes: float, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--batch", "2", "--length", "64", "--steps", "5"]
    loss = one_card.main([*small, "--rate", "0.002", "--optimizer", optimizer])
    assert loss < math.log(256) - 0.5
    assert (
        f"918,656 params, {num_bytes} bytes each with their state"
        in capsys.readouterr().out
    )


@pytest.mark.long
@pytest.mark.slow
def test_update_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_cost, "TREES", {"two": lambda: [(64, 64, 3, 3)] * 2})
    out = tmp_path / "cost.json"
    update_cost.main(["--rounds", "2", "--json", str(out)])
    cost = json.loads(out.read_text())["two"]
    for name, num_bytes in {
        "optax.sgd(0.1, 0.9)": 20,
        "spa(1.0, 0.1)": 20,
        "spa(1.0, 0.1), bfloat16 params": 14,
        "the same with bfloat16 z": 10,
    }.items():
        assert cost[name]["must_move"] == pytest.approx(num_bytes, abs=0.01)


@pytest.mark.long
@pytest.mark.slow
def test_low_precision(tmp_path: Path) -> None:
    arguments = ["--task", "digits", "--momentum", "0.9", "--schedule", "constant"]
    arguments += ["--seeds", "1", "--epochs", "6", "--json", str(tmp_path / "out")]
    text = low_precision.main(arguments)
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if "|" in line
    ]
    rows = [row for row in rows if " at " in row[-2]]  # those with a lowest loss
    ratios = {row[1]: float(row[3]) for row in rows}  # at η = 0.01
    num_bytes = {row[1]: float(row[2]) for row in rows}
    assert ratios["SGD+M in float32"] == 1
    for name in ("SPA, float32 z", "SPA, bfloat16 z"):
        assert abs(ratios[f"{name}, stochastic"] - 1) < 0.02
    assert ratios["SGD+M, float32 m"] > ratios["SPA, float32 z"]
    assert num_bytes["SPA, bfloat16 z, stochastic"] == 4


@pytest.mark.slow
def test_gauge(tmp_path: Path) -> None:
    """On the digits."""
    out = tmp_path / "runs"
    text = gauge.main(
        ["--task", "digits", "--epochs", "12", "--seeds", "1", "--json", str(out)]
    )
    reports = json.loads(out.read_text())["reports"]
    assert [report[0] for report in reports] == list(range(0, 12 * 28, 10))
    # Early on all gradients point the same way.
    ratio = gauge.ratio(reports, "early")
    assert ratio > 1.5
    assert f"| digits | {ratio:.2f} |" in text
