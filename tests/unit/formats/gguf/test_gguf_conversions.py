"""Conversions from artifacts to GGUF and back, and between GGUF files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, IntegrityError, RefusedError, UsageError
from quantforge.events import Policy
from quantforge.files.reader import open_checkpoint
from quantforge.formats.gguf.container import MetadataValue, ValueType
from quantforge.formats.gguf.parsing import GgufFile, read_gguf
from quantforge.formats.gguf.source import open_gguf
from quantforge.formats.gguf.tokenizer_files import tokenizer_files
from quantforge.packers.ggml.blocks import decode_blocks
from quantforge.recipe import CalibrationOptions, Recipe, Rule, from_toml
from quantforge.settings import Settings
from tests import gguf_models
from tests.gguf_exports import (
    NO_CALIBRATION,
    WIDE,
    assert_export_refused,
    copy_with_edited_tokenizer,
    copy_with_json_values,
    export,
)
from tests.runs import CALIBRATION_ARGUMENTS, run_command

DEMO = Path(__file__).parents[4] / "models" / "demo"


def quantize_model(model: Path, out: Path, scheme: str, **values: object) -> Path:
    recipe = Recipe(scheme=scheme, scales="absmax", calibration=NO_CALIBRATION, **values)
    api.quantize(str(model), recipe, out, Settings())
    return out


@pytest.mark.parametrize(
    ("scheme", "gguf_type"),
    [("int4:g32:sym", "Q4_0"), ("int8:g64:sym", "Q8_0"), ("int5:g32:sym", "Q5_0")],
)
def test_integers_convert_to_gguf_blocks_and_back_exactly(scheme, gguf_type, models, tmp_path):
    source = quantize_model(models("llama-tied"), tmp_path / "a", scheme)
    file = export(source, tmp_path / "b.gguf", None, allow_inexact=True, embedding="keep")
    assert {entry.type for entry in read_gguf(file).tensors.values()} == {gguf_type, "F32"}
    back = export(file, tmp_path / "c", None, format="compressed-tensors")
    plain = export(file, tmp_path / "d", None, format="plain")
    assert (plain / "tokenizer.json").is_file()
    assert not api.verify(plain, source=file, forward=False).findings
    from quantforge.formats.decoded import decode_checkpoint
    from quantforge.formats.open_model import open_model

    expected, blocks, again = (decode_checkpoint(open_model(path)) for path in (source, file, back))
    for name in expected.computed:
        torch.testing.assert_close(blocks.read(name), expected.read(name), rtol=1e-3, atol=1e-7)
        assert torch.equal(blocks.read(name), again.read(name))


@pytest.mark.parametrize(
    ("gguf_type", "bits"), [("Q4_1", 4), ("Q5_1", 5), ("Q4_0", 4), ("Q8_0", 8)]
)
def test_gguf_integer_blocks_convert_to_mlx_and_back(gguf_type, bits, models, tmp_path):
    """The same values in the other layout; types with a minimum convert back to the same bytes."""
    from quantforge.formats.decoded import decode_checkpoint

    rules = (Rule("embed_tokens", f"q{gguf_type[1:].lower()}"),)  # llama-quantize would take Q6_K
    file = export(models("llama-tied", **WIDE), tmp_path / "a.gguf", gguf_type, rules=rules)
    outcome = api.export(str(file), None, tmp_path / "b", format="mlx")
    assert (outcome.verdict, outcome.events) == ("exact", ())
    declaration = json.loads((tmp_path / "b" / "config.json").read_text())["quantization"]
    assert (declaration["bits"], declaration["group_size"]) == (bits, 32)
    numbers, same = (
        decode_checkpoint(open_gguf(file)),
        decode_checkpoint(open_checkpoint(tmp_path / "b")),
    )
    assert len(same.computed) == 15
    assert all(torch.equal(numbers.read(name), same.read(name)) for name in same.computed)
    if gguf_type.endswith("_1"):
        back = open_gguf(export(tmp_path / "b", tmp_path / "c.gguf", None))
        assert all(torch.equal(back.read(n), open_gguf(file).read(n)) for n in back.entries)


def test_an_embedding_is_decoded_for_formats_that_cannot_hold_it(models, tmp_path):
    """Blocks convert exactly; a superblock embedding is rounded to the model dtype only with consent."""
    from quantforge.formats.decoded import decode_checkpoint

    file = export(models("llama-tied", **WIDE), tmp_path / "a.gguf", "Q4_0")
    with pytest.raises(RefusedError, match=r"embed_tokens: decoded, .* not F16 numbers") as caught:
        api.export(str(file), None, tmp_path / "b", format="gptq")
    assert "--allow-inexact" in caught.value.hint
    outcome = api.export(str(file), None, tmp_path / "b", format="gptq", allow_inexact=True)
    assert [event.where for event in outcome.events] == ["model.embed_tokens"]
    numbers, same = (
        decode_checkpoint(open_gguf(file)),
        decode_checkpoint(open_checkpoint(tmp_path / "b")),
    )
    assert len(same.computed) == 14
    assert all(torch.equal(numbers.read(name), same.read(name)) for name in same.computed)
    name = "model.embed_tokens.weight"
    assert torch.equal(same.read(name), numbers.read(name).half())
    for gguf_type in (
        "Q4_1",
        "Q4_K_S",
    ):  # minima that are no whole steps, and superblocks: rounded again alone
        other = export(models("llama-tied", **WIDE), tmp_path / f"{gguf_type}.gguf", gguf_type)
        for accepted in (False, True):
            with pytest.raises(RefusedError) as caught:
                api.export(str(other), None, tmp_path / "c", format="gptq", allow_inexact=accepted)
            assert f"`quantforge export {other} --format gptq" in caught.value.hint
            assert "--requantize` rounds the decoded weights" in caught.value.hint


def test_an_awq_model_exports_to_gguf_exactly(models, tmp_path):
    a = tmp_path / "a"
    recipe = Recipe(method="awq", bits=4, calibration=CalibrationOptions(samples=4, length=24))
    model = models("llama-tied", dtype=torch.bfloat16, **WIDE)
    api.quantize(str(model), recipe, a, Settings())
    b = export(a, tmp_path / "b.gguf", None)
    from quantforge.formats.decoded import decode_checkpoint
    from quantforge.formats.open_model import open_model

    first, second = decode_checkpoint(open_model(a)), decode_checkpoint(open_model(b))
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.computed)
    assert len(first.computed) == 14
    stored_recipe = from_toml(read_gguf(b).value("quantforge.recipe", str))
    assert (stored_recipe.method, stored_recipe.bits) == ("awq", 4)  # the rounding, not the move


def test_tokenizer_differences_are_events_of_an_export(models, tmp_path):
    def nfc(tokenizer):
        tokenizer["normalizer"] = {"type": "NFC"}

    model = copy_with_edited_tokenizer(models("llama-tied"), tmp_path / "m", nfc)
    source = quantize_model(model, tmp_path / "a", "int4:g32:sym")
    moved = {"allow_inexact": True, "format": "gguf", "embedding": "keep"}
    outcome = api.export(str(source), None, tmp_path / "b.gguf", **moved)
    kinds = [event.kind for event in outcome.events if event.kind != "inexact"]
    assert kinds == ["tokenizer-differs"]
    assert [event["kind"] for event in manifest.read_manifest(outcome.out)["events"]].count(
        kinds[0]
    ) == 1
    strict = Settings(policy=Policy(allow={"tokenizer-differs": 0}))
    with pytest.raises(RefusedError, match="tokenizer-differs"):
        api.export(str(source), None, tmp_path / "c.gguf", strict, **moved)


def test_a_file_has_no_recipe_without_a_manifest(models, tmp_path):
    source = quantize_model(models("llama-tied"), tmp_path / "a", "int4:g32:sym")
    manifest.manifest_path(source).unlink()
    file = export(source, tmp_path / "b.gguf", None, allow_inexact=True)
    assert "quantforge.recipe" not in read_gguf(file).metadata


def test_export_rounds_a_tied_embedding_and_reports_it(tmp_path, capsys):
    """Codes of linears do not change; the rounding is announced, recorded and can be switched off."""
    model = gguf_models.make("llama-tied", tmp_path / "m", torch.float16, **WIDE)
    name = "model.embed_tokens.weight"
    source = quantize_model(model, tmp_path / "a", "int4:g32:sym")
    result = run_command(capsys, "export", source, "-o", tmp_path / "b.gguf")
    assert result.code == 0, result.err
    assert "exact but for the embedding" in result.err
    message = f"chosen: {name}: F16, 164 kB -> q6_k, 67.2 kB (tied embedding, as llama-quantize); --embedding keep"
    assert result.err.index(message) < result.err.index("exact but for the embedding")
    types = {key: entry.type for key, entry in read_gguf(tmp_path / "b.gguf").tensors.items()}
    assert types.pop("token_embd.weight") == "Q6_K"
    assert set(types.values()) == {"Q4_0", "F32"}
    document = manifest.read_manifest(tmp_path / "b.gguf")
    assert document["event_counts"] == {"embedding-quantized": 1}
    (entry,) = [item for item in document["tensors"] if item["name"] == name]
    assert (entry["scheme"], entry["error"] < 1e-3) == ("q6_k", True)
    for origin in (model, source):
        assert api.verify(tmp_path / "b.gguf", source=origin).findings == []
    strict = Policy(strict=True)
    with pytest.raises(RefusedError, match="embedding-quantized"):
        export(source, tmp_path / "x.gguf", None, policy=strict)
    assert not (tmp_path / "x.gguf").exists()
    unchanged_file = export(source, tmp_path / "c.gguf", None, embedding="keep", policy=strict)
    eights = export(source, tmp_path / "d.gguf", None, embedding="q8_0")
    embedding_types = [
        read_gguf(path).tensors["token_embd.weight"].type for path in (unchanged_file, eights)
    ]
    assert embedding_types == ["F16", "Q8_0"]


def test_export_does_not_round_untied_or_quantized_embeddings(models, tmp_path):
    """An untied head with its embedding, and an embedding that is quantized already."""
    untied = quantize_model(
        models("llama", dtype=torch.float16, **WIDE), tmp_path / "a", "int4:g32:sym"
    )
    file = export(untied, tmp_path / "a.gguf", None, policy=Policy(strict=True))
    tensors = read_gguf(file).tensors
    assert {tensors[f"{name}.weight"].type for name in ("token_embd", "output")} == {"F16"}
    file = export(models("llama-tied", **WIDE), tmp_path / "b.gguf", "Q8_0")
    moved = export(file, tmp_path / "c", None, format="mlx", allow_inexact=True)
    assert "embedding-quantized" not in manifest.read_manifest(moved)["event_counts"]
    with pytest.raises(UsageError, match="is quantized already"):
        export(file, tmp_path / "x", None, format="mlx", embedding="int4:g64:min")
    with pytest.raises(UsageError, match="an export to gptq rounds no embedding"):
        export(untied, tmp_path / "x", None, format="gptq", embedding="int8:row")


def test_numbers_without_a_gguf_type_are_refused_with_hints(models, tmp_path):
    model = models("llama-tied")
    asymmetric = quantize_model(model, tmp_path / "a", "int4:g32:asym:f32")
    with pytest.raises(RefusedError, match="minima are not f16 numbers"):
        export(asymmetric, tmp_path / "x.gguf", None)
    three = quantize_model(model, tmp_path / "b", "int3:g32:sym")
    with pytest.raises(RefusedError, match="3-bit integers are no type"):
        export(three, tmp_path / "x.gguf", None)
    with pytest.raises(RefusedError, match="second quantization") as caught:
        export(three, tmp_path / "x.gguf", "Q8_0")
    assert "--source" in caught.value.hint
    assert "--requantize" in caught.value.hint
    assert not (tmp_path / "x.gguf").exists()


def test_requantization_uses_the_source_or_is_an_event(models, tmp_path):
    model = models("llama-tied")
    source = quantize_model(model, tmp_path / "a", "int4:g32:sym")
    again = export(source, tmp_path / "x.gguf", "Q8_0", source=str(model))
    direct = export(model, tmp_path / "y.gguf", "Q8_0")
    names = open_gguf(direct).entries
    assert all(
        torch.equal(open_gguf(again).read(name), open_gguf(direct).read(name)) for name in names
    )
    other = gguf_models.make("llama-tied", tmp_path / "other", num_hidden_layers=1)
    with pytest.raises(IntegrityError, match="not the model"):
        export(source, tmp_path / "z.gguf", "Q8_0", source=str(other))
    decoded = export(source, tmp_path / "z.gguf", "Q8_0", requantize=True)
    assert manifest.read_manifest(decoded)["event_counts"] == {"requantized": 1}


def test_refused_quantized_files_get_a_command_that_works(models, tmp_path, capsys, monkeypatch):
    """Tokenizer and side files are read from the metadata keys of the GGUF file."""
    monkeypatch.chdir(tmp_path)
    export(models("llama-tied", **WIDE), Path("m.gguf"), "Q4_K_S")
    small = ("--samples", 4, "--length", 24)  # scales are searched, for which rows are read
    for typed in (
        ("quantize", "m.gguf", "--method", "rtn", "-o", "a", *small),
        ("export", "m.gguf", "--type", "Q8_0", "-o", "b.gguf"),
        ("export", "m.gguf", "--format", "gguf", "-o", "c.gguf"),
    ):
        refused = run_command(capsys, *typed)
        assert refused.code in {3, 4}
        named = shlex.split(" ".join(refused.err.split()).split("`")[1])
        assert named[:3] == ["quantforge", typed[0], "m.gguf"]
        options = typed[2:] if typed[0] == "quantize" else typed[-2:]
        result = run_command(capsys, *named[1:], *options)
        assert result.code == 0, result.err
        out = Path(typed[typed.index("-o") + 1])
        assert manifest.read_manifest(out)["event_counts"]["requantized"] == 1
    embedding = open_checkpoint(Path("a")).entries["model.embed_tokens.weight"]
    assert embedding.dtype == "F16"  # the type of the model, not that in which it was decoded
    files = tokenizer_files(read_gguf(Path("m.gguf")))
    assert all((Path("a") / name).read_bytes() == data for name, data in files.items())
    assert not api.reproduce("a", "m.gguf").differing
    assert not api.verify("a", source="m.gguf").findings


@pytest.mark.parametrize("pre_tokenizer", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_a_byte_level_tokenizer_round_trips_through_gguf(pre_tokenizer, models, tmp_path):
    from tokenizers import Tokenizer

    model = copy_with_json_values(models("llama-tied"), tmp_path / "m", "config.json")
    tokenizer = gguf_models.byte_level_tokenizer(pre_tokenizer)
    tokenizer.save(str(model / "tokenizer.json"))
    files = tokenizer_files(read_gguf(export(model, tmp_path / "x.gguf")))
    loaded = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Hello wörld, it's 1234 don't 日本語 русский  \n\n 2024</s> x"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids
    assert loaded.decode(loaded.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_round_trips_through_gguf(prefix, models, tmp_path):
    from tokenizers import Tokenizer

    model = copy_with_json_values(
        models("llama-tied", vocab_size=500), tmp_path / "m", "config.json"
    )
    tokenizer = gguf_models.sentencepiece_tokenizer(prefix=prefix)
    tokenizer.save(str(model / "tokenizer.json"))
    file = read_gguf(export(model, tmp_path / "x.gguf"))
    assert file.value("tokenizer.ggml.add_space_prefix", bool) is prefix
    loaded = Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"].decode())
    text = "Hello wörld, it's 1234 日本語 русский  \n\n 🚀 x"
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


def sentencepiece_file(**changes: object) -> GgufFile:
    """Return metadata of a sentencepiece vocabulary whose first token is marked unused."""
    tokens = ["<s>", "</s>", "a", "b", "ab"]
    values = {"model": "llama", "tokens": tokens, "token_type": [5, 3, 1, 1, 1], "scores": [0.0] * 5,
              "bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True, "add_eos_token": True,
              "add_space_prefix": False, **changes}  # fmt: skip
    metadata = {
        f"tokenizer.ggml.{key}": MetadataValue(ValueType.STRING, each)
        for key, each in values.items()
        if each is not None
    }
    return GgufFile((Path("x.gguf"),), metadata, {})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 4, 1]), ({"add_bos_token": False}, [4, 1]), ({"add_eos_token": False}, [0, 4]),
        ({"add_bos_token": False, "add_eos_token": False}, [4]),
        ({"add_bos_token": None, "add_eos_token": None}, [0, 4]),  # as llama.cpp, of pieces
    ],
)  # fmt: skip
def test_bos_and_eos_are_added_even_if_marked_unused(changes, expected):
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_str(
        tokenizer_files(sentencepiece_file(**changes))["tokenizer.json"].decode()
    )
    assert loaded.encode("ab").ids == expected
    assert loaded.token_to_id("<s>") == 0


@pytest.mark.parametrize("scores", [[0.0] * 4, [0.0] * 6, ["x"] * 5])
def test_scores_that_do_not_fit_the_tokens_are_refused(scores):
    with pytest.raises(InputError, match=f"{len(scores)} values for 5 tokens"):
        tokenizer_files(sentencepiece_file(scores=scores))


def test_a_sentencepiece_vocabulary_with_other_merges_is_refused(models, tmp_path):
    model = copy_with_json_values(
        models("llama-tied", vocab_size=500), tmp_path / "m", "config.json"
    )
    gguf_models.sentencepiece_tokenizer(prefix=True).save(str(model / "tokenizer.json"))
    model = copy_with_edited_tokenizer(
        model, tmp_path / "n", lambda it: it["model"]["merges"].pop(5)
    )
    assert_export_refused(RefusedError, "no merge gives", model, tmp_path)


def test_a_gguf_file_converts_to_another_type(models, tmp_path):
    model = models("llama-tied", **WIDE)
    wide = export(model, tmp_path / "f32.gguf", "F32")
    direct, by_way = (
        export(source, tmp_path / name, "Q4_K_M")
        for source, name in ((model, "a.gguf"), (wide, "b.gguf"))
    )
    first, second = open_gguf(direct), open_gguf(by_way)
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.entries)
    direct_keys, two = read_gguf(direct).metadata, read_gguf(by_way).metadata
    assert {key: value for key, value in direct_keys.items() if key.startswith("tokenizer")} == {
        key: value for key, value in two.items() if key.startswith("tokenizer")
    }
    with pytest.raises(RefusedError, match="second quantization"):
        export(direct, tmp_path / "c.gguf", "Q8_0")
    assert manifest.read_manifest(export(direct, tmp_path / "c.gguf", "Q8_0", requantize=True))[
        "event_counts"
    ] == {"requantized": 1}
    with pytest.raises(RefusedError, match="of that format already"):
        export(direct, tmp_path / "d.gguf", None)


def test_decode_only_gguf_types_are_read(models, tmp_path):
    import gguf
    import numpy as np

    plain = export(models("llama-tied", **WIDE), tmp_path / "x.gguf", "F32")
    source = read_gguf(plain)
    gguf_type = gguf.GGMLQuantizationType.NVFP4
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
    for key, value in source.metadata.items():
        if key != "general.architecture" and not key.startswith(("general", "quantforge")):
            types = {
                ValueType.U32: writer.add_uint32,
                ValueType.F32: writer.add_float32,
                ValueType.BOOL: writer.add_bool,
                ValueType.STRING: writer.add_string,
                ValueType.ARRAY: writer.add_array,
            }
            types[value.type](key, value.value)
    from quantforge.files.safetensors import read_tensor

    for name, entry in source.tensors.items():
        if name != "blk.1.ffn_up.weight":
            writer.add_tensor(name, read_tensor(entry.raw()).numpy())
            continue
        blocks = generator.integers(0, 256, (512, 4 * 36), dtype=np.uint8)
        blocks.reshape(512, 4, 36)[:, :, :4] = 0x30  # sane scales
        writer.add_tensor(name, blocks, raw_dtype=gguf_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_gguf(tmp_path / "y.gguf")
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf_type))
    assert torch.equal(checkpoint.read("model.layers.1.mlp.up_proj.weight"), expected)
    assert torch.equal(
        checkpoint.read_rows("model.layers.1.mlp.up_proj.weight", 3, 9), expected[3:9]
    )
    assert "quantization_config" not in checkpoint.config
    inspection = api.inspect(tmp_path / "y.gguf")
    (tensor,) = (
        item for item in inspection.tensors if item.name == "model.layers.1.mlp.up_proj.weight"
    )
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("nvfp4", (512, 256), 512 * 4 * 36)
    assert (inspection.quantized_weights, inspection.quantized_bytes) == (512 * 256, tensor.nbytes)
    assert inspection.schemes["nvfp4"] == 1
    assert inspection.tensor_bytes < inspection.file_bytes


@pytest.mark.parametrize("gguf_type", ["IQ1_S", "IQ2_XXS", "IQ2_M", "IQ3_XXS"])
def test_types_that_need_importance_are_refused_without_it(gguf_type, models):
    recipe = Recipe(format="gguf", type=gguf_type, calibration=NO_CALIBRATION)
    with pytest.raises(RefusedError, match="importance of its columns"):
        api.plan(str(models("llama-tied", **WIDE)), recipe)


def test_iq2_xxs_with_calibration_text_plans_gptq():
    planned = api.plan(str(DEMO), Recipe(format="gguf", type="IQ2_XXS"))
    assert "gptq" in " ".join(planned.notes)
    assert {tensor.scheme.weight.grid for tensor in planned.tensors if tensor.scheme} == {
        "iq2_xxs",
        "q2_k",
        "q5_k",
    }


def test_an_iq_scheme_applies_to_all_linears():
    planned = api.plan(str(DEMO), Recipe(format="gguf", scheme="iq2_s"))
    grids = {t.scheme.weight.grid for t in planned.tensors if t.scheme and "embed" not in t.name}
    assert grids == {"iq2_s"}


def test_iq3_s_blocks_are_decoded_for_plain_exports(tmp_path, models):
    source = models("llama-tied", **WIDE)
    file = export(source, tmp_path / "x.gguf", "IQ3_S")
    checkpoint, plain = (
        open_gguf(file),
        export(file, tmp_path / "d", None, format="plain", allow_inexact=True),
    )
    name = "model.layers.1.mlp.up_proj.weight"
    grid = checkpoint.config["gguf_types"][name] if "gguf_types" in checkpoint.config else "iq3_s"
    assert grid == "iq3_s"
    from quantforge.files.reader import open_checkpoint

    decoded = decode_blocks(checkpoint.read(name), "IQ3_S")
    stored = open_checkpoint(plain).read(name)
    torch.testing.assert_close(stored.float(), decoded.to(stored.dtype).float(), rtol=0, atol=0)


def test_quantize_export_and_eval_read_each_others_results(tmp_path, capsys):
    """Each result is the input of the next command; a GGUF file is accepted as a model."""
    model = gguf_models.make("llama-tied", tmp_path / "m", torch.bfloat16, **WIDE)
    a, b, c = (tmp_path / name for name in ("a", "b.gguf", "c.gguf"))
    text = tmp_path / "text.txt"
    text.write_text(
        "the weights of the model are rounded to the nearest point of the grid, row by row\n" * 60
    )
    assert (
        run_command(
            capsys,
            "quantize",
            model,
            "--method",
            "awq",
            "--bits",
            "4",
            "-o",
            a,
            *CALIBRATION_ARGUMENTS,
        ).code
        == 0
    )
    assert run_command(capsys, "export", a, "--embedding", "keep", "-o", b).code == 0
    common = ("--text", text, "--windows", "2", "--length", "32", "--no-speed", "--json")
    result = run_command(capsys, "eval", model, a, b, *common)
    assert result.code == 0, result.err
    rows = json.loads(result.out)["models"]
    assert [row["format"] for row in rows] == ["plain", "compressed-tensors", "gguf"]
    assert rows[1]["perplexity"] == pytest.approx(rows[2]["perplexity"], rel=1e-6)
    assert rows[1]["kl_mean"] == pytest.approx(rows[2]["kl_mean"], rel=1e-4)
    assert rows[2]["scheme"] == "q4_0"
    assert (
        run_command(capsys, "export", model, "--format", "gguf", "--type", "Q8_0", "-o", c).code
        == 0
    )
    result = run_command(capsys, "eval", c, b, *common)  # the tokenizer is that of the file
    assert result.code == 0, result.err
    assert json.loads(result.out)["models"][1]["perplexity"] == pytest.approx(
        rows[2]["perplexity"], rel=1e-6
    )
    output = run_command(capsys, "inspect", c, "--json")
    assert json.loads(output.out)["schemes"] == {"q8_0": 15, "F32": 5}
    assert json.loads(output.out)["provenance"]["method"] == "rtn"
    result = run_command(capsys, "plan", model, "--format", "gguf", "--type", "Q9_K")
    assert (result.code, "--type Q9_K: unknown" in result.err) == (2, True)
