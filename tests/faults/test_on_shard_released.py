"""Files of a release's variants that a command takes: the bytes of a release without it, whatever happens."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shlex
import signal
import time
from pathlib import Path

import pytest

from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import RefusedError, ResourceError, UsageError
from quantforge.settings import Settings
from quantforge.verbs import release
from tests.conftest import Tiny
from tests.runs import command, ended, forked, script, tree
from tests.thorough import further

HEAD = """model = "{model}"
[calibration]
samples = 4
length = 16
"""
INT4 = """[[variant]]
name = "int4"
recipe = {method = "gptq", scheme = "int4:g32:sym", max_shard_bytes = 60000}
format = "compressed-tensors"
"""
INT3 = INT4.replace("int4", "int3")
INT8 = INT4.replace("int4", "int8").replace("gptq", "rtn")
AWQ = """[[variant]]
name = "awq"
recipe = {method = "awq", scheme = "int4:g32:asym", max_shard_bytes = 60000}
format = "awq"
"""
Q8 = '[[variant]]\nname = "q8"\nmethod = "rtn"\ntype = "Q8_0"\n'
TEXT = '[evaluation]\ntext = "builtin"\nwindows = 2\nlength = 16\n'


@pytest.fixture
def away(tmp_path: Path) -> Path:
    place = tmp_path / "away"
    for name in ("int4", "int3", "int8", "awq"):
        (place / name).mkdir(parents=True)
    return place


@pytest.fixture
def taken(away: Path) -> Settings:
    return Settings(on_shard=f"mv {{}} {shlex.quote(str(away))}/{{name}}/")


def written(tmp_path, model, *parts):
    path = tmp_path / "release.toml"
    path.write_text(HEAD.format(model=model) + "".join(parts))
    return path


@pytest.fixture(scope="module")
def whole(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    """Return the files of a release of two variants without a command, and the seconds that it takes."""
    place = tmp_path_factory.mktemp("whole")
    start = time.monotonic()
    release(written(place, tiny("llama-wide"), INT4, INT3), place / "out")
    return tree(place / "out"), time.monotonic() - start


def together(out: Path, away: Path) -> dict[str, str]:
    """The files of a release and those that were taken, by the names that they have in a release."""
    folders = {"awq": "awq"}
    moved = {
        f"{folders.get(name.partition('/')[0], 'compressed-tensors')}/{name}": digest
        for name, digest in tree(away).items()
    }
    assert not moved.keys() & tree(out).keys()
    return tree(out) | moved


@pytest.mark.thorough
def test_files_that_are_moved_away_change_no_byte_and_are_not_made_again(
    model, tmp_path, away, taken, capsys
):
    spec, out = written(tmp_path, model, INT4, AWQ, INT8), tmp_path / "out"
    release(spec, tmp_path / "whole")
    whole = tree(tmp_path / "whole")
    said = command(capsys, "release", spec, "-o", out, "--on-shard", taken.on_shard)
    assert said.code == 0, said.err
    assert together(out, away) == whole
    assert not [name for name in tree(out) if name.endswith(".safetensors")]
    assert said.err.count("were handed over to mv {} ") == 3
    before = tree(out)
    assert release(spec, out, taken).made == ()
    assert tree(out) == before
    with pytest.raises(RefusedError, match="put them back first") as refused:
        release(spec, out)
    assert "--on-shard" in refused.value.hint
    written(tmp_path, model, INT4, AWQ, INT8, INT3)
    assert release(spec, out, taken).made == ("int3",)
    written(tmp_path, model, INT4, AWQ, INT8)
    release(spec, out, taken)
    for file in away.glob("*/*"):
        place = out / ("awq" if file.parent.name == "awq" else "compressed-tensors")
        file.rename(place / file.parent.name / file.name)
    assert release(spec, out).made == ()
    for name in whole:
        assert tree(out)[name] == whole[name]


@pytest.mark.parametrize("join", [further(False), True])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(
    model, tmp_path, away, taken, whole, join
):
    spec, out = written(tmp_path, model, INT4, INT3), tmp_path / "out"
    files, seconds = whole
    moments = random.Random(7)
    settings = Settings(on_shard=taken.on_shard, join=join)
    for kill in itertools.count():
        children = [
            forked(lambda: release(spec, out, settings), tmp_path / f"errors-{number}")
            for number in range(1 + join)
        ]
        if kill < 6:
            time.sleep(seconds * moments.random())
            os.kill(moments.choice(children), signal.SIGKILL)
        codes = [ended(child) for child in children]
        errors = [path.read_text() for path in tmp_path.glob("errors-*")]
        assert {*codes} <= {0, -signal.SIGKILL}, errors
        if kill >= 6:
            break
    assert together(out, away) == files
    assert not any(out.rglob(".*"))


def test_a_command_that_fails_stops_the_release_and_the_same_goes_on(
    model, tmp_path, away, whole, capsys, monkeypatch
):
    lines = "name = sys.argv[2]\n"
    lines += (
        "if name == 'int3' and '00002' in shard.name and not Path('mended').exists(): sys.exit(3)\n"
    )
    lines += "shutil.move(shard, place / 'away' / name / shard.name)"
    taker = f"{script(tmp_path, lines)} {{}} {{name}}"
    monkeypatch.chdir(tmp_path)
    spec, out = written(tmp_path, model, INT4, INT3), tmp_path / "out"
    failed = command(capsys, "release", spec, "-o", out, "--on-shard", taker)
    assert (failed.code, "ended with 3" in failed.err) == (7, True), failed.err
    assert "goes on with this shard" in failed.err
    Path("mended").touch()
    again = command(capsys, "release", spec, "-o", out, "--on-shard", taker)
    assert again.code == 0, again.err
    assert together(out, away) == whole[0]


def test_a_disk_that_fills_up_meanwhile_stops_it_and_it_goes_on(
    model, tmp_path, away, taken, whole, monkeypatch
):
    spec, out = written(tmp_path, model, INT4, INT3), tmp_path / "out"
    allocate, calls = WeightsWriter._allocate_one, itertools.count()

    def full(self, *arguments):
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "_allocate_one", full)
        with pytest.raises(ResourceError, match="No space left"):
            release(spec, out, taken)
    release(spec, out, taken)
    assert together(out, away) == whole[0]


def test_what_cannot_work_is_refused_before_any_work(model, tmp_path, taken, capsys):
    out = tmp_path / "out"
    for parts, settings, said in (
        ((INT4, INT3), Settings(on_shard="true"), "2 variants: their files have the same names"),
        ((INT4,), Settings(on_shard="no-such-program-here"), "no program"),
        ((TEXT, INT4), taken, "scoring reads all files"),
        ((INT4,), Settings(on_shard="true", ray="auto"), "machines of the cluster"),
    ):
        with pytest.raises(UsageError, match=said):
            release(written(tmp_path, model, *parts), out, settings)
    spec = written(tmp_path, model, INT4, Q8)
    for more in ((), ("--dry-run",)):
        refused = command(capsys, "release", spec, "-o", out, "--on-shard", "true {name}", *more)
        assert refused.code == 4
        assert "1 of 2 variants cannot be made: q8: --on-shard, and gguf" in refused.err
    assert not out.exists()
    release(written(tmp_path, model, INT4), out, Settings(on_shard="true"))  # there is but one
