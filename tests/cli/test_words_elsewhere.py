"""Words of other tools: what is typed there for methods, formats, engines, types and schemes is answered with ours."""

from __future__ import annotations

import re

import pytest

from quantforge.engines import ENGINE_WORDS, TARGETS, target_of
from quantforge.errors import QuantForgeError, join_with_or, nearest_hint
from quantforge.formats import FORMAT_HINTS, FORMATS, load_format
from quantforge.formats.gguf.mixture import MIXTURES, TYPE_HINTS
from quantforge.notation import parse_layer
from quantforge.quantizers import METHOD_ALIASES, METHODS
from tests.conftest import Tiny
from tests.runs import run_command

TYPED = [
    # formats
    ("--format ggml", "--format gguf"),
    ("--format llama.cpp", "--format gguf"),
    ("--format gguf:q4_k_m", "--type Q4_K_M"),
    ("--format q4_k_m", "--format gguf"),
    ("--format auto_gptq", "--format gptq"),
    ("--format GPTQModel", "--format gptq"),
    ("--format marlin", "--format gptq"),
    ("--format gptqv2", "'gptq_v2'"),
    ("--format auto_awq", "--format awq"),
    ("--format gemm", "--format awq"),
    ("--format bitsandbytes", "--format bnb"),
    ("--format nf4", "--format bnb"),
    ("--format llm_compressor", "--format compressed-tensors"),
    ("--format pack-quantized", "--format compressed-tensors"),
    ("--format compressed_tensors", "'compressed-tensors'"),
    ("--format mlx-lm", "--format mlx"),
    ("--format auto_round", "--format gptq"),
    ("--format exl2", "quantforge formats"),
    ("--format safetensors", "--format plain"),
    ("--format w4a16", "--scheme W4A16"),
    # methods
    ("--method gtpq", "'gptq'"),
    ("--method GPTQModifier", "--method gptq"),
    ("--method auto-round", "awq+gptq"),
    ("--method AutoAWQ", "--method awq"),
    ("--method smoothquant", "--method smooth+gptq"),
    ("--method nearest", "--method rtn"),
    ("--method bnb", "--format bnb"),
    ("--method imatrix", "--imatrix FILE"),
    ("--method int4", "--bits 4"),
    ("--method dynamic_quant", "quantforge allocate"),
    # engines
    ("--for hf", "--for transformers"),
    ("--for trtllm", "--for tensorrt-llm"),
    ("--for llamacpp", "'llama.cpp'"),
    ("--for lmstudio", "--for llama.cpp"),
    ("--for mlx_lm", "--for mlx"),
    # types
    ("--type Q4KM", "'Q4_K_M'"),
    ("--type q4-k-m", "'Q4_K_M'"),
    ("--type Q4_K_L", "--type Q4_K_M"),
    ("--type UD-Q4_K_XL", "--embedding q8_0"),
    ("--type q4", "--type Q4_K_M"),
    ("--type q8", "'Q8_0'"),
    ("--type fp16", "--type F16"),
    ("--type int8", "--type Q8_0"),
    ("--type tq1_0", "--type IQ1_S"),
    ("--type w4a16", "--scheme"),
    # schemes
    ("--scheme w4a16g128", "int4:g128:sym"),
    ("--scheme W4A16_G128", "int4:g128:sym"),
    ("--scheme w4g64", "int4:g64:sym"),
    ("--scheme int4-g128-asym", "int4:g128:asym"),
    ("--scheme 4bit", "int4:g128:sym"),
    ("--scheme uint8", "int8:g128:sym"),
    ("--scheme w8a8-int8", "W8A8"),
    ("--scheme FP8-Dynamic", "'FP8_DYNAMIC'"),
    ("--scheme w4a8", "int4:g128:sym+int8:token:dynamic"),
    ("--scheme bnb-4bit", "nf4:g64:sym:double"),
    ("--scheme q4_k_m", "--type Q4_K_M"),
    ("--lm-head fp16", "--ignore PATTERN"),
    ("--rule down_proj=w8g64", "int8:g64:sym"),
    # words that take few
    ("--scales mse", "known: absmax, reference, search"),
    ("--kv-cache int8", "hold scales of fp8 alone"),
    ("--expert-tokens every", "known: all, routed"),
]  # fmt: skip


def test_words_of_other_tools_are_answered_with_ours(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rule for all of them: exit 2, as of any word that an option does not take."""
    for typed, meant in TYPED:
        ended = run_command(capsys, "plan", tiny("llama"), *typed.split(" ", 1))
        assert ended.code == 2, (typed, ended.err)
        assert meant in ended.err.partition("hint: ")[2], (typed, ended.err)


@pytest.mark.parametrize("table", [ENGINE_WORDS, FORMAT_HINTS, METHOD_ALIASES, TYPE_HINTS])
def test_no_word_of_ours_is_hidden_by_one_of_others(table: dict[str, str]) -> None:
    words = [word for key in table for word in key.split()]
    assert len({*words}) == len(words)
    assert all(word.isalnum() and word == word.lower() for word in words)
    for option, known in (
        ("--format ", FORMATS), ("--method ", METHODS), ("--for ", TARGETS), ("--type ", MIXTURES),
    ):  # fmt: skip
        for said in table.values():
            for named in re.findall(rf"(?:^|: ){option}(\S+)", said):
                assert {*named.rstrip(",:").split("+")} <= {*known}, said


def test_a_scheme_with_two_letters_exchanged(
    tiny: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_command(capsys, "plan", tiny("llama"), "--scheme", "W4A61")
    assert (ended.code, "'W4A16'" in ended.err) == (2, True)


def test_schemes_that_hints_name_are_schemes() -> None:
    for typed, _ in TYPED:
        option, word = typed.split()
        if option == "--scheme":
            with pytest.raises(QuantForgeError) as refused:
                parse_layer(word)
            kind, _, scheme = refused.value.hint.partition("write ")
            if scheme and not kind:
                parse_layer(scheme)


def test_the_most_alike_word_has_the_same_digits() -> None:
    assert nearest_hint("IQ3_X", ["IQ2_XS", "IQ3_M", "IQ3_S"]) == "did you mean 'IQ3_S' or 'IQ3_M'?"
    assert nearest_hint("Q4_K_X", MIXTURES).startswith("did you mean 'Q4_K_")


def test_what_a_program_asks_is_answered_too() -> None:
    for ask, word, said in ((load_format, "ggml", "gguf"), (target_of, "hf", "transformers")):
        with pytest.raises(QuantForgeError) as refused:
            ask(word)
        assert said in refused.value.hint


def test_a_recipe_that_there_is_not_is_a_word_like_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = run_command(capsys, "recipes", "fast")
    assert (ended.code, "'fast-8bit'" in ended.err) == (2, True)


def test_alternatives_are_told_in_words() -> None:
    assert [join_with_or((2, 3, 4)), join_with_or(["a"])] == ["2, 3 or 4", "a"]


def test_options_of_other_tools_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, typed, ours in (
        ("generate", "--temp", "--temperature"),
        ("quantize", "--tensor-type", "--rule"),
        ("quantize", "--q-bits", "--bits"),
    ):
        assert f"here it is {ours}\n" in run_command(capsys, verb, "demo", typed, "1").err
