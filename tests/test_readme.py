"""The README's Python blocks run, in order, each in the namespace that the ones before left."""

import re
from pathlib import Path

import jax
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert BLOCKS
    namespace: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # what users have
        for block in BLOCKS:
            exec(compile(block, "README.md", "exec"), namespace)
    # What a block is said to print, it prints.
    said = [line for block in BLOCKS for line in re.findall(r"print\(.*\)  # (.*)", block)]
    assert said
    assert capsys.readouterr().out.splitlines() == said


def test_pictures_are_there() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (Path(__file__).parent.parent / picture).is_file(), picture
