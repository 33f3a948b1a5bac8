"""Low-precision sources decode like in transformers and can be quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts import manifest
from quantforge.errors import InputError
from quantforge.files.reader import Checkpoint
from quantforge.formats import detect_format
from quantforge.formats.decoded import decode_checkpoint, quantized_weight_readers
from quantforge.formats.open_model import open_model, open_plain_source
from quantforge.runtime.load import load
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests.conftest import Tiny
from tests.runs import quantize, recipe

E4M3 = torch.float8_e4m3fn


def round_to_fp8_tiles(weight: Tensor, side: int = 128) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes and tile scales; the last tiles may be smaller."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // side) * side, -(-columns // side) * side)
    padded[:rows, :columns] = weight.float()
    tiles = padded.view(len(padded) // side, side, -1, side)
    scales = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return codes.to(E4M3).contiguous(), scales


def write_model(
    model: Path, directory: Path, tensors: Mapping[str, Tensor], quantization: Mapping[str, object]
) -> Path:
    """Write a model with other tensors and a ``quantization_config``."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load_tensors(model: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_fp8_model(model: Path, directory: Path, side: int = 128) -> Path:
    """Write a model in the fp8 layout of DeepSeek."""
    tensors = {}
    for name, value in load_tensors(model).items():
        if name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = round_to_fp8_tiles(value, side)
        else:
            tensors[name] = value
    words = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [side] * 2}
    return write_model(model, directory, tensors, words)


def check_row_slices(source: Checkpoint, name: str) -> None:
    """Check that any range of rows equals the slice of the full tensor."""
    weight = source.read(name)
    rows = len(weight)
    for first, last in ((0, 1), (rows - 1, rows), (rows // 3, rows - rows // 4), (5, 5)):
        assert torch.equal(source.read_rows(name, first, last), weight[first:last]), name


@pytest.mark.parametrize("family", ["llama-wide", "llama", "qwen3"])
def test_fp8_tiles_are_decoded_like_transformers(tiny: Tiny, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    model = write_fp8_model(tiny(family), tmp_path / "m")
    source = open_plain_source(model)
    config = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=config
    ).state_dict()
    names = [name for name in source.entries if name.endswith("proj.weight")]
    assert len(names) >= 14
    for name in names:
        assert source.entries[name].dtype == "BF16"
        assert torch.equal(source.read(name).bfloat16(), theirs[name]), name
        check_row_slices(source, name)
    assert source.source_notes == {"precision": "fp8 (128x128 tiles)"}
    assert "quantization_config" not in source.config


def test_an_fp8_source_is_quantized_verified_and_evaluated(tiny: Tiny, tmp_path: Path) -> None:
    model = write_fp8_model(tiny("llama-wide"), tmp_path / "m")
    requested_recipe = recipe("gptq", scheme="int4:g32:sym")
    plan = api.plan(model, requested_recipe)
    assert "source precision: fp8 (128x128 tiles)" in plan.notes
    out = tmp_path / "q"
    done = quantize(model, out, requested_recipe)
    assert done.plan.tensors == plan.tensors
    assert {event.kind for event in done.events} <= {"few-calibration-tokens"}
    document = manifest.read_manifest(out)
    assert document is not None
    assert document["source"]["precision"] == "fp8 (128x128 tiles)"
    assert verify(out, model).findings == []
    assert reproduce(out, model, Settings()).differing == ()
    evaluation = api.evaluate(model, [out], text="builtin", windows=2, length=32, speed=False)
    assert [row["scheme"] for row in evaluation.rows] == [
        "fp8 (128x128 tiles)",
        "int4:g32:sym:bf16",
    ]
    assert 0 < evaluation.rows[1]["kl_mean"] < 0.2


def test_fp8_sources_quantize_like_their_decoded_weights(tiny: Tiny, tmp_path: Path) -> None:
    """The packed bytes equal those from a float32 copy of the decoded weights."""
    model = write_fp8_model(tiny("llama"), tmp_path / "m")
    source = open_plain_source(model)
    plain = shutil.copytree(
        tiny("llama"), tmp_path / "p", ignore=shutil.ignore_patterns("*.safetensors*")
    )
    save_file({name: source.read(name) for name in source.entries}, plain / "model.safetensors")
    for method in ("rtn", "gptq"):
        requested_recipe = recipe(method, scheme="int4:g32:sym:f16")
        results = [tmp_path / f"{method}-{source_path.name}" for source_path in (model, plain)]
        for source_path, out in zip((model, plain), results, strict=True):
            quantize(source_path, out, requested_recipe)
        first, second = map(load_tensors, results)
        packed = [name for name in first if name.endswith(("weight_packed", "weight_scale"))]
        assert len(packed) == 2 * 21
        assert all(torch.equal(first[name], second[name]) for name in packed)
        norm = "model.norm.weight"
        assert first[norm].dtype == torch.bfloat16
        assert torch.equal(first[norm], second[norm].bfloat16())


def test_unconverted_modules_of_fp8_sources_are_read_unchanged(tiny: Tiny, tmp_path: Path) -> None:
    model = write_fp8_model(tiny("llama-wide"), tmp_path / "m")
    tensors, plain_weight = load_tensors(model), "model.layers.1.mlp.down_proj.weight"
    source = load_tensors(tiny("llama-wide"))[plain_weight]
    tensors[plain_weight] = source
    del tensors[f"{plain_weight}_scale_inv"]
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    config["modules_to_not_convert"] = [plain_weight.removesuffix(".weight"), "lm_head"]
    mixed = write_model(model, tmp_path / "mixed", tensors, config)
    assert torch.equal(open_plain_source(mixed).read(plain_weight), source)
    assert api.plan(mixed, recipe(scheme="int4:g32:sym")).quantized()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "without model.layers.0.mlp.up_proj.weight_scale_inv"),
        ("shape", r"\[1, 1\], weight_block_size and the weight ask for \[2, 1\]"),
        ("method", "no reader for quant_method 'fp9'"),
        ("nan", "scale nan of row 0, group 0"),
        ("block", "weight_block_size 'all'"),
    ],
)
def test_undecodable_fp8_sources_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, damage: str, words: str
) -> None:
    model = write_fp8_model(tiny("llama-wide"), tmp_path / "m")
    tensors, name = load_tensors(model), "model.layers.0.mlp.up_proj.weight_scale_inv"
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][:1]
    elif damage == "nan":
        tensors[name][0, 0] = torch.nan
    elif damage == "method":
        config["quant_method"] = "fp9"
    else:
        config["weight_block_size"] = "all"
    bad = write_model(model, tmp_path / "bad", tensors, config)
    with pytest.raises(InputError, match=words):
        quantize(bad, tmp_path / "q", recipe(scheme="int4:g32:sym"))
    assert not (tmp_path / "q").exists()


