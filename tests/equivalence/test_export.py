"""Export between any two formats: the same numbers bit for bit, counted where they are not, or a refusal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantforge import api
from quantforge.api import Exported
from quantforge.errors import QuantForgeError, RefusedError, UsageError
from quantforge.events import Policy
from quantforge.files.reader import open_checkpoint
from quantforge.formats import detect_format
from quantforge.recipe import Recipe, Rule
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import copy_model, file_digests, quantize, recipe
from tests.thorough import mark_others_thorough, parametrize_each_value, thorough_case

FORMATS = ("compressed-tensors", "gptq", "gptq_v2", "awq")
SCHEMES = ("int4:g128:sym", "int4:g128:asym", "int3:g128:sym", "int8:g128:sym")
LAYERS = 2 * 7

Made = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function from scheme and format to a quantized model."""

    @cache
    def make(scheme: str, form: str) -> Path:
        out = tmp_path_factory.mktemp("quantized") / "m"
        quantize(tiny("llama-wide"), out, recipe(scheme=scheme, format=form, scales="absmax"))
        return out

    return make


def export(source: Path, form: str, out: Path, **options: bool) -> Exported:
    found = api.export(str(source), Recipe(format=form), out, Settings(), **options)
    assert isinstance(found, Exported)
    return found


def decoded(directory: Path) -> dict[str, Tensor]:
    """The weight of every linear, as the files say."""
    checkpoint = open_checkpoint(directory)
    form = detect_format(checkpoint.config)
    headers = checkpoint.stored_tensors()
    layouts = form.find_layouts(checkpoint.config, headers)
    return {
        layout.module: form.unpack(
            layout, {name: checkpoint.read(name) for name in layout.tensor_names}
        ).decode()
        for layout in layouts
    }


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def storable(scheme: str, form: str) -> bool:
    return form != "awq" or scheme.startswith("int4")


# Each format of a scheme that all hold; each scheme, and one that a format does not hold.
PAIRS = [
    *((SCHEMES[0], source) for source in FORMATS),
    *((scheme, FORMATS[0]) for scheme in SCHEMES[1:]),
    (SCHEMES[2], "awq"),
]


@pytest.mark.parametrize(
    ("scheme", "source"), mark_others_thorough(itertools.product(SCHEMES, FORMATS), *PAIRS)
)
def test_every_pair_is_exact_or_refused(
    made: Made, tmp_path: Path, scheme: str, source: str
) -> None:
    if not storable(scheme, source):
        with pytest.raises(RefusedError, match="4 bits"):
            made(scheme, source)
        return
    model = made(scheme, source)
    numbers = decoded(model)
    assert len(numbers) == LAYERS
    for target in FORMATS:
        out = tmp_path / target
        if not storable(scheme, target):
            with pytest.raises(RefusedError) as refused:
                export(model, target, out, allow_inexact=True)
            assert "int4:g128" in refused.value.hint  # the nearest that it could hold
            assert not out.exists()
            continue
        result = export(model, target, out)
        assert (result.verdict, result.events, result.layers) == ("exact", (), LAYERS)
        assert equal(decoded(out), numbers)
        kept = [name for name in load_file(model / "model.safetensors") if "norm" in name]
        first, second = (load_file(place / "model.safetensors") for place in (model, out))
        assert kept
        assert all(torch.equal(first[name], second[name]) for name in kept)
        weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
        assert weights == result.output_bytes


@pytest.mark.parametrize("scheme", mark_others_thorough(SCHEMES, *SCHEMES[1:3]))
def test_decoded_weights_are_exact_or_counted(made, tiny, tmp_path, scheme):
    """A bfloat16 scale times an integer has more digits than bfloat16 holds: float32 takes it, BF16 by a flag."""
    model = made(scheme, "compressed-tensors")
    lossless = export(model, "plain", tmp_path / "lossless")
    assert (lossless.verdict, lossless.events) == ("exact", ())
    assert "stored as F32" in lossless.notes[0]
    assert "weights are not BF16 numbers" in lossless.notes[0]
    exact = load_file(tmp_path / "lossless" / "model.safetensors")
    assert {value.dtype for value in exact.values()} == {torch.float32}
    assert equal({f"{k}.weight": v for k, v in decoded(model).items()},
                 {k: v for k, v in exact.items() if "proj" in k})  # fmt: skip
    assert json.loads((tmp_path / "lossless" / "config.json").read_text())["dtype"] == "float32"
    settings = Settings(policy=Policy(strict=True))
    with pytest.raises(RefusedError, match="inexact"):
        api.export(
            str(model), Recipe(format="plain"), tmp_path / "plain", settings, allow_inexact=True
        )
    assert not (tmp_path / "plain").exists()
    result = export(model, "plain", tmp_path / "plain", allow_inexact=True)
    assert result.verdict == "inexact"
    counts = json.loads((tmp_path / "plain" / "quantforge.manifest.json").read_text())[
        "event_counts"
    ]
    assert counts == {"inexact": len(result.events)} == {"inexact": LAYERS}
    plain, source = load_file(tmp_path / "plain" / "model.safetensors"), decoded(model)
    assert plain.keys() == load_file(tiny("llama-wide") / "model.safetensors").keys()
    for module, exact in source.items():
        assert torch.equal(plain[f"{module}.weight"], exact.bfloat16())
        assert not torch.equal(plain[f"{module}.weight"].float(), exact)
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", torch.float16), ("bf16", torch.bfloat16), ("F32", torch.float32)]
)
def test_decoded_weights_in_a_type_that_is_asked_for(made, tmp_path, kind, dtype):
    """Every tensor has that type, and the configuration says so; what is rounded is an event with its share."""
    model, out = made("int4:g128:sym", "compressed-tensors"), tmp_path / "out"
    result = api.export(str(model), None, out, format="plain", type=kind)
    assert isinstance(result, Exported)
    assert (result.verdict == "exact") == (kind == "F32") == (not result.events)
    assert all("weights are not" in event.detail for event in result.events)
    found = load_file(out / "model.safetensors")
    assert {value.dtype for value in found.values()} == {dtype}
    assert all(torch.equal(found[f"{k}.weight"], v.to(dtype)) for k, v in decoded(model).items())
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )


