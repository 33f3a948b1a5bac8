"""The GGUF file of a vision tower: tensor names, values and keys as llama.cpp reads them, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.artifacts import manifest
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.files.reader import open_checkpoint
from quantforge.formats.gguf.parsing import read_gguf
from quantforge.formats.gguf.projector_file import projector_file
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from quantforge.verification.verify import verify
from tests import gguf_models, vision_models
from tests.gguf_exports import NO_CALIBRATION, assert_export_refused, copy_with_json_values, export
from tests.runs import StopError, run_command

gguf = pytest.importorskip("gguf")
NAMES = sorted(vision_models.CASES)
TOWERS = ("vision_tower.", "multi_modal_projector.", "visual.", "model.visual.", "vision_model.", "model.vision_tower.",
          "model.embed_vision.")  # fmt: skip
NORMS = {
    "visual.merger.norm": "v.post_ln",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
}
GEMMA4 = {  # gguf's map has the two norms under the names of other families, too
    "post_attention_layernorm": "attn_post_norm", "pre_feedforward_layernorm": "ln2",
}  # fmt: skip
MERGERS = {"visual.merger.linear_fc1": "mm.0", "visual.merger.linear_fc2": "mm.2"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    return {name: vision_models.make(name, root / name) for name in NAMES}


def export_projector(model: Path, out: Path) -> Path:
    """Export a model and return the path of its vision tower file."""
    export(model, out, mmproj=True)
    return out.with_name(f"mmproj-{out.stem}-F16.gguf")


def expected_gguf_name(name: str, family: str) -> str:
    """Return the name that gguf-py's map gives a checkpoint tensor, or "" if it has none."""
    module, _, end = name.removeprefix("model.").rpartition(".")
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    if family == "gemma4":
        block = re.fullmatch(r"vision_tower\.encoder\.layers\.(\d+)\.(.*?)(\.linear)?", module)
        if block and block[2] in GEMMA4:
            return f"v.blk.{block[1]}.{GEMMA4[block[2]]}.{end}"
        inner = f"vision_model.model.layers.{block[1]}.{block[2]}" if block else f"model.{module}"
        if gguf_name := mapping.get_name(inner):
            return f"{gguf_name}.{end}"
        return {"position_embedding_table": "v.position_embd.weight"}.get(end, f"v.{end}")
    if gguf_name := {
        "class_embedding": "v.class_embd",
        "positional_embedding_vlm": "v.position_embd.weight",
    }.get(end):
        return gguf_name
    if family == "llama4" and module == "multi_modal_projector.linear_1":
        return "mm.model.fc.weight"
    if family == "llama4" and module.endswith(
        "post_attention_layernorm"
    ):  # Gemma 4 has it elsewhere
        return f"v.blk.{module.split('.')[3]}.ln2.{end}"
    deeper = re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", module)
    gguf_name = (
        {**NORMS, **MERGERS}.get(module) or mapping.get_name(deeper) or mapping.get_name(module)
    )
    return f"{gguf_name}.{end}" if gguf_name else ""