def test_our_own_fp8_results_are_no_source(tiny: Tiny, tmp_path: Path) -> None:
    quantize(tiny("llama-wide"), tmp_path / "q", recipe(scheme="FP8_BLOCK"))
    assert open_plain_source(tmp_path / "q") == open_model(tmp_path / "q")
    with pytest.raises(InputError, match="already quantized"):
        quantize(tmp_path / "q", tmp_path / "again", recipe(bits=4))


LUT = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LUT = torch.cat((LUT, -LUT))


def write_mxfp4_model(model: Path, directory: Path) -> Path:
    """Write a model in the layout of gpt-oss: mxfp4 experts, everything else in bfloat16."""
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for name, value in load_tensors(model).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(
                torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(119, 124, shape, generator=generator).to(
                torch.uint8
            )
        else:
            tensors[name] = value
    words = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    return write_model(model, directory, tensors, words)


def test_mxfp4_experts_are_decoded_like_transformers(tiny: Tiny, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = write_mxfp4_model(tiny("gpt-oss"), tmp_path / "m")
    source = open_plain_source(model)
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
    state_dict = theirs.state_dict()
    names = [name for name in source.entries if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(names) == 2 * 3
    for name in names:
        assert source.entries[name].shape == tuple(state_dict[name].shape)
        assert torch.equal(source.read(name).bfloat16(), state_dict[name]), name
        assert torch.equal(source.read_rows(name, 1, 3), source.read(name)[1:3])
    assert source.source_notes == {"precision": "mxfp4"}
    ids = torch.arange(24).view(1, -1)
    with torch.no_grad():
        expected = theirs.float()(ids).logits
        logits = load(source).model(ids).logits
        again = load(model).model(ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, again)
    out = tmp_path / "q"
    done = quantize(model, out, recipe("rtn", scheme="int8:g32:sym"))
    assert "source precision: mxfp4" in done.plan.notes
    assert verify(out, model).findings == []
    keep_experts = recipe("rtn", scheme="int8:g32:sym", ignore=("*experts*",))
    quantize(model, tmp_path / "kept", keep_experts)
    assert torch.equal(load_tensors(tmp_path / "kept")[names[0]], state_dict[names[0]])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("exponent", r"exponent 255 of expert 2, row 3, group 0 is no number"),
        ("scales", r"gate_up_proj_scales: missing"),
        ("blocks", r"gate_up_proj_blocks: missing"),
        ("shape", r"gate_up_proj_scales: U8 \[4, 256, 1\]"),
        ("twice", r"gate_up_proj: stored as it is, and as .*_blocks and .*_scales"),
        ("experts", r"gate_up_proj: shape \[3, 64, 256\], the config asks for \[4, 64, 256\]"),
    ],
)
def test_undecodable_mxfp4_blocks_are_refused_by_name(
    tiny: Tiny, tmp_path: Path, damage: str, words: str
) -> None:
    model = write_mxfp4_model(tiny("gpt-oss"), tmp_path / "m")
    tensors, name = load_tensors(model), "model.layers.1.mlp.experts.gate_up_proj"
    if damage == "exponent":
        tensors[f"{name}_scales"][2, 3, 0] = 255
    elif damage == "shape":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :, :1].contiguous()
    elif damage == "twice":
        tensors[name] = torch.zeros(4, 64, 256)
    elif damage == "experts":
        tensors |= {key: tensors[key][:3] for key in (f"{name}_blocks", f"{name}_scales")}
    else:
        del tensors[f"{name}_{damage}"]
    bad = write_model(model, tmp_path / "bad", tensors, {"quant_method": "mxfp4"})
    with pytest.raises(InputError, match=words):
        quantize(bad, tmp_path / "q", recipe(scheme="int8:g32:sym"))
    assert not (tmp_path / "q").exists()


