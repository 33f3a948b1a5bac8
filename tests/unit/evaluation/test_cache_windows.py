"""Windows on which caches are tried: as long as positions and text allow."""

from __future__ import annotations

from quantforge.evaluation.cache_quality import trial_of
from quantforge.runtime.text_side import tokenizer_of
from tests.conftest import make_tiny


def test_a_text_of_one_shortest_window_is_enough_whatever_the_positions(tmp_path):
    path = make_tiny("llama", tmp_path, max_position_embeddings=96)  # halves to 3, then to 1
    tokenizer = tokenizer_of(path)
    text = "ab"
    assert len(tokenizer.encode(text)) + (tokenizer.bos_id is not None) == 2
    assert trial_of([path], text, ["int8"], 2).windows.ids.shape == (1, 2)
