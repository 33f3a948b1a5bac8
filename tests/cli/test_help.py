"""Help, completion and hints: what a person sees who has not read the documentation, without the weight of a run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

from quantforge.cli import doctor, plan_summary, usage_errors
from quantforge.cli.app import VERBS
from quantforge.cli.result_summary import upload_hint
from tests.conftest import Tiny
from tests.runs import leftovers, run_command
from tests.thorough import thorough_case

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "transformers",
    "numba",
    "pydantic",
    "numpy",
    "tokenizers",
    "huggingface_hub",
    "starlette",
    "uvicorn",
    "aiohttp",
)


Offered = Callable[[list[str], str], list[str]]


def asking(words: list[str], shell: str) -> dict[str, str]:
    """What a shell sets to ask for the last word, by the protocol that its script speaks."""
    return {"_QUANTFORGE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": " ".join(words),
            "_TYPER_COMPLETE_FISH_ACTION": "get-args", "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": str(len(words) - 1)}  # fmt: skip


def words_of(told: str) -> list[str]:
    found = []
    for text in told.splitlines():
        word = text.removeprefix("_arguments '*: :((").split("\t")[0]
        found.append(word.split('"')[1] if word.startswith('"') else word)
    return [word for word in found if word]


@pytest.fixture
def offered(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Offered:
    """Return a function that asks in this process, and in a folder of files."""
    monkeypatch.chdir(place)

    def found(words: list[str], shell: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in asking(words, shell).items():
                patch.setenv(name, value)
            patch.setenv("COLUMNS", "80")  # which answers set for themselves, and leave so
            ended = run_command(capsys)
        assert ended.code == 0, ended.err
        return words_of(ended.out)

    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "more/inner").mkdir(parents=True)
    (tmp_path / "more/some.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    return tmp_path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_verbs_options_and_values(shell: str, offered: Offered) -> None:
    assert offered(["quantforge", "qu"], shell) == ["quantize"]
    options = offered(["quantforge", "quantize", "--"], shell)
    assert "--method" in options
    assert all(one.startswith("--") for one in options)  # one line for each
    typed = ["quantforge", "plan", "model", "--type", "Q4_K"]
    assert offered(typed, shell) == ["Q4_K_S", "Q4_K_M"]


def test_the_installed_program_completes() -> None:
    asked = {**os.environ, **asking(["quantforge", "qu"], "bash")}
    program = Path(sys.executable).with_name("quantforge")
    told = subprocess.run([program], env=asked, capture_output=True, text=True, check=True)
    assert words_of(told.stdout) == ["quantize"]


OFFERED = [
    (["plan", "model", "--method", "aw"], ["awq"]),
    (["plan", "model", "--method", "awq+g"], ["awq+gptq"]),
    (["plan", "model", "--format", "comp"], ["compressed-tensors"]),
    (["plan", "model", "--scheme", "nv"], ["nvfp4"]),
    (["plan", "model", "--scheme", "W4"], ["W4A16", "W4A16_ASYM"]),
    (["plan", "model", "--recipe", "bal"], ["balanced-4bit"]),
    (["plan", "model", "--for", "vl"], ["vllm"]),
    (["plan", "model", "--bits", "x", "--scales", "ref"], ["reference"]),
    (["quantize", "model", "--allow", "dead"], ["dead-channels="]),
    (["help", "ver"], ["verify"]),
]  # fmt: skip


def test_values_of_options_are_completed(offered: Offered) -> None:
    for words, expected in OFFERED:
        assert offered(["quantforge", *words], "fish") == expected, words


def test_help_and_completion_import_nothing_heavy(place: Path) -> None:
    script = f"""
import sys, json, io, os, contextlib
from quantforge.cli.app import main
for arguments, environment in json.loads(sys.stdin.read()):
    sys.argv = ["quantforge", *arguments]
    os.environ.update(environment)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found = [name for name in {HEAVY} if name in sys.modules]
    sys.__stdout__.write(json.dumps([arguments, environment, code or 0, found, out.getvalue()]) + chr(10))
"""
    line = "quantforge plan model --bits 4 --samples 3 --strict --method "
    asked = {"_QUANTFORGE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    calls = [
        ([], {}),
        (["--help"], {}),
        (["help"], {}),
        (["help", "eval"], {}),
        (["serve", "--help"], {}),
        (["quantize", "-h"], {}),
        ([], asked),
    ]
    result = subprocess.run([sys.executable, "-c", script], input=json.dumps(calls), capture_output=True, text=True,
                            check=True, cwd=place)  # fmt: skip
    lines = [json.loads(text) for text in result.stdout.splitlines()]
    assert len(lines) == len(calls)
    for arguments, environment, code, found, out in lines:
        assert (code, found) == (0, []), (arguments, environment)
        assert ("awq" if environment else "Usage: quantforge") in out


@pytest.mark.parametrize(
    ("words", "most"), [(["--help"], 45), (["quantize", "--help"], 90), (["generate", "-h"], 75)]
)
def test_help_imports_few_modules(words: list[str], most: int) -> None:
    """Each takes time before a person reads the first line; those of other verbs are not imported."""
    script = f"""
