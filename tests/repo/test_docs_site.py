"""The documentation as a site: every page is in its contents, and a link that leads nowhere stops the build."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.thorough import thorough_case

ROOT = Path(__file__).parents[2]
BUILDER = shutil.which("zensical")


def pages(entries: list[object]) -> list[str]:
    """Return the files that contents name, at any depth."""
    found = []
    for entry in entries:
        assert isinstance(entry, dict)
        for value in entry.values():
            found += pages(value) if isinstance(value, list) else [value]
    return found


def test_every_page_is_in_the_contents() -> None:
    named = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(named) == there
    assert len(named) == len(there)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_and_pictures_outside_of_the_site_are_there(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@pytest.mark.skipif(BUILDER is None, reason="zensical is not installed")
@pytest.mark.parametrize(
    "broken", [thorough_case(""), thorough_case("[x](no-such-page.md)"), "[x](cli.md#no-such-part)"]
)
def test_the_site_builds_and_a_link_that_leads_nowhere_stops_it(
    broken: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/index.md").open("a") as page:
        page.write(f"\n{broken}\n")
    assert BUILDER is not None
    ended = subprocess.run(
        [BUILDER, "build", "--strict"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode == 0) == (not broken), ended.stdout + ended.stderr
    if not broken:
        text = (tmp_path / "build/site/other-tools.html").read_text()
        assert "llama-quantize" in text
        assert not re.search(r'(src|href)="https?://[^"]*\.(js|css|woff2?)"', text)
