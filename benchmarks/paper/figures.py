"""The figures of the paper, from the library's own functions and from runs on CIFAR-10.

    python benchmarks/paper/figures.py

writes figure1.png, and for the recipe that most people have audit.png. With

    python benchmarks/paper/train_cifar10.py --optimizer all --seeds 5 --out runs
    python benchmarks/paper/train_cifar10.py --optimizer spa-eta \
        --track --seeds 5 --out tracked
    python benchmarks/paper/figures.py --runs runs --tracked tracked

figures 2, 3 and 4 as well, and tables of their numbers.

Figure 1 maps hyper-parameters from one form of momentum to the other, over 100 steps
with a change at step 20; (a) and (b) have beside the paper's recursion the solution
that looks ahead. Figure 2 is the gauge over a run, Figure 3 training with momentum kept
and dropped, and Figure 4 the training loss around the first drop of the learning rate.
"""

from pathlib import Path
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from command_line import UserError, mean_and_error
from formulas import forward_recursion
from optimizers import CIFAR10, OPTIMIZERS
from runs import Runs, last, of_epochs, read_runs, table

from spa_optax import hyperparams_from_sgdm, hyperparams_to_sgdm, stagewise, theory

NUM_STEPS, CHANGE = 100, 20
ALPHA, BETA = 1.0, 0.9
ETA, C = ALPHA / (1 - BETA), 1 - BETA
# of (f): a factor of 10 takes 48 steps, so that it arrives; the paper's is 1.0005
RATE = 1.05

Series = dict[str, np.ndarray]
GREY: Any = {"color": "0.8", "linewidth": 0.8, "zorder": 0}  # lines behind the curves


def values_of(hyperparam: optax.ScalarOrSchedule) -> np.ndarray:
    """Those of a number or a schedule at all steps."""
    if callable(hyperparam):
        return np.array([hyperparam(k) for k in range(NUM_STEPS)], float)
    return np.full(NUM_STEPS, hyperparam, float)


def step_function(before: float, after: float, change: int = CHANGE) -> optax.Schedule:
    def value(k: Any) -> jax.Array:
        return jnp.where(k < change, before, after)

    return value


def from_sgdm(
    learning_rate: optax.ScalarOrSchedule, momentum: optax.ScalarOrSchedule
) -> Series:
    """η and c of a recipe of SGD+M: by the paper's recursion, and looking ahead."""
    forward = forward_recursion(values_of(learning_rate), values_of(momentum))
    ahead = map(values_of, hyperparams_from_sgdm(learning_rate, momentum))
    names = ("η forward", "c forward", "η look-ahead", "c look-ahead")
    return dict(zip(names, (*forward, *ahead), strict=True))


def to_sgdm(
    learning_rate: optax.ScalarOrSchedule, averaging: optax.ScalarOrSchedule
) -> Series:
    """α and β of a recipe of SPA."""
    counts = jnp.arange(NUM_STEPS)
    alpha, beta, _ = hyperparams_to_sgdm(learning_rate, averaging)
    return {"α": np.asarray(alpha(counts)), "β": np.asarray(beta(counts))}  # pyright: ignore[reportCallIssue]


def figure_1() -> dict[str, Series]:
    """The six panels."""
    # c_k changes at k = CHANGE, and `averaging` at count k is c_{k+1}.
    increased = step_function(C, 10 * C, CHANGE - 1)
    return {
        "(a) α ÷ 10": from_sgdm(step_function(ALPHA, ALPHA / 10), BETA),
        "(b) β from 0.9 to 0.8": from_sgdm(ALPHA, step_function(BETA, 0.8)),
        "(c) η ÷ 10": to_sgdm(*stagewise(ETA, C, [CHANGE], averaging_mode="constant")),
        "(d) c × 10": to_sgdm(ETA, increased),
        "(e) η ÷ 10 and c × 10": to_sgdm(*stagewise(ETA, C, [CHANGE])),
        f"(f) as (e), by {RATE} a step": to_sgdm(
            *stagewise(ETA, C, [CHANGE], step_divisor=RATE)
        ),
    }


