"""A quantization config that contradicts the tensors or its copies is found; unambiguous ones pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.errors import InputError
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.open_model import open_model
from quantforge.verification.verify import verify
from tests import peers

BLOCK = "model.layers.0."
UP = f"{BLOCK}mlp.up_proj"
INT4, ASYM, INT8 = "llmc-w4a16-gptq", "llmc-w4a16-awq-asym", "llmc-w8a8-smooth"
FP8, NVFP4, MXFP4 = "llmc-fp8", "llmc-nvfp4", "llmc-mxfp4"
GPTQ, ORDERED, SKIPPED = "gptqmodel-v1", "gptqmodel-desc-act", "gptqmodel-3bit-skipped"
V2, AWQ, NF4 = "gptqmodel-v2-asym", "gptqmodel-awq", "bnb-nf4"
COPY = "quantize_config.json"
CACHE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
LINEARS = [f"self_attn.{name}_proj" for name in "qkv"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]
Edit = Callable[["Model"], None]


class Model:
    """A copy of an artifact that a tool wrote, to be edited: its configuration, its tensors, other files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.path = Path(shutil.copytree(peers.FIXTURES / name, folder / name))
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self.tensors = load_file(self.path / "model.safetensors")

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def group(self) -> dict[str, Any]:
        return self.quantization["config_groups"]["group_0"]

    def written(self) -> Path:
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors", {"format": "pt"})
        return self.path


def both(*edits: Edit) -> Edit:
    def apply(model: Model) -> None:
        for edit in edits:
            edit(model)

    return apply


def put(**values: Any) -> Edit:
    return lambda model: model.quantization.update(values)


def group(**values: Any) -> Edit:
    return lambda model: model.group.update(values)


def storage(name: str) -> Edit:
    return both(put(format=name), group(format=name))


def weights(**values: Any) -> Edit:
    return lambda model: model.group["weights"].update(values)


def inputs(**values: Any) -> Edit:
    return lambda model: model.group["input_activations"].update(values)


def drop(key: str) -> Edit:
    def apply(model: Model) -> None:
        model.quantization.pop(key)

    return apply


def second_group(target: str, **values: Any) -> Edit:
    """Add another config group before the first, equal but for ``values``."""

    def apply(model: Model) -> None:
        other = {**deepcopy(model.group), "targets": [target], **values}
        model.quantization["config_groups"] = {"group_1": other, "group_0": model.group}

    return apply


def index(order: Callable[[torch.Tensor], torch.Tensor], *modules: str) -> Edit:
    """Add ``g_idx`` tensors for groups of 32 to modules, by default to all."""

    def apply(model: Model) -> None:
        ends = [name for name in model.tensors if name.endswith(".weight_scale")]
        for name in ends:
            module = name.removesuffix(".weight_scale")
            if not modules or module in modules:
                columns = torch.arange(model.tensors[name].shape[1] * 32, dtype=torch.int32)
                model.tensors[f"{module}.weight_g_idx"] = order(columns // 32).contiguous()

    return apply


def remove_tensors(end: str) -> Edit:
    def apply(model: Model) -> None:
        for name in [name for name in model.tensors if name.endswith(end)]:
            del model.tensors[name]

    return apply


def add_tensor(name: str, value: torch.Tensor) -> Edit:
    return lambda model: model.tensors.update({name: value})


def file(name: str, **values: Any) -> Edit:
    """Change keys of another file, which may be new; None takes a key away."""

    def apply(model: Model) -> None:
        path = model.path / name
        content = {**(json.loads(path.read_text()) if path.exists() else {}), **values}
        path.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )

    return apply


def only_config(model: Model) -> None:
    """Remove the copy of the quantization config, so that ``config.json`` has the only one."""
    (model.path / COPY).unlink()


