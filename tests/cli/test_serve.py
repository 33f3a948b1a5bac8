"""``quantforge serve`` as a person types it: it tells where it is, answers, refuses what it cannot serve, and stops."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests

import quantforge
from quantforge.api.serve import serve, served_model
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.serving import serve_options
from quantforge.settings import Settings
from tests.conftest import Tiny
from tests.runs import run_command

pytest.importorskip("uvicorn")
DEMO = Path(__file__).parents[2] / "models/demo"


def started(*arguments: object, module: str = "quantforge") -> subprocess.Popen[str]:
    words = [
        sys.executable,
        "-m",
        module,
        "serve",
        str(DEMO),
        "--port",
        "0",
        *map(str, arguments),
    ]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.tokens
@pytest.mark.thorough
def test_an_answer_with_drafts_is_that_of_the_plain_loop() -> None:
    plain = quantforge.generate(DEMO, "import os, json, json", raw=True, max_tokens=40)
    asked = {"model": "demo", "prompt": "import os, json, json", "max_tokens": 40, "temperature": 0}
    drafted = ("--json", "--concurrent", 2, "--draft", "int3", "--draft-tree", "2x1x1")
    with started(*drafted, module="tests.choices") as server:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        url = json.loads(text)["url"]
        found = requests.post(f"{url}/v1/completions", json=asked, timeout=120).json()
        metrics = requests.get(f"{url}/metrics", timeout=60).text
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
    assert found["choices"][0]["text"] == plain.text
    counts = dict(re.findall(r"^quantforge_(\w+)_total (\d+)$", metrics, re.MULTILINE))
    assert int(counts["guessed_tokens"]) >= int(counts["accepted_guesses"]) > 0


def test_what_cannot_be_served_is_refused(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_command(capsys, "serve", tiny("gpt2"), "--port", "0")
    assert found.code == RefusedError.exit_code
    assert "'gpt2' is not computed by the own decoder" in found.err
    assert "quantforge generate" in found.err
    for arguments, code, said in (
        (["--port", "99999"], UsageError.exit_code, "--port 99999"),
        (["--concurrent", "0"], UsageError.exit_code, "--concurrent 0"),
        (["--waiting", "-1"], UsageError.exit_code, "--waiting -1"),
        (["--timeout", "-1"], UsageError.exit_code, "--timeout -1"),
        (["--cache", "int3"], UsageError.exit_code, "'int3' is no kind of cache"),
        (["--cache-memory", "0.000001"], UsageError.exit_code, "cache of 1e-06 GiB"),
        (["--draft-tree", "2x2"], UsageError.exit_code, "add --draft"),
        (["--draft", "lookahead"], UsageError.exit_code, "single text"),
        (["--context", "5000"], InputError.exit_code, "1024 positions"),
        (["--host", "203.0.113.1"], InputError.exit_code, "cannot listen on 203.0.113.1"),
    ):
        found = run_command(capsys, "serve", DEMO, "--port", "0", *arguments)
        assert (found.code, found.out) == (code, ""), found.err
        assert said in found.err


def test_names_and_room() -> None:
    options = serve_options.complete_options({"concurrent": 2, "context": 100, "cache_gib": 0.0005})
    served = served_model(str(DEMO), Settings(), options)
    assert (served.name, served.rows, served.max_total_tokens) == ("demo", 2, 100)
    assert served.cache_tokens % 32 == 0
    assert (
        0 < served.cache_tokens * 4 * 2 * 2 * 64 * 2 <= 0.0005 * (1 << 30)
    )  # layers, kinds, heads, width, bytes
    with pytest.raises(UsageError, match="no option 'hots'"):
        serve(str(DEMO), hots="x")  # type: ignore[call-arg]


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_options, "find_spec", lambda name: None if name == "uvicorn" else 1)
    with pytest.raises(UsageError, match="uvicorn, not installed here") as found:
        serve(str(DEMO))
    assert found.value.hint == "pip install 'quantforge[serve]'"
