"""``bench --url`` on a real vLLM server, beside what the server says of the same requests in its own metrics.

python scripts/interop_server.py VLLM MODEL RESULTS.md

VLLM is the command ``vllm``. The requests come at their own times, as `quantforge bench` sends them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from interop_sections import renew

from quantforge.evaluation.bench_requests import (
    LengthRange,
    RequestStream,
    ServedRequest,
    Slo,
    summarize,
)
from quantforge.evaluation.bench_senders import send_to_server

REQUESTS, RATE = 24, 4.0
LIMITS = "ttft=500ms,tpot=50ms"
START = 600.0  # seconds until the server has to be there
# Of the server: the metric of a mean, with `_sum` and `_count`.
MEANS = {
    "TTFT": "vllm:time_to_first_token_seconds",
    "TPOT": "vllm:request_time_per_output_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


@contextlib.contextmanager
def served(command: str, model: str) -> Iterator[str]:
    """Serve a model on a free port of this machine; the address is given, and the server ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
           "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    started = subprocess.Popen(
        [command, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512",
         "--enforce-eager"],
        env=os.environ | own, stdout=sys.stderr,
    )  # fmt: skip
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + START
        while not _answers(f"{url}/health"):
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server did not start")
            time.sleep(1)
        yield url
    finally:
        started.terminate()
        started.wait(60)


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return answer.status == 200
    return False


def metrics(url: str) -> dict[str, float]:
    """Return the server's counters, each summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{.*\})? (\S+)$", text, flags=re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def measure(url: str, model: str) -> tuple[list[ServedRequest], dict[str, float]]:
    """Send the requests; return how each was served, and the growth of the server's counters meanwhile."""
    from transformers import AutoTokenizer

    from quantforge.api.scored_text import read_text

    ids = AutoTokenizer.from_pretrained(model).encode(read_text("builtin", 1 << 20, offline=True))
    stream = RequestStream(
        REQUESTS, RATE, prompt=LengthRange(16, 64), new=LengthRange(8, 32), seed=0
    )
    before: dict[str, float] = {}

    def follow(_: int) -> None:
        if not before:  # the request that warms up is no part of the stream
            before.update(metrics(url))

    found = send_to_server(f"{url}/v1", "", stream.draw(ids), follow)
    return found, {name: value - before.get(name, 0.0) for name, value in metrics(url).items()}


def lines(found: list[ServedRequest], counted: dict[str, float]) -> list[str]:
    """Return the table: our figures, and the server's."""
    ours = summarize(found, Slo.parse(LIMITS, "--slo"), None)
    done = [one for one in found if one.token_times and not one.error]
    means = {
        "TTFT": sum(one.ttft for one in done) / len(done),
        "TPOT": sum(one.tpot for one in done if one.tpot is not None) / len(done),
        "e2e": sum(one.end_to_end for one in done) / len(done),
    }
    rows = [
        ("requests that finished", f"{len(done)}", f"{counted['vllm:request_success_total']:.0f}"),
        ("prompt tokens", f"{ours.prompt_tokens}", f"{counted['vllm:prompt_tokens_total']:.0f}"),
        ("new tokens", f"{ours.new_tokens}", f"{counted['vllm:generation_tokens_total']:.0f}"),
        *(
            (
                f"{name}, mean, ms",
                f"{mean * 1e3:.2f}",
                f"{1e3 * counted[f'{MEANS[name]}_sum'] / counted[f'{MEANS[name]}_count']:.2f}",
            )
            for name, mean in means.items()
        ),
        (f"goodput/s ({LIMITS})", f"{ours.goodput:.2f}", "-"),
        ("tokens/s", f"{ours.tokens_per_second:.1f}", "-"),
    ]
    return [
        "| figure | `bench --url` | the server |",
        "|---|---:|---:|",
        *(f"| {name} | {one} | {other} |" for name, one, other in rows),
    ]


NOTE = (
    f"`vllm serve` with the bundled model on a CPU, {REQUESTS} requests at {RATE:g} a second (prompts of 16 to 64"
    " tokens, answers of 8 to 32). Beside what `bench --url` finds: the growth of the counters in the server's"
    " `/metrics`. Its clock starts when it has read a request and stops before it writes, so that its TTFT and e2e are"
    " shorter by the way there and back."
)


def main(command: str, model: str, out: Path) -> None:
    """Serve, measure, and renew the section of the results."""
    with served(command, model) as url:
        with urllib.request.urlopen(f"{url}/version", timeout=30) as answer:
            version = answer.read().decode()
        found, counted = measure(url, model)
    number = re.sub(r'[{}"]|version|:|\s', "", version)
    table = lines(found, counted)
    renew(
        out,
        "\n".join(
            ["## A server, measured from outside", "", NOTE, "", *table, "", f"- vllm-cpu {number}"]
        ),
    )
    sys.stdout.write("\n".join(table) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
