"""The tokenizer against the source's: ``tokenizer.json`` as a tree, and the files that say parts of it again.

`tokenizers` writes out defaults, and transformers builds the tokenizers of some families anew from their class: what it
makes of the *source's* tokenizer tells; the artifact's is only compared. Files that repeat the vocabulary
(``vocab.json``, ``merges.txt``, ``added_tokens.json``, ``special_tokens_map.json``) may be written or left
out by whoever saves, and must say the same wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quantforge.verification.beside.facts import Beside, DocumentError, Pair, parse
from quantforge.verification.beside.reasons import SETTINGS, TOKENIZER, unexplained
from quantforge.verification.beside.trees import Change, at, changes, plain, same, shown
from quantforge.verification.findings import Report
from quantforge.verification.structure import tokens_of
from quantforge_calibration.tokenizer import quiet, raised

NAME, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL, ADDED = "special_tokens_map.json", "added_tokens.json"
WORDS, MERGES = "vocab.json", "merges.txt"
REPEATED = frozenset({SPECIAL, ADDED, WORDS, MERGES})
_SHOWN = 12


def check_tokenizer(report: Report, pair: Pair, source: Path) -> None:
    """Report everything in which the artifact's tokenizer is not the source's; ``source`` is its directory."""
    try:
        tree = tokenizer_changes(pair, source)
    except DocumentError as error:
        report.add("side-files", NAME, f"is no tokenizer: {plain(str(error))}")
        tree = []
    _tell(report, NAME, tree)
    try:
        _tell(report, CONFIG, settings_changes(pair))
    except DocumentError as error:
        report.add("side-files", CONFIG, f"is damaged: {plain(str(error))}")


def tokenizer_changes(pair: Pair, source: Path | None = None) -> list[Change]:
    """Return the places of ``tokenizer.json`` that mean something else; raise `DocumentError` where it is none."""
    if NAME not in pair.own.files or NAME not in pair.other.files:
        return []
    if pair.own.files[NAME] == pair.other.files[NAME]:
        return []
    other = canonical(pair.other.readable(NAME))
    try:
        own = canonical(pair.own.document(NAME))
        tokens_of(pair.own.document(NAME))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DocumentError(str(error)) from error
    found = unexplained(changes(own, other), TOKENIZER, pair)
    if found and source is not None:
        built = canonical(rebuilt(source))
        found = [item for item in found if not built or not same_place(item, built)]
    return found


def same_place(change: Change, built: Mapping[str, Any]) -> bool:
    """Return whether the value at a place is what transformers makes of it."""
    value = at(built, change.path)
    return value is change.own or same(change.own, value)


def rebuilt(source: Path) -> dict[str, Any]:
    """Return the source's tokenizer as transformers would save it, {} where it cannot be loaded without model code."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with quiet():
            loaded = AutoTokenizer.from_pretrained(
                source, local_files_only=True, trust_remote_code=False
            )
            return parse(loaded.backend_tokenizer.to_str().encode())
    except BaseException as error:
        if not raised(error):
            raise
        return {}
    finally:
        logging.set_verbosity(level)


def canonical(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with merges as pairs and added tokens by id; raise built-in errors for what is no tokenizer."""
    found = dict(tokenizer)
    if isinstance(model := found.get("model"), Mapping) and isinstance(model.get("merges"), list):
        pairs = [item.split(" ", 1) if isinstance(item, str) else item for item in model["merges"]]
        found["model"] = {**model, "merges": pairs}
    if isinstance(added := found.get("added_tokens"), list):
        found["added_tokens"] = {str(item["id"]): item for item in added}
        if len(found["added_tokens"]) != len(added):
            raise DocumentError("two added tokens have one id")
    return found


def settings_changes(pair: Pair) -> list[Change]:
    """Return the keys of ``tokenizer_config.json`` that mean something else; raise `DocumentError` if it is damaged."""
    own, other = pair.own.document(CONFIG), pair.other.readable(CONFIG)
    if CONFIG not in pair.own.files or CONFIG not in pair.other.files:
        return []
    return unexplained(changes(_flat(own, pair.own), _flat(other, pair.other)), SETTINGS, pair)


def _flat(settings: Mapping[str, Any], beside: Beside) -> dict[str, Any]:
    """Return special tokens by their text, if their flags are those of the tokenizer; leave out the template."""
    added = beside.readable(NAME).get("added_tokens")
    listed = (
        [item for item in added if isinstance(item, Mapping)] if isinstance(added, list) else []
    )
    known = {item["content"]: item for item in listed if isinstance(item.get("content"), str)}
    found = {key: value for key, value in settings.items() if key != "chat_template"}
    for key, value in found.items():
        if key.endswith("_token") and isinstance(value, Mapping) and "content" in value:
            text = value["content"]
            flags = {
                flag: is_set
                for flag, is_set in value.items()
                if flag not in {"content", "__type", "id", "special"}
            }
            stated = known.get(text, flags) if isinstance(text, str) else {}
            found[key] = (
                text
                if all(stated.get(flag) == is_set for flag, is_set in flags.items())
                else dict(value)
            )
    return found


def contradicting(own: Beside, name: str) -> list[str]:
    """Describe where a file that repeats a part of the tokenizer contradicts that part."""
    tokenizer = own.readable(NAME)
    if not tokenizer:
        return []
    try:
        return [
            f"{plain(text)} (it repeats another file)"
            for text in _contradictions(own, tokenizer, name)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return [f"is damaged: {plain(str(error))}"]


def _contradictions(own: Beside, tokenizer: Mapping[str, Any], name: str) -> Iterable[str]:
    tokens = tokens_of(tokenizer)
    if name in {ADDED, WORDS}:
        for piece, number in own.document(name).items():
            if tokens.get(piece) != number:
                yield f"{shown(piece)} = {shown(number)}, {NAME} has {shown(tokens.get(piece))}"
    elif name == MERGES:
        lines = [
            line
            for line in own.files[name].decode(errors="replace").splitlines()
            if line and not line.startswith("#version")
        ]
        merges = canonical(tokenizer)["model"].get("merges") or []
        if lines != [" ".join(pair) for pair in merges]:
            yield f"the merges are not those of {NAME}"
    else:
        settings = own.readable(CONFIG)
        for role, token in own.document(name).items():
            for stated, said in zip(_texts(token), _texts(settings.get(role, token)), strict=False):
                if stated not in tokens or stated != said:
                    yield f"{role} = {shown(stated)}, {CONFIG} has {shown(said)}"


def _texts(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item.get("content") if isinstance(item, Mapping) else item for item in items]


def _tell(report: Report, name: str, found: list[Change]) -> None:
    """Report one finding for each place (at most `_SHOWN`), one for all tokens and one for all merges."""
    large = [item for item in found if item.path[:2] in {("model", "vocab"), ("model", "merges")}]
    for part in ("vocab", "merges"):
        inside = [item for item in large if item.path[1] == part]
        if inside:
            what = "token(s) differ" if part == "vocab" else "merge(s) differ"
            report.add("side-files", name, f"{len(inside)} {what}, e.g. {inside[0]}")
    rest = [item for item in found if item not in large]
    for item in rest[:_SHOWN]:
        report.add("side-files", name, f"{item} (text would be read otherwise)")
    if len(rest) > _SHOWN:
        report.add("side-files", name, f"and {len(rest) - _SHOWN} more places")
