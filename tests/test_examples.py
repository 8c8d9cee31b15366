"""`examples/digits.py` and the benchmarks run, at a small size, and support their claims."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bases
import cifar_data
import digits
import equivalence
import gauge
import grid
import jax
import jax.numpy as jnp
import language_model
import low_precision
import numpy as np
import one_card
import optax
import pytest
import render
import train_cifar10
import update_cost
import vision_transformer
from flax import nnx
from helpers import long

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
@pytest.mark.filterwarnings("error:`rounding_key` should be given")
def test_digits(tmp_path: Path) -> None:
    picture = tmp_path / "digits.png"
    text = digits.main(["--epochs", "8", "--seeds", "2", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = {line[:23].strip(): line.split() for line in text.splitlines()[1:]}
    before = lambda mark: {name: float(row[row.index(mark) - 1]) for name, row in rows.items()}
    accuracy, loss = before("%"), before("±")
    assert accuracy["optax.sgd"] > 90
    assert abs(accuracy["spa_from_sgdm"] - accuracy["optax.sgd"]) < 0.5
    assert loss["spa_from_sgdm, bfloat16"] < loss["optax.sgd, bfloat16"]
    # `spa(η)` is another form of momentum. Rounding, which a network may amplify, is far below it.
    for name in ("spa_from_sgdm", "sgd + noise"):
        assert float(rows[name][-1]) < float(rows["spa"][-1]) / 10


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "num_bytes"), [("spa_adamw", 4.1), long("lion", 4.0)])
def test_one_card(optimizer: str, num_bytes: float, capsys: pytest.CaptureFixture[str]) -> None:
    loss = one_card.main(["--steps", "5", "--rate", "0.002", "--optimizer", optimizer])
    assert loss < math.log(256) - 0.5
    assert f"918,656 params, {num_bytes} bytes each with their state" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (digits, ["--picture", "FILE/x.png"]),
        (equivalence, ["--json", "FILE/x"]),
        (language_model, ["--heads", "3"]),
        (train_cifar10, ["--track", "--optimizer", "sgdm", "--out", "NEW"]),
    ],
)
def test_bad_arguments(
    script: Any, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before anything is computed or written."""
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("")
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


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
    assert cost["optax.sgd(0.1, 0.9)"]["bytes_accessed"] == pytest.approx(24, abs=1)
    assert cost["spa(1.0, 0.1)"]["bytes_accessed"] == pytest.approx(28, abs=1)
    for name in ("spa(1.0, 0.1)", "the same with rounding_key"):
        assert cost[name]["temporary"] < 4_000


def test_trees_of_update_cost() -> None:
    is_shape = lambda node: isinstance(node, tuple)
    leaves = lambda name: jax.tree.leaves(update_cost.TREES[name](), is_leaf=is_shape)
    assert sum(map(math.prod, leaves("GPT-2"))) == 124_439_808
    assert len(leaves("ResNet-152")) == 459
    assert round(sum(map(math.prod, leaves("ResNet-152"))) / 1e6, 2) == 58.15  # as usually quoted


@pytest.mark.slow
def test_low_precision(tmp_path: Path) -> None:
    arguments = ["--task", "digits", "--momentum", "0.9", "--schedule", "constant"]
    arguments += ["--seeds", "1", "--epochs", "6", "--json", str(tmp_path / "out")]
    text = low_precision.main(arguments)
    lines = (tmp_path / "out").read_text()
    assert low_precision.main(arguments) == text
    assert (tmp_path / "out").read_text() == lines  # nothing is run again
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "|" in line]
    rows = [row for row in rows if " at " in row[-2]]  # those with a lowest loss
    ratios = {row[1]: float(row[3]) for row in rows}  # at η = 0.01
    num_bytes = {row[1]: float(row[2]) for row in rows}
    assert ratios["SGD+M in float32"] == 1
    for name in ("SPA, float32 z", "SPA, bfloat16 z"):
        assert abs(ratios[f"{name}, stochastic"] - 1) < 0.02
    assert ratios["SGD+M, float32 m"] > ratios["SPA, float32 z"]
    assert set(num_bytes.values()) == {3, 4, 6, 8, 10}
    assert num_bytes["SPA, bfloat16 z, stochastic"] == 4


SMALL = ["--width", "16", "--heads", "2", "--layers", "1"]


