"""The benchmark on nanoGPT's recipe: its network, text and schedule, the rivals, and
every row."""

import functools
import itertools
import json
import math
from pathlib import Path
from typing import Any

import common
import equivalence
import jax
import jax.numpy as jnp
import language_model
import nanogpt
import numpy as np
import optax
import pytest
import render
import rivals
from helpers import long
from language_rows import ROWS

pytestmark = pytest.mark.usefixtures("standard_promotion")
SMALL = nanogpt.Sizes(vocabulary=4, length=8, layers=1, heads=2, width=64)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """A small network, and a text in which each character gives the next."""
    text = np.arange(2_000, dtype=np.int32) % 4
    for name in ("init", "losses", "batch", "windows"):
        monkeypatch.setattr(
            nanogpt, name, functools.partial(getattr(nanogpt, name), sizes=SMALL)
        )
    monkeypatch.setattr(nanogpt, "read", lambda folder: (text, text[:200]))
    monkeypatch.setattr(nanogpt, "WARM_UP", 5)
    return nanogpt.read(Path())


@pytest.mark.slow
def test_network() -> None:
    """As many params as nanoGPT counts, none of which sees later characters."""
    params = nanogpt.init(jax.random.key(0))
    decay = nanogpt.is_matrix(params)
    sizes = jax.tree.map(
        lambda x, is_matrix: x.size * np.array([is_matrix, 1]), params, decay
    )
    assert list(sum(jax.tree.leaves(sizes))) == [802_944, 802_944 + 1_152]
    tokens = np.arange(20).reshape(2, 10)
    other = tokens.copy()
    other[:, 6:] = 64
    first, second = (nanogpt.logits(params, x, 4) for x in (tokens, other))
    np.testing.assert_array_equal(first[:, :6], second[:, :6])
    assert np.all(np.abs(first[:, 6:] - second[:, 6:]).max(-1) > 1e-3)


def test_schedule() -> None:
    """`get_lr` of nanoGPT by hand: (k + 1)/101 of the peak, then a cosine to a
    tenth."""
    rate = nanogpt.schedule(1e-3)
    expected = {
        0: 1e-3 / 101,
        99: 1e-3 * 100 / 101,
        100: 1e-3,
        1_050: 5.5e-4,
        2_000: 1e-4,
    }
    found = [float(rate(jnp.array(k))) for k in expected]
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-5)
    assert float(nanogpt.schedule(1e-3, floor=1.0)(1_999)) == pytest.approx(1e-3)


def test_batches_and_windows() -> None:
    """Every start counts, the last too, and every label is in one window."""
    text = jnp.arange(12)
    starts = {
        int(x)
        for i in range(20)
        for x in nanogpt.batch(text, jax.random.key(i), SMALL, 8)[0][:, 0]
    }
    assert starts == {0, 1, 2, 3}  # len − block = 4 of them, as in nanoGPT's `randint`
    inputs, labels, has_label = nanogpt.windows(np.arange(100), SMALL, size=5)
    assert inputs.shape == (3, 5, 8)
    np.testing.assert_array_equal(labels[has_label == 1], np.arange(1, 100))
    np.testing.assert_array_equal(inputs[has_label == 1] + 1, np.arange(1, 100))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "spacing"),
    [
        (rivals.DYNAMIC["mu"], 0.9 / 64),  # 64 values from 0.1 to 1
        (rivals.DYNAMIC["nu"], 0.9 / 128),
        (rivals.LINEAR["mu"], 1 / 127),
        (rivals.COMPANDED["mu"], 2 / 127),  # x = y/(2 − y), with a slope of 2 at 1
        (rivals.COMPANDED["nu"], 2 / 255),
    ],
)
def test_codecs(codec: rivals.Codec, spacing: float) -> None:
    """Off by half a spacing of the largest of a block at most, and 0 stays 0."""
    x = jax.random.normal(jax.random.key(0), (3, 1_001)) ** 3
    x = jnp.abs(x) if codec in (rivals.DYNAMIC["nu"], rivals.COMPANDED["nu"]) else x
    stored = rivals.encode(codec, x)
    assert stored.codes.dtype.itemsize == 1
    blocks = np.array_split(np.abs(x).ravel(), range(codec.block, x.size, codec.block))
    largest = np.concatenate([np.full(len(block), block.max()) for block in blocks])
    error = np.abs(rivals.decode(codec, stored) - x).ravel()
    assert np.all(error <= 0.51 * spacing * largest + 1e-3 * np.abs(x).ravel())
    zero = jnp.zeros_like(x)
    np.testing.assert_array_equal(
        rivals.decode(codec, rivals.encode(codec, zero)), zero
    )


