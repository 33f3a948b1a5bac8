"""Rows of tokens: distinct windows, chosen by the seed, never fewer than asked for in silence."""

from __future__ import annotations

import hashlib
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantforge_calibration import SourceError
from quantforge_calibration.row_count import share_rows
from quantforge_calibration.sampler import (
    concatenate_samples,
    digest,
    pack_rows,
    tokens_per_column_warning,
    wrap_rows,
)
from tests.calibration.support import refused

IDS = st.integers(10, 10_000)
DOCUMENTS = st.lists(st.lists(IDS, max_size=40), max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    docs=DOCUMENTS,
    rows=st.integers(1, 6),
    length=st.integers(2, 12),
    bos=st.sampled_from([None, 1]),
    eos=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**32),
    choose=st.sampled_from(["spread", "first"]),
)
def test_rows_are_distinct_windows_of_the_joined_stream(docs, rows, length, bos, eos, seed, choose):
    stream: list[int] = []
    for doc in filter(None, docs):
        stream += ([eos] if stream and eos is not None else []) + doc
    payload = length - (bos is not None)
    windows = [stream[i : i + payload] for i in range(0, len(stream) - payload + 1, payload)]
    if len(windows) < rows:
        refused(
            lambda: pack_rows(docs, rows, length, bos, eos, seed, choose),
            f"{len(stream)} tokens",
            f"need {rows * payload}",
        )
        return
    sample = pack_rows(docs, rows, length, bos, eos, seed, choose)
    report = sample.report
    assert sample.ids.shape == (rows, length)
    assert sample.ids.dtype == torch.int64
    if bos is not None:
        assert (sample.ids[:, 0] == bos).all()
    found = sample.ids[:, length - payload :].tolist()
    left = iter(windows)
    assert all(row in left for row in found)  # a subsequence: distinct windows, in order
    if choose == "first" or rows == len(windows):
        assert found == windows[:rows]
    assert report.tokens_available == len(stream)
    assert report.tokens_truncated == len(stream) - payload * len(windows)
    assert report.tokens_used == rows * payload
    assert report.duplicated_rows == rows - len(set(map(tuple, found)))
    again = pack_rows(docs, rows, length, bos, eos, seed, choose)
    assert torch.equal(again.ids, sample.ids)
    assert again.report == report


def test_every_window_can_be_chosen_and_seeds_differ():
    docs = [list(range(1000))]
    seen, samples = set(), set()
    for seed in range(60):
        ids = pack_rows(docs, 5, 10, seed=seed).ids
        assert (ids[:, 1:] - ids[:, :-1] == 1).all()
        starts = (ids[:, 0] // 10).tolist()
        assert [start // 20 for start in starts] == [0, 1, 2, 3, 4]  # one from every fifth
        seen.update(starts)
        samples.add(tuple(starts))
    assert len(samples) == 60
    assert len(seen) > 90


def test_packing_leaves_the_global_generators_alone():
    states = random.getstate(), torch.random.get_rng_state()
    pack_rows([list(range(100))], 3, 10, seed=7)
    assert random.getstate() == states[0]
    assert torch.equal(torch.random.get_rng_state(), states[1])


def test_golden_rows_and_digest():
    sample = pack_rows([range(10, 22), range(30, 42)], 2, 5, 0, 1, seed=3)
    assert sample.ids.tolist() == [[0, 10, 11, 12, 13], [0, 33, 34, 35, 36]]
    values = struct.pack("<12q", 2, 5, *sample.ids.flatten().tolist())
    assert sample.report.digest == hashlib.sha256(values).hexdigest()
    assert digest(sample.ids.t()) != digest(sample.ids)
    assert digest(sample.ids.reshape(5, 2)) != digest(sample.ids)


def test_too_little_text_says_how_many_tokens_and_what_to_type():
    refused(lambda: pack_rows([range(25)], 3, 10), "25 tokens", "need 30", "--samples 2")
    refused(lambda: pack_rows([range(5)], 3, 10), "5 tokens", "smaller --length")
    refused(lambda: pack_rows([], 1, 2), "0 tokens")
    refused(lambda: pack_rows([[5]], 1, 2, allow_fewer=True), "1 tokens")


def test_fewer_rows_only_where_allowed():
    report = pack_rows([range(25)], 3, 10, allow_fewer=True).report
    assert (report.rows, report.rows_requested, report.tokens_truncated) == (2, 3, 5)


def test_one_repeated_token_is_reported_as_duplicates():
    assert pack_rows([[7] * 100], 5, 10).report.duplicated_rows == 4


@pytest.mark.parametrize(("rows", "length"), [(0, 8), (-1, 8), (1, 1), (1, 0)])
def test_impossible_shapes(rows, length):
    with pytest.raises(ValueError, match="cannot make"):
        pack_rows([range(100)], rows, length)


@settings(deadline=None)
@given(st.integers(1, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_sum_and_follow_the_weights(rows, weights):
    try:
        shares = share_rows(rows, weights)
    except SourceError:
        return
    assert sum(shares) == rows
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - rows * weight / sum(weights)) < 1.0001


def test_shares_of_known_cases():
    assert share_rows(8, [3, 1]) == [6, 2]
    assert share_rows(10, [1, 1, 1]) == [4, 3, 3]
    refused(lambda: share_rows(2, [3, 1, 1]), "too few", "--samples")


def test_given_rows_and_their_combination():
    ids = torch.arange(12).view(3, 4)
    sample = wrap_rows(ids)
    both = concatenate_samples([sample, pack_rows([range(12)], 3, 4, source="a.txt")])
    assert both.report.sources == ("self", "a.txt")
    assert both.report.duplicated_rows == 3
    assert both.report.rows == both.report.rows_requested == 6
    assert both.report.digest == digest(torch.cat([ids, ids]))
    for bad in (ids.float(), ids[0], ids[:0]):
        refused(lambda bad=bad: wrap_rows(bad), "int64 [rows, length]")


def test_tokens_per_column_warning():
    assert tokens_per_column_warning(8 * 64, 64) is None
    assert "7.9 per column" in str(tokens_per_column_warning(8 * 64 - 6, 64))
