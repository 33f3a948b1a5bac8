"""The result of an earlier run, of which an overwrite may remove or replace only its own files.

Its manifest lists the files with their sizes. A file that is not listed, or has another size, belongs to somebody and
is kept: the overwrite is refused and names it. The card is no exception, although `verify` allows it to change: a
person who has added figures does not want to lose them. The manifest itself belongs to the result, and so does a
signature that lists this manifest. Listed names must stay inside: no links, no ``..``, and beside a file only names of
its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from quantforge.errors import InputError, RefusedError
from quantforge.files.opener import FILES, parse_object
from quantforge_files import roles

MANIFEST = "quantforge.manifest.json"
SIGNATURE_SUFFIX = ".sig"
DIRECTORY_SIGNATURE = f"model{SIGNATURE_SUFFIX}"

SCHEMA = "quantforge.manifest/2"
_MAX_SHOWN_NAMES = 5
_MAX_DEPTH = 8  # parts of a name
_NOT_A_FILE = -1  # instead of the size of what is no regular file


@dataclass(frozen=True, slots=True)
class PreviousOutput:
    """The files of an earlier result: bytes by name within ``root``, the manifest last; some may be missing."""

    root: Path
    files: Mapping[str, int]

    def check(self) -> None:
        """Refuse if one of the files has another size than the manifest lists.

        Raises:
            RefusedError: naming it.
        """
        for name, size in self.files.items():
            size_on_disk = file_size(self.root, name)
            if size_on_disk not in {None, size}:
                raise self._kept_error(
                    [name], f"is not the file of {size} bytes that the manifest lists"
                )

    def check_no_other_files(self) -> None:
        """Refuse if the directory contains any other file; errors as `check`."""
        self.check()
        parents = {parent for name in self.files for parent in PurePosixPath(name).parents}
        if other_files := sorted(
            self._unlisted_files(self.root, "", {str(parent) for parent in parents})
        ):
            raise self._kept_error(
                other_files, "is no file of the earlier result: its manifest does not list it"
            )

    def remove(self) -> None:
        """Remove the files, the manifest last; directories stay."""
        for name, size in self.files.items():
            if file_size(self.root, name) == size:
                (self.root / name).unlink()

    def _unlisted_files(
        self, directory: Path, prefix: str, known_directories: set[str]
    ) -> Iterator[str]:
        with os.scandir(directory) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False) and name in known_directories:
                    yield from self._unlisted_files(
                        directory / entry.name, f"{name}/", known_directories
                    )
                elif name not in self.files:
                    yield name

    def _kept_error(self, names: list[str], reason: str) -> RefusedError:
        path = self.root / names[0]
        more_names = ", ".join(names[1:_MAX_SHOWN_NAMES]) + (
            " ..." if len(names) > _MAX_SHOWN_NAMES else ""
        )
        and_more = f" (and {more_names})" if more_names else ""
        return RefusedError.at(
            path, f"{reason}{and_more}, and it is kept", "move it away, or choose another --output"
        )


def read_previous_output(
    root: Path,
    manifest: str = MANIFEST,
    signature: str = DIRECTORY_SIGNATURE,
    is_own_name: Callable[[str], bool] = lambda _: True,
) -> PreviousOutput:
    """Read from a manifest which files belong to a result.

    Args:
        root: the directory of the files.
        manifest: name of the manifest in it.
        signature: name of the signature, which may be missing.
        is_own_name: whether this result can have a file of a given name.

    Raises:
        RefusedError: the manifest cannot be read, lists no files with their sizes, or lists files of others.
    """
    manifest_path = root / manifest

    def unreadable_error(reason: str) -> RefusedError:
        return RefusedError(
            f"{reason}; nothing says which files here may be removed",
            "choose another --output, or remove the earlier result yourself",
            file=str(manifest_path),
        )

    if file_size(root, manifest) in {None, _NOT_A_FILE}:
        raise unreadable_error(f"{manifest_path}: no regular file")
    try:
        data = FILES.read(manifest_path, roles.MANIFEST, root)
        document = parse_object(data, manifest_path)
    except InputError as error:
        raise unreadable_error(error.message) from error
    if text := other_version(document, SCHEMA):
        raise unreadable_error(f"{manifest_path}: {text}")
    outputs = document.get("outputs")
    if document.get("schema") != SCHEMA or not isinstance(outputs, Mapping):
        raise unreadable_error(f"{manifest_path}: is no manifest that lists the files of a result")
    files: dict[str, int] = {}
    for name, entry in outputs.items():
        size = entry.get("bytes") if isinstance(entry, Mapping) else None
        if not _is_inner_path(name) or not is_own_name(name) or name in {manifest, signature}:
            raise unreadable_error(
                f"{manifest_path}: lists {name[:80]!r}, which is no file of this result"
            )
        if type(size) is not int:
            raise unreadable_error(f"{manifest_path}: states no size of {name[:80]!r}")
        files[name] = size
    signature_size = file_size(root, signature)
    if signature_size is not None and _signs_manifest(root / signature, manifest, data):
        files[signature] = signature_size
    return PreviousOutput(root, {**files, manifest: len(data)})


def other_version(document: Mapping[str, object], schema: str) -> str:
    """Return a clause that names both schemas if a document has another number of ``schema``; "" otherwise."""
    found, kind = document.get("schema"), schema.rpartition("/")[0]
    if not isinstance(found, str) or found == schema or not found.startswith(f"{kind}/"):
        return ""
    return f"has schema {found[:60]}, and this version of quantforge reads {schema}"


def check_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse an output directory that exists and must not be replaced.

    Raises:
        RefusedError: it is not a directory, must not be overwritten, or has files that no manifest lists.
    """

    def refuse(message: str, hint: str) -> RefusedError:
        return RefusedError.at(out, message, hint)

    if out.is_symlink():
        raise refuse("is a link", f"give the directory that it leads to: {os.path.realpath(out)}")
    if not out.exists():
        return
    if not out.is_dir():
        raise refuse("is a file", "give the name of a directory")
    if not overwrite:
        raise exists_error(out, out, out / MANIFEST)
    if not any(out.iterdir()):
        return
    if not os.path.lexists(out / MANIFEST):
        raise refuse(
            f"is not a result of quantforge (it holds no {MANIFEST}) and will not be replaced",
            "choose another --output, or remove the directory yourself",
        )
    read_previous_output(out).check_no_other_files()


