"""The command line as a user meets it: help, documents, errors with hints and exit codes, and the main job."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quantforge.cli.console import Console
from quantforge.errors import InputError
from quantforge.progress import Progress
from tests.runs import copy_model, run_command

VERBS = (
    "plan", "quantize", "export", "eval", "generate", "verify", "reproduce", "diff", "inspect", "formats", "recipes",
    "doctor",
)  # fmt: skip
HEAVY = ("torch", "transformers", "datasets", "triton", "numpy", "tokenizers", "huggingface_hub")
EVAL = ("--windows", "4", "--length", "32", "--no-speed")


# ---- help and imports


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("quantforge")
    compiled = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}  # as an installed program is
    compiled.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([script, "--help"], capture_output=True, check=True, env=compiled)
    spent = []
    for _ in range(3):  # what else the machine does makes single ones slower
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = subprocess.run(
            [script, "--help"], capture_output=True, text=True, check=True, env=compiled
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) <= 1.0
    assert all(verb in result.stdout for verb in VERBS)
    assert result.stderr == ""


def test_nothing_heavy_is_imported_before_there_is_work(model: Path, tmp_path: Path) -> None:
    """One process runs command after command, and looks at what each of them has imported."""
    taken, damaged = tmp_path / "taken", copy_model(model, tmp_path / "damaged")
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


# ---- stdout and stderr


def test_stdout_has_the_path_and_stderr_the_progress(model, tmp_path, capsys):
    loud = run_command(capsys, "quantize", model, "--scales", "absmax", "-v", "-o", tmp_path / "a")
    assert loud.out == f"{tmp_path / 'a'}\n"
    parts = [line for line in loud.err.splitlines() if line.startswith("block ")]
    assert len(parts) == 2
    assert all("peak" in line for line in parts)
    quiet = run_command(capsys, "quantize", model, "--scales", "absmax", "-o", tmp_path / "b", "-q")
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
        assert run_command(capsys, *options, tmp_path / name).code == code, name
    assert mine.read_text() == "mine"
    assert not (tmp_path / "a").exists()
    assert run_command(capsys, *options, log).code == 0
    parts = [json.loads(line)["part"] for line in log.read_text().splitlines()]
    assert parts == ["outer", "block 0", "block 1", "head"]
    assert run_command(capsys, *options, log, "--overwrite").code == 0
    assert len(log.read_text().splitlines()) == 8, "it goes on"
    for name in ("mine.md", "link.md"):
        (tmp_path / name).symlink_to("mine")
        ended = run_command(capsys, "eval", model, "--report", tmp_path / name, "--overwrite")
        assert ended.code == 4, ended.err
    (tmp_path / "old.md").write_text("mine")
    assert run_command(capsys, "eval", model, "--report", tmp_path / "old.md").code == 4
    assert mine.read_text() == "mine"


# ---- errors


REFUSALS: list[tuple[list[str], int, list[str]]] = [
    (["plam"], 2, ["plam", "'plan'"]),
    (["plan"], 2, ["MODEL", "quantforge plan"]),
    (["plan", "MODEL", "--metod", "rtn"], 2, ["--metod", "--method"]),
    (["plan", "MODEL", "--method", "gtpq"], 2, ["gtpq", "'gptq'"]),
    (["plan", "MODEL", "--method", "awq,gptq"], 2, ["'awq,gptq'", "--method awq+gptq"]),
    (["plan", "MODEL", "--method", "gptq-awq"], 2, ["'gptq-awq'", "--method awq+gptq"]),
    (["plan", "MODEL", "--method", "aqw"], 2, ["error: unknown method 'aqw'\n", "'awq'"]),
    (["plan", "MODEL", "--method", "aqw+gptq"], 2, ["'aqw' in 'aqw+gptq'", "'awq'"]),
    (["plan", "MODEL", "--context", "64", "--device-name", "H100"], 2, ["'h100-pcie' or 'h100-sxm'"]),
    (["verify", "MODEL", "--for", "vlm", "-q"], 2, ["vlm", "'vllm'"]),
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
    (["generate", "MODEL", "x", "--draft-tree", "2x2"], 2, ["--draft-tree", "add --draft"]),
    (["generate", "MODEL", "x", "--draft", "ngram", "--draft-tree", "2x0"], 2, ["'2x0'", "3x2x1"]),
    (["generate", "MODEL", "x", "--draft", "ngram", "--draft-tree", "9x9"], 2, ["at most 64"]),
    (["generate", "MODEL", "x", "--draft", "lookahead", "--draft-tree", "2"], 2, ["lookahead", "leave it out"]),
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
    (["eval", "MODEL", "--cache", "int7", "--no-speed"], 2, ["--cache int7", "no kind of cache"]),
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
    (["plan", "MODEL", "--lm-head", "int8", "--ignore", "*"], 3, ["nothing"]),
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
    (["plan", "MODEL", "--format", "fp8", "--strict"], 4, ["low-coverage", "77.8%", "k_proj"]),
    (["plan", "MODEL", "--format", "awq", "--scheme", "nf4"], 4, ["nf4", "--format bnb"]),
    (["plan", "MODEL", "--format", "gguf", "--scheme", "nf4"], 4, ["nf4", "--format bnb"]),
    (["plan", "MODEL", "--format", "gptq", "--rule", "down_proj=int8"], 4, ["compressed-tensors"]),
    (["quantize", "MODEL", "-o", "TAKEN"], 4, ["exists", "taken-2"]),
    (["quantize", "MODEL", "-o", "TAKEN", "--overwrite"], 4, ["not a result"]),
]  # fmt: skip


@pytest.mark.parametrize("code", [2, 3, 4])
def test_a_refusal_says_what_and_what_to_type(model, tmp_path, capsys, code):
    places = {"MODEL": model, "OUT": tmp_path / "out", "TAKEN": tmp_path / "taken"}
    places["RECIPE"] = tmp_path / "recipe.toml"
    places["RECIPE"].write_text('methd = "rtn"\n')
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    before = {path.name for path in tmp_path.iterdir()}
    for line, expected, words in REFUSALS:
        if expected != code:
            continue
        arguments = line
        for key, value in places.items():
            arguments = [word.replace(key, str(value)) for word in arguments]
        result = run_command(capsys, *arguments)
        assert result.code == code, (line, result.err)
        error, hint = result.err.split("hint: ")
        # What was chosen is said first, where it comes to that.
        told, found, error = error.rpartition("error: ")
        assert found, line
        assert all(said.startswith("chosen: ") for said in told.splitlines()), line
        assert hint.strip(), line
        for word in words:
            assert word in result.err, line
        assert "Traceback" not in result.err
        if arguments[0] != "plan":
            assert result.out == "", line
        assert {path.name for path in tmp_path.iterdir()} == before, line


def test_an_engine_that_is_not_installed_is_told_before_a_file_is_read(
    model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("quantforge.evaluation.llama_cpp.find_spec", lambda _: None)
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF")
    asked = ("eval", model, tmp_path / "damaged.gguf")
    result = run_command(capsys, *asked, "--engine", "llama.cpp")
    assert result.code == 2, result.err
    assert "pip install 'quantforge[llamacpp]'" in result.err
    assert run_command(capsys, *asked).code == 3


def test_names_in_hostile_files_do_not_drive_the_terminal(model, tmp_path, capsys):
    source = copy_model(model, tmp_path / "m")
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "evil\x1b[2J\x07", "_name_or_path": "x\nlicense: mit"}
    (source / "config.json").write_text(json.dumps(config))
    for arguments in (
        ["plan", source, "--tensors"],
        ["inspect", source],
        ["plan", source, "--method", "gptq"],
    ):
        result = run_command(capsys, *arguments)
        assert "\x1b" not in result.out + result.err
        assert "\x07" not in result.out + result.err
    assert run_command(capsys, "quantize", source, "-o", tmp_path / "o", "-q").code == 0
    assert "license: mit" not in (tmp_path / "o" / "README.md").read_text()


def test_a_bug_of_ours_is_told_from_a_bad_input(model, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("quantforge.api.plan", lambda *_, **__: 1 / 0)
    result = run_command(capsys, "plan", model)
    assert result.code == 1
    assert "Traceback" not in result.err
    (saved,) = tmp_path.glob("*.traceback")
    assert "ZeroDivisionError" in saved.read_text()
    assert str(saved) in result.err
    assert "Traceback" in run_command(capsys, "plan", model, "--debug").err


def test_memory_that_runs_out_is_no_bug(model, capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("quantforge.api.plan", fail)
    result = run_command(capsys, "plan", model)
    assert result.code == 7
    assert "hint: " in result.err


def test_arguments_that_are_no_utf_8_are_refused_before_the_work(capsys):
    result = run_command(capsys, "plan", "models/\udcff", "--bits", "4")
    assert result.code == 2
    assert "not UTF-8" in result.err


@pytest.mark.parametrize(
    "arguments",
    [("inspect", "a" * 5000), ("verify", "a" * 300), ("diff", "a" * 300, "b"), ("plan", "b", "--recipe", "c" * 300)],
)  # fmt: skip
def test_names_that_are_too_long_are_refused_wherever_they_stand(capsys, arguments):
    result = run_command(capsys, *arguments)
    assert result.code == 3
    assert result.err.startswith("error: ")


def test_a_number_of_threads_that_would_end_the_process_is_refused(model, tmp_path, capsys):
    for verb in (["quantize", model, "-o", tmp_path / "o"], ["eval", model], ["verify", model]):
        result = run_command(capsys, *verb, "--threads", "100000")
        assert result.code == 2
        assert "more than" in result.err


def watched(console: Console, line: str) -> None:
    with console.progress_meter():
        console.show_progress(Progress(phase=line, step=line))


def test_no_text_of_others_reaches_a_terminal_raw(capsys):
    """Control characters (C0, C1), directions of writing and halves of pairs are escaped on every way out."""
    text = "a\x1b[2J\x9b31m\u202e\u2066\udcff\r\u2028b"
    console = Console(as_json=True)
    console.print_document({"name": text, text: [text], "much": float("inf")})
    assert json.loads(capsys.readouterr().out)["name"] == text
    for tell in (
        console.note,
        console.print_text,
        lambda line: watched(console, line),
        lambda line: console.print_table([line], [[line]]),
    ):
        tell(text)
    for as_json in (False, True):
        Console(as_json=as_json).print_error(InputError(text, text, file=text))
    console.print_document({"name": text})
    told = capsys.readouterr()
    assert {c for c in told.out + told.err if not c.isprintable()} == {"\n"}


def test_a_terminal_that_is_not_utf_8_gets_escapes(model, tmp_path):
    copy = copy_model(model, tmp_path / "mödell")
    told = subprocess.run(
        [Path(sys.executable).with_name("quantforge"), "inspect", copy],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert b"m\\xf6dell" in told.stdout


def test_the_command_is_the_module():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"quantforge": "quantforge.__main__:main"}
