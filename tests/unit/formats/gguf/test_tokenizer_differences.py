"""Every tokenizer setting gives the same tokens in llama.cpp, an event that names it, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from quantforge.errors import RefusedError
from quantforge.formats.gguf.tokenizer import added_tokens
from quantforge.formats.gguf.vocabulary import TokenType, Vocabulary, vocabulary
from tests import gguf_models
from tests.gguf_exports import export
from tests.thorough import mark_others_thorough

ROWS = 520
Change = Callable[[dict[str, Any]], object]
TEXTS = ("the weights of the model", "Hello world, it's 1234  and\n\n 5678; don't", "tab\tand\r\nnew", "日本語 é",
         "<s>a</s>b", "\u2581under a\u2581b", "")  # fmt: skip
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
PREPEND = {"type": "Prepend", "prepend": "\u2581"}


class Case(NamedTuple):
    """A tokenizer change: its base, the expected event, and a text that llama.cpp splits differently."""

    base: str
    change: Change
    event: str = ""
    witness: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 (nobody writes into it)


def normalizer(*steps: dict[str, Any]) -> Change:
    return lambda it: it.update(normalizer={"type": "Sequence", "normalizers": [*steps]})


def pre_steps(*steps: dict[str, Any]) -> Change:
    return lambda it: it.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*steps]})


def model(**values: Any) -> Change:
    return lambda it: it["model"].update(values)


def root(**values: Any) -> Change:
    return lambda it: it.update(values)


def added(*texts: str, **flags: Any) -> Change:
    def change(it: dict[str, Any]) -> None:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for text in texts:
            it["added_tokens"].append({"id": 0, "content": text, **plain, "special": True, **flags})

    return change


def both(*changes: Change) -> Change:
    return lambda it: [change(it) for change in changes]


def special(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def template(*items: dict[str, Any], **ids: int) -> Change:
    """Return a change to a template post-processor; ``ids`` override those of <s> and </s>."""
    numbers = {"<s>": 0, "</s>": 1, **ids}
    special_tokens = {
        name: {"id": name, "ids": [number], "tokens": [name]} for name, number in numbers.items()
    }
    return root(post_processor={
        "type": "TemplateProcessing", "single": [*items], "pair": [TEXT, special("</s>"), TEXT],
        "special_tokens": special_tokens})  # fmt: skip


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


def metaspace(**values: Any) -> Change:
    step = {"type": "Metaspace", "replacement": "\u2581", **values}
    return both(root(normalizer=None), pre_steps(step))


def piece(text: str) -> Change:
    return lambda it: it["model"]["vocab"].setdefault(text, len(it["model"]["vocab"]))


def without_z(it: dict[str, Any]) -> None:
    left = [piece for piece in it["model"]["vocab"] if "z" not in piece]
    it["model"]["vocab"] = {piece: number for number, piece in enumerate(left)}
    it["model"]["merges"] = [pair for pair in it["model"]["merges"] if "z" not in "".join(pair)]


def repeated(it: dict[str, Any]) -> None:
    it["model"]["merges"].append(it["model"]["merges"][0])


def with_merges_apart(it: dict[str, Any]) -> None:
    """Move one of several merges of the same piece to the end of the list."""
    merges = it["model"]["merges"]
    joined = ["".join(pair) for pair in merges]
    merges.append(merges.pop(next(n for n, piece in enumerate(joined) if joined.count(piece) > 1)))


def unchanged(it: dict[str, Any]) -> None:
    del it


SAME = {
    "bytes": Case("gpt-2", unchanged),
    "pieces": Case("pieces", unchanged),
    "no steps of normalization": Case("gpt-2", normalizer()),
    "offsets": Case("gpt-2", root(pre_tokenizer={**BYTES, "trim_offsets": False})),
    "unknown token that is never needed": Case("gpt-2", model(unk_token="<s>")),
    "missing byte": Case("gpt-2", without_z, witness=""),
    "empty affixes": Case("gpt-2", model(continuing_subword_prefix="", end_of_word_suffix="")),
    "merge twice": Case("gpt-2", repeated),
    "added": Case("gpt-2", added("<x>")),
    "added, normalized by nothing": Case("gpt-2", added("<x>", normalized=True)),
    "added with a mark of a space": Case("gpt-2", added("<a\u2581b>", special=False)),
    "added piece with a mark": Case("pieces", added("<a\u2581b>", special=False)),
    "added with a space": Case("pieces", added("<a b>", special=False)),
    "added within another": Case("gpt-2", added("<a>", "<a><b>", "<b>")),
    "added runs": Case("gpt-2", added("\n\n", "\n\n\n", special=False)),
    "begins": Case("gpt-2", template(special("<s>"), TEXT)),
    "begins and ends": Case("gpt-2", template(special("<s>"), TEXT, special("</s>"))),
    "ends": Case("gpt-2", template(TEXT, special("</s>"))),
    "offsets of the post-processor": Case("gpt-2", root(post_processor={**BYTES, "trim_offsets": False})),
    "truncation": Case("gpt-2", root(truncation={
        "max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"})),
    "decoder in a sequence": Case("gpt-2", root(decoder={"type": "Sequence", "decoders": [BYTES]})),
    "clean_up": Case("gpt-2", unchanged, settings={"clean_up_tokenization_spaces": True}),
    "legacy": Case("gpt-2", unchanged, settings={"legacy": False}),
    "space before, last": Case("pieces", normalizer(SPACES, PREPEND)),
    "metaspace": Case("pieces", metaspace(prepend_scheme="never", split=False)),
    "metaspace after a space": Case("pieces", both(
        metaspace(prepend_scheme="always", split=False), normalizer(PREPEND, SPACES))),
    "split at nothing": Case("pieces", pre_steps(
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False})),
    "no token for the unknown": Case("pieces", model(unk_token=None, fuse_unk=False)),
}  # fmt: skip
EVENTS = {
    "NFC": Case("gpt-2", normalizer({"type": "NFC"}), "normalizer NFC", "e\u0301"),
    "dropout": Case("gpt-2", model(dropout=1.0), "model.dropout", "the"),
    "unknown bytes": Case("gpt-2", both(without_z, model(unk_token="<s>")), "model.unk_token", "zoo"),
    "words": Case("gpt-2", added("<x>", single_word=True), "('<x>') single_word", "a<x>b"),
    "spaces before": Case("gpt-2", added("<x>", lstrip=True), "('<x>') lstrip", "a <x>"),
    "spaces after": Case("gpt-2", added("<x>", rstrip=True), "('<x>') rstrip", "<x> b"),
    "normalized": Case("prefix", added("<x>", normalized=True), "('<x>') normalized", "a<x>"),
    "normalized spaces": Case(
        "pieces", added("<a\u2581b>", normalized=True, special=False), "normalized", "<a\u2581b>"),
    "overlap": Case("gpt-2", added("ab", "bcd"), "'ab' and 'bcd' can overlap", "abcd"),
    "pieces that are added": Case(
        "pieces", both(piece("\u2581\u2581"), added("\u2581\u2581", special=False)), "hold \u2581", "\u2581\u2581"),
    "two begin": Case("gpt-2", template(special("<s>"), special("</s>"), TEXT), "puts '<s>', '</s>' before", "a"),
    "another begins": Case("gpt-2", template(special("</s>"), TEXT), "puts '</s>' before", "a"),
    "another id": Case("gpt-2", template(special("<s>"), TEXT, **{"<s>": 5}), "puts '<s>' before", "a"),
    "text twice": Case("gpt-2", template(TEXT, TEXT), "with the text 2 times", "a"),
    "classifier": Case("gpt-2", root(post_processor={
        "type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}), "post_processor BertProcessing", "a"),
    "decoder": Case("gpt-2", root(decoder={"type": "Fuse"}), "decoder Fuse"),
    "no decoder": Case("gpt-2", root(decoder=None), "decoder none"),
    "decoder of pieces": Case("pieces", root(decoder={"type": "ByteFallback"}), "decoder ByteFallback"),
    "space before": Case("gpt-2", unchanged, "add_prefix_space", settings={"add_prefix_space": True}),
    "special tokens as text": Case("gpt-2", unchanged, "split_special", settings={"split_special_tokens": True}),
    "begins by settings": Case("gpt-2", unchanged, "add_bos_token = true", settings={"add_bos_token": True}),
    "ends by settings": Case("pieces", unchanged, "add_eos_token = true", settings={"add_eos_token": True}),
    "does not begin by settings": Case(
        "gpt-2", template(special("<s>"), TEXT), "add_bos_token = false", settings={"add_bos_token": False}),
    "no end": Case("gpt-2", unchanged, "no token that ends a text", settings={"eos_token": None}),
    "metaspace first": Case("pieces", metaspace(prepend_scheme="first", split=False), '"first"', "a<s>b"),
    "metaspace always": Case("pieces", metaspace(prepend_scheme="always", split=False), '"always"', " a"),
    "ranks apart": Case("pieces", with_merges_apart, "ranked apart"),
    "ignore_merges": Case("pieces", model(ignore_merges=True), "model.ignore_merges"),
}  # fmt: skip
REFUSED = {
    **{kind: Case("gpt-2", normalizer({"type": kind}), f"does {kind}")
       for kind in ("NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")},
    "a space before": Case("gpt-2", pre_steps({**BYTES, "add_prefix_space": True}), "a space before the text"),
    "no words": Case("gpt-2", pre_steps({**BYTES, "use_regex": False}), "unknown pre-tokenizer: none"),
    "no bytes": Case("qwen2", lambda it: it["pre_tokenizer"]["pretokenizers"].pop(), "no ByteLevel at the end"),
    "bytes first": Case("qwen2", lambda it: it["pre_tokenizer"]["pretokenizers"].reverse(), "no ByteLevel at the end"),
    "numbers": Case("gpt-2", pre_steps({"type": "Digits", "individual_digits": False}, BYTES), "a step 'Digits'"),
    "punctuation": Case("gpt-2", pre_steps({"type": "Punctuation", "behavior": "Isolated"}, BYTES), "a step 'Punct"),
    "words taken whole": Case("gpt-2", model(ignore_merges=True), "ignore_merges"),
    "prefixes": Case("gpt-2", model(continuing_subword_prefix="##"), "model.continuing_subword_prefix"),
    "suffixes": Case("gpt-2", model(end_of_word_suffix="</w>"), "model.end_of_word_suffix"),
    "spaces stay": Case("pieces", root(normalizer=None), "no step writes spaces"),
    "two spaces before": Case("pieces", normalizer(PREPEND, PREPEND, SPACES), "no step 'Prepend'"),
    "pieces stripped": Case("pieces", normalizer({"type": "Strip"}, SPACES), "no step 'Strip'"),
    "digits": Case("pieces", pre_steps({"type": "Digits", "individual_digits": True}), "no step 'Digits'"),
    "a byte that is no piece": Case("pieces", lambda it: it["model"]["vocab"].pop("<0x41>"), "<0x41> first"),
    "cut at spaces": Case(
        "pieces", both(piece("a\u2581"), lambda it: it["model"]["merges"].append(["a", "\u2581"]),
                       metaspace(split=True)), "Metaspace splits"),
}  # fmt: skip


def write_tokenizer(case: Case, directory: Path) -> dict[str, Any]:
    """Write the tokenizer of a case into a directory and return it."""
    base = (
        gguf_models.sentencepiece_tokenizer(prefix=case.base == "prefix")
        if case.base in {"prefix", "pieces"}
        else gguf_models.byte_level_tokenizer(case.base)
    )
    document: dict[str, Any] = json.loads(base.to_str())
    case.change(document)
    (directory / "tokenizer.json").write_text(json.dumps(document))
    settings = {"bos_token": "<s>", "eos_token": "</s>", **case.settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return document


def write_and_read_vocabulary(case: Case, directory: Path) -> Vocabulary:
    write_tokenizer(case, directory)
    return vocabulary(directory, ROWS, {})


@pytest.mark.parametrize("name", SAME)
def test_harmless_tokenizer_changes_give_no_event(name: str, tmp_path: Path) -> None:
    assert write_and_read_vocabulary(SAME[name], tmp_path).events == []


@pytest.mark.parametrize("name", EVENTS)
def test_tokenizer_differences_of_llama_cpp_are_events(name: str, tmp_path: Path) -> None:
    events = write_and_read_vocabulary(EVENTS[name], tmp_path).events
    assert [event.kind for event in events] == ["tokenizer-differs"], events
    assert EVENTS[name].event in events[0].detail
    assert "llama.cpp" in events[0].detail or "keys" in events[0].detail


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_split_ordinary_text_differently_are_refused(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError) as refused:
        write_and_read_vocabulary(REFUSED[name], tmp_path)
    assert REFUSED[name].event in refused.value.message


def test_a_named_pre_tokenizer_makes_a_normalizer_an_event(tmp_path: Path) -> None:
    write_tokenizer(Case("gpt-2", normalizer({"type": "Lowercase"})), tmp_path)
    (event,) = vocabulary(tmp_path, ROWS, {}, "gpt-2").events
    assert "normalizer Lowercase" in event.detail


def test_more_than_three_eos_ids_are_an_event(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 20, 21]}')
    written_vocabulary = write_and_read_vocabulary(SAME["bytes"], tmp_path)
    assert [written_vocabulary.special_ids[role] for role in ("eos", "eot", "eom")] == [1, 20, 21]
    assert written_vocabulary.events == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 20, 21, 22]}')
    (event,) = write_and_read_vocabulary(SAME["bytes"], tmp_path).events
    assert "keys for three tokens" in event.detail


def test_phi3_names_give_an_event_about_dropped_spaces(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "<unk>", "<|end|>"]
    case = Case("gpt-2", added(*names))
    write_tokenizer(case, tmp_path)
    assert vocabulary(tmp_path, ROWS, {}, name="tiny").events == []
    (event,) = vocabulary(tmp_path, ROWS, {}, name="Phi-3-mini").events
    assert "2 added token(s) ('</s>', '<|end|>') no rstrip: llama.cpp drops" in event.detail


def test_added_tokens_have_the_ids_of_tokenizers(tmp_path: Path) -> None:
    """The library ignores stated ids; two tokens with one id cannot be represented."""

    def numbered(it: dict[str, Any]) -> None:
        for number, text in ((900, "<x>"), (3, "<y>"), (7, "the"), (901, "<x>"), (5, "")):
            added(text, id=number)(it)

    document = write_tokenizer(Case("gpt-2", numbered), tmp_path)
    library = Tokenizer.from_str(json.dumps(document))
    ids = {item["content"]: item["id"] for item in added_tokens(document)}
    assert ids == {text: library.token_to_id(text) for text in ("<s>", "</s>", "<x>", "<y>", "the")}


def test_tokens_added_by_settings_match_transformers(tmp_path: Path) -> None:
    """Tokens added by tokenizer_config.json only, and flags that it changes."""
    from transformers import PreTrainedTokenizerFast

    flags = {"rstrip": False, "single_word": False, "normalized": False}
    listed = {
        "1": {"content": "</s>", "lstrip": True, "special": True, **flags},
        "9": {"content": "the", "lstrip": False, "special": False, **flags},
    }
    named = {"additional_special_tokens": ["e"], "extra_special_tokens": {"image_token": "a"}}
    case = Case(
        "gpt-2", unchanged, settings={"added_tokens_decoder": listed, "unk_token": "t", **named}
    )
    written_vocabulary = write_and_read_vocabulary(case, tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    stock = {
        number: TokenType.CONTROL if item.special else TokenType.USER_DEFINED
        for number, item in loaded.added_tokens_decoder.items()
    }
    assert {written_vocabulary.tokens[number] for number in stock} >= {"</s>", "the", "e", "t"}
    plain = (TokenType.NORMAL, TokenType.UNUSED)
    assert {
        n: token_type
        for n, token_type in enumerate(written_vocabulary.kinds)
        if token_type not in plain
    } == stock
    (event,) = written_vocabulary.events
    assert "('</s>') lstrip: llama.cpp keeps spaces" in event.detail
    (event,) = write_and_read_vocabulary(
        Case("gpt-2", unchanged, settings={"extra_special_tokens": ["<x>"]}), tmp_path
    ).events
    assert "('<x>') that tokenizer.json lacks" in event.detail


@pytest.mark.parametrize(
    "name",
    mark_others_thorough(
        {**SAME, **{k: c for k, c in EVENTS.items() if c.witness}},
        "bytes",
        "added piece with a mark",
        "overlap",
    ),
)
def test_tokenizer_events_agree_with_llama_cpp(
    name: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    """Without an event all texts are tokenized alike; with one, the witness text is not."""
    pytest.importorskip("xllamacpp")
    from quantforge.evaluation.llama_cpp import LlamaCpp

    case = (SAME | EVENTS)[name]
    model_directory = tmp_path / "m"
    model_directory.mkdir()
    for path in models("llama-tied", vocab_size=ROWS).iterdir():
        (model_directory / path.name).write_bytes(path.read_bytes())
    library = Tokenizer.from_str(json.dumps(write_tokenizer(case, model_directory)))
    library.no_truncation()
    engine = LlamaCpp(export(model_directory, tmp_path / "x.gguf", "F32"), 32)
    if case.event:
        assert library.encode(case.witness).ids != engine.tokenize(case.witness, special=True)
        return
    for text in (*TEXTS, "a<x> <a><b>\n\n\n\n\nb<a b><a\u2581b> zoo"):
        assert library.encode(text).ids == engine.tokenize(text, special=True), text
