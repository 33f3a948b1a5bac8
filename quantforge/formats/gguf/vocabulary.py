"""Convert a ``tokenizer.json`` to the vocabulary keys of llama.cpp.

The list of tokens is exactly as long as the embedding. A shorter vocabulary is filled up with unused tokens. Tokens
past the embedding that no ordinary text has are left out, as an event; with others the tokenizer is of another model.
Two kinds are written:

*Byte-level BPE* (``gpt2``) keeps its pieces in the byte alphabet and its merges in order. It first cuts the text into
words, and llama.cpp has those regular expressions compiled in, under names (``tokenizer.ggml.pre``). Its converter
recognises a name by a digest of the ids of one fixed text, which depends on the whole vocabulary and so rejects every
newly trained tokenizer. Here the steps themselves are compared: the split patterns, whether digits stand alone, and
whether a word that is a token of the vocabulary is taken whole (``ignore_merges``), which llama.cpp ties to the name.
What is not recognised is refused, because a wrong name gives wrong tokens without any error.

*BPE as sentencepiece does it* (``llama``) has scores instead: llama.cpp joins whichever neighbours give the piece of
the highest score, so the score of a piece is minus the rank of the merge that makes it. That is the same only if every
way to cut a piece into two pieces is a merge, which is checked, and if the spaces are written alike.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from quantforge.errors import InputError, RefusedError
from quantforge.events import Event
from quantforge.files.opener import read_object
from quantforge.formats.gguf import tokenizer_differences as differences
from quantforge.formats.gguf.container import (
    MetadataValue,
    ValueType,
    array_value,
    bool_value,
    string_value,
    u32_value,
)
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.formats.gguf.tokenizer import (
    SENTENCEPIECE_SPACE,
    added_tokens,
    apply_tokenizer_config,
    bos_eos_flags,
    chat_templates,
    check_added_tokens,
    end_token_ids,
    flatten_steps,
    pieces_by_id,
    post_processor_ends,
    read_merges,
    read_settings,
    special_ids,
)
from quantforge_files.roles import TOKENIZER

DIFFERS_EVENT = "tokenizer-differs"
_MAX_ROWS = 1 << 22  # of an embedding; the largest have a quarter of a million
_MERGE_SPACE = chr(256 + 32)
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
# "seperator": so llama.cpp spells it
_KEY_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}


class TokenType(IntEnum):
    """Token types of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# The default; a template of another name is under TEMPLATE.NAME
TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(slots=True)
class Vocabulary:
    """A tokenizer in the form in which GGUF stores it.

    Attributes:
        model: ``gpt2`` or ``llama``.
        pre: name of the pre-tokenizer.
        tokens: pieces by id.
        kinds: what each is.
        scores: of the pieces, for ``llama``.
        merges: for ``gpt2``, ``left right``.
        special_ids: ids by role.
        flags: ``add_bos_token``, ``add_eos_token``, ``add_space_prefix``.
        templates: chat templates by name; "" is the default.
        notes: what is carried of several things that differ.
        events: what llama.cpp does otherwise, and tokens that are left out.
    """

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special_ids: dict[str, int] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def keys(self) -> dict[str, MetadataValue]:
        """Return the metadata keys."""
        metadata = {
            "tokenizer.ggml.model": string_value(self.model),
            "tokenizer.ggml.pre": string_value(self.pre),
            "tokenizer.ggml.tokens": array_value(ValueType.STRING, self.tokens),
            "tokenizer.ggml.token_type": array_value(ValueType.I32, self.kinds),
        }
        if self.scores:
            metadata["tokenizer.ggml.scores"] = array_value(ValueType.F32, self.scores)
        if self.merges:
            metadata["tokenizer.ggml.merges"] = array_value(ValueType.STRING, self.merges)
        for role, number in self.special_ids.items():
            metadata[f"tokenizer.ggml.{_KEY_NAMES.get(role, role)}_token_id"] = u32_value(number)
        for name, value in self.flags.items():
            metadata[f"tokenizer.ggml.{name}"] = bool_value(value)
        if "" in self.templates:
            metadata[TEMPLATE_KEY] = string_value(self.templates[""])
        template_names = sorted(name for name in self.templates if name)
        if template_names:
            metadata["tokenizer.chat_templates"] = array_value(ValueType.STRING, template_names)
        return metadata | {
            f"{TEMPLATE_KEY}.{name}": string_value(self.templates[name]) for name in template_names
        }


