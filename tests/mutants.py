"""The share of random mutants of the package that the quick tests kill: how strong they
are.

    pip install cosmic-ray
    JAX_PLATFORMS=cpu python tests/mutants.py 340  # in all, at least 15 of a module

In a mutant cosmic-ray has replaced one operator, number or condition. The test files of
its module run until a test fails. A survivor is printed: it is equivalent, or needs a
test."""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.commands import init
from cosmic_ray.mutating import use_mutation
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec

TESTS = {  # the quickest first
    "core evaluate family xla": (
        "core family reanchor storage precision checks optax_contract"
    ),
    "storage precision wrappers": (
        "storage precision wrappers eight_bits checks optax_contract"
    ),
    "adam": "second_moment aliases checks",
    "lookahead": "lookahead schedules scale equivalence",
    "convert optax_states": "convert convert_moments",
}
# Operators that replace each other. Another would only raise.
GROUPS = [
    "Add Sub Mul Div Pow",
    "BitAnd BitOr BitXor",
    "Eq NotEq Lt LtE Gt GtE",
    "Is IsNot",
]


def mutants(path: Path) -> list[MutationSpec]:
    """Those of a module, but not of its types and of `*` in signatures."""
    with use_db(":memory:") as db:
        init([path], db, {})
        every = [item.mutations[0] for item in db.work_items]
    lines = path.read_text().splitlines()
    pair = lambda mutant: set(mutant.operator_name.split("_")[1:])
    fits = lambda m: (
        len(pair(m)) < 2 or any(pair(m) <= set(group.split()) for group in GROUPS)
    )
    is_type = lambda m: re.search(r"\| None|\*,", lines[m.start_pos[0] - 1])
    return [m for m in every if fits(m) and not is_type(m)]


def main(num: int) -> None:
    root, copy = Path(__file__).parent.parent, Path(tempfile.mkdtemp()) / "spa_optax"
    shutil.copytree(
        root / "spa_optax", copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    files = {
        module: tests.split()
        for names, tests in TESTS.items()
        for module in names.split()
    }
    pools = {module: mutants(copy / f"_{module}.py") for module in files}
    total, rng = sum(map(len, pools.values())), random.Random(0)
    for module, pool in pools.items():
        command = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-xq",
            "-m",
            "not slow and not long",
        ]
        command += [f"tests/test_{name}.py" for name in files[module]]
        options = {"cwd": root, "env": environment, "capture_output": True}
        subprocess.run(command, **options, check=True)
        sample = rng.sample(
            pool, min(len(pool), max(15, round(num * len(pool) / total)))
        )
        survivors = 0
        for mutant in sample:
            operator = plugins.get_operator(mutant.operator_name)()
            with use_mutation(mutant.module_path, operator, mutant.occurrence):
                if subprocess.run(command, **options).returncode == 0:
                    survivors += 1
                    print(
                        f"_{module}.py:{mutant.start_pos[0]}: "
                        f"{mutant.operator_name} survives"
                    )
        print(
            f"_{module}.py: {len(sample) - survivors} of {len(sample)} killed",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]))
