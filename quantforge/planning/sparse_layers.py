"""Sparsity as it is planned: which linears get zeros, and what is refused because nothing would come of them.

Zeros save bytes or time only where a format or a kernel leaves them out. No format here does, and the engine that did
has given it up; so the result is a plain model, to be measured, or to be quantized by a second run (`rtn` keeps zeros).
"""

from __future__ import annotations

from dataclasses import replace

from quantforge.architectures.match import Matched, Role
from quantforge.errors import InputError, RefusedError, UsageError
from quantforge.events import Event
from quantforge.formats import PLAIN
from quantforge.notation import SPARSITY_HINT as HINT
from quantforge.planning.coverage import asked
from quantforge.plans import Action, Draft
from quantforge.quantizers import is_sparse
from quantforge.scheme import Sparsity

_NOTHING_COMES = (
    "codes of zeros take as much room as others, and no engine skips them: vLLM removed its sparse kernels and their"
    " format in March 2026 (vllm-project/vllm, pull request 36799)"
)


def with_zeros(draft: Draft, matched: Matched, method: str, pattern: Sparsity | None) -> Draft:
    """Return the draft with the linears marked that get zeros: all inside of blocks that no rule keeps.

    Args:
        draft: of a format that `check_zeros` lets through.
        matched: the model.
        method: what the recipe says.
        pattern: of the zeros; None without any.

    Raises:
        UsageError: a method or a sparsity without the other.
        InputError: no linear is left.
    """
    if not is_sparse(method):
        if pattern is not None:
            raise UsageError(
                f"--sparsity {pattern}: --method {method} makes no zeros",
                "--method sparsegpt, wanda or magnitude",
            )
        return draft
    if pattern is None:
        raise UsageError(f"--method {method}: no --sparsity is given", f"say {HINT}")
    roles = {tensor.stored.name: tensor.role for tensor in matched.tensors}
    tensors, events = [], []
    rule = f"{method}, sparsity {pattern}"
    for tensor in draft.tensors:
        linear = tensor.part >= 0 and roles.get(tensor.name) is Role.LINEAR
        wanted = linear and tensor.action is Action.KEEP and not asked(tensor)
        fits = wanted and pattern.fits(tensor.matrix[1])
        if wanted and not fits:
            detail = f"none: {tensor.matrix[1]} input columns are no multiple of {pattern.run}"
            events.append(Event("substitution", tensor.name, detail))
        tensors.append(replace(tensor, sparse=True, rule=rule) if fits else tensor)
    if not any(tensor.sparse for tensor in tensors):
        raise InputError(
            f"--sparsity {pattern}: no linear is left that could have it", "check --ignore"
        )
    return replace(draft, tensors=tuple(tensors), substitutions=(*draft.substitutions, *events))


def check_zeros(method: str, pattern: Sparsity | None, form: str) -> None:
    """Refuse zeros of which nothing would come.

    Args:
        method: that makes them.
        pattern: of the zeros; None without any.
        form: the format's key.

    Raises:
        UsageError: other methods stand beside it.
        RefusedError: the format has nothing of it.
    """
    if pattern is None or not is_sparse(method):
        return
    if "+" in method:
        raise UsageError(
            f"--method {method}: zeros are made by a run of their own",
            "--method sparsegpt --format plain first, then quantize its result",
        )
    if form != PLAIN:
        raise RefusedError(
            f"--sparsity {pattern} in {form}: {_NOTHING_COMES}",
            f"--format {PLAIN}, to measure it by `eval`, or to quantize it by a second run",
        )