def vocabulary(
    root: Path, rows: int, config: Mapping[str, Any], pre: str | None = None, name: str = ""
) -> Vocabulary:
    """Read the tokenizer of a model directory and convert it.

    Args:
        root: the directory.
        rows: of the embedding.
        config: ``config.json``, for ids of special tokens that nothing else states.
        pre: name of the pre-tokenizer, where it cannot be recognised; with it a normalisation, or missing merges, that
            llama.cpp does otherwise are accepted.
        name: of the model, by which llama.cpp knows one family.

    Raises:
        InputError: no tokenizer, damaged, or ordinary text has tokens for which the embedding has no row.
        RefusedError: a kind of tokenizer, or a step of one, that llama.cpp is not known to have.
    """
    path = root / "tokenizer.json"
    if rows > _MAX_ROWS:
        raise InputError(
            f"an embedding of {rows} rows", "it is damaged", file=str(root), subject=str(root)
        )
    if not path.is_file():
        raise InputError(
            "missing; GGUF carries the vocabulary of a tokenizer.json",
            "save the tokenizer with transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))",
            file=str(path),
            subject=str(path),
        )
    tokenizer = read_object(path, TOKENIZER, root)
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        kind = model.get("type") if isinstance(model, Mapping) else None
        raise RefusedError(
            f"a tokenizer of kind {kind!r} is not written",
            "written are BPE tokenizers",
            subject=str(path),
        )
    if model.get("type", "BPE") != "BPE":
        raise RefusedError(
            f"a tokenizer of kind {model['type']!r} is not written",
            "written are BPE tokenizers",
            subject=str(path),
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise RefusedError(
                f"model.{key} = {model[key]!a:.40}: llama.cpp has no such pieces",
                "this tokenizer cannot be carried",
                subject=str(path),
            )
    settings = read_settings(root / "tokenizer_config.json")
    pieces = pieces_by_id(path, model["vocab"])
    tokenizer = apply_tokenizer_config(tokenizer, settings)
    built = (
        _sentencepiece(path, tokenizer, pieces, pre)
        if model.get("byte_fallback")
        else _byte_level(tokenizer, pre)
    )
    check_added_tokens(tokenizer, settings)
    beyond_rows = _tokens_past_embedding(path, tokenizer, pieces, rows)
    _fill_tokens(path, built, tokenizer, pieces, rows)
    numbers = {piece: number for number, piece in enumerate(built.tokens)}
    built.special_ids = special_ids(numbers, settings, config, root, beyond_rows)
    built.flags |= bos_eos_flags(numbers, built.special_ids, tokenizer, settings, model=built.model)
    built.templates, notes = chat_templates(root)
    built.notes += notes
    ends = [number for number in end_token_ids(root) if 0 <= number < rows]
    message = (
        (path, differences.normalizer_differences(tokenizer) if built.model == "gpt2" else ()),
        (path, differences.space_differences(tokenizer)),
        (path, differences.model_differences(tokenizer, built.model)),
        (path, differences.added_token_differences(tokenizer, built.model, name, built.tokens)),
        (
            path,
            differences.post_processor_differences(
                tokenizer, built.special_ids, built.flags, numbers
            ),
        ),
        (path, differences.decoder_differences(tokenizer, built.model)),
        (
            root / "tokenizer_config.json",
            differences.settings_differences(settings, tokenizer, built.flags),
        ),
        (
            root / "generation_config.json",
            differences.end_token_differences(built.special_ids, ends, built.tokens, built.model),
        ),
    )
    built.events += [
        Event(DIFFERS_EVENT, file.name, text) for file, texts in message for text in texts
    ]
    return built


def _tokens_past_embedding(
    path: Path, tokenizer: Mapping[str, Any], pieces: Mapping[int, str], rows: int
) -> dict[str, int]:
    """Return the tokens with ids beyond the embedding, which are left out, by text.

    Raises:
        InputError: ordinary text has one, or every text begins or ends with one.
    """
    model = tokenizer["model"]
    added_ids = {item["content"]: item["id"] for item in added_tokens(tokenizer)}
    beyond_rows = {text: number for number, text in pieces.items() if number >= rows}
    beyond_rows |= {text: number for text, number in added_ids.items() if number >= rows}
    if not beyond_rows:
        return beyond_rows
    merged_pieces = {left + right for left, right in read_merges(model)}
    reads_whole_words = (
        bool(model.get("ignore_merges")) or str(model.get("unk_token")) in beyond_rows
    )
    post_processed = {piece for piece in post_processor_ends(tokenizer) if piece is not None}
    for piece, number in beyond_rows.items():
        ordinary = piece not in added_ids and (
            reads_whole_words
            or piece in merged_pieces
            or len(piece) == 1
            or _BYTE_PIECE.fullmatch(piece)
        )
        if ordinary or piece in post_processed:
            raise InputError(
                f"token {piece!r} has id {number}, the embedding has {rows} rows",
                "tokenizer and weights are not of one model, or the embedding was not resized",
                file=str(path),
                subject=str(path),
            )
    return beyond_rows


def _fill_tokens(
    path: Path, filled: Vocabulary, tokenizer: Mapping[str, Any], pieces: dict[int, str], rows: int
) -> None:
    """Fill in token texts and types for every row of the embedding; added tokens are put into ``pieces``."""
    kinds: dict[int, TokenType] = {}
    model = tokenizer["model"]
    for number, piece in pieces.items():
        if filled.model == "llama" and _BYTE_PIECE.fullmatch(piece):
            kinds[number] = TokenType.BYTE
        elif piece == model.get("unk_token"):
            kinds[number] = TokenType.UNKNOWN
    added_contents = {}
    for item in added_tokens(tokenizer):
        special = bool(item.get("special"))
        spaced = filled.model == "llama" and differences.spelled_with_spaces(item, tokenizer)
        content = item["content"].replace(SENTENCEPIECE_SPACE, " ") if spaced else item["content"]
        if pieces.get(item["id"], item["content"]) != item["content"]:
            raise InputError(
                f"tokens {pieces[item['id']]!r} and {content!r} both have id {item['id']}",
                "ids of its vocabulary are missing, and added tokens get the ids after the number of pieces: save the "
                "tokenizer again with every id in use",
                file=str(path),
                subject=str(path),
            )
        added_contents[item["id"]] = pieces[item["id"]] = content
        if kinds.get(item["id"]) is not TokenType.UNKNOWN:
            kinds[item["id"]] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    beyond_rows = {number: piece for number, piece in pieces.items() if number >= rows}
    if beyond_rows:
        shown_texts = ", ".join(
            f"{beyond_rows[number]!a:.60} (id {number})" for number in sorted(beyond_rows)[:3]
        )
        filled.events.append(
            Event(
                "tokens-dropped",
                path.name,
                f"{len(beyond_rows)} token(s) past the {rows} rows of the embedding, {shown_texts}: "
                "llama.cpp takes their names in a text for ordinary text",
            )
        )
        gone = set(beyond_rows.values())
        filled.merges = [pair for pair in filled.merges if pair.replace(" ", "", 1) not in gone]
    scores = (
        dict(zip(sorted(model["vocab"].values()), filled.scores, strict=True))
        if filled.scores
        else {}
    )
    filled.tokens = [pieces.get(number, f"[PAD{number}]") for number in range(rows)]
    filled.kinds = [
        int(kinds.get(number, TokenType.NORMAL if number in pieces else TokenType.UNUSED))
        for number in range(rows)
    ]
    if filled.scores:
        filled.scores = [
            _ADDED_SCORE if number in added_contents else scores.get(number, _UNUSED_SCORE)
            for number in range(rows)
        ]
    if len(set(filled.tokens)) != rows:
        raise InputError(
            "two tokens are spelled alike", "the file is damaged", file=str(path), subject=str(path)
        )


_CARRIED_KEYS = ("general.license", "general.base_model", "general.languages", "general.tags")


@dataclass(frozen=True, slots=True)
class CarriedVocabulary:
    """Vocabulary copied from another GGUF file, with the same interface as `Vocabulary`."""

    tokens: list[str]
    found: dict[str, MetadataValue]
    notes: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()

    def keys(self) -> dict[str, MetadataValue]:
        """Return the metadata keys."""
        return self.found


def carried_vocabulary(path: Path, rows: int) -> CarriedVocabulary:
    """Copy the vocabulary, license and base model from a GGUF file.

    Raises:
        InputError: the vocabulary and the embedding have different lengths.
    """
    file = read_gguf(path)
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list)
    if len(tokens) != rows:
        raise InputError(
            f"{len(tokens)} tokens, the embedding has {rows} rows",
            "the file is damaged",
            file=str(path),
            subject=str(path),
        )
    keys = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith(("tokenizer.", *_CARRIED_KEYS))
    }
    return CarriedVocabulary(tokens, keys)


