"""Residual networks: He et al.'s of 2016 for CIFAR-10, and of 2015 for ImageNet.

`dtype=jnp.bfloat16` computes convolutions in bfloat16. Params and all of BatchNorm stay
float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def convolution(
    before: int, after: int, kernel: int, strides: int, **options: Any
) -> nnx.Conv:
    init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    of = {"kernel_size": (kernel, kernel), "strides": strides, "padding": kernel // 2}
    return nnx.Conv(before, after, use_bias=False, kernel_init=init, **of, **options)


batch_norm = partial(nnx.BatchNorm, momentum=0.9)


class Block(nnx.Module):
    """A pre-activation residual block: BatchNorm and ReLU before each convolution.

    A bottleneck has kernels of 1×1, 3×3 and 1×1, the last with four times as many
    filters. Where the shape changes, the shortcut is a 1×1 convolution after the first
    BatchNorm and ReLU.
    """

    def __init__(
        self,
        width_in: int,
        width: int,
        strides: int,
        *,
        bottleneck: bool,
        **options: Any,
    ) -> None:
        """`width` is the number of filters."""
        shapes = [(width, 3, strides), (width, 3, 1)]
        if bottleneck:
            shapes = [(width, 1, 1), (width, 3, strides), (4 * width, 1, 1)]
        layers, before = [], width_in
        for width_out, kernel, stride in shapes:
            layers += [batch_norm(before, **options), nnx.relu]
            layers += [convolution(before, width_out, kernel, stride, **options)]
            before = width_out
        self.activate = nnx.Sequential(*layers[:2])
        self.residual = nnx.Sequential(*layers[2:])
        self.width_out = before
        reshapes = strides != 1 or width_in != before
        self.shortcut = (
            convolution(width_in, before, 1, strides, **options) if reshapes else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, h, w, width_in) to (b, h / strides, w / strides, width_out)."""
        h = self.activate(x)
        return (x if self.shortcut is None else self.shortcut(h)) + self.residual(h)


class Bottleneck(nnx.Module):
    """Convolutions of 1×1, 3×3 (with the strides) and 1×1, each with BatchNorm, and a
    shortcut.
    """

    def __init__(self, width_in: int, width: int, strides: int, **options: Any) -> None:
        """`width` is the number of filters; the last convolution has four times as
        many.
        """
        conv, norm = partial(convolution, **options), partial(batch_norm, **options)
        self.width_out = 4 * width
        self.residual = nnx.Sequential(
            *(conv(width_in, width, 1, 1), norm(width), nnx.relu),
            *(conv(width, width, 3, strides), norm(width), nnx.relu),
            *(conv(width, 4 * width, 1, 1), norm(4 * width)),
        )
        if strides != 1 or width_in != 4 * width:
            projection = conv(width_in, 4 * width, 1, strides)
            self.shortcut = nnx.Sequential(projection, norm(4 * width))
        else:
            self.shortcut = None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(b, h, w, width_in) to (b, h / strides, w / strides, 4 width)."""
        shortcut = x if self.shortcut is None else self.shortcut(x)
        return nnx.relu(shortcut + self.residual(x))


def stages(
    make: Callable[..., Any], before: int, depths: Sequence[int], widths: Sequence[int]
) -> tuple[nnx.Sequential, int]:
    """Stages of blocks, of which each but the first halves height and width."""
    blocks = []
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for i in range(depth):
            blocks.append(make(before, width, 2 if stage > 0 and i == 0 else 1))
            before = blocks[-1].width_out
    return nnx.Sequential(*blocks), before


class PreActResNet(nnx.Module):
    """He et al., Identity Mappings in Deep Residual Networks, 2016, for images of
    32×32.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        widths: Sequence[int],
        *,
        bottleneck: bool = False,
        stem_strides: int = 1,
        **options: Any,
    ) -> None:
        """Stages of `num_blocks` blocks; options are `rngs` and `dtype`."""
        self.stem = convolution(3, widths[0], 3, stem_strides, **options)
        make = partial(Block, bottleneck=bottleneck, **options)
        self.blocks, last = stages(make, widths[0], num_blocks, widths)
        self.norm = batch_norm(last, **options)
        self.head = nnx.Linear(last, 10, rngs=options["rngs"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (b, 32, 32, 3) to logits (b, 10)."""
        x = nnx.relu(self.norm(self.blocks(self.stem(x))))
        return self.head(x.mean((1, 2), dtype=jnp.float32))


class ResNet(nnx.Module):
    """He et al., Deep Residual Learning, 2015, with the strides at the 3×3
    convolutions.
    """

    def __init__(
        self, num_blocks: Sequence[int], width: int, num_classes: int, **options: Any
    ) -> None:
        """Stages of `num_blocks` blocks; each stage has twice the width of the one
        before.
        """
        self.stem = convolution(3, width, 7, 2, **options)
        self.norm = batch_norm(width, **options)
        widths = [width * 2**stage for stage in range(len(num_blocks))]
        self.blocks, last = stages(
            partial(Bottleneck, **options), width, num_blocks, widths
        )
        self.head = nnx.Linear(last, num_classes, rngs=options["rngs"])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Images (b, h, w, 3) to logits (b, num_classes)."""
        x = nnx.relu(self.norm(self.stem(x)))
        pad: Any = ((1, 1), (1, 1))  # which flax takes, but has no type for
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=pad)
        return self.head(self.blocks(x).mean((1, 2), dtype=jnp.float32))


WIDTHS = (64, 128, 256, 512)
PREACT_RESNETS: dict[str, Callable[..., PreActResNet]] = {
    "small": partial(
        PreActResNet, (1, 1, 1), (16, 32, 64), stem_strides=2
    ),  # for a CPU
    "resnet18": partial(PreActResNet, (2, 2, 2, 2), WIDTHS),
    "resnet50": partial(PreActResNet, (3, 4, 6, 3), WIDTHS, bottleneck=True),
    "resnet152": partial(
        PreActResNet, (3, 8, 36, 3), WIDTHS, bottleneck=True
    ),  # the paper's
}
RESNETS: dict[str, Callable[..., ResNet]] = {
    "small": partial(ResNet, (1, 1), 8),  # for a CPU
    "resnet50": partial(ResNet, (3, 4, 6, 3), 64),  # the paper's
}
