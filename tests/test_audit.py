"""The audit, against the definitions; and the defining values of Figure 1."""

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, slow, table, unchecked, x64

from spa_optax import (
    hyperparams_from_sgdm,
    hyperparams_to_sgdm,
    momentum_drop,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stagewise,
    theory,
)
from spa_optax._hyperparams import SGDMHyperparams

AT_LEAST_1 = "must be a concrete integer >= 1 and below 2^31, the limit of counts"


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
    audit = theory.audit(*stagewise(10.0, 0.1, [20], step_factor=1.05), 100)
    for name in ("α spikes", "β is 1 or more", "β is negative"):
        assert not len(first(audit, name))
    # Balanced: R_k's first coefficient is 0 throughout.
    audit = theory.audit(*stagewise(10.0, 0.1, [20], averaging_rule="balance"), 100)
    np.testing.assert_array_equal(audit.remainder_x, 0)
    # η falling by 10 where 1.06 is allowed; and above the limit for constants.
    audit = theory.audit(*stagewise(1.0, 0.1, [20], averaging_rule="constant"), 100, smoothness=0.1)
    assert first(audit, "weight").tolist() == [20]
    assert not len(first(audit, "limit"))
    assert "η is divided by 10 there, 1.05694 is allowed" in audit.report()
    audit = theory.audit(1.0, 0.1, 10, smoothness=1.0)
    assert len(first(audit, "limit")) == 10
    audit = theory.audit(*stagewise(1.0, 0.1, [20], step_factor=1.05), 200, smoothness=0.1)
    assert "they hold at every step" in audit.report()


def test_the_report_begins_with_what_is_beyond_doubt() -> None:
    schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
    report = theory.audit(*hyperparams_from_sgdm(schedule, 0.9), 1_000, smoothness=5.0).report()
    assert report.startswith(
        "Nothing to change: α falls 10-fold at step 500. As primal averaging c"
    )
    assert re.search(r"rises from 0\.10\d? to 0\.526 over the 4\d steps before", report)
    assert report.index("before") < report.index("By the bound")
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
        assert report.startswith("A hyper-parameter is NaN or out of range at step")
        assert "hold at every step" not in report
    momentum = lambda k: jnp.where(k < 50, 0.9, jnp.nan)
    report = theory.audit(*hyperparams_from_sgdm(0.1, momentum), 100).report()
    assert "A hyper-parameter is NaN or out of range at step 50 and at 49 others" in report
    audit = theory.audit(lambda k: jnp.full_like(k, jnp.nan, float), 0.1, 100, smoothness=1.0)
    assert "η undefined, c 0.1\n" in audit.report()
    assert "at 99 others" in audit.report()
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
    assert "is NaN or out of range at step 61 and at 18 others" in audit.report()
    assert np.isfinite(audit.eta[:60]).all()


@pytest.mark.parametrize(("averaging", "num_steps"), [(0.0033, 300), (0.0033, 1_000), (0.05, 80)])
def test_averages_longer_than_the_run(averaging: float, num_steps: int) -> None:
    """x_n holds x_0 with the weight that a gradient of 0 at x_0 = 1, z = 0 leaves."""
    weight = (1 - averaging) ** num_steps
    report = theory.audit(1.0, averaging, num_steps).report()
    assert f"x ends with {100 * weight:.2g} % of x_0." in report
    enough = float(report.split("constant c of ")[1].split()[0])
    assert 0.003 < (1 - enough) ** num_steps < 0.01
    assert "of x_0" not in theory.audit(1.0, enough, num_steps).report()
    every = schedule_free_averaging(1.0)
    assert "of x_0" not in theory.audit(1.0, every, num_steps).report()
    assert "of x_0" in theory.audit_sgdm(1.0, lambda k: 1 - averaging, num_steps).report()