# Byte-level BPE and its pre-tokenizer


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _join_patterns(*patterns: str) -> str:
    return "|".join((*patterns, _TAIL))


_LLAMA3 = _join_patterns(_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _OTHER)
_QWEN2 = _join_patterns(_CONTRACTIONS, _LETTERS, r"\p{N}", _OTHER)
_QWEN35 = _join_patterns(
    _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
)
_TEKKEN = _join_patterns(_UPPER, _LOWER, r"\p{N}", _SLASH)
_GPT4O = _join_patterns(
    f"{_UPPER}{_CONTRACTIONS}?", f"{_LOWER}{_CONTRACTIONS}?", r"\p{N}{1,3}", _SLASH
)


BYTE_LEVEL_STEP, DIGITS_STEP = "bytes", "digits"
# Steps, and whether words that are tokens are taken whole: the name in llama.cpp.
_PRE_TOKENIZERS: Mapping[tuple[tuple[str, ...], bool], str] = {
    ((BYTE_LEVEL_STEP,), False): "gpt-2",
    ((DIGITS_STEP, BYTE_LEVEL_STEP), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
}
# Pre-tokenizers of byte-level vocabularies for which llama.cpp begins a text with a token unless told otherwise.
_BOS_BY_DEFAULT = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "chameleon", "pixtral"}
)


