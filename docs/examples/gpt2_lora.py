"""Fine-tune a GPT-2 that PyTorch saved, with LoRA, and give it back to PyTorch.

1. PyTorch trains a tiny GPT-2 on the source code of this package, byte by byte, and
   saves it under the names of the published models. Without PyTorch, random numbers
   stand in for it.
2. ``migrations/gpt2-nnx.toml`` reads these files into ``gpt2_nnx.py``, a model of Flax
   nnx whose layers run in a scan. Both must give the same logits.
3. ``gpt2_lora.toml`` freezes the lower half of the layers; above it, LoRA factors and
   norms train on the pages of this documentation. Half-way, they are saved with the
   optimizer's state.
4. A second process resumes from there, and must arrive at the same bits.
5. The factors are merged into the weights. The same table, read backwards, writes the
   files for PyTorch, which must give the logits of the model in nnx.
6. The factors and the norms alone become a folder for PEFT, which must give these
   logits, too, on top of the files of step 1.

Any check that fails makes the exit status 1. Run it with ``make demo-lm``; it takes
about a minute and a half on two CPU cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gpt2_nnx import GPT2
from tqdm import trange

import treeadapt as ta

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
import transformers

if transformers.is_torch_available():
    import torch

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
MIGRATION = ta.load_migration(HERE / "migrations" / "gpt2-nnx.toml")
ADAPTER = ta.load_migration(HERE / "migrations" / "peft-gpt2-nnx.toml")
RULES = ta.load_rules(HERE / "gpt2_lora.toml")
# Gradients are of whole arrays; the rules decide on the layers within.
TRAINS = ["**/lora", "**/ln_{1,2,f}"]

# In the names and the configuration of an adapter; the scale is that of its table.
PREFIX, SCALE = "base_model.model.transformer.", 2
QUERIES_KEYS_VALUES = [f"blocks/attn/{p}/lora/lora_" for p in ("query", "key", "value")]

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS = 256, 64, 64, 4, 4
BATCH = 16


def main() -> int:
    """Run the steps; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for the files of this run")
    parser.add_argument("--torch-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="gpt2-lora-"))
    if args.resume:
        return resume(folder, args.steps)

    print(f"1. A GPT-2 of {LAYERS} layers learns Python in PyTorch.")
    published = folder / "published"
    make_published(published, args.torch_steps)

    print("\n2. Its files become a model of Flax nnx that scans its layers.")
    model = ta.load(published, new_model(), migration=MIGRATION)
    plan = MIGRATION.plan(ta.read_metadata(published), model)
    print(f"   {str(plan).splitlines()[0]}")
    checks = [same_logits(model, published)]

    print("\n3. The upper half learns English. These rules of gpt2_lora.toml apply:\n")
    report = ta.summarize(model, RULES)
    print(report.to_text(depth=2))
    report.save(folder / "report.svg", title="A GPT-2 by gpt2_lora.toml")
    params, rest = ta.split(model, TRAINS)
    pages = text("docs/**/*.md")
    unseen = np.stack([pages[at : at + LENGTH + 1] for at in range(0, 20_000, 100)])
    before = loss(params, rest, unseen)
    state = optimizer().init(params)
    params, state = train(
        params, state, rest, range(args.steps), folder / "half.safetensors"
    )
    after = loss(params, rest, unseen)
    print(f"   loss on unseen text: {before:.3f} -> {after:.3f} nats per byte")
    checks.append(after < before)

    print("\n4. A second process resumes half-way.")
    command = [sys.executable, __file__, "--resume", f"--steps={args.steps}"]
    subprocess.run([*command, f"--folder={folder}"], check=True)
    ended = {"params": params, "state": state}
    resumed = ta.load(folder / "resumed.safetensors", ended)
    differences = ta.tree_diff(resumed, ended, values=True)
    print(f"   {differences or 'Parameters and state are the same, bit for bit.'}")
    checks.append(not differences)

    print("\n5. The factors are merged; the same table writes files for PyTorch.")
    tuned = folder / "tuned"
    model = ta.merge(params, rest)
    merged = merge_factors(model)
    ta.save(tuned, MIGRATION.inverse(merged), max_shard_bytes=1_000_000)
    shutil.copy(published / "config.json", tuned)
    checks += [same_logits(merged, tuned), same_where_frozen(published, tuned)]

    print("\n6. The factors and the norms become a folder for PEFT.")
    adapter = folder / "adapter"
    write_adapter(adapter, model)
    checks.append(same_logits(model, published, adapter))
    print(f"\nThe files are in {folder}; report.svg is a picture of the rules.")
    return 0 if all(checks) else 1


def make_published(folder: Path, steps: int) -> None:
    """Write a GPT-2 as it is published: PyTorch's names, shards, an index, masks."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        loss_type="ForCausalLM",
    )
    if not transformers.is_torch_available():
        print("   PyTorch is NOT INSTALLED: random numbers stand in for its files.")
        ta.save(folder, MIGRATION.inverse(new_model()), max_shard_bytes=1_000_000)
        config.save_pretrained(folder)
        return
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = transformers.GPT2LMHeadModel(config)
    data = text("treeadapt/**/*.py")
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with trange(steps, desc="   PyTorch", mininterval=1) as progress:
        for step in progress:
            tokens = torch.tensor(batch(data, step)[:, 1:], dtype=torch.int64)
            value = model(tokens, labels=tokens).loss
            adamw.zero_grad()
            value.backward()
            adamw.step()
            if step % 20 == 19:
                progress.set_postfix(loss=f"{value.item():.2f}")
    for block in model.transformer.h:  # old files hold the causal mask of each layer
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.uint8).tril()
        block.attn.register_buffer("bias", mask[None, None])
    model.transformer.save_pretrained(folder, max_shard_size="1MB")


def new_model() -> GPT2:
    """A model to read the published one into; its LoRA factors do nothing yet."""
    return GPT2(
        vocabulary=VOCABULARY,
        length=LENGTH,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        rngs=nnx.Rngs(0),
    )


def same_logits(model: GPT2, folder: Path, adapter: Path | None = None) -> bool:
    """Whether PyTorch, with the files of a folder, answers as the model does."""
    if not transformers.is_torch_available():
        return True
    if adapter is not None and importlib.util.find_spec("peft") is None:
        print("   PEFT is NOT INSTALLED: nothing reads the folder.")
        return True
    tokens = batch(text("README.md"), 0)[:, :-1]
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    if adapter is not None:
        import peft

        theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
    ours = nnx.jit(GPT2.__call__)(model, tokens)
    difference = np.abs(np.asarray(ours) - expected).max()
    largest = np.abs(expected).max()
    print(
        f"   PyTorch's logits are up to {largest:.1f}; ours differ by {difference:.0e}"
    )
    return bool(difference < 1e-5 * largest)


def optimizer() -> optax.GradientTransformation:
    """What each label of the rules means."""
    return ta.partition({"lora": optax.adamw(5e-3), "norms": optax.adam(1e-3)}, RULES)


@jax.jit
def loss(params: Any, rest: Any, tokens: Any) -> jax.Array:
    """The mean of ``-log p`` of each next byte; ``tokens`` is [batch, length + 1]."""
    logits = ta.merge(params, rest)(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean()


@jax.jit
def train_step(params: Any, state: Any, rest: Any, tokens: Any) -> Any:
    """One step; returns the new params, the new state and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, rest, tokens)
    updates, state = optimizer().update(grads, state, params)
    return ta.apply_updates(params, updates), state, value


