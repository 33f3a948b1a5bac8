"""Speculative decoding: tokens are guessed cheaply, and the model checks all of them in one pass.

Reading the weights is what a step costs, so that checking k guesses costs little more than computing one token. The
result is exact by construction: at each place the token is chosen from the model's own logits, with the same draw that
the plain loop makes there, and a guess counts where it is that token. So with a seed the sampled text is the same too,
whatever guesses and however many: a guess never becomes text, it only saves a pass. The price is that a draft which
draws must draw with the same random numbers; it agrees somewhat less often than with a rejection rule, which would
have it accepted as often as the distributions allow but gives other text.

In this folder:

    draft            Guesses of a smaller model, or of the same model in fewer bits, that reads along
    draft_choice     Who guesses for a loaded model: copies of its text, itself ahead or in fewer bits, its heads
    draft_options    Options of speculation: who guesses, how many tokens in a row, and how many for one place
    draft_tree       Trees of guesses of a draft that reads along: behind each token, those that it finds likeliest
    eagle3_files     Files of EAGLE-3: the tensors of its network under their names
    eagle3_layer     The network of EAGLE-3: one decoder layer that reads tokens and, beside them
    feature_guesser  Guesses of a small network that reads tokens and, beside each
    growing_text     A text that grows by passes: the last token and guesses behind it are computed
    guess_trees      Trees of guesses: several tokens may be guessed for one place
    guesses          Interface of whoever guesses the next tokens, and what has come of the guesses
    head_products    Products with the weights of draft heads: plain ones in the type of the model
    likely_trees     Trees that grow by logits: behind each token stand those that some logits find likeliest
    lookahead        Lookahead decoding: the model guesses for itself, many places at once (Fu et al., arXiv 2402.02057)
    medusa           Medusa heads: each guesses the token so many places ahead, from the model's last hidden state alone
    mtp              The model's own layer for further tokens (MTP), where its files hold one behind the last layer
    mtp_files        Files that hold a layer for further tokens behind the last one
    ngrams           Guesses from the text itself: what followed the last time that its last tokens occurred
    own_draft        A draft made of the model itself: its linears in fewer bits, everything else shared
    pace             How many tokens to guess in a row: as many as pay, from what passes have cost so far
    speculate        One text with speculation: guess, check all guesses in one pass
"""
