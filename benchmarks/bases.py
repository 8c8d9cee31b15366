"""Optimizers as base × form: a finished Optax optimizer, and a wrapper of the package around it.

A base is an optimizer of other people. A form says how its params are stored and averaged. Every
base has every form, through `stochastic_rounding` and `primal_averaging` alone.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spa_optax import (
    eval_params,
    float8_momentum,
    in_float32,
    primal_averaging,
    scale_by_factored_second_moment,
    schedule_free_averaging,
    stochastic_rounding,
)

F32, BF16 = jnp.float32, jnp.bfloat16
B2, DECAY = 0.99, 0.1
MIN_SIZE = 32  # of the axes of what is factored: the heads of attention
Tx = optax.GradientTransformation
Hypers = dict[str, Any]

# Tuning moves over these grids. Names are those of the hyper-parameters of a base or a form.
GRIDS = {
    "rate": tuple(0.00025 * 2.0**i for i in range(-6, 14)),
    "momentum": (0.0, 0.4, 0.6, 0.8, 0.9, 0.95, 0.975, 0.99),
    "c": (1.0, 0.4, 0.2, 0.1, 0.05, 0.025, 0.0125, 0.00625),
    "mu_y": (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99),
    "decay": (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998),
}


# ------------------------------------------------------------------------------------------- bases


class Base(NamedTuple):
    """An optimizer, from its rate, its momentum, a dtype for its state and a key."""

    make: Callable[[optax.Schedule, Any, Any, jax.Array], Tx]
    rate: float  # to begin tuning with
    momentum: float | None = None


def finished(direction: Tx, rate: optax.Schedule) -> Tx:
    decay = optax.add_decayed_weights(DECAY)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(rate))


def adam_factored(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    """With momentum it is that of the directions, as in Adafactor."""
    del key
    scale = scale_by_factored_second_moment(B2, min_dim_size_to_factor=MIN_SIZE)
    if momentum is not None:
        scale = optax.chain(scale, optax.ema(momentum, debias=False, accumulator_dtype=dtype))
    return finished(scale, rate)


def adamw(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    del key
    return optax.adamw(rate, momentum, B2, mu_dtype=dtype, weight_decay=DECAY)


def lion(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    """The momentum is b2, of what is stored. Rates are smaller than Adam's, so decay is larger."""
    del key
    return optax.lion(rate, b1=0.9, b2=momentum, mu_dtype=dtype, weight_decay=5 * DECAY)


