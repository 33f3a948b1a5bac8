"""Kinds of files, and how many bytes each may have.

A limit is at least four times the largest published file of its kind: tokenizers of 33 MB with 262 000 tokens,
indexes of 140 000 names. Weights have no limit, because they are read in parts.
"""

from __future__ import annotations

from dataclasses import dataclass

NO_LIMIT = (1 << 63) - 1  # of files that are read in parts
_KB, _MB, _GB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class FileRole:
    """A kind of file.

    Attributes:
        name: its name in messages.
        max_bytes: the largest size.
        max_values: the largest number of values, keys and containers, for JSON or a header.
        allow_infinity: whether its numbers may be infinite, see `strict_json.parse`.
    """

    name: str
    max_bytes: int
    max_values: int = 0
    allow_infinity: bool = False


# Lists of what is left out name every expert.
CONFIG = FileRole("configuration", 64 * _MB, 1_200_000, allow_infinity=True)
INDEX = FileRole("index of weights", 64 * _MB, 1_200_000)
HEADER = FileRole("safetensors header", 32 * _MB, 4_000_000)  # a quarter of a million tensors
GGUF_HEADER = FileRole("GGUF header", 128 * _MB, 6_000_000)
WEIGHTS = FileRole("weights", NO_LIMIT)
TOKENIZER = FileRole("tokenizer", 136 * _MB, 4_500_000)
# Sentencepiece, tiktoken, merges, tokens by themselves.
VOCABULARY = FileRole("vocabulary", 80 * _MB)
# Of a tokenizer, of generation, of a processor.
SETTINGS = FileRole("settings", 32 * _MB, 1_000_000)
TEMPLATE = FileRole("chat template", 4 * _MB)
LICENCE = FileRole("licence", 4 * _MB)
CARD = FileRole("model card", 16 * _MB)
MANIFEST = FileRole("manifest", 128 * _MB, 4_000_000)
SIGNATURE = FileRole("signature", 16 * _MB, 1_000_000)
KEY = FileRole("key", 64 * _KB)
RECIPE = FileRole("recipe", _MB)
TASK = FileRole("task", _MB)
# With tables of text: what is digested in ten seconds.
IMATRIX = FileRole("importance matrix", 8 * _GB)
TEXT = FileRole("text", 256 * _MB)
LINE = FileRole("line of JSON", 32 * _MB, 1_000_000)
TABLE = FileRole("table of text", 8 * _GB)
IMAGE = FileRole("image", 64 * _MB)
HIDDEN_STATES = FileRole("hidden states", NO_LIMIT)
TUNING_RESULTS = FileRole("results of tuning", NO_LIMIT)
JOURNAL = FileRole("journal", 128 * _MB, 1_000_000)

# The files that are carried into a result, by patterns of their names.
CARRIED_FILES = {
    "tokenizer.json": TOKENIZER,
    "tekken.json": VOCABULARY, "vocab.json": VOCABULARY, "vocab.txt": VOCABULARY, "merges.txt": VOCABULARY,
    "tokenizer.model": VOCABULARY, "tokenizer.model.v[0-9]*": VOCABULARY, "*.tiktoken": VOCABULARY,
    "spiece.model": VOCABULARY, "sentencepiece*.model": VOCABULARY,
    "tokenizer*.json": SETTINGS, "added_tokens.json": SETTINGS, "special_tokens_map.json": SETTINGS,
    "generation_config.json": SETTINGS, "*processor_config.json": SETTINGS,
    "chat_template*.json": TEMPLATE, "chat_template*.jinja": TEMPLATE, "additional_chat_templates/*.jinja": TEMPLATE,
}  # fmt: skip
