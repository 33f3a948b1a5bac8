"""When a disk call fails or a run is killed, an output is old, new or absent, never partial."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge.errors import RefusedError, ResourceError
from quantforge.files.disk import DISK
from quantforge.files.stage import Stage
from tests.releases import (
    NO_FSYNC_DISK,
    FailingDisk,
    make,
    os_error,
    read_release,
    sibling_names,
    stage_release,
)

# --- the disk fails -------------------------------------------------------------------------------


@pytest.mark.parametrize("existing", [False, True])
def test_a_failed_disk_call_leaves_the_old_or_new_output(tmp_path: Path, existing: bool) -> None:
    make(tmp_path / "expected", "new", NO_FSYNC_DISK)
    expected = read_release(tmp_path / "expected")
    outcomes = []
    for at in range(1, 1000):
        out = tmp_path / f"{at}/out"
        out.parent.mkdir()
        if existing:
            make(out, "old", NO_FSYNC_DISK)
        old = read_release(out) if existing else None
        code = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)[at % 4]
        failing = FailingDisk(at, os_error(code))
        try:
            make(out, "new", failing.disk())
        except (ResourceError, RefusedError) as error:
            failure = error
        else:
            break
        if isinstance(failure, RefusedError):
            assert "cannot swap" in failure.message, "the probe failed"
        else:
            assert os.strerror(code) in failure.message
            assert "bytes needed" in failure.message
            assert "free" in failure.message
        state = read_release(out) if out.exists() else None
        assert state in (old, expected)
        outcomes.append(state == expected)
        make(out, "new", NO_FSYNC_DISK)  # the same command again
        assert read_release(out) == expected
        assert sibling_names(out) == set()
    assert failing.count < at, "no failure is swallowed"
    assert len(outcomes) > 20
    assert outcomes == [False] * (at - 2) + [True], "only the last sync comes after the rename"


def test_short_writes_are_continued(tmp_path: Path) -> None:
    make(tmp_path / "expected", "new")
    halves = replace(DISK, pwrite=lambda d, data, at: os.pwrite(d, data[: len(data) // 2 + 1], at))
    make(tmp_path / "out", "new", halves)
    assert read_release(tmp_path / "out") == read_release(tmp_path / "expected")
    stuck = replace(DISK, pwrite=lambda d, data, at: 0)
    with pytest.raises(ResourceError, match="No space left"):
        make(tmp_path / "other", "new", stuck)


def test_too_little_disk_space_is_refused_before_work(tmp_path: Path) -> None:
    with Stage(tmp_path / "out", overwrite=False) as stage:
        stage.check_space(1)
        with pytest.raises(ResourceError, match=f"{2**60} bytes needed, [0-9]+ free") as caught:
            stage.check_space(2**60)
        assert f"free space in {tmp_path} " in caught.value.hint  # not what is removed at the end
        stage.write_file("staged", bytes(2**20))
        with pytest.raises(ResourceError) as caught:
            stage.check_space(2**60)
        assert f" {2**60 - 2**20} bytes needed" in caught.value.message


LIMITED = """
import resource, sys
from pathlib import Path
from quantforge.files.stage import Stage
from quantforge.files.writer import plan_files
from quantforge.files.writer import WeightsWriter
from quantforge.errors import ResourceError
from quantforge.plans import StoredTensor
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with Stage(Path(sys.argv[1]), overwrite=False) as stage:
    for attempt in (
        lambda: WeightsWriter(stage.path, plan_files(((StoredTensor("w", "U8", (10,)),),
                                                      (StoredTensor("v", "U8", (200_000,)),)))),
        lambda: stage.write_file("tokenizer.json", bytes(200_000)),
    ):
        try:
            attempt()
        except ResourceError as error:
            print(error.message)
    print(sorted(path.name for path in stage.path.iterdir()))
"""


def test_a_file_size_limit_is_reported_and_space_freed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert "File too large; 200" in lines[0]
    assert "File too large; 200000 bytes needed" in lines[1]
    assert lines[2] == "[]", "the file and the shards gave their space back"


# --- kills ----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from tests import releases as t
from dataclasses import replace
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
failing = t.FailingDisk(0, kill)
disk = replace(failing.disk(), fsync=failing.wrap(lambda descriptor: None))
for place in sys.argv[1:]:
    for at in range(1, 1000):
        child = os.fork()
        if not child:
            failing.at = at
            t.make(Path(place) / f"{at}/out", "new", disk)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            print(at if os.WEXITSTATUS(status) == 0 else "error")
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
"""


def test_a_kill_at_any_call_leaves_the_old_or_new_output(tmp_path: Path) -> None:
    directories = [tmp_path / "absent", tmp_path / "existing"]
    for directory in directories:
        for at in range(1, 60):
            (directory / f"{at}").mkdir(parents=True)
            if directory.name == "existing":
                make(directory / f"{at}/out", "old", NO_FSYNC_DISK)
    command = [sys.executable, "-c", KILLED, *map(str, directories)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    make(tmp_path / "expected", "new", NO_FSYNC_DISK)
    make(tmp_path / "old", "old", NO_FSYNC_DISK)
    expected, old = read_release(tmp_path / "expected"), read_release(tmp_path / "old")
    for directory, calls in zip(directories, done.stdout.split(), strict=True):
        check_killed(directory, int(calls), old if directory.name == "existing" else None, expected)


def check_killed(
    directory: Path, calls: int, old: dict[str, bytes] | None, expected: dict[str, bytes]
) -> None:
    """Check what each kill left, and that the next run completes it."""
    assert 20 < calls < 60
    states = []
    for at in range(1, calls):
        out = directory / f"{at}/out"
        state = read_release(out) if out.exists() else None
        states.append(state == expected)
        assert state in (old, expected)
        with Stage(out, overwrite=True) as stage:
            assert read_release(stage.path).get("config.json") != b"old", (
                "no stage of an old release"
            )
            stage_release(stage, "new", NO_FSYNC_DISK)
            stage.publish()
        assert read_release(out) == expected
        assert sibling_names(out) == set()
    assert states == sorted(states)
    assert states[-1], "the last kill came after the rename"
    assert not states[0]
