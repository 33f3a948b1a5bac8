"""Tokenizer, templates and generation settings against the source's: resaved they pass, changed they fail."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quantforge.errors import InputError
from quantforge.verification import side_files
from quantforge.verification.consistency import find_contradictions
from quantforge.verification.findings import Report
from quantforge.verification.side_files import SideFiles, compare_files
from tests import gguf_models
from tests.faults.test_verify_configuration import json_paths, other_than, with_value

_ADDED = {"__type": "AddedToken"}
_TOKEN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_LISTED = {
    str(n): {"content": piece, **_TOKEN, "special": True} for n, piece in enumerate(("<s>", "</s>"))
}
# Settings as their publishers released them, before transformers 5.
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {
        "tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>", **_TOKEN, **_ADDED}, "eos_token": "</s>",
        "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "legacy": False, "model_max_length": 4096, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {}}),
    "llama3": ("llama", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072, "added_tokens_decoder": _LISTED, "chat_template": "{{ messages }}"}),
    "qwen2": ("qwen2", {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "</s>", "pad_token": "<s>",
        "add_prefix_space": False, "add_bos_token": False, "additional_special_tokens": ["<s>"], "errors": "replace",
        "split_special_tokens": False, "unk_token": None, "clean_up_tokenization_spaces": False,
        "model_max_length": 131072, "added_tokens_decoder": _LISTED,
        "chat_template": [{"name": "default", "template": "{{ a }}"}, {"name": "tool_use", "template": "{{ b }}"}]}),
    "gpt2": ("gpt2", {
        "tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "bos_token": "</s>", "eos_token": "</s>",
        "unk_token": "</s>", "add_prefix_space": False}),
    "gemma": ("gemma2", {
        "tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "pad_token": "<unk>", "add_bos_token": True, "add_eos_token": False, "spaces_between_special_tokens": False,
        "use_default_system_prompt": False, "sp_model_kwargs": {}, "clean_up_tokenization_spaces": False}),
}  # fmt: skip
_KIND = {"llama3": "llama-bpe", "qwen2": "qwen2", "gpt2": "gpt-2"}
NAME, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Return a function that makes the directory of a tokenizer as it was released."""

    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        model_type, settings = RELEASED[name]
        tokenizer = (
            gguf_models.byte_level_tokenizer(_KIND[name]) if name in _KIND
            else gguf_models.sentencepiece_tokenizer(prefix=name == "llama2")
        )  # fmt: skip
        tokenizer.save(str(directory / NAME))
        (directory / CONFIG).write_text(json.dumps(settings))
        (directory / "config.json").write_text(
            json.dumps({"model_type": model_type, "eos_token_id": [1, 2]})
        )
        return directory

    return make


def read(directory: Path) -> SideFiles:
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    return SideFiles(json.loads(files.pop("config.json", b"{}")), files)


def find_messages(files_read: dict[str, bytes], source: Path) -> list[str]:
    """Return the findings as text; warnings begin with a question mark."""
    other = read(source)
    report = Report(source)
    files = SideFiles(other.config, files_read)
    compare_files(report, files, other)
    find_contradictions(report, files, 0)
    return [
        f"{'?' * (item.severity == 'warning')}{item.where}: {item.detail}"
        for item in report.findings
    ]


def edited(files: dict[str, bytes], name: str, **values: Any) -> dict[str, bytes]:
    return {**files, name: json.dumps({**json.loads(files.get(name, b"{}")), **values}).encode()}


@pytest.mark.parametrize("name", RELEASED)
def test_files_saved_by_transformers_pass(name, released, tmp_path):
    from transformers import AutoTokenizer

    source = released(name)
    AutoTokenizer.from_pretrained(source, local_files_only=True).save_pretrained(tmp_path)
    assert find_messages(read(tmp_path).files, source) == []


# Settings that are added, and whether transformers reads something else by them.
ADDED: dict[str, tuple[Any, bool]] = {
    "eos_token": ("<s>", True), "unk_token": ("a", True), "pad_token": ("a", True), "model_max_length": (16, True),
    "padding_side": ("left", True), "truncation_side": ("left", True), "clean_up_tokenization_spaces": (False, True),
    "auto_map": ({"AutoTokenizer": ["x.Y", None]}, True), "extra_special_tokens": (["a"], True),
    "added_tokens_decoder": ({"5": {"content": "a", **_TOKEN, "special": True}}, True),
    "split_special_tokens": (True, True), "added_by_nobody": (1, False), "name_or_path": ("x", False),
}  # fmt: skip