def sgd(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    """Rates are far larger than Adam's, so decay is smaller."""
    del key
    decay = optax.add_decayed_weights(DECAY / 1000)
    return optax.chain(decay, optax.sgd(rate, momentum, accumulator_dtype=dtype))


def fan_in(path: Any, x: jax.Array) -> int | None:
    """How many axes of a kernel are its inputs; None for all else."""
    *_, layer, name = (entry.key for entry in path)
    if name != "kernel":
        return None
    return x.ndim - 1 if layer == "out" else 1  # "out" joins the heads of attention


def matrices(params: Any) -> Any:
    """The same for Muon."""

    def leaf(path: Any, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        axes, n = tuple(range(x.ndim)), fan_in(path, x)
        return None if n is None else optax.contrib.MuonDimensionNumbers(axes[:n], axes[n:])

    return jax.tree_util.tree_map_with_path(leaf, params)


def labels(label: Callable[[Any, jax.Array], str]) -> Callable[[Any], Any]:
    return functools.partial(jax.tree_util.tree_map_with_path, label)


muon_like_adam = functools.partial(
    optax.contrib.muon, muon_weight_dimension_numbers=matrices, consistent_rms=0.2
)


def muon(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    """With steps of Adam's size, and AdamW for what is no kernel of a layer."""
    del key
    adam: dict[str, Any] = {"adam_b1": 0.8, "adam_b2": B2, "adam_weight_decay": DECAY}
    return muon_like_adam(rate, beta=momentum, weight_decay=DECAY, mu_dtype=dtype, **adam)


def in_float8(make: Callable[..., Tx]) -> Callable[..., Tx]:
    """The same base with its momentum in 8 bits."""
    return lambda rate, momentum, dtype, key: float8_momentum(make(rate, momentum, F32, key), key)


def muon_without_momentum(rate: optax.Schedule, momentum: Any, dtype: Any, key: jax.Array) -> Tx:
    """And Adam's factored direction for what is no kernel."""
    tx = muon_like_adam(-1.0, beta=0.0, nesterov=False)
    first_step = lambda updates, params: tx.update(updates, tx.init(params), params)[0]
    rules: dict[Any, Tx] = {
        "kernel": finished(optax.stateless(first_step), rate),
        "other": adam_factored(rate, momentum, dtype, key),
    }
    kind = lambda path, x: "kernel" if fan_in(path, x) else "other"
    return optax.partition(rules, labels(kind))


BASES = {
    "Adam, factored": Base(adam_factored, 0.004),
    "AdamW": Base(adamw, 0.004, 0.8),
    "AdamW, factored": Base(adam_factored, 0.004, 0.8),
    "Lion": Base(lion, 0.001, 0.95),
    "Muon": Base(muon, 0.016, 0.8),
    "Muon without momentum": Base(muon_without_momentum, 0.032),
    "SGD": Base(sgd, 0.256, 0.9),
    "AdamW, factored, float8 m": Base(in_float8(adam_factored), 0.004, 0.8),
    "Lion, float8 m": Base(in_float8(lion), 0.001, 0.95),
    "Muon, float8 m": Base(in_float8(muon), 0.016, 0.8),
}


# ------------------------------------------------------------------------------------------- forms


class Run(NamedTuple):
    """What a form needs of a run."""

    num_steps: int
    key: jax.Array

    @property
    def warm_up(self) -> int:
        """In steps."""
        return self.num_steps // 10


def cosine(run: Run) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, 1.0, run.warm_up, run.num_steps)


def constant(run: Run) -> optax.Schedule:
    return optax.warmup_constant_schedule(0.0, 1.0, run.warm_up)


class Form(NamedTuple):
    """How the params of a base are stored, averaged and evaluated."""

    dtype: Any  # of the params, and of the state where the base can
    wrap: Callable[[Tx, Hypers, Run], Tx]
    start: Hypers = {}  # noqa: RUF012  # its hyper-parameters, to begin tuning with
    schedule: Callable[[Run], optax.Schedule] = cosine
    faster: float = 1.0  # the rate to begin with, over that of the base
    tuned_as: str | None = None  # another form, whose best hyper-parameters this one takes
    evaluate: Callable[[Any, Any], Any] = eval_params


def averaged(c: Any, mu_y: Any, base: Tx, run: Run, dtype: Any = BF16, **options: Any) -> Tx:
    return primal_averaging(base, c, mu_y, state_dtype=dtype, rounding_key=run.key, **options)


def schedule_free(base: Tx, h: Hypers, run: Run, dtype: Any = BF16) -> Tx:
    c = schedule_free_averaging(constant(run), run.warm_up)
    return averaged(c, h["mu_y"], base, run, dtype)


def constant_c(base: Tx, h: Hypers, run: Run, dtype: Any = BF16) -> Tx:
    return averaged(h["c"], h["mu_y"], base, run, dtype)


def authors_gpa(base: Tx, h: Hypers, run: Run, dtype: Any = BF16) -> Tx:
    return averaged(h["c"], h["mu_y"], base, run, dtype, params_of_base="z")


def with_average(base: Tx, decay: Any, dtype: Any, key: jax.Array) -> Tx:
    """Beside the params, e ← e + (1 − decay)(x − e), which training does not see."""
    mean = stochastic_rounding(optax.identity(), jax.random.fold_in(key, 1))

    def init(params: Any) -> Any:
        e = optax.tree.cast(params, dtype)
        return base.init(params), mean.init(e), e

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        of_base, of_mean, e = state
        u, of_base = base.update(updates, of_base, params)
        x = optax.apply_updates(params, u)
        towards = lambda x, e: (1 - decay) * (x.astype(F32) - e.astype(F32))
        step, of_mean = mean.update(jax.tree.map(towards, x, e), of_mean, e)
        return u, (of_base, of_mean, optax.apply_updates(e, step))

    return Tx(init, update)


def averaged_in(dtype: Any, tuned_as: str | None = "averaged") -> Form:
    """With z in this dtype, c and μ_y constant."""
    wrap = functools.partial(constant_c, dtype=dtype)
    return Form(BF16, wrap, {"c": 0.1, "mu_y": 0.9}, faster=2, tuned_as=tuned_as)


def weights_averaged_in(dtype: Any, schedule: Any = constant) -> Form:
    """With an average beside them, both in this dtype."""

    def wrap(base: Tx, h: Hypers, run: Run) -> Tx:
        tx = base if dtype == F32 else stochastic_rounding(base, run.key)
        return with_average(tx, h["decay"], dtype, run.key)

    average = lambda state, params: state[2]
    return Form(dtype, wrap, {"decay": 0.98}, schedule, evaluate=average)


itself = lambda state, params: params
FORMS = {
    "float32": Form(F32, lambda base, h, run: base, evaluate=itself),
    "bfloat16": Form(BF16, lambda base, h, run: stochastic_rounding(base, run.key)),
    "bfloat16, to nearest": Form(
        BF16, lambda base, h, run: in_float32(base), tuned_as="bfloat16", evaluate=itself
    ),
    "averaged": averaged_in(BF16, tuned_as=None),
    "averaged, 8 bits": averaged_in(jnp.float8_e4m3fn),
    "averaged, 32 bits": averaged_in(F32),
    "Schedule-Free, 8 bits": Form(
        BF16,
        functools.partial(schedule_free, dtype=jnp.float8_e4m3fn),
        {"mu_y": 0.9},
        constant,
        faster=2,
        tuned_as="Schedule-Free",
    ),
    "Schedule-Free": Form(BF16, schedule_free, {"mu_y": 0.9}, constant, faster=2),
    "GPA": Form(BF16, authors_gpa, {"c": 0.1, "mu_y": 0.7}),
    "EMA": weights_averaged_in(F32),
    "EMA, bfloat16": weights_averaged_in(BF16),
    "EMA, cosine": weights_averaged_in(F32, cosine),
}


CELLS = list(itertools.product(BASES, FORMS))


class Scheme(NamedTuple):
    """What is trained: an optimizer from its hyper-parameters and a run."""

    dtype: Any  # of the params
    make: Callable[[Hypers, Run], Tx]
    start: Hypers = {}  # noqa: RUF012
    evaluate: Callable[[Any, Any], Any] = itself


def scheme(base_name: str, form_name: str, rate_scale: float = 1.0) -> Scheme:
    """A base in a form. Rates begin at `rate_scale` times what they do on text."""
    base, form = BASES[base_name], FORMS[form_name]
    rate = base.rate * form.faster * rate_scale
    momentum = {} if base.momentum is None else {"momentum": base.momentum}

    def make(h: Hypers, run: Run) -> Tx:
        shape = form.schedule(run)
        dtype = None if form.dtype == F32 else form.dtype
        tx = base.make(lambda k: h["rate"] * shape(k), h.get("momentum"), dtype, run.key)
        return form.wrap(tx, h, run)

    return Scheme(form.dtype, make, {"rate": rate, **momentum, **form.start}, form.evaluate)