def test_weights_beyond_a_type_that_is_asked_for_are_refused(tiny, tmp_path):
    source = copy_model(tiny("llama-wide"), tmp_path / "large")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for options in ({}, {"allow_inexact": True}):
        with pytest.raises(
            RefusedError, match=r"model\.norm\.weight: .*outside of the range of F16"
        ) as refused:
            api.export(str(source), None, tmp_path / "out", format="plain", type="F16", **options)
        assert "--type BF16 or --type F32" in refused.value.hint
    with pytest.raises(UsageError, match="--type Q4_0: with --format plain"):
        api.export(str(source), None, tmp_path / "out", format="plain", type="Q4_0")
    assert not (tmp_path / "out").exists()
    api.export(str(source), None, tmp_path / "out", format="plain", type="BF16")


@pytest.mark.parametrize("form", ["gptq", thorough_case("gptq_v2"), "awq"])
def test_groups_are_split_exactly_where_a_format_states_one_size(tiny, tmp_path, form):
    rules = (Rule("down_proj", "int4:g64:asym"), Rule("o_proj", "int4:row:asym"))
    model = tmp_path / "mixed"
    quantize(
        tiny("llama-wide"), model, recipe(scheme="int4:g128:asym", rules=rules, scales="absmax")
    )
    result = export(model, form, tmp_path / form)
    assert (result.verdict, result.events) == ("exact", ())
    (note,) = (note for note in result.notes if "split into groups of 64 columns" in note)
    assert "model.layers.0.mlp.gate_proj and 11 more" in note
    assert equal(decoded(tmp_path / form), decoded(model))
    config = json.loads((tmp_path / form / "config.json").read_text())
    assert config["quantization_config"]["group_size"] == 64


