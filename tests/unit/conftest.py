"""Session fixtures: models for GGUF files, created on first use."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import gguf_models
from tests.conftest import make_once_per_session


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function from a name of `gguf_models` and changes to a directory. Do not write into it."""
    created: dict[str, Path] = {}

    def model(name: str, **changes: object) -> Path:
        key = f"{name} {sorted(changes.items(), key=str)}"
        if key not in created:
            own = f"gguf-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
            make = lambda path: gguf_models.make(name, path / "m", **changes)  # noqa: E731
            created[key] = make_once_per_session(tmp_path_factory, own, make) / "m"
        return created[key]

    return model
