"""Releases are refused before any work, resume after a kill to the same bytes, and make only new variants."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess

import pytest

from quantforge.api import release
from quantforge.api.release import SPEC, ReleasedVariant, upload_script, variant_repository
from quantforge.errors import GateError, RefusedError
from quantforge.settings import Settings
from tests.runs import file_digests, fork_child, run_command, wait_for_exit_code
from tests.thorough import thorough_case

SPEC_HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
[evaluation]
text = "builtin"
windows = 2
length = 16
[gates]
max_kl = 50.0
"""
INT4 = """[[variant]]
name = "int4"
recipe = {method = "gptq", scheme = "int4:g32:sym"}
format = "compressed-tensors"
"""
RTN4 = INT4.replace("gptq", "rtn")  # where the method does not matter
Q8 = '[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


def write_spec(tmp_path, model, *parts):
    path = tmp_path / "release.toml"
    path.write_text(SPEC_HEAD.format(model=model) + "".join(parts))
    return path


def test_a_killed_release_resumes_and_can_be_extended(model, tmp_path, capsys):
    spec, errors = write_spec(tmp_path, model, INT4, Q8), tmp_path / "errors"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = release(spec, whole)
    assert result.made == ("int4", "q8")
    result.check_gates()
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=whole, check=False)
    assert checked.returncode == 0
    named = {line.split("  ")[1] for line in (whole / "SHA256SUMS").read_text().splitlines()}
    assert named == {*file_digests(whole)} - {"SHA256SUMS"}

    def until(step):
        def kill(progress):
            if step in f"{progress.phase}: {progress.step}":
                os.kill(os.getpid(), signal.SIGKILL)

        return fork_child(lambda: release(spec, killed, Settings(progress=kill)), errors)

    for kill_step in ("reading", "block 1: rounding", "publishing", "scoring"):
        assert wait_for_exit_code(until(kill_step)) == -signal.SIGKILL, errors.read_text()
    release(spec, killed)
    assert file_digests(killed) == file_digests(whole)
    assert release(spec, killed).made == ()
    assert file_digests(killed) == file_digests(whole)

    before = {path: path.stat().st_mtime_ns for path in killed.rglob("*.safetensors")}
    spec.write_text(
        spec.read_text() + INT4.replace("int4", "int2", 1).replace("int4:g32", "int2:g32")
    )
    assert run_command(capsys, "release", spec, "-o", killed, "--json").code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    figures = json.loads((killed / "release.json").read_text())["evaluation"]["metrics"]
    assert figures["int2"]["kl_mean"] > figures["int4"]["kl_mean"] > figures["q8"]["kl_mean"] > 0


def test_an_invalid_release_file_gets_an_example(tmp_path, capsys):
    for text, message in (
        ("{}", "it is a release file"),
        ('model = "m"\n[evaluation]\nwindows = "x"', "e.g. windows = 4"),
    ):
        (tmp_path / "r.toml").write_text(text)
        ended = run_command(capsys, "release", tmp_path / "r.toml")
        assert (ended.code, message in ended.err.partition("hint: ")[2]) == (3, True), ended.err


