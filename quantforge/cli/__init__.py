"""The command line: options in, one call of a verb, a document or a table out.

In this folder:

    allocate        ``quantforge allocate``: bits for each layer, within a size
    app             ``quantforge``: the verbs and the error boundary
    bench           ``quantforge bench``: latency and throughput of models, or of a server, under a stream of requests
    choices         Options that choose something of a recipe: one line each, in `RECIPE`
    console         The only place that prints: stdout carries data, stderr everything else
    demo            ``quantforge demo``: copy out the small model that comes with the package
    diff            ``quantforge diff``: how two models differ
    doctor          ``quantforge doctor``: whether this machine can do the work, by doing a little of it
    evaluate        ``quantforge eval``: one table for a reference and its descendants, whatever their format
    export          ``quantforge export``: move a model into a format without quantizing it again
    formats         ``quantforge formats``: what can be read and written, and what an export from each to each keeps
    generate        ``quantforge generate``: a model continues a text or answers; without a prompt
    inspect         ``quantforge inspect``: what is in a model, from headers alone
    options         Options that several verbs share, each with its one name, help and group, and what their values mean
    path_arguments  Paths and options as a person types them
    plan            ``quantforge plan``: what would happen, from headers alone
    plan_summary    What is shown of a plan: by ``quantforge plan``
    processes       Processes of one command, of which one speaks: those that torchrun starts
    progress_bar    Progress on stderr: one bar on a terminal, some lines in a log, JSON for machines
    quantize        ``quantforge quantize``: run a recipe on a model
    recipes         ``quantforge recipes``: list the built-in recipes, or print one
    release         ``quantforge release``: many recipes of one model, scored, gated and laid out to be uploaded
    reproduce       ``quantforge reproduce``: make a result again from its manifest, and compare every file
    result_summary  What is said of a result that was made: what it is, what happened to it
    run_log         Reports of a run: its progress for people, and the file of ``--log`` for programs
    serve           ``quantforge serve``: a model behind OpenAI's API over HTTP
    sweep           ``quantforge sweep``: all combinations of some choices, and which of them nothing beats
    usage_errors    Errors of the command line's parser in our own words, each with a hint at what to type instead
    verb_command    A verb as it is shown and completed: its options in named groups
    verify          ``quantforge verify``: check a quantized model, whoever made it
"""
