"""Parameters of a block are restored from the written tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from quantforge.execution.block_tensors import BlockTensors
from quantforge.formats.storage import get_storage
from quantforge.plans import Action, StoredTensor, TensorPlan


def test_gguf_decay_parameters_keep_the_source_bits():
    storage = get_storage("gguf")
    values = {"A_log": torch.linspace(-4, 2, 12), "norm.weight": torch.linspace(0, 1, 12)}
    plans = [
        TensorPlan(name, "F32", (12,), Action.KEEP, "", outputs=(StoredTensor(name, "F32", (12,)),),
                   negate_exp=name == "A_log") for name in values
    ]  # fmt: skip
    written = {plan.name: storage.convert_unquantized(plan, values[plan.name]) for plan in plans}
    present = {name: values[name].clone() for name in values}
    present["norm.weight"] += 1
    output = SimpleNamespace(storage=storage, read=lambda plan: {plan.name: written[plan.name]})
    part = SimpleNamespace(
        stored_name=lambda name: name, parameters=lambda: list(present),
        is_outside_module=lambda name: False, set_parameter=present.__setitem__,
    )  # fmt: skip
    BlockTensors(SimpleNamespace(tensors=plans), output).load_written_parameters(part)
    assert all(torch.equal(present[name], values[name]) for name in values)