@pytest.mark.parametrize("name", NAMES)
def test_projector_tensors_have_gguf_names_and_source_values(name, models, tmp_path):
    file = read_gguf(export_projector(models[name], tmp_path / "x.gguf"))
    source = open_checkpoint(models[name])
    stored = {tensor_name: read_float(entry) for tensor_name, entry in file.tensors.items()}
    left = set(stored)
    for tensor in source.entries:
        family = vision_models.CASES[name].model_type
        if (
            not tensor.startswith(TOWERS)
            or "head." in tensor
            or not (gguf_name := expected_gguf_name(tensor, family))
        ):
            continue
        value = source.read(tensor).float()
        if "soft_emb_norm" in tensor:
            value = value + 1
        if vision_models.CASES[name].model_type == "mistral3" and re.search(
            r"attention\.[qk]_proj", tensor
        ):
            # As llama.cpp's converter permutes them: 2 heads, halves become pairs.
            value = value.view(2, 2, 8, 32).swapaxes(1, 2).reshape(32, 32)
        if family == "gemma4" and gguf_name == "v.patch_embd.weight":
            value = value.view(32, 4, 4, 3).movedim(3, 1)
        parts = {gguf_name: value.view(value.shape or 1)}
        if name == "qwen2_5_vl" and ".attn.qkv." in tensor:
            parts = {
                gguf_name.replace("qkv", tensor_name): part
                for tensor_name, part in zip("qkv", value.chunk(3), strict=True)
            }
        if value.dim() == 5:
            parts = {gguf_name: value[:, :, 0], f"{gguf_name}.1": value[:, :, 1]}
        for tensor_name, part in parts.items():
            torch.testing.assert_close(
                stored[tensor_name], part, rtol=1e-3, atol=1e-6, msg=tensor_name
            )
            left.discard(tensor_name)
    others = (
        "v.deepstack",
        "v.token_embd",
        *(("mm.input_projection",) if name == "gemma3" else ()),
    )
    assert all(tensor_name.startswith(others) for tensor_name in left), left


def read_float(entry) -> torch.Tensor:
    from quantforge.files.safetensors import read_tensor

    return read_tensor(entry.raw()).float()


@pytest.mark.parametrize("name", NAMES)
def test_projector_dtypes_and_names_follow_gguf(name, models, tmp_path):
    file = read_gguf(export_projector(models[name], tmp_path / "x.gguf"))
    patterns = {
        re.escape(pattern).replace(r"\{bid\}", r"\d+") for pattern in gguf.TENSOR_NAMES.values()
    }
    for tensor_name, entry in file.tensors.items():
        assert any(
            re.fullmatch(rf"{pattern}(\.(weight(\.1)?|bias|(in|out)put_(min|max)))?", tensor_name)
            for pattern in patterns
        ), tensor_name
        wide = len(entry.shape) == 1 or "_embd" in tensor_name
        assert entry.type == ("F32" if wide else "F16"), tensor_name
    own = {*vars(gguf.Keys.Clip).values(), *vars(gguf.Keys.ClipVision).values(),
           *vars(gguf.Keys.ClipVision.Attention).values(), *vars(gguf.Keys.ClipVision.Projector).values()}  # fmt: skip
    assert {key for key in file.metadata if key.startswith("clip.")} <= own
    assert file.value("general.architecture", str) == "clip"
    kinds = {
        "gemma3": "GEMMA3",
        "gemma4": "GEMMA4V",
        "llama4": "LLAMA4",
        "mistral3": "PIXTRAL",
        "qwen2_5_vl": "QWEN25VL",
        "qwen3_vl": "QWEN3VL",
    }
    assert file.value("clip.projector_type", str) == getattr(
        gguf.VisionProjectorType, kinds[vision_models.CASES[name].model_type]
    )


