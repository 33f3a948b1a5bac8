"""Date of an evaluation, and the versions that it was made with; the day alone, so that its hour changes no report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quantforge.results.manifest import versions

EPOCH = "SOURCE_DATE_EPOCH"  # https://reproducible-builds.org/specs/source-date-epoch/


@dataclass(frozen=True, slots=True)
class Made:
    """Day (ISO 8601, UTC) and versions of an evaluation."""

    date: str
    versions: Mapping[str, str]

    @classmethod
    def now(cls) -> Made:
        """Return today and what is installed; the day of ``SOURCE_DATE_EPOCH`` where that is set."""
        epoch = os.environ.get(EPOCH, "")
        moment = datetime.fromtimestamp(int(epoch), UTC) if epoch.isdecimal() else datetime.now(UTC)
        return cls(moment.date().isoformat(), versions())

    def to_json(self) -> dict[str, Any]:
        """Return both as plain data."""
        return {"date": self.date, "versions": dict(self.versions)}
