"""GGUF keys against the source: our files and llama.cpp's pass, any other value is found."""

from __future__ import annotations

import re
import shutil
import struct
from functools import cache
from typing import Any

import pytest

from quantforge import api
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.recipe import Recipe, Rule
from quantforge.verification.findings import Report, Severity
from quantforge.verification.gguf_keys import (
    affects_model,
    check_gguf_keys,
    expected_keys,
    key_differences,
)
from quantforge.verification.opening import open_artifact, open_source
from quantforge.verification.verify import verify
from tests import gguf_models, peers
from tests.gguf_exports import export

FAMILIES = ("llama", "llama-yarn", "gemma3", "phi3-long", "qwen3_moe", "gpt2")


@pytest.fixture(scope="module")
def source_and_gguf(tmp_path_factory):
    """Return a function that makes a source and a GGUF file of it."""

    @cache
    def make(family: str):
        directory = tmp_path_factory.mktemp(family)
        if family == "sentencepiece":
            source = gguf_models.make("llama-tied", directory / "s", vocab_size=640)
            gguf_models.sentencepiece_tokenizer(prefix=True).save(str(source / "tokenizer.json"))
        else:
            source = gguf_models.make(family, directory / "s")
        return source, export(source, directory / "m.gguf", "Q4_0")

    return make


def find_messages(path, source) -> list[str]:
    report = Report(path, source)
    artifact = open_artifact(report)
    assert artifact is not None
    check_gguf_keys(report, artifact, open_source(source))
    assert "gguf-keys" not in report.skipped
    return [item.detail for item in report.findings]


def test_only_the_differing_part_of_long_texts_is_shown():
    key, begin = "tokenizer.chat_template", "{% for message in messages %}" * 10
    ((text, severity),) = key_differences({key: f"{begin}hello"}, {key: f"{begin}goodbye"})
    assert severity is Severity.ERROR
    assert {"'hello'", "'goodbye'"} <= set(text.replace(",", "").split())
    assert "message in messages" not in text


@pytest.mark.parametrize("family", [*FAMILIES, "sentencepiece"])
def test_gguf_keys_of_our_files_pass(family, source_and_gguf):
    source, file = source_and_gguf(family)
    assert find_messages(file, source) == []


@pytest.mark.parametrize("name", ["q8_0", "q4_k_m"])
def test_gguf_keys_of_llama_cpp_files_pass(name, tmp_path):
    record = (peers.FIXTURES / f"llama.cpp-{name}.json").read_text()
    source = peers.make("wide" if '"wide"' in record else "narrow", tmp_path)
    assert find_messages(peers.FIXTURES / f"llama.cpp-{name}.gguf", source) == []


def other_than(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case [first, *rest]:
            return [other_than(first), *rest]
    return [1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "sentencepiece", "qwen3_moe"])
def test_every_changed_added_or_missing_gguf_key_is_found(family, source_and_gguf):
    source, path = source_and_gguf(family)
    file = read_gguf(path)
    expected, _ = expected_keys(file, open_source(source))
    keys = {key: value.value for key, value in file.metadata.items()}
    assert list(key_differences(keys, expected)) == []
    unsaid = []
    for key, value in keys.items():
        if affects_model(key) and key != "tokenizer.ggml.scores":
            assert list(key_differences({**keys, key: other_than(value)}, expected)), key
        rest = {name: item for name, item in keys.items() if name != key}
        if affects_model(key) and not list(key_differences(rest, expected)):
            unsaid.append(key.rpartition(".")[2])
    # What llama.cpp takes for granted, or has no use for.
    assert set(unsaid) <= {
        "type", "freq_base", "freq_base_swa", "vocab_size", "dimension_count", "add_bos_token", "add_eos_token",
        "add_space_prefix", "unknown_token_id", "padding_token_id", "bos_token_id", "eos_token_id", "key_length",
        "value_length", "scores", "pre", "eot_token_id",
    }  # fmt: skip
    arch = keys["general.architecture"]
    more = 2 if family != "qwen3_moe" else 5
    for key, value, severity in (
        (f"{arch}.rope.scaling.factor", 4.0, "error"), (f"{arch}.expert_count", more, "error"),
        (f"{arch}.logit_scale", 2.0, "error"), ("tokenizer.ggml.eot_token_id", 5, "error"),
        ("tokenizer.ggml.precompiled_charsmap", [1], "error"), ("tokenizer.ggml.add_sep_token", True, "error"),
        ("tokenizer.chat_template.tool", "{{ x }}", "error"), ("general.sampling.temp", 2.0, "warning"),
        (f"{arch}.added", 1, "warning"), ("general.description", "x", None), ("quantforge.version", "x", None),
        ("quantize.imatrix.dataset", "x", None),
    ):  # fmt: skip
        levels = [level for _, level in key_differences({**keys, key: value}, expected)]
        assert levels == ([severity] if severity else []), key


