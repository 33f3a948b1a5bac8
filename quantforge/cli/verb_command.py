"""A verb as it is shown and completed: its options in named groups, its words read without being converted.

Help, and what a shell asks for while somebody types, come before any value is looked at: conversion would import what
only a run needs.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

OTHERS = "Options"  # the group of options that name none


def sort_words(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """Give each option and argument of ``ctx`` its words, not converted; return the words that are left."""
    bare = TyperCommand(command.name, add_help_option=False)
    bare.parse_args(ctx, [])  # without options, tells ctx how options begin
    typed, rest, _ = command.make_parser(ctx).parse_args(args=list(args))
    ctx.params = {str(one.name): typed.get(str(one.name)) for one in command.params}
    ctx.args = rest
    return list(rest)


def _readable(name: str, text: str) -> tuple[str, str]:
    """Return what help says of an option, with types and ranges in words instead of the parser's."""
    name = re.sub(r"<int( range)?>", "N", re.sub(r"<float( range)?>", "X", name))
    text = re.sub(r"; x>=(0|-\d+)\b|  \[x>=(0|-\d+)\]", "", text)
    text = re.sub(r"\bx>=(\d+)", r"at least \1", re.sub(r"\b(\d+)<=x<=(\d+)", r"\1 to \2", text))
    return name, text.replace("]  [", "; ")


def _completed(command: Any, args: list[str]) -> list[str]:
    """Give ``*`` to each option that may stand without a value (its name in help has brackets) and does."""
    bare = {
        flag
        for one in command.params
        if one.param_type_name == "option" and str(one.metavar).startswith("[")
        for flag in one.opts
    }
    found: list[str] = []
    for word, following in zip(args, [*args[1:], "--"], strict=False):
        found.append(word)
        if word in bare and following.startswith("-") and "--" not in found:
            found.append("*")
    return found


class Verb(TyperCommand):
    """A command of ``quantforge``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return what is left of the arguments."""
        if ctx.resilient_parsing:
            return sort_words(self, ctx, args)
        return super().parse_args(ctx, _completed(self, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what stands behind the verb in the line of its usage."""
        found = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(one.metavar or one.name.upper()) for one in found)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options by their groups, in the order in which these first occur."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            if record is None:
                continue
            group = getattr(one, "rich_help_panel", None) or OTHERS
            if one.param_type_name == "argument":
                group, record = "Arguments", (record[0].partition(" <")[0], record[1])
            groups.setdefault(group, []).append(_readable(*record))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
