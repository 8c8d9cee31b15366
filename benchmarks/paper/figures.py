"""The figures of the paper, from the library's own functions and from runs on CIFAR-10.

    python benchmarks/paper/figures.py

writes figure1.png and figure1.csv, and for the recipe that most people have audit.png. With

    python benchmarks/paper/train_cifar10.py --optimizer all --seeds 5 --out runs
    python benchmarks/paper/train_cifar10.py --optimizer spa-eta --track --seeds 5 --out tracked
    python benchmarks/paper/figures.py --runs runs --tracked tracked

figures 2, 3 and 4 as well, each as a PNG and a table of its numbers.

Figure 1 maps hyper-parameters from one form of momentum to the other, over 100 steps with a change
at step 20, α = 1 and β = 0.9. (a) and (b) have beside the paper's recursion the solution that looks
ahead: the growth comes from the choice of η_0, not from the schedule.

Figure 2 is the gauge of momentum over a run, and Figure 3 training with momentum, and with momentum
dropped: with η held or α held, and by the gauge. What α held does to the effective step, kept
momentum with η ÷ 10 shows. Figure 4 is the training loss around the first drop of the learning
rate, abrupt or gradual, and the test accuracy of all the optimizers of train_cifar10.py. Beside the
paper's curves is SGD+M in PyTorch's form, as sgdm.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from command_line import UserError, plus_minus
from optimizers import CIFAR10, OPTIMIZERS
from report import Runs, mean_and_error, name_lost_curves, over_seeds, read_runs

from spa_optax import hyperparams_from_sgdm, hyperparams_to_sgdm, stagewise, theory

NUM_STEPS, CHANGE = 100, 20
ALPHA, BETA = 1.0, 0.9
ETA, C = ALPHA / (1 - BETA), 1 - BETA
RATE = 1.05  # of (f): a factor of 10 takes 48 steps, so that it arrives; the paper's is 1.0005

Series = dict[str, np.ndarray]


def from_sgdm(learning_rate: optax.ScalarOrSchedule, momentum: optax.ScalarOrSchedule) -> Series:
    """η and c of a recipe of SGD+M: by the paper's recursion, and looking ahead."""
    counts = np.arange(NUM_STEPS)
    over = lambda h: np.array([h(k) if callable(h) else h for k in counts], float)
    forward_eta, forward_c = theory.forward_recursion(over(learning_rate), over(momentum))
    eta, c = (over(h) for h in hyperparams_from_sgdm(learning_rate, momentum))
    return {
        "η forward": forward_eta,
        "c forward": forward_c,
        "η look-ahead": eta,
        "c look-ahead": c,
    }


def to_sgdm(learning_rate: optax.ScalarOrSchedule, averaging: optax.ScalarOrSchedule) -> Series:
    """α and β of a recipe of SPA."""
    counts = jnp.arange(NUM_STEPS)
    alpha, beta = hyperparams_to_sgdm(learning_rate, averaging)
    return {"α": np.asarray(alpha(counts)), "β": np.asarray(beta(counts))}  # pyright: ignore[reportCallIssue]


def figure_1() -> dict[str, Series]:
    """The six panels."""
    changed = lambda before, after: lambda k: jnp.where(k < CHANGE, before, after)
    # c_k changes at k = CHANGE, and `averaging` at count k is c_{k+1}.
    increased = lambda k: jnp.where(k < CHANGE - 1, C, 10 * C)
    return {
        "(a) α ÷ 10": from_sgdm(changed(ALPHA, ALPHA / 10), BETA),
        "(b) β from 0.9 to 0.8": from_sgdm(ALPHA, changed(BETA, 0.8)),
        "(c) η ÷ 10": to_sgdm(*stagewise(ETA, C, [CHANGE], averaging_rule="constant")),
        "(d) c × 10": to_sgdm(ETA, increased),
        "(e) η ÷ 10 and c × 10": to_sgdm(*stagewise(ETA, C, [CHANGE])),
        f"(f) as (e), by {RATE} a step": to_sgdm(*stagewise(ETA, C, [CHANGE], step_factor=RATE)),
    }


