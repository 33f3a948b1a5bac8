"""Request streams: reproducible, served in process or by a server, with figures that equal their definitions."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantforge.errors import InputError, UsageError
from quantforge.evaluation.bench_requests import (
    LengthRange,
    RequestStream,
    ServedRequest,
    Slo,
    TimedRequest,
    read_trace,
    summarize,
)
from quantforge.evaluation.bench_senders import send_to_server, serve_in_process, spread_over_tokens
from quantforge.runtime.batching.engine import EngineOptions
from tests.fake_decoder import FakeDecoder

TEXT = list(range(50))


def test_the_same_seed_draws_the_same_requests():
    options = RequestStream(20, rate=5, shared=8, share=0.5, seed=3)
    first, two = options.draw(TEXT), options.draw(TEXT)
    assert first == two
    assert first != RequestStream(20, rate=5, shared=8, share=0.5, seed=4).draw(TEXT)
    assert [item.arrival for item in first] == sorted(item.arrival for item in first)
    assert all(16 <= item.new_tokens <= 64 for item in first)


def test_arrivals_have_the_requested_rate():
    requests = RequestStream(4000, rate=20, seed=1).draw(TEXT)
    assert 3999 / requests[-1].arrival == pytest.approx(20, rel=0.05)


def test_a_share_of_prompts_has_the_shared_prefix():
    requests = RequestStream(1000, shared=10, share=0.3, prompt=LengthRange(12, 12), seed=0).draw(
        TEXT
    )
    long = [item for item in requests if len(item.prompt_ids) == 22]
    assert len(long) + sum(len(item.prompt_ids) == 12 for item in requests) == 1000
    assert 0.25 < len(long) / 1000 < 0.35
    assert len({item.prompt_ids[:10] for item in long}) == 1
    assert len({item.prompt_ids[10:] for item in long}) > 1


@pytest.mark.parametrize(
    "text", ["", "0", "5..4", "a", "1..", "..5", "1.5", "-3", "9" * 30, "1..2..3"]
)
def test_malformed_length_ranges_are_refused(text):
    with pytest.raises(UsageError):
        LengthRange.parse(text, "--new-tokens")


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=ms", "x=5ms", "ttft=5ms,ttft=6ms", "ttft=-1s", "ttft=nans"]
)
def test_malformed_slo_limits_are_refused(text):
    with pytest.raises(UsageError):
        Slo.parse(text, "--slo")


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"at": -1, "prompt_tokens": 1, "new_tokens": 1}', '{"at": NaN, "prompt_tokens": 1, "new_tokens": 1}',
     '{"at": 0, "prompt_tokens": 0, "new_tokens": 1}', '{"at": 0, "prompt_tokens": true, "new_tokens": 1}', "",
     '{"at": 0, "prompt_tokens": 1.5, "new_tokens": 1}', '{"at": "0", "prompt_tokens": 1, "new_tokens": 1}'],
)  # fmt: skip
def test_malformed_traces_are_refused(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"trace\.jsonl"):
        read_trace(path, TEXT)


def test_a_trace_is_sorted_by_arrival(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2, "prompt_tokens": 3, "new_tokens": 4}\n\n{"at": 0.5, "prompt_tokens": 60, "new_tokens": 1}\n'
    )
    requests = read_trace(path, TEXT)
    assert [(item.arrival, len(item.prompt_ids), item.new_tokens) for item in requests] == [
        (0.5, 60, 1),
        (2.0, 3, 4),
    ]


def test_load_figures_equal_values_computed_by_hand():
    served = [
        ServedRequest(0.0, 10, [1.0, 1.5, 2.0]),
        ServedRequest(1.0, 20, [1.2]),
        ServedRequest(1.0, 5, [], "status 500"),
        ServedRequest(2.0, 30, [4.0, 5.0]),
    ]
    figures = summarize(served, Slo(ttft=1.5, tpot=0.6), price_per_hour=3.6)
    assert (figures.requests, figures.failed, figures.seconds, figures.new_tokens) == (4, 1, 5.0, 6)
    assert figures.prompt_tokens == 60
    assert figures.ttft == {50: 1.0, 90: 2.0, 99: 2.0}
    assert figures.tpot == {50: 0.5, 90: 1.0, 99: 1.0}
    assert figures.end_to_end[50] == 2.0
    assert figures.tokens_per_second == 6 / 5
    assert figures.requests_per_second == 3 / 5
    assert figures.goodput == 2 / 5  # the third waited too long for its first token
    assert figures.slo_attainment == 2 / 4
    assert figures.cost == pytest.approx(3.6 / (1.2 * 3600) * 1e6)
    assert figures.errors == {"status 500": 1}


def test_cost_per_million_tokens_equals_a_published_example():
    """2 per hour at 2000 tokens per second cost 0.28 per million tokens."""
    figures = summarize([ServedRequest(0.0, 1, [1.0] * 2000)], None, 2.0)
    assert figures.cost == pytest.approx(0.2778, abs=1e-4)


def test_load_figures_without_any_token():
    figures = summarize([ServedRequest(0.0, 1, [], "gone")], Slo(ttft=1), 1.0)
    assert (figures.tokens_per_second, figures.goodput, figures.cost, figures.failed) == (
        0.0,
        0.0,
        None,
        1,
    )


@given(st.lists(st.floats(0, 10), max_size=8), st.integers(0, 40))
def test_token_times_cover_every_token(pieces, tokens):
    times = spread_over_tokens(sorted(pieces), tokens)
    assert len(times) == (max(tokens, len(pieces)) if pieces else 0)
    assert set(times) == set(pieces)
    assert times == sorted(times)


def test_a_request_stream_is_served_in_process():
    requests = [TimedRequest(0.02 * index, (1, 2, index), 3 + index % 4) for index in range(12)]
    progress = []
    run = serve_in_process(
        FakeDecoder(), requests, EngineOptions(rows=4, token_budget=16), progress.append
    )
    assert [len(item.token_times) for item in run.served] == [item.new_tokens for item in requests]
    assert all(
        item.token_times[0] >= item.arrival and item.token_times == sorted(item.token_times)
        for item in run.served
    )
    assert progress == list(range(1, 13))
    assert run.counters.new_tokens == sum(item.new_tokens for item in requests)
    assert 0 < run.unused_cache_fraction < 1


class Server:
    """Fake server of the completions API that sends tokens in pieces, or fails."""

    def __init__(
        self, fail=(), piece=1, *, other=False, closes=False, once=False, text="x", noted=False
    ):
        self.fail, self.piece, self.bodies = set(fail), piece, []
        self.text, self.noted = text, noted
        self.other, self.closes = other, closes
        self.seen = set() if once else None  # connections, each of which takes one request

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(60)
        return f"http://127.0.0.1:{self.port}/v1"

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)

    def _run(self, ready):
        from aiohttp import web

        async def models(_):
            return web.json_response({"models": []} if self.other else {"data": [{"id": "fake"}]})

        async def completions(request):
            body = await request.json()
            self.bodies.append(body)
            if self.seen is not None and request.transport in self.seen:
                request.transport.close()
            if self.seen is not None:
                self.seen.add(request.transport)
            if len(self.bodies) - 1 in self.fail and self.closes:
                request.transport.close()
            if len(self.bodies) - 1 in self.fail:
                return web.Response(status=503, text="busy")
            answer = web.StreamResponse()
            await answer.prepare(request)
            for _ in range(0, body["max_tokens"], self.piece):
                await answer.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % self.text.encode())
            if self.noted:
                await answer.write(
                    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
                )
            usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
            await answer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
            return answer

        async def start():
            app = web.Application()
            app.add_routes(
                [web.get("/v1/models", models), web.post("/v1/completions", completions)]
            )
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            ready.set()

        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(start())
        self.loop.run_forever()


@pytest.mark.parametrize("piece", [1, 3])
def test_a_request_stream_is_sent_to_a_server(piece):
    pytest.importorskip("aiohttp")
    requests = [TimedRequest(0.01 * index, (1, 2, index), 5) for index in range(8)]
    server = Server(fail={3}, piece=piece)  # the first is the one that warms up
    with server as url:
        served = send_to_server(url, "", requests)
    assert sum(bool(item.error) for item in served) == 1
    assert "503" in next(item.error for item in served if item.error)
    assert [len(item.token_times) for item in served if not item.error] == [5] * 7
    assert {body["model"] for body in server.bodies} == {"fake"}
    assert [body["prompt"][1] for body in server.bodies] == [2] * 9


@pytest.mark.parametrize("text", ["x", ""])
@pytest.mark.parametrize("noted", [True, False])
def test_empty_text_pieces_count_as_tokens(text, noted):
    """vLLM sends end tokens as empty pieces; llama.cpp marks the end in a piece without a token."""
    pytest.importorskip("aiohttp")
    with Server(text=text, noted=noted) as url:
        (waited,) = send_to_server(url, "", [TimedRequest(0.0, (1, 2), 5)])
    assert not waited.error
    assert len(waited.token_times) == 5
    assert waited.token_times[0] < waited.token_times[-1]


def test_a_closed_keep_alive_connection_is_reopened():
    pytest.importorskip("aiohttp")
    with Server(once=True) as url:
        served = send_to_server(
            url, "", [TimedRequest(0.1 * index, (1, 2), 5) for index in range(3)]
        )
    assert [(item.error, len(item.token_times)) for item in served] == [("", 5)] * 3


def test_unreachable_or_unsuitable_servers_are_refused():
    pytest.importorskip("aiohttp")
    requests = [TimedRequest(0.0, (1,), 1)]
    with pytest.raises(UsageError):
        send_to_server("127.0.0.1:8000", "", requests)
    with pytest.raises(InputError, match=r"^nothing listens at http://127\.0\.0\.1:9$"):
        send_to_server("http://127.0.0.1:9", "", requests)
    with Server() as url, pytest.raises(InputError, match="lists no models as OpenAI") as refused:
        send_to_server(url.removesuffix("/v1"), "", requests)
    assert refused.value.hint == f"--url {url}"
    with Server(other=True) as url, pytest.raises(InputError, match="lists no models") as refused:
        send_to_server(url, "", requests)
    assert refused.value.hint == "the address of a server up to /v1"
    with Server(fail={1}, closes=True) as url:
        (waited,) = send_to_server(url, "", requests)
    assert waited.error == f"{url} closed the connection"
    with Server() as url, pytest.raises(InputError, match="fake"):
        send_to_server(url, "other", requests)
    with Server(fail={0}) as url, pytest.raises(InputError, match="503"):
        send_to_server(url, "", requests)