def _byte_level(tokenizer: Mapping[str, Any], pre: str | None) -> Vocabulary:
    model = tokenizer["model"]
    kinds = [node.get("type") for node in flatten_steps(tokenizer.get("normalizer"), "normalizers")]
    kind = next((kind for kind in kinds if kind != "NFC"), None)
    if kind is not None and pre is None:
        raise RefusedError(
            f"tokenizer.json: llama.cpp does no normalisation, the tokenizer does {kind}",
            "accept that with --pre-tokenizer NAME",
        )
    built = Vocabulary("gpt2", pre or _recognize_pre_tokenizer(tokenizer), [], [])
    built.merges = [
        " ".join(piece.replace(" ", _MERGE_SPACE) for piece in pair) for pair in read_merges(model)
    ]
    return built


def _recognize_pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level BPE tokenizer.

    Raises:
        RefusedError: the steps are none that llama.cpp is known to do.
    """
    steps = _pre_tokenizer_steps(tokenizer.get("pre_tokenizer"))
    nodes = flatten_steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if not nodes or nodes[-1].get("type") != "ByteLevel":
        steps = (*steps, "no ByteLevel at the end")
    ignore_merges = bool(tokenizer["model"].get("ignore_merges", False))
    name = _PRE_TOKENIZERS.get((steps, ignore_merges))
    if name is None:
        names = " then ".join(step if len(step) < 60 else step[:60] + "..." for step in steps)
        raise RefusedError(
            f"tokenizer.json: unknown pre-tokenizer: {names or 'none'}{', ignore_merges' if ignore_merges else ''}",
            "name llama.cpp's equivalent with --pre-tokenizer NAME (e.g. llama-bpe, qwen2, gpt-2)",
        )
    return name


def _pre_tokenizer_steps(node: object) -> tuple[str, ...]:
    """Return the splitting steps as comparable strings; unsupported steps are named by their JSON type."""
    if not isinstance(node, Mapping):
        return ()
    kind = node.get("type")
    if kind == "Sequence":
        inner = node.get("pretokenizers")
        return tuple(
            step
            for item in (inner if isinstance(inner, list) else ())
            for step in _pre_tokenizer_steps(item)
        )
    if kind == "ByteLevel":
        if node.get("add_prefix_space"):
            return ("a space before the text",)
        return (BYTE_LEVEL_STEP,) if node.get("use_regex", True) else ()
    if kind == "Digits" and node.get("individual_digits"):
        return (DIGITS_STEP,)
    if kind == "Split":
        pattern = node.get("pattern")
        text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        is_plain = node.get("behavior") == "Isolated" and not node.get("invert", False)
        if isinstance(text, str) and is_plain:
            return (text,)
    return (f"a step {kind!r}",)


def pre_tokenizer_steps(name: str) -> tuple[tuple[str, ...], bool] | None:
    """Return the steps of llama.cpp's pre-tokenizer with this name, None if it is unknown."""
    return next((key for key, other in _PRE_TOKENIZERS.items() if other == name), None)


def adds_bos_by_default(model: str, pre: str) -> bool:
    """Return whether llama.cpp adds BOS before a text if no key says so.

    Args:
        model: the kind of vocabulary: ``llama`` (pieces, as sentencepiece has them) or ``gpt2`` (bytes).
        pre: the pre-tokenizer of a vocabulary of bytes.
    """
    return model == "llama" or pre in _BOS_BY_DEFAULT


# BPE as sentencepiece does it


