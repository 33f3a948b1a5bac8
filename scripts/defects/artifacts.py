"""Healthy artifacts: one command line each, and what other tools write; made once in a folder, then kept.

The table `MADE` has a row for each: the family of formats, the source, the name, the command. Families are those of the
report; rows without one are looked at for false alarms and never damaged. No artifact keeps our manifest, so that
`verify` has to go by the files alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "models"
DEMO = ROOT / "models" / "demo"
RELEASED = "smollm2"
# Calibration: enough for methods to do their work, and cheap.
ROWS, FEW = "--samples 8 --length 128", "--samples 6 --length 24"
# Decoding plainly in a process: compiling kernels takes longer than its products.
NO_PROGRAMS = ("QUANTFORGE_CPU_PROGRAMS", "off")
RECORDS = ("quantforge.manifest.json", "model.sig")

CT, CT8, FP, NV, MX = (
    "compressed-tensors 2 to 4 bits",
    "compressed-tensors 8 bits",
    "compressed-tensors fp8",
    "nvfp4",
    "mxfp4",
)
GPTQ, AWQ, BNB, MLX, TILES, GGUF = "gptq", "awq", "bitsandbytes", "mlx", "fp8 tiles", "gguf"
FAMILIES = (CT, CT8, FP, NV, MX, GPTQ, AWQ, BNB, MLX, TILES, GGUF)
# Methods in commands. {rtn} may weigh errors by what tensors read; {plain} knows no tensor but the one that it rounds.
WORDS = {
    "rtn": "quantize {model} --method rtn",
    "plain": "quantize {model} --method rtn --calibration none",
    "to": "quantize {model} --method",
}
MADE: tuple[tuple[str, str, str, str], ...] = (
    # Two trained models
    (CT, "wren", "ct-int4", "{plain} --scheme int4:g128:sym"),
    ("", "wren", "ct-int4-search", "{rtn} --scheme int4:g64:sym"),
    ("", "demo", "gptq-search", "{rtn} --scheme int4:g32:asym --format gptq"),
    (CT, "wren", "ct-int4-awq", "{to} awq --scheme int4:g32:asym {rows}"),
    (CT, "wren", "ct-int4-gptq", "{to} gptq --scheme int4:g128:sym {rows}"),
    (CT, "demo", "ct-int4-awq-gptq", "{to} awq+gptq --scheme int4:g64:sym {rows}"),
    (CT, "wren", "ct-int4-row", "{plain} --scheme int4:row:sym --scales absmax"),
    (CT, "demo", "ct-int4-asym", "{rtn} --scheme int4:g32:asym"),
    (CT, "wren", "ct-int3", "{to} gptq --scheme int3:g64:sym {rows}"),
    (CT, "wren", "ct-int2", "{to} awq+gptq --scheme int2:g32:asym {rows}"),
    ("", "wren", "ct-int5", "{rtn} --scheme int5:g128:asym"),
    ("", "demo", "ct-int6", "{rtn} --scheme int6:g64:sym"),
    ("", "wren", "ct-int7", "{to} gptq --scheme int7:g128:sym {rows}"),
    ("", "wren", "ct-int4-smooth-gptq", "{to} smooth+gptq --scheme int4:g128:sym {rows}"),
    ("", "wren", "ct-int4-rotate", "{to} rotate --scheme int4:g128:sym {rows}"),
    ("", "demo", "ct-int4-rotate-gptq", "{to} rotate+gptq --scheme int4:g64:sym {rows}"),
    ("", "wren", "ct-mixed", "{rtn} --scheme int4:g128:sym --rule down_proj=int8:g128:sym"),
    ("", "wren", "ct-head", "{rtn} --scheme int4:g128:sym --lm-head int8:g128:sym --embedding keep"),
    ("", "demo", "ct-tuned", "{to} gptq --scheme int3:g64:sym --tune 2 --guided-hessians 1 {rows}"),
    ("", "wren", "ct-low-effort", "{to} awq --scheme int4:g64:asym --effort low {rows}"),
    ("", "demo", "ct-high-effort", "quantize {model} --bits 3 --effort high {rows}"),
    ("", "wren", "ct-target", "quantize {model} --target 4.5bpw {rows}"),
    ("", "wren", "magnitude", "{to} magnitude --sparsity 50% --format plain"),
    ("", "wren", "wanda", "{to} wanda --sparsity 2:4 --format plain {rows}"),
    ("", "demo", "sparsegpt", "{to} sparsegpt --sparsity 50% --format plain {rows}"),
    (CT8, "demo", "ct-int8", "{plain} --scheme int8:g128:sym"),
    (CT8, "wren", "ct-w8a8", "{to} smooth --scheme W8A8 {rows}"),
    (CT8, "wren", "ct-w8a8-static", "{rtn} --scheme W8A8_STATIC {rows}"),
    ("", "wren", "ct-int8-awq", "{to} awq --scheme int8:g128:sym {rows}"),
    (FP, "wren", "ct-fp8-dynamic", "{plain} --scheme FP8_DYNAMIC"),
    (FP, "wren", "ct-fp8-static", "{rtn} --scheme FP8_STATIC --kv-cache fp8 {rows}"),
    (FP, "wren", "ct-fp8-block", "{plain} --scheme FP8_BLOCK"),
    ("", "wren", "ct-mxfp8", "{rtn} --scheme mxfp8"),
    ("", "demo", "ct-fp8-gptq", "{to} gptq --scheme fp8:row:sym {rows}"),
    (NV, "wren", "ct-nvfp4", "{plain} --scheme NVFP4"),
    (NV, "demo", "ct-nvfp4-gptq", "{to} gptq --scheme NVFP4 {rows}"),
    (NV, "wren", "ct-nvfp4-w4a4", "{rtn} --scheme NVFP4_W4A4 {rows}"),
    (MX, "wren", "ct-mxfp4", "{plain} --scheme MXFP4"),
    (MX, "demo", "ct-mxfp4-awq", "{to} awq --scheme MXFP4 {rows}"),
    (GPTQ, "wren", "gptq-int4", "{to} gptq --scheme int4:g128:sym --format gptq {rows}"),
    (GPTQ, "wren", "gptq-v2-asym", "{to} gptq --scheme int4:g64:asym --format gptq_v2 {rows}"),
    (GPTQ, "demo", "gptq-int8", "{plain} --scheme int8:g128:asym --format gptq"),
    (GPTQ, "wren", "gptq-rtn-asym", "{plain} --scheme int4:g64:asym --format gptq"),
    (GPTQ, "wren", "gptq-int3", "{to} gptq --scheme int3:g64:sym --format gptq {rows}"),
    ("", "wren", "gptq-int2", "{to} gptq --scheme int2:g32:asym --format gptq {rows}"),
    (AWQ, "wren", "awq-asym", "{to} awq --scheme int4:g128:asym --format awq {rows}"),
    (AWQ, "demo", "awq-rtn", "{plain} --scheme int4:g64:sym --format awq"),
    (AWQ, "wren", "awq-rtn-asym", "{plain} --scheme int4:g64:asym --format awq"),
    (AWQ, "wren", "awq-awq-gptq", "{to} awq+gptq --scheme int4:g64:asym --format awq {rows}"),
    (BNB, "wren", "bnb-nf4", "{plain} --scheme nf4:g64 --format bnb"),
    (BNB, "wren", "bnb-nf4-double", "{plain} --scheme nf4:g64:sym:double --format bnb"),
    (BNB, "wren", "bnb-int8", "{plain} --scheme int8:row:sym --format bnb"),
    (BNB, "wren", "bnb-llm-int8", "{rtn} --scheme LLM_INT8 --format bnb {rows}"),
    ("", "demo", "bnb-fp4", "{rtn} --scheme fp4:g64 --format bnb"),
    ("", "wren", "bnb-nf4-gptq", "{to} gptq --scheme nf4:g64 --format bnb {rows}"),
    (MLX, "wren", "mlx-int4", "{plain} --scheme int4:g64:min --format mlx"),
    (MLX, "demo", "mlx-int8", "{rtn} --scheme int8:g64:min --format mlx"),
    (MLX, "wren", "mlx-mxfp4", "{plain} --scheme mxfp4 --format mlx"),
    ("", "wren", "mlx-int3", "{rtn} --scheme int3:g32:sym --format mlx"),
    ("", "wren", "mlx-int2", "{to} gptq --scheme int2:g32:min --format mlx {rows}"),
    (TILES, "wren", "fp8-tiles", "{plain} --scheme FP8_BLOCK --format fp8"),
    (TILES, "demo", "fp8-tiles", "{plain} --scheme FP8_BLOCK --format fp8"),
    (GGUF, "wren", "Q4_0.gguf", "{plain} --type Q4_0"),
    (GGUF, "wren", "Q8_0.gguf", "{rtn} --type Q8_0"),
    (GGUF, "wren", "Q4_K_M.gguf", "{plain} --type Q4_K_M"),
    (GGUF, "wren", "Q2_K.gguf", "{plain} --type Q2_K"),
    (GGUF, "demo", "IQ4_XS.gguf", "{plain} --type IQ4_XS"),
    (GGUF, "wren", "IQ4_NL.gguf", "{plain} --type IQ4_NL"),
    (GGUF, "wren", "Q5_K_M.gguf", "{plain} --type Q5_K_M --scales reference"),
    ("", "wren", "Q6_K.gguf", "{rtn} --type Q6_K"),
    ("", "demo", "Q3_K_M.gguf", "{rtn} --type Q3_K_M"),
    ("", "wren", "Q4_0-awq.gguf", "{to} awq --type Q4_0 {rows}"),
    ("", "demo", "Q5_1.gguf", "{rtn} --type Q5_1"),
    ("", "wren", "Q4_0-reference.gguf", "{rtn} --type Q4_0 --scales reference"),
    ("", "demo", "Q4_0-exported.gguf", "export {model} --type Q4_0"),
    ("", "wren", "ct-as-gptq", "export {made}/ct-int4 --format gptq --allow-inexact"),
    ("", "wren", "ct-as-mlx", "export {made}/ct-int4 --format mlx --allow-inexact"),
    ("", "wren", "ct-as-Q8_0.gguf", "export {made}/ct-int4 --type Q8_0 --requantize"),
    ("", "wren", "awq-as-gptq", "export {made}/awq-asym --format gptq_v2 --allow-inexact"),
    ("", "wren", "Q4_0-as-ct", "export {made}/Q4_0.gguf --format compressed-tensors --allow-inexact"),
    # Tiny models with random weights, of other architectures
    (CT, "qwen2", "ct-int4", "{plain} --scheme int4:g32:sym"),
    (CT, "gemma3", "ct-int4", "{plain} --scheme int4:g32:sym"),
    ("", "gemma3", "ct-int4-awq", "{to} awq --scheme int4:g32:sym {rows}"),
    ("", "llama", "ct-int4-awq", "{to} awq --scheme int4:g32:asym {rows}"),
    ("", "phi3", "ct-int4-awq", "{to} awq --scheme int4:g32:sym {rows}"),
    ("", "gpt2", "ct-int4-awq", "{to} awq --scheme int4:g32:sym {rows}"),
    ("", "qwen3", "ct-int4-gptq", "{to} gptq --scheme int4:g32:sym {rows}"),
    ("", "llama-wide", "ct-int2", "{rtn} --scheme int2:g32:asym"),
    (CT8, "llama", "ct-int8", "{plain} --scheme int8:row:sym"),
    (GPTQ, "llama", "gptq", "{to} gptq --scheme int4:g32:asym --format gptq {rows}"),
    (GGUF, "qwen2", "Q4_0.gguf", "{plain} --type Q4_0"),
    (GGUF, "gemma", "Q8_0.gguf", "{plain} --type Q8_0"),
    ("", "olmoe", "ct-int4", "{rtn} --scheme int4:g32:sym"),
    ("", "mixtral", "Q8_0.gguf", "{rtn} --type Q8_0"),
    # A trained model with channels of large activations
    ("", "wren-outlier", "ct-int4-awq", "{to} awq --scheme int4:g64:sym {rows}"),
    ("", "wren-outlier", "ct-w8a8", "{to} smooth --scheme W8A8 {rows}"),
    ("", "wren-outlier", "gptq-int4", "{to} gptq --scheme int4:g128:sym --format gptq {rows}"),
    ("", "wren-outlier", "Q4_K_M.gguf", "{rtn} --type Q4_K_M"),
    # Matrices of zeros, zero norms, dead rows and columns, single huge weights
    ("", "zeros", "ct-int4", "{rtn} --scheme int4:g64:sym"),
    ("", "zeros", "ct-int4-gptq", "{to} gptq --scheme int4:g64:sym {rows}"),
    ("", "zeros", "awq", "{to} awq --bits 4 --format awq {rows}"),
    ("", "zeros", "ct-w8a8", "{to} smooth --scheme W8A8 {rows}"),
    ("", "zeros", "mlx-int4", "{rtn} --scheme int4:g64:min --format mlx"),
    ("", "zeros", "bnb-nf4", "{rtn} --scheme nf4:g64 --format bnb"),
    ("", "zeros", "ct-nvfp4", "{rtn} --scheme NVFP4"),
    ("", "zeros", "Q4_0.gguf", "export {model} --type Q4_0"),
    ("", "zeros", "Q4_K_M.gguf", "{rtn} --type Q4_K_M"),
    # A released model
    ("", RELEASED, "rtn-int4-absmax", "{rtn} --bits 4 --scales absmax"),
    ("", RELEASED, "rtn-int4-search", "{rtn} --bits 4 --scales search"),
    (CT, RELEASED, "rtn-int4-g64-absmax", "{plain} --scheme int4:g64:sym --scales absmax"),
    ("", RELEASED, "rtn-int4-g64-search", "{rtn} --scheme int4:g64:sym --scales search"),
    (GGUF, RELEASED, "export-Q4_0.gguf", "export {model} --type Q4_0"),
    ("", RELEASED, "Q4_0-reference.gguf", "quantize {model} --type Q4_0 --scales reference"),
    ("", RELEASED, "mlx-int4", "{rtn} --format mlx --bits 4"),
    ("", RELEASED, "Q3_K_M-rtn.gguf", "{rtn} --type Q3_K_M"),
    (CT, RELEASED, "awq-int4", "{to} awq --bits 4 {rows}"),
    (CT, RELEASED, "gptq-int4", "{to} gptq --bits 4 {rows}"),
    (CT8, RELEASED, "rtn-int8-row", "{plain} --scheme int8:row:sym --scales absmax"),
    (CT8, RELEASED, "rtn-int8-g64", "{plain} --scheme int8:g64:asym --scales absmax"),
    (FP, RELEASED, "fp8-dynamic", "{plain} --scheme FP8_DYNAMIC"),
    ("", RELEASED, "fp8-block", "{rtn} --scheme FP8_BLOCK"),
    (MX, RELEASED, "mxfp4", "{plain} --scheme MXFP4 --scales absmax"),
    ("", RELEASED, "mxfp8", "{rtn} --scheme mxfp8"),
    (NV, RELEASED, "nvfp4", "{plain} --scheme NVFP4 --scales absmax"),
    (BNB, RELEASED, "bnb-nf4", "{plain} --scheme nf4:g64 --format bnb --scales absmax"),
    ("", RELEASED, "bnb-nf4-double", "{rtn} --scheme nf4:g64:sym:double --format bnb"),
    ("", RELEASED, "bnb-fp4", "{rtn} --scheme fp4:g64 --format bnb"),
    ("", RELEASED, "bnb-int8", "{rtn} --scheme int8:row:sym --format bnb --scales absmax"),
    ("", RELEASED, "mlx-int8", "{rtn} --scheme int8:g64:min --format mlx"),
    (MLX, RELEASED, "mlx-int4-absmax", "{plain} --scheme int4:g64:min --format mlx --scales absmax"),
    ("", RELEASED, "mlx-mxfp4", "{rtn} --scheme mxfp4 --format mlx"),
    ("", RELEASED, "Q8_0.gguf", "{rtn} --type Q8_0"),
    ("", RELEASED, "Q4_1-reference.gguf", "quantize {model} --type Q4_1 --scales reference"),
    (GGUF, RELEASED, "export-Q8_0.gguf", "export {model} --type Q8_0"),
    ("", RELEASED, "export-F16.gguf", "export {model} --type F16 --format gguf"),
    ("", RELEASED, "rtn-int4-row-absmax", "{rtn} --scheme int4:row:sym --scales absmax"),
    (GPTQ, RELEASED, "gptq-rtn-int4", "{plain} --scheme int4:g64:asym --format gptq --scales absmax"),
    (AWQ, RELEASED, "awq-rtn-int4", "{plain} --scheme int4:g64:asym --format awq --scales absmax"),
    ("", RELEASED, "rtn-int4-head",
     "{rtn} --scheme int4:g64:sym --lm-head int8:g64:sym --embedding keep --scales absmax"),
    ("", RELEASED, "rtn-int5", "{rtn} --scheme int5:g64:asym --scales absmax"),
    ("", RELEASED, "rtn-int6", "{rtn} --scheme int6:g64:sym --scales absmax"),
    ("", RELEASED, "rtn-int7", "{rtn} --scheme int7:g64:sym --scales absmax"),
    ("", RELEASED, "rtn-mixed", "{rtn} --scheme int4:g64:sym --rule down_proj=int8:g64:sym --scales absmax"),
    ("", RELEASED, "magnitude-50", "{to} magnitude --sparsity 50% --format plain"),
    ("", RELEASED, "wanda-2of4", "{to} wanda --sparsity 2:4 --format plain {rows}"),
    ("", RELEASED, "ct-to-gptq", "export {made}/rtn-int4-g64-absmax --format gptq --allow-inexact"),
    ("", RELEASED, "ct-to-awq", "export {made}/rtn-int4-g64-search --format awq --allow-inexact"),
    ("", RELEASED, "ct-to-mlx", "export {made}/rtn-int4-g64-search --format mlx --allow-inexact"),
    ("", RELEASED, "ct-to-Q8_0.gguf", "export {made}/rtn-int4-g64-search --type Q8_0 --requantize"),
    ("", RELEASED, "mlx-to-Q4_1.gguf", "export {made}/mlx-int4 --type Q4_1 --requantize"),
    ("", RELEASED, "Q8_0-to-ct", "export {made}/Q8_0.gguf --format compressed-tensors --allow-inexact"),
    ("", RELEASED, "Q4_0-to-gptq", "export {made}/export-Q4_0.gguf --format gptq --allow-inexact"),
    ("", RELEASED, "ct-to-plain", "export {made}/rtn-int4-g64-search --format plain"),
    ("", RELEASED, "mxfp4-to-mlx", "export {made}/mxfp4 --format mlx"),
    ("", RELEASED, "rtn-int3", "{rtn} --scheme int3:g64:sym"),
    ("", RELEASED, "rtn-int2", "{rtn} --scheme int2:g32:asym"),
    ("", RELEASED, "rtn-int4-asym", "{rtn} --scheme int4:g32:asym"),
    ("", RELEASED, "Q2_K.gguf", "{rtn} --type Q2_K"),
    (GGUF, RELEASED, "Q4_K_M-reference.gguf", "quantize {model} --type Q4_K_M --scales reference"),
    ("", RELEASED, "Q5_K_M.gguf", "{rtn} --type Q5_K_M"),
    ("", RELEASED, "Q6_K.gguf", "{rtn} --type Q6_K"),
    ("", RELEASED, "IQ4_NL.gguf", "{rtn} --type IQ4_NL"),
    ("", RELEASED, "IQ4_XS.gguf", "{rtn} --type IQ4_XS"),
    ("", RELEASED, "Q5_1.gguf", "{rtn} --type Q5_1"),
    ("", RELEASED, "mlx-int3", "{rtn} --scheme int3:g64:min --format mlx"),
    ("", RELEASED, "mlx-int2-gptq", "{to} gptq --scheme int2:g32:min --format mlx {rows}"),
    ("", RELEASED, "W8A8-smooth", "{to} smooth --scheme W8A8 {rows}"),
    ("", RELEASED, "W8A8-static", "{rtn} --scheme W8A8_STATIC {rows}"),
    ("", RELEASED, "fp8-static-kv", "{rtn} --scheme FP8_STATIC --kv-cache fp8 {rows}"),
    ("", RELEASED, "nvfp4-w4a4", "{rtn} --scheme NVFP4_W4A4 {rows}"),
    ("", RELEASED, "awq-asym", "{to} awq --scheme int4:g64:asym --format awq {rows}"),
    ("", RELEASED, "gptq-sym", "{to} gptq --scheme int4:g64:sym --format gptq {rows}"),
    ("", RELEASED, "awq-gptq-int4", "{to} awq+gptq --scheme int4:g64:sym {rows}"),
    ("", RELEASED, "gptq-v2-int3", "{to} gptq --scheme int3:g64:asym --format gptq_v2 {rows}"),
    ("", RELEASED, "rotate-int4", "{to} rotate --scheme int4:g64:sym {rows}"),
    ("", RELEASED, "smooth-gptq-int4", "{to} smooth+gptq --scheme int4:g64:sym {rows}"),
    ("", RELEASED, "sparsegpt-50", "{to} sparsegpt --sparsity 50% --format plain {rows}"),
    ("", RELEASED, "awq-Q4_0.gguf", "{to} awq --type Q4_0 {rows}"),
    ("", RELEASED, "gptq-Q4_K_M.gguf", "{to} gptq --type Q4_K_M {rows}"),
    ("", RELEASED, "gptq-nf4", "{to} gptq --scheme nf4:g64 --format bnb {rows}"),
    ("", RELEASED, "awq-gptq-int2", "{to} awq+gptq --scheme int2:g32:asym --effort low {rows}"),
    ("", RELEASED, "gptq-tune", "{to} gptq --scheme int4:g64:sym --tune 1 {rows}"),
    ("", RELEASED, "gptq-guide", "{to} gptq --scheme int3:g64:sym --guided-hessians 1 {rows}"),
    ("", RELEASED, "target-4.5", "quantize {model} --target 4.5bpw {rows}"),
    ("", RELEASED, "awq-mxfp4", "{to} awq --scheme MXFP4 {rows}"),
)  # fmt: skip
# Artifacts of other tools that are kept with the tests, and the families of those that are damaged.
PEERS = {"gptqmodel-desc-act": GPTQ, "gptqmodel-awq": AWQ, "mlx-4bit": MLX, "llmc-w8a8-smooth": CT8,
         "llama.cpp-q8_0": GGUF, "bnb-nf4": BNB, "llmc-fp8-block": FP, "autoround-asym": GPTQ}  # fmt: skip
Maker = Callable[[], tuple[Path, Path]]  # returns the paths of an artifact and its source
TRAINED = ("wren", "demo", "wren-outlier", "zeros", RELEASED)


@dataclass(frozen=True)
class Healthy:
    """A healthy artifact.

    Attributes:
        name: ``SOURCE/NAME``.
        family: of formats; empty for those that are not damaged.
        make: makes it when it is first asked for, and returns its path and that of its source.
        command: what makes it, as in `MADE`; empty for what other tools make.
    """

    name: str
    family: str
    make: Maker
    command: str = ""

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.make()[0]

    @property
    def source(self) -> Path:
        """What it was made from."""
        return self.make()[1]

    @property
    def released(self) -> bool:
        """Whether its source is the released model."""
        return self.name.startswith(f"{RELEASED}/")

    @property
    def tensor_by_tensor(self) -> bool:
        """Whether its command rounds every tensor by itself: what becomes of it depends on no other tensor."""
        return self.command.startswith(("{plain}", "export {model}"))


class Shop:
    """Makes artifacts in a folder."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def all(self, *, only: str = "") -> list[Healthy]:
        """Every healthy artifact whose name contains ``only``."""
        from scripts.defects.others import OTHERS

        found = [
            Healthy(f"{source}/{name}", family, self._ours(source, name, command), command)
            for family, source, name, command in MADE
            if source != "wren-outlier" or SHARED.exists()
        ]
        found += [Healthy(f"peers/{name}", family, self._peer(name)) for name, family in _peers()]
        found += [Healthy(name, "", self._other(name, make)) for name, make in OTHERS.items()]
        return [item for item in found if only in item.name]

    def model(self, name: str) -> Path:
        """The source of that name."""
        if name in {"wren", "demo", "wren-outlier"}:
            return (SHARED / name if (SHARED / name).exists() else DEMO).resolve()
        makers = {"zeros": _zeros, RELEASED: _released}
        from tests.conftest import make_tiny

        make = makers.get(name) or (lambda place: make_tiny(name, place))
        return self._once(self._work / "models" / name, make)

    def _ours(self, source: str, name: str, command: str) -> Maker:
        @cache
        def make() -> tuple[Path, Path]:
            folder, model = self._work / "healthy" / source, self.model(source)
            for needed in re.findall(r"{made}/(\S+)", command):
                (row,) = (row for row in MADE if row[1:3] == (source, needed))
                self._ours(source, needed, row[3])()
            return self._once(
                folder / name, lambda place: by_command(command, model, place, folder)
            ), model

        return make

    def _other(self, name: str, make: Callable[[Path, Path], object]) -> Maker:
        @cache
        def made() -> tuple[Path, Path]:
            model = self.model(name.partition("/")[0])
            return self._once(
                self._work / "healthy" / name, lambda place: make(model, place)
            ), model

        return made

    def _peer(self, name: str) -> Maker:
        from tests import peers

        @cache
        def make() -> tuple[Path, Path]:
            source = json.loads((peers.FIXTURES / f"{name}.json").read_text())["source"]
            model = self._once(
                self._work / "models" / f"peers-{source}", lambda place: peers.make(source, place)
            )
            folder = peers.FIXTURES / name
            kept = folder if folder.is_dir() else folder.with_name(f"{name}.gguf")
            # A copy beside the damaged ones, so that links can be made.
            copy = shutil.copytree if kept.is_dir() else shutil.copy
            return self._once(
                self._work / "healthy" / "peers" / kept.name, lambda place: copy(kept, place)
            ), model

        return make

    def _once(self, out: Path, make: Callable[[Path], object]) -> Path:
        """Make something that appears whole or not at all, in one process at a time."""
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.with_name(f".{out.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not out.exists():
                stage = out.parent / ".stage" / out.name
                shutil.rmtree(stage.parent / out.name, ignore_errors=True)
                stage.parent.mkdir(exist_ok=True)
                stage.unlink(missing_ok=True)
                make(stage)
                stage.rename(out)
        return out


def by_command(command: str, model: Path, out: Path, made: Path = Path()) -> None:
    """Run a command of `MADE` in a forked process, and remove the records that it leaves.

    Args:
        command: the template.
        model: the source.
        out: the artifact to be.
        made: the folder with other artifacts of the source.
    """
    from quantforge.cli.app import main
    from tests.runs import fork_child, wait_for_exit_code

    rows = ROWS if model.name in TRAINED else FEW
    # The words in braces may hold braces themselves.
    line = command.format(**WORDS, model="{model}", made=made, rows=rows).format(model=model)
    words = [*line.split(), "--threads", "1", "-q", "-o", str(out)]
    errors = out.with_name(f".{out.name}.errors")

    def work() -> None:
        sys.argv = ["quantforge", *words]
        main()

    if wait_for_exit_code(fork_child(work, errors)):
        raise RuntimeError(f"quantforge {' '.join(words)}\n{errors.read_text()}")
    errors.unlink()
    out.with_name(f"{out.name}.quantforge.json").unlink(missing_ok=True)
    for name in RECORDS if out.is_dir() else ():
        (out / name).unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """The environment of processes that run this checkout's command line."""
    packages = map(str, (ROOT, ROOT / "kernels", ROOT / "calibration"))
    kept = {key: value for key, value in os.environ.items() if key != NO_PROGRAMS[0]}
    return kept | {"PYTHONPATH": os.pathsep.join(packages)}


def _zeros(place: Path) -> None:
    """The demo model with matrices, a norm, rows and columns of zeros, and two huge weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO, place)
    tensors = load_file(DEMO / "model.safetensors")
    layer = "model.layers.{}.{}.weight".format
    tensors[layer(2, "self_attn.o_proj")].zero_()
    tensors[layer(2, "mlp.down_proj")].zero_()
    tensors[layer(0, "input_layernorm")][7] = 0
    tensors[layer(1, "post_attention_layernorm")].zero_()
    tensors[layer(0, "mlp.gate_proj")][::5] = 0
    tensors[layer(0, "mlp.up_proj")][:, 64:128] = 0
    tensors[layer(1, "self_attn.q_proj")][3, 5] = 30.0
    tensors[layer(1, "mlp.down_proj")][0, 0] = -30.0
    save_file(tensors, place / "model.safetensors", {"format": "pt"})


def _released(place: Path) -> None:
    """The released model in float16, and beside it the file that it was published as; needs the package index."""
    subprocess.run(
        [ROOT / "scripts" / "released_model", place], check=True, stdout=subprocess.DEVNULL
    )
    for name in (*RECORDS, "README.md"):  # of the decoding
        (place / name).unlink(missing_ok=True)
    published = place.with_name(f"{place.name}.gguf")
    published.rename(place.parents[1] / published.name)


def _peers() -> list[tuple[str, str]]:
    from tests.peers import FIXTURES

    return [(path.stem, PEERS.get(path.stem, "")) for path in sorted(FIXTURES.glob("*.json"))]
