"""Defects in what describes the weights: keys and the table of GGUF, headers of safetensors, raw bytes of any file."""

from __future__ import annotations

import random
from typing import Any

from scripts.defects.files import Copy, Shard
from scripts.defects.gguf_files import ARRAY, STRING, Container, Key
from scripts.defects.numbers import data_bytes

# Keys that a file may gain: type, type of items, value. {} is the architecture.
GAINED: dict[str, tuple[int, int, Any]] = {
    "{}.rope.freq_base": (6, 0, 500000.0),
    "{}.rope.scaling.type": (8, 0, b"linear"),
    "{}.rope.scaling.factor": (6, 0, 2.0),
    "{}.rope.dimension_count": (4, 0, 32),
    "{}.attention.sliding_window": (4, 0, 8),
    "{}.attention.scale": (6, 0, 0.5),
    "{}.attention.key_length": (4, 0, 32),
    "{}.attn_logit_softcapping": (6, 0, 30.0),
    "{}.final_logit_softcapping": (6, 0, 30.0),
    "{}.logit_scale": (6, 0, 0.5),
    "{}.expert_count": (4, 0, 4),
    "{}.context_length": (4, 0, 131072),
    "tokenizer.chat_template": (8, 0, b"{{ 'visit' }}"),
    "tokenizer.chat_template.tool_use": (8, 0, b"{{ 'visit' }}"),
    "tokenizer.ggml.add_bos_token": (7, 0, True),
    "tokenizer.ggml.add_eos_token": (7, 0, True),
    "tokenizer.ggml.add_space_prefix": (7, 0, True),
    "tokenizer.ggml.pre": (8, 0, b"llama-bpe"),
    "tokenizer.ggml.eot_token_id": (4, 0, 5),
    "tokenizer.ggml.padding_token_id": (4, 0, 7),
    "tokenizer.ggml.unknown_token_id": (4, 0, 9),
    "general.alignment": (4, 0, 64),
    "general.sampling.temp": (6, 0, 9.0),
    "general.description": (8, 0, b"harmless"),
    "general.url": (8, 0, b"https://example.org"),
    "split.count": (2, 0, 2),
    "adapter.type": (8, 0, b"lora"),
    "x.note": (8, 0, b"harmless"),
}


def gguf_keys(copy: Copy, chance: random.Random) -> str | None:
    """Change, add or remove a key of a GGUF file."""
    if not copy.one_file:
        return None
    container = Container(copy)
    keys = {key.name: key for key in container.keys}
    turn = chance.random()
    if turn < 0.25:
        family = next(k.value.decode() for k in container.keys if k.name == "general.architecture")
        name = chance.choice([n for n in GAINED if n.format(family) not in keys])
        kind, items, value = GAINED[name]
        container.keys.append(Key(name.format(family), kind, items, value))
        text = f"{name.format(family)} = {value!r} added"
    elif turn < 0.4:
        key = chance.choice(container.keys)
        container.keys.remove(key)
        text = f"{key.name} removed"
    else:
        key = chance.choice(container.keys)
        text = f"{key.name}: {_altered(key, chance)}"
    container.save()
    return text


def _altered(key: Key, chance: random.Random) -> str:
    if key.type == ARRAY:
        at, other = chance.sample(range(len(key.value)), 2) if len(key.value) > 1 else (0, 0)
        if chance.random() < 0.6:
            key.value[at], key.value[other] = key.value[other], key.value[at]
            if key.value[at] != key.value[other]:
                return f"items {at} and {other} exchanged"
        key.value[at] = _changed(key.items, key.value[at], chance)
        return f"item {at} = {key.value[at]!r}"
    old = key.value
    key.value = _changed(key.type, old, chance)
    return f"{key.value!r} for {old!r}"[:120]


