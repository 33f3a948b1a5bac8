"""Take pictures of a report in Chromium: three widths, light and dark, into a folder.

    python scripts/report_pictures.py report.html pictures/

Chromium is a package of the system (``apt install chromium``); without it nothing is done. No network is used.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (390, 768, 1440)
SCHEMES = ("light", "dark")
HEIGHT = 900
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def chromium() -> str | None:
    """Return the path of Chromium, or None."""
    return next(filter(None, map(shutil.which, CHROMIUM)), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium with a profile of its own, and end it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield found
        finally:
            found.close()


@contextmanager
def shown(browser: Browser, report: Path, width: int, scheme: str = "light") -> Iterator[Page]:
    """Open a report at a width; nothing but the file can be reached."""
    context = browser.new_context(
        viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, offline=True
    )
    try:
        page = context.new_page()
        page.goto(report.absolute().as_uri())
        yield page
    finally:
        context.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("pictures", type=Path)
    given = parser.parse_args()
    if chromium() is None:
        print("no Chromium: no pictures")
        return
    given.pictures.mkdir(parents=True, exist_ok=True)
    with browser() as running:
        for width in WIDTHS:
            for scheme in SCHEMES:
                with shown(running, given.report, width, scheme) as page:
                    target = given.pictures / f"{given.report.stem}-{width}-{scheme}.png"
                    page.screenshot(path=target, full_page=True)
                    print(target)


if __name__ == "__main__":
    main()
