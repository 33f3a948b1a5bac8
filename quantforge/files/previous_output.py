"""The result of an earlier run: its files are the only ones that an overwrite may ever remove or replace.

Its manifest lists them with their sizes, and whatever is there beside them, or has another size, is somebody's and is
kept: the overwrite is refused with its name. The card is no exception, although `verify` allows it to change: who has
written figures into it does not want to lose them. The manifest itself belongs to the result, and so does a signature
that lists this very manifest. Names lead nowhere else: no links, no way up, and beside a file only names of its own.
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
SIGNATURE = ".sig"
OF_DIRECTORY = f"model{SIGNATURE}"

SCHEMA = "quantforge.manifest/2"
_SHOWN = 5
_DEEPEST = 8  # parts of a name
_ODD = -1  # instead of the size of what is no regular file


@dataclass(frozen=True, slots=True)
class PreviousOutput:
    """The files of a result: bytes by name inside of ``root``, the manifest last. Some may be missing by now."""

    root: Path
    files: Mapping[str, int]

    def check(self) -> None:
        """Refuse when one of the files is not as the manifest lists it.

        Raises:
            RefusedError: naming it.
        """
        for name, size in self.files.items():
            found = size_of(self.root, name)
            if found not in {None, size}:
                raise self._kept([name], f"is not the file of {size} bytes that the manifest lists")

    def check_alone(self) -> None:
        """Refuse when the directory holds anything else; errors as `check`."""
        self.check()
        parents = {parent for name in self.files for parent in PurePosixPath(name).parents}
        if others := sorted(self._others(self.root, "", {str(parent) for parent in parents})):
            raise self._kept(
                others, "is no file of the earlier result: its manifest does not list it"
            )

    def remove(self) -> None:
        """Remove the files, the manifest last; directories stay."""
        for name, size in self.files.items():
            if size_of(self.root, name) == size:
                (self.root / name).unlink()

    def _others(self, folder: Path, prefix: str, folders: set[str]) -> Iterator[str]:
        with os.scandir(folder) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False) and name in folders:
                    yield from self._others(folder / entry.name, f"{name}/", folders)
                elif name not in self.files:
                    yield name

    def _kept(self, names: list[str], why: str) -> RefusedError:
        place = self.root / names[0]
        rest = ", ".join(names[1:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        also = f" (and {rest})" if rest else ""
        return RefusedError.at(
            place, f"{why}{also}, and it is kept", "move it away, or choose another --output"
        )


def read_previous_output(
    root: Path,
    manifest: str = MANIFEST,
    signature: str = OF_DIRECTORY,
    own: Callable[[str], bool] = lambda _: True,
) -> PreviousOutput:
    """Read which files belong to a result.

    Args:
        root: the directory of its files.
        manifest: its name in there.
        signature: the name of a signature, which may be missing.
        own: whether a name can be one of this result.

    Raises:
        RefusedError: the manifest cannot be read, lists no files with their sizes, or lists files of others.
    """
    place = root / manifest

    def unknown(what: str) -> RefusedError:
        return RefusedError(
            f"{what}; nothing says which files here may be removed",
            "choose another --output, or remove the earlier result yourself",
            file=str(place),
        )

    if size_of(root, manifest) in {None, _ODD}:
        raise unknown(f"{place}: no regular file")
    try:
        data = FILES.read(place, roles.MANIFEST, root)
        document = parse_object(data, place)
    except InputError as error:
        raise unknown(error.message) from error
    if text := other_version(document, SCHEMA):
        raise unknown(f"{place}: {text}")
    outputs = document.get("outputs")
    if document.get("schema") != SCHEMA or not isinstance(outputs, Mapping):
        raise unknown(f"{place}: is no manifest that lists the files of a result")
    files: dict[str, int] = {}
    for name, entry in outputs.items():
        size = entry.get("bytes") if isinstance(entry, Mapping) else None
        if not _inside(name) or not own(name) or name in {manifest, signature}:
            raise unknown(f"{place}: lists {name[:80]!r}, which is no file of this result")
        if type(size) is not int:
            raise unknown(f"{place}: states no size of {name[:80]!r}")
        files[name] = size
    bundle = size_of(root, signature)
    if bundle is not None and _signs(root / signature, manifest, data):
        files[signature] = bundle
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
        RefusedError: no directory, not to be overwritten, or not only what an earlier result's manifest lists.
    """

    def refuse(what: str, hint: str) -> RefusedError:
        return RefusedError.at(out, what, hint)

    if out.is_symlink():
        raise refuse("is a link", f"give the directory that it leads to: {os.path.realpath(out)}")
    if not out.exists():
        return
    if not out.is_dir():
        raise refuse("is a file", "give the name of a directory")
    if not overwrite:
        raise already_there(out, out, out / MANIFEST)
    if not any(out.iterdir()):
        return
    if not os.path.lexists(out / MANIFEST):
        raise refuse(
            f"is not a result of quantforge (it holds no {MANIFEST}) and will not be replaced",
            "choose another --output, or remove the directory yourself",
        )
    read_previous_output(out).check_alone()