def test_declarations_are_derived_from_decoded_sources(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("gpt-oss")
    derived = api.derive_declarations(write_mxfp4_model(model, tmp_path / "m"))
    assert derived.document() == api.derive_declarations(model).document()


def write_modelopt_model(model: Path, directory: Path) -> tuple[Path, dict[str, Tensor]]:
    """Write a model in several Model Optimizer layouts; return also the expected weights."""
    tensors, expected = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, value in load_tensors(model).items():
        kind = name.split(".")[-2]
        rows, columns = value.shape if value.dim() == 2 else (0, 0)
        scales = name.replace(".weight", ".weight_scale")
        if kind in {"up_proj", "o_proj"}:
            codes = torch.randint(256, (rows, columns // 2), generator=generator).to(torch.uint8)
            steps = (torch.rand((rows, columns // 16), generator=generator) * 400 + 1).to(E4M3)
            second = torch.tensor(0.0003)
            tensors |= {name: codes, scales: steps, f"{scales}_2": second}
            tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.02)
            elements = torch.stack((LUT[(codes & 15).int()], LUT[(codes >> 4).int()]), 2).view(
                rows, columns
            )
            step = steps.float() * second
            expected[name] = elements * step.repeat_interleave(16, 1)
        elif kind == "q_proj":
            tensors[name] = (value.float() * 1000).to(E4M3)
            tensors[scales] = torch.tensor(0.001)
            expected[name] = tensors[name].float() * 0.001
        elif kind == "k_proj":
            tensors[name] = (value.float() * 1000).to(E4M3)
            tensors[scales] = torch.linspace(0.001, 0.002, rows)
            tensors[name.replace(".weight", ".k_scale")] = torch.tensor(1.0)
            expected[name] = tensors[name].float() * tensors[scales][:, None]
        elif kind == "v_proj":
            tensors[name] = (value.float() * 100).to(E4M3)
            tensors[scales] = torch.randint(
                115, 122, (rows, columns // 32), generator=generator
            ).to(torch.uint8)
            expected[name] = tensors[name].float() * 2.0 ** (
                tensors[scales].float() - 127
            ).repeat_interleave(32, 1)
        elif kind in {"gate_proj", "down_proj"}:
            tensors[name], grid = round_to_fp8_tiles(value)
            tensors[scales] = grid[:, None, :, None].contiguous()
            steps = grid.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = tensors[name].float() * steps[:rows, :columns]
        else:
            tensors[name] = value
    return write_model(
        model, directory, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    ), expected


def test_modelopt_layouts_are_decoded(tiny: Tiny, tmp_path: Path) -> None:
    model, expected = write_modelopt_model(tiny("llama-wide"), tmp_path / "m")
    source = open_plain_source(model)
    assert source.entries.keys() == open_model(tiny("llama-wide")).entries.keys()
    for name, value in expected.items():
        assert torch.equal(source.read(name), value), name
        check_row_slices(source, name)
    assert source.source_notes["precision"].startswith("fp8 (128x128 tiles), nvfp4, ")
    quantize(model, tmp_path / "q", recipe(scheme="int4:g32:sym"))
    assert verify(tmp_path / "q", model).findings == []
    api.export(model, out=tmp_path / "plain", format="plain")
    plain = open_model(tmp_path / "plain")
    assert "quantization_config" not in plain.config
    for name, value in expected.items():
        assert torch.equal(plain.read(name), value.to(plain.read(name).dtype)), name
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError):
        api.plan(model, recipe(scheme="int4:g32:sym"))
    (model / "hf_quant_config.json").write_text("{}")
    assert open_plain_source(model).source_notes == source.source_notes


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mlp.up_proj.weight_scale_2", None, "weight_scale_2: missing"),
        ("mlp.up_proj.weight_scale", None, "no matrix|type U8|shape"),
        ("mlp.up_proj.weight_scale", torch.ones(256, 7).to(E4M3), "is no layout that is read"),
        ("mlp.up_proj.pre_quant_scale", torch.ones(128), "were scaled against their inputs"),
        ("self_attn.q_proj.weight_scale", torch.tensor(torch.inf), "a scale is not finite"),
    ],
)
def test_damaged_modelopt_files_are_refused(
    tiny: Tiny, tmp_path: Path, name: str, value: Tensor | None, words: str
) -> None:
    model, _ = write_modelopt_model(tiny("llama-wide"), tmp_path / "m")
    tensors = load_tensors(model)
    tensors.pop(f"model.layers.1.{name}", None)
    if value is not None:
        tensors[f"model.layers.1.{name}"] = value
    bad = write_model(model, tmp_path / "bad", tensors, {"quant_method": "modelopt"})
    with pytest.raises(InputError, match=words):
        quantize(bad, tmp_path / "q", recipe(scheme="int4:g32:sym"))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("int4:g32:sym:bf16", "int4 (groups of 32, bf16 scales)"),
        ("int3:g64:asym:f16", "int3 (groups of 64, f16 scales)"),
        ("W8A8", "int8 (a scale for each row)"),
        ("fp8:tensor", "fp8 (one scale)"),
        ("FP8_DYNAMIC", "fp8 (a scale for each row)"),
        ("FP8_BLOCK", "fp8 (128x128 tiles)"),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "mxfp4"),
        ("mxfp8", "mxfp8"),
    ],
)
def test_compressed_tensors_models_are_valid_sources(
    tiny: Tiny, tmp_path: Path, scheme: str, words: str
) -> None:
    model = tmp_path / "m"
    quantize(tiny("llama-wide"), model, recipe(scheme=scheme, scales="absmax"))
    expected = decode_checkpoint(open_model(model))
    (model / "quantforge.manifest.json").unlink()  # as if it were of somebody else
    source = open_plain_source(model)
    assert source.source_notes == {"precision": words}
    assert source.entries.keys() == open_model(tiny("llama-wide")).entries.keys()
    format_key = detect_format(open_model(model).config)
    for name in source.entries:
        assert source.entries[name].dtype == "BF16"
        assert torch.equal(source.read(name).float(), expected.read(name).float())
        check_row_slices(source, name)
    for name, (rows, _) in quantized_weight_readers(open_model(model)).items():
        packed = {part: open_model(model).read(part) for part in rows.layout.tensor_names}
        assert torch.equal(source.read(name), format_key.unpack(rows.layout, packed).decode()), name
    done = quantize(model, tmp_path / "q", recipe(scheme="int8:g32:sym"))
    assert f"source precision: {words}" in done.plan.notes
    assert verify(tmp_path / "q", model).findings == []


def test_only_requested_rows_of_fp8_sources_are_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_fp8_model(tiny("llama-wide"), tmp_path / "m")
    source = open_plain_source(model)
    read = []
    rows_of = Checkpoint.read_rows

    def record_read(checkpoint: Checkpoint, name: str, first: int, last: int) -> Tensor:
        read.append((name, first, last))
        return rows_of(checkpoint, name, first, last)

    monkeypatch.setattr(Checkpoint, "read_rows", record_read)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a whole tensor was read"))
    name = "model.layers.0.mlp.up_proj.weight"
    source.read_rows(name, 130, 140)
    assert read == [(name, 130, 140), (f"{name}_scale_inv", 1, 2)]
