"""The Python blocks of the README and of each page run, each page in a namespace of its own."""

import dataclasses
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from nbclient import NotebookClient

from spa_optax import eval_params

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not path.is_symlink()
}
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
BLOCKS = {
    name: blocks
    for name, page in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
}
# These need trainers that are not installed here.
OF_TRAINERS = BLOCKS.pop("docs/trainers.md")


@dataclasses.dataclass
class TensorSpec:
    """As in axlearn, where it is a leaf."""

    shape: tuple[int, ...]
    dtype: Any = None
    mesh_axes: Any = None


class PartitionedGradientTransformation(NamedTuple):
    """As in axlearn."""

    init: Any
    update: Any
    partition: Any


@pytest.fixture(autouse=True)
def _axlearn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names that the recipe takes from axlearn, which is not installed."""
    stub = types.ModuleType("axlearn.common.optimizer_base")
    vars(stub).update(
        OptStateSpec=TensorSpec,
        PartitionedGradientTransformation=PartitionedGradientTransformation,
    )
    for name in ("axlearn", "axlearn.common", stub.__name__):
        monkeypatch.setitem(sys.modules, name, stub)


def run_blocks(name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):  # what users have
        for block in BLOCKS[name]:
            exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(name)
    # What a block is said to print, it prints.
    said = re.findall(r"print\(.*\)  # (.*)", "".join(BLOCKS[name]))
    assert capsys.readouterr().out.splitlines() == said


def test_code_for_trainers_is_what_their_scripts_run() -> None:
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks/trainers").glob("with_*.py"))
    for block in OF_TRAINERS:
        _, *code = re.split(r"^(?=class |def )", block, maxsplit=1, flags=re.MULTILINE)
        assert "".join(code).strip() in scripts


def test_recipes_for_trainers() -> None:
    """By their interfaces: MaxText's configuration, and axlearn's params with descriptions."""
    recipes = run_blocks("docs/recipes.md")
    numbers = {"adam_b1": 0.9, "adam_b2": 0.99, "adam_eps": 1e-8, "adam_weight_decay": 0.1}
    config = types.SimpleNamespace(opt_type="gpa_adamw", **numbers)
    recipes["get_adamw_mask"] = lambda config: None  # MaxText's own
    params = {"w": jnp.ones((8, 4), jnp.bfloat16), "b": jnp.ones(4, jnp.bfloat16)}
    tx = recipes["get_optimizer"](config, optax.constant_schedule(1e-3))
    state = tx.init(params)
    assert optax.tree.get(state, "z")["w"].dtype == jnp.bfloat16
    expected, _ = tx.update(params, state, params)

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    x = eval_params(optimizer.opt_state, nnx.state(model))
    assert np.any(x["kernel"][...] != model.kernel[...])
    recipes["at_x"](types.SimpleNamespace(model=model, optimizer=optimizer))
    chex.assert_trees_all_equal(nnx.state(model), x)

    described = jax.tree.map(lambda x: types.SimpleNamespace(value=x), params)
    wrapped = recipes["for_axlearn"](tx)
    state = wrapped.init(described)
    updates, state = wrapped.update(params, state, described)
    chex.assert_trees_all_equal(updates, expected)
    split = PartitionSpec("fsdp")
    specs = {"w": TensorSpec((8, 4), jnp.bfloat16, split), "b": TensorSpec((4,), jnp.bfloat16)}
    parts = wrapped.partition(specs)
    assert jax.tree.structure(parts) == jax.tree.structure(state)
    for part, leaf in zip(*map(jax.tree.leaves, (parts, state)), strict=True):
        assert (part.shape, part.dtype) == (leaf.shape, leaf.dtype)
        assert (part.mesh_axes == split) == (part.shape == (8, 4))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_colab(path: Path) -> None:
    """A link that opens the notebook, and a line to install from the repository: PyPI has none."""
    colab = runpy.run_path(str(ROOT / "docs/hooks.py"))["colab"]
    (cell,) = (c.source for c in nbformat.read(path, as_version=4).cells if "%pip" in c.source)
    page = colab(cell, f"notebooks/{path.name}", "https://github.com/some/where/")
    url = "https://colab.research.google.com/github/some/where/blob/main/"
    (linked,) = re.findall(f'href="{re.escape(url)}(.*?)"', page)
    assert ROOT / linked == path
    assert "%pip install git+https://github.com/some/where scikit-learn" in page
    assert colab(cell, f"notebooks/{path.name}", None) == cell
    assert colab(cell, "method.md", "https://x") == cell


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_notebooks(path: Path) -> None:
    """They run, and print what they are stored with, except for digits."""
    stored, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(notebook, timeout=300).execute()
    without_digits = lambda cells: "".join(
        re.sub(r"[-\d.]+", "", output.get("text", ""))
        for cell in cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    )
    assert without_digits(notebook.cells) == without_digits(stored.cells) != ""


def test_there_are_blocks_that_print() -> None:
    assert sum(block.count("print(") for block in BLOCKS["README.md"]) > 0
    assert len(BLOCKS) > 5


@pytest.mark.parametrize("name", PAGES)
def test_what_is_linked_is_there(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[name])
    for link in links:
        assert ((ROOT / name).parent / link).exists(), link
