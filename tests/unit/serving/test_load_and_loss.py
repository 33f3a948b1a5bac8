"""A server under load, with disconnects, timeouts and failures, leaks no page."""

from __future__ import annotations

import asyncio
import random
import re
import time

import pytest
import torch

from tests.fake_decoder import VOCABULARY, FakeDecoder
from tests.http_client import LETTERS, NAME, letters, serve_fake_decoder
from tests.unit.serving.test_answers import plain

PATH = "/v1/completions"


class Slow(FakeDecoder):
    """Takes its time for every pass."""

    def hidden_of_spans(self, ids, spans, cache):
        time.sleep(0.02)
        return super().hidden_of_spans(ids, spans, cache)


def body(prompt, **more):
    return {"model": NAME, "prompt": prompt, "temperature": 0, **more}


@pytest.mark.thorough
def test_thousand_requests_with_cancellations_leak_no_page():
    draw = random.Random(3)
    requested = []
    for number in range(1000):
        prompt = "".join(draw.choice(LETTERS) for _ in range(draw.randint(1, 60)))
        lost = (
            {}
            if draw.random() > 0.05
            else draw.choice([{"gone": 0.0}, {"gone": 0.01}, {"gone_after": 2}])
        )
        requested.append(
            (prompt, draw.randint(1, 24), number % 2 == 0 or "gone_after" in lost, lost)
        )
    assert 20 < sum(bool(lost) for *_, lost in requested) < 90

    async def work():
        async with serve_fake_decoder(rows=12, pages=24, waiting=1000, token_budget=96) as client:
            gate = asyncio.Semaphore(40)

            async def one(prompt, count, stream, lost):
                async with gate:
                    return await client.post(
                        PATH, body(prompt, max_tokens=count, stream=stream), **lost
                    )

            result = await asyncio.gather(*(one(*each) for each in requested))
            for (prompt, count, _, lost), answer in zip(requested, result, strict=True):
                expected = letters(plain(prompt, count))
                if lost:
                    assert answer.status in {0, 200}
                    assert not answer.body or expected.startswith(answer.text()[: len(expected)])
                else:
                    assert answer.text() == expected
            counters = await client.model.engine.counters()
            assert counters.finished["cancelled"] > 0
            await scraped(client)

    asyncio.run(work())


