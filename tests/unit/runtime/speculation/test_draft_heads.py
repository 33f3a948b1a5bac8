"""Medusa and EAGLE-3 heads draft what their papers define, without changing the text."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention, silu

import quantforge
from quantforge.errors import InputError, UsageError
from quantforge.formats.sources.head_directory import open_draft_heads
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.eagle3 import Eagle3Layer
from quantforge.runtime.speculation.hidden_state_drafter import HiddenStateDrafter
from quantforge.runtime.speculation.medusa import MedusaDrafter, read_medusa
from tests.plain_loop import StopLimits, generate
from tests.runs import run_command
from tests.unit.runtime.speculation.test_speculate import DEMO, DRAWN, speculated

GENERATOR = torch.Generator().manual_seed(5)
HEADS, SEEN, OWN = 3, [0, 2, 1], 500


def noise(*shape, scale=0.05):
    return torch.randn(*shape, generator=GENERATOR) * scale


@pytest.fixture(scope="module")
def model():
    return load(DEMO).model


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model)


@pytest.fixture(scope="module")
def ids():
    draw = random.Random(3)
    return [draw.randrange(5, 2000) for _ in range(33)]


def write(path, config, tensors, name="model.safetensors"):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / name)
    return path


def write_medusa(path, vocabulary, hidden):
    """Write heads of Medusa for a model of a width; return their directory."""
    tensors = {}
    for head in range(HEADS):
        for layer in range(2):
            tensors[f"{head}.{layer}.linear.weight"] = noise(hidden, hidden)
            tensors[f"{head}.{layer}.linear.bias"] = noise(hidden)
        tensors[f"{head}.2.weight"] = noise(vocabulary, hidden)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": 2}
    return write(path, config, tensors, "medusa_lm_head.safetensors")


def write_eagle(path, vocabulary, seen, width=48, mlp=80):
    """Write an EAGLE-3 head of a width for a model; return its directory."""
    heads, kv, head = 4, 2, 16
    targets = torch.randperm(vocabulary, generator=GENERATOR)[:OWN].sort().values
    tensors = {
        "d2t": targets - torch.arange(OWN),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).scatter_(0, targets, True),
        "embed_tokens.weight": noise(vocabulary, width, scale=1),
        "fc.weight": noise(width, 3 * seen), "norm.weight": 1 + noise(width),
        "lm_head.weight": noise(OWN, width, scale=1),
        "midlayer.self_attn.q_proj.weight": noise(heads * head, 2 * width, scale=0.3),
        "midlayer.self_attn.k_proj.weight": noise(kv * head, 2 * width, scale=0.3),
        "midlayer.self_attn.v_proj.weight": noise(kv * head, 2 * width, scale=0.3),
        "midlayer.self_attn.o_proj.weight": noise(width, heads * head, scale=0.3),
        "midlayer.mlp.gate_proj.weight": noise(mlp, width, scale=0.3),
        "midlayer.mlp.up_proj.weight": noise(mlp, width, scale=0.3),
        "midlayer.mlp.down_proj.weight": noise(width, mlp, scale=0.3),
        **{f"midlayer.{name}.weight": 1 + noise(width)
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "hidden_size": width,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "intermediate_size": mlp,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": vocabulary, "draft_vocab_size": OWN,
        "hidden_act": "silu", "eagle_aux_hidden_state_layer_ids": SEEN,
    }  # fmt: skip
    return write(path, config, tensors)


@pytest.fixture(scope="module")
def medusa(tmp_path_factory, model):
    sizes = model.get_input_embeddings().weight.shape
    return write_medusa(tmp_path_factory.mktemp("heads") / "medusa", *sizes)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory, model):
    sizes = model.get_input_embeddings().weight.shape
    return write_eagle(tmp_path_factory.mktemp("heads") / "eagle", *sizes)


class RecordedPrograms(Drafter):
    """Passes on to a drafter, and keeps what it drafted after which text."""

    def __init__(self, inner):
        self.inner, self.taps, self.drafted = inner, inner.taps, []

    def observe(self, computed):
        self.inner.observe(computed)

    def draft(self, history, most, sampler):
        tree = self.inner.draft(history, most, sampler)
        self.drafted.append((list(history), tree))
        return tree


def run(decoder, ids, drafter, most, sampling=None, tokens=12):
    """Return what was drafted; the text is the plain loop's."""
    limits, recorded = StopLimits(tokens), RecordedPrograms(drafter)
    (plain,) = generate(decoder, [ids], limits, sampling)
    assert speculated(decoder, ids, recorded, most, limits, sampling)[0] == plain
    assert len(recorded.drafted) > 3
    return recorded.drafted


