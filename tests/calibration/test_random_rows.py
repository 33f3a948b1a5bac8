"""Rows of random tokens: as many as asked for, spread over the sample, of ordinary tokens, and never over an image."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from quantforge_calibration.draw import RowRequest, draw
from quantforge_calibration.image_rows import ImageRow, ImageRows
from quantforge_calibration.sampler import Sample, digest, with_random_rows, wrap_rows
from quantforge_calibration.tokenizer import TextTokenizer, load_tokenizer
from tests.calibration.support import bos_template, write_model

IDS = 258  # of the tokenizer: two special ones, then a byte each
TEXT = 5


def tokenizer(path: Path, post_processor: object = None) -> TextTokenizer:
    return load_tokenizer(write_model(path / "m", post_processor))


def replaced(sample: Sample, changed: Sample) -> list[int]:
    return [i for i, row in enumerate(changed.ids) if not row.equal(sample.ids[i])]


def rows_of_text(rows: int, length: int = 64) -> Sample:
    return wrap_rows(torch.full((rows, length), TEXT))


def test_a_share_of_the_rows_is_drawn_from_ordinary_tokens(tmp_path):
    sample = rows_of_text(32, 512)
    sample.ids[1, 0] = 6  # rows do not begin alike
    words = replace(tokenizer(tmp_path), embedding_rows=200)
    found = with_random_rows(sample, 1 / 16, words, 0)
    assert replaced(sample, found) == [7, 23]
    drawn = found.ids[[7, 23]]
    assert set(drawn.flatten().tolist()) == {*range(2, 200)}  # neither <s> nor </s>
    assert drawn.float().mean(1).sub(100.5).abs().max() < 15  # even: 5 standard errors
    report = found.report
    assert (report.random_rows, report.tokens_used) == (2, 30 * 512)
    assert report.digest == digest(found.ids) != sample.report.digest


@given(rows=st.integers(1, 300), share=st.floats(0, 1))
def test_rows_are_spread_evenly(tmp_path_factory, rows, share):
    sample = rows_of_text(rows, 8)
    words = tokenizer(tmp_path_factory.mktemp("spread"))
    found = with_random_rows(sample, share, words, 3)
    count = int(rows * share)
    assert found.report.random_rows == count
    at = replaced(sample, found)
    assert len(at) == count
    gaps = {b - a for a, b in pairwise(at)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_no_share_changes_nothing(tmp_path):
    sample = rows_of_text(15)
    words = tokenizer(tmp_path)
    assert with_random_rows(sample, 0.0, words, 0) is sample
    assert with_random_rows(sample, 1 / 16, words, 0) is sample  # less than a row
    assert (
        with_random_rows(sample, 1.0, replace(words, embedding_rows=2), 0) is sample
    )  # a model of special tokens alone


def test_the_token_that_begins_rows_stays(tmp_path):
    words = tokenizer(tmp_path, bos_template())
    assert words.bos_id == 0
    request = RowRequest(rows=16, length=32)
    plain, found = draw(request, words), draw(replace(request, random_share=0.25), words)
    assert len(replaced(plain, found)) == 4
    assert (found.ids[:, 0] == 0).all()
    assert (found.ids[:, 1:] > 1).any(1).all()
    assert found.report.tokens_used == plain.report.tokens_used - 4 * 31


def test_what_all_rows_begin_with_stays(tmp_path):
    words = load_tokenizer(write_model(tmp_path / "m", bos_token=None))
    assert words.bos_id is None
    found = with_random_rows(rows_of_text(8), 1.0, words, 0)
    assert (found.ids[:, 0] == TEXT).all()
    assert (found.ids[:, 1:] != TEXT).any(1).all()


def test_the_token_for_unknown_ones_is_not_drawn():
    model = models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>")
    assert TextTokenizer(Tokenizer(model), None, None).ordinary_ids() == [1, 2]


def test_the_seed_decides_what_is_drawn(tmp_path):
    words, sample = tokenizer(tmp_path), rows_of_text(16)
    first, again, other = (with_random_rows(sample, 0.5, words, n) for n in (0, 0, 1))
    assert first.ids.equal(again.ids)
    assert replaced(sample, first) == replaced(sample, other)
    assert not first.ids.equal(other.ids)


def test_added_tokens_are_not_drawn(tmp_path):
    words = tokenizer(tmp_path)
    words.tokenizer.add_tokens(["<image>", "word"])
    assert words.ordinary_ids() == [*range(2, IDS)]


def test_rows_with_images_stay(tmp_path):
    sample = rows_of_text(8)
    shown = tuple(ImageRow("text", (), "here") if i % 2 else None for i in range(8))
    sample = replace(sample, images=ImageRows(shown, None, 64))  # type: ignore[arg-type]
    words = tokenizer(tmp_path)
    found = with_random_rows(sample, 1.0, words, 0)
    assert replaced(sample, found) == [0, 2, 4, 6]
    assert found.images is sample.images
    assert with_random_rows(sample, 0.25, words, 0).report.random_rows == 1
