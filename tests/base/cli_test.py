import dataclasses
import functools
import pathlib
import sys
import types

import numpy as np
import pytest
from absl import flags

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError


def status_of(main, *arguments, **options):
    """The exit status of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            cli.run(main, **options)
    return exit_info.value.code


def error_of(fail, capsys):
    """The sentence that a command prints which ends with an error."""
    with pytest.raises(SystemExit) as exit_info, cli.exit_on_errors():
        fail()
    assert exit_info.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    "argument, message",
    [
        ("--nosuch=1", "error: Unknown command line flag 'nosuch'"),
        ("--verbosity=high", "error: flag --verbosity=high: "),
        ("stray", "error: unexpected argument 'stray': every option is a flag"),
        ("--gin.STEPS", "error: --gin.STEPS has no value: write --gin.NAME=VALUE"),
    ],
)
def test_invalid_flags_are_reported_in_one_sentence(argument, message, capsys):
    assert status_of(lambda: pytest.fail("main ran"), argument) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_exits_with_status_0(argument, capsys):
    assert status_of(lambda: pytest.fail("main ran"), argument) == 0
    captured = capsys.readouterr()
    assert captured.out
    assert captured.err == ""


def test_the_name_of_a_flag_in_other_programs_is_known(monkeypatch, capsys):
    values = flags.FlagValues()
    flags.DEFINE_integer("max_new_tokens", 1, "tokens.", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)
    with pytest.raises(SystemExit), cli.exit_on_errors():
        cli.parse_flags(["program", "--max_tokens=3"])
    assert "did you mean --max_new_tokens." in capsys.readouterr().err


def test_flags_for_paths_know_the_home_folder(monkeypatch):
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(
        flags, "DEFINE", functools.partial(flags.DEFINE, flag_values=values)
    )
    monkeypatch.setattr(
        flags, "DEFINE_multi", functools.partial(flags.DEFINE_multi, flag_values=values)
    )
    output = cli.DEFINE_path("output", "~/default", "a file.")
    several = cli.DEFINE_path("input", [], "files.")
    values(["program", "--input=~/a", "--input=b~"])
    assert (output.value, several.value) == ("/home/me/default", ["/home/me/a", "b~"])
    with pytest.raises(UserError, match="--output must be a path"):
        values(["program", "--output="])


def test_settings_without_docstrings_have_flags(monkeypatch):
    kind = dataclasses.make_dataclass("Undocumented", [("steps", int, 3)])
    kind.__doc__ = None  # As PYTHONOPTIMIZE=2 leaves it.
    values = flags.FlagValues()
    monkeypatch.setattr(flags, "FLAGS", values)
    monkeypatch.setattr(
        flags, "DEFINE", functools.partial(flags.DEFINE, flag_values=values)
    )
    cli.define_flags(kind)
    values(["program", "--steps=5"])
    assert values.steps == 5


def test_a_missing_flag_is_named(monkeypatch):
    values = flags.FlagValues()
    flags.DEFINE_string("model", None, "a run folder.", flag_values=values)
    monkeypatch.setattr(flags, "FLAGS", values)
    values(["program"])
    with pytest.raises(UserError, match=r"--model is missing: a run folder\."):
        cli.required("model")
    values.model = "m"
    assert cli.required("model") == "m"


def test_unavailable_platform_is_reported_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    jax = types.ModuleType("jax")
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(jax, "devices", _no_devices, raising=False)
    assert "JAX_PLATFORMS=cuda" in error_of(_fail_assertion, capsys)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(AssertionError), cli.exit_on_errors():
        _fail_assertion()


def _no_devices() -> None:
    raise RuntimeError("Unable to initialize\nbackend 'cuda'.")


def _fail_assertion() -> None:
    raise AssertionError


def test_invalid_path_is_reported_in_one_sentence(capsys):
    error = error_of(lambda: pathlib.Path("x" * 5000).stat(), capsys)
    assert error.startswith("error: cannot use xxx")
    assert len(error) < 1000
    with pytest.raises(FileNotFoundError), cli.exit_on_errors():
        pathlib.Path("x").stat()


def _panic() -> None:
    raise type("PanicException", (BaseException,), {})("index out of bounds")


def _exhaust_device() -> None:
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n\nBuf")


@pytest.mark.parametrize(
    "allocate, message",
    [
        (lambda: np.zeros(2**50), "not enough memory (Unable to allocate"),
        (_exhaust_device, "has not enough memory (RESOURCE_EXHAUSTED: Out of"),
        (_panic, "a library cannot process this input: index out of bounds."),
    ],
)
def test_out_of_memory_or_a_panic_is_reported_in_one_sentence(
    allocate, message, capsys
):
    assert message in error_of(allocate, capsys)


def test_long_values_are_truncated_in_messages():
    text = str(UserError(f"--name={'x' * 5000} is wrong: {', '.join('ab' * 5000)}."))
    assert text.startswith("--name=xxx")
    assert "is wrong" in text
    assert len(text) < 2000
    assert str(UserError("short 'value'.")) == "short 'value'."