import sys
from quantforge.cli.app import main
sys.argv = ["quantforge", *{words}]
try:
    main()
except SystemExit:
    print(sum(name.startswith("quantforge") for name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) <= most


def test_help_shows_groups_defaults_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_command(capsys, "help", "quantize").out
    assert shown == run_command(capsys, "quantize", "--help").out
    for text in ("Calibration:", "Which layers:", "How it runs:", "[default: search]", "absmax, search, reference",
                 "compressed-tensors", "IQ4_XS", "tensorrt-llm", "[@revision]"):  # fmt: skip
        assert text in shown
    assert "--bits N              Bits per weight; the other choices follow.  [2 to 8]\n" in shown
    everything = "".join(run_command(capsys, "help", verb).out for verb in VERBS)
    for text in ("<", "TypeAdapter", "x>=", "<=x"):
        assert text not in everything


HINTS = [
    (["list"], "quantforge formats"),
    (["quantise", "x"], "'quantize'"),
    (["convert", "x"], "quantforge export"),
    (["ppl"], "quantforge eval"),
    (["llama-cli"], "quantforge generate"),
    (["oneshot"], "quantforge quantize"),
    (["xyzzy"], "verbs: plan"),
    (["models"], "quantforge inspect models"),
    (["help", "quantise"], "'quantize'"),
    (["--versoin"], "'--version'"),
    (["--offline", "plan", "demo"], "after the verb"),
    (["quantize", "x", "--metod", "awq"], "'--method'"),
    (["quantize", "x", "--bit", "4"], "'--bits'"),
    (["quantize", "x", "--wbits", "4"], "--bits"),
    (["quantize", "x", "--group_size", "64"], "--scheme"),
    (["quantize", "x", "--nsamples", "4"], "--samples"),
    (["quantize", "x", "--output-dir", "y"], "--output"),
    (["quantize", "x", "--max_shard_size", "5GB"], "--max-shard-bytes"),
    (["plan", "x", "--vram", "8GB"], "--memory"),
    (["generate", "x", "--n-predict", "8"], "--max-tokens"),
    (["bench", "x", "--n-predict", "8"], "--new-tokens"),
    (["serve", "x", "--ctx-size", "4096"], "--context"),
    (["generate", "x", "hi", "--host", "0.0.0.0"], "an option of serve"),
    (["quantize", "x", "--tensors"], "plan, inspect"),
    (["quantize", "x", "y"], "-o PATH"),
    (["generate", "x", "two", "words"], "in quotes"),
    (["eval", "x", "--wide=yes"], "quantforge help eval"),
    (["eval", "x", "--max-kl", "0.1"], "quantforge eval REFERENCE MODEL"),
    (["quantize"], "quantforge quantize demo"),
    (["quantize", "x", "--bits"], "quantforge help quantize"),
]


def test_a_hint_names_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in HINTS:
        result = run_command(capsys, *arguments)
        assert result.code == 2, arguments
        assert said in result.err.partition("hint: ")[2], (arguments, result.err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "x", "--bits", "9"], "--bits 9: a whole number from 2 to 8 is expected"),
        (["plan", "x", "--bits=four"], "--bits four: a whole number from 2 to 8 is expected"),
        (["plan", "x", "--samples", "0"], "--samples 0: a whole number, 1 at least, is expected"),
        (["eval", "x", "--max-kl", "lots"], "--max-kl lots: a number is expected"),
        (["eval"], "REFERENCE is missing"),
    ],
)
def test_no_word_of_a_library_reaches_a_person(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, *arguments)
    assert result.code == 2
    assert said in result.err
    assert "Input should" not in result.err
    assert "Invalid value" not in result.err


def test_what_hints_name_exists(capsys: pytest.CaptureFixture[str]) -> None:
    everything = "".join(run_command(capsys, "help", verb).out for verb in VERBS)
    for options in usage_errors.OPTIONS_OF_OTHER_TOOLS.values():
        assert all(f"{option} " in everything for option in options), options


@pytest.mark.parametrize(
    ("verb", "ending"), [("quantize", ""), ("export", ".gguf"), thorough_case("quantize", ".gguf")]
)
def test_a_dry_run_refuses_the_places_that_the_run_refuses(tiny, tmp_path, capsys, verb, ending):
    words = (
        verb,
        tiny("llama"),
        *(("--method", "rtn", "--bits", "8") if verb == "quantize" else ("--format", "gguf")),
    )
    (tmp_path / f"foreign{ending}").mkdir()
    (tmp_path / f"foreign{ending}" / "mine").touch()
    (tmp_path / f"file{ending}").touch()
    before = {*tmp_path.rglob("*")}
    for place in (f"missing/out{ending}", f"foreign{ending}", f"file{ending}"):
        for more in ((), ("--overwrite",)):
            dry = run_command(capsys, *words, "-o", tmp_path / place, *more, "--dry-run")
            run = run_command(capsys, *words, "-o", tmp_path / place, *more)
            assert dry == run, place
            assert dry.code in {2, 3, 4}, dry.err
            assert {*tmp_path.rglob("*")} == before
            assert "--overwrite" not in dry.err  # it would not help


