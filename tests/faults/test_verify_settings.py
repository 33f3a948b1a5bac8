"""What contradicts itself beside the weights: told with and without a source."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from quantforge.verification.beside.quantization import contradictions, disagreements
from quantforge.verification.beside.within import check_within
from quantforge.verification.findings import Report
from quantforge.verification.opening import open_artifact
from quantforge.verification.structure import check_structure
from tests import peers
from tests.faults.test_verify_configuration import changed, other_than, places

ARTIFACTS = ("llmc-w4a16-gptq", "llmc-fp8", "gptqmodel-v1", "gptqmodel-awq", "bnb-nf4", "mlx-4bit")
# Notes of the tool that quantized, keys that only tell how it did, and other spellings of the same.
NOTES = {
    "observer", "version", "global_compression_ratio", "quantization_status", "ignore", "targets", "meta",
    "sparsity_config", "transform_config", "llm_int8_enable_fp32_cpu_offload", "bnb_4bit_compute_dtype",
    "llm_int8_skip_modules", "lm_head", "observer_kwargs", "actorder",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    def copied(name: str):
        return shutil.copytree(peers.FIXTURES / name, tmp_path / name)

    return copied


def told(model) -> list[str]:
    report = Report(model)
    artifact = open_artifact(report)
    if artifact is not None:
        check_structure(report, artifact, None)
        check_within(report, artifact)
    unjudged = [report.unjudged] if report.unjudged else []
    return unjudged + [f"{item.where}: {item.detail}" for item in report.findings]


@pytest.mark.parametrize("path", sorted(peers.FIXTURES.glob("*/")), ids=lambda path: path.name)
def test_files_of_other_tools_do_not_contradict_themselves(path):
    assert told(path) == []


@pytest.mark.parametrize("name", ARTIFACTS)
def test_every_key_of_a_quantization_is_obeyed_known_or_found(name, model):
    place = model(name)
    config = json.loads((place / "config.json").read_text())
    quantization = config["quantization_config"]
    unsaid = set()
    for path in places(quantization):
        if "meta" in path:
            continue
        value: Any = quantization
        for key in path:
            value = value[key]
        own = {**config, "quantization_config": changed(quantization, path, other_than(value))}
        if not list(contradictions(own, frozenset())):
            (place / "config.json").write_text(json.dumps(own))
            if not told(place):
                unsaid.add(next(str(key) for key in reversed(path) if isinstance(key, str)))
    assert unsaid <= NOTES
    for value in (1, None):  # newer libraries write keys that state nothing
        own = {**config, "quantization_config": {**quantization, "added_by_nobody": value}}
        found = list(contradictions(own, frozenset()))  # of MLX there is a second copy
        assert bool(found) == (value is not None or "quantization" in config)


def document(place, name: str, **values: Any) -> None:
    found = json.loads((place / name).read_text()) if (place / name).exists() else {}
    (place / name).write_text(json.dumps({**found, **values}))


PLANTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an id beyond the vocabulary": ("config.json", {"eos_token_id": 100}, "100 rows"),
    "an end beyond the vocabulary": ("generation_config.json", {"eos_token_id": [1, 5000]}, "5000"),
    "another end": ("tokenizer_config.json", {"eos_token": "A"}, "end at"),
    "a token that is none": ("tokenizer_config.json", {"bos_token": "<nothing>"}, "no token"),
    "a map that names no token": (
        "special_tokens_map.json",
        {"eos_token": "<nothing>"},
        "<nothing>",
    ),
    "a class of another family": ("config.json", {"architectures": ["GPT2LMHeadModel"]}, "gpt2"),
    "MLX's key": ("config.json", {"quantization": {"bits": 3, "group_size": 32}}, "quantization ="),
    "a second description": ("quantize_config.json", {"bits": 8}, "bits"),
    "a third description": ("quant_config.json", {"w_bit": 8, "quant_method": "gptq"}, "bits"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_contradicts_the_rest_is_found(name, model):
    place = model("gptqmodel-v1")
    file, values, part = PLANTED[name]
    document(place, file, **values)
    found = told(place)
    assert any(item.startswith(file) and part in item for item in found), found
    assert "".join(found).isprintable()


def test_markers_of_a_template_are_tokens(model):
    place = model("llmc-w4a16-gptq")
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    added = [{**tokenizer["added_tokens"][0], "id": 99, "content": "<|user|>"}]
    tokenizer["added_tokens"] += added
    tokenizer["model"]["vocab"] = {k: v for k, v in tokenizer["model"]["vocab"].items() if v != 99}
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:1]
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (place / "chat_template.jinja").write_text("<|user|>{{ x }}")
    assert told(place) == []
    (place / "chat_template.jinja").write_text("<|user|>{{ x }}<|usor|>")
    assert any("<|usor|>" in item for item in told(place))


def test_a_second_description_has_to_say_the_same():
    config = {
        "quantization_config": {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
        }
    }
    older = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    assert list(disagreements(older, config)) == []
    assert list(disagreements({**older, "zero_point": False}, config))
    assert list(disagreements({**older, "x": 1}, config))
    config["quantization_config"]["quant_method"] = ["x"]
    assert list(contradictions(config, frozenset())) == []


@pytest.mark.parametrize(
    "values",
    [{"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, {"sparsity_config": {"format": "sparse"}},
     {"format": "int-quantized"},
     {"format": "mixed-precision", "config_groups": {"group_0": {"targets": ["x"]}}},
     {"config_groups": {"group_0": {"output_activations": {"num_bits": 8}}}}],
)  # fmt: skip
def test_what_would_be_done_in_addition_is_found(values):
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                      "config_groups": {"group_0": {"format": "pack-quantized"}}}}  # fmt: skip
    assert list(contradictions(config, frozenset())) == []
    config["quantization_config"].update(values)
    assert list(contradictions(config, frozenset()))
