"""examples/language_model.py: its text, its network, every optimizer, stopped runs, the
command."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_scripts import load_example
from flax import nnx
from helpers import long

language_model = load_example("language_model")
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDTH": 16, "HEADS": 2, "LAYERS": 1, "LENGTH": 8}
    for name, value in {**sizes, "NUM_REPORTS": 3, "VALIDATION_BATCHES": 2}.items():
        monkeypatch.setattr(language_model, name, value)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("abcd" * 500)
    return path


def run(text: Path, out: Path, *options: str) -> list[dict[str, float]]:
    language_model.main(["--text", str(text), "--out", str(out), *options])
    return language_model.read_log(out / "log.csv")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_stopped_run_goes_on_to_the_same_numbers(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops at the fifth step, and earlier ends a line of the log without its
    checkpoint."""
    rows = run(text, tmp_path / "whole", "--steps", "6")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert (tmp_path / "whole/language_model.png").read_bytes().startswith(b"\x89PNG")

    batch, out = language_model.batch, tmp_path / "stopped"

    def stopped(text: np.ndarray, index: int) -> np.ndarray:
        if index == 5:
            raise KeyboardInterrupt
        return batch(text, index)

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "batch", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(text, out, "--steps", "6")
    assert [row["step"] for row in language_model.read_log(out / "log.csv")] == [2, 4]
    language_model.write_log(
        out / "log.csv", rows
    )  # one more than there are checkpoints
    for options, message in (
        (["6"], "2"),
        (["7", "--resume"], "--steps must be 6, as before"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(text, out, "--steps", *options)
    np.testing.assert_equal(run(text, out, "--steps", "6", "--resume"), rows)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_it_is_evaluated_at_x(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If x were 0, all characters would be equally likely."""

    def zeros(opt_state: Any, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    monkeypatch.setattr(language_model.spa_optax, "eval_params", zeros)
    (row,) = run(text, tmp_path / "out", "--steps", "1")
    assert row["validation loss"] == pytest.approx(math.log(4))
    assert row["training loss"] != row["validation loss"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [long("spa_adamw"), long("adamw"), long("muon")])
def test_every_optimizer_learns(
    optimizer: str, text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """In a text of period 4 each character gives the next: a perfect model has a loss
    of 0."""
    monkeypatch.setattr(language_model, "NUM_REPORTS", 1)
    rows = run(text, tmp_path / "out", "--optimizer", optimizer, "--steps", "60")
    assert rows[-1]["validation loss"] < 0.1
    num_bytes = {"spa_adamw": 4.1, "adamw": 8.0, "muon": 4.0}[optimizer]
    assert f"{num_bytes} bytes each" in capsys.readouterr().out


@pytest.mark.slow
def test_a_character_does_not_see_later_ones() -> None:
    network = language_model.GPT(100, nnx.Rngs(0))
    text = np.arange(20).reshape(2, 10)
    other = np.where(np.arange(10) < 6, text, 99)
    first, second = network(text), network(other)
    np.testing.assert_array_equal(first[:, :6], second[:, :6])
    assert np.all(np.abs(first[:, 6:] - second[:, 6:]).max(-1) > 1e-3)


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "".join(chr(228 + i) for i in range(300)), encoding="utf-8"
    )
    text = language_model.read(tmp_path / "text")
    np.testing.assert_equal(text, (300, np.arange(270), np.arange(270, 300)))
    batch = language_model.batch(text.training, 3)
    np.testing.assert_array_equal(language_model.batch(text.training, 3), batch)
    assert not np.array_equal(language_model.batch(text.training, 4), batch)
    assert np.all(np.diff(batch) == 1)
