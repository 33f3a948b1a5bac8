"""Signatures with a local key, made and checked with model_signing, detect every change."""

from __future__ import annotations

import base64
import json
import runpy
import sys
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from quantforge import api
from quantforge.api.reproduce import reproduce
from quantforge.artifacts import manifest
from quantforge.artifacts.signing import check_signature, sign_files, signature_path
from quantforge.errors import InputError, IntegrityError, UsageError
from quantforge.files.output_names import MANIFEST_SUFFIX
from quantforge.files.previous_output import DIRECTORY_SIGNATURE
from quantforge.settings import Settings
from tests.runs import file_digests, leftovers, quantize, recipe, run_command

pytest.importorskip("model_signing")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

PEM = serialization.Encoding.PEM
GGUF = recipe(type="Q8_0", format="gguf", scales="absmax")


def private_pem(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: bytes = b""
) -> bytes:
    kind = serialization.PrivateFormat.PKCS8
    locked = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return key.private_bytes(PEM, kind, locked)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``key`` and ``key.pub``, and another pair of keys."""
    directory = tmp_path_factory.mktemp("keys")
    for name in ("key", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        (directory / name).write_bytes(private_pem(key))
        public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        (directory / f"{name}.pub").write_bytes(public)
    return directory


@pytest.fixture
def signed(model: Path, out: Path, keys: Path) -> Path:
    quantize(model, out, recipe(bits=8), sign=keys / "key")
    return out


def assert_refused(result: Path, keys: Path, match: str, key: str = "key.pub") -> None:
    with pytest.raises(IntegrityError, match=match):
        check_signature(result, keys / key)


def accepted_by_model_signing(*words: object) -> bool:
    """Whether the command line of the library, in this process, accepts a signature."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["model_signing", "verify", "key", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("model_signing", run_name="__main__")
    return not ended.value.code


def test_signing_adds_only_the_signature(signed: Path, model: Path, keys: Path) -> None:
    plain = signed.with_name("m")
    quantize(model, plain, recipe(bits=8))
    assert {
        **file_digests(plain),
        DIRECTORY_SIGNATURE: file_digests(signed)[DIRECTORY_SIGNATURE],
    } == file_digests(signed)
    assert not reproduce(signed, str(model), Settings(offline=True)).differing
    assert leftovers(signed) == {"out"}


def test_verify_and_model_signing_check_a_signature(
    signed: Path, model: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--no-forward", "--json")
    for key, code in (("key.pub", 0), ("other.pub", 5)):
        ended = run_command(
            capsys, "verify", signed, "--source", model, "--key", keys / key, *options
        )
        assert ended.code == code
        wrong = {item["check"] for item in json.loads(ended.out)["findings"]}
        assert json.loads(ended.out)["unsigned"] == ([] if code else ["README.md"])
        assert wrong == ({"signature"} if code else set())
    document = json.loads(run_command(capsys, "verify", signed, "--source", model, *options).out)
    assert "no key" in document["skipped"]["signature"]
    arguments = (signed, "--signature", signed / DIRECTORY_SIGNATURE, "--public_key")
    assert accepted_by_model_signing(*arguments, keys / "key.pub")
    assert not accepted_by_model_signing(*arguments, keys / "other.pub")


def test_the_signature_check_detects_every_change(signed: Path, keys: Path) -> None:
    check_signature(signed, keys / "key.pub")
    assert_refused(signed, keys, "sig: it is not by the key .*other.pub", "other.pub")
    for path in sorted(signed.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        if path.name in manifest.MUTABLE:
            check_signature(signed, keys / "key.pub")
        else:
            assert_refused(signed, keys, r"sig: (it is|is|the files are) not? [^\\{}\[\]]*$")
        path.unlink()
        if path.name not in manifest.MUTABLE:
            assert_refused(signed, keys, f"missing: {path.name}|there is no signature")
        path.write_bytes(data)
    (signed / "added").touch()
    assert_refused(signed, keys, r"not those that were signed \(not signed: added\)$")
    (signed / "added").unlink()
    (signed / DIRECTORY_SIGNATURE).unlink()
    assert_refused(signed, keys, "there is no signature")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "a\\b", 7])
def test_a_signature_bundle_with_outside_paths_is_refused(
    signed: Path, keys: Path, name: object
) -> None:
    bundle_path = signed / DIRECTORY_SIGNATURE
    bundle = json.loads(bundle_path.read_bytes())
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"][0]["name"] = name
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    bundle_path.write_text(json.dumps(bundle))
    assert_refused(signed, keys, "is no file of the result")
    for data in ("", "{}", '{"dsseEnvelope": {"payload": "e30="}}', '{"dsseEnvelope": 1}'):
        bundle_path.write_text(data)
        assert_refused(signed, keys, "is no signature bundle")


