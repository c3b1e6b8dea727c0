"""Builds a frozen dataclass from gin files and `--gin.NAME=VALUE`.

gin reads the statements and builds the dataclass, whose fields check their values.
Added here: the location of every statement, one sentence for every error, and the rule
that whatever the command line names has an effect.
"""

import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import gin
from absl import flags
from gin import config_parser
from gin.config import ConfigurableReference, ParserDelegate

from bpd_jax.base import gin_registry
from bpd_jax.base.errors import UserError

T = TypeVar("T")

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# The folder of gin_configs/: inside the package in a wheel, beside it in a checkout.
_ROOT = _PACKAGE if (_PACKAGE / "gin_configs").is_dir() else _PACKAGE.parent
_COMMAND_LINE = "the command line"

_GIN_FILE = flags.DEFINE_multi_string(
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
      source: the file, or "the command line".
      location: `FILE:LINE` or `--gin.NAME=VALUE`.
    """

    name: str
    value: str
    macros: tuple[str, ...]
    source: str
    location: str

    @property
    def owner(self) -> str:
        """The class whose parameter is set, or the macro itself."""
        return self.name.rpartition(".")[0] or self.name

    def is_in(self, used: set[str]) -> bool:
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
        reader = _Reader()
        given = {os.fspath(path): reader.read_file(os.fspath(path)) for path in paths}
        for binding in bindings:
            reader.read(binding, _COMMAND_LINE)
        _check_macros(reader.settings)
        owners = {setting.owner.rpartition("/")[2] for setting in reader.settings}
        chosen = next((other for other in others if other.__name__ in owners), kind)
        value, operative = _build(chosen), gin.operative_config_str()
        used = set(re.findall(r"^(\S+) =", operative, re.MULTILINE))
        _check_effects(given, reader.settings, used)
        files, settings = tuple(reader.files), tuple(reader.settings)
        return Parsed(value, files, settings, gin.config_str(), operative)
    finally:
        gin.clear_config()


class _Reader:
    """Passes statements to gin one by one, and records where each stands.

    gin's own search fails if the folder of a name, such as runs/, can be imported.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.settings: list[Setting] = []
        self._open: list[str] = []  # Files that are being read.

    def read_file(self, name: str, location: str = _COMMAND_LINE) -> list[Setting]:
        """Reads a file that is named at `location`; returns what it sets."""
        places = (name, name), (name, _ROOT / name), (f"gin_configs/{name}", None)
        for name, path in places:
            path = pathlib.Path(path or _ROOT / name)
            if path.is_file():
                break
        else:
            raise UserError(
                f"{location} names the configuration file {places[0][0]}, which does "
                f"not exist in this folder, in {_ROOT} or in {_ROOT / 'gin_configs'}."
            )
        if name in self._open:
            raise UserError(f"{location} includes {name}, which includes itself.")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {name}: {error}.") from error
        first = len(self.settings)
        self.files.append(name)
        self._open.append(name)
        self.read(text, name)
        self._open.pop()
        return self.settings[first:]

    def read(self, text: str, source: str) -> None:
        """Reads the statements of a file, or one of the command line."""
        parser, line = None, 1
        try:
            parser = config_parser.ConfigParser(f"{text}\n", ParserDelegate())
            for statement in parser:
                line = statement.location.line_num
                location = _location(text, source, line)
                if isinstance(statement, config_parser.IncludeStatement):
                    self.read_file(statement.filename, location)
                elif isinstance(statement, config_parser.ImportStatement):
                    gin.parse_config(statement.format())
                elif isinstance(statement, config_parser.BindingStatement):
                    self._bind(statement, source, location)
                line = parser.current_token.start[0]
        except (*_FAULTS, tokenize.TokenError) as error:
            location = _location(text, source, getattr(error, "lineno", None) or line)
            flag = location if source == _COMMAND_LINE else ""
            raise UserError(f"{location}: {_fault(error, flag)}.") from error

    def _bind(
        self, statement: config_parser.BindingStatement, source: str, location: str
    ) -> None:
        scope, owner, parameter, value, _ = statement
        name = f"{scope}/{owner}" if scope else owner
        if parameter:
            gin.bind_parameter((scope, owner, parameter), value)
            name = f"{name}.{parameter}"
        else:
            gin.bind_parameter((name, "gin.macro", "value"), value)
        macros = tuple(_macros(value))
        self.settings.append(Setting(name, repr(value), macros, source, location))


# What gin raises for malformed statements, unknown names and failed imports.
_FAULTS = (SyntaxError, ValueError, KeyError, ImportError, RecursionError)


def _location(text: str, source: str, line: int) -> str:
    if source != _COMMAND_LINE:
        return f"{source}:{line}"
    return "--gin." + "=".join(map(str.strip, text.split("=", 1)))


def _macros(value: object) -> Iterator[str]:
    if isinstance(value, ConfigurableReference):
        if value.selector in ("gin.macro", "gin.constant"):
            yield "/".join(value.scopes)
    elif isinstance(value, dict):
        yield from _macros([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _macros(item)


def _fault(error: Exception, flag: str) -> str:
    """Description of an error in a statement, or in a flag, on one line."""
    if isinstance(error, RecursionError):
        return "its value is nested too deeply"
    if isinstance(error, tokenize.TokenError):
        return "a bracket or a quote is not closed"
    if isinstance(error, UnicodeError):  # from Python 3.12 on
        return "its value is not a gin value, because it is not valid Unicode"
    text = str(error.args[0] if isinstance(error, SyntaxError) else error)
    if unknown := re.match(r"No configurable matching (?:\w+ )?'@?([^'()]*)", text):
        known = list(gin_registry.registered)
        return f"unknown name {unknown[1]}{_suggest(unknown[1], known)}"
    if wrong := re.match(r"Configurable '(.*)' doesn't .* named '(.*)'", text):
        target = gin_registry.registered.get(wrong[1].rpartition(".")[2])
        names = list(inspect.signature(target).parameters) if target else []
        return f"{wrong[1]} has no parameter {wrong[2]}{_suggest(wrong[2], names)}"
    name, _, value = flag.partition("=")
    quoted = f"{name}=\"'{value}'\"" if re.match(r"[^-'\"@%\[({]", value) else "'TEXT'"
    # gin quotes Python's parser, which prints an object's address.
    token = re.search(r"Failed to parse token '(.*)'", text, re.DOTALL)
    if not token and (quoted == "'TEXT'" or not isinstance(error, SyntaxError)):
        return text.partition("\n")[0].rstrip(". ")
    word = " ".join(token[1].split()) if token else value
    return (
        f"{word} is not a gin value: text needs quotes, as in {quoted}, and constants "
        "are True, False and None"
    )


def _check_macros(settings: Sequence[Setting]) -> None:
    """Raises a `UserError` for a macro that is required, undefined or never used."""
    for setting in {each.name: each for each in settings}.values():
        if "gin.REQUIRED" in setting.macros:
            raise UserError(
                f"{setting.name} has no value: add --gin.{setting.name}=VALUE "
                f"({setting.location} requires it)."
            )
    defined = [setting.name for setting in settings if setting.owner == setting.name]
    used = {macro for setting in settings for macro in setting.macros}
    for setting in settings:
        for macro in setting.macros:
            if macro == "TASK" and macro not in defined:
                raise UserError(
                    "no file names a task: add --gin_file=gin_configs/tasks/NAME.gin "
                    f"({setting.location} requires it)."
                )
            if macro not in defined and "." not in macro:
                raise UserError(
                    f"{setting.location}: the macro %{macro} is not defined"
                    f"{_suggest(macro, defined)}."
                )
        if setting.name in defined and setting.name not in used:
            raise UserError(
                f"{setting.location}: nothing uses {setting.name}"
                f"{_suggest(setting.name, sorted(used - {'gin.REQUIRED'}))}."
            )


def _build(kind: type[T]) -> T:
    try:
        return gin.get_configurable(kind)()
    except UserError as error:
        # gin appends lines about its own calls.
        raise UserError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise UserError("the configuration has a cycle of macros.") from None
    except TypeError as error:
        # The missing arguments are only in Python's message.
        missing = re.match(r"(\w+)(?:\.__init__)?\(\) missing .*?'(.*?)'", str(error))
        if missing is None:
            raise
        name = ".".join(missing.groups())
        raise UserError(
            f"{name} has no value: no file sets it; add --gin.{name}=VALUE."
        ) from None


def _check_effects(
    given: dict[str, list[Setting]], settings: Sequence[Setting], used: set[str]
) -> None:
    """Raises a `UserError` for what the command line names without any effect.

    A file may also set what another command needs.
    """
    for setting in settings:
        if setting.source == _COMMAND_LINE and not setting.is_in(used):
            hint = f"leave it out, or set a parameter to @{setting.owner}()"
            hint = "another setting replaces it" if "." not in setting.name else hint
            raise UserError(
                f"{setting.location}: nothing uses {setting.owner}: {hint}."
            )
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