def test_one_step() -> None:
    audit = theory.audit(1.0, 0.1, 1, smoothness=1.0)
    assert "1 steps as SPA: η 1, c 0.1\n" in audit.report()
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
    labels = ["η", "α = ηc", "α = ηc", "c", "β", "c"]
    assert [axis.get_ylabel() for axis in figure.axes] == labels
    assert figure.get_suptitle().startswith("α spikes from 1 to 10 at step 19, as in Figure")
    spikes = [line for line in figure.axes[1].lines if line.get_marker() == "o"]
    assert spikes[0].get_xdata().tolist() == [19]
    plt.close(figure)
    # A rise of c over 42 steps of 100,000 is less than a pixel wide: α and c there once more.
    schedule = lambda k: jnp.where(k < 50_000, 0.1, 0.01)
    figure = theory.audit(*hyperparams_from_sgdm(schedule, 0.9), 100_000).plot()
    assert [axis.get_ylabel() for axis in figure.axes] == labels
    ((x, y),) = (line.get_data() for line in figure.axes[5].lines)
    assert len(x) < 200
    assert x[y.argmax()] == 49_999
    plt.close(figure)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.audit(1.0, 0.1, 0), f"`num_steps` {AT_LEAST_1}, got 0"),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 1e2),
            f"`num_steps` {AT_LEAST_1}, got 100.0",
        ),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 2.5),
            f"`num_steps` {AT_LEAST_1}, got 2.5",
        ),
        (lambda: theory.audit(1.0, 0.1, 9, smoothness=0.0), "`smoothness` must be None or finite"),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 9, smoothness="a"),
            "`smoothness` must be None or finite and > 0, got 'a'",
        ),
        (
            lambda: unchecked(theory.audit)(1.0, 0.1, 9, smoothness=jnp.ones(2)),
            "`smoothness` must be None or finite and > 0, got Array([1., 1.]",
        ),
        (lambda: theory.audit(-1.0, 0.1, 9), "`learning_rate` must be finite and >= 0, got -1.0"),
        (lambda: theory.audit(1.0, 1.1, 9), "`averaging` must be in [0, 1], got 1.1"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.slow
def test_figure_1(tmp_path: Path) -> None:
    """The values that define each panel."""
    with jax.numpy_dtype_promotion("standard"):  # what users have
        figures.main(["--out", str(tmp_path)])
        panels = figures.figure_1()
    of = {
        f"{title[:3]} {name}": values
        for title, series in panels.items()
        for name, values in series.items()
    }
    for name in ("figure1.png", "audit.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert {len(values) for values in of.values()} == {100}
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
    report = audit.report(verbose=True)
    told = [line.removeprefix("- ").split(":")[0] for line in report.splitlines()]
    assert [line for line in told if line in breaches] == broken[2:]
    assert [finding.kind for finding in audit.findings()] == ["average", "beta", "spike"]
    assert "coefficient" not in audit.report()
    assert list(theory.audit(1.0, 0.1, 6).breaches()) == list(breaches)[:6]


# --------------------------------------------------------------------------------- the verdict

STEPS = 10_000


def line(*points: tuple[float, float]) -> optax.Schedule:
    """Straight from point to point, (step, value)."""
    steps, values = (jnp.array(of, float) for of in zip(*points, strict=True))
    return lambda k: jnp.interp(k.astype(float), steps, values)


JUMPS = "jumps (a factor of 1.5 or more, in no ramp, above 1e-4 of the largest)."
SMOOTH = f"Nothing to change: neither α nor α/(1 − β) {JUMPS}"
RECIPES: dict[str, tuple[Any, Any, str]] = {
    "step decay, as ResNet": (
        optax.piecewise_constant_schedule(0.1, {3_000: 0.1, 6_000: 0.1, 9_000: 0.1}),
        0.9,
        r"Nothing to change: α falls 10-fold at step 3,000 and at 2 others\. As primal averaging c"
        r" rises from 0\.10\d to 0\.526 over the 4\d steps before, and z moves ahead: evaluate the"
        r" params, not z\.",
    ),
    "warm-up and cosine": (
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 500, STEPS),
        0.9,
        re.escape(SMOOTH),
    ),
    "one-cycle, momentum the other way round": (
        optax.cosine_onecycle_schedule(STEPS, 0.1),
        line((0, 0.95), (3_000, 0.85), (STEPS, 0.95)),
        re.escape(SMOOTH),
    ),
    "linear decay": (optax.linear_schedule(0.1, 0.0, STEPS), 0.9, re.escape(SMOOTH)),
    "warm-up, stable, decay": (
        line((0, 0.0), (500, 0.1), (8_000, 0.1), (STEPS, 0.0)),
        0.9,
        re.escape(SMOOTH),
    ),
    "inverse square root": (
        lambda k: 0.1 * jnp.minimum((k + 1.0) / 500, jnp.sqrt(500 / (k + 1.0))),
        0.9,
        re.escape(SMOOTH),
    ),
    "cosine with restarts": (
        lambda k: 0.05 * (1 + jnp.cos(jnp.pi * (k % 2_500) / 2_500)),
        0.9,
        r"α rises from 3\.\d+e-08 to 0\.1 at step 2,500 and at 2 others\. Check that it is meant,"
        r" as in a restart\.",
    ),
    "halved on a plateau": (
        lambda k: 0.1 * 0.5 ** (k // 1_500).astype(float),
        0.9,
        r"Nothing to change: α falls 2-fold at step 1,500 and at 5 others\. As primal averaging c"
        r" rises from 0\.10\d to 0\.182 over the 3\d steps before.*",
    ),
    "triangle, as airbench": (
        line((0, 0.02), (2_000, 0.1), (STEPS, 0.007)),
        0.85,
        re.escape(SMOOTH),
    ),
    "cosine to a tenth, as GPT-3": (
        optax.warmup_cosine_decay_schedule(0.0, 6e-4, 375, 9_000, 6e-5),
        0.9,
        re.escape(SMOOTH),
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_verdict_on_recipes_of_the_field(name: str) -> None:
    learning_rate, momentum, verdict = RECIPES[name]
    with jax.numpy_dtype_promotion("standard"):
        audit = theory.audit_sgdm(learning_rate, momentum, STEPS)
    assert re.fullmatch(verdict, audit.report().splitlines()[0])
    assert not any(finding.needs_change for finding in audit.findings())


def test_what_to_type_helps() -> None:
    """Each form that the report suggests has nothing left that needs a change."""
    needs_change = lambda audit: [f.kind for f in audit.findings() if f.needs_change]
    remedy = (
        "Let η fall by less than c per step (the `step_factor` of `stagewise` or `momentum_drop`),"
        " or give the recipe as SGD+M, to `spa_from_sgdm`."
    )
    schedules = {
        rule: functools.partial(stagewise, 10.0, 0.1, [200], averaging_rule=rule)
        for rule in ("constant", "scale", "balance")
    } | {"hold": functools.partial(momentum_drop, 10.0, 0.1, 200, hold="alpha")}
    for name, schedule in schedules.items():
        abrupt = theory.audit(*schedule(), 400)
        expected = {"scale": ["spike"], "balance": ["beta", "spike"]}.get(name, ["beta"])
        assert needs_change(abrupt) == expected
        assert abrupt.report().splitlines()[0].endswith(remedy)
        assert not needs_change(theory.audit(*schedule(step_factor=1 / (1 - 0.099)), 400))
    fall = lambda k: jnp.where(k < 200, 1.0, 0.1)
    report = theory.audit(fall, 0.1, 400).report()
    assert report.startswith(
        f"β is 9 at step 200: no SGD+M has that. η falls by 90 % there, where c is 10 %. {remedy}\n"
        "α falls 10-fold at step 200.\n"
    )
    assert not needs_change(theory.audit_sgdm(lambda k: 0.1 * fall(k), 0.9, 400))
    # To change c a step earlier makes the spike two steps long.
    eta, c = stagewise(10.0, 0.1, [200])
    earlier = theory.audit(eta, lambda k: c(k + 1), 400)
    np.testing.assert_allclose(earlier.alpha[197:202], [1, 10, 10, 1, 1], rtol=1e-5)


def test_a_small_c() -> None:
    hyperparams = stagewise(1.0, 1e-3, [20], averaging_rule="constant", step_factor=1.01)
    assert "η falls by 0.99 % there, where c is 0.1 %." in theory.audit(*hyperparams, 50).report()
    report = theory.audit(1.0, 0.0, 50).report()
    assert report.startswith("α is 0 at every step: the params do not move.")
    # Where x stands still, β = 1 for constants; z moves on, and x sets out after it.
    kinds = [f.kind for f in theory.audit(1.0, lambda k: jnp.where(k < 9, 0, 0.1), 50).findings()]
    assert kinds == ["average", "rise"]


def step_at(start: int, before: float, after: float) -> optax.Schedule:
    return lambda k: jnp.where(k < start, before, after)


# The hyper-parameters below a jump by a factor, and above it.
PAIRS: dict[str, tuple[Any, Any]] = {
    "α": (theory.audit_sgdm, lambda f: ((0.1 / f, 0.9), (0.1, 0.9))),
    "β": (theory.audit_sgdm, lambda f: ((0.1, 0.5), (0.1, 1 - 0.5 / f))),
    "α/(1 − β)": (theory.audit_sgdm, lambda f: ((0.1, 0.5), (0.1 * f**0.5, 1 - 0.5 / f**0.5))),
    "η": (theory.audit, lambda f: ((0.1 / f, 0.1), (0.1, 0.1))),
    "c": (theory.audit, lambda f: ((0.1, 0.5 / f), (0.1, 0.5))),
}


@pytest.mark.parametrize("factor", [1.5, slow(30.0), slow(1_100.0), 1e4])
@pytest.mark.parametrize("of", PAIRS)
def test_every_jump_is_found(of: str, factor: float) -> None:
    """Up and down, at any step: also right after the first, and in the last."""
    make, pairs = PAIRS[of]
    for start, sign in itertools.product((1, 50, 99), (1, -1)):
        before, after = pairs(factor)[::sign]
        audit = make(*(step_at(start, *of) for of in zip(before, after, strict=True)), 100)
        found = [finding for finding in audit.findings() if finding.kind != "average"]
        kinds = [finding.kind for finding in found if finding.steps == [start]]
        falls = ["beta", "drop"] if of == "η" else ["drop"]  # at a constant c
        assert kinds == (["rise"] if sign > 0 else falls)
        nothing = audit.report().startswith("Nothing to change")
        assert nothing == (kinds == ["drop"] and found == audit.findings())


@pytest.mark.parametrize("value", [1e-4, 1e-5])
def test_a_jump_from_a_tiny_rate(value: float) -> None:
    audit = theory.audit_sgdm(step_at(50, value, 0.11), 0.9, 100)
    assert audit.report().startswith(f"α rises from {value:.3g} to 0.11 at step 50. Check that")


def test_ramps_are_no_jumps() -> None:
    """Over five steps or more. The report says how small a jump may be that it does not name."""
    jumps = lambda audit: [f for f in audit.findings() if f.kind != "average"]
    for num_steps in (4, 5, 30):
        up = line((0, 0), (10, 0), (10 + num_steps, 0.1), (99, 0.1))
        down = line((0, 0.1), (10, 0.1), (10 + num_steps, 0), (99, 0))
        for audit in (theory.audit_sgdm(up, 0.9, 100), theory.audit_sgdm(down, 0.9, 100)):
            assert bool(jumps(audit)) == (num_steps < 5)
    assert not jumps(theory.audit_sgdm(step_at(50, 0.1, 0.14), 0.9, 100))
    tiny = line((0, 1e-6), (49, 1e-6), (50, 9e-6), (60, 9e-6), (90, 0.1))
    assert not jumps(theory.audit_sgdm(tiny, 0.9, 100))
    assert f"neither α nor η {JUMPS}" in theory.audit(1.0, 0.1, 50).report()


def test_a_spike_of_a_recipe_is_not_blamed_on_c() -> None:
    report = theory.audit_sgdm(lambda k: jnp.where(k == 50, 1.0, 0.0), 0.9, 100).report()
    assert report.startswith("α spikes from 0 to 1 at step 50. Make the change gradual.")


def test_rises_and_betas_out_of_range_are_found() -> None:
    kinds = lambda audit: [finding.kind for finding in audit.findings()]
    assert kinds(theory.audit(*momentum_drop(1.0, 0.1, 50), 100)) == ["rise"]
    # Figure 1(e), two steps long.
    eta, c = (
        table(jnp.where(jnp.arange(100) < k, *of)) for k, of in ((20, (10, 1)), (18, (0.1, 1)))
    )
    assert kinds(theory.audit(eta, c, 100)) == ["rise", "drop"]
    for beta in (1.5, -0.5):
        audit = theory.audit_sgdm(0.1, lambda k, beta=beta: jnp.where(k == 5, beta, 0.9), 12)
        assert audit.report().startswith("A hyper-parameter is NaN or out of range at step 5.")


def test_the_tail_of_a_decay_to_0_needs_no_change() -> None:
    """β is over 1 there, as η falls faster and faster, but nothing moves any more."""
    audit = theory.audit(lenient(optax.cosine_decay_schedule(1.0, 1_000)), 0.1, 1_000)
    assert audit.breaches()["β is 1 or more"].sum() > 5
    assert audit.report().startswith(f"Nothing to change: neither α nor η {JUMPS}")


def test_sgdm_is_audited_as_its_primal_averaging() -> None:
    schedule = lambda k: jnp.where(k < 500, 0.1, 0.01)
    ours = theory.audit_sgdm(schedule, 0.9, 1_000, smoothness=5.0)
    by_hand = theory.audit(*hyperparams_from_sgdm(schedule, 0.9), 1_000, smoothness=5.0)
    for value, expected in zip(ours, by_hand, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_momentum_in_the_place_of_averaging_is_noticed() -> None:
    for call in (
        lambda: theory.audit(0.1, 0.9, 100),
        lambda: spa(0.1, 0.9),
        lambda: spa_adamw(1e-3, 0.9),
    ):
        with pytest.warns(UserWarning, match="0.9 means a momentum of 0.1. For a momentum of 0.9"):
            call()
    with pytest.raises(ValueError, match=re.escape("unpack it, as in `spa(*stagewise(...))`")):
        unchecked(spa)(stagewise(1.0, 0.1, [10]))


def test_the_reports_of_the_docs() -> None:
    docs = (Path(__file__).parent.parent / "docs/schedules.md").read_text(encoding="utf-8")
    fall, rise = step_at(200, 1.0, 0.1), step_at(500, 0.5, 0.99)
    for audit in (
        theory.audit(*stagewise(10.0, 0.1, [200]), 400),
        theory.audit(fall, 0.1, 400),
        theory.audit_sgdm(0.1, rise, 1_000),
    ):
        assert f"> {audit.report().splitlines()[0]}\n" in docs


@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_the_advice_for_a_few_steps_is_an_averaging(num_steps: int) -> None:
    assert "With a constant c of 1 it" in theory.audit_sgdm(0.1, 0.9, num_steps).report()


def test_nesterov_momentum() -> None:
    """As `spa_from_sgdm` makes it, but for the last step, after which any w will do."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.3, 20, 100)
    with jax.numpy_dtype_promotion("standard"):
        found = theory.audit_sgdm(rate, 0.9, 100, nesterov=True)
        tx, x = spa_from_sgdm(rate, 0.9, nesterov=True), jnp.ones(1)
        step = lambda state, _: (new := tx.update(x, state, x)[1], (new.eta, new.c))
        eta, c = jax.lax.scan(step, tx.init(x), None, 100)[1]
    np.testing.assert_allclose(found.eta[:-1], eta[:-1], rtol=1e-4)
    np.testing.assert_allclose(found.c[:-1], c[:-1], rtol=1e-4)
    assert found.report(verbose=True).startswith("Nothing to change: neither α nor α/(1 − β) jumps")
    without = theory.audit_sgdm(0.1, 0.0, 10, nesterov=True)
    np.testing.assert_allclose((without.eta, without.c), [[0.1] * 10, [1.0] * 10], rtol=1e-6)
    with pytest.raises(ValueError, match=r"`smoothness` must be None with Nesterov .* got 1\.0"):
        theory.audit_sgdm(0.1, 0.9, 10, nesterov=True, smoothness=1.0)
