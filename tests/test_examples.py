"""`examples/digits.py` and the benchmarks run, at a small size, and support their claims."""

import json
import math
import re
from pathlib import Path

import compiled
import digits
import equivalence
import gauge
import jax
import language_model
import low_precision
import memory
import numpy as np
import one_card
import pytest
import update_cost
import vision_transformer

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:`rounding_key` should be given")
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
    # `spa(η)` is another form of momentum. Rounding, which a network may amplify, is far below it.
    for name in ("spa_from_sgdm", "sgd + noise"):
        assert float(rows[name][-1]) < float(rows["spa"][-1]) / 10


@pytest.mark.slow
def test_digits_of_one_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "digits.png"
    text = digits.main(["--epochs", "1", "--seeds", "1", "--picture", str(picture)])
    assert picture.exists()
    assert "±" not in text
    assert "nan" not in text
    assert "\nseeds: 1, epochs: 1, steps: 22\n" in capsys.readouterr().out


@pytest.mark.parametrize(("optimizer", "num_bytes"), [("gpa_adamw", 4.1), ("lion", 4.0)])
def test_one_card(optimizer: str, num_bytes: float, capsys: pytest.CaptureFixture[str]) -> None:
    loss = one_card.main(["--steps", "5", "--rate", "0.002", "--optimizer", optimizer])
    assert loss < math.log(256) - 0.5
    assert f"918,656 params, {num_bytes} bytes each with their state" in capsys.readouterr().out


SCRIPTS = {
    module.__name__: module
    for module in (
        digits,
        one_card,
        *(compiled, equivalence, gauge, language_model, low_precision, memory, update_cost),
        vision_transformer,
    )
}


def test_an_interrupted_run_keeps_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(digits, "train", interrupted)
    (tmp_path / "digits.png").write_bytes(b"of the run before")
    with pytest.raises(KeyboardInterrupt):
        digits.main(["--picture", str(tmp_path / "digits.png")])
    assert (tmp_path / "digits.png").read_bytes() == b"of the run before"


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option says what it is, and what it is if not given."""
    with pytest.raises(SystemExit, match="0"):
        SCRIPTS[name].main(["--help"])
    text = capsys.readouterr().out
    options = re.split(r"\n  (?=-)", text[text.index("options:") :].partition("\n\n")[0])[1:]
    for option in options:
        assert re.search(r"\s{2,}\S", option), option  # a help
        assert "None" not in option
        assert "False" not in option
    assert any("(default:" in option for option in options)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("digits", ["--epochs", "0"], "--epochs must be >= 1, got 0"),
        ("digits", ["--seeds", "-1"], "--seeds must be >= 1, got -1"),
        ("digits", ["--picture", "FILE/x.png"], "--picture must be a picture that can be written"),
        ("digits", ["--picture", "FOLDER"], "--picture must be a picture that can be written"),
        ("digits", ["--picture", "FOLDER/x.xyz"], "Format 'xyz' is not supported"),
        ("low_precision", ["--seeds", "0"], "--seeds must be finite and > 0, got 0"),
        ("low_precision", ["--epochs", "0"], "--epochs must be finite and > 0, got 0"),
        ("low_precision", ["--json", "FOLDER"], "--json must be a file that can be written, got"),
        ("equivalence", ["--steps", "0"], "--steps must be finite and > 0, got 0"),
        ("equivalence", ["--steps", "5"], "--steps must be a multiple of 10, got 5"),
        ("equivalence", ["--momentum", "1"], "--momentum must be in [0, 1), got 1.0"),
        ("equivalence", ["--json", "FILE/x"], "--json must be a file that can be written, got"),
        ("gauge", ["--seeds", "0"], "--seeds must be finite and > 0, got 0"),
        ("memory", ["--target", "abacus"], "invalid choice: 'abacus'"),
        ("memory", ["--picture", "FOLDER"], "--picture must be a file that can be written, got"),
        ("update_cost", ["--rounds", "0"], "--rounds must be finite and > 0, got 0"),
        ("language_model", ["--seeds", "0"], "--seeds must be finite and > 0, got 0"),
        ("language_model", ["--rounds", "-1"], "--rounds must be >= 0, got -1"),
        ("language_model", ["--heads", "3"], "--width must be a multiple of --heads, got 128"),
        ("language_model", ["--scheme", "gpa_adamw, 8 bytes"], "the reference, got ["),
    ],
)
def test_bad_arguments(
    name: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found before anything is computed or written."""
    file, folder = tmp_path / "FILE", tmp_path / "FOLDER"
    file.write_text("")
    folder.mkdir()
    places = lambda text: text.replace("FILE", str(file)).replace("FOLDER", str(folder))
    with pytest.raises(SystemExit, match="2"):
        SCRIPTS[name].main([places(argument) for argument in arguments])
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [file, folder]
    assert not any(folder.iterdir())


