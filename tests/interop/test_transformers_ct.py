"""Stock transformers with the compressed-tensors library loads our files and computes our numbers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from quantforge.formats import compressed_tensors as ct
from quantforge.planned import Action, Plan, StoredTensor, TensorPlan
from quantforge.scheme import LayerScheme, ScaleType, parse
from quantforge.tensor import QuantizedTensor

IDS = torch.arange(48).reshape(1, 48) * 7 % 512


def tiny_llama(tied):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=tied, initializer_range=0.06,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def random_tensor(scheme, shape, generator):
    scales = torch.rand(scheme.parameter_shape(shape), generator=generator) * 0.02 + 0.002
    scales = scales.to({ScaleType.F16: torch.float16, ScaleType.F32: torch.float32}[scheme.scale])
    codes = torch.randint(0, 1 << scheme.bits, shape, generator=generator, dtype=torch.uint8)
    if scheme.symmetric:
        codes = (codes.short() - (1 << (scheme.bits - 1))).to(torch.int8)
        return QuantizedTensor(codes, {"scales": scales}, scheme)
    zeros = torch.randint(0, 1 << scheme.bits, scales.shape, generator=generator, dtype=torch.uint8)
    return QuantizedTensor(codes, {"scales": scales, "zeros": zeros}, scheme)


def decoded(tensor):
    columns = tensor.shape[1]
    spread = lambda p: p.float().expand(tensor.shape[0], -1).repeat_interleave(columns // p.shape[1], 1)
    zeros = spread(tensor.parameters["zeros"]) if "zeros" in tensor.parameters else 0
    return (tensor.codes.float() - zeros) * spread(tensor.parameters["scales"])


def export(model, scheme_of, directory):
    """Write every block linear in the scheme that ``scheme_of(name)`` gives (None keeps it); decode in place."""
    generator = torch.Generator().manual_seed(1)
    tensors, plans = {}, []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        text = scheme_of(name) if name.endswith("_proj.weight") else None
        shape = tuple(weight.shape)
        if text is None:
            tensors[name] = weight.clone()
            stored = (StoredTensor(name, "F32", shape),)
            plans.append(TensorPlan(name, "F32", shape, Action.KEEP, "", stored=stored))
            continue
        layer = LayerScheme(parse(text))
        tensor = random_tensor(layer.weight, shape, generator)
        module = name.removesuffix(".weight")
        tensors |= ct.pack(module, tensor)
        stored = ct.stored(module, layer, shape)
        plans.append(TensorPlan(name, "F32", shape, Action.QUANTIZE, "", layer, stored))
        weight.copy_(decoded(tensor))
    plan = Plan("m", "llama", "rtn", (), "rtn", ct.KEY, tuple(plans), (), 0, 0)
    config = json.loads(model.config.to_json_string(use_diff=False))
    for name, content in ct.side_files(plan, config).items():
        (directory / name).write_bytes(content)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def logits_of(directory, **options):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(IDS).logits


def compare(model, directory, **options):
    with torch.no_grad():
        expected = model(IDS).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(logits_of(directory, **options), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("scheme", ["int2:g64:sym:f16", "int3:g128:sym:f32", "int4:g128:sym:f16"])
def test_group_schemes_load(tmp_path, scheme, tied):
    model = tiny_llama(tied)
    export(model, lambda name: scheme, tmp_path)
    compare(model, tmp_path)