def test_image_mean_and_std_come_from_the_processor(models, tmp_path):
    model = copy_with_json_values(models["gemma3"], tmp_path / "m", "config.json")
    (model / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    file = read_gguf(export_projector(model, tmp_path / "x.gguf"))
    assert file.metadata["clip.vision.image_mean"].value == pytest.approx([0.1, 0.2, 0.3])
    assert file.metadata["clip.vision.image_std"].value == [0.5, 0.5, 0.5]
    for key, value in (
        ("image_mean", [1, 2]),
        ("image_std", [0, 0, 0]),
        ("image_std", [-0.5, 0.5, 0.5]),
        ("do_normalize", "false"),
    ):
        (model / "preprocessor_config.json").write_text(json.dumps({key: value}))
        assert_export_refused(InputError, key, model, tmp_path, mmproj=True)


def test_published_tower_tensor_names_are_known(models, tmp_path):
    """Gemma's files nest the tower one module deeper; transformers also saves it below ``model``."""
    first = export_projector(models["gemma3"], tmp_path / "x.gguf").read_bytes()
    for old, new in (
        ("vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "model.vision_tower."),
    ):
        model = copy_with_changed_tensors(
            models["gemma3"], tmp_path / new, lambda name, old=old, new=new: name.replace(old, new)
        )
        second = export_projector(model, tmp_path / f"{new}gguf").read_bytes()
        assert second[-5000:] == first[-5000:]


def copy_with_changed_tensors(
    model: Path, path: Path, name, change=lambda tensors: tensors
) -> Path:
    """Copy a model with renamed or changed tensors."""
    path = copy_with_json_values(model, path, "config.json")
    tensors = {name(key): value for key, value in load_file(path / "model.safetensors").items()}
    save_file(change(tensors), path / "model.safetensors", {"format": "pt"})
    return path


FC1 = "vision_tower.encoder.layers.1.mlp.fc1.weight"
CHANGES = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != FC1}, f"misses {FC1}"),
    "extra": (lambda t: {**t, "vision_tower.extra.weight": torch.zeros(2)}, r"no place for, vision_tower\.extra"),
    "twice": (lambda t: {**t, f"model.{FC1}": t[FC1].clone()}, f"has twice (model.)?{FC1}"),
    "another shape": (lambda t: {**t, FC1: torch.zeros(3, 32)}, rf"{FC1}: F32 \[3, 32\]"),
    "not finite": (lambda t: {**t, FC1: t[FC1] * float("inf")}, FC1),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_an_incomplete_tower_is_refused_by_name(what, models, tmp_path):
    change, words = CHANGES[what]
    model = copy_with_changed_tensors(models["gemma3"], tmp_path / "m", lambda name: name, change)
    assert_export_refused(InputError, words, model, tmp_path, mmproj=True)


def test_a_tower_value_beyond_float16_is_refused(models, tmp_path):
    def change(tensors):
        tensors[FC1][0, 0] = 1e6
        return tensors

    model = copy_with_changed_tensors(models["gemma3"], tmp_path / "m", lambda name: name, change)
    out = tmp_path / "x.gguf"
    with pytest.raises(RefusedError, match="beyond the range of float16"):
        export_projector(model, out)
    assert not out.exists()


def test_a_non_square_number_of_image_tokens_is_refused(models, tmp_path):
    model = copy_with_json_values(
        models["gemma3"], tmp_path / "m", "config.json", mm_tokens_per_image=5
    )
    with pytest.raises(RefusedError, match="mm_tokens_per_image = 5"):
        projector_file(open_checkpoint(model), "x")


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("gemma3", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("gemma3", {"intermediate_size": 32}, "exchanges up and down"),
    ("gemma3", {"image_size": 40}, "patches"),
    ("gemma4", {"hidden_activation": "gelu"}, "hidden_activation = gelu"),
    ("gemma4", {"head_dim": 8}, "head_dim = 8"),
    ("gemma4", {"num_key_value_heads": 1}, "num_key_value_heads = 1"),
    ("gemma4", {"num_attention_heads": 3}, "3 heads"),
    ("gemma4", {"rope_parameters": {"rope_theta": 50.0}}, r"rope_theta = 50\.0"),
    ("llama4", {"hidden_act": "silu"}, "hidden_act = silu"),
    ("llama4", {"rope_theta": 5.0}, r"rope_theta = 5\.0"),
    ("llama4", {"pixel_shuffle_ratio": 0.4}, r"pixel_shuffle_ratio = 0\.4"),
    ("llama4", {"image_size": 40}, "image_size = 40"),
    ("llama4", {"projector_output_dim": 32}, "projector_output_dim = 32"),
    ("llama4", {"vision_output_dim": 32}, "vision_output_dim = 32"),
    ("llama4", {"intermediate_size": 64}, "intermediate_size = 64"),
    ("llama4", {"num_attention_heads": 16}, "16 heads"),
    ("mistral3", {"hidden_act": "relu"}, "hidden_act = relu"),
    ("mistral3", {"head_dim": 8}, "head_dim = 8"),
    ("mistral3", {"rope_parameters": {"rope_theta": 5.0}}, r"rope_theta = 5\.0"),
    ("qwen2_5_vl", {"fullatt_block_indexes": [0, 3]}, "fullatt_block_indexes"),
    ("qwen2_5_vl", {"window_size": 56}, "window_size"),
    ("qwen3_vl", {"deepstack_visual_indexes": [2, 1]}, "deepstack_visual_indexes"),
    ("qwen3_vl", {"num_position_embeddings": 17}, "num_position_embeddings"),
    ("qwen3_vl", {"num_heads": 3}, "3 heads"),
])  # fmt: skip
def test_vision_settings_unsupported_by_llama_cpp_are_refused(
    name, changes, words, models, tmp_path
):
    config = json.loads((models[name] / "config.json").read_text())
    vision = {**config["vision_config"], **changes}
    model = copy_with_json_values(models[name], tmp_path / "m", "config.json", vision_config=vision)
    with pytest.raises(RefusedError, match=words):
        projector_file(open_checkpoint(model), "x")