@pytest.mark.parametrize("key", ADDED)
def test_a_tokenizer_setting_that_changes_loading_is_found(key, released):
    source = released("llama3")
    value, differs = ADDED[key]
    messages = find_messages(edited(read(source).files, CONFIG, **{key: value}), source)
    assert all(item.startswith(CONFIG) for item in messages), messages
    assert bool(messages) == differs, messages


def test_a_pad_token_of_the_source_passes(released):
    source = released("llama3")
    assert find_messages(edited(read(source).files, CONFIG, pad_token="</s>"), source) == []


SAMPLED = {"vocab", "merges"}


@pytest.mark.parametrize("name", ["llama2", "llama3"])
def test_every_tokenizer_value_is_compared(name, released, monkeypatch):
    """Every value counts even if transformers cannot load the tokenizer."""

    def fail(side: SideFiles) -> Any:
        raise InputError("unread")

    monkeypatch.setattr(side_files, "load_tokenizer", fail)
    source = released(name)
    other = read(source)
    tree = json.loads(other.files[NAME])
    seen: set[Any] = set()
    for path in json_paths(tree):
        if SAMPLED & set(path):
            if path[:2] in seen and len(path) > 2:
                continue
            seen.update([path[:2]] if len(path) > 2 else [])
        value: Any = tree
        for key in path:
            value = value[key]
        unread = path[0] == "decoder" and path[-1] in {
            "add_prefix_space",
            "trim_offsets",
            "use_regex",
        }
        if value not in (None, False, [], "") and not unread:
            edited_tree = json.dumps(with_value(tree, path, other_than(value))).encode()
            assert find_messages({**other.files, NAME: edited_tree}, source), path


TREES: dict[str, Any] = {
    "truncation": {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    },
    "normalizer": {"type": "Lowercase"},
    "post_processor": None,
}


@pytest.mark.parametrize("key", TREES)
def test_a_changed_tokenizer_step_is_found(key, released):
    source = released("llama2")
    files = edited(read(source).files, NAME, **{key: TREES[key]})
    files = edited(files, NAME, decoder={"type": "Fuse"}) if key == "post_processor" else files
    assert any("decoder" in item or key in item for item in find_messages(files, source))