def unquantize_up(model: Model) -> None:
    """Store one module that a group targets unquantized."""
    remove_tensors(f"{UP}.weight_packed")(model)
    remove_tensors(f"{UP}.weight_scale")(model)
    remove_tensors(f"{UP}.weight_shape")(model)
    model.tensors[f"{UP}.weight"] = torch.randn(128, 64).bfloat16()


def one_group(model: Model) -> None:
    """Keep the first group of columns of every module, as if it were the only one."""
    for name, value in model.tensors.items():
        if name.endswith((".scales", ".qzeros")):
            model.tensors[name] = value[:1].contiguous()
        elif name.endswith(".g_idx"):
            model.tensors[name] = value * 0


PLANTED: dict[str, tuple[str, Edit, str]] = {
    # compressed-tensors: which modules
    "ignored, and packed": (INT4, put(ignore=["lm_head", UP]), "excludes it"),
    "ignored by a pattern, and packed": (INT4, put(ignore=["lm_head", "re:.*up_proj"]), "excludes it"),
    "a tied head that nothing ignores": (INT4, put(ignore=[]), "lm_head"),
    "targeted, and plain": (INT4, unquantize_up, "declares that it is"),
    "packed, and no group's": (INT4, group(targets=[UP]), "no config group"),
    "two groups of one module": (INT4, second_group("re:.*(up|gate)_proj", input_activations=CACHE), "int4"),
    # how they are stored
    "packed in a format of plain codes": (INT4, storage("naive-quantized"), "is packed"),
    "plain in a packed format": (INT8, storage("pack-quantized"), "is not packed"),
    "another format": (INT4, storage("nvfp4-pack-quantized"), "nvfp4"),
    "the format of the group is another": (INT4, put(format="int-quantized"), "format"),
    "another width": (INT4, weights(num_bits=8), "asks for"),
    "larger groups": (INT4, weights(group_size=64), "the other tensors hold"),
    "one scale for a row": (INT4, weights(strategy="channel", group_size=None), "asks for"),
    "asymmetric without zero points": (INT4, weights(symmetric=False), "weight_zero_point"),
    "symmetric with zero points": (ASYM, weights(symmetric=True), "weight_zero_point"),
    "nvfp4 without its divisor": (NVFP4, remove_tensors("up_proj.weight_global_scale"), "weight_global_scale"),
    "mxfp4 with a divisor": (MXFP4, add_tensor(f"{UP}.weight_global_scale", torch.ones(1)), "weight_global_scale"),
    "static inputs without their scales": (INT8, inputs(dynamic=False, strategy="tensor"), "input_scale"),
    "scales of inputs that are not static": (FP8, inputs(dynamic=True), "input_scale"),
    # the order of columns
    "an order without an index": (INT4, weights(actorder="group"), "weight_g_idx"),
    "an order, and one index missing": (INT4, both(weights(actorder="group"), index(lambda i: i.flip(0), UP)),
        "is missing"),
    "an index that no order announces": (INT4, index(lambda i: i.flip(0)), "runs of columns"),
    "an index beside no order": (INT4, both(weights(actorder=None), index(lambda i: i.flip(0), UP)), "runs of columns"),
    "an index that is too short": (INT4, both(weights(actorder="group"), index(lambda i: i[:16])), "I32 [16]"),
    # what only some loaders refuse, or read differently
    "outputs that are rounded": (INT4, group(output_activations=CACHE), "output_activations"),
    "a key of a group that nobody knows": (INT4, group(zeros="x"), "zeros"),
    "an argument that nobody knows": (INT4, weights(zeros="x"), "weights.zeros"),
    "weights that are rounded anew": (INT4, weights(dynamic=True), "weights.dynamic"),
    "another type of scales": (NVFP4, weights(scale_dtype="torch.uint8"), "scale_dtype"),
    "an order that nobody knows": (INT4, weights(actorder="x"), "actorder"),
    "no status": (INT4, drop("quantization_status"), "quantization_status is missing"),
    "inputs that nobody scaled": (MXFP4, inputs(dynamic=False), "input_activations.dynamic = False"),
    "inputs of an order that nobody knows": (INT8, inputs(actorder="x"), "input_activations.actorder"),
    "groups of no size": (FP8, inputs(strategy="group", dynamic=True), "activations of 8 bits per group"),
    "a group of no layer": (INT4, second_group("re:.*nothing"), "group_1.targets"),
    "a group of another name": (INT4, lambda m: m.quantization.update(config_groups={"W4A16": m.group}), "group_0"),
    "weights that are said to be plain": (INT4, put(quantization_status="frozen"), "quantization_status"),
    # the cache
    "a cache without scales": (INT4, put(kv_cache_scheme=CACHE), "scales of the KV cache are missing"),
    "scales without a cache": (FP8, put(kv_cache_scheme=None), "kv_cache_scheme is missing"),
    # GPTQ and AWQ
    "desc_act, in order": (GPTQ, both(only_config, put(desc_act=True)), "desc_act = true"),
    "scattered, and nothing said": (ORDERED, both(only_config, drop("desc_act")), "desc_act is missing"),
    "of the second layout, and nothing said": (V2, both(only_config, drop("checkpoint_format")), "checkpoint_format"),
    "4 bits, and nothing said": (NF4, drop("load_in_4bit"), "load_in_4bit is missing"),
    "symmetric, and said to be not": (GPTQ, both(only_config, put(sym=False)), "sym = False"),
    "asymmetric, and said to be not": (V2, put(sym=True), "config.json says sym"),
    "desc_act without g_idx": (GPTQ,
        both(only_config, put(desc_act=True), remove_tensors(".g_idx")), "g_idx is missing"),
    "desc_act, one g_idx missing": (ORDERED, both(only_config, remove_tensors("up_proj.g_idx")), "g_idx is missing"),
    "scattered, and no desc_act": (ORDERED, both(only_config, put(desc_act=False)), "runs of columns"),
    "scattered, and no desc_act of one": (ORDERED, both(
        only_config, put(dynamic={"+:.*up_proj": {"desc_act": False}})), "runs of columns"),
    "in the list, and plain": (SKIPPED, both(
        only_config, put(modules_in_block_to_quantize=[[*LINEARS, "self_attn.o_proj"]])),
        "declares that it is"),
    "not in the list, and packed": (GPTQ,
        both(only_config, put(modules_in_block_to_quantize=[LINEARS])), "excludes it"),
    "no list of lists": (GPTQ, both(only_config, put(modules_in_block_to_quantize="o_proj")), "is no list"),
    "not to convert, and packed": (GPTQ, both(only_config, put(modules_to_not_convert=["up_proj"])), "is packed"),
    "two names of the method": (GPTQ, both(only_config, put(method="awq")), "quant_method"),
    "two names of the width": (AWQ, both(only_config, put(w_bit=8)), "w_bit"),
    "two names of the groups": (AWQ, both(only_config, put(q_group_size=64)), "q_group_size"),
    "excepted by a rule, and packed": (AWQ, both(only_config, put(dynamic={"-:.*up_proj": {}})), "is packed"),
    "an order of columns in AWQ": (AWQ, both(only_config, put(desc_act=True)), "desc_act = true"),
    "zero points that are said nothing of": (AWQ, both(only_config, drop("zero_point")), "zero_point is missing"),
    "zero points that are denied": (AWQ, both(only_config, put(zero_point=False)), "zero points differ"),
    "a method that nobody knows": (GPTQ, both(only_config, put(quant_method="x", method="x")), "is the name right"),
    # other homes of the same
    "a copy with other groups": (GPTQ, file(COPY, group_size=128), COPY),
    "a copy with another order": (GPTQ, file(COPY, desc_act=True), COPY),
    "a copy with rules of its own": (GPTQ, file(COPY, dynamic={"-:.*up_proj": {}}), "config.json has {}"),
    "a copy without the rules": (SKIPPED, file(COPY, dynamic=None), "dynamic = {}"),
    "a copy without the width": (GPTQ, file(COPY, bits=None), "bits = None"),
    "AWQ's old file": (AWQ, file("quant_config.json", zero_point=False, q_group_size=32, w_bit=4), "zero_point"),
    "a description for other engines": (GPTQ,
        file("hf_quant_config.json", quantization={"quant_algo": "FP8"}), "hf_quant"),
    "vLLM's second key": (INT4,
        lambda m: m.config.update(compression_config={**m.quantization, "ignore": []}), "compression_config"),
}  # fmt: skip

