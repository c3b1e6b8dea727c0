"""Builds a frozen dataclass from gin files and `--gin.NAME=VALUE`.

gin parses the statements and builds the dataclass, whose fields check their values.
Added here: the location of every statement, one sentence for every error, and the rule
that whatever the command line names has an effect.
"""

import ast
import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import gin
from absl import flags
from gin import config_parser
from gin.config import (
    ConfigurableReference,
    ParserDelegate,
    iterate_references,
)

from bpd_jax.base import cli, settings
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import expand_home

T = TypeVar("T")

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# The folder of gin_configs/: inside the package in a wheel, beside it in a checkout.
_ROOT = _PACKAGE if (_PACKAGE / "gin_configs").is_dir() else _PACKAGE.parent
_COMMAND_LINE = "the command line"
# What gin raises for malformed statements, unknown names and failed imports.
_FAULTS = (SyntaxError, ValueError, TypeError, KeyError, ImportError, RecursionError)

_GIN_FILE = cli.DEFINE_path(
    "gin_file", [], "Configuration file; later ones override earlier ones."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "One setting NAME=VALUE; --gin.NAME=VALUE is the short form."
)


class Setting(NamedTuple):
    """One statement `NAME = VALUE`.

    Attributes:
      name: name of a parameter, such as `TrainConfig.steps`, or of a macro.
      value: value in gin's syntax.
      macros: names of the macros in the value.
      built: what the value is made by: `NAME` or `SCOPE/NAME` of classes.
      source: the file, or "the command line".
      location: `FILE:LINE` or `--gin.NAME=VALUE`.
    """

    name: str
    value: str
    macros: tuple[str, ...]
    built: tuple[str, ...]
    source: str
    location: str

    @property
    def owner(self) -> str:
        """The class whose parameter is set, or the macro itself."""
        return self.name.rpartition(".")[0] or self.name

    def is_in(self, used: Iterable[str]) -> bool:
        """Whether gin used the value, in its scope or in an inner one."""
        scope, slash, name = self.name.rpartition("/")
        end = "/" + ".".join(name.split(".")[-2:])  # Without the module.
        return any(
            f"/{each}".endswith(end) and each.startswith(scope + slash) for each in used
        )


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[T]):
    """A parsed configuration.

    Attributes:
      value: the requested dataclass.
      files: all files, in the order read; an included file comes after its includer.
      settings: all statements, in the order in which gin applied them.
      text: all effective settings, as one gin file without includes.
      operative: the settings that `value` was built from, including defaults.
    """

    value: T
    files: tuple[str, ...]
    settings: tuple[Setting, ...]
    text: str
    operative: str

    def describe(self) -> str:
        """All files in the order read, each with its settings."""
        effective = {setting.name: setting for setting in self.settings}
        lines = []
        for source in (*self.files, _COMMAND_LINE):
            selected = [each for each in self.settings if each.source == source]
            if selected or source != _COMMAND_LINE:
                lines.append(source if selected else f"{source} (sets nothing itself)")
            for setting in selected:
                later = effective[setting.name]
                note = "" if later is setting else f"   (overridden, {later.location})"
                lines.append(f"  {setting.name} = {setting.value}{note}")
        return "\n".join(lines)


def parse_flags(
    kind: type[T], *others: type[T], defaults: Sequence[str] = ()
) -> Parsed[T]:
    """Parses the flags; without defaults, `--gin_file` is required. See `parse`."""
    if not _GIN_FILE.value and not defaults:
        raise UserError(
            "--gin_file is missing: give a configuration file, such as "
            "--gin_file=runs/pretrain.gin."
        )
    paths, bindings = _GIN_FILE.value, _GIN_BINDINGS.value
    return parse(paths, bindings, kind, *others, defaults=defaults)


