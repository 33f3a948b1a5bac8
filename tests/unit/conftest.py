"""Models for GGUF files, made when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import gguf_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a name of `gguf_models` and changes to a directory. Do not write into it."""
    made: dict[str, Path] = {}

    def model(name: str, **changes: object) -> Path:
        key = f"{name} {sorted(changes.items(), key=str)}"
        if key not in made:
            made[key] = gguf_models.make(name, tmp_path_factory.mktemp("models") / "m", **changes)
        return made[key]

    return model
