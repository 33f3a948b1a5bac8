"""Tiny models that read pictures, of the families whose towers llama.cpp reads from a file of its own."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.conftest import GEMMA3, GEMMA4, QWEN_VISION, SIZES, VISION, randomize, tiny_tokenizer

IMAGE_TOKEN = 319  # the token that stands for a part of a picture
ROW_BREAK_TOKEN = 318  # the token behind a row of one, where a family has it
_SLIDING = ["sliding_attention"] * 5 + ["full_attention"]
_TOWER = {**QWEN_VISION, "depth": 4, "intermediate_size": 64}
_GEMMA4 = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
           "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 64}  # fmt: skip
# Bounds that clip a part of what passes, and by what pooled patches are shifted and multiplied.
_BUFFERS = {"input_min": -0.75, "input_max": 1.0, "output_min": -1.25, "output_max": 0.875, "std_bias": 0.5,
            "std_scale": 0.25}  # fmt: skip
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Case:
    """A model, and a picture that it reads as it is: height and width in pixels, and how colours become numbers."""

    model_type: str
    config: dict[str, Any]
    size: tuple[int, int]
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}


CASES = {
    "llama4": Case("llama4", {
        "text_config": {**SIZES, "num_hidden_layers": 4, "head_dim": 32, "num_local_experts": 4,
                        "intermediate_size": 64, "intermediate_size_mlp": 128, "interleave_moe_layer_step": 2},
        "vision_config": {**VISION, "num_hidden_layers": 2, "intermediate_size": 128, "image_size": 32,
                          "vision_output_dim": 48, "projector_input_dim": 48, "projector_output_dim": 48},
        "image_token_index": IMAGE_TOKEN,
    }, (32, 32)),
    "gemma3": Case("gemma3", {
        "text_config": {**GEMMA3, "num_hidden_layers": 6, "layer_types": _SLIDING},
        "vision_config": {**VISION, "intermediate_size": 64, "num_hidden_layers": 2},
        "mm_tokens_per_image": 4, "image_token_index": IMAGE_TOKEN,
    }, (32, 32)),
    "gemma4": Case("gemma4", {
        "text_config": {**GEMMA4, "hidden_size_per_layer_input": 32, "pad_token_id": 0,
                        "use_bidirectional_attention": "vision"},
        "vision_config": {**_GEMMA4, "use_clipped_linears": True, "standardize": True},
        "image_token_id": IMAGE_TOKEN,
    }, (4 * 3 * 9, 4 * 3 * 10), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "gemma4-causal": Case("gemma4", {  # of a width of which llama.cpp lets no token of a picture look ahead
        "text_config": {**GEMMA4, "hidden_size": 1536, "hidden_size_per_layer_input": 0, "num_hidden_layers": 2,
                        "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**_GEMMA4, "pooling_kernel_size": 2},
        "image_token_id": IMAGE_TOKEN,
    }, (4 * 2 * 9, 4 * 2 * 10), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "mistral3": Case("mistral3", {
        "text_config": {**SIZES, "model_type": "mistral", "head_dim": 32, "sliding_window": None, "rms_norm_eps": 1e-5},
        "vision_config": {**VISION, "model_type": "pixtral", "num_hidden_layers": 2, "patch_size": 14,
                          "intermediate_size": 64, "image_size": 280, "hidden_act": "silu"},
        "image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False,
    }, (28 * 3, 28 * 5), _CLIP_MEAN, _CLIP_DEVIATION),
    "ministral3": Case("mistral3", {
        "text_config": {**SIZES, "model_type": "ministral3", "head_dim": 32, "rms_norm_eps": 1e-5,
                        "rope_parameters": {
                            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                            "original_max_position_embeddings": 8, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
        "vision_config": {**VISION, "model_type": "pixtral", "num_hidden_layers": 2, "patch_size": 14,
                          "intermediate_size": 64, "image_size": 280, "hidden_act": "silu"},
        "image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False,
    }, (28 * 3, 28 * 5), _CLIP_MEAN, _CLIP_DEVIATION),
    "qwen2_5_vl": Case("qwen2_5_vl", {
        "text_config": {**SIZES, "rope_parameters": _rope(2, 3, 3)},
        "vision_config": {key: value for key, value in _TOWER.items() if key != "num_position_embeddings"}
        | {"fullatt_block_indexes": [1, 3], "patch_size": 14},
        "image_token_id": IMAGE_TOKEN,
    }, (14 * 12, 14 * 20), _CLIP_MEAN, _CLIP_DEVIATION),
    "qwen3_vl": Case("qwen3_vl", {
        "text_config": {**SIZES, "head_dim": 32, "rope_parameters": _rope(6, 5, 5)},
        "vision_config": {**_TOWER, "patch_size": 16, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [1, 2]},
        "image_token_id": IMAGE_TOKEN,
    }, (16 * 8, 16 * 12)),
}  # fmt: skip


def make(name: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Build, fill and save one model with its tokenizer; ``changes`` are those of its tower."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    case = CASES[name]
    config = {**case.config, "vision_config": {**case.config["vision_config"], **changes}}
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(case.model_type, **config), dtype=torch.float32
    )
    randomize(model)
    for one, buffer in model.named_buffers():
        if one.rpartition(".")[2] in _BUFFERS:
            buffer.fill_(_BUFFERS[one.rpartition(".")[2]])
    model.to(dtype).save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    if CASES[name].model_type == "mistral3":
        _with_token(directory / "tokenizer.json", "[IMG_BREAK]", ROW_BREAK_TOKEN)
    return directory


def _with_token(path: Path, word: str, number: int) -> None:
    """Give a number of a tokenizer to another word, which is added."""
    written = json.loads(path.read_text())
    vocabulary = written["model"]["vocab"]
    held = next((one for one, found in vocabulary.items() if found == number), None)
    vocabulary.pop(held, None)
    vocabulary[word] = number
    written["model"]["merges"] = [
        pair for pair in written["model"]["merges"] if "".join(pair) != held
    ]
    written["added_tokens"].append({"id": number, "content": word, "single_word": False, "lstrip": False,
                                    "rstrip": False, "normalized": False, "special": True})  # fmt: skip
    path.write_text(json.dumps(written))


def load(directory: Path) -> Any:
    """The whole model in transformers."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def random_image(name: str) -> np.ndarray:
    """A picture of noise, uint8 ``[height, width, 3]``."""
    return np.random.default_rng(0).integers(0, 256, (*CASES[name].size, 3), dtype=np.uint8)


