"""The help page of a verb, which begins with its whole docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from cyclopts import App


def describe_by_docstring(app: App, words: Sequence[str]) -> None:
    """Have the help page of the verb that the command line `words` names begin with the verb's docstring.

    Verbs are imported late, so each is registered with the line that lists it. Without this, the line is all that its
    own page says.
    """
    command = app.parse_commands([word for word in words if word not in app.help_flags])[1][-1]
    verb: Any = command.default_command
    if getattr(verb, "__module__", "").startswith("penstock."):  # and not a flag of the parser's own
        command.help = verb.__doc__ = unwrapped(inspect.getdoc(verb) or "")


def unwrapped(doc: str) -> str:
    """A docstring with each paragraph, and each description of an option, on one line, for terminals of any width.

    Indented lines before the options are examples, and stay as they are.
    """
    text, heading, options = doc.partition("\n\nParameters\n")
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    options = re.sub(r"(?m)^(\w+) ", r"\1\n    ", options.replace("\n    ", " "))
    return text + heading + options
