"""Decisions, from headers alone: which layer gets what, by which rule, in which file.

No torch, but where declarations have to be derived (`undeclared`) or a source is read in the form of an engine's loader
(`loader_form`).

In this folder:

    allocation         Allocation: the linears of a model in groups, the room that a target leaves them
    beside_towers      The plan of a GGUF file beside which its vision tower is written, in a file of its own
    budgets            Budgets: which scheme each group of linears gets
    builtin_recipes    The built-in recipes: TOML files whose first lines say what they are, how good
    by_module          Planning for the formats that store a model module by module: which layer gets which scheme
    cache_size         Size of a cache: what all layers of a model keep of a sequence, by its length
    calibration_rows   Calibration rows: what a run gets where it asks the builtin text for more than that has
    candidates         Candidates of an allocation: schemes that a format holds and an engine loads
    capacity           Capacity: whether a planned result fits beside its cache, how fast it can decode at best
    cards              Cards: memory, bandwidth and 16-bit matrix products of devices that models are served on
    changed_source     The source as a recipe changes all of it, before anything else sees it: fewer heads and experts
    choice             The one order of decision: what becomes of a tensor, whatever form a format stores it in
    cited_files        Recipes that name what they read without saying where it lies
    conversion         The conversion of a quantized model, planned from its headers: a proven re-layout or a refusal
    coverage           Coverage of blocks: how much of them a plan quantizes; what stays is named, and where it is much
    decisions          Decisions of plans in words: what is chosen for a user who left it open, and what is substituted
    effort             Effort: the one dial for time against quality, and what it sets of a recipe
    embedding_choice   Embedding and head of a plan: their share of the bytes, and the option that makes them smaller
    gguf               The plan of a GGUF file: a name, a type and a place for every tensor, and all of the header
    gguf_files         Contents of GGUF files: the tensor table, where experts are one tensor
    gguf_types         Types of the tensors of a GGUF file: from the mixture, from ``--scheme``
    guidance           Guided statistics in a plan: which models and methods they are for, how many strips fit
    heads_alone        Checks of a recipe for draft heads alone, which no engine serves without their model
    known_importance   Importance from a file, compared with a plan by names and widths alone
    layer_schemes      Schemes of linears in a format that stores module by module: the default
    loader_form        A source, and the names of its result, as the loader of a named engine takes them
    method_choice      Choice of the method where none is asked for: the one that measured best
    naming             Names of results that nobody names: ``wren-awq-int4``, ``wren-Q4_0.gguf``
    needed_statistics  Statistics that calibration has to observe for a plan: of the method
    notes              Notes of a plan: what there is to say of the source, of heads that predict further tokens
    omissions          Omissions: what of a model directory does not reach the result
    peak_memory        Predict the peak memory of a run from headers alone: `plan` prints it, and tests hold runs to it
    planned_run        Plan of a run: a recipe on an opened model, with what the settings say of memory
    planner            Planning: from a recipe and the headers of a checkpoint to every decision of the run
    quantities         Quantities as people type them: tokens, bytes, rates and prices, strictly
    recipe_options     Recipes by options: a file, a built-in recipe or the empty one
    release_spec       Release file: one model, many recipes, and what has to hold of each result
    rules              Rules: which layers a pattern means, and which pattern decides
    run_work           Work of a run, from headers alone: bytes that it reads and writes, and operations
    single_experts     Experts that files hold stacked: read one by one where any of them is rounded
    size_target        Target of an allocation: a size as it is asked for
    sparse_layers      Sparsity as it is planned: which linears get zeros
    tunable            Tuning in a plan: for which models, methods and formats it is, and what it takes
    undeclared         Declarations for families that have none, where a recipe needs them
    weight_traffic     Count the weights of a planned result in use: bytes in memory
"""