@pytest.mark.parametrize(("name", "changes", "words"), [
    ("gemma4", {"use_bidirectional_attention": None}, "use_bidirectional_attention = None"),
    ("gemma4", {"pad_token_id": 1}, "pad_token_id = 1"),
    ("gemma4-causal", {"use_bidirectional_attention": "vision"}, "use_bidirectional_attention = vision"),
])  # fmt: skip
def test_decoder_settings_for_images_unsupported_by_llama_cpp_are_refused(
    name, changes, words, models, tmp_path
):
    config = json.loads((models[name] / "config.json").read_text())
    text = {**config["text_config"], **changes}
    model = copy_with_json_values(models[name], tmp_path / "m", "config.json", text_config=text)
    with pytest.raises(RefusedError, match=words):
        projector_file(open_checkpoint(model), "x")


def test_image_mean_is_zero_without_normalization(models, tmp_path):
    colours = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    for name, processor, expected in (
        ("gemma3", {}, [0.1, 0.2, 0.3]), ("gemma3", {"do_normalize": False}, [0.0] * 3),
        ("gemma4", {}, [0.0] * 3), ("gemma4", {"do_normalize": True}, [0.1, 0.2, 0.3]),
    ):  # fmt: skip
        model = copy_with_json_values(models[name], tmp_path / f"{name}-{processor}", "config.json")
        (model / "preprocessor_config.json").write_text(json.dumps({**colours, **processor}))
        keys = projector_file(open_checkpoint(model), "x").keys
        assert keys["clip.vision.image_mean"].value == pytest.approx(expected)


def test_infinite_clamp_bounds_are_written_unchanged(models, tmp_path):
    def change(tensors):
        item = "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max"
        return {**tensors, item: torch.tensor(float("inf"))}

    model = copy_with_changed_tensors(models["gemma4"], tmp_path / "m", lambda name: name, change)
    file = read_gguf(export_projector(model, tmp_path / "x.gguf"))
    assert read_float(file.tensors["v.blk.0.ffn_up.input_max"]).item() == float("inf")
    assert read_float(file.tensors["v.blk.1.ffn_up.input_max"]).item() == 1.0
    assert not verify(tmp_path / "x.gguf", model, forward=False).findings


def test_image_processing_differences_of_llama_cpp_are_an_event(models, tmp_path, capsys):
    out = tmp_path / "x.gguf"
    export_projector(models["llama4"], out)
    (event,) = (
        item for item in manifest.read_manifest(out)["events"] if item["kind"] == "tower-differs"
    )
    assert "column by column" in event["detail"]
    options = (
        "--format",
        "gguf",
        "--type",
        "F16",
        "--mmproj",
        "--strict",
        "-o",
        tmp_path / "y.gguf",
    )
    result = run_command(capsys, "export", models["llama4"], *options)
    assert (result.code, "tower-differs" in result.err) == (4, True)
    assert (
        "tower-differs"
        in run_command(
            capsys, "plan", models["llama4"], "--format", "gguf", "--type", "F16", "--mmproj"
        ).out
    )


