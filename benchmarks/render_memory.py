"""The tables of results/memory.jsonl, for render.py."""

from collections.abc import Callable
from typing import Any

import common
import memory

# The rows of memory.py, with what their bytes per parameter are.
TEXTS = {
    "AdamW, float32 master copy": "AdamW, float32 master copy, 14",
    "AdamW": "AdamW, float32 params, 12",
    "AdamW, m in bfloat16": "AdamW, float32 params, bfloat16 momentum, 10",
    "spa_adamw, z in float32, ν whole": "`spa_adamw`, z in float32, ν whole, 10",
    "NAdamW, m in bfloat16, rounded at random": "AdamW in `stochastic_rounding`, 8",
    "spa_adamw, z in bfloat16, ν whole": "`spa_adamw`, z in bfloat16, ν whole, 8",
    "Adafactor": "Adafactor, float32 params, 4",
    "spa_adamw, z in bfloat16": "`spa_adamw`, z in bfloat16, 4",
    "spa_adamw, z in float8": "`spa_adamw`, z in float8, 3",
    "Adafactor, rounded at random": "Adafactor in `stochastic_rounding`, 2",
    "Adafactor, rounded to nearest": "Adafactor, rounded to nearest, 2",
    "Muon, m in float8": (
        "Muon in `float8_momentum` and `stochastic_rounding`, 3.1 to 3.7"
    ),
}
# The rows and targets of docs/fit.md.
SCALED = [
    "AdamW",
    "AdamW, m in bfloat16",
    "NAdamW, m in bfloat16, rounded at random",
    "Adafactor",
    "spa_adamw, z in bfloat16",
    "spa_adamw, z in float8",
    "Adafactor, rounded at random",
    "Muon, m in float8",
]
SCALED_TO = {
    "8B on v5e-8": "8B on v5e-8",
    "70B on v5p-64": "70B on v5p-64 (32 devices)",
}
# From an optimizer, a card and its limit to a cell.
CellOf = Callable[[str, str, float, common.Records], str]
BYTES = "optimizer, bytes per parameter"


def tables(found: common.Records) -> dict[str, dict[str, str]]:
    """By page, and by its name there."""
    everywhere = {target: target for target in memory.BY_OPTIMIZER}
    return {
        "benchmarks/results/memory.md": {
            "devices": of_devices(found, list(TEXTS), everywhere),
            "in the backward pass": in_backward(found),
            "cards": of_cards(found, cell_of_both_ways),
        },
        "docs/fit.md": {
            "devices": of_devices(found, SCALED, SCALED_TO),
            "cards": of_cards(found, cell_of_model),
        },
        "docs/backward.md": {
            "cards in the backward pass": of_cards(found, cell_in_backward),
        },
    }


def records_of(found: common.Records) -> dict[tuple[str, str], Any]:
    return {(r["optimizer"], r["target"]): r for r in found.found.values()}


def of_devices(found: common.Records, names: list[str], targets: dict[str, str]) -> str:
    """GiB per device."""
    of_target = records_of(found)
    limits = [f"*{memory.TARGETS[name].limit:.4g}*" for name in targets]
    rows = [["*GiB for a program*", *limits]]
    for name in names:
        cells = [cell(of_target.get((name, target))) for target in targets]
        rows.append([TEXTS[name], *cells])
    return common.markdown([BYTES, *targets.values()], rows)


def in_backward(found: common.Records) -> str:
    """GiB of both ways of a step."""
    of_target = records_of(found)
    compiled = {t for name, t in of_target if name.endswith(memory.IN_BACKWARD)}
    targets = [target for target in memory.BY_OPTIMIZER if target in compiled]
    rows = []
    for name, text in TEXTS.items():
        cells = []
        for target in targets:
            in_pass = of_target.get((name + memory.IN_BACKWARD, target))
            cells += [cell(of_target.get((name, target))), cell(in_pass)]
        if any(cells[1::2]):
            rows.append([text, *cells])
    columns = [
        f"{target}{how}" for target in targets for how in ("", ", in the backward pass")
    ]
    return common.markdown([BYTES, *columns], rows)


def cell(record: Any) -> str:
    """Empty if it was not compiled."""
    if record is None:
        return ""
    if record["GiB"] is None:
        return "OOM"
    limit = memory.TARGETS[record["target"]].limit
    if record["refused"] or record["GiB"] > limit:
        return f"{record['GiB']:.1f}, OOM"
    return f"{record['GiB']:.1f}"


def of_cards(found: common.Records, cell_of: CellOf) -> str:
    """For each optimizer and card what `cell_of` says."""
    limits = {card: memory.TARGETS[f"8B on one {card}"].limit for card in memory.CARDS}
    rows = [["*GiB for a program*", *(f"*{limit:.1f}*" for limit in limits.values())]]
    for name, text in TEXTS.items():
        if name in memory.BY_CARD:
            cells = [
                cell_of(name, card, limit, found) for card, limit in limits.items()
            ]
            rows.append([text, *cells])
    return common.markdown([BYTES, *memory.CARDS], rows)


def cell_of_model(name: str, card: str, limit: float, found: common.Records) -> str:
    """The largest model, with a star if it nearly fills the card."""
    largest = memory.largest_model(name, card, found)
    if largest is None:
        return "none"
    model, size = largest
    return f"{model}\\*" if limit - size < 1 else model


def cell_in_backward(name: str, card: str, limit: float, found: common.Records) -> str:
    """The same, updated in the backward pass."""
    return cell_of_model(name + memory.IN_BACKWARD, card, limit, found)


def cell_of_both_ways(name: str, card: str, limit: float, found: common.Records) -> str:
    """The largest models of an ordinary step and of one in the backward pass, with
    their GiB.
    """
    fits = [memory.largest_model(way, card, found) for way in memory.both_ways([name])]
    return " → ".join(
        "none" if fit is None else "{} {:.1f}".format(*fit) for fit in fits
    )
