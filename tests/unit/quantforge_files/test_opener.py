"""The file opener: what it refuses, and its limits on reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantforge_files import roles
from quantforge_files.opener import MAX_NAMES, Opener
from quantforge_files.roles import FileRole

SMALL = FileRole("thing", 100)


class Refused(Exception):
    pass


FILES = Opener(
    lambda detail, hint, subject, file: Refused(f"{subject}: {detail} | {hint} | {file}")
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "outside").write_bytes(b"private")
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def refusal(path: Path, inside: Path | None, role: FileRole = SMALL) -> str:
    with pytest.raises(Refused) as caught:
        FILES.read(path, role, inside)
    for other in (
        FILES.check,
        lambda *arguments: FILES.read_start(arguments[0], arguments[1], 1, arguments[2]),
    ):
        with pytest.raises(Refused):
            other(path, role, inside)
    return str(caught.value)


def test_files_over_their_size_limit_are_refused(model: Path) -> None:
    (model / "a").write_bytes(b"x" * 100)
    assert FILES.read(model / "a", SMALL, model) == b"x" * 100
    assert FILES.read_start(model / "a", SMALL, 7, model) == b"x" * 7
    (model / "a").write_bytes(b"x" * 101)
    assert "101 bytes, more than 100 | no thing needs to be that large" in refusal(
        model / "a", model
    )


def test_a_sparse_terabyte_file_is_refused_for_every_role(model: Path) -> None:
    (model / "a").touch()
    os.truncate(model / "a", 1 << 40)
    for role in (value for value in vars(roles).values() if isinstance(value, FileRole)):
        if role.max_bytes < roles.NO_LIMIT:
            assert str(1 << 40) in refusal(model / "a", model, role)


def test_a_file_growing_while_being_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "a").write_bytes(b"x" * 100)
    pread = os.pread

    def growing(descriptor: int, count: int, offset: int) -> bytes:
        with (model / "a").open("ab") as file:
            file.write(b"y" * 50)
        return pread(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", growing)
    with pytest.raises(Refused, match="101 bytes, more than 100"):
        FILES.read(model / "a", SMALL, model)


@pytest.mark.timeout(5)
@pytest.mark.parametrize("inside", [True, False])
def test_pipes_devices_and_directories_are_refused_at_once(model: Path, inside: bool) -> None:
    os.mkfifo(model / "pipe")
    (model / "folder").mkdir()
    (model / "link").symlink_to("pipe")
    root = model if inside else None
    for name in ("pipe", "folder", "link"):
        assert "not a regular file" in refusal(model / name, root)
    (model / "zero").symlink_to("/dev/zero")
    assert ("outside of the model" if inside else "not a regular file") in refusal(
        model / "zero", root
    )


def test_links_out_of_the_model_need_an_explicit_path(model: Path) -> None:
    (model / "link").symlink_to("../outside")
    (model / "folder").symlink_to("..")
    for path in (model / "link", model / "folder" / "outside"):
        assert "outside of the model" in refusal(path, model)
        assert FILES.read(path, SMALL, None) == b"private"
    with pytest.raises(Refused, match="outside of the model"):
        FILES.list_names(model / "folder", model)
    assert FILES.list_names(model / "folder", None) == ["model", "outside"]
    (model / "own").write_bytes(b"own")
    (model / "inner").symlink_to("own")
    assert FILES.read(model / "inner", SMALL, model) == b"own"


def test_missing_looping_or_invalid_paths_are_refused(model: Path) -> None:
    assert "No such file" in refusal(model / "nothing", model)
    (model / "loop").symlink_to("loop")
    refusal(model / "loop", None)
    refusal(model / "a\0b", model)
    refusal(model / ("a" * 300), model)


def test_a_directory_with_too_many_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_NAMES >= 4 * 1000
    monkeypatch.setattr("quantforge_files.opener.MAX_NAMES", 3)
    for name in "abc":
        (tmp_path / name).touch()
    assert FILES.list_names(tmp_path, None) == ["a", "b", "c"]
    assert [path.name for path in FILES.list_files_below(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "d").mkdir()
    for look in (
        lambda: FILES.list_names(tmp_path, None),
        lambda: FILES.list_files_below(tmp_path),
    ):
        with pytest.raises(Refused, match="more than 3 files"):
            look()


def test_text_files_must_be_utf_8(model: Path) -> None:
    (model / "a").write_bytes("é".encode())
    assert FILES.text(model / "a", SMALL, model) == "é"
    (model / "a").write_bytes(b"ab\xa5")
    with pytest.raises(Refused, match="not UTF-8 at byte 2"):
        FILES.text(model / "a", SMALL, model)
