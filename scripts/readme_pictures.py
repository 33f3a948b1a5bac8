"""Make the two pictures of README from a real run on the bundled model: a terminal (SVG) and a report (PNG).

    python scripts/readme_pictures.py          # into docs/pictures

The terminal is what `eval` prints at 100 columns, drawn by rich; the report is its upper part in Chromium, 1200 wide.
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
from scripts.report_pictures import browser, chromium  # noqa: E402 - of this folder

PICTURES = ROOT / "docs/pictures"
COLUMNS, WIDTH, HEIGHT = 100, 1200, 900
MOST_BYTES = 150_000
MADE = (
    "quantize demo --method rtn --bits 4",
    "quantize demo --bits 4",
    "export demo-awq+gptq-int4 --format gguf --allow-inexact",
)
SHOWN = "eval demo demo-rtn-int4 demo-awq+gptq-int4 demo-Q4_0.gguf"
REPORT = "--generated builtin --generated-tokens 48 --report report.html"


def run(line: str, place: Path) -> str:
    """Run a command of ours there, in colours, and return what it printed."""
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    words = [sys.executable, "-m", "quantforge", *line.split()]
    ended = subprocess.run(words, cwd=place, env=environment, stdout=subprocess.PIPE, check=True)
    return ended.stdout.decode()


def terminal(line: str, said: str) -> str:
    """Return the picture of a command and its output; fonts are those of whoever looks."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text(f"$ quantforge {line}\n", "bold"), Text.from_ansi(said), sep="")
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
        said = run(f"{SHOWN} {REPORT}", place)
        save(PICTURES / "terminal.svg", terminal(SHOWN, said).encode())
        with browser() as running:
            page = running.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light"
            )
            page.goto((place / "report.html").as_uri())
            save(PICTURES / "report.png", page.screenshot())


if __name__ == "__main__":
    main()