async def scraped(client):
    """Return the samples of the metrics, each of a family that is described."""
    result = await client.get("/metrics")
    assert result.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples, described = {}, {}
    for line in result.body.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            described[name] = kind
        elif not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+)(\{([a-z]+="[^"]*",?)+\})? ([0-9.e+-]+)', line)
            assert match, line
            family = re.sub("_(bucket|sum|count)$", "", match[1])
            assert described.get(match[1]) or described[family] == "histogram"
            samples[match[1] + (match[2] or "")] = float(match[4])
    return samples


def test_metrics_count_requests_and_tokens():
    async def work():
        async with serve_fake_decoder() as client:
            for _ in range(3):
                await client.post(PATH, body("abc", max_tokens=4))
            await client.post(PATH, body("abc", max_tokens=-4))
            await client.get("/nothing")
            result = await scraped(client)
            assert result['quantforge_requests_total{path="/v1/completions",status="200"}'] == 3
            assert result['quantforge_requests_total{path="/v1/completions",status="400"}'] == 1
            assert result['quantforge_requests_total{path="other",status="404"}'] == 1
            assert result["quantforge_prompt_tokens_total"] == 9
            assert result["quantforge_generated_tokens_total"] == 12
            assert result["quantforge_cache_pages_free"] == result["quantforge_cache_pages"] > 0
            assert (
                result['quantforge_request_seconds_bucket{le="+Inf"}']
                == result["quantforge_request_seconds_count"]
                == 3
            )

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_during_prefill_frees_pages(stream):
    async def work():
        async with serve_fake_decoder(Slow(), token_budget=8, chunk=8) as client:
            await client.post(PATH, body("abcd" * 60, max_tokens=50, stream=stream), gone=0.1)
            while (await client.model.engine.counters()).running:
                await asyncio.sleep(0.01)
            counters = await client.model.engine.counters()
            assert 0 < counters.computed_tokens < 200
            assert (counters.pages_free, counters.finished["cancelled"]) == (counters.pages, 1)
            assert client.model.metrics.disconnected == 1
            assert (await client.post(PATH, body("abc", max_tokens=4))).text() == letters(
                plain("abc", 4)
            )

    asyncio.run(work())


def test_too_many_requests_get_a_retry_response():
    async def work():
        async with serve_fake_decoder(Slow(), rows=2, waiting=1) as client:
            many = [
                asyncio.ensure_future(client.post(PATH, body("abc", max_tokens=9)))
                for _ in range(3)
            ]
            await asyncio.sleep(0.05)
            late = await client.post(PATH, body("abc", max_tokens=9))
            assert (late.status, late.document["error"]["type"]) == (429, "rate_limit_error")
            assert int(late.headers["retry-after"]) >= 1
            assert [reply.status for reply in await asyncio.gather(*many)] == [200] * 3
            # All of a request or none; one that never fits need not come again.
            wide = await client.post(PATH, body(["a", "b", "c", "d"], max_tokens=2))
            assert (wide.status, wide.document["error"]["code"]) == (400, "too_many_answers")
            assert (await client.post(PATH, body(["a", "b", "c"], max_tokens=2))).status == 200

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_request_timeout_ends_the_answer(stream):
    async def work():
        async with serve_fake_decoder(Slow(), seconds=0.2) as client:
            result = await client.post(
                PATH, body("abc", max_tokens=200, ignore_eos=True, stream=stream)
            )
            if stream:
                assert result.events[-1]["error"]["code"] == "timeout"
                assert b"[DONE]" not in result.body
                assert len(result.events) > 1
            else:
                assert (result.status, result.document["error"]["code"]) == (504, "timeout")

    asyncio.run(work())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"prompt": "abcd" * 20, "echo": True, "logprobs": 0}], ids=str
)
def test_server_shutdown_ends_answers_with_an_error(stream, more):
    async def work():
        async with serve_fake_decoder(Slow(), token_budget=8, chunk=8) as client:
            request = body("abc", max_tokens=200, ignore_eos=True, stream=stream) | more
            going = asyncio.ensure_future(client.post(PATH, request))
            await asyncio.sleep(0.1)
            client.model.engine.cancel_all()
            result = await going
            error = result.events[-1]["error"] if stream else result.document["error"]
            assert error["code"] == "stopping"

    asyncio.run(work())


class Failing(FakeDecoder):
    """Fails once, or gives logits that are no numbers."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def logits(self, hidden):
        kind, self.kind = self.kind, ""
        if kind == "raises":
            raise RuntimeError("out of luck")
        return torch.full((len(hidden), VOCABULARY), torch.nan) if kind else super().logits(hidden)


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_failed_step_ends_only_its_requests(kind, caplog):
    async def work():
        async with serve_fake_decoder(Failing(kind)) as client:
            result = await client.post(PATH, body(["abc", "de"], max_tokens=4))
            assert (result.status, result.document["error"]["type"]) == (500, "server_error")
            assert "out of luck" not in result.body.decode()
            assert (await client.post(PATH, body("abc", max_tokens=4))).text() == letters(
                plain("abc", 4)
            )

    asyncio.run(work())
    assert ("a step of the engine failed" in caplog.text) == (kind == "raises")


def test_failing_text_decoder_returns_an_error(monkeypatch):
    from quantforge.runtime.text_stream import TextStream
    from quantforge_calibration.source_error import SourceError

    def fail(*_):
        raise SourceError("no decoder", "")

    async def work():
        async with serve_fake_decoder() as client:
            monkeypatch.setattr(TextStream, "add", fail)
            result = await client.post(PATH, body("abc", max_tokens=40))
            assert (result.status, result.document["error"]["code"]) == (500, "engine_error")

    asyncio.run(work())
