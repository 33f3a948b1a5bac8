"""Vision towers in the engine that they are for: llama.cpp makes of a picture what transformers makes of it."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import vision_models
from tests.gguf_exports import export
from tests.mtmd import embeddings, llama_cpp_server, run_in_new_process
from tests.thorough import mark_others_thorough

pytest.importorskip("xllamacpp")
NAMES = sorted(vision_models.CASES)
BEFORE, BEHIND = "the weights", " are rounded"
# What llama.cpp puts around a picture of its own accord.
AROUND = {
    "gemma3": ("<start_of_image>", "<end_of_image>"),
    "gemma4": ("<|image>", "<image|>"),
    "gemma4-causal": ("<|image>", "<image|>"),
    "llama4": ("<|image_start|>", "<|image_end|>"),
    "ministral3": ("", "[IMG_END]"),
    "mistral3": ("", "[IMG_END]"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen3_vl": ("<|vision_start|>", "<|vision_end|>"),
}
# Models that are handed what llama.cpp makes of a picture, and the last module of their towers in transformers: small
# differences, as of float16, grow in one, and the other gets it in another order.
HANDED = {
    "gemma4": "model.embed_vision",
    "gemma4-causal": "model.embed_vision",
    "llama4": "multi_modal_projector",
}


# Towers that llama.cpp computes by graphs of their own.
TOWERS = ("gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen3_vl")
# Tokens of a picture that see each other; embeddings that are handed over; an end of rows; positions of three kinds.
TEXTS = ("gemma3", "gemma4", "mistral3", "qwen3_vl")


@pytest.fixture(scope="module")
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """A family's name, a model of it, and its file, beside which lies that of the tower."""
    root = tmp_path_factory.mktemp(request.param)
    model = vision_models.make(request.param, root / "m")
    return request.param, model, export(model, root / "x.gguf", "F32", mmproj=True)


@pytest.mark.parametrize(
    "made", mark_others_thorough(NAMES, *TOWERS), indirect=True, scope="module"
)
def test_the_tower_makes_of_a_picture_what_transformers_makes_of_it(
    made: tuple[str, Path, Path],
) -> None:
    name, model, file = made
    expected = vision_models.image_features(name, vision_models.load(model))
    found = computed(name, file, expected.shape[1])
    assert found.shape == expected.shape
    if name == "llama4":  # column by column, of which an event tells
        assert np.linalg.norm(found - expected) > 0.1 * np.linalg.norm(expected)
        side = isqrt(len(found))
        expected = expected.reshape(side, side, -1).swapaxes(0, 1).reshape(expected.shape)
    most = 5e-3 if name in HANDED else 3e-3
    assert np.linalg.norm(found - expected) < most * np.linalg.norm(expected)


def computed(name: str, file: Path, width: int) -> np.ndarray:
    """What llama.cpp makes of a family's picture."""
    tower = file.with_name(f"mmproj-{file.stem}-F16.gguf")
    return run_in_new_process(embeddings, file, tower, vision_models.random_image(name), width)


class Server:
    """llama.cpp's server of a model with its tower, for requests about pictures."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.marker = self.get("/props").get("media_marker", "<__media__>")

    def get(self, path: str) -> dict[str, Any]:
        """The answer to a question."""
        with urllib.request.urlopen(self._address + path) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )  # fmt: skip
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    def ids(self, text: str, *, first: bool = False) -> list[int]:
        """The tokens of a text."""
        body = {"content": text, "add_special": first, "parse_special": True}
        return self.post("/tokenize", body)["tokens"]

    def likeliest(self, prompt: str, pixels: np.ndarray) -> dict[int, float]:
        """The likeliest tokens behind a prompt with a picture, and their log-probabilities."""
        picture = base64.b64encode(vision_models.encode_png(pixels)).decode()
        answer = self.post("/completion", {
            "prompt": {"prompt_string": prompt, "multimodal_data": [picture]},
            "n_predict": 1, "n_probs": 40, "temperature": 0, "cache_prompt": False,
        })  # fmt: skip
        (step,) = answer["completion_probabilities"]
        return {item["id"]: item["logprob"] for item in step["top_logprobs"]}


@pytest.fixture
def server(made: tuple[str, Path, Path]) -> Iterator[Server]:
    file = made[2]
    with llama_cpp_server(file, file.with_name(f"mmproj-{file.stem}-F16.gguf")) as address:
        yield Server(address)


def expected(name: str, file: Path, before: list[int], behind: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token, from transformers' model beside a file."""
    whole = vision_models.load(file.with_name("m"))
    if name in HANDED:
        made = torch.tensor(computed(name, file, whole.config.text_config.hidden_size))
        whole.get_submodule(HANDED[name]).forward = lambda *_, **__: made
    ids = torch.tensor([[*before, *vision_models.image_tokens(name, whole), *behind]])
    kinds = (ids == vision_models.IMAGE_TOKEN).int()
    named = {"gemma3": {"token_type_ids": kinds}, "llama4": {}, "ministral3": {}, "mistral3": {}}
    beside = named.get(name, {"mm_token_type_ids": kinds})
    with torch.no_grad():
        found = whole(input_ids=ids, **vision_models.inputs(name), **beside)
    return torch.log_softmax(found.logits[0, -1].double(), -1)


@pytest.mark.parametrize("made", mark_others_thorough(NAMES, *TEXTS), indirect=True, scope="module")
def test_the_model_continues_a_text_with_a_picture_as_in_transformers(
    made: tuple[str, Path, Path], server: Server
) -> None:
    name, _, file = made
    start, end = AROUND[name]
    before = [*server.ids(BEFORE, first=True), *(server.ids(start) if start else ())]
    wanted = expected(name, file, before, [*server.ids(end), *server.ids(BEHIND)])
    found = server.likeliest(f"{BEFORE}{server.marker}{BEHIND}", vision_models.random_image(name))
    worst = max(abs(value - wanted[token].item()) for token, value in found.items())
    assert worst < 2e-2
    likeliest = max(found, key=found.get)
    assert wanted.max() - wanted[likeliest] < 4e-2  # unless two are nearly a tie
    other = server.likeliest(
        f"{BEFORE}{server.marker}{BEHIND}", 255 - vision_models.random_image(name)
    )
    assert max(abs(other.get(token, 0.0) - value) for token, value in found.items()) > 5 * worst
