"""Refusals of the parser of the command line, in our own words instead of those of the libraries under it."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from quantforge.cli import hints
from quantforge.errors import UsageError

# typer carries its own copy of click, or uses it.
CLICK: Any = typer.BadParameter.__bases__[0]


def in_our_words(error: Any, arguments: list[str], group: Any) -> UsageError:
    """Return a refusal of the parser as an error of ours.

    Args:
        error: the refusal, an instance of `CLICK`.
        arguments: what was typed.
        group: the command that has the verbs.
    """
    verb = next((word for word in arguments if not word.startswith("-")), "")
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    kind = type(error).__name__
    early = _before_the_verb(arguments, group)
    if early is not None or verb not in group.commands:
        return early or _without_verb(option, verb, group)
    known = _flags(group.commands[verb])
    more = f"`quantforge help {verb}` lists what it takes"
    flag = str(option or "") if param is None else min(param.opts, key=len)
    if (several := hints.typed_option(flag, arguments)) != flag:
        kind, option = "NoSuchOption", several
    if kind == "NoSuchOption":
        others: dict[str, str] = {}
        for name, one in group.commands.items():
            others |= {
                flag: ", ".join(filter(None, (others.get(flag), name))) for flag in _flags(one)
            }
        return UsageError(
            f"{verb} has no option {option}",
            hints.for_option(str(option), verb, known, others, arguments),
        )
    if kind == "BadOptionUsage":
        return _valueless(group.commands[verb], str(option), arguments, more)
    if kind == "MissingParameter" and param is not None:
        name = _name(param)
        line = _completed(group.commands[verb], arguments, verb) or _example(group.commands[verb])
        return UsageError(f"{verb}: {name} is missing", line or more)
    if param is not None:
        value = _typed_for(param, arguments)
        hint = hints.for_value(_name(param), value, known) or more
        return UsageError(f"{_name(param)}{value}: {_wanted(param)}", hint)
    extra = getattr(getattr(error, "ctx", None), "args", None) or _extra(error)
    if extra:
        said = " ".join(extra)
        return UsageError(
            f"{verb}: nothing takes '{said}'", hints.for_extra(extra, verb, _model(arguments, verb))
        )
    return UsageError(error.format_message(), more)


def _without_verb(option: Any, verb: str, group: Any) -> UsageError:
    if option is None or verb:
        return UsageError(f"no verb '{verb}'", hints.for_verb(verb, list(group.commands)))
    flags = [*_flags(group), "--help"]
    hint = hints.for_flag_of_all(str(option), flags, group.commands)
    return UsageError(f"no option {option} without a verb", hint)


def _before_the_verb(arguments: list[str], group: Any) -> UsageError | None:
    """Return the refusal of options of a verb that stand in front of it; None where there are none."""
    verb = next((word for word in arguments if word in group.commands), "")
    first = arguments[: arguments.index(verb)] if verb else []
    flags = [word.partition("=")[0] for word in first if word.startswith("-")]
    if not flags or not first[0].startswith("-") or not {*flags} <= {*_flags(group.commands[verb])}:
        return None
    typed = ["quantforge", *arguments[len(first) :], *first]
    return UsageError(f"{flags[0]}: options come behind the verb", shlex.join(typed))


def _model(arguments: list[str], verb: str) -> str:
    """Return the word that directly follows the verb, "" for an option."""
    following = arguments[arguments.index(verb) + 1 :][:1]
    return "" if following[:1] and following[0].startswith("-") else "".join(following)


def _completed(command: Any, arguments: list[str], verb: str) -> str:
    """Return what was typed with the arguments that are missing, "" where nothing or some argument was typed."""
    typed = arguments[arguments.index(verb) + 1 :]
    if not typed or _model(arguments, verb):
        return ""
    wanted = [one for one in command.params if one.param_type_name == "argument" and one.required]
    names = [_name(one).removesuffix("...") for one in wanted]
    told = "; ".join(
        f"{name}: {str(one.help).rstrip('.')}" for name, one in zip(names, wanted, strict=True)
    )
    return f"{shlex.join(['quantforge', verb, *names, *typed])} ({told})"


def _valueless(command: Any, option: str, arguments: list[str], more: str) -> UsageError:
    """Return the refusal of a flag that was given a value, or of an option that was given none."""
    for one in command.params:
        if option in {*one.opts, *one.secondary_opts} and getattr(one, "is_flag", False):
            value = _typed_for(one, arguments).strip()
            pair = (*one.opts[:1], *one.secondary_opts[:1])
            return UsageError(f"{option} takes no value", hints.for_flag(option, value, pair))
    return UsageError(f"{option} needs a value", more)


def _flags(command: Any) -> list[str]:
    return [
        flag
        for one in command.params
        for flag in (*one.opts, *one.secondary_opts)
        if flag[0] == "-"
    ]


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return str(max(param.opts, key=len))


def _typed_for(param: Any, arguments: list[str]) -> str:
    """Return the value that was typed for an option, after a blank."""
    for place, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in param.opts:
            return f" {value}" if equals else f" {' '.join(arguments[place + 1 : place + 2])}"
    return ""


def _wanted(param: Any) -> str:
    """Return which values an option takes; each version of typer has them elsewhere."""
    described = getattr(param, "type_descriptor", None)
    kind = getattr(described, "annotation", None) or getattr(param.type, "name", "")
    bounds = param if described is not None else param.type
    least, most = getattr(bounds, "min", None), getattr(bounds, "max", None)
    what = "a number" if "float" in str(kind) else "a whole number"
    if least is not None and most is not None:
        return f"{what} from {least} to {most} is expected"
    return f"{what} is expected" if least is None else f"{what}, {least} at least, is expected"


def _extra(error: Any) -> list[str]:
    _, opened, inside = str(getattr(error, "message", "")).rpartition("(")
    return inside.rstrip(")").split() if opened else []


def _example(command: Any) -> str:
    said = str(command.epilog or "").partition("Example: ")[2]
    return f"e.g. {said}" if said else ""