def parse(
    paths: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str],
    kind: type[T],
    *others: type[T],
    defaults: Sequence[str] = (),
) -> Parsed[T]:
    """Reads files, then single settings, and builds a `kind` from them.

    A file is looked up in the working directory, in the folder that holds
    `gin_configs/`, and in `gin_configs/` itself. gin's global state is cleared.

    Args:
      paths: configuration files; later settings override earlier ones.
      bindings: statements such as `TrainConfig.steps = 10`.
      kind: a registered dataclass.
      *others: one of these is built instead if something sets a field of it.
      defaults: statements that come first, and may be without effect.
    """
    gin.clear_config()
    try:
        gin.parse_config(list(defaults))
        reader = _Reader([], [])
        given = {os.fspath(path): reader.read_file(os.fspath(path)) for path in paths}
        for binding in bindings:
            reader.read(binding, _COMMAND_LINE)
        settings = tuple(reader.settings)
        _check_macros(settings)
        owners = {setting.owner.rpartition("/")[2] for setting in settings}
        chosen = next((other for other in others if other.__name__ in owners), kind)
        value, operative = _build(chosen, settings), gin.operative_config_str()
        _check_effects(given, settings, re.findall(r"(?m)^(\S+) =", operative))
        return Parsed(value, (*reader.files,), settings, gin.config_str(), operative)
    finally:
        gin.clear_config()


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Passes statements to gin one by one, and records where each stands."""

    files: list[str]
    settings: list[Setting]

    def read_file(
        self, name: str, location: str = _COMMAND_LINE, outer: tuple[str, ...] = ()
    ) -> list[Setting]:
        """Reads a file that is named at `location`; returns what it sets."""
        folders = (pathlib.Path(), _ROOT, _ROOT / "gin_configs")
        path = next((x / name for x in folders if _is_readable(x / name)), None)
        if path is None:
            raise UserError(
                f"{location} names the configuration file {name}, which does not "
                f"exist in this folder, in {_ROOT} or in {_ROOT / 'gin_configs'}."
            )
        name = str(path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path)
        if name in outer:
            raise UserError(f"{location} includes {name}, which includes itself.")
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {name}: {error}.") from error
        first = len(self.settings)
        self.files.append(name)
        self.read(text, name, (*outer, name))
        return self.settings[first:]

    def read(self, text: str, source: str, outer: tuple[str, ...] = ()) -> None:
        """Reads the statements of a file, or one of the command line."""
        flag = "--gin." + "=".join(map(str.strip, text.split("=", 1)))
        in_file = source != _COMMAND_LINE
        location = f"{source}:1" if in_file else flag
        try:
            parser = config_parser.ConfigParser(f"{text}\n", _Delegate())
            for statement in parser:
                if in_file:
                    location = f"{source}:{statement.location.line_num}"
                match statement:
                    case config_parser.IncludeStatement():
                        self.read_file(expand_home(statement.filename), location, outer)
                    case config_parser.ImportStatement():
                        gin.parse_config(statement.format())
                    case config_parser.BindingStatement(scope, owner, key, value, _):
                        name = f"{scope}/{owner}" if scope else owner
                        _check_binding(owner, key)
                        _check_singleton(scope, owner, key, value)
                        macro = (name, "gin.macro", "value")
                        gin.bind_parameter((scope, owner, key) if key else macro, value)
                        name = f"{name}.{key}" if key else name
                        references = [str(each) for each in iterate_references(value)]
                        macros, built = (
                            tuple(x[1:] for x in references if x.startswith(mark))
                            for mark in "%@"
                        )
                        built = tuple(x.removesuffix("()") for x in built)
                        about = (name, repr(value), macros, built, source, location)
                        self.settings.append(Setting(*about))
                if in_file:  # Of an error in the next statement.
                    location = f"{source}:{parser.current_token.start[0]}"
        except (*_FAULTS, tokenize.TokenError) as error:
            if in_file and (at := getattr(error, "lineno", None)):
                location = f"{source}:{at}"
            token = parser.current_token
            raise UserError(f"{location}: {_fault(error, token, location)}.") from error


class _Delegate(ParserDelegate):
    """Refuses references to unknown names."""

    def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
        _check_known(scoped_selector.rpartition("/")[2])
        return super().configurable_reference(scoped_selector, evaluate)


def _check_known(name: str) -> None:
    try:
        gin.get_configurable(name)
    except (KeyError, ValueError):
        close = _suggest(name, [*settings.registered])
        raise ValueError(f"unknown name {name}{close}") from None


def _check_binding(owner: str, parameter: str) -> None:
    """Refuses parameters of unknown classes, and unknown ones; macros have none."""
    if not parameter:
        return
    _check_known(owner)
    name = owner.rpartition(".")[2]
    if name in settings.registered:
        names = [*inspect.signature(settings.registered[name]).parameters]
        if parameter not in names:
            close = _suggest(parameter, names)
            raise ValueError(f"{name} has no parameter {parameter}{close}")


def _check_singleton(scope: str, owner: str, parameter: str, value: Any) -> None:
    """Refuses values of `NAME/singleton.constructor` that are no class."""
    is_constructor = parameter == "constructor" and owner.endswith("singleton")
    if is_constructor and not isinstance(value, ConfigurableReference):
        name = f"{scope}/singleton.constructor"
        raise ValueError(f"{name} must be a class, such as @TextTask")


def _is_readable(path: pathlib.Path) -> bool:
    """Whether it is a file, or a pipe, as of a shell's `<(…)`."""
    return path.exists() and not path.is_dir()