def states(model, history):
    """Return the last hidden states of transformers, and those that go into each block."""
    with torch.inference_mode():
        result = model(torch.tensor([history]), output_hidden_states=True).hidden_states
    return result[-1][0], [part[0] for part in result]


@pytest.mark.tokens
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 1)])
def test_medusa_drafts_equal_the_output_of_each_head(model, decoder, medusa, ids, shape):
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    heads = read_medusa(open_draft_heads(medusa), model.get_input_embeddings().weight)
    for history, tree in run(decoder, ids, MedusaDrafter(heads, shape), 3):
        hidden = states(model, history[:-1])[0][-1]
        ends = [-1]
        for head, count in zip(range(tree.depth), shape, strict=False):
            x = hidden
            for layer in range(2):
                name = f"{head}.{layer}.linear"
                x = x + silu(tensors[f"{name}.weight"] @ x + tensors[f"{name}.bias"])
            best = (tensors[f"{head}.2.weight"] @ x).topk(count).indices.tolist()
            for end in ends:
                assert [tree.tokens[node] for node in tree.children(end)] == best
            ends = [node for end in ends for node in tree.children(end)]


def test_medusa_tensor_names_of_other_tools_are_read(model, medusa, tmp_path):
    """Blocks and heads apart, as vLLM has them."""
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    other = {}
    for name, value in tensors.items():
        head, layer, *rest = name.split(".")
        other[
            f"blocks.{head}.layers.{layer}.{rest[-1]}"
            if len(rest) > 1
            else f"lm_heads.{head}.weight"
        ] = value
    config = {"model_type": "medusa", "num_heads": HEADS, "num_hidden_layers": 2}
    embedding = model.get_input_embeddings().weight
    result = read_medusa(open_draft_heads(write(tmp_path / "m", config, other)), embedding)
    for first, second in zip(result, read_medusa(open_draft_heads(medusa), embedding), strict=True):
        x = noise(2, embedding.shape[1])
        assert torch.equal(first.logits(x), second.logits(x))


def rms(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def turned(x):
    """Rotate ``[heads, tokens, 16]``, token t by t."""
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    cosine, sine = angles.cos(), angles.sin()
    first, second = x[..., :8], x[..., 8:]
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def eagle_says(tensors, features, tokens, *, normed=False):
    """Return states and logits behind the last of some tokens, computed as a whole text without a cache."""
    embedded = tensors["embed_tokens.weight"][tokens]
    layer = {name.removeprefix("midlayer."): value for name, value in tensors.items()}
    before = rms(features, layer["hidden_norm.weight"])
    x = torch.cat((rms(embedded, layer["input_layernorm.weight"]), before), -1)
    q, k, v = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T + layer.get(f"self_attn.{name}_proj.bias", 0))
        .view(len(x), -1, 16)
        .transpose(0, 1)
        for name in "qkv"
    )
    k, v = (part.repeat_interleave(2, 0) for part in (turned(k), v))
    out = scaled_dot_product_attention(turned(q)[None], k[None], v[None], is_causal=True)[0]
    y = before if normed else features
    y = y + out.transpose(0, 1).reshape(len(x), -1) @ layer["self_attn.o_proj.weight"].T
    h = rms(y, layer["post_attention_layernorm.weight"])
    gated = silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
    y = y + gated @ layer["mlp.down_proj.weight"].T
    return y[-1], rms(y[-1], tensors["norm.weight"]) @ tensors["lm_head.weight"].T


