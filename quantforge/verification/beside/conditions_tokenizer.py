"""Conditions on keys of ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

from quantforge.verification.beside.facts import Pair
from quantforge.verification.beside.trees import ABSENT, Change, at, same


def special_already(change: Change, pair: Pair) -> bool:
    """Return whether the added token is one of the source's vocabulary that its settings name as a special token."""
    token = change.own
    if change.other is not ABSENT or not isinstance(token, dict):
        return False
    words = at(pair.other.readable("tokenizer.json"), ("model", "vocab"))
    settings = pair.other.readable("tokenizer_config.json")
    listed = settings.get("added_tokens_decoder")
    stated = listed.get(str(token.get("id"))) if isinstance(listed, dict) else None
    if isinstance(stated, dict):
        return all(same(token.get(key), value) for key, value in stated.items())
    named = [
        value.get("content") if isinstance(value, dict) else value
        for key, value in settings.items()
        if key.endswith("_token")
    ]
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return (
        isinstance(words, dict)
        and token.get("content") in named
        and isinstance(token["content"], str)
        and same(words.get(token["content"], ABSENT), token.get("id"))
        and all(token.get(key) is value for key, value in flags.items())
    )


_GENERIC = frozenset({"TokenizersBackend", "TokenizersBackendFast", "PreTrainedTokenizerFast"})


def reader(change: Change, pair: Pair) -> bool:
    """Return whether the class takes tokenizer.json as it is, or is the source's class under its other name."""
    if not isinstance(change.own, str):
        return False
    if change.own in _GENERIC:
        return "tokenizer.json" in pair.own.files
    return isinstance(change.other, str) and change.own.removesuffix(
        "Fast"
    ) == change.other.removesuffix("Fast")


def repeats(change: Change, pair: Pair) -> bool:
    """Return whether all listed tokens are added tokens of tokenizer.json with the same flags, or the list is gone."""
    if change.own is ABSENT:
        return "tokenizer.json" in pair.own.files
    added = pair.own.readable("tokenizer.json").get("added_tokens")
    known = (
        {str(item.get("id")): item for item in added if isinstance(item, dict)}
        if isinstance(added, list)
        else {}
    )
    listed = change.own if isinstance(change.own, dict) else None
    if listed is None:
        listed = {change.path[1]: change.own} if len(change.path) == 2 else {}
    return bool(listed) and all(
        isinstance(item, dict) and {**known.get(number, {}), **item} == known.get(number)
        for number, item in listed.items()
    )


def added_by_steps(change: Change, pair: Pair) -> bool:
    """Return whether the flag is left out, and the steps of tokenizer.json do what it said."""
    from quantforge.formats.gguf.special import template_ends as ends_of

    if change.own is not ABSENT:
        return False
    before, now = (ends_of(side.readable("tokenizer.json")) for side in (pair.other, pair.own))
    settings = pair.other.readable("tokenizer_config.json")
    role = change.path[-1].removeprefix("add_").removesuffix("_token")
    token = settings.get(f"{role}_token")
    content = token.get("content") if isinstance(token, dict) else token
    does = now[0 if role == "bos" else 1] == content and content is not None
    return before == now or does == (change.other is True)


def added_token(change: Change, pair: Pair) -> bool:
    """Return whether the name is that of an added token of tokenizer.json; these tokens are compared by themselves."""
    added = pair.own.readable("tokenizer.json").get("added_tokens")
    listed = added if isinstance(added, list) else []
    return change.other in (ABSENT, None) and any(
        isinstance(item, dict) and same(item.get("content"), change.own) for item in listed
    )


def listed_elsewhere(change: Change, pair: Pair) -> bool:
    """Return whether the lists of further special tokens are the source's, under either of the two names."""
    del change
    names = ("additional_special_tokens", "extra_special_tokens")
    both = [
        [beside.readable("tokenizer_config.json").get(name) or [] for name in names]
        for beside in (pair.own, pair.other)
    ]
    return all(any(same(one, other) for other in both[1]) or not one for one in both[0]) and (
        any(both[0]) or not any(both[1])
    )


def own_padding(change: Change, pair: Pair) -> bool:
    """Return whether the padding token, which the source lacks, is one of the source's special tokens."""
    settings = pair.other.readable("tokenizer_config.json")
    known = [settings.get(f"{role}_token") for role in ("bos", "eos", "unk")]
    texts = [item.get("content") if isinstance(item, dict) else item for item in known]
    return change.other in (ABSENT, None) and isinstance(change.own, str) and change.own in texts


def no_mistral(change: Change, pair: Pair) -> bool:
    """Return whether transformers ignores the flag: it obeys it for families of Mistral only."""
    return (
        isinstance(change.own, bool)
        and "mistral" not in str(pair.other.config.get("model_type")).lower()
    )
