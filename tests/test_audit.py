"""The audit, against the definitions; and the defining values of Figure 1."""

import csv
import re
from pathlib import Path
from typing import Any

import figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, table, unchecked, x64

from spa_optax import (
    SGDMHyperparams,
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    spa,
    stagewise,
    theory,
)


def values(hyperparams: tuple[Any, Any], counts: Any) -> Any:
    """Of a pair of schedules, compiled as one program."""
    return jax.jit(lambda counts: [h(counts) for h in hyperparams])(jnp.asarray(counts))


def test_arrays_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    etas, cs = rng.uniform(0.1, 2, 40), rng.uniform(0.1, 1, 40)
    with x64():
        eta, c = table(jnp.asarray(etas)), table(jnp.asarray(cs))
        audit = theory.audit(eta, c, 40, smoothness=3.0)
        np.testing.assert_allclose(audit.eta, etas, rtol=1e-12)
        np.testing.assert_allclose(audit.c, cs, rtol=1e-12)
        alpha, beta = values(hyperparams_to_sgdm(eta, c), np.arange(40))
        np.testing.assert_allclose(audit.alpha, alpha, rtol=1e-12)
        np.testing.assert_allclose(audit.beta[1:], beta[1:], rtol=1e-12)
        assert np.isnan(audit.beta[0])
        k = np.arange(2, 40)
        now = {"eta": etas[k], "eta_prev": etas[k - 1], "c": cs[k - 1], "smoothness": 3.0}
        np.testing.assert_allclose(audit.step_weight[2:], theory.step_weight(**now), rtol=1e-9)
        losses = np.eye(2)[:, :, None]  # of x and of z
        of_x, of_z = theory.remainder(*losses, c_prev=cs[k - 2], **now)
        np.testing.assert_allclose(3.0 * audit.remainder_x[2:], of_x, rtol=1e-9)
        np.testing.assert_allclose(audit.remainder_z[2:], of_z, rtol=1e-9)
        limit = theory.max_learning_rate(cs, 3.0)
        np.testing.assert_allclose(audit.max_learning_rate, limit, rtol=1e-12)
        ratio = theory.max_decay_ratio(etas[k - 1], cs[k - 1], 3.0)
        np.testing.assert_allclose(audit.max_decay_ratio[2:], ratio, rtol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_recipes_of_sgdm(momentum: float) -> None:
    """The backward recursion over all steps is the look-ahead at each."""
    schedule = lambda k: jnp.where(k < 10, k.astype(float) / 100, 0.1 * 0.99 ** k.astype(float))
    with x64():
        hyperparams = hyperparams_from_sgdm(schedule, momentum)
        audit = theory.audit(*hyperparams, 60)
        steps = [0, 1, 2, 9, 10, 30, 59]
        eta, c = values(hyperparams, steps)
        np.testing.assert_allclose(audit.eta[steps], eta, rtol=1e-7)
        np.testing.assert_allclose(audit.c[steps], c, rtol=1e-7)
        np.testing.assert_allclose(audit.beta, momentum)
    assert audit.c[0] == 0  # warm-up from zero
    assert "nan" not in audit.report()


def test_breaches_of_figure_1() -> None:
    first = lambda audit, name: next(
        np.flatnonzero(steps) for key, steps in audit.breaches().items() if name in key
    )
    # (c): β spikes to 9 at 20. (e): α spikes at 19. (f): neither.
    audit = theory.audit(*stagewise(10.0, 0.1, [20], averaging_rule="constant"), 100)
    assert first(audit, "β is 1 or more").tolist() == [20]
    np.testing.assert_allclose(audit.beta[20], 9, rtol=1e-5)
    audit = theory.audit(*stagewise(10.0, 0.1, [20]), 100)
    assert first(audit, "α spikes").tolist() == [19]
    assert first(audit, "second coefficient").tolist() == [20]
    audit = theory.audit(*stagewise(10.0, 0.1, [20], rate=1.05), 100)
    for name in ("α spikes", "β is 1 or more", "β is negative"):
        assert not len(first(audit, name))
    # Balanced: R_k's first coefficient is 0 throughout.
    audit = theory.audit(*stagewise(10.0, 0.1, [20], averaging_rule="balance"), 100)
    np.testing.assert_array_equal(audit.remainder_x, 0)
    # η falling by 10 where 1.06 is allowed; and above the limit for constants.
    audit = theory.audit(*stagewise(1.0, 0.1, [20], averaging_rule="constant"), 100, smoothness=0.1)
    assert first(audit, "weight").tolist() == [20]
    assert not len(first(audit, "limit"))
    assert "η is divided by 10 there, 1.057 is allowed" in audit.report()
    audit = theory.audit(1.0, 0.1, 10, smoothness=1.0)
    assert len(first(audit, "limit")) == 10
    audit = theory.audit(*stagewise(1.0, 0.1, [20], rate=1.05), 200, smoothness=0.1)
    assert "they hold at every step" in audit.report()


def test_the_report_begins_with_what_is_beyond_doubt() -> None:
    schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
    report = theory.audit(*hyperparams_from_sgdm(schedule, 0.9), 1_000, smoothness=5.0).report()
    anticipates, bound = report.index("c anticipates the drop of α at step 500"), report.index("By")
    assert anticipates < bound
    assert re.search(r"rises from 0\.10\d? to 0\.526", report)
    assert "sufficient, for the worst" in report


def test_a_schedule_that_is_nan_or_out_of_range_is_reported() -> None:
    nan = lambda k: jnp.where(k < 50, 0.1, jnp.nan)
    for learning_rate, averaging in (
        (nan, 0.1),
        (0.1, nan),
        (lambda k: 0.1 - 1e-2 * k.astype(float), 0.1),
    ):
        audit = theory.audit(learning_rate, averaging, 100, smoothness=1.0)
        report = audit.report()
        assert "a hyper-parameter is NaN or out of range: first at step" in report
        assert "hold at every step" not in report
    momentum = lambda k: jnp.where(k < 50, 0.9, jnp.nan)
    report = theory.audit(*hyperparams_from_sgdm(0.1, momentum), 100).report()
    assert "a hyper-parameter is NaN or out of range: first at step 50, 50 in all" in report
    audit = theory.audit(lambda k: jnp.full_like(k, jnp.nan, float), 0.1, 100, smoothness=1.0)
    assert "η undefined, c 0.1 to 0.1" in audit.report()
    assert "100 in all" in audit.report()
    assert "By the bound" not in audit.report()
    assert "out of range" not in theory.audit(0.01, 0.1, 100, smoothness=1.0).report()


@pytest.mark.parametrize("nan", [True, False], ids=["NaN", "negative"])
def test_a_recipe_past_the_end_of_its_schedule(nan: bool) -> None:
    """What lies ahead counts as the look-ahead counts it, so that the hyper-parameters agree."""
    root = lambda k: 0.1 * jnp.sqrt(1 - k.astype(float) / 60.5)
    line = lambda k: 0.1 * (1 - k.astype(float) / 60.5)
    hyperparams = hyperparams_from_sgdm(root if nan else line, 0.9)
    audit = theory.audit(*hyperparams, 80)
    np.testing.assert_allclose((audit.eta, audit.c), values(hyperparams, np.arange(80)), rtol=1e-5)
    assert "a hyper-parameter is NaN or out of range: first at step 61, 19 in all" in audit.report()
    assert np.isfinite(audit.eta[:60]).all()


def test_one_step() -> None:
    audit = theory.audit(1.0, 0.1, 1, smoothness=1.0)
    assert audit.report().startswith("1 steps: η 1 to 1, c 0.1 to 0.1")
    assert "β undefined" in audit.report()  # β_0 is free


@pytest.mark.slow
def test_a_million_steps() -> None:
    """O(n) in time and memory at any β: not a window of 18,412 steps at each."""
    schedule = lenient(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5_000, 10**6))
    hyperparams = hyperparams_from_sgdm(schedule, 0.999)
    audit = theory.audit(*hyperparams, 10**6)
    assert len(audit.eta) == 10**6
    np.testing.assert_allclose(audit.eta[500_000], hyperparams[0](500_000), rtol=1e-5)


