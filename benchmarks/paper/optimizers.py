"""The optimizers that are compared, with the schedules of the paper's recipe."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import optax
from command_line import UserError
from formulas import momentum_drop

from spa_optax import diagnostics, spa, spa_from_sgdm, stagewise

Tx = optax.GradientTransformation
FACTOR = 10.0  # of the learning rate at a drop
# per step, where η falls gradually: a factor of 10 takes 4,606 steps, 11.8 epochs
RATE = 1.0005

OPTIMIZERS = {
    "sgdm": "optax.sgd with momentum, in PyTorch's form: α ÷ 10 at the drops",
    "spa_from_sgdm": "the same, as primal averaging",
    "spa-eta": "primal averaging, η ÷ 10 at the drops",
    "spa-abrupt": "η ÷ 10 and c × 10, at once",
    "spa-gradual": (
        "η ÷ 10 and c × 10, by 1.0005 a step (more where the schedule is shortened)"
    ),
    "drop-eta": "spa-eta without momentum (c = 1) after epoch 1, η held",
    "drop-alpha": (
        "spa-eta without momentum after epoch 1, α held, which divides η by 10 as well"
    ),
    "tenth": (
        "spa-eta with momentum, but η ÷ 10 after epoch 1: the control for drop-alpha"
    ),
}


class Recipe(NamedTuple):
    """How long to train, and when to divide the learning rate by `FACTOR`."""

    epochs: int
    drops: tuple[int, ...]  # the first epochs, from 0, with the lower rate


CIFAR10, IMAGENET = Recipe(300, (150, 225)), Recipe(100, (30, 60, 90))


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings that the result of a run depends on."""

    optimizer: str
    seed: int
    model: str
    bfloat16: bool
    epochs: int
    batch: int
    learning_rate: float
    averaging: float
    weight_decay: float
    track: bool


def make_optimizer(config: Config, recipe: Recipe, steps_per_epoch: int) -> Tx:
    """One of `OPTIMIZERS`, with the recipe's schedule shortened to `config.epochs`."""
    eta, c = config.learning_rate, config.averaging
    alpha, beta = eta * c, 1 - c
    scale = config.epochs / recipe.epochs
    drops = [round(epoch * scale * steps_per_epoch) for epoch in recipe.drops]
    if drops[0] < 1 or any(
        after <= before for before, after in itertools.pairwise(drops)
    ):
        raise UserError(
            f"--epochs must leave steps between the drops, got drops at steps {drops}"
        )
    # As gradual as the paper's, but each drop must be complete before the next.
    shortest = min(after - before for before, after in itertools.pairwise(drops))
    step_divisor = max(RATE ** (1 / scale), FACTOR ** (1 / shortest))
    alphas = optax.piecewise_constant_schedule(alpha, dict.fromkeys(drops, 1 / FACTOR))
    constant_c = partial(stagewise, eta, c, divisor=FACTOR, averaging_mode="constant")
    eta_only = constant_c(drops)
    make: dict[str, Callable[[], Tx]] = {
        "sgdm": lambda: optax.sgd(alphas, momentum=beta),
        "spa_from_sgdm": lambda: spa_from_sgdm(alphas, momentum=beta),
        "spa-eta": lambda: spa(*eta_only),
        "spa-abrupt": lambda: spa(*stagewise(eta, c, drops, FACTOR)),
        "spa-gradual": lambda: spa(
            *stagewise(eta, c, drops, FACTOR, step_divisor=step_divisor)
        ),
        "drop-eta": lambda: spa(*momentum_drop(*eta_only, steps_per_epoch, hold="eta")),
        "drop-alpha": lambda: spa(
            *momentum_drop(*eta_only, steps_per_epoch, hold="alpha")
        ),
        "tenth": lambda: spa(*constant_c([steps_per_epoch, *drops])),
    }
    if config.optimizer == "tenth" and drops[0] <= steps_per_epoch:
        raise UserError(
            f"tenth needs a first drop after epoch 1, got {config.epochs} epochs"
        )
    tx = make[config.optimizer]()
    if config.track:
        tx = diagnostics.track_momentum(tx)
    return optax.chain(optax.add_decayed_weights(config.weight_decay), tx)
