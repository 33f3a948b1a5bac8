"""A decoder without a model: its next token is a hash of the history that it reads through the cache's table."""

from __future__ import annotations

import random

import torch

from quantforge.runtime.cache import CacheShape, PagedCache
from quantforge.runtime.ragged_attention import RaggedBatch
from quantforge.runtime.speculation.decode import SpeculativeDecoder
from quantforge.runtime.speculation.drafter import Drafter
from quantforge.runtime.speculation.tree import ROOT, DraftTree

VOCABULARY = 61
CPU = torch.device("cpu")


def next_token(history) -> int:
    """Return the token that follows a history."""
    state = 7
    for token in history:
        state = (state * 31 + int(token) + 1) % 1_000_003
    return state % VOCABULARY


def greedy_tokens(request) -> list[int]:
    """Return the new tokens of a greedy request by the plain loop."""
    tokens, found = list(request.ids), []
    while len(found) < request.new_tokens and not (found and found[-1] in request.stop):
        found.append(next_token(tokens))
        tokens.append(found[-1])
    return found


def chain_tree(tokens):
    """Return the tree of one token for each place."""
    tree, node = DraftTree(), ROOT
    for token in tokens:
        node = tree.add(node, token)
    return tree


class OracleDrafter(Drafter):
    """Drafts trees of a shape in which what really follows often stands, anywhere."""

    def __init__(self, shape, seed=0):
        self.shape, self.draw = shape, random.Random(seed)

    def draft(self, history, most, sampler):
        tree, ends = DraftTree(), [(ROOT, list(history))]
        for count in self.shape[:most]:
            grown = []
            for node, text in ends:
                tokens = self.draw.sample(range(VOCABULARY), count)
                if self.draw.random() < 0.7:
                    tokens[self.draw.randrange(count)] = next_token(text)
                for token in dict.fromkeys(tokens):
                    grown.append((tree.add(node, token), [*text, token]))
            ends = grown
        return tree


def oracle_speculation(shape):
    """Return the speculation of an engine that asks `OracleDrafter` in every step that only decodes."""
    return SpeculativeDecoder(None, lambda room: OracleDrafter(shape, room), len(shape), fixed=True)


class FakeDecoder:
    """What an engine needs of a `Decoder`; keys are tokens, values their positions."""

    positions, vocabulary, device = 400, VOCABULARY, CPU

    def __init__(self):
        self.passes: list[list[tuple[int, int, int]]] = []  # row, first place, tokens

    def cache(self, sequences, tokens, kind="", pages=None, max_step_tokens=0):
        return PagedCache(
            CacheShape(2, 1, 2, kind, torch.float32),
            sequences,
            tokens,
            CPU,
            pages,
            max_step_tokens=max_step_tokens,
        )

    def hidden_of_spans(self, ids, spans, cache):
        rows = [span.row for span in spans]
        assert len(set(rows)) == len(rows)
        batch = RaggedBatch(spans, cache)
        self.passes.append([(span.row, cache.length(span.row), span.tokens) for span in spans])
        for layer in range(2):
            keys, values = (
                part.float().view(-1, 1, 1).expand(-1, 1, 2) for part in (ids, batch.positions)
            )
            cache.write(layer, batch.slots[0], keys.contiguous(), values.contiguous())
        found = []
        for span in spans:
            start, row = cache.length(span.row), cache.table[span.row : span.row + 1]
            both = [
                [part[0, : start + span.tokens, 0, 0] for part in cache.read(layer, row)]
                for layer in range(2)
            ]
            seen = torch.ones(span.tokens, span.tokens).tril() if span.tree is None else span.tree
            depths = [start + int(row.sum()) - 1 for row in seen]
            for keys, values in both:
                assert values.tolist() == [*range(start), *depths]
                assert torch.equal(keys, both[0][0])
            history = both[0][0].tolist()
            for row in seen:
                path = [history[start + place] for place in row.nonzero()[:, 0].tolist()]
                found.append(next_token(history[:start] + path))
            cache.advance(span.row, span.tokens)
        return torch.tensor(found, dtype=torch.float32)[:, None]

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCABULARY).float()
