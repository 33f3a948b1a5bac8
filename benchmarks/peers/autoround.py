"""One run of AutoRound, in its own environment: quantize a model on given token rows and save it.

    python benchmarks/peers/autoround.py MODEL ROWS.npy OUT ITERATIONS int4:g128:sym

Everything else as AutoRound has it, but for ``torch.compile``, which is off. Prints one JSON line with the seconds of
quantizing and saving, loading and imports excluded, and those of the processor.
"""

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Quantize and save."""
    model_path, rows_path, out, iterations, scheme = sys.argv[1:]
    bits, group, zero = scheme.split(":")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    rows = torch.from_numpy(np.load(rows_path))
    start, used = time.monotonic(), time.process_time()
    rounder = AutoRound(
        model,
        tokenizer,
        scheme={
            "bits": int(bits.removeprefix("int")),
            "group_size": int(group.removeprefix("g")),
            "sym": zero == "sym",
            "data_type": "int",
        },
        iters=int(iterations),
        dataset=[*rows.split(8)],
        nsamples=len(rows),
        seqlen=rows.shape[1],
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(out, format="auto_round")
    print(
        json.dumps(
            {
                "seconds": time.monotonic() - start,
                "processor": time.process_time() - used,
                "versions": {
                    name: version(name) for name in ("auto-round", "transformers", "torch")
                },
            }
        )
    )


if __name__ == "__main__":
    main()
