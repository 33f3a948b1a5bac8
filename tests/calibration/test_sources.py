"""Calibration text: the corpora themselves, what a source may be called, and how files are read."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unicodedata import category
from unicodedata import name as unicode_name

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge_calibration import SourceError, parse_sources, readers
from quantforge_calibration.readers import read_text
from quantforge_calibration.sources import builtin
from tests.calibration.support import TALK, read, refused


def corpus_lines(corpus: str) -> list[str]:
    return [line for text in builtin(corpus) for line in text.splitlines() if len(line) > 80]


@pytest.mark.parametrize(
    ("corpus", "least", "scripts"),
    [
        ("calibration", 75_000, "LATIN CYRILLIC GREEK ARABIC DEVANAGARI HANGUL HIRAGANA CJK"),
        ("evaluation", 36_000, "LATIN CYRILLIC HIRAGANA CJK"),
    ],
)
def test_corpus_is_large_enough_and_clean(corpus, least, scripts):
    text = "".join(builtin(corpus))
    assert len(text.encode()) >= least
    assert set(scripts.split()) <= {unicode_name(c, "").split(" ")[0] for c in set(text)}
    assert {c for c in set(text) if category(c) in ("Cc", "Cn", "Co")} <= {"\n", "\t"}
    assert "\ufffd" not in text


def test_no_long_line_occurs_twice_in_or_between_the_corpora():
    counts = Counter(corpus_lines("calibration") + corpus_lines("evaluation"))
    assert [line for line, n in counts.items() if n > 1] == []


def test_no_passage_is_shared_between_the_corpora():
    def windows(corpus):
        for text in builtin(corpus):
            words = text.split()
            yield from (" ".join(words[i : i + 8]) for i in range(len(words) - 7))

    assert not set(windows("calibration")) & set(windows("evaluation"))


def test_builtin_means_the_corpus_that_is_asked_for():
    assert read("builtin") == list(builtin("calibration"))
    assert read("builtin", corpus="evaluation") == list(builtin("evaluation"))


def test_forms_of_a_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    Path("data").mkdir()
    for spec, kind, split, column in [
        ("builtin", "builtin", "", ""),
        ("self", "self", "", ""),
        ("a.txt", "file", "", ""),
        ("a.txt:body", "file", "", "body"),
        ("data", "directory", "", ""),
        ("data:train", "directory", "train", ""),
        ("data:train:body", "directory", "train", "body"),
        ("org/name:train", "hub", "train", ""),
        ("wikitext:test:page", "hub", "test", "page"),
    ]:
        (source,) = parse_sources(spec)
        assert (source.kind, source.split, source.column) == (kind, split, column), spec


def test_mixture_and_its_weights(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    sources = parse_sources(f"{path}=3, builtin=0.5,self")
    assert [(s.kind, s.weight) for s in sources] == [("file", 3.0), ("builtin", 0.5), ("self", 1.0)]


@pytest.mark.parametrize("name", ["builtin", "a=3,b=1", "x:train:text", "self"])
def test_a_path_that_exists_wins(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("from the file")
    assert read(name) == ["from the file"]


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("", "not a source"),
        ("builtn", "did you mean 'builtin'?"),
        ("missing.txt", "no file or directory 'missing.txt'"),
        ("missing.jsonl:field", "no file or directory 'missing.jsonl'"),
        ("./missing", "no file or directory"),
        ("~nobody-at-all/x", "no file or directory"),
        ("builtin=0", "'0' is not a weight"),
        ("builtin=nan", "weight"),
        ("builtin=x", "weight"),
        ("builtin,,self", "not a source"),
        ("a\0b", "not a source"),
        ("x" * 5000, "not a source"),
        ("a:b:c:d", "not a source"),
    ],
)
def test_what_is_not_a_source(spec, part):
    refused(lambda: parse_sources(spec), part)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_parsing_any_text_gives_sources_or_a_typed_error(text):
    try:
        sources = parse_sources(text)
    except SourceError:
        return
    assert sources


def test_a_file_has_no_splits(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    refused(lambda: parse_sources(f"{path}:train:text"), "no splits", f"{path}:text")


def test_text_file_is_one_document_cut_at_a_line_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\ntwo\nthree é".encode())
    assert read(str(path)) == ["one\ntwo\nthree é"]
    assert read_text(path, 9) == "one\ntwo\n"
    assert read_text(path, 8) == "one\ntwo\n"
    assert read_text(path, 7) == "one\n"


@settings(deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\ufeff")),
    limit=st.integers(1, 60),
)
def test_the_cut_keeps_a_prefix_and_never_half_a_character(tmp_path_factory, text, limit):
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    head = read_text(path, limit)
    assert text.startswith(head)
    assert len(head.encode()) <= limit
    if len(text.encode()) <= limit:
        assert head == text
    elif "\n" in text.encode()[:limit].decode(errors="ignore"):
        assert head.endswith("\n")
    else:
        assert len(head.encode()) > limit - 4


def test_a_huge_line_is_not_read_into_memory(tmp_path):
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:  # sparse: eight gigabytes on one line cost nothing
        file.write(b"word " * 1000)
        file.truncate(8 << 30)
    assert len(read(str(path), 4000)[0]) == 4000
    path.rename(lines := tmp_path / "huge.jsonl")
    refused(lambda: read(str(lines), 4000), "line 1", "longer than")
    os.truncate(lines, (8 << 30) + 1)
    refused(lambda: read(str(lines), 4000), "8589934593 bytes, more than")


@pytest.mark.parametrize(
    ("name", "data", "parts"),
    [
        ("empty.txt", b"", ["holds no text"]),
        ("blank.txt", b" \n\n", ["holds no text"]),
        ("empty.jsonl", b"\n", ["holds no text"]),
        ("latin.txt", "déjà".encode("latin-1"), ["byte 1", "iconv"]),
        ("wide.txt", "text".encode("utf-16"), ["not UTF-8"]),
        ("binary.txt", b"a\0b", ["NUL"]),
        ("packed.txt", gzip.compress(b"text", mtime=0), ["gzip", "gunzip -k"]),
        ("packed.jsonl", gzip.compress(b"{}", mtime=0), ["gzip"]),
        ("a.json", b"[]", ["jq -c"]),
        ("cut.jsonl", b'{"text": "a"}\n{"text": ', ["line 2", "not JSON"]),
        ("latin.jsonl", '{"text": "é"}'.encode("latin-1"), ["line 1", "UTF-8"]),
        ("list.jsonl", b"[1]", ["not a JSON object"]),
        ("deep.jsonl", b"[" * 100_000, ["line 1"]),
        ("number.jsonl", b'{"text": 3}', ["'text' is of the type int, not a text"]),
        ("field.jsonl", b'{"body": "a", "id": 1}', ["body, id", "FILE:FIELD"]),
        ("chat.jsonl", json.dumps({"messages": TALK}).encode(), ["chat_template = true"]),
        ("half.jsonl", b'{"text": "\\ud800"}', ["surrogate"]),
        ("a.parquet", b"PAR1 not really", ["parquet"]),
    ],
)
def test_bad_files_are_typed_errors(tmp_path, name, data, parts):
    (tmp_path / name).write_bytes(data)
    refused(lambda: read(str(tmp_path / name)), name, *parts)


def test_jsonl_fields_nulls_and_bound(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "aaaa", "b": "x"}, {"text": None, "b": "y"}, {"text": "cccé", "b": "z"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(str(path)) == ["aaaa", "cccé"]
    assert read(f"{path}:b") == ["x", "y", "z"]
    assert read(str(path), column="b") == ["x", "y", "z"]
    assert read(str(path), 8) == ["aaaa", "ccc"]  # é is two bytes and only one was left
    assert read(str(path), 4) == ["aaaa"]


def test_parquet_columns_and_streaming(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "train-00000.parquet"
    table = pyarrow.table({"text": [f"row {i}" for i in range(300)], "n": list(range(300))})
    parquet.write_table(table, path, row_group_size=100)
    assert read(str(path)) == [f"row {i}" for i in range(300)]
    assert read(f"{tmp_path}:train:text") == read(str(path))
    refused(lambda: read(f"{path}:n"), "'n' is of the type int", "name the field")
    refused(lambda: read(f"{path}:body"), "n, text")
    path.write_bytes(path.read_bytes()[:-20])
    refused(lambda: read(str(path)), "parquet")


def test_directory_takes_the_files_of_the_split_in_order(tmp_path):
    (tmp_path / "data").mkdir()
    for name, text in [("train-1", "b"), ("train-0", "a"), ("test-0", "z")]:
        (tmp_path / "data" / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    (tmp_path / "README.md").write_text("not data, though it says train")
    assert read(f"{tmp_path}:train:text") == ["a", "b"]
    assert read(str(tmp_path)) == ["z", "a", "b"]
    refused(lambda: read(f"{tmp_path}:dev"), "split 'dev'", "train-0.jsonl")


def test_hub_offline_without_the_library_and_with_it(monkeypatch):
    refused(lambda: read("org/name:train", offline=True), "--offline", "hf download")
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(lambda: read("org/name:train"), "pip install")
    calls = []

    def load_dataset(name, **options):
        calls.append((name, options))
        return iter([{"body": "one"}, {"body": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read("org/name:train:body") == ["one", "two"]
    assert calls == [("org/name", {"split": "train", "streaming": True})]
    refused(lambda: read("org/name:train"), "no text in 'text'")
    broken = SimpleNamespace(load_dataset=lambda *_, **__: 1 / 0)
    monkeypatch.setitem(sys.modules, "datasets", broken)
    refused(lambda: read("org/name:train"), "cannot be read", "hf download")


def test_sources_need_neither_torch_nor_tokenizers():
    code = (
        "import sys; from quantforge_calibration import documents, parse_sources\n"
        "list(documents(parse_sources('builtin')[0], 1000))\n"
        "sys.exit(bool({'torch', 'tokenizers', 'pyarrow', 'quantforge'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_chats_are_answered_with_the_option_that_renders_them():
    said = readers._missing_text_error("chats.jsonl, line 1", ["messages"], "text")
    assert "--chat-template, or chat_template = true" in str(said.hint)
