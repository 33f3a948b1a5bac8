"""Evaluation: perplexity, divergence from a reference, speed and memory, and their reports.

In this folder:

    bounded_templates  Templates of task files, rendered in a sandbox that bounds what one of them takes
    divergence         Divergence of a model from its reference: the exact KL divergence, token by token
    evaluate           `eval`: a reference and its descendants, measured under one protocol
    figures            Figures of one model as a row of an evaluation: those of its files, and those of its quality
    harness            Tasks of lm-evaluation-harness on packed weights: found, checked
    head               The last step of a language model, a part of the vocabulary at a time
    language_model     Packed weights as an ``LM`` of lm-evaluation-harness: requests in the library's terms
    llama_cpp          A GGUF file in the engine that it is for: llama.cpp, through the ``xllamacpp`` wheel (optional)
    perplexity         Perplexity from final hidden states: ``exp`` of the mean negative log-likelihood per token
    report             A finished evaluation as a table, as Markdown, and as one HTML page that needs nothing else
    requests           Requests of tasks to a model, through our runtime: how likely is this continuation, this text
    scatter            Scatter of KL divergence (logarithmic) against the size of the weights, as inline SVG
    speed              Speed: time to the first token, time per further token at several batch sizes, share of the roof
    task_code          Task files that would run code: refused before the work
    windows            The text that is scored: one document, cut into windows, and the protocol that says so
"""
