"""`reproduce`, `diff` and the provenance statements that supply-chain tools read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts.manifest import NAME, read_manifest, sha256
from quantforge.artifacts.provenance import BILL, STATEMENT
from quantforge.errors import InputError, IntegrityError
from quantforge.files.stage import Stage
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from quantforge.verification.difference import difference
from tests.conftest import Tiny
from tests.gguf_exports import NO_CALIBRATION
from tests.runs import (
    StopError,
    copy_model,
    fast_recipe,
    file_digests,
    quantize,
    recipe,
    run_command,
)


@pytest.fixture(scope="module")
def result(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results") / "m"
    quantize(tiny("llama-wide"), out, fast_recipe("gptq", scheme="int4:g32:sym"), provenance=True)
    return out


def test_reproduce_rebuilds_a_result_byte_for_byte(result, model):
    report = reproduce(result, str(model), Settings())
    assert report.differing == ()
    assert report.versions == {}
    assert report.files == len(file_digests(result)) - 2  # without the manifest and the card


def test_reproduce_reports_files_that_differ(result, model, tmp_path, capsys):
    other = copy_model(result, tmp_path / "m")
    document = json.loads((other / NAME).read_text())
    document["recipe"] = document["recipe"].replace('"gptq"', '"rtn"', 1)
    (other / NAME).write_text(json.dumps(document))
    ended = run_command(capsys, "reproduce", other, "--source", model, "--json")
    report = json.loads(ended.out)
    assert ended.code == 5
    assert report["schema"] == "quantforge.reproduce/1"
    assert "model.safetensors" in report["differing"]
    assert "config.json" not in report["differing"]


def test_reproduce_refuses_another_source_before_work(result, tiny, tmp_path):
    with pytest.raises(IntegrityError, match=r"config\.json"):
        reproduce(result, str(tiny("llama")), Settings())
    (tmp_path / "m").mkdir()
    with pytest.raises(InputError, match=f"no {NAME} in it"):
        reproduce(tmp_path / "m", str(tiny("llama")), Settings())


def test_reproduce_handles_gguf_results_and_gguf_sources(model, tmp_path):
    """The Modelfile is rebuilt too, and a renamed source file is accepted."""
    file, moved, out = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "m"
    plain = {"format": "gguf", "scales": "absmax", "calibration": NO_CALIBRATION}
    quantize(model, file, recipe(type="BF16", **plain), modelfile=True, provenance=True)
    report = reproduce(file, str(model))
    assert (report.files, report.differing) == (4, ())
    kept = reproduce(file, str(model), keep=tmp_path / "z.gguf")
    assert (kept.files, kept.differing) == (1, ())
    assert kept.left_out == ("a.Modelfile", "a.gguf.bom.cdx.json", "a.gguf.provenance.intoto.json")
    assert report.left_out == ()
    (tmp_path / "a.Modelfile").write_text("FROM ./other.gguf\n")
    edited = reproduce(file, str(model))
    assert edited.differing == edited.edited == ("a.Modelfile",)
    quantize(file, out, recipe(scheme="int4:g32:sym", calibration=NO_CALIBRATION))
    file.rename(moved)
    assert reproduce(out, str(moved)).differing == ()
    again = Recipe(method="rtn", type="Q8_0", **plain)
    api.export(str(out), again, tmp_path / "c.gguf", Settings(), source=moved)
    for other in (model, tmp_path / "c.gguf"):
        with pytest.raises(IntegrityError, match=r"made from: a\.gguf"):
            reproduce(out, str(other))


def test_diff_names_recipe_tensor_and_file_differences(result, model, tmp_path, capsys):
    quantize(model, tmp_path / "m", recipe(scheme="int8:g32:sym"))
    (tmp_path / "m" / "chat_template.jinja").write_text("{{ 'x' }}")
    differences = difference(result, tmp_path / "m")
    assert differences.recorded_differences["recipe.scheme"] == ["int4:g32:sym", "int8:g32:sym"]
    assert differences.files == ["chat_template.jinja"]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in differences.tensors} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}  # fmt: skip
    assert all(10 < value < 30 for value in differences.tensors.values())
    ended = run_command(capsys, "diff", result, tmp_path / "m", "--json")
    assert ended.code == 5
    assert json.loads(ended.out)["equal"] is False


def test_diff_of_a_copy_is_equal(result, tmp_path, capsys):
    again = copy_model(result, tmp_path / "again")
    differences = difference(result, again)
    assert differences.equal
    assert all(value == math.inf for value in differences.tensors.values())
    assert run_command(capsys, "diff", result, again).code == 0


def test_diff_reports_an_edited_configuration_but_not_the_card(result, tmp_path, capsys):
    again = copy_model(result, tmp_path / "again")
    (again / "README.md").write_text("figures")
    assert run_command(capsys, "diff", result, again).code == 0
    config = json.loads((again / "config.json").read_text())
    (again / "config.json").write_text(json.dumps(config | {"bos_token_id": 3}))
    ended = run_command(capsys, "diff", result, again)
    assert ended.code == 5
    assert "differs: the file config.json" in ended.out


def test_diff_accepts_a_recipe_without_one_field(result, tmp_path):
    again = copy_model(result, tmp_path / "again")
    document = json.loads((again / NAME).read_text())
    lacking = document["recipe"].replace("tune = 0\n", "")
    assert lacking != document["recipe"]
    (again / NAME).write_text(json.dumps(document | {"recipe": lacking}))
    differences = difference(result, again)
    assert differences.recorded_differences == {"recipe.tune": [0, None]}
    assert differences.missing_records == {"first": [], "second": []}
    (again / NAME).unlink()
    assert difference(result, again).missing_records["second"] == ["manifest", "recipe"]


def test_gguf_files_are_compared_byte_for_byte(model, tmp_path, capsys):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    api.export(model, out=first, format="gguf", bits=8)
    written = first.read_bytes()
    second.write_bytes(written)
    assert run_command(capsys, "diff", first, second).code == 0
    assert written.count(b"damping = 0.01") == 1
    second.write_bytes(written.replace(b"damping = 0.01", b"damping = 0.02"))
    ended = run_command(capsys, "diff", first, second)
    assert ended.code == 5
    assert "differs: the file b.gguf" in ended.out


@pytest.mark.parametrize(("first", "second"), [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_diff_handles_zero_nan_and_infinite_tensors(first, second, model, tmp_path, capsys):
    changed = [
        copy_with_norm(model, tmp_path / name, x) for name, x in (("a", first), ("b", second))
    ]
    differences = difference(*changed)
    assert set(differences.tensors.values()) == {-math.inf}
    assert not differences.equal
    assert run_command(capsys, "diff", *changed).code == 5
    assert all(difference(each, each).equal for each in changed)


def copy_with_norm(model: Path, out: Path, value: float) -> Path:
    """Return a copy of a model whose last norm is one value."""
    shard = copy_model(model, out) / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.norm.weight"].fill_(value)
    save_file(tensors, shard, {"format": "pt"})
    return out


@pytest.mark.parametrize("text", ["scheme =", "ignore = " + 1500 * "["])
def test_a_manifest_whose_recipe_is_damaged_is_refused(text, result, tmp_path, capsys):
    damaged = copy_model(result, tmp_path / "damaged")
    document = json.loads((damaged / NAME).read_text()) | {"recipe": text}
    (damaged / NAME).write_text(json.dumps(document))
    ended = run_command(capsys, "diff", result, damaged)
    assert ended.code == 3
    assert "the recipe of its manifest: not TOML" in ended.err


def test_provenance_lists_the_digest_of_every_file(result, model):
    statement = json.loads((result / STATEMENT).read_text())
    bill = json.loads((result / BILL).read_text())
    unlisted = {STATEMENT, BILL, NAME}
    expected = {
        name: digest for name, digest in file_digests(result).items() if name not in unlisted
    }
    subjects = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    assert subjects == expected
    (ancestor,) = bill["metadata"]["component"]["pedigree"]["ancestors"]
    hashes = {item["name"]: item["hashes"][0]["content"] for item in ancestor["components"]}
    assert hashes["model.safetensors"] == sha256(model / "model.safetensors", None)
    assert bill["specVersion"] == "1.6"
    assert (
        bill["components"][0]["hashes"][0]["content"]
        == read_manifest(result)["calibration"]["digest"]
    )
    assert {STATEMENT, BILL} < read_manifest(result)["outputs"].keys()


def test_provenance_is_written_only_on_request(model, tmp_path):
    quantize(model, tmp_path / "m", recipe())
    assert not (tmp_path / "m" / STATEMENT).exists()


def test_a_repeated_publication_lists_the_same_files(model, out, monkeypatch):
    """Side files of an interrupted publication are not listed as outputs."""
    plain = out.with_name("m") / "out"
    plain.parent.mkdir()
    quantize(model, plain, recipe(bits=8), provenance=True)
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "publish", raise_stop)
        with pytest.raises(StopError):
            quantize(model, out, recipe(bits=8), provenance=True)
    assert quantize(model, out, recipe(bits=8), provenance=True).resumed
    assert file_digests(out) == file_digests(plain)


def raise_stop(stage: Stage) -> None:
    raise StopError


def test_a_missing_or_damaged_manifest_is_named(model, tmp_path, capsys):
    """The manifest of a file has another name than in a directory; the hint points at that of a renamed file."""
    file = tmp_path / "a.gguf"
    quantize(
        model, file, recipe(format="gguf", type="BF16", scales="absmax", calibration=NO_CALIBRATION)
    )
    file.rename(tmp_path / "b.gguf")
    with pytest.raises(InputError, match=r"no b\.gguf\.quantforge\.json beside it") as refused:
        reproduce(tmp_path / "b.gguf", str(model))
    assert "a.gguf.quantforge.json" in refused.value.hint
    (tmp_path / "b.gguf").rename(file)
    side = tmp_path / "a.gguf.quantforge.json"
    side.write_text(side.read_text()[:-9])
    with pytest.raises(InputError, match=r"a\.gguf\.quantforge\.json: it is damaged"):
        reproduce(file, str(model))
    assert "manifest: damaged" in run_command(capsys, "inspect", file).out
    assert json.loads(run_command(capsys, "inspect", file, "--json").out)["provenance"].keys() == {
        "manifest"
    }
