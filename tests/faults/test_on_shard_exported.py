"""Files of an export that a command takes when they are final: the bytes of an export without it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quantforge import verbs
from quantforge.checkpoint.stage import Stage
from quantforge.checkpoint.writer import WeightsWriter
from quantforge.errors import IntegrityError, ResourceError, UsageError
from quantforge.execution.journal import Workspace
from quantforge.recipe import Recipe
from quantforge.settings import Settings
from quantforge.verbs import move_codes
from tests.runs import (
    StopError,
    command,
    ended,
    forked,
    leftovers,
    moving,
    quantize,
    script,
    swift,
    tree,
)

WANTED = Recipe(format="gptq", max_shard_bytes=60_000)
OPTIONS = ("--format", "gptq", "--max-shard-bytes", 60_000)


@pytest.fixture
def away(tmp_path: Path) -> Path:
    place = tmp_path / "away"
    place.mkdir()
    return place


@pytest.fixture
def codes(model: Path, tmp_path: Path) -> Path:
    """A model whose codes another format holds as they are."""
    quantize(model, tmp_path / "codes", swift(scheme="int4:g32:sym", scales="absmax"))
    return tmp_path / "codes"


@pytest.fixture
def whole(codes: Path, tmp_path: Path) -> dict[str, str]:
    """The files of the same export without a command."""
    export(codes, tmp_path / "whole")
    return tree(tmp_path / "whole")


def export(model: Path, out: Path, wanted: Recipe = WANTED, **settings: Any) -> Any:
    return verbs.export(str(model), wanted, out, Settings(**settings))


def shards(files: dict[str, str]) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def test_files_that_are_moved_away_change_no_byte(codes, out, away, whole, capsys):
    said = command(capsys, "export", codes, *OPTIONS, "-o", out, "--on-shard", moving(away))
    assert said.code == 0, said.err
    assert len(shards(whole)) > 3
    assert sorted(tree(away)) == shards(whole)
    assert tree(out) | tree(away) == whole
    assert f"{len(shards(whole))} weight files were handed over to mv" in said.err
    assert not out.parent.joinpath(".out.qf").exists()


@pytest.mark.thorough
def test_weights_that_are_rounded_plainly_are_handed_over_too(model, out, away):
    wanted = replace(WANTED, scheme="int4:g32:sym")
    export(model, out.with_name("whole"), wanted)
    export(model, out, wanted, on_shard=moving(away))
    assert len(tree(away)) > 3
    assert tree(out) | tree(away) == tree(out.with_name("whole"))


def test_files_lie_there_no_longer_than_is_forecast(codes, out, away, whole, monkeypatch):
    most, commit, held = [0], Workspace.commit, move_codes.most_held
    forecast = []

    def watched(self, *arguments):
        lying = (out.parent / ".out.qf/stage").glob("*.safetensors")
        most[0] = max(most[0], sum(file.stat().st_size for file in lying))
        commit(self, *arguments)

    monkeypatch.setattr(Workspace, "commit", watched)
    monkeypatch.setattr(
        move_codes, "most_held", lambda *given: forecast.append(held(*given)) or forecast[0]
    )
    made = export(codes, out, on_shard=moving(away))
    assert 0 < most[0] <= forecast[0] < made.output_bytes


def test_killed_at_any_moment_it_ends_with_the_same_bytes(codes, out, away, whole):
    errors, moments, kills = out.parent / "errors", random.Random(5), 0
    work = partial(export, codes, out, on_shard=moving(away))
    start = time.monotonic()
    export(codes, out.with_name("timed"))
    seconds = time.monotonic() - start
    while not out.exists():
        child = forked(work, errors)
        if kills < 8:
            time.sleep(seconds * moments.random())
            os.kill(child, signal.SIGKILL)
        assert ended(child) in {0, -signal.SIGKILL}, errors.read_text()
        kills += 1
    assert tree(out) | tree(away) == whole


def test_what_a_command_has_taken_is_neither_written_nor_handed_over_again(
    codes, out, away, whole, monkeypatch
):
    lines = "if '00003' in shard.name and not (place / 'mended').exists(): sys.exit(3)\n"
    lines += "(place / 'order').open('a').write(f'{shard.name}\\n')\n"
    lines += "shutil.move(shard, place / shard.name)"
    taker = script(away, lines)
    with pytest.raises(ResourceError, match="ended with 3"):
        export(codes, out, on_shard=taker)
    assert not out.exists()
    with pytest.raises(IntegrityError, match="differs in"):
        export(codes, out, replace(WANTED, max_shard_bytes=80_000), on_shard=taker)
    (away / "mended").touch()
    written, write = [], WeightsWriter.write

    def noted(self, name, tensor):
        written.append(name)
        write(self, name, tensor)

    monkeypatch.setattr(WeightsWriter, "write", noted)
    export(codes, out, on_shard=taker)
    assert (away / "order").read_text().split() == shards(whole)
    taken = {name: digest for name, digest in tree(away).items() if name in whole}
    assert tree(out) | taken == whole
    begun = len(written)
    export(codes, out.with_name("again"))
    assert 0 < begun < len(written) - begun


def test_a_disk_that_fills_up_meanwhile_stops_it_and_it_goes_on(
    codes, out, away, whole, monkeypatch
):
    allocate, calls = WeightsWriter._allocate_one, itertools.count()

    def full(self, *arguments):
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(WeightsWriter, "_allocate_one", full)
        with pytest.raises(ResourceError, match="No space left"):
            export(codes, out, on_shard=moving(away))
    assert not out.exists()
    export(codes, out, on_shard=moving(away))
    assert tree(out) | tree(away) == whole


@pytest.mark.parametrize("place", [(Stage, "publish"), (Workspace, "remove")])
def test_killed_before_or_behind_the_publication_it_only_ends(
    codes, out, away, whole, monkeypatch, place
):
    with monkeypatch.context() as patch:
        patch.setattr(*place, lambda _: (_ for _ in ()).throw(StopError))
        with pytest.raises(StopError):
            export(codes, out, on_shard=moving(away))
    monkeypatch.setattr(WeightsWriter, "write", None)
    made = export(codes, out, on_shard=moving(away))
    assert (made.verdict, made.format) == ("exact", "gptq")
    assert tree(out) | tree(away) == whole
    assert not out.parent.joinpath(".out.qf").exists()


def test_without_the_command_it_goes_on_too(codes, out, away, whole):
    lines = "if '00003' in shard.name: sys.exit(3)\nshutil.move(shard, place / shard.name)"
    with pytest.raises(ResourceError):
        export(codes, out, on_shard=script(away, lines))
    export(codes, out)
    taken = {name: digest for name, digest in tree(away).items() if name in whole}
    assert len(taken) == 2
    assert tree(out) | taken == whole


def test_what_cannot_work_is_refused(codes, out):
    for changes, settings in (({"format": "gguf"}, {}), ({}, {"overwrite": True})):
        place = out.with_suffix(".gguf") if changes else out
        wanted = replace(WANTED, max_shard_bytes=None, **changes)
        with pytest.raises(UsageError, match="--on-shard, and "):
            export(codes, place, wanted, on_shard="true", **settings)
    with pytest.raises(UsageError, match="no program"):
        export(codes, out, on_shard="no-such-program-here")
    assert leftovers(out) == {"codes"}
