"""Small releases to publish, and disks that fail at a chosen call."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantforge.artifacts.manifest import SCHEMA, finish_manifest
from quantforge.files.disk import DISK, Disk
from quantforge.files.previous_output import MANIFEST
from quantforge.files.stage import Stage
from quantforge.files.writer import WeightsWriter, plan_files
from quantforge.plans import StoredTensor

TWO_VARIANTS = """model = "{model}"
[calibration]
samples = 4
length = 16
[[variant]]
name = "int4"
recipe = {{method = "gptq", scheme = "int4:g32:sym"}}
format = "compressed-tensors"
[[variant]]
name = "q8"
method = "rtn"
type = "Q8_0"
"""
SHARDS = ((StoredTensor("a", "U8", (5,)),), (StoredTensor("b", "F32", (2, 2)),))
CALLS = ("allocate", "pwrite", "fsync", "rename", "exchange")


def stage_release(stage: Stage, text: str, disk: Disk = DISK) -> None:
    """Stage a small release whose every file says which one it is of."""
    with WeightsWriter(stage.path, plan_files(SHARDS), disk=disk) as writer:
        writer.write("a", torch.tensor([ord(text[0])] * 5, dtype=torch.uint8))
        writer.write("b", torch.full((2, 2), float(len(text))))
    stage.write_file("config.json", text.encode())
    stage.write_file("additional_chat_templates/x.jinja", text.encode())
    stage.write_file(MANIFEST, manifest_of(stage, text))


def manifest_of(stage: Stage, text: str) -> bytes:
    """The manifest of what is staged, which says which release it is of."""
    return finish_manifest({"schema": SCHEMA, "text": text}, stage.path, stage.manifest)


def release_text(data: str) -> str:
    """Which release a file is of."""
    return str(json.loads(data)["text"]) if data.startswith("{") else data


def make(out: Path, text: str, disk: Disk = DISK) -> None:
    with Stage(out, out.exists(), disk=disk) as stage:
        stage_release(stage, text, disk)
        stage.publish()


def read_release(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def sibling_names(out: Path) -> set[str]:
    return {path.name for path in out.parent.iterdir()} - {out.name}


class FailingDisk:
    """A disk whose call number ``at`` (over all kinds of calls) fails."""

    def __init__(self, at: int, fail: Callable[[], None]) -> None:
        self.count = 0
        self.at = at
        self.fail = fail

    def disk(self) -> Disk:
        return Disk(**{name: self.wrap(getattr(DISK, name)) for name in CALLS})

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: object, **options: object) -> object:
            self.count += 1
            if self.count == self.at:
                self.fail()
            return call(*arguments, **options)

        return counted


NO_FSYNC_DISK = replace(DISK, fsync=lambda descriptor: None)


def os_error(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail
