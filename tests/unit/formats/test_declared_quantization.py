"""Declarations of a quantization: left over, in unusual places, missing, or contradicting the tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.errors import InputError
from quantforge.formats.open_model import open_model
from quantforge.runtime.load import load
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import quantize, recipe
from tests.thorough import parametrize_each_value

KEY = "quantization_config"
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NAMES = ("quantize_config.json", "quant_config.json", "quantforge.manifest.json")
Changed = Callable[[dict[str, Any]], object]
WEIGHTS = "model.safetensors"


def copy_with_config(source: Path, directory: Path, change: Changed = lambda _: None) -> Path:
    """Copy a model without manifest and quantization files, with a changed configuration."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns(*NAMES))
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def change_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a single-file model."""
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    return model


@pytest.fixture(scope="module")
def packed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from a format to a tiny model in it."""
    created: dict[str, Path] = {}

    def model(format_key: str) -> Path:
        if format_key not in created:
            created[format_key] = tmp_path_factory.mktemp(format_key) / "m"
            requested_recipe = recipe(
                format=format_key, scales="absmax", scheme=SCHEMES[format_key]
            )
            quantize(tiny("llama-wide"), created[format_key], requested_recipe)
        return created[format_key]

    return model


SCHEMES = {
    "compressed-tensors": "int4:g32:sym", "gptq": "int4:g32:sym", "awq": "int4:g32:asym", "mlx": "int4:g32:min",
    "bnb": "nf4:g64:sym", "fp8": "FP8_BLOCK",
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "left"),
    [
        (KEY, BNB),
        (KEY, {"quant_method": "gptq", "bits": 4, "group_size": 128}),
        (KEY, {"quant_method": "compressed-tensors", "config_groups": {}}),
        (KEY, {"quant_method": "nobody-knows"}),
        (KEY, {}),
        (KEY, "none"),
        ("compression_config", {"quant_method": "compressed-tensors"}),
        ("quantization", {"bits": 4, "group_size": 64}),
    ],
)
def test_declarations_without_packed_tensors_are_ignored_with_a_note(tiny, tmp_path, key, left):
    model = copy_with_config(
        tiny("llama"), tmp_path / "m", lambda config: config.update({key: left})
    )
    inspection = api.inspect(model)
    assert (inspection.format, inspection.bits_per_weight) == (
        "plain",
        api.inspect(tiny("llama")).bits_per_weight,
    )
    assert f"{key}" in inspection.notes[0]
    assert "left over" in inspection.notes[0]
    assert open_model(model).config == open_model(tiny("llama")).config


def test_a_null_quantization_config_declares_nothing(tiny, tmp_path):
    model = copy_with_config(
        tiny("llama"), tmp_path / "m", lambda config: config.update({KEY: None})
    )
    assert api.inspect(model).notes == ()
    assert open_model(model).config == open_model(tiny("llama")).config


@pytest.mark.parametrize("nested", [False, True])
def test_leftover_declarations_are_not_written_to_results(tiny, tmp_path, nested):
    def change(config: dict[str, Any]) -> None:
        config.update({"vision_config": {KEY: BNB}} if nested else {KEY: BNB})

    model = copy_with_config(tiny("llama"), tmp_path / "m", change)
    key_path = f"vision_config.{KEY}" if nested else KEY
    outcome = quantize(model, tmp_path / "q", recipe(scales="absmax", scheme="int4:g32:sym"))
    assert any(key_path in note and "left over" in note for note in outcome.plan.notes)
    assert "bitsandbytes" not in (tmp_path / "q" / "config.json").read_text()
    assert verify(tmp_path / "q", model).findings == []
    moved = api.export(model, None, tmp_path / "plain", format="plain")
    assert any(key_path in note for note in moved.notes)
    assert KEY not in (tmp_path / "plain" / "config.json").read_text()
    file = tmp_path / "m.gguf"
    api.export(model, None, file, type="Q8_0")
    assert api.inspect(file).schemes["q8_0"] > 0


