"""The file of a vision tower beside a GGUF file, against the source: keys and tensors, one after the other."""

from __future__ import annotations

from quantforge.checkpoint.publish_file import projector_name
from quantforge.checkpoint.safetensors import read_tensor
from quantforge.errors import InputError, RefusedError
from quantforge.formats.gguf.parsing import GgufFile, read_gguf
from quantforge.formats.gguf.projector_file import ProjectorFile, projector_file
from quantforge.formats.gguf.projector_keys import ARCH
from quantforge.verification.beside.gguf_keys import key_differences
from quantforge.verification.beside.trees import plain
from quantforge.verification.findings import Report
from quantforge.verification.opening import Original


def check_tower(report: Report, source: Original) -> None:
    """Report every key and tensor of the tower's file that is not as the source has it; nothing without such a file."""
    place = report.path.with_name(projector_name(report.path))
    if not place.is_file():
        return
    try:
        file = read_gguf(place)
    except InputError as error:
        report.add("unreadable", plain(place.name), error.message)
        return
    try:
        expected = projector_file(source.checkpoint, place.name)
    except (InputError, RefusedError) as error:
        report.add(
            "keys", plain(place.name), f"no such file is made from the source: {error.message}"
        )
        return
    own = {key: value.value for key, value in file.metadata.items() if key.startswith(f"{ARCH}.")}
    other = {key: value.value for key, value in expected.keys.items() if key.startswith(f"{ARCH}.")}
    for text in key_differences(own, other):
        report.add("keys", plain(place.name), text)
    _check_tensors(report, file, expected, source)


def _check_tensors(
    report: Report, file: GgufFile, expected: ProjectorFile, source: Original
) -> None:
    """Compare the tensors, as float16 where they are written so."""
    name = plain(file.files[0].name)
    wanted = {stored.name for stored, _ in expected.plan.places}
    for one in sorted(wanted ^ file.tensors.keys()):
        what = "is missing" if one in wanted else "is none of the tower"
        report.add("incomplete", name, f"{plain(one)} {what}")
    if not wanted <= file.tensors.keys():
        return
    try:
        for one, value in expected.values(source.checkpoint):
            entry = file.tensors[one]
            found = read_tensor(entry.raw()).to(value.dtype)
            if entry.shape != tuple(value.shape) or not bool((found == value).all()):
                report.add("kept-changed", name, f"{plain(one)} is not the source's")
    except (InputError, RefusedError) as error:
        report.add("kept-changed", name, error.message)
