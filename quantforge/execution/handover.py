"""Handing over: each shard of a result goes to a command of the user as soon as it is final.

A shard is final when the journal says of every unit that writes to it that it is done: its bytes are durable then, and
nothing reads them again. Its size and SHA-256 are written down first, then the command is called, then it is written
down that the command has ended well. So a kill between them leads to a second call, never to a shard that no call saw;
a shard that is gone from the stage by then was moved away, and is not handed over again. Files that are not begun yet
take no room: a result may be larger than the disk.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from pathlib import Path
from typing import Any

from quantforge.checkpoint.disk import writing
from quantforge.checkpoint.foreign_json import read_object
from quantforge.checkpoint.stage import Stage
from quantforge.errors import InputError, ResourceError, UsageError, without
from quantforge.execution.journal import damaged, write_durably
from quantforge.execution.progress import tell
from quantforge.execution.units import unit_of, units_of
from quantforge.formats import format_of
from quantforge.plans import Plan
from quantforge.results.manifest import sha256
from quantforge.settings import Settings
from quantforge_files.roles import JOURNAL as JOURNAL_ROLE

RECORD = "shards.json"  # in the directory of the journal
PLACE, NAME = "{}", "{name}"  # of the path in the command, and of the name of the result
_STDERR = 2  # stdout carries our own data


class Handover:
    """Shards of one run, and the command that takes them.

    Attributes:
        gone: names of the shards that are not in the stage any more; it grows.

    Raises:
        IntegrityError: the record of an interrupted run is damaged.
    """

    def __init__(
        self, command: str, stage: Stage, journal: Path, writers: Mapping[str, AbstractSet[str]]
    ) -> None:
        """Take up what an interrupted run had handed over.

        Args:
            command: which takes the shards; with "" they stay.
            stage: of the result.
            journal: the directory of the journal.
            writers: the units that write to each shard, by its name in the stage.
        """
        words = shlex.split(command)
        self._words = [word.replace(NAME, stage.out.name) for word in words]
        self._stage, self._record = stage.path, journal / RECORD
        self._shards = recorded(journal)
        if command and not self._record.exists():
            self._write()
        self.lazily = self._record.exists()
        self._writers = writers
        self.gone = {name for name in self._shards if not os.path.lexists(stage.path / name)}

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Return what the manifest says of the shards that were handed over, by name."""
        return {
            name: {"bytes": shard["bytes"], "sha256": shard["sha256"]}
            for name, shard in self._shards.items()
        }

    def take(self, done: Iterable[str]) -> None:
        """Hand over what is final by the units that are ``done``, in the order of the files.

        Raises:
            ResourceError: the command fails or cannot be started; the same command goes on with it.
        """
        done = {*done}
        for name, units in self._writers.items() if self._words else ():
            if units <= done and not self._shards.get(name, {}).get("handed"):
                self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        path = self._stage / name
        if name not in self.gone:
            tell(f"handing over {name}")
            if name not in self._shards:
                size = path.stat().st_size
                self._shards[name] = {"bytes": size, "sha256": sha256(path, self._stage)}
                self._write()
            self._call(path)
            if path.is_symlink():  # to where the command has moved it: no result holds links
                path.unlink()
            if not os.path.lexists(path):
                self.gone.add(name)
        self._shards[name]["handed"] = True
        self._write()

    def _call(self, path: Path) -> None:
        words = [word.replace(PLACE, str(path)) for word in self._words]
        if words == self._words:
            words.append(str(path))
        hint = (
            "mend what is in its way, then give the same command again: it goes on with this shard"
        )
        try:
            nothing = subprocess.DEVNULL
            code = subprocess.run(words, stdin=nothing, stdout=_STDERR, check=False).returncode
        except OSError as error:
            said = f"--on-shard: {words[0]} cannot be started: {error.strerror}"
            raise ResourceError(said, hint, file=str(path)) from error
        if code:
            how = f"ended with {code}" if code > 0 else f"was ended by signal {-code}"
            raise ResourceError(
                f"--on-shard: {shlex.join(words)} {how}; {path.name} is complete",
                hint,
                file=str(path),
            )

    def _write(self) -> None:
        data = json.dumps(self._shards, indent=1).encode()
        with writing(self._record, len(data)):
            write_durably(self._record, data)


