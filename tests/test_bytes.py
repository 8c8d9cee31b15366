"""The tables of bytes in docs/memory.md, recomputed from states."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jaxtyping import PyTree

from spa_optax import (
    float8_momentum,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

PAGE = Path(__file__).parent.parent / "docs/memory.md"
KEY = jax.random.key(0)
RATE = 1e-3
# What the code of the table may name.
NAMES = {
    "optax": optax,
    "rate": RATE,
    "key": KEY,
    "bfloat16": jnp.bfloat16,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "muon": optax.contrib.muon(RATE, mu_dtype=jnp.bfloat16),
    "float8_momentum": float8_momentum,
    "stochastic_rounding": stochastic_rounding,
    "spa_adamw": spa_adamw,
    "spa_from_sgdm": spa_from_sgdm,
}
# The fields of states that hold what the table calls z, m and ν.
FIELDS = {
    "z": {"z"},
    "m": {"mu", "trace"},
    "ν": {"nu", "v", "v_row", "v_col"},
}
DTYPES = {4: jnp.float32, 2: jnp.bfloat16}


class Row(NamedTuple):
    """A row of the table."""

    code: str
    params: int
    state: dict[str, int]  # by "z", "m" and "ν"
    total: int


def read_rows() -> list[Row]:
    """The rows whose last cell is code, perhaps for kernels alone."""
    _, section = PAGE.read_text(encoding="utf-8").split("\n## Bytes\n")
    section = section.split("\n## ")[0]
    rows = re.findall(
        r"^\| (\d+) \| (\d+) \| (.+) \| `(.+)`(?:, kernels)? \|$",
        section,
        re.MULTILINE,
    )
    return [
        Row(code, int(params), parts(state), int(total))
        for total, params, state, code in rows
    ]


def parts(cell: str) -> dict[str, int]:
    """The numbers in a cell such as "z 2 + ν ≈ 0"."""
    pairs = [part.split(" ") for part in cell.replace("≈ ", "").split(" + ")]
    return {name: int(number) for name, number in pairs}


def num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_of_fields(state: PyTree, fields: set[str]) -> int:
    """The bytes of all arrays in fields of these names."""
    leaves = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if fields & {getattr(entry, "name", None) for entry in path}
    ]
    return num_bytes(leaves)


ROWS = read_rows()


def test_all_rows_are_read() -> None:
    section = PAGE.read_text(encoding="utf-8").split("\n## Bytes\n")[1]
    lines = section.split("\n## ")[0].splitlines()
    num_lines = sum(line.startswith("|") for line in lines)
    num_heads = sum(line.startswith("|---") for line in lines)
    assert len(ROWS) == num_lines - 2 * num_heads > 0  # without heads and their rules


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.params}: {row.code}")
def test_bytes(row: Row) -> None:
    dtype = DTYPES[row.params]
    params = {name: jax.ShapeDtypeStruct((1000, 1000), dtype) for name in "abcd"}
    size = 4 * 1000 * 1000
    tx: Any = eval(row.code, NAMES.copy())
    state = jax.eval_shape(tx.init, params)
    for name, fields in FIELDS.items():
        # Means over rows and columns are not counted: 0.008 bytes per parameter.
        expected = pytest.approx(row.state.get(name, 0), abs=0.01)
        assert bytes_of_fields(state, fields) / size == expected, name
    assert num_bytes((params, state)) / size == pytest.approx(row.total, abs=0.01)
    assert row.params + sum(row.state.values()) == row.total
