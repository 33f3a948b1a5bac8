"""All or nothing: a result is staged beside its place and appears there by one rename.

For an output ``DIR/name`` a run keeps all that it needs in ``DIR/.name.qf`` (see `quantforge.files.lock`), so that
renames stay on one file system: the stage, which becomes the result, and the journal. Both survive an interrupted run,
so that it can be resumed; nothing is left beside a result that is finished. A file of the stage has another name until
its last byte is synced, so that a run that is killed leaves no half of one.

Files are synced when they are written, directories before the rename, the parent after it, so that even after a power
failure a reader finds the old release, the new one or none, never a mixture. An overwrite swaps the two directories in
one step (renameat2) and then removes the files of the old release, now at the stage's place; where that does not exist
it is refused rather than done in two steps. Before the swap the lock file durably records which directory is being
published (its inode), so that a run that finds a stage after a kill knows whether it is work to resume or the remains
of the old release. Only what the old release's own manifest lists is ever removed
(`quantforge.files.previous_output`); this is looked at before the work, before the swap, and once more after it,
when nobody can find the old release by its name any more: if something was put there in between, the two are swapped
back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Self

from quantforge.errors import InputError, IntegrityError, RefusedError, UsageError
from quantforge.files.disk import (
    DISK,
    Disk,
    check_name,
    free_bytes,
    make_folder,
    no_space,
    run_folder,
    whole_file,
    writing,
)
from quantforge.files.lock import Lock
from quantforge.files.opener import FILES, changed
from quantforge.files.output_names import MODELFILE, NUMBERED, placed, projector_name, side_of
from quantforge.files.previous_output import (
    MANIFEST,
    SIGNATURE,
    PreviousOutput,
    already_there,
    check_replaceable,
    read_previous_output,
    size_of,
)
from quantforge.files.reader import role_of
from quantforge_files import roles
from quantforge_files.opener import Stamp

STAGE = "stage"  # its name in the directory of a run
PART = ".part"  # ends the name of a file that is not whole
MOVING = ".moving.json"  # in the stage of a file that is being published
_COPY_BYTES = 2**20


class Stage:
    """The locked stage of one output directory, as a context manager.

    Leaving the ``with`` block keeps a stage that holds files (after an error it can be resumed) and
    frees the lock; `publish` or `discard` end it.

    Args:
        out: the output directory, which need not exist.
        overwrite: whether an earlier release (or an empty directory) at ``out`` may be replaced.
        source: the model that is read, which ``out`` must not touch.

    Attributes:
        named, out: the output as it was given, and where it is.
        path: of the stage.
        journal, units: directories of the run's journal, and of what several processes share.

    Raises (name and parent of ``out`` at once, the others on entering):
        UsageError: ``out`` and ``source`` overlap, or ``out`` is no name for a directory.
        InputError: the parent is missing or cannot be written to.
        RefusedError: ``out`` exists and must not be replaced.
        BusyError: another run works on ``out``.
    """

    manifest = MANIFEST  # its name in the stage

    def __init__(
        self, out: Path, overwrite: bool, source: Path | None = None, *, disk: Disk = DISK
    ) -> None:
        self.named, self.out = out, _absolute(out)
        self._lock = Lock(run_folder(self.out))
        self.path = self._lock.directory / STAGE
        self.journal = self._lock.directory / "journal"
        self.units = self._lock.directory / "units"
        self._overwrite, self._source, self._disk = overwrite, source, disk
        self._written: set[str] = set()

    # ---- its place

    @property
    def begun(self) -> bool:
        """Return whether an earlier run on this output is unfinished, or has just published."""
        return self._lock.directory.exists()

    def check(self) -> None:
        """Refuse an invalid output path before anything is created; errors as on entering."""
        check_apart(self.out, self._source)
        if not self.begun:  # nothing to recover
            self._check_place()

    def __enter__(self) -> Self:
        try:
            self.check()
            published = self._lock.take()
            try:
                self._recover(published)
                self._lock.record(0)
                self._check_place()
                make_folder(self.path)
                for cut in self.path.rglob(f"*{PART}"):  # whose writing was interrupted
                    cut.unlink()
                if self._overwrite and self.out.exists():
                    self._check_exchange()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise unwritable(self.out.parent, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.rmdir()  # only if it is empty
        self._lock.release()

    def forget(self, also: Callable[[], None] = lambda: None) -> None:
        """Remove the leftovers of a finished run, and call ``also``; errors as `Lock.take`."""
        self._lock.take()
        try:
            also()
            if not self.path.exists():
                _remove(self.journal)
        finally:
            self._lock.release()

    def _check_place(self) -> None:
        check_replaceable(self.out, self._overwrite)

    def _check_exchange(self) -> None:
        """Find out before the work whether this file system can swap directories."""
        first, second = self.path / ".swap-1", self.path / ".swap-2"
        try:
            make_folder(first)
            make_folder(second)
            self._disk.exchange(first, second)
        except OSError as error:
            raise RefusedError.at(
                self.out,
                "this file system cannot swap two directories in one step",
                f"write to a new directory, or remove it first: rm -r {self.out}",
            ) from error
        finally:
            _remove(first)
            _remove(second)

    # ---- its files

    def place(self, name: str) -> str:
        """Return the name under which a weight file ``name`` of a plan is written."""
        return name

    def check_space(self, needed: int) -> None:
        """Refuse to begin when ``needed`` bytes, less those already staged, do not fit.

        Raises:
            ResourceError: with the bytes needed and free.
        """
        files = (path.stat() for path in self.path.rglob("*") if path.is_file())
        held = sum(found.st_blocks * 512 for found in files)  # POSIX: whatever the block size
        if free_bytes(self.path) + held < needed:
            raise no_space(self.path, needed - held, "the result does not fit")

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a file of the result, durable and whole: it is absent until all of it is there.

        Raises:
            ResourceError: the disk is full or fails.
        """
        with self._new_file(relative, len(data)) as descriptor:
            self._disk.write_at(descriptor, memoryview(data), 0)

    def copy_file(self, source: Path, relative: str, root: Path | None = None) -> str:
        """Copy a file of a model byte for byte, under the rules of `quantforge.files.opener`; return its SHA-256.

        Raises:
            InputError: ``source`` is a link out of its model (``root``) or no regular file.
            IntegrityError: it changed while it was copied.
            ResourceError: the disk is full or fails.
        """
        digest, done = hashlib.sha256(), 0
        role = role_of(relative) or roles.WEIGHTS
        with FILES.opened(source, role, root or source.parent) as reading:
            stamp = Stamp.of(reading)
            with self._new_file(relative, stamp.size) as descriptor:
                while data := os.pread(reading, min(_COPY_BYTES, stamp.size - done), done):
                    digest.update(data)
                    self._disk.write_at(descriptor, memoryview(data), done)
                    done += len(data)
                if done != stamp.size or Stamp.of(reading) != stamp:
                    raise changed(source)
        return digest.hexdigest()

    def check_whole(self, others: Collection[str]) -> None:
        """Refuse files that this run has not written, but for ``others``: they would be published with the result.

        What an interrupted run has left half written is removed.

        Raises:
            RefusedError: naming one, and where it lies.
        """
        known = {*self._written, *others}
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name in known or (path.is_dir() and not path.is_symlink()):
                continue
            if name.endswith(PART) and name.removesuffix(PART) in known:
                path.unlink()
                continue
            raise RefusedError.at(
                path,
                "is no file of the result, and would be published with it",
                f"the same command goes on without it: mv {shlex.quote(str(path))} ELSEWHERE",
            )

    @property
    def empty(self) -> bool:
        """Return whether nothing is staged: a journal of earlier work is void then."""
        return not any(self.path.iterdir())

    def clear(self) -> None:
        """Empty the stage: files that another run staged must not become part of this result."""
        _remove(self.path)
        make_folder(self.path)

    def discard(self) -> None:
        """Remove the stage and all that was staged."""
        _remove(self.path)

    @contextmanager
    def _new_file(self, relative: str, size: int) -> Iterator[int]:
        """Make a file of so many bytes, and the directories that it lies in: a link in place of one is an error."""
        parts = PurePosixPath(relative).parts
        if not parts or parts[0] == "/" or ".." in parts or "\\" in relative or "\0" in relative:
            raise ValueError(f"{relative!r} is no place inside the output")
        target = self.path.joinpath(*parts)
        with writing(target, size):
            made = self.path
            for part in parts[:-1]:
                made = made / part
                make_folder(made)
            with whole_file(target, target.name + PART, self._disk) as descriptor:
                yield descriptor
        self._written.add(relative)

    # ---- publishing

    def publish(self) -> None:
        """Make the stage the output, in one step.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has begun.
            ResourceError: the disk failed; the output is what it was before.
        """
        with writing(self.path, 0):
            for directory, _, _ in os.walk(self.path):
                self._disk.sync(Path(directory))
            self._lock.keep()
        self._check_place()
        with writing(self.out, 0):
            if self.out.exists():
                self._lock.record(self.path.stat().st_ino)
                self._disk.fsync(self._lock.descriptor)
                self._disk.exchange(self.path, self.out)
                self._disk.sync(self.out.parent)
                try:
                    self._remove_old()
                except RefusedError:  # it is not only the old release any more
                    self._disk.exchange(self.path, self.out)
                    self._disk.sync(self.out.parent)
                    self._lock.record(0)
                    raise
            else:
                self._disk.rename(self.path, self.out)
                self._disk.sync(self.out.parent)

    def _recover(self, published: int) -> None:
        """Finish what a kill interrupted in `publish`; the last holder was publishing this inode (or 0)."""
        for place in (self.path, self.journal, self.units):
            if os.path.lexists(place) and not stat.S_ISDIR(place.lstat().st_mode):
                hint = f"move it away: mv {place} ELSEWHERE"
                raise RefusedError.at(place, "is no directory of a run", hint)
        there = self.path.exists() and self.out.exists()
        if published and there and self.out.stat().st_ino == published:  # killed after the swap
            self._remove_old()

    def _remove_old(self) -> None:
        """Remove the release that was replaced, which is at the stage's place."""
        if os.path.lexists(self.path / MANIFEST):
            old = read_previous_output(self.path)
            old.check_alone()
            old.remove()
        for directory, _, names in os.walk(self.path, topdown=False):
            if names:
                raise RefusedError(
                    f"{directory}/{names[0]}: is no file of the release that was replaced, and it is kept",
                    "move it away, then run again",
                    file=f"{directory}/{names[0]}",
                )
            Path(directory).rmdir()


