"""The figures of the paper, from the library's own functions.

    python examples/figures.py

writes figure1.png and figure1.csv, and for the recipe that most people have audit.png.

Figure 1 maps hyper-parameters from one form of momentum to the other, over 100 steps with a change
at step 20, α = 1 and β = 0.9. (a) and (b) have beside the paper's recursion the solution that looks
ahead: the growth comes from the choice of η_0, not from the schedule.
"""

import argparse
import csv
from pathlib import Path

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


def write_csv(panels: dict[str, Series], path: Path) -> None:
    """A row a step, a column a series."""
    columns = {
        f"{title.partition(' ')[0]} {name}": values
        for title, series in panels.items()
        for name, values in series.items()
    }
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        for k in range(NUM_STEPS):
            writer.writerow([k, *(f"{values[k]:.7g}" for values in columns.values())])


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
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    panels = figure_1()
    draw_figure_1(panels, arguments.out / "figure1.png")
    write_csv(panels, arguments.out / "figure1.csv")
    audit = audit_of_the_usual_recipe()
    figure = audit.plot()
    figure.savefig(arguments.out / "audit.png", dpi=150)
    plt.close(figure)
    print(audit.report())
    print(f"\nfigure1.png, figure1.csv and audit.png are in {arguments.out}")


if __name__ == "__main__":
    main()
