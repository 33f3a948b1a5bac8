"""``quantforge serve`` as a person types it: it tells where it is, answers, refuses what it cannot serve, and stops."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import requests

import quantforge
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.http_api.server_limits import ServerLimits
from quantforge.settings import Settings
from quantforge.verbs import serve_model
from tests.conftest import Tiny
from tests.runs import command

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


def open_door(url: str) -> bool:
    """Whether a server accepts requests."""
    try:
        return requests.get(f"{url}/health", timeout=60).status_code == 200
    except requests.RequestException:
        return False


def test_it_tells_where_it_is_and_stops_at_a_signal() -> None:
    with started("--concurrent", 3, "--cache", "int8", "--served-name", "mine") as server:
        assert server.stdout is not None
        first, second = server.stdout.readline(), server.stdout.readline()
        url = re.fullmatch(r"serving mine at (http://127\.0\.0\.1:\d+)\n", first)
        assert url, first
        assert shlex.split(second)[1] == f"{url[1]}/v1/chat/completions"
        body = json.loads(shlex.split(second)[-1])
        found = requests.post(shlex.split(second)[1], json={**body, "max_tokens": 3}, timeout=60)
        assert found.status_code == 200
        assert found.json()["usage"]["completion_tokens"] <= 3
        # One answer is under way when it is asked to stop, and ends.
        asked = {
            "model": "mine",
            "prompt": "import",
            "max_tokens": 40,
            "ignore_eos": True,
            "stream": True,
        }
        with requests.post(
            f"{url[1]}/v1/completions", json=asked, stream=True, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == b"data: [DONE]"
        out, err = server.communicate(timeout=120)
    assert (server.returncode, out) == (0, "")
    assert "3 answers at a time, 1024 tokens each at most, 3072 in all" in err
    assert err.endswith("stopped\n")


def test_two_signals_do_not_wait_and_a_document_is_one() -> None:
    with started("--json") as server:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        told = json.loads(text)
        assert told["schema"] == "quantforge.serve/1"
        assert (told["model"], told["chat"], told["context"]) == ("demo", True, 1024)
        asked = {
            "model": "demo",
            "prompt": "import",
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": True,
        }
        with requests.post(
            f"{told['url']}/v1/completions", json=asked, stream=True, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGINT)
            while open_door(told["url"]):
                time.sleep(0.02)
            server.send_signal(signal.SIGINT)
            with suppress(requests.RequestException):  # the connection may be cut
                assert b"data: [DONE]" not in list(lines)
        out, err = server.communicate(timeout=120)
    assert (server.returncode, out, err) == (0, "", "")


@pytest.mark.tokens
@pytest.mark.thorough
def test_an_answer_with_guesses_is_that_of_the_plain_loop() -> None:
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
    found = command(capsys, "serve", tiny("gpt2"), "--port", "0")
    assert found.code == RefusedError.exit_code
    assert "'gpt2' is not computed by the own decoder" in found.err
    assert "quantforge generate" in found.err
    for arguments, code, said in (
        (["--port", "99999"], UsageError.exit_code, "--port 99999"),
        (["--concurrent", "0"], UsageError.exit_code, "--concurrent 0"),
        (["--timeout", "-1"], UsageError.exit_code, "seconds = -1"),
        (["--cache", "int3"], UsageError.exit_code, "'int3' is no kind of cache"),
        (["--cache-memory", "0.000001"], UsageError.exit_code, "cache of 1e-06 GiB"),
        (["--draft-tree", "2x2"], UsageError.exit_code, "add --draft"),
        (["--draft", "lookahead"], UsageError.exit_code, "single text"),
        (["--context", "5000"], InputError.exit_code, "1024 positions"),
        (["--host", "203.0.113.1"], InputError.exit_code, "cannot listen on 203.0.113.1"),
    ):
        found = command(capsys, "serve", DEMO, "--port", "0", *arguments)
        assert (found.code, found.out) == (code, ""), found.err
        assert said in found.err


def test_names_and_room() -> None:
    options: serve_model.ServeOptions = {"concurrent": 2, "context": 100, "cache_gib": 0.0005}
    served = serve_model.served_model(str(DEMO), Settings(), ServerLimits(), options)
    assert (served.name, served.rows, served.room) == ("demo", 2, 100)
    assert served.cache_tokens % 32 == 0
    assert (
        0 < served.cache_tokens * 4 * 2 * 2 * 64 * 2 <= 0.0005 * (1 << 30)
    )  # layers, kinds, heads, width, bytes
    with pytest.raises(UsageError, match="no option 'hots'"):
        serve_model.serve(str(DEMO), hots="x")  # type: ignore[call-arg]


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_model, "find_spec", lambda name: None if name == "uvicorn" else 1)
    with pytest.raises(UsageError, match="uvicorn, not installed here") as found:
        serve_model.serve(str(DEMO))
    assert found.value.hint == "pip install 'quantforge[serve]'"
