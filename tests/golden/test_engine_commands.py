"""Serve commands use only options and values that the engines document."""

from __future__ import annotations

import itertools
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from quantforge.cache_kinds import WORDS as KINDS
from quantforge.engines import (
    TARGETS,
    check_engine,
    command_of,
    snippets,
    with_output_path,
)
from quantforge.errors import RefusedError, UsageError, join_with_or
from quantforge.formats import load_format
from quantforge.plans import EngineVerdict, NoteKind, Serving, kind_of

DOCUMENTED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("engine_options.toml").read_text(encoding="utf-8")
)
OUT = "/a b/it's"
ASKED = [
    Serving(context, cache, devices)
    for context, cache, devices in itertools.product((None, 32768), (None, *KINDS), (1, 2))
]


def allowed(engine: str, serving: Serving) -> bool:
    try:
        check_engine(engine, serving, [], (), "plain")
    except RefusedError:
        return False
    return True


def takes(value: str, documented: Any) -> bool:
    """Whether an option takes a value."""
    if documented == "int":
        return value.isdecimal()
    return not documented or value in documented


def parsed(engine: str, command: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options and the lines of the file of a command, each with its value."""
    known = DOCUMENTED[engine]
    words = shlex.split(command, comments=False)
    lines: dict[str, str] = {}
    if "printf" in words:
        start, end = words.index("printf"), words.index(">")
        for line in words[start + 2 : end]:
            key, _, value = line.partition(" ")
            lines[key.rstrip(":")] = value
        words = words[end:]
        words = words[words.index("&&") + 1 :]
    program = known["program"]
    assert [w for w in program if w not in {"MODEL", "NAME"}] == [
        word
        for word, written in zip(words, program, strict=False)
        if written not in {"MODEL", "NAME"}
    ]
    rest = words[len(program) :]
    rest = rest[: rest.index("&&")] if "&&" in rest else rest
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    return options, lines


@pytest.mark.parametrize("engine", TARGETS)
def test_every_option_of_a_serve_command_is_documented(engine):
    known = DOCUMENTED[engine]
    seen = 0
    for serving in ASKED:
        if not allowed(engine, serving):
            continue
        options, lines = parsed(
            engine, command_of(engine, OUT, serving, tokenizer="org/name", name="it")
        )
        for name, value in options.items():
            assert takes(value, known["options"][name]), name
        for name, value in lines.items():
            documented = known["file"][name]
            if name == "PARAMETER":
                assert takes(value.split()[0], documented)
            else:
                assert takes(value, documented), name
        text = " ".join((*options.values(), *lines.values()))
        assert serving.devices == 1 or "2" in text.split()
        if serving.context is not None and TARGETS[engine].context:
            assert "32768" in text
        seen += 1
    assert seen >= 4


def test_caches_and_devices_an_engine_lacks_are_refused():
    refused = {
        (engine, kind)
        for engine, kind in itertools.product(TARGETS, KINDS)
        if not allowed(engine, Serving(cache=kind))
    }
    assert ("vllm", "int4") not in refused
    assert {("sglang", "int8"), ("llama.cpp", "fp8"), ("mlx", "fp8")} <= refused
    for engine, kind in refused:
        with pytest.raises(RefusedError, match=f"--for {engine}: no cache in {kind}") as error:
            check_engine(engine, Serving(cache=kind), [], (), "plain")
        known = TARGETS[engine].caches
        assert error.value.hint == (
            f"--cache {join_with_or(known)}" if known else "leave --cache out"
        )
    split = {engine for engine in TARGETS if not allowed(engine, Serving(devices=2))}
    assert split == {"llama.cpp", "ollama", "mlx", "transformers"}


def test_engine_notes_have_the_kinds_engine_and_serve():
    verdict = check_engine("lmdeploy", Serving(), [], (), "awq")
    assert all(kind_of(note) in {NoteKind.ENGINE, NoteKind.SERVE} for note in verdict)
    assert kind_of("linears as declared for llama") is NoteKind.FACT
    with pytest.raises(UsageError, match="'int5'"):
        check_engine("vllm", Serving(cache="int5"), [], (), "plain")


@pytest.mark.parametrize("engine", TARGETS)
def test_keys_and_values_of_different_widths_are_refused(engine):
    with pytest.raises(RefusedError, match="no cache in k=int8,v=int4") as raised:
        check_engine(engine, Serving(cache="v=int4,k=int8"), [], (), "plain")
    assert ("int8" in raised.value.hint) == ("int8" in TARGETS[engine].caches)
    with pytest.raises(UsageError, match="k=int8: one word"):
        check_engine(engine, Serving(cache="k=int8"), [], (), "plain")


@pytest.mark.parametrize("engine", TARGETS)
def test_same_kind_for_keys_and_values_is_that_kind(engine):
    for kind in KINDS:
        alike = [Serving(cache=name) for name in (kind, f"k={kind},v={kind}", f"v={kind},k={kind}")]
        assert len({allowed(engine, item) for item in alike}) == 1
        assert len({command_of(engine, OUT, item) for item in alike}) == 1


def test_unbounded_context_is_noted():
    verdicts = {
        engine: check_engine(engine, Serving(4096), [], (), "plain") for engine in ("mlx", "vllm")
    }
    assert any("its cache grows" in note for note in verdicts["mlx"])
    assert len(verdicts["vllm"]) == 1


@pytest.mark.parametrize(
    ("format_key", "engine", "package"),
    [("gguf", "vllm", "vllm-gguf-plugin"), ("bnb", "vllm", "vllm-bnb-plugin")],
)
def test_required_vllm_plugins_are_named(format_key, engine, package):
    said = check_engine(engine, Serving(), [], (), format_key, "org/name")
    assert f"vllm: {format_key} files need pip install {package}" in said
    assert ("--tokenizer org/name" in said[-1]) == (format_key == "gguf")
    verdict = load_format(format_key).INFO.engines["vllm"]
    assert package in verdict.note
    assert "since vLLM 0.2" in verdict.note


@pytest.mark.parametrize("engine", ["vllm", "ollama", "tensorrt-llm"])
def test_output_path_is_quoted_for_the_shell(engine):
    note = check_engine(
        engine, Serving(32768, "fp8" if engine == "vllm" else None), [], (), "plain"
    )[-1]
    command = with_output_path(note, OUT).removeprefix("serve it with: ")
    words = shlex.split(command)
    assert any(word.endswith(OUT) for word in words)
    assert not any("OUT" in word for word in words)


def test_model_cards_use_the_same_serve_commands():
    about = load_format("compressed-tensors").INFO
    rendered = snippets(about, [EngineVerdict(name, True) for name in TARGETS], "made", chat=True)
    for item in rendered:
        if item.language == "bash":
            assert command_of(item.engine, "made", Serving(), name="model") in item.code
    assert [item.engine for item in rendered] == [*TARGETS]
    assert set(TARGETS) == set(DOCUMENTED)
