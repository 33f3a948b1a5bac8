"""The model card of a result: metadata for the hub, runnable loading code and a description of the work."""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from quantforge import api
from quantforge.api import export
from quantforge.artifacts import manifest
from quantforge.artifacts.card import (
    base_model,
    code,
    front_matter,
    hub_library,
    source_card_fields,
)
from quantforge.engines import TARGETS, snippets
from quantforge.errors import UsageError
from quantforge.files.hub import repository_name
from quantforge.formats import FORMATS, load_format
from quantforge.plans import EngineVerdict
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import CALIBRATION, copy_model, fast_recipe, quantize, recipe, run_command


def read_card(directory: Path) -> ModelCard:
    return ModelCard((directory / "README.md").read_text())


def loading_code(directory: Path, language: str, engine: str) -> str:
    text = (directory / "README.md").read_text()
    return text.partition(f"### {engine}\n\n```{language}\n")[2].partition("\n```")[0]


@pytest.mark.parametrize(
    ("format_key", "scheme", "packages"),
    [("compressed-tensors", "int4:g32:sym", "compressed-tensors"), ("plain", None, ""),
     ("bnb", "nf4", "bitsandbytes")],
)  # fmt: skip
def test_the_loading_code_of_a_card_runs(
    format_key: str, scheme: str | None, packages: str, tiny: Tiny, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for package in filter(None, [packages.replace("-", "_"), "accelerate"]):
        pytest.importorskip(package)
    requested_recipe = recipe(scheme=scheme, format=format_key, scales="absmax")
    quantize(tiny("llama-wide"), tmp_path / "q", requested_recipe)
    code = loading_code((tmp_path / "q").rename(tmp_path / "any-name"), "python", "transformers")
    assert f"pip install transformers accelerate {packages}".strip() in code
    assert "apply_chat_template" in code
    monkeypatch.chdir(tmp_path / "any-name")
    exec(compile(code, "card", "exec"), {})
    assert capsys.readouterr().out.startswith("user: What can you do?")


def test_every_engine_of_a_format_has_a_loading_snippet() -> None:
    for format_key in FORMATS:
        about = load_format(format_key).INFO
        loading_snippets = snippets(
            about, [EngineVerdict(name, True) for name in about.engines], "x", chat=False
        )
        assert [item.engine for item in loading_snippets] == list(about.engines)
        assert set(about.engine_packages) <= set(about.engines) <= set(TARGETS)
        for item in loading_snippets:
            assert "x" in item.code
            if item.language == "python":
                compile(item.code, item.engine, "exec")


def test_base_model_is_a_hub_name_or_omitted(tiny: Tiny, tmp_path: Path) -> None:
    model = copy_model(tiny("llama-wide"), tmp_path / "m")
    (model / "README.md").write_text(
        "---\nlicense: mit\nlanguage: no\nbase_model: other/thing\nwidget: [x]\n---\n# M\n"
    )
    requested_recipe = recipe(scheme="int8:row", scales="absmax")
    quantize(model, tmp_path / "a", requested_recipe)
    data = read_card(tmp_path / "a").data.to_dict()
    assert "base_model" not in data
    assert "base_model" not in manifest.read_manifest(tmp_path / "a")
    assert "base_model" not in (tmp_path / "a" / "README.md").read_text()
    quantize(model, tmp_path / "b", requested_recipe, base_model="org/name")
    data = read_card(tmp_path / "b").data.to_dict()
    assert data == {
        "base_model": "org/name", "base_model_relation": "quantized", "language": "no", "library_name": "transformers",
        "license": "mit", "pipeline_tag": "text-generation", "quantized_by": "quantforge",
        "tags": ["quantforge", "compressed-tensors"],
    }  # fmt: skip
    with pytest.raises(UsageError, match="no name of the hub"):
        Settings(base_model="../elsewhere")


def test_a_result_that_no_engine_loads_names_no_library(tiny: Tiny) -> None:
    plan = api.plan(str(tiny("llama-wide")), recipe(scheme="int8:row"))
    assert hub_library(plan) == "transformers"
    refusals = tuple(replace(verdict, loads=False) for verdict in plan.engines)
    assert hub_library(replace(plan, engines=refusals)) == ""
    assert "library_name" not in front_matter("", "", [], {}, tuned=False)


def test_an_export_card_lists_the_whole_lineage(tiny: Tiny, tmp_path: Path) -> None:
    rows = replace(CALIBRATION, random_share=0.5)
    requested_recipe = fast_recipe("gptq", scheme="int4:g32:sym:f16", calibration=rows)
    quantize(tiny("llama-wide"), tmp_path / "a", requested_recipe, base_model="org/name")
    export(tmp_path / "a", format="gptq", out=tmp_path / "b")
    export(tmp_path / "b", format="compressed-tensors", out=tmp_path / "c")
    text = (tmp_path / "c" / "README.md").read_text()
    for line in (
        "[org/name](https://huggingface.co/org/name), quantized by `gptq`",
        f"1. `{tiny('llama-wide').name}`: quantized by `gptq` into `compressed-tensors`",
        "2. `a`: exported to `gptq`", "3. `b`: exported to `compressed-tensors`",
        'method = "gptq"', "Calibrated on `6` rows of `24` tokens", ", `3` of them of random tokens; SHA-256",
    ):  # fmt: skip
        assert line in text, line
    assert read_card(tmp_path / "c").data.base_model == "org/name"
    document = manifest.read_manifest(tmp_path / "c")
    assert document is not None
    first = document["lineage"]["lineage"]
    assert (first["method"], first["base_model"]) == ("gptq", "org/name")
    assert first["recipe"] == manifest.read_manifest(tmp_path / "a")["recipe"]


def test_a_card_names_the_calibration_text(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "q"
    quantize(tiny("llama-wide"), out, fast_recipe("gptq", scheme="int4:g32:sym:f16"))
    sources = manifest.read_manifest(out)["calibration"]["sources"]
    text = (out / "README.md").read_text()
    assert f"tokens from `{', '.join(sources)}`;" in text


def test_a_card_title_does_not_depend_on_the_directory(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny("llama-wide")
    arguments = ("--method", "rtn", "--bits", "4", "--scales", "absmax", "-o", tmp_path / "my+name")
    result = run_command(capsys, "quantize", model, *arguments)
    assert f"hf upload ORG/my-name {tmp_path / 'my+name'} ." in result.err
    text = (tmp_path / "my+name" / "README.md").read_text()
    assert f"# {model.name} quantized by rtn (compressed-tensors)\n" in text
    assert f"{model.name}-rtn" not in text
    assert 'place = "."\n' in text
    assert "vllm serve . --served-model-name model\n" in text
    assert "The code loads it from `.`; the path of this directory, or its name on the hub," in text


def test_a_name_with_newlines_gets_no_snippet() -> None:
    about = load_format("gguf").INFO
    assert snippets(about, [EngineVerdict("llama.cpp", True)], "a\n```\nb.gguf", chat=True) == []


def test_names_are_quoted_for_shell_python_and_markdown() -> None:
    name = """it's "a" $(b)|`c`.gguf"""
    about = load_format("gguf").INFO
    served = snippets(about, [EngineVerdict("llama.cpp", True)], name, chat=True)[0].code
    command, request = served.split("\n\n# in another terminal\n")
    assert name in shlex.split(command)
    assert json.loads(shlex.split(request)[-1])["messages"]
    assert json.loads(shlex.split(request)[-1])["model"] in {name, name.removesuffix(".gguf")}
    (loaded,) = snippets(about, [EngineVerdict("transformers", True)], name, chat=False)
    (assignment,) = re.findall(r"^place = .*", loaded.code, re.MULTILINE)
    assert ast.literal_eval(assignment.removeprefix("place = ").partition("  # ")[0]) == name
    assert code("a.gguf") == "`a.gguf`"
    shown = code(name)
    assert not {"|", "`", "*"} & set(shown)
    assert html.unescape(shown) == f"<code>{name}</code>"


@pytest.mark.parametrize(
    "name", ["demo-awq+gptq-int4", "a--b..c", "-x-", "Größe", "x" * 200, "+", "a b"]
)
def test_repository_names_are_valid_on_the_hub(name: str) -> None:
    validate_repo_id(f"ORG/{repository_name(name)}")


def test_a_card_describes_events_and_experts_in_sentences(tiny: Tiny, tmp_path: Path) -> None:
    quantize(tiny("qwen3-moe"), tmp_path / "q", fast_recipe("gptq", scheme="int4:g128:sym"))
    text = (tmp_path / "q" / "README.md").read_text()
    assert "- A tensor cannot hold the scheme asked for and was given another: " in text
    assert "Its 8 experts saw " in text
    assert "calibration tokens each" in text


@pytest.mark.parametrize(
    "front",
    ["license: [", "license: {a: b}", f"license: {'[' * 5000}",
     f"language: [{'x,' * 20000}]", "license: &a [*a]", "license:"],
)  # fmt: skip
def test_invalid_front_matter_of_a_card_is_ignored(front: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    assert source_card_fields(tmp_path / "README.md") == {}


def test_the_first_model_of_a_lineage_is_the_base() -> None:
    hub = {"source": {"model": "org/first", "revision": "abc"}}
    document = {"source": {"model": "org/second", "revision": "def"}, "lineage": hub}
    assert base_model("", document, {}) == "org/first"
    assert base_model("my/own", document, {}) == "my/own"
    assert base_model("", {"source": {"model": "there"}}, {"_name_or_path": "a/b"}) == "a/b"
    assert base_model("", {"source": {"model": "a/b"}}, {"_name_or_path": "/a/b"}) == ""
    for wrong in ("x\nlicense: mit", 3, "/srv/models/x"):
        assert base_model("", {"source": {"model": "a"}}, {"_name_or_path": wrong}) == ""
    assert base_model("", {"source": {"model": "a"}, "lineage": {"source": "damaged"}}, {}) == ""
