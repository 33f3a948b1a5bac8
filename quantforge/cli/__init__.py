"""Command line: parse options, call one function of `quantforge.api`, print the result.

In this folder:

    allocate        ``quantforge allocate``: bits for each layer, within a size
    app             ``quantforge``: entry point of the command line; verbs, errors and signals
    bench           ``quantforge bench``: latency and throughput of models, or of a server, under a stream of requests
    choices         Command-line options that override fields of a recipe, in the table `RECIPE_OPTIONS`
    console         Console output: data on stdout, everything else on stderr; no other module prints
    demo            ``quantforge demo``: copy out the small model that comes with the package
    diff            ``quantforge diff``: how two models differ
    doctor          ``quantforge doctor``: check the installation, by running each kernel once
    evaluate        ``quantforge eval``: compare a reference with models derived from it, of any format
    export          ``quantforge export``: move a model into a format without quantizing it again
    formats         ``quantforge formats``: list the formats, and how exact each conversion between them is
    generate        ``quantforge generate``: continue a text, answer, or, without a prompt, chat on the terminal
    inspect         ``quantforge inspect``: show the contents of a model, from headers alone
    options         Command-line options that several verbs share, and parsers of their values
    path_arguments  Show paths and option names in output as the user typed them
    plan            ``quantforge plan``: show what `quantize` would do, from headers alone
    plan_summary    Print a plan, for ``quantforge plan`` and for ``--dry-run`` of other verbs
    processes       Several processes of one command: ranks of torchrun, and workers of ``--jobs``; only one prints
    progress_bar    Progress meters on stderr: a bar on a terminal, lines in a log, or lines of JSON
    quantize        ``quantforge quantize``: run a recipe on a model
    recipes         ``quantforge recipes``: list the built-in recipes, or print one
    release         ``quantforge release``: make, score and check many variants of one model, ready to be uploaded
    reproduce       ``quantforge reproduce``: make a result again from its manifest, and compare every file
    result_summary  Print the summary of a new result: size, events, and commands to evaluate and publish it
    run_log         Progress of a run on the console, and in the file of ``--log``
    serve           ``quantforge serve``: serve a model with OpenAI's HTTP API
    sweep           ``quantforge sweep``: quantize with all combinations of some choices, and compare the results
    usage_errors    Convert errors of the command-line parser into `UsageError` with a helpful hint
    verb_command    Click command of a verb: help with grouped options, and fast shell completion
    verify          ``quantforge verify``: check a quantized model, made by any tool
"""
