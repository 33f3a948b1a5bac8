"""No file that a verb writes contains a local path, and the location of a text changes no byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantforge.artifacts import manifest
from quantforge.formats.gguf.parsing import read_gguf
from tests.runs import CALIBRATION_ARGUMENTS, copy_model, file_digests, run_command

TEXT = "the weights of the model are rounded to the nearest point of the grid, row by row\n" * 60
LINES = "".join(json.dumps({"body": f"{number} {TEXT[:400]}"}) + "\n" for number in range(20))


@pytest.fixture
def workdir(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make home, temporary and working directory with recognizable names, and a model with texts."""
    for name in ("home", "scratch", "work"):
        (tmp_path / f"telltale-{name}").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "telltale-home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "telltale-scratch"))
    work = tmp_path / "telltale-work"
    monkeypatch.chdir(work)
    source = copy_model(model, work / "wren")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"_name_or_path": str(work / "before")})
    )
    (work / "texts").mkdir()
    (work / "texts" / "talks.txt").write_text(TEXT)
    (work / "texts" / "mails.jsonl").write_text(LINES)
    return work


def files_with_paths(folder: Path) -> list[str]:
    """Return the files that contain a local path."""
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*"))
            if path.is_file() and b"telltale-" in path.read_bytes()]  # fmt: skip