def draw_figure_1(panels: dict[str, Series], path: Path) -> None:
    """Two axes a panel: η over c from SGD+M, α over β to it."""
    figure, axes = plt.subplots(4, 3, figsize=(10, 9), sharex=True, layout="constrained")
    slots = [axes[row : row + 2, column] for row in (0, 2) for column in range(3)]
    for (title, series), (upper, lower) in zip(panels.items(), slots, strict=True):
        upper.set_title(title, fontsize=10)
        for name, values in series.items():
            symbol, _, form = name.partition(" ")
            axis = upper if symbol in "ηα" else lower
            style = {"color": "C3"} if form == "forward" else {"color": "C0"}
            axis.plot(values, label=form or None, drawstyle="steps-mid", **style)
            axis.set_ylabel(symbol)
        if "η forward" in series:
            upper.set_yscale("log")
            lower.set_yscale("log")
            upper.legend(frameon=False, fontsize=8)
        else:
            upper.set_ylim(0, 1.1 * max(series["α"]))
            lower.set_ylim(bottom=-0.02)
            lower.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_csv(path: Path, index: str, counts: Sequence[int] | np.ndarray, columns: Series) -> None:
    """A row a step or an epoch, a column a series."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([index, *columns])
        for i, count in enumerate(counts):
            writer.writerow([count, *(f"{values[i]:.7g}" for values in columns.values())])


# ----------------------------------------------------------------------------- figures 2, 3 and 4


def last(runs: Runs, name: str, factor: float = 1, key: str = "test_accuracy") -> np.ndarray:
    """A metric of the last epoch, of each seed; a null is NaN."""
    return factor * np.array([run[-1][key] for run in runs[name]], float)


def of_steps(runs: list[list[dict[str, Any]]], key: str) -> np.ndarray:
    """What was written at every step, (seeds, steps): the loss, or what `momentum_report` said."""
    values = lambda line: line["losses"] if key == "loss" else line["momentum"][key]
    try:
        return np.array([[v for line in run for v in values(line)] for run in runs], float)
    except KeyError:
        raise UserError(f"runs must have {key} of every step: train with --track") from None


def with_error(values: np.ndarray) -> str:
    """Mean ± standard error over seeds, in 16 places."""
    return f"{plus_minus(*mean_and_error(values)):>16}"


def over(runs: list[Any]) -> str:
    """For titles."""
    seeds = command_line.count(len(runs), "seed")
    return f"mean over {seeds} ± standard error" if len(runs) > 1 else seeds


def first_drop(num_steps: int) -> int:
    """The first step with the lower rate."""
    return round(CIFAR10.drops[0] / CIFAR10.epochs * num_steps)


def figure_2(runs: list[list[dict[str, Any]]], out: Path) -> None:
    """Both terms, their ratio beside the noise level, and the alignment, at every step."""
    keys = ("iterate_term", "gradient_term", "gain", "noise_level", "alignment")
    found = {key: of_steps(runs, key) for key in keys}
    found["gain / noise_level"] = found["gain"] / found["noise_level"]
    curves = {key: mean_and_error(values) for key, values in found.items()}
    steps = np.arange(found["gain"].shape[1])
    panels = (keys[:2], keys[2:4], ("gain / noise_level",), keys[4:])
    figure, axes = plt.subplots(1, 4, figsize=(15, 4.2), layout="constrained")
    for axis, names in zip(axes, panels, strict=True):
        for name in names:
            mean, error = curves[name]
            axis.plot(steps, mean, label=name.replace("_", " "))
            axis.fill_between(steps, mean - error, mean + error, alpha=0.2)
        axis.set(xscale="log", xlabel="step", xlim=(1, len(steps)))
        if name_lost_curves(axis) and axis in axes[:2]:
            axis.set_yscale("log")
            ticks = (0.1, 0.2, 0.5, 1, 2, 5)
            axis.set_yticks(ticks, [str(tick) for tick in ticks])
            axis.set_yticks([], minor=True)
        for epoch in CIFAR10.drops:
            drop = epoch / CIFAR10.epochs * len(steps)
            axis.axvline(drop, color="0.8", linewidth=0.8, zorder=0)
        axis.legend(frameon=False)
    axes[0].set_ylabel("moving average")
    axes[1].set_ylabel("iterate term / gradient term")
    axes[2].set_ylabel("gain / noise level")
    axes[3].set_ylabel("cosine between −gradient and last step")
    axes[2].axhline(1, color="0.8", linewidth=0.8, zorder=0)
    axes[3].axhline(0, color="0.8", linewidth=0.8, zorder=0)
    figure.suptitle(f"{over(runs)}; η drops at the grey lines")
    figure.savefig(out / "figure2.png", dpi=150)
    plt.close(figure)
    columns = {}
    some = np.unique(np.geomspace(1, max(len(steps) - 1, 1), 200).astype(int))
    some = some[some < len(steps)]
    for key, (mean, error) in curves.items():
        columns |= {key: mean[some], f"{key} error": error[some]}
    write_csv(out / "figure2.csv", "step", steps[some], columns)


def table_of_figure_2(runs: list[list[dict[str, Any]]]) -> str:
    """Means ± standard errors over seeds."""
    gain, level = of_steps(runs, "gain"), of_steps(runs, "noise_level")
    alignment = of_steps(runs, "alignment")
    drop = first_drop(gain.shape[1])
    titles = ("gain", "noise level", "gain/noise level", "alignment")
    rows = [f"{'step':>6} " + "  ".join(f"{title:>16}" for title in titles)]
    wanted = {1, 2, 5, 10, 20, 50, 100, 200, 390, 1000, drop - 1, drop + 20, gain.shape[1] - 1}
    for step in sorted(wanted.intersection(range(1, gain.shape[1]))):  # a short run has fewer
        columns = (gain, level, gain / level, alignment)
        row = "  ".join(with_error(column[:, step]) for column in columns)
        rows.append(f"{step:6} {row}")
    return "\n".join(rows)


DROPPED = {
    "spa-eta": "momentum kept",
    "drop-eta": "dropped after epoch 1, η held",
    "until-noise": "dropped by the gauge, η held",
    "drop-alpha": "dropped after epoch 1, α held",
    "tenth": "kept, η ÷ 10 after epoch 1",
}


def figure_3(runs: Runs, out: Path) -> None:
    """Training loss and test error, with momentum and without."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    columns, epochs = {}, np.arange(1, len(runs["spa-eta"][0]) + 1)
    for name, label in DROPPED.items():
        loss, loss_error = over_seeds(runs[name], "train_loss")
        accuracy, error = over_seeds(runs[name], "test_accuracy")
        curves = ((loss, loss_error), (100 - 100 * accuracy, 100 * error))
        for axis, (mean, spread) in zip(axes, curves, strict=True):
            axis.plot(epochs, mean, marker="." if len(epochs) < 20 else "", label=label)
            axis.fill_between(epochs, mean - spread, mean + spread, alpha=0.2)
        columns |= {f"{name} loss": loss, f"{name} loss error": loss_error}
        columns |= {f"{name} test error": curves[1][0], f"{name} test error error": curves[1][1]}
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    name_lost_curves(axes[0])
    axes[0].set(xlabel="epoch", ylabel="training loss")
    axes[1].set(xlabel="epoch", ylabel="test error, %")
    axes[1].legend(frameon=False)
    figure.suptitle(over(runs["spa-eta"]))
    figure.savefig(out / "figure3.png", dpi=150)
    plt.close(figure)
    write_csv(out / "figure3.csv", "epoch", epochs, columns)


