"""The command line as a user meets it: help, documents, errors with hints and exit codes, and the main job."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quantforge.checkpoint.disk import place_of_run
from quantforge.cli.app import RESUMED
from quantforge.cli.console import Console
from quantforge.cli.stopping import Stopped
from quantforge.errors import InputError
from quantforge.execution.progress import Progress
from quantforge.execution.record import scaled_of
from quantforge.results.manifest import NAME
from quantforge.results.significant import size, sized
from tests.conftest import Tiny
from tests.runs import ROWS, command, copied

VERBS = (
    "plan", "quantize", "export", "eval", "generate", "verify", "reproduce", "diff", "inspect", "formats", "recipes",
    "doctor",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "triton", "numpy", "tokenizers", "huggingface_hub")
EVAL = ("--windows", "4", "--length", "32", "--no-speed")


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny("llama-wide")


# ---- help and imports


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("quantforge")
    compiled = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # as an installed program is
    compiled.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([script, "--help"], capture_output=True, check=True, env=compiled)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [script, "--help"], capture_output=True, text=True, check=True, env=compiled
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent <= 1.0
    assert all(verb in result.stdout for verb in VERBS)
    assert result.stderr == ""


def test_nothing_heavy_is_imported_before_there_is_work(model: Path, tmp_path: Path) -> None:
    """One process runs command after command, and looks at what each of them has imported."""
    taken, damaged = tmp_path / "taken", copied(model, tmp_path / "damaged")
    taken.mkdir()
    (damaged / "model.safetensors").write_bytes(b"x")
    fine = [["--help"], ["--version"], ["formats"], ["recipes"], ["recipes", "balanced-4bit"],
            ["plan", model], ["plan", model, "--method", "awq", "--json"], ["inspect", model],
            ["plan", model, "--context", "64", "--device-name", "l4"],
            *([verb, "--help"] for verb in VERBS)]  # fmt: skip
    refusals = [
        ["quantize", model, "-o", taken], ["quantize", model, "-o", model / "inside"],
        ["quantize", "./absent", "-o", tmp_path / "o"], ["quantize", damaged, "-o", tmp_path / "o"],
        ["quantize", model, "--method", "gtpq", "-o", tmp_path / "o"],
        ["quantize", model, "--bits", "11", "-o", tmp_path / "o"],
        ["quantize", model, "--ignore", "q_porj", "-o", tmp_path / "o"],
        ["quantize", model, "--scheme", "int4:g256", "--strict", "-o", tmp_path / "o"],
        ["quantize", model, "-o", tmp_path / "no" / "o"],
        ["export", model, "--format", "qptq", "-o", tmp_path / "o"], ["export", model, "-o", taken],
        ["eval", "./absent"], ["eval", model, damaged], ["eval", model, "--report", "r.txt"],
        ["inspect", damaged], ["plan", damaged], ["recipes", "x"], ["plam"],
    ]  # fmt: skip
    script = f"""
import sys, json, io, contextlib
from quantforge.cli.app import main
for arguments in json.loads(sys.stdin.read()):
    sys.argv = ["quantforge", *arguments]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found = [name for name in {HEAVY} if name in sys.modules]
    sys.__stdout__.write(json.dumps([arguments, code, found, err.getvalue()]) + chr(10))
