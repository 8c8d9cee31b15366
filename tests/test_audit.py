"""The audit, against the definitions; and the defining values of Figure 1."""

import functools
import itertools
from pathlib import Path
from typing import Any

import figures
import formulas
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, quick, table, unchecked, x64

import spa_optax
from spa_optax import hyperparams_from_sgdm, spa_from_sgdm, stagewise, theory
from spa_optax.theory import Audit


def kinds(audit: Audit, *, only_changes: bool = False) -> list[str]:
    """The kinds of findings, or only of those that need a change."""
    findings = audit.findings()
    return [
        f.kind for f in findings if f.kind not in ("rise", "drop") or not only_changes
    ]


def verdict(audit: Audit) -> str:
    """The first line of the report."""
    return audit.summary().splitlines()[0]


def step_at(start: int, before: float, after: float) -> optax.Schedule:
    """A schedule with one step."""
    return lambda k: jnp.where(k < start, before, after)


def line(*points: tuple[float, float]) -> optax.Schedule:
    """Straight from point to point, (step, value)."""
    steps, values = (jnp.array(column, float) for column in zip(*points, strict=True))
    return lambda k: jnp.interp(k.astype(float), steps, values)


def values(hyperparams: Any, counts: Any) -> Any:
    """Of a pair of schedules, compiled as one program."""
    return jax.jit(lambda counts: [h(counts) for h in hyperparams])(jnp.asarray(counts))


def test_arrays_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    etas, cs = rng.uniform(0.1, 2, 40), rng.uniform(0.1, 1, 40)
    k = np.arange(2, 40)
    with x64():
        schedules = table(jnp.asarray(etas)), table(jnp.asarray(cs))
        audit = theory.audit(*schedules, 40)
        sgdm = spa_optax.hyperparams_to_sgdm(*schedules)
        alpha, beta = values(sgdm[:2], np.arange(40))
    expected = {"eta": etas[k], "c": cs[k], "alpha": alpha[k], "beta": beta[k]}
    assert expected.keys() | {"is_from_sgdm"} == audit._asdict().keys()
    assert not audit.is_from_sgdm
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(audit, name)[k], value, rtol=1e-9)
    np.testing.assert_allclose(audit.beta[:2], (np.nan, beta[1]), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.999])
def test_recipes_of_sgdm(momentum: float) -> None:
    """The backward recursion over all steps is the look-ahead at each; `audit` of
    the pair is the same."""

    def schedule(k: Any) -> Any:
        return jnp.where(k < 10, k.astype(float) / 100, 0.1 * 0.99 ** k.astype(float))

    with x64():
        hyperparams = hyperparams_from_sgdm(schedule, momentum)
        audit = theory.audit_sgdm(schedule, momentum, 60)
        np.testing.assert_allclose(
            audit[:2], values(hyperparams, np.arange(60)), rtol=1e-7
        )
        np.testing.assert_allclose(audit.beta, momentum)
        again = theory.audit(*hyperparams, 60)
        for value, same in zip(audit[:3], again[:3], strict=True):
            np.testing.assert_allclose(value, same, rtol=1e-7)
    assert audit.c[0] == (momentum == 0)  # warm-up from zero


def test_a_schedule_of_high_momentum() -> None:
    """η_0 is Σ_j α_j β^j, in float64, which takes more than 2,000 terms."""
    rate, beta, num_steps = optax.cosine_decay_schedule(0.1, 10_000), 0.9995, 10_000
    with x64(), jax.numpy_dtype_promotion("standard"):
        alphas = np.asarray(rate(np.arange(num_steps)))
        expected = np.sum(alphas * beta ** np.arange(num_steps))
        for momentum in (beta, jnp.asarray(beta), lambda k: jnp.asarray(beta)):
            found = theory.audit_sgdm(rate, momentum, 2)
            np.testing.assert_allclose(found.eta[0], expected, rtol=1e-9)


