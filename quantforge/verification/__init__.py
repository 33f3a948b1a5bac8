"""A finished artifact, ours or anyone's, as if nobody could be trusted: files, structure, numbers, logits."""