def draw_figure_1(panels: dict[str, Series], path: Path) -> None:
    """Two axes a panel: η over c from SGD+M, α over β to it."""
    figure, axes = plt.subplots(
        4, 3, figsize=(10, 9), sharex=True, layout="constrained"
    )
    slots = [axes[row : row + 2, column] for row in (0, 2) for column in range(3)]
    for (title, series), (upper, lower) in zip(panels.items(), slots, strict=True):
        for name, values in series.items():
            symbol, _, form = name.partition(" ")
            axis, color = (
                upper if symbol in "ηα" else lower,
                "C3" if form == "forward" else "C0",
            )
            axis.plot(values, label=form or None, drawstyle="steps-mid", color=color)
            axis.set_ylabel(symbol)
        upper.set_title(title, fontsize=10)
        lower.set_xlabel("step")
        if "η forward" in series:
            plt.setp((upper, lower), yscale="log")
            upper.legend(frameon=False, fontsize=8)
        else:
            upper.set_ylim(bottom=0)
            lower.axhline(1, **GREY)
    save(figure, path)


def draw_audit(audit: theory.Audit, path: Path) -> None:
    """η, c, α and β at all steps, and close to the largest change of α."""
    steps = np.arange(len(audit.eta))
    k = np.abs(np.diff(audit.alpha)).argmax() + 1
    figure, axes = plt.subplots(
        4, 2, figsize=(12, 9), sharex="col", layout="constrained"
    )
    figure.suptitle(audit.summary().splitlines()[0])
    for row, name, values in zip(axes, ("η", "c", "α", "β"), audit[:4], strict=True):
        for axis, shown in zip(row, (steps, steps[k - 50 : k + 20]), strict=True):
            axis.plot(shown, values[shown])
            axis.set(ylabel=name, yscale="log" if name in "ηα" else "linear")
    plt.setp(axes[-1], xlabel="step")
    save(figure, path)


def band(axis: Any, x: np.ndarray, values: np.ndarray, label: str) -> None:
    """The mean over seeds, and a band of one standard error."""
    mean, error = mean_and_error(values)
    axis.plot(x, mean, marker="." if len(x) < 20 else "", label=label)
    axis.fill_between(x, mean - error, mean + error, alpha=0.2)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    plt.close(figure)


def of_steps(runs: list[list[dict[str, Any]]], key: str) -> np.ndarray:
    """What was written at every step, (seeds, steps): the loss, or what
    `momentum_report` said.
    """

    def values(line: dict[str, Any]) -> list[float]:
        return line["losses"] if key == "loss" else line["momentum"][key]

    try:
        return np.array(
            [[v for line in run for v in values(line)] for run in runs], float
        )
    except KeyError:
        raise UserError(
            f"runs must have {key} of every step: train with --track"
        ) from None


def over(runs: list[Any]) -> str:
    """For titles."""
    return f"mean over {command_line.count(len(runs), 'seed')} ± standard error"


def first_drop(num_steps: int) -> int:
    """The first step with the lower rate."""
    return round(CIFAR10.drops[0] / CIFAR10.epochs * num_steps)


def around_drop(losses: np.ndarray, start: int, end: int) -> np.ndarray:
    """The losses of steps `start` to `end`, counted from the first drop."""
    drop = first_drop(losses.shape[1])
    return losses[:, drop + start : drop + end]


PANELS = {
    "moving average": ("iterate_term", "gradient_term"),
    "iterate term / gradient term": ("gain", "noise_level"),
    "gain / noise level": ("gain / noise_level",),
}


def figure_2(runs: list[list[dict[str, Any]]], out: Path) -> str:
    """Both terms, and their ratio beside the noise level, at every step."""
    keys = ("iterate_term", "gradient_term", "gain", "noise_level")
    found = {key: of_steps(runs, key) for key in keys}
    found["gain / noise_level"] = found["gain"] / found["noise_level"]
    num_steps = found["gain"].shape[1]
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.2), layout="constrained")
    for axis, (label, names) in zip(axes, PANELS.items(), strict=True):
        for name in names:
            band(axis, np.arange(num_steps), found[name], name.replace("_", " "))
        axis.set(xscale="log", xlabel="step", xlim=(1, num_steps), ylabel=label)
        for epoch in CIFAR10.drops:
            axis.axvline(epoch / CIFAR10.epochs * num_steps, **GREY)
        axis.legend(frameon=False)
    plt.setp(axes[:2], yscale="log")
    axes[2].axhline(1, **GREY)
    figure.suptitle(f"{over(runs)}; η drops at the grey lines")
    save(figure, out / "figure2.png")
    titles = ("gain", "noise_level", "gain / noise_level")
    drop = first_drop(num_steps)
    steps = [1, 2, 5, 10, 20, 50, 100, 200, 390, 1000]
    steps += [drop - 1, drop + 20, num_steps - 1]
    rows = {
        str(k): [found[title][:, k] for title in titles] for k in steps if k < num_steps
    }
    return table(titles, rows)


