"""Multi-token prediction layers draft as the transformers block does, without changing the text."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import quantforge
from quantforge.errors import InputError, RefusedError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.load import load
from quantforge.runtime.speculation.hidden_state_drafter import HiddenStateDrafter
from quantforge.runtime.speculation.mtp import read_mtp
from tests.runs import quantize, recipe
from tests.unit.runtime.speculation.test_draft_heads import rms, run

JOINS = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    """Return a tiny GLM whose files hold a layer behind the last one: like it, and not the same."""
    plain, out = tiny("glm4-moe"), tmp_path_factory.mktemp("mtp") / "m"
    out.mkdir()
    tensors = {
        name: value
        for path in plain.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    config = json.loads((plain / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    noise = torch.Generator().manual_seed(9)
    last, at = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    for name, value in list(tensors.items()):
        if name.startswith(last):
            shift = (
                torch.randn(value.shape, generator=noise) * 0.3 * value.float().std(correction=0)
            )
            tensors[at + name.removeprefix(last)] = (value.float() + shift).to(value.dtype)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{at}{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=noise)
    tensors[f"{at}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=noise) * 0.2
    tensors[f"{at}shared_head.head.weight"] = torch.randn(
        config["vocab_size"], hidden, generator=noise
    )
    table = tensors["model.embed_tokens.weight"]
    tensors[f"{at}embed_tokens.weight"] = table + 0.1 * torch.randn(table.shape, generator=noise)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    for path in plain.glob("token*"):
        (out / path.name).write_bytes(path.read_bytes())
    return out


@pytest.fixture(scope="module")
def block(source, tmp_path_factory):
    """Return transformers' model of that layer alone, and the tensors that join it."""
    from transformers import AutoModelForCausalLM

    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors, at = load_file(source / "model.safetensors"), f"model.layers.{layers}."
    joins = {name: tensors.pop(f"{at}{name}.weight") for name in JOINS}
    tensors["model.embed_tokens.weight"] = tensors.pop(f"{at}embed_tokens.weight")
    whole = tmp_path_factory.mktemp("whole")
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    grown = {**config, "num_hidden_layers": layers + 1, "num_nextn_predict_layers": 0}
    (whole / "config.json").write_text(json.dumps(grown))
    model = AutoModelForCausalLM.from_pretrained(
        whole, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.model.layers = nn.ModuleList([model.model.layers[layers]])
    model.model.layers[0].self_attn.layer_idx = 0
    model.config.num_hidden_layers = 1
    model.model.norm.weight = nn.Parameter(joins["shared_head.norm"])
    return model, joins


def says(block, features, tokens):
    """Return the state and the logits behind the last of some tokens, as a whole text without a cache."""
    model, joins = block
    embedded = model.model.embed_tokens(torch.tensor(tokens))
    x = (
        torch.cat((rms(embedded, joins["enorm"]), rms(features, joins["hnorm"])), -1)
        @ joins["eh_proj"].T
    )
    with torch.inference_mode():
        y = model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1]
    return y, y @ joins["shared_head.head"].T


@pytest.mark.tokens
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2)])
def test_mtp_drafts_equal_the_transformers_block(source, block, shape):
    loaded = load(source)
    assert loaded.model.config.rms_norm_eps == 1e-5
    draw = random.Random(4)
    ids = [draw.randrange(3, 300) for _ in range(20)]
    network = read_mtp(loaded)
    drafter = HiddenStateDrafter(network, 60, shape)
    for history, tree in run(Decoder(load(source).model), ids, drafter, len(shape), tokens=8):
        with torch.inference_mode():
            result = loaded.model(torch.tensor([history[:-1]]), output_hidden_states=True)
        text = result.hidden_states[-1][0]
        ends = [(-1, history[1:], text)]
        for count in shape[: tree.depth]:
            following = []
            for end, tokens, features in ends:
                y, logits = says(block, features, tokens)
                nodes = tree.children(end)
                assert [tree.tokens[node] for node in nodes] == logits.topk(count).indices.tolist()
                following += [
                    (node, [*tokens, tree.tokens[node]], torch.cat((features, y[None])))
                    for node in nodes
                ]
            ends = following


@pytest.mark.tokens
def test_generate_accepts_mtp_of_source_and_quantized_model(source, tmp_path):
    for heads in ("keep", "quantize"):
        quantize(
            source, tmp_path / heads, recipe(scheme="int8:g32:sym", scales="absmax", mtp=heads)
        )
    for model in (source, tmp_path / "keep", tmp_path / "quantize"):
        options = {"raw": True, "max_tokens": 12}
        plain = quantforge.generate(model, "row by row", **options)
        for more in ({}, {"draft_tree": "2x2"}):
            result = quantforge.generate(model, "row by row", draft="mtp", **more, **options)
            assert result.tokens == plain.tokens
            assert result.speculation["guessed"] > 0


def test_models_without_mtp_layer_are_refused(source, tiny, tmp_path):
    with pytest.raises(InputError, match="no layer for further tokens"):
        quantforge.generate(tiny("llama"), "a", raw=True, max_tokens=2, draft="mtp")
    tensors = load_file(source / "model.safetensors")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = next(name for name in tensors if name.endswith("eh_proj.weight"))
    save_file(
        {key: value for key, value in tensors.items() if key != name},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(RefusedError, match="eh_proj"):
        quantforge.generate(tmp_path, "a", raw=True, max_tokens=2, draft="mtp")
