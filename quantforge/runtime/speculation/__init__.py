"""Speculative decoding: tokens are guessed cheaply, and the model checks all of them in one pass.

Reading the weights is what a step costs, so that checking k guesses costs little more than computing one token. The
result is exact by construction: at each place the token is chosen from the model's own logits, with the same draw that
the plain loop makes there, and a guess counts where it is that token. So with a seed the sampled text is the same too,
whatever guesses and however many: a guess never becomes text, it only saves a pass. The price is that a draft which
draws must draw with the same random numbers; it agrees somewhat less often than with a rejection rule, which would
have it accepted as often as the distributions allow but gives other text.

In this folder:
"""