def inputs(name: str) -> dict[str, torch.Tensor]:
    """What transformers' model takes for the picture."""
    case = CASES[name]
    pixels = torch.tensor(random_image(name)).permute(2, 0, 1).float() / 255
    pixels = (pixels - torch.tensor(case.mean)[:, None, None]) / torch.tensor(case.deviation)[
        :, None, None
    ]
    if name in {"gemma3", "llama4"}:
        return {"pixel_values": pixels[None]}
    if CASES[name].model_type == "mistral3":
        return {"pixel_values": pixels[None], "image_sizes": torch.tensor([case.size])}
    size = case.config["vision_config"]["patch_size"]
    if case.model_type == "gemma4":
        rows, columns = (side // size for side in case.size)
        patches = pixels.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        return {
            "pixel_values": patches.reshape(1, rows * columns, -1),
            "image_position_ids": places[None],
        }
    rows, columns = (side // size for side in case.size)
    frames = pixels[None].expand(2, -1, -1, -1)
    blocks = frames.reshape(1, 2, 3, rows // 2, 2, size, columns // 2, 2, size)
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(rows * columns, -1)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, rows, columns]])}


def image_features(name: str, model: Any) -> np.ndarray:
    """What transformers' tower makes of the picture: ``[tokens, width]``, features of early layers behind it."""
    with torch.no_grad():
        found = model.get_image_features(**inputs(name))
        if name == "llama4":  # whose projector is called by the model
            return _flatten_tokens(model.multi_modal_projector(found.last_hidden_state)).numpy()
    whole = _flatten_tokens(found.pooler_output)
    if CASES[name].model_type == "mistral3":  # a token behind each row but the last
        row = model.get_input_embeddings().weight[ROW_BREAK_TOKEN][None].detach()
        parts = whole.split(CASES[name].size[1] // 28)
        whole = torch.cat([part for one in parts for part in (one, row)][:-1])
    deep = [_flatten_tokens(one) for one in getattr(found, "deepstack_features", None) or ()]
    return torch.cat([whole, *deep], 1).numpy()


def image_tokens(name: str, model: Any) -> list[int]:
    """The tokens that stand for the picture, with those behind its rows."""
    count = len(image_features(name, model))
    if CASES[name].model_type != "mistral3":
        return [IMAGE_TOKEN] * count
    width = CASES[name].size[1] // 28 + 1
    return [
        ROW_BREAK_TOKEN if place % width == width - 1 else IMAGE_TOKEN for place in range(count)
    ]


def _flatten_tokens(value: Any) -> torch.Tensor:
    value = torch.cat([*value]) if isinstance(value, list | tuple) else value
    return value.reshape(-1, value.shape[-1])


def encode_png(pixels: np.ndarray) -> bytes:
    """A picture as a PNG file."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
