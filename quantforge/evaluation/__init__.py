"""Evaluation: perplexity, divergence from a reference, speed and memory, and their reports.

Four modules make the figures that are always measured: `compare_models` takes one model after another, `windows` cuts
the text, `divergence` scores a model on the windows and against the reference, `head` makes logits and sums over them.
All others measure what comes besides (errors of blocks, answers, caches, tasks, speed, llama.cpp, requests) or write
what was measured (tables, reports, cards).

In this folder:

    bench_requests  Requests of a bench: a seeded stream or a trace, what each had to wait for, and the figures of all
    bench_senders   Send a stream of requests in real time
    block_errors    Error of each block by itself
    cache_quality   Quality of caches: the same weights with keys and values stored in fewer bits
    card_section    Measured figures for the card of a result: a section of its text, and ``model-index`` for the hub
    columns         Columns of a table of text, and as many of them as a width holds
    compare_models  `eval`: a reference and its descendants, measured under one protocol, one model in memory at a time
    divergence      Perplexity of a model, and its exact KL divergence from a reference, token by token
    kept_rows       Rows of an interrupted evaluation, kept in the user's cache until the same evaluation completes
    llama_cpp       A GGUF file in the engine that it is for: llama.cpp, through the ``xllamacpp`` wheel (optional)
    output_head     The last step of a language model, a part of the vocabulary at a time
    reference_text  Text that the reference writes itself: how a model scores along it, and where its own answer differs
    report          A finished evaluation as a file: Markdown, the document of ``--json``
    speed           Speed and memory of a model as an engine would run it: time to the first token
    task_model      A model that answers the requests of lm-evaluation-harness through our runtime
    tasks           Tasks of lm-evaluation-harness: found, checked before any work, and run on a model
    text_tables     Evaluation as tables of text: quality, speed with memory, caches
    text_windows    The text that is scored: one document, cut into windows, and the protocol that says so
    verdict         Verdict on an evaluation: which models nothing beats, who wins by what, and the same in words
    report_page/    The report of an evaluation as one page that needs nothing else: no network, no other file
"""
