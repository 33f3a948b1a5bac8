"""Hints: what a refusal tells a person to type is typed here, and does what the hint promised."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.runs import CALIBRATION_ARGUMENTS, run_command

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """A model whose matrices have 40 and 48 and 200 columns."""
    folder = tmp_path_factory.mktemp("odd") / "odd"
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=40,
        intermediate_size=200,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=24,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def test_a_format_that_holds_no_matrix_says_so_and_names_one_that_does(odd, tmp_path, capsys):
    refused = run_command(capsys, "plan", odd, "--format", "fp8", "--bits", "8")
    assert refused.code == 3
    assert "fp8 cannot hold the shape of any matrix" in refused.err
    assert "200 input columns are no multiple of 128" in refused.err
    assert "--ignore" not in refused.err
    for number, scheme in enumerate(("fp8:row", "int4:row")):
        assert f"{scheme}" in refused.err
        out = tmp_path / str(number)
        typed = ("--format", "compressed-tensors", "--scheme", scheme)
        assert (
            run_command(
                capsys, "quantize", odd, "--method", "rtn", "--scales", "absmax", *typed, "-o", out
            ).code
            == 0
        )
        assert run_command(capsys, "verify", out, "--source", odd).code == 0


def test_rules_that_keep_everything_are_named_as_the_cause(capsys):
    refused = run_command(capsys, "plan", DEMO, "--bits", "4", "--ignore", "*")
    assert "--ignore, a rule or the recipe keeps every layer" in refused.err


def test_a_scale_beyond_float16_is_held_by_what_the_hint_names(tmp_path, capsys):
    big = shutil.copytree(DEMO, tmp_path / "big")
    tensors = load_file(big / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5] *= 2.0**21
    save_file(tensors, big / "model.safetensors", {"format": "pt"})
    how = ("quantize", big, "--method", "rtn", "--scales", "absmax")
    refused = run_command(capsys, *how, "--bits", "4", "--format", "gptq", "-o", tmp_path / "out")
    assert refused.code == 3
    assert "beyond the range of torch.float16" in refused.err
    hint = "--format compressed-tensors --scheme int4:g128:sym:f32"
    assert hint in " ".join(refused.err.split())
    assert run_command(capsys, *how, *hint.split(), "-o", tmp_path / "out").code == 0
    events = json.loads((tmp_path / "out" / "quantforge.manifest.json").read_text())["events"]
    assert events == []


def test_messages_under_another_name_are_read_when_renamed_as_the_hint_says(tmp_path, capsys):
    rows = [[{"from": "human", "value": "word " * 60}, {"from": "gpt", "value": "Fine. " * 9}]] * 60
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    how = (
        "plan",
        DEMO,
        "--method",
        "gptq",
        "--bits",
        "4",
        *CALIBRATION_ARGUMENTS,
        "--chat-template",
        "--calibration",
    )
    refused = run_command(capsys, *how, f"{file}:conversations")
    assert refused.code == 3
    said = " ".join(refused.err.split())
    assert (
        "line 1: 'conversations' is a list of messages with 'from' and 'value', not a text" in said
    )
    assert (
        "rename 'conversations' to messages, 'from' to role (human is user, gpt is assistant)"
        in said
    )
    named = {"from": "role", "value": "content", "human": "user", "gpt": "assistant"}
    renamed = [
        [{named[key]: named.get(text, text) for key, text in one.items()} for one in row]
        for row in rows
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in renamed))
    assert run_command(capsys, *how, file).code == 0
