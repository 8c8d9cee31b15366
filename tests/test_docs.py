"""The Python blocks of the README and of each page run, each page in a namespace of its
own."""

import contextlib
import functools
import html
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from helpers import long, quick, run
from jaxtyping import Array
from nbclient import NotebookClient

from spa_optax import (
    eval_params,
    float8_momentum,
    primal_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

KEY = jax.random.key(0)
standard_promotion = pytest.mark.usefixtures("standard_promotion")
ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *sorted((ROOT / "docs").glob("*.md")),
    )
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


@functools.cache
def run_blocks(name: str) -> tuple[dict[str, Any], str]:
    """The names that the blocks of a page define, and what they print."""
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        for block in BLOCKS[name]:
            exec(compile(block, name, "exec"), namespace)
    return namespace, printed.getvalue()


@pytest.mark.parametrize("name", quick(BLOCKS, "README.md"))
def test_python_blocks(name: str) -> None:
    _, printed = run_blocks(name)
    # What a block is said to print, it prints.
    assert printed.splitlines() == re.findall(
        r"print\(.*\)  # (.*)", "".join(BLOCKS[name])
    )


@pytest.mark.parametrize("name", ["spa_adamw", "spa_from_sgdm"])
def test_other_optimizers_of_the_first_page(name: str) -> None:
    """They train in the example, in place of its `tx`."""
    example, *blocks = BLOCKS["README.md"]
    [other] = [block for block in blocks if f"tx = {name}(" in block]
    before, after = example.split("\nparams = {")
    printed = io.StringIO()
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        exec(f"{before}\n{other}\nparams = {{{after}", {})
    assert printed.getvalue() == "True\n"


def test_code_for_trainers_is_what_their_scripts_run() -> None:
    scripts = "".join(
        path.read_text() for path in (ROOT / "benchmarks/trainers").glob("*.py")
    )
    for block in OF_TRAINERS:
        _, *code = re.split(
            r"^(?=class |def |@)", block, maxsplit=1, flags=re.MULTILINE
        )
        assert "".join(code).strip() in scripts


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [long(path) if path.stem == "four_bytes" else path for path in NOTEBOOKS]
)
def test_notebooks(path: Path) -> None:
    """They run, and print what they are stored with, except for digits."""
    stored, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    for cell in notebook.cells:  # four_bytes.ipynb trains for long
        cell.source = cell.source.replace("STEPS = 500", "STEPS = 20")
    NotebookClient(notebook, timeout=300).execute()
    found = printed_without_digits(notebook.cells)
    assert found == printed_without_digits(stored.cells) != ""


def printed_without_digits(cells: Any) -> str:
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    texts = [output["text"] for output in outputs if output.get("name") == "stdout"]
    return re.sub(r"[-\d.]+", "", "".join(texts))


def test_other_code_for_trainers_is_python() -> None:
    """It does not run here, since it needs a trainer."""
    page = PAGES["docs/trainers.md"]
    blocks = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        compile(block, "docs/trainers.md", "exec")


@pytest.mark.parametrize("name", PAGES)
def test_no_table_is_broken(name: str) -> None:
    """An empty line ends a table: before it text becomes a row, and after it a row
    becomes text.
    """
    assert not re.search(r"^\|.*\|\n\n\|(?! ?-)", PAGES[name], re.MULTILINE)
    assert not re.search(r"^\|.*\|\n(?![|\n])", PAGES[name] + "\n", re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_what_is_linked_is_there(name: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[name]):
        assert ((ROOT / name).parent / link).exists(), link


@pytest.mark.slow
def test_the_site_has_no_dead_links(tmp_path: Path) -> None:
    """Indices are set lower, and pictures lead to themselves in full."""
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    dead = []
    for page in tmp_path.rglob("index.html"):
        for link in re.findall(
            r'(?:href|src)="([^"#:]+)[#"]', page.read_text(encoding="utf-8")
        ):
            target = page.parent / html.unescape(link)
            if not (target / "index.html" if target.is_dir() else target).exists():
                dead.append(f"{page.relative_to(tmp_path)}: {link}")
    assert not dead
    optimizers, theorem = (
        (tmp_path / page / "index.html").read_text()
        for page in ("api/optimizers", "theorem")
    )
    assert "x<sub>k+1</sub> = (1 − c<sub>k+1</sub>)" in optimizers
    assert '<a href="../look_ahead.png"><img' in theorem


@pytest.mark.slow
@standard_promotion
@pytest.mark.parametrize(
    "tx", [spa_adamw(1e-2, 0.05, 0.9), spa_adamw(1e-2)], ids=["y", "x"]
)
def test_x_outlives_a_donated_step(tx: Any) -> None:
    """Though `nnx.clone` shares arrays with the model."""
    page, _ = run_blocks("docs/evaluate.md")
    rngs, batch = nnx.Rngs(0), jnp.ones((8, 3))
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean((model(batch) - 1) ** 2))(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    x = eval_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    average = page["with_params"](model, x)
    before = average(batch)
    step(model, optimizer)
    np.testing.assert_array_equal(average(batch), before)


@pytest.mark.slow
@standard_promotion
def test_muon_trains_kernels_alone() -> None:
    """A position embedding has only one name."""
    page, _ = run_blocks("docs/muon.md")
    kernels, labels = page["kernels"], page["labels"]
    params = {
        "position": jnp.ones((4, 8)),
        "out": {"kernel": jnp.ones((2, 4, 8)), "bias": jnp.ones(8)},
        "layers": [{"kernel": jnp.ones((8, 2, 4))}],
    }
    numbers = optax.contrib.MuonDimensionNumbers
    assert kernels(params) == {
        "position": None,
        "out": {"kernel": numbers((0, 1), (2,)), "bias": None},
        "layers": [{"kernel": numbers((0,), (1, 2))}],
    }
    assert labels(params["position"]) == "adam"
    assert labels(params) == {
        "position": "adam",
        "out": {"kernel": "muon", "bias": "adam"},
        "layers": [{"kernel": "muon"}],
    }
    of_nnx = nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Param)
    assert sorted(jax.tree.leaves(labels(of_nnx))) == ["adam", "muon"]


