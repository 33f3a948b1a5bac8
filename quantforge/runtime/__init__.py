"""The runtime: models of any format that is read, which compute on packed weights, so that they can be measured.

In this folder:

    cache             The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages
    decoder           One readable decoder for the llama-like families, on packed weights and a paged cache
    decoder_layer     A block as the decoder computes it: its modules, joined where they read the same
    expert_stacks     Experts of a running model: their matrices written into the stacks that transformers computes with
    fill_skeleton     The skeleton of a model, filled from a checkpoint one tensor at a time: packed linears
    generate          Generation: prefill the prompts, then one token per sequence and step
    joined            Linear layers that read the same activation, multiplied as one: q, k, v; gate, up
    kv_cache          Keys and values as an fp8 cache holds them: measured while calibration runs
    linear            A linear layer whose weight stays packed in memory
    load              One loader for every format: a model that computes, with its quantized weights still packed
    memory            Memory that a stretch of work takes above what the process held before it
    model_sizes       Figures of a model for reports: bits per weight, bytes, schemes
    problems          A quantized tensor as a problem of the kernels: which grid, which parameters, in their plain terms
    prompt_attention  Attention of several new tokens per sequence, as of a prompt, over the paged cache, in plain torch
    room              Room for weights and caches on a GPU: checked before anything is loaded, with what would fit
    rotary            Angles of rotary positions: frequencies as transformers derives them, times positions
    sampling          Choosing the next token from logits, by the usual definitions
"""
