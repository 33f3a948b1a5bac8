"""Every format stores the rounded weights, as an independent decoder, `export` and conversions confirm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.acceptance.decoders import decode, gguf_key, gguf_types
from tests.acceptance.support import (
    ROWS,
    Make,
    Model,
    command,
    config,
    document,
    refusal,
    relative_error,
    tensors,
)
from tests.thorough import mark_others_thorough, thorough_case

PLAIN = "--method rtn --calibration none"
# Of a GGUF file the linears in the blocks alone are looked at here.
OUTSIDE = "--embedding keep --ignore lm_head"


def stored_as(format_key: str, scheme: str) -> str:
    return (
        f"{PLAIN} --format {format_key} --scheme {scheme} {OUTSIDE if format_key == 'gguf' else ''}"
    )


# Format, scheme, and the largest relative error of a linear: a fact of the grid.
STORED = [
    ("compressed-tensors", "int4:g128:sym", 0.15),
    ("compressed-tensors", "int3:g64:sym", 0.30),
    ("compressed-tensors", "int4:g32:asym", 0.12),
    thorough_case("compressed-tensors", "int8:row:sym", 0.02),
    ("compressed-tensors", "W8A8", 0.02),
    thorough_case("compressed-tensors", "FP8_DYNAMIC", 0.04),
    ("compressed-tensors", "FP8_BLOCK", 0.04),
    ("compressed-tensors", "nvfp4", 0.12),
    ("gptq", "int4:g128:sym", 0.15),
    thorough_case("gptq", "int8:g64:sym", 0.02),
    ("gptq", "int2:g64:asym", 0.50),
    ("gptq_v2", "int4:g64:asym", 0.15),
    ("awq", "int4:g128:asym", 0.15),
    thorough_case("bnb", "nf4:g64:sym", 0.12),
    ("bnb", "nf4:g64:sym:double", 0.12),
    ("bnb", "int8:row:sym", 0.02),
    ("fp8", "fp8:128x128", 0.04),
    ("mlx", "int4:g64:min", 0.13),
    thorough_case("mlx", "int8:g32:min", 0.02),
    ("gguf", "q4_0", 0.13),
    thorough_case("gguf", "q8_0", 0.02),
]


def linears(model: Path) -> dict[str, torch.Tensor]:
    """The weights of the linears in the blocks of a plain model."""
    return {
        name.removesuffix(".weight"): weight.float()
        for name, weight in tensors(model).items()
        if "_proj" in name
    }


@pytest.mark.parametrize(("format_key", "scheme", "error"), STORED)
def test_stored_codes_decode_to_the_rounded_weights(
    format_key: str, scheme: str, error: float, model: Model, make: Make, tmp_path: Path
) -> None:
    """Codes, scales and zero points mean what the format says; `export --format plain` gives the same numbers."""
    result = make("quantize", "llama", stored_as(format_key, scheme)).path
    decoded, source = decode(result), linears(model("llama"))
    assert (
        {*decoded} >= {*source} if format_key != "fp8" else {*decoded} < {*source}
    )  # of shapes that tiles divide
    for name in {*decoded} & {*source}:
        assert 0 < relative_error(decoded[name], source[name]) < error, name
    plain = document("export", result, "--format plain -o", tmp_path / "plain")
    assert plain["verdict"] == "exact"
    stored = linears(tmp_path / "plain")
    assert {*stored} == {*source}
    for name in {*decoded} & {*source}:
        torch.testing.assert_close(stored[name], decoded[name], rtol=1e-6, atol=1e-7, msg=name)


# What moves where: made as, moved into, and what the export says of it. Every format is read and written once.
MOVED = [
    (("compressed-tensors", "int4:g128:sym"), "mlx", "exact"),
    thorough_case(("compressed-tensors", "int4:g128:sym"), "gptq", "exact"),
    (("compressed-tensors", "int8:row:sym"), "bnb", "exact"),
    thorough_case(("gptq", "int8:g64:sym"), "gptq_v2", "exact"),
    (("gptq", "int8:g64:sym"), "gguf", "exact"),
    (("gptq_v2", "int4:g64:asym"), "awq", "exact"),
    (("awq", "int4:g128:asym"), "gptq_v2", "exact"),
    thorough_case(("awq", "int4:g128:asym"), "compressed-tensors", "exact"),
    (("fp8", "fp8:128x128"), "compressed-tensors", "exact"),
    (("gguf", "q4_0"), "gptq", "exact"),
    thorough_case(("gguf", "q8_0"), "compressed-tensors", "exact"),
]


@pytest.mark.parametrize(("stored", "format_key", "verdict"), MOVED)
def test_a_conversion_keeps_every_value(
    stored: tuple[str, str], format_key: str, verdict: str, make: Make
) -> None:
    result = make("quantize", "llama", stored_as(*stored)).path
    moved = make("export", result, "--format", format_key)
    assert moved.document["verdict"] == verdict
    assert {event["kind"] for event in moved.document["events"]} <= {"low-coverage"}
    before, after = decode(result), decode(moved.path)
    assert {*before} == {*after}
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-7, msg=name)
    same = document("diff", result, moved.path)
    assert all(row["equal_values"] for row in same["tensors"])


@pytest.mark.parametrize(
    ("stored", "format_key"),
    [
        (("compressed-tensors", "int4:g128:sym"), "bnb"),
        (("compressed-tensors", "nvfp4"), "gguf"),
        (("compressed-tensors", "W8A8"), "gguf"),
    ],
)
def test_a_scheme_that_a_format_cannot_hold_is_refused(
    stored: tuple[str, str], format_key: str, make: Make, tmp_path: Path
) -> None:
    result = make("quantize", "llama", stored_as(*stored)).path
    out = tmp_path / f"out{'.gguf' if format_key == 'gguf' else ''}"
    message = refusal(4, "export", result, "--format", format_key, "-o", out)
    assert "model.layers.0." in message
    assert not out.exists()


def test_inexact_scales_need_allow_inexact(make: Make, tmp_path: Path) -> None:
    """Float32 scales that are not float16 numbers are refused, or rounded with an event."""
    result = make("quantize", "llama", stored_as("compressed-tensors", "int4:g128:sym:f32")).path
    out = tmp_path / "gptq"
    message = refusal(4, "export", result, "--format gptq -o", out)
    assert "--allow-inexact" in message
    moved = document("export", result, "--format gptq --allow-inexact -o", out)
    assert {event["kind"] for event in moved["events"]} == {"inexact"}
    before = decode(result)
    for name, weight in decode(out).items():
        assert 0 < relative_error(weight, before[name]) < 0.001, name


def test_the_conversion_table_matches_export() -> None:
    """The rows are those of `test_a_conversion_keeps_every_value` and the refusals above."""
    rows = document("formats")["conversions"]
    table = {(row["from"], row["scheme"], row["to"]): row["verdict"] for row in rows}
    assert table["compressed-tensors", "int4:g128:sym:bf16", "mlx"] == "exact"
    assert table["compressed-tensors", "int8:row:sym:bf16", "bnb"] == "exact"
    assert table["gguf", "q8_0", "gptq"] == "exact"
    assert table["compressed-tensors", "int4:g128:sym:bf16", "bnb"] == "no"
    assert table["compressed-tensors", "nvfp4", "gguf"] == "no"
    assert table["bnb", "nf4:g64:sym:f32", "gptq"] == "no"
    assert all(row["reason"] for row in rows if row["verdict"] == "no")


def test_a_tied_embedding_becomes_q8_0_in_gguf(make: Make, model: Model) -> None:
    result = make("quantize", "tied", PLAIN, "--bits 4").path
    moved = make("export", result, "--format gguf")
    assert moved.document["verdict"] == "exact but for the embedding"
    assert {event["kind"] for event in moved.document["events"]} == {"embedding-quantized"}
    assert gguf_types(moved.path)["token_embd.weight"] == "Q8_0"
    kept = make("export", result, "--format gguf --embedding keep")
    assert (kept.document["verdict"], kept.document["events"]) == ("exact", [])
    assert gguf_types(kept.path)["token_embd.weight"] == "F16"
    refusal(4, "export", result, "--format gguf --strict -o", moved.path.with_name("y.gguf"))


def test_a_plain_export_can_change_the_dtype(make: Make, tmp_path: Path) -> None:
    result = make(
        "quantize", "llama", PLAIN, "--format compressed-tensors --scheme int4:g128:sym"
    ).path
    whole, half = tmp_path / "whole", tmp_path / "half"
    document("export", result, "--format plain -o", whole)
    rounded = document("export", result, "--format plain --type F16 -o", half)
    weights = tensors(whole), tensors(half)
    name = "model.layers.0.mlp.up_proj.weight"
    assert (weights[0][name].dtype, weights[1][name].dtype) == (torch.float32, torch.float16)
    assert torch.equal(weights[1][name], weights[0][name].half())
    assert {event["kind"] for event in rounded["events"]} <= {"inexact"}


def test_requantizing_needs_an_option_or_the_source(
    model: Model, make: Make, tmp_path: Path
) -> None:
    result = make("quantize", "llama", PLAIN, "--bits 4").path
    refusal(3, "quantize", result, PLAIN, "--bits 3 -o", tmp_path / "no")
    again = document("quantize", result, PLAIN, "--bits 3 --requantize -o", tmp_path / "again")
    assert again["event_counts"]["requantized"] >= 1
    words = ("--format gguf --type Q8_0 -o", tmp_path / "q8.gguf")
    message = refusal(4, "export", result, words)
    assert "--source" in message
    document("export", result, words, "--source", model("llama"))
    source = linears(model("llama"))
    for name, weight in decode(tmp_path / "q8.gguf").items():  # of the source, not of 4 bits
        assert relative_error(weight, source[name]) < 0.02, name


def test_the_engine_option_chooses_the_format(model: Model, make: Make, tmp_path: Path) -> None:
    chosen = {
        engine: document("plan", model("llama"), "--for", engine, "--bits 4 --method rtn")["format"]
        for engine in ("vllm", "llama.cpp", "mlx", "transformers", "lmdeploy", "ollama")
    }
    assert chosen == {"vllm": "compressed-tensors", "llama.cpp": "gguf", "mlx": "mlx", "lmdeploy": "awq",
                      "transformers": chosen["transformers"], "ollama": "gguf"}  # fmt: skip
    refusal(4, "plan", model("llama"), "--for llama.cpp --bits 4 --format awq")
    result = make(
        "quantize", "llama", PLAIN, "--format compressed-tensors --scheme int4:g128:sym"
    ).path
    moved = document("export", result, "--for mlx -o", tmp_path / "mlx")
    assert moved["format"] == "mlx"
    served = command("plan", model("llama"), "--for vllm --bits 4")
    assert "vllm serve" in served.out + served.err


# ---- GGUF

TYPES = {
    "F16": 0.001, "BF16": 0.004, "Q8_0": 0.02, "Q6_K": 0.04, "Q5_K_M": 0.06, "Q4_K_M": 0.12, "Q4_0": 0.13,
    "Q4_1": 0.12, "Q5_0": 0.07, "Q3_K_M": 0.22, "Q2_K": 0.45, "IQ4_NL": 0.12, "IQ4_XS": 0.12,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", mark_others_thorough(TYPES, "BF16", "Q8_0", "Q4_K_M", "Q3_K_M", "IQ4_XS")
)
def test_every_gguf_type_decodes_within_its_error(name: str, model: Model, make: Make) -> None:
    result = make("export", "wide", "--type", name).path
    source, decoded = linears(model("wide")), decode(result)
    assert {*decoded} == {*source}
    for module, weight in decoded.items():
        assert 0 <= relative_error(weight, source[module]) < TYPES[name], module
    types = gguf_types(result)
    stored = name.removesuffix("_M")
    assert types["blk.0.ffn_up.weight"] == stored
    assert types["output_norm.weight"] == "F32"
    assert document("verify", result, "--source", model("wide"))["ok"] is True


def test_q4_k_m_uses_the_types_of_llama_cpp(make: Make) -> None:
    types = gguf_types(make("export", "demo", "--type Q4_K_M").path)
    assert types["token_embd.weight"] == "Q6_K"  # tied: it is the output
    assert {types[f"blk.{block}.ffn_down.weight"] for block in range(4)} == {"Q4_K", "Q6_K"}
    assert {types[f"blk.{block}.attn_q.weight"] for block in range(4)} == {"Q4_K"}


def test_iq2_types_need_an_importance_matrix(model: Model, make: Make, tmp_path: Path) -> None:
    words = "--method rtn --type IQ2_XXS"
    out = tmp_path / "x.gguf"
    message = refusal(4, "quantize", model("wide"), words, "--calibration none -o", out)
    assert "--imatrix" in message or "--calibration" in message
    result = make("quantize", "wide", words, ROWS).path
    source, decoded = linears(model("wide")), decode(result)
    assert "IQ2_XXS" in gguf_types(result).values()
    for module, weight in decoded.items():
        assert relative_error(weight, source[module]) < 0.6, module


@pytest.mark.parametrize("name", ["Q4_0", thorough_case("Q5_1"), thorough_case("Q8_0")])
def test_reference_scales_match_the_bytes_of_gguf_py(name: str, model: Model, make: Make) -> None:
    """`--scales reference` writes what llama.cpp's own package makes of the same numbers."""
    import gguf
    from gguf.quants import quantize

    path = make("export", "llama", "--type", name, "--scales reference").path
    weight = tensors(model("llama"))["model.layers.0.mlp.up_proj.weight"].float().numpy()
    (stored,) = (
        tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight"
    )
    expected = quantize(weight, gguf.GGMLQuantizationType[name])
    assert stored.data.tobytes() == expected.tobytes()


