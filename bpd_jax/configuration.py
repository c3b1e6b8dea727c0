"""Builds a frozen dataclass from gin files and `--gin.NAME=VALUE`.

gin sets only the fields of the dataclasses in `CONFIGURABLES`, and no other module uses
gin. The location of every statement is recorded, so that errors and `--dry_run` name
the file and the line.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import pathlib
import re
import tokenize
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import gin
from absl import flags
from gin import config_parser
from gin.config import ConfigurableReference, ParserDelegate

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.options import DecodeConfig

T = TypeVar("T")

_PACKAGE = pathlib.Path(__file__).resolve().parent
# The folder of gin_configs/: inside the package in a wheel, beside it in a checkout.
_ROOT = _PACKAGE if (_PACKAGE / "gin_configs").is_dir() else _PACKAGE.parent
_COMMAND_LINE = "the command line"
_REQUIRED = "gin.REQUIRED"
# The macro that the files of gin_configs/tasks/ define.
_TASK = "TASK"
# The vocabulary size of GPT-2 and GPT-3, for hosts without their tokenizer.
_GPT3_TOKENS = 50257

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "Configuration file; later ones override earlier ones."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "One setting NAME=VALUE; --gin.NAME=VALUE is the short form."
)


# The module of each dataclass (or function) whose arguments gin files set. A module is
# imported when a file first names its dataclass.
CONFIGURABLES = {
    "BlockDrafterConfig": "models.drafter_config",
    "BlockHeadsConfig": "models.blockwise_config",
    "BlockwiseConfig": "models.blockwise_config",
    "ComputeConfig": "models.compute",
    "DecodeConfig": "decoding.options",
    "DecodeOptions": "decoding.options",
    "ExampleTask": "data.example_task",
    "HeadSchedule": "training.head_schedule",
    "HeadsTrainConfig": "training.heads.heads_config",
    "MeshConfig": "models.partitioning",
    "OptimizerConfig": "training.config",
    "RotaryConfig": "models.rotary",
    "StudyConfig": "studies.study_config",
    "TextTask": "data.text_task",
    "TrainConfig": "training.config",
    "TransformerConfig": "models.transformer_config",
    "vocabulary_size": "configuration",
}


@functools.cache
def configurable(name: str) -> Callable[..., Any] | None:
    """Imports and registers a dataclass or function; None if `name` is unknown."""
    if name not in CONFIGURABLES:
        return None
    module = importlib.import_module(f"bpd_jax.{CONFIGURABLES[name]}")
    target: Callable[..., Any] = getattr(module, name)
    gin.external_configurable(target, module="bpd_jax")
    return target


class _Delegate(ParserDelegate):
    """Registers references `@NAME` before gin resolves them."""

    def configurable_reference(self, name: str, evaluate: bool) -> Any:
        configurable(name.rpartition("/")[2].rpartition(".")[2])
        return super().configurable_reference(name, evaluate)


def vocabulary_size(task: Any) -> int:
    """Size of the vocabulary of a task, without training a tokenizer.

    For generations it is the vocabulary size of the model that generated them, which
    may be larger than that of its tokenizer.
    """
    from bpd_jax.data import generations, tokenizer
    from bpd_jax.data.text_task import GENERATIONS, TextTask

    if isinstance(task, TextTask) and task.corpus == GENERATIONS:
        return int(generations.read_header(task.text_files or "")["vocab_size"])
    if task.trained_size is not None:
        return int(task.trained_size)
    if task.vocabulary == "gpt3":
        return _GPT3_TOKENS
    return tokenizer.named_tokenizer(task.vocabulary).vocab_size


@dataclasses.dataclass(frozen=True)
class GinBinding:
    """One statement `NAME = VALUE`.

    Attributes:
      name: name of a parameter, such as `TrainConfig.steps`, or of a macro.
      value: value in gin's syntax.
      source: the file, or "the command line".
      line: line number in the file, from 1.
      macros: names of the macros in the value.
    """

    name: str
    value: str
    source: str
    line: int
    macros: tuple[str, ...]

    @property
    def location(self) -> str:
        """The location of the statement, for messages."""
        if self.source == _COMMAND_LINE:
            return f"--gin.{self.name}={self.value}"
        return f"{self.source}:{self.line}"

    @property
    def is_macro(self) -> bool:
        """Whether the statement defines a macro."""
        return "." not in self.name

    @property
    def target(self) -> str:
        """The dataclass whose parameter is set; "" for a macro."""
        return re.split("[./]", f".{self.name}")[-2]


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
    settings: tuple[GinBinding, ...]
    text: str
    operative: str

    def describe(self) -> str:
        """All files in the order read, each with its settings."""
        effective = {setting.name: setting for setting in self.settings}
        lines = []
        for source in (*self.files, _COMMAND_LINE):
            selected = [
                setting for setting in self.settings if setting.source == source
            ]
            if source == _COMMAND_LINE and not selected:
                continue
            lines.append(source if selected else f"{source} (sets nothing itself)")
            for setting in selected:
                later = effective[setting.name]
                note = "" if later is setting else f"   (overridden, {later.location})"
                lines.append(f"  {setting.name} = {setting.value}{note}")
        return "\n".join(lines)


def has_files() -> bool:
    """Whether `--gin_file` is given."""
    return bool(_GIN_FILE.value)


def parse_flags(kind: type[T], *others: type[T]) -> Parsed[T]:
    """Parses `--gin_file` and `--gin.NAME=VALUE`; see `parse`."""
    if not _GIN_FILE.value:
        raise UserError(
            "--gin_file is missing: give a configuration file, such as "
            "--gin_file=runs/pretrain.gin."
        )
    return parse(_GIN_FILE.value, _GIN_BINDINGS.value, kind, *others)


def parse_decode_flags() -> DecodeConfig:
    """The `DecodeConfig` from gin; without gin files and settings, the defaults."""
    bindings = ["DecodeConfig.options = @DecodeOptions()", *_GIN_BINDINGS.value]
    return parse(_GIN_FILE.value, bindings, DecodeConfig).value


def parse(
    paths: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str],
    kind: type[T],
    *others: type[T],
) -> Parsed[T]:
    """Reads files, then single settings, and builds a `kind` from them.

    A file is looked up in the working directory, in the folder that holds
    `gin_configs/`, and in `gin_configs/` itself, so that `runs/pretrain.gin` and
    `gin_configs/runs/pretrain.gin` name the same file. gin's global state is cleared
    afterwards.

    Args:
      paths: configuration files; later settings override earlier ones.
      bindings: statements such as `TrainConfig.steps = 10`.
      kind: a registered dataclass.
      *others: one of these is built instead if something sets a field of it.

    Raises:
      UserError: a file is missing or malformed, a name is unknown, a macro or a setting
        has no effect, or a value is missing or out of range.
    """
    gin.clear_config()
    try:
        reader = _GinReader()
        for path in paths:
            reader.read_file(os.fspath(path), "the command line")
        for binding in bindings:
            reader.read_binding(binding)
        reader.check_required()
        reader.check_macros()
        bound = {setting.name.partition(".")[0] for setting in reader.settings}
        built = next((o for o in others if o.__name__ in bound), kind)
        reader.check_references(built.__name__)
        value = _build(built)
        return Parsed(
            value,
            tuple(reader.files),
            tuple(reader.settings),
            gin.config_str(),
            gin.operative_config_str(),
        )
    finally:
        gin.clear_config()


class _GinReader:
    """Applies statements one by one and keeps a record of each."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.settings: list[GinBinding] = []
        self._open: list[str] = []  # Files that are being read.

    def read_file(self, name: str, location: str) -> None:
        """Reads a file that is named at `location`."""
        name, path = _find_file(name, location)
        if name in self._open:
            raise UserError(f"{location} includes {name}, which includes itself.")
        self.files.append(name)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {name}: {error}.") from error
        self._open.append(name)
        self._read(text, name)
        self._open.pop()

    def read_binding(self, binding: str) -> None:
        """Reads one statement from the command line."""
        self._read(binding + "\n", _COMMAND_LINE)

    def _read(self, text: str, source: str) -> None:
        for statement in _statements(text, source):
            location = f"{source}:{statement.location.line_num}"
            if isinstance(statement, config_parser.IncludeStatement):
                self.read_file(statement.filename, location)
            elif isinstance(statement, config_parser.BindingStatement):
                self._bind(statement, source)
            elif isinstance(statement, config_parser.ImportStatement):
                raise UserError(
                    f"{location}: imports are not supported; gin files set the "
                    f"arguments of {', '.join(sorted(CONFIGURABLES))}."
                )

    def _bind(self, statement: config_parser.BindingStatement, source: str) -> None:
        scope, selector, argument, value, location = statement
        scoped = f"{scope}/{selector}" if scope else selector
        setting = GinBinding(
            name=f"{scoped}.{argument}" if argument else scoped,
            value=repr(value),
            source=source,
            line=location.line_num,
            macros=tuple(_macros(value)),
        )
        self.settings.append(setting)
        if not argument:
            gin.bind_parameter((scoped, "gin.macro", "value"), value)
            return
        target = configurable(selector.rpartition(".")[2])
        if target is None:
            raise UserError(
                f"{setting.location}: unknown name {selector}"
                f"{_suggest(selector, list(CONFIGURABLES))}."
            )
        names = list(inspect.signature(target).parameters)
        if argument not in names:
            raise UserError(
                f"{setting.location}: {selector} has no parameter {argument}"
                f"{_suggest(argument, names)}."
            )
        _check_nested(setting, target, argument, value)
        gin.bind_parameter((scope, selector, argument), value)

    @functools.cached_property
    def effective(self) -> dict[str, GinBinding]:
        """The effective (last) statement for each name."""
        return {setting.name: setting for setting in self.settings}

    def check_required(self) -> None:
        """Raises if a value is still `%gin.REQUIRED`."""
        for setting in self.effective.values():
            if _REQUIRED in setting.macros:
                raise UserError(
                    f"{setting.name} has no value: add --gin.{setting.name}=VALUE "
                    f"({setting.location} requires it)."
                )

    def check_macros(self) -> None:
        """Raises a `UserError` for a macro that is undefined or unused.

        A macro of a file must be used by any statement, a macro of the command line by
        an effective one.
        """
        defined = [setting.name for setting in self.settings if setting.is_macro]
        for setting in self.settings:
            for macro in setting.macros:
                if macro == _TASK and macro not in defined:
                    raise UserError(
                        "no file names a task: add --gin_file=gin_configs/tasks/"
                        f"NAME.gin ({setting.location} requires it)."
                    )
                if macro != _REQUIRED and macro not in defined:
                    raise UserError(
                        f"{setting.location}: the macro %{macro} is not defined"
                        f"{_suggest(macro, defined)}."
                    )
        used_anywhere = {name for setting in self.settings for name in setting.macros}
        used_effectively = {
            name for setting in self.effective.values() for name in setting.macros
        }
        for setting in self.settings:
            on_command_line = setting.source == _COMMAND_LINE
            used = used_effectively if on_command_line else used_anywhere
            if setting.is_macro and setting.name not in used:
                raise UserError(
                    f"{setting.location}: nothing uses {setting.name}"
                    f"{_suggest(setting.name, sorted(used - {_REQUIRED}))}."
                )

    def check_references(self, built: str) -> None:
        """Raises a `UserError` for a setting of a dataclass that nothing refers to.

        Files may have such settings, because a command builds only what it needs; on
        the command line they would be ignored.

        Args:
          built: name of the dataclass that is built, which needs no reference.
        """
        used = {built, ""}  # Macros have their own check.
        for setting in self.settings:
            used.update(re.findall(r"@(?:\w+[./])*(\w+)", setting.value))
            if setting.source != _COMMAND_LINE:
                used.add(setting.target)
        for setting in self.settings:
            if setting.target not in used:
                raise UserError(
                    f"{setting.location}: nothing uses {setting.target}: leave the "
                    f"setting out, or set a parameter to @{setting.target}()."
                )


