"""Make docs/python.ipynb: docs/python.md as a notebook, its code run on the bundled model, with what it printed.

    python scripts/python_notebook.py

The format is JSON (nbformat 4.5), so that nothing of Jupyter is needed to write it. Code is run in one process, in an
empty directory, as the first cell says; the path of that directory is left out of what is kept.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK = ROOT / "docs/python.md", ROOT / "docs/python.ipynb"
BLOCK = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
SETUP = """\
# An empty directory, so that this runs anywhere.
import os
import tempfile

os.chdir(tempfile.mkdtemp());
"""


def cells(page: str) -> list[dict[str, Any]]:
    """Return the cells of a page that have not run: text, and code behind a cell that prepares it."""
    parts = BLOCK.split(page)  # text and code in turn
    parts[1:1] = [SETUP, ""]
    made: list[dict[str, Any]] = []
    for index, text in enumerate(parts):
        if not text.strip():
            continue
        kind = "code" if index % 2 else "markdown"
        cell = {"cell_type": kind, "id": f"cell-{len(made)}", "metadata": {}}
        lines = text.strip().splitlines(keepends=True)
        more = {"execution_count": None, "outputs": []} if kind == "code" else {}
        made.append({**cell, **more, "source": lines})
    return made


def execute(made: list[dict[str, Any]]) -> None:
    """Run the code cells in their order, and put into each what it printed."""
    known: dict[str, object] = {}
    for number, cell in enumerate((cell for cell in made if cell["cell_type"] == "code"), 1):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), known)
        said = printed.getvalue().replace(f"{Path.cwd()}{os.sep}", "")
        cell["execution_count"] = number
        if said:
            lines = said.splitlines(keepends=True)
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}]


def main() -> None:
    """Write the notebook."""
    made = cells(PAGE.read_text())
    execute(made)
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": python, "language_info": {"name": "python"}}
    notebook = {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
