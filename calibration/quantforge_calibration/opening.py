"""The opener of this package (see `quantforge_files`), whose refusals are `SourceError`."""

from __future__ import annotations

from quantforge_calibration.source_error import SourceError
from quantforge_files import Opener

FILES = Opener(lambda message, hint, _file: SourceError(message, hint))