def test_token_scores_are_compared_by_order(source_and_gguf):
    source, path = source_and_gguf("sentencepiece")
    file = read_gguf(path)
    expected, _ = expected_keys(file, open_source(source))
    keys = {key: value.value for key, value in file.metadata.items()}
    scores = keys["tokenizer.ggml.scores"]
    assert (
        list(key_differences({**keys, "tokenizer.ggml.scores": [2 * x for x in scores]}, expected))
        == []
    )
    assert list(key_differences({**keys, "tokenizer.ggml.scores": scores[::-1]}, expected))
    assert list(key_differences({**keys, "tokenizer.ggml.scores": "x"}, expected))


def plant_key(path, target, key: str, change):
    """Copy a GGUF file with another 32-bit value of a key."""
    shutil.copy(path, target)
    data = bytearray(target.read_bytes())
    start = data.index(key.encode()) + len(key) + 4
    data[start : start + 4] = change
    target.write_bytes(data)
    return target


@pytest.mark.parametrize("key", ["model", "pre"])
def test_a_missing_tokenizer_model_key_is_a_finding(key, source_and_gguf, tmp_path):
    source, path = source_and_gguf("llama")
    bad = tmp_path / "m.gguf"
    name = f"tokenizer.ggml.{key}".encode()
    bad.write_bytes(path.read_bytes().replace(name, name[:-1] + b"_"))
    findings = verify(bad, source, forward=False).findings
    assert {item.check for item in findings} >= {"gguf-keys"}
    assert not verify(path, source, forward=False).findings


def test_another_rope_frequency_base_is_found(source_and_gguf, tmp_path):
    source, path = source_and_gguf("qwen3_moe")
    bad = plant_key(path, tmp_path / "m.gguf", "qwen3moe.rope.freq_base", struct.pack("<f", 5e5))
    assert any("rope.freq_base" in item for item in find_messages(bad, source))


def test_rope_frequencies_must_match_the_configuration(source_and_gguf, tmp_path):
    _, path = source_and_gguf("llama")
    source = gguf_models.make(
        "llama", tmp_path / "s", rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert any("rotary embedding" in item for item in find_messages(path, source))


@pytest.mark.parametrize("rules", [
    {"v_proj": "q8_0", "down_proj": "q5_0"}, {"mlp": "q5_1"}, {"layers.0": "q8_0", "layers.1": "q5_1"},
    {"mlp": "keep"}, {"self_attn": "q4_1", "mlp": "q5_0"},
])  # fmt: skip
def test_mixed_gguf_rules_give_a_mixed_output_name(source_and_gguf, tmp_path, rules):
    source, _ = source_and_gguf("llama")
    recipe = Recipe(
        method="rtn", scales="absmax", format="gguf", scheme="q4_0",
        rules=tuple(Rule(f"re:.*{k}.*", v) for k, v in rules.items()),
    )  # fmt: skip
    planned = api.plan(source, recipe).name
    out = tmp_path / planned
    api.quantize(source, recipe, out)
    if {*rules.values()} == {"keep"}:
        assert planned.endswith("-Q4_0.gguf")
    else:
        assert re.search(r"-mixed-[4-9]\.\d\dbpw\.gguf$", planned)
