"""The family against torch, Keras, and the code of Schedule-Free's authors.

It needs the extra `oracles`, which `.ci/run oracles` installs. Runs are in float64, of
200 noisy steps.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from helpers import x64
from test_methods import NUM_STEPS, START, equal, gradient, ours, schedule

from spa_optax import (
    eval_params,
    schedule_free_averaging,
    spa,
    spa_adamw,
    spa_from_sgdm,
)

torch = pytest.importorskip("torch")
schedulefree = pytest.importorskip("schedulefree")
os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras")

ALPHAS = 0.02 * np.abs(
    np.sin(np.arange(NUM_STEPS) / 30)
)  # rises, falls, and is 0 at first


def torch_steps(make: Callable[[list[Any]], Any], step: Callable[..., None]) -> Any:
    """The param and its state after every step."""
    param = torch.nn.Parameter(torch.tensor(START))
    optimizer = make([param])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for k in range(NUM_STEPS):
        param.grad = torch.tensor(np.array(gradient(k, param.detach().numpy())))
        step(k, optimizer, param)
        yield param.detach().numpy(), optimizer.state[param]


@pytest.mark.parametrize("nesterov", [False, True])
def test_torch_sgd(nesterov: bool) -> None:
    def step(k: int, optimizer: Any, param: Any) -> None:
        optimizer.param_groups[0]["lr"] = ALPHAS[k]
        optimizer.step()

    make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=nesterov)
    with x64():
        rates = np.append(ALPHAS, np.zeros(3_000))  # as far as the look-ahead sees
        mine = ours(spa_from_sgdm(schedule(rates), 0.9, nesterov))
        for (y, _), (expected, _) in zip(mine, torch_steps(make, step), strict=True):
            equal(y, expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_keras_sgd(nesterov: bool) -> None:
    """Its rate is inside the buffer."""
    keras.config.set_floatx("float64")
    with x64():
        param = keras.Variable(START, dtype="float64")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=nesterov)
        optimizer.build([param])
        tx = spa(schedule(ALPHAS / 0.1), 0.1, 0.9 if nesterov else 1.0)
        for k, (y, _) in enumerate(ours(tx)):
            optimizer.learning_rate = ALPHAS[k]
            optimizer.apply([gradient(k, param.value)], [param])
            equal(y, param.value)


def authors(name: str, tx: optax.GradientTransformation, **options: Any) -> None:
    """y and x of one of the authors' optimizers are ours."""
    make = functools.partial(getattr(schedulefree, name), **options)
    with x64(), jax.numpy_dtype_promotion("standard"):
        steps = torch_steps(make, lambda k, optimizer, param: optimizer.step())
        for (y, state), (expected, theirs) in zip(ours(tx), steps, strict=True):
            equal(y, expected)
            equal(eval_params(state, y), theirs["x"])


def averaging_of(weights: np.ndarray) -> np.ndarray:
    """The averaging that makes x the mean of the z with some weights."""
    return weights / np.maximum(np.cumsum(weights), 1e-30)


@pytest.mark.parametrize("r", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("warmup", [0, 30])
def test_schedule_free_sgd(warmup: int, r: float) -> None:
    counts = np.arange(1, NUM_STEPS + 1)
    rates = 0.1 * np.minimum(counts / max(warmup, 1), 1)
    rate, c = schedule(rates), schedule(averaging_of(counts**r * rates**2))
    if r == 0:
        with x64():
            c = schedule_free_averaging(0.1, warmup)
    options = {"lr": 0.1, "momentum": 0.9, "warmup_steps": warmup, "r": r}
    authors("SGDScheduleFreeReference", spa(rate, c, 0.9), **options)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_schedule_free_adamw(weight_decay: float) -> None:
    rate = schedule(0.02 * np.minimum(np.arange(1, NUM_STEPS + 1) / 30, 1))
    with x64():
        c = schedule_free_averaging(0.02, 30)
    tx = spa_adamw(rate, c, 0.9, b2=0.99, eps=1e-8, weight_decay=weight_decay)
    options = {
        "lr": 0.02,
        "betas": (0.9, 0.99),
        "warmup_steps": 30,
        "weight_decay": weight_decay,
    }
    authors("AdamWScheduleFreeReference", tx, **options)


def test_schedule_free_plus() -> None:
    """With its first steps, power of the count and annealing. Its Polyak rate is 1."""
    if not hasattr(schedulefree, "AdamCScheduleFreePlusPaper"):
        pytest.skip("the release of `schedulefree` has no ScheduleFree+")
    steps, start, r, first, last = 120, 30, 1.0, 0.9, 0.965

    def step(k: int, optimizer: Any, param: Any) -> None:
        g, state = param.grad, optimizer.state[param]
        p = min(k / steps, 1.0)
        beta = 1 - np.exp(np.log(1 - first) * (1 - p) + np.log(1 - last) * p)
        apart = (g * (state["z"] - state["x"])).sum() if "z" in state else 0.0
        optimizer.step_func(float(g.abs().sum() * np.sqrt(np.pi / 2) - beta * apart))

    options = {"sf_beta1": first, "sf_beta1_max": last, "sf_beta1_anneal_steps": steps}
    plus = schedulefree.AdamCScheduleFreePlusPaper
    make = functools.partial(plus, lr=0.02, r=r, c_warmup=start, **options)
    progress = np.minimum(np.arange(NUM_STEPS) / steps, 1)
    mu_y = schedule(1 - (1 - first) ** (1 - progress) * (1 - last) ** progress)
    with x64(), jax.numpy_dtype_promotion("standard"):
        counts = np.arange(1, NUM_STEPS + 1)
        weights = np.where(counts > start, counts**r, 0)
        c = schedule(np.where(counts > start, averaging_of(weights), 1))
        tx = optax.chain(optax.scale_by_adam(0.9, 0.95), spa(0.02, c, mu_y))
        for (y, state), (expected, theirs) in zip(
            ours(tx), torch_steps(make, step), strict=True
        ):
            equal(y, expected)
            equal(eval_params(state, y), theirs["x"])
