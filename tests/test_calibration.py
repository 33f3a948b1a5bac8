"""Calibration text: sources, packing, tokenizers, chat templates, and the corpora themselves."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unicodedata import category
from unicodedata import name as unicode_name

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from quantforge_calibration import SourceError, documents, parse_sources
from quantforge_calibration.chat import ChatTemplate, Limits, load_chat_template, render
from quantforge_calibration.draw import Request, draw
from quantforge_calibration.readers import read_text
from quantforge_calibration.sampler import (
    combine,
    digest,
    given_rows,
    pack_rows,
    share_rows,
    tokens_per_column_warning,
)
from quantforge_calibration.sources import builtin
from quantforge_calibration.tokenizer import load_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BIG = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with a tokenizer of single bytes (ids 2..257), <s> = 0 and </s> = 1."""
    return write_model(tmp_path / "model")


def write_model(path: Path, post_processor: object = None, **config: object) -> Path:
    path.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.enable_truncation(4)  # stored in the file by some exporters; must not cut documents
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def bos_template() -> object:
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])


def read(spec: str, max_bytes: int = BIG, **options: object) -> list[str]:
    (source,) = parse_sources(spec)
    return list(documents(source, max_bytes, **options))


def refused(call: object, *parts: str) -> SourceError:
    with pytest.raises(SourceError) as caught:
        call()
    for part in parts:
        assert part in f"{caught.value.message}\n{caught.value.hint}"
    assert caught.value.message
    assert caught.value.hint
    return caught.value


# -- the corpora


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


# -- parsing


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


# -- reading


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
    with path.open("wb") as file:  # sparse: ten gigabytes on one line cost nothing
        file.write(b"word " * 1000)
        file.truncate(10 << 30)
    assert len(read(str(path), 4000)[0]) == 4000
    path.rename(lines := tmp_path / "huge.jsonl")
    refused(lambda: read(str(lines), 4000), "line 1", "longer than")


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
        ("number.jsonl", b'{"text": 3}', ["no text in 'text'"]),
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
    refused(lambda: read(f"{path}:n"), "no text in 'n'")
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


# -- packing

IDS = st.integers(10, 10_000)
DOCUMENTS = st.lists(st.lists(IDS, max_size=40), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    docs=DOCUMENTS,
    rows=st.integers(1, 6),
    length=st.integers(2, 12),
    bos=st.sampled_from([None, 1]),
    eos=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**32),
    choose=st.sampled_from(["spread", "first"]),
)
def test_rows_are_distinct_windows_of_the_joined_stream(docs, rows, length, bos, eos, seed, choose):
    stream: list[int] = []
    for doc in filter(None, docs):
        stream += ([eos] if stream and eos is not None else []) + doc
    payload = length - (bos is not None)
    windows = [stream[i : i + payload] for i in range(0, len(stream) - payload + 1, payload)]
    if len(windows) < rows:
        refused(
            lambda: pack_rows(docs, rows, length, bos, eos, seed, choose),
            f"{len(stream)} tokens",
            f"need {rows * payload}",
        )
        return
    sample = pack_rows(docs, rows, length, bos, eos, seed, choose)
    report = sample.report
    assert sample.ids.shape == (rows, length)
    assert sample.ids.dtype == torch.int64
    if bos is not None:
        assert (sample.ids[:, 0] == bos).all()
    found = sample.ids[:, length - payload :].tolist()
    left = iter(windows)
    assert all(row in left for row in found)  # a subsequence: distinct windows, in order
    if choose == "first" or rows == len(windows):
        assert found == windows[:rows]
    assert report.tokens_available == len(stream)
    assert report.tokens_truncated == len(stream) - payload * len(windows)
    assert report.tokens_used == rows * payload
    assert report.duplicated_rows == rows - len(set(map(tuple, found)))
    again = pack_rows(docs, rows, length, bos, eos, seed, choose)
    assert torch.equal(again.ids, sample.ids)
    assert again.report == report


