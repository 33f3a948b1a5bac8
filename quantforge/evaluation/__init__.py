"""Evaluation: perplexity, divergence from a reference, speed and memory, and their reports.

In this folder:

    block_errors    Error of each block by itself
    cache_quality   Quality of caches: the same weights with keys and values stored in fewer bits
    cache_tables    Figures of caches as tables of text: what each costs in quality, by position
    cache_trial     Trial of caches: which kinds, and on what text; refused where a model has no such caches
    card_section    Measured figures for the card of a result: a section of its text, and ``model-index`` for the hub
    columns         Columns of a table of text, and as many of them as a width holds
    comparable      Refusal of models that cannot be compared, by their configurations and tokenizers, before any work
    deployment      A model as an engine would run it: loaded in 16 bits, its speed and its memory taken
    divergence      Divergence of a model from its reference: the exact KL divergence, token by token
    evaluate        `eval`: a reference and its descendants, measured under one protocol, one model in memory at a time
    figures         Figures of one model as a row of an evaluation: those of its files, and those of its quality
    folder_card     The card of a folder of results that are one file each: what they are, which to take
    gates           Quality gates: limits that every model of an evaluation has to keep
    generated       Text that the reference writes itself: how a model scores along it
    head            The last step of a language model, a part of the vocabulary at a time
    job_summary     Job summary of a CI: the report of an evaluation as GitHub-flavoured Markdown
    kept_reference  The reference once its weights have left memory: its kept outputs
    kept_rows       Rows of an interrupted evaluation: kept in the user's cache until the same evaluation ends well
    llama_cpp       A GGUF file in the engine that it is for: llama.cpp, through the ``xllamacpp`` wheel (optional)
    model_ending    The ending of a model, from final hidden states to logits, by its own code
    perplexity      Perplexity from final hidden states: ``exp`` of the mean negative log-likelihood per token
    planted_key     Retrieval of a planted key: whether attention still finds in a cache what was put there long before
    report          A finished evaluation as a file: Markdown, the document of ``--json``
    speed           Speed: time to the first token, time per further token at several batch sizes, share of the roof
    task_files      Task files of lm-evaluation-harness: read as data, and refused if they would run code
    task_model      A model that answers the requests of lm-evaluation-harness through our runtime
    tasks           Tasks of lm-evaluation-harness: found, checked before any work, and run on a model
    text_tables     Evaluation as two tables of text: quality, and speed with memory
    verdict         Verdict on an evaluation: which models nothing beats, who wins by what, and the same in words
    windows         The text that is scored: one document, cut into windows, and the protocol that says so
    report_page/    The report of an evaluation as one page that needs nothing else: no network, no other file
    serving_load/   A stream of requests, sent to a model here or to any OpenAI-compatible server
"""
