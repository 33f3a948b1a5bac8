"""Artifacts of AutoRound in its own format, decoded by its own torch kernel inside of transformers."""

import shutil
from functools import partial

import torch
from auto_round import AutoRound
from record import digest, linears, run
from transformers import AutoModelForCausalLM, AutoTokenizer

# Name: (export format, symmetric, layers with other bits).
RECIPES = {
    "autoround": ("auto_round", True, {"model.layers.0.self_attn.o_proj": {"bits": 16}}),
    "autoround-asym": ("auto_round", False, {"model.layers.0.mlp.down_proj": {"bits": 8}}),
}


def make(form, symmetric, layers, sources, out):
    """Round without tuning, save, load, multiply the identity."""
    torch.manual_seed(0)
    path = sources / "narrow"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(path)
    columns = {name: module.in_features for name, module in linears(model).items()}
    rounder = AutoRound(
        model, tokenizer, bits=4, group_size=32, sym=symmetric, iters=0, device_map="cpu",
        disable_opt_rtn=True, layer_config=layers,
    )  # fmt: skip
    rounder.quantize_and_save(output_dir=str(out), format=form)
    for nested in [item for item in out.iterdir() if item.is_dir()]:  # it adds a folder of its own
        shutil.copytree(nested, out, dirs_exist_ok=True)
        shutil.rmtree(nested)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float16, device_map="cpu")
    decoded = {}
    for name, module in linears(loaded).items():
        if not isinstance(module, torch.nn.Linear):
            with torch.inference_mode():
                weight = module(torch.eye(columns[name], dtype=torch.float16)).T
            decoded[name] = digest(weight.float().contiguous().numpy())
    made = f"bits=4, group_size=32, sym={symmetric}, iters=0, layer_config={layers}, format={form}"
    return {"source": "narrow", "made": made, "dtype": "float16", "decoded": decoded}


run(
    {name: partial(make, *recipe) for name, recipe in RECIPES.items()},
    ("auto-round", "transformers", "torch"),
)
