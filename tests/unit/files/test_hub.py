"""Model names: paths precede the hub cache, which is read from disk without network."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import pytest

from quantforge.errors import InputError
from quantforge.files.hub import resolve_model
from quantforge.files.reader import open_checkpoint
from quantforge.files.writer import header_bytes
from quantforge.plans import StoredTensor

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The layout of huggingface_hub: refs name a commit, snapshots link to blobs."""
    repo = tmp_path / "hub/models--org--name"
    snapshot = repo / "snapshots" / COMMIT
    files = {
        "config.json": b"{}",
        "model.safetensors": header_bytes([StoredTensor("w", "U8", (1,))]) + b"x",
        "LICENSE": b"free",
    }
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    for number, (name, data) in enumerate(files.items()):
        (repo / "blobs" / f"{number:040x}").write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{number:040x}")
    (repo / "refs/main").write_text(COMMIT)
    (repo / "refs/v1").write_text(COMMIT)
    return tmp_path / "hub"


@pytest.mark.parametrize("name", ["org/name", "org/name@main", "org/name@v1", f"org/name@{COMMIT}"])
def test_a_cached_model_is_found_and_opened(cache: Path, name: str) -> None:
    model_path = resolve_model(name, offline=True, cache_dir=cache)
    assert model_path.name == COMMIT
    checkpoint = open_checkpoint(model_path)
    assert list(checkpoint.entries) == ["w"]
    assert [path.name for path in checkpoint.side_files] == ["LICENSE"]


@pytest.fixture(scope="module")
def network() -> deque[str]:
    """Return the last socket events of this process; an audit hook cannot be removed."""
    events: deque[str] = deque(maxlen=10)
    sys.addaudithook(lambda event, _: events.append(event) if event.startswith("socket") else None)
    return events


@pytest.mark.parametrize("name", ["org/other", "org/name@v2", f"org/name@{COMMIT[::-1]}"])
def test_a_missing_cached_model_gives_a_download_hint(
    cache: Path, network: deque[str], name: str
) -> None:
    network.clear()
    with pytest.raises(InputError, match=r"not .* in the cache while offline") as caught:
        resolve_model(name, offline=True, cache_dir=cache)
    model, _, revision = name.partition("@")
    assert f"hf download {model}" in caught.value.hint
    assert revision in caught.value.hint
    assert not network


def test_an_existing_path_wins_over_the_hub_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", offline=True, cache_dir=cache) == Path("org/name")
    assert resolve_model(str(tmp_path), offline=True) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org", offline=True) == tmp_path / "org"


@pytest.mark.parametrize(
    "name",
    ["./org/name", "../org/name", "/org/name", "~/org/name", "name", "org/name/more", "org/",
     "org/name@", "a b/c", "org/../name", "x" * 5000, "~nobody-here/x", ""],
)  # fmt: skip
def test_other_model_names_are_missing_directories(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(cache)
    with pytest.raises(InputError, match="no such directory") as caught:
        resolve_model(name, offline=True, cache_dir=cache)
    assert "org/name[@revision]" in caught.value.hint
