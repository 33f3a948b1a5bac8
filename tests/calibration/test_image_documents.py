"""Rows that name images: paths from the folder of the file, places in messages, and the rest refused by its row."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from quantforge_calibration import SourceError, parse_sources
from quantforge_calibration.image_documents import (
    ImageDocument,
    first_image,
    image_documents,
    read_image,
)
from quantforge_files.roles import IMAGE
from tests.vision import draw_image, write_rows


def documents(tmp_path: Path, *rows: dict[str, Any], chat: bool = False) -> list[ImageDocument]:
    path = write_rows(tmp_path / "rows.jsonl", *rows)
    (source,) = parse_sources(str(path))
    return list(image_documents(source, 1 << 20, chat=chat))


def parts(*names: str | None) -> list[dict[str, Any]]:
    found = [{"type": "image", **({"image": name} if name else {})} for name in names]
    return [{"role": "user", "content": [*found, {"type": "text", "text": "what"}]}]


def test_images_are_paths_from_the_folder_of_the_file(tmp_path: Path) -> None:
    found = documents(
        tmp_path,
        {"text": "a", "image": "x/1.png"},
        {"text": "b", "images": ["1.png", {"path": "2.png", "bytes": None}]},
        {"text": "c", "image": None},
        {"text": None, "image": "3.png"},
    )
    assert [[path.relative_to(tmp_path).as_posix() for path in one.images] for one in found] == [
        ["x/1.png"], ["1.png", "2.png"], [],
    ]  # fmt: skip
    assert [one.record for one in found] == ["a", "b", "c"]
    assert found[1].where == f"{tmp_path / 'rows.jsonl'}, line 2"


def test_messages_have_places_for_images(tmp_path: Path) -> None:
    rows = (
        {"messages": parts("1.png", "2.png")},
        {"messages": parts(None, "2.png"), "image": "1.png"},
    )
    for found in documents(tmp_path, *rows, chat=True):
        assert [path.name for path in found.images] == ["1.png", "2.png"]
        assert not isinstance(found.record, str)
        assert found.record.messages[0]["content"][:2] == [{"type": "image"}] * 2
    for rows in (
        ({"messages": parts(None)},),
        ({"messages": parts("1.png"), "images": ["2.png"]},),
    ):
        with pytest.raises(SourceError, match=r"line 1 names [01] image.* 1 place"):
            documents(tmp_path, *rows, chat=True)


@pytest.mark.parametrize(
    "image",
    [
        "https://example.org/1.png",
        "data:image/png;base64,AAAA",
        "/etc/1.png",
        "../1.png",
        7,
        {"bytes": "AAAA"},
    ],
)
def test_what_is_not_a_path_below_the_file_is_refused(tmp_path: Path, image: Any) -> None:
    refused = "rows.jsonl, line 2: image .* is not a path below the folder of the file; nothing is"
    with pytest.raises(SourceError, match=refused):
        documents(tmp_path, {"text": "a"}, {"text": "b", "image": image})


def test_a_row_with_both_fields_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="line 1 has both"):
        documents(tmp_path, {"text": "a", "image": "1.png", "images": ["2.png"]})


def test_a_source_of_texts_names_no_image(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "r.jsonl",
        {"text": 'the "image" of a set', "image": None},
        {"text": "b", "images": []},
    )
    (source,) = parse_sources(str(path))
    assert first_image(source) is None
    write_rows(path, {"text": "a"}, {"messages": parts("1.png")})
    assert first_image(source) == f"{path}, line 2"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(path: Path, side: int) -> Path:
    """Write a PNG of side x side pixels in a few bytes of file."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    body = zlib.compress(bytes(1 << 16), 9)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )
    return path


def test_files_that_are_no_image_are_refused(tmp_path: Path) -> None:
    good = draw_image(tmp_path / "good.png")
    assert read_image(good, "row").size == (32, 32)
    with pytest.raises(SourceError, match=r"row 7: image .*missing.png: No such file"):
        read_image(tmp_path / "missing.png", "row 7")
    text = tmp_path / "text.png"
    text.write_text("a text")
    with pytest.raises(SourceError, match=r"row 7: image .*text.png cannot be read: its format"):
        read_image(text, "row 7")
    short = tmp_path / "short.png"
    short.write_bytes(good.read_bytes()[:300])
    with pytest.raises(SourceError, match=r"row 7: image .*short.png cannot be read"):
        read_image(short, "row 7")
    with pytest.raises(SourceError, match=r"not a regular file|Is a directory"):
        read_image(tmp_path, "row 7")
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(IMAGE.max_bytes + 1)
    with pytest.raises(SourceError, match="bytes, more than") as refused:
        read_image(large, "row 7")
    assert refused.value.message.startswith("row 7: image")


@pytest.mark.parametrize("side", [9_500, 20_000])  # where Pillow warns, and where it refuses
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(
    tmp_path: Path, side: int
) -> None:
    with pytest.raises(SourceError, match=r"row 7: image .*pixels\) exceeds limit"):
        read_image(bomb(tmp_path / "bomb.png", side), "row 7")
