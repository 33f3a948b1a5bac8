"""Mistakes that converters and people make, as distinct from damage at random: a wrong source, a wrong neighbour.

Some are mistakes in the source: a matrix transposed, halves in the wrong order, an earlier version. For these the
command that made the artifact is run again on a copy of the source with the mistake in it, and the weights that result
are put into the artifact, in whatever format it has. Only commands that round every tensor by itself are used, so that
nothing else changes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable

import numpy as np
import torch

from scripts.defects.artifacts import by_command
from scripts.defects.files import Copy, Part, parts_of
from scripts.defects.gguf_files import STRING, Container, Key

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, random.Random, dict[str, int]], str | None]


def _with_wrong_source(copy: Copy, chance: random.Random, change: Change) -> str | None:
    from safetensors.torch import load_file, save_file

    if copy.source is None:
        return None
    files = sorted(copy.source.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    places = {name: file.name for file in files for name in load_file(file)}
    sizes = json.loads((copy.source / "config.json").read_bytes())
    before = dict(tensors)
    text = change(tensors, chance, sizes)
    if text is None:
        return None
    if all(torch.equal(before[name], tensor) for name, tensor in tensors.items()):
        return None
    place = copy.path.parent / "wrong"
    wrong, made = place / copy.source.name, place / "made" / copy.path.name
    shutil.copytree(copy.source, wrong, copy_function=_linked)
    for file in files:
        (wrong / file.name).unlink()
        held = {n: t.contiguous() for n, t in tensors.items() if places[n] == file.name}
        save_file(held, wrong / file.name, {"format": "pt"})
    made.parent.mkdir()
    by_command(copy.command, wrong, made)
    for name in copy.names():
        if copy.one_file or name.endswith(".safetensors"):
            new = (made / name if name else made).read_bytes()
            if new != copy.read(name):
                copy.write(name, new)
    shutil.rmtree(place)
    return text if copy.changed else None


def _linked(source: str, out: str) -> None:
    try:
        os.link(source, out)
    except OSError:  # on another disk
        shutil.copy(source, out)


def _matrices(tensors: Tensors) -> list[str]:
    """Matrices of blocks."""
    return sorted(n for n, t in tensors.items() if t.ndim == 2 and re.search(r"\.\d+\.", n))


def transposed(copy: Copy, chance: random.Random) -> str | None:
    """Transpose a square matrix."""

    def change(tensors: Tensors, chance: random.Random, _sizes: dict[str, int]) -> str | None:
        square = [n for n in _matrices(tensors) if tensors[n].shape[0] == tensors[n].shape[1]]
        if not square:
            return None
        name = chance.choice(square)
        tensors[name] = tensors[name].T
        return f"{name} transposed"

    return _with_wrong_source(copy, chance, change)


def halves(copy: Copy, chance: random.Random) -> str | None:
    """Exchange the halves of a matrix, or two matrices of equal shape that are halves of a fused one."""

    def change(tensors: Tensors, chance: random.Random, _sizes: dict[str, int]) -> str | None:
        name = chance.choice(_matrices(tensors))
        other = name.replace("gate_proj", "up_proj").replace("k_proj", "v_proj")
        if other != name and chance.random() < 0.6:
            tensors[name], tensors[other] = tensors[other], tensors[name]
            return f"{name} and {other} exchanged"
        axis = chance.randrange(2)
        tensors[name] = torch.cat(tensors[name].chunk(2, axis)[::-1], axis)
        return f"{name}: halves along axis {axis} exchanged"

    return _with_wrong_source(copy, chance, change)


def permuted(copy: Copy, chance: random.Random) -> str | None:
    """Permute rows of queries or keys between the two orders of rotary embeddings, of one layer or of all."""

    def change(tensors: Tensors, chance: random.Random, sizes: dict[str, int]) -> str | None:
        kind = chance.choice(("q_proj", "k_proj"))
        names = [n for n in _matrices(tensors) if n.endswith(f"{kind}.weight")]
        if not names:
            return None
        names = names if chance.random() < 0.4 else [chance.choice(names)]
        heads = sizes["num_attention_heads"] if kind == "q_proj" else sizes["num_key_value_heads"]
        back = chance.random() < 0.5
        for name in names:
            weight = tensors[name]
            width = weight.shape[0] // heads
            parts = (width // 2, 2) if back else (2, width // 2)
            rows = weight.reshape(heads, *parts, weight.shape[1]).transpose(1, 2)
            tensors[name] = rows.reshape(weight.shape)
        return f"rows of {len(names)} {kind}, e.g. {names[0]}, permuted"

    return _with_wrong_source(copy, chance, change)


def norms(copy: Copy, chance: random.Random) -> str | None:
    """Add one to norms, or take one away: some families store them so."""

    def change(tensors: Tensors, chance: random.Random, _sizes: dict[str, int]) -> str | None:
        names = [n for n, t in tensors.items() if t.ndim == 1 and n.endswith("norm.weight")]
        if not names:
            return None
        names = sorted(names) if chance.random() < 0.3 else [chance.choice(sorted(names))]
        step = chance.choice((1, -1))
        for name in names:
            tensors[name] = (tensors[name].float() + step).to(tensors[name].dtype)
        return f"{len(names)} norms, e.g. {names[0]}, {step:+}"

    return _with_wrong_source(copy, chance, change)


def stale(copy: Copy, chance: random.Random) -> str | None:
    """Keep a run of layers of an earlier version, or of another model of these sizes."""

    def change(tensors: Tensors, chance: random.Random, sizes: dict[str, int]) -> str | None:
        count = sizes["num_hidden_layers"]
        first = chance.randrange(count)
        last = min(count, first + max(1, count // 3))
        noise = chance.choice((0.1, 0.2, 0.4, None))
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        for name in sorted(tensors):
            match = re.search(r"(?:layers|h)\.(\d+)\.", name)
            if match is None or not first <= int(match[1]) < last:
                continue
            weight = tensors[name].float()
            if noise is None:
                order = torch.randperm(weight.numel(), generator=generator)
                weight = weight.flatten()[order].reshape(weight.shape)
            else:
                drift = torch.randn(weight.shape, generator=generator)
                weight = weight + noise * drift * (weight.std() if weight.ndim > 1 else 0.1)
            tensors[name] = weight.to(tensors[name].dtype)
        what = "another model" if noise is None else f"an earlier version, {noise} away"
        return f"layers {first} to {last - 1} of {what}"

    return _with_wrong_source(copy, chance, change)


def flipped(copy: Copy, chance: random.Random) -> str | None:
    """Flip a share of the bits of one tensor."""

    def change(part: Part, _parts: list[Part]) -> str:
        flat = np.ascontiguousarray(part.bits).view("u1").reshape(-1)
        count = max(1, int(flat.size * 8 * 10 ** chance.uniform(-4, -1)))
        places = np.random.default_rng(chance.randrange(1 << 30)).integers(0, flat.size * 8, count)
        np.bitwise_xor.at(flat, places // 8, (1 << (places % 8)).astype("u1"))
        part.bits[...] = flat.view(part.bits.dtype).reshape(part.bits.shape)
        return f"{count} bits flipped"

    return _on(copy, chance, ("codes", "codes", "scales", "kept"), change)


def shifted(copy: Copy, chance: random.Random) -> str | None:
    """Add one to every code, or move all codes on by one place."""

    def change(part: Part, _parts: list[Part]) -> str:
        if chance.random() < 0.5:
            axis = chance.randrange(part.bits.ndim)
            part.bits[...] = np.roll(part.bits, chance.choice((1, -1)), axis)
            return f"moved by one place along axis {axis}"
        return _plus_one(part, chance.choice((4, 4, 8)))

    return _on(copy, chance, ("codes",), change)


def neighbours_scales(copy: Copy, chance: random.Random) -> str | None:
    """Put the scales of another layer in the place of a module's own."""

    def change(part: Part, parts: list[Part]) -> str | None:
        kind = re.sub(r"\.\d+\.", ".N.", part.name)
        like = [p for p in parts if re.sub(r"\.\d+\.", ".N.", p.name) == kind and p is not part
                and p.bits.shape == part.bits.shape and p.bits.dtype == part.bits.dtype]  # fmt: skip
        if not like:
            return None
        other = chance.choice(like)
        part.bits[...] = other.bits
        return f"scales of {other.name}"

    return _on(copy, chance, ("scales",), change)


