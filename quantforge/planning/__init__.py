"""Decisions, from headers alone: which layer gets what, by which rule, in which file.

No torch, but where declarations have to be derived (`planner`) or a source is read in the form of an engine's loader
(`source`).

In this folder:

    allocation         Allocation: which scheme each group of linears gets, so that a model of a given size loses least
    calibration_rows   Calibration rows: what a run gets where it asks the builtin text for more than that has
    capacity           Capacity: whether a planned result fits beside its cache, how fast it can decode at best
    choice             The one order of decision: what becomes of a tensor, whatever a format calls its schemes
    conversion         The conversion of a quantized model, planned from its headers: a proven re-layout or a refusal
    coverage           Coverage of blocks: how much of them a plan quantizes; what stays is named, and where it is much
    draft              What becomes of every tensor of a model, before its files are laid out
    effort             Method and effort: what a recipe leaves open, and what is set for it
    embedding_choice   Embedding and head of a plan: their share of the bytes, and the option that makes them smaller
    format_choice      Choice of the format of a result where none is asked for
    gguf_draft         The plan of a GGUF file: a name, a type and a place for every tensor, and all of the header
    gpu_cards          Cards: memory, bandwidth and 16-bit matrix products of devices that models are served on
    gradient_options   What takes gradients in a plan: guided statistics and tuning, for which models
    importance_check   Importance from a file, compared with a plan by names and widths alone
    layer_schemes      Schemes of linears in a format that stores module by module: the default
    local_paths        Recipes that name what they read without saying where it lies
    module_formats     Planning for the formats that store a model module by module: which layer gets which scheme
    naming             Names of results that nobody names: ``wren-awq-int4``, ``wren-Q4_0.gguf``
    needed_statistics  Statistics that calibration has to observe for a plan: of the method
    notes              Notes of a plan: what there is to say of the source, of heads that predict further tokens
    peak_memory        Predict the peak memory of a run from headers alone: `plan` prints it, and tests hold runs to it
    planner            Planning: from a recipe and the headers of a checkpoint to every decision of the run
    recipe_options     Recipes by options: a file, a built-in recipe or the empty one
    release_spec       Release file: one model, many recipes, and what has to hold of each result
    run_work           Work of a run, from headers alone: bytes that it reads and writes, and operations
    size_target        Target of an allocation: a size as it is asked for
    source_views       The model that is planned: three views of it follow one another
    typed_quantities   Quantities as people type them: tokens, bytes, rates and prices, strictly
    weight_traffic     Count the weights of a planned result in use: bytes in memory
"""
