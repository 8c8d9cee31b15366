"""The optimizers of today, as they are, in bfloat16 and averaged, on a small language model.

    python benchmarks/language_model.py --json benchmarks/results/text.jsonl

Trains a decoder of bytes on the modules of Python's own standard library, an eighth of whose files
are held out. What is compared is in bases.py, how it is tuned in grid.py.
"""

import functools
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import grid
import jax
import jax.numpy as jnp
import numpy as np
from bases import BF16
from flax import nnx


@functools.cache
def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and those of an eighth of the files, by a hash of their path."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[list[bytes]] = [[], []]
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not {"site-packages", "dist-packages", "test", "tests"} & set(name.parts):
            files[zlib.crc32(name.as_posix().encode()) % 8 == 0].append(path.read_bytes())
    seen, unseen = (np.frombuffer(b"\0".join(f), np.uint8) for f in files)
    return seen, unseen


class Block(nnx.Module):
    """Attention, then a perceptron, each behind a LayerNorm."""

    def __init__(
        self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs, *, causal: bool = True
    ) -> None:
        """Params are float32, whatever the dtype to compute in."""
        self.causal = causal
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, dtype=dtype, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shaped like `x`."""
        mask = nnx.make_causal_mask(x[..., 0]) if self.causal else None
        x += self.attention(self.norm_1(x), mask=mask)
        return x + self.narrow(nnx.gelu(self.widen(self.norm_2(x))))


class Decoder(nnx.Module):
    """Logits of the next byte."""

    def __init__(
        self, width: int, heads: int, layers: int, length: int, dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """For texts of `length` bytes."""
        self.tokens = nnx.Embed(256, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
        blocks = (Block(width, heads, dtype, rngs) for _ in range(layers))
        self.blocks = nnx.Sequential(*blocks)
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From (batch, length) to (batch, length, 256)."""
        x = self.tokens(tokens) + self.places(jnp.arange(tokens.shape[1]))
        return self.tokens.attend(self.norm(self.blocks(x)))


def make_task(sizes: dict[str, int]) -> grid.Task:
    """To foresee the next byte."""

    def batches(text: jax.Array) -> Callable[[jax.Array], grid.Batch]:
        last = text.size - sizes["length"] - 1

        def batch(key: jax.Array) -> grid.Batch:
            starts = jax.random.randint(key, (sizes["batch"], 1), 0, last)
            tokens = text[starts + jnp.arange(sizes["length"] + 1)].astype(jnp.int32)
            return tokens[:, :-1], tokens[:, 1:]

        return batch

    shape = {name: sizes[name] for name in ("width", "heads", "layers", "length")}
    seen, unseen = (batches(jnp.asarray(text)) for text in read_text())
    return grid.Task("text", lambda rngs: Decoder(**shape, dtype=BF16, rngs=rngs), seen, unseen)


def main(argv: list[str] | None = None) -> str:
    sizes = grid.NETWORK | {"length": (128, "of a text, in bytes"), "batch": (8, "texts at a step")}
    arguments = grid.parse(common.parser(__doc__), argv, sizes)
    return grid.compare(make_task(arguments.sizes), arguments)


if __name__ == "__main__":
    common.command_line.run(main)
