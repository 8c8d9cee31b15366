"""The optimizers of language_model.py on images: a small vision transformer on CIFAR-10.

    python benchmarks/vision_transformer.py --data-dir DIR --json benchmarks/results/images.jsonl

Trains a transformer to classify the 50,000 images for training, in patches of 8×8, without
augmentation, and validates it by the cross-entropy of the 10,000 others. What is compared
is in bases.py, how it is tuned in grid.py. CIFAR-10 is downloaded to DIR if it is not there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import grid
import jax
import jax.numpy as jnp
import language_model
from flax import nnx
from low_precision import BF16
from paper.cifar_data import TEST, TRAIN, normalize, read

PATCH = 8


class VisionTransformer(nnx.Module):
    """Logits of the classes of images."""

    def __init__(self, width: int, heads: int, layers: int, dtype: Any, rngs: nnx.Rngs) -> None:
        """For images of 32×32."""
        self.patches = nnx.Linear(PATCH * PATCH * 3, width, dtype=dtype, rngs=rngs)
        self.places = nnx.Embed((32 // PATCH) ** 2, width, dtype=dtype, rngs=rngs)
        block = lambda: language_model.Block(width, heads, dtype, rngs, causal=False)
        self.blocks = nnx.Sequential(*(block() for _ in range(layers)))
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.classes = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """From (batch, 32, 32, 3) to (batch, 10)."""
        n = 32 // PATCH
        patches = images.reshape(-1, n, PATCH, n, PATCH, 3).swapaxes(2, 3)
        x = self.patches(patches.reshape(-1, n * n, PATCH * PATCH * 3))
        x += self.places(jnp.arange(n * n))
        return self.classes(self.norm(self.blocks(x)).mean(1))


def make_task(sizes: dict[str, int], folder: Path) -> grid.Task:
    """To classify CIFAR-10."""

    def batches(names: list[str]) -> Callable[[jax.Array], grid.Batch]:
        images, labels = map(jnp.asarray, read(folder, names))

        def batch(key: jax.Array) -> grid.Batch:
            i = jax.random.randint(key, (sizes["batch"],), 0, len(labels))
            return normalize(images[i]), labels[i]

        return batch

    shape = {name: sizes[name] for name in ("width", "heads", "layers")}
    return grid.Task(
        "images",
        lambda rngs: VisionTransformer(**shape, dtype=BF16, rngs=rngs),
        batches(TRAIN),
        batches(TEST),
        rate_scale=1 / 4,
    )


def main(argv: list[str] | None = None) -> str:
    parser = common.parser(__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="of CIFAR-10")
    sizes = grid.NETWORK | {"batch": (64, "images at a step")}
    arguments = grid.parse(parser, argv, sizes)
    return grid.compare(make_task(arguments.sizes, arguments.data_dir), arguments)


if __name__ == "__main__":
    common.command_line.run(main)
