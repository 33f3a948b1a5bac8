"""The journal of a run: finished units are kept, damage and another fingerprint are refused."""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantforge.errors import IntegrityError, ResourceError
from quantforge.events import Event
from quantforge.execution import journal, unit_output
from quantforge.execution.journal import (
    FINGERPRINT_FILE,
    JOURNAL_FILE,
    Journal,
    events_of,
    figures_of,
    finished_tensor_names,
    merge_records,
    recorded_fingerprint,
    resume_or_create_journal,
    run_fingerprint,
    write_durably,
)
from quantforge.execution.unit_output import checksum, copy_strips
from quantforge.execution.units import list_units
from quantforge.files.disk import DISK
from quantforge.files.stage import Stage
from quantforge.plans import Action, StoredTensor, TensorPlan
from tests.releases import NO_FSYNC_DISK
from tests.runs import recipe

SAME = {"recipe": "", "device": "cpu"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def write_journal(directory: Path, *units: str) -> bytes:
    """Leave a journal in which some units are done, and return its bytes."""
    work = Journal(directory, SAME)
    for unit in units:
        work.commit(unit, {"checksums": {unit: 1}})
    work.close()
    return (directory / JOURNAL_FILE).read_bytes()


def finished_units(directory: Path) -> dict[str, Any]:
    """What a journal says is done."""
    work = Journal(directory, SAME)
    work.close()
    assert work.resumed == bool(work.done)
    return work.done


# ---- lines


def test_finished_units_are_known_to_the_next_run(directory: Path) -> None:
    assert finished_units(directory) == {}
    work = Journal(directory, SAME)
    assert not work.resumed
    record = {"checksums": {"a": 7}, "metrics": {"a": {"error": math.inf}}}
    work.commit("outer", record)
    assert work.done == {"outer": {"unit": "outer", **record}}
    work.close()
    work.close()
    assert finished_units(directory) == work.done
    write_journal(directory, "block 0")
    assert list(finished_units(directory)) == ["outer", "block 0"]
    last = Journal(directory, SAME)
    last.remove()
    assert not directory.exists()
    last.remove()


@pytest.mark.parametrize("lost", [1, 2, 10, 40])
def test_truncated_last_line_is_dropped(directory: Path, lost: int) -> None:
    whole = write_journal(directory, "outer")
    (directory / JOURNAL_FILE).write_bytes(write_journal(directory, "block 0")[:-lost])
    assert list(finished_units(directory)) == ["outer"]
    assert (directory / JOURNAL_FILE).read_bytes() == whole
    write_journal(directory, "block 0", "block 1")
    assert list(finished_units(directory)) == ["outer", "block 0", "block 1"]


def test_any_changed_byte_is_refused_as_damage(directory: Path) -> None:
    data = write_journal(directory, "outer", "head")
    for at in range(len(data) - 1):
        (directory / JOURNAL_FILE).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(IntegrityError, match="damaged") as refused:
            finished_units(directory)
        assert refused.value.hint == f"start afresh: rm -r {directory}"
    (directory / JOURNAL_FILE).write_bytes(
        data[:-1] + b"?"
    )  # a last line without its end, as of a kill
    assert list(finished_units(directory)) == ["outer"]


@pytest.mark.parametrize("text", [b"[]", b"{}", b'"unit"', b'{"unit": 1', b"\xff"])
def test_line_without_a_unit_is_refused(directory: Path, text: bytes) -> None:
    write_journal(directory, "outer")
    with (directory / JOURNAL_FILE).open("ab") as file:
        file.write(sha256(text).hexdigest()[:16].encode() + b" " + text + b"\n")
    with pytest.raises(IntegrityError, match="damaged"):
        finished_units(directory)


def test_line_is_synced_before_its_unit_counts_as_done(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Journal(directory, SAME)
    seen = []

    def fsync(_descriptor: int) -> None:
        seen.append(((directory / JOURNAL_FILE).read_bytes()[-1:], "outer" in work.done))

    monkeypatch.setattr(os, "fsync", fsync)
    work.commit("outer", {})
    work.close()
    assert seen == [(b"\n", False)]


def test_partial_write_is_reported_as_full_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_journal(directory, "outer")
    work, write = Journal(directory, SAME), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(ResourceError, match="No space left"):
            work.commit("head", {})
    work.close()
    assert "head" not in work.done
    assert list(finished_units(directory)) == ["outer"]


# ---- fingerprints


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({**SAME, "recipe": "s"}, "recipe"),
        ({"recipe": ""}, "device: cpu there, none here"),
        ({**SAME, "imatrix": "0" * 64}, "imatrix"),
        ({"device": "gpu", "recipe": "s"}, "device: cpu there, gpu here; recipe"),
        ({**SAME, "recipe": "bits = 3"}, "bits: unset there, 3 here"),
    ],
)
def test_run_with_another_fingerprint_is_refused_naming_the_difference(
    directory: Path, other: dict[str, str], named: str
) -> None:
    before = write_journal(directory, "outer")
    with pytest.raises(IntegrityError, match=f"differs in: {named}$") as refused:
        Journal(directory, other)
    assert f"rm -r {directory}" in refused.value.hint
    assert (directory / JOURNAL_FILE).read_bytes() == before
    assert recorded_fingerprint(directory) == SAME


