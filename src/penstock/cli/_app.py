"""The fields of a configuration dataclass as options of the command line, for all verbs.

`configured` makes the options of a verb from the dataclass of its settings. So the command line, the file and the
Python call use the same names, and only `penstock.config.load` decides what a value means.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from penstock.config.convert import TypedText, nearest
from penstock.config.describe import Field, default_word, settings, type_word
from penstock.config.load import load
from penstock.config.model import PRESETS

R = TypeVar("R")

_GENERAL = "Run"
_needed = Group("Most needed", sort_key=-1)
_SEVERAL = inspect.Parameter.VAR_POSITIONAL
_ELSEWHERE = " docs/reference/settings.md lists the fields of the others."


def configured(
    cls: type[Any], *, positional: str | None = None, flags: tuple[str, ...] = (),
    aliases: Mapping[str, str] | None = None, file: tuple[str, ...] = ("--config",), first: tuple[str, ...] = (),
    loader: Callable[..., Any] = load,
) -> Callable[[Callable[..., R]], Callable[..., R]]:  # fmt: skip
    """Turn a function of `(config: cls, *, own options…)` into a verb with one option per setting of `cls`.

    The verb takes `--config FILE`, or one of the names in `file`, and `--key.of.setting VALUE` for every setting.
    `positional` names a setting that may also be the first argument. `flags` are settings that are true where they are
    named; other booleans take a value. `aliases` are other prefixes of options, separated by spaces. With `first`,
    `--help` lists only these settings, and `--help-all` all. Settings of families other than the default's are not
    listed, because they would double the page.

    The function is called with the loaded configuration, the words after the positional setting if it takes any
    (`*words`), and its own options by keyword. A `loader` has the arguments of `penstock.config.load.load`, for verbs
    whose defaults depend on other settings.
    """
    shown: list[Field] = []
    unlisted: dict[str, list[str]] = {}
    for setting in settings(cls):
        if setting.families:
            part, _, name = setting.key.rpartition(".")
            unlisted.setdefault(part, []).append(name)
        else:
            shown.append(setting)
    about = "TOML, YAML or JSON file of settings. Options given here override it."
    of_settings = [
        *_options(shown, positional, flags, aliases or {}, first),
        _option("config", Path, Parameter(name=list(file), help=about, group=_needed if first else None)),
        *(_unlisted(part, names) for part, names in unlisted.items()),
    ]

    def read(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The configuration from the words of the command line; options of settings are removed from `options`."""
        overrides = dict(zip([positional], arguments))
        path = options.pop("config", None)
        for setting in shown:
            value = options.pop(_identifier(setting.key), None)
            if isinstance(value, list) and typing.get_args(setting.kind)[0] != TypedText:
                value = ",".join(value)  # an option that was given several times
            if value is not None:
                overrides[setting.key] = value
        for part in unlisted:
            for name, value in (options.pop(_identifier(f"{part}."), None) or {}).items():
                overrides[f"{part}.{name}"] = value
        return loader(cls, file=path, overrides=overrides)

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(function)
        def verb(*arguments: Any, **options: Any) -> R:
            config = read(arguments, options)
            return function(config, *(arguments[1:] if positional else arguments), **options)

        verb.read = read  # type: ignore[attr-defined]
        _show_options(verb, sorted([*of_settings, *_own(function)], key=lambda option: option.kind), first)
        return verb

    return decorate


