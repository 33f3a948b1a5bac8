"""Windows for comparing KV caches are as long as positions and text allow."""

from __future__ import annotations

from quantforge.evaluation.cache_quality import plan_cache_comparison
from quantforge.formats.open_model import open_model
from tests.conftest import make_tiny
from tests.evaluations import load_tokenizer


def test_a_text_of_one_minimal_window_is_enough(tmp_path):
    path = make_tiny("llama", tmp_path, max_position_embeddings=96)  # halves to 3, then to 1
    tokenizer = load_tokenizer(path)
    text = "ab"
    assert len(tokenizer.encode(text)) + (tokenizer.bos_id is not None) == 2
    assert plan_cache_comparison([open_model(path)], text, ["int8"], 2).windows.ids.shape == (1, 2)