def exists_error(path: Path, out: Path, manifest: Path) -> RefusedError:
    """Return the error for an output that exists: it says what that was made from, and suggests what to type.

    Args:
        path: the file or directory that exists.
        out: the result that was to be written.
        manifest: the manifest of the existing result; if it is missing or damaged, the message is shorter.
    """
    stem, dot, suffix = out.name.rpartition(".") if not out.is_dir() else (out.name, "", "")
    candidates = (out.with_name(f"{stem}-{number}{dot}{suffix}") for number in itertools.count(2))
    free_name = next(name for name in candidates if not os.path.lexists(name))
    is_empty_directory = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    replaceable = is_empty_directory or os.path.lexists(manifest)
    return RefusedError.at(
        path,
        f"exists{_made_from(manifest)}",
        f"another name: -o {shlex.quote(str(free_name))}"
        + (", or replace it with --overwrite" if replaceable else ""),
    )


def _made_from(manifest: Path) -> str:
    """Return a clause that says what a result was made from, and how, according to its manifest; "" if unknown."""
    try:
        document = parse_object(FILES.read(manifest, roles.MANIFEST, manifest.parent), manifest)
    except InputError:
        return ""
    source = document.get("source")
    model = source.get("model") if isinstance(source, Mapping) else None
    details = (
        f"{key} {document[key]}"
        for key in ("method", "format")
        if isinstance(document.get(key), str) and document[key]
    )
    return f", made from {model} ({', '.join(details)})" if isinstance(model, str) else ""


def file_size(root: Path, name: str) -> int | None:
    """Return the size of a regular file below ``root``; -1 if it is a link or not a file, None if it is missing."""
    path_parts = PurePosixPath(name).parts
    for depth in range(1, len(path_parts) + 1):
        try:
            status = root.joinpath(*path_parts[:depth]).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return _NOT_A_FILE
        if depth < len(path_parts) and not stat.S_ISDIR(status.st_mode):
            return _NOT_A_FILE
    return status.st_size if stat.S_ISREG(status.st_mode) else _NOT_A_FILE


def _is_inner_path(name: str) -> bool:
    """Return whether a name is a normalized relative path without ``..``."""
    path = PurePosixPath(name)
    return (
        0 < len(path.parts) <= _MAX_DEPTH
        and not path.is_absolute()
        and ".." not in path.parts
        and str(path) == name
        and "\0" not in name
    )


def _signs_manifest(path: Path, manifest: str, data: bytes) -> bool:
    """Return whether a file is a signature that lists this manifest; the key does not matter here."""
    try:
        bundle = FILES.read(path, roles.SIGNATURE, path.parent)
        return signed_files(path, bundle).get(manifest) == hashlib.sha256(data).hexdigest()
    except InputError:
        return False


def signed_files(path: Path, data: bytes) -> dict[str, str]:
    """Return the digests of the files that a signature bundle lists; ``data`` is the content of ``path``.

    `quantforge.artifacts.signing` checks whether they are true.

    Raises:
        InputError: it is not a signature bundle of the OpenSSF's model signing.
    """
    try:
        envelope = parse_object(data, path, roles.SIGNATURE).get("dsseEnvelope")
        payload_bytes = base64.b64decode(dict(envelope or {})["payload"])
        payload = parse_object(payload_bytes, path, roles.SIGNATURE)
        digests = {item["name"]: item["digest"] for item in payload["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InputError.at(path, "is no signature bundle") from error
    return digests