@pytest.fixture(scope="module")
def ordered(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a quantized model whose columns are scattered over groups."""

    @cache
    def make(form: str, *, mixed: bool = False, scattered: bool = True) -> Path:
        out = tmp_path_factory.mktemp("ordered") / "m"
        rules = (Rule("down_proj", "int4:g64:asym"),) if mixed else ()
        wanted = recipe(scheme="int4:g32:asym", format=form, scales="absmax", rules=rules)
        quantize(tiny("llama-wide"), out, wanted)
        (out / "quantforge.manifest.json").unlink()
        tensors = load_file(out / "model.safetensors")
        codes, index = (
            (".weight_packed", ".weight_g_idx") if "comp" in form else (".qweight", ".g_idx")
        )
        for name in [name for name in tensors if name.endswith(codes)]:
            columns = tensors[name].shape["comp" in form] * 8
            size = 64 if mixed and "down_proj" in name else 32
            order = torch.arange(columns, dtype=torch.int32) // size
            mixing = torch.randperm(columns, generator=torch.Generator().manual_seed(1))
            tensors[name.removesuffix(codes) + index] = order[mixing] if scattered else order
        save_file(tensors, out / "model.safetensors", {"format": "pt"})
        for place in out.glob("*config.json"):
            text = place.read_text().replace('"desc_act": false', '"desc_act": true')
            place.write_text(text.replace('"group_size"', '"actorder": "group", "group_size"'))
        return out

    return make


@parametrize_each_value(
    ("form", ["gptq", "gptq_v2", "compressed-tensors"]), ("target", ["gptq", "gptq_v2"])
)
def test_the_order_of_activations_is_kept_between_the_layouts_of_gptq(
    ordered, tmp_path, form, target
):
    model, out = ordered(form), tmp_path / "out"
    index = ".weight_g_idx" if form == "compressed-tensors" else ".g_idx"
    result = export(model, target, out)
    assert result.verdict == "exact"
    assert any("desc_act stays true" in note for note in result.notes)
    assert equal(decoded(out), decoded(model))
    before, after = (load_file(place / "model.safetensors") for place in (model, out))
    indexes = {name.removesuffix(index): one for name, one in before.items() if index in name}
    assert len(indexes) == LAYERS
    assert all(torch.equal(after[f"{module}.g_idx"], one) for module, one in indexes.items())
    assert len(after["model.layers.0.mlp.up_proj.scales"]) == 128 // 32
    for name in ("config.json", "quantize_config.json"):
        assert '"desc_act": true' in (out / name).read_text()


@pytest.mark.parametrize("target", ["awq", "mlx", "compressed-tensors"])
def test_the_order_of_activations_is_refused_in_these_words_by_other_formats(
    ordered, tmp_path, target
):
    with pytest.raises(RefusedError, match=r"g_idx scatters .*desc_act.*not written to") as refused:
        export(ordered("gptq"), target, tmp_path / "out", allow_inexact=True)
    assert "--format gptq" in refused.value.hint
    assert not (tmp_path / "out").exists()
    rising = ordered("gptq", scattered=False)  # as many files say desc_act without any need
    export(rising, target, tmp_path / "out", allow_inexact=True)
    if target == "awq":
        assert equal(decoded(tmp_path / "out"), decoded(rising))


def test_groups_with_an_order_are_not_split(ordered, tmp_path):
    with pytest.raises(RefusedError, match="its groups would have to be split"):
        export(ordered("compressed-tensors", mixed=True), "gptq", tmp_path / "out")


def test_scales_that_do_not_fit_need_a_flag_and_are_counted(tiny, tmp_path):
    model = tmp_path / "wide-scales"
    quantize(tiny("llama-wide"), model, recipe(scheme="int4:g128:sym:f32", scales="absmax"))
    with pytest.raises(RefusedError, match="scales are not f16") as refused:
        export(model, "gptq", tmp_path / "out")
    assert "--allow-inexact" in refused.value.hint
    result = export(model, "gptq", tmp_path / "out", allow_inexact=True)
    assert (result.verdict, len(result.events)) == ("inexact", LAYERS)
    before, after = decoded(model), decoded(tmp_path / "out")
    for name, value in before.items():
        error = (after[name] - value).abs().max() / value.abs().max()
        assert 0 < error < 2.0**-11  # half a digit of float16


def test_a_zero_point_that_the_first_gptq_layout_cannot_spell(tiny, tmp_path):
    """Ours are never 0, even where all weights are positive; a file of another tool may hold one."""
    source = copy_model(tiny("llama-wide"), tmp_path / "positive")
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].abs() + 0.01
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    model = tmp_path / "quantized"
    quantize(source, model, recipe(scheme="int4:g128:asym", scales="absmax", format="gptq_v2"))
    export(model, "gptq", tmp_path / "gptq")
    assert equal(decoded(model), decoded(tmp_path / "gptq"))

    stored = load_file(model / "model.safetensors")
    module = name.removesuffix(".weight")
    stored[f"{module}.qzeros"][0, 0] = 0
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match="zero point") as refused:
        export(model, "gptq", tmp_path / "refused", allow_inexact=True)
    assert "gptq_v2" in refused.value.hint
    assert refused.value.tensor == module
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("form", mark_others_thorough(FORMATS, FORMATS[0]))
def test_export_of_an_unquantized_model_is_plain_rounding(tiny, tmp_path, form):
    model = str(tiny("llama-wide"))
    wanted = recipe(format=form)
    api.export(model, wanted, tmp_path / "a", Settings())
    quantize(tiny("llama-wide"), tmp_path / "b", wanted)
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")


def test_there_and_back_is_the_same_file(made, tmp_path):
    model = made("int4:g128:sym", "compressed-tensors")
    for first, second in itertools.pairwise((model, *(tmp_path / form for form in FORMATS[1:]))):
        export(first, second.name, second)
    export(tmp_path / "awq", "compressed-tensors", tmp_path / "back")
    assert equal(decoded(tmp_path / "back"), decoded(model))


def test_an_export_keeps_side_files_lineage_and_shards_on_request(made, tiny, tmp_path):
    model = made("int4:g128:sym", "compressed-tensors")
    api.export(
        str(model), Recipe(format="gptq", max_shard_bytes=50_000), tmp_path / "out", Settings()
    )
    out = tmp_path / "out"
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "model.safetensors.index.json").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    source = tiny("llama-wide")
    document = json.loads((out / "quantforge.manifest.json").read_text())
    assert document["lineage"]["source"]["model"] == source.name
    assert document["lineage"]["method"] == "rtn"
    assert f"`{source.name}`, " in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "wanted",
    [Recipe(format="gptq", bits=3), Recipe(format="gptq", ignore=("k_proj",))],
)
def test_an_export_of_a_quantized_model_takes_no_new_numbers(made, tmp_path, wanted):
    model = made("int4:g128:sym", "compressed-tensors")
    with pytest.raises(UsageError) as refused:
        api.export(str(model), wanted, tmp_path / "out", Settings())
    assert refused.value.hint


def test_a_damaged_scale_is_found(made, tmp_path):
    source = copy_model(made("int4:g128:sym", "compressed-tensors"), tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name][3, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for target in ("gptq", "plain"):
        with pytest.raises(QuantForgeError):
            export(source, target, tmp_path / "out", allow_inexact=True)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"m"}
