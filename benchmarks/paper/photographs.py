"""Photographs of ImageNet's usual size, to try `train_imagenet.py` on without ImageNet.

    python benchmarks/paper/photographs.py DIR

writes DIR/train and DIR/val: pieces, 500×375, of the two photographs that come with scikit-learn.
"""

from collections.abc import Sequence
from pathlib import Path

import command_line
import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

NUM_TRAIN, NUM_VAL = 256, 32  # images of each class


def write_tree(
    folder: Path, num_train: int, num_val: int, smallest: tuple[int, int], largest: tuple[int, int]
) -> None:
    """So many JPEGs of each of three classes, of heights and widths from smallest to largest."""
    temple, flower = load_sample_images().images
    classes = {"a temple": temple, "flower": flower, "upside down": flower[::-1]}
    rng = np.random.default_rng(0)
    for part, num in (("train", num_train), ("val", num_val)):
        for name, photograph in classes.items():
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            for i in range(num):
                height, width = rng.integers(smallest, largest, endpoint=True)
                top, left = rng.integers(0, np.subtract(photograph.shape[:2], (height, width)) + 1)
                piece = Image.fromarray(photograph[top : top + height, left : left + width])
                piece.save(folder / part / name / f"{i}.{'JPEG' if i % 2 else 'jpg'}", quality=90)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.make_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write them")
    write_tree(parser.parse_args(argv).folder, NUM_TRAIN, NUM_VAL, (375, 500), (375, 500))


if __name__ == "__main__":
    command_line.run(main)