def test_nesterov_momentum() -> None:
    """As `spa_from_sgdm` makes it, but for the last step, after which any w will do."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.3, 20, 100)
    with jax.numpy_dtype_promotion("standard"):
        found = theory.audit_sgdm(rate, 0.9, 100, nesterov=True)
        tx, x = spa_from_sgdm(rate, 0.9, nesterov=True), jnp.ones(1)

        def step(state: Any, _: Any) -> Any:
            _, new = tx.update(x, state, x)
            return new, (new.eta, new.c)

        eta, c = jax.lax.scan(step, tx.init(x), None, 100)[1]
    np.testing.assert_allclose(
        (found.eta[:-1], found.c[:-1]), (eta[:-1], c[:-1]), rtol=1e-4
    )
    assert verdict(found).startswith("Nothing to change")
    without = theory.audit_sgdm(0.1, 0.0, 10, nesterov=True)
    np.testing.assert_allclose(
        (without.eta, without.c), [[0.1] * 10, [1.0] * 10], rtol=1e-6
    )


def test_findings_of_figure_1() -> None:
    # (c): β spikes to 9 at 20. (e): α spikes at 19. (f): neither.
    audit = theory.audit(*stagewise(10.0, 0.1, [20], averaging_mode="constant"), 100)
    kind, text = audit.findings()[0]
    assert kind == "beta"
    assert "at step 20," in text
    np.testing.assert_allclose(audit.beta[20], 9, rtol=1e-5)
    audit = theory.audit(*stagewise(10.0, 0.1, [20]), 100)
    kind, text = audit.findings()[0]
    assert kind == "spike"
    assert "at step 19," in text
    audit = theory.audit(*stagewise(10.0, 0.1, [20], step_divisor=1.05), 100)
    assert not {"beta", "spike"} & {*kinds(audit)}


@pytest.mark.parametrize(
    ("make", "hyperparams", "first", "others"),
    [
        (theory.audit, (step_at(50, 0.1, jnp.nan), 0.1), 50, 49),
        (theory.audit, (line((0, 0.1), (20, -0.1)), 0.1), 11, 88),
        (theory.audit, (0.1, step_at(50, 0.1, 1.1)), 50, 49),
        (theory.audit_sgdm, (0.1, step_at(50, 0.9, 1.0)), 50, 49),
        (theory.audit_sgdm, (0.1, step_at(1, jnp.nan, 0.9)), 0, 0),
        (theory.audit_sgdm, (0.1, step_at(97, 0.9, -0.5)), 97, 2),
        # η, which is α_k + w_{k+1}, is positive there.
        (
            functools.partial(theory.audit_sgdm, nesterov=True),
            (line((0, 0.1), (20, -0.1), (40, 0.3)), step_at(5, 0.9, 0.0)),
            11,
            13,
        ),
        # The look-ahead counts what lies past the end of a schedule as 0.
        (theory.audit_sgdm, (line((0, 0.1), (121, -0.1)), 0.9), 61, 38),
        (
            theory.audit_sgdm,
            (lambda k: 0.1 * jnp.sqrt(1 - k.astype(float) / 60.5), 0.9),
            61,
            38,
        ),
    ],
)
def test_nan_and_out_of_range(
    make: Any, hyperparams: Any, first: int, others: int
) -> None:
    audit = make(*hyperparams, 100)
    (finding,) = audit.findings()
    assert finding.kind == "range"
    and_others = {0: "", 1: " and at 1 other"}.get(others, f" and at {others} others")
    assert finding.text.endswith(f"out of range at step {first}{and_others}.")
    assert np.isfinite(audit.eta[:first]).all()
    if make is theory.audit_sgdm and first == 61:
        recipe = hyperparams_from_sgdm(*hyperparams)
        np.testing.assert_allclose(audit[:2], values(recipe, np.arange(100)), rtol=1e-5)


@pytest.mark.parametrize("make", [theory.audit, theory.audit_sgdm])
def test_a_decay_may_end_a_rounding_error_below_0(make: Any) -> None:
    """As `optax.linear_schedule(1e-3, 0, 1_000)` does under `jax.jit`."""
    rates = jnp.linspace(1e-3, 0, 1_001).at[-1].set(-5e-11)
    assert verdict(make(table(rates), 0.5, 1_001)).startswith("Nothing to change")
    (finding,) = make(table(rates.at[-1].set(-1e-6)), 0.5, 1_001).findings()
    assert finding.kind == "range"


@pytest.mark.parametrize(
    ("averaging", "num_steps"), [(0.0033, 300), (0.0033, 1_000), (0.05, 80)]
)
def test_averages_longer_than_the_run(averaging: float, num_steps: int) -> None:
    """x_n holds x_0 with the weight that a gradient of 0 at x_0 = 1, z = 0 leaves."""
    weight, report = (
        (1 - averaging) ** num_steps,
        theory.audit(1.0, averaging, num_steps).summary(),
    )
    assert f"x ends with {100 * weight:.2g} % of x_0." in report
    enough = float(report.split("constant c of ")[1].split()[0])
    assert 0.003 < (1 - enough) ** num_steps < 0.01
    for c in (enough, spa_optax.schedule_free_averaging(1.0)):
        assert "average" not in kinds(theory.audit(1.0, c, num_steps))
    assert "average" in kinds(
        theory.audit_sgdm(1.0, lambda k: 1 - averaging, num_steps)
    )


@pytest.mark.slow
def test_picture(tmp_path: Path) -> None:
    """The site has that of a longer recipe."""
    audit = theory.audit_sgdm(step_at(60, 0.1, 0.01), 0.9, 99)
    figures.draw_audit(audit, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_steps", [0, 2.5])
def test_a_number_of_steps_is_refused(num_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"`num_steps`.*{num_steps}"):
        unchecked(theory.audit)(1.0, 0.1, num_steps)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"`learning_rate`.*-1.0"):
        theory.audit(-1.0, 0.1, 9)
    with pytest.raises(ValueError, match=r"`averaging`.*1.1"):
        theory.audit(1.0, 1.1, 9)
    with pytest.warns(UserWarning, match=r"`averaging`.*0.9.* 0.1"):
        theory.audit(0.1, 0.9, 100)


N = 10_000
RECIPES: dict[str, Any] = {
    "step decay, as ResNet": optax.piecewise_constant_schedule(
        0.1, {3_000: 0.1, 6_000: 0.1, 9_000: 0.1}
    ),
    "warm-up and cosine": optax.warmup_cosine_decay_schedule(0.0, 0.1, 500, N),
    "one-cycle, momentum the other way round": optax.cosine_onecycle_schedule(N, 0.1),
    "linear decay": optax.linear_schedule(0.1, 0.0, N),
    "warm-up, stable, decay": line((0, 0), (500, 0.1), (8_000, 0.1), (N, 0)),
    "inverse square root": lambda k: (
        0.1 * jnp.minimum((k + 1) / 500, jnp.sqrt(500 / (k + 1)))
    ),
    "cosine with restarts": lambda k: (
        0.05 * (1 + jnp.cos(jnp.pi * (k % 2_500) / 2_500))
    ),
    "halved on a plateau": lambda k: 0.1 * 0.5 ** (k // 1_500).astype(float),
    "triangle, as airbench": line((0, 0.02), (2_000, 0.1), (N, 0.007)),
    "cosine to a tenth, as GPT-3": optax.warmup_cosine_decay_schedule(
        0.0, 6e-4, 375, 9_000, 6e-5
    ),
}
MOMENTA = {  # of the others 0.9
    "one-cycle, momentum the other way round": line(
        (0, 0.95), (3_000, 0.85), (N, 0.95)
    ),
    "triangle, as airbench": 0.85,
}
JUMPS = {  # of the others neither α nor α/(1 − β) jumps
    "step decay, as ResNet": [("drop", "at step 3,000 and at 2 others")],
    "cosine with restarts": [("rise", "at step 2,500 and at 2 others")],
    "halved on a plateau": [("drop", "at step 1,500 and at 5 others")],
}


@pytest.mark.parametrize(
    "name",
    quick(
        RECIPES,
        "step decay, as ResNet",
        "cosine with restarts",
        "triangle, as airbench",
    ),
)
def test_the_verdict_on_recipes_of_the_field(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        audit = theory.audit_sgdm(RECIPES[name], MOMENTA.get(name, 0.9), N)
    expected = JUMPS.get(name, [])
    for finding, (kind, where) in zip(audit.findings(), expected, strict=True):
        assert finding.kind == kind
        assert where in finding.text
    assert not kinds(audit, only_changes=True)
    assert verdict(audit).startswith("Nothing to change") == ("restarts" not in name)


@pytest.mark.parametrize("c", [0.0125, 0.05, 0.1])
@pytest.mark.parametrize(
    "name", ["linear decay", "warm-up and cosine", "warm-up, stable, decay"]
)
def test_the_verdict_on_lr_decay_at_a_constant_averaging(name: str, c: float) -> None:
    """In the end η falls by more than c per step, and β is over 1."""
    with jax.numpy_dtype_promotion("standard"):
        audit = theory.audit(lambda k: RECIPES[name](10 * k), c, N // 10)
    assert np.nanmax(audit.beta) > 1
    assert verdict(audit).startswith("Nothing to change")


def test_the_remedy_helps() -> None:
    """Each form that the report suggests has nothing left that needs a change."""
    gradual = 1 / (1 - 0.099)
    expected = {
        "constant": ["beta"],
        "scale": ["spike"],
        "balance": ["beta", "spike"],
    }
    schedules = {
        rule: functools.partial(stagewise, 10.0, 0.1, [200], averaging_mode=rule)
        for rule in expected
    }
    schedules["hold"] = functools.partial(
        formulas.momentum_drop, 10.0, 0.1, 200, hold="alpha"
    )
    for name, schedule in schedules.items():
        abrupt = theory.audit(*schedule(), 400)
        assert kinds(abrupt, only_changes=True) == expected.get(name, ["beta"])
        remedy = "Let η fall by a smaller fraction than c in each step."
        assert remedy in verdict(abrupt)
        slow = theory.audit(*schedule(step_divisor=gradual), 400)
        assert not kinds(slow, only_changes=True)
    recipe = theory.audit_sgdm(step_at(200, 0.1, 0.01), 0.9, 400)
    assert not kinds(recipe, only_changes=True)
    # To change c a step earlier makes the spike two steps long.
    eta, c = stagewise(10.0, 0.1, [200])
    earlier = theory.audit(eta, lambda k: c(k + 1), 400)
    np.testing.assert_allclose(earlier.alpha[197:202], [1, 10, 10, 1, 1], rtol=1e-5)
    assert kinds(earlier) == ["rise", "drop"]


def test_print_shows_the_summary() -> None:
    audit = theory.audit(0.1, 0.1, 100)
    assert str(audit) == audit.summary()


def test_the_reports_of_the_docs() -> None:
    folder = Path(__file__).parent.parent / "docs"
    pages = [folder / name for name in ("audit.md", "momentum.md")]
    docs = "".join(page.read_text(encoding="utf-8") for page in pages)
    for audit in (
        theory.audit(step_at(200, 1e-3, 1e-4), 0.1, 400),
        theory.audit_sgdm(0.1, step_at(500, 0.5, 0.99), 1_000),
    ):
        assert f"> {verdict(audit)}\n" in docs


def test_verdicts_on_an_eta_and_c_of_ones_own() -> None:
    c_rises_first = theory.audit(*stagewise(10.0, 0.1, [200]), 400)
    assert verdict(c_rises_first) == (
        "α spikes from 1 to 10 at step 199, as in Figure 1(e): c rises a step before η "
        "falls. Let η fall by a smaller fraction than c in each step."
    )
    too_long = theory.audit(1.0, 0.0033, 300)
    assert verdict(too_long) == (
        "Averages over 1/c steps are too long for 300: x ends with 37 % of x_0. With a "
        "constant c of 0.017 it would be less than 1 %."
    )


# The hyper-parameters below a jump by a factor, and above it.
PAIRS: dict[str, tuple[Any, Any]] = {
    "α": (theory.audit_sgdm, lambda f: ((0.1 / f, 0.9), (0.1, 0.9))),
    "β": (theory.audit_sgdm, lambda f: ((0.1, 0.5), (0.1, 1 - 0.5 / f))),
    "α/(1 − β)": (
        theory.audit_sgdm,
        lambda f: ((0.1, 0.5), (0.1 * f**0.5, 1 - 0.5 / f**0.5)),
    ),
    "η": (theory.audit, lambda f: ((0.1 / f, 0.1), (0.1, 0.1))),
    "c": (theory.audit, lambda f: ((0.1, 0.5 / f), (0.1, 0.5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.5, 1e4])
@pytest.mark.parametrize("name", PAIRS)
def test_every_jump_is_found(name: str, factor: float) -> None:
    """Up and down, at any step: also right after the first, and in the last."""
    make, pairs = PAIRS[name]
    for start, sign in itertools.product((1, 50, 99), (1, -1)):
        before, after = pairs(factor)[::sign]
        audit = make(
            *(step_at(start, *pair) for pair in zip(before, after, strict=True)), 100
        )
        found = [finding for finding in audit.findings() if finding.kind != "average"]
        falls = ["beta", "drop"] if name == "η" else ["drop"]  # at a constant c
        expected = ["rise"] if sign > 0 else falls
        assert [
            finding.kind for finding in found if f"at step {start}" in finding.text
        ] == expected
        nothing = verdict(audit).startswith("Nothing to change")
        assert nothing == (expected == ["drop"] and found == audit.findings())


@pytest.mark.slow
def test_jumps_ramps_and_spikes_of_recipes() -> None:
    def jumps(rate: Any) -> bool:
        found = kinds(theory.audit_sgdm(rate, 0.9, 100))
        return "rise" in found or "drop" in found

    # A ramp over five steps or more is no jump, nor is a small change, nor one of tiny
    # rates.
    for length, low, high in itertools.product((4, 5, 30), (0, 0.1), (0, 0.1)):
        ramp = line((0, low), (10, low), (10 + length, high), (99, high))
        assert low == high or jumps(ramp) == (length < 5)
    assert not jumps(step_at(50, 0.1, 0.14))
    assert not jumps(line((0, 1e-6), (49, 1e-6), (50, 9e-6), (60, 9e-6), (90, 0.1)))
    # A spike of a recipe is not blamed on c.
    spike = theory.audit_sgdm(lambda k: jnp.where(k == 50, 1.0, 0.0), 0.9, 100)
    assert verdict(spike).startswith("α spikes from 0 to 1 at step 50.")


@pytest.mark.parametrize("num_steps", [10, 20, 30, 40, 50, 100])
def test_a_decay_that_ends_just_below_0_has_no_spikes(num_steps: int) -> None:
    decay = optax.linear_schedule(1e-3, 0.0, num_steps, transition_begin=200)
    audit = theory.audit(decay, 0.1, 400)
    assert -1e-9 < audit.eta.min() <= 0
    assert not kinds(audit, only_changes=True)


def test_a_rate_of_minus_0_is_0() -> None:
    found = theory.audit(lambda k: -step_at(50, -1.0, 0.0)(k), 0.1, 100)
    assert verdict(found).startswith("η falls from 1 to 0 at step 50")


def test_a_first_step_of_nesterov_momentum_moves() -> None:
    """By δ g alone: c is 0 where β_0 is."""
    found = theory.audit_sgdm(0.1, step_at(1, 0.0, 0.9), 1, nesterov=True)
    assert "standstill" not in kinds(found)


def test_where_x_stands_still() -> None:
    assert verdict(theory.audit(1.0, 0.0, 50)).startswith("α is 0 at every step")
    assert verdict(theory.audit(0.0, 0.1, 50)).startswith("α is 0 at every step")
    # Where x stands still, β = 1 for constants; z moves on, and x sets out after it.
    assert kinds(theory.audit(1.0, step_at(9, 0.0, 0.1), 50)) == ["average", "rise"]
    assert kinds(theory.audit(*formulas.momentum_drop(1.0, 0.1, 50), 100)) == ["rise"]
    # x goes on towards z while η is 0, though α is 0 at every step.
    audit = theory.audit(step_at(5, 1.0, 0.0), step_at(5, 0.0, 0.5), 50)
    assert not audit.alpha.any()
    assert "standstill" not in kinds(audit)
    # In the tail of a decay to 0 β is over 1, but nothing moves any more.
    audit = theory.audit(lenient(optax.cosine_decay_schedule(1.0, 1_000)), 0.1, 1_000)
    assert np.sum(audit.beta >= 1) > 5
    assert verdict(audit).startswith("Nothing to change: neither α nor η jumps")