def already_there(path: Path, out: Path, manifest: Path) -> RefusedError:
    """Return the refusal for an output that exists: what it was made from, and what to type.

    Args:
        path: the file or directory that is in the way.
        out: the result that was to be written.
        manifest: that of the result which is there; without one, or with a damaged one, nothing is said of it.
    """
    stem, dot, suffix = out.name.rpartition(".") if not out.is_dir() else (out.name, "", "")
    names = (out.with_name(f"{stem}-{number}{dot}{suffix}") for number in itertools.count(2))
    free = next(name for name in names if not os.path.lexists(name))
    empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    replaceable = empty or os.path.lexists(manifest)
    return RefusedError.at(
        path,
        f"exists{_made_from(manifest)}",
        f"another name: -o {shlex.quote(str(free))}"
        + (", or replace it with --overwrite" if replaceable else ""),
    )


def _made_from(manifest: Path) -> str:
    """Return a clause that says what a result was made from, and how, by its manifest; "" if unknown."""
    try:
        said = parse_object(FILES.read(manifest, roles.MANIFEST, manifest.parent), manifest)
    except InputError:
        return ""
    source = said.get("source")
    model = source.get("model") if isinstance(source, Mapping) else None
    how = (
        f"{key} {said[key]}"
        for key in ("method", "format")
        if isinstance(said.get(key), str) and said[key]
    )
    return f", made from {model} ({', '.join(how)})" if isinstance(model, str) else ""


def size_of(root: Path, name: str) -> int | None:
    """Return how many bytes a regular file below ``root`` has; -1 for a link or anything else, None if missing."""
    parts = PurePosixPath(name).parts
    for depth in range(1, len(parts) + 1):
        try:
            found = root.joinpath(*parts[:depth]).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            return _ODD
        if depth < len(parts) and not stat.S_ISDIR(found.st_mode):
            return _ODD
    return found.st_size if stat.S_ISREG(found.st_mode) else _ODD


def _inside(name: str) -> bool:
    """Return whether a name is a normalized relative path without ``..``."""
    path = PurePosixPath(name)
    return (
        0 < len(path.parts) <= _DEEPEST
        and not path.is_absolute()
        and ".." not in path.parts
        and str(path) == name
        and "\0" not in name
    )


def _signs(place: Path, manifest: str, data: bytes) -> bool:
    """Return whether a file is a signature that lists this manifest; the key does not matter here."""
    try:
        bundle = FILES.read(place, roles.SIGNATURE, place.parent)
        return signed_files(place, bundle).get(manifest) == hashlib.sha256(data).hexdigest()
    except InputError:
        return False


def signed_files(place: Path, data: bytes) -> dict[str, str]:
    """Return the digests by name of the files that a signature bundle, the content of ``place``, lists.

    `quantforge.artifacts.signing` checks that they are true.

    Raises:
        InputError: it is not a signature bundle of the OpenSSF's model signing.
    """
    try:
        envelope = parse_object(data, place, roles.SIGNATURE).get("dsseEnvelope")
        inner = base64.b64decode(dict(envelope or {})["payload"])
        payload = parse_object(inner, place, roles.SIGNATURE)
        found = {item["name"]: item["digest"] for item in payload["predicate"]["resources"]}
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InputError.at(place, "is no signature bundle") from error
    return found