def uploads(out, *typed):
    """Run the upload script with a fake `hf`, and return repository and path of each upload."""
    (out.parent / "hf").write_text('#!/bin/sh\necho "$2 $3"\n')
    (out.parent / "hf").chmod(0o755)
    ran = subprocess.run(
        ["sh", out / "upload.sh", *typed], capture_output=True, text=True, check=True,
        env={"PATH": f"{out.parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    return sorted(ran.stdout.splitlines(), reverse=True)


@pytest.mark.parametrize("declared", ["acme/demo", ""])
def test_repository_names_contain_the_model_name_once(declared, tmp_path):
    out = tmp_path / "made"
    out.mkdir()
    names = ("demo-vllm-4bit", "demo", "other-demo-mlx")
    variants = [ReleasedVariant(name, out / name, "awq", "awq", 1, {}, ()) for name in names]
    (out / "upload.sh").write_text(upload_script(declared, variants))
    for name in names:
        (out / name).mkdir()
    cards = [
        f"{variant_repository('acme/demo', variant.out)} awq/{variant.name}" for variant in variants
    ]
    assert cards[0] == "acme/demo-vllm-4bit awq/demo-vllm-4bit"
    assert uploads(out, *([] if declared else ["acme/demo"])) == sorted(cards, reverse=True)


def test_cards_and_upload_script_name_the_same_repositories(model, tmp_path):
    spec, out = write_spec(tmp_path, model, RTN4, Q8), tmp_path / "out"
    release(spec, out)
    card = out / "compressed-tensors/int4/README.md"
    before = card.read_text()
    assert "vllm serve . " in before
    assert "hf download" not in (out / "gguf/README.md").read_text()
    plain = file_digests(out)
    text = spec.read_text()
    spec.write_text(f'{text}[card]\nrepository = "acme/demo"\n')
    assert release(spec, out).made == ()
    script = (out / "upload.sh").read_text()
    assert "repository=acme/demo\n" in script
    assert uploads(out) == ["acme/demo-int4 compressed-tensors/int4", "acme/demo-GGUF gguf"]
    named = card.read_text()
    assert "vllm serve acme/demo-int4 --served-model-name model\n" in named
    assert 'place = "acme/demo-int4"\n' in named
    assert "vllm serve . " not in named
    files = (out / "gguf/README.md").read_text()
    assert "hf download acme/demo-GGUF q8.gguf --local-dir .\nllama-server -m q8.gguf" in files
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, check=False)
    assert checked.returncode == 0
    spec.write_text(text)  # and back: to the bytes of a release that never had one
    release(spec, out)
    assert file_digests(out) == plain
    spec.write_text(f'{text}[card]\nrepository = "acme/demo"\n'.replace("int4:g32", "int4:g64"))
    card.write_text(named)
    again = release(spec, out, Settings(overwrite=True))
    assert again.made == ("int4",)
    assert (
        "vllm serve acme/demo-int4 " in card.read_text()
    )  # the older card was no edit of a person


@pytest.mark.parametrize("repository", [thorough_case(""), "acme/demo"])
def test_the_printed_publish_command_works(repository, model, tmp_path, capsys):
    card = f'[card]\nrepository = "{repository}"\n' if repository else ""
    spec, out = write_spec(tmp_path, model, Q8, card), tmp_path / "an out"
    stderr = run_command(capsys, "release", spec, "-o", out).err
    typed = stderr.partition("to publish it: ")[2].splitlines()[0]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "hf").write_text('#!/bin/sh\necho "$2"\n')
    (tools / "hf").chmod(0o755)
    ran = subprocess.run(
        ["sh", "-c", typed], capture_output=True, text=True, check=True,
        env={"PATH": f"{tools}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ran.stdout == f"{repository or 'ORG/NAME'}-GGUF\n"


def test_a_variant_that_fails_a_gate_is_not_uploaded(model, tmp_path, capsys):
    spec = write_spec(tmp_path, model, INT4, Q8 + "gates = {max_bytes = 10, max_kl = 0.0}\n")
    out = tmp_path / "out"
    summary = tmp_path / "summary"
    ended_command = run_command(capsys, "release", spec, "-o", out, "--summary", summary)
    assert ended_command.code == 6
    assert summary.read_text().startswith("## Release\n\n| variant | format |")
    assert "| q8 | gguf | rtn |" in summary.read_text()
    assert (out / "evaluation.md").read_text() in summary.read_text()
    assert "q8: KL divergence" in ended_command.err
    assert "bytes, at most 10" in ended_command.err
    assert "int4: KL" not in ended_command.err
    script = (out / "upload.sh").read_text()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "hf").write_text('#!/bin/sh\necho "$@"\n')
    (tools / "hf").chmod(0o755)
    ran = subprocess.run(
        ["sh", "upload.sh", "me/it"], cwd=out, capture_output=True, text=True, check=True,
        env={"PATH": f"{tools}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert ran.stdout == "upload me/it-int4 compressed-tensors/int4 .\n"
    assert "# q8 failed" in script
    assert "int4" in (out / "evaluation.md").read_text()
    with pytest.raises(GateError):
        release(spec, out).check_gates()


def test_all_invalid_variants_are_named_and_nothing_is_written(model, tmp_path, capsys):
    bad = '[[variant]]\nname = "{}"\nformat = "awq"\nscheme = "int3:g32:sym"\n'
    spec = write_spec(tmp_path, model, INT4, bad.format("one"), bad.format("two"))
    for more in ((), ("--dry-run",)):
        ended_command = run_command(capsys, "release", spec, "-o", tmp_path / "out", *more)
        assert ended_command.code == 4
        assert "2 of 3 variants cannot be made: one: " in ended_command.err
        assert "two: " in ended_command.err
        assert {path.name for path in tmp_path.iterdir()} == {"release.toml"}


def test_a_release_refuses_foreign_and_different_outputs(model, tmp_path, capsys):
    spec, out = write_spec(tmp_path, model, Q8), tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("kept")
    with pytest.raises(RefusedError, match="no release"):
        release(spec, out)
    assert file_digests(out).keys() == {"mine"}
    shutil.rmtree(out)
    assert run_command(capsys, "release", spec, "-o", out, "--dry-run").code == 0
    assert not out.exists()
    release(spec, out)
    before = file_digests(out)
    write_spec(
        tmp_path,
        model,
        INT4.replace("int4", "q8", 1)
        .replace("compressed-tensors", "gguf")
        .replace("int4:g32:sym", "q4_0"),
    )
    with pytest.raises(RefusedError, match="differs from what would be made in"):
        release(spec, out)
    assert file_digests(out) == before
    assert SPEC in before


def test_an_invalid_release_directory_is_refused_before_work(model, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(model, source)
    spec = write_spec(tmp_path, source, Q8)
    (tmp_path / "file").touch()
    before = {*tmp_path.rglob("*")}
    for output, code, words in (
        ("no/such", 3, "no directory"),
        ("file", 3, "is no directory"),
        ("source/sub", 2, "overlaps the model"),
    ):
        ended = run_command(capsys, "release", spec, "-o", tmp_path / output)
        assert (ended.code, words in ended.err) == (code, True), ended.err
        assert {*tmp_path.rglob("*")} == before


def test_overwrite_replaces_only_variants_that_differ(model, tmp_path):
    out = tmp_path / "out"
    release(write_spec(tmp_path, model, RTN4, Q8), out)
    changed = RTN4.replace("int4:g32", "int3:g32")
    spec = write_spec(tmp_path, model, changed, Q8)
    with pytest.raises(RefusedError, match="differs from what would be made in"):
        release(spec, out)
    assert release(spec, out, Settings(overwrite=True)).made == ("int4",)
    assert release(spec, out).made == ()
    release(spec, tmp_path / "anew")
    assert file_digests(out) == file_digests(tmp_path / "anew")


def test_provenance_is_written_for_every_variant_and_listed(model, tmp_path):
    spec, out = write_spec(tmp_path, model, Q8, RTN4), tmp_path / "out"
    release(spec, out)
    with pytest.raises(RefusedError, match="provenance"):
        release(spec, out, Settings(provenance=True))
    result = release(spec, out, Settings(provenance=True, overwrite=True))
    assert result.made == ("q8", "int4")
    listed = (out / "SHA256SUMS").read_text()
    assert listed.count(".intoto") == 2, listed
    assert release(spec, out, Settings(provenance=True)).made == ()
