"""What XLA makes of an update for TPUs and NVIDIA cards, none of which needs to be
there.

    pip install libtpu
    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION
    # VERSION is that of jax
    python benchmarks/compiled.py --target v5e h100

Params and state are donated. The columns: bytes a parameter that kernels read from the
device's memory and write to it; kernels a leaf; bytes written there and not returned;
XLA's cycles over the peer's, the first row of each group; seconds to compile. A last
table has the collectives, where every leaf is split over many devices.
"""

import functools
import importlib.metadata
import math
import os
import re
import time
from typing import Any, NamedTuple
from unittest import mock

import common
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from paper.command_line import UserError
from tqdm import tqdm
from update_cost import TREES, label, map_shapes, sizes, update_of

os.environ.setdefault(
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1"
)  # it fails without a driver
TPUS = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "7x": "tpu7x:2x2x2"}
Figures = dict[str, dict[str, Any]]  # of each update


class Card(NamedTuple):
    """What XLA has to know of an NVIDIA card."""

    major: int  # compute capability
    minor: int
    cores: int
    gigahertz: float
    bandwidth: int  # bytes per second
    memory: int  # bytes that CUDA leaves
    l2_cache: int  # bytes
    shared_memory: int = 232_448  # bytes of a block at most
    threads: int = 2_048  # of a core


SMALLER = {"shared_memory": 101_376, "threads": 1_536}
CARDS = {
    "l4": Card(8, 9, 58, 2.04, 300_000_000_000, 23_650_000_000, 50_331_648, **SMALLER),
    "rtx4090": Card(
        8, 9, 128, 2.52, 1_008_000_000_000, 25_393_692_672, 75_497_472, **SMALLER
    ),
    "rtx5090": Card(
        12, 0, 170, 2.41, 1_792_000_000_000, 33_670_000_000, 100_663_296, **SMALLER
    ),
    "a100-40": Card(
        8, 0, 108, 1.41, 1_555_200_000_000, 42_331_013_120, 41_943_040, 166_912
    ),
    "l40s": Card(
        8, 9, 142, 2.52, 864_000_000_000, 47_660_000_000, 100_663_296, **SMALLER
    ),
    "h100": Card(9, 0, 132, 1.98, 3_352_320_000_000, 84_942_979_072, 52_428_800),
}
PODS = {"v5e": "v5e:16x16", "v5p": "v5p:8x8x4", "v6e": "v6e:16x16"}  # of 256 devices

# Updates as update_cost.py names them; the first of a group is the peer of the others.
GROUPS = [
    [
        "optax.sgd(0.1, 0.9)",
        "spa(1.0, 0.1)",
        "primal_averaging(optax.sgd(0.1), 0.1)",
        "track_momentum(spa(1.0, 0.1))",
    ],
    ["optax.sgd(schedule, 0.9)", "spa(schedule, 0.1)", "spa_from_sgdm(schedule, 0.9)"],
    ["optax.sgd(schedule, 0.9, True)", "spa_from_sgdm(schedule, 0.9, True)"],
    [
        "optax.contrib.schedule_free_sgd(0.1)",
        "spa(0.1, 0.05, 0.9)",
        "track_momentum(spa(0.1, 0.05, 0.9))",
    ],
    [
        "optax.adamw(1e-3)",
        "spa_adamw(1e-3)",
        "spa_adamw(1e-3, 0.05, 0.9)",
        "optax.adamw(1e-3, mu_dtype=bfloat16)",
        "primal_averaging(optax.adamw(1e-3), 0.1, 0.9)",
        "track_momentum(spa_adamw(1e-3))",
        "spa_adamw, bfloat16 params, 10 bytes",
        "the same, 8 bytes",
        "the same, 4 bytes",
        "the same, 4 bytes, μ_y = 0.9",
        "the same, 3 bytes, μ_y = 0.9",
        "stochastic_rounding(optax.adamw(1e-3, mu_dtype=bfloat16), key), "
        "bfloat16 params",
    ],
    [
        "optax.sgd(0.1, 0.9, accumulator_dtype=float32), bfloat16 params",
        "spa(1.0, 0.1), bfloat16 params",
        "the same with rounding_key",
        "the same with bfloat16 z",
        "the same with float8_e4m3fn z",
    ],
    [
        "stochastic_rounding(optax.lion(1e-3, mu_dtype=bfloat16), key), "
        "bfloat16 params",
        "stochastic_rounding(float8_momentum(optax.lion(1e-3), key), key), "
        "bfloat16 params",
    ],
]
PEERS = {row: group[0] for group in GROUPS for row in group}
CLIPPED = (
    "chain(clip_by_global_norm(1.0), spa(1.0, 0.1))"  # whose norm takes a collective
)

# What libtpu asks the machine for, unless it is told. It ends the process at flags for
# other compilers, which jax reads from XLA_FLAGS when it starts.
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": "",
}


