"""Content of GGUF files: tensors, metadata keys, split parts and side files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, RefusedError
from quantforge.files.output_names import side_path
from quantforge.files.unstacked_experts import unstack_experts
from quantforge.formats.gguf.container import string_value
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.formats.gguf.source import open_gguf
from quantforge.formats.gguf.tokenizer import chat_templates, special_ids
from quantforge.formats.gguf.tokenizer_files import tokenizer_files
from quantforge.formats.gguf.vocabulary import vocabulary
from quantforge.formats.storage import get_storage
from quantforge.plans import Action, StoredTensor, TensorPlan
from quantforge.recipe import Recipe, Rule
from quantforge.runtime.text_processing import load_text_processor
from quantforge.settings import Settings
from quantforge.verification.side_files import SideFiles, template_changes
from tests import gguf_models
from tests.gguf_exports import NO_CALIBRATION, WIDE, copy_with_json_values, export
from tests.runs import run_command
from tests.thorough import mark_others_thorough

DEMO = Path(__file__).parents[4] / "models" / "demo"
SETTINGS = {
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "hidden_act", "layer_types",
    "n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon", "activation_function", "no_rope_layers",
    "query_pre_attn_scalar", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "attention_bias",
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "norm_eps",
    "layer_norm_eps", "norm_epsilon", "use_bias", "use_qkv_bias",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "per_layer_config", "attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block", "num_experts", "top_k_experts",
    "intermediate_size_mlp", "interleave_moe_layer_step", "moe_layers", "use_qk_norm", "attention_chunk_size",
    "attn_temperature_tuning", "floor_scale", "attn_scale",
}  # fmt: skip


# Rows that are reordered, a tied head, linears in one matrix, transposed ones, norms with an offset, experts, windows,
# factors, layers that differ, biases, positions that are stretched.
KINDS = (
    "llama", "llama-tied", "llama-yarn", "phi3-long", "gpt2", "gemma3", "nemotron", "mixtral", "qwen3_moe", "llama4",
    "llama4-several", "mistral", "granite", "cohere2", "exaone4", "gemma4", "gemma4-moe", "stablelm", "starcoder2",
    "hunyuan-alpha",
)  # fmt: skip


@pytest.mark.parametrize("name", mark_others_thorough(sorted(gguf_models.FAMILIES), *KINDS))
def test_every_tensor_and_setting_round_trips_through_gguf(name, models, tmp_path):
    model = models(name)
    out = export(model, tmp_path / "x.gguf", "F32")
    from quantforge.formats.open_model import open_model

    source, checkpoint = unstack_experts(open_model(model)), open_gguf(out)
    assert set(checkpoint.entries) == set(source.entries)
    for tensor in source.entries:
        expected = source.read(tensor).float()
        tolerance = 1e-6 if ("gemma" in name or name == "nemotron") and "norm" in tensor else 0.0
        torch.testing.assert_close(
            checkpoint.read(tensor), expected, rtol=0, atol=tolerance, msg=tensor
        )
        rows = checkpoint.read_rows(tensor, 0, 1) if expected.dim() else checkpoint.read(tensor)
        torch.testing.assert_close(rows, expected[:1], rtol=0, atol=tolerance)
    from transformers import AutoConfig

    before = AutoConfig.from_pretrained(model).to_dict()
    after = AutoConfig.for_model(
        **{**checkpoint.config, "model_type": checkpoint.config["model_type"]}
    ).to_dict()
    for key in SETTINGS & before.keys():
        if before[key] is not None:
            assert after[key] == before[key], key


def test_repeated_exports_have_the_same_bytes(models, tmp_path):
    model = models("llama-tied")
    first = export(model, tmp_path / "a.gguf")
    second = export(model, tmp_path / "b.gguf")
    assert first.read_bytes() == second.read_bytes()


def test_metadata_keys_describe_model_origin_and_recipe(models, tmp_path):
    model = copy_with_json_values(
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


def test_named_chat_templates_round_trip_through_metadata_keys(models, tmp_path):
    named = {"default": "D", "tool_use": "T", "a-b": "{{ x }}\u00e9", "none": ""}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    model = copy_with_json_values(
        models("llama-tied"), tmp_path / "m", "tokenizer_config.json", chat_template=listed
    )
    (model / "chat_template.jinja").unlink()
    path = export(model, tmp_path / "x.gguf", "Q8_0")
    file = read_gguf(path)
    stored = {key: file.metadata[key].value for key in file.metadata if "chat_template" in key}
    assert stored == {
        "tokenizer.chat_template": "D", "tokenizer.chat_templates": ["a_b", "tool_use"],
        "tokenizer.chat_template.tool_use": "T", "tokenizer.chat_template.a_b": "{{ x }}\u00e9",
    }  # fmt: skip
    assert vocabulary(model, 320, {}).notes == [
        "chat template: 'a-b' is called a_b in the file",
        "chat template: none is empty and is not written",
    ]
    assert load_text_processor(path, {}).template.templates == {
        "default": "D",
        "tool_use": "T",
        "a_b": "{{ x }}\u00e9",
    }
    plain = export(path, tmp_path / "plain", None, format="plain", allow_inexact=True)
    loaded = AutoTokenizer.from_pretrained(plain)
    assert loaded.chat_template == {"default": "D", "tool_use": "T", "a_b": "{{ x }}\u00e9"}


def test_template_changes_compares_templates_as_transformers_reads_them():
    listed = [{"name": name, "template": name} for name in ("default", "a-b")]
    source = {"tokenizer_config.json": json.dumps({"chat_template": listed}).encode()}
    source["chat_template.json"] = b'{"chat_template": "not taken"}'
    own = {"chat_template.jinja": b"default\n", "additional_chat_templates/a_b.jinja": b"a-b"}
    for files, expected in (
        (own, []),
        ({**own, "additional_chat_templates/a_b.jinja": b"x"}, ["a_b = 'x'"]),
        ({"chat_template.jinja": b"default"}, ["a_b = nothing"]),
        ({**own, "additional_chat_templates/more.jinja": b"m"}, ["the source has nothing"]),
    ):
        changes = [
            str(change) for change in template_changes(SideFiles({}, files), SideFiles({}, source))
        ]
        assert len(changes) == len(expected)
        assert all(part in change for change, part in zip(changes, expected, strict=True))


def test_template_names_with_the_same_key_are_refused(models, tmp_path):
    listed = [{"name": name, "template": name} for name in ("a-b", "a_b")]
    model = copy_with_json_values(
        models("llama-tied"), tmp_path / "m", "tokenizer_config.json", chat_template=listed
    )
    (model / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="'a_b' has the key of another one"):
        chat_templates(model)


def test_a_template_key_unusable_as_a_file_name_is_refused(models, tmp_path):
    file = read_gguf(export(models("llama-tied"), tmp_path / "x.gguf", "Q8_0"))
    metadata = {**file.metadata, "tokenizer.chat_template...": string_value("x")}
    with pytest.raises(InputError, match="no name for a file"):
        tokenizer_files(replace(file, metadata=metadata))


def test_eos_ids_outside_the_vocabulary_are_ignored(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 1099511627776, 2, 3]}')
    result = special_ids({"a": 0, "b": 1, "c": 2, "d": 3}, {}, {}, tmp_path)
    assert result == {"eos": 2, "eot": 3}


def test_unquantized_tensors_are_restored_to_the_source_shape():
    def plan(shape, stored, **values):
        stored = (StoredTensor("x", "F32", stored),)
        return TensorPlan("x", "F32", shape, Action.KEEP, "", outputs=stored, **values)

    storage, value = get_storage("gguf"), torch.linspace(-4, 2, 12)
    convolution, decay = plan((4, 1, 3), (4, 3)), plan((12,), (12,), negate_exp=True)
    assert torch.equal(
        storage.restore_unquantized(
            convolution, storage.convert_unquantized(convolution, value.view(4, 1, 3))
        ),
        value.view(4, 1, 3),
    )
    assert torch.allclose(
        storage.restore_unquantized(decay, storage.convert_unquantized(decay, value)),
        value,
        atol=1e-6,
    )


def test_model_names_that_mislead_llama_cpp_are_omitted(models, tmp_path):
    model = copy_with_json_values(models("llama-tied"), tmp_path / "my-Phi-3-mini", "config.json")
    assert "general.name" not in read_gguf(export(model, tmp_path / "x.gguf")).metadata


def test_the_manifest_of_a_gguf_file_lists_it(models, tmp_path):
    out = export(models("llama-tied"), tmp_path / "x.gguf")
    document = manifest.read_manifest(out)
    digest = hashlib.sha256(out.read_bytes()).hexdigest()
    assert document["outputs"] == {"x.gguf": {"bytes": out.stat().st_size, "sha256": digest}}
    assert {path.name for path in tmp_path.iterdir()} == {"x.gguf", "x.gguf.quantforge.json"}


def test_a_modelfile_states_file_context_and_stop_tokens(models, tmp_path):
    settings = Settings(modelfile=True)
    recipe = Recipe(format="gguf", type="Q8_0", calibration=NO_CALIBRATION, scales="absmax")
    api.export(str(models("llama-tied")), recipe, tmp_path / "x.gguf", settings)
    text = (tmp_path / "x.Modelfile").read_text()
    assert text.splitlines() == ["FROM ./x.gguf", "PARAMETER num_ctx 128", 'PARAMETER stop "</s>"']
    assert set(manifest.read_manifest(tmp_path / "x.gguf")["outputs"]) == {"x.gguf", "x.Modelfile"}


def test_rules_override_the_mixture_and_misfit_shapes_are_substituted(
    models,
):
    model = models("llama-tied")  # 64 columns
    recipe = Recipe(
        format="gguf", type="Q4_K_M", calibration=NO_CALIBRATION, ignore=("layers.0.mlp.up_proj",),
        rules=(Rule("v_proj", "q8_0"), Rule("re:.*layers.1.mlp.down_proj", "q4_0")),
    )  # fmt: skip
    plan = api.plan(str(model), recipe)
    schemes = {tensor.name: str(tensor.scheme) for tensor in plan.tensors}
    assert schemes["model.layers.0.self_attn.v_proj.weight"] == "q8_0"
    assert schemes["model.layers.1.mlp.down_proj.weight"] == "q4_0"
    assert schemes["model.layers.0.mlp.up_proj.weight"] == "None"
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == "q5_0"  # Q4_K does not divide 64
    events = {event.where: event.detail for event in plan.substitutions}
    assert events["model.layers.0.self_attn.q_proj.weight"].startswith(
        "Q4_K -> Q5_0, 5632 bytes: 64 columns"
    )
    assert "model.layers.0.self_attn.v_proj.weight" not in events


def test_the_plan_predicts_the_exact_file_size(models, tmp_path):
    model = models("llama-tied", **WIDE)
    plan = api.plan(
        str(model),
        Recipe(format="gguf", type="Q3_K_M", calibration=NO_CALIBRATION, scales="absmax"),
    )
    out = export(model, tmp_path / "x.gguf", "Q3_K_M")
    assert out.stat().st_size == plan.output_bytes
    types = {name: entry.type for name, entry in read_gguf(out).tensors.items()}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.0.attn_v.weight"] == "Q5_K"
    assert list(types) == sorted(types, key=lambda name: (name.startswith("blk"), name))


def test_large_gguf_files_are_split_and_read_as_one(models, tmp_path):
    model = models("llama-tied")
    single_file = export(model, tmp_path / "w.gguf", "F16")
    export(model, tmp_path / "x.gguf", "F16", max_shard_bytes=60_000)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) > 2
    assert parts[0].name == f"x-00001-of-{len(parts):05}.gguf"
    assert not (tmp_path / "x.gguf").exists()
    assert side_path(parts[0]).is_file()
    single, many = open_gguf(single_file), open_gguf(parts[1])
    assert all(torch.equal(single.read(name), many.read(name)) for name in single.entries)
    with pytest.raises(RefusedError, match="exists"):
        export(model, tmp_path / "x.gguf", "F16")
    export(model, tmp_path / "x.gguf", "F16", overwrite=True)
    assert not list(tmp_path.glob("x-*.gguf"))


# Rows that are reordered with biases and rope factors, norms that add one, linears in one matrix, transposed matrices,
# factors of a configuration, a scale of logits.
@pytest.mark.parametrize("name", mark_others_thorough(sorted(
    name for name in set(gguf_models.FAMILIES) - {"mixtral", "qwen3_moe"} if not name.startswith(("gemma4", "llama4"))
), "llama", "gemma3", "phi3", "gpt2", "granite", "cohere2"))  # fmt: skip
def test_q8_0_files_of_every_family_compute_nearly_the_source_logits(name, models, tmp_path):
    from quantforge.runtime.load import load

    model = models(name)
    ids = [5, 9, 41, 77, 160, 23, 11, 200]
    expected = torch.log_softmax(gguf_models.logits(model, ids), -1)
    with torch.no_grad():
        logits = load(export(model, tmp_path / "x.gguf", "Q8_0")).model(torch.tensor([ids])).logits
    actual = torch.log_softmax(logits[0, -1], -1)
    assert 0 < (actual - expected).abs().max() < 0.15  # rounded to 8 bits, and nothing else


def test_planned_peak_memory_grows_with_threads():
    recipe = Recipe(format="gguf", type="Q4_K_M", calibration=NO_CALIBRATION)
    peaks = [
        api.plan(str(DEMO), recipe, Settings(threads=threads)).peak_memory_bytes
        for threads in (1, 2, 8, 64)
    ]
    assert peaks[1] - peaks[0] == pytest.approx(27e6, rel=0.05)
    assert peaks[1] <= peaks[2] == peaks[3]


def test_a_conversion_to_16_bits_reports_nothing_quantized(tmp_path, capsys):
    result = run_command(
        capsys, "export", DEMO, "--format", "gguf", "--type", "BF16", "-o", tmp_path / "x.gguf"
    )
    assert result.code == 0
    assert "nothing quantized, 16.0" in result.err
    assert "nan" not in result.err
    assert (
        "nothing quantized"
        in run_command(capsys, "plan", DEMO, "--format", "gguf", "--type", "F16").out
    )