def test_a_dry_run_of_what_is_made_says_so(tiny, tmp_path, capsys):
    words = (
        "quantize",
        tiny("llama"),
        "--method",
        "rtn",
        "--scales",
        "absmax",
        "--bits",
        "8",
        "--join",
        "-o",
        tmp_path / "out",
    )
    assert run_command(capsys, *words).code == 0
    again = run_command(capsys, *words, "--dry-run")
    assert again.code == 0
    assert "this command has made it" in again.err
    assert "engine" in again.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["quantize", "MODEL", "--bits", "4"],
        ["export", "MODEL", "--format", "gptq"],
        ["export", "MADE", "--format", "gptq"],
    ],
)
def test_a_dry_run_is_the_plan_and_writes_nothing(
    arguments: list[str],
    tiny: Tiny,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_summary, "free_bytes", lambda _: 1 << 40)  # it changes by itself
    model, made, out = tiny("llama-wide"), tmp_path / "made", tmp_path / "out"
    if "MADE" in arguments:
        assert (
            run_command(capsys, "quantize", model, "--scales", "absmax", "-o", made, "-q").code == 0
        )
    words = [{"MODEL": str(model), "MADE": str(made)}.get(word, word) for word in arguments]
    shown = run_command(capsys, *words, "--dry-run", "--json", "-o", out)
    assert shown.code == 0, shown.err
    assert not leftovers(out) - {"made"}
    document = json.loads(shown.out)
    assert document["schema"] == "quantforge.plan/2"
    if arguments[0] == "quantize":
        assert shown.out == run_command(capsys, "plan", *words[1:], "--json", "-o", out).out
    assert "engine" in run_command(capsys, *words, "--dry-run", "-o", out).out
    assert run_command(capsys, *words, "-o", out, "-q", "--scales", "absmax").code == 0
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert weights == document["output_bytes"]


def test_every_extra_is_told_of_by_the_doctor() -> None:
    """With the command that installs it; a hint never names an extra that the doctor does not know."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert doctor.OPTIONAL_PACKAGES.keys() == project.keys() - {"dev", "docs", "fuzz", "all"}
    for extra, (package, _) in doctor.OPTIONAL_PACKAGES.items():
        assert package.replace("_", "-") in {re.split("[<>=;]", one)[0] for one in project[extra]}
    hinted = {
        extra
        for path in (ROOT / "quantforge").rglob("*.py")
        for extra in re.findall(r"quantforge\[(\w+)\]", path.read_text())
    }
    assert hinted
    assert hinted <= doctor.OPTIONAL_PACKAGES.keys()


@pytest.mark.parametrize("model", ["demo", "wren.gguf"])
def test_a_prompt_before_its_model_is_noticed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "wren.gguf").touch()
    ended = run_command(capsys, "generate", "Explain json.", model)
    assert ended.code == 2
    assert f"hint: quantforge generate {model} 'Explain json.'" in ended.err
    told = run_command(capsys, "generate", "nowhere", "Explain json.")
    assert "comes first" not in told.err


def test_a_misspelt_model_is_answered_with_its_neighbour_and_not_said_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    for words in (["deom", "hi"], ["./deom", "hi"]):
        ended = run_command(capsys, "generate", *words)
        assert "hint: did you mean 'demo'?" in ended.err
        assert "loading" not in ended.err


def test_the_page_of_the_command_line_has_a_row_for_every_verb() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs/cli.md").read_text(), re.MULTILINE)
    told = {verb for row in rows for verb in re.findall(r"`(\w+)", row)}
    assert VERBS.keys() - told == set()


def test_what_is_published_of_a_file_is_its_own(tmp_path: Path) -> None:
    """No pattern takes another file in."""
    for name in (
        "ex.gguf",
        "ex.gguf.quantforge.json",
        "ex.Modelfile",
        "ex2.gguf",
        "example.gguf",
        "ex-mine.txt",
    ):
        (tmp_path / name).touch()
    said = upload_hint(tmp_path / "ex.gguf")
    patterns = shlex.split(said.partition("hf ")[2])
    chosen = [two for one, two in pairwise(patterns) if one == "--include"]
    taken = {path.name for path in tmp_path.iterdir() for one in chosen if fnmatch(path.name, one)}
    assert taken == {"ex.gguf", "ex.gguf.quantforge.json", "ex.Modelfile"}