"""
    commands = [[str(word) for word in words] for words in (*fine, *refusals)]
    result = subprocess.run([sys.executable, "-c", script], input=json.dumps(commands),
                            capture_output=True, text=True, check=True, cwd=tmp_path)  # fmt: skip
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == len(commands)
    for number, (arguments, code, found, err) in enumerate(lines):
        assert found == [], arguments
        assert (code == 0) is (number < len(fine)), (arguments, err)
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "damaged"}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(capsys, verb):
    result = command(capsys, verb, "--help")
    assert result.code == 0
    assert result.err == ""
    assert f"quantforge {verb}" in result.out
    assert "Example:" in result.out or verb in {"formats", "recipes", "doctor"}


def test_without_arguments_it_shows_the_help(capsys):
    assert command(capsys).out == command(capsys, "--help").out


def test_the_page_names_the_verbs_that_an_interruption_does_not_cost():
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    told = (
        page.partition("### After a signal")[2].partition("## Events")[0].partition("All other")[0]
    )
    assert RESUMED | {"export", "eval"} == {*re.findall(r"`([a-z]+)`", told)}


# ---- documents


def test_inspect_says_in_words_how_a_result_was_made(model, tmp_path, capsys):
    out = tmp_path / "out"
    command(capsys, "quantize", model, "--method", "gptq", "--bits", "4", *ROWS, "-o", out)
    told = command(capsys, "inspect", out).out
    assert "{" not in told
    assert re.search(r"^versions: quantforge \S+, python", told, re.M)
    assert re.search(r"^calibration: \S.*: \d+ rows of \d+ tokens$", told, re.M)
    assert re.search(r"^events: 1 calibration-short$", told, re.M)
    document = json.loads((out / NAME).read_text())
    odd = {"source": [], "calibration": {"sources": 5}, "event_counts": [1], "versions": None}
    (out / NAME).write_text(json.dumps(document | odd))
    assert command(capsys, "inspect", out).code == 0


def test_tensors_of_a_file_of_blocks_have_its_types_and_the_shapes_of_their_elements(
    tiny, tmp_path, capsys
):
    source, file = tiny("llama-wide"), tmp_path / "x.gguf"
    assert command(capsys, "export", source, "--type", "Q8_0", "-o", file).code == 0
    lines = command(capsys, "inspect", file, "--tensors", "*").out.splitlines()[1:]
    listed = {line.split()[0]: line.split()[1:3] for line in lines}
    plain = command(capsys, "inspect", source, "--tensors", "*").out.splitlines()[1:]
    assert {name: shape for name, (_, shape) in listed.items()} == {
        line.split()[0]: line.split()[2] for line in plain
    }
    assert {kind for kind, _ in listed.values()} == {"q8_0", "F32"}
    found = json.loads(command(capsys, "inspect", file, "--json").out)
    held = next(one for one in found["tensors"] if one["dtype"] == "q8_0")
    assert held["bytes"] * 32 == 34 * math.prod(held["shape"])
    assert found["tensor_bytes"] == sum(one["bytes"] for one in found["tensors"])


def test_sizes_of_weights_and_of_files_have_their_own_words_everywhere(model, tmp_path, capsys):
    out = tmp_path / "out"
    asked = (model, "--method", "rtn", "--bits", "4", "--calibration", "none")
    planned, made = command(capsys, "plan", *asked), command(capsys, "quantize", *asked, "-o", out)
    files = (out / "model.safetensors").stat().st_size
    assert f", files {size(files)}, " in made.err
    assert re.search(rf"^files +{re.escape(sized(files))} in 1$", planned.out, re.M)
    assert f"- files: {sized(files)} in 1\n" in (out / "README.md").read_text()
    found = json.loads(command(capsys, "inspect", out, "--json").out)
    weights = found["tensor_bytes"]
    assert weights < files == found["file_bytes"]
    told = f"; weights {size(weights)}, files {size(files)}"
    assert told in command(capsys, "inspect", out).out
    measured = ("--windows", "1", "--length", "8", "--no-speed")
    shown = command(capsys, "eval", model, out, *measured).out
    assert "weights" in shown.splitlines()[1]
    assert "closest: out (KL 0." in shown
    assert f", weights {size(weights)})" in " ".join(shown.split())


def test_the_summary_tells_for_how_many_activations_factors_were_found(model, tmp_path, capsys):
    asked = ("quantize", model, "--bits", "4", *ROWS)
    said = command(capsys, *asked, "--method", "awq", "-o", tmp_path / "a").err
    (told,) = re.findall(r"^columns scaled for (\d+) of (\d+) activations; ", said, re.M)
    assert 0 <= int(told[0]) <= int(told[1]) > 0
    assert "scaled" not in command(capsys, *asked, "--method", "rtn", "-o", tmp_path / "r").err
    records = [{"transform": {"a": {"family": "none"}, "b": {"family": "duo"}}}, {"events": []}]
    assert scaled_of(records) == (1, 2)
    assert scaled_of([{"transform": {"a": {"error": 0.5}}}]) is None


def test_tensors_are_chosen_in_the_document_too(model, capsys):
    asked = ("inspect", model, "--tensors", "*.q_proj.*")
    names = [one["name"] for one in json.loads(command(capsys, *asked, "--json").out)["tensors"]]
    assert names
    assert all(".q_proj." in name for name in names)
    listed = command(capsys, *asked).out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == names


def test_tensors_without_a_pattern_are_all(model, capsys):
    every = command(capsys, "inspect", model, "--tensors", "*").out
    assert ".q_proj." in every
    for asked in (
        (model, "--tensors"),
        ("--tensors", "--offline", model),
        (model, "--tensors", "all"),
    ):
        assert command(capsys, "inspect", *asked).out == every


def test_a_result_whose_run_has_not_ended_is_told_from_one_that_never_was(tmp_path, capsys):
    assert "no such directory\n" in command(capsys, "inspect", tmp_path / "g").err
    place_of_run(tmp_path / "g").mkdir()
    result = command(capsys, "inspect", tmp_path / "g")
    assert (result.code, "has not ended" in result.err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        (["plan", "MODEL"], "quantforge.plan/1"),
        (["plan", "MODEL", "-q", "--tensors"], "quantforge.plan/1"),
        (["inspect", "MODEL"], "quantforge.inspect/1"),
        (["inspect", "MODEL/model.safetensors"], "quantforge.inspect/1"),
        (["verify", "MODEL", "--no-forward"], "quantforge.verify/1"),
        (["diff", "MODEL", "MODEL"], "quantforge.diff/1"),
        (["formats"], "quantforge.formats/1"),
        (["recipes"], "quantforge.recipes/2"),
        (["recipes", "fast-8bit"], "quantforge.recipe/1"),
        (["doctor"], "quantforge.doctor/1"),
    ],
)
def test_json_is_one_document_with_a_schema(model, capsys, arguments, schema):
    result = command(capsys, *(word.replace("MODEL", str(model)) for word in arguments), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["schema"] == schema
    assert result.err == ""


def test_an_error_as_json_is_an_object_on_stderr(model, tmp_path, capsys):
    out = tmp_path / "out"
    result = command(capsys, "quantize", model, "--method", "x", "-o", out, "--json")
    assert result.out == ""
    error = json.loads(result.err)["error"]
    assert error["code"] == "usage"
    assert error["message"]
    assert error["hint"]


def test_stdout_has_the_path_and_stderr_the_progress(model, tmp_path, capsys):
    loud = command(capsys, "quantize", model, "--scales", "absmax", "-v", "-o", tmp_path / "a")
    assert loud.out == f"{tmp_path / 'a'}\n"
    parts = [line for line in loud.err.splitlines() if line.startswith("block ")]
    assert len(parts) == 2
    assert all("peak" in line for line in parts)
    quiet = command(capsys, "quantize", model, "--scales", "absmax", "-o", tmp_path / "b", "-q")
    assert quiet.out == f"{tmp_path / 'b'}\n"
    assert quiet.err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}, "no log that nobody asked for"


def test_times_go_to_a_log_that_is_named_and_to_no_file_of_others(model, tmp_path, capsys):
    log, mine = tmp_path / "log", tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "nowhere").symlink_to("new")
    os.mkfifo(tmp_path / "pipe")
    options = ("quantize", model, "--scales", "absmax", "-q", "-o", tmp_path / "a", "--log")
    bad = {"mine": 4, "link": 4, "nowhere": 4, "pipe": 4, "no/log": 3, "a/log": 3, model / "log": 2}
    for name, code in bad.items():
        assert command(capsys, *options, tmp_path / name).code == code, name
    assert mine.read_text() == "mine"
    assert not (tmp_path / "a").exists()
    assert command(capsys, *options, log).code == 0
    parts = [json.loads(line)["part"] for line in log.read_text().splitlines()]
    assert parts == ["outer", "block 0", "block 1", "head"]
    assert command(capsys, *options, log, "--overwrite").code == 0
    assert len(log.read_text().splitlines()) == 8, "it goes on"
    for name in ("mine.md", "link.md"):
        (tmp_path / name).symlink_to("mine")
        ended = command(capsys, "eval", model, "--report", tmp_path / name, "--overwrite")
        assert ended.code == 4, ended.err
    (tmp_path / "old.md").write_text("mine")
    assert command(capsys, "eval", model, "--report", tmp_path / "old.md").code == 4
    assert mine.read_text() == "mine"


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plam"], 2, ["plam", "'plan'"]),
        (["plan"], 2, ["MODEL", "quantforge plan"]),
        (["plan", "MODEL", "--metod", "rtn"], 2, ["--metod", "--method"]),
        (["plan", "MODEL", "--method", "gtpq"], 2, ["gtpq", "'gptq'"]),
        (["plan", "MODEL", "--method", "awq,gptq"], 2, ["'awq,gptq'", "--method awq+gptq"]),
        (["plan", "MODEL", "--method", "gptq-awq"], 2, ["'gptq-awq'", "--method awq+gptq"]),
        (["plan", "MODEL", "--method", "aqw"], 2, ["error: unknown method 'aqw'\n", "'awq'"]),
        (["plan", "MODEL", "--method", "aqw+gptq"], 2, ["'aqw' in 'aqw+gptq'", "'awq'"]),
        (["plan", "MODEL", "--context", "64", "--device-name", "H100"], 2, ["'h100-pcie' or 'h100-sxm'"]),
        (["verify", "MODEL", "--for", "tgii", "-q"], 2, ["tgii", "'tgi'"]),
        (["plan", "MODEL", "--method", "gptq+awq"], 2, ["gptq+awq", "awq+gptq"]),
        (["plan", "MODEL", "--format", "compresed-tensors"], 2, ["'compressed-tensors'"]),
        (["plan", "MODEL", "--bits", "9"], 2, ["--bits"]),
        (["plan", "MODEL", "--bits", "4", "--scheme", "int4"], 2, ["--bits", "--scheme"]),
        (["plan", "MODEL", "--rule", "q_proj"], 2, ["q_proj", "PATTERN=keep"]),
        (["plan", "MODEL", "--allow", "substitutoin=1"], 2, ["'substitution'"]),
        (["plan", "MODEL", "--allow", "substitution"], 2, ["EVENT=N"]),
        (["plan", "MODEL", "--allow", "substitution=²"], 2, ["EVENT=N"]),
        (["plan", "MODEL", "--activations", "dsk"], 2, ["'disk'"]),
        (["quantize", "MODEL", "--device", "gpu", "-o", "OUT"], 2, ["gpu", "cuda"]),
        (["quantize", "MODEL", "--device", "cuda:99", "-o", "OUT"], 2, ["--device cpu"]),
        (["quantize", "MODEL", "--device", "cuda:99", "--imatrix", "OUT"], 2, ["--device cpu"]),
        (["verify", "MODEL", "--device", "cuda:99"], 2, ["--device cpu"]),
        (["quantize", "MODEL", "--format", "awq", "-o", "OUT.gguf"], 2, ["out.gguf", "--format gguf"]),
        (["quantize", "MODEL", "--type", "Q8_0", "-o", "OUT"], 2, ["-o ", "out.gguf"]),
        (["quantize", "MODEL", "--type", "Q8_0", "--format", "bnb"], 2, ["--type", "bnb", "gguf"]),
        (["quantize", "MODEL", "--bits", "8", "--modelfile"], 2, ["--modelfile", "gguf"]),
        (["quantize", "MODEL", "--method", "awq", "--format", "plain"], 2, ["awq", "nothing is rounded"]),
        (["quantize", "MODEL", "-o", "MODEL"], 2, ["overlaps", "beside"]),
        (["export", "MODEL", "-o", "OUT"], 2, ["--format", "quantforge formats"]),
        (["eval", "MODEL", "--report", "r.txt"], 2, ["r.txt", ".md"]),
        (["eval", "MODEL", "--max-ppl-increase", "lots"], 2, ["lots", "2%"]),
        (["eval", "MODEL", "--max-ppl-increase", "2"], 2, ["2% or 200%?", "write 2% or 0.02"]),
        (["bench", "MODEL", "--served-name", "x"], 2, ["--served-name", "add --url"]),
        (["generate", "MODEL", "x", "--draft-tokens", "4"], 2, ["--draft-tokens", "add --draft"]),
        (["generate", "MODEL", "x", "--include-stop"], 2, ["--include-stop", "add --stop"]),
        (["bench", "MODEL", "--share", "50"], 2, ["--share 50", "write 50% or 0.5"]),
        (["eval", "MODEL", "--engine", "llama.cpp"], 2, ["none of the models", "--format gguf"]),
        (["quantize", "MODEL", "--tensor-parallel", "2"], 2, ["--tensor-parallel 2", "--for ENGINE"]),
        (["plan", "MODEL", "--tensor-parallel", "2"], 2, ["--tensor-parallel 2", "--for ENGINE"]),
        (["export", "MODEL", "--format", "gptq", "--tensor-parallel", "2"], 2, ["--for ENGINE"]),
        (["eval", "MODEL", "--generated-tokens", "9"], 2, ["--generated-tokens", "add --generated"]),
        (["eval", "MODEL", "--chat-template"], 2, ["--chat-template", "add --generated"]),
        (["eval", "MODEL", "--task-limit", "9"], 2, ["--task-limit", "add --tasks"]),
        (["eval", "MODEL", "--allow-code"], 2, ["--allow-code", "add --tasks"]),
        (["eval", "MODEL", "--cache", "int8", "--no-speed"], 2, ["--cache int8", "measure speed"]),
        (["inspect", "MODEL", "--tensors", "q_proj"], 2, ["q_proj", "--tensors '*q_proj*'"]),
        (["inspect", "MODEL", "--tensors", "*.q_porj"], 2, ["q_porj", "'*q_proj*'"]),
        (["inspect", "MODEL", "--tensors", "*", "--derive"], 2, ["--tensors", "--derive"]),
        (["plan", "./absent"], 3, ["absent", "directory"]),
        (["plan", "MODEL", "--scheme", "int9"], 2, ["int9", "'int"]),
        (["plan", "MODEL", "--scheme", "int4:g0"], 2, ["g0", "g128"]),
        (["plan", "MODEL", "--scheme", "int4:g128:asymm"], 2, ["asymm", "asym"]),
        (["plan", "MODEL", "--ignore", "q_porj"], 3, ["q_porj", "'q_proj'"]),
        (["plan", "MODEL", "--rule", "dwn_proj=int8"], 3, ["dwn_proj", "'down_proj'"]),
        (["plan", "MODEL", "--rule", "re:(a+)+$=int8"], 3, ["repetition"]),
        (["plan", "MODEL", "--ignore", "re:["], 3, ["re:'[' is no regular expression"]),
        (["plan", "MODEL", "--rule", "q_proj=int8", "--rule", "k_proj=int4"], 3, ["one matrix"]),
        (["plan", "MODEL", "--recipe", "balancd-4bit"], 3, ["'balanced-4bit'"]),
        (["plan", "MODEL", "--recipe", "RECIPE"], 3, ["unknown key", "'method'"]),
        (["plan", "MODEL", "--head", "int8", "--ignore", "*"], 3, ["nothing"]),
        (["recipes", "fast"], 2, ["'fast-8bit'"]),
        (["quantize", "MODEL", "-o", "OUT/a/b"], 3, ["mkdir -p"]),
        (["quantize", "MODEL", "--method", "gptq", "--calibration", "no.txt", "-o", "OUT"], 3, ["no.txt"]),
        (["inspect", "RECIPE"], 3, ["safetensors"]),
        (["eval", "MODEL", "RECIPE"], 3, ["a recipe, not a model"]),
        (["inspect", "nothing.gguf"], 3, ["nothing.gguf: no such file"]),
        (["inspect", "nothing"], 3, ["nothing: no such directory"]),
        (["allocate", "MODEL", "--target", "3.5", "-o", "OUT"], 2, ["--target 3.5: no size", "3.5bpw"]),
        (["eval", "MODEL", "--text", "no.txt"], 3, ["no.txt"]),
        (["plan", "MODEL", "--scheme", "int4:g256:sym", "--strict"], 4, ["--allow substitution="]),
        (["plan", "MODEL", "--scheme", "int4:g127"], 2, ["groups of 127", "no linear (128, 256)", "g64, g32, g16"]),
        (["plan", "MODEL", "--bits", "4", "--rule", "down_proj=int8:g100"], 2, ["g128, g64, g32, g16"]),
        (["plan", "MODEL", "--format", "awq", "--bits", "3"], 4, ["4 bits", "--format compressed-tensors"]),
        (["plan", "MODEL", "--format", "plain", "--bits", "4"], 4, ["plain", "compressed-tensors"]),
        (["plan", "MODEL", "--format", "fp8", "--strict"], 4, ["coverage", "77.8%", "k_proj"]),
        (["plan", "MODEL", "--format", "awq", "--scheme", "nf4"], 4, ["nf4", "--format bnb"]),
        (["plan", "MODEL", "--format", "gguf", "--scheme", "nf4"], 4, ["nf4", "--format bnb"]),
        (["plan", "MODEL", "--format", "gptq", "--rule", "down_proj=int8"], 4, ["compressed-tensors"]),
        (["quantize", "MODEL", "-o", "TAKEN"], 4, ["exists", "--overwrite"]),
        (["quantize", "MODEL", "-o", "TAKEN", "--overwrite"], 4, ["not a result"]),
    ],
)  # fmt: skip
def test_a_refusal_says_what_and_what_to_type(model, tmp_path, capsys, arguments, code, words):
    places = {"MODEL": model, "OUT": tmp_path / "out", "TAKEN": tmp_path / "taken"}
    places["RECIPE"] = tmp_path / "recipe.toml"
    places["RECIPE"].write_text('methd = "rtn"\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    for key, value in places.items():
        arguments = [word.replace(key, str(value)) for word in arguments]
    before = {path.name for path in tmp_path.iterdir()}
    result = command(capsys, *arguments)
    assert result.code == code, result.err
    error, hint = result.err.split("hint: ")
    # What was chosen is said first, where it comes to that.
    told, found, error = error.rpartition("error: ")
    assert found
    assert all(line.startswith("chosen: ") for line in told.splitlines())
    assert hint.strip()
    for word in words:
        assert word in result.err
    assert "Traceback" not in result.err
    if arguments[0] != "plan":
        assert result.out == ""
    assert {path.name for path in tmp_path.iterdir()} == before


def test_an_engine_that_is_not_installed_is_told_before_a_file_is_read(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("quantforge.evaluation.llama_cpp.find_spec", lambda _: None)
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    asked = ("eval", model, tmp_path / "damaged.gguf")
    result = command(capsys, *asked, "--engine", "llama.cpp")
    assert result.code == 2, result.err
    assert "pip install 'quantforge[llamacpp]'" in result.err
    assert command(capsys, *asked).code == 3


def test_names_in_hostile_files_do_not_drive_the_terminal(model, tmp_path, capsys):
    source = copied(model, tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "evil\x1b[2J\x07", "_name_or_path": "x\nlicense: mit"}
    (source / "config.json").write_text(json.dumps(config))
    for arguments in (
        ["plan", source, "--tensors"],
        ["inspect", source],
        ["plan", source, "--method", "gptq"],
    ):
        result = command(capsys, *arguments)
        assert "\x1b" not in result.out + result.err
        assert "\x07" not in result.out + result.err
    assert command(capsys, "quantize", source, "-o", tmp_path / "o", "-q").code == 0
    assert "license: mit" not in (tmp_path / "o" / "README.md").read_text()


def test_a_bug_of_ours_is_told_from_a_bad_input(model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("quantforge.verbs.plan", lambda *_, **__: 1 / 0)
    result = command(capsys, "plan", model)
    assert result.code == 1
    assert "Traceback" not in result.err
    (saved,) = tmp_path.glob("*.traceback")
    assert "ZeroDivisionError" in saved.read_text()
    assert str(saved) in result.err
    assert "Traceback" in command(capsys, "plan", model, "--debug").err


def test_memory_that_runs_out_is_no_bug(model, capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("quantforge.verbs.plan", fail)
    result = command(capsys, "plan", model)
    assert result.code == 7
    assert "hint: " in result.err


def test_a_closed_pipe_is_no_bug(model):
    script = Path(sys.executable).with_name("quantforge")
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([script, "plan", model], stdout=writing, stderr=subprocess.PIPE, text=True,
                            check=False)  # fmt: skip
    os.close(writing)
    assert result.returncode == 141
    assert result.stderr == ""


# ---- the plan is what happens


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bits", "3"], ["--scheme", "int4:g32:asym"], ["--scheme", "int8:row"], ["--scheme", "int4:tensor"],
        ["--scheme", "int5:g256"], ["--bits", "4", "--format", "gptq"], ["--bits", "4", "--format", "awq"],
        ["--rule", "down_proj=int8:g64:sym", "--ignore", "*.layers.0.*", "--max-shard-bytes", "50000"],
        ["--head", "int8", "--embedding", "int8"], ["--rule", "lm_head=int6"],
    ],
)  # fmt: skip
def test_the_plan_is_what_quantize_does(model, tmp_path, capsys, arguments):
    planned = json.loads(command(capsys, "plan", model, *arguments, "--json").out)
    out = tmp_path / "out"
    done = command(capsys, "quantize", model, *arguments, *ROWS, "-o", out, "--json")
    result = json.loads(done.out)
    weights = list(out.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in weights) == planned["output_bytes"]
    assert len(weights) == planned["files"]
    for key in ("output_bytes", "bits_per_weight", "bits_per_weight_total", "format", "method"):
        assert result[key] == planned[key]
    manifest = json.loads((out / "quantforge.manifest.json").read_text())
    chosen = {(t["name"], t["action"], t["rule"], t["scheme"]) for t in planned["tensors"]}
    written = {(t["name"], t["action"], t["rule"], t.get("scheme")) for t in manifest["tensors"]}
    assert chosen == written
    assert planned["substitutions"] == [
        e for e in manifest["events"] if e["kind"] == "substitution"
    ]
    found = json.loads(command(capsys, "inspect", out, "--json").out)
    assert found["tensor_bytes"] == sum(tensor["bytes"] for tensor in planned["tensors"])
    assert found["file_bytes"] == planned["output_bytes"]
    assert found["bits_per_weight"] == pytest.approx(planned["bits_per_weight_total"])
    assert found["bits_per_quantized_weight"] == pytest.approx(planned["bits_per_weight"])


def test_options_override_the_recipe(model, capsys):
    result = command(
        capsys, "plan", model, "--recipe", "small-3bit", "--bits", "5", "--method", "rtn", "--json"
    )
    planned = json.loads(result.out)
    assert planned["method"] == "rtn"
    schemes = {tensor["scheme"] for tensor in planned["tensors"] if tensor["scheme"]}
    assert schemes == {"int5:g128:sym:bf16", "int4:g128:sym:bf16"}  # the recipe's rule stays


def test_an_event_is_shown_and_counted(tiny, tmp_path, capsys):
    arguments = ("quantize", tiny("llama"), "--scales", "absmax", "-o", tmp_path / "out")
    assert "event substitution x18" in command(capsys, *arguments).err
    again = command(capsys, *arguments, "--overwrite", "--strict", "--json")
    assert again.code == 4
    assert json.loads(again.err)["error"]["code"] == "refused"


def test_arguments_that_are_no_utf_8_are_refused_before_the_work(capsys):
    result = command(capsys, "plan", "models/\udcff", "--bits", "4")
    assert result.code == 2
    assert "not UTF-8" in result.err


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "a" * 5000), ("verify", "a" * 300), ("diff", "a" * 300, "b"), ("plan", "b", "--recipe", "c" * 300)],
)  # fmt: skip
def test_names_that_are_too_long_are_refused_wherever_they_stand(capsys, arguments):
    result = command(capsys, *arguments)
    assert result.code == 3
    assert result.err.startswith("error: ")


def test_a_number_of_threads_that_would_end_the_process_is_refused(model, tmp_path, capsys):
    for verb in (["quantize", model, "-o", tmp_path / "o"], ["eval", model]):
        result = command(capsys, *verb, "--threads", "100000")
        assert result.code == 2
        assert "more than" in result.err


def watched(console: Console, line: str) -> None:
    with console.watch():
        console.show(Progress(phase=line, step=line))


def test_no_text_of_others_reaches_a_terminal_raw(capsys):
    """Control characters (C0, C1), directions of writing and halves of pairs are escaped on every way out."""
    text = "a\x1b[2J\x9b31m\u202e\u2066\udcff\r\u2028b"
    console = Console(as_json=True)
    console.document({"name": text, text: [text], "much": float("inf")})
    assert json.loads(capsys.readouterr().out)["name"] == text
    for tell in (
        console.note,
        console.text,
        lambda line: watched(console, line),
        lambda line: console.table([line], [[line]]),
    ):
        tell(text)
    for as_json in (False, True):
        Console(as_json=as_json).error(InputError(text, text, file=text))
    console.document({"name": text})
    told = capsys.readouterr()
    assert {c for c in told.out + told.err if not c.isprintable()} == {"\n"}


def test_a_terminal_that_is_not_utf_8_gets_escapes(model, tmp_path):
    copy = copied(model, tmp_path / "mödell")
    told = subprocess.run(
        [Path(sys.executable).with_name("quantforge"), "inspect", copy],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert b"m\\xf6dell" in told.stdout


# ---- the commands of the mission, as a person types them


def test_results_have_names_of_their_own(model, tmp_path, capsys, monkeypatch):
    """Without -o: said before the work, the same in the plan, and what exists is refused."""
    monkeypatch.chdir(tmp_path)
    typed = ["quantize", model, "--scales", "absmax", "--bits", "4"]
    made = command(capsys, *typed, "-v")
    name = f"{model.name}-rtn-int4"
    assert (made.code, made.out) == (0, f"{name}\n")
    assert made.err.index(f"output: ./{name}") < made.err.index("block 0")
    planned = command(capsys, "plan", *typed[1:], "--json")
    assert json.loads(planned.out)["output"] == name
    assert f"./{name}\n" in command(capsys, "plan", *typed[1:]).out
    again = command(capsys, *typed)
    assert (again.code, "exists" in again.err) == (4, True)
    moved = command(capsys, "export", f"{name}/", "--format", "gguf", "--json")
    assert json.loads(moved.out)["out"] == f"{model.name}-Q4_0.gguf"
    assert (tmp_path / f"{model.name}-Q4_0.gguf").is_file()


def test_words_are_taken_in_letters_of_either_case_and_recorded_in_small_ones(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    typed = ["--method", "RTN", "--format", "GPTQ", "--scales", "AbsMax", "--bits", "4"]
    typed += ["--calibration", "none"]
    made = command(capsys, "quantize", model, *typed)
    assert made.out == f"{model.name}-rtn-int4-gptq\n", made.err
    small = command(capsys, "quantize", model, *map(str.lower, typed), "-o", "small")
    assert small.code == 0, small.err
    manifests = [Path(place, "quantforge.manifest.json") for place in ("small", made.out.strip())]
    recipe, same = (json.loads(path.read_text())["recipe"] for path in manifests)
    assert recipe == same
    assert 'method = "rtn"' in recipe
    chosen = command(
        capsys, "plan", model, "--for", "VLLM", "--device-name", "L4", "--context", "64", "--json"
    )
    assert chosen.code == 0, chosen.err
    assert json.loads(chosen.out)["capacity"]["cards"][0]["name"] == "l4"


def test_what_is_asked_for_decides_the_format(model, tmp_path, capsys):
    for words, form, file in (
        (["--bits", "8"], "gguf", "a.gguf"),
        (["--scheme", "nf4"], "bnb", "b"),
        (["--format", "plain"], "plain", "c"),
    ):
        out = tmp_path / file
        typed = [*words, "--scales", "absmax", "--json", "-o", out]
        assert json.loads(command(capsys, "plan", model, *typed).out)["format"] == form
        made = command(capsys, "quantize", model, *typed)
        assert json.loads(made.out)["format"] == form, made.err
        assert out.is_file() is (form == "gguf")
    said = command(capsys, "quantize", model, "--scheme", "nf4", "-v", "-o", tmp_path / "e")
    assert said.err.index("chosen: --format bnb") < said.err.index("block 0")


INTERRUPTED_AT = """
import importlib.abc, os, runpy, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
sys.argv[1:1] = ["plan", "./absent"]
runpy.run_module("quantforge", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["quantforge.cli", "typer", "quantforge.verbs.sweep_recipes"])
@pytest.mark.parametrize(
    ("more", "said"), [((), "stopped\n"), (("--json-progress",), '{"note": "stopped"}\n')]
)
def test_an_interruption_while_it_starts_is_one_line(module, more, said):
    words = [sys.executable, "-c", INTERRUPTED_AT, module, *more]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", said)


