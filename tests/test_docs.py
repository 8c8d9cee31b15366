"""The Python blocks of the README and of each page run, each page in a namespace of its own."""

import re
import runpy
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from helpers import quick_names
from nbclient import NotebookClient

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


def run_blocks(name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):  # what users have
        for block in BLOCKS[name]:
            exec(compile(block, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", quick_names(BLOCKS, "README.md"))
def test_python_blocks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks(name)
    # What a block is said to print, it prints.
    said = re.findall(r"print\(.*\)  # (.*)", "".join(BLOCKS[name]))
    assert capsys.readouterr().out.splitlines() == said


def test_code_for_trainers_is_what_their_scripts_run() -> None:
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks/trainers").glob("*.py"))
    for block in OF_TRAINERS:
        _, *code = re.split(r"^(?=class |def |@)", block, maxsplit=1, flags=re.MULTILINE)
        assert "".join(code).strip() in scripts


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
