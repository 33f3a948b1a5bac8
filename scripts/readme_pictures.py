"""Make the two pictures of README from a real run on the bundled model: a terminal (SVG) and a report (PNG).

    python scripts/readme_pictures.py          # into docs/pictures

The terminal is what the `eval` of README prints at 100 columns below the very command, drawn by rich; the report is its
part down to the first charts in Chromium, 1200 wide.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from scripts.report_pictures import browser, chromium, shown  # noqa: E402

PICTURES = ROOT / "docs/pictures"
COLUMNS, WIDTH = 100, 1200
MARGIN = 24  # below the charts
MOST_BYTES = 150_000
MADE = (
    "quantize demo --method gptq --bits 4",
    "quantize demo --method rtn --bits 4",
    "export demo-gptq-int4 --format gguf",
)
SHOWN = "eval demo demo-rtn-int4 demo-gptq-int4 demo-Q4_0.gguf"
OPTIONS = "--report report.html"
FIRST_CHARTS = """Math.max(...[...document.querySelector(".charts").children].slice(0, 2).map(
  figure => figure.getBoundingClientRect().bottom))"""


def run(line: str, place: Path) -> str:
    """Run a command of ours there, in colours, and return what it printed."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    words = [sys.executable, "-m", "quantforge", *line.split()]
    ended = subprocess.run(words, cwd=place, env=environment, stdout=subprocess.PIPE, check=True)
    return ended.stdout.decode()


def terminal(said: str) -> str:
    """Return the picture of the command that is shown and its output; fonts are those of whoever looks."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    command = f"$ quantforge {SHOWN} \\\n      {OPTIONS}\n\n"
    console.print(Text(command, "bold"), Text.from_ansi(said), sep="")
    fonts = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
    drawn = console.export_svg(
        title="quantforge", code_format=fonts.sub("", CONSOLE_SVG_FORMAT), unique_id="terminal"
    )
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def save(path: Path, data: bytes) -> None:
    """Write a picture that is small enough for a page."""
    if len(data) > MOST_BYTES:
        sys.exit(f"error: {path.name} has {len(data)} bytes, more than {MOST_BYTES}")
    path.write_bytes(data)
    print(path.relative_to(ROOT), len(data), "bytes")


def main() -> None:
    """Make both."""
    if chromium() is None:
        sys.exit("error: no Chromium here")
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        run("demo", place)
        for line in MADE:
            run(line, place)
        said = run(f"{SHOWN} {OPTIONS}", place)
        save(PICTURES / "terminal.svg", terminal(said).encode())
        with browser() as running, shown(running, place / "report.html", WIDTH) as page:
            part = {"x": 0, "y": 0, "width": WIDTH, "height": page.evaluate(FIRST_CHARTS) + MARGIN}
            save(PICTURES / "report.png", page.screenshot(clip=part, full_page=True))


if __name__ == "__main__":
    main()