_MAX_SQUARES = 200_000_000  # of the lengths of all pieces, which looking at every cut costs; the largest: 20 million
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def _sentencepiece(
    path: Path, tokenizer: Mapping[str, Any], pieces: Mapping[int, str], pre: str | None
) -> Vocabulary:
    model = tokenizer["model"]
    vocab: Mapping[str, int] = model["vocab"]
    pairs = read_merges(model)
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(pairs):
        ranks.setdefault(left + right, rank)
    added_texts = {item["content"] for item in added_tokens(tokenizer)}
    _check_bytes(path, vocab)
    if pre is None:
        _check_merges(path, vocab, pairs, added_texts)
    built = Vocabulary("llama", "default", [], [])
    has_pre_tokenizer = pre is not None
    built.flags["add_space_prefix"] = _adds_space_prefix(
        path, tokenizer, added_texts, named=has_pre_tokenizer
    )
    built.scores = [-float(ranks.get(pieces[number], 0)) for number in sorted(pieces)]
    return built


def _check_bytes(path: Path, vocab: Mapping[str, int]) -> None:
    """Raise `RefusedError` unless every byte is a token, as llama.cpp requires."""
    missing_bytes = [
        name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in vocab
    ]
    if missing_bytes:
        raise RefusedError(
            f"byte_fallback, and {len(missing_bytes)} of the 256 bytes are no pieces, {missing_bytes[0]} first",
            "llama.cpp needs all of them: this tokenizer cannot be carried",
            subject=str(path),
        )


def _check_merges(
    path: Path, vocab: Mapping[str, int], pairs: list[tuple[str, str]], added_texts: set[str]
) -> None:
    """Raise `RefusedError` unless every split of a token into two tokens is a merge, as llama.cpp assumes."""
    check_lengths(path, vocab)
    known_pairs = set(pairs)
    for piece in vocab.keys() - added_texts:
        if _BYTE_PIECE.fullmatch(piece):
            continue
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair[0] in vocab and pair[1] in vocab and pair not in known_pairs:
                raise RefusedError(
                    f"{pair[0]!r} and {pair[1]!r} are pieces but no merge gives {piece!r}: llama.cpp would "
                    "join them, this tokenizer does not",
                    "accept other tokens for some words with --pre-tokenizer default",
                    subject=str(path),
                )


def check_lengths(path: Path, pieces: Iterable[str]) -> None:
    """Raise `InputError` if the tokens are too long to check all their splits."""
    if sum(len(piece) ** 2 for piece in pieces) > _MAX_SQUARES:
        raise InputError(
            "pieces of such lengths are no vocabulary",
            "take the file of the original model",
            file=str(path),
            subject=str(path),
        )


def _adds_space_prefix(
    path: Path, tokenizer: Mapping[str, Any], added_texts: Container[str], *, named: bool
) -> bool:
    """Return whether a space is added before the text; raise `RefusedError` for steps that llama.cpp lacks.

    Args:
        path: ``tokenizer.json``.
        tokenizer: its content.
        added_texts: its added tokens.
        named: other tokens for some words are accepted (``--pre-tokenizer``).
    """
    prefix = replaces_space = False
    model = tokenizer["model"]
    for node in (
        *flatten_steps(tokenizer.get("normalizer"), "normalizers"),
        *flatten_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"),
    ):
        kind = node.get("type")
        spaces = node.get("pattern") == {"String": " "}
        if kind == "Prepend" and node.get("prepend") == SENTENCEPIECE_SPACE and not prefix:
            prefix = True
        elif (
            kind == "Metaspace"
            and node.get("replacement", SENTENCEPIECE_SPACE) == SENTENCEPIECE_SPACE
        ):
            default = "always" if node.get("add_prefix_space", True) else "never"
            prefix = prefix or node.get("prepend_scheme", default) != "never"
            replaces_space = True
            metaspace_node = next(
                (
                    token
                    for token in model["vocab"]
                    if SENTENCEPIECE_SPACE in token[1:] and token not in added_texts
                ),
                None,
            )
            if node.get("split", True) and metaspace_node is not None and not named:
                raise RefusedError(
                    f"Metaspace splits a text at spaces, llama.cpp does not, and joins {metaspace_node!r}",
                    "accept other tokens for some words with --pre-tokenizer default",
                    subject=str(path),
                )
        elif kind == "Replace" and spaces and node.get("content") == SENTENCEPIECE_SPACE:
            replaces_space = True
        elif not (kind == "Split" and spaces and replaces_space):
            raise RefusedError(
                f"llama.cpp's tokenizer has no step {kind!r}",
                "this tokenizer cannot be carried",
                subject=str(path),
            )
    if not replaces_space:
        raise RefusedError(
            f"no step writes spaces as {SENTENCEPIECE_SPACE}, and llama.cpp does",
            "this tokenizer cannot be carried",
            subject=str(path),
        )
    return prefix
