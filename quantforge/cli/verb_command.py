"""Click command of a verb: help with grouped options, and fast shell completion.

Help and completion do not convert values, since conversion would import modules that only a run needs.
"""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

DEFAULT_GROUP = "Options"  # help group of options without a group


def parse_unconverted(command: Any, ctx: Any, args: list[str]) -> list[str]:
    """Store the unconverted values of all options and arguments in ``ctx``; return the rest of the words."""
    plain_command = TyperCommand(command.name, add_help_option=False)
    plain_command.parse_args(ctx, [])  # sets the option prefixes of ctx
    values, remaining, _ = command.make_parser(ctx).parse_args(args=list(args))
    ctx.params = {
        str(parameter.name): values.get(str(parameter.name)) for parameter in command.params
    }
    ctx.args = remaining
    return list(remaining)


def _readable_help(name: str, text: str) -> tuple[str, str]:
    """Return name and help text of an option, with types and ranges in plain words."""
    name = re.sub(r"<int( range)?>", "N", re.sub(r"<float( range)?>", "X", name))
    text = re.sub(r"; x>=(0|-\d+)\b|  \[x>=(0|-\d+)\]", "", text)
    text = re.sub(r"\bx>=(\d+)", r"at least \1", re.sub(r"\b(\d+)<=x<=(\d+)", r"\1 to \2", text))
    return name, text.replace("]  [", "; ")


def _fill_bare_options(command: Any, args: list[str]) -> list[str]:
    """Insert ``*`` after each option that may be given without a value (its metavar has brackets) and is."""
    flags = {
        flag
        for parameter in command.params
        if parameter.param_type_name == "option" and str(parameter.metavar).startswith("[")
        for flag in parameter.opts
    }
    filled: list[str] = []
    for argument, next_argument in zip(args, [*args[1:], "--"], strict=False):
        filled.append(argument)
        if argument in flags and next_argument.startswith("-") and "--" not in filled:
            filled.append("*")
    return filled


class Verb(TyperCommand):
    """A command of ``quantforge``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; return the rest. Completion parses without type conversion."""
        if ctx.resilient_parsing:
            return parse_unconverted(self, ctx, args)
        return super().parse_args(ctx, _fill_bare_options(self, args))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts after the verb in the usage line."""
        arguments = [
            parameter
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "argument"
        ]
        return [
            "[OPTIONS]",
            *(str(parameter.metavar or parameter.name.upper()) for parameter in arguments),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options by group, in the order in which the groups occur."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            group = getattr(parameter, "rich_help_panel", None) or DEFAULT_GROUP
            if parameter.param_type_name == "argument":
                group, record = "Arguments", (record[0].partition(" <")[0], record[1])
            groups.setdefault(group, []).append(_readable_help(*record))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