def _statements(text: str, source: str) -> Iterator[Any]:
    """Yields the statements of a text.

    Raises:
      UserError: a statement is malformed, or names an unknown reference.
    """
    parser = None
    try:
        parser = config_parser.ConfigParser(text, _Delegate())
        while (statement := parser.parse_statement()) is not None:
            yield statement
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        location = "--gin." + "=".join(map(str.strip, text.split("=", 1)))
        if source != _COMMAND_LINE:
            token_line = parser.current_token.start[0] if parser else 1
            location = f"{source}:{getattr(error, 'lineno', None) or token_line}"
        raise UserError(f"{location}: {_fault(error)}.") from error


def _fault(error: Exception) -> str:
    """Description of an error in a statement, on one line."""
    if isinstance(error, RecursionError):
        return "its value is nested too deeply"
    if isinstance(error, tokenize.TokenError):
        return "a bracket or a quote is not closed"
    if isinstance(error, UnicodeError):  # from Python 3.12 on
        return "its value is not a gin value, because it is not valid Unicode"
    text = str(error.args[0] if isinstance(error, SyntaxError) else error)
    # gin quotes Python's parser, which prints an object's address.
    token = re.search(r"Failed to parse token '(.*)'", text, re.DOTALL)
    if token is None:
        return text.partition("\n")[0].rstrip(".")
    return (
        f"{' '.join(token[1].split())} is not a gin value: text needs quotes (in a "
        "shell --gin.NAME=\"'TEXT'\"), and constants are True, False and None"
    )


