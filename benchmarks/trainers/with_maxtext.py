"""MaxText's trainer trains its decoder, split over 8 devices, with `maxtext.patch`
applied.

Its synthetic data is one batch, which is learned by heart.
"""

import contextlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import maxtext
import shared
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train as trainer

OPT_TYPES = {
    shared.FACTORED: "spa_adamw",
    "primal_averaging": "averaged_adamw",
    "stochastic_rounding": "rounded_adamw",
}
SIZES = """
    base_emb_dim=128 base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=512
    head_dim=32
    base_num_decoder_layers=2 vocab_size=256 max_target_length=64
    per_device_batch_size=1
"""
ON_CPU = """
    hardware=cpu attention=dot_product skip_jax_distributed_system=True
    enable_goodput_recording=False dataset_type=synthetic async_checkpointing=False
"""


def train(name: str, folder: Path, kill_at: int) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / f"metrics_{kill_at}.txt"
    options = {
        "run_name": "run",
        "base_output_directory": folder,
        "metrics_file": metrics,
        "steps": shared.STEPS,
        "checkpoint_period": shared.SAVE_EVERY,
        "eval_interval": 100,
        "eval_start_step": 99,
        "eval_steps": 2,
        "weight_dtype": "bfloat16",
        "learning_rate": 1e-3,
        "opt_type": OPT_TYPES[name],
    }
    seen: list[int] = []
    original = trainer.training_loop_iteration

    def iteration(jax_device_state: Any, python_vars: Any, immutable_data: Any) -> Any:
        seen.append(int(python_vars["step"]))
        if kill_at and seen[-1] == kill_at:
            shared.die()
        return original(jax_device_state, python_vars, immutable_data)

    trainer.training_loop_iteration = iteration
    optimizers.STATE_DTYPE = shared.NARROW["state_dtype"]
    config = Path(maxtext.__file__).parent / "configs/base.yml"
    arguments = [
        *SIZES.split(),
        *ON_CPU.split(),
        *(f"{k}={v}" for k, v in options.items()),
    ]
    with contextlib.redirect_stdout(sys.stderr):
        config, recorder = trainer.initialize(["train", str(config), *arguments])
        state = trainer.train_loop(config, recorder)
    assert (folder / "run/x").exists()  # exported
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [line["eval/avg_loss"] for line in lines if "eval/avg_loss" in line]
    model, of_optimizer = state["model"], state["optimizer"]["opt_state"]
    return shared.result(losses[-1], seen[0], model, of_optimizer)


if __name__ == "__main__":
    shared.main(__file__, importlib.metadata.version("maxtext"), train)
