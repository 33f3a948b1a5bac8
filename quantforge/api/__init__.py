"""The verbs: what the command line calls, and what a program may call instead.

In this folder:

    allocate          Allocate: bits for each group of linears
    bench             Measure latency and throughput of models, or of a server, under a seeded stream of requests
    completed_result  A result that lies at the place of a job already, made by this very command before it was killed
    declarations      Declarations of a model, derived from the code of transformers: to be read, compared and kept
    demo              Demo: the small trained model that comes with the package, copied out to try things on
    demo_text         Text on which the demo model is judged
    diff              Diff: how two models of any formats differ
    evaluate          Evaluate: a reference and its descendants, whatever their format, measured on one text
    export            Export: a model in another format, as a proven re-layout or a refusal
    folder_cards      The card of a folder of results that are one file each: what they are, which to take
    generate          Generate: a model of any format that is read continues a text or answers a conversation
    imatrix           Importance of columns, observed on calibration text and written for llama.cpp's tools and for us
    inspect           Contents of a model directory, a safetensors file or a GGUF file, from headers alone
    job               A job: one result that is to be made, planned from headers
    load              Load: a model of any format that is read, ready to compute with its weights still packed
    output            Place of a result, and the room that it asks for: shared by the verbs that write
    plan              Plan: what `quantize` would do, from headers alone, and what its result, or a model as it is
    quantize          Quantize: a plan carried out and published, or gone on with after any interruption
    release           Release: many recipes of one model, made, scored, gated and laid out to be uploaded
    reproduce         Making a result again from its manifest, and comparing every byte
    scored_text       Text that an evaluation scores, prompts that its models answer: each from one source
    serve             Serve: a model of any format behind OpenAI's API over HTTP, until it is stopped
    sweep             Sweep: all combinations of some choices, quantized and scored; the same call resumes it
    torch_defaults    State of the program that calls a verb: results do not depend on torch's defaults
    variants          Variants: several results of one model, each a job of its own
    verify            `verify`: check a quantized model, whoever made it
"""

from quantforge.api.allocate import allocate
from quantforge.api.declarations import Declarations, derive_declarations
from quantforge.api.demo import demo
from quantforge.api.diff import diff
from quantforge.api.evaluate import evaluate
from quantforge.api.export import Exported, export
from quantforge.api.generate import generate
from quantforge.api.imatrix import make_imatrix
from quantforge.api.inspect import Inspected, inspect
from quantforge.api.job import Outcome
from quantforge.api.load import load
from quantforge.api.plan import capacity, plan
from quantforge.api.quantize import quantize
from quantforge.api.release import Released, release
from quantforge.api.reproduce import Reproduced, reproduce
from quantforge.api.serve import ListeningServer, serve
from quantforge.api.sweep import Swept, sweep
from quantforge.api.verify import verify
from quantforge.errors import QuantForgeError
from quantforge.events import Event, Policy
from quantforge.execution.progress import Progress
from quantforge.planning.allocation import Allocated
from quantforge.planning.capacity import Capacity, Load
from quantforge.plans import Plan, Serving
from quantforge.recipe import AwqOptions, CalibrationOptions, GptqOptions, Recipe, Rule
from quantforge.runtime.generated_text import Generated, GeneratedText, LikelyToken, ScoredToken
from quantforge.settings import Settings

__all__ = [
    "Allocated",
    "AwqOptions",
    "CalibrationOptions",
    "Capacity",
    "Declarations",
    "Event",
    "Exported",
    "Generated",
    "GeneratedText",
    "GptqOptions",
    "Inspected",
    "LikelyToken",
    "ListeningServer",
    "Load",
    "Outcome",
    "Plan",
    "Policy",
    "Progress",
    "QuantForgeError",
    "Recipe",
    "Released",
    "Reproduced",
    "Rule",
    "ScoredToken",
    "Serving",
    "Settings",
    "Swept",
    "allocate",
    "capacity",
    "demo",
    "derive_declarations",
    "diff",
    "evaluate",
    "export",
    "generate",
    "inspect",
    "load",
    "make_imatrix",
    "plan",
    "quantize",
    "release",
    "reproduce",
    "serve",
    "sweep",
    "verify",
]