def _find_file(name: str, location: str) -> tuple[str, pathlib.Path]:
    """The full name and the path of a configuration file that is named at `location`.

    Raises:
      UserError: there is no such file.
    """
    full = f"gin_configs/{name}"
    for candidate, path in (
        (name, pathlib.Path(name)),
        (name, _ROOT / name),
        (full, _ROOT / full),
    ):
        if path.is_file():
            return candidate, path
    raise UserError(
        f"{location} names the configuration file {name}, which does not exist in this "
        f"folder, in {_ROOT} or in {_ROOT / 'gin_configs'}."
    )


def _check_nested(
    setting: GinBinding, target: Callable[..., Any], argument: str, value: object
) -> None:
    """Raises a `UserError` if a value is given instead of a registered dataclass."""
    if value is None or isinstance(value, ConfigurableReference):
        return
    hint = typing.get_type_hints(target).get(argument)
    for expected in (hint, *typing.get_args(hint)):
        name = getattr(expected, "__name__", "")
        if dataclasses.is_dataclass(expected) and name in CONFIGURABLES:
            raise UserError(
                f"{setting.location}: {setting.name} must be a {name}, not a value: "
                f"write @{name}() and set its fields, as in {name}.FIELD = VALUE."
            )


def _macros(value: object) -> Iterator[str]:
    """Names of the macros in a value; a reference prints as `%NAME`."""
    if isinstance(value, ConfigurableReference):
        if value.selector in ("gin.macro", "gin.constant"):
            yield value.scoped_selector.rpartition("/")[0]
    elif isinstance(value, dict):
        yield from _macros([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _macros(item)


def _build(kind: type[T]) -> T:
    configurable(kind.__name__)
    try:
        return gin.get_configurable(kind)()
    except UserError as error:
        # gin appends lines about its own calls.
        raise UserError(str(error).partition("\n")[0]) from None
    except RecursionError:
        raise UserError("the configuration has a cycle of macros.") from None
    except TypeError as error:
        # The missing arguments are only in Python's message.
        missing = re.match(r"(\w+)(?:\.__init__)?\(\) missing .*?: (.*)", str(error))
        if missing is None:
            raise
        names = re.findall(r"'(\w+)'", missing[2])
        raise UserError(
            f"{missing[1]}.{names[0]} has no value: no file sets it; add "
            f"--gin.{missing[1]}.{names[0]}=VALUE."
        ) from None


def _suggest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]}"
    return f": choose from {', '.join(names)}" if names else ""
