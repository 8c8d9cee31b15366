"""The Python blocks of the README and of each page run, each page in a namespace of its own."""

import re
from pathlib import Path

import jax
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if not path.is_symlink()
}
BLOCKS = {
    name: blocks
    for name, page in PAGES.items()
    if (blocks := re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
}


@pytest.mark.parametrize("name", BLOCKS)
def test_python_blocks(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # what users have
        for block in BLOCKS[name]:
            exec(compile(block, name, "exec"), namespace)
    # What a block is said to print, it prints.
    said = re.findall(r"print\(.*\)  # (.*)", "".join(BLOCKS[name]))
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs/notebooks").glob("*.ipynb")), ids=str)
def test_notebooks(path: Path) -> None:
    """They run, and print what they are stored with, but for digits."""
    stored, notebook = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(notebook, timeout=300).execute()
    without_digits = lambda cells: [
        re.sub(r"[-\d.]+", "", output.get("text", ""))
        for cell in cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    ]
    assert without_digits(notebook.cells) == without_digits(stored.cells) != []


def test_there_are_blocks_that_print() -> None:
    assert sum(block.count("print(") for block in BLOCKS["README.md"]) > 0
    assert len(BLOCKS) > 5


@pytest.mark.parametrize("name", PAGES)
def test_what_is_linked_is_there(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[name])
    for link in links:
        assert ((ROOT / name).parent / link).exists(), link