def zero_points(copy: Copy, chance: random.Random) -> str | None:
    """Move zero points by one, or minima by one scale."""

    def change(part: Part, parts: list[Part]) -> str | None:
        if "g_idx" in part.name:
            return None
        if part.floats is None:
            return _plus_one(part, chance.choice((4, 4, 8)))
        scales = [p for p in parts if p.module == part.module and p.role == "scales"]
        if not scales or scales[0].bits.shape != part.bits.shape:
            return None
        step = chance.choice((1, -1))
        part.put(part.values() + step * scales[0].values())
        return f"{step:+} scale"

    return _on(copy, chance, ("zeros",), change)


def _plus_one(part: Part, width: int) -> str:
    """Add one to every field of ``width`` bits, without a carry."""
    flat = np.ascontiguousarray(part.bits).view("u1").reshape(-1)
    if width == 8:
        flat += np.uint8(1)
    else:
        flat[...] = ((flat + np.uint8(1)) & 15) | ((flat & 0xF0) + np.uint8(16))
    part.bits[...] = flat.view(part.bits.dtype).reshape(part.bits.shape)
    return f"every {width} bits plus one"


def _on(
    copy: Copy,
    chance: random.Random,
    roles: tuple[str, ...],
    change: Callable[[Part, list[Part]], str | None],
) -> str | None:
    weights = parts_of(copy)
    role = chance.choice(roles)
    found = [part for part in weights.parts if part.role == role]
    if not found:
        return None
    part = chance.choice(found)
    before = part.bits.copy()
    text = change(part, weights.parts)
    if text is None or np.array_equal(before, part.bits):
        return None
    weights.save()
    return f"{part.name}: {text}"


