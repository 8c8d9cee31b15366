"""nanoGPT's own PyTorch code against nanogpt.py: the same weights and batches, 30 steps
of loss.

    pip install torch --index-url https://download.pytorch.org/whl/cpu
    python benchmarks/nanogpt_parity.py

Takes `model.py` and the functions `get_batch` and `get_lr` of `train.py` from a clone
of https://github.com/karpathy/nanoGPT. Both sides train by AdamW as published, in
float32. The largest relative difference of the losses should be some roundings: 1e-6.
"""

import ast
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import language_model
import nanogpt
import numpy as np
from language_rows import ROWS

URL, COMMIT = (
    "https://github.com/karpathy/nanoGPT",
    "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
)
STEPS, LIMIT = 30, 3e-6


def functions_of(script: Path, names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a script that cannot be imported, with its settings."""
    tree = ast.parse(script.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    exec(compile(tree, str(script), "exec"), names)
    return names


def params_of(model: Any) -> Any:
    """The weights of nanoGPT's model, by the names of nanogpt.py."""
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}

    def leaf(path: Any, _: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        value = weights.pop(f"transformer.{name}.weight")
        return jnp.array(value if name in ("wte", "wpe") else value.T)  # a copy

    like = jax.eval_shape(nanogpt.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(leaf, like)
    assert not weights, weights.keys()
    return params


def compare(code: Path, data_dir: Path) -> list[tuple[float, float]]:
    """The losses of every step, nanoGPT's and ours."""
    import torch  # pyright: ignore[reportMissingImports]

    sys.path.append(str(code))
    from model import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    torch.manual_seed(1337)
    vocabulary, length, *network = nanogpt.SIZES
    model = GPT(GPTConfig(length, vocabulary, *network, dropout=0.0, bias=False))
    rate, betas = nanogpt.RATE, (nanogpt.B1, nanogpt.B2)
    optimizer = model.configure_optimizers(nanogpt.DECAY, rate, betas, "cpu")
    row = ROWS["AdamW, as nanoGPT has it"]
    start, step = language_model.make_steps(
        row, row.settings, nanogpt.STEPS, jax.random.key(0)
    )
    carry, found = start(params_of(model)), []
    with tempfile.TemporaryDirectory() as folder:
        nanogpt.read(data_dir)[0].astype(np.uint16).tofile(Path(folder) / "train.bin")
        names: dict[str, Any] = {"np": np, "torch": torch, "math": math, "os": os}
        names |= {"data_dir": folder, "block_size": length, "batch_size": nanogpt.BATCH}
        names |= {
            "learning_rate": rate,
            "min_lr": rate / 10,
            "warmup_iters": nanogpt.WARM_UP,
        }
        names |= {
            "lr_decay_iters": nanogpt.STEPS,
            "device": "cpu",
            "device_type": "cpu",
        }
        functions = functions_of(code / "train.py", names)
        for k in range(STEPS):
            batch = functions["get_batch"]("train")
            for group in optimizer.param_groups:
                group["lr"] = functions["get_lr"](k)
            _, loss = model(*batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), nanogpt.CLIP)
            optimizer.step()
            carry, ours = step(
                carry, k, *(jnp.asarray(x.numpy(), jnp.int32) for x in batch)
            )
            found.append((loss.item(), float(ours)))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--data-dir", type=Path, default=Path("data"), help="of Tiny Shakespeare"
    )
    arguments = common.parse(parser, argv)
    common.check_new(arguments.json)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", URL, folder], check=True)
        subprocess.run(["git", "-C", folder, "checkout", "--quiet", COMMIT], check=True)
        found = compare(Path(folder), arguments.data_dir)
    common.write_json(arguments.json, found)
    largest = max(abs(ours / theirs - 1) for theirs, ours in found)
    print(f"{STEPS} steps, loss {found[0][0]:.7f} to {found[-1][0]:.7f}")
    print(f"The largest relative difference is {largest:.1e}.")
    if not largest < LIMIT:
        raise common.command_line.UserError(
            f"the losses must agree to {LIMIT}, got {largest:.1e}"
        )


if __name__ == "__main__":
    common.command_line.run(main)
