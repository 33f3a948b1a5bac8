"""GGUF files of Gemma 4 and Llama 4: read, computed with, and verified against their sources."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantforge import api
from quantforge.errors import InputError, NotReadError, RefusedError
from quantforge.files.reader import Checkpoint
from quantforge.formats.decoded import decode_checkpoint
from quantforge.formats.gguf.container import MetadataValue, ValueType
from quantforge.formats.gguf.families import family_of
from quantforge.formats.gguf.parsing import GgufFile, read_gguf
from quantforge.formats.gguf.source import _stored_as, config_from_keys, open_gguf
from quantforge.formats.open_model import open_model
from quantforge.recipe import Recipe
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests import gguf_models
from tests.gguf_exports import export
from tests.runs import run_command
from tests.thorough import mark_others_thorough

NAMES = sorted(name for name in gguf_models.FAMILIES if name.startswith(("gemma4", "llama4")))
IDS = [5, 9, 41, 77, 160, 23, 11, 200, 300, 7, 19, 55, 93, 111, 64, 222, 31, 14, 250, 199]


def with_weights(model: Any, source: Checkpoint, *, transposed: bool) -> Any:
    """Load the weights of a checkpoint with unstacked experts into a transformers model."""
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")
    plain, experts = dict[str, torch.Tensor](), dict[tuple[str, str], dict[int, torch.Tensor]]()
    for name in source.entries:
        value = source.read(name).float()
        if match := expert.fullmatch(name):
            turned = value.T if transposed else value
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = turned
        else:
            plain[name] = value
    for module in {module for module, _ in experts}:
        parts = {
            word: torch.stack([value for _, value in sorted(experts[module, word].items())])
            for word in ("gate", "up", "down")
        }
        both = [parts["gate"], parts["up"]]
        plain[f"{module}.gate_up_proj"] = torch.cat(both, 2 if transposed else 1)
        plain[f"{module}.down_proj"] = parts["down"]
    missing, unknown = model.load_state_dict(plain, strict=False)
    assert not unknown
    assert all(name == "lm_head.weight" or "inv_freq" in name for name in missing)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", mark_others_thorough(NAMES, "gemma4", "gemma4-moe", "llama4"))
@pytest.mark.parametrize("gguf_type", ["Q4_0", *mark_others_thorough(["F16", "Q6_K"])])
def test_loaded_gguf_files_compute_the_logits_of_transformers(
    name: str, gguf_type: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = models(name)
    file = export(source, tmp_path / "x.gguf", gguf_type)
    peer = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        before = peer(ids).logits
        expected = with_weights(
            peer, decode_checkpoint(open_model(file)), transposed=name.startswith("llama4")
        )(ids).logits
        actual = load(file).model(ids).logits
    assert (expected - before).abs().max() > (1e-5 if gguf_type == "F16" else 1e-2)
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2e-4)


def copy_with_scaled_tensor(file: Path, tensor: str) -> Path:
    """Copy a file without its manifest, with the first quarter of a tensor scaled."""
    entry, data = read_gguf(file).tensors[tensor], bytearray(file.read_bytes())
    size = max(4, (entry.end - entry.start) // 16 * 4)
    part = slice(entry.start, entry.start + size)
    data[part] = (torch.frombuffer(data[part], dtype=torch.float32) * 1.25).numpy().tobytes()
    bad = file.with_name("bad.gguf")
    bad.write_bytes(data)
    return bad


@pytest.mark.parametrize(("name", "tensors"), [
    ("gemma4", ("blk.1.layer_output_scale.weight", "per_layer_token_embd.weight", "blk.2.inp_gate.weight",
                "blk.1.attn_k.weight", "blk.3.ffn_up.weight", "rope_freqs.weight")),
    ("gemma4-moe", ("blk.1.ffn_down_exps.scale", "blk.0.ffn_gate_inp.scale", "blk.2.ffn_up_exps.weight",
                    "blk.1.attn_k.weight")),
    ("llama4", ("blk.1.ffn_gate_exps.weight", "blk.3.ffn_down_exps.weight", "blk.0.attn_q.weight",
                "blk.1.ffn_gate_inp.weight", "blk.3.ffn_up_shexp.weight")),
])  # fmt: skip
def test_verify_finds_a_scaled_tensor_in_a_gguf_file(
    name: str, tensors: tuple[str, ...], models: Callable[[str], Path], tmp_path: Path
) -> None:
    source = models(name)
    file = export(source, tmp_path / "x.gguf", "F32")
    sound = verify(file, source)
    assert sound.findings == []
    assert sound.unsupported == ""
    for tensor in tensors:
        findings = verify(copy_with_scaled_tensor(file, tensor), source, forward=False).findings
        assert findings, tensor
        assert all(item.check != "manifest" for item in findings)


def test_verify_and_eval_accept_llama4_gguf_files(
    models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = models("llama4")
    file = export(source, tmp_path / "x.gguf", "Q8_0")
    assert run_command(capsys, "verify", file, "--source", source).code == 0
    result = run_command(
        capsys, "eval", source, file, "--windows", 2, "--length", 32, "--no-speed", "--max-kl", 0.05
    )
    assert result.code == 0


def with_changed_keys(file: GgufFile, **values: Any) -> GgufFile:
    """Return the file with changed architecture keys; None removes a key."""
    arch = file.value("general.architecture", str)
    metadata = dict(file.metadata)
    for key, value in values.items():
        full_key = f"{arch}.{key.replace('__', '.')}"
        old = metadata.pop(full_key, MetadataValue(ValueType.U32, 0))
        if value is not None:
            value_type = ValueType.ARRAY if isinstance(value, list) else old.type
            metadata[full_key] = MetadataValue(value_type, value, old.element_type)
    return GgufFile(file.files, metadata, file.tensors)


@pytest.mark.parametrize(("name", "values", "error_type", "message"), [
    ("gemma4", {"attention__sliding_window_pattern": [True] * 4}, NotReadError, "sliding_window_pattern"),
    ("gemma4", {"attention__sliding_window_pattern": [False] * 4}, NotReadError, "sliding_window_pattern"),
    ("gemma4", {"attention__sliding_window_pattern": [True] * 3}, InputError, "sliding_window_pattern"),
    ("gemma4", {"attention__shared_kv_layers": 4}, NotReadError, "shared_kv_layers"),
    ("gemma4", {"attention__head_count_kv": [2, 2, 1, 2]}, NotReadError, "head_count_kv"),
    ("gemma4", {"feed_forward_length": [128, 128, 256, 128]}, NotReadError, "feed_forward_length"),
    ("gemma4", {"attention__key_length_swa": None}, InputError, "key_length_swa"),
    ("llama4", {"attention__sliding_window": 0}, NotReadError, "sliding_window = 0"),
    ("llama4", {"interleave_moe_layer_step": None}, InputError, "interleave_moe_layer_step"),
    ("llama4", {"expert_count": None}, InputError, "expert_count"),
])  # fmt: skip
def test_gguf_keys_without_a_configuration_are_refused_by_name(
    name: str, values: dict[str, Any], error_type: type[Exception], message: str,
    models: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    file = read_gguf(export(models(name), tmp_path / "x.gguf", "F32"))
    with pytest.raises(error_type, match=message):
        config_from_keys(with_changed_keys(file, **values))


def test_omitted_or_scalar_keys_of_other_converters_are_read(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    file = read_gguf(export(models("gemma4-equal"), tmp_path / "x.gguf", "F32"))
    own = config_from_keys(file)
    assert own["final_logit_softcapping"] == 30.0
    other = with_changed_keys(file, feed_forward_length=128, attention__shared_kv_layers=None, rope__freq_base_swa=None,
                    embedding_length_per_layer_input=None, final_logit_softcapping=None)  # fmt: skip
    assert config_from_keys(other) == own
    assert (
        config_from_keys(with_changed_keys(file, final_logit_softcapping=0.0))[
            "final_logit_softcapping"
        ]
        is None
    )


def test_llama4_rope_parameters_round_trip_through_gguf(
    models: Callable[..., Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    model = models("llama4", rope_parameters=rope)
    assert (
        config_from_keys(read_gguf(export(model, tmp_path / "x.gguf", "F32")))["rope_parameters"]
        == rope
    )


@pytest.mark.parametrize("gguf_type", ["F32", *mark_others_thorough(["Q8_0"])])
def test_fused_gate_up_expert_tensors_are_split(
    gguf_type: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp's converter writes the experts of Gemma 4 like this."""
    pytest.importorskip("xllamacpp")
    from quantforge.evaluation.llama_cpp import LlamaCpp

    first = export(models("gemma4-moe"), tmp_path / "x.gguf", gguf_type)
    second = copy_with_fused_experts(first, tmp_path / "y.gguf")
    assert "blk.0.ffn_gate_up_exps.weight" in read_gguf(second).tensors
    separate, other = open_gguf(first), open_gguf(second)
    assert separate.entries.keys() == other.entries.keys()
    assert all(torch.equal(separate.read(name), other.read(name)) for name in separate.entries)
    same = [LlamaCpp(file, 64).top(IDS, 5) for file in (first, second)]
    assert same[0].keys() == same[1].keys()
    assert all(abs(value - same[1][token]) < 1e-3 for token, value in same[0].items())
    assert verify(second, models("gemma4-moe"), forward=False).findings == []


