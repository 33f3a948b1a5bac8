"""Checkpoints on disk: the only place where bytes are read from a model or written to one."""