@pytest.mark.slow
def test_the_two_halves_of_a_number() -> None:
    x = jax.lax.bitcast_convert_type(
        jax.random.bits(jax.random.key(0), (10_000,)), jnp.float32
    )
    x = jnp.concatenate(
        [x[jnp.abs(x) < 1e38], jnp.array([0.0, -0.0, 1 + 2**-8, 1 + 2**-7])]
    )
    high, low = rivals.split(x)
    np.testing.assert_array_equal(rivals.join(high, low), x)
    assert np.all(np.abs(high.astype(jnp.float32) - x) <= 2**-8 * np.abs(x) + 1e-38)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "off"), [(jnp.int16, 0), (jnp.int8, 2**-9 / 127)])
def test_with_the_low_half_params_are_float32(dtype: Any, off: float) -> None:
    """In int8 each step is off by half a code or less, of numbers up to 1.02."""
    tx = optax.adamw(1e-3)
    split, x = (
        rivals.with_low_half(tx, dtype),
        jnp.linspace(-1, 1, 999).astype(jnp.bfloat16),
    )
    wide = x.astype(jnp.float32)
    state, expected = split.init(x), tx.init(wide)
    for _ in range(20):
        updates, expected = tx.update(jnp.cos(wide), expected, wide)
        u, state = split.update(jnp.cos(wide), state, x)
        wide, x = optax.apply_updates(wide, updates), optax.apply_updates(x, u)
        low = jnp.round(state[1] * (2**15 / jnp.iinfo(dtype).max)).astype(jnp.int32)
        np.testing.assert_allclose(rivals.join(x, low), wide, rtol=1e-6, atol=20 * off)


@pytest.mark.long
@pytest.mark.slow
def test_language_model(tmp_path: Path, small: Any) -> None:
    """Runs are not repeated, and SPA with the hyper-parameters of SGD+M has its
    loss."""
    out = tmp_path / "runs"
    arguments = [
        "--optimizers",
        "SGD with momentum",
        "spa_from_sgdm",
        "--seed",
        "0",
        "1",
    ]
    arguments += ["--settings", "momentum=0.8,0.9", "rate=0.1"]
    arguments += ["--steps", "40", "--json", str(out)]
    text = language_model.main(arguments)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    ends = {
        (r["optimizer"], r["settings"]["momentum"], r["seed"]): r["curve"][-1]
        for r in records
    }
    assert len(ends) == 2 * 2 * 2
    for momentum, seed in itertools.product((0.8, 0.9), (0, 1)):
        found = ends["spa_from_sgdm", momentum, seed]
        expected = ends["SGD with momentum", momentum, seed]
        assert found["step"] == 40
        for name in ("weights", "EMA 0.99", language_model.SCHEDULE_FREE):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
        assert found["weights"] < math.log(4)
    rows = [
        [cell.strip() for cell in line.split("|")[1:6]]
        for line in text.splitlines()[2:]
    ]
    assert rows == [
        [name, "float32", "8.0", f"rate=0.1 momentum={momentum}", "2"]
        for name in ("SGD with momentum", "spa_from_sgdm")
        for momentum in (0.8, 0.9)
    ]
    lines = out.read_text()
    assert (language_model.main(arguments), out.read_text()) == (text, lines)