def run_and_check_code(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    ended = run_command(capsys, *words)
    assert ended.code == code, ended.err
    return ended.out + ended.err


def test_no_written_file_contains_a_local_path(workdir, capsys):
    """Every verb that writes, with every option that names a file, given as absolute paths."""
    texts, out = workdir / "texts", workdir.parent / "out"
    (out / "h").mkdir(parents=True)
    source = f"{texts / 'talks.txt'}=3,{texts / 'mails.jsonl'}:body"
    typed = ("--calibration", source, *CALIBRATION_ARGUMENTS, "--provenance")
    run_and_check_code(
        capsys, "quantize", workdir / "wren", "--method", "gptq", "-o", out / "a", *typed
    )
    run_and_check_code(
        capsys,
        "quantize",
        workdir / "wren",
        "--type",
        "Q4_0",
        "--modelfile",
        "-o",
        out / "b.gguf",
        *typed,
    )
    run_and_check_code(
        capsys,
        "quantize",
        workdir / "wren",
        "--type",
        "Q4_0",
        "--imatrix",
        out / "i.gguf",
        "-o",
        out / "c.gguf",
        *typed,
    )
    run_and_check_code(
        capsys, "quantize", workdir / "wren", "--imatrix", out / "i.dat", "-o", out / "d", *typed
    )
    run_and_check_code(
        capsys,
        "export",
        out / "a",
        "--format",
        "gptq",
        "-o",
        out / "e",
        "--allow-inexact",
        "--provenance",
    )
    run_and_check_code(
        capsys,
        "export",
        out / "a",
        "-o",
        out / "f.gguf",
        "--calibration",
        texts / "talks.txt",
        "--allow-inexact",
    )
    run_and_check_code(capsys, "export", workdir / "wren", "--format", "plain", "-o", out / "g")
    reports = [word for kind in ("md", "html", "json") for word in ("--report", out / f"r.{kind}")]
    run_and_check_code(capsys, "eval", workdir / "wren", out / "a", out / "c.gguf", "--text", texts / "talks.txt",
        "--windows", "2", "--length", "32", "--no-speed", *reports)  # fmt: skip
    run_and_check_code(
        capsys,
        "reproduce",
        out / "a",
        "--source",
        workdir / "wren",
        "--calibration",
        source,
        "-o",
        out / "h" / "a",
    )
    assert files_with_paths(out) == []
    assert len(list(out.rglob("*"))) > 30
    recorded = manifest.read_manifest(out / "a")
    assert recorded["calibration"]["sources"] == ["talks.txt", "mails.jsonl:body"]
    assert 'source = "talks.txt=3,mails.jsonl:body"' in recorded["recipe"]
    digest = manifest.sha256(texts / "talks.txt", None)
    for text in (recorded["recipe"], (out / "r.md").read_text()):
        assert digest in text
    assert (
        read_gguf(out / "b.gguf").value("quantize.imatrix.dataset", str)
        == "talks.txt=3,mails.jsonl:body"
    )
    assert files_with_paths(workdir / "wren") == ["config.json"]  # the source is never changed


def test_the_location_of_the_calibration_text_changes_no_byte(workdir, capsys):
    for folder in ("x", "y"):
        (workdir / folder).mkdir()
        shutil.copy(workdir / "texts" / "talks.txt", workdir / folder / "talks.txt")
        run_and_check_code(capsys, "quantize", "wren", "--method", "gptq", *CALIBRATION_ARGUMENTS, "-o", f"{folder}/m",
            "--calibration", f"{folder}/talks.txt")  # fmt: skip
    assert file_digests(workdir / "x" / "m") == file_digests(workdir / "y" / "m")


def test_reproduce_needs_the_same_calibration_text(workdir, capsys):
    text = workdir / "texts" / "talks.txt"
    run_and_check_code(
        capsys,
        "quantize",
        "wren",
        "--method",
        "gptq",
        *CALIBRATION_ARGUMENTS,
        "-o",
        "m",
        "--calibration",
        text,
    )
    again = ("reproduce", "m", "--source", "wren")
    output = run_and_check_code(capsys, *again, code=3)
    assert (
        f"--calibration 'talks.txt', with the paths of its files here: SHA-256 {manifest.sha256(text, None)}"
        in output
    )
    other = workdir / "renamed.md"
    shutil.copy(text, other)
    assert "byte for byte" in run_and_check_code(capsys, *again, "--calibration", other)
    other.write_text(TEXT + "x")
    assert "not the content that the recipe states" in run_and_check_code(
        capsys, *again, "--calibration", other, code=5
    )
    run_and_check_code(capsys, *again, "--calibration", f"{text}=2,builtin=1", code=5)
    run_and_check_code(
        capsys, "quantize", "wren", "--method", "gptq", *CALIBRATION_ARGUMENTS, "-o", "n"
    )
    assert "leave --calibration out" in run_and_check_code(
        capsys, "reproduce", "n", *again[2:], "--calibration", text, code=2
    )


def test_reproduce_checks_the_digest_of_the_imatrix(workdir, capsys):
    arguments = (
        "quantize",
        "wren",
        "--type",
        "Q4_0",
        "--imatrix",
        "i.gguf",
        "-o",
        "m.gguf",
        *CALIBRATION_ARGUMENTS,
    )
    run_and_check_code(capsys, *arguments)
    again = ("reproduce", "m.gguf", "--source", "wren")
    digest = manifest.sha256(workdir / "i.gguf", None)
    assert f"--imatrix FILE, of SHA-256 {digest}" in run_and_check_code(capsys, *again, code=3)
    assert "byte for byte" in run_and_check_code(capsys, *again, "--imatrix", "i.gguf")
    (workdir / "i.gguf").rename(workdir / "j.gguf")
    other = ("--imatrix", "i.gguf", "--calibration", "texts/talks.txt")
    run_and_check_code(
        capsys, "quantize", "wren", "--type", "Q4_0", *other, "-o", "n.gguf", *CALIBRATION_ARGUMENTS
    )
    assert "not the content" in run_and_check_code(capsys, *again, "--imatrix", "i.gguf", code=5)


def test_requantizing_export_checks_the_calibration_text(workdir, capsys):
    run_and_check_code(
        capsys,
        "quantize",
        "wren",
        "--method",
        "gptq",
        *CALIBRATION_ARGUMENTS,
        "-o",
        "m",
        "--calibration",
        "texts/talks.txt",
    )
    again = ("export", "m", "--type", "Q4_0", "--source", "wren", "-o", "n.gguf")
    assert "SHA-256" in run_and_check_code(capsys, *again, code=3)
    run_and_check_code(capsys, *again, "--calibration", "texts/mails.jsonl:body", code=5)
    run_and_check_code(capsys, *again, "--calibration", "texts/talks.txt")
