"""Sign a result with the user's own key and verify signatures, in the OpenSSF Model Signing (OMS) format.

A bundle ``model.sig`` (for a file ``NAME``: ``NAME.sig`` next to it) holds an in-toto statement that lists every file
with its SHA-256, signed with an elliptic-curve key; the tool ``model_signing`` can verify it too. The library
``model-signing`` is imported only if a key is given. An ECDSA signature contains a random number, so that it is the
only file that differs between identical runs, and it is not an output in the manifest.

In a directory all files are signed except the card, into which figures are written later. For a file (or numbered
files) the signature also covers what the run wrote next to it, including the manifest; other files may be there too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from quantforge.artifacts.manifest import MUTABLE, read_manifest, sha256
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.files.disk import save_file
from quantforge.files.opener import FILES
from quantforge.files.output_names import side_path
from quantforge.files.previous_output import DIRECTORY_SIGNATURE, SIGNATURE_SUFFIX, signed_files
from quantforge_files import roles

_MAX_NAMES = 5  # names of files in a message
_KEY_HINT = "openssl ecparam -name prime256v1 -genkey -noout -out KEY; openssl ec -in KEY -pubout -out PUBLIC"


def check_signing_key(key: Path) -> None:
    """Check before the work that a private key can be used.

    Raises:
        UsageError: the library is not installed.
        InputError: the file is not a supported private key.
    """
    _signer(key)


def sign_files(root: Path, key: Path, *, unsigned: frozenset[str]) -> bytes:
    """Sign every file below ``root`` except those named and return the bundle; errors as `check_signing_key`."""
    signer = _signer(key)
    hashing = _import_library().hashing.Config()
    hashing.set_ignored_paths(paths=sorted(unsigned), ignore_git_paths=False)
    with TemporaryDirectory() as directory:
        path = Path(directory) / DIRECTORY_SIGNATURE
        signer.set_hashing_config(hashing).sign(root, path)
        return FILES.read(path, roles.SIGNATURE, None)


def signature_path(result: Path) -> Path:
    """Return the path of the signature of a result."""
    return result / DIRECTORY_SIGNATURE if result.is_dir() else side_path(result, SIGNATURE_SUFFIX)


def check_signature(result: Path, public_key: Path) -> list[str]:
    """Verify a result against its signature; return the names of its files that the signature does not cover.

    Raises:
        UsageError: the library is not installed.
        InputError: ``public_key`` is not a public key.
        IntegrityError: there is no signature, it was made with another key, or files have changed since.
    """
    library, path = _import_library(), signature_path(result)
    with _checked_key(public_key, "public key"):
        verifier = library.verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    if not path.is_file():
        raise IntegrityError.at(path, "there is no signature")
    try:
        data = FILES.read(path, roles.SIGNATURE, path.parent)
    except InputError as error:
        raise IntegrityError(error.message, error.hint, file=str(path)) from error
    signed = _signed_digests(path, data)
    if result.is_file() and result.name not in signed:
        raise IntegrityError.at(path, f"{result.name} is not signed")
    verifier.set_ignore_unsigned_files(result.is_file())
    try:
        with TemporaryDirectory() as directory:  # the library opens the bundle by name
            save_file(Path(directory) / DIRECTORY_SIGNATURE, data)
            root = result if result.is_dir() else result.parent
            verifier.verify(root, Path(directory) / DIRECTORY_SIGNATURE)
    except Exception as error:  # any error of the library or its dependencies
        reason = _difference(result, signed) or f"it is not by the key {public_key}"
        raise IntegrityError.at(path, reason) from error
    return sorted(_present_files(result) - {*signed, path.name})


def _signed_digests(bundle: Path, data: bytes) -> dict[str, str]:
    """Return the digests listed in a bundle, refusing names outside of the result before any file is opened."""
    try:
        signed = signed_files(bundle, data)
    except InputError as error:
        raise IntegrityError.at(bundle, "is no signature bundle") from error
    for name in signed:
        path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or re.search(r"[\\\0]", str(name)):
            raise IntegrityError.at(bundle, f"{json.dumps(name)} is no file of the result")
    return signed


def _difference(result: Path, signed: dict[str, str]) -> str:
    """Return which files differ from a signature (changed, missing, added) as text; "" if none do."""
    root = result if result.is_dir() else result.parent
    present_files = _present_files(result) if result.is_dir() else set()
    missing_files = {name for name in signed if not (root / name).is_file()}
    differences = {
        "changed since": {name for name in signed if not _has_digest(root, name, signed[name])}
        - missing_files,
        "missing": missing_files,
        "not signed": present_files - {*signed} - unsigned_files(result.name, one_file=False),
    }
    difference_texts = [
        f"{kind}: {', '.join(sorted(names)[:_MAX_NAMES])}"
        + (" ..." if len(names) > _MAX_NAMES else "")
        for kind, names in differences.items()
        if names
    ]
    return (
        f"the files are not those that were signed ({'; '.join(difference_texts)})"
        if difference_texts
        else ""
    )


def _has_digest(root: Path, name: str, digest: str) -> bool:
    """Return whether a file has the given digest; False if it may not be read as part of the result."""
    try:
        return sha256(root / name, root) == digest
    except InputError:
        return False


def _present_files(result: Path) -> set[str]:
    """Return the names of the existing files of a result; for a file, those that its manifest lists."""
    if result.is_dir():
        return {str(path.relative_to(result)) for path in FILES.list_files_below(result)}
    manifest_outputs = (read_manifest(result) or {}).get("outputs")
    names = {
        result.name,
        side_path(result).name,
        *(manifest_outputs if isinstance(manifest_outputs, dict) else ()),
    }
    return {name for name in names if Path(name).name == name and result.with_name(name).is_file()}


def _signer(key: Path) -> Any:
    """Return the library's signer for a private key; errors as `check_signing_key`."""
    library = _import_library()
    with _checked_key(key, "private key"):
        return library.signing.Config().use_elliptic_key_signer(private_key=key)


@contextmanager
def _checked_key(key: Path, kind: str) -> Iterator[None]:
    """Check the size of a key file, and turn errors of the cryptography library into one that names the file."""
    FILES.check(key, roles.KEY, None)
    try:
        yield
    except Exception as error:  # any error of the library or its dependencies
        message = f"no {kind} of an elliptic curve P-256, P-384 or P-521 in PEM without a password; no other is taken"
        raise InputError.at(key, message, _KEY_HINT) from error


def _import_library() -> Any:
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
    """Return the names of the files of a result ``name`` that are not signed."""
    return frozenset({f"{name}{SIGNATURE_SUFFIX}"}) if one_file else MUTABLE | {DIRECTORY_SIGNATURE}
