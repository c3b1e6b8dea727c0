"""The common part of all commands: flags, errors, exit status.

Flags are absl's; `--gin.NAME=VALUE` is short for `--gin_bindings="NAME = VALUE"`.
Bad input ends with one sentence on standard error and exit status 1.
"""

import contextlib
import dataclasses
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags, logging

from bpd_jax.base import startup
from bpd_jax.base.compiled import keep_compiled
from bpd_jax.base.errors import UserError, shortened
from bpd_jax.base.settings import (
    PATH,
    REPEATED,
    Check,
    checks_of,
    documented_attributes,
    fields_of,
    parse_value,
)

# absl lists flags under the module that calls `define_flags`.
flags.disclaim_key_flags()

# Flags of other programs, and ours.
_NAMES_ELSEWHERE = {
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "model_path": "model",
    "temp": "temperature",
}

# Exit status of a program whose output is no longer read, as shells define it.
_UNREAD = 128 + signal.SIGPIPE
# Errors of a full disk, and errors that only another path or permissions can avoid.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNUSABLE_PATH = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR),
)


def rewrite_gin_arguments(arguments: Sequence[str]) -> list[str]:
    """Turns `--gin.NAME=VALUE` into `--gin_bindings=NAME = VALUE`.

    >>> rewrite_gin_arguments(["train", "--gin.STEPS=5", "--workdir=w"])
    ['train', '--gin_bindings=STEPS = 5', '--workdir=w']
    """
    rewritten = []
    for argument in arguments:
        if argument == "-h":
            argument = "--help"
        if argument.startswith("--gin."):
            name, _, value = argument.removeprefix("--gin.").partition("=")
            if not name or not value:
                raise UserError(
                    f"{argument} has no value: write --gin.NAME=VALUE, for example "
                    "--gin.STEPS=100."
                )
            argument = f"--gin_bindings={name} = {value}"
        rewritten.append(argument)
    return rewritten


def run(main: Callable[..., None], *, positional: bool = False) -> None:
    """Parses flags and runs `main`, which gets the list of `positional` arguments.

    Exit status: 0; 1 for bad input or output that cannot be written; 130 after Ctrl-C;
    141 if the output is no longer read, as in `… | head`.
    """
    # TensorFlow prints messages before absl can suppress them.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    def guarded(arguments: Sequence[str]) -> None:
        if len(arguments) > 1 and not positional:
            raise UserError(
                f"unexpected argument {arguments[1]!r}: every option is a flag, "
                "as in --name=value; see --help."
            )
        logging.set_verbosity(logging.WARNING)
        keep_compiled()
        main(*([list(arguments[1:])] if positional else []))

    # --help lists the flags of all modules of this repository.
    for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
        if module.startswith(("bpd_jax.", "experiments.", "benchmarks.")):
            for flag in module_flags:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    with exit_on_errors():
        app.run(guarded, argv=rewrite_gin_arguments(sys.argv), flags_parser=parse_flags)


def parse_flags(arguments: list[str]) -> list[str]:
    """Sets the flags; returns the arguments that are none."""
    try:
        return flags.FLAGS(arguments)
    except SystemExit:  # absl prints --help and ends with status 1.
        sys.exit(0)
    except flags.UnrecognizedFlagError as error:
        ours = _NAMES_ELSEWHERE.get(error.flagname, "")
        hint = f"did you mean --{ours}" if ours in flags.FLAGS else "see --help"
        raise UserError(f"{error}; {hint}.") from error
    except flags.Error as error:
        raise UserError(f"{error}; --help lists all flags.") from error


@contextlib.contextmanager
def exit_on_errors() -> Iterator[None]:
    """Ends the program with one sentence on bad input or an interrupt; see `run`."""
    startup.print_any_text()
    try:
        with startup.interruptible():
            try:
                yield
            except SystemExit:
                sys.stdout.flush()  # While an error can still be reported.
                raise
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(startup.INTERRUPTED)
    except BaseException as error:
        is_unread = startup.readiness(sys.stdout) & select.POLLERR
        if isinstance(error, BrokenPipeError) and is_unread:
            startup.discard(sys.stdout)
            sys.exit(_UNREAD)
        sentence = _sentence(error)
        if sentence is None:
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            startup.discard(sys.stdout)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        print(f"error: {shortened(sentence)}", file=sys.stderr)
        sys.exit(1)