@pytest.fixture
def standard_in_threads() -> Iterator[None]:
    """`standard_promotion` is that of one thread."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def losses(path: Path) -> dict[tuple[str, str, int], list[float]]:
    records = map(json.loads, path.read_text().splitlines())
    of = lambda record: (record["base"], record["form"], record["seed"])
    return {of(record): [loss for _, loss in record["curve"]] for record in records}


@pytest.mark.slow
@pytest.mark.usefixtures("standard_in_threads")
def test_language_model(tmp_path: Path) -> None:
    """Trains, is not run again, and draws."""
    out, picture = tmp_path / "runs", tmp_path / "losses.png"
    cells = ["--base", "AdamW", "Adam, factored", "--form", "float32", "bfloat16", "Schedule-Free"]
    options = ["--seeds", "2", "--jobs", "2", "--json", str(out), "--fix", "rate=0.008"]
    options += ["mu_y=0.9", "momentum=0.8"]
    sizes = [*SMALL, "--length", "16", "--batch", "8", "--steps", "60"]
    text = language_model.main([*cells, *options, *sizes])
    runs = losses(out)
    assert len(runs) == 2 * 3 * 2  # bases, forms, seeds
    for curve in runs.values():
        assert len(curve) == 10
        assert curve[-1] < min(curve[0], math.log(256))
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    num_bytes = {row[2]: row[3] for row in rows if len(row) == 10 and row[1] == "AdamW"}
    assert num_bytes == {"float32": "12.0", "bfloat16": "8.0", "Schedule-Free": "10.0"}
    lines = out.read_text()
    again = language_model.main([*cells, *options, *sizes, "--picture", str(picture)])
    assert (again, out.read_text()) == (text, lines)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("standard_in_threads")
def test_vision_transformer(tmp_path: Path) -> None:
    """Learns the brightness of a quarter of the image from other images than it is validated by."""
    rng = np.random.default_rng(0)
    for name in cifar_data.TRAIN + cifar_data.TEST:
        labels = rng.integers(0, 2, 32, np.uint8)
        images = rng.integers(0, 100, (32, 3, 32, 32), np.uint8)
        images[:, :, :16, 16:] += labels[:, None, None, None] * np.uint8(150)
        records = np.concatenate([labels[:, None], images.reshape(32, -1)], 1)
        (tmp_path / name).write_bytes(records.tobytes())
    out = tmp_path / "runs"
    options = ["--seeds", "1", "--json", str(out), "--data-dir", str(tmp_path)]
    options += ["--base", "AdamW", "--form", "float32", "averaged", "--fix", "rate=0.002"]
    options += ["momentum=0.8", "c=0.1", "mu_y=0.9", "--batch", "16", "--steps", "120"]
    vision_transformer.main([*SMALL, *options])
    assert len(losses(out)) == 2
    assert all(curve[-1] < math.log(2) / 2 for curve in losses(out).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [base if base in ("AdamW", "Muon, float8 m") else long(base) for base in bases.BASES],
)
def test_bases(base: str) -> None:
    """Every base descends in the simplest bowl, plain and averaged, and takes its bytes."""
    # With an axis to factor, a head of attention, vectors and the last layer.
    network = language_model.Decoder(32, 1, 1, 32, jnp.float32, nnx.Rngs(0))
    params, num_bytes = nnx.to_pure_dict(nnx.state(network, nnx.Param)), {}
    for form in ("bfloat16", "averaged"):
        scheme = bases.scheme(base, form)
        run = bases.Run(40, jax.random.key(0))
        h = {**scheme.start, "rate": scheme.start["rate"] / 16}
        x = optax.tree.cast(params, scheme.dtype)
        state = scheme.make(h, run).init(x)
        num_bytes[form] = sum(leaf.nbytes for leaf in jax.tree.leaves((x, state)))
        # Hyper-parameters are traced, as in the benchmark.
        update = jax.jit(lambda h, *rest, make=scheme.make, run=run: make(h, run).update(*rest))
        for _ in range(40):
            updates, state = update(h, x, state, x)  # the gradient of |x|²/2
            x = optax.apply_updates(x, updates)
        y = scheme.evaluate(state, x)
        assert optax.tree.norm(optax.tree.cast(y, jnp.float32)) < optax.tree.norm(params)
    size = optax.tree.size(params)
    assert num_bytes["averaged"] - num_bytes["bfloat16"] == pytest.approx(2 * size, abs=64)  # z
    of_base = {"AdamW": 8, "Lion": 4, "SGD": 4, "Lion, float8 m": 3}
    if base in of_base:
        assert num_bytes["bfloat16"] / size == pytest.approx(of_base[base], rel=0.03)


def test_average_of_weights() -> None:
    """Beside float32 params it is the recursion itself, and training does not see it."""
    tx = bases.with_average(optax.sgd(0.5), 0.75, jnp.float32, jax.random.key(0))
    x, e = jnp.array(1.0), 1.0
    state = tx.init(x)
    for k in range(1, 4):
        updates, state = tx.update(x, state, x)
        x = optax.apply_updates(x, updates)
        e += 0.25 * (0.5**k - e)
        assert (float(x), float(state[2])) == (0.5**k, pytest.approx(e))


@pytest.mark.slow
def test_gauge(tmp_path: Path) -> None:
    """On digits; the decoder has its own test."""
    out, plots = tmp_path / "runs", tmp_path / "plots"
    arguments = ["--task", "digits", "--epochs", "12", "--seeds", "1", "--json", str(out)]
    text = gauge.main([*arguments, "--plot", str(plots)])
    assert (plots / "gauge_digits.png").read_bytes().startswith(b"\x89PNG")
    reports = json.loads(out.read_text())["reports"]
    assert [report[0] for report in reports["all"]] == list(range(0, 12 * 28, 10))
    # Early on all gradients of a layer point the same way.
    ratio, alignment = gauge.ratios(reports["all"], "early")
    assert ratio > 1.5
    assert f"| digits | all | {ratio:.2f} ({alignment:+.2f})" in text
    lines = out.read_text()
    gauge.main(arguments)
    assert out.read_text() == lines  # nothing is run again


def record_of(h: dict[str, float], loss: float | None, seed: int = 0) -> dict[str, Any]:
    return {"h": h, "seed": seed, "bytes": 4.0, "curve": [(1, loss)]}


def test_tuning_ends_where_no_neighbour_is_better() -> None:
    """In a bowl, where large rates diverge; what is fixed stays, all neighbours were tried."""
    found = {}

    def run(h: dict[str, float]) -> dict[str, Any]:
        loss = math.log2(h["rate"] / 0.001) ** 2 + 50 * (h["momentum"] - 0.4) ** 2
        found[h["rate"], h["momentum"]] = h
        return record_of(h, loss if h["rate"] < 0.01 else None)

    start = {"rate": 0.016, "momentum": 0.8}
    assert grid.tune(start, run, {}) == {"rate": 0.001, "momentum": 0.4}
    assert found.keys() > {(0.0005, 0.4), (0.002, 0.4), (0.001, 0.0), (0.001, 0.6)}
    assert len(found) < 20
    assert grid.tune(start, run, {"momentum": 0.8}) == {"rate": 0.001, "momentum": 0.8}


def test_table_of_cells() -> None:
    """Differences are taken seed by seed; 4.303 is the 97.5 % point of t with 2 degrees."""
    h, other = {"rate": 0.004}, {"rate": 0.008}
    losses = {"float32": (2.0, 2.1, 2.2), "bfloat16": (1.9, 1.9, 2.2)}
    tried = {
        ("AdamW", form): [record_of(h, loss, seed) for seed, loss in enumerate(of_form)]
        for form, of_form in losses.items()
    }
    tried["AdamW", "bfloat16"] += [record_of(other, None), record_of(other, 1.0, seed=1)]
    runs = {cell: grid.by_seed(records) for cell, records in tried.items()}
    text = grid.table(runs, list(grid.telling(runs)), settings=True)
    error = 4.303 * 0.1 / 3**0.5
    row = f"| 2.0000 | 3 | −0.1000 [−{0.1 + error:.4f}, +{error - 0.1:.4f}] |  | rate 0.004 |"
    assert row in text
    assert "| AdamW | bfloat16 | rate | 0.004: 1.9000, 0.008: inf |" in grid.tuning_table(tried)


def test_results_are_those_of_the_records() -> None:
    """`python benchmarks/render.py` would change nothing."""
    for name, text in render.pages().items():
        assert (render.RESULTS / f"{name}.md").read_text() == text, name
    # The page that says what to type has its differences from there.
    recorded = re.findall(r"[−+]0\.\d{4}", (render.RESULTS / "text.md").read_text())
    page = (render.RESULTS.parent.parent / "docs/which.md").read_text()
    told = set(re.findall(r"[−+]0\.\d{3}\b", page))
    assert told
    assert told <= {f"{float(d.replace('−', '-')):+.3f}".replace("-", "−") for d in recorded}


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