@pytest.mark.parametrize("line", ["{", "[]", '{"task": 1}'])
def test_records_of_something_else(line: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    good = json.dumps(dict.fromkeys(low_precision.KEYS, 1))
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="--json must be new or of this benchmark, but line 2 of"):
        low_precision.main(["--json", str(path)])


@pytest.mark.slow
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
    leaves = {name: leaves_of(make()) for name, make in TREES.items()}
    sizes = {name: sum(map(math.prod, shapes)) for name, shapes in leaves.items()}
    assert sizes["GPT-2"] == 124_439_808
    assert round(sizes["ResNet-152"] / 1e6, 2) == 58.15  # as usually quoted
    assert len(leaves["ResNet-152"]) == 459


TREES = dict(update_cost.TREES)


def leaves_of(shapes: object) -> list[tuple[int, ...]]:
    return jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))


@pytest.mark.slow
def test_low_precision(tmp_path: Path) -> None:
    arguments = ["--task", "digits", "--momentum", "0.9", "--schedule", "constant"]
    arguments += ["--seeds", "1", "--epochs", "6", "--json", str(tmp_path / "out")]
    text = low_precision.main(arguments)
    lines = (tmp_path / "out").read_text()
    assert low_precision.main(arguments) == text  # nothing is run again
    assert (tmp_path / "out").read_text() == lines
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    assert "±" not in text  # of one seed
    assert "nan" not in text
    rows = [row for row in rows if " at " in row[-2]]  # those with a lowest loss
    ratios = {row[1]: float(row[3]) for row in rows}  # at η = 0.01
    num_bytes = {row[1]: float(row[2]) for row in rows}
    assert ratios["SGD+M in float32"] == 1
    for name in ("SPA, float32 z", "SPA, bfloat16 z"):
        assert abs(ratios[f"{name}, stochastic"] - 1) < 0.02
    assert ratios["SGD+M, float32 m"] > ratios["SPA, float32 z"]
    assert set(num_bytes.values()) == {4, 6, 8, 10}
    assert num_bytes["SPA, bfloat16 z, stochastic"] == 4


def test_images_of_low_precision(tmp_path: Path) -> None:
    """By the published layout: a label, then the red, the green and the blue plane, by rows."""
    records = np.zeros((2_560, 3_073), np.uint8)
    records[4, 0], records[4, 1 + 1024 * 2 + 32 * 5 + 6] = 7, 255
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    path.parent.mkdir()
    path.write_bytes(records.tobytes())
    for folder in (tmp_path, path.parent):
        images, labels = low_precision.read_cifar10(folder)
        assert images.shape == (2_560, 32, 32, 3)
        assert images[4, 5, 6, 2] == 255
        assert (images == 0).sum() == images.size - 1
        assert (labels[4], labels.sum()) == (7, 7)


