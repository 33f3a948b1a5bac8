"""Public Python API: one function for each command of ``quantforge``.

In this folder:

    allocate          ``allocate``: choose a scheme for every linear, to diverge least from the source at a given size
    bench             Measure latency and throughput of models, or of a server, under a seeded stream of requests
    completed_result  Detect that the result of a job exists already and is up to date
    declarations      Derive the architecture declarations of a model by running the code of transformers
    demo              Copy the small trained demo model out of the package
    demo_text         Evaluation text of the demo model: modules of Python's standard library that it was not trained on
    diff              ``diff``: compare two models of any formats
    evaluate          ``evaluate``: measure a reference model and models derived from it, of any format, on one text
    export            ``export``: convert a model into another format, exactly or not at all
    folder_cards      Model card of a folder with several single-file results (GGUF)
    generate          ``generate``: let a model of any supported format continue a text or answer a conversation
    imatrix           Importance matrices (imatrix): measured on calibration text, written in llama.cpp's format
    inspect           ``inspect``: show the contents of a model or weight file, from headers alone
    job               Job: one result to be made, planned from headers
    load              ``load``: load a model of any supported format for inference, with its weights still packed
    output            Output path and disk space of a result, shared by all commands that write one
    plan              ``plan`` and ``capacity``: what `quantize` would do, and the memory and speed of its result
    quantize          ``quantize``: plan, round and publish a model; an interrupted run is resumed
    release           ``release``: make, score and check many variants of one model, ready to be uploaded
    reproduce         ``reproduce``: make a result again from its manifest and compare every byte
    scored_text       Read the text that an evaluation scores and the prompts that its models answer
    serve             ``serve``: serve a model of any format with OpenAI's HTTP API
    sweep             ``sweep``: quantize a model with all combinations of some choices, and score the results
    torch_defaults    Isolate API calls from the caller's torch defaults (dtype, device, gradients, threads)
    variants          Make several results (variants) of one model, for releases and sweeps; each is a job
    verify            ``verify``: check a quantized model, made by any tool
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
from quantforge.planning.allocation import Allocated
from quantforge.planning.capacity import Capacity, Load
from quantforge.plans import Plan, Serving
from quantforge.progress import Progress
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