BIASES = {
    f"midlayer.self_attn.{name}_proj.bias": noise(64 if name == "q" else 32) for name in "qkv"
}


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("shape", "config", "more"),
    [
        ((1, 1, 1), {}, {}),
        ((3, 2, 2), {}, {}),
        ((1, 1), {"norm_before_residual": True}, {}),
        ((1, 1), {"attention_bias": True}, BIASES),
    ],
)
def test_eagle_drafts_equal_the_plain_computation(
    model, decoder, eagle, ids, tmp_path, shape, config, more
):
    head = changed(eagle, tmp_path / "h", config, more)
    tensors, normed = (
        load_file(head / "model.safetensors"),
        bool(config.get("norm_before_residual")),
    )
    network = Eagle3Layer(
        open_draft_heads(head), model.get_input_embeddings().weight, len(decoder.layers)
    )
    targets = tensors["d2t"] + torch.arange(OWN)
    for history, tree in run(decoder, ids, HiddenStateDrafter(network, 100, shape), 3):
        _, into = states(model, history[:-1])
        text = torch.cat([into[block] for block in SEEN], -1) @ tensors["fc.weight"].T
        ends = [(-1, history[1:], text)]
        for count in shape[: tree.depth]:
            following = []
            for end, tokens, features in ends:
                y, logits = eagle_says(tensors, features, torch.tensor(tokens), normed=normed)
                best = targets[logits.topk(count).indices].tolist()
                nodes = tree.children(end)
                assert [tree.tokens[node] for node in nodes] == best
                following += [
                    (node, [*tokens, tree.tokens[node]], torch.cat((features, y[None])))
                    for node in nodes
                ]
            ends = following


def test_default_eagle_taps_are_early_middle_and_late_blocks(model, eagle, tmp_path):
    head = changed(eagle, tmp_path / "h", {"eagle_aux_hidden_state_layer_ids": None})
    assert Eagle3Layer(open_draft_heads(head), model.get_input_embeddings().weight, 12).taps == (
        2,
        6,
        9,
    )


@pytest.mark.tokens
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_generate_accepts_draft_heads(request, kind):
    path = request.getfixturevalue(kind)
    for options in ({}, {"temperature": 0.8, "seed": 3}):
        arguments = {"raw": True, "max_tokens": 20, **options}
        plain = quantforge.generate(DEMO, "import os, json", **arguments)
        for more in ({}, {"draft_tree": "3x2"}):
            result = quantforge.generate(
                DEMO, "import os, json", draft=str(path), **more, **arguments
            )
            assert result.tokens == plain.tokens
            assert result.speculation["guessed"] > 0


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_server_refuses_draft_heads(request, kind, capsys):
    path = request.getfixturevalue(kind)
    ended = run_command(capsys, "bench", DEMO, "--requests", 2, "--draft", path)
    assert (ended.code, "single text" in ended.err) == (2, True)


@pytest.mark.tokens
def test_sampled_drafts_of_heads(model, decoder, eagle, ids):
    network = Eagle3Layer(
        open_draft_heads(eagle), model.get_input_embeddings().weight, len(decoder.layers)
    )
    run(decoder, ids, HiddenStateDrafter(network, 100, (2, 2)), 2, DRAWN)


def changed(path, to, config=None, tensors=None, drop=()):
    """Write heads with other values."""
    (file,) = path.glob("*.safetensors")
    held = {name: value for name, value in load_file(file).items() if name not in drop}
    return write(
        to,
        {**json.loads((path / "config.json").read_text()), **(config or {})},
        {**held, **(tensors or {})},
        file.name,
    )