DROPPED = {
    "spa-eta": "momentum kept",
    "drop-eta": "dropped after epoch 1, η held",
    "drop-alpha": "dropped after epoch 1, α held",
    "tenth": "kept, η ÷ 10 after epoch 1",
}


def figure_3(runs: Runs, out: Path) -> str:
    """Training loss and test error, with momentum and without; differences are by
    seed.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows, epochs = {}, np.arange(1, len(runs["spa-eta"][0]) + 1)
    kept = last(runs, "spa-eta", "test_accuracy")
    for name, label in DROPPED.items():
        band(axes[0], epochs, of_epochs(runs[name], "train_loss"), label)
        band(axes[1], epochs, 100 - 100 * of_epochs(runs[name], "test_accuracy"), label)
        accuracy = last(runs, name, "test_accuracy")
        rows[label] = last(runs, name, "train_loss"), 100 - accuracy, kept - accuracy
    axes[0].set(xlabel="epoch", ylabel="training loss")
    axes[1].set(xlabel="epoch", ylabel="test error, %")
    axes[1].legend(frameon=False)
    figure.suptitle(over(runs["spa-eta"]))
    save(figure, out / "figure3.png")
    return table(("training loss", "test error, %", "− kept"), rows)


AT_THE_DROP = ("sgdm", "spa-eta", "spa-abrupt", "spa-gradual")
BEFORE, AFTER, SMOOTHED = 100, 400, 10  # steps
WINDOWS = ((-60, 0), (0, 20), (20, 60), (60, 120), (120, 200))


def figure_4(runs: Runs, out: Path) -> str:
    """The training loss around the first drop. The tables also have test accuracies;
    differences are by seed.
    """
    figure, axis = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
    at_the_drop, at_the_end = {}, {}
    for i, name in enumerate(runs):
        if name in AT_THE_DROP:
            losses = of_steps(runs[name], "loss")
            means = [around_drop(losses, *window).mean(1) for window in WINDOWS]
            at_the_drop[name] = [*means, around_drop(losses, 0, 20).max(1)]
            around = around_drop(losses, -BEFORE - SMOOTHED + 1, AFTER).mean(0)
            smooth = np.convolve(around, np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
            axis.plot(np.arange(-BEFORE, AFTER), smooth, color=f"C{i}", label=name)
    of_sgdm = last(runs, "sgdm", "test_accuracy")
    for name, of_seeds in runs.items():
        end = 100 * of_epochs(of_seeds, "test_accuracy")[:, -1]
        at_the_end[name] = last(runs, name, "train_loss"), end, end - of_sgdm
    axis.axvline(0, **GREY)
    seeds = command_line.count(len(of_sgdm), "seed")
    axis.set(
        title=f"mean over {seeds} and {SMOOTHED} steps",
        xlabel="steps from the first drop",
        ylabel="training loss",
    )
    axis.legend(frameon=False)
    save(figure, out / "figure4.png")
    titles = [*(f"{start} to {end}" for start, end in WINDOWS), "peak of the first 20"]
    text = f"training loss from the first drop\n{table(titles, at_the_drop)}\n\n"
    return text + table(("training loss", "test accuracy, %", "− sgdm"), at_the_end)


def main(argv: list[str] | None = None) -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="a folder")
    parser.add_argument(
        "--runs", type=Path, help="the folder that train_cifar10.py wrote all of"
    )
    parser.add_argument(
        "--tracked", type=Path, help="the folder that it wrote spa-eta --track of"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many it has of each")
    arguments = parser.parse_args(argv)
    command_line.check_positive(parser, arguments, "seeds")
    command_line.check_writable(parser, arguments, "out", "folder")
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    draw_figure_1(figure_1(), out / "figure1.png")
    # The usual recipe: drops by 10 at epochs 150 and 225 of 300, of 391 steps each.
    drops: dict[int, float] = {150 * 391: 0.1, 225 * 391: 0.1}
    audit = theory.audit_sgdm(
        optax.piecewise_constant_schedule(0.1, drops), 0.9, 300 * 391
    )
    draw_audit(audit, out / "audit.png")
    print(audit.summary())
    if arguments.runs:
        runs = read_runs(arguments.runs, list(OPTIMIZERS), arguments.seeds)
        print(f"\n{figure_3(runs, out)}\n\n{figure_4(runs, out)}")
    if arguments.tracked:
        tracked = read_runs(arguments.tracked, ["spa-eta"], arguments.seeds)
        print(f"\n{figure_2(tracked['spa-eta'], out)}")
    print(f"\nThe figures are in {out}")


if __name__ == "__main__":
    command_line.run(main)
