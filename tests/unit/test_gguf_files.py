"""Exports to GGUF and from it: round trips, refusals before a byte is written, resuming, parts, conversions."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from quantforge import manifest, pipeline
from quantforge.checkpoint.publish_file import side_of
from quantforge.errors import InputError, IntegrityError, QuantForgeError, RefusedError, UsageError
from quantforge.formats.gguf.container import ValueType
from quantforge.formats.gguf.reader import read_gguf
from quantforge.formats.gguf.source import open_gguf
from quantforge.formats.gguf.tokenizer_files import tokenizer_files
from quantforge.recipe import CalibrationOptions, Recipe, Rule
from quantforge.settings import Settings
from tests import gguf_models
from tests.runs import StopError, crash_after, leftovers

SETTINGS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "layer_types",
    "n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon", "activation_function", "no_rope_layers",
    "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "attention_bias",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
}  # fmt: skip
NO_DATA = CalibrationOptions(source="none")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def export(model: Path, out: Path, kind: str | None = "Q8_0", **values: object) -> Path:
    settings = Settings(
        **{key: values.pop(key) for key in ("overwrite", "progress", "policy") if key in values}
    )
    again = {
        key: values.pop(key) for key in ("source", "requantize", "allow_inexact") if key in values
    }
    values = {"format": "gguf", "calibration": NO_DATA, "scales": "absmax", **values}
    pipeline.export(str(model), Recipe(type=kind, **values), out, settings, **again)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, Path] = {}

    def model(name: str, **changes: object) -> Path:
        key = f"{name} {sorted(changes)}"
        if key not in made:
            made[key] = gguf_models.make(name, tmp_path_factory.mktemp("models") / "m", **changes)
        return made[key]

    return model


def changed(model: Path, place: Path, file: str, **values: object) -> Path:
    """A copy of a model with other values in a JSON file."""
    place.mkdir()
    for path in model.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    content = json.loads((place / file).read_text())
    (place / file).write_text(json.dumps({**content, **values}))
    return place


def refused(
    kind: type[QuantForgeError], match: str, model: Path, tmp_path: Path, **values: object
) -> None:
    """The export fails so, and nothing of it is left behind."""
    before = set(tmp_path.iterdir())
    with pytest.raises(kind, match=match):
        export(model, tmp_path / "x.gguf", **values)
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {".x.gguf.qf.lock"}


# ---- what is written


@pytest.mark.parametrize("name", sorted(gguf_models.FAMILIES))
def test_every_tensor_and_setting_comes_back_as_it_was(name, models):
    model = models(name)
    out = export(model, model.parent / "x.gguf", "F32", overwrite=True)
    from quantforge.formats.opening import open_model

    source, found = open_model(model), open_gguf(out)
    assert set(found.entries) == set(source.entries)
    for tensor in source.entries:
        expected = source.read(tensor).float()
        tolerance = 1e-6 if "gemma" in name and "norm" in tensor else 0.0
        torch.testing.assert_close(found.read(tensor), expected, rtol=0, atol=tolerance, msg=tensor)
        rows = found.read_rows(tensor, 0, 1) if expected.dim() else found.read(tensor)
        torch.testing.assert_close(rows, expected[:1], rtol=0, atol=tolerance)
    from transformers import AutoConfig

    before = AutoConfig.from_pretrained(model).to_dict()
    after = AutoConfig.for_model(
        **{**found.config, "model_type": found.config["model_type"]}
    ).to_dict()
    for key in SETTINGS & before.keys():
        if before[key] is not None:
            assert after[key] == before[key], key


def test_the_same_export_twice_has_the_same_bytes_whatever_the_output_is_called(models, tmp_path):
    model = models("llama-tied")
    first = export(model, tmp_path / "a.gguf")
    second = export(model, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_keys_say_what_the_model_is_where_it_comes_from_and_how_it_was_made(models, tmp_path):
    model = changed(
        models("llama-tied"), tmp_path / "m", "generation_config.json", eos_token_id=[1, 5]
    )
    card = "---\nlicense: apache-2.0\nbase_model:\n- org/base-1B\n---\n# A model\n"
    (model / "README.md").write_text(card)
    template = "{% for m in messages %}\u00e9\r\n{{ m }} {% endfor %}"
    (model / "chat_template.jinja").write_bytes(template.encode())
    file = read_gguf(export(model, tmp_path / "x.gguf", "Q8_0"))
    expected = {
        "general.architecture": "llama", "general.license": "apache-2.0", "general.base_model.0.name": "base-1B",
        "general.base_model.0.organization": "org", "general.file_type": 7, "general.quantization_version": 2,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": template, "tokenizer.ggml.pre": "gpt-2", "llama.attention.key_length": 32,
    }  # fmt: skip
    assert {key: file.metadata[key].value for key in expected} == expected
    from quantforge.recipe import from_toml

    assert from_toml(file.value("quantforge.recipe", str)).type == "Q8_0"
    assert "general.alignment" not in file.metadata


def test_a_name_that_llama_cpp_takes_for_another_model_is_left_out(models, tmp_path):
    model = changed(models("llama-tied"), tmp_path / "my-Phi-3-mini", "config.json")
    assert "general.name" not in read_gguf(export(model, tmp_path / "x.gguf")).metadata


def test_the_manifest_beside_the_file_describes_it(models, tmp_path):
    out = export(models("llama-tied"), tmp_path / "x.gguf")
    document = manifest.read(out)
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    assert document["outputs"] == {"x.gguf": {"bytes": out.stat().st_size, "sha256": digest}}
    assert {path.name for path in tmp_path.iterdir()} == {
        "x.gguf", "x.gguf.quantforge.json", ".x.gguf.qf.lock",
    }  # fmt: skip


def test_a_modelfile_names_the_file_its_context_and_its_ends(models, tmp_path):
    settings = Settings(modelfile=True)
    recipe = Recipe(format="gguf", type="Q8_0", calibration=NO_DATA, scales="absmax")
    pipeline.export(str(models("llama-tied")), recipe, tmp_path / "x.gguf", settings)
    text = (tmp_path / "x.Modelfile").read_text()
    assert text.splitlines() == ["FROM ./x.gguf", "PARAMETER num_ctx 128", 'PARAMETER stop "</s>"']
    assert set(manifest.read(tmp_path / "x.gguf")["outputs"]) == {"x.gguf", "x.Modelfile"}


def test_rules_decide_before_the_mixture_and_shapes_that_do_not_fit_are_substituted_as_events(
    models,
):
    model = models("llama-tied")  # 64 columns
    recipe = Recipe(
        format="gguf", type="Q4_K_M", calibration=NO_DATA, ignore=("layers.0.mlp.up_proj",),
        rules=(Rule("v_proj", "q8_0"), Rule("re:.*layers.1.mlp.down_proj", "q4_0")),
    )  # fmt: skip
    plan = pipeline.plan(str(model), recipe)
    found = {tensor.name: str(tensor.scheme) for tensor in plan.tensors}
    assert found["model.layers.0.self_attn.v_proj.weight"] == "q8_0"
    assert found["model.layers.1.mlp.down_proj.weight"] == "q4_0"
    assert found["model.layers.0.mlp.up_proj.weight"] == "None"
    assert found["model.layers.0.self_attn.q_proj.weight"] == "q5_0"  # Q4_K does not divide 64
    events = {event.where: event.detail for event in plan.substitutions}
    assert events["model.layers.0.self_attn.q_proj.weight"].startswith(
        "Q4_K -> Q5_0, 5632 bytes: 64 columns"
    )
    assert "model.layers.0.self_attn.v_proj.weight" not in events


def test_the_plan_is_the_file_to_the_byte(models, tmp_path):
    model = models("llama-tied", **WIDE)
    plan = pipeline.plan(
        str(model), Recipe(format="gguf", type="Q3_K_M", calibration=NO_DATA, scales="absmax")
    )
    out = export(model, tmp_path / "x.gguf", "Q3_K_M")
    assert out.stat().st_size == plan.output_bytes
    types = {name: entry.type for name, entry in read_gguf(out).tensors.items()}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_v.weight"] == "Q5_K"
    assert list(types) == sorted(types, key=lambda name: (name.startswith("blk"), name))


def test_large_results_come_in_numbered_parts_that_are_read_as_one(models, tmp_path):
    model = models("llama-tied")
    whole = export(model, tmp_path / "w.gguf", "F16")
    export(model, tmp_path / "x.gguf", "F16", max_shard_bytes=60_000)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) > 2
    assert parts[0].name == f"x-00001-of-{len(parts):05}.gguf"
    assert not (tmp_path / "x.gguf").exists()
    assert side_of(parts[0]).is_file()
    one, many = open_gguf(whole), open_gguf(parts[1])
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.entries)
    with pytest.raises(RefusedError, match="exists"):
        export(model, tmp_path / "x.gguf", "F16")
    export(model, tmp_path / "x.gguf", "F16", overwrite=True)
    assert not list(tmp_path.glob("x-*.gguf"))


@pytest.mark.parametrize("name", sorted(set(gguf_models.FAMILIES) - {"mixtral", "qwen3_moe"}))
def test_a_file_of_every_family_is_loaded_and_computes_what_its_source_does(name, models, tmp_path):
    from quantforge.runtime.load import load

    model = models(name)
    ids = [5, 9, 41, 77, 160, 23, 11, 200]
    expected = torch.log_softmax(gguf_models.logits(model, ids), -1)
    with torch.no_grad():
        logits = load(export(model, tmp_path / "x.gguf", "Q8_0")).model(torch.tensor([ids])).logits
    found = torch.log_softmax(logits[0, -1], -1)
    assert 0 < (found - expected).abs().max() < 0.15  # rounded to 8 bits, and nothing else


# ---- what is refused


def test_families_and_settings_that_a_file_cannot_carry_are_refused(models, tmp_path, tiny):
    refused(RefusedError, "model_type 'opt'.*not written", tiny("opt"), tmp_path)
    for name, values, match in (
        ("gemma2", {"query_pre_attn_scalar": 77}, "query_pre_attn_scalar = 77"),
        ("gemma3", {"layer_types": ["full_attention"] * 6}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ("llama-tied", {"hidden_act": "relu"}, "activation 'relu'"),
        (
            "llama-tied",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope scaling 'dynamic'",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ):
        model = changed(models(name), tmp_path / f"{name} {match[:5]}", "config.json", **values)
        refused(RefusedError, match, model, tmp_path)


def test_tensors_that_the_graph_has_no_place_for_are_refused(tmp_path, tiny):
    refused(
        RefusedError, r"no place in llama.cpp's gemma2: .*k_proj.bias", tiny("gemma2"), tmp_path
    )


def edited(model: Path, place: Path, change: object) -> Path:
    model = changed(model, place, "config.json")
    content = json.loads((model / "tokenizer.json").read_text())
    change(content)
    (model / "tokenizer.json").write_text(json.dumps(content))
    return model


def test_tokenizers_that_do_not_fit_are_refused(models, tmp_path):
    source = models("llama-tied")

    def with_change(name: str, change: object) -> Path:
        return edited(source, tmp_path / name, change)

    split = {"type": "Split", "pattern": {"Regex": "\\d+"}, "behavior": "Isolated", "invert": False}
    odd = with_change("pre", lambda it: it.update(pre_tokenizer=split))
    refused(RefusedError, r"unknown pre-tokenizer: \\d\+", odd, tmp_path)
    export(odd, tmp_path / "named.gguf", pre="qwen2")
    assert read_gguf(tmp_path / "named.gguf").value("tokenizer.ggml.pre", str) == "qwen2"
    more = with_change("more", lambda it: it["model"]["vocab"].update(zzz=320))
    refused(InputError, "'zzz' has id 320, the embedding has 320 rows", more, tmp_path)
    kind = with_change("kind", lambda it: it["model"].update(type="WordPiece"))
    refused(RefusedError, "'WordPiece' is not written", kind, tmp_path)
    normal = with_change("normal", lambda it: it.update(normalizer={"type": "Lowercase"}))
    refused(RefusedError, "does Lowercase", normal, tmp_path)
    missing = changed(source, tmp_path / "added", "tokenizer_config.json", bos_token="<nowhere>")
    refused(InputError, "bos_token '<nowhere>' is not in the vocabulary", missing, tmp_path)
    bare = changed(source, tmp_path / "bare", "config.json")
    (bare / "tokenizer.json").unlink()
    refused(InputError, "tokenizer.json: missing", bare, tmp_path)
    (bare / "tokenizer.json").write_text("{")
    refused(InputError, "not JSON", bare, tmp_path)


def test_a_vocabulary_smaller_than_the_embedding_is_filled_up(models, tmp_path):
    model = edited(models("llama-tied"), tmp_path / "m", lambda it: it["model"]["vocab"].popitem())
    model = edited(model, tmp_path / "n", lambda it: it["model"]["merges"].pop())
    file = read_gguf(export(model, tmp_path / "x.gguf"))
    assert file.value("tokenizer.ggml.tokens", list)[319] == "[PAD319]"
    assert file.value("tokenizer.ggml.token_type", list)[319] == 5


def test_values_that_blocks_cannot_hold_are_refused(tmp_path):
    for value, kind, match in (
        (float("nan"), "Q8_0", "nan"),
        (float("inf"), "F16", "inf"),
        (1e6, "F16", "beyond the range of float16"),
    ):
        model = gguf_models.make("llama-tied", tmp_path / f"m{value}")
        from safetensors.torch import load_file, save_file

        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        with pytest.raises(QuantForgeError, match=match):
            export(model, tmp_path / "x.gguf", kind)
        assert not (tmp_path / "x.gguf").exists()


def test_a_type_is_for_gguf_alone(models):
    for values in ({"type": "Q4_K_M"}, {"pre": "qwen2"}):
        with pytest.raises(UsageError, match="belong to GGUF"):
            pipeline.plan(str(models("llama-tied")), Recipe(**values))
    with pytest.raises(InputError, match="'type' is given beside"):
        Recipe(format="gguf", type="Q4_K_M", bits=4)
    with pytest.raises(InputError, match="--bits 7: no mixture"):
        pipeline.plan(str(models("llama-tied")), Recipe(format="gguf", bits=7))
    plan = pipeline.plan(
        str(models("llama-tied", **WIDE)), Recipe(format="gguf", scheme="q5_k", calibration=NO_DATA)
    )
    kinds = {str(tensor.scheme) for tensor in plan.tensors if tensor.scheme and tensor.part >= 0}
    assert kinds == {"q5_k", "q5_1"}  # 128 columns of the output of attention


def test_experts_that_are_missing_are_refused(models, tmp_path):
    from safetensors.torch import load_file, save_file

    model = changed(models("mixtral"), tmp_path / "m", "config.json")
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    refused(InputError, r"blk.1.ffn_gate_exps.weight: experts \[0, 1, 3\] of 4", model, tmp_path)


# ---- files that are there already, interruptions


def test_nothing_is_replaced_that_is_not_ours(models, tmp_path):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists"):
        export(model, out)
    with pytest.raises(RefusedError, match="not a result of quantforge"):
        export(model, out, overwrite=True)
    assert out.read_bytes() == b"precious"
    out.unlink()
    out.mkdir()
    with pytest.raises(RefusedError, match="is no file"):
        export(model, out, overwrite=True)
    out.rmdir()
    out.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="is no file"):
        export(model, out)
    with pytest.raises(UsageError, match="overlaps"):
        export(model, model / "x.gguf")


def test_an_interrupted_run_leaves_no_file_and_goes_on(models, tmp_path):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    reference = export(model, tmp_path / "y.gguf")
    with pytest.raises(StopError):
        export(model, out, progress=crash_after("block 0"))
    assert not out.exists()
    export(model, out)
    assert out.read_bytes() == reference.read_bytes()
    assert leftovers(out) == {"x.gguf", "x.gguf.quantforge.json", "y.gguf", "y.gguf.quantforge.json",
                              ".y.gguf.qf.lock"}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_calibrated_run_goes_on_from_what_it_had_written(name, models, tmp_path):
    text = CalibrationOptions(samples=4, length=24, propagate="quantized")
    values = {"method": "awq+gptq", "calibration": text, "type": "Q4_0"}

    def run(out: Path, **settings: object) -> Path:
        pipeline.quantize(
            str(models(name)), Recipe(format="gguf", **values), out, Settings(**settings)
        )
        return out

    whole = run(tmp_path / "a.gguf")
    with pytest.raises(StopError):
        run(tmp_path / "b.gguf", progress=crash_after("block 0"))
    assert run(tmp_path / "b.gguf").read_bytes() == whole.read_bytes()


def test_a_full_disk_leaves_the_earlier_file_as_it_was(models, tmp_path, monkeypatch):
    model, out = models("llama-tied"), tmp_path / "x.gguf"
    export(model, out)
    before = out.read_bytes()
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((1, 1, 1, 1, 1, 1, 1, 1, 1, 1)))
    with pytest.raises(QuantForgeError, match="does not fit"):
        export(model, out, "F16", overwrite=True)
    assert out.read_bytes() == before
    assert manifest.read(out) is not None


# ---- conversions


def quantized(model: Path, out: Path, scheme: str, **values: object) -> Path:
    recipe = Recipe(scheme=scheme, scales="absmax", calibration=NO_DATA, **values)
    pipeline.quantize(str(model), recipe, out, Settings())
    return out


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [("int4:g32:sym", "Q4_0"), ("int8:g64:sym", "Q8_0"), ("int5:g32:sym", "Q5_0")],
)
def test_integers_move_to_blocks_and_back_without_a_bit_changed(scheme, kind, models, tmp_path):
    source = quantized(models("llama-tied"), tmp_path / "a", scheme)
    file = export(source, tmp_path / "b.gguf", None, allow_inexact=True)
    assert {entry.type for entry in read_gguf(file).tensors.values()} == {kind, "F32"}
    back = export(file, tmp_path / "c", None, format="compressed-tensors")
    plain = export(file, tmp_path / "d", None, format="plain", allow_inexact=True)
    assert (plain / "tokenizer.json").is_file()
    from quantforge.formats.decoded import decoded
    from quantforge.formats.opening import open_model

    expected, blocks, again = (decoded(open_model(path)) for path in (source, file, back))
    for name in expected.layouts:
        torch.testing.assert_close(blocks.read(name), expected.read(name), rtol=1e-3, atol=1e-7)
        assert torch.equal(blocks.read(name), again.read(name))


def test_a_model_that_was_scaled_keeps_its_numbers_and_the_mission_is_exact(models, tmp_path):
    a = tmp_path / "a"
    recipe = Recipe(method="awq", bits=4, calibration=CalibrationOptions(samples=4, length=24))
    model = models("llama-tied", dtype=torch.bfloat16, **WIDE)
    pipeline.quantize(str(model), recipe, a, Settings())
    b = export(a, tmp_path / "b", None)
    from quantforge.formats.decoded import decoded
    from quantforge.formats.opening import open_model

    first, second = decoded(open_model(a)), decoded(open_model(b))
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.layouts)
    assert len(first.layouts) == 14


def test_numbers_that_no_block_has_are_refused_with_the_ways_out(models, tmp_path):
    model = models("llama-tied")
    asymmetric = quantized(model, tmp_path / "a", "int4:g32:asym")
    with pytest.raises(RefusedError, match="zero points differ"):
        export(asymmetric, tmp_path / "x.gguf", None)
    three = quantized(model, tmp_path / "b", "int3:g32:sym")
    with pytest.raises(RefusedError, match="3-bit integers are no type"):
        export(three, tmp_path / "x.gguf", None)
    with pytest.raises(RefusedError, match="second quantization") as caught:
        export(three, tmp_path / "x.gguf", "Q8_0")
    assert "--source" in caught.value.hint
    assert "--requantize" in caught.value.hint
    assert not (tmp_path / "x.gguf").exists()


def test_a_second_quantization_starts_from_the_recorded_source_or_is_an_event(models, tmp_path):
    model = models("llama-tied")
    source = quantized(model, tmp_path / "a", "int4:g32:sym")
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
    assert manifest.read(decoded)["event_counts"] == {"requantized": 1}


@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_a_tokenizer_comes_back_with_the_same_tokens(kind, models, tmp_path):
    from tokenizers import Tokenizer

    model = changed(models("llama-tied"), tmp_path / "m", "config.json")
    tokenizer = gguf_models.byte_level_tokenizer(kind)
    tokenizer.save(str(model / "tokenizer.json"))
    files = tokenizer_files(read_gguf(export(model, tmp_path / "x.gguf")))
    found = Tokenizer.from_str(files["tokenizer.json"].decode())
    text = "Hello wörld, it's 1234 don't 日本語 русский  \n\n 2024</s> x"
    assert found.encode(text).ids == tokenizer.encode(text).ids
    assert found.decode(found.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_tokenizer_comes_back_with_the_same_tokens(prefix, models, tmp_path):
    from tokenizers import Tokenizer

    model = changed(models("llama-tied", vocab_size=500), tmp_path / "m", "config.json")
    tokenizer = gguf_models.sentencepiece_tokenizer(prefix=prefix)
    tokenizer.save(str(model / "tokenizer.json"))
    file = read_gguf(export(model, tmp_path / "x.gguf"))
    assert file.value("tokenizer.ggml.add_space_prefix", bool) is prefix
    found = Tokenizer.from_str(tokenizer_files(file)["tokenizer.json"].decode())
    text = "Hello wörld, it's 1234 日本語 русский  \n\n 🚀 x"
    assert found.encode(text).ids == tokenizer.encode(text).ids


def test_a_sentencepiece_vocabulary_with_other_merges_is_refused(models, tmp_path):
    model = changed(models("llama-tied", vocab_size=500), tmp_path / "m", "config.json")
    gguf_models.sentencepiece_tokenizer(prefix=True).save(str(model / "tokenizer.json"))
    model = edited(model, tmp_path / "n", lambda it: it["model"]["merges"].pop(5))
    refused(RefusedError, "no merge gives", model, tmp_path)


def test_one_file_is_made_from_another(models, tmp_path):
    model = models("llama-tied", **WIDE)
    wide = export(model, tmp_path / "f32.gguf", "F32")
    direct, by_way = (
        export(source, tmp_path / name, "Q4_K_M") for source, name in ((model, "a"), (wide, "b"))
    )
    first, second = open_gguf(direct), open_gguf(by_way)
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.entries)
    one, two = read_gguf(direct).metadata, read_gguf(by_way).metadata
    assert {key: value for key, value in one.items() if key.startswith("tokenizer")} == {
        key: value for key, value in two.items() if key.startswith("tokenizer")
    }
    with pytest.raises(RefusedError, match="second quantization"):
        export(direct, tmp_path / "c", "Q8_0")
    assert manifest.read(export(direct, tmp_path / "c", "Q8_0", requantize=True))[
        "event_counts"
    ] == {"requantized": 1}
    again = export(direct, tmp_path / "d", None)  # the same numbers in the same types
    assert all(torch.equal(first.read(name), open_gguf(again).read(name)) for name in first.entries)


def test_types_that_can_only_be_decoded_are_read(models, tmp_path):
    import gguf
    import numpy as np

    plain = export(models("llama-tied", **WIDE), tmp_path / "x.gguf", "F32")
    source = read_gguf(plain)
    kind = gguf.GGMLQuantizationType.IQ2_XS
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
    from quantforge.checkpoint.safetensors import read_tensor

    for name, entry in source.tensors.items():
        if name != "blk.1.ffn_up.weight":
            writer.add_tensor(name, read_tensor(entry.raw()).numpy())
            continue
        blocks = generator.integers(0, 256, (512, 74), dtype=np.uint8)
        blocks[:, 1] = 0x2C  # a sane float16 scale
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "y.gguf")
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(found.read("model.layers.1.mlp.up_proj.weight"), expected)
    assert torch.equal(found.read_rows("model.layers.1.mlp.up_proj.weight", 3, 9), expected[3:9])
    assert "quantization_config" not in found.config


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "Q2_K", "IQ4_XS", "Q4_0"])
def test_scales_that_overflow_are_refused_and_ones_that_vanish_are_events(kind, tmp_path):
    from safetensors.torch import load_file, save_file

    for factor in (1e10, 1e-9):
        model = gguf_models.make("llama-tied", tmp_path / f"m{factor}", **WIDE)
        tensors = load_file(model / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] *= factor
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
        out = tmp_path / f"{factor}.gguf"
        if factor > 1:
            for scales in ("absmax", "search"):
                with pytest.raises(QuantForgeError, match="up_proj"):
                    export(model, out, kind, scales=scales)
                assert not out.exists()
        else:
            events = manifest.read(export(model, out, kind))["events"]
            clamped = [event["where"] for event in events if event["kind"] != "substitution"]
            assert clamped == ["model.layers.0.mlp.up_proj.weight"]


def test_the_three_commands(tmp_path, capsys):
    """Quantize, export, evaluate: each result is the input of the next; a file is a model like any other."""
    from tests.runs import ROWS, command

    model = gguf_models.make("llama-tied", tmp_path / "m", torch.bfloat16, **WIDE)
    a, b, c = (tmp_path / name for name in "abc")
    text = tmp_path / "text.txt"
    text.write_text(
        "the weights of the model are rounded to the nearest point of the grid, row by row\n" * 60
    )
    assert (
        command(capsys, "quantize", model, "--method", "awq", "--bits", "4", "-o", a, *ROWS).code
        == 0
    )
    assert command(capsys, "export", a, "--format", "gguf", "-o", b).code == 0
    common = ("--text", text, "--windows", "2", "--length", "32", "--no-speed", "--json")
    ended = command(capsys, "eval", model, a, b, *common)
    assert ended.code == 0, ended.err
    rows = json.loads(ended.out)["models"]
    assert [row["format"] for row in rows] == ["plain", "compressed-tensors", "gguf"]
    assert rows[1]["perplexity"] == pytest.approx(rows[2]["perplexity"], rel=1e-6)
    assert rows[1]["kl_mean"] == pytest.approx(rows[2]["kl_mean"], rel=1e-4)
    assert rows[2]["scheme"] == "q4_0"
    assert command(capsys, "export", model, "--format", "gguf", "--type", "Q8_0", "-o", c).code == 0
    ended = command(capsys, "eval", c, b, *common)  # the tokenizer is that of the file
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["models"][1]["perplexity"] == pytest.approx(
        rows[2]["perplexity"], rel=1e-6
    )
    shown = command(capsys, "inspect", c, "--json")
    assert json.loads(shown.out)["schemes"] == {"q8_0": 15, "F32": 5}
    assert json.loads(shown.out)["provenance"]["method"] == "rtn"
    ended = command(capsys, "plan", model, "--format", "gguf", "--type", "Q9_K")
    assert (ended.code, "--type Q9_K: unknown" in ended.err) == (3, True)
