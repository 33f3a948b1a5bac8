"""Build models other than plain weights: in low precision, with experts, undeclared; and an adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

RANK, TILE = 4, 128
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_TILES = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [TILE, TILE]}


def build_sources(root: Path, make: Callable[[str, Path], object]) -> None:
    """Make them below ``root``, where ``model`` is a llama; ``make(family, place)`` saves a model of another family."""
    make("mixtral", root / "moe")
    make("gpt-oss", root / "blocks-plain")
    _write_encoded(root / "blocks-plain", root / "mxfp4", _encode_mxfp4, {"quant_method": "mxfp4"})
    shutil.rmtree(root / "blocks-plain")
    _write_encoded(root / "model", root / "fp8", _encode_fp8_tiles, _TILES)
    _write_encoded(root / "model", root / "nvfp4", _encode_nvfp4, _NVFP4)
    _write_adapter(root / "model", root / "lora")
    _build_undeclared(root / "undeclared")


def _load_tensors(model: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _write_encoded(
    model: Path,
    output: Path,
    encode: Callable[[str, Tensor], dict[str, Tensor]],
    quantization: Mapping[str, object],
) -> None:
    """Write a model whose tensors are encoded, and say so in its configuration."""
    shutil.copytree(model, output, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, Tensor] = {}
    for name, value in _load_tensors(model).items():
        tensors |= encode(name, value)
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    config = json.loads((output / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (output / "config.json").write_text(json.dumps(config))


def _encode_fp8_tiles(name: str, value: Tensor) -> dict[str, Tensor]:
    """Encode as DeepSeek publishes: e4m3 under a multiplier for each tile."""
    if not name.endswith("proj.weight"):
        return {name: value}
    grid = [-(-size // TILE) for size in value.shape]
    scales = value.float().abs().amax().div(448).expand(grid).contiguous()
    return {
        name: (value.float() / scales[0, 0]).to(torch.float8_e4m3fn),
        f"{name}_scale_inv": scales,
    }


def _encode_nvfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    """Encode as Model Optimizer publishes: any elements, steps of e4m3, one scale of the tensor."""
    if not name.endswith("proj.weight"):
        return {name: value}
    rows, columns = value.shape
    codes = torch.arange(rows * columns // 2).remainder(251).to(torch.uint8)
    steps = torch.full((rows, columns // 16), 2.0).to(torch.float8_e4m3fn)
    return {
        name: codes.view(rows, columns // 2),
        f"{name}_scale": steps,
        f"{name}_scale_2": torch.tensor(0.005),
    }


def _encode_mxfp4(name: str, value: Tensor) -> dict[str, Tensor]:
    """Encode as gpt-oss is published: any elements of 4 bits under powers of two."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: value}
    experts, columns, rows = value.shape
    shape = (experts, rows, columns // 32)
    codes = torch.arange(experts * rows * columns // 2).remainder(251).to(torch.uint8)
    return {
        f"{name}_blocks": codes.view(*shape, 16),
        f"{name}_scales": torch.full(shape, 121, dtype=torch.uint8),
    }


def _write_adapter(model: Path, output: Path) -> None:
    """Write an adapter as PEFT does."""
    output.mkdir()
    tensors = {}
    for name, value in _load_tensors(model).items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            rows, columns = value.shape
            module = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = torch.full((RANK, columns), 0.01)
            tensors[f"{module}.lora_B.weight"] = torch.full((rows, RANK), 0.01)
    save_file(tensors, output / "adapter_model.safetensors", {"format": "pt"})
    adapter_config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none",
        "base_model_name_or_path": "a/b", "rank_pattern": {}, "alpha_pattern": {"q_proj": 4}, "use_rslora": False,
    }  # fmt: skip
    (output / "adapter_config.json").write_text(json.dumps(adapter_config))


def _build_undeclared(output: Path) -> None:
    """Save a model of a family that nobody declared."""
    from scripts import tiny_families
    from tests.conftest import tiny_tokenizer

    tiny_families.build("persimmon").save_pretrained(output)
    tiny_tokenizer().save_pretrained(output)
