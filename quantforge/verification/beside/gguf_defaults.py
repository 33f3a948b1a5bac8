"""Defaults of llama.cpp where a GGUF file does not state a key: the one table of what means the same to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.formats.gguf.special import begins_by_default
from quantforge.formats.gguf.vocabulary import Kind
from quantforge.verification.beside.trees import ABSENT, same

PRE = "tokenizer.ggml.pre"
# Keys that are read by people alone.
_DESCRIPTION = re.compile(
    r"general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|license.*|url|doi"
    r"|uuid|repo_url|source\..*|base_model\..*|dataset\..*|tags|languages)|quantize\.imatrix\..*|quantforge\..*"
)
# Checked by the reader of the container, or by `check_file_type`.
_CONTAINER = re.compile(r"general\.(file_type|quantization_version|alignment)|split\..*")
# Roles of tokens that generation has no use for: a file may name them or not.
_ROLES = ("unknown", "padding", "seperator", "mask", "eot")
# Names of pre-tokenizers that llama.cpp maps to the same one, with the same flags.
_ALIKE = ({"llama-bpe", "llama3", "llama-v3"}, {"gpt-2", "phi-2"}, {"qwen2", "deepseek-r1-qwen"}, {"gpt-4o", "llama4"},
          {"default", ""})  # fmt: skip
_LOOKS_SPECIAL = re.compile(r"<.*>|\[.*\]|\uff5c.*")


@dataclass(frozen=True, slots=True)
class Model:
    """The keys of a file and those expected of it."""

    own: Mapping[str, Any]
    expected: Mapping[str, Any]

    def default(self, key: str) -> Any:
        """Return what llama.cpp takes where the key is missing, `ABSENT` where it refuses or does something else."""
        kind, pre = self._value("tokenizer.ggml.model"), self._value(PRE)
        pieces = kind == "llama"  # as sentencepiece has them
        arch = self._value("general.architecture")
        heads, width = self._of("attention.head_count"), self._of("embedding_length")
        head = (
            width // heads
            if isinstance(heads, int) and isinstance(width, int) and heads > 0
            else ABSENT
        )
        words = self._value("tokenizer.ggml.tokens")
        defaults: dict[str, Any] = {
            f"{arch}.attention.head_count_kv": heads, f"{arch}.attention.key_length": head,
            f"{arch}.attention.value_length": head,
            f"{arch}.rope.dimension_count": self._of("attention.key_length", head),
            f"{arch}.rope.freq_base": 10000.0, f"{arch}.rope.freq_base_swa": 10000.0,
            f"{arch}.rope.scaling.type": "none", f"{arch}.rope.scaling.factor": 1.0,
            f"{arch}.rope.scaling.attn_factor": 1.0, f"{arch}.rope.scaling.yarn_beta_fast": 32.0,
            f"{arch}.rope.scaling.yarn_beta_slow": 1.0, f"{arch}.rope.scaling.finetuned": True,
            f"{arch}.rope.scaling.original_context_length": self._of("context_length"),
            f"{arch}.vocab_size": len(words) if isinstance(words, list) else ABSENT,
            f"{arch}.expert_count": 0, f"{arch}.expert_used_count": 0, f"{arch}.attention.sliding_window": 0,
            f"{arch}.tensor_data_layout": "", f"{arch}.attention.causal": True, f"{arch}.pooling_type": 0,
            f"{arch}.use_parallel_residual": True, f"{arch}.attention.scale": 0.0,
            "general.type": "model", "tokenizer.ggml.add_space_prefix": pieces,
            "tokenizer.ggml.add_bos_token": begins_by_default(str(kind), str(pre)),
            "tokenizer.ggml.add_eos_token": False,
            "tokenizer.ggml.add_sep_token": False, "tokenizer.ggml.token_type_count": 0,
            "tokenizer.ggml.remove_extra_whitespaces": False, PRE: "default",
        }  # fmt: skip
        ids = {"bos": 1, "eos": 2, "unknown": 0} if pieces else {"bos": 11, "eos": 11}
        defaults |= {f"tokenizer.ggml.{role}_token_id": number for role, number in ids.items()}
        return defaults.get(key, ABSENT)

    def optional(self, key: str) -> bool:
        """Return whether a file may leave the key out, whatever its value."""
        return key in {f"tokenizer.ggml.{role}_token_id" for role in _ROLES} or not obeyed(key)

    def idle(self, key: str, value: Any) -> bool:
        """Return whether a key that follows from nothing in the source changes nothing."""
        return not obeyed(key) or same(self.default(key), value)

    def _value(self, key: str) -> Any:
        return self.own.get(key, self.expected.get(key, ABSENT))

    def _of(self, key: str, otherwise: Any = ABSENT) -> Any:
        found = self._value(f"{self._value('general.architecture')}.{key}")
        return otherwise if found is ABSENT else found


def obeyed(key: str) -> bool:
    """Return whether llama.cpp, or what reads a file before it, goes by a key."""
    return not _DESCRIPTION.fullmatch(key) and not _CONTAINER.fullmatch(key)


def alike(first: Any, second: Any) -> bool:
    """Return whether llama.cpp treats two names of pre-tokenizers alike."""
    return first == second or any(
        {first, second} <= group for group in _ALIKE if isinstance(first, str)
    )


def kinds_alike(own: Any, other: Any, tokens: Any, number: int) -> bool:
    """Return whether ``own`` is the kind that another converter writes for token ``number``, which looks special."""
    piece = tokens[number] if isinstance(tokens, list) and number < len(tokens) else ""
    looks = isinstance(piece, str) and bool(_LOOKS_SPECIAL.fullmatch(piece))
    return looks and (own, other) == (Kind.CONTROL, Kind.USER_DEFINED)
