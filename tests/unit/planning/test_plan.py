"""Plans from headers: complete tensor lists, exact bytes, substitutions, ties and speed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.reader import open_checkpoint
from quantforge.grids import PerGroup
from quantforge.plans import Action, Plan, StoredTensor
from quantforge.recipe import CalibrationOptions, Recipe, Rule
from tests import headers
from tests.conftest import FAMILIES, Tiny
from tests.quantized import INTEGER_FORMATS
from tests.runs import copy_model, quantize, recipe
from tests.thorough import parametrize_each_value


def plan(model: Path, **values: object) -> Plan:
    return api.plan(str(model), Recipe(**values))


def schemes(planned: Plan, ending: str) -> set[str]:
    return {
        str(t.scheme or t.action) for t in planned.tensors if t.name.endswith(f"{ending}.weight")
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return headers.llama(tmp_path_factory.mktemp("llama") / "m")


@pytest.mark.parametrize("method", ["awq", "gptq", "awq+gptq", "smooth"])
def test_calibrated_methods_are_refused_without_calibration(llama: Path, method: str) -> None:
    without = CalibrationOptions(source="none")
    with pytest.raises(UsageError, match=f"--method {method.replace('+', '.')} observes"):
        plan(llama, method=method, bits=4, calibration=without)
    assert plan(llama, method="rtn", bits=4, calibration=without).needs == ()


def test_rows_longer_than_the_positions_are_refused_or_noted(tiny: Tiny) -> None:
    model = tiny("llama")  # of 128 positions
    for method in ("gptq", "awq"):
        with pytest.raises(InputError, match="rows of 129 tokens, the model has 128 positions"):
            api.plan(model, method=method, bits=4, length=129)
    notes = api.plan(model, method="gptq", bits=4).notes
    assert [note for note in notes if "--length 128 stays within them" in note]
    assert not [
        note
        for note in api.plan(model, method="gptq", bits=4, length=128).notes
        if "positions" in note
    ]
    assert api.plan(model, method="rtn", scales="absmax", bits=4, length=129)  # reads no text


def test_a_large_model_plans_in_under_a_second(tmp_path: Path) -> None:
    model = headers.llama(tmp_path / "large", num_hidden_layers=56)
    assert len(open_checkpoint(model).entries) > 500
    script = Path(sys.executable).with_name("quantforge")
    # As an installed program is
    compiled = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "p")}
    compiled.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [script, "plan", model, "--method", "awq+gptq", "--rule", "down_proj=int8", "--json"]
    subprocess.run(command, capture_output=True, check=True, env=compiled)
    for last in (False, False, True):  # beside other programs the caches are theirs
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=compiled)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if used < 1.5:
            break
        assert not last, used
    assert len(json.loads(result.stdout)["tensors"]) == 2 + 1 + 56 * 9


def test_planned_bytes_of_a_known_model(llama):
    planned = plan(llama, bits=4)
    weights = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 11008 * 4096)
    assert sum(t.shape[0] * t.shape[1] for t in planned.quantized()) == weights
    shapes = 14 * 16  # the shape of each matrix, two int64, in its own tensor
    packed = weights // 2 + weights // 128 * 2 + shapes
    assert sum(tensor.output_bytes for tensor in planned.quantized()) == packed
    unquantized = 2 * (2 * 32000 * 4096 + 5 * 4096)
    header = planned.output_bytes - packed - unquantized
    assert 0 < header < 200 * len(planned.tensors) * 3
    assert planned.bits_per_weight == pytest.approx(4.125, abs=1e-4)


@pytest.mark.parametrize("format_key", INTEGER_FORMATS)
def test_every_source_tensor_is_accounted_for_once(tiny: Tiny, format_key: str) -> None:
    """Each family is planned in one of the formats."""
    for family in [*FAMILIES][INTEGER_FORMATS.index(format_key) :: len(INTEGER_FORMATS)]:
        scheme = "int4:g32:asym" if format_key == "awq" else "int4:g32:sym"
        model = tiny(family)
        planned = plan(model, scheme=scheme, format=format_key)
        names = [tensor.name for tensor in planned.tensors]
        assert sorted(names) == sorted(open_checkpoint(model).entries)
        assert all(tensor.rule for tensor in planned.tensors)
        assert any(tensor.action is Action.QUANTIZE for tensor in planned.tensors)
        stored = [item.name for tensor in planned.tensors for item in tensor.outputs]
        assert len(set(stored)) == len(stored) == sum(len(shard) for shard in planned.shards)
        assert not any(tensor.outputs for tensor in planned.tensors if tensor.action is Action.DROP)


# ---- schemes


def test_bits_give_the_default_scheme_of_the_format(llama):
    assert schemes(plan(llama, bits=4), "q_proj") == {"int4:g128:sym:bf16"}
    assert schemes(plan(llama, bits=4, format="gptq"), "q_proj") == {"int4:g128:sym:f16"}
    assert schemes(plan(llama, bits=4, format="awq"), "q_proj") == {"int4:g128:asym:f16"}


def test_a_rule_applies_to_all_linears_of_a_shared_input(llama):
    planned = plan(llama, bits=4, rules=(Rule("*.layers.1.self_attn.k_proj", "int8"),))
    for name in ("q_proj", "k_proj", "v_proj"):
        assert schemes(planned, f"layers.1.self_attn.{name}") == {"int8:g128:sym:bf16"}
        assert schemes(planned, f"layers.0.self_attn.{name}") == {"int4:g128:sym:bf16"}
    assert schemes(planned, "layers.1.self_attn.o_proj") == {"int4:g128:sym:bf16"}
    tied = next(t for t in planned.tensors if t.name.endswith("layers.1.self_attn.q_proj.weight"))
    assert "tied to model.layers.1.self_attn.k_proj" in tied.rule
    with pytest.raises(InputError, match="one matrix"):
        plan(llama, rules=(Rule("q_proj", "int8"), Rule("v_proj", "keep")))


def test_ignored_layers_are_kept(llama):
    planned = plan(llama, ignore=("*.layers.0.*", "down_proj"))
    assert schemes(planned, "down_proj") == {"keep"}
    assert schemes(planned, "layers.0.mlp.up_proj") == {"keep"}
    assert schemes(planned, "layers.1.mlp.up_proj") != {"keep"}
    with pytest.raises(InputError, match="nothing would be quantized"):
        plan(llama, ignore=("*",))


@pytest.mark.parametrize(
    ("columns", "granularity"),
    [(192, "g64"), (96, "g32"), (48, "g16"), (4096 + 8, "row"), (33, "row")],
)
def test_a_non_dividing_group_is_replaced_by_a_finer_one(tmp_path, columns, granularity):
    config = {**headers.LLAMA, "intermediate_size": columns}
    model = headers.write(tmp_path / "m", config, headers.llama_tensors(config))
    planned = plan(model, bits=4)
    assert schemes(planned, "down_proj") == {f"int4:{granularity}:sym:bf16"}
    assert schemes(planned, "up_proj") == {"int4:g128:sym:bf16"}
    assert [event.kind for event in planned.substitutions] == ["substitution"] * 2
    assert f"int4:g128:sym -> int4:{granularity}" in planned.substitutions[0].detail


@parametrize_each_value(
    ("format_key", ["gptq", "gptq_v2", "awq"]),
    ("columns, group_size", [(192, 64), (96, 32), (48, 16)]),
)
def test_single_group_formats_get_the_largest_common_group(
    tmp_path, format_key, columns, group_size
):
    planned = plan(
        headers.llama(tmp_path / "m", intermediate_size=columns), bits=4, format=format_key
    )
    sizes = {t.scheme.weight.granularity for t in planned.tensors if t.scheme}
    assert sizes == {PerGroup(group_size)}
    details = {event.where: event.detail for event in planned.substitutions}
    assert len(details) == 14
    odd, other = (f"model.layers.0.{name}.weight" for name in ("mlp.down_proj", "self_attn.q_proj"))
    assert f"{columns} input columns are no multiple of 128" in details[odd]
    assert f"-> int4:g{group_size}" in details[other]
    assert f"{columns} input columns ({odd} and 1 more) are no multiple of 128" in details[other]


def test_indivisible_columns_do_not_change_other_groups(tmp_path):
    model = headers.llama(tmp_path / "m", intermediate_size=4096 + 8)
    planned = plan(model, bits=4, format="gptq")
    assert schemes(planned, "down_proj") == {"keep"}
    assert schemes(planned, "up_proj") == {"int4:g128:sym:f16"}
    assert {event.where for event in planned.substitutions if event.kind == "substitution"} == {
        f"model.layers.{block}.mlp.down_proj.weight" for block in range(2)
    }
    assert "--scheme int4:row:sym" in planned.substitutions[0].detail
    rows = plan(model, scheme="int4:row:sym", format="gptq")
    assert schemes(rows, "down_proj") == schemes(rows, "up_proj") == {"int4:row:sym:f16"}
    with pytest.raises(RefusedError, match="down_proj"):  # asked for by name
        plan(model, bits=4, format="gptq", rules=(Rule("down_proj", "int4:g128:sym"),))


def test_refusals_name_the_obstacle_and_alternatives(tmp_path):
    odd = {"hidden_size": 1096, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = headers.llama(tmp_path / "m", **odd, intermediate_size=1096)
    with pytest.raises(RefusedError, match="the layout holds 4 bits") as refused:
        plan(model, scheme="int8:g128:sym", format="awq")
    assert "compressed-tensors or gptq" in refused.value.hint
    with pytest.raises(InputError, match="1096 input columns are no multiple of 128") as refused:
        plan(model, bits=4, format="awq")
    assert "--format compressed-tensors" in refused.value.hint
    assert schemes(plan(model, bits=4, format="gptq"), "up_proj") == {"int4:row:sym:f16"}


def test_different_requested_groups_are_refused_with_hints(llama):
    with pytest.raises(RefusedError) as refused:
        plan(llama, bits=4, format="gptq", rules=(Rule("down_proj", "int4:g32:sym"),))
    for text in ("32 (model.layers.0.mlp.down_proj and 1 more)", "128 (", "and 11 more)"):
        assert text in refused.value.message
    assert "--scheme int4:g128:sym" in refused.value.hint
    assert "--format compressed-tensors" in refused.value.hint


def test_a_group_dividing_no_columns_is_refused_with_alternatives(
    tmp_path,
):
    config = {**headers.LLAMA, "intermediate_size": 200}
    model = headers.write(tmp_path / "m", config, headers.llama_tensors(config))
    planned = plan(model, scheme="int4:g100")  # of down_proj alone
    assert schemes(planned, "down_proj") == {"int4:g100:sym:bf16"}
    assert {event.kind for event in planned.substitutions} == {"substitution"}
    for choices in (
        {"scheme": "int4:g127"},
        {"bits": 4, "rules": (Rule("up_proj", "int4:g100"),)},
        {"bits": 4, "lm_head": "int8:g100"},
        {"scheme": "int8:g127", "format": "gptq"},
    ):
        with pytest.raises(UsageError, match="divide the columns of no linear") as refused:
            plan(model, **choices)
        assert "g64, g32, g16" in refused.value.hint or "g128" in refused.value.hint
    config = {**headers.LLAMA, "intermediate_size": 100}
    odd = headers.write(tmp_path / "odd", config, headers.llama_tensors(config))
    with pytest.raises(UsageError) as refused:
        plan(odd, bits=4, rules=(Rule("down_proj", "int4:g48"),))
    assert refused.value.hint == "one scale for each row: row"


def test_unsupported_schemes_name_the_layer(llama):
    with pytest.raises(RefusedError) as refused:
        plan(llama, bits=5, format="gptq")
    assert refused.value.tensor
    assert refused.value.tensor in refused.value.message
    with pytest.raises(RefusedError):
        plan(llama, format="gptq", rules=(Rule("down_proj", "int8"),))
    with pytest.raises(UsageError, match="nope"):
        plan(llama, method="nope")


def test_an_integer_tensor_cannot_be_quantized(tmp_path):
    tensors = [
        StoredTensor(t.name, "I32" if "up_proj" in t.name else t.dtype, t.shape)
        for t in headers.llama_tensors(headers.LLAMA)
    ]
    with pytest.raises(InputError, match="I32"):
        plan(headers.write(tmp_path / "m", headers.LLAMA, tensors))


# ---- head and embedding


def load_in_transformers(model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_quantized_head_loads_in_transformers(tiny, tmp_path, family):
    model, out = tiny(family), tmp_path / "out"
    done = quantize(
        model, out, recipe("rtn", scheme="int8:g64:sym", lm_head="int8:g64:sym", scales="absmax")
    )
    assert done.plan.tensors_after_blocks == ("lm_head.weight",)
    assert all(verdict.loads for verdict in done.plan.engines if verdict.engine == "transformers")
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in done.plan.notes) is (
        family == "llama-tied"
    )
    ids = torch.arange(24)[None]
    with torch.inference_mode():
        ours, original = load_in_transformers(out), load_in_transformers(model)
        distance = (ours(ids).logits.log_softmax(-1) - original(ids).logits.log_softmax(-1)).abs()
        assert 0 < distance.max() < 0.2
        assert torch.equal(ours.model.embed_tokens.weight, original.model.embed_tokens.weight)
        change = (ours.lm_head.weight - original.lm_head.weight).abs().max()
        assert 0 < change < original.lm_head.weight.abs().max() / 127


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("head", ["keep", "int8:g64:sym"])
def test_a_quantized_embedding_loads_only_in_our_runtime(tiny, tmp_path, family, head):
    from quantforge.runtime.load import load

    model, out = tiny(family), tmp_path / "out"
    done = quantize(
        model, out, recipe("rtn", embedding="int8:g64:sym", lm_head=head, scales="absmax")
    )
    assert not any(verdict.loads for verdict in done.plan.engines)
    assert any("eval" in verdict.reason for verdict in done.plan.engines)
    names = {tensor.name for tensor in done.plan.tensors}
    assert "lm_head.weight" in names  # on its own from now on
    source = load_file(model / "model.safetensors") if family == "llama-tied" else {}
    if source and head == "keep":
        stored_head = load_file(out / "model.safetensors")["lm_head.weight"]
        assert torch.equal(stored_head, source["model.embed_tokens.weight"])
    with torch.inference_mode():
        ids = torch.arange(24)[None]
        ours, original = load(out).model(ids).logits, load_in_transformers(model)(ids).logits
        assert (ours.log_softmax(-1) - original.log_softmax(-1)).abs().mean() < 1.0


def test_rules_reach_an_unstored_tied_head(tmp_path):
    model = headers.llama(tmp_path / "m", tie_word_embeddings=True)
    assert "lm_head.weight" not in {t.name for t in plan(model).tensors}
    assert "lm_head.weight" not in {t.name for t in plan(model, ignore=("lm_head",)).tensors}
    planned = plan(model, rules=(Rule("lm_head", "int8"),))
    assert schemes(planned, "lm_head") == {"int8:g128:sym:bf16"}
    assert schemes(planned, "embed_tokens") == {"keep"}


def test_a_duplicate_tied_head_is_stored_once(tiny, tmp_path):
    source = copy_model(tiny("llama-tied"), tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    planned = plan(source)
    assert schemes(planned, "lm_head") == {"drop"}
    quantize(source, tmp_path / "out", recipe(scales="absmax"))
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    quantize(source, tmp_path / "head", recipe(scales="absmax", lm_head="int8"))
    assert "lm_head.weight_packed" in load_file(tmp_path / "head" / "model.safetensors")
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="differs"):
        quantize(source, tmp_path / "no", recipe(scales="absmax"))
    assert not (tmp_path / "no").exists()


# ---- other families


def test_an_undeclared_family_allows_rtn_or_derived_declarations(tiny, tmp_path):
    source = copy_model(tiny("llama-wide"), tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "novel"}))
    planned = plan(source)
    assert len(planned.quantized()) == 14
    assert any("'novel' is not declared" in note and "'*.weight'" in note for note in planned.notes)
    for method in ("gptq", "awq", "awq+gptq"):
        derived = plan(source, method=method)  # architectures names a class that is known
        assert any("derived from the code" in n and "LlamaForCausalLM" in n for n in derived.notes)
        assert [e.kind for e in derived.substitutions if e.where == "novel"] == [
            "unknown-model-type"
        ]
    nobody = copy_model(source, tmp_path / "nobody")
    unknown_config = {**config, "model_type": "novel", "architectures": ["NovelForCausalLM"]}
    (nobody / "config.json").write_text(json.dumps(unknown_config))
    with pytest.raises(InputError, match="'novel' is not declared") as caught:
        plan(nobody, method="gptq")
    assert "unknown to transformers" in caught.value.message
    assert "rtn" in caught.value.hint
    quantize(source, tmp_path / "out", recipe())
    quantize(tiny("llama-wide"), tmp_path / "known", recipe())
    ours, declared_tensors = (
        load_file(tmp_path / name / "model.safetensors") for name in ("out", "known")
    )
    assert ours.keys() == declared_tensors.keys()
    with pytest.raises((InputError, RefusedError)) as caught:
        plan(source, lm_head="int8", ignore=("*",))
    assert caught.value.hint


def test_an_undeclared_tied_family_keeps_its_embedding(tmp_path):
    config = {**headers.LLAMA, "model_type": "novel", "tie_word_embeddings": True}
    model = headers.write(tmp_path / "m", config, headers.llama_tensors(config, head=False))
    assert plan(model).quantized()
    with pytest.raises(RefusedError, match="tied"):
        plan(model, embedding="int8")
    with pytest.raises(InputError, match="no head"):
        plan(model, lm_head="int8")


def test_the_vision_tower_of_a_multimodal_model_is_kept(tiny, tmp_path):
    model, out = tiny("gemma3-multimodal"), tmp_path / "out"
    quantize(model, out, recipe("rtn", scheme="int4:g32:sym", scales="absmax"))
    source, written = (load_file(path / "model.safetensors") for path in (model, out))
    foreign = {name for name in source if "vision" in name or "projector" in name}
    assert len(foreign) > 10
    assert all(torch.equal(source[name], written[name]) for name in foreign)
    assert any(name.endswith("q_proj.weight_packed") for name in written)
    ignored = set(json.loads((out / "config.json").read_text())["quantization_config"]["ignore"])
    linears = {
        name.removesuffix(".weight")
        for name in foreign
        if name.endswith(".weight") and source[name].dim() == 2 and "embed" not in name
    }
    assert linears
    assert linears <= ignored


@pytest.mark.parametrize("ignored", [(), ("*.layers.0.*",)])
@pytest.mark.parametrize("head", ["keep", "int4:g64:sym"])
def test_a_multimodal_model_loads_in_transformers(tiny, tmp_path, ignored, head):
    """Module names differ from tensor names, and the configuration must match the modules."""
    from transformers import AutoModelForImageTextToText

    model, out = tiny("gemma3-multimodal"), tmp_path / "out"
    quantize(
        model,
        out,
        recipe("rtn", scheme="int8:g32:sym", scales="absmax", ignore=ignored, lm_head=head),
    )
    ours, original = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for path in (out, model)
    )
    ids = torch.arange(20)[None] + 5
    with torch.inference_mode():
        distance = ours(ids).logits.log_softmax(-1) - original(ids).logits.log_softmax(-1)
    assert 0 < distance.abs().max() < (0.2 if head == "keep" else 1.5)
    state_dict = ours.state_dict()
    for name, value in original.state_dict().items():
        if "vision" in name or "projector" in name:
            assert torch.equal(state_dict[name], value)


def test_plans_note_that_transformers_cannot_load_packed_conv1d(tiny):
    verdicts = {v.engine: v for v in plan(tiny("gpt2"), scheme="int4:g32:sym").engines}
    assert not verdicts["transformers"].loads
    assert "Conv1D" in verdicts["transformers"].reason


@pytest.mark.parametrize("format_key", ["gptq", "awq"])
def test_unpackable_matrices_are_kept_with_their_fused_group(
    models: Callable[..., Path], format_key: str
) -> None:
    model = models("llama", num_key_value_heads=1, head_dim=4)
    scheme = "int4:g16:asym" if format_key == "awq" else "int4:g16:sym"
    planned = plan(model, scheme=scheme, format=format_key)
    unquantized = {tensor.name for tensor in planned.tensors if tensor.action is Action.KEEP}
    for name in ("q_proj", "k_proj", "v_proj"):
        assert f"model.layers.0.self_attn.{name}.weight" in unquantized
    assert schemes(planned, "mlp.gate_proj") == {f"{scheme}:f16"}
    details = {event.where: event.detail for event in planned.substitutions}
    assert "-> kept" in details["model.layers.0.self_attn.q_proj.weight"]
    assert "k_proj" in details["model.layers.0.self_attn.q_proj.weight"]
    assert "% of its linears" in details["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(RefusedError, match="k_proj"):  # asked for by name
        plan(model, scheme=scheme, format=format_key, rules=(Rule("*.k_proj", scheme),))


@pytest.mark.parametrize("size", [2, 4])
def test_results_no_smaller_than_the_source_are_refused(llama: Path, size: int) -> None:
    """One byte per code plus four per scale, against two bytes per weight."""
    with pytest.raises(RefusedError, match="nothing is gained"):
        plan(llama, scheme=f"int8:g{size}:sym:f32")
    assert plan(llama, scheme="int8:g8:sym:f32").output_bytes
