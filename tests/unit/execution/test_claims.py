"""Claims of units: one owner each, kept alive by heartbeats, and lost without them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from quantforge.errors import IntegrityError, ResourceError
from quantforge.execution import claims
from quantforge.execution.claims import Claims
from quantforge.files.disk import DISK
from quantforge.files.lock import ChangeTracker

SAME = {"recipe": "r"}
RECORD = {"unit": "a", "checksums": {}}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(claims, "LEASE_SECONDS", 0.4)


UNITS = [f"unit {number}" for number in range(60)]


def prepared(directory: Path, units: int = 1) -> Claims:
    result = Claims(directory / "units", UNITS[:units])
    result.prepare(SAME)
    return result


def names(shared: Claims) -> list[str]:
    return sorted(path.name for path in run_of(shared).iterdir() if path.is_dir())


def run_of(shared: Claims) -> Path:
    assert shared.run is not None
    return shared.run


def test_worker_claims_only_requested_units(tmp_path: Path) -> None:
    shared = prepared(tmp_path, 3)
    first = shared.claim(["unit 1"])
    assert first is not None
    assert first.unit == 1
    with first:
        assert not shared.has_claimable(["unit 1"])
        assert shared.has_claimable(["unit 1", "unit 2"])
        assert shared.claim(["unit 1"]) is None
    assert shared.has_claimable(["unit 1"])  # given back


def test_many_workers_finish_every_unit_once(tmp_path: Path) -> None:
    shared = prepared(tmp_path, 60)
    done: list[int] = []

    def work() -> None:
        mine = Claims(shared.directory, shared.names)
        while (claim := mine.claim(UNITS)) is not None:
            with claim:
                done.append(claim.unit)
                claim.finish({"unit": mine.names[claim.unit], "checksums": {}})
            assert not claim.lost

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(done) == list(range(60))
    assert len(shared.finished_directories()) == 60
    assert shared.finished_records().keys() == set(shared.names)


def test_live_worker_keeps_its_unit_and_failed_one_returns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LEASE_SECONDS", 2.0)  # beats come late on a busy machine
    shared, other = prepared(tmp_path), prepared(tmp_path)
    claim = shared.claim(UNITS)
    assert claim is not None

    def interrupted() -> None:
        with claim:
            ends = time.monotonic() + 2.5  # longer than the lease
            while time.monotonic() < ends:
                assert other.claim(UNITS) is None
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(shared) == ["0000.1.free"]
    again = other.claim(UNITS)
    assert again is not None
    assert names(shared) == ["0000.2.held"]


def test_worker_without_heartbeat_loses_its_unit(tmp_path: Path) -> None:
    shared, other = prepared(tmp_path), prepared(tmp_path)
    lost = shared.claim(UNITS)  # which never begins to count
    assert lost is not None
    assert other.claim(UNITS) is None
    time.sleep(0.5)
    mine = other.claim(UNITS)
    assert mine is not None
    with mine:
        with lost:  # it wakes
            (mine.directory / mine.file("data")).write_bytes(b"mine")
            lost.finish({"unit": "unit 0", "checksums": {"late": 1}})
        assert lost.lost
        assert names(shared) == ["0000.2.held"]
        mine.finish({"unit": "unit 0", "checksums": {"good": 1}})
    assert not mine.lost
    ((record, data),) = shared.finished_records().values()
    assert record["checksums"] == {"good": 1}
    assert data.read_bytes() == b"mine"


def test_errors_after_losing_a_claim_are_suppressed(tmp_path: Path) -> None:
    shared = prepared(tmp_path)
    claim = shared.claim(UNITS)
    assert claim is not None
    with claim:
        claim.directory.rename(run_of(shared) / "0000.2.held")
        raise ResourceError("no such file")
    assert claim.lost
    assert shared.claim(UNITS) is None  # seen for the first time
    time.sleep(0.5)
    again = shared.claim(UNITS)
    assert again is not None
    with pytest.raises(ResourceError, match="full"), again:
        raise ResourceError("the disk is full")
    assert names(shared) == ["0000.3.free"]


def test_symlinked_unit_directory_is_not_claimed(tmp_path: Path) -> None:
    shared, elsewhere = prepared(tmp_path), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "1.data").write_text("somebody's")
    (run_of(shared) / "0000.0.free").rmdir()
    (run_of(shared) / "0000.0.free").symlink_to(elsewhere)
    assert shared.claim(UNITS) is None
    assert (elsewhere / "1.data").read_text() == "somebody's"


def test_damaged_claim_records_are_refused(tmp_path: Path) -> None:
    shared = prepared(tmp_path, 2)
    claim = shared.claim(UNITS)
    assert claim is not None
    with claim:
        claim.finish(RECORD)
    assert shared.finished_records().keys() == {"unit 0"}  # the other is free
    record = next(run_of(shared).glob("0000.1.done/1.record"))
    record.write_bytes(record.read_bytes()[:-5])
    with pytest.raises(IntegrityError, match="damaged") as refused:
        shared.finished_records()
    assert refused.value.hint == f"start afresh: rm -r {shared.directory}"
    with pytest.raises(IntegrityError, match="differs in: recipe"):
        shared.check_fingerprint({"recipe": "s"})
    (run_of(shared) / "0001.0.free").rmdir()
    assert shared.claim(UNITS) is None
    time.sleep(0.5)
    with pytest.raises(IntegrityError, match="damaged"):
        shared.claim(UNITS)


def test_finished_run_leaves_no_claim_files(tmp_path: Path) -> None:
    shared = prepared(tmp_path, 3)
    shared.check_exists()
    shared.remove()
    assert list(tmp_path.iterdir()) == []
    assert shared.claim(UNITS) is None
    assert (len(shared.finished_directories()), shared.exists) == (0, False)
    shared.check_fingerprint({"recipe": "s"})
    with pytest.raises(IntegrityError, match="is over"):
        shared.check_exists()
    shared.remove()


def test_stale_worker_cannot_write_into_the_next_run(tmp_path: Path) -> None:
    """A worker that was stopped for long wakes beside a unit of the same name and generation."""
    shared = prepared(tmp_path)
    lost = shared.claim(UNITS)
    assert lost is not None
    shared.remove()
    following = prepared(tmp_path)
    mine = following.claim(UNITS)
    assert mine is not None
    assert mine.directory.name == lost.directory.name
    with mine:
        with lost:
            lost.finish({"unit": "unit 0", "checksums": {"late": 1}})
        assert lost.lost
        assert not shared.exists
        assert shared.claim(UNITS) is None
        mine.finish({"unit": "unit 0", "checksums": {"good": 1}})
    assert not mine.lost
    assert following.finished_records()["unit 0"][0]["checksums"] == {"good": 1}
    following.remove()
    shared.prepare({"recipe": "s"})  # for those who begin a run themselves
    assert names(shared) == ["0000.0.free"]


def test_unchanged_time_starts_at_first_observation() -> None:
    watch = ChangeTracker()
    assert watch.seconds_unchanged("a", 1) == 0
    time.sleep(0.02)
    assert 0.02 <= watch.seconds_unchanged("a", 1) < 5
    assert watch.seconds_unchanged("b", 1) == 0
    assert watch.seconds_unchanged("a", 2) == 0


def test_unknown_directories_are_not_units(tmp_path: Path) -> None:
    shared = prepared(tmp_path)
    for name in ("0001.0.free", "0001.0.done", "stray"):
        (run_of(shared) / name).mkdir()
    claim = shared.claim(UNITS)
    assert claim is not None
    assert claim.unit == 0
    with claim:
        assert shared.claim(UNITS) is None
        assert (len(shared.finished_directories()), shared.finished_records()) == (0, {})


def test_symlinked_claims_directory_is_ignored(tmp_path: Path) -> None:
    shared = prepared(tmp_path)
    shared.directory.rename(tmp_path / "elsewhere")
    shared.directory.symlink_to(tmp_path / "elsewhere")
    other = Claims(shared.directory, shared.names)
    assert not other.exists
    assert other.claim(UNITS) is None
    other.check_fingerprint({"recipe": "s"})  # of no run


def test_leftover_files_of_a_lost_claim_are_removed(tmp_path: Path) -> None:
    shared = prepared(tmp_path)
    lost = shared.claim(UNITS)
    assert lost is not None
    for name in (lost.file("data"), lost.file("record"), "notes.txt"):
        (lost.directory / name).write_text("left")
    assert shared.claim(UNITS) is None
    time.sleep(0.5)
    mine = shared.claim(UNITS)
    assert mine is not None
    assert [path.name for path in mine.directory.iterdir()] == ["notes.txt"]


def test_finished_unit_directory_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(type(DISK), "sync", lambda _, path: synced.append(path))
    shared = prepared(tmp_path)
    synced.clear()
    claim = shared.claim(UNITS)
    assert claim is not None
    with claim:
        claim.finish(RECORD)
    assert synced[-1] == run_of(shared)


def test_lease_lasts_many_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert claims.LEASE_SECONDS >= 30 * claims.HEARTBEAT_SECONDS