class FileStage(Stage):
    """Stage of an output that is a file, or numbered files, instead of a directory.

    For an output ``DIR/name.gguf`` the stage is a directory as for any result. Publishing renames what it holds into
    ``DIR``, one file after another: first what stands beside the weights, then the weights (the first of numbered
    files last, because that is the one that is opened), and the manifest ``name.gguf.quantforge.json`` at the
    end. A rename replaces an earlier file in one step; its manifest is removed before, so that no manifest ever
    describes another file than the one next to it. A kill in between leaves the old file, or the new one, whole
    and loadable, at worst without its manifest. Before the first rename the stage durably lists the names to
    come, and the files of the earlier result with their sizes: the next run on this output finds the list and
    makes what is missing of the removals and renames.

    ``DIR`` belongs to others too. Only what the earlier result's manifest lists is removed or replaced, and only under
    names that a result of this name has; what else has a name to come, or would be taken for a part of the result, is a
    refusal that names it.

    Args:
        names: of all files that will be published, as far as they are known before the work.
    """

    def __init__(
        self,
        out: Path,
        overwrite: bool,
        source: Path | None = None,
        *,
        names: Collection[str] = (),
        disk: Disk = DISK,
    ) -> None:
        super().__init__(out, overwrite, source, disk=disk)
        self.manifest = side_of(self.out).name
        beside = (self.manifest, side_of(self.out, SIGNATURE).name)
        self._names = {self.out.name, *beside, *names}

    def place(self, name: str) -> str:
        """Return the final name of a weight file: the output's own, with the number of the part."""
        return placed(self.out, name)

    def publish(self) -> None:
        """Move everything to its place; see the class.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has begun.
            ResourceError: the disk failed.
        """
        staged = {path.name for path in self.path.iterdir() if path.is_file()} - {self.manifest}
        self._names |= staged
        self._check_place()
        before = self._earlier()
        with writing(self.out, 0):
            self._lock.keep()
            self._disk.sync(self.path)
        plan = {"names": sorted(staged), "earlier": dict(before.files) if before else {}}
        self.write_file(MOVING, json.dumps(plan).encode())
        with writing(self.out, 0):
            self._disk.sync(self.path)
            self._move()

    def _recover(self, published: int) -> None:
        super()._recover(published)
        if (self.path / MOVING).is_file():
            self._move()

    def _move(self) -> None:
        """Perform the listed removals and renames that are still to do, the manifest last."""
        if (self.path / self.manifest).exists():
            names, before = self._planned()
            to_come = [name for name in names if (self.path / name).exists()]
            self._check_free([*to_come, self.manifest], before.files)
            weights = [name for name in names if name == self.out.name or self._is_part(name)]
            beside = [name for name in names if name not in weights]
            old = {name: size for name, size in before.files.items() if name not in names}
            PreviousOutput(before.root, old).remove()  # its manifest with it
            for name in (*beside, *reversed(weights)):
                if name in to_come:
                    self._disk.rename(self.path / name, self.out.with_name(name))
            self._disk.sync(self.out.parent)
            self._disk.rename(self.path / self.manifest, self.out.with_name(self.manifest))
            self._disk.sync(self.out.parent)
        self.discard()

    def _planned(self) -> tuple[list[str], PreviousOutput]:
        """Read the list in the stage: files to publish, and files to replace."""
        place = self.path / MOVING
        try:
            found = json.loads(FILES.read(place, roles.JOURNAL, self.path))
            names, before = found["names"], found["earlier"]
            good = all(self._own(name) for name in {*names, *before})
            good = good and all(type(size) is int for size in before.values())
        except (InputError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            good = False
        if not good:
            raise IntegrityError.at(
                place, "is no list of this run", f"start afresh: rm -r {self._lock.directory}"
            )
        return names, PreviousOutput(self.out.parent, before)

    def discard(self) -> None:
        """Remove the stage, unless some of it is at its place already: the next run finishes that."""
        if not ((self.path / MOVING).exists() and (self.path / self.manifest).exists()):
            super().discard()

    def _check_exchange(self) -> None:
        """Accept every file system: nothing is swapped, since a rename replaces a file."""

    def _check_place(self) -> None:
        before = self._earlier() if self._overwrite else None
        parts = {path.name for path in self.out.parent.iterdir() if self._is_part(path.name)}
        self._check_free(self._names | parts, before.files if before else {})
        if before is not None:
            before.check()

    def _check_free(self, names: Collection[str], before: Mapping[str, int]) -> None:
        """Refuse files at names to be published, unless they belong to the earlier result by their size."""
        for name in sorted(names):
            path = self.out.with_name(name)
            found = size_of(path.parent, name)
            if found is None or found == before.get(name):
                continue
            if found < 0:
                why, hint = "is no file", "give the name of a file"
            elif not self._overwrite:
                raise already_there(path, self.out, side_of(self.out))
            elif not side_of(self.out).is_file() and not before:
                side = side_of(self.out).name
                why = f"is not a result of quantforge (no {side} beside it) and is kept"
                hint = "choose another --output, or remove the file yourself"
            else:
                why = "is not as the manifest of the earlier result lists it, and it is kept"
                hint = "move it away, or choose another --output"
            raise RefusedError.at(path, why, hint)

    def _earlier(self) -> PreviousOutput | None:
        """Return the files of the earlier result, None if there is none."""
        side = side_of(self.out)
        if size_of(side.parent, side.name) is None:
            return None
        signature = side_of(self.out, SIGNATURE).name
        return read_previous_output(side.parent, side.name, signature, self._own)

    def _own(self, name: str) -> bool:
        """Return whether a file beside the output can be one of its result."""
        return Path(name).name == name and (
            name in {self.out.name, f"{self.out.stem}{MODELFILE}", projector_name(self.out)}
            or name.startswith(f"{self.out.name}.")
            or self._is_part(name)
        )

    def _is_part(self, name: str) -> bool:
        part = NUMBERED.search(name)
        own = (self.out.stem, self.out.suffix)
        return part is not None and (name[: part.start()], part[3] or "") == own


def _remove(directory: Path) -> None:
    """Remove a directory of the run with all that it holds, if it is there."""
    if directory.exists():
        shutil.rmtree(directory)


def _absolute(out: Path) -> Path:
    """Return ``out`` with its parent resolved; the last part is kept, so that a link there is seen.

    Raises:
        UsageError: ``out`` is no name for a directory, or as `check_name`.
        InputError: its parent is missing.
    """
    if out.name in {"", ".."}:
        raise UsageError(f"--output {out}: no name for a directory", "e.g. --output quantized")
    check_name(out, "--output")
    try:
        parent = Path(os.path.realpath(out.parent, strict=True))
    except OSError as error:
        raise InputError(
            f"{out.parent}: {error.strerror}", f"mkdir -p {out.parent}", file=str(out)
        ) from error
    return parent / out.name


def check_folder(place: Path) -> None:
    """Refuse a path at which no directory of several results can be made or continued.

    Raises:
        UsageError: as `check_name`.
        InputError: its parent is missing, or it is a link or a file.
    """
    check_name(place, "--output")
    if not place.parent.is_dir():
        raise InputError.at(place, f"no directory {place.parent}", f"mkdir -p {place.parent}")
    if place.is_symlink():
        hint = f"give the directory that it leads to: {os.path.realpath(place)}"
        raise InputError.at(place, "is a link", hint)
    if place.exists() and not place.is_dir():
        raise InputError.at(place, "is no directory", "name a new directory with -o")


def check_apart(out: Path, source: Path | None) -> None:
    """Refuse an output that overlaps the source model.

    Raises:
        UsageError: one of the two is, or lies in, the other.
    """
    if source is None:
        return
    real, place = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if place == real or place.is_relative_to(real) or real.is_relative_to(place):
        raise UsageError(
            f"--output {out}: overlaps the model {source}", "write to a directory beside the model"
        )


def unwritable(directory: Path, error: OSError) -> InputError:
    """Return the error for a directory that is not writable."""
    return InputError.at(
        directory,
        f"cannot write here: {error.strerror}",
        "choose an --output in a directory that you may write to",
    )