def test_the_command_is_the_module():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"quantforge": "quantforge.__main__:main"}


@pytest.mark.parametrize(
    ("verb", "said"), [("quantize", "goes on from here"), ("plan", "begins anew")]
)
def test_what_an_interrupted_command_promises_is_true(verb, said, model, monkeypatch, capsys):
    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(f"quantforge.verbs.{verb}", stop)
    told = command(capsys, verb, model, "--bits", "4")
    assert told.code == 130
    assert told.err.endswith(f"stopped; the same command again {said}\n")


@pytest.mark.parametrize(
    ("quantized", "said"), [(False, "goes on from here"), (True, "begins anew")]
)
def test_an_interrupted_export_goes_on_where_it_rounds(
    quantized, said, model, tmp_path, monkeypatch, capsys
):
    def stop(*_: object, **__: object) -> None:
        raise Stopped(signal.SIGINT)

    module = sys.modules[importlib.import_module("quantforge.verbs").export.__module__]
    place = tmp_path / "made"
    if quantized:
        rounded = ("--method", "rtn", "--scales", "absmax", "--scheme", "int4:g32:sym")
        assert command(capsys, "quantize", model, *rounded, "-o", place).code == 0
    monkeypatch.setattr(module, "quantize_opened", stop)
    monkeypatch.setattr(module, "settle_all", stop)
    told = command(
        capsys, "export", place if quantized else model, "--format", "gptq", "-o", tmp_path / "x"
    )
    assert told.code == 130
    assert told.err.endswith(f"stopped; the same command again {said}\n")


