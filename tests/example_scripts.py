"""The examples that have the name of a benchmark."""

import importlib.util
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name: str) -> Any:
    """The module of an example."""
    spec: Any = importlib.util.spec_from_file_location(
        f"example_{name}", EXAMPLES / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