def test_every_window_can_be_chosen_and_seeds_differ():
    docs = [list(range(1000))]
    seen, samples = set(), set()
    for seed in range(60):
        ids = pack_rows(docs, 5, 10, seed=seed).ids
        assert (ids[:, 1:] - ids[:, :-1] == 1).all()
        starts = (ids[:, 0] // 10).tolist()
        assert [start // 20 for start in starts] == [0, 1, 2, 3, 4]  # one from every fifth
        seen.update(starts)
        samples.add(tuple(starts))
    assert len(samples) == 60
    assert len(seen) > 90


def test_packing_leaves_the_global_generators_alone():
    states = random.getstate(), torch.random.get_rng_state()
    pack_rows([list(range(100))], 3, 10, seed=7)
    assert random.getstate() == states[0]
    assert torch.equal(torch.random.get_rng_state(), states[1])


def test_golden_rows_and_digest():
    sample = pack_rows([range(10, 22), range(30, 42)], 2, 5, 0, 1, seed=3)
    assert sample.ids.tolist() == [[0, 10, 11, 12, 13], [0, 33, 34, 35, 36]]
    values = struct.pack("<12q", 2, 5, *sample.ids.flatten().tolist())
    assert sample.report.digest == hashlib.sha256(values).hexdigest()
    assert digest(sample.ids.t()) != digest(sample.ids)
    assert digest(sample.ids.reshape(5, 2)) != digest(sample.ids)


def test_too_little_text_says_how_many_tokens_and_what_to_type():
    refused(lambda: pack_rows([range(25)], 3, 10), "25 tokens", "need 30", "--samples 2")
    refused(lambda: pack_rows([range(5)], 3, 10), "5 tokens", "smaller --length")
    refused(lambda: pack_rows([], 1, 2), "0 tokens")
    refused(lambda: pack_rows([[5]], 1, 2, allow_fewer=True), "1 tokens")


def test_fewer_rows_only_where_allowed():
    report = pack_rows([range(25)], 3, 10, allow_fewer=True).report
    assert (report.rows, report.rows_asked, report.tokens_truncated) == (2, 3, 5)


def test_one_repeated_token_is_reported_as_duplicates():
    assert pack_rows([[7] * 100], 5, 10).report.duplicated_rows == 4


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (-1, 8), (1, 1), (1, 0)])
def test_impossible_shapes(rows, length):
    with pytest.raises(ValueError, match="cannot make"):
        pack_rows([range(100)], rows, length)


@settings(deadline=None)
@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_sum_and_follow_the_weights(rows, weights):
    try:
        shares = share_rows(rows, weights)
    except SourceError:
        return
    assert sum(shares) == rows
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - rows * weight / sum(weights)) < 1.0001


def test_shares_of_known_cases():
    assert share_rows(8, [3, 1]) == [6, 2]
    assert share_rows(10, [1, 1, 1]) == [4, 3, 3]
    refused(lambda: share_rows(2, [3, 1, 1]), "too few", "--samples")


def test_given_rows_and_their_combination():
    ids = torch.arange(12).view(3, 4)
    sample = given_rows(ids)
    both = combine([sample, pack_rows([range(12)], 3, 4, source="a.txt")])
    assert both.report.sources == ("self", "a.txt")
    assert both.report.duplicated_rows == 3
    assert both.report.rows == both.report.rows_asked == 6
    assert both.report.digest == digest(torch.cat([ids, ids]))
    for bad in (ids.float(), ids[0], ids[:0]):
        refused(lambda bad=bad: given_rows(bad), "int64 [rows, length]")


def test_tokens_per_column_warning():
    assert tokens_per_column_warning(8 * 64, 64) is None
    assert "7.9 per column" in str(tokens_per_column_warning(8 * 64 - 6, 64))


# -- tokenizers


def test_tokenizer_without_bos_does_not_truncate_and_knows_eos(model):
    tokenizer = load_tokenizer(model)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
    assert len(tokenizer.encode("eight by")) == 8
    assert tokenizer.encode("<s>a")[0] == 0  # without a BOS of its own the text is left alone


@pytest.mark.parametrize("by", ["post-processor", "config"])
def test_bos_is_what_the_tokenizer_adds(tmp_path, by):
    in_file = bos_template() if by == "post-processor" else None
    path = write_model(tmp_path / "m", in_file, **({} if in_file else {"add_bos_token": True}))
    tokenizer = load_tokenizer(path)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("<s>a") == tokenizer.encode("a")
    assert 0 not in tokenizer.encode("a")


def test_a_trailing_token_of_the_post_processor_is_no_bos(tmp_path):
    after = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    assert load_tokenizer(write_model(tmp_path / "m", after)).bos_id is None


