"""The number types that a GGUF tensor table may name: ids, and how many bytes a run of numbers takes.

Most are those of `quantforge.packers.ggml`; here are also plain types that only tables have, and block types that files
can name but no model is stored in. Ids that were given up (4, 5, 31 to 33, 36 to 38) are in neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantforge.packers.ggml import LAYOUTS, Layout

TYPES: Mapping[str, Layout] = {
    **LAYOUTS,
    "F64": Layout(28, 1, 8),
    "I8": Layout(24, 1, 1),
    "I16": Layout(25, 1, 2),
    "I32": Layout(26, 1, 4),
    "I64": Layout(27, 1, 8),
    "Q8_1": Layout(9, 32, 36),
    "Q8_K": Layout(15, 256, 292),
}
BY_NUMBER: Mapping[int, str] = {layout.number: name for name, layout in TYPES.items()}
