"""Exports to GGUF in tests: made, made with something wrong, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantforge import api
from quantforge.errors import QuantForgeError
from quantforge.recipe import CalibrationOptions, Recipe
from quantforge.settings import Settings

NO_CALIBRATION = CalibrationOptions(source="none")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def export(model: Path, out: Path, kind: str | None = "Q8_0", **values: object) -> Path:
    settings = Settings(
        **{
            key: values.pop(key)
            for key in ("overwrite", "progress", "policy", "mmproj")
            if key in values
        }
    )
    again = {
        key: values.pop(key) for key in ("source", "requantize", "allow_inexact") if key in values
    }
    values = {"format": "gguf", "calibration": NO_CALIBRATION, "scales": "absmax", **values}
    api.export(str(model), Recipe(type=kind, **values), out, settings, **again)
    return out


def copy_with_json_values(model: Path, place: Path, file: str, **values: object) -> Path:
    """A copy of a model with other values in a JSON file."""
    place.mkdir()
    for path in model.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    content = json.loads((place / file).read_text())
    (place / file).write_text(json.dumps({**content, **values}))
    return place


def assert_export_refused(
    kind: type[QuantForgeError], match: str, model: Path, tmp_path: Path, **values: object
) -> None:
    """The export fails so, and nothing of it is left behind."""
    before = set(tmp_path.iterdir())
    with pytest.raises(kind, match=match):
        export(model, tmp_path / "x.gguf", **values)
    assert set(tmp_path.iterdir()) == before


def copy_with_edited_tokenizer(model: Path, place: Path, change: object) -> Path:
    model = copy_with_json_values(model, place, "config.json")
    content = json.loads((model / "tokenizer.json").read_text())
    change(content)
    (model / "tokenizer.json").write_text(json.dumps(content))
    return model
