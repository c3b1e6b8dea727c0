"""The checks of settings, and that every class of settings applies them."""

import dataclasses
import importlib
import inspect
import math
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import pytest

import bpd_jax
from bpd_jax.base import settings
from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import Validated, checks_of, choice, each, instance, number

PACKAGE = pathlib.Path(bpd_jax.__file__).parent
COUNT, SHARE = settings.integer(1), number(0, most=1)
HUGE = 10**400


@pytest.mark.parametrize(
    "check, allowed, refused",
    [
        (COUNT, [1, HUGE], [0, -1, True, 1.0, math.nan, "1", None, np.int64(1)]),
        (settings.integer(2, 5), [2, 5], [1, 6]),
        (COUNT.or_none(), [None, 1], [0]),
        (SHARE, [0, 0.5, 1, np.float32(1)], [-0.1, 1.1, True, math.nan, "0", None]),
        (number(), [-1e300], [math.inf, -math.inf, HUGE]),
        (number(above=1, below=3), [1.5], [1, 3]),
        (number(-1, 2), [-1, 1.9], [-1.1, 2]),
        (choice("a", "b"), ["a", "b"], ["c", "", None, ["a"]]),
        (instance(int, str), [3, "a"], [0.5, int, None]),
        (each(COUNT), [(), [1, 1], (2,)], [[1, 0], [True], 1, None, {1}]),
        (each(settings.TEXT), [["ab"]], ["ab", [None]]),
        (each(COUNT, distinct=True), [[1, 2]], [[1, 1]]),
        (settings.SWITCH, [0, 1], [2, "1", None]),
        (settings.TRUTH, [True, False], [1, "True", None]),
        (settings.TEXT, ["", "a"], [b"a", None]),
        (settings.WORDS, ["a"], ["", 1, None]),
        (settings.PATH, ["a", "~/[1]*"], ["", "a\0", None]),
        (settings.BYTES, [0, 10**12], [-1, 0.5, True]),
    ],
)
def test_what_checks_allow(check, allowed, refused):
    assert [value for value in allowed if not check.allows(value)] == []
    assert [value for value in refused if check.allows(value)] == []


def test_annotations_declare_checks():
    @dataclasses.dataclass
    class Example:
        seed: settings.Seed
        rate: settings.NonNegative | None
        lengths: Mapping[str, settings.Count]
        words: tuple[str, ...]

    checks = checks_of(Example)
    assert [checks["seed"].allows(v) for v in (0, 2**32 - 1, 2**32)] == [1, 1, 0]
    assert [checks["rate"].allows(v) for v in (None, 0, -0.1)] == [1, 1, 0]
    assert [checks["lengths"].allows(v) for v in ({"a": 1}, {"a": 0}, [])] == [1, 0, 0]
    assert [checks["words"].allows(v) for v in (["a"], "a", [1])] == [1, 0, 0]


def test_paths_in_settings_know_the_home_folder(monkeypatch):
    @dataclasses.dataclass
    class Example(settings.Validated):
        one: settings.Path | None = None
        several: tuple[settings.Path, ...] = ()
        named: Mapping[str, Mapping[str, settings.Path]] = dataclasses.field(
            default_factory=dict
        )

    monkeypatch.setenv("HOME", "/home/me")
    example = Example("~/a", ["~/b", "c"], {"d": {"e": "~"}})
    assert example.one == checks_of(Example)["one"].parse("~/a") == "/home/me/a"
    assert example.several == ("/home/me/b", "c")
    assert example.named == {"d": {"e": "/home/me"}}
    assert Example().one is None


@pytest.mark.parametrize(
    "text, size", [("500MB", 500e6), ("1.5 g", 15e8), ("7", 7), ("2kb", 2000)]
)
def test_sizes_in_bytes(text, size):
    assert settings.BYTES.parse(text) == size
    with pytest.raises(ValueError, match="is not a size"):
        settings.BYTES.parse(f"-{text}")


def kinds_of_settings():
    """All classes of settings of the package."""
    for file in PACKAGE.glob("*/**/*.py"):
        if "Validated" in file.read_text():
            module = file.relative_to(PACKAGE.parent).with_suffix("")
            importlib.import_module(".".join(module.parts))
    kinds = [Validated]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return [
        kind
        for kind in kinds[1:]
        if kind.__module__.startswith("bpd_jax.") and not inspect.isabstract(kind)
    ]


def test_every_setting_refuses_other_types_by_its_name():
    kinds = kinds_of_settings()
    assert len(kinds) > 20
    samples = [2, "text", [2], True, *map(object.__new__, kinds)]
    for kind in kinds:
        checks, fields = checks_of(kind), dataclasses.fields(kind)
        assert list(checks) == [field.name for field in fields], kind
        valid = {}
        for field in fields:
            if field.default is field.default_factory is dataclasses.MISSING:
                check = checks[field.name]
                # The description of a choice ends with one.
                options = [*samples, check.description.split()[-1]]
                valid[field.name] = next(filter(check.allows, options))
        prefix = f"{kind.__name__}." if kind.prefix is None else kind.prefix
        for name, check in checks.items():
            for wrong in (object(), *([] if check.optional else [None])):
                message = f"^{re.escape(prefix + name)} must be "
                with pytest.raises(UserError, match=message):
                    kind(**valid | {name: wrong})
