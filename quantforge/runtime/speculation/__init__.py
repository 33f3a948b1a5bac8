"""Speculative decoding: tokens are drafted cheaply, and the model verifies all of them in one pass.

The time of a decoding step is dominated by reading the weights, so verifying k drafted tokens costs little more than
computing one. The result is exact by construction: at each position the token is chosen from the model's own logits,
with the same random number as in plain decoding, and a drafted token is accepted if it equals that token. So for a
given seed the sampled text is the same with any drafter. The price: a draft model must sample with the same random
numbers, and its tokens are accepted somewhat less often than under rejection sampling, which changes the text.

One verifier (`verify_drafts`) serves both a single text (`decode`) and the steps of a serving engine. Every draft
method is a `Drafter`.

In this folder:

    decode                Speculative decoding of one text: draft tokens, verify all of them in one pass
    draft_model           Draft models: a smaller model with the same vocabulary
    draft_options         Options of speculative decoding: the draft method, draft length and draft tree
    drafter               The drafter interface, the cache of a drafter, and reading of draft-head linears
    eagle3                EAGLE-3: draft with one decoder layer that reads tokens and the model's hidden states
    hidden_state_drafter  Draft with a small network that reads tokens and the model's hidden states before them
    lookahead             Lookahead decoding: the model drafts for itself at several positions in parallel
    medusa                Medusa heads: head i predicts the token i + 1 positions after the model's own
    mtp                   Multi-token prediction (MTP): draft with a layer that models store after the decoder layers
    ngrams                N-gram drafting (prompt lookup): copy what followed the text's last tokens at an earlier place
    tree                  Draft trees: several tokens may be drafted for one position
    verify_drafts         Verification of drafted tokens: one is accepted if the model chooses the same token
"""
