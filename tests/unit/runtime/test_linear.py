"""Packed linears and the loader compute with the weights that the files store."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from quantforge.api import quantize
from quantforge.errors import InputError
from quantforge.files.reader import open_checkpoint
from quantforge.formats import detect_format
from quantforge.recipe import Recipe
from quantforge.runtime import linear
from quantforge.runtime.linear import PackedLinear
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge_kernels import fallback
from quantforge_kernels.cpu import instruction_sets, packed_integers
from quantforge_kernels.matmul_spec import Kernel
from tests.conftest import FAMILIES, SIZES, TEXT_FAMILIES
from tests.quantized import dequantize_reference, random_tensor
from tests.thorough import parametrize_each_value, representative_families

CPU = torch.device("cpu")
IDS = torch.arange(3, 43).view(2, 20) % 300
FORMATS = {"compressed-tensors": "int4:g32:sym", "gptq": "int8:g32:sym", "awq": "int4:g32:asym"}


@pytest.fixture(scope="module")
def quantized(tiny, tmp_path_factory):
    """Return a function from family, format and scheme to the directory of a rounded model."""

    @cache
    def make(family: str, format_key: str, scheme: str, head: str = "keep") -> Path:
        out = tmp_path_factory.mktemp("quantized") / family
        recipe = Recipe(scheme=scheme, format=format_key, scales="absmax", lm_head=head)
        quantize(str(tiny(family)), recipe, out, Settings())
        return out

    return make


@cache
def peer(path: Path):
    """The same model by transformers' own loader, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    towers = "text_config" in json.loads((path / "config.json").read_text())
    auto = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=torch.float32).eval()


def spoil(source: Path, target: Path, change) -> Path:
    """Copy a model of one file, with the bytes of its tensors changed."""
    from safetensors.torch import load_file, save_file

    for file in filter(Path.is_file, source.iterdir()):
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@parametrize_each_value(
    ("grid", ["int2", "int3", "int4", "int5", "int8"]),
    ("rest", ["g32:sym", "g24:asym", "row:sym", "row:asym", "tensor:sym"]),
)
def test_a_packed_linear_multiplies_by_the_decoded_weight(grid, rest):
    tensor = random_tensor(f"{grid}:{rest}:bf16", (40, 96))
    bias, x = torch.randn(40), torch.randn(2, 3, 96)
    layer = PackedLinear(tensor, bias, torch.float32, CPU)
    expected = torch.nn.functional.linear(
        x.double(), dequantize_reference(tensor).double(), bias.double()
    )
    assert layer.kernel == "reference"
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tensor.decode(), dequantize_reference(tensor), rtol=0, atol=0)