@functools.cache
def devices_of(
    target: str, pod: bool = False, topology: str | None = None
) -> list[Any]:
    """Devices to compile for: of a host, of a pod, or of another topology of TPUs."""
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # starts jax, which reads XLA_FLAGS before they are hidden
    try:
        if target in CARDS:
            return _card_topology(CARDS[target]).devices
        with mock.patch.dict(os.environ, TPU_ENVIRONMENT):
            name = topology or (PODS if pod else TPUS)[target]
            return topologies.get_topology_desc(
                platform="tpu", topology_name=name
            ).devices
    except (RuntimeError, ValueError) as error:
        of_cards = " ".join(
            f"jax-cuda12-{kind}=={jax.__version__}" for kind in ("plugin", "pjrt")
        )
        package = f"--no-deps {of_cards}" if target in CARDS else "libtpu"
        raise UserError(
            f"--target {target} needs `pip install {package}`: {error}"
        ) from error


def _card_topology(card: Card) -> Any:
    config = f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {card.major}  minor: {card.minor} }}
          core_count: {card.cores}  fpus_per_core: 128  clock_rate_ghz: {card.gigahertz}
          memory_bandwidth: {card.bandwidth}  device_memory_size: {card.memory}
          l2_cache_size: {card.l2_cache}
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: {card.shared_memory}
          shared_memory_per_core: {card.shared_memory + 1024}
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536  threads_per_warp: 32
          threads_per_block_limit: 1024  threads_per_core_limit: {card.threads}
          block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9  minor: 10 }}
    """
    return topologies.get_topology_desc(
        platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=config
    )


@mock.patch.dict(os.environ, TPU_ENVIRONMENT)
def compile_update(tx: Any, shapes: Any, dtype: Any, devices: list[Any]) -> Any:
    """The update, each leaf split along its first axis that has a multiple of the
    devices.
    """
    mesh = Mesh(np.array(devices), "devices")

    def like(leaf: Any) -> jax.ShapeDtypeStruct:
        axis = next(
            (i for i, n in enumerate(leaf.shape) if n % len(devices) == 0), None
        )
        spec = (
            PartitionSpec()
            if axis is None
            else PartitionSpec(*[None] * axis, "devices")
        )
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    params = map_shapes(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes)
    params, state = (
        jax.tree.map(like, t) for t in (params, jax.eval_shape(tx.init, params))
    )
    step = jax.jit(functools.partial(common.update, tx), donate_argnums=(1, 2))
    return step.lower(params, params, state).compile()


class Program(NamedTuple):
    """What a compiled program does, counted in its main computation."""

    kernels: list[int]  # bytes that each reads and writes, in whatever memory
    num_collectives: int
    num_bytes: int  # read from the device's memory and written to it
    temporary: int  # bytes written there and not returned
    aliased: float  # of what is returned
    cycles: int  # 0 where XLA has no estimate


class Buffer(NamedTuple):
    """An array in the compiled program."""

    rank: int
    size: int  # in bytes
    in_hbm: bool  # in the device's memory, and not in that of a core


COLLECTIVE = (
    "(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?"
)
NO_WORK = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
INSTRUCTION = re.compile(
    r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)(?:, |$)(.*)"
)


def buffers(kind: str) -> list[Buffer]:
    """Those of an HLO type, such as `(f32[3,64]{1,0:T(8,128)}, f32[]{:T(128)S(6)})`."""
    result = []
    for bits, shape, layout in re.findall(
        r"[a-z]+(\d*)\w*\[([\d,]*)\]((?:\{[^{}]*\})?)", kind
    ):
        lengths = [int(length) for length in shape.split(",") if length]
        size = math.prod(lengths) * int(bits or 8) // 8
        result.append(Buffer(len(lengths), size, not re.search(r"S\([1-9]", layout)))
    return result


def in_hbm(arrays: list[Buffer]) -> int:
    return sum(array.size for array in arrays if array.in_hbm)


def text_of(compiled: Any) -> str:
    """A program, or nothing where jax 0.10.2 cannot print it: some of libtpu's for v5p
    and 7x.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return ""