def train(
    params: Any, state: Any, rest: Any, steps: range, save_to: Path | None = None
) -> Any:
    """Train for these steps; write params and state after half of them."""
    data = text("docs/**/*.md")[20_000:]  # what comes before is never trained on
    with trange(steps.start, steps.stop, desc="   LoRA", mininterval=1) as progress:
        for step in progress:
            tokens = batch(data, step)
            params, state, value = train_step(params, state, rest, tokens)
            if step % 20 == 19:
                progress.set_postfix(loss=f"{value:.2f}")
            if save_to is not None and step + 1 == len(steps) // 2:
                ta.save(save_to, {"params": params, "state": state})
    return params, state


def resume(folder: Path, steps: int) -> int:
    """The second process: everything from files, then the second half of the steps."""
    model = ta.load(folder / "published", new_model(), migration=MIGRATION)
    params, rest = ta.split(model, TRAINS)
    state = jax.eval_shape(optimizer().init, params)
    half = ta.load(folder / "half.safetensors", {"params": params, "state": state})
    second = range(steps // 2, steps)
    params, state = train(half["params"], half["state"], rest, second)
    ta.save(folder / "resumed.safetensors", {"params": params, "state": state})
    return 0


def merge_factors(model: GPT2) -> GPT2:
    """Add each product of LoRA factors to its kernel, for all layers at once."""
    params, rest = ta.split(model)
    for path in params:
        at, is_factor, _ = path.partition("lora/lora_a")
        if is_factor:
            params[f"{at}kernel"] += params[path] @ params[f"{at}lora/lora_b"]
            params[path] *= 0  # so that the model does not add the product again
    return ta.merge(params, rest)


def write_adapter(folder: Path, model: GPT2) -> None:
    """Write the factors and the norms as a folder that PEFT reads."""
    factors, _ = ta.split(model, ["**/lora"])
    rank = factors["blocks/attn/out/lora/lora_a"].shape[-1]
    # What trains besides the factors is in the folder as it is.
    norms = {
        f"{PREFIX}{name}": leaf
        for name, leaf in MIGRATION.inverse(model).items()
        if "ln_" in name
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": SCALE * rank,
        "rank_pattern": {"c_attn": 3 * rank},
        "alpha_pattern": {"c_attn": SCALE * 3 * rank},
        "target_modules": ["c_attn", "c_proj", "c_fc"],
        "modules_to_save": ["ln_1", "ln_2", "ln_f"],
        "fan_in_fan_out": True,  # the kernels of GPT-2 are transposed
    }
    folder.mkdir()
    arrays = ADAPTER.inverse(shared_factors(factors)) | norms
    ta.save(folder / "adapter_model.safetensors", arrays)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def shared_factors(factors: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Give queries, keys and values one first factor: theirs, side by side.

    The second factor of each has zeros where the first one is that of another, so the
    products stay. Shapes become ``[layers, width, 3 * rank]`` and ``[layers, 3 * rank,
    width]``.
    """
    firsts = [factors[f"{name}a"] for name in QUERIES_KEYS_VALUES]
    shared = jnp.concatenate(firsts, axis=-1)
    wide = dict(factors)
    for number, name in enumerate(QUERIES_KEYS_VALUES):
        second = factors[f"{name}b"]
        rank = second.shape[1]
        before, after = number * rank, (2 - number) * rank
        wide[f"{name}a"] = shared
        wide[f"{name}b"] = jnp.pad(second, ((0, 0), (before, after), (0, 0)))
    return wide


def same_where_frozen(before: Path, after: Path) -> bool:
    """Whether the files differ where the rules train, and only there."""
    old, new = ta.load(before), ta.load(after)
    frozen = ta.param_mask(new, ["h.{0..1}.*", "w{t,p}e.*"])
    changed = {leaf.path for leaf in ta.tree_diff(old, new, values=True).of("changed")}
    wrong = [path for path in changed if frozen[path]]
    print(f"   {len(changed)} of {len(new)} arrays changed, {len(wrong)} frozen ones")
    return bool(changed) and not wrong


def text(pattern: str) -> np.ndarray:
    """The bytes of the repository's files that match, one after the other."""
    files = sorted(REPOSITORY.glob(pattern))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(data: np.ndarray, step: int) -> np.ndarray:
    """The bytes that a step sees, [BATCH, LENGTH + 1]; the same in each process."""
    starts = np.random.default_rng(step).integers(len(data) - LENGTH, size=BATCH)
    return np.stack([data[start : start + LENGTH + 1] for start in starts])


if __name__ == "__main__":
    sys.exit(main())
