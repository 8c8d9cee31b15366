"""How many random mutants of the package the quick tests kill.

    pip install cosmic-ray
    JAX_PLATFORMS=cpu python tests/mutants.py 340  # in all, at least 5 of a module
    JAX_PLATFORMS=cpu python tests/mutants.py 40 core codec  # of these modules

In a mutant cosmic-ray has replaced one operator, number or condition. The test files of
its module run until a test fails. A survivor is printed: it is equivalent, or needs a
test.
"""

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

# The test files of each module, the quickest first.
CORE = [
    "core",
    "shift_z",
    "storage",
    "eight_bits",
    "family",
    "checks",
    "optax_contract",
]
TESTS = {
    "coefficients": CORE,
    "codec": CORE,
    "core": CORE,
    "state": CORE,
    "checks": CORE,
    "trees": [*CORE, "convert"],
    "arguments": ["checks", "schedules", "storage", "wrappers"],
    "params": ["family", "shift_z", "storage", "checks"],
    "spa": [
        "lookahead",
        "family",
        "eight_bits",
        "equivalence",
        "checks",
        "optax_contract",
    ],
    "sgdm": ["lookahead", "schedules", "scale", "equivalence"],
    "rounding": ["precision", "wrappers", "eight_bits"],
    "wrappers": ["wrappers", "precision", "eight_bits", "checks", "optax_contract"],
    "float8_momentum": ["eight_bits", "wrappers", "checks", "optax_contract"],
    "adamw": ["second_moment", "aliases", "checks"],
    "xla": [*CORE, "memory", "scale"],
    "schedules": ["schedules", "methods", "checks"],
    "convert": ["convert"],
    "convert_states": ["convert"],
    "optax_states": ["wrappers", "eight_bits"],
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
    return [
        mutant
        for mutant in every
        if is_worthwhile(mutant) and not is_of_types(mutant, lines)
    ]


def is_worthwhile(mutant: MutationSpec) -> bool:
    """Whether a mutant replaces an operator by one of its group, or is no operator."""
    operators = set(mutant.operator_name.split("_")[1:])
    if len(operators) < 2:
        return True
    return any(operators <= set(group.split()) for group in GROUPS)


def is_of_types(mutant: MutationSpec, lines: list[str]) -> bool:
    """Whether a mutant changes an annotation, or `*` in a signature."""
    return re.search(r"\| None|\*,", lines[mutant.start_pos[0] - 1]) is not None


def main(num: int, *modules: str) -> None:
    root, copy = Path(__file__).parent.parent, Path(tempfile.mkdtemp()) / "spa_optax"
    shutil.copytree(
        root / "spa_optax", copy, ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    pools = {module: mutants(copy / f"_{module}.py") for module in modules or TESTS}
    total, rng = sum(map(len, pools.values())), random.Random(0)
    passing: list[list[str]] = []  # before the package is mutated
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
        files = [f"tests/test_{name}.py" for name in TESTS[module]]
        command += [file for file in files if (root / file).exists()]
        options = {"cwd": root, "env": environment, "capture_output": True}
        if command not in passing:
            subprocess.run(command, **options, check=True)
            passing.append(command)
        sample = rng.sample(
            pool, min(len(pool), max(5, round(num * len(pool) / total)))
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
    main(int(sys.argv[1]), *sys.argv[2:])
