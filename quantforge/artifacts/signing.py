"""Signing a result with a key of one's own, and checking it: the model signature of the OpenSSF (OMS).

A bundle ``model.sig`` (beside a file ``NAME``: ``NAME.sig``) holds an in-toto statement that lists every file with its
SHA-256, signed by an elliptic-curve key; the tool ``model_signing`` reads it too. The library ``model-signing`` is
imported only when a key is named. An ECDSA signature contains a random number, so that it is the one file that is not
the same in two runs, and is no output in the manifest.

Of a directory all files are signed but the card, into which later figures go. Of a file, or numbered files, what the
run wrote beside them is signed too, the manifest included, and other files may lie there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from quantforge.artifacts.manifest import MUTABLE, read, sha256
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.files.disk import save
from quantforge.files.opener import FILES
from quantforge.files.output_names import side_of
from quantforge.files.previous_output import OF_DIRECTORY, SIGNATURE, signed_files
from quantforge_files import roles

_SHOWN = 5  # names of files of a kind
_HINT = "openssl ecparam -name prime256v1 -genkey -noout -out KEY; openssl ec -in KEY -pubout -out PUBLIC"


def check_key(key: Path) -> None:
    """Find out before the work whether a private key can be used.

    Raises:
        UsageError: the library is not installed.
        InputError: the file is no private key that it takes.
    """
    _signer(key)


def signature(root: Path, key: Path, *, unsigned: frozenset[str]) -> bytes:
    """Sign every file below ``root`` but those named; errors as `check_key`."""
    signer = _signer(key)
    hashing = _library().hashing.Config()
    hashing.set_ignored_paths(paths=sorted(unsigned), ignore_git_paths=False)
    with TemporaryDirectory() as directory:
        place = Path(directory) / OF_DIRECTORY
        signer.set_hashing_config(hashing).sign(root, place)
        return FILES.read(place, roles.SIGNATURE, None)


def signature_of(result: Path) -> Path:
    """Return the path of the signature of a result."""
    return result / OF_DIRECTORY if result.is_dir() else side_of(result, SIGNATURE)


def check_signature(result: Path, public_key: Path) -> list[str]:
    """Check a result against its signature; return the names of its files that the signature does not cover.

    Raises:
        UsageError: the library is not installed.
        InputError: ``public_key`` is no public key.
        IntegrityError: there is no signature, it is of another key, or files are not those that were signed.
    """
    library, place = _library(), signature_of(result)
    with _key(public_key, "public key"):
        verifier = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    if not place.is_file():
        raise IntegrityError.at(place, "there is no signature")
    try:
        data = FILES.read(place, roles.SIGNATURE, place.parent)
    except InputError as error:
        raise IntegrityError(error.message, error.hint, file=str(place)) from error
    signed = _signed(place, data)
    if result.is_file() and result.name not in signed:
        raise IntegrityError.at(place, f"{result.name} is not signed")
    verifier.set_ignore_unsigned_files(result.is_file())
    try:
        with TemporaryDirectory() as directory:  # the library opens the bundle by name
            save(Path(directory) / OF_DIRECTORY, data)
            root = result if result.is_dir() else result.parent
            verifier.verify(root, Path(directory) / OF_DIRECTORY)
    except Exception as error:  # of the library, its cryptography and its containers
        why = _difference(result, signed) or f"it is not by the key {public_key}"
        raise IntegrityError.at(place, why) from error
    return sorted(_present(result) - {*signed, place.name})


def _signed(place: Path, data: bytes) -> dict[str, str]:
    """Return the digests that a bundle lists, before any file is opened; refuse names outside of the result."""
    try:
        signed = signed_files(place, data)
    except InputError as error:
        raise IntegrityError.at(place, "is no signature bundle") from error
    for name in signed:
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or re.search(r"[\\\0]", str(name)):
            raise IntegrityError.at(place, f"{json.dumps(name)} is no file of the result")
    return signed


def _difference(result: Path, signed: dict[str, str]) -> str:
    """Say which files are not as a signature lists them: changed, missing, added; "" where all are."""
    root = result if result.is_dir() else result.parent
    here = _present(result) if result.is_dir() else set()
    missing = {name for name in signed if not (root / name).is_file()}
    told = {
        "changed since": {name for name in signed if not _is(root, name, signed[name])} - missing,
        "missing": missing,
        "not signed": here - {*signed} - unsigned_files(result.name, one_file=False),
    }
    parts = [
        f"{what}: {', '.join(sorted(names)[:_SHOWN])}" + (" ..." if len(names) > _SHOWN else "")
        for what, names in told.items()
        if names
    ]
    return f"the files are not those that were signed ({'; '.join(parts)})" if parts else ""


def _is(root: Path, name: str, digest: str) -> bool:
    """Return whether a file has a digest; not where it may not be read as part of the result."""
    try:
        return sha256(root / name, root) == digest
    except InputError:
        return False


def _present(result: Path) -> set[str]:
    """Return the names of the files of a result that are there; beside a file, those that its manifest lists."""
    if result.is_dir():
        return {str(path.relative_to(result)) for path in FILES.below(result)}
    listed = (read(result) or {}).get("outputs")
    names = {result.name, side_of(result).name, *(listed if isinstance(listed, dict) else ())}
    return {name for name in names if Path(name).name == name and result.with_name(name).is_file()}


def _signer(key: Path) -> Any:
    """Return the library's signer with a private key; errors as `check_key`."""
    library = _library()
    with _key(key, "private key"):
        return library.signing.Config().use_elliptic_key_signer(private_key=key)


@contextmanager
def _key(key: Path, kind: str) -> Iterator[None]:
    """Check that a key is a file of its size; what cryptography says of it becomes an error that names the file."""
    FILES.check(key, roles.KEY, None)
    try:
        yield
    except Exception as error:  # of the library and its cryptography
        what = f"no {kind} of an elliptic curve P-256, P-384 or P-521 in PEM without a password; no other is taken"
        raise InputError.at(key, what, _HINT) from error


def _library() -> Any:
    try:
        import model_signing
        import model_signing.hashing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as error:
        raise UsageError(
            "signatures need the library model-signing", "pip install 'quantforge[signing]'"
        ) from error
    return model_signing


def unsigned_files(name: str, *, one_file: bool) -> frozenset[str]:
    """Return the names of files that are not signed in a result ``name``."""
    return frozenset({f"{name}{SIGNATURE}"}) if one_file else MUTABLE | {OF_DIRECTORY}
