"""Tiny models that read pictures, with their processors, and files of rows with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import make_tiny, tiny_tokenizer

GEMMA, QWEN, QWEN3 = "gemma3-multimodal", "qwen2.5-vl", "qwen3-vl"
IMAGE, START, END = 310, 311, 312  # ids of tokens that the tiny tokenizer has no words for
IMAGE_TOKENS = {
    GEMMA: ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    QWEN: ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    QWEN3: ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
IMAGE_MARKERS = {GEMMA: "<start_of_image>", QWEN: "<|image_pad|>", QWEN3: "<|image_pad|>"}
_SIZES = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_QWEN = {**_SIZES, "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
         "size": {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}}  # fmt: skip
TEMPLATE = """{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}{% for
part in m['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{%
endif %}
{% endfor %}"""


def make_vision(family: str, directory: Path, **changes: Any) -> Path:
    """Build a tiny model with the processor of its family: 4 tokens for an image of 32 x 32."""
    ids = {"image_token_id": IMAGE, "vision_start_token_id": START}
    if family == GEMMA:
        ids = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    make_tiny(family, directory, **ids, **changes)
    words = IMAGE_TOKENS[family]
    tokenizer = tiny_tokenizer()
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = written["model"]["vocab"]
    for number, word in zip((IMAGE, START, END), words, strict=True):
        held = next((name for name, found in vocabulary.items() if found == number), None)
        written["model"]["merges"] = [
            pair for pair in written["model"]["merges"] if "".join(pair) != held
        ]
        vocabulary.pop(held, None)
        vocabulary[word] = number
        written["added_tokens"].append({"id": number, "content": word, "single_word": False, "lstrip": False,
                                        "rstrip": False, "normalized": False, "special": True})  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(written))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    if family == GEMMA:
        names = ("image_token", "boi_token", "eoi_token")
        settings |= dict(zip(names, words, strict=True))
        settings["extra_special_tokens"] = dict(zip(names, words, strict=True))
    settings.pop("tokenizer_file", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", IMAGE_MARKERS[family]))
    write_processor(family, directory)
    return directory


def write_processor(family: str, directory: Path) -> None:
    """Write the files of a processor."""
    if family == GEMMA:
        own = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
        images = {
            **_SIZES,
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        }
    else:
        kind = "Qwen2_5_VLProcessor" if family == QWEN else "Qwen3VLProcessor"
        own = {"processor_class": kind}
        images = {**_QWEN, "image_processor_type": "Qwen2VLImageProcessor"}
    (directory / "processor_config.json").write_text(json.dumps(own))
    (directory / "preprocessor_config.json").write_text(
        json.dumps({**images, "processor_class": own["processor_class"]})
    )


def draw_image(path: Path, seed: int = 0, size: tuple[int, int] = (32, 32)) -> Path:
    """Write a picture of random colours."""
    import numpy as np
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(colours).save(path)
    return path


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    """Write rows as ``.jsonl``."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
