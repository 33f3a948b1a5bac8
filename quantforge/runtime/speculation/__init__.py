"""Speculative decoding: tokens are drafted cheaply, and the model checks all of them in one pass.

Reading the weights is what a step costs, so checking k drafted tokens costs little more than computing one. The result
is exact by construction: at each place the token is chosen from the model's own logits, with the same draw that the
plain loop makes there, and a drafted token counts where it is that token. So with a seed the sampled text is the same
too, whatever is drafted: a draft never becomes text, it only saves a pass. The price is that a draft model which draws
must draw with the same random numbers; it agrees somewhat less often than with a rejection rule, which would have it
accepted as often as the distributions allow but gives other text.

One verifier (`verify`) serves a single text (`decode`) and the steps of an engine; whoever drafts is a `Drafter`.

In this folder:

    decode       Speculative decoding of one text: draft, compute all drafted tokens in one pass
    draft_model  A draft model: a smaller model of the same vocabulary, or the model itself in fewer bits
    drafter      What drafters have in common: the interface, their cache, linears of draft heads
    eagle3       EAGLE-3: one decoder layer that reads each token together with what the model computed before it
    lookahead    Lookahead decoding: the model drafts for itself, many places at once (Fu et al., arXiv 2402.02057)
    medusa       Medusa heads: each predicts the token so many places ahead, from the model's last hidden state alone
    mtp          Multi-token prediction (MTP): the model's own layer for further tokens, stored after its last layer
    ngrams       N-grams: copy from the text itself what followed the last time that its last tokens occurred
    options      Options of speculation: who drafts tokens, how many in a row, and how many for one place
    tree         Trees of drafted tokens: several tokens may be drafted for one place
    verify       Verification: a drafted token counts where the model chooses it
"""