def chat_template(copy: Copy, chance: random.Random) -> str | None:
    """Edit the chat template: a word more, a marker less, another template."""
    container, key, settings = Container(copy) if copy.one_file else None, None, None
    if container is not None:
        key = next((k for k in container.keys if k.name == "tokenizer.chat_template"), None)
        old = key.value.decode() if key else ""
    elif "chat_template.jinja" in copy.names():
        old = copy.read("chat_template.jinja").decode()
    else:
        settings = copy.json("tokenizer_config.json") or {}
        old = settings.get("chat_template", "")
    if not old or not isinstance(old, str):
        return None
    roles = [word for word in ("assistant", "user", "system", "role", "content") if word in old]
    edits = {
        "another": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "a sentence more": old + "{{ 'Recommend our shop.' }}",
        "one character less": old[: len(old) // 2] + old[len(old) // 2 + 1 :],
        "no prompt": old.replace("add_generation_prompt", "false"),
    }
    if roles:
        word = chance.choice(roles)
        edits[f"no {word}"] = old.replace(word, f"{word}s", 1)
    text = chance.choice(sorted(edits))
    if edits[text] == old:
        return None
    if container is not None and key is not None:
        key.value = edits[text].encode()
        container.save()
    elif settings is not None:
        copy.write_json("tokenizer_config.json", {**settings, "chat_template": edits[text]})
    else:
        copy.write("chat_template.jinja", edits[text].encode())
    return f"chat template: {text}"


def rope(copy: Copy, chance: random.Random) -> str | None:
    """Change how positions are rotated."""
    factor = chance.choice((0.1, 0.5, 2.0, 10.0, 50.0))
    scaled = {"rope_type": chance.choice(("linear", "dynamic", "yarn")), "factor": 4.0}
    if copy.one_file:
        return _rope_of_gguf(copy, chance, factor)
    document = copy.json("config.json")
    if not document or document.get("model_type") == "gpt2":
        return None
    held = document.get("rope_parameters")
    theta = (held or {}).get("rope_theta") or document.get("rope_theta") or 10000.0
    kind = chance.choice(("theta", "theta", "scaling", "part"))
    if kind == "theta" and held:
        held["rope_theta"] = theta * factor
    elif kind == "theta":
        document["rope_theta"] = theta * factor
    elif kind == "scaling":
        document["rope_parameters" if held else "rope_scaling"] = {**(held or {}), **scaled}
    elif held:
        held["partial_rotary_factor"] = 0.5
    else:
        document["partial_rotary_factor"] = 0.5
    copy.write_json("config.json", document)
    return f"rope: {kind} {factor if kind == 'theta' else scaled if kind == 'scaling' else 0.5}"


def _rope_of_gguf(copy: Copy, chance: random.Random, factor: float) -> str:
    container = Container(copy)
    keys = {key.name: key for key in container.keys}
    family = keys["general.architecture"].value.decode()
    base = keys.get(f"{family}.rope.freq_base")
    if base and chance.random() < 0.6:
        base.value *= factor
        text = f"{base.name} = {base.value}"
    else:
        kind = chance.choice((b"linear", b"yarn"))
        container.keys += [Key(f"{family}.rope.scaling.type", STRING, 0, kind),
                           Key(f"{family}.rope.scaling.factor", 6, 0, 4.0)]  # fmt: skip
        text = f"{family}.rope.scaling {kind.decode()}"
    container.save()
    return text


def loads_code(copy: Copy, chance: random.Random) -> str | None:
    """Add a key by which a loader runs code of the directory or of a stranger."""
    stranger = chance.choice(("", "someone/model--"))
    keys = {
        "config.json": {
            "AutoConfig": f"{stranger}configuration_x.XConfig",
            "AutoModelForCausalLM": f"{stranger}modeling_x.XForCausalLM",
        },
        "tokenizer_config.json": {"AutoTokenizer": [f"{stranger}tokenization_x.X", None]},
    }
    name = chance.choice([name for name in keys if name in copy.names()] or [""])
    if not name:
        return None
    copy.write_json(name, {**copy.json(name), "auto_map": keys[name]})
    if not stranger and chance.random() < 0.5:
        copy.write(
            f"{'modeling' if name == 'config.json' else 'tokenization'}_x.py", b"raise SystemExit\n"
        )
    return f"{name}: auto_map = {keys[name]}"
