"""Settings of processors of images and sounds against the source's.

Their classes are not asked for defaults: what is added by whoever saved is a warning, anything else a finding.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from quantforge.verification.beside.facts import DocumentError, Pair
from quantforge.verification.beside.reasons import PROCESSORS, unexplained
from quantforge.verification.beside.trees import ABSENT, changes, plain
from quantforge.verification.findings import Report, Severity

PATTERN = "*processor_config.json"


def check_processors(report: Report, pair: Pair) -> None:
    """Report every key that is not the source's, in files that both have."""
    for name in sorted(pair.own.files.keys() & pair.other.files.keys()):
        if not is_processor(name) or pair.own.files[name] == pair.other.files[name]:
            continue
        try:
            own, other = pair.own.document(name), pair.other.document(name)
        except DocumentError as error:
            report.add("side-files", plain(name), f"is damaged: {plain(str(error))}")
            continue
        for change in unexplained(changes(own, other), PROCESSORS, pair):
            added = change.other is ABSENT or change.other is None
            severity = Severity.WARNING if added else Severity.ERROR
            report.add(
                "side-files", plain(name), f"{change} (pictures would be read otherwise)", severity
            )


def is_processor(name: str) -> bool:
    """Return whether a file of this name holds settings of a processor."""
    return fnmatchcase(name, PATTERN)