@pytest.mark.parametrize("shape", [(8, 64), (3, 64, 64), (16, 64, 64), (4, 65, 64)])
def test_expert_stacks_of_unexpected_shape_are_refused(
    shape: tuple[int, ...], models: Callable[[str], Path], tmp_path: Path
) -> None:
    path = export(models("gemma4-moe"), tmp_path / "x.gguf", "F32")
    entry = read_gguf(path).tensors["blk.0.ffn_up_exps.weight"]
    config = config_from_keys(read_gguf(path))
    names = tuple(f"{part}{number}" for number in range(4) for part in ("gate", "up"))
    with pytest.raises(InputError, match="8 matrices of experts"):
        _stored_as(replace(entry, shape=shape), names, family_of(config), config)


def copy_with_fused_experts(file: Path, out: Path) -> Path:
    """Copy a file with gguf-py, with gate and up projections of experts in one tensor."""
    import gguf

    read = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, "gemma4")
    for key, field in read.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    data = {tensor.name: tensor for tensor in read.tensors}
    for name, tensor in data.items():
        if "ffn_up_exps" in name:
            continue
        gates, value = "ffn_gate_exps" in name, tensor.data
        if gates:
            value = np.concatenate([value, data[name.replace("gate", "up")].data], 1)
        new_name = name.replace("gate", "gate_up") if gates else name
        writer.add_tensor(new_name, value, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize("gguf_type", ["Q4_0", "F16"])
@pytest.mark.parametrize("name", ["gemma4-moe", "llama4"])
def test_decoding_experts_one_by_one_is_refused_for_stacked_families(
    name: str, gguf_type: str, tmp_path: Path
) -> None:
    """transformers would initialize such experts randomly, with only a warning."""
    model = gguf_models.make(name, tmp_path / "m")
    export(model, tmp_path / "q.gguf", gguf_type)
    recipe = Recipe(format="plain")
    out = tmp_path / "out"
    with pytest.raises(RefusedError, match="experts in one tensor"):
        api.export(str(tmp_path / "q.gguf"), recipe, out, Settings())
    assert not out.exists()