HEALTHY: dict[str, tuple[str, Edit]] = {
    "an index in order": (INT4, index(lambda i: i)),
    "an index that the library does not use": (INT4, index(lambda i: i * 0 - 1)),
    "scattered as it is said": (INT4, both(weights(actorder="group"), index(lambda i: i.flip(0)))),
    "no order at all": (INT4, weights(actorder=None)),
    "no format of the group": (INT4, lambda m: m.group.pop("format")),
    "no format anywhere": (INT8, both(drop("format"), lambda m: m.group.pop("format"))),
    "one group by name, one by class": (INT4, second_group(UP)),
    "a head that a pattern ignores": (INT4, put(ignore=["re:.*lm_head"])),
    "targets that leave the head alone": (INT4, both(put(ignore=[]), group(targets=["re:.*layers.*"]))),
    "no desc_act, no g_idx": (GPTQ, remove_tensors(".g_idx")),
    "desc_act, in order, as static groups are": (GPTQ, both(only_config, put(desc_act=True, static_groups=True))),
    "desc_act of one group": (GPTQ, both(only_config, one_group, put(desc_act=True, group_size=-1))),
    "no arguments but those that are needed": (INT4, lambda m: m.group.update(
        weights={"num_bits": 4, "group_size": 32})),
    "rules and a list that agree": (SKIPPED, put(modules_in_block_to_quantize=[LINEARS])),
    "the list alone": (SKIPPED, both(only_config, drop("dynamic"), put(modules_in_block_to_quantize=[LINEARS]))),
    "a list for what this model has not": (GPTQ,
        put(modules_in_block_to_quantize=[[*LINEARS, "self_attn.o_proj", "mlp.more"]])),
    "one description": (GPTQ, only_config),
    "AWQ's old file in its spelling": (AWQ,
        file("quant_config.json", zero_point=True, q_group_size=32, w_bit=4, version="GEMM")),
    "both names, one value": (AWQ, both(only_config, put(w_bit=4, q_group_size=32))),
    "a copy that leaves out what is usual": (GPTQ, file(COPY, desc_act=None, sym=None, lm_head=None)),
}  # fmt: skip


def find_messages(path: Path) -> list[str]:
    report = verify(path, forward=False)
    return [f"{item.where}: {item.detail}" for item in report.findings]


@pytest.mark.parametrize("name", PLANTED)
def test_a_contradiction_is_found_and_named(name, tmp_path):
    artifact, edit, part = PLANTED[name]
    model = Model(artifact, tmp_path)
    edit(model)
    messages = find_messages(model.written())
    assert any(part in item for item in messages), messages


@pytest.mark.parametrize("name", HEALTHY)
def test_unambiguous_configurations_pass(name, tmp_path):
    artifact, edit = HEALTHY[name]
    model = Model(artifact, tmp_path)
    edit(model)
    assert find_messages(model.written()) == []


def test_scattered_columns_without_desc_act_are_not_decoded(tmp_path):
    model = Model(ORDERED, tmp_path)
    put(desc_act=False)(model)
    checkpoint = decode_checkpoint(open_model(model.written()))
    with pytest.raises(InputError, match=r"runs of columns, but .*g_idx scatters them"):
        checkpoint.read(f"{UP}.weight")
