"""The source model, one block at a time: what transformers computes, observed and rewritten."""
