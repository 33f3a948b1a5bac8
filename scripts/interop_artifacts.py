"""Make one artifact per layout with the log-probabilities that our own decoding gives, and tabulate the engines.

python scripts/interop_artifacts.py make MODEL DIRECTORY
python scripts/interop_artifacts.py table DIRECTORY TABLE.md
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

# name -> (scheme, format, extra options); `source` is the model itself, the noise floor of an engine.
ARTIFACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ct-int4-g128": ("int4:g128:sym", "compressed-tensors", ()),
    "ct-int4-g128-asym": ("int4:g128:asym", "compressed-tensors", ()),
    "ct-int4-row": ("int4:row:sym", "compressed-tensors", ()),
    "ct-int3-g128": ("int3:g128:sym", "compressed-tensors", ()),
    "ct-int2-g64": ("int2:g64:sym", "compressed-tensors", ()),
    "ct-int8-g128": ("int8:g128:sym", "compressed-tensors", ()),
    "ct-mixed-4-8": ("int4:g128:sym", "compressed-tensors", ("--rule", "down_proj=int8:g128:sym")),
    "ct-head-int8": ("int4:g128:sym", "compressed-tensors", ("--head", "int8:g128:sym")),
    "gptq-int4-g128": ("int4:g128:sym", "gptq", ()),
    "gptq-int4-g32": ("int4:g32:sym", "gptq", ()),
    "gptq-int4-skipped": ("int4:g128:sym", "gptq", ("--ignore", "layers.0.mlp.down_proj")),
    "gptq-int4-asym": ("int4:g128:asym", "gptq", ()),
    "gptq-int8-g128": ("int8:g128:sym", "gptq", ()),
    "gptq-int3-g128": ("int3:g128:sym", "gptq", ()),
    "gptq-v2-int4-asym": ("int4:g128:asym", "gptq_v2", ()),
    "awq-int4-g128": ("int4:g128:asym", "awq", ()),
    "awq-int4-sym": ("int4:g64:sym", "awq", ()),
    "awq-int4-skipped": ("int4:g128:asym", "awq", ("--ignore", "layers.0.mlp.down_proj")),
    "ct-w8a8": ("W8A8", "compressed-tensors", ()),
    "ct-w8a8-static": ("W8A8_STATIC", "compressed-tensors", ()),
    "ct-fp8": ("fp8:row:sym", "compressed-tensors", ()),
    "ct-fp8-dynamic": ("FP8_DYNAMIC", "compressed-tensors", ()),
    "ct-fp8-static": ("FP8_STATIC", "compressed-tensors", ()),
    "ct-fp8-block": ("FP8_BLOCK", "compressed-tensors", ()),
    "ct-nvfp4": ("NVFP4", "compressed-tensors", ()),
    "ct-nvfp4-w4a4": ("NVFP4_W4A4", "compressed-tensors", ()),
    "ct-mxfp4": ("MXFP4", "compressed-tensors", ()),
    "ct-mxfp8": ("mxfp8", "compressed-tensors", ()),
    "fp8-block": ("FP8_BLOCK", "fp8", ()),
    "bnb-nf4": ("nf4:g64", "bnb", ()),
    "bnb-nf4-double": ("nf4:g64:sym:double", "bnb", ()),
    "bnb-fp4": ("fp4:g64", "bnb", ()),
    "bnb-int8": ("int8:row:sym", "bnb", ()),
    "mlx-int4-g64": ("int4:g64:min", "mlx", ()),
    "mlx-int3-g32-sym": ("int3:g32:sym", "mlx", ()),
    "mlx-mxfp4": ("mxfp4", "mlx", ()),
    "mlx-mxfp8": ("mxfp8", "mlx", ()),
}
PROMPT = 48  # tokens whose next-token log-probabilities are compared


def make(model: Path, directory: Path) -> None:
    """Quantize into every layout and save what our decoding says of one fixed prompt."""
    import numpy as np
    import torch

    from quantforge.cli.request import build_recipe
    from quantforge.execution import Settings
    from quantforge.pipeline import quantize
    from quantforge.runtime.load import load

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "source").unlink(missing_ok=True)
    (directory / "source").symlink_to(model.resolve())
    for name, (scheme, form, extra) in ARTIFACTS.items():
        pairs = dict(zip(extra[::2], extra[1::2], strict=True))
        recipe = build_recipe(
            None, method="rtn", scales="absmax", scheme=scheme, format=form,
            head=pairs.get("--head"), ignore=[v for k, v in pairs.items() if k == "--ignore"],
            rules=[v for k, v in pairs.items() if k == "--rule"],
        )  # fmt: skip
        quantize(str(model), recipe, directory / name, Settings(overwrite=True))
    ids = torch.arange(PROMPT)[None] * 37 % 1000 + 5
    for name in ("source", *ARTIFACTS):
        loaded = load(directory / name)
        with torch.inference_mode():
            logits = loaded.model(input_ids=ids).logits[0, :-1].float()
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        values = {"ids": ids[0].numpy(), "logprobs": chosen.numpy(), "logits": logits.numpy()}
        np.savez(directory / f"{name}.npz", **values)


def table(work: Path, out: Path) -> None:
    """Write the results of all engines that were run as one Markdown table.

    An engine may print to stdout; its results are the last line.
    """
    engines = {
        path.stem: json.loads(path.read_text().splitlines()[-1])
        for path in sorted(work.glob("*.json"))
    }
    lines = [
        "# What was seen to load",
        "",
        f"Made by `scripts/interop` with quantforge {version('quantforge')} from the bundled model, on a CPU. Cells:"
        " largest difference to our own decoding; of logits (float32) for transformers and gptqmodel, of the"
        " log-probabilities of 47 prompt tokens (bfloat16) for vLLM. `source` is the unquantized model: the engine's"
        " own noise. transformers decodes the asymmetric artifact to bfloat16 (`dequantize=True`), gptqmodel's torch"
        " kernels compute AWQ in float16. What vLLM refuses here it refuses by design (GPTQ that is not symmetric 4 or"
        " 8 bits) or for want of a CPU kernel.",
        "",
        "| artifact | " + " | ".join(engines) + " |",
        "|---|" + "---|" * len(engines),
    ]
    for name in ("source", *ARTIFACTS):
        cells = [_cell(engine["artifacts"].get(name)) for engine in engines.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *(f"- {name}: {engine['versions']}" for name, engine in engines.items())]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")


def _cell(result: dict[str, object] | None) -> str:
    if result is None:
        return "-"
    if "error" in result:
        return f"refused: {str(result['error'])[:160]}"
    return f"{result['difference']:.1e}"


if __name__ == "__main__":
    {"make": make, "table": table}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