@pytest.mark.slow
def test_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "tune", lambda scheme, run: [run(*scheme.start)])
    out = tmp_path / "runs"
    schemes = ["AdamW, float32", "gpa_adamw, 8 bytes"]
    sizes = ["--width", "16", "--heads", "2", "--layers", "1", "--length", "16", "--steps", "60"]
    arguments = ["--scheme", *schemes, "--seeds", "2", "--rounds", "1", "--json", str(out), *sizes]
    text = language_model.main(arguments)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2 * (1 + 2)  # two more seeds
    for record in records:
        first, last = record["curve"][0], record["curve"][-1]
        assert (first[0], last[0], len(record["curve"])) == (3, 60, 20)
        assert last[1] < first[1]
        assert last[1] < math.log(256)
    num_bytes = {record["scheme"]: round(record["bytes"], 1) for record in records}
    assert num_bytes == dict(zip(schemes, (12, 8), strict=True))
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    rows = {row[1]: row for row in rows if len(row) == 9}
    assert rows["AdamW, float32"][5:8] == ["0.0000 ± 0.0000", "60", "1.00"]
    assert set(schemes) < set(rows)
    lines = out.read_text()
    picture = tmp_path / "losses.png"
    language_model.main([*arguments, "--rounds", "0", "--picture", str(picture)])
    assert out.read_text() == lines  # nothing is run again
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_vision_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learns the brightness of a quarter of the image from other images than it is validated by."""
    monkeypatch.setattr(language_model, "tune", lambda scheme, run: [run(*scheme.start)])
    rng = np.random.default_rng(0)
    for name in (*low_precision.BATCHES, "test_batch.bin"):
        labels = rng.integers(0, 2, 32, np.uint8)
        images = rng.integers(0, 100, (32, 3, 32, 32), np.uint8)
        images[:, :, :16, 16:] += labels[:, None, None, None] * np.uint8(150)
        records = np.concatenate([labels[:, None], images.reshape(32, -1)], 1)
        (tmp_path / name).write_bytes(records.tobytes())
    out = tmp_path / "runs"
    schemes = ["AdamW, float32", "gpa_adamw, 4 bytes"]
    sizes = ["--width", "16", "--heads", "2", "--layers", "1", "--batch", "16", "--steps", "120"]
    options = ["--seeds", "1", "--rounds", "0", "--json", str(out), "--data-dir", str(tmp_path)]
    text = vision_transformer.main(["--scheme", *schemes, *options, *sizes])
    assert all(f"| {name} |" in text for name in schemes)
    for record in map(json.loads, out.read_text().splitlines()):
        assert record["curve"][-1][1] < math.log(2) / 2


@pytest.mark.slow
def test_gauge(tmp_path: Path) -> None:
    """On digits; the decoder has its own test."""
    out, plots = tmp_path / "runs", tmp_path / "plots"
    arguments = ["--task", "digits", "--epochs", "12", "--seeds", "1", "--json", str(out)]
    text = gauge.main([*arguments, "--plot", str(plots)])
    assert (plots / "gauge_digits.png").read_bytes().startswith(b"\x89PNG")
    records = {record["way"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert set(records) == {"measured", *gauge.WAYS}
    # Watching changes nothing.
    assert records["measured"]["loss"] == records["kept"]["loss"]
    reports = records["measured"]["reports"]
    assert list(reports) == ["all", "layers.0", "layers.2"]
    assert [report[0] for report in reports["all"]] == list(range(0, 12 * 28, 10))
    # Early on all gradients of a layer point the same way; the table has its ratio and alignment.
    ratio, alignment = gauge.ratios(reports["all"], "early")
    assert ratio > 1.5
    assert f"| digits | all | {ratio:.2f} ({alignment:+.2f})" in text
    lines = out.read_text()
    gauge.main(arguments)
    assert out.read_text() == lines  # nothing is run again


def test_tuning_ends_where_no_neighbour_is_better() -> None:
    """In a bowl, whose bottom is not in the middle; all neighbours of the best were tried."""
    scheme = language_model.SCHEMES["AdamW, float32"]

    def run(rate: float, momentum: float) -> dict[str, object]:
        loss = math.log2(rate / 0.001) ** 2 + 50 * (momentum - 0.4) ** 2
        return {"rate": rate, "momentum": momentum, "curve": [(1, loss)]}

    records = language_model.tune(scheme, run)
    best = records[-1]
    assert (best["rate"], best["momentum"]) == (0.001, 0.4)
    tried = {(record["rate"], record["momentum"]) for record in records}
    assert tried > {(0.0005, 0.4), (0.002, 0.4), (0.001, 0.0), (0.001, 0.6)}
    assert len(tried) == len(records) < 20
    table = language_model.tuning_table({"AdamW, float32": records})
    assert "| AdamW, float32 | 0.4 | 0.0005: 1.0000, 0.001: 0.0000, 0.002: 1.0000" in table


def test_language_model_is_validated_on_other_files() -> None:
    seen, unseen = language_model.read_text()
    assert 0.05 < len(unseen) / len(seen) < 0.3
    seen, unseen = (set(text.tobytes().split(b"\0")) for text in (seen, unseen))
    assert not {text for text in seen & unseen if len(text) > 100}


@pytest.mark.slow
def test_equivalence(tmp_path: Path) -> None:
    out = tmp_path / "drift.json"
    equivalence.main(["--steps", "500", "--momentum", "0.9", "--json", str(out)])
    assert not jax.config.jax_enable_x64
    # Convex: 500 steps round x by half an ulp each, 3e-5 of it if all point the same way.
    rounding = 500 * 2.0**-24
    for drift in json.loads(out.read_text()).values():
        assert max(drift["SPA from SGD+M"]) < 2 * rounding
        assert 0 < max(drift["SPA from float64"]) < rounding
