"""``generation_config.json`` against the source's; a missing one is what transformers derives from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantforge.verification.beside.facts import Beside, DocumentError, Pair, tower
from quantforge.verification.beside.reasons import GENERATION, unexplained
from quantforge.verification.beside.trees import Change, changes
from quantforge.verification.findings import Report

NAME = "generation_config.json"
# What a file that does not state them takes from config.json.
_DERIVED = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "cache_implementation", "max_length",
    "min_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size",
    "num_beams", "length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "bad_words_ids", "early_stopping",
)  # fmt: skip


def check_generation(report: Report, pair: Pair) -> None:
    """Report every setting of generation that is not the source's and has no reason to differ."""
    try:
        found = generation_changes(pair)
    except DocumentError as error:
        report.add("side-files", NAME, f"is damaged: {error}")
        return
    for change in found:
        report.add("side-files", NAME, f"{change} (text would be generated otherwise)")


def generation_changes(pair: Pair) -> list[Change]:
    """Return the settings that mean something else; raise `DocumentError` where the file is no JSON object."""
    own, other = pair.own.document(NAME), pair.other.readable(NAME)
    found = changes(_whole(pair.own, own), _whole(pair.other, other))
    return unexplained(found, GENERATION, pair)


def _whole(beside: Beside, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, config.json's where they are silent; nulls are left out, one number is a list of one."""
    inner, outer = tower(beside.config), beside.config
    derived = {key: source[key] for source in (inner, outer) for key in _DERIVED if key in source}
    whole = {key: value for key, value in {**derived, **stated}.items() if value is not None}
    return {
        key: _listed(value) if key.endswith("_token_id") else value for key, value in whole.items()
    }


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value
