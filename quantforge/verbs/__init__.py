"""The verbs: what the command line calls, and what a program may call instead.

quantize: a plan carried out and published, or gone on with
plan: what `quantize` would do, from headers alone
export: a model in another format
requantize: a quantized model again, from its source or from its decoded weights
imatrix: importance of columns, observed and written
reproduce: a result made again from its manifest, and compared
inspect: what a model or a result is
output: where a result comes to lie, and the room that it asks for
"""

from quantforge.verbs.export import Exported, export, format_for
from quantforge.verbs.imatrix import make_imatrix
from quantforge.verbs.plan import plan
from quantforge.verbs.quantize import Outcome, quantize

__all__ = ["Exported", "Outcome", "export", "format_for", "make_imatrix", "plan", "quantize"]
