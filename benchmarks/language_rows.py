"""The optimizers that language_model.py compares, each with its best settings.

`nanogpt.B2`, weight decay of matrices alone, clipping and the schedule's shape are the
same for all. The settings are the best, or nearly so, of those that
were tried on seeds 0 and 6: results/language_model.md lists them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import nanogpt
import optax
from nanogpt import B2, DECAY
from optax.contrib import MuonDimensionNumbers
from rivals import BF16, COMPANDED, DYNAMIC, F32, LINEAR, Tx, in_codes, with_low_half

from spa_optax import (
    float8_momentum,
    in_float32,
    primal_averaging,
    schedule_free_averaging,
    spa_adamw,
    spa_from_sgdm,
    stochastic_rounding,
)

# From the schedule of the rate, a key and the other settings by name.
Make = Callable[..., Tx]
E4M3 = jnp.float8_e4m3fn


class Row(NamedTuple):
    """An optimizer, and its best settings by name."""

    make: Make
    settings: dict[str, float]  # "rate" is its peak
    dtype: Any = F32  # of the params
    floor: float = 0.1  # the last rate over the peak
    compute: Any = F32  # the dtype in which the network computes


matrices: dict[str, Any] = {"mask": nanogpt.is_matrix}
recipe: dict[str, Any] = {"b2": B2, "weight_decay": DECAY, **matrices}


def adamw(rate: optax.Schedule, key: jax.Array, b1: float, **options: Any) -> Tx:
    return optax.adamw(rate, b1, **recipe, **options)


nadamw = functools.partial(adamw, nesterov=True)


def nadamw_in_bfloat16(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
    """Optax' own steps from bfloat16 gradients: its state is in bfloat16, too."""
    narrow = optax.stateless(lambda grads, params: optax.tree.cast(grads, BF16))
    return optax.chain(narrow, nadamw(rate, key, b1))


