"""The tables of results/memory.jsonl, for render.py."""

from typing import Any

import common
import memory

# The rows of memory.py, with what their bytes per parameter are.
TEXTS = {
    "AdamW, float32 master copy": "AdamW, float32 master copy, 14",
    "AdamW": "AdamW, float32 params, 12",
    "AdamW, bfloat16 m, float32 params": "AdamW, float32 params, bfloat16 momentum, 10",
    "spa_adamw, bfloat16 params, full ν": "`spa_adamw`, z in float32, ν whole, 10",
    "NAdamW, bfloat16 m": "AdamW in `stochastic_rounding`, 8",
    "spa_adamw, bfloat16 z, full ν": "`spa_adamw`, z in bfloat16, ν whole, 8",
    "Adafactor": "Adafactor, float32 params, 4",
    "spa_adamw, bfloat16 z": "`spa_adamw`, z in bfloat16, 4",
    "Muon, float8 m": (
        "Muon in `float8_momentum` and `stochastic_rounding`, 3.1 to 3.7"
    ),
    "spa_adamw, float8 z": "`spa_adamw`, z in float8, 3",
    "Adafactor, bfloat16 params": "Adafactor in `stochastic_rounding`, 2",
    "Adafactor, rounded to nearest": "Adafactor, rounded to nearest, 2",
}
# The rows and targets of docs/fit.md.
SCALED = [
    "AdamW, float32 master copy",
    "AdamW",
    "AdamW, bfloat16 m, float32 params",
    "NAdamW, bfloat16 m",
    "Adafactor",
    "spa_adamw, bfloat16 z",
    "Muon, float8 m",
    "spa_adamw, float8 z",
    "Adafactor, bfloat16 params",
]
SCALED_TO = {
    "8B on v5e-8": "8B on v5e-8",
    "70B on v5p-64": "70B on v5p-64 (32 devices)",
}
BYTES = "optimizer, bytes per parameter"


def tables(found: common.Records) -> dict[str, dict[str, str]]:
    """By page, and by its name there."""
    everywhere = dict(zip(memory.BY_OPTIMIZER, memory.BY_OPTIMIZER, strict=True))
    return {
        "benchmarks/results/memory.md": {
            "devices": of_devices(found, list(TEXTS), everywhere),
            "versions": versions(found),
            "in the backward pass": in_backward(found),
            "cards": memory.largest(
                list(memory.CARDS), memory.both_ways(memory.BY_CARD), found, text_of_row
            ),
        },
        "docs/fit.md": {
            "devices": of_devices(found, SCALED, SCALED_TO),
            "cards": of_cards(found),
        },
    }


def text_of_row(name: str) -> str:
    """Without its bytes, which are a column."""
    base = name.removesuffix(memory.IN_BACKWARD)
    text, _, _ = TEXTS[base].rpartition(", ")
    return text + name.removeprefix(base)


def records_of(found: common.Records) -> dict[tuple[str, str], Any]:
    return {(r["optimizer"], r["target"]): r for r in found.found.values()}


def of_devices(found: common.Records, names: list[str], targets: dict[str, str]) -> str:
    """GiB per device."""
    of_target = records_of(found)
    limits = [f"*{memory.TARGETS[name].limit:.4g}*" for name in targets]
    rows = [["*what a device has*", *limits]]
    for name in names:
        cells = [cell(of_target.get((name, target))) for target in targets]
        rows.append([TEXTS[name], *cells])
    return common.markdown([BYTES, *targets.values()], rows)


def versions(found: common.Records) -> str:
    """What each target was compiled with."""
    of_target = common.groups(list(found.found.values()), "target")
    rows = []
    for target in memory.BY_OPTIMIZER:
        [version] = {record["versions"] for record in of_target[target]}
        rows.append([target, version])
    return common.markdown(["target", "compiled with"], rows)


def in_backward(found: common.Records) -> str:
    """GiB of both ways of a step."""
    of_target = records_of(found)
    targets = [
        target
        for target in memory.BY_OPTIMIZER
        if any(
            t == target and name.endswith(memory.IN_BACKWARD) for name, t in of_target
        )
    ]
    rows = []
    for name, text in TEXTS.items():
        cells = []
        for target in targets:
            in_pass = of_target.get((name + memory.IN_BACKWARD, target))
            if in_pass:
                cells += [cell(of_target.get((name, target))), cell(in_pass)]
            else:
                cells += ["", ""]
        if any(cells):
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


def of_cards(found: common.Records) -> str:
    """The largest model on each card, by both ways of a step."""
    limits = {card: memory.TARGETS[f"8B on one {card}"].limit for card in memory.CARDS}
    rows = [["*GiB for a program*", *(f"*{limit:.1f}*" for limit in limits.values())]]
    for name, text in TEXTS.items():
        if name not in memory.BY_CARD:
            continue
        row = [text]
        for card, limit in limits.items():
            fits = [
                memory.largest_model(way, card, found)
                for way in memory.both_ways([name])
            ]
            # By model: the second way matters only if it fits a larger one.
            sizes = dict(filter(None, reversed(fits)))
            row.append(
                " → ".join(
                    f"{model}\\*" if limit - size < 1 else model
                    for model, size in sorted(sizes.items())
                )
            )
        rows.append(row)
    return common.markdown([BYTES, *memory.CARDS], rows)