def test_figures_on_disk_are_not_replaced(tmp_path: Path) -> None:
    """A benchmark that writes a whole file stops before it computes."""
    out = tmp_path / "figures"
    out.write_text("of another run")
    with pytest.raises(SystemExit):
        language_model.common.command_line.run(
            functools.partial(equivalence.main, ["--steps", "1", "--json", str(out)])
        )
    assert out.read_text() == "of another run"


def test_settings_that_a_row_lacks(small: Any) -> None:
    with pytest.raises(SystemExit):
        language_model.common.command_line.run(
            functools.partial(
                language_model.main,
                ["--optimizers", "Lion", "--settings", "momentum=0.9"],
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "spa_adamw, z in float8" else long(name) for name in ROWS],
)
def test_rows(name: str, small: Any) -> None:
    row = ROWS[name]
    losses = language_model.train(row, row.settings, 40, 0, small)["curve"][-1]
    assert min(losses["weights"], losses["EMA 0.99"]) < math.log(4) / 2
    has_x = any(part in name for part in ("spa", "averaging", "copy"))
    assert ("x" in losses) == has_x


@pytest.mark.slow
def test_averages_of_the_weights(small: Any) -> None:
    """At a constant rate Schedule-Free's mean weighs all steps after warm-up alike, and
    an EMA that is younger than its length is a mean."""
    row = ROWS["AdamW"]._replace(floor=1.0)
    start, step = language_model.make_steps(row, row.settings, 9, jax.random.key(0))
    carry, seen = start(nanogpt.init(jax.random.key(0))), []
    for k in range(9):
        batch = nanogpt.batch(jnp.asarray(small[0]), jax.random.key(k))
        carry, _ = step(carry, k, *batch)
        seen.append(np.float64(carry[0]["wte"]))
    averages = {name: np.float64(tree["wte"]) for name, tree in carry[2].items()}
    np.testing.assert_allclose(averages["EMA 0.99"], np.mean(seen, 0), atol=1e-7)
    # Rates grow linearly for WARM_UP steps, and weights are their squares.
    rates = np.minimum((np.arange(9) + 1) / (nanogpt.WARM_UP + 1), 1)
    expected = np.average(seen, axis=0, weights=rates**2)
    found = averages[language_model.SCHEDULE_FREE]
    np.testing.assert_allclose(found, expected, atol=1e-7)


def records_of(name: str, ends: list[dict[str, float | None]]) -> list[dict[str, Any]]:
    """A run for each seed, at the settings of its row."""
    settings = ROWS[name].settings
    return [
        {"optimizer": name, "settings": settings, "steps": 9, "seed": seed}
        | {"bytes": 12.0, "curve": [{"step": 9, **end}], "seconds": 1}
        for seed, end in enumerate(ends)
    ]


def test_table_of_runs() -> None:
    """Differences are taken seed by seed; 4.303 is the 97.5 % point of t with 2
    degrees."""
    nadamw = records_of(
        "NAdamW", [{"weights": w, "EMA 0.99": 3.0} for w in (2.0, 2.1, 2.2)]
    )
    spa = records_of("spa_adamw", [{"weights": 3.0, "x": x} for x in (1.9, 1.9, 2.2)])
    error = 4.303 * 0.1 / 3**0.5
    difference = f"−0.100 [−{0.1 + error:.3f}, +{error - 0.1:.3f}]"
    table = common.table(language_model.rows_of(nadamw + spa, nadamw))
    settings = "rate=0.004 averaging=0.1 interpolation=0.9"
    assert f"| {settings} | 3 | 2.000 | {difference} | 3.000 |  |" in table
    assert "| 3 | 2.100 |  |  | 3.000 (EMA 0.99) |" in table
    of_row = {"NAdamW": nadamw, "spa_adamw": spa}
    ladder = language_model.ladder(of_row, of_row)
    assert f"| 2.000 | {difference} | {difference} |" in ladder
    nadamw[0]["curve"][-1]["weights"] = None  # not finite
    table = common.table(language_model.rows_of(nadamw, nadamw))
    assert "| 3 | – | 3.000 (EMA 0.99) |" in table


def test_results_are_those_of_the_records() -> None:
    render.main(["--check"])
