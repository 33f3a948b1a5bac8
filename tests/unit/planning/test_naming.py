"""Default names of results, and what an output name decides."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quantforge.artifacts.manifest import NAME, SCHEMA
from quantforge.errors import InputError, UsageError
from quantforge.grids import ScaleType
from quantforge.notation import parse_layer, parse_sparsity
from quantforge.planning.format_choice import choose_format, formats_holding
from quantforge.planning.naming import default_name, default_path
from quantforge.plans import Action, TensorPlan
from quantforge.recipe import Recipe, Rule
from quantforge.scheme import LayerScheme


def name_of_result(path: Path, method: str | None, key: str, *schemes: str, label: str = "") -> str:
    tensors = []
    for number, text in enumerate(schemes):
        layer = parse_layer(text)
        layer = LayerScheme(layer.weight.with_scale(ScaleType.BF16), layer.input)
        tensors.append(TensorPlan(f"t{number}", "BF16", (256, 256), Action.QUANTIZE, "", layer))
    return default_name(SimpleNamespace(path=path, source_notes={}), method, key, tensors, label)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "key", "schemes", "name"),
    [
        ("awq", "compressed-tensors", ["int4:g128:sym"], "wren-awq-int4"),
        ("awq+gptq", "compressed-tensors", ["int3:g128:sym"], "wren-awq-gptq-int3"),
        ("rtn", "compressed-tensors", ["int4:g64:asym"], "wren-rtn-int4-g64-asym"),
        ("rtn", "compressed-tensors", ["W8A8"], "wren-rtn-w8a8"),
        ("rtn", "compressed-tensors", ["int8:row:sym+int8:token:dynamic"], "wren-rtn-w8a8"),
        ("rtn", "compressed-tensors", ["W4A16"], "wren-rtn-int4"),
        ("rtn", "compressed-tensors", ["fp8"], "wren-rtn-fp8"),
        ("rtn", "compressed-tensors", ["nvfp4"], "wren-rtn-nvfp4"),
        ("rtn", "compressed-tensors", ["NVFP4_W4A4"], "wren-rtn-nvfp4-w4a4"),
        ("gptq", "gptq", ["int4:g128:sym"], "wren-int4-gptq"),
        ("awq", "awq", ["int4:g128:asym"], "wren-int4-awq"),
        ("awq", "awq", ["int4:g128:sym"], "wren-int4-sym-awq"),
        ("awq+gptq", "gptq", ["int4:g32:sym"], "wren-awq-gptq-int4-g32-gptq"),
        ("rtn", "bnb", ["nf4:g64:sym"], "wren-rtn-nf4-bnb"),
        ("rtn", "bnb", ["nf4:g64:sym:double"], "wren-rtn-nf4-double-bnb"),
        ("rtn", "compressed-tensors", ["int4", "int4", "int8"], "wren-rtn-int4-mixed"),
        ("rtn", "compressed-tensors", ["int4:g128", "int4:g64"], "wren-rtn-int4"),  # substituted
        ("rtn", "plain", [], "wren-plain"),
    ],
)
def test_default_names_follow_method_format_and_scheme(tmp_path, method, key, schemes, name):
    assert name_of_result(tmp_path / "wren", method, key, *schemes) == name


@pytest.mark.parametrize(
    ("pattern", "name"), [("50%", "wren-50zeros-wanda-plain"), ("2:4", "wren-2of4-wanda-plain")]
)
def test_sparsity_stays_in_the_names_of_derived_results(tmp_path, pattern, name):
    tensors = [TensorPlan("t", "BF16", (256, 256), Action.KEEP, "", None, sparse=True)]
    source, zeros = (
        SimpleNamespace(path=tmp_path / "wren", source_notes={}),
        parse_sparsity(pattern),
    )
    assert default_name(source, "wanda", "plain", tensors, zeros=zeros) == name  # type: ignore[arg-type]
    recipe = f'method = "wanda"\nformat = "plain"\nsparsity = "{pattern}"\n'
    document = {
        "schema": SCHEMA,
        "method": "wanda",
        "recipe": recipe,
        "source": {"model": "wren"},
        "outputs": {},
    }
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / NAME).write_text(json.dumps(document))
    again = name_of_result(tmp_path / "sparse", "rtn", "compressed-tensors", "int4:g128:sym")
    assert again == name.replace("wanda-plain", "rtn-int4")


def test_gguf_names_end_with_the_type(tmp_path):
    assert (
        name_of_result(tmp_path / "wren", "rtn", "gguf", "q4_k", label="Q4_K_M")
        == "wren-Q4_K_M.gguf"
    )
    assert (
        name_of_result(tmp_path / "wren", "gptq", "gguf", "q4_k", label="Q4_K_M")
        == "wren-gptq-Q4_K_M.gguf"
    )
    assert name_of_result(tmp_path / "wren", None, "gguf", "q4_0", label="Q4_0") == "wren-Q4_0.gguf"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--org--Wren-1B/snapshots/0123abc", "Wren-1B"),
        ("a b;$(c)\n", "a_b___c__"),
        (".hidden", "hidden"),
        ("-rf", "rf"),
        ("Größe", "Größe"),
        ("x" * 255, "x" * 120),
        ("...", "model"),
        ("wren-Q8_0.gguf", "wren"),
        ("wren.q4_k_m.gguf", "wren"),
        ("wren-Q8_0-00001-of-00003.gguf", "wren"),
        ("wren-v2.gguf", "wren-v2"),
        ("wren-mixed-4.06bpw.gguf", "wren"),
        ("mixed-4.06bpw.gguf", "mixed-4.06bpw"),
        ("Q8_0.gguf", "Q8_0"),
    ],
)
def test_model_names_are_sanitized_for_files(tmp_path, path, name):
    model = tmp_path / path
    assert name_of_result(model, "rtn", "gguf", label="F16") == f"{name}-F16.gguf"
    assert name_of_result(tmp_path / "wren" / ".", "rtn", "gguf", label="F16") == "wren-F16.gguf"


def test_exports_are_named_after_the_original_model(tmp_path):
    """Through any chain of exports; for foreign artifacts only the directory name is known."""
    first = {
        "schema": SCHEMA,
        "method": "awq",
        "recipe": "bits = 4",
        "source": {"model": "org/wren"},
        "outputs": {},
    }
    second = first | {"method": "export from x", "recipe": "", "source": {"model": "a"}}
    for number, document in enumerate(
        (first, second | {"lineage": first}, second | {"lineage": second | {"lineage": first}})
    ):
        artifact = tmp_path / f"wren-awq-int4-{number}"
        artifact.mkdir()
        (artifact / NAME).write_text(json.dumps(document))
        assert name_of_result(artifact, None, "gptq", "int4:g128:sym") == "wren-awq-int4-gptq"
        assert name_of_result(artifact, None, "gguf", "q4_0", label="Q4_0") == "wren-Q4_0.gguf"
        assert name_of_result(artifact, "gptq", "gptq", "int4:g128:sym") == "wren-int4-gptq"
        assert name_of_result(artifact, None, "mlx", "int4:g128:min") == "wren-awq-int4-mlx"
        assert name_of_result(artifact, None, "mlx", "int4:g32:min") == "wren-awq-int4-g32-mlx"
        assert name_of_result(artifact, None, "awq", "int4:g128:sym") == "wren-int4-awq"
    strange = tmp_path / "Wren-GPTQ"
    strange.mkdir()
    assert name_of_result(strange, None, "awq", "int4:g128:sym") == "Wren-GPTQ-awq"
    (strange / NAME).write_text(
        json.dumps({"schema": SCHEMA, "source": {"model": "../../etc"}, "outputs": {}})
    )
    assert name_of_result(strange, None, "awq", "int4:g128:sym") == "etc-int4-awq"


def test_the_default_output_is_outside_the_model_directory(tmp_path, monkeypatch):
    (tmp_path / "wren" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert default_path("x", Path("wren")) == Path("x")
    for inside in ("wren", "wren/sub"):
        monkeypatch.chdir(tmp_path / inside)
        assert default_path("x", tmp_path / "wren") == tmp_path / "x"


@pytest.mark.parametrize(
    ("recipe", "out", "key"),
    [
        (Recipe(), "x", "compressed-tensors"),
        (Recipe(bits=4), None, "compressed-tensors"),
        (Recipe(), "x.gguf", "gguf"),
        (Recipe(bits=8), "x.GGUF", "gguf"),
        (Recipe(format="gguf"), "x.gguf", "gguf"),
        (Recipe(type="Q4_K_M"), None, "gguf"),
        (Recipe(pre_tokenizer="llama-bpe"), None, "gguf"),
        (Recipe(scheme="nf4"), None, "bnb"),
        (Recipe(scheme="fp4:g64"), "x", "bnb"),
        (Recipe(scheme="LLM_INT8"), None, "bnb"),
        (Recipe(scheme="q4_k"), None, "gguf"),
        (Recipe(scheme="int4:g64:min"), None, "mlx"),
        (Recipe(scheme="fp8:128x128"), None, "compressed-tensors"),
        (Recipe(scheme="int5:g100"), None, "compressed-tensors"),
        (Recipe(bits=4, rules=(Rule("down_proj", "q6_k"),)), None, "gguf"),
        (Recipe(scheme="nf4", rules=(Rule("down_proj", "keep"),)), None, "bnb"),
        (Recipe(scheme="int4:g32", engine="llama.cpp"), None, "gguf"),
        (Recipe(scheme="int4:g64:sym", engine="mlx"), None, "mlx"),
        # no format holds both: the plan of the default one says what is in the way
        (Recipe(scheme="nf4", rules=(Rule("down_proj", "q6_k"),)), None, "compressed-tensors"),
        (Recipe(scheme="nf4", lm_head="nf4"), None, "compressed-tensors"),
    ],
)
def test_the_format_follows_from_recipe_and_output_name(recipe, out, key):
    chosen, notes = choose_format(recipe, out and Path(out))
    assert chosen.format == key
    assert bool(notes) == (not recipe.format and key != "compressed-tensors")
    assert choose_format(chosen, out and Path(out)) == (chosen, ())


def test_an_option_precedes_the_output_name_as_reason():
    _, by_type = choose_format(Recipe(type="Q8_0"), Path("x.gguf"))
    assert "--type Q8_0 is of GGUF files" in by_type[0]
    _, by_name = choose_format(Recipe(), Path("x.gguf"))
    assert "by the name of the result" in by_name[0]


@pytest.mark.parametrize(
    ("recipe", "out", "hint"),
    [
        (Recipe(format="awq"), "x.gguf", "--format gguf"),
        (Recipe(format="compressed-tensors", engine="vllm"), "x.gguf", "--format gguf"),
        (Recipe(format="gguf"), "x", "-o x.gguf"),
        (Recipe(type="Q4_K_M"), "x.Q4_K_M", "-o x.Q4_K_M.gguf"),
        (Recipe(type="Q4_K_M"), ".", "NAME.gguf"),
        (Recipe(), "x.safetensors", "-o x"),
    ],
)
def test_an_output_name_contradicting_the_format_is_refused(recipe, out, hint):
    with pytest.raises(UsageError) as refused:
        choose_format(recipe, Path(out))
    assert hint in refused.value.hint


def test_formats_holding_a_layer_scheme():
    assert formats_holding(parse_layer("nf4")) == ["bnb"]
    assert "compressed-tensors" in formats_holding(parse_layer("int4"))
    assert formats_holding(parse_layer("int7:g32:min")) == []
    with pytest.raises(InputError):
        choose_format(Recipe(scheme="nf5"))
