"""Replayed inputs of blocks that read earlier outputs equal those of the model."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quantforge.model.block_calls import StandIn
from quantforge.model.block_inputs import ReplayedInputs, equal_trees
from quantforge.model.hidden_states import InMemory, LeafStore, StateLayout

ROWS, LENGTH, HIDDEN, BLOCKS = 3, 5, 4, 5


class Block(nn.Module):
    """Block that reads the output of the block before the previous one, and a shared mapping."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(HIDDEN, HIDDEN), index

    def forward(
        self, states: Tensor, history: Tensor, chosen: Any, shared: UserDict[int, Tensor]
    ) -> Any:
        output = self.linear(states) + history.sum(0) + sum(shared.values(), torch.zeros(1))
        if chosen is not None:
            output = output * chosen
        if self.index == 1:
            shared[self.index] = output.mean(-1, keepdim=True)
        return output, output.argmax(-1, keepdim=True) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, HIDDEN)
        self.blocks = nn.ModuleList([Block(index) for index in range(BLOCKS)])

    def forward(self, ids: Tensor) -> Tensor:
        states: Tensor = self.embedding(ids)
        history, chosen, shared = states.new_zeros(1, *states.shape), None, UserDict[int, Tensor]()
        for index, block in enumerate(self.blocks):
            if index % 2:
                history = torch.cat([history, states[None]])
            states, chosen = block(states, history, chosen, shared=shared)
        return states + history.sum(0)


@pytest.mark.parametrize("on_disk", [False, True])
def test_replayed_block_inputs_equal_the_model(tmp_path: Path, on_disk: bool) -> None:
    torch.manual_seed(0)
    model, ids = Model().requires_grad_(False), torch.randint(0, 10, (ROWS, LENGTH))
    expected = torch.cat([model(row[None]) for row in ids])
    blocks = list(model.blocks)
    standins = [StandIn(block, 2) for block in blocks]
    model.blocks = nn.ModuleList(standins)
    leaves = LeafStore(tmp_path if on_disk else None)
    replay = ReplayedInputs(standins, model, ids, StateLayout(0, (HIDDEN,)), leaves)
    assert sorted(replay.reread_states) == [0, 2]  # the embedding is computed by the model itself
    states = torch.zeros(ROWS, LENGTH, HIDDEN)
    for index, block in enumerate(blocks):
        replay.at_block(index)
        for again in (
            True,
            False,
        ):  # a block passes its rows several times, with other weights the first time
            if again:
                block.linear.weight += 1
            outputs = []
            for row in range(ROWS):
                reached = replay.call_for(row, states[row : row + 1])
                returned = block(
                    reached.states, *reached.arguments.args, **reached.arguments.kwargs
                )
                replay.record_output(reached, returned)
                outputs.append(returned[0])
            if again:
                block.linear.weight -= 1
        states = torch.cat(outputs)
        if index in replay.reread_states:
            store = InMemory(ROWS, LENGTH, HIDDEN)
            store.write(0, states)
            replay.reread_states[index] = store
    ends = [replay.run_end(row, states[row : row + 1], model) for row in range(ROWS)]
    torch.testing.assert_close(torch.cat(ends), expected)
    assert replay.needs_earlier_outputs
    stored_leaves = [
        leaf
        for outputs_of_row in replay._outputs_by_row.values()
        for leaf in tree_leaves(tuple(outputs_of_row))
    ]
    assert len(stored_leaves) == ROWS * 2
    assert [isinstance(leaf, Tensor) for leaf in stored_leaves] == [not on_disk] * len(
        stored_leaves
    )
    assert not list(tmp_path.iterdir())  # the file has no name


def test_equal_trees_compares_lengths_and_keys():
    tensor = torch.ones(2)
    assert equal_trees((tensor, {"a": tensor}), (tensor.clone(), {"a": tensor}))
    assert not equal_trees((tensor, {"a": tensor}), (tensor, {"a": tensor, "b": tensor}))
    assert not equal_trees([tensor, tensor], [tensor])
