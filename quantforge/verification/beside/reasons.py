"""The one table of what may differ from the source beside the weights, why, and what must hold of the new value.

A difference that no row of its file allows is a finding. Whoever adds a method that changes a configuration on purpose
(other norms, rotations, fewer experts) adds a row here, whose ``holds`` looks at what the tensors say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from quantforge.verification.beside import conditions_model as model
from quantforge.verification.beside import conditions_tokenizer as tokenizer
from quantforge.verification.beside.conditions import (
    Holds,
    a_flag,
    a_text,
    a_version,
    always,
    among,
    idle,
    left_out,
    one_of,
)
from quantforge.verification.beside.facts import Pair
from quantforge.verification.beside.trees import Change


@dataclass(frozen=True, slots=True)
class Reason:
    """One row: a pattern of places (``*.dtype`` is also ``dtype``), why they may differ, and on what condition."""

    place: str
    why: str
    holds: Holds

    def allows(self, change: Change, pair: Pair) -> bool:
        """Return whether the row is about a change, and its condition holds."""
        return fnmatchcase(f".{change.key}", f".{self.place}") and self.holds(change, pair)


def unexplained(found: Iterable[Change], rows: Sequence[Reason], pair: Pair) -> list[Change]:
    """Return the changes that no row allows."""
    return [change for change in found if not any(row.allows(change, pair) for row in rows)]


CONFIGURATION: tuple[Reason, ...] = (
    Reason("*dtype", "the type that the rest is computed in", model.dtype),
    Reason("*torch_dtype", "the older spelling of dtype", model.dtype),
    Reason("*transformers_version", "whoever saves writes its own version", a_version),
    Reason("*_name_or_path", "where it was loaded from; set anew by every loader", a_text),
    Reason("_commit_hash", "where it was loaded from", a_text),
    Reason(
        "_attn_implementation_autoset", "a note of transformers 4.46 to itself", one_of(True, False)
    ),
    Reason("*tie_word_embeddings", "the head was quantized by itself", model.untied),
    Reason(
        "*pad_token_id", "a tokenizer without padding was given one of its tokens", model.padding
    ),
    Reason("architectures", "the class of the family", model.classes),
)

# Settings that do nothing with these values, in transformers and in engines that read the file.
_IDLE: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,), "temperature": (1.0,), "top_p": (1.0,), "typical_p": (1.0,), "min_p": (0.0,),
    "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,), "length_penalty": (1.0,), "num_beams": (1,),
    "num_beam_groups": (1,), "diversity_penalty": (0.0,), "no_repeat_ngram_size": (0,), "use_cache": (True,),
    "encoder_no_repeat_ngram_size": (0,), "num_return_sequences": (1,), "min_length": (0,), "early_stopping": (False,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "remove_invalid_values": (False,), "output_attentions": (False,),
    "output_hidden_states": (False,), "output_scores": (False,), "output_logits": (False,),
    "return_dict_in_generate": (False,), "renormalize_logits": (False,), "low_memory": (False,),
}  # fmt: skip
GENERATION: tuple[Reason, ...] = (
    Reason("transformers_version", "whoever saves writes its own version", a_version),
    Reason("_from_model_config", "a note of transformers to itself", a_flag),
    *(Reason(key, "does nothing", idle(*values)) for key, values in _IDLE.items()),
    Reason("do_sample", "a temperature is meant to be used", model.sampling),
    Reason(
        "pad_token_id",
        "a tokenizer without padding was given one of its tokens",
        model.listed_padding,
    ),
)

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "version": ("1.0",), "truncation": (None,), "padding": (None,), "normalizer": (None,), "pre_tokenizer": (None,),
    "post_processor": (None,), "decoder": (None,), "model.type": ("BPE",), "model.dropout": (None,),
    "model.unk_token": (None,), "model.continuing_subword_prefix": (None, ""), "model.end_of_word_suffix": (None, ""),
    "model.fuse_unk": (False,), "model.byte_fallback": (False,), "model.ignore_merges": (False,),
    "*.trim_offsets": (True,), "*.use_regex": (True,), "*.invert": (False,), "*.prepend_scheme": ("always",),
    "added_tokens": ({},),
}  # fmt: skip
TOKENIZER: tuple[Reason, ...] = (
    *(
        Reason(key, "a default that is written out, or not", among(*values))
        for key, values in _DEFAULTS.items()
    ),
    Reason(
        "added_tokens.*", "a special token of the vocabulary, made whole", tokenizer.special_already
    ),
)

# Settings whose value is the default of every version, and what it is.
_USUAL: dict[str, tuple[Any, ...]] = {
    "legacy": (True, False, None), "sp_model_kwargs": ({},), "use_default_system_prompt": (False,),
    "spaces_between_special_tokens": (False,), "errors": ("replace",), "add_prefix_space": (None, False),
    "split_special_tokens": (False,), "model_max_length": (int(1e30), 1e30), "padding_side": ("right",),
    "truncation_side": ("right",), "model_input_names": (["input_ids", "attention_mask"],),
    "clean_up_tokenization_spaces": (False,), "auto_map": (None,), "processor_class": (None,),
    "bos_token": (None,), "eos_token": (None,), "unk_token": (None,), "pad_token": (None,), "sep_token": (None,),
    "cls_token": (None,), "mask_token": (None,), "model_specific_special_tokens": ({},),
    "extra_special_tokens": ([], {}), "additional_special_tokens": ([],), "add_bos_token": (None,),
    "add_eos_token": (None,),
}  # fmt: skip
SETTINGS: tuple[Reason, ...] = (
    Reason("tokenizer_class", "the class that reads tokenizer.json", tokenizer.reader),
    Reason("added_tokens_decoder*", "says again what tokenizer.json says", tokenizer.repeats),
    Reason("add_bos_token", "said by the steps of tokenizer.json", tokenizer.added_by_steps),
    Reason("add_eos_token", "said by the steps of tokenizer.json", tokenizer.added_by_steps),
    Reason("additional_special_tokens", "renamed", tokenizer.listed_elsewhere),
    Reason("extra_special_tokens", "renamed", tokenizer.listed_elsewhere),
    Reason("pad_token", "a tokenizer without padding was given one of its tokens", tokenizer.own_padding),
    *(Reason(key, "a role that generation has no use for", tokenizer.added_token)
      for key in ("mask_token", "sep_token", "cls_token")),
    Reason("fix_mistral_regex", "obeyed for Mistral's families only", tokenizer.no_mistral),
    Reason("backend", "what transformers 5 writes", one_of("tokenizers")),
    Reason("is_local", "where it was loaded from", a_flag),
    Reason("local_files_only", "where it was loaded from", a_flag),
    Reason("name_or_path", "where it was loaded from", a_text),
    Reason("special_tokens_map_file", "where it was loaded from", a_text),
    Reason("legacy", "obeyed by tokenizers without tokenizer.json only", left_out),
    Reason("sp_model_kwargs", "obeyed by tokenizers without tokenizer.json only", left_out),
    Reason("clean_up_tokenization_spaces", "the default of the version that saved", one_of(True, False)),
    *(Reason(key, "a default that is written out, or not", idle(*values)) for key, values in _USUAL.items()),
)  # fmt: skip
PROCESSORS: tuple[Reason, ...] = (
    Reason("transformers_version", "whoever saves writes its own version", a_version),
    Reason("chat_template", "compared as a template", always),
    Reason("*", "a null is no value", idle(None)),
)
