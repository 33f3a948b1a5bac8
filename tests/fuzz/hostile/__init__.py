"""Whole commands on hostile input: a tree of files with one or more of them damaged, and a verb that reads it.

| file | what it does |
|---|---|
| `tree.py` | builds the sound files that every case begins with, and the commands that read each of them |
| `damage.py` | damages a file by its role: bytes, documents, tables, and what stands at its place |
| `cases.py` | draws a case (damages and a command) from a seed and a number |
| `judge.py` | runs a case in a fork under limits and says what must not happen |
"""
