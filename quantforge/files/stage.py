"""All or nothing: a result is staged beside its output and appears by one rename.

For an output ``DIR/name`` a run keeps its files in ``DIR/.name.qf`` (see `quantforge.files.lock`), so that renames stay
on one file system: the stage, which becomes the result, and the journal. Both survive an interrupted run, so that it
can be resumed; nothing is left beside a finished result. A file of the stage has another name until its last byte is
synced, so that a killed run leaves no partial file under a final name.

Files are synced when they are written, directories before the rename, the parent after it, so that even after a power
failure a reader finds the old release, the new one or none, never a mixture. An overwrite swaps the two directories in
one step (renameat2) and then removes the files of the old release, which are now in the stage; if the system cannot
swap, the overwrite is refused rather than done in two steps. Before the swap the lock file durably records which
directory is being published (its inode), so that a run that finds a stage after a kill knows whether it is work to
resume or the rest of the old release. Only files that the old release's own manifest lists are ever removed
(`quantforge.files.previous_output`). This is checked before the work, before the swap, and once more after it, when
nobody can find the old release by its name any more: if a file was added in between, the two are swapped back.
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
    atomic_file,
    check_name,
    free_bytes,
    make_directory,
    no_space_error,
    run_folder,
    write_errors,
)
from quantforge.files.lock import Lock
from quantforge.files.opener import FILES, changed_error
from quantforge.files.output_names import (
    MODELFILE_SUFFIX,
    PART_NUMBER,
    final_name,
    projector_name,
    side_path,
)
from quantforge.files.previous_output import (
    MANIFEST,
    SIGNATURE_SUFFIX,
    PreviousOutput,
    check_replaceable,
    exists_error,
    file_size,
    read_previous_output,
)
from quantforge.files.reader import role_of
from quantforge_files import roles
from quantforge_files.opener import Stamp

STAGE_DIRECTORY = "stage"  # its name in the directory of a run
PART_SUFFIX = ".part"  # ends the name of a file that is not whole
MOVES_FILE = ".moving.json"  # in the stage of a file that is being published
_COPY_BYTES = 2**20


class Stage:
    """The locked stage of one output directory, as a context manager.

    Leaving the ``with`` block keeps a stage that contains files (after an error it can be resumed) and
    releases the lock; `publish` or `discard` end the stage.

    Args:
        out: the output directory, which need not exist.
        overwrite: whether an earlier release (or an empty directory) at ``out`` may be replaced.
        source: the model that is read, which must not overlap ``out``.

    Attributes:
        output_argument, out: the output as it was given, and its absolute path.
        path: path of the stage.
        journal, units: directories for the run's journal, and for files shared by several processes.

    Raises (errors about the name and parent of ``out`` immediately, the others on entering):
        UsageError: ``out`` and ``source`` overlap, or ``out`` is not a valid directory name.
        InputError: the parent is missing or not writable.
        RefusedError: ``out`` exists and must not be replaced.
        BusyError: another run works on ``out``.
    """

    manifest = MANIFEST  # its name in the stage

    def __init__(
        self, out: Path, overwrite: bool, source: Path | None = None, *, disk: Disk = DISK
    ) -> None:
        self.output_argument, self.out = out, _absolute_output(out)
        self._lock = Lock(run_folder(self.out))
        self.path = self._lock.directory / STAGE_DIRECTORY
        self.journal = self._lock.directory / "journal"
        self.units = self._lock.directory / "units"
        self._overwrite, self._source, self._disk = overwrite, source, disk
        self._written: set[str] = set()

    # ---- its place

    @property
    def has_earlier_run(self) -> bool:
        """Return whether an earlier run on this output is unfinished, or has just published."""
        return self._lock.directory.exists()

    def check(self) -> None:
        """Refuse an invalid output path before anything is created; errors as on entering."""
        check_no_overlap(self.out, self._source)
        if not self.has_earlier_run:  # nothing to recover
            self._check_replaceable()

    def __enter__(self) -> Self:
        try:
            self.check()
            published = self._lock.acquire()
            try:
                self._recover(published)
                self._lock.record(0)
                self._check_replaceable()
                make_directory(self.path)
                for partial_file in self.path.rglob(
                    f"*{PART_SUFFIX}"
                ):  # whose writing was interrupted
                    partial_file.unlink()
                if self._overwrite and self.out.exists():
                    self._check_exchange()
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise unwritable_error(self.out.parent, error) from error
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.path.rmdir()  # only if it is empty
        self._lock.release()

    def remove_leftovers(self, also_remove: Callable[[], None] = lambda: None) -> None:
        """Remove the files that a finished run left, and call ``also_remove``; errors as `Lock.acquire`."""
        self._lock.acquire()
        try:
            also_remove()
            if not self.path.exists():
                _remove_tree(self.journal)
        finally:
            self._lock.release()

    def _check_replaceable(self) -> None:
        check_replaceable(self.out, self._overwrite)

    def _check_exchange(self) -> None:
        """Check before the work whether this file system can swap directories."""
        first, second = self.path / ".swap-1", self.path / ".swap-2"
        try:
            make_directory(first)
            make_directory(second)
            self._disk.exchange(first, second)
        except OSError as error:
            raise RefusedError.at(
                self.out,
                "this file system cannot swap two directories in one step",
                f"write to a new directory, or remove it first: rm -r {self.out}",
            ) from error
        finally:
            _remove_tree(first)
            _remove_tree(second)

    # ---- its files

    def final_name(self, name: str) -> str:
        """Return the name under which a planned weight file is written."""
        return name

    def check_space(self, needed: int) -> None:
        """Refuse to start if ``needed`` bytes, less those already staged, do not fit.

        Raises:
            ResourceError: with the bytes needed and free.
        """
        files = (path.stat() for path in self.path.rglob("*") if path.is_file())
        # POSIX: whatever the block size
        staged_bytes = sum(status.st_blocks * 512 for status in files)
        if free_bytes(self.path) + staged_bytes < needed:
            raise no_space_error(self.path, needed - staged_bytes, "the result does not fit")

    def write_file(self, relative: str, data: bytes) -> None:
        """Write a file of the result durably; it appears only when it is complete.

        Raises:
            ResourceError: the disk is full or fails.
        """
        with self._new_file(relative, len(data)) as descriptor:
            self._disk.write_at(descriptor, memoryview(data), 0)

    def copy_file(self, source: Path, relative: str, root: Path | None = None) -> str:
        """Copy a file of a model unchanged, with the checks of `quantforge.files.opener`; return its SHA-256.

        Raises:
            InputError: ``source`` is a link out of its model (``root``) or not a regular file.
            IntegrityError: it changed while it was copied.
            ResourceError: the disk is full or fails.
        """
        digest, copied = hashlib.sha256(), 0
        role = role_of(relative) or roles.WEIGHTS
        with FILES.open_checked(source, role, root or source.parent) as source_descriptor:
            stamp = Stamp.of(source_descriptor)
            with self._new_file(relative, stamp.size) as descriptor:
                while data := os.pread(
                    source_descriptor, min(_COPY_BYTES, stamp.size - copied), copied
                ):
                    digest.update(data)
                    self._disk.write_at(descriptor, memoryview(data), copied)
                    copied += len(data)
                if copied != stamp.size or Stamp.of(source_descriptor) != stamp:
                    raise changed_error(source)
        return digest.hexdigest()

    def check_no_foreign_files(self, allowed_names: Collection[str]) -> None:
        """Refuse files that this run has not written, except ``allowed_names``: they would be published as well.

        Partial files of an interrupted run are removed.

        Raises:
            RefusedError: naming one, and its path.
        """
        known_names = {*self._written, *allowed_names}
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if name in known_names or (path.is_dir() and not path.is_symlink()):
                continue
            if name.endswith(PART_SUFFIX) and name.removesuffix(PART_SUFFIX) in known_names:
                path.unlink()
                continue
            raise RefusedError.at(
                path,
                "is no file of the result, and would be published with it",
                f"the same command goes on without it: mv {shlex.quote(str(path))} ELSEWHERE",
            )

    @property
    def empty(self) -> bool:
        """Return whether nothing is staged; a journal of earlier work is void then."""
        return not any(self.path.iterdir())

    def clear(self) -> None:
        """Empty the stage: files that another run staged must not become part of this result."""
        _remove_tree(self.path)
        make_directory(self.path)

    def discard(self) -> None:
        """Remove the stage with all its files."""
        _remove_tree(self.path)

    @contextmanager
    def _new_file(self, relative: str, size: int) -> Iterator[int]:
        """Create a file of ``size`` bytes and its parent directories; a link in place of one is an error."""
        path_parts = PurePosixPath(relative).parts
        if (
            not path_parts
            or path_parts[0] == "/"
            or ".." in path_parts
            or "\\" in relative
            or "\0" in relative
        ):
            raise ValueError(f"{relative!r} is no place inside the output")
        target = self.path.joinpath(*path_parts)
        with write_errors(target, size):
            directory = self.path
            for directory_name in path_parts[:-1]:
                directory = directory / directory_name
                make_directory(directory)
            with atomic_file(target, target.name + PART_SUFFIX, self._disk) as descriptor:
                yield descriptor
        self._written.add(relative)

    # ---- publishing

    def publish(self) -> None:
        """Make the stage the output, in one step.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has started.
            ResourceError: the disk failed; the output is unchanged.
        """
        with write_errors(self.path, 0):
            for directory, _, _ in os.walk(self.path):
                self._disk.sync(Path(directory))
            self._lock.ensure_held()
        self._check_replaceable()
        with write_errors(self.out, 0):
            if self.out.exists():
                self._lock.record(self.path.stat().st_ino)
                self._disk.fsync(self._lock.descriptor)
                self._disk.exchange(self.path, self.out)
                self._disk.sync(self.out.parent)
                try:
                    self._remove_replaced()
                except RefusedError:  # it is not only the old release any more
                    self._disk.exchange(self.path, self.out)
                    self._disk.sync(self.out.parent)
                    self._lock.record(0)
                    raise
            else:
                self._disk.rename(self.path, self.out)
                self._disk.sync(self.out.parent)

    def _recover(self, publishing_inode: int) -> None:
        """Finish a `publish` that was killed; ``publishing_inode`` is what the last holder was publishing (or 0)."""
        for path in (self.path, self.journal, self.units):
            if os.path.lexists(path) and not stat.S_ISDIR(path.lstat().st_mode):
                hint = f"move it away: mv {path} ELSEWHERE"
                raise RefusedError.at(path, "is no directory of a run", hint)
        both_exist = self.path.exists() and self.out.exists()
        if (
            publishing_inode and both_exist and self.out.stat().st_ino == publishing_inode
        ):  # killed after the swap
            self._remove_replaced()

    def _remove_replaced(self) -> None:
        """Remove the release that was replaced, which is now in the stage."""
        if os.path.lexists(self.path / MANIFEST):
            previous = read_previous_output(self.path)
            previous.check_no_other_files()
            previous.remove()
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

    For an output ``DIR/name.gguf`` the stage is a directory as for any result. Publishing renames its files into
    ``DIR``, one after another: first the side files, then the weights (the first of numbered files last, because that
    is the one that programs open), and the manifest ``name.gguf.quantforge.json`` at the end. A rename replaces an
    earlier file in one step; the earlier manifest is removed before, so that a manifest never describes another file
    than the one next to it. A kill in between leaves either the old file or the new one, complete and loadable, at
    worst without its manifest. Before the first rename the stage durably lists the new names, and the files of the
    earlier result with their sizes: the next run on this output finds the list and performs the missing removals and
    renames.

    ``DIR`` also contains files of others. Only files that the earlier result's manifest lists are removed or replaced,
    and only if a result of this name can have such a file; any other file that has one of the new names, or would be
    taken for a part of the result, leads to an error that names it.

    Args:
        names: all files that will be published, as far as they are known before the work.
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
        self.manifest = side_path(self.out).name
        side_names = (self.manifest, side_path(self.out, SIGNATURE_SUFFIX).name)
        self._names = {self.out.name, *side_names, *names}

    def final_name(self, name: str) -> str:
        """Return the final name of a weight file: the output's own, with the number of the part."""
        return final_name(self.out, name)

    def publish(self) -> None:
        """Move all files to their final names; see the class.

        Raises:
            RefusedError: the output appeared or changed since the run began.
            BusyError: the lock was removed, and another run has started.
            ResourceError: the disk failed.
        """
        staged = {path.name for path in self.path.iterdir() if path.is_file()} - {self.manifest}
        self._names |= staged
        self._check_replaceable()
        previous = self._read_previous()
        with write_errors(self.out, 0):
            self._lock.ensure_held()
            self._disk.sync(self.path)
        moves = {"names": sorted(staged), "earlier": dict(previous.files) if previous else {}}
        self.write_file(MOVES_FILE, json.dumps(moves).encode())
        with write_errors(self.out, 0):
            self._disk.sync(self.path)
            self._perform_moves()

    def _recover(self, publishing_inode: int) -> None:
        super()._recover(publishing_inode)
        if (self.path / MOVES_FILE).is_file():
            self._perform_moves()

    def _perform_moves(self) -> None:
        """Perform the listed removals and renames that are still missing, the manifest last."""
        if (self.path / self.manifest).exists():
            names, previous = self._read_moves()
            pending = [name for name in names if (self.path / name).exists()]
            self._check_names_free([*pending, self.manifest], previous.files)
            weights = [name for name in names if name == self.out.name or self._is_part(name)]
            side_files = [name for name in names if name not in weights]
            obsolete_files = {
                name: size for name, size in previous.files.items() if name not in names
            }
            PreviousOutput(previous.root, obsolete_files).remove()  # its manifest with it
            for name in (*side_files, *reversed(weights)):
                if name in pending:
                    self._disk.rename(self.path / name, self.out.with_name(name))
            self._disk.sync(self.out.parent)
            self._disk.rename(self.path / self.manifest, self.out.with_name(self.manifest))
            self._disk.sync(self.out.parent)
        self.discard()

    def _read_moves(self) -> tuple[list[str], PreviousOutput]:
        """Read the list in the stage: files to publish, and files to replace."""
        path = self.path / MOVES_FILE
        try:
            document = json.loads(FILES.read(path, roles.JOURNAL, self.path))
            names, earlier = document["names"], document["earlier"]
            is_valid = all(self._is_result_name(name) for name in {*names, *earlier})
            is_valid = is_valid and all(type(size) is int for size in earlier.values())
        except (InputError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            is_valid = False
        if not is_valid:
            raise IntegrityError.at(
                path, "is no list of this run", f"start afresh: rm -r {self._lock.directory}"
            )
        return names, PreviousOutput(self.out.parent, earlier)

    def discard(self) -> None:
        """Remove the stage, unless some of its files have been published already: the next run finishes that."""
        if not ((self.path / MOVES_FILE).exists() and (self.path / self.manifest).exists()):
            super().discard()

    def _check_exchange(self) -> None:
        """Accept every file system: nothing is swapped, since a rename replaces a file."""

    def _check_replaceable(self) -> None:
        previous = self._read_previous() if self._overwrite else None
        part_names = {path.name for path in self.out.parent.iterdir() if self._is_part(path.name)}
        self._check_names_free(self._names | part_names, previous.files if previous else {})
        if previous is not None:
            previous.check()

    def _check_names_free(self, names: Collection[str], previous_sizes: Mapping[str, int]) -> None:
        """Refuse files that have a name to be published, unless they belong to the earlier result by their size."""
        for name in sorted(names):
            path = self.out.with_name(name)
            size = file_size(path.parent, name)
            if size is None or size == previous_sizes.get(name):
                continue
            if size < 0:
                reason, hint = "is no file", "give the name of a file"
            elif not self._overwrite:
                raise exists_error(path, self.out, side_path(self.out))
            elif not side_path(self.out).is_file() and not previous_sizes:
                manifest_name = side_path(self.out).name
                reason = f"is not a result of quantforge (no {manifest_name} beside it) and is kept"
                hint = "choose another --output, or remove the file yourself"
            else:
                reason = "is not as the manifest of the earlier result lists it, and it is kept"
                hint = "move it away, or choose another --output"
            raise RefusedError.at(path, reason, hint)

    def _read_previous(self) -> PreviousOutput | None:
        """Return the files of the earlier result, None if there is none."""
        manifest_path = side_path(self.out)
        if file_size(manifest_path.parent, manifest_path.name) is None:
            return None
        signature = side_path(self.out, SIGNATURE_SUFFIX).name
        return read_previous_output(
            manifest_path.parent, manifest_path.name, signature, self._is_result_name
        )

    def _is_result_name(self, name: str) -> bool:
        """Return whether a file next to the output has a name that a file of this result can have."""
        return Path(name).name == name and (
            name in {self.out.name, f"{self.out.stem}{MODELFILE_SUFFIX}", projector_name(self.out)}
            or name.startswith(f"{self.out.name}.")
            or self._is_part(name)
        )

    def _is_part(self, name: str) -> bool:
        match = PART_NUMBER.search(name)
        own_parts = (self.out.stem, self.out.suffix)
        return match is not None and (name[: match.start()], match[3] or "") == own_parts


def _remove_tree(directory: Path) -> None:
    """Remove a directory of the run with all its contents, if it exists."""
    if directory.exists():
        shutil.rmtree(directory)


def _absolute_output(out: Path) -> Path:
    """Return ``out`` with its parent resolved, but not its last part, so that a link is noticed.

    Raises:
        UsageError: ``out`` is not a valid directory name, or as `check_name`.
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


def check_results_directory(path: Path) -> None:
    """Refuse a path at which a directory of several results cannot be created or continued.

    Raises:
        UsageError: as `check_name`.
        InputError: its parent is missing, or it is a link or a file.
    """
    check_name(path, "--output")
    if not path.parent.is_dir():
        raise InputError.at(path, f"no directory {path.parent}", f"mkdir -p {path.parent}")
    if path.is_symlink():
        hint = f"give the directory that it leads to: {os.path.realpath(path)}"
        raise InputError.at(path, "is a link", hint)
    if path.exists() and not path.is_dir():
        raise InputError.at(path, "is no directory", "name a new directory with -o")


def check_no_overlap(out: Path, source: Path | None) -> None:
    """Refuse an output that overlaps the source model.

    Raises:
        UsageError: one of the two contains the other, or they are the same.
    """
    if source is None:
        return
    source_path, output_path = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if (
        output_path == source_path
        or output_path.is_relative_to(source_path)
        or source_path.is_relative_to(output_path)
    ):
        raise UsageError(
            f"--output {out}: overlaps the model {source}", "write to a directory beside the model"
        )


def unwritable_error(directory: Path, error: OSError) -> InputError:
    """Return the error for a directory that is not writable."""
    return InputError.at(
        directory,
        f"cannot write here: {error.strerror}",
        "choose an --output in a directory that you may write to",
    )
