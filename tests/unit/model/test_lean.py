"""Imports of transformers' modelling code: in a process of ours lean, in one of others whole."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from quantforge.model import lean_imports as lean

NEVER_NEEDED = ("accelerate", "numba", "scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor",
                "torch.distributed.tensor", "triton")  # fmt: skip
SCRIPT = f"""
import json, sys
from quantforge.cli.app import main
sys.argv = ["quantforge", "--version"]
try:
    main()
except SystemExit:
    pass
from quantforge.model import skeleton
config = dict(model_type="llama", hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
              num_key_value_heads=1, vocab_size=8)
model = skeleton.build(config)
import quantforge.evaluation.evaluate, quantforge.execution.execute, quantforge.quantizers.gptq
found = [name for name in {NEVER_NEEDED} if name in sys.modules]
import torch, torch.distributed
from importlib.util import find_spec
print(json.dumps(dict(found=found, kind=type(model).__name__, available=torch.distributed.is_available(),
                      accelerate=find_spec("accelerate") is not None)))
"""


def test_a_command_loads_no_compiler_no_distributed_training_and_no_package_that_it_never_calls():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    after = json.loads(result.stdout.splitlines()[-1])
    assert after.pop("accelerate") is (find_spec("accelerate") is not None)
    # What is hidden during an import is there again afterwards.
    assert after.pop("available") is torch.distributed.is_available()
    assert after == {"found": [], "kind": "LlamaForCausalLM"}


def test_nothing_is_hidden_in_a_process_of_others(monkeypatch):
    monkeypatch.setattr(lean, "_alone", type(lean._alone)())
    before = dict(sys.modules), torch.distributed.is_available
    with lean.lean():
        assert torch.distributed.is_available is before[1]
        assert {name: sys.modules.get(name) for name in lean.OPTIONAL} == {
            name: before[0].get(name) for name in lean.OPTIONAL
        }


def test_what_is_hidden_comes_back_after_an_error_too(monkeypatch):
    monkeypatch.setattr(lean, "_alone", type(lean._alone)())
    lean.allow()
    before = {name: sys.modules.get(name) for name in (*lean.OPTIONAL, lean.DYNAMO)}
    available = torch.distributed.is_available
    with pytest.raises(ModuleNotFoundError), lean.lean():
        importlib.import_module("quantforge.no_such_module")
    assert {name: sys.modules.get(name) for name in before} == before
    assert torch.distributed.is_available is available


def test_the_stand_in_steps_aside_when_more_than_decorators_is_asked_of_it(monkeypatch):
    import torch._dynamo as real

    stand_in = lean._StandIn()
    assert stand_in.disable(len) is len
    assert stand_in.disable(recursive=False)(len) is len
    monkeypatch.setitem(sys.modules, lean.DYNAMO, real)
    assert stand_in.config is real.config