@pytest.mark.slow
@standard_promotion
def test_groups() -> None:
    """Params of any container get labels, and a group starts anew."""
    page, _ = run_blocks("docs/groups.md")
    params, labels = page["params"], page["labels_by_name"]
    head, trunk = (nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2))
    of_nnx = nnx.state(nnx.Dict(head=head, trunk=trunk), nnx.Param)
    for tree in (params, freeze(params), of_nnx):
        assert set(jax.tree.leaves(labels(tree))) == {"head", "trunk"}
        assert jax.tree.structure(labels(tree)) == jax.tree.structure(tree)
    groups = page["groups"]
    grads = jax.tree.map(jnp.ones_like, params)
    _, state = groups.update(grads, groups.init(params), params)
    new = groups.init(params).inner_states["head"]
    state = state._replace(inner_states={**state.inner_states, "head": new})
    counts = optax.tree.get_all_with_path(state, "count")
    assert {int(count) for path, count in counts if path[1].key == "head"} == {0}
    assert {int(count) for path, count in counts if path[1].key == "trunk"} == {1}


@pytest.mark.slow
@standard_promotion
def test_restored_onto_a_mesh(tmp_path: Path) -> None:
    """A scalar that is restored onto one device cannot join params on several."""
    page, _ = run_blocks("docs/resume.md")
    on_devices, _ = run_blocks("docs/sharding.md")
    params = jnp.ones((256, 128), jnp.bfloat16)
    params = jax.device_put(params, on_devices["split"])
    tx = spa_adamw(
        1e-2, state_dtype=jnp.bfloat16, second_moment="factored", rounding_key=KEY
    )

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    def init(params: Any) -> Any:
        return jax.tree.map(on_devices["place"], tx.init(params))

    params, state = step(params, init(params))
    page["save"](tmp_path / "run", params, state)
    restored = page["restore"](tmp_path / "run", params, init(params))
    expected, _ = step(params, state)
    found, _ = step(*restored)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@standard_promotion
def test_the_rate_to_log() -> None:
    """It stands in the state of each optimizer, here after five steps."""
    rate = optax.cosine_decay_schedule(1e-2, 100)
    base = optax.inject_hyperparams(optax.adamw)(rate)
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    of_group = optax.partition(
        {"a": spa_adamw(rate, 0.05, 0.9), "b": spa_adamw(1.0, 0.05, 0.9)},
        {"a": "a", "b": "b"},
    )
    lion = optax.inject_hyperparams(optax.lion)(rate)
    get = optax.tree.get

    def injected(state: Any) -> Array:
        return get(state, "hyperparams")["learning_rate"]

    rows = [
        *((make(rate, 0.1), lambda s: get(s, "eta")) for make in (spa, spa_adamw)),
        (spa_from_sgdm(rate), lambda s: get(s, "eta") * get(s, "c")),
        (optax.inject_hyperparams(spa_from_sgdm)(rate), injected),
        (primal_averaging(base, 0.1), injected),
        (stochastic_rounding(base, KEY), injected),
        (float8_momentum(lion, KEY), injected),
        (of_group, lambda s: get(get(s, "inner_states")["a"], "eta")),
    ]
    for tx, of_state in rows:
        _, state = run(optax.chain(optax.clip(1.0), tx), params, 5 * [params])
        np.testing.assert_allclose(of_state(state), rate(4), rtol=1e-5)
