"""The runtime: models of any format that is read, which compute on packed weights, so that they can be measured.

In this folder:

    active_experts    Experts that a token is sent to: how many of them
    answer_limits     Rules for an answer: how long it is, how its tokens are chosen, what ends it
    beam_search       Beam search: several continuations of one prompt side by side
    cache             The paged cache of keys and values: fixed pages, a table per sequence, a list of free pages
    cache_layout      Layout of a cache: what it holds for each token
    computed          Which models the own decoder computes
    decoder           One readable decoder for the families that have a record of their blocks
    decoder_layer     A block as the decoder computes it: its modules, joined where they read the same
    decoding_engines  Engines: the two ways to compute the next token, the own decoder and the forward of transformers
    decoding_steps    Decoding steps: prefill the prompts, then one token per sequence and step
    fill_experts      Experts of a skeleton, filled one mixture at a time: packed where any of them is quantized
    fill_skeleton     The skeleton of a model, filled from a checkpoint one parameter at a time: packed linears
    generated_text    Generated texts: what `generate` returns, without torch
    kv_cache          Keys and values as an fp8 cache holds them: measured while calibration runs
    linear            A linear layer whose weight stays packed in memory
    load              One loader for every format: a model that computes, with its quantized weights still packed
    memory            Memory that a stretch of work takes above what the process held before it
    model_sizes       Figures of a model for reports: bits per weight, bytes, schemes
    packed_experts    Experts of a mixture whose weights stay packed
    packed_stacks     Stacks of experts' matrices that stay packed: rows are multiplied by the matrices of their owners
    plain_weights     Linears that need their weight as it is: those that a kernel cannot stand in for
    problems          A quantized tensor as a problem of the kernels: which grid, which parameters, in their plain terms
    prompt_attention  Attention of several new tokens per sequence, as of a prompt, over the paged cache, in plain torch
    put_adapter       A model with an adapter of low rank on its linears, whose weights stay packed
    ragged            A ragged batch: spans of new tokens of some sequences, of different lengths
    room              Room for weights and caches on a GPU: checked before anything is loaded, with what would fit
    rotary            Angles of rotary positions: frequencies as transformers derives them, times positions
    sampling          Choosing tokens from logits: every request has a sampler of its own
    sampling_options  Rules by which the next token is chosen from logits, by the usual definitions, in this order
    speaker           A model that answers in text: a prompt or a conversation in, pieces of text out as they come
    spread_experts    Packed experts whose module takes tokens that are spread over all of them (`quantforge.model.exper
    stop_strings      Strings that end a text, found while it comes in pieces, wherever the pieces part
    stored_entries    Entries of one layer of a cache: keys and values put into their places, and read back from pages
    tensor_shares     Shares of a model: each of several processes holds a part of every matrix of a block
    text_side         The text side of a model of any format: its tokenizer, its chat template
    token_stream      Tokens of one answer as they are chosen, and their text as soon as it is whole
    weight_cuts       Cuts of a weight matrix: the rows, or the columns, that one of several processes holds of it
    serving/          Serving: many requests on one model at a time, each with the tokens that it would have alone
    speculation/      Speculative decoding: tokens are drafted cheaply, and the model checks all of them in one pass
"""
