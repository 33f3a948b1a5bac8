"""A renamed or moved result is verified and reproduced by its own manifest, not by its neighbors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from quantforge.api.reproduce import reproduce
from quantforge.verification.findings import Report
from quantforge.verification.verify import verify
from tests.runs import quantize, recipe, run_command

MANIFEST_END = ".quantforge.json"
GGUF_Q4_0 = {"format": "gguf", "type": "Q4_0"}


def copy_result(file: Path, new: Path, *, beside: tuple[str, ...] = ()) -> Path:
    """Copy a GGUF file or its parts under another name, with its manifest and the given side files."""
    new.parent.mkdir(exist_ok=True)
    if file.exists():
        shutil.copy(file, new)
    for part in file.parent.glob(f"{file.stem}-*-of-*{file.suffix}"):
        shutil.copy(part, new.with_name(new.stem + part.name.removeprefix(file.stem)))
    for ending in (MANIFEST_END, *beside):
        shutil.copy(f"{file}{ending}", f"{new}{ending}")
    return new


def damage_file(file: Path) -> Path:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    return file


def quick_verify(path: Path, source: Path | None = None) -> Report:
    return verify(path, source, forward=False)


def manifest_findings(report: Report) -> list[tuple[str, str]]:
    return [
        (finding.where, finding.detail)
        for finding in report.findings
        if finding.check == "manifest"
    ]


CHANGED = "its SHA-256 is not that of the manifest"


@pytest.fixture
def result(tiny, tmp_path):
    out = tmp_path / "q" / "m-Q4_0.gguf"
    out.parent.mkdir()
    quantize(tiny("llama"), out, recipe(**GGUF_Q4_0), provenance=True)
    return out


SIDE_SUFFIXES = (".provenance.intoto.json", ".bom.cdx.json")


@pytest.mark.parametrize("name", ["My-Q4_0.gguf", "blob"])
def test_a_renamed_file_is_verified_by_its_manifest(result, tmp_path, tiny, name):
    alone = copy_result(result, tmp_path / "rn" / name, beside=SIDE_SUFFIXES)
    report = quick_verify(alone, tiny("llama"))
    assert not report.findings
    assert report.notes == [f"the manifest calls {name} by another name: m-Q4_0.gguf"]
    assert report.document()["notes"] == report.notes
    assert not quick_verify(result).notes
    # The neighbour is whole: nothing of that makes up for a byte of this one, nor the other way round.
    beside = damage_file(copy_result(result, result.with_name(name), beside=SIDE_SUFFIXES))
    assert manifest_findings(quick_verify(beside)) == [(name, CHANGED)]
    assert not manifest_findings(quick_verify(result))
    damage_file(result)
    assert not manifest_findings(
        quick_verify(copy_result(alone, result.with_name(f"2{name}"), beside=SIDE_SUFFIXES))
    )


def test_missing_side_files_are_named_after_the_renamed_file(result, tmp_path):
    renamed = copy_result(result, result.with_name("My.gguf"))
    missing = manifest_findings(quick_verify(renamed))
    assert missing == [
        (f"My.gguf{suffix}", "is listed in the manifest and missing")
        for suffix in sorted(SIDE_SUFFIXES)
    ]


def test_verify_prints_a_note_about_a_renamed_file(result, tmp_path, capsys):
    renamed = copy_result(result, tmp_path / "rn" / "My.gguf", beside=SIDE_SUFFIXES)
    ended = run_command(capsys, "verify", renamed, "--no-forward")
    assert ended.code == 0
    assert "by another name: m-Q4_0.gguf" in ended.err


def test_renamed_gguf_parts_are_verified_together(tiny, tmp_path):
    out = tmp_path / "q.gguf"
    quantize(tiny("llama"), out, recipe(**GGUF_Q4_0, max_shard_bytes=20000))
    parts = sorted(tmp_path.glob("q-*-of-*.gguf"))
    assert len(parts) > 1
    copy_result(out, tmp_path / "rn.gguf")
    first, *_, last = sorted(tmp_path.glob("rn-*-of-*.gguf"))
    assert not quick_verify(first).findings
    assert quick_verify(first).notes
    assert manifest_findings(quick_verify(damage_file(last))) == [(last.name, CHANGED)]
    assert [name for name, _ in manifest_findings(quick_verify(first))] == [last.name]
    assert not quick_verify(parts[0]).findings


def test_a_file_that_the_manifest_does_not_list_is_an_error(tiny, tmp_path, result):
    """A manifest that lists no file, or only some parts of a set, is not enough."""
    manifest_path = Path(f"{result}{MANIFEST_END}")
    document = json.loads(manifest_path.read_text())
    document["outputs"] = {}
    manifest_path.write_text(json.dumps(document))
    assert manifest_findings(quick_verify(result)) == [
        (result.name, "is not listed in the manifest")
    ]
    out = tmp_path / "s.gguf"
    quantize(tiny("llama"), out, recipe(**GGUF_Q4_0, max_shard_bytes=20000))
    manifest_path, (first, *_, last) = (
        Path(f"{out}{MANIFEST_END}"),
        sorted(tmp_path.glob("s-*-of-*.gguf")),
    )
    document = json.loads(manifest_path.read_text())
    del document["outputs"][last.name]
    manifest_path.write_text(json.dumps(document))
    assert manifest_findings(quick_verify(first)) == [(last.name, "is not listed in the manifest")]


def test_reproduce_of_a_renamed_file_ignores_its_neighbor(result, tmp_path, tiny):
    renamed = copy_result(result, result.with_name("My.gguf"), beside=SIDE_SUFFIXES)
    assert reproduce(renamed, tiny("llama")).differing == ()
    damage_file(renamed)
    report = reproduce(renamed, tiny("llama"))
    assert (report.differing, report.edited) == (("My.gguf",), ("My.gguf",))
    kept = reproduce(renamed, tiny("llama"), keep=tmp_path / "other.gguf")
    assert kept.left_out == tuple(f"My.gguf{suffix}" for suffix in sorted(SIDE_SUFFIXES))
    assert kept.differing == ("My.gguf",)


def test_a_renamed_directory_is_verified_and_reproduced(tiny, tmp_path):
    out, moved = tmp_path / "q", tmp_path / "elsewhere"
    quantize(tiny("llama"), out, recipe(), provenance=True)
    out.rename(moved)
    assert not quick_verify(moved, tiny("llama")).findings
    assert reproduce(moved, tiny("llama")).differing == ()


def test_a_renamed_source_is_recognized(tiny, tmp_path):
    plain = tmp_path / "plain.gguf"
    quantize(tiny("llama"), plain, recipe(format="gguf", type="F16"))
    out = tmp_path / "q"
    quantize(plain, out, recipe(scheme="int4:g32:sym", scales="absmax"))
    moved = copy_result(plain, tmp_path / "rn" / "other.gguf")
    assert not quick_verify(out, moved).findings
    assert reproduce(out, moved).differing == ()
