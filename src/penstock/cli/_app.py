"""What all verbs share: the fields of a configuration dataclass as options of the command line.

`configured` makes the options of a verb from the dataclass of its settings. So the command line, the file and the
Python call use the same names, and only `penstock.config.load` decides what a value means.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from penstock.config.convert import nearest
from penstock.config.describe import Field, default_word, settings, type_word
from penstock.config.load import load

R = TypeVar("R")

_GENERAL = "Run"


def configured(
    cls: type[Any],
    *,
    positional: str | None = None,
    flags: tuple[str, ...] = (),
    loader: Callable[..., Any] = load,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Turn a function of `(config: cls, *, own options…)` into a verb with one option per setting of `cls`.

    The verb takes `--config FILE` and `--key.of.setting VALUE` for every setting. `positional` names a setting that may
    also be its first argument. `flags` are settings that are true where they are named; others that are true or false
    take a value.
    The settings of families other than the default's are taken too, but not listed by `--help`: they are as many again.
    The function is called with the loaded configuration first and its own options by keyword. A `loader` takes the same
    arguments as `penstock.config.load.load`, for verbs whose defaults depend on other settings.
    """
    every = list(settings(cls))
    shown = [setting for setting in every if not setting.families]
    unlisted: dict[str, list[str]] = {}
    for setting in every:
        if setting.families:
            part, _, name = setting.key.rpartition(".")
            unlisted.setdefault(part, []).append(name)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=hints.get(name, Any), kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in list(inspect.signature(function).parameters.items())[1:]
        ]
        options = _options(shown, positional, flags) + _unlisted_options(unlisted)

        @functools.wraps(function)
        def verb(*arguments: Any, **given: Any) -> R:
            overrides: dict[str, Any] = {}
            if arguments and arguments[0] is not None and positional is not None:
                overrides[positional] = arguments[0]
            file = given.pop("config", None)
            for setting in shown:
                value = given.pop(_identifier(setting.key), None)
                if value is not None:
                    overrides[setting.key] = value
            for part in unlisted:
                for name, value in (given.pop(_identifier(f"{part}."), None) or {}).items():
                    overrides[f"{part}.{name}"] = value
            return function(loader(cls, file=file, overrides=overrides), **given)

        verb.__signature__ = inspect.Signature([*options, *own])  # type: ignore[attr-defined]
        del verb.__wrapped__  # its signature would be taken for this one's
        # For readers of the function's annotations, who do not ask for its signature.
        verb.__annotations__ = {parameter.name: parameter.annotation for parameter in [*options, *own]}
        return verb

    return decorate


def _options(shown: list[Field], positional: str | None, flags: tuple[str, ...]) -> list[inspect.Parameter]:
    options = []
    if positional is not None:
        about = next(setting for setting in shown if setting.key == positional)
        options.append(
            inspect.Parameter(
                positional,
                inspect.Parameter.POSITIONAL_ONLY,
                default=None,
                annotation=Annotated[str | None, Parameter(help=f"Same as --{positional}. {about.help}")],
            )
        )
    options.append(
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None,
                Parameter(help="TOML, YAML or JSON file of settings. Options given here override it."),
            ],
        )
    )
    groups: dict[str, Group] = {}
    for setting in shown:
        head = setting.key.partition(".")[0]
        head = head if _is_part(head, shown) else _GENERAL
        group = groups.setdefault(head, Group(head.capitalize(), sort_key=len(groups)))
        flag = setting.key in flags
        quiet = flag or setting.default is None
        options.append(
            inspect.Parameter(
                _identifier(setting.key),
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    bool | None if flag else str | None,
                    Parameter(
                        name=f"--{setting.key}",
                        help=setting.help,
                        group=group,
                        metavar=None if flag else type_word(setting.kind),
                        show_default=False if quiet else _constant(default_word(setting.default)),
                        allow_leading_hyphen=True,
                        negative="",
                    ),
                ],
            )
        )
    return options


def _unlisted_options(unlisted: dict[str, list[str]]) -> list[inspect.Parameter]:
    """One option for each part that has settings `--help` does not list: `--part.NAME VALUE` with any of the names."""

    def option(part: str, names: list[str]) -> inspect.Parameter:
        def check(_: Any, given: dict[str, str] | None) -> None:
            for name in given or ():
                if name not in names:
                    raise ValueError(f"It is not a setting.{nearest(name, names)}")

        parameter = Parameter(name=f"--{part}", show=False, allow_leading_hyphen=True, validator=check)
        kind = Annotated[dict[str, str] | None, parameter]
        only = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(_identifier(f"{part}."), only, default=None, annotation=kind)

    return [option(part, names) for part, names in unlisted.items()]


def _is_part(head: str, shown: list[Field]) -> bool:
    return any(setting.key.startswith(f"{head}.") for setting in shown)


def _identifier(key: str) -> str:
    # Two underscores replace the dot. The prefix keeps a setting named `config` apart from --config.
    return "setting__" + key.replace(".", "__")


def _constant(text: str) -> Callable[[Any], str]:
    return lambda _: text
