"""Every key of a configuration, changed one at a time, through a GGUF file into llama.cpp: is it obeyed, or refused?

    python scripts/gguf_keys.py --out FILE.jsonl [--families llama,gemma3] [--keys norm_eps,rope_parameters]

For every tiny model of `tests.gguf_models`, and with towers, each key of ``config.json``, and each that transformers'
class of configurations has beside these, is changed (`gguf_key_changes`). transformers builds the model of the changed
file with random weights; the GGUF file is then written, and llama.cpp has to compute the same. What becomes of a
change is one of

- ``no effect``: neither on transformers' logits nor on the file;
- ``same``: both compute the same, which is another thing than before; ``weak``: the change is too small to be judged;
- ``refused``: by its name; ``not built``: by transformers already;
- ``an event says so``: there is a difference, which the manifest states (a window that llama.cpp does not have);
- ``DIFFERENT``, ``LLAMA.CPP REFUSES`` or ``CRASH``: a finding. transformers obeys the key, which is neither written nor
  checked. What differs has to for three sets of weights, since experts that are used differ where scores are near.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.gguf_key_changes import ABSENT, cases

IDS = [5, 9, 41, 77, 160, 23, 11, 200, 300, 7, 19, 55, 93, 111, 64, 222, 31, 14, 250, 199, 8, 121, 42, 66]  # fmt: skip
PLACES = (11, len(IDS))  # after so many tokens the next is compared
CLOSE = 0.03  # of the deviation of log-probabilities: the engine keeps keys and values as float16
PATIENCE = 40  # seconds
SAME, WEAK, REFUSED, NO_EFFECT, UNBUILT = "same", "weak", "refused", "no effect", "not built"
TOLD = "an event says so"
DIFFERENT, UNLOADED, CRASH = "DIFFERENT", "LLAMA.CPP REFUSES", "CRASH"
FINDINGS = {DIFFERENT, UNLOADED, CRASH}


def bases() -> dict[str, dict[str, Any]]:
    """Return the configurations to begin with, by name."""
    from scripts import tiny_families
    from tests import gguf_models
    from tests.conftest import FAMILIES, MULTIMODAL_MIXTURES
    from tests.vision_models import CASES

    texts = {**gguf_models.FAMILIES, **gguf_models.WRITTEN}
    found = {name: {"model_type": kind, **values} for name, (kind, values) in texts.items()}
    for name, case in CASES.items():
        found[f"{name}-tower"] = {"model_type": case.model_type, **case.config}
    known = {**FAMILIES, **MULTIMODAL_MIXTURES}
    for name, kind, text in (
        ("gemma4-multimodal", "gemma4", {}),
        ("qwen2.5-vl", "qwen2_vl", {}),
        ("llama4-multimodal", "llama4", gguf_models.WRITTEN["llama4"][1]),
    ):
        values = known[name][1]
        own = {"model_type": kind, "text_config": text or values["text_config"]}
        found[f"{name}-whole"] = {**values, **own}
    found["kimi_k25-whole"] = tiny_families.configuration("kimi_k25").to_dict()
    return found


def _engine(pipe: Any) -> None:
    """Answer with the log-probabilities of files whose paths arrive."""
    import torch

    from quantforge.errors import InputError
    from quantforge.evaluation.llama_cpp import LlamaCpp

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    while path := pipe.recv():
        try:
            engine = LlamaCpp(Path(path), 64)
            pipe.send([engine.top(IDS[:place], 1 << 20) for place in PLACES])
        except InputError as error:
            pipe.send(str(error))


class Engine:
    """llama.cpp in a process of its own, which may crash or hang."""

    def __init__(self) -> None:
        self._process: Any = None

    def answers(self, path: Path) -> list[dict[int, float]] | str:
        """Return the log-probabilities after each of `PLACES`, or why there are none."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_engine, args=(other,), daemon=True)
            self._process.start()
            other.close()
        try:
            self._pipe.send(str(path))
            if self._pipe.poll(PATIENCE):
                found: list[dict[int, float]] | str = self._pipe.recv()
                return found
            said = f"no answer in {PATIENCE} s"
        except (EOFError, OSError):
            said = "it crashed"
        self._process.kill()
        self._process = None
        return said