def test_a_gguf_file_has_model_and_tokenizer_keys(model: Model, make: Make) -> None:
    path = make("export", "demo", "--type Q4_K_M").path
    settings = config(model("demo"))
    expected = {
        "general.architecture": "llama",
        "llama.block_count": settings["num_hidden_layers"],
        "llama.embedding_length": settings["hidden_size"],
        "llama.attention.head_count_kv": settings["num_key_value_heads"],
        "llama.context_length": settings["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": (model("demo") / "chat_template.jinja").read_text(),
    }
    assert {name: gguf_key(path, name) for name in expected} == expected
    vocabulary = json.loads((model("demo") / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = gguf_key(path, "tokenizer.ggml.tokens")
    assert [tokens[number] for number in vocabulary.values()] == [*vocabulary]


def test_a_gguf_file_converts_back_to_the_same_model(model: Model, make: Make) -> None:
    """Weights come back as they were, and the tokenizer is rebuilt from the keys of the file."""
    from transformers import AutoTokenizer

    whole = make("export", "llama", "--type BF16").path
    again = make("export", whole, "--format plain").path
    weights = tensors(again)
    for name, weight in tensors(model("llama")).items():
        assert torch.equal(weights[name].float(), weight.float()), name
    text = "the weights of the model\n\tdef f(x): 12"
    read = [
        AutoTokenizer.from_pretrained(path)(text)["input_ids"] for path in (again, model("llama"))
    ]
    assert read[0] == read[1]
    refusal(3, "quantize", make("export", "llama", "--type Q8_0").path, PLAIN, "--bits 4")


def test_an_imatrix_file_is_written_then_reused(model: Model, make: Make, tmp_path: Path) -> None:
    """It is written if missing, then read; another importance gives other bytes."""
    file = tmp_path / "importance.gguf"
    words = ("--method rtn --type Q4_K_M --imatrix", file)
    document("quantize", model("wide"), words, ROWS, "-o", tmp_path / "x.gguf")
    assert gguf_key(file, "general.type") == "imatrix"
    assert document("inspect", file)["schema"] == "quantforge.inspect/2"
    document("quantize", model("wide"), words, "-o", tmp_path / "y.gguf")
    plain = make("export", "wide", "--type Q4_K_M").path
    decoded = [
        decode(path)["model.layers.0.mlp.up_proj"]
        for path in (tmp_path / "x.gguf", tmp_path / "y.gguf", plain)
    ]
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[0], decoded[2])


def test_large_gguf_files_are_split_into_parts(make: Make, model: Model) -> None:
    result = make("export", "llama", "--type Q8_0 --max-shard-bytes 200000")
    parts = sorted(result.path.parent.glob("*-of-*.gguf"))
    assert len(parts) > 1
    assert [path.name.split("-")[-3] for path in parts] == [
        f"{n:05}" for n in range(1, len(parts) + 1)
    ]
    assert document("verify", parts[0], "--source", model("llama"))["ok"] is True


def test_modelfile_option_writes_an_ollama_modelfile(make: Make) -> None:
    path = make("export", "llama", "--type Q8_0 --modelfile").path
    lines = path.with_suffix(".Modelfile").read_text()
    assert f"FROM ./{path.name}" in lines


def test_mmproj_writes_the_vision_tower_to_a_separate_file(
    make: Make, model: Model, tmp_path: Path
) -> None:
    path = make("export", "tower", "--type Q8_0 --mmproj").path
    (tower,) = path.parent.glob("mmproj-*-F16.gguf")
    assert gguf_key(tower, "general.architecture") == "clip"
    assert {*gguf_types(tower).values()} == {"F16", "F32"}
    assert not any("vision" in name or name.startswith("v.") for name in gguf_types(path))
    assert document("verify", path, "--source", model("tower"))["ok"] is True
    message = refusal(4, "export", model("llama"), "--type Q8_0 --mmproj -o", tmp_path / "x.gguf")
    assert "tower" in message