def _own(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """A verb's own options, which are not settings."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, option in list(inspect.signature(function).parameters.items())[1:]:
        kind = option.kind if option.kind is _SEVERAL else inspect.Parameter.KEYWORD_ONLY
        yield option.replace(annotation=hints.get(name, Any), kind=kind)


def _show_options(verb: Any, options: list[inspect.Parameter], first: tuple[str, ...]) -> None:
    """Give a verb the signature that the parser and the help pages read; with `first`, one for each of two pages."""
    verb.__signature__ = inspect.Signature(options)
    if first:
        needed = {*map(_identifier, first), "config"}
        short = [option for option in options if option.name in needed]
        verb.pages = (inspect.Signature(short), inspect.Signature(options))
    del verb.__wrapped__  # or its signature would be read instead
    # For code that reads annotations instead of the signature.
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in options}


def load_or_described(cls: type[Any], *, file: Path | None, overrides: Mapping[str, Any]) -> Any:
    """Load settings as `load` does, where the model may also be a folder, a config.json or a name on the hub, each with
    or without `hf:`, or timm's name after `timm:`. The model's name and folder become the settings `name` and
    `weights`, and `package.module:function` the setting `factory`, where these settings exist."""
    settings, known = dict(overrides), {field.name for field in fields(cls)}
    named = settings.get("model")
    typed = named if isinstance(named, str) else ""
    named = typed.removeprefix("hf:")
    library = named != typed or named.startswith("timm:")
    if ":" in named and not library and "factory" in known:
        settings["factory"] = settings.pop("model")
    elif library or (named not in PRESETS and (Path(named).exists() or "/" in named) and named):
        from penstock.config.theirs.read import named_model

        model = named_model(named)
        described = {"model": model.config, "name": model.name, "weights": model.folder}
        settings = {key: value for key, value in described.items() if key in known} | settings
        settings["model"] = model.config
    return load(cls, file=file, overrides=settings)


def _option(
    name: str, kind: Any, about: Parameter, *, place: Any = inspect.Parameter.KEYWORD_ONLY
) -> inspect.Parameter:
    return inspect.Parameter(name, place, default=None, annotation=Annotated[kind | None, about])


def _options(
    shown: list[Field], positional: str | None, flags: tuple[str, ...], aliases: Mapping[str, str],
    needed: tuple[str, ...],
) -> Iterator[inspect.Parameter]:  # fmt: skip
    """The listed settings, the positional one first, then the most needed ones, grouped by part."""
    parts = {setting.key.partition(".")[0] for setting in shown if "." in setting.key}
    groups: dict[str, Group] = {}
    order = [positional, *needed, *(setting.key for setting in shown)]
    for setting in sorted(shown, key=lambda setting: order.index(setting.key)):
        head = setting.key.partition(".")[0]
        head = head if head in parts else _GENERAL
        first, flag = setting.key == positional, setting.key in flags
        begins = [begin for begin in aliases if setting.key.startswith(begin)]
        short = [
            f"--{word}{setting.key.removeprefix(begin)}"
            for begin in begins
            for word in aliases[begin].split(" ")
        ]
        group = groups.setdefault(head, Group(head.capitalize(), sort_key=len(groups)))
        default = "" if flag or setting.default is None else default_word(setting.default)
        about = Parameter(
            name=[*short, f"--{setting.key}"],
            help=setting.help + (_ELSEWHERE if setting.key.endswith(".family") else ""),
            group=_needed if setting.key in needed else group,
            metavar=None if flag else type_word(setting.kind),
            show_default=_constant(default) if default else False,
            allow_leading_hyphen=not first,  # or it would take an unknown option for its value
            negative="",
        )
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD if first else inspect.Parameter.KEYWORD_ONLY
        kind: Any = bool if flag else list[str] if typing.get_origin(setting.kind) is tuple else str
        yield _option(_identifier(setting.key), kind, about, place=place)


def _unlisted(part: str, names: list[str]) -> inspect.Parameter:
    """The option that accepts the unlisted settings of a part: `--part.NAME VALUE` with any of their names."""

    def check(_: Any, values: dict[str, str] | None) -> None:
        for name in values or ():
            if name not in names:
                raise ValueError(f"It is not a setting.{nearest(name, names)}")

    about = Parameter(name=f"--{part}", show=False, allow_leading_hyphen=True, validator=check)
    return _option(_identifier(f"{part}."), dict[str, str], about)


def _identifier(key: str) -> str:
    # Two underscores replace the dot. The prefix keeps a setting named `config` apart from --config.
    return "setting__" + key.replace(".", "__")


def _constant(text: str) -> Callable[[Any], str]:
    return lambda _: text