def test_a_dropped_audio_tower_is_an_event(models, tmp_path):
    def change(tensors):
        heard = {
            f"model.audio_tower.layers.{layer}.weight": torch.zeros(4, 4) for layer in range(2)
        }
        return {
            **tensors,
            **heard,
            "model.embed_audio.embedding_projection.weight": torch.zeros(64, 4),
        }

    model = copy_with_changed_tensors(models["gemma4"], tmp_path / "m", lambda name: name, change)
    bits = {"scheme": "int8:g32:sym", "calibration": NO_CALIBRATION}
    api.quantize(str(model), Recipe(**bits), tmp_path / "q", Settings())
    for source, more in ((model, {"type": "F16"}), (tmp_path / "q", {"allow_inexact": True})):
        out = tmp_path / f"{source.name}.gguf"
        api.export(str(source), None, out, Settings(mmproj=True), format="gguf", **more)
        (event,) = (
            layer
            for layer in manifest.read_manifest(out)["events"]
            if layer["kind"] == "tower-dropped"
        )
        assert "audio_tower and embed_audio: 3 tensors, 1152 bytes" in event["detail"]
    assert not any(
        name.startswith("a.") for name in read_gguf(tmp_path / "mmproj-m-F16.gguf").tensors
    )


def test_the_img_break_embedding_is_stored_with_the_tower(models, tmp_path):
    model = models["mistral3"]
    file = read_gguf(export_projector(model, tmp_path / "x.gguf"))
    embedding = open_checkpoint(model).read("language_model.model.embed_tokens.weight")
    stored_row = read_float(file.tensors["v.token_embd.img_break"])
    assert torch.equal(stored_row, embedding[vision_models.ROW_BREAK_TOKEN])
    assert not verify(tmp_path / "x.gguf", model, forward=False).findings
    other = copy_with_json_values(model, tmp_path / "m", "tokenizer.json", added_tokens=[])
    with pytest.raises(InputError, match=r"no added token \[IMG_BREAK\]"):
        projector_file(open_checkpoint(other), "x")
    other = copy_with_json_values(model, tmp_path / "n", "config.json")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["[IMG_BREAK]"] = 320
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=r"embed_tokens\.weight: \[320, 64\], and row 320"):
        projector_file(open_checkpoint(other), "x")
    other_layer = copy_with_json_values(
        model, tmp_path / "o", "config.json", vision_feature_layer=-2
    )
    with pytest.raises(RefusedError, match="vision_feature_layer = -2"):
        projector_file(open_checkpoint(other_layer), "x")


def test_a_vision_size_that_is_no_number_is_refused(models, tmp_path):
    config = json.loads((models["gemma3"] / "config.json").read_text())
    vision = {**config["vision_config"], "num_hidden_layers": "many"}
    model = copy_with_json_values(
        models["gemma3"], tmp_path / "m", "config.json", vision_config=vision
    )
    with pytest.raises(InputError, match=r"vision_config\.num_hidden_layers = 'many'"):
        projector_file(open_checkpoint(model), "x")


def test_models_without_a_supported_vision_tower_are_refused(tmp_path):
    model = gguf_models.make("llama-tied", tmp_path / "m")
    assert_export_refused(RefusedError, "describes no vision tower", model, tmp_path, mmproj=True)
    other = copy_with_json_values(model, tmp_path / "o", "config.json", vision_config={"depth": 2})
    with pytest.raises(RefusedError, match="'llama' is not written") as caught:
        export_projector(other, tmp_path / "x.gguf")
    assert "gemma3, gemma4, llama4, mistral3, qwen2_5_vl, qwen3_vl" in caught.value.hint