def test_an_event_of_a_whole_model_is_not_told_as_one_of_a_tensor(model, tmp_path, capsys):
    place = tmp_path / "made"
    rounded = ("--method", "rtn", "--scales", "absmax", "--scheme", "int8:row:sym")
    assert command(capsys, "quantize", model, *rounded, "-o", place).code == 0
    again = ("--format", "gguf", "--type", "Q8_0", "--requantize", "--dry-run")
    told = command(capsys, "export", place, *again)
    assert told.code == 0, told.err
    assert "requantized: made: from decoded weights\n" in told.out
    assert "tensors, the first is made" not in told.out


def test_a_job_summary_is_added_to_with_the_verdict_of_the_gates(model, tmp_path, capsys):
    made = tmp_path / "made"
    scheme = ("--method", "rtn", "--scales", "absmax", "--scheme", "int4:g32:sym")
    assert command(capsys, "quantize", model, *scheme, "-o", made).code == 0
    summary = tmp_path / "summary.md"
    small = ("--windows", 2, "--length", 16, "--no-speed")
    assert command(capsys, "eval", model, made, *small, "--summary", summary).code == 0
    first = summary.read_text()
    assert first.startswith("## Evaluation\n\n|  | model |")
    assert "Failed" not in first
    assert (
        command(capsys, "eval", model, made, *small, "--summary", summary, "--max-kl", 0).code == 6
    )
    added = summary.read_text().removeprefix(first)
    assert added.startswith("## Evaluation\n\n**Failed:** 1 quality gate(s) failed: ")
    refused = command(capsys, "eval", model, made, *small, "--summary", tmp_path / "no" / "s.md")
    assert refused.code == 3
