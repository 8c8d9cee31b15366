"""The table of bytes in docs/start.md, computed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from optax.contrib import muon

import spa_optax

PAGE = (Path(__file__).parent.parent / "docs/start.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (f32|bf16) \| `(.*?)`.*?\| (.*?) \| (\d+) \|$", PAGE, re.M)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "e4m3": jnp.float8_e4m3fn}
NAMES = {
    **vars(spa_optax),
    **DTYPES,
    "optax": optax,
    "muon": muon,
    "key": jax.random.key(0),
    "r": 1e-3,
    "F": "factored",
}


def test_the_table_is_read_whole() -> None:
    assert len(ROWS) == PAGE.count("\n| f32 |") + PAGE.count("\n| bf16 |") > 20


@pytest.mark.parametrize(("dtype", "code", "terms", "total"), ROWS)
def test_bytes(dtype: str, code: str, terms: str, total: str) -> None:
    """Of four arrays, whose means over rows and columns add less than a hundredth."""
    params = 4 * [jax.ShapeDtypeStruct((1_000, 1_000), DTYPES[dtype])]
    state = jax.eval_shape(eval(code, dict(NAMES)).init, params)
    sizes = [
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state))
    ]
    assert sum(sizes) / 4e6 == pytest.approx(int(total), abs=0.02)
    assert sum(map(int, re.findall(r"\d+", terms))) == int(total)