def test_tokenizers_that_cannot_be_loaded(tmp_path, model):
    refused(lambda: load_tokenizer(tmp_path), "no tokenizer.json", "save_pretrained")
    (model / "tokenizer_config.json").write_text("{")
    refused(lambda: load_tokenizer(model), "tokenizer_config.json is not JSON")
    (model / "tokenizer_config.json").write_text("[]")
    refused(lambda: load_tokenizer(model), "not a JSON object")
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(lambda: load_tokenizer(model), "not a tokenizer")


# -- chat templates


def test_render_with_what_published_templates_use():
    text = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') }}"
    )
    talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "é"}]
    assert render(ChatTemplate(text, {"bos_token": "<s>"}), [talk, TALK]) == [
        '<s>"é"2024',
        '<s>"hi""hello"2024',
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "SecurityError"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include '/etc/passwd' %}", "rendered"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "CPU time",
        ),
        ("{{ ('a' * 10**9)[:1] }}", "memory"),
        ("{% set a = 'a' * 10**6 %}{% for i in range(99) %}{{ a }}{% endfor %}", "too much"),
    ],
)
def test_hostile_templates_are_stopped(text, part):
    limits = Limits(cpu_seconds=1, wall_seconds=20, output_characters=10**7)
    start = time.perf_counter()
    refused(lambda: render(ChatTemplate(text, {}), [TALK], limits), part)
    assert time.perf_counter() - start < 15


def test_wall_time_is_limited():
    text = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    limits = Limits(cpu_seconds=100, wall_seconds=0.5)
    refused(lambda: render(ChatTemplate(text, {}), [TALK], limits), "over 0.5 s")


def test_a_child_that_fails_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    refused(lambda: render(ChatTemplate("x", {}), [TALK]), "stopped: status 1")


def test_where_the_template_is_found(model):
    refused(lambda: load_chat_template(model), "no chat template")
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in [("plain", "plain"), (named, "D")]:
        config = {"bos_token": "<s>", "chat_template": value}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_chat_template(model) == ChatTemplate(expected, {"bos_token": "<s>"})
    (model / "chat_template.jinja").write_text("file")
    assert load_chat_template(model).text == "file"


# -- all of it


def test_draw_builtin_gives_fewer_rows_and_says_so(model):
    sample = draw(Request(rows=4000, length=64), load_tokenizer(model))
    assert sample.report.rows < sample.report.rows_asked == 4000
    assert sample.report.rows == len(sample.ids)
    assert sample.report.sources == ("builtin",)
    assert sample.report.duplicated_rows == 0


def test_draw_is_repeatable_and_follows_the_seed(model):
    tokenizer = load_tokenizer(model)
    first, again, other = (
        draw(Request(rows=8, length=32, seed=seed), tokenizer).report.digest for seed in (0, 0, 1)
    )
    assert first == again != other


def test_draw_a_user_file_that_is_too_short_is_an_error(tmp_path, model):
    path = tmp_path / "short.txt"
    path.write_text("only a little")
    refused(lambda: draw(Request(str(path), 4, 32), load_tokenizer(model)), "13 tokens", "need 128")
    sample = draw(Request(str(path), 4, 6, allow_fewer=True), load_tokenizer(model))
    assert (sample.report.rows, sample.report.tokens_truncated) == (2, 1)


def test_draw_a_mixture_with_rows_of_the_model(tmp_path, model):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh" * 100)
    request = Request(f"{path}=2,builtin=1,self=1", rows=8, length=16)
    own = torch.full((2, 16), 5)
    sample = draw(request, load_tokenizer(model), own_rows=lambda rows, length: own[:rows, :length])
    assert sample.ids.shape == (8, 16)
    assert sample.report.sources == (str(path), "builtin", "self")
    assert torch.equal(sample.ids[-2:], own)
    assert sample.report.duplicated_rows == 4  # the file repeats every 16 ids
    refused(lambda: draw(request, load_tokenizer(model)), "'self' needs a model")


def test_draw_renders_messages_only_when_asked(tmp_path, model):
    path = tmp_path / "chat.jsonl"
    rows = [{"messages": TALK}, {"text": "plain"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = load_tokenizer(model)
    request = Request(str(path), rows=1, length=70, choose="first")
    refused(lambda: draw(request, tokenizer), "chat_template = true")
    sample = draw(request, tokenizer, chat=ChatTemplate(CHATML, {}))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
    expected = [*tokenizer.encode(text), 1, *tokenizer.encode("plain")]
    assert sample.ids[0].tolist() == expected[:70]
