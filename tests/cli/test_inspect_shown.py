"""Inspection as a user sees it: tensors, sizes, words on how a result was made."""

from __future__ import annotations

import json
import math
import re
import shutil

from quantforge.artifacts.manifest import NAME
from quantforge.artifacts.number_text import size, size_and_bytes
from quantforge.files.disk import run_folder
from tests.runs import CALIBRATION_ARGUMENTS, run_command


def test_inspect_says_in_words_how_a_result_was_made(model, tmp_path, capsys):
    out = tmp_path / "out"
    run_command(
        capsys,
        "quantize",
        model,
        "--method",
        "gptq",
        "--bits",
        "4",
        *CALIBRATION_ARGUMENTS,
        "-o",
        out,
    )
    told = run_command(capsys, "inspect", out).out
    assert "{" not in told
    assert re.search(r"^versions: quantforge \S+, python", told, re.M)
    assert re.search(r"^calibration: \S.*: \d+ rows of \d+ tokens$", told, re.M)
    assert re.search(r"^events: 1 few-calibration-tokens$", told, re.M)
    document = json.loads((out / NAME).read_text())
    odd = {"source": [], "calibration": {"sources": 5}, "event_counts": [1], "versions": None}
    (out / NAME).write_text(json.dumps(document | odd))
    assert run_command(capsys, "inspect", out).code == 0


def test_tensors_of_a_file_of_blocks_have_its_types_and_the_shapes_of_their_elements(
    tiny, tmp_path, capsys
):
    source, file = tiny("llama-wide"), tmp_path / "x.gguf"
    assert run_command(capsys, "export", source, "--type", "Q8_0", "-o", file).code == 0
    lines = run_command(capsys, "inspect", file, "--tensors", "*").out.splitlines()[1:]
    listed = {line.split()[0]: line.split()[1:3] for line in lines}
    plain = run_command(capsys, "inspect", source, "--tensors", "*").out.splitlines()[1:]
    assert {name: shape for name, (_, shape) in listed.items()} == {
        line.split()[0]: line.split()[2] for line in plain
    }
    assert {kind for kind, _ in listed.values()} == {"q8_0", "F32"}
    own = run_command(capsys, "inspect", file, "--tensors", "blk.0.ffn_d*").out.splitlines()[1:]
    assert [line.split()[:2] for line in own] == [
        ["blk.0.ffn_down.weight:", "model.layers.0.mlp.down_proj.weight"]
    ]
    found = json.loads(run_command(capsys, "inspect", file, "--json").out)
    held = next(one for one in found["tensors"] if one["dtype"] == "q8_0")
    assert held["bytes"] * 32 == 34 * math.prod(held["shape"])
    assert found["tensor_bytes"] == sum(one["bytes"] for one in found["tensors"])


def test_sizes_of_weights_and_of_files_have_their_own_words_everywhere(model, tmp_path, capsys):
    out = tmp_path / "out"
    asked = (model, "--method", "rtn", "--bits", "4", "--calibration", "none")
    planned, made = (
        run_command(capsys, "plan", *asked),
        run_command(capsys, "quantize", *asked, "-o", out),
    )
    files = (out / "model.safetensors").stat().st_size
    assert f", files {size(files)}, " in made.err
    assert re.search(rf"^files +{re.escape(size_and_bytes(files))} in 1$", planned.out, re.M)
    assert f"- files: {size_and_bytes(files)} in 1\n" in (out / "README.md").read_text()
    found = json.loads(run_command(capsys, "inspect", out, "--json").out)
    weights = found["tensor_bytes"]
    assert weights < files == found["file_bytes"]
    told = f"; weights {size(weights)}, files {size(files)}"
    assert told in run_command(capsys, "inspect", out).out
    measured = ("--windows", "1", "--length", "8", "--no-speed")
    shown = run_command(capsys, "eval", model, out, *measured).out
    assert "weights" in shown.splitlines()[1]
    assert "closest: out (KL 0." in shown
    assert f", weights {size(weights)})" in " ".join(shown.split())


def test_tensors_are_chosen_in_the_document_too(model, capsys):
    asked = ("inspect", model, "--tensors", "*.q_proj.*")
    names = [
        one["name"] for one in json.loads(run_command(capsys, *asked, "--json").out)["tensors"]
    ]
    assert names
    assert all(".q_proj." in name for name in names)
    listed = run_command(capsys, *asked).out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == names


def test_tensors_without_a_pattern_are_all(model, capsys):
    every = run_command(capsys, "inspect", model, "--tensors", "*").out
    assert ".q_proj." in every
    for asked in (
        (model, "--tensors"),
        ("--tensors", "--offline", model),
        (model, "--tensors", "all"),
    ):
        assert run_command(capsys, "inspect", *asked).out == every


def test_a_result_whose_run_has_not_ended_is_told_from_one_that_never_was(tmp_path, capsys):
    assert "no such directory\n" in run_command(capsys, "inspect", tmp_path / "g").err
    run_folder(tmp_path / "g").mkdir()
    result = run_command(capsys, "inspect", tmp_path / "g")
    assert (result.code, "has not ended" in result.err) == (3, True)


def test_an_importance_matrix_is_explained(model, tmp_path, capsys):
    for name in ("importance.gguf", "importance.dat"):
        file = tmp_path / name
        made = run_command(capsys, "quantize", model, "--type", "Q4_0", "--imatrix", file, *CALIBRATION_ARGUMENTS,
                       "-o", tmp_path / f"{file.suffix[1:]}.gguf")  # fmt: skip
        assert made.code == 0, made.err
        assert f"--imatrix {file}: made" in made.err
        told = run_command(capsys, "inspect", file)
        assert told.code == 0
        assert "importance matrix\nvalues " in told.out
        assert "mean squares of columns" in told.out
        assert "chunks: 6" in told.out
        listed = run_command(capsys, "inspect", file, "--tensors").out
        assert "blk.0.attn_q.weight" in listed


def test_inspect_names_the_chat_templates_that_are_taken(tiny, tmp_path, capsys):
    source = tmp_path / "m"
    shutil.copytree(tiny("llama-wide"), source)
    (source / "chat_template.jinja").write_text("D")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    file = tmp_path / "x.gguf"
    assert run_command(capsys, "export", source, "--type", "Q8_0", "-o", file).code == 0
    for model in (source, file):
        assert "\nchat templates: default, tool_use\n" in run_command(capsys, "inspect", model).out
    (source / "chat_template.jinja").write_bytes(b"\xff")
    assert (
        "cannot be read"
        in json.loads(run_command(capsys, "inspect", source, "--json").out)["notes"][0]
    )