def test_plot() -> None:
    import matplotlib.pyplot as plt

    figure = theory.audit(*stagewise(10.0, 0.1, [20]), 100).plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["η", "α = ηc", "c", "β"]
    spikes = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert spikes[0].get_xdata().tolist() == [19]
    plt.close(figure)
    # A rise of c over 42 steps of 100,000 is less than a pixel wide: α and c there once more.
    schedule = lambda k: jnp.where(k < 50_000, 0.1, 0.01)
    figure = theory.audit(*hyperparams_from_sgdm(schedule, 0.9), 100_000).plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["η", "α = ηc", "α = ηc", "c", "β", "c"]
    ((x, y),) = (line.get_data() for line in figure.axes[5].lines)
    assert len(x) < 200
    assert x[y.argmax()] == 49_999
    plt.close(figure)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.audit(1.0, 0.1, 0), "`num_steps` must be a concrete integer >= 1, got 0"),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 1e2),
            "`num_steps` must be a concrete integer >= 1, got 1",
        ),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 2.5),
            "`num_steps` must be a concrete integer >= 1, got 2",
        ),
        (lambda: theory.audit(1.0, 0.1, 9, smoothness=0.0), "`smoothness` must be None or finite"),
        (lambda: theory.audit(-1.0, 0.1, 9), "`learning_rate` must be finite and >= 0, got -1.0"),
        (lambda: theory.audit(1.0, 1.1, 9), "`averaging` must be in [0, 1], got 1.1"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.slow
def test_figure_1(tmp_path: Path) -> None:
    """The values that define each panel, from the file that the example writes."""
    with jax.numpy_dtype_promotion("standard"):  # what users have
        figures.main(["--out", str(tmp_path)])
    for name in ("figure1.png", "audit.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "figure1.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    assert len(rows) == 100
    # (a) and (b): growth without bound by the recursion, none by the look-ahead.
    assert of["(a) η forward"][99] == pytest.approx(3.7e4, rel=0.02)
    assert of["(a) η look-ahead"][99] == pytest.approx(1.0)
    assert of["(a) c forward"][99] < 1e-5
    assert of["(a) c look-ahead"][19] == pytest.approx(0.53, abs=0.005)
    assert of["(b) η forward"][99] > 1e8
    assert of["(b) η look-ahead"][99] == pytest.approx(5.0)  # α/(1 − 0.8)
    # (c): a one-step spike of β.
    assert of["(c) β"][[19, 20, 21]] == pytest.approx([0.9, 9.0, 0.9])
    assert of["(c) α"][[19, 20]] == pytest.approx([1.0, 0.1])
    # (d): α up by 10, β down to 0.
    assert of["(d) α"][[18, 19, 20]] == pytest.approx([1.0, 10.0, 10.0])
    assert of["(d) β"][[19, 20, 99]] == pytest.approx([0.9, 0.0, 0.0])
    # (e): a one-step spike of α, no momentum after.
    assert of["(e) α"][[18, 19, 20]] == pytest.approx([1.0, 10.0, 1.0])
    assert of["(e) β"][[19, 20, 99]] == pytest.approx([0.9, 0.0, 0.0], abs=1e-6)
    # (f): no spikes, and it arrives.
    assert of["(f) β"].max() < 1
    assert of["(f) α"].max() < 1.06
    assert of["(f) β"][99] == pytest.approx(0.0, abs=1e-6)


def test_a_schedule_made_from_sgdm_is_still_a_schedule() -> None:
    params = jnp.ones(2)
    tx = spa(*hyperparams_from_sgdm(lambda k: 0.1 / (k + 1).astype(float), 0.9))
    jax.jit(tx.update)(params, tx.init(params), params)


def test_schedules_say_which_recipe_they_were_made_from() -> None:
    """The audit uses the recipe of both schedules if it is one, and the schedules otherwise."""
    rates = [lambda k: 0.1 / (k + 1).astype(float), lambda k: 0.2 / (k + 1).astype(float)]
    one, other = (hyperparams_from_sgdm(rate, 0.5) for rate in rates)
    assert [h.sgdm for h in one] == [SGDMHyperparams(rates[0], 0.5)] * 2
    assert theory.audit(*one, 3).beta[0] == 0.5
    mixed = theory.audit(one.learning_rate, other.averaging, 3)
    assert np.isnan(mixed.beta[0])
    expected = values((one.learning_rate, other.averaging), np.arange(3))
    np.testing.assert_allclose((mixed.eta, mixed.c), expected, rtol=1e-6)


def test_conditions_come_in_the_order_of_the_report() -> None:
    """Each that breaks has one line of the report, the two that rest on the bound last."""
    etas = jnp.array([1.0, 9.0, 1.0, 0.1, 1.0, 2.0])
    cs = jnp.array([0.1, 0.5, 0.1, 0.9, 0.5, 0.1])
    audit = theory.audit(table(etas), table(cs), 6, smoothness=9.0)
    breaches = audit.breaches()
    assert list(breaches) == [
        "a hyper-parameter is NaN or out of range",
        "α spikes to over twice its neighbours",
        "β is 1 or more",
        "β is negative",
        "R_k's first coefficient is positive",
        "R_k's second coefficient (SGD's too) is positive",
        "the weight of ‖x_k − x_{k−1}‖² is positive",
        "η is over the limit for constants",
    ]
    broken = [name for name, steps in breaches.items() if steps.any()]
    assert len(broken) == 6
    told = [line.removeprefix("- ").split(":")[0] for line in audit.report().splitlines()]
    assert [line for line in told if line in breaches] == broken
    assert list(theory.audit(1.0, 0.1, 6).breaches()) == list(breaches)[:6]
