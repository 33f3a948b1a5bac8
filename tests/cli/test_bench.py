"""``quantforge bench`` on the bundled model: a table for people, a document for programs, refusals before the work."""

from __future__ import annotations

import json

import pytest

from tests.cli.test_cli import run

SMALL = ("--requests", "6", "--prompt-tokens", "8..20", "--new-tokens", "3..6", "--rows", "4")