FILES: dict[str, tuple[str, bytes]] = {
    "special tokens": ("special_tokens_map.json", b'{"eos_token": "<s>"}'),
    "added tokens": ("added_tokens.json", b'{"<s>": 7}'),
    "merges": ("merges.txt", b"#version: 0.2\na b\n"),
    "words": ("vocab.json", b'{"a": 3}'),
    "damaged": ("added_tokens.json", b"\xff"),
    "a template file": ("chat_template.jinja", b"{{ 'visit' }}"),
    "a named template": ("additional_chat_templates/rag.jinja", b"{{ x }}"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_contradicting_tokenizer_file_is_found(name, released):
    source = released("llama3")
    file, content = FILES[name]
    messages = find_messages({**read(source).files, file: content}, source)
    assert any(item.lstrip("?").startswith(file) for item in messages)
    assert "".join(messages).isprintable()


def test_files_that_repeat_the_tokenizer_pass(released):
    source = released("llama3")
    files = read(source).files
    tree = json.loads(files[NAME])
    merges = "\n".join(
        item if isinstance(item, str) else " ".join(item) for item in tree["model"]["merges"]
    )
    files |= {
        "vocab.json": json.dumps(tree["model"]["vocab"]).encode(),
        "merges.txt": f"#version: 0.2\n{merges}\n".encode(),
        "special_tokens_map.json": b'{"bos_token": "<s>", "eos_token": {"content": "</s>"}}',
        "added_tokens.json": b'{"<s>": 0, "</s>": 1}',
    }
    assert find_messages(files, source) == []


def test_a_missing_chat_template_is_found(released):
    source = released("qwen2")
    files = read(source).files
    settings = json.loads(files[CONFIG])
    edited_settings = {**settings, "chat_template": settings["chat_template"][:1]}
    assert any(
        "tool_use" in item
        for item in find_messages({**files, CONFIG: json.dumps(edited_settings).encode()}, source)
    )


PLACES = ("chat_template.jinja", "chat_template.json", "processor_config.json", CONFIG)


@pytest.mark.parametrize("location", PLACES)
def test_a_chat_template_is_compared_in_every_file(location, released):
    """Loaders differ in which of several templates they use."""
    source = released("llama3")
    files = read(source).files

    def with_template(text: str) -> dict[str, bytes]:
        if location.endswith("jinja"):
            return {**files, location: text.encode()}
        return edited(files, location, chat_template=text)

    assert find_messages(with_template("{{ messages }}"), source) == []
    (message,) = find_messages(with_template("{{ messages }}x"), source)
    assert message.startswith(location)


SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "as transformers derives them": ({"_from_model_config": True, "eos_token_id": [1, 2],
                                      "transformers_version": "5.1.0"}, True),
    "what does nothing": ({"eos_token_id": [1, 2], "num_beams": 1, "use_cache": True, "top_p": 1.0}, True),
    "one end less": ({"eos_token_id": 1}, False),
    "another end": ({"eos_token_id": [1, 3]}, False),
    "sampling": ({"eos_token_id": [1, 2], "do_sample": True}, False),
    "a temperature": ({"eos_token_id": [1, 2], "temperature": 1.5}, False),
    "a limit": ({"eos_token_id": [1, 2], "max_new_tokens": 1}, False),
    "forbidden words": ({"eos_token_id": [1, 2], "bad_words_ids": [[5]]}, False),
    "code": ({"eos_token_id": [1, 2], "custom_generate": "x/y"}, False),
    "a padding token": ({"eos_token_id": [1, 2], "pad_token_id": 1}, True),
    "no end": ({"top_p": 1.0}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_added_generation_settings_must_match_the_configuration(name, released):
    source = released("gpt2")
    settings, healthy = SETTINGS[name]
    messages = find_messages(
        {**read(source).files, GENERATION: json.dumps(settings).encode()}, source
    )
    assert (messages == []) == healthy, messages


@pytest.mark.parametrize("key", ["added_by_nobody", "custom_generate"])
def test_an_unknown_generation_setting_warns_and_code_fails(key, released):
    source = released("gpt2")
    (message,) = find_messages(
        edited(read(source).files, GENERATION, eos_token_id=[1, 2], **{key: "x/y"}), source
    )
    assert message.startswith("?") == (key == "added_by_nobody")


def test_an_unloadable_tokenizer_is_compared_literally(released, tmp_path):
    source = released("llama3")
    tree = json.loads((source / NAME).read_text())
    tree["model"].update(
        continuing_subword_prefix="####", ignore_merges=False
    )  # the library panics
    (tmp_path / NAME).write_text(json.dumps(tree))
    (tmp_path / CONFIG).write_bytes((source / CONFIG).read_bytes())
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    files = read(tmp_path).files
    messages = find_messages(edited(files, CONFIG, eos_token="<s>"), tmp_path)
    assert len(messages) == 1
    assert "eos_token = '<s>'" in messages[0]
    assert any("cannot load it" in item for item in find_messages(files, source))


def test_processor_settings_are_compared(released):
    source = released("llama3")
    name = "processor_config.json"
    before = read(source)
    text = '{"a": {"b": 1}, "chat_template": "x"}'
    other = SideFiles(before.config, {**before.files, name: text.encode()})
    for edited, severity in (
        ('{"a": {"b": 1}, "chat_template": "x", "c": null}', None),
        ('{"a": {"b": 2}, "chat_template": "x"}', "error"),
        ('{"a": {"b": 1}, "chat_template": "x", "c": 1}', "warning"),
        ('{"a": {}, "chat_template": "x"}', "error"),
        ('{"a": {"b": 1}, "chat_template": "y"}', "error"),
    ):
        report = Report(source)
        compare_files(
            report, SideFiles(other.config, {**other.files, name: edited.encode()}), other
        )
        findings = [(item.where, item.severity) for item in report.findings]
        assert findings == ([(name, severity)] if severity else [])
