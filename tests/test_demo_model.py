"""The bundled demo model is a trained model, and it is sensitive to quantization.

Most tests of a quantization toolchain need a model whose quality can be lost. These tests hold the
bundled one to that: it fits the repository, its shapes suit every number format, it predicts
text that it never saw clearly better than the best general compressor, and each bit taken from its
weights hurts several times more than the one before.
"""

import importlib.util
import json
import lzma
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "demo"
WINDOW = 512
PREFIX_BYTES = 16 * 1024
UNUSUAL_TEXTS = [
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # \t two  spaces\n\n\n",
    "naïve café, Größe, 你好, मानक, 🚀👩‍🚀, \u200b\u00a0, e\u0301",
    "",
    "\r\n \x00\x7f",
]


def _load_demo_text() -> ModuleType:
    """Import scripts/demo_text.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("demo_text", ROOT / "scripts" / "demo_text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo_text() -> ModuleType:
    """Return the module that splits the standard library by topic."""
    return _load_demo_text()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the bundled tokenizer as any user would load it."""
    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    """Return the bundled model in float32, on one thread, so that results do not vary."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, local_files_only=True)
    yield loaded.eval()
    torch.set_num_threads(threads)


# --- the files -----------------------------------------------------------------------------


def test_the_folder_holds_every_file_and_stays_below_ten_megabytes() -> None:
    """Everything that readers, users and lawyers need is there, in at most 10 MB."""
    files = {path.name: path for path in MODEL.iterdir()}
    assert files.keys() == {
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_log.jsonl",
    }
    assert sum(path.stat().st_size for path in files.values()) <= 10_000_000


def test_the_shapes_suit_k_quants_and_grouped_query_attention() -> None:
    """Every linear takes a multiple of 256 inputs, and several query heads share a key head."""
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["hidden_size"] % 256 == 0
    assert config["intermediate_size"] % 256 == 0
    assert config["num_attention_heads"] * config["head_dim"] % 256 == 0
    assert config["num_attention_heads"] > config["num_key_value_heads"]


# --- the tokenizer -------------------------------------------------------------------------


@pytest.mark.parametrize("text", UNUSUAL_TEXTS)
def test_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    """Byte-level BPE loses nothing, whatever the script."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_chat_template_renders_turns(tokenizer: Tokenizer) -> None:
    """The template is ChatML, and its markers are single tokens."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Explain assert."},
        {"role": "assistant", "content": "It checks."},
    ]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nExplain assert.<|im_end|>\n"
        "<|im_start|>assistant\nIt checks.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [
        0,
        1,
        2,
    ]


# --- the text ------------------------------------------------------------------------------


def test_the_topics_are_disjoint(demo_text: ModuleType) -> None:
    """No module serves two parts."""
    tables = (demo_text.TRAINING, demo_text.CALIBRATION, demo_text.EVALUATION)
    names = [name for table in tables for family in table.values() for name in family.split()]
    assert len(names) == len(set(names))


# --- the weights ---------------------------------------------------------------------------


def test_it_predicts_held_out_text_better_than_xz(
    model: PreTrainedModel, tokenizer: Tokenizer, demo_text: ModuleType
) -> None:
    """The model needs at least 15 % fewer bits per byte than `xz -9e` on the same text.

    What is compared: xz compresses the prefix whole and may look back over all of it. The model
    sees at most 511 tokens of it at a time. It pays for every token but each window's first, and
    is divided by the bytes of the tokens it paid for, so the unpaid tokens (one in 512) count on
    neither side; the last, incomplete window is left out. The size of the model itself is not
    counted: this asks whether it learned the language, not whether it is a compressor.
    """
    prefix = demo_text.evaluation_text().encode()[:PREFIX_BYTES]
    xz_bits = 8 * len(lzma.compress(prefix, preset=9 | lzma.PRESET_EXTREME)) / len(prefix)
    windows = _windows(tokenizer, prefix.decode(errors="ignore"))
    nats = sum(_nats(model, window) for window in windows)
    paid = sum(_byte_length(tokenizer, window[1:]) for window in windows)
    assert nats / math.log(2) / paid <= 0.85 * xz_bits


def test_every_bit_less_hurts_at_least_three_times_more(
    model: PreTrainedModel, tokenizer: Tokenizer, demo_text: ModuleType
) -> None:
    """KL(source || rounded) at least triples from 4 to 3 bits and from 3 to 2 bits."""
    windows = _windows(tokenizer, demo_text.evaluation_text())
    windows = windows[:: len(windows) // 4][:4]  # spread over all evaluation topics
    source = [_log_probabilities(model, window) for window in windows]
    weights = {name: module.weight.detach().clone() for name, module in _linears(model)}
    divergence = {}
    for bits in (4, 3, 2):
        for name, module in _linears(model):
            module.weight.data = _round_to_nearest(weights[name], bits)
        rounded = (_log_probabilities(model, window) for window in windows)
        divergence[bits] = _mean_divergence(source, rounded)
    assert divergence[3] >= 3 * divergence[4]
    assert divergence[2] >= 3 * divergence[3]


def _windows(tokenizer: Tokenizer, text: str) -> list[Tensor]:
    """Cut a text into whole windows that do not overlap."""
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return list(tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW))


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, window: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=window[None]).logits[0]
    return logits.log_softmax(-1)


def _nats(model: PreTrainedModel, window: Tensor) -> float:
    """Return the summed negative log likelihood of a window's tokens but the first."""
    predicted = _log_probabilities(model, window)[:-1]
    return float(functional.nll_loss(predicted, window[1:], reduction="sum"))


def _byte_length(tokenizer: Tokenizer, tokens: Tensor) -> int:
    """Return the bytes that tokens stand for: in a byte-level vocabulary one character each."""
    return sum(len(token) for token in tokenizer.convert_ids_to_tokens(tokens.tolist()))


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield every linear layer but the output matrix, which is the embedding."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module


def _round_to_nearest(weight: Tensor, bits: int) -> Tensor:
    """Round symmetrically in groups of 128, full scale at the group's largest magnitude.

    The same rule for every width: 2 bits leave the codes -1, 0 and 1.
    """
    largest = 2 ** (bits - 1) - 1
    groups = weight.reshape(len(weight), -1, 128)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    rounded: Tensor = (groups / scale).round() * scale
    return rounded.view_as(weight)


def _mean_divergence(source: list[Tensor], rounded: Iterator[Tensor]) -> float:
    """Return the mean over all positions of KL(source || rounded), in nats."""
    pairs = zip(source, rounded, strict=True)
    each = [functional.kl_div(q, p, log_target=True, reduction="batchmean") for p, q in pairs]
    return float(torch.stack(each).mean())
