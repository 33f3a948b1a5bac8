"""`release`, `sweep` and `allocate`: several results of one model, their gates, and resuming."""

from __future__ import annotations

import json
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.support import ROWS, Make, Model, Start, command, digests, document, refusal

SPEC_HEAD = """model = "{model}"
[calibration]
samples = 4
length = 32
[evaluation]
text = "builtin"
windows = 2
length = 32
reports = ["md", "json"]
[gates]
max_kl = {gate}
"""
INT4 = """[[variant]]
name = "int4"
recipe = {method = "gptq", scheme = "int4:g32:sym"}
format = "compressed-tensors"
"""
Q8 = '[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
RELEASE_FILES = {
    "release.json",
    "release.toml",
    "SHA256SUMS",
    "upload.sh",
    "evaluation.md",
    "evaluation.json",
}


@pytest.fixture(autouse=True)
def _fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")


def write_spec(directory: Path, model: Path, *variants: str, gate: float = 50.0) -> Path:
    spec = directory / "release.toml"
    spec.write_text(SPEC_HEAD.format(model=model, gate=gate) + "".join(variants))
    return spec


@pytest.fixture(scope="module")
def released(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    directory = tmp_path_factory.mktemp("release")
    spec = write_spec(directory, model("llama"), INT4, Q8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        return spec, directory / "made", document("release", spec, "-o", directory / "made")


def test_a_release_has_all_files_for_publication(released: tuple[Path, Path, Any]) -> None:
    _, out, release = released
    assert release["made"] == ["int4", "q8"]
    assert {path.name for path in out.iterdir() if path.is_file()} == RELEASE_FILES
    assert (out / "gguf" / "q8.gguf").exists()
    assert (out / "compressed-tensors" / "int4" / "config.json").exists()
    checked = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, check=False)
    assert checked.returncode == 0
    listed = {line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == {*digests(out)} - {"SHA256SUMS"}
    assert subprocess.run(["sh", "-n", "upload.sh"], cwd=out, check=False).returncode == 0
    assert "hf upload" in (out / "upload.sh").read_text()
    figures = {row["name"]: row["metrics"]["kl_mean"] for row in release["variants"]}
    assert figures["int4"] > figures["q8"] > 0
    report = json.loads((out / "evaluation.json").read_text())
    assert len(report["models"]) == 3


def test_each_variant_matches_its_quantize_command(
    released: tuple[Path, Path, Any], model: Model, make: Make
) -> None:
    _, out, _ = released
    words = "--method gptq --scheme int4:g32:sym --samples 4 --length 32"
    alone = digests(make("quantize", "llama", words).path)
    assert (
        digests(out / "compressed-tensors" / "int4")["model.safetensors"]
        == alone["model.safetensors"]
    )
    for path in (out / "compressed-tensors" / "int4", out / "gguf" / "q8.gguf"):
        assert document("verify", path, "--source", model("llama"))["ok"] is True


def test_repeating_a_release_makes_only_new_variants(
    released: tuple[Path, Path, Any], model: Model, tmp_path: Path
) -> None:
    spec, out, _ = released
    before = digests(out)
    assert document("release", spec, "-o", out)["made"] == []
    assert digests(out) == before
    more = write_spec(
        tmp_path, model("llama"), INT4, Q8, Q8.replace("q8", "q4").replace("Q8_0", "Q4_0")
    )
    assert document("release", more, "-o", out)["made"] == ["q4"]
    assert document("release", spec, "-o", out)["made"] == []


@pytest.mark.thorough  # `tests/faults/test_release.py` kills one at four places
def test_a_killed_release_resumes_to_the_same_bytes(
    released: tuple[Path, Path, Any], start: Start, tmp_path: Path
) -> None:
    spec, _, _ = released
    whole, out = tmp_path / "whole", tmp_path / "out"
    document("release", spec, "-o", whole)
    run = start("release", spec, "-o", out, "--json-progress")
    run.until(lambda: '"part": "' in run.err.replace('"part": ""', ""))
    run.send(signal.SIGKILL)
    run.ended()
    document("release", spec, "-o", out)
    assert digests(out) == digests(whole)


@pytest.mark.thorough  # as `tests/faults/test_jobs.py` does
def test_processes_that_join_a_release_write_the_same_bytes(
    released: tuple[Path, Path, Any], start: Start, tmp_path: Path
) -> None:
    spec, _, _ = released
    runs = [start("release", spec, "-o", tmp_path / "out", "--join") for _ in range(2)]
    assert [run.ended().code for run in runs] == [0, 0], [run.err for run in runs]
    document("release", spec, "-o", tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_failed_gate_ends_a_finished_release_with_code_6(model: Model, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model("llama"), INT4, Q8, gate=0.001)
    ended = command(
        "release", spec, "-o", tmp_path / "out", "--summary", tmp_path / "summary.md", "--json"
    )
    assert ended.code == 6
    assert "int4" in ended.err
    assert (tmp_path / "out" / "SHA256SUMS").exists()
    upload = (tmp_path / "out" / "upload.sh").read_text()
    assert "q8.gguf" in upload
    assert "name=int4" not in upload
    assert "int4" in (tmp_path / "summary.md").read_text()


def test_only_and_budget_select_variants_of_a_release(model: Model, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model("llama"), INT4, Q8)
    shown = document("release", spec, "-o", tmp_path / "out", "--dry-run")
    assert [row["name"] for row in shown["variants"]] == ["int4", "q8"]
    assert not (tmp_path / "out").exists()
    assert document("release", spec, "-o", tmp_path / "only", "--only q8")["made"] == ["q8"]
    cheap = document("release", spec, "-o", tmp_path / "out", "--dry-run --budget 400kB")
    assert [row["name"] for row in cheap["variants"]] == ["int4"]
    assert "q8" in json.dumps(cheap["left_out"])
    refusal(4, "release", spec, "-o", tmp_path / "out", "--budget 1kB")


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [
        (("[gates]", "[gats]"), 3, "gates"),
        (('"rtn"', '"rnt"'), 4, "rtn"),
        (('name = "q8"', 'name = "int4"'), 3, "int4"),
        (('text = "builtin"', 'text = "absent.txt"'), 3, "absent.txt"),
        (('type = "Q8_0"', 'scheme = "nf4"\nformat = "awq"'), 4, "q8"),
    ],
)
def test_a_release_with_an_invalid_entry_writes_nothing(
    change: tuple[str, str], code: int, word: str, model: Model, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, model("llama"), INT4, Q8)
    spec.write_text(spec.read_text().replace(*change))
    ended = command("release", spec, "-o", tmp_path / "out")
    assert (ended.code, word in ended.err) == (code, True), ended.err
    assert not (tmp_path / "out").exists()


def test_a_foreign_output_directory_is_refused_and_kept(model: Model, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model("llama"), Q8)
    out = tmp_path / "out"
    out.mkdir()
    (out / "SHA256SUMS").write_text("mine")
    refusal(4, "release", spec, "-o", out)
    assert (out / "SHA256SUMS").read_text() == "mine"


def test_a_sweep_can_be_extended_and_skips_invalid_combinations(
    model: Model, tmp_path: Path
) -> None:
    base = (
        "sweep",
        model("llama"),
        "--calibration none --method rtn --windows 2 --window-length 32",
    )
    first = document(base, "--over bits=4 --over format=compressed-tensors,awq -o", tmp_path / "s")
    assert len(first["results"]) == 2
    more = document(base, "--over bits=3,4 --over format=compressed-tensors,awq -o", tmp_path / "s")
    assert len(more["results"]) == 3
    assert len(more["left_out"]) == 1  # awq has 4 bits alone
    rows = more["evaluation"]["models"]
    assert len(rows) == 4
    refusal(
        4,
        base,
        "--over bits=3 --over format=compressed-tensors,awq -o",
        tmp_path / "t",
        "--strict",
    )
    refusal(2, base, "--over bitz=3 -o", tmp_path / "t")


def test_allocate_beats_a_uniform_scheme_at_its_target(
    model: Model, make: Make, tmp_path: Path
) -> None:
    recipe = tmp_path / "mixed.toml"
    words = f"--candidates int3:g128,int4:g128,int5:g128 {ROWS}"
    allocation = document("allocate", model("llama"), "--target 4.0bpw", words, "-o", recipe)
    assert {group["scheme"] for group in allocation["groups"]} <= {
        "int3:g128:sym",
        "int4:g128:sym",
        "int5:g128:sym",
    }
    assert tomllib.loads(recipe.read_text())["rule"]
    uniform = {row["scheme"]: row for row in allocation["uniform"]}
    assert uniform["int3:g128:sym"]["kl_nats"] > allocation["kl_nats"]
    planned = document("plan", model("llama"), "--recipe", recipe)
    assert planned["output_bytes"] == allocation["bytes"]
    refusal(4, "allocate", model("llama"), "--target 4.0bpw", words, "-o", recipe)  # it is there
    refusal(2, "allocate", model("llama"), "--target four", words, "-o", tmp_path / "x.toml")


@pytest.mark.thorough  # as `tests/unit/execution/test_allocation.py` shows
def test_like_does_not_exceed_the_size_of_another_file(
    model: Model, make: Make, tmp_path: Path
) -> None:
    like = make("export", "wide", "--type Q4_0").path
    result = document(
        "quantize",
        model("wide"),
        "--like",
        like,
        ROWS,
        "--candidates q3_k,q4_k,q5_k",
        "-o",
        tmp_path / "x.gguf",
    )
    assert result["output_bytes"] <= like.stat().st_size