@parametrize_each_value(
    (
        "scheme",
        ["int4:g64:sym:f16", "int4:g32:asym:bf16", "int8:row:sym:bf16", "int3:g64:sym:bf16"],
    ),
    ("vectors", [True, False]),
)
def test_bfloat16_uses_cpu_programs_with_vector_units(scheme, vectors, monkeypatch):
    if not vectors:
        monkeypatch.setattr(packed_integers, "best_instruction_set", lambda: None)
    kernel = (
        "llvm-int"
        if vectors and instruction_sets.best_instruction_set() is not None
        else "reference"
    )
    tensor = random_tensor(scheme, (48, 128))
    x = torch.randn(5, 128).bfloat16()
    layer = PackedLinear(tensor, None, torch.bfloat16, CPU)
    expected = x.double() @ dequantize_reference(tensor).double().T
    assert layer.kernel == kernel
    assert (layer(x).double() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("family", representative_families(TEXT_FAMILIES))
def test_plain_models_load_to_the_same_logits(tiny, family):
    loaded = load(tiny(family))
    with torch.inference_mode():
        logits, peer_logits = loaded.model(IDS).logits, peer(tiny(family))(IDS).logits
    assert torch.equal(logits, peer_logits)
    assert loaded.format == "plain"
    assert loaded.kernels == {"dense": 1.0}
    bits = {"bfloat16": 16, "float16": 16, "float32": 32}[FAMILIES[family][2]]
    assert loaded.bits_per_weight == loaded.bits_per_weight_total == bits
    peer_logits = peer(tiny(family)).state_dict()  # of a tied head the same place
    weights = sum({value.data_ptr(): value.numel() for value in peer_logits.values()}.values())
    assert loaded.weight_bytes == weights * bits // 8


def test_multimodal_model_loads_its_text_tower(tiny):
    from transformers import AutoModelForImageTextToText

    path = tiny("gemma3-multimodal")
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(load(path).model(IDS).logits, whole(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("family", "format_key"),
    [("llama", "compressed-tensors"), ("llama-tied", "gptq"), ("qwen2", "awq"),
     ("gemma2", "compressed-tensors"), ("phi3", "gptq"), ("gpt2", "compressed-tensors"),
     ("opt", "compressed-tensors")],
)  # fmt: skip
def test_quantized_models_equal_their_decoded_weights(tiny, quantized, family, format_key):
    path = quantized(family, format_key, FORMATS[format_key])
    loaded = load(path)
    assert loaded.format == format_key
    assert loaded.scheme.startswith(FORMATS[format_key])
    assert sum(loaded.kernels.values()) == pytest.approx(1)
    assert loaded.kernels["reference"] > 0.5
    expected = decoded_model(tiny(family), path)
    with torch.inference_mode():
        logits, expected_logits = loaded.model(IDS).logits, expected(IDS).logits
        source = peer(tiny(family))(IDS).logits
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)
    assert (expected_logits - source).abs().max() > 1e-3  # it was rounded


def decoded_model(source: Path, path: Path):
    """The source by transformers, its weights replaced by what the codes of ``path`` stand for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    checkpoint = open_checkpoint(path)
    format_key = detect_format(checkpoint.config)
    stored = checkpoint.stored_tensors()
    layouts = format_key.find_layouts(checkpoint.config, stored)
    assert layouts
    for layout in layouts:
        tensor = format_key.unpack(
            layout, {name: checkpoint.read(name) for name in layout.tensor_names}
        )
        module = model.get_submodule(layout.module)
        values = dequantize_reference(tensor)
        transposed = type(module).__name__ == "Conv1D"
        module.weight.data.copy_(values.T if transposed else values)
    return model


def test_a_quantized_head_is_packed_and_counts_as_read(tiny, quantized):
    path = quantized("llama-tied", "compressed-tensors", "int4:g32:sym", "int8:g32:sym")
    loaded = load(path)
    assert isinstance(loaded.model.get_output_embeddings(), PackedLinear)
    assert loaded.kernels == {"reference": 1.0}
    assert "int8" in loaded.scheme
    assert "int4" in loaded.scheme
    packed = [m for m in loaded.model.modules() if isinstance(m, PackedLinear)]
    norms = [value for name, value in loaded.model.named_parameters() if "norm" in name]
    weight_bytes = sum(m.weight_bytes for m in packed) + sum(value.nbytes for value in norms)
    assert loaded.read_bytes == weight_bytes  # not the embedding, of which a token reads one row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linears_hold_at_most_a_tenth_more_than_the_files(quantized, dtype):
    path = quantized("llama", "compressed-tensors", "int4:g32:sym")
    stored = [
        entry.nbytes
        for name, entry in open_checkpoint(path).entries.items()
        if name.endswith(("weight_packed", "weight_scale"))
    ]
    loaded = load(path, dtype=dtype)
    packed = [m for m in loaded.model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) * 2 == len(stored) == 3 * 7 * 2
    assert sum(module.weight_bytes for module in packed) <= 1.1 * sum(stored)
    fast = "reference" if instruction_sets.best_instruction_set() is None else "llvm-int"
    kernel = fast if dtype == torch.bfloat16 else "reference"
    assert {module.kernel for module in packed} == {kernel}


@pytest.mark.skipif(instruction_sets.best_instruction_set() is None, reason="no vectors")
def test_eight_bit_activations_are_optional(quantized):
    path = quantized("llama", "compressed-tensors", "int4:g32:sym")
    with torch.inference_mode():
        exact, rounded = (
            load(path, dtype=torch.bfloat16, input_bits=bits).model(IDS).logits.float()
            for bits in (16, 8)
        )
    error = float((exact - rounded).norm() / exact.norm())
    assert 1e-3 < error < 5e-2
    names = load(path, dtype=torch.bfloat16, input_bits=8).kernels
    assert "llvm-int8" in names
    assert "llvm-int" not in names
    assert not load(path, dtype=torch.bfloat16, input_bits=8).events
    with torch.inference_mode():  # in float32 nothing but the rounding is less exact
        plain, only = (load(path, input_bits=bits).model(IDS).logits for bits in (16, 8))
    assert 1e-3 < float((plain - only).norm() / plain.norm()) < 5e-2
    assert "llvm-int8" in load(path, input_bits=8).kernels
    mixture = load(quantized("mixtral", "compressed-tensors", "int4:g32:sym"), input_bits=8)
    assert "llvm-int8-grouped" in mixture.kernels
    assert not mixture.events
    kept = load(quantized("llama", "bnb", "nf4:g64:sym"), input_bits=8)
    assert "llvm-int8" not in kept.kernels
    assert [event.kind for event in kept.events] == ["kernel-fallback"]


def test_eight_bits_without_packed_weights_are_an_event(tiny):
    (event,) = load(tiny("llama"), input_bits=8).events
    assert (event.kind, event.where) == ("kernel-fallback", "model")
    assert "no linear is quantized" in event.detail


def test_bits_per_weight_counts_scales(quantized):
    loaded = load(quantized("llama-tied", "gptq", "int8:g32:sym"))
    # 16 scale bits and 8 zero bits per 32 weights; g_idx adds an int32 per column
    assert 8 + 24 / 32 <= loaded.bits_per_weight < 9.5
    assert loaded.bits_per_weight < loaded.bits_per_weight_total < 16


def test_tied_heads_stay_tied(tiny):
    model = load(tiny("llama-tied")).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_nan_weight_is_refused_with_its_position(tiny, tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    with pytest.raises(InputError, match=r"up_proj.*nan.*\[3, 5\]"):
        load(spoil(tiny("llama-tied"), tmp_path, change))


def test_a_nan_scale_is_refused(quantized, tmp_path):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight_scale"][0, 0] = float("nan")

    source = quantized("llama-tied", "compressed-tensors", "int4:g32:sym")
    with pytest.raises(InputError, match="weight_scale"):
        load(spoil(source, tmp_path, change))


def test_missing_tensor_is_refused(tiny, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(InputError, match="up_proj"):
        load(spoil(tiny("llama-tied"), tmp_path, change))


def test_undeclared_family_loads_completely_or_is_refused(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("persimmon", **{**SIZES, "num_hidden_layers": 1})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(load(tmp_path).model(IDS).logits, peer(tmp_path)(IDS).logits)

    def lose(tensors):
        del tensors["model.final_layernorm.weight"]

    def add(tensors):
        tensors["model.extra.weight"] = torch.ones(3)

    for name in ("lost", "added"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=r"in no file, first: model\.final_layernorm\.weight"):
        load(spoil(tmp_path, tmp_path / "lost", lose))
    with pytest.raises(
        InputError, match=r"have no place in the model, first: model\.extra\.weight"
    ):
        load(spoil(tmp_path, tmp_path / "added", add))


def test_failing_kernel_is_an_event_and_listed(quantized, monkeypatch):
    def broken(*_):
        raise RuntimeError("ptxas: no such register")

    kernel = Kernel("broken", lambda _: True, fallback.prepare, broken, lambda *_: (None, {}))
    monkeypatch.setattr(linear, "select_kernel", lambda _problem: kernel)
    path = quantized("llama", "compressed-tensors", "int4:g32:sym")
    loaded = load(path)
    assert {event.kind for event in loaded.events} == {"kernel-fallback"}
    assert len(loaded.events) == 3 * 7
    assert "broken: RuntimeError: ptxas" in loaded.events[0].detail
    assert set(loaded.kernels) == {"reference", "dense"}
    with torch.inference_mode():
        torch.testing.assert_close(
            loaded.model(IDS).logits, peer(path)(IDS).logits, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("limit", [linear.MAX_DECODED_BYTES, 0])
def test_small_weights_are_decoded_once(monkeypatch, limit):
    tensor = random_tensor("int4:g32:sym", (48, 64))
    monkeypatch.setattr(linear, "select_kernel", lambda _: fallback.KERNEL)
    layer = PackedLinear(tensor, None, torch.float32, CPU)
    x = torch.randn(7, 64)
    expected = layer(x)
    decoding, count = fallback.decode_rows, []
    monkeypatch.setattr(linear, "MAX_DECODED_BYTES", limit)
    monkeypatch.setattr(fallback, "decode_rows", lambda *args: count.append(1) or decoding(*args))
    with linear.cache_decoded_weights(torch.nn.Sequential(layer)):
        for _ in range(3):
            assert torch.equal(layer(x), expected)
    assert len(count) == (1 if limit else 3)
    assert torch.equal(layer(x), expected)
    assert len(count) == (2 if limit else 4)  # nothing is kept any longer