def test_journal_without_finished_units_is_replaced(directory: Path) -> None:
    write_journal(directory)
    (directory / "states").write_text("left")
    work = Journal(directory, {"recipe": "s"})
    work.close()
    assert not work.resumed
    assert recorded_fingerprint(directory) == {"recipe": "s"}
    assert {path.name for path in directory.iterdir()} == {FINGERPRINT_FILE, JOURNAL_FILE}
    (directory / JOURNAL_FILE).unlink()
    assert finished_units(directory) == {}
    assert recorded_fingerprint(directory) == SAME


def test_unreadable_fingerprint_is_refused_as_damage(directory: Path) -> None:
    write_journal(directory, "outer")
    (directory / FINGERPRINT_FILE).write_text("[")
    assert recorded_fingerprint(directory) == {}
    with pytest.raises(IntegrityError, match="damaged"):
        finished_units(directory)


def test_fingerprint_file_and_directory_are_synced(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the file and the directory that names it, in this order: before any line of the journal."""
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink().name)
    )
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    write_journal(directory)
    assert [synced[0].partition(".")[0], synced[1]] == ["fingerprint", "journal"]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_fingerprint_covers_every_input_of_the_run(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("1")
    second.write_text("2")

    def drawn(digest: str) -> Any:
        return SimpleNamespace(sample=SimpleNamespace(report=SimpleNamespace(digest=digest)))

    def source(digest: str) -> dict[str, Any]:
        return {"files": {"w": {"sha256": digest}}}

    whole = {
        "recipe": recipe().to_toml(), "source": source("x"), "calibrated": drawn("c"), "device": "cpu",
        "imatrix": first,
    }  # fmt: skip
    changes = {
        "recipe": ("recipe", recipe(bits=3).to_toml()), "source": ("source file w", source("y")),
        "calibrated": ("calibration", drawn("d")), "device": ("device", "cuda"), "imatrix": ("imatrix", second),
    }  # fmt: skip
    reference = run_fingerprint(**whole)
    assert reference["calibration"] == "c"
    assert {"version of quantforge", "version of torch"} <= reference.keys()
    for argument, (name, value) in changes.items():
        result = run_fingerprint(**{**whole, argument: value})
        assert {key for key in {*reference, *result} if reference.get(key) != result.get(key)} == {
            name
        }
    several = [run_fingerprint(**{**whole, "device": f"cuda:{number}"}) for number in range(2)]
    assert several[0] == several[1] != reference  # ranks of one run
    bare = run_fingerprint(**{**whole, "calibrated": None, "imatrix": None})
    assert bare["calibration"] == ""
    assert "imatrix" not in bare


# ---- going on


def planned(name: str, part: int) -> TensorPlan:
    stored = tuple(StoredTensor(f"{name}.{end}", "U8", (1,)) for end in ("codes", "scale"))
    return TensorPlan(name, "F32", (1, 1), Action.KEEP, "", None, stored, part)


def test_finished_units_give_their_tensor_names() -> None:
    names = {"embed": -1, "zero": 0, "one": 1, "head": -1}
    plan: Any = SimpleNamespace(
        tensors=[planned(name, part) for name, part in names.items()],
        tensors_after_blocks=("head",),
    )
    units = {"outer": "embed", "block 0": "zero", "block 1": "one", "head": "head"}
    for unit, name in units.items():
        assert finished_tensor_names(plan, {unit: {}}) == [f"{name}.codes", f"{name}.scale"]
    assert finished_tensor_names(plan, {}) == []
    assert len(finished_tensor_names(plan, units)) == 8


def test_block_without_tensors_is_still_a_unit() -> None:
    plan: Any = SimpleNamespace(
        tensors=[planned("embed", -1), planned("one", 1), planned("head", -1)],
        tensors_after_blocks=("head",),
        needs=(),
        guided_hessians=0,
        tune=0,
    )
    units = list_units(plan, 2)
    assert [unit.name for unit in units] == ["outer", "block 0", "block 1", "head"]
    assert [[tensor.name for tensor in unit.outputs] for unit in units] == [
        ["embed.codes", "embed.scale"], [], ["one.codes", "one.scale"], ["head.codes", "head.scale"],
    ]  # fmt: skip


def test_stage_is_kept_only_when_resuming_its_run(tmp_path: Path) -> None:
    with Stage(tmp_path / "out", overwrite=False, disk=NO_FSYNC_DISK) as stage:
        work = resume_or_create_journal(stage, SAME)
        work.close()
        (stage.path / "staged").write_text("x")
        # Nothing was finished: what is staged is worth nothing
        stale = resume_or_create_journal(stage, SAME)
        assert stage.empty
        (stage.path / "staged").write_text("x")
        stale.commit("outer", {})
        stale.close()
        again = resume_or_create_journal(stage, SAME)
        again.close()
        assert again.resumed
        assert (stage.path / "staged").exists()
        stage.clear()  # as when the stage was published, and a kill left the journal
        afresh = resume_or_create_journal(stage, SAME)
        afresh.remove()
        assert not afresh.resumed


# ---- records


def test_records_of_a_unit_merge_in_order() -> None:
    events = [Event("substitution", name, "") for name in "abc"]
    parts: list[dict[str, Any]] = [{}, {}]
    merge_records(parts[0], {"events": [events[0].to_json()], "metrics": {"a": {"error": 1.0}}})
    merge_records(parts[0], {"events": [events[1].to_json()], "metrics": {"b": {"error": 2.0}}})
    merge_records(parts[1], {"events": [events[2].to_json()], "transform": {"x": 3}})
    assert events_of([*parts, {}]) == events
    assert figures_of([*parts, {}]) == {"a": {"error": 1.0}, "b": {"error": 2.0}}
    assert parts[1]["transform"] == {"x": 3}


@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (10, 3), (11, 3), (3, 40), (3, 100), (0, 5), (5, 0)]
)
def test_copy_strips_cover_a_tensor_within_the_byte_limit(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_output, "COPY_STRIP_BYTES", 12)
    stored = StoredTensor("t", "U8", shape)
    cut = list(copy_strips(stored))
    rows = shape[0] if shape else 1
    assert rows or cut == [(0, 0)]
    assert cut[0][0] == 0
    assert cut[-1][1] == rows
    assert all(before[1] == after[0] for before, after in pairwise(cut))
    width = stored.nbytes // max(rows, 1)
    longest = max(1, 12 // max(width, 1)) if width else max(rows, 1)
    assert all(last - first == min(longest, rows - first) for first, last in cut)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_checksum_of_parts_equals_checksum_of_the_whole(dtype: torch.dtype) -> None:
    value = torch.randn(6, 4).to(dtype)
    data = value.view(torch.uint8).numpy().tobytes()
    assert checksum(value, 0) == zlib.crc32(data)
    assert checksum(value[4:], checksum(value[:4], 0)) == zlib.crc32(data)
    assert checksum(value.T, 0) == checksum(value.T.contiguous(), 0) != zlib.crc32(data)
    assert checksum(torch.tensor(3.0).to(dtype), 0) == zlib.crc32(
        torch.tensor([3.0]).to(dtype).view(torch.uint8).numpy().tobytes()
    )


def test_durable_write_is_complete_or_leaves_no_file(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir()
    short = replace(DISK, pwrite=lambda file, data, offset: os.pwrite(file, data[:3], offset))
    monkeypatch.setattr(journal, "DISK", short)
    write_durably(directory / "record", b"whole")
    assert (directory / "record").read_bytes() == b"whole"
    monkeypatch.setattr(journal, "DISK", replace(DISK, pwrite=lambda *_: 0))
    with pytest.raises(OSError, match="No space left"):
        write_durably(directory / "other", b"whole")
    assert not (directory / "other").exists()


def test_journal_of_an_older_schema_is_refused(directory: Path) -> None:
    write_journal(directory, "outer")  # its fingerprint has no schema, as those of the first one
    with pytest.raises(IntegrityError) as refused:
        Journal(directory, {**SAME, "schema": journal.SCHEMA})
    assert "of schema quantforge.journal/1" in refused.value.message
    assert f"resumes {journal.SCHEMA}" in refused.value.message
    assert f"rm -r {directory}" in refused.value.hint
    assert (directory / JOURNAL_FILE).exists()
