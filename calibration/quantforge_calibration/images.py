"""Images of calibration rows, read with Pillow: files of few formats, and no more of them than a picture needs.

A file of a few kilobytes can ask for gigabytes of pixels. So its size is read first, and held against Pillow's own
limit, which is an error here and no warning; a file itself is as large as its role allows.
"""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from quantforge_calibration.image_documents import INSTALL
from quantforge_calibration.opening import FILES
from quantforge_calibration.source_error import SourceError
from quantforge_files.roles import IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
PIXELS = 89_478_485  # Pillow's own limit: a quarter of a gigabyte as RGB


def read_image(path: Path, where: str) -> Image:
    """Return an image as RGB, turned as its camera says; of several frames the first.

    Args:
        path: of the file.
        where: which row names it.

    Raises:
        SourceError: Pillow is missing; the file is missing, is none of `FORMATS`, is damaged or has too many pixels.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise SourceError(f"{where} names an image, which Pillow reads", INSTALL) from error
    try:
        data = FILES.read(path, IMAGE, None)
    except SourceError as error:
        raise SourceError(f"{where}: image {error.message}", error.hint) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            with pillow.open(BytesIO(data), formats=FORMATS) as file:
                _check_size(file.width * file.height, path, where)
                return ImageOps.exif_transpose(file).convert("RGB")
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_large(path, where) from error
    except SourceError:
        raise
    except Exception as error:  # of a damaged file Pillow raises whatever its readers come upon
        kind = "is no image" if isinstance(error, UnidentifiedImageError) else "is damaged"
        said = "" if kind == "is no image" else f": {error}"
        raise SourceError(
            f"{where}: image {path} {kind} in a format that is read{said}",
            f"give it as {', '.join(FORMATS)}",
        ) from error


def _check_size(pixels: int, path: Path, where: str) -> None:
    if pixels > PIXELS:
        raise _too_large(path, where)


def _too_large(path: Path, where: str) -> SourceError:
    return SourceError(
        f"{where}: image {path} has more than {PIXELS} pixels",
        "give it smaller: models read far fewer",
    )
