"""A model on a second GPU launches its kernels, streams and graphs there."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from quantforge.runtime.decoder import Decoder
from quantforge.runtime.decoding import DecodingStep, prefill
from quantforge.runtime.load import load
from tests.runs import quantize, recipe

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
IDS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))


def logits(path, device, kind="", graph=True):
    """Logits after a prompt and two more tokens."""
    decoder = Decoder(load(path, device=device).model)
    cache = decoder.cache(2, 32, kind)
    with torch.inference_mode():
        results = [prefill(decoder, IDS.to(device), cache, 2)]
        step = DecodingStep(decoder, cache, graph)
        for token in (5, 7):
            results.append(step(torch.full((2,), token, device=device)).clone())
    return torch.stack(results).cpu()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("kind", ["", "int8"])
def test_second_gpu_gives_the_same_logits(tiny, tmp_path, family, kind):
    quantize(tiny(family), tmp_path / "out", recipe(bits=4))
    assert torch.cuda.current_device() == 0
    expected = logits(tmp_path / "out", "cuda:0", kind, graph=False)
    result = logits(tmp_path / "out", "cuda:1", kind, graph=family == "llama")
    torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    assert torch.cuda.current_device() == 0


def test_a_graph_is_captured_on_each_gpu(tiny):
    first, second = (logits(tiny("llama"), device) for device in ("cuda:0", "cuda:1"))
    torch.testing.assert_close(first, second, rtol=1e-2, atol=1e-2)


def test_separate_thread_computes_on_the_second_gpu(tiny):
    """The current device is that of a thread: a new one begins with the first GPU."""
    results = []
    thread = Thread(target=lambda: results.append(logits(tiny("llama"), "cuda:1", graph=False)))
    thread.start()
    thread.join()
    expected = logits(tiny("llama"), "cuda:0", graph=False)
    torch.testing.assert_close(results[0], expected, rtol=1e-2, atol=1e-2)