def analyse(compiled: Any) -> Program:
    text = compiled.as_text()
    is_tpu = ":T(" in text  # which has a core for scalars
    results: dict[str, list[Buffer]] = {}
    kernels, num_collectives = [], 0
    read = written = returned = cycles = 0
    for line in text[text.index("\nENTRY ") :].splitlines():
        if (found := INSTRUCTION.match(line)) is None:
            continue
        is_root, name, kind, opcode, operands, rest = found.groups()
        inputs = [
            array for o in re.findall(r"%([\w.-]+)", operands) for array in results[o]
        ]
        outputs = results[name] = buffers(kind)
        num_collectives += bool(re.fullmatch(COLLECTIVE, opcode))
        if is_root:
            returned = in_hbm(outputs)
        if opcode.endswith(
            "-start"
        ):  # of a copy between memories, whose outputs `-done` has
            results[name] = inputs
        elif opcode not in NO_WORK:
            is_copy = (
                opcode in ("copy", "copy-done")
                and inputs[0].in_hbm
                and outputs[0].in_hbm
            )
            if opcode in ("fusion", "reduce") or (
                is_copy and (outputs[0].rank > 0 or not is_tpu)
            ):
                kernels.append(sum(array.size for array in inputs + outputs))
            # A copy may be that of a slice.
            from_hbm = opcode.endswith("-done") and inputs[0].in_hbm
            read += sum(array.size for array in outputs) if from_hbm else in_hbm(inputs)
            written += in_hbm(outputs)
            if estimate := re.search(r'"estimated_cycles":"(\d+)"', rest):
                cycles += int(estimate[1])
    memory, temporary = compiled.memory_analysis(), max(0, written - returned)
    aliased = memory.alias_size_in_bytes / memory.output_size_in_bytes
    return Program(kernels, num_collectives, read + written, temporary, aliased, cycles)


def measure(shapes: Any, devices: list[Any], title: str, wanted: list[str]) -> Figures:
    """The figures of a tree on one device, of the updates that are wanted and of their
    peers.
    """
    leaves, figures = sizes(shapes), {}
    with_peers = {*wanted, *(PEERS[name] for name in wanted)}
    for name in tqdm(
        [name for name in PEERS if name in with_peers], desc=title, leave=False
    ):
        start = time.perf_counter()
        tx, dtype = update_of(name)
        program = analyse(compile_update(tx, shapes, dtype, devices[:1]))
        figures[name] = {
            "bytes": program.num_bytes / sum(leaves),
            "kernels": len(program.kernels) / len(leaves),
            "temporary": program.temporary / sum(leaves),
            "cycles": program.cycles,
            "seconds": time.perf_counter() - start,
            "peer": PEERS[name],
        }
    return figures


def table(figures: Figures) -> str:
    rows = []
    for name, of_name in figures.items():
        of_peer = figures[of_name["peer"]]["cycles"]
        ratio = f"{of_name['cycles'] / of_peer:.3f}" if of_peer else ""
        row = [label(name), f"{of_name['bytes']:.1f}", f"{of_name['kernels']:.2f}"]
        rows.append(
            [*row, f"{of_name['temporary']:.2f}", ratio, f"{of_name['seconds']:.1f}"]
        )
    return common.markdown(
        ["update", "bytes", "kernels", "temporary", "cycles", "compile"], rows
    )


def collectives(target: str) -> dict[str, dict[str, int | None]]:
    """Those of each update with every leaf split over a host's devices, and over a
    pod's.
    """
    shapes = [(1024, 768), (768, 1024), (3, 3, 256, 512)]
    pods = [
        devices_of(target, pod=pod)
        for pod in (False, True)
        if not pod or target in PODS
    ]

    def count(name: str, devices: list[Any]) -> int | None:
        tx, dtype = update_of(name)
        program = compile_update(tx, shapes, dtype, devices)
        return analyse(program).num_collectives if text_of(program) else None

    return {
        name: {f"{len(devices)} devices": count(name, devices) for devices in pods}
        for name in tqdm([*PEERS, CLIPPED], desc="collectives", leave=False)
    }


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    add = functools.partial(parser.add_argument, nargs="+")
    add("--target", choices=[*TPUS, *CARDS], default=["v5e"], help="to compile for")
    add("--tree", choices=TREES, default=list(TREES), help="shapes of the params")
    add("--update", choices=PEERS, metavar="NAME", help="these and their peers only")
    arguments = common.parse(parser, argv)
    common.check_new(arguments.json)
    text, everything = [], {}
    for target in arguments.target:
        devices, of_target = devices_of(target), everything.setdefault(target, {})
        for name in arguments.tree:
            wanted, title = arguments.update or list(PEERS), f"{target}, {name}"
            of_target[name] = measure(TREES[name](), devices, title, wanted)
            text += [f"{title}; {versions(target)}", table(of_target[name])]
        if target in TPUS and arguments.update is None:
            counts = of_target["collectives"] = collectives(target)
            rows = []
            for update, of_update in counts.items():
                if any(of_update.values()):
                    cells = ["" if n is None else str(n) for n in of_update.values()]
                    rows.append([f"`{update}`", *cells])
            text.append(f"{target}, collectives; none of the others has any")
            text.append(common.markdown(["update", *counts[CLIPPED]], rows))
    common.write_json(arguments.json, everything)
    print("\n\n".join(text))
    return "\n\n".join(text)


def versions(target: str) -> str:
    package = "jax-cuda12-plugin" if target in CARDS else "libtpu"
    return f"jax {jax.__version__}, {package} {importlib.metadata.version(package)}"


if __name__ == "__main__":
    common.command_line.run(main)