def _changed(kind: int, value: Any, chance: random.Random) -> Any:
    if kind == STRING:
        cut = chance.randrange(len(value) + 1)
        return value[:cut] + b"~" + value[cut:]
    if kind == 7:
        return not value
    if kind in {6, 12}:
        return value * chance.choice((1.1, 2.0, 0.5, 10.0)) or 1.0
    largest = {0: 255, 1: 127, 2: 65535, 3: 32767}.get(kind, 2**31 - 1)
    return max(0, min(largest, chance.choice((value + 1, value * 2 + 1, value // 2, value - 1, 0))))


def table(copy: Copy, chance: random.Random) -> str | None:
    """Change the table of a GGUF file: a type, a name, dimensions, or where two tensors lie."""
    if not copy.one_file:
        return None
    container = Container(copy)
    first, second = chance.sample(container.tensors, 2)
    kind = chance.choice(("type", "exchange", "name", "dims", "dims order", "offset"))
    if kind == "type":
        # Of the same size, so that the file stays whole: Q4_0 and IQ4_NL, IQ4_NL's sizes, F16 and BF16.
        alike = {2: 20, 20: 2, 1: 30, 30: 1}
        first = chance.choice([t for t in container.tensors if t.type in alike] or [first])
        first.type = alike.get(first.type, first.type ^ 1)
        text = f"{first.name}: type {first.type}"
    elif kind == "exchange":
        pairs = [(a, b) for a in container.tensors for b in container.tensors
                 if a.name < b.name and a.dims == b.dims and a.type == b.type]  # fmt: skip
        first, second = chance.choice(pairs or [(first, second)])
        first.name, second.name = second.name, first.name
        text = f"{first.name} and {second.name} exchanged by name"
    elif kind == "name":
        text = f"{first.name} renamed"
        first.name += "~"
    elif kind == "dims":
        first.dims[0] *= 2
        text = f"{first.name}: dims {first.dims}"
    elif kind == "dims order":
        several = [t for t in container.tensors if len(t.dims) > 1 and t.dims[0] != t.dims[1]]
        first = chance.choice(several)
        first.dims.reverse()
        text = f"{first.name}: dims {first.dims}"
    else:
        first.offset += container.alignment
        text = f"{first.name}: offset {first.offset}"
    container.save()
    return f"table: {text}"


def header(copy: Copy, chance: random.Random) -> str | None:
    """Change the header of a file of safetensors: a type of the same size, a shape, names, places, metadata."""
    files = [name for name in copy.names() if name.endswith(".safetensors")]
    if not files:
        return None
    shard = Shard(copy, chance.choice(files))
    names = sorted(shard.entries)
    name, other = chance.sample(names, 2)
    entry = shard.header[name]
    kind = chance.choice(("type", "shape", "exchange", "rename", "drop", "metadata"))
    alike = {"F16": "BF16", "BF16": "F16", "I32": "F32", "F32": "I32", "U8": "I8", "I8": "U8", "F8_E4M3": "F8_E5M2",
             "I64": "F64"}  # fmt: skip
    if kind == "type":
        entry["dtype"] = alike.get(entry["dtype"], "I32")
        text = f"{name}: type {entry['dtype']}"
    elif kind == "shape":
        entry["shape"] = (
            [*entry["shape"][::-1]] if len(set(entry["shape"])) > 1 else [1, *entry["shape"]]
        )
        text = f"{name}: shape {entry['shape']}"
    elif kind == "exchange":
        shard.header[name], shard.header[other] = shard.header[other], entry
        text = f"{name} and {other} exchanged"
    elif kind == "rename":
        shard.header[f"{name}~"] = shard.header.pop(name)
        text = f"{name} renamed"
    elif kind == "drop":
        last = max(names, key=lambda n: shard.header[n]["data_offsets"][1])
        first = shard.header.pop(last)["data_offsets"][0]
        del shard.data[first:]
        text = f"{last} dropped"
    else:
        shard.header["__metadata__"] = {"format": chance.choice(("tf", "mlx", "np"))}
        text = f"metadata {shard.header['__metadata__']}"
    shard.save()
    return f"header: {text}"


def described(copy: Copy, chance: random.Random) -> str | None:
    """Change what describes the weights: the configuration of the quantization, a header, a table."""
    from scripts.defects.beside import quantization

    if copy.one_file:
        return table(copy, chance)
    return quantization(copy, chance) if chance.random() < 0.7 else header(copy, chance)


def raw(copy: Copy, chance: random.Random) -> str | None:
    """Overwrite, drop or append bytes: in the weights as often as in a header or any file beside them."""
    if chance.random() < 0.5:
        return data_bytes(copy, chance)
    name = chance.choice(copy.names())
    data = copy.read(name)
    if not data:
        return None
    heads = {"GGUF": len(Container(copy).header()) if copy.one_file else 0}
    limit = len(data)
    if name.endswith(".safetensors"):
        limit = 8 + int.from_bytes(data[:8], "little")
    elif copy.one_file:
        limit = heads["GGUF"]
    kind = chance.choice(("bits", "bits", "random", "cut", "append"))
    at, length = chance.randrange(limit), int(2 ** chance.uniform(0, 8))
    if kind == "bits":
        data[at] ^= 1 << chance.randrange(8)
        text = f"one bit at {at}"
    elif kind == "random":
        length = min(length, limit - at)
        data[at : at + length] = chance.randbytes(length)
        text = f"{length} random bytes at {at}"
    elif kind == "cut":
        del data[len(data) - min(len(data), length) :]
        text = f"{length} bytes cut from the end"
    else:
        data += chance.randbytes(length)
        text = f"{length} bytes appended"
    copy.write(name, data)
    return f"{name or copy.path.name}: {text}"
