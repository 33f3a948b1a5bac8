"""The command line: options in, one call of a verb, a document or a table out.

In this folder:

    allocate          ``quantforge allocate``: bits for each layer, within a size
    answer_options    Options of answers: how their tokens are chosen, what ends them, how many there are
    answers           Answers shown as they come, with their speed; of several models side by side
    app               ``quantforge``: the verbs and the error boundary
    bench             ``quantforge bench``: latency and throughput of models, or of a server, under a stream of requests
    choices           Options that choose something of a recipe: one line each, in `RECIPE`
    completion        Words that a shell offers for the values of options
    console           The only place that prints: stdout carries data, stderr everything else
    demo              ``quantforge demo``: copy out the small model that comes with the package
    diff              ``quantforge diff``: how two models differ
    doctor            ``quantforge doctor``: whether this machine can do the work, by doing a little of it
    draft_flags       Options of speculation, for every verb that decodes
    dry_run           ``--dry-run``: the plan of a command, taken at the moment at which its work would begin
    error_types       Errors of the system and of libraries under us as errors of ours, each with its exit code
    evaluate          ``quantforge eval``: one table for a reference and its descendants, whatever their format
    evaluate_options  Options of ``quantforge eval``, in the groups of its help
    export            ``quantforge export``: move a model into a format without quantizing it again
    formats           ``quantforge formats``: what can be read and written, and what an export from each to each keeps
    generate          ``quantforge generate``: a model continues a text or answers; without a prompt
    inspect           ``quantforge inspect``: what is in a model, from headers alone
    jobs              Jobs: further processes of the command that is running, which share its work, say nothing
    meter             Progress on stderr: one bar on a terminal, some lines in a log, JSON for machines
    options           Options that several verbs share, each with its one name, help and group
    plan              ``quantforge plan``: what would happen, from headers alone
    plan_capacity     Show what a planned result needs in use: memory, devices that it fits on
    plan_forecast     Forecast of a run: its time, files and memory, each with what it rests on
    quantize          ``quantforge quantize``: run a recipe on a model
    ranks             Ranks: processes that torchrun starts with one command, of which the first one speaks
    recipes           ``quantforge recipes``: list the built-in recipes, or print one
    release           ``quantforge release``: many recipes of one model, scored, gated and laid out to be uploaded
    reproduce         ``quantforge reproduce``: make a result again from its manifest, and compare every file
    request           From options to a request: choices of a recipe, the policy on events
    run_log           Progress of a run: shown to people and, where a file is named, written for programs
    serve             ``quantforge serve``: a model behind OpenAI's API over HTTP
    stopping          Stopping: what a signal does that asks the command to stop, modules that are being loaded aside
    sweep             ``quantforge sweep``: all combinations of some choices, and which of them nothing beats
    terminal_chat     A chat on a terminal: lines of a person, answers as they come, and what was said so far
    typed_paths       Paths and options as they were typed
    usage_errors      Errors of the command line's parser in our own words, each with a hint at what to type instead
    verb              A verb as it is shown and completed: its options in named groups
    verify            ``quantforge verify``: check a quantized model, whoever made it
"""