def _fault(error: Exception, token: tokenize.TokenInfo, location: str) -> str:
    """Description of an error in a statement, or in a flag, on one line.

    `token` is the one at which the parser stopped.
    """
    if isinstance(error, tokenize.TokenError):
        return "a bracket or a quote is not closed"
    # gin's own message quotes Python's parser, which prints an object's address.
    is_word = isinstance(error, SyntaxError) and _is_no_value(token)
    if not is_word and not isinstance(error, UnicodeError):
        text = str(error.args[0] if isinstance(error, SyntaxError) else error)
        return text.partition("\n")[0].rstrip(". ")
    name, _, value = location.partition("=")
    word = " ".join(token.string.split()) if is_word else value
    quoted = f"{name}=\"'{value}'\"" if value and "'" not in value else "'TEXT'"
    return (
        f"{word} is not a gin value: text needs quotes, as in {quoted}, and constants "
        "are True, False and None"
    )


def _is_no_value(token: tokenize.TokenInfo) -> bool:
    """Whether it is a word, a number or a text that Python does not read as one."""
    if token.type not in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING):
        return False
    try:
        ast.literal_eval(token.string)
    except (ValueError, SyntaxError):
        return True
    return False


def _check_macros(settings: Sequence[Setting]) -> None:
    """Refuses macros that are required, undefined or never used."""
    for setting in {each.name: each for each in settings}.values():
        if "gin.REQUIRED" in setting.macros:
            raise UserError(
                f"{setting.name} has no value: add --gin.{setting.name}=VALUE "
                f"({setting.location} requires it)."
            )
    defined = [setting.name for setting in settings if setting.owner == setting.name]
    used = {
        macro: each for each in settings for macro in each.macros if "." not in macro
    }
    if "TASK" in used.keys() - set(defined):
        raise UserError(
            "no file names a task: add --gin_file=gin_configs/tasks/NAME.gin "
            f"({used['TASK'].location} requires it)."
        )
    for macro, setting in used.items():
        if macro not in defined:
            reason = f"the macro %{macro} is not defined{_suggest(macro, defined)}"
            raise UserError(f"{setting.location}: {reason}.")
    for setting in settings:
        if setting.name in defined and setting.name not in used:
            close = _suggest(setting.name, [*used])
            raise UserError(f"{setting.location}: nothing uses {setting.name}{close}.")


def _build(kind: type[T], given: Sequence[Setting]) -> T:
    """Builds a `kind`; `given` are the settings that gin knows."""
    try:
        return gin.get_configurable(kind)()
    except UserError as error:
        # gin appends lines about its own calls.
        raise UserError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise UserError("the configuration has a cycle of macros.") from None
    except TypeError:
        built = (selector for setting in given for selector in setting.built)
        for selector in (kind.__name__, *built):
            for name in _missing(selector):
                raise UserError(
                    f"{name} has no value: no file sets it; add --gin.{name}=VALUE."
                ) from None
        raise


def _missing(selector: str) -> Iterator[str]:
    """Parameters of `SCOPE/NAME` that have neither a value nor a default."""
    target = selector.rpartition("/")[2]
    made_by = settings.registered.get(target) or gin.get_configurable(target)
    for parameter in inspect.signature(made_by).parameters.values():
        names = {f"{each}.{parameter.name}" for each in (selector, target)}
        if parameter.default is parameter.empty and not any(map(_is_bound, names)):
            yield f"{target}.{parameter.name}"


def _is_bound(name: str) -> bool:
    try:
        gin.query_parameter(name)
    except ValueError:
        return False
    return True


def _check_effects(
    given: Mapping[str, list[Setting]], settings: Sequence[Setting], used: list[str]
) -> None:
    """Refuses what the command line names without any effect.

    A file may also set what another command needs.
    """
    for setting in settings:
        if setting.source == _COMMAND_LINE and not setting.is_in(used):
            hint = f"leave it out, or set a parameter to @{setting.owner}()"
            hint = "another setting replaces it" if "." not in setting.name else hint
            reason = f"nothing uses {setting.owner}"
            raise UserError(f"{setting.location}: {reason}: {hint}.")
    for file, in_file in given.items():
        if not any(setting.is_in(used) for setting in in_file):
            names = ", ".join(sorted({setting.owner for setting in in_file}))
            raise UserError(
                f"--gin_file={file} has no effect: nothing here uses {names or 'it'}."
            )


def _suggest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}"
    return f": choose from {', '.join(sorted(names))}" if names else ""