def recorded(journal: Path) -> dict[str, dict[str, Any]]:
    """Return what a journal says of shards that were handed over, by name; empty where it says nothing.

    Raises:
        IntegrityError: it is damaged.
    """
    path = journal / RECORD
    if not path.exists():
        return {}
    try:
        found = read_object(path, JOURNAL_ROLE, journal)
    except InputError as error:
        raise damaged(path, journal.parent) from error
    for shard in found.values():
        if not isinstance(shard, dict) or not {"bytes", "sha256"} <= shard.keys():
            raise damaged(path, journal.parent)
    return found


def is_moved(moved: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a file of a manifest may be missing, because a command has taken it."""
    shard = moved.get(name, {})
    return all(shard.get(key) == entry[key] for key in ("bytes", "sha256"))


def held_bytes(plan: Plan, sizes: Sequence[int]) -> int:
    """Return the bytes of the files on the disk at a time, at most, where each is moved away when it is final.

    ``sizes`` are those of the weight files.
    """
    blocks = 1 + max((tensor.part for tensor in plan.tensors), default=-1)
    order = {unit.name: number for number, unit in enumerate(units_of(plan, blocks))}
    return most_held([[order[unit] for unit in units] for units in writers(plan)], sizes)


def most_held(times: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    """Return the bytes that files take together at most, each from the first of its ``times`` to the last."""
    changes = [0] * (2 + max((time for own in times for time in own), default=0))
    for own, size in zip(times, sizes, strict=True):
        changes[min(own)] += size
        changes[max(own) + 1] -= size
    return max(accumulate(changes))


def writers(plan: Plan) -> list[set[str]]:
    """Return the names of the units that write to each weight file, in the order of the files."""
    written = ((unit_of(tensor, plan), tensor.stored) for tensor in plan.tensors)
    units = {item.name: unit for unit, stored in written for item in stored}
    return [{units[name] for name in names} for names in plan.shards]


def check_command(plan: Plan, propagate: str, settings: Settings) -> None:
    """Refuse a command that cannot be called, or a run that needs shards which it may have moved away.

    Args:
        plan: of the run.
        propagate: of the recipe's calibration.
        settings: of the run.

    Raises:
        UsageError: naming what is in the way.
    """
    if settings.on_shard is None:
        return
    check_program(settings.on_shard)
    reads_quantized = bool(plan.needs) and propagate != "source"
    tuned = "--tune changes what is written already"
    reasons = {
        f"{plan.format}: its files are put in their place together, at the end": format_of(
            plan.format
        ).ABOUT.one_file,
        "--join (or torchrun): processes hand on finished parts in files of their own": settings.join,
        "--overwrite: of a release whose shards are elsewhere nobody can tell which one it is": settings.overwrite,
        "--sign: a signature reads all files": settings.sign is not None,
        tuned: bool(plan.tune),
        'propagate = "quantized": blocks are read back from the shards': reads_quantized,
    }
    for reason, holds in reasons.items():
        if holds:
            hint = without("--tune") if reason == tuned else "leave one of them out"
            raise UsageError(f"--on-shard, and {reason}", hint)


def check_program(command: str) -> None:
    """Refuse a command whose program cannot be run.

    Raises:
        UsageError: naming it.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--on-shard {command}: {error}", "close its quotes") from error
    if not words or shutil.which(words[0]) is None:
        program = words[0] if words else ""
        raise UsageError(
            f"--on-shard: no program {program!r} that can be run",
            "name one that can be run; for several steps write a script, or bash -c '...'",
        )


def check_several(command: str, number: int) -> None:
    """Refuse a command to which the files of several results would be the same.

    Raises:
        UsageError: it does not ask for their names.
    """
    check_program(command)
    if number > 1 and NAME not in command:
        raise UsageError(
            f"--on-shard, and {number} variants: their files have the same names",
            f"name the variant in the command, by {NAME}: --on-shard 'mv {PLACE} ELSEWHERE/{NAME}/'",
        )
