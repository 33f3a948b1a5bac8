"""Healthy artifacts: ours by every method and format, and what other tools write; made once in a folder, then kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from quantforge import verbs
from quantforge.recipe import CalibrationOptions, Recipe, Rule
from quantforge.settings import Settings

ROOT = Path(__file__).parents[2]
WREN = ROOT.parent / "shared" / "models" / "wren"
DEMO = ROOT / "models" / "demo"
ROWS = CalibrationOptions(samples=8, length=128)
SHORT = CalibrationOptions(samples=6, length=24, micro_batch=4)

# Family of the table, name, source, recipe. What has a family is damaged; all are looked at for false alarms.
CT, CT8, FP, NV, MX = (
    "compressed-tensors 2 to 4 bits",
    "compressed-tensors 8 bits",
    "compressed-tensors fp8",
    "nvfp4",
    "mxfp4",
)
GPTQ, AWQ, BNB, MLX, TILES, GGUF = "gptq", "awq", "bitsandbytes", "mlx", "fp8 tiles", "gguf"
FAMILIES = (CT, CT8, FP, NV, MX, GPTQ, AWQ, BNB, MLX, TILES, GGUF)
Made = tuple[str, str, str, dict[str, Any]]
OURS: tuple[Made, ...] = (
    (CT, "ct-int4", "wren", {"scheme": "int4:g128:sym"}),
    (CT, "ct-int4-awq", "wren", {"method": "awq", "scheme": "int4:g32:asym"}),
    (CT, "ct-int4-gptq", "wren", {"method": "gptq", "scheme": "int4:g128:sym"}),
    (CT, "ct-int4-awq-gptq", "demo", {"method": "awq+gptq", "scheme": "int4:g64:sym"}),
    (CT, "ct-int4-row", "wren", {"scheme": "int4:row:sym", "scales": "absmax"}),
    (CT, "ct-int3", "wren", {"method": "gptq", "scheme": "int3:g64:sym"}),
    (CT, "ct-int2", "wren", {"method": "awq+gptq", "scheme": "int2:g32:asym"}),
    (CT, "ct-int4-qwen2", "qwen2", {"scheme": "int4:g32:sym"}),
    (CT, "ct-int4-gemma3", "gemma3", {"method": "awq", "scheme": "int4:g32:sym"}),
    ("", "ct-int5", "wren", {"scheme": "int5:g128:asym"}),
    ("", "ct-int6", "demo", {"scheme": "int6:g64:sym"}),
    ("", "ct-int7", "wren", {"method": "gptq", "scheme": "int7:g128:sym"}),
    ("", "ct-int4-smooth-gptq", "wren", {"method": "smooth+gptq", "scheme": "int4:g128:sym"}),
    ("", "ct-mixed", "wren", {"scheme": "int4:g128:sym", "rules": (Rule("down_proj", "int8:g128:sym"),)}),
    ("", "ct-head", "wren", {"scheme": "int4:g128:sym", "head": "int8:g128:sym", "embedding": "keep"}),
    ("", "ct-llama", "llama", {"method": "awq", "scheme": "int4:g32:asym"}),
    ("", "ct-phi3", "phi3", {"method": "awq", "scheme": "int4:g32:sym"}),
    ("", "ct-gpt2", "gpt2", {"method": "awq", "scheme": "int4:g32:sym"}),
    ("", "ct-qwen3", "qwen3", {"method": "gptq", "scheme": "int4:g32:sym"}),
    ("", "ct-int2-tiny", "llama-wide", {"scheme": "int2:g32:asym"}),
    (CT8, "ct-int8", "demo", {"scheme": "int8:g128:sym"}),
    (CT8, "ct-w8a8", "wren", {"method": "smooth", "scheme": "W8A8"}),
    (CT8, "ct-w8a8-static", "wren", {"scheme": "W8A8_STATIC"}),
    (CT8, "ct-int8-llama", "llama", {"scheme": "int8:row:sym"}),
    ("", "ct-int8-awq", "wren", {"method": "awq", "scheme": "int8:g128:sym"}),
    (FP, "ct-fp8-dynamic", "wren", {"scheme": "FP8_DYNAMIC"}),
    (FP, "ct-fp8-static", "wren", {"scheme": "FP8_STATIC", "kv_cache": "fp8"}),
    (FP, "ct-fp8-block", "wren", {"scheme": "FP8_BLOCK"}),
    ("", "ct-mxfp8", "wren", {"scheme": "mxfp8"}),
    ("", "ct-fp8-gptq", "demo", {"method": "gptq", "scheme": "fp8:row:sym"}),
    (NV, "ct-nvfp4", "wren", {"scheme": "NVFP4"}),
    (NV, "ct-nvfp4-gptq", "demo", {"method": "gptq", "scheme": "NVFP4"}),
    (NV, "ct-nvfp4-w4a4", "wren", {"scheme": "NVFP4_W4A4"}),
    (MX, "ct-mxfp4", "wren", {"scheme": "MXFP4"}),
    (MX, "ct-mxfp4-awq", "demo", {"method": "awq", "scheme": "MXFP4"}),
    (GPTQ, "gptq-int4", "wren", {"method": "gptq", "scheme": "int4:g128:sym", "format": "gptq"}),
    (GPTQ, "gptq-v2-asym", "wren", {"method": "gptq", "scheme": "int4:g64:asym", "format": "gptq_v2"}),
    (GPTQ, "gptq-int8", "demo", {"scheme": "int8:g128:asym", "format": "gptq"}),
    (GPTQ, "gptq-int3", "wren", {"method": "gptq", "scheme": "int3:g64:sym", "format": "gptq"}),
    (GPTQ, "gptq-llama", "llama", {"method": "gptq", "scheme": "int4:g32:asym", "format": "gptq"}),
    ("", "gptq-int2", "wren", {"method": "gptq", "scheme": "int2:g32:asym", "format": "gptq"}),
    (AWQ, "awq-asym", "wren", {"method": "awq", "scheme": "int4:g128:asym", "format": "awq"}),
    (AWQ, "awq-rtn", "demo", {"scheme": "int4:g64:sym", "format": "awq"}),
    (AWQ, "awq-awq-gptq", "wren", {"method": "awq+gptq", "scheme": "int4:g64:asym", "format": "awq"}),
    (BNB, "bnb-nf4", "wren", {"scheme": "nf4:g64", "format": "bnb"}),
    (BNB, "bnb-nf4-double", "wren", {"scheme": "nf4:g64:sym:double", "format": "bnb"}),
    (BNB, "bnb-int8", "wren", {"scheme": "int8:row:sym", "format": "bnb"}),
    (BNB, "bnb-llm-int8", "wren", {"scheme": "LLM_INT8", "format": "bnb"}),
    ("", "bnb-fp4", "demo", {"scheme": "fp4:g64", "format": "bnb"}),
    ("", "bnb-nf4-gptq", "wren", {"method": "gptq", "scheme": "nf4:g64", "format": "bnb"}),
    (MLX, "mlx-int4", "wren", {"scheme": "int4:g64:min", "format": "mlx"}),
    (MLX, "mlx-int8", "demo", {"scheme": "int8:g64:min", "format": "mlx"}),
    (MLX, "mlx-mxfp4", "wren", {"scheme": "mxfp4", "format": "mlx"}),
    ("", "mlx-int3", "wren", {"scheme": "int3:g32:sym", "format": "mlx"}),
    ("", "mlx-int2", "wren", {"method": "gptq", "scheme": "int2:g32:min", "format": "mlx"}),
    (TILES, "fp8-tiles", "wren", {"scheme": "FP8_BLOCK", "format": "fp8"}),
    (TILES, "fp8-tiles-demo", "demo", {"scheme": "FP8_BLOCK", "format": "fp8"}),
    (GGUF, "Q4_0.gguf", "wren", {"type": "Q4_0", "format": "gguf"}),
    (GGUF, "Q8_0.gguf", "wren", {"type": "Q8_0", "format": "gguf"}),
    (GGUF, "Q4_K_M.gguf", "wren", {"type": "Q4_K_M", "format": "gguf"}),
    (GGUF, "Q2_K.gguf", "wren", {"type": "Q2_K", "format": "gguf"}),
    (GGUF, "IQ4_XS.gguf", "demo", {"type": "IQ4_XS", "format": "gguf"}),
    (GGUF, "IQ4_NL.gguf", "wren", {"type": "IQ4_NL", "format": "gguf"}),
    (GGUF, "Q5_K_M.gguf", "wren", {"type": "Q5_K_M", "format": "gguf", "scales": "reference"}),
    ("", "Q6_K.gguf", "wren", {"type": "Q6_K", "format": "gguf"}),
    ("", "Q3_K_M.gguf", "demo", {"type": "Q3_K_M", "format": "gguf"}),
    ("", "Q4_0-awq.gguf", "wren", {"method": "awq", "type": "Q4_0", "format": "gguf"}),
    ("", "Q5_1.gguf", "demo", {"type": "Q5_1", "format": "gguf"}),
    (GGUF, "Q4_0-qwen2.gguf", "qwen2", {"type": "Q4_0", "format": "gguf"}),
)  # fmt: skip
# Artifacts of other tools that are kept with the tests, and the families of those that are damaged.
PEERS = {"gptqmodel-desc-act": GPTQ, "gptqmodel-awq": AWQ, "mlx-4bit": MLX, "llmc-w8a8-smooth": CT8,
         "llama.cpp-q8_0": GGUF, "bnb-nf4": BNB, "llmc-fp8-block": FP, "autoround-asym": GPTQ}  # fmt: skip


class Healthy:
    """A healthy artifact, made when it is first asked for; ``family`` is empty for those that are not damaged."""

    def __init__(self, name: str, family: str, make: Callable[[], tuple[Path, Path]]) -> None:
        self.name, self.family, self._make = name, family, cache(make)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._make()[0]

    @property
    def source(self) -> Path:
        """What it was made from."""
        return self._make()[1]


class Shop:
    """Makes artifacts in a folder."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.model = cache(self._model)

    def all(self, *, only: str = "") -> Iterator[Healthy]:
        """Every healthy artifact whose name contains ``only``."""
        for family, name, source, values in OURS:
            if only in name:
                yield Healthy(name, family, partial(self._ours, name, source, values))
        for name, family in self._peers().items():
            if only in name:
                yield Healthy(name, family, partial(self._peer, name))
        from scripts.defects.others import OTHERS

        for name, (family, source, make) in OTHERS.items():
            if only in name:
                yield Healthy(name, family, partial(self._other, name, source, make))

    def _other(
        self, name: str, source: str, make: Callable[[Path, Path], Path]
    ) -> tuple[Path, Path]:
        model = self.model(source)
        return _whole(self._work / "others" / name, lambda place: make(model, place)), model

    def _ours(self, name: str, source: str, values: dict[str, Any]) -> tuple[Path, Path]:
        model, out = self.model(source), self._work / "ours" / name
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            rows = ROWS if source in {"wren", "demo"} else SHORT
            recipe = Recipe(**{"calibration": rows, **values})
            verbs.quantize(str(model), recipe, out, Settings())
        return out, model

    def _model(self, name: str) -> Path:
        if name in {"wren", "demo"}:
            return (WREN if name == "wren" and WREN.exists() else DEMO).resolve()
        from tests.conftest import make_tiny

        return _whole(self._work / "models" / name, lambda place: make_tiny(name, place))

    @staticmethod
    def _peers() -> dict[str, str]:
        from tests.peers import FIXTURES

        return {path.stem: PEERS.get(path.stem, "") for path in sorted(FIXTURES.glob("*.json"))}

    def _peer(self, name: str) -> tuple[Path, Path]:
        import json

        from tests import peers

        source = json.loads((peers.FIXTURES / f"{name}.json").read_text())["source"]
        made = _whole(self._work / "peers" / source, lambda place: peers.make(source, place))
        folder = peers.FIXTURES / name
        kept = self._work / "fixtures" / (name if folder.is_dir() else f"{name}.gguf")
        if not kept.exists():  # beside the copies, so that links can be made
            kept.parent.mkdir(parents=True, exist_ok=True)
            if folder.is_dir():
                shutil.copytree(folder, kept)
            else:
                shutil.copy(folder.with_name(f"{name}.gguf"), kept)
        return kept, made


def _whole(out: Path, make: Any) -> Path:
    """Make something that appears whole or not at all."""
    if not out.exists():
        stage = out.with_name(f"{out.name}.part")
        shutil.rmtree(stage, ignore_errors=True)
        stage.parent.mkdir(parents=True, exist_ok=True)
        made = make(stage)
        (made if isinstance(made, Path) else stage).rename(out)
    return out
