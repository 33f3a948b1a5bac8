"""What installed libraries write themselves: bitsandbytes and compressed-tensors through transformers, llama.cpp."""

from __future__ import annotations

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


def _llama_cpp(kind: str) -> Callable[[Path, Path], Path]:
    """Quantize a file of plain weights by llama.cpp's own code."""

    def make(source: Path, out: Path) -> Path:
        import xllamacpp

        from quantforge import pipeline
        from quantforge.recipe import Recipe
        from quantforge.settings import Settings

        plain = out.with_name("plain.gguf")
        plain.unlink(missing_ok=True)
        pipeline.quantize(str(source), Recipe(type="BF16", format="gguf"), plain, Settings())
        parameters = xllamacpp.llama_model_quantize_params()
        parameters.ftype = getattr(xllamacpp.llama_ftype, f"LLAMA_FTYPE_MOSTLY_{kind}")
        xllamacpp.llama_model_quantize(str(plain), str(out), parameters)
        for left in plain.parent.glob("plain.gguf*"):
            left.unlink()
        return out

    return make


OTHERS: dict[str, tuple[str, str, Callable[[Path, Path], Path]]] = {}
