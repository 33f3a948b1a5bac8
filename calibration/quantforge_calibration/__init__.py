"""Calibration text: where it comes from, how it becomes rows of token ids, and what was used.

A quantizer measures activations, and what it measures depends on the text it is shown. This package
supplies that text and accounts for it. The path is short::

    "a.txt=3,builtin=1" --sources--> documents --tokenizer--> ids --sampler--> Sample(ids, report)

`draw.draw` walks all of it in one call. Nothing here imports ``quantforge``; importing this
package, parsing a source and reading documents import neither torch nor tokenizers.
"""

from quantforge_calibration.errors import SourceError
from quantforge_calibration.sources import Source, documents, parse_sources

__all__ = ["Source", "SourceError", "documents", "parse_sources"]