def autogptq(config: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration of a GPTQ model as AutoGPTQ wrote it in 2023."""
    declaration = config.pop(KEY)
    settings = {key: declaration[key] for key in ("bits", "group_size", "desc_act", "sym")}
    return {**settings, "damp_percent": 0.01, "static_groups": False, "true_sequential": True,
            "model_name_or_path": None, "model_file_base_name": "model"}  # fmt: skip


def autoawq(config: dict[str, Any]) -> dict[str, Any]:
    """Return the declaration of an AWQ model as AutoAWQ wrote it in 2023."""
    declaration = config.pop(KEY)
    return {
        "zero_point": declaration["zero_point"],
        "q_group_size": declaration["group_size"],
        "w_bit": 4,
        "version": "GEMM",
    }


@pytest.mark.parametrize(
    ("format_key", "file", "written"),
    [("gptq", "quantize_config.json", autogptq), ("awq", "quant_config.json", autoawq),
     ("awq", "quantize_config.json", autoawq)],
)  # fmt: skip
def test_side_files_declare_the_quantization(packed, tmp_path, format_key, file, written):
    declared: dict[str, Any] = {}
    model = copy_with_config(
        packed(format_key), tmp_path / "m", lambda config: declared.update(written(config))
    )
    (model / file).write_text(json.dumps(declared))
    inspection = api.inspect(model)
    assert (inspection.format, inspection.schemes) == (
        format_key,
        api.inspect(packed(format_key)).schemes,
    )
    assert file in inspection.notes[0]
    api.export(model, None, tmp_path / "plain", format="plain", allow_inexact=True)
    api.export(packed(format_key), None, tmp_path / "same", format="plain", allow_inexact=True)
    assert (tmp_path / "plain" / WEIGHTS).read_bytes() == (tmp_path / "same" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("key_path", "within"),
    [
        ("compression_config", lambda inspection: {"compression_config": inspection}),
        ("compression_config", lambda inspection: {"compression_config": {KEY: inspection, "sparsity_config": {}}}),
        (f"text_config.{KEY}", lambda inspection: {"text_config": {KEY: inspection}}),
    ],
)  # fmt: skip
def test_other_config_keys_declare_the_quantization(packed, tmp_path, key_path, within):
    model = copy_with_config(packed("compressed-tensors"), tmp_path / "m",
                   lambda config: config.update(within(config.pop(KEY))))  # fmt: skip
    if key_path != "compression_config":  # a tower has to be whole
        config = json.loads((model / "config.json").read_text())
        config["text_config"] = {**config, **config["text_config"]}
        (model / "config.json").write_text(json.dumps(config))
    inspection = api.inspect(model)
    assert (inspection.format, inspection.schemes) == (
        "compressed-tensors", api.inspect(packed("compressed-tensors")).schemes)  # fmt: skip
    assert key_path in inspection.notes[0]
    api.export(model, None, tmp_path / "gptq", format="gptq")
    assert (
        set(json.loads((tmp_path / "gptq" / "config.json").read_text())) & {"compression_config"}
        == set()
    )


def test_old_mlx_files_with_one_declaration_are_read(packed, tmp_path):
    model = copy_with_config(packed("mlx"), tmp_path / "m", lambda config: config.pop(KEY))
    assert api.inspect(model).schemes == api.inspect(packed("mlx")).schemes
    with pytest.raises(InputError, match="already quantized"):
        api.plan(model, recipe())
    api.export(model, None, tmp_path / "plain", format="plain", allow_inexact=True)
    assert "quantization" not in (tmp_path / "plain" / "config.json").read_text()


def test_contradicting_declarations_are_refused(packed, tmp_path):
    declared: dict[str, Any] = {}
    model = copy_with_config(
        packed("gptq"), tmp_path / "m", lambda config: declared.update(autogptq(config))
    )
    (model / "quantize_config.json").write_text(json.dumps(declared))
    (model / "quantization_config.json").write_text(json.dumps({**declared, "sym": False}))
    with pytest.raises(InputError, match="declare different quantizations"):
        api.inspect(model)


@parametrize_each_value(
    (
        "format_key, tool",
        [
            ("compressed-tensors", "llm-compressor"),
            ("gptq", "GPTQModel"),
            ("awq", "AutoAWQ"),
            ("mlx", "mlx-lm"),
            ("bnb", "bitsandbytes"),
            ("fp8", "DeepSeek"),
        ],
    ),
    ("left", [None, {}]),
)
def test_undeclared_packed_tensors_are_refused_by_name(packed, tmp_path, format_key, tool, left):
    def change(config: dict[str, Any]) -> None:
        config.pop("quantization", None)
        config.pop(KEY) if left is None else config.update({KEY: left})

    model = copy_with_config(packed(format_key), tmp_path / "m", change)
    for read in (
        api.inspect,
        lambda path: api.export(path, None, tmp_path / "o", format="plain"),
    ):
        with pytest.raises(InputError, match=tool) as caught:
            read(model)
        assert "model.layers.0." in caught.value.message
    assert not (tmp_path / "o").exists()


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


NORM = "model.layers.1.input_layernorm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@parametrize_each_value(
    ("format_key", ["plain", "compressed-tensors", "gptq", "mlx"]),
    (
        "change, words",
        [
            (drop(NORM), f"{NORM}: missing"),
            (
                lambda tensors: tensors.update(further=torch.ones(4)),
                "further: not a tensor of llama",
            ),
            (lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()}), f"{NORM}: shape"),
        ],
    ),
)
def test_export_refuses_missing_extra_or_misshapen_tensors(
    packed, tmp_path, format_key, change, words
):
    model = change_tensors(copy_with_config(packed("compressed-tensors"), tmp_path / "m"), change)
    with pytest.raises(InputError, match=words):
        api.export(model, None, tmp_path / "o", format=format_key, allow_inexact=True)
    with pytest.raises(InputError, match=words):
        api.inspect(model)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop(UP), f"{UP}: missing"),
        (lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)}), f"packed .F8_E4M3: {UP}"),
        (lambda t: t.update({UP: t[UP][:, :-8].clone()}), f"{UP}: shape"),
    ],
)
def test_plain_export_refuses_missing_or_misshapen_tensors(tiny, tmp_path, change, words):
    model = change_tensors(copy_with_config(tiny("llama-wide"), tmp_path / "m"), change)
    with pytest.raises(InputError, match=words):
        api.export(model, None, tmp_path / "o", format="plain")
    with pytest.raises(InputError, match=words):
        api.inspect(model)


def test_export_refuses_a_tied_head_unlike_the_embedding(tiny, tmp_path):
    model = copy_with_config(
        tiny("llama"), tmp_path / "m", lambda config: config.update(tie_word_embeddings=True)
    )
    api.inspect(model)
    with pytest.raises(InputError, match="tie_word_embeddings"):
        api.export(model, None, tmp_path / "o", format="plain")


def test_packed_tensors_of_undeclared_families_are_not_plain(tiny, tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    changes = {"model_type": "unheard", KEY: declared}
    model = copy_with_config(
        tiny("llama-wide"), tmp_path / "m", lambda config: config.update(changes)
    )
    change_tensors(model, lambda t: t.update({f"{UP}s": t[UP].to(torch.int32)}))
    with pytest.raises(InputError, match=r"up_proj.weights: packed \(I32\)"):
        api.export(model, None, tmp_path / "o", format="plain")


DOWN = "model.layers.1.mlp.down_proj"


def with_plain_weights(format_key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    """Return a change that replaces the packed tensors of a module with 16-bit weights."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"{DOWN}.")]:
            tensors.pop(name)
        tensors[f"{DOWN}.weight"] = torch.ones(
            64 if format_key == "llama" else 128, 256, dtype=torch.bfloat16
        )

    return change


@pytest.mark.parametrize("format_key", ["compressed-tensors", "gptq", "awq", "bnb", "fp8"])
def test_unpacked_modules_must_be_listed(packed, tmp_path, format_key):
    model = change_tensors(
        copy_with_config(packed(format_key), tmp_path / "m"), with_plain_weights(format_key)
    )
    for read in (
        api.inspect,
        load,
        lambda path: api.export(path, None, tmp_path / "o", format="plain"),
    ):
        with pytest.raises(
            InputError, match=f"says that {DOWN} is quantized, but 1 such modules are not packed"
        ):
            read(model)
    config = json.loads((model / "config.json").read_text())
    listed = {"compressed-tensors": "ignore", "bnb": "llm_int8_skip_modules"}.get(
        format_key, "modules_to_not_convert"
    )
    if format_key == "gptq":
        config[KEY]["dynamic"] = {f"-:{DOWN}": {}}
    else:
        config[KEY][listed] = [*(config[KEY].get(listed) or []), DOWN]
    (model / "config.json").write_text(json.dumps(config))
    assert api.inspect(model).format == format_key


def test_packed_modules_must_not_be_listed(packed, tmp_path):
    model = copy_with_config(
        packed("compressed-tensors"),
        tmp_path / "m",
        lambda config: config[KEY]["ignore"].append(DOWN),
    )
    for read in (
        api.inspect,
        load,
        lambda path: api.export(path, None, tmp_path / "o", format="plain"),
    ):
        with pytest.raises(InputError, match=f"says that {DOWN} is not quantized"):
            read(model)


def test_bits_and_groups_contradicting_the_shapes_are_refused(packed, tmp_path):
    """2-bit codes in groups of 64 would fit the same words as 4-bit codes in groups of 32."""

    def change(config: dict[str, Any]) -> None:
        for key in ("quantization", KEY):
            config[key] |= {"bits": 2, "group_size": 64}

    model = copy_with_config(packed("mlx"), tmp_path / "m", change)
    with pytest.raises(InputError, match="shape"):
        api.inspect(model)


@pytest.mark.parametrize("value", [0, 1])
def test_zero_biases_of_old_gptq_files_are_dropped(packed, tmp_path, value):
    names = [name for name in load_file(packed("gptq") / WEIGHTS) if name.endswith(".qweight")]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            rows = tensors[name].shape[1]
            bias = torch.full((rows,), value, dtype=torch.float16)
            tensors[f"{name.removesuffix('.qweight')}.bias"] = bias

    model = change_tensors(copy_with_config(packed("gptq"), tmp_path / "m"), change)
    if value:
        with pytest.raises(InputError, match="bias: not a tensor of llama"):
            api.inspect(model)
        return
    assert f"{len(names)} biases of zeros" in api.inspect(model).notes[0]
    api.export(model, None, tmp_path / "plain", format="plain")
    api.export(packed("gptq"), None, tmp_path / "same", format="plain")
    assert (tmp_path / "plain" / WEIGHTS).read_bytes() == (tmp_path / "same" / WEIGHTS).read_bytes()
