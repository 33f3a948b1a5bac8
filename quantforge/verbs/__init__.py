"""The verbs: what the command line calls, and what a program may call instead."""