def _sentence(error: BaseException) -> str | None:
    """What a user can do about an error; None if it is a bug."""
    text = " ".join(str(error).split())
    match error:
        case UserError():
            return str(error)
        case MemoryError():
            size = f" ({text})" if text else ""
            return f"there is not enough memory{size}: choose smaller sizes."
        case RuntimeError() if text.startswith("RESOURCE_EXHAUSTED"):  # as of XLA
            line = str(error).partition("\n")[0].rstrip(".")
            return f"the device has not enough memory ({line}): choose smaller sizes."
        case RuntimeError() | AssertionError() if platforms := _unusable_platforms():
            return (
                f"JAX cannot use JAX_PLATFORMS={platforms}: unset it, or install the "
                "backend of this device."
            )
        case OSError() if error.errno in _NO_ROOM:
            return f"cannot write {error.filename or 'the output'}: {error.strerror}."
        case OSError() if error.errno in _UNUSABLE_PATH and error.filename:
            return f"cannot use {error.filename}: {error.strerror}."
    # Libraries written in Rust raise it for internal errors.
    is_panic = type(error).__name__ == "PanicException"
    return f"a library cannot process this input: {text}." if is_panic else None


def _unusable_platforms() -> str | None:
    """The selected platforms, if JAX cannot start them.

    The exception does not show this: from the second call on it has no message.
    """
    with contextlib.suppress(KeyError):
        platforms = os.environ["JAX_PLATFORMS"]
        try:
            sys.modules["jax"].devices()
        except (RuntimeError, AssertionError):
            return platforms
    return None


def required(flag: str) -> str:
    """Returns the value of a required flag."""
    if value := flags.FLAGS[flag].value:
        return value
    raise UserError(f"--{flag} is missing: {flags.FLAGS[flag].help}")


class _CheckedParser(flags.ArgumentParser):
    """Reads the value of a flag, which must pass a check."""

    def __init__(self, name: str, check: Check) -> None:
        self._name, self._check = f"--{name}", check
        self.syntactic_help = check.description

    def parse(self, argument: str) -> Any:
        """The value, once it has passed the check."""
        return parse_value(self._name, argument, self._check)


def DEFINE_checked(
    name: str, default: str | None, about: str, check: Check
) -> flags.FlagHolder[Any]:
    """Defines a flag whose value passes a check, as `flags.DEFINE_integer` does."""
    return flags.DEFINE(_CheckedParser(name, check), name, default, about)


def DEFINE_path(
    name: str, default: str | list[str] | None, about: str
) -> flags.FlagHolder[Any]:
    """Defines a flag for a file, a folder or a pattern; see `settings.PATH`.

    A flag whose default is a list may be given several times.
    """
    parser = _CheckedParser(name, PATH)
    if isinstance(default, list):
        serializer: flags.ArgumentSerializer[Any] = flags.ArgumentSerializer()
        return flags.DEFINE_multi(parser, serializer, name, default, about)
    return flags.DEFINE(parser, name, default, about)


def define_flags(kind: type, *names: str) -> None:
    """Defines flags for fields of a dataclass of settings, by default for all.

    A flag that is not given is None, and the field keeps its default.
    """
    about: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        about |= documented_attributes(base.__doc__ or "")
    fields, checks = fields_of(kind), checks_of(kind)
    for name in names or checks:
        check, default = checks[name], fields[name].default
        text = about.get(name, "")  # PYTHONOPTIMIZE=2 drops docstrings.
        if default not in (None, dataclasses.MISSING, ()):
            text = f"{text.rstrip('.')}; default {default}."
        if check.flag is bool:
            flags.DEFINE_bool(name, None, text)
        elif check.flag is REPEATED:
            flags.DEFINE_multi_string(name, None, text)
        else:
            DEFINE_checked(name, None, text, check)


def flag_values(kind: type) -> dict[str, Any]:
    """The values of the fields that are set by flags."""
    names = [name for name in checks_of(kind) if name in flags.FLAGS]
    values = {name: flags.FLAGS[name].value for name in names}
    return {name: value for name, value in values.items() if value is not None}
