"""Planning: decide from tensor headers alone how each tensor is stored, by which rule, and in which file.

No module imports torch at load time; `planner` imports it when declarations have to be derived, `source_views` when the
source is read in the layout of an engine's loader.

In this folder:

    allocation         Mixed-precision allocation
    calibration_rows   Calibration rows: how many there will be, how many hold random tokens
    capacity           Capacity planning: whether a quantized model and its KV cache fit on a GPU
    conversion         Plan the export of a quantized model from its headers
    coverage           Coverage: which share of the weights inside the blocks a plan quantizes
    effort             Default method and effort: choose what a recipe leaves open, and the settings of an effort level
    embedding_choice   Quantization of embedding and head: their share of the bytes
    format_choice      Choose the format of a result if none is requested, and check that the result's name matches it
    gguf_plan          Plan a GGUF file: the name, type and position of every tensor, and the metadata
    gpu_cards          GPUs: memory, bandwidth and 16-bit compute of the devices that models are served on
    gradient_options   Options that need gradients (guided Hessians, tuning): when they are possible and what they cost
    importance_check   Compare an importance file (imatrix) with a plan by names and widths
    layer_schemes      Schemes of linears in formats that store a model module by module: defaults and substitutes
    local_paths        Separate local paths from recipes: a recipe holds names and digests of the files it uses
    module_formats     Plan results of formats that store a model module by module: the scheme of every tensor
    naming             Default names of results: ``wren-awq-int4``, ``wren-Q4_0.gguf``
    needed_statistics  Statistics that calibration has to collect for a plan
    notes              Notes of a plan: facts about the source, about draft heads (multi-token prediction)
    partial_plan       A plan before its files are laid out: what becomes of every tensor of a model
    peak_memory        Predict the peak memory of a run from headers alone; `plan` prints it
    planner            Planning: turn a recipe and the headers of a checkpoint into every decision of a run
    recipe_options     Build recipes from options: a file, a built-in recipe or the empty one
    release_spec       Release files: one model, several recipes, and the quality gates that each result has to pass
    run_work           Forecast the work of a run from headers alone: bytes read and written, and operations
    scheme_rules       The order in which rules, options and defaults decide the scheme of each tensor, for every format
    size_target        Target sizes of mixed-precision allocation
    source_views       The model that is planned, in three consecutive views
    typed_quantities   Parse quantities that users type: numbers of tokens, bytes, rates and prices
    weight_traffic     Count the bytes of weights of a planned model: in memory, and read by one decoding step
"""