class Sweep:
    """One family: its model of every changed configuration, exported and compared."""

    def __init__(self, engine: Engine, work: Path) -> None:
        self._engine, self._work = engine, work
        self._logits: Any = None  # of the configuration to begin with
        self._digest = b""  # of its file

    def begin(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the configuration as it is published, and all that its class knows."""
        from transformers import AutoConfig

        config = AutoConfig.for_model(**values)
        config.save_pretrained(self._work)
        return json.loads((self._work / "config.json").read_text()), config.to_dict()

    def judge(self, raw: Mapping[str, Any]) -> tuple[str, str]:
        """Return what becomes of a configuration, and why; the first is the one to begin with."""
        for seed in range(3):
            verdict, why = self._judge(raw, seed)
            if verdict != DIFFERENT:
                return (SAME if seed and verdict in {WEAK, NO_EFFECT} else verdict), why
        return verdict, why

    def _judge(self, raw: Mapping[str, Any], seed: int) -> tuple[str, str]:
        try:
            logits = self._build(raw, seed)
        except Exception as error:
            return UNBUILT, f"{type(error).__name__}: {error}"[:200]
        if not logits.isfinite().all():
            return UNBUILT, "logits are not finite"
        effect = float("inf")
        if self._logits is None:
            self._logits = logits
        elif not seed:
            effect = (logits - self._logits).abs().max().item()
        return self._compared(logits.log_softmax(-1), effect)

    def _compared(self, expected: Any, effect: float) -> tuple[str, str]:
        """Export, and compare with llama.cpp; ``effect`` is that of the change on logits."""
        from quantforge import api
        from quantforge.errors import QuantForgeError
        from quantforge.recipe import CalibrationOptions, Recipe
        from quantforge.settings import Settings

        out, spread = self._work / "x.gguf", expected.std().item()
        recipe = Recipe(format="gguf", type="F32", calibration=CalibrationOptions(source="none"))
        try:
            api.export(str(self._work / "m"), recipe, out, Settings(overwrite=True))
        except QuantForgeError as error:
            return (REFUSED if effect else NO_EFFECT), str(error)[:300]
        except Exception:
            return CRASH, traceback.format_exc()[-400:]
        digest = hashlib.sha256(out.read_bytes()).digest()
        if not effect and digest == self._digest:
            return NO_EFFECT, ""
        self._digest = self._digest or digest
        found = self._engine.answers(out)
        if isinstance(found, str):
            return UNLOADED, found[:300]
        events = json.loads(Path(f"{out}.quantforge.json").read_text())["events"]
        pairs = [
            (row, token, value) for row, one in enumerate(found) for token, value in one.items()
        ]
        far = max(abs(value - expected[row, token].item()) for row, token, value in pairs)
        said = [
            f"by {far:.4f}, spread {spread:.2f}, effect {effect:.4f}",
            *(item["kind"] for item in events),
        ]
        if far > CLOSE * spread:
            return (TOLD if events else DIFFERENT), " ".join(said)
        seen = SAME if effect > 2 * CLOSE * spread else WEAK
        return (seen if effect else NO_EFFECT), " ".join(said)

    def _build(self, raw: Mapping[str, Any], seed: int) -> Any:
        """Write the model, and return its logits after each of `PLACES`."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        from tests.conftest import randomize, tiny_tokenizer

        place = self._work / "m"
        if not place.exists():
            tiny_tokenizer().save_pretrained(place)
        (place / "config.json").write_text(json.dumps(raw))
        config = AutoConfig.from_pretrained(place)
        auto = AutoModelForImageTextToText if "text_config" in raw else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32).eval()
        randomize(model, seed)
        with torch.no_grad():
            found = model(torch.tensor([IDS])).logits[0, [number - 1 for number in PLACES]].double()
        for old in place.glob("*.safetensors*"):
            old.unlink()
        model.save_pretrained(place)
        stated = {**raw, "architectures": [type(model).__name__]}
        (place / "config.json").write_text(json.dumps(stated))
        return found


def main() -> None:
    """Judge every change, append a line for each to a file, and end with 1 where there is a finding."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", default="")
    parser.add_argument("--keys", default="")
    options = parser.parse_args()
    families, keys = ({*text.split(",")} - {""} for text in (options.families, options.keys))
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    engine, counts = Engine(), Counter[str]()
    with options.out.open("a") as out, tempfile.TemporaryDirectory() as work:
        for name, values in bases().items():
            if families and name not in families:
                continue
            sweep = Sweep(engine, Path(work) / name)
            raw, known = sweep.begin(values)
            for key, value, changed in (("(base)", None, raw), *cases(raw, known)):
                if keys and not {"(base)", *keys} & {key, key.rpartition(".")[2]}:
                    continue
                verdict, why = sweep.judge(changed)
                counts[verdict] += 1
                stated = "(absent)" if value is ABSENT else value
                row = {"family": name, "key": key, "value": stated, "verdict": verdict, "why": why}
                print(json.dumps(row), file=out, flush=True)
                if verdict in FINDINGS:
                    print(*row.values(), flush=True)
    print(dict(counts))
    sys.exit(bool(FINDINGS & counts.keys()))


if __name__ == "__main__":
    main()
