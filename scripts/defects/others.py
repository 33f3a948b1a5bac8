"""What installed libraries write themselves: bitsandbytes and compressed-tensors through transformers, gguf-py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch


def _saved(source: Path, out: Path, model: object) -> Path:
    from transformers import AutoTokenizer

    model.save_pretrained(out)  # type: ignore[attr-defined]
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return out


def _bitsandbytes(**options: object) -> Callable[[Path, Path], Path]:
    def make(source: Path, out: Path) -> Path:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        config = BitsAndBytesConfig(**options)
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        return _saved(source, out, model)

    return make


def _compressed(scheme: str) -> Callable[[Path, Path], Path]:
    """Round by the largest magnitude in compressed-tensors' own way, and let its compressor write."""

    def make(source: Path, out: Path) -> Path:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import calculate_qparams
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        groups = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
        config = QuantizationConfig(config_groups=groups, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            found = getattr(module, "quantization_scheme", None)
            if found is None:
                continue
            weight, size = module.weight.data, found.weights.group_size or module.weight.shape[1]
            grouped = weight.float().view(weight.shape[0], -1, size)
            scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), found.weights)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        _saved(source, out, model)
        compressor.update_config(out)
        return out

    return make


def _ggml(kind: str, number: int) -> Callable[[Path, Path], Path]:
    """Round every matrix of a file of plain weights by gguf-py's own code; ``number`` is the type of the file."""

    def make(source: Path, out: Path) -> Path:
        import numpy as np
        from gguf import GGMLQuantizationType, quants

        from scripts.defects.artifacts import by_command
        from scripts.defects.files import Copy
        from scripts.defects.gguf_files import Container

        plain = out.with_name(f"{out.name}.plain")
        plain.mkdir()
        by_command("export {model} --type F32 --format gguf", source, plain / "m.gguf")
        container = Container(Copy(plain / "m.gguf", plain / "copy"))
        data = bytearray()
        for tensor in container.tensors:
            weight = np.frombuffer(container.data, "f4", int(np.prod(tensor.dims)), tensor.offset)
            tensor.offset = len(data)
            if len(tensor.dims) > 1:
                wanted = GGMLQuantizationType[kind]
                weight = quants.quantize(weight.reshape(tensor.dims[::-1]), wanted)
                tensor.type = int(wanted)
            data += weight.tobytes()
            data += b"\0" * (-len(data) % container.alignment)
        container.data = data
        for key in container.keys:
            if key.name == "general.file_type":
                key.value = number
        container.save()
        container.copy.path.rename(out)
        shutil.rmtree(plain)
        return out

    return make


def _published(source: Path, out: Path) -> None:
    """Copy the file that the released model was published as; its source was decoded from it."""
    shutil.copy(source.with_name(f"{source.name}.gguf"), out)


OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "wren/transformers-bnb-nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "wren/transformers-bnb-nf4-double": _bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "demo/transformers-bnb-fp4": _bitsandbytes(load_in_4bit=True),
    "wren/transformers-bnb-int8": _bitsandbytes(load_in_8bit=True),
    "wren/compressor-w4a16": _compressed("W4A16"),
    "demo/compressor-w8a16": _compressed("W8A16"),
    "wren/compressor-fp8-dynamic": _compressed("FP8_DYNAMIC"),
    "wren/gguf-py-Q8_0.gguf": _ggml("Q8_0", 7),
    "demo/gguf-py-Q4_0.gguf": _ggml("Q4_0", 2),
    "smollm2/published.gguf": _published,
    "smollm2/transformers-bnb-nf4": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "smollm2/transformers-bnb-int8": _bitsandbytes(load_in_8bit=True),
    "smollm2/compressor-fp8-dynamic": _compressed("FP8_DYNAMIC"),
    "smollm2/compressor-w8a16": _compressed("W8A16"),
    "smollm2/gguf-py-Q8_0.gguf": _ggml("Q8_0", 7),
    "smollm2/gguf-py-Q4_0.gguf": _ggml("Q4_0", 2),
    "smollm2/gguf-py-Q5_1.gguf": _ggml("Q5_1", 9),
}