def test_a_file_signature_covers_its_side_files_only(
    model: Path, tmp_path: Path, keys: Path
) -> None:
    out = tmp_path / "m.gguf"
    quantize(model, out, GGUF, sign=keys / "key", modelfile=True)
    assert signature_path(out).name == "m.gguf.sig"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    check_signature(out, keys / "key.pub")
    assert check_signature(out, keys / "key.pub") == [], "the manifest is covered too"
    for name in ("m.Modelfile", "m.gguf", f"m.gguf{MANIFEST_SUFFIX}"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert_refused(out, keys, "sig")
        (tmp_path / name).write_bytes(data)
    arguments = (tmp_path, "--signature", signature_path(out), "--public_key", keys / "key.pub")
    assert accepted_by_model_signing(*arguments, "--ignore_unsigned_files")
    (tmp_path / "other.gguf.sig").write_bytes(signature_path(out).read_bytes())
    assert_refused(tmp_path / "other.gguf", keys, "is not signed")
    quantize(model, out, GGUF, overwrite=True)
    assert not signature_path(out).exists(), "the signature of the release before"


def test_a_signature_without_the_manifest_is_reported(
    model: Path, tmp_path: Path, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier versions and other tools write such signatures."""
    out, directory = tmp_path / "m.gguf", tmp_path / "alone"
    quantize(model, out, GGUF)
    directory.mkdir()
    (directory / "m.gguf").write_bytes(out.read_bytes())
    out.with_name("m.gguf.sig").write_bytes(
        sign_files(directory, keys / "key", unsigned=frozenset({"x"}))
    )
    assert check_signature(out, keys / "key.pub") == [f"m.gguf{MANIFEST_SUFFIX}"]
    ended = run_command(capsys, "verify", out, "--key", keys / "key.pub", "--no-forward")
    assert f"not covered by the signature: m.gguf{MANIFEST_SUFFIX}" in ended.err


def test_gguf_parts_share_one_signature(model: Path, tmp_path: Path, keys: Path) -> None:
    quantize(model, tmp_path / "m.gguf", replace(GGUF, max_shard_bytes=100_000), sign=keys / "key")
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    for part in parts:
        assert signature_path(part) == tmp_path / "m.gguf.sig"
        check_signature(part, keys / "key.pub")
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    assert_refused(parts[0], keys, "sig")


def test_an_unusable_signing_key_is_refused_before_work(
    model: Path, tmp_path: Path, keys: Path
) -> None:
    bad = tmp_path / "m"
    ecdsa = ec.generate_private_key(ec.SECP256R1())
    curve = ec.generate_private_key(ec.SECP256K1())
    strange = rsa.generate_private_key(65537, 2048)
    curve_id = bytes.fromhex("06072a8648ce3d0201")  # the identifier of elliptic curves in DER
    der = b64decode(b"".join(private_pem(ecdsa).splitlines()[1:-1])).replace(
        curve_id, curve_id[:2] + b"\x2b" + curve_id[3:]
    )
    unknown = b"-----BEGIN PRIVATE KEY-----\n" + b64encode(der) + b"\n-----END PRIVATE KEY-----\n"
    for data in (
        b"no key",
        (keys / "key.pub").read_bytes(),
        private_pem(ecdsa, b"x"),
        private_pem(strange),
        private_pem(curve),
        unknown,
    ):
        bad.write_bytes(data)
        with pytest.raises(InputError, match="private key") as error:
            quantize(model, tmp_path / "out", recipe(bits=8), sign=bad)
        assert error.value.message == (
            f"{bad}: no private key of an elliptic curve P-256, P-384 or P-521 in PEM without a password;"
            " no other is taken"
        )
        assert "openssl" in error.value.hint
    with pytest.raises(InputError, match="No such file"):
        quantize(model, tmp_path / "out", recipe(bits=8), sign=tmp_path / "missing")
    assert {path.name for path in tmp_path.iterdir()} == {"m"}
    with pytest.raises(InputError, match="public key"):
        check_signature(tmp_path, keys / "key")


def test_signing_without_model_signing_is_refused(
    model: Path, out: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantization and export need the library only if a key is given."""
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(UsageError, match="model-signing"):
        quantize(model, out, recipe(bits=8), sign=keys / "key")
    quantize(model, out, recipe(bits=8))
    again = out.with_name("again")
    with pytest.raises(UsageError, match="model-signing"):
        api.export(str(out), recipe(format="gptq"), again, Settings(sign=keys / "key"))
    api.export(str(out), recipe(format="gptq"), again, Settings())
    assert not (again / DIRECTORY_SIGNATURE).exists()
    assert not list(out.parent.glob(f"*{MANIFEST_SUFFIX}"))
