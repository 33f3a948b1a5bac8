"""`verify` finds and names each planted defect of an artifact without a manifest; healthy artifacts pass."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.artifacts.manifest import NAME
from quantforge.engines import TARGETS
from quantforge.errors import InputError, UsageError
from quantforge.verification.findings import CHECKS, Report, Severity
from quantforge.verification.verify import verify
from scripts import tiny_families
from tests import gguf_models
from tests.conftest import Tiny, tiny_tokenizer
from tests.runs import copy_model, fast_recipe, keep_first_blocks, quantize, recipe, run_command
from tests.thorough import mark_others_thorough, thorough_case

Tensors = dict[str, torch.Tensor]
Plant = Callable[[Path], None]
MakeArtifact = Callable[[str], Path]

# What is damaged: an artifact with folded factors, one with zero points, experts, a GGUF file, static inputs.
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "folded": ("llama-wide", {"method": "awq", "scheme": "int4:g32:sym"}),
    "zeros": ("llama-wide", {"scheme": "int4:g32:asym", "format": "gptq"}),
    "experts": ("mixtral", {"scheme": "int4:g32:sym", "scales": "absmax"}),  # rows of 64 weights
    "blocks": ("llama-wide", {"format": "gguf", "type": "Q4_0"}),
    "inputs": ("llama-wide", {"scheme": "W8A8_STATIC"}),
}
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1"


@pytest.fixture(scope="session")
def source(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def find(family: str) -> Path:
        if family in gguf_models.FAMILIES and family != "llama":
            return gguf_models.make(family, tmp_path_factory.mktemp(family))
        return tiny(family)

    return find


def artifact_name(base: str) -> str:
    return "m.gguf" if base == "blocks" else "m"


@pytest.fixture(scope="session")
def artifact(
    source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> MakeArtifact:
    @cache
    def make(base: str) -> Path:
        family, values = BASES[base]
        out = tmp_path_factory.mktemp(base) / artifact_name(base)
        quantize(source(family), out, recipe(**values))
        return out

    return make


def quick_verify(path: Path, source: Path | None = None, **options: Any) -> Report:
    """Verify without the forward pass, which is not what most defects need."""
    return verify(path, source, **{"forward": False, **options})


def describe(report: Report) -> list[str]:
    return [f"{item.severity} {item.check} {item.where}: {item.detail}" for item in report.findings]


# Planting.


def tensors(change: Callable[[Tensors], object]) -> Plant:
    """Change the tensors of ``model.safetensors``."""

    def plant(model: Path) -> None:
        stored = load_file(model / "model.safetensors")
        change(stored)
        whole = {name: value.contiguous() for name, value in stored.items()}
        save_file(whole, model / "model.safetensors", {"format": "pt"})

    return plant


def element(name: str, change: Callable[[torch.Tensor], object]) -> Plant:
    """Change one tensor in place."""
    return tensors(lambda stored: change(stored[name]))


def document(file: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    """Change a JSON file."""

    def plant(model: Path) -> None:
        content = json.loads((model / file).read_text())
        change(content)
        (model / file).write_text(json.dumps(content))

    return plant


def put(position: tuple[int, int], value: float) -> Callable[[torch.Tensor], object]:
    def change(tensor: torch.Tensor) -> None:
        tensor[position] = value

    return change


def put_all(value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.fill_(value)


def scaled(position: Any, factor: float) -> Callable[[torch.Tensor], object]:
    def change(tensor: torch.Tensor) -> None:
        tensor[position] *= factor

    return change


def swap_modules(stored: Tensors, first: str, second: str) -> None:
    """Swap everything that belongs to two modules."""
    for name in [name for name in stored if name.startswith(f"{first}.")]:
        other = second + name.removeprefix(first)
        stored[name], stored[other] = stored[other], stored[name]


def swap_groups(stored: Tensors) -> None:
    packed, scale = stored[f"{DOWN}.weight_packed"], stored[f"{DOWN}.weight_scale"]
    # Eight codes of 4 bits in a word, 32 in a group
    packed[5, :8] = packed[5, [4, 5, 6, 7, 0, 1, 2, 3]]
    scale[5, :2] = scale[5, [1, 0]]


def reorder_rows(stored: Tensors, module: str, heads: int) -> None:
    """Reorder rows as llama.cpp does for its rotary embedding."""
    for part in ("weight_packed", "weight_scale"):
        value = stored[f"{module}.{part}"]
        halves = value.view(heads, 2, -1, value.shape[1])
        stored[f"{module}.{part}"] = halves.transpose(1, 2).reshape(value.shape)


def raise_zero_point(stored: Tensors) -> None:
    """Raise one zero point, in the lowest four bits of a word."""
    zeros = stored[f"{UP}.qzeros"]
    word = int(zeros[1, 3])
    zeros[1, 3] = word + 1 if word & 15 < 12 else word - 1


def unquantize_key(stored: Tensors) -> None:
    """Leave k_proj unquantized beside q and v."""
    columns = stored[f"{K}.weight_packed"].shape[1] * 8
    rows = stored[f"{K}.weight_packed"].shape[0]
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        del stored[f"{K}.{part}"]
    stored[f"{K}.weight"] = torch.randn(rows, columns).bfloat16()


def all_of(*plants: Plant) -> Plant:
    def plant(model: Path) -> None:
        for change in plants:
            change(model)

    return plant


def method(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = config["quantization_config"]
    return settings


def weights(config: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = method(config)["config_groups"]["group_0"]["weights"]
    return settings


def add_stale_shard(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "model-00003-of-00003.safetensors")


def truncate_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-16])


def restore_source_weights(model: Path) -> None:
    """Replace the codes with plain weights, and keep the quantization config."""
    stored_tensors = load_file(model / "model.safetensors")
    stored = {name for name in stored_tensors if name.rpartition(".")[2].startswith("weight_")}
    original = {name: value for name, value in stored_tensors.items() if name not in stored}
    for name in {name.rpartition(".")[0] for name in stored}:
        shape = stored_tensors[f"{name}.weight_shape"].tolist()
        original[f"{name}.weight"] = torch.randn(*shape).bfloat16()
    save_file(original, model / "model.safetensors", {"format": "pt"})


def gguf_scale(value: float) -> Plant:
    """Set the scale of the first block of the last tensor in the file."""

    def plant(model: Path) -> None:
        data = bytearray(model.read_bytes())
        data[-18:-16] = struct.pack("<e", value)
        model.write_bytes(data)

    return plant


def drop(name: str) -> Plant:
    return tensors(lambda stored: stored.pop(name))


def replace_token(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["changed!"] = vocabulary.pop(max(vocabulary, key=lambda piece: vocabulary[piece]))


def add_large_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["<x>"] = 99999


CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SCALE = f"{DOWN}.weight_scale"
NORM = "model.layers.0.input_layernorm.weight"
# Name: (artifact, defect, check that finds it, part of what it names).
DEFECTS: dict[str, tuple[str, Plant, str, str]] = {
    "nan scale": ("folded", element(SCALE, put((3, 1), float("nan"))), "not-finite", DOWN),
    "infinite scale": ("folded", element(SCALE, put((3, 1), float("inf"))), "not-finite", DOWN),
    "zero scale": ("folded", element(SCALE, put((3, 1), 0.0)), "scale", DOWN),
    "scale 1.5 times": ("folded", element(SCALE, scaled((3, 1), 1.5)), "group-error", DOWN),
    "scale two thirds": ("folded", element(SCALE, scaled((3, 1), 2 / 3)), "group-error", DOWN),
    "scale of another sign": ("folded", element(SCALE, scaled((3, 1), -1.0)), "group-error", DOWN),
    "huge scale": ("folded", element(SCALE, scaled((3, 1), 1e8)), "group-error", DOWN),
    "all scales 1.5 times": ("folded", element(SCALE, scaled(slice(None), 1.5)), "scale-fold", DOWN),
    "scale of a folded row": ("folded", element(f"{V}.weight_scale", scaled(7, 1.6)), "scale-fold", V),
    "scale missing": ("folded", drop(SCALE), "scale", DOWN),
    "scale of an expert missing": ("experts", drop(f"{EXPERT}.weight_scale"), "scale", EXPERT),
    "groups swapped": ("folded", tensors(swap_groups), "group-error", DOWN),
    "zero point off by one": ("zeros", tensors(raise_zero_point), "group-error", UP),
    "v1 zero points read as v2": (
        "zeros",
        all_of(
            document(CONFIG, lambda c: method(c).update(checkpoint_format="gptq_v2")),
            document("quantize_config.json", lambda c: c.update(checkpoint_format="gptq_v2")),
        ),
        "zero-points", "layers.0"),
    "sym said of zero points": (
        "zeros", document(CONFIG, lambda c: method(c).update(sym=True)), "zero-points", "qzeros"),
    "gate and up swapped": ("folded", tensors(lambda t: swap_modules(t, GATE, UP)), "swapped-tensors", UP),
    "blocks swapped": (
        "folded", tensors(lambda t: swap_modules(t, DOWN, DOWN.replace(".0.", ".1."))), "swapped-tensors", DOWN),
    "q rows permuted": ("folded", tensors(lambda t: reorder_rows(t, Q, 4)), "swapped-tensors", Q),
    "k rows permuted": ("folded", tensors(lambda t: reorder_rows(t, K, 2)), "swapped-tensors", K),
    "tied said of a head": (
        "folded", document(CONFIG, lambda c: c.update(tie_word_embeddings=True)), "incomplete", ""),
    "tied, and the head is gone": (
        "folded",
        all_of(document(CONFIG, lambda c: c.update(tie_word_embeddings=True)), drop("lm_head.weight")),
        "configuration", "lm_head"),
    "dropped tensor": ("folded", drop("model.norm.weight"), "incomplete", ""),
    "one block too few": (
        "folded", document(CONFIG, lambda c: c.update(num_hidden_layers=1)), "incomplete", ""),
    "ignore list names a quantized layer": (
        "folded", document(CONFIG, lambda c: method(c)["ignore"].append(DOWN)), "ignore-list", DOWN),
    "ignore list without the head": (
        "folded", document(CONFIG, lambda c: method(c).update(ignore=[])), "ignore-list", "lm_head"),
    "mixed schemes in q, k, v": (
        "folded",
        all_of(tensors(unquantize_key), document(CONFIG, lambda c: method(c)["ignore"].append(K))),
        "fused-layers", "self_attn"),
    "stale shard": ("folded", add_stale_shard, "unreadable", "model-00003-of-00003"),
    "truncated file": ("folded", truncate_weights, "unreadable", "model.safetensors"),
    "wrong bits": ("zeros", document(CONFIG, lambda c: method(c).update(bits=8)), "unreadable", ""),
    "wrong group size": ("folded", document(CONFIG, lambda c: weights(c).update(group_size=64)), "unreadable", ""),
    "shape that lies": ("folded", element(f"{DOWN}.weight_shape", scaled(0, 2)), "unreadable", DOWN),
    "no method": ("folded", document(CONFIG, lambda c: method(c).update(quant_method=None)), "unreadable", ""),
    "nothing quantized": ("folded", restore_source_weights, "nothing-quantized", ""),
    "edited template": (
        "folded", lambda m: (m / "chat_template.jinja").write_text("{{ 'visit' }}"), "side-files", "chat_template"),
    "changed token": ("folded", document(TOKENIZER, replace_token), "side-files", TOKENIZER),
    "token without a row": ("folded", document(TOKENIZER, add_large_token), "side-files", TOKENIZER),
    "tokenizer missing": ("folded", lambda m: (m / TOKENIZER).unlink(), "side-files", TOKENIZER),
    "another norm constant": (
        "folded", document(CONFIG, lambda c: c.update(rms_norm_eps=0.1)), "configuration", CONFIG),
    "nan in a norm": ("folded", element(NORM, put(3, float("nan"))), "not-finite", NORM),  # type: ignore[arg-type]
    "changed final norm": ("folded", element("model.norm.weight", scaled(3, 1.5)), "unquantized-changed", "model.norm"),
    "zero norm under a fold": ("folded", element(NORM, put_all(0.0)), "scale-fold", "input_layernorm"),
    "changed norm under a fold": ("folded", element(NORM, scaled(3, 2.0)), "scale-fold", "input_layernorm"),
    "changed embedding": (
        "folded", element("model.embed_tokens.weight", scaled(9, -1.0)), "unquantized-changed", "embed_tokens"),
    "sign turned": ("folded", element(SCALE, scaled(slice(None), -1.0)), "swapped-tensors", DOWN),
    "input scale of zero": ("inputs", element(f"{DOWN}.input_scale", scaled(0, 0.0)), "scale", DOWN),
    "infinite scale in GGUF": ("blocks", gguf_scale(float("inf")), "not-finite", ""),
    "scale 1.5 times in GGUF": ("blocks", gguf_scale(0.9), "group-error", ""),
}  # fmt: skip


# What is not proven: a scale may serve one weight, a factor be moved on purpose, and some engines load such layers.
WARNINGS = {
    "scale 1.5 times",
    "scale two thirds",
    "scale of a folded row",
    "changed norm under a fold",
    "zero norm under a fold",
    "mixed schemes in q, k, v",
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found_and_named(name, artifact, source, tmp_path):
    base, plant, check, where = DEFECTS[name]
    original = source(BASES[base][0])
    model = tmp_path / artifact(base).name
    if artifact(base).is_dir():
        copy_model(artifact(base), model)
        (model / NAME).unlink()
    else:
        shutil.copy(artifact(base), model)
    plant(model)
    report = quick_verify(model, original)
    findings = [item for item in report.findings if item.check == check]
    assert any(where in f"{item.where} {item.detail}" for item in findings), describe(report)
    assert report.failed() == (name not in WARNINGS), describe(report)
    assert report.failed(strict=True)


@pytest.mark.parametrize("base", BASES)
def test_healthy_artifacts_have_no_findings(base, artifact, source):
    report = verify(artifact(base), source(BASES[base][0]))
    assert describe(report) == []
    assert report.tensors
    assert 0 < report.figures["kl_mean"] < 0.2
    assert describe(quick_verify(artifact(base))) == []


def test_norm_gains_that_grow_with_depth_pass(tmp_path):
    demo = Path(__file__).parents[2] / "models" / "demo"
    model = copy_model(demo, tmp_path / "rising")

    def rise(stored: Tensors) -> None:
        for layer, gain in enumerate((0.05, 1.03, 2.02, 3.0)):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                value = stored[f"model.layers.{layer}.{norm}.weight"]
                value *= gain / value.mean()

    tensors(rise)(model)
    quantize(model, tmp_path / "q", recipe(scheme="int4:g64:sym"))
    assert describe(quick_verify(tmp_path / "q")) == []


# A trained network may be odd in these ways, and what was rounded from it is in order.
def repeat_rows(weight: torch.Tensor) -> None:
    weight[1::2] = weight[::2]


def make_symmetric(weight: torch.Tensor) -> None:
    if weight.shape[0] == weight.shape[1]:
        weight.copy_((weight + weight.T) / 2)


ODD_WEIGHTS: dict[str, Callable[[torch.Tensor], object]] = {
    "rows repeated": repeat_rows,
    "symmetric": make_symmetric,
    "three values": lambda w: w.copy_(w.sign() * (w.abs() > w.abs().mean()) * 0.25),
    "all alike": lambda w: w.fill_(0.02),
}


@pytest.mark.parametrize("name", ODD_WEIGHTS)
def test_unusual_source_weights_pass(name, source, tmp_path):
    model = copy_model(source("llama-wide"), tmp_path / "odd")
    names = [*(f"{linear}.weight" for linear in (Q, K, V, GATE, UP, DOWN))]
    tensors(lambda stored: [ODD_WEIGHTS[name](stored[weight_name]) for weight_name in names])(model)
    quantize(model, tmp_path / "q", recipe(scheme="int4:g32:sym", scales="absmax"))
    (tmp_path / "q" / NAME).unlink()
    assert describe(quick_verify(tmp_path / "q", model)) == []


@pytest.mark.parametrize("factor", [1.0, -1.0, 2.0])
def test_duplicated_source_blocks_pass(factor, source, tmp_path):
    """As depth up-scaling makes them, some with a factor: then their codes or scales are the same bit for bit."""
    model = copy_model(source("llama-wide"), tmp_path / "copies")

    def copy(stored: Tensors) -> None:
        for name in (Q, K, V, GATE, UP, DOWN):
            other = f"{name.replace('.0.', '.1.')}.weight"
            stored[other] = factor * stored[f"{name}.weight"]

    tensors(copy)(model)
    quantize(model, tmp_path / "q", recipe(scheme="int4:g32:sym", scales="absmax"))
    (tmp_path / "q" / NAME).unlink()
    assert describe(quick_verify(tmp_path / "q", model)) == []


@pytest.mark.parametrize("method", ["awq", "smooth"])
def test_zero_columns_pass_with_any_folded_factor(method, source, tmp_path):
    model = copy_model(source("llama-wide"), tmp_path / "dead")
    dead = [Q, K, V, GATE, UP, DOWN]
    tensors(lambda stored: [stored[f"{name}.weight"][:, ::7].zero_() for name in dead])(model)
    scheme = "W8A8" if method == "smooth" else "int4:g32:asym"
    quantize(model, tmp_path / "q", recipe(method, scheme=scheme))
    (tmp_path / "q" / NAME).unlink()
    assert describe(quick_verify(tmp_path / "q", model)) == []


def test_every_check_is_listed_once_without_a_source(artifact, tmp_path):
    model = copy_model(artifact("folded"), tmp_path / "m")
    (model / NAME).unlink()
    element(f"{DOWN}.weight_packed", put_all(0x77777777))(model)
    document = quick_verify(model).document()
    assert {item["check"] for item in document["findings"]} == {"group-error", "zero-points"}
    assert document["partial"].keys() == {"unquantized-changed", "group-error", "swapped-tensors"}
    kinds = [*document["checked"], *document["partial"], *document["skipped"]]
    assert sorted(kinds) == sorted(CHECKS)


@pytest.mark.parametrize("base", ["folded", "blocks"])
def test_zero_matrices_and_gains_pass(base, source, tmp_path):
    """As depth up-scaling makes them."""
    family, values = BASES[base]
    model, out = copy_model(source(family), tmp_path / "zero"), tmp_path / artifact_name(base)

    def silence(stored: Tensors) -> None:
        for name in (Q, K, "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
            stored[f"{name}.weight"].zero_()
        stored["model.layers.0.post_attention_layernorm.weight"][7] = 0

    tensors(silence)(model)
    quantize(model, out, recipe(**values))
    assert describe(quick_verify(out, model)) == []
    assert describe(quick_verify(out)) == []


def test_double_quantized_scales_of_small_rows_pass(tmp_path):
    demo = keep_first_blocks(
        copy_model(Path(__file__).parents[2] / "models/demo", tmp_path / "demo"), 1
    )
    quantize(demo, tmp_path / "q", recipe(scheme="nf4:g64:sym:double", scales="absmax"))
    assert describe(verify(tmp_path / "q", demo)) == []


# Every method and format, folded or not; numbers of bits down to 2.
HEALTHY: dict[str, dict[str, Any]] = {
    "2 bits": {"scheme": "int2:g32:asym"},
    "3 bits by gptq": {"method": "gptq", "scheme": "int3:g64:sym"},
    "2 bits by awq+gptq": {"method": "awq+gptq", "scheme": "int2:g32:asym"},
    "6 bits by row": {"scheme": "int6:row:sym"},
    "8 bits": {"scheme": "int8:g128:sym", "lm_head": "int8:g128:sym"},
    "awq in its format": {"method": "awq", "scheme": "int4:g32:asym", "format": "awq"},
    "smooth": {"method": "smooth", "scheme": "W8A8"},
    "nf4": {"scheme": "nf4:g64:sym:double", "format": "bnb"},
    "bnb int8": {"scheme": "LLM_INT8", "format": "bnb"},
    "fp8": {"scheme": "FP8_DYNAMIC"},
    "fp8 tiles": {"scheme": "FP8_BLOCK", "format": "fp8", "ignore": ("*self_attn*",)},
    "nvfp4": {"scheme": "NVFP4A16"},
    "mxfp4": {"scheme": "MXFP4A16"},
    "mlx": {"bits": 4, "format": "mlx"},
}


@pytest.mark.parametrize(
    "name",
    mark_others_thorough(
        HEALTHY,
        "3 bits by gptq",
        "awq in its format",
        "smooth",
        "nf4",
        "bnb int8",
        "fp8 tiles",
        "nvfp4",
        "mlx",
    ),
)
def test_every_method_and_format_passes(name, source, tmp_path):
    model = source("llama-wide")
    quantize(model, tmp_path / "m", recipe(**HEALTHY[name]))
    assert describe(quick_verify(tmp_path / "m", model)) == []


@pytest.mark.parametrize("family", ["gpt2", "gemma3", thorough_case("phi3")])
def test_folded_factors_of_other_families_pass(family, source, tmp_path):
    model = source(family)
    quantize(model, tmp_path / "m", recipe("awq", scheme="int4:g32:sym"))
    report = quick_verify(tmp_path / "m", model)
    assert describe(report) == []
    assert report.tensors


def test_a_channel_with_clipped_outliers_passes(artifact, source, tmp_path):
    """Its fitted factor is too small, but a wrong factor of the same channel is still found."""
    original = copy_model(source("llama-wide"), tmp_path / "source")
    model = copy_model(artifact("folded"), tmp_path / "m")
    (model / NAME).unlink()
    words = load_file(model / "model.safetensors")[f"{DOWN}.weight_packed"]
    codes = torch.stack([(words >> 4 * field) & 15 for field in range(8)], -1).flatten(1)
    at_ends = (codes == 0) | (codes == 15)
    channel = int(at_ends.sum(0).argmax())
    outliers = at_ends[:, channel]
    # In the source they are larger than in the artifact, as if a search of scales had clipped them.
    element(f"{DOWN}.weight", scaled((outliers, channel), 1.4))(original)
    assert describe(quick_verify(model, original)) == []

    wrong = copy_model(model, tmp_path / "wrong")
    element(f"{UP}.weight_scale", scaled(channel, 0.7))(wrong)
    assert f"{UP}.weight" in {
        f.where for f in quick_verify(wrong, original).findings if f.check == "scale-fold"
    }


def test_a_trained_model_passes_at_3_bits(tmp_path):
    model = keep_first_blocks(
        copy_model(Path(__file__).parents[2] / "models/demo", tmp_path / "demo"), 1
    )
    quantize(model, tmp_path / "m", fast_recipe("awq", scheme="int3:g64:sym"))
    assert describe(quick_verify(tmp_path / "m", model)) == []


ODD_VALUES: list[Any] = [
    None,
    5,
    -1,
    "x",
    [],
    {},
    [1],
    {"a": 1},
    True,
    "re:(a+)+$",
    [[["x"]]],
    3.5,
    10**30,
]


def json_paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a JSON document."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from json_paths(value, (*path, key))


@pytest.mark.parametrize("base", ["folded", "zeros", "inputs"])
def test_odd_quantization_configs_raise_no_python_error(base, artifact, tmp_path):
    """Any value in ``quantization_config`` gives findings or none, but never a Python error."""
    model = copy_model(artifact(base), tmp_path / "m")
    (model / NAME).unlink()
    config = json.loads((model / CONFIG).read_text())
    config["quantization_config"].setdefault("dynamic", {})
    for path in json_paths(method(config), ("quantization_config",)):
        for value in random.Random(str(path)).sample(ODD_VALUES, 2):
            changed = deepcopy(config)
            node = changed
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
            (model / CONFIG).write_text(json.dumps(changed))
            assert quick_verify(model).document()["schema"] == "quantforge.verify/2"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": 5}', '{"model": {"vocab": {"a": "b"}}}', "\x00"]
)
def test_an_invalid_tokenizer_is_a_finding(content, artifact, source, tmp_path):
    model = copy_model(artifact("folded"), tmp_path / "m")
    (model / NAME).unlink()
    (model / TOKENIZER).write_text(content)
    assert [item.where for item in quick_verify(model, source("llama-wide")).findings] == [
        TOKENIZER
    ]


# With a manifest, and on the command line.


def flip_byte(model: Path) -> None:
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-100] ^= 1
    (model / "model.safetensors").write_bytes(data)


def add_huge_file(model: Path) -> None:
    """Add a sparse file of a terabyte, which is found by its size without a digest."""
    document(NAME, lambda d: d["outputs"].update({"x.bin": {"bytes": 3, "sha256": ""}}))(model)
    (model / "x.bin").touch()
    os.truncate(model / "x.bin", 1 << 40)


CHANGES: dict[str, tuple[Plant, str]] = {
    "grown": (add_huge_file, "x.bin"),
    "one bit": (flip_byte, "model.safetensors"),
    "added": (lambda m: (m / "notes.txt").write_text("x"), "notes.txt"),
    "removed": (lambda m: (m / "generation_config.json").unlink(), "generation_config.json"),
    "edited manifest": (document(NAME, lambda d: d["outputs"].pop(CONFIG)), CONFIG),
    "no manifest any more": (lambda m: (m / NAME).write_text("{}"), NAME),
    "name outside": (
        document(NAME, lambda d: d["outputs"].update({"../x": {"bytes": 1, "sha256": ""}})), "../x"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_files_are_compared_with_the_manifest(name, artifact, tmp_path):
    plant, where = CHANGES[name]
    model = copy_model(artifact("folded"), tmp_path / "m")
    plant(model)
    report = quick_verify(model)
    assert [item.where for item in report.findings if item.check == "manifest"] == [where]


def test_an_edited_model_card_passes(artifact, tmp_path):
    model = copy_model(artifact("folded"), tmp_path / "m")
    (model / "README.md").write_text("with figures")
    assert describe(quick_verify(model)) == []


def test_the_logits_check_finds_configuration_and_scale_errors(artifact, source, tmp_path):
    model, original = copy_model(artifact("folded"), tmp_path / "m"), source("llama-wide")
    (model / NAME).unlink()
    document(CONFIG, lambda config: config.update(rms_norm_eps=0.1))(model)
    findings = verify(model, original).findings
    assert ("logits", Severity.ERROR) in {(item.check, item.severity) for item in findings}
    document(CONFIG, lambda config: config.update(rms_norm_eps=1e-5))(model)
    for layer in (0, 1):
        name = DOWN.replace(".0.", f".{layer}.")
        element(f"{name}.weight_scale", scaled(slice(None), 3.0))(model)
    findings = verify(model, original).findings
    assert ("logits", Severity.WARNING) in {(item.check, item.severity) for item in findings}


def test_a_tuned_gptq_result_of_the_demo_passes(tmp_path):
    demo = keep_first_blocks(
        copy_model(Path(__file__).parents[2] / "models/demo", tmp_path / "demo"), 1
    )
    quantize(demo, tmp_path / "q", recipe("gptq", scheme="int4:g128:sym", tune=2))
    assert describe(verify(tmp_path / "q", demo)) == []
    (tmp_path / "q" / NAME).unlink()
    assert describe(verify(tmp_path / "q", demo)) == []


def test_a_source_with_fewer_blocks_is_reported(artifact, source, tmp_path):
    model = copy_model(artifact("folded"), tmp_path / "m")
    (model / NAME).unlink()
    shorter = keep_first_blocks(copy_model(source("llama-wide"), tmp_path / "shorter"), 1)
    report = verify(model, shorter)
    assert "blocks" in report.skipped["logits"]
    assert {
        item.detail for item in report.findings if item.where.startswith("model.layers.1.")
    } == {"the source has no such tensor"}


@pytest.mark.parametrize(
    "family", mark_others_thorough(("llava_next", "fuyu", "lfm3"), "llava_next")
)
def test_undeclared_families_with_renamed_tensors_are_verified(family, tmp_path):
    """Artifact and source of an undeclared family are matched in the same way."""
    source = tiny_families.write(family, tmp_path / "source", tiny_tokenizer())
    quantize(source, tmp_path / "q", recipe(scheme="int4:g16:sym"))
    report = verify(tmp_path / "q", source)
    assert describe(report) == []
    assert report.figures["kl_mean"] > 0
    (tmp_path / "q" / NAME).unlink()
    stored = load_file(tmp_path / "q/model.safetensors")
    gain = next(name for name in stored if ".layers.1." in name and name.endswith("norm.weight"))
    drop(gain)(tmp_path / "q")
    for forward in (True, False):
        findings = verify(tmp_path / "q", source, forward=forward).findings
        assert {item.where for item in findings} == {gain}


def test_a_gemma4_model_is_verified(tmp_path):
    source = tiny_families.write("gemma4_unified", tmp_path / "source", tiny_tokenizer())
    quantize(source, tmp_path / "q", recipe(scheme="int4:g16:sym"))
    report = verify(tmp_path / "q", source)
    assert describe(report) == []
    assert report.figures["kl_mean"] > 0


@pytest.mark.parametrize("family", mark_others_thorough(("blip-2", "kosmos-2"), "kosmos-2"))
def test_logits_are_skipped_for_models_that_need_images(family, tmp_path):
    source = tiny_families.write(family, tmp_path / "source", tiny_tokenizer())
    quantize(source, tmp_path / "q", recipe(scheme="int4:g16:sym"))
    report = verify(tmp_path / "q", source)
    assert describe(report) == []
    assert "run" in report.skipped["logits"]
    report = verify(tmp_path / "q")
    assert {item.severity for item in report.findings} <= {Severity.WARNING}


def test_a_copy_of_the_source_warns_that_nothing_is_quantized(source):
    model = source("llama-wide")
    assert describe(quick_verify(model)) == []
    assert [(item.check, item.severity) for item in quick_verify(model, model).findings] == [
        ("nothing-quantized", Severity.WARNING)
    ]


def test_the_verify_command_exits_with_5_and_lists_findings(artifact, tmp_path, capsys):
    model = copy_model(artifact("folded"), tmp_path / "m")
    sound = run_command(capsys, "verify", model, "--no-forward", "--json")
    (model / "notes.txt").write_text("x")
    ended = run_command(capsys, "verify", model, "--no-forward", "--json")
    document = json.loads(ended.out)
    assert (sound.code, ended.code) == (0, 5)
    assert (json.loads(sound.out)["ok"], document["ok"]) == (True, False)
    assert document["schema"] == "quantforge.verify/2"
    assert document["findings"][0]["where"] == "notes.txt"
    assert document["skipped"]["quantization-error"].startswith("no source")


def test_an_engine_that_cannot_load_the_artifact_is_a_finding(artifact):
    report = quick_verify(artifact("zeros"), engine="vllm")
    assert [item.check for item in report.findings] == ["engine"]
    with pytest.raises(UsageError, match="unknown engine"):
        quick_verify(artifact("zeros"), engine="vlmm")


def test_an_engine_alias_has_the_verdict_of_its_engine(artifact):
    """Every engine of `quantize --for` is one of `verify --for`."""
    model = artifact("zeros")
    for engine, target in TARGETS.items():
        report, engine_report = (
            quick_verify(model, engine=name) for name in (engine, target.verdict_engine)
        )
        assert [item.detail for item in report.findings] == [
            item.detail for item in engine_report.findings
        ]
        assert all(item.where == engine for item in report.findings if item.check == "engine")


def test_verify_of_a_missing_path_exits_with_3(tmp_path, capsys):
    assert run_command(capsys, "verify", tmp_path / "nowhere" / "m").code == 3


def test_missing_paths_are_refused_before_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["quantforge.api.verify"], "check_device", pytest.fail)
    for path, source in ((tmp_path / "nothing", None), (tmp_path, tmp_path / "nothing")):
        with pytest.raises(InputError):
            api.verify(path, source=source)