def test_a_plan_with_mmproj_reports_and_counts_the_tower(models, tmp_path, capsys):
    model, options = models["gemma3"], ("--bits", 8, "--format", "gguf", "--json")
    bare, plan = (
        json.loads(run_command(capsys, "plan", model, *options, *more).out)
        for more in ((), ("--mmproj",))
    )
    rules = {item["name"]: item["rule"] for item in plan["tensors"] if item["action"] == "drop"}
    tower = projector_file(open_checkpoint(model), "")
    written_too = {name for name, rule in rules.items() if "--mmproj writes it" in rule}
    assert written_too == set(tower.tensors)
    assert "of another tower" in {item["rule"] for item in bare["tensors"]}
    more = plan["forecast"]["disk_bytes"] - bare["forecast"]["disk_bytes"]
    assert more == tower.plan.size > 0
    assert "--mmproj writes that of pictures, " in " ".join(plan["notes"])
    result = run_command(capsys, "plan", model, "--bits", 8, "--mmproj")
    assert result.code == 2
    assert "add --format gguf" in result.err
    announced = Settings(mmproj=True, announce=lambda plan, _: stop_at_announced_plan(plan))
    with pytest.raises(StopError):
        api.export(str(model), None, tmp_path / "x.gguf", announced, format="gguf", type="F16")


def stop_at_announced_plan(plan):
    """Check the announced plan of an export, then stop like a dry run."""
    assert any("--mmproj writes it" in tensor.rule for tensor in plan.tensors)
    raise StopError


def test_mmproj_is_refused_for_other_formats(models, tmp_path):
    with pytest.raises(UsageError, match="--mmproj"):
        export(models["gemma3"], tmp_path / "x", None, mmproj=True, format="plain")
    assert not (tmp_path / "x").exists()


def test_the_projector_file_belongs_to_the_manifest_and_is_verified(models, tmp_path):
    out = tmp_path / "x.gguf"
    tower = export_projector(models["gemma3"], out)
    assert set(manifest.read_manifest(out)["outputs"]) == {out.name, tower.name}
    source = models["gemma3"]
    assert not verify(out, source, forward=False).findings
    for path in (out, tower, out.with_name("x.gguf.quantforge.json")):
        path.rename(path.with_name(path.name.replace("x", "y", 1)))
    renamed = out.with_name("y.gguf")
    assert not verify(renamed, source, forward=False).findings
    renamed_tower = tower.with_name("mmproj-y-F16.gguf")
    data = bytearray(renamed_tower.read_bytes())
    data[-100] ^= 1
    renamed_tower.write_bytes(data)
    findings = {
        (item.check, item.where) for item in verify(renamed, source, forward=False).findings
    }
    assert findings == {
        ("manifest", renamed_tower.name),
        ("unquantized-changed", renamed_tower.name),
    }
    assert "no model" in verify(renamed_tower).unsupported


def test_reproduce_includes_the_projector_file(models, tmp_path):
    out = tmp_path / "x.gguf"
    export_projector(models["gemma3"], out)
    again = api.reproduce(out, models["gemma3"])
    assert (again.files, again.differing) == (2, ())


def test_the_tower_of_a_quantized_model_is_written_too(models, tmp_path):
    api.quantize(
        str(models["gemma3"]),
        Recipe(bits=8, calibration=NO_CALIBRATION),
        tmp_path / "q",
        Settings(),
    )
    settings = Settings(mmproj=True)
    api.export(
        str(tmp_path / "q"), None, tmp_path / "y.gguf", settings, format="gguf", allow_inexact=True
    )
    first = export_projector(models["gemma3"], tmp_path / "x.gguf").read_bytes()
    assert (tmp_path / "mmproj-y-F16.gguf").read_bytes()[-5000:] == first[-5000:]


def test_an_earlier_projector_file_is_replaced_and_foreign_kept(models, tmp_path):
    out = tmp_path / "x.gguf"
    tower = export_projector(models["gemma3"], out)
    export(models["gemma3"], out, "BF16", overwrite=True)
    assert not tower.exists()  # of the earlier result, and not asked for
    tower.write_text("mine")
    with pytest.raises(RefusedError, match="mmproj-x-F16"):
        export(models["gemma3"], out, "Q8_0", overwrite=True, mmproj=True)
    assert tower.read_text() == "mine"
