"""Trees of drafted tokens keep the text, and the cache holds only accepted tokens."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

import quantforge
from quantforge.cache_kinds import WORDS
from quantforge.errors import UsageError
from quantforge.runtime.decoder import Decoder
from quantforge.runtime.generation_options import Sampling
from quantforge.runtime.load import load
from quantforge.runtime.ragged_attention import Span
from quantforge.runtime.sampling import RowSampler
from quantforge.runtime.speculation.draft_model import ModelDrafter
from quantforge.runtime.speculation.draft_options import MAX_NODES, DraftOptions, parse_tree_shape
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.ngrams import NgramDrafter
from quantforge.runtime.speculation.tree import ROOT, DraftTree
from tests.choices import plain_text
from tests.fake_decoder import chain_tree
from tests.plain_loop import StopLimits, generate
from tests.unit.runtime.speculation.test_speculate import (
    DEMO,
    DRAWN,
    PENALISED,
    speculated,
)

SHAPE = (3, 2, 2)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(load(DEMO).model)


@pytest.fixture(scope="module")
def ids():
    draw = random.Random(1)
    return [draw.randrange(5, 2000) for _ in range(12)] * 4


class Planted(Drafter):
    """Drafts full trees in which the true continuation stands anywhere, up to a depth drawn anew."""

    def __init__(self, truth, shape=SHAPE, probes=0):
        self.truth, self.shape, self.draw, self.probes = truth, shape, random.Random(1), probes
        self.passes, self.most = [], 2000

    def draft(self, history, most, sampler):
        right = self.draw.randrange(len(self.shape) + 1)
        tree, ends, on_path = DraftTree(), [ROOT], ROOT
        for depth, count in enumerate(self.shape[:most]):
            true = self.truth[len(history) + depth] if depth < right else None
            grown, following = [], None
            for node in ends:
                tokens = self.draw.sample(range(5, self.most), count)
                if node == on_path and true is not None:
                    tokens[self.draw.randrange(count)] = true
                for token in dict.fromkeys(tokens):
                    grown.append(tree.add(node, token))
                    if node == on_path and token == true:
                        following = grown[-1]
            ends, on_path = grown, following
        for _ in range(self.probes):
            tree.add(
                self.draw.randrange(-1, len(tree.tokens)),
                self.draw.randrange(5, self.most),
                probe=True,
            )
        self.passes.append(tree)
        return tree


@pytest.mark.tokens
@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(kind, Sampling()) for kind in (*WORDS, "k=int8,v=int4")] + [("", DRAWN), ("", PENALISED)],
)
def test_text_is_that_of_the_plain_loop(decoder, ids, kind, sampling):
    limits = StopLimits(40, cache=kind)
    plain = plain_text(decoder, ids, limits, sampling)
    assert len(plain) == 40
    for probes in (0, 5):
        planted = Planted(ids + plain, probes=probes)
        result, counts = speculated(decoder, ids, planted, 3, limits, sampling)
        assert result == plain
        assert counts.tokens == len(plain) - 1
        assert 1.5 < counts.tokens_per_pass < 3.5
        assert counts.drafted > 2 * counts.depths


@pytest.mark.tokens
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "cohere", "mixtral", "qwen3"])
def test_tree_drafts_keep_the_text_of_every_family(tiny, family):
    """Windows, soft caps, several rotary bases, mixtures: positions follow the depth, not the place."""
    decoder = Decoder(load(tiny(family)).model)
    draw = random.Random(2)
    ids = [draw.randrange(3, 300) for _ in range(40)]
    limits = StopLimits(24)
    (plain,) = generate(decoder, [ids], limits)
    planted = Planted(ids + plain)
    planted.most = 300
    result, counts = speculated(decoder, ids, planted, 3, limits)
    assert result == plain
    assert counts.accepted > 4


@pytest.mark.parametrize("kind", [*WORDS, ""])
def test_accepted_path_equals_the_plain_cache(decoder, ids, kind):
    tree = DraftTree()
    for parent, token in ((ROOT, 7), (ROOT, 8), (1, 9), (0, 10), (2, 11), (2, 12)):
        tree.add(parent, token)
    path = [1, 2, 5]
    paged_cache, expected = decoder.cache(1, 100, kind), decoder.cache(1, 100, kind)
    for first in (paged_cache, expected):
        first.reserve(0, 100)
    with torch.inference_mode():
        decoder.hidden_of_spans(torch.tensor(ids[:31]), [Span(0, 31)], paged_cache)
        decoder.hidden_of_spans(
            torch.tensor(tree.tokens), [Span(0, 6, tree.mask(root=False))], paged_cache
        )
        paged_cache.keep_tree_path(0, 31, path)
        decoder.hidden_of_spans(torch.tensor([*ids[:31], 8, 9, 12]), [Span(0, 34)], expected)
    assert paged_cache.length(0) == paged_cache.lengths[0] == 34
    for layer in range(len(paged_cache.layers)):
        for first, second in zip(
            paged_cache.read(layer, paged_cache.table),
            expected.read(layer, expected.table),
            strict=True,
        ):
            error = (first[0, :34] - second[0, :34]).abs().max() / second[0, :34].abs().max()
            assert error < (1e-4 if kind in {"", "bf16"} else 0.15)  # else a code may flip


@pytest.mark.tokens
@pytest.mark.parametrize(
    "sampling", [Sampling(), DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"]
)
def test_model_as_its_own_draft_is_always_accepted(decoder, ids, sampling):
    limits = StopLimits(21)
    (plain,) = generate(decoder, [ids], limits, sampling)
    drafter = ModelDrafter(decoder, len(ids) + 21, SHAPE)
    result, counts = speculated(decoder, ids, drafter, 3, limits, sampling)
    assert result == plain
    assert counts.acceptance == 1
    assert counts.passes == 5


def path_to(tree, node):
    """Return the nodes from the first after the root to a node."""
    return [] if node == ROOT else [*path_to(tree, tree.parents[node]), node]


@pytest.mark.tokens
def test_draft_model_keeps_the_accepted_path(decoder, ids):
    """What is drafted after a text that followed an older tree is that of a draft model that never saw the tree."""
    reads = ModelDrafter(decoder, 200, SHAPE)
    history, sampler = list(ids), RowSampler(Sampling())
    computed = []
    compute = reads._logits
    reads._logits = lambda tokens, tree=None: (
        computed.append((len(tokens), tree)) or compute(tokens, tree)
    )
    for leaf in (5, 3, 0, 6):
        tree = reads.draft(history, 3, sampler)
        fresh = ModelDrafter(decoder, 200, SHAPE).draft(history, 3, sampler)
        assert (tree.tokens, tree.parents) == (fresh.tokens, fresh.parents)
        history += [tree.tokens[node] for node in path_to(tree, leaf)] + [77]
    texts = [count for count, tree in computed if tree is None]
    assert texts[0] == len(ids)
    assert max(texts[1:]) <= 2  # a leaf was never computed, and the last token; the path is there


def test_ngram_tree_copies_several_matches():
    drafter, sampler = NgramDrafter((2, 1, 1), lengths=(2,)), RowSampler(Sampling())
    tree = drafter.draft([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 3, sampler)
    assert tree.tokens == [5, 6, 1, 3, 4, 1]
    assert tree.parents == [ROOT, 0, 1, ROOT, 3, 4]
    assert (tree.depth, tree.drafted, tree.is_chain) == (3, 6, False)
    again = drafter.draft([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 5, 6, 1, 2], 2, sampler)
    assert again.tokens == [5, 6, 3, 4]  # what followed twice is there once
    assert chain_tree([5, 6]).is_chain


def test_tree_shapes_are_parsed():
    assert parse_tree_shape("3x2x1") == (3, 2, 1)
    assert DraftOptions("ngram", tree="8").shape == (8,)
    assert DraftOptions("ngram", tokens=2).shape == (1, 1)
    for bad in (
        "",
        "x",
        "0",
        "3x0",
        "-1",
        "3x",
        "3,2",
        "2x2x2x2x2x2",
        "65",
        "1" + "x1" * MAX_NODES,
        "9" * 5000,
        "²",
    ):
        with pytest.raises(UsageError):
            parse_tree_shape(bad)
    for options in ({"tree": "2x2"}, {"draft": "ngram", "tree": "2", "tokens": 4}, {"tokens": 4}):
        with pytest.raises(UsageError):
            DraftOptions(**options)


@cache
def loaded():
    return quantforge.load(DEMO)


@pytest.mark.tokens
@pytest.mark.parametrize("draft", ["ngram", "int3", str(DEMO)])
def test_text_is_the_same_with_any_tree(draft) -> None:
    options = {"raw": True, "max_tokens": 30, "seed": 4}
    plain = quantforge.generate(loaded(), "import os, json, json, json", **options)
    drafted = quantforge.generate(
        loaded(), "import os, json, json, json", draft=draft, draft_tree="3x2x1", **options
    )
    assert drafted.tokens == plain.tokens