def table_of_figure_3(runs: Runs) -> str:
    """Means ± standard errors over seeds; differences are taken seed by seed."""
    titles = ("training loss", "test error, %", "− kept")
    rows = [f"{'last epoch':30} " + "  ".join(f"{title:>16}" for title in titles)]
    for name, label in DROPPED.items():
        error = 100 - last(runs, name, 100)
        kept = 100 - last(runs, "spa-eta", 100)
        columns = (last(runs, name, key="train_loss"), error, error - kept)
        rows.append(f"{label:30} " + "  ".join(with_error(column) for column in columns))
    c = of_steps(runs["until-noise"], "c")
    higher = [np.flatnonzero(row > row[0] * 1.0001) for row in c]
    began = ["never" if steps.size == 0 else str(steps[0]) for steps in higher]
    rows.append(f"first step at which the gauge drops momentum: {', '.join(began)}")
    return "\n".join(rows)


LIMIT = 2.0  # points of accuracy, of the third panel
AT_THE_DROP = ("sgdm", "spa-eta", "spa-abrupt", "spa-gradual")
BEFORE, AFTER, SMOOTHED = 100, 400, 10  # steps
WINDOWS = ((-60, 0), (0, 20), (20, 60), (60, 120), (120, 200))


def losses_around_the_drop(
    runs: Runs, before: int, after: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The training loss around the first drop: steps from it, and losses (seeds, steps).

    A short run has fewer than `before` and `after` steps.
    """
    found = {name: of_steps(runs[name], "loss") for name in AT_THE_DROP}
    num_steps = found["sgdm"].shape[1]
    drop = first_drop(num_steps)
    steps = np.arange(max(-before, -drop), min(after, num_steps - drop))
    return steps, {name: losses[:, steps + drop] for name, losses in found.items()}


def table_of_figure_4(runs: Runs) -> str:
    """Means ± standard errors over seeds; differences are taken seed by seed."""
    steps, around = losses_around_the_drop(runs, BEFORE, AFTER)
    # Those that a short run has.
    windows = [(a, b) for a, b in WINDOWS if steps[0] <= a and b - 1 <= steps[-1]]
    titles = [f"{start} to {end}" for start, end in windows]
    rows = ["training loss, mean over steps from the first drop, and its peak in the first 20"]
    rows.append(" " * 12 + "".join(f"{title:>18}" for title in [*titles, "peak"]))
    for name, losses in around.items():
        means = [losses[:, (steps >= a) & (steps < b)].mean(1) for a, b in windows]
        peak = losses[:, (steps >= 0) & (steps < 20)].max(1)
        rows.append(f"{name:12}" + "".join(f"  {with_error(m)}" for m in [*means, peak]))
    rows.append("")
    titles = ("training loss", "test accuracy, %", "− sgdm")
    rows.append(f"{'last epoch':13}" + "  ".join(f"{title:>16}" for title in titles))
    for name in runs:
        accuracy = last(runs, name, 100)
        columns = (last(runs, name, key="train_loss"), accuracy, accuracy - last(runs, "sgdm", 100))
        rows.append(f"{name:13}" + "  ".join(with_error(column) for column in columns))
    return "\n".join(rows)


def figure_4(runs: Runs, out: Path) -> None:
    """Three panels, and the numbers in them."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    color = {name: f"C{i}" for i, name in enumerate(runs)}
    seeds = command_line.count(len(runs["sgdm"]), "seed")
    columns = {}
    steps, around = losses_around_the_drop(runs, BEFORE + SMOOTHED - 1, AFTER)
    smoothed = min(SMOOTHED, len(steps))
    steps = steps[smoothed - 1 :]
    for name, losses in around.items():
        columns[name] = losses.mean(0)[smoothed - 1 :]
        smooth = np.convolve(losses.mean(0), np.full(smoothed, 1 / smoothed), mode="valid")
        axes[0].plot(steps, smooth, color=color[name], label=name)
    write_csv(out / "figure4_loss.csv", "step", steps, columns)
    name_lost_curves(axes[0])
    axes[0].axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes[0].set(
        xlabel="steps from the first drop",
        ylabel="training loss",
        title=f"mean over {seeds} and {command_line.count(smoothed, 'step')}",
    )
    axes[0].legend(frameon=False)
    columns, epochs = {}, np.arange(1, len(runs["sgdm"][0]) + 1)
    for i, name in enumerate(runs):
        mean, error = (100 * v for v in over_seeds(runs[name], "test_accuracy"))
        columns |= {name: mean, f"{name} error": error}
        marker = "." if len(epochs) < 20 else ""
        axes[1].plot(epochs, mean, color=color[name], marker=marker, label=name)
        difference, error = mean_and_error(last(runs, name, 100) - last(runs, "sgdm", 100))
        if not abs(difference) >= LIMIT:
            axes[2].errorbar(difference, i, xerr=error, color=color[name], marker="o", capsize=3)
        else:
            place = np.clip(difference, -0.9 * LIMIT, 0.9 * LIMIT)
            sign = "+" if difference > 0 else ""
            text = (sign + plus_minus(difference, error, ".1f")).replace("-", "−")
            side = "left" if difference < 0 else "right"
            axes[2].text(place, i, text, color=color[name], va="center", ha=side)
    write_csv(out / "figure4_accuracy.csv", "epoch", epochs, columns)
    axes[1].xaxis.get_major_locator().set_params(integer=True)
    axes[1].set(xlabel="epoch", ylabel="test accuracy, %", title=f"mean over {seeds}")
    axes[1].legend(frameon=False, fontsize=8)
    axes[2].set(
        xlabel="percentage points",
        xlim=(-LIMIT, LIMIT),
        title="test accuracy − sgdm" + (", ± standard error" if len(runs["sgdm"]) > 1 else ""),
    )
    axes[2].set_yticks(range(len(runs)), runs)
    for label, name in zip(axes[2].get_yticklabels(), runs, strict=True):
        label.set_color(color[name])
    axes[2].axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes[2].set_ylim(len(runs) - 0.5, -0.5)
    figure.savefig(out / "figure4.png", dpi=150)
    plt.close(figure)


# ------------------------------------------------------------------------------------------- audit


def audit_of_the_usual_recipe() -> theory.Audit:
    """Rate 0.1, momentum 0.9, drops by 10 at epochs 150 and 225 of 300, of 391 steps each."""
    drops = {150 * 391: 0.1, 225 * 391: 0.1}
    recipe = optax.piecewise_constant_schedule(0.1, drops)
    return theory.audit_sgdm(recipe, 0.9, 300 * 391)


def figures_of_runs(runs: Runs, tracked: Runs, out: Path) -> None:
    """Figures 3 and 4 of all optimizers, and Figure 2 of spa-eta, where these are given."""
    if runs:
        figure_3(runs, out)
        figure_4(runs, out)
        print(f"\n{table_of_figure_3(runs)}\n\n{table_of_figure_4(runs)}")
    if tracked:
        figure_2(tracked["spa-eta"], out)
        print(f"\n{table_of_figure_2(tracked['spa-eta'])}")


def main(argv: list[str] | None = None) -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("figures"), help="a folder")
    parser.add_argument("--runs", type=Path, help="the folder that train_cifar10.py wrote all of")
    parser.add_argument("--tracked", type=Path, help="the folder that it wrote spa-eta --track of")
    parser.add_argument("--seeds", type=int, default=5, help="how many it has of each")
    arguments = parser.parse_args(argv)
    command_line.check_positive(parser, arguments, "seeds")
    command_line.check_writable(parser, arguments, "out", "folder")
    # What is wrong with runs is found before anything is drawn.
    runs: Runs = {}
    tracked: Runs = {}
    if arguments.runs:
        runs = read_runs(arguments.runs, list(OPTIMIZERS), arguments.seeds)
    if arguments.tracked:
        tracked = read_runs(arguments.tracked, ["spa-eta"], arguments.seeds)
        of_steps(tracked["spa-eta"], "gain")
    arguments.out.mkdir(parents=True, exist_ok=True)
    panels = figure_1()
    draw_figure_1(panels, arguments.out / "figure1.png")
    columns = {
        f"{title.partition(' ')[0]} {name}": values
        for title, series in panels.items()
        for name, values in series.items()
    }
    write_csv(arguments.out / "figure1.csv", "step", range(NUM_STEPS), columns)
    audit = audit_of_the_usual_recipe()
    figure = audit.plot()
    figure.savefig(arguments.out / "audit.png", dpi=150)
    plt.close(figure)
    print(audit.report())
    figures_of_runs(runs, tracked, arguments.out)
    print(f"\nThe figures are in {arguments.out}")


if __name__ == "__main__":
    command_line.run(main)
