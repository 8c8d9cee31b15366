"""The figures of the paper, from the library's own functions and from runs on CIFAR-10.

    python examples/figures.py

writes figure1.png and figure1.csv, and for the recipe that most people have audit.png. With

    python examples/cifar10.py --optimizer all --seeds 5 --out runs
    python examples/figures.py --runs runs

figure4.png, figure4_loss.csv and figure4_accuracy.csv as well.

Figure 1 maps hyper-parameters from one form of momentum to the other, over 100 steps with a change
at step 20, α = 1 and β = 0.9. (a) and (b) have beside the paper's recursion the solution that looks
ahead: the growth comes from the choice of η_0, not from the schedule.

Figure 4 is the training loss around the first drop of the learning rate, abrupt or gradual, and the
test accuracy of all the optimizers of cifar10.py. Beside the paper's curves is SGD+M in PyTorch's
form, as sgdm.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import cifar10
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

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
        f"(f) as (e), by {RATE} a step": to_sgdm(*stagewise(ETA, C, [CHANGE], rate=RATE)),
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


# ---------------------------------------------------------------------------------------- figure 4

AT_THE_DROP = ("sgdm", "spa-eta", "spa-abrupt", "spa-gradual")
BEFORE, AFTER, SMOOTHED = 100, 400, 10  # steps
WINDOWS = ((-60, 0), (0, 20), (20, 60), (60, 120), (120, 200))


def losses_around_the_drop(runs: cifar10.Runs, before: int, after: int) -> dict[str, np.ndarray]:
    """The training loss of every step around the first drop, (seeds, before + after)."""
    found = {}
    for name in AT_THE_DROP:
        losses = np.array([np.concatenate([line["losses"] for line in run]) for run in runs[name]])
        drop = round(cifar10.DROPS[0] / cifar10.EPOCHS * losses.shape[1])
        found[name] = losses[:, drop - before : drop + after]
    return found


def mean_and_error(values: np.ndarray) -> str:
    """Over seeds, with the standard error."""
    return f"{values.mean():7.4f} ± {values.std(ddof=1) / np.sqrt(len(values)):.4f}"


def table_of_figure_4(runs: cifar10.Runs) -> str:
    """Means ± standard errors over seeds; differences are taken seed by seed."""
    titles = [f"{start} to {end}" for start, end in WINDOWS]
    rows = ["training loss, mean over steps from the first drop, and its peak in the first 20"]
    rows.append(" " * 12 + "".join(f"{title:>17}" for title in [*titles, "peak"]))
    for name, losses in losses_around_the_drop(runs, BEFORE, AFTER).items():
        means = [losses[:, BEFORE + a : BEFORE + b].mean(1) for a, b in WINDOWS]
        peak = losses[:, BEFORE : BEFORE + 20].max(1)
        rows.append(f"{name:12}" + "".join(f"  {mean_and_error(m)}" for m in [*means, peak]))
    rows.append("")
    rows.append(f"{'last epoch':13} {'training loss':>17} {'test accuracy, %':>18} {'− sgdm':>18}")
    last = lambda name, key: np.array([run[-1][key] for run in runs[name]])
    for name in runs:
        accuracy = 100 * last(name, "test_accuracy")
        difference = accuracy - 100 * last("sgdm", "test_accuracy")
        columns = (last(name, "train_loss"), accuracy, difference)
        rows.append(f"{name:13}" + "  ".join(mean_and_error(column) for column in columns))
    return "\n".join(rows)


def figure_4(runs: cifar10.Runs, out: Path) -> None:
    """Three panels, and the numbers in them."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    color = {name: f"C{i}" for i, name in enumerate(runs)}
    steps = np.arange(-BEFORE, AFTER)
    columns = {}
    around = losses_around_the_drop(runs, BEFORE + SMOOTHED - 1, AFTER)
    for name, losses in around.items():
        columns[name] = losses.mean(0)[SMOOTHED - 1 :]
        smooth = np.convolve(losses.mean(0), np.full(SMOOTHED, 1 / SMOOTHED), mode="valid")
        axes[0].plot(steps, smooth, color=color[name], label=name)
    write_csv(out / "figure4_loss.csv", "step", steps, columns)
    axes[0].axvline(0, color="0.8", linewidth=0.8, zorder=0)
    axes[0].set(
        xlabel="steps from the first drop",
        ylabel="training loss",
        title=f"mean over seeds and {SMOOTHED} steps",
    )
    axes[0].legend(frameon=False)
    columns, epochs = {}, np.arange(1, len(runs["sgdm"][0]) + 1)
    for i, (name, of_seeds) in enumerate(runs.items()):
        mean, error = (100 * values for values in cifar10.over_seeds(of_seeds, "test_accuracy"))
        columns |= {name: mean, f"{name} error": error}
        axes[1].plot(epochs, mean, color=color[name], marker="." if len(epochs) < 20 else "")
        axes[2].errorbar(mean[-1], i, xerr=error[-1], color=color[name], marker="o", capsize=3)
    write_csv(out / "figure4_accuracy.csv", "epoch", epochs, columns)
    axes[1].set(xlabel="epoch", ylabel="test accuracy, %", title="mean over seeds")
    axes[2].set(xlabel="test accuracy, %", title="last epoch, ± standard error")
    axes[2].set_yticks(range(len(runs)), runs)
    axes[2].invert_yaxis()
    figure.savefig(out / "figure4.png", dpi=150)
    plt.close(figure)


# ------------------------------------------------------------------------------------------- audit


def audit_of_the_usual_recipe() -> theory.Audit:
    """Rate 0.1, momentum 0.9, drops by 10 at epochs 150 and 225 of 300, of 391 steps each."""
    drops = {150 * 391: 0.1, 225 * 391: 0.1}
    recipe = optax.piecewise_constant_schedule(0.1, drops)
    return theory.audit(*hyperparams_from_sgdm(recipe, 0.9), 300 * 391)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("figures"), help="a folder")
    parser.add_argument("--runs", type=Path, help="the folder that cifar10.py wrote all of")
    parser.add_argument("--seeds", type=int, default=5, help="how many it has of each")
    arguments = parser.parse_args(argv)
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
    if arguments.runs:
        runs = cifar10.read_runs(arguments.runs, list(cifar10.OPTIMIZERS), arguments.seeds)
        figure_4(runs, arguments.out)
        print(f"\n{table_of_figure_4(runs)}")
    print(f"\nThe figures are in {arguments.out}")


if __name__ == "__main__":
    main()