def test_non_finite_draft_heads_are_reported(medusa, tmp_path):
    name = "0.2.weight"
    (file,) = medusa.glob("*.safetensors")
    large = torch.full_like(load_file(file)[name], 3e38)
    result = changed(medusa, tmp_path / "h", tensors={name: large})
    with pytest.raises(InputError, match=r"^the draft: ") as raised:
        quantforge.generate(DEMO, "import", raw=True, max_tokens=8, draft=str(result))
    assert "--draft" in raised.value.hint


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("medusa", {"drop": ["1.2.weight"]}, "no tensor"),
        ("medusa", {"tensors": {"0.0.linear.weight": torch.zeros(8, 8)}}, "expected"),
        ("medusa", {"tensors": {"0.2.weight": torch.zeros(7, 128)}}, "expected"),
        ("medusa", {"tensors": {"0.2.weight": torch.zeros(4096, 256).int()}},
         r"packed \(I32: 0.2.weight\)"),
        ("medusa", {"tensors": {"1.0.linear.bias": torch.full((256,), torch.nan)}},
         "h/medusa_lm_head.safetensors: tensor '1.0.linear.bias' holds nan"),
        ("eagle", {"tensors": {"fc.weight": torch.full((48, 768), torch.inf)}}, "'fc.weight' holds inf"),
        ("eagle", {"tensors": {"midlayer.mlp.up_proj.weight": torch.zeros(80, 48).short()}}, r"packed \(I16"),
        ("medusa", {"config": {"medusa_num_heads": 0}}, "medusa_num_heads"),
        ("medusa", {"config": {"medusa_num_heads": "3"}}, "medusa_num_heads"),
        ("eagle", {"drop": ["midlayer.mlp.up_proj.weight"]}, "no tensor"),
        ("eagle", {"drop": ["d2t"]}, "no tensor"),
        ("eagle", {"drop": ["embed_tokens.weight"]}, "no tensor"),
        ("eagle", {"config": {"vocab_size": 77}}, "vocab_size"),
        ("eagle", {"config": {"num_hidden_layers": 2}}, "num_hidden_layers"),
        ("eagle", {"config": {"hidden_act": ["silu"]}}, "hidden_act"),
        ("eagle", {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}}, "blocks"),
        ("eagle", {"config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "blocks"),
        ("eagle", {"config": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}}, "rotary"),
        ("eagle", {"tensors": {"d2t": torch.full((OWN,), 10**6)}}, "d2t"),
        ("eagle", {"tensors": {"d2t": torch.zeros(OWN)}}, "d2t"),
        ("eagle", {"tensors": {"fc.weight": torch.zeros(48, 3)}}, "expected"),
    ],
)  # fmt: skip
def test_heads_of_another_model_are_refused(request, tmp_path, model, decoder, kind, change, says):
    result = changed(request.getfixturevalue(kind), tmp_path / "h", **change)
    with pytest.raises(InputError, match=says):
        quantforge.generate(DEMO, "import", raw=True, max_tokens=2, draft=str(result))


def test_pickles_and_other_heads_are_refused(tmp_path, medusa):
    other = tmp_path / "pickled"
    other.mkdir()
    (other / "config.json").write_text((medusa / "config.json").read_text())
    (other / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="pickle"):
        open_draft_heads(other)
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"]}')
    save_file({"a": torch.zeros(1)}, other / "model.safetensors")
    with pytest.raises(InputError, match="not computed"):
        open_draft_heads(other)
    assert open_draft_heads(DEMO) is None
    with pytest.raises(UsageError, match="3 heads"):
        quantforge.generate(
            DEMO, "import", raw=True, max_tokens=2, draft=str(medusa), draft_tree="1x1x1x1"
        )


@pytest.mark.tokens
def test_medusa_sampling_draws_each_position_independently(decoder, model, medusa, ids):
    heads = read_medusa(open_draft_heads(medusa), model.get_input_embeddings().weight)
    run(
        decoder,
        ids,
        MedusaDrafter(heads, (2, 2, 1)),
        3,
        Sampling(temperature=0.7, seed=1, repetition_penalty=1.1),
    )