def adamw_in_float32(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
    """With bfloat16 params only the params are rounded, to nearest: a control."""
    return in_float32(adamw(rate, key, b1))


def spa_of_adam(
    rate: optax.Schedule,
    key: jax.Array,
    averaging: Any,
    interpolation: float,
    **options: Any,
) -> Tx:
    return spa_adamw(rate, averaging, interpolation, **recipe, **options)


def spa_in_bfloat16(
    rate: optax.Schedule,
    key: jax.Array,
    averaging: Any,
    interpolation: float,
    state_dtype: Any,
) -> Tx:
    return spa_of_adam(
        rate,
        key,
        averaging,
        interpolation,
        second_moment="factored",
        state_dtype=state_dtype,
        rounding_key=key,
    )


def schedule_free_adamw(
    rate: optax.Schedule, key: jax.Array, interpolation: float
) -> Tx:
    return spa_of_adam(rate, key, schedule_free(rate), interpolation)


def schedule_free(rate: optax.Schedule) -> optax.Schedule:
    return schedule_free_averaging(rate, warmup_steps=nanogpt.WARM_UP)


def with_decay(direction: Tx, rate: optax.Schedule, decay: float = DECAY) -> Tx:
    of_matrices = optax.add_decayed_weights(decay, **matrices)
    return optax.chain(direction, of_matrices, optax.scale_by_learning_rate(rate))


def factored_nadamw(
    rate: optax.Schedule,
    key: jax.Array,
    b1: float,
    dtype: Any = F32,
    in_8_bits: bool = False,
) -> Tx:
    """What `spa_adamw` does with a factored ν, as Nesterov momentum of directions."""
    momentum = optax.trace(b1, nesterov=True, accumulator_dtype=dtype)
    if in_8_bits:
        momentum = in_codes(momentum, {"trace": DYNAMIC["mu"]})
    direction = optax.chain(factored_rms(), momentum, optax.scale(1 - b1))
    return with_decay(direction, rate)


def factored_nadamw_in_float8(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
    return float8_momentum(factored_nadamw(rate, key, b1), key)


def factored_rms() -> Tx:
    """Adafactor's ν, with Adam's β₂ and bias correction."""

    def decay_at(count: Any, b2: Any) -> Any:
        k = jnp.asarray(count, F32)
        return b2 * (1 - b2**k) / (1 - b2 ** (k + 1))

    return optax.scale_by_factored_rms(
        decay_rate=B2, decay_rate_fn=decay_at, epsilon=1e-16
    )


def adafactor(rate: optax.Schedule, key: jax.Array, **options: Any) -> Tx:
    options |= {"multiply_by_parameter_scale": False}  # with Adam's rates
    descent = optax.adafactor(None, **options)
    return with_decay(optax.chain(descent, optax.scale(-1.0)), rate)


def muon(
    rate: optax.Schedule, key: jax.Array, momentum: float, dtype: Any = None
) -> Tx:
    """With steps of Adam's size, and NAdam for what is no matrix of a layer."""

    def axes(path: Any, x: jax.Array) -> MuonDimensionNumbers | None:
        return MuonDimensionNumbers() if x.ndim == 2 and path[0].key == "h" else None

    direction = optax.contrib.muon(
        -1.0,
        beta=momentum,
        adam_b2=B2,
        mu_dtype=dtype,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=functools.partial(
            jax.tree_util.tree_map_with_path, axes
        ),
    )
    return with_decay(direction, rate)


def muon_in_8_bits(rate: optax.Schedule, key: jax.Array, momentum: float) -> Tx:
    return float8_momentum(muon(rate, key, momentum, dtype=BF16), key)


def muon_in_codes(rate: optax.Schedule, key: jax.Array, momentum: float) -> Tx:
    return in_codes(muon(rate, key, momentum), LINEAR)


def averaged_adamw(
    rate: optax.Schedule,
    key: jax.Array,
    b1: float,
    averaging: float,
    interpolation: float,
) -> Tx:
    return primal_averaging(adamw(rate, key, b1), averaging, interpolation)


def averaged_muon(
    rate: optax.Schedule,
    key: jax.Array,
    momentum: float,
    averaging: float,
    interpolation: float,
) -> Tx:
    return primal_averaging(muon(rate, key, momentum), averaging, interpolation)


def rounded(make: Make, **options: Any) -> Make:
    def make_rounded(rate: optax.Schedule, key: jax.Array, **settings: float) -> Tx:
        return stochastic_rounding(make(rate, key, **settings, **options), key)

    return make_rounded


def coded_adamw(codecs: Any) -> Make:
    def make_coded(rate: optax.Schedule, key: jax.Array, **settings: float) -> Tx:
        return in_codes(adamw(rate, key, **settings), codecs)

    return make_coded


def with_copy(dtype: Any) -> Make:
    """Around AdamW, an average that is z itself: a master copy of the params."""

    def make_with_copy(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
        base = adamw(rate, key, b1)
        return primal_averaging(base, 1.0, state_dtype=dtype, rounding_key=key)

    return make_with_copy


def with_other_half(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
    return with_low_half(adamw(rate, key, b1))


def sgdm(momentum: Tx) -> Tx:
    """Rates are far larger than Adam's, so the decay is smaller."""
    return optax.chain(optax.add_decayed_weights(DECAY / 1_000, **matrices), momentum)


def sgd(rate: optax.Schedule, key: jax.Array, momentum: float) -> Tx:
    return sgdm(optax.sgd(rate, momentum))


def spa_of_sgd(rate: optax.Schedule, key: jax.Array, momentum: float) -> Tx:
    return sgdm(spa_from_sgdm(rate, momentum))


def lion(rate: optax.Schedule, key: jax.Array, b1: float) -> Tx:
    return with_decay(optax.scale_by_lion(b1, B2), rate, 5 * DECAY)


def with_z(dtype: Any) -> Make:
    return functools.partial(spa_in_bfloat16, state_dtype=dtype)


def in_bfloat16(name: str, make: Make) -> Row:
    """A row with the settings of another, beside bfloat16 params."""
    return Row(make, ROWS[name].settings, BF16)


# At the default b1; the best one is not known for every row that is made of AdamW.
ADAMW: dict[str, float] = {"rate": 4e-3, "b1": 0.9}
ROWS = {
    "AdamW, as nanoGPT has it": Row(adamw, {"rate": nanogpt.RATE, "b1": 0.9}),
    "AdamW": Row(adamw, {"rate": 4e-3, "b1": 0.7}),
    "NAdamW": Row(nadamw, {"rate": 4e-3, "b1": 0.9}),
    "factored_nadamw": Row(factored_nadamw, {"rate": 4e-3, "b1": 0.9}),
    "spa_adamw": Row(
        spa_of_adam, {"rate": 4e-3, "averaging": 0.1, "interpolation": 0.9}
    ),
    "AdamW in primal_averaging": Row(
        averaged_adamw,
        {"rate": 4e-3, "b1": 0.7, "averaging": 0.025, "interpolation": 0.4},
    ),
    "Muon": Row(muon, {"rate": 8e-3, "momentum": 0.95}),
    "Muon in primal_averaging": Row(
        averaged_muon,
        {"rate": 8e-3, "momentum": 0.95, "averaging": 0.003125, "interpolation": 0.4},
    ),
    "Adafactor": Row(adafactor, {"rate": 4e-3}),
    "Adafactor with momentum": Row(adafactor, {"rate": 4e-3, "momentum": 0.9}),
    "Lion": Row(lion, {"rate": 1e-3, "b1": 0.9}),
    "SGD with momentum": Row(sgd, {"rate": 0.25, "momentum": 0.9}),
    "spa_from_sgdm": Row(spa_of_sgd, {"rate": 0.25, "momentum": 0.9}),
}
ROWS |= {
    "NAdamW, m and ν in bfloat16, rounded to nearest": Row(
        nadamw_in_bfloat16, ADAMW, BF16
    ),
    "AdamW, rounded to nearest": Row(adamw_in_float32, ADAMW, BF16),
    "NAdamW, m in bfloat16": Row(functools.partial(nadamw, mu_dtype=BF16), ADAMW),
    "AdamW, m in bfloat16, rounded at random": Row(
        rounded(adamw, mu_dtype=BF16), ADAMW, BF16
    ),
    "NAdamW, m in bfloat16, rounded at random": Row(
        rounded(nadamw, mu_dtype=BF16), ADAMW, BF16
    ),
    "AdamW, m and ν as in bitsandbytes": Row(
        rounded(coded_adamw(DYNAMIC)), ADAMW, BF16
    ),
    "AdamW, m and ν as in FlashOptim": Row(
        rounded(coded_adamw(COMPANDED)), ADAMW, BF16
    ),
    "factored_nadamw, m in float32": in_bfloat16(
        "factored_nadamw", rounded(factored_nadamw)
    ),
    "factored_nadamw, m in bfloat16": in_bfloat16(
        "factored_nadamw", rounded(factored_nadamw, dtype=BF16)
    ),
    "factored_nadamw, m as in bitsandbytes": in_bfloat16(
        "factored_nadamw", rounded(factored_nadamw, in_8_bits=True)
    ),
    "factored_nadamw, m in float8": in_bfloat16(
        "factored_nadamw", rounded(factored_nadamw_in_float8)
    ),
    "spa_adamw, ν factored": Row(
        functools.partial(spa_of_adam, second_moment="factored"),
        ROWS["spa_adamw"].settings,
    ),
    "spa_adamw, z in float32": in_bfloat16("spa_adamw", with_z(F32)),
    "spa_adamw, z in bfloat16": in_bfloat16("spa_adamw", with_z(BF16)),
    "spa_adamw, z in float8": in_bfloat16("spa_adamw", with_z(E4M3)),
    "Muon, m in float8": in_bfloat16("Muon", rounded(muon_in_8_bits)),
    "Muon, m as in 8-bit Muon": in_bfloat16("Muon", rounded(muon_in_codes)),
    "Adafactor, rounded at random": in_bfloat16("Adafactor", rounded(adafactor)),
    "Adafactor, m in bfloat16, rounded at random": in_bfloat16(
        "Adafactor with momentum", rounded(adafactor, dtype_momentum=BF16)
    ),
}
ROWS |= {
    "AdamW, rounded at random": in_bfloat16("AdamW", rounded(adamw)),
    "AdamW, a master copy in bfloat16": in_bfloat16("AdamW", with_copy(BF16)),
    "AdamW, a master copy in float8": in_bfloat16("AdamW", with_copy(E4M3)),
    "AdamW, the other half of the bits in its state": in_bfloat16(
        "AdamW", with_other_half
    ),
}
ROWS |= {
    f"{name}, constant rate": ROWS[name]._replace(floor=1.0)
    for name in ("AdamW", "spa_adamw", "Muon", "Muon in primal_averaging")
}
ROWS["spa_adamw, Schedule-Free"] = Row(
    schedule_free_adamw, {"rate": 4e-3, "interpolation": 0.9}, floor=1.0
)
# Computed in bfloat16, as large models are.
COMPUTED_IN_BF16 = (
    "NAdamW",
    "NAdamW, m in bfloat16, rounded at random",
    "spa_adamw, z in bfloat16",
)
ROWS |= {
    f"{name}, computed in bfloat16": ROWS[name]._replace(compute=BF16)
    for name in COMPUTED_IN_BF16
}

# From AdamW to 3 bytes, one change a row: by z, and by momentum.
LADDERS = {
    "z": (
        "AdamW",
        "spa_adamw",
        "spa_adamw, ν factored",
        "spa_adamw, z in float32",
        "spa_adamw, z in bfloat16",
        "spa_adamw, z in float8",
    ),
    "momentum": (
        "AdamW",
        "NAdamW",
        "factored_nadamw",
        "factored_nadamw, m in float32",
        "factored_nadamw, m in bfloat16",
        "factored_nadamw, m in float8",
    ),
}
