"""Low-rank corrections of a quantized model, block by block: what its blocks read decides, not what the source's did.

The rows pass the quantized model, and behind each block what this returns once it is corrected, as in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quantforge.checkpoint.safetensors import read_tensor
from quantforge.errors import InputError, IntegrityError
from quantforge.execution.journal import Workspace
from quantforge.execution.progress import tell
from quantforge.execution.record import checksum
from quantforge.formats.sources.adapter_files import names_of_halves
from quantforge.model.statistics import Statistic
from quantforge.model.stream import ModelStream
from quantforge.numerics.allocator import trim
from quantforge.numerics.products import matmul
from quantforge.quantizers.hessian import checked_hessian
from quantforge.quantizers.low_rank import low_rank

if TYPE_CHECKING:
    from quantforge.checkpoint.writer import WeightsWriter
    from quantforge.model.block import BlockPart

_HESSIAN = frozenset({Statistic.HESSIAN})


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction of all blocks.

    Attributes:
        modules: the module of the running model, by the canonical name of each linear that is corrected.
        aims: returns what the linears of a block should compute with, float32 ``[out, in]``, by canonical name.
        rank: of every product.
        writer: of the adapter's weights.
        work: the journal.
        blocks: how many there are.
    """

    modules: Mapping[str, str]
    aims: Callable[[int], Callable[[str], Tensor]]
    rank: int
    writer: WeightsWriter
    work: Workspace
    blocks: int

    @torch.inference_mode()
    def execute(self, stream: ModelStream) -> None:
        """Correct every block that the journal does not have.

        Args:
            stream: of the quantized model, decoded.

        Raises:
            InputError: a weight or an activation is not finite.
            IntegrityError: what was written is not what the journal says.
        """
        for part in stream:
            if (record := self.work.done.get(part.name)) is not None:
                tell(f"{part.name}: correcting again", part.index, self.blocks)
                self._restore(part, record["sums"])
            else:
                tell(f"{part.name}: observing", part.index, self.blocks)
                sums = self._correct(part)
                self.writer.sync()
                self.work.commit(part.name, {"sums": sums})
            part.advance()
            trim()

    def _linears(self, part: BlockPart, names: tuple[str, ...]) -> dict[str, str]:
        """Return the modules of those linears that are corrected, by their names in the block."""
        canonical = {name: f"{part.name}.{name}" for name in names}
        return {name: self.modules[one] for name, one in canonical.items() if one in self.modules}

    def _correct(self, part: BlockPart) -> dict[str, int]:
        """Correct the linears of a block, one shared input after the other; return the checksums."""
        sums: dict[str, int] = {}
        aim = self.aims(part.index)
        for shared in part.inputs:
            chosen = self._linears(part, shared.linears)
            if not chosen:
                continue
            hessian = part.observe({shared.key: _HESSIAN})[shared.key].hessian
            assert hessian is not None
            checked_hessian(hessian, f"{part.name}.{shared.key}")
            for name, module in chosen.items():
                tell(f"{part.name}: {name}")
                sums |= self._written(part, name, module, aim(f"{part.name}.{name}"), hessian)
            trim()
        return sums

    def _written(
        self, part: BlockPart, name: str, module: str, aim: Tensor, hessian: Tensor
    ) -> dict[str, int]:
        error = aim.to(hessian.device) - part.weight(name)
        try:
            halves = low_rank(error, hessian, self.rank)
        except InputError as found:
            raise InputError(f"{module}: {found.message}", found.hint, tensor=module) from found
        self._add(part, name, *halves)
        sums = {}
        for stored, half in zip(names_of_halves(module), halves, strict=True):
            self.writer.write(stored, half.cpu().contiguous())
            sums[stored] = checksum(half.cpu().contiguous(), 0)
        return sums

    def _restore(self, part: BlockPart, sums: Mapping[str, int]) -> None:
        """Correct a block by what was written for it."""
        read = partial(self._read, sums)
        for name, module in self._linears(part, part.own_linears).items():
            self._add(part, name, *map(read, names_of_halves(module)))

    def _read(self, sums: Mapping[str, int], stored: str) -> Tensor:
        value = read_tensor(self.writer.entry(stored))
        if checksum(value, 0) != sums.get(stored):
            raise IntegrityError(
                f"{stored}: not as the interrupted run has written it",
                f"start afresh: rm -r {self.work.directory.parent}",
                tensor=stored,
            )
        return value

    def _add(self, part: BlockPart, name: str, a: Tensor, b: Tensor) -> None:
        weight = part.weight(name)
        part.set_weight(name, weight + matmul(b.to(weight), a.to(weight)))
