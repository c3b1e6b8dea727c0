"""Settings: one dataclass field declares type, default, check and help.

    @dataclasses.dataclass(frozen=True)
    class Decoding(Validated):
        \"\"\"How texts are decoded.

        Attributes:
          max_new_tokens: maximum number of tokens decoded after each prompt.
          acceptance: how draft tokens are accepted.
        \"\"\"

        max_new_tokens: Count = 64
        acceptance: Annotated[str, choice("exact", "typical")] = "exact"

The annotation is the check of a new instance, the entry under `Attributes` the help.
gin files (of `configurable` classes), keyword arguments and flags of `cli.define_flags`
set the fields. Parts of methods (`tree:32:min_prob=0.1`) declare help and check with
`setting`.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from bpd_jax.base.errors import UserError

try:
    import gin
except ImportError:
    # Hosts without gin decode and train through the Python interface.
    gin = None

T = TypeVar("T", bound=Callable[..., Any])

REPEATED = "repeated"


@dataclasses.dataclass(frozen=True)
class Check:
    """The values that a setting accepts.

    Attributes:
      description: completes the sentence "NAME must be …".
      parse: reads a value from text; raises ValueError if it cannot.
      accepts: whether a value is allowed.
      optional: whether None is allowed.
      convert: converts an accepted value to the stored one.
      flag: bool for a flag without a value (`--NAME` or `--noNAME`), REPEATED for one
        that may be given several times, None for one whose value is parsed.
    """

    description: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    optional: bool = False
    convert: Callable[[Any], Any] = lambda value: value
    flag: type | str | None = None

    def or_none(self) -> "Check":
        """The same check, for a setting that may be None."""
        return dataclasses.replace(self, optional=True)

    def allows(self, value: object) -> bool:
        """Whether a value is allowed, including None if it is optional."""
        return self.optional if value is None else self.accepts(value)


def integer(least: float = -math.inf, most: float = math.inf) -> Check:
    """Integers from `least` to `most`."""
    description = "an integer" + f" of at least {least}" * (least > -math.inf)
    if most < math.inf:
        description = f"an integer from {least} to {most}"
    elif least == 1:
        description = "a positive integer"

    def accepts(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return Check(description, int, accepts)


def number(
    least: float = -math.inf,
    below: float = math.inf,
    *,
    above: float = -math.inf,
    most: float = math.inf,
) -> Check:
    """Finite numbers, within optional bounds."""
    bounds = [f"from {least:g} to {most:g}"]
    if math.isinf(least) or math.isinf(most):
        bounds = [f"of at least {least:g}"] * (least > -math.inf)
        bounds += [f"of at most {most:g}"] * (most < math.inf)
    bounds += [f"above {above:g}"] * (above > -math.inf)
    bounds += [f"below {below:g}"] * (below < math.inf)
    description = f"a finite number {' and '.join(bounds)}".strip()

    def accepts(value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        try:
            exact = float(value)
        except OverflowError:  # An integer beyond float64.
            return False
        inside = least <= exact < below and above < exact <= most
        return math.isfinite(exact) and inside

    return Check(description, float, accepts)


def choice(*options: str) -> Check:
    """One of several strings."""
    return Check(
        f"one of {', '.join(options)}",
        str,
        lambda value: isinstance(value, str) and value in options,
    )


def instance(*kinds: type) -> Check:
    """Instances of dataclasses, which gin files write as `@NAME()`."""
    names = " or ".join(f"@{kind.__name__}()" for kind in kinds)
    return Check(names, _unreadable, lambda value: isinstance(value, kinds))


def each(check: Check, *, distinct: bool = False) -> Check:
    """Tuples whose elements pass a check, and all differ if they must be `distinct`.

    Lists, as in gin and JSON, become tuples.
    """
    return Check(
        f"a list{' without repetition' * distinct}, each element {check.description}",
        lambda text: tuple(check.parse(word.strip()) for word in text.split(",")),
        lambda value: (
            isinstance(value, (list, tuple))
            and all(map(check.allows, value))
            and not (distinct and len(set(value)) < len(value))
        ),
        convert=lambda values: tuple(
            value if value is None else check.convert(value) for value in values
        ),
        flag=REPEATED if check in (TEXT, WORDS, PATH) else None,
    )


def _unreadable(text: str) -> Any:
    raise ValueError(f"{text} is set by gin files only")


SWITCH = Check("0 or 1", int, lambda value: value in (0, 1))
"""A setting that is on (1) or off (0)."""

TRUTH = Check("True or False", _unreadable, lambda v: isinstance(v, bool), flag=bool)
TEXT = Check("text, in quotes", str, lambda v: isinstance(v, str))
WORDS = Check("a non-empty text, in quotes", str, lambda v: TEXT.accepts(v) and v != "")


def expand_home(path: str) -> str:
    """A path with the user's home folder in place of a `~` at its beginning."""
    expanded = os.path.expanduser(path)
    if expanded == path and re.match("~(/|$)", path):
        raise UserError(f"{path}: there is no home folder here: set HOME.")
    return expanded


PATH = Check(
    "a path, in quotes",
    expand_home,
    lambda v: WORDS.accepts(v) and "\0" not in v,
    convert=expand_home,
)
"""A file, a folder or a pattern; names of models and vocabularies are among them."""


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text.upper(), re.A)
    if match is None:
        raise ValueError(f"{text} is not a size")
    digits, unit = match.groups()
    return int(float(digits) * 1000 ** " KMGT".index(unit or " "))


BYTES = Check("a number of bytes such as 500MB or 4GB", _bytes, integer(0).accepts)

Count = Annotated[int, integer(1)]
Natural = Annotated[int, integer(0)]
Positive = Annotated[float, number(above=0)]
NonNegative = Annotated[float, number(0)]
Share = Annotated[float, number(0, most=1)]
Words = Annotated[str, WORDS]
Path = Annotated[str, PATH]
Seed = Annotated[int, integer(0, 2**32 - 1)]

_PLAIN = {bool: TRUTH, int: integer(), float: number(), str: TEXT}


class Validated:
    """Base of dataclasses of settings: validates every field of a new instance."""

    prefix: ClassVar[str | None] = None
    """Precedes field names in messages; None for the class and a dot, as in gin."""

    def __post_init__(self) -> None:
        kind = type(self)
        prefix = f"{kind.__name__}." if kind.prefix is None else kind.prefix
        check_settings(self, prefix)
        self.check_together()

    def check_together(self) -> None:
        """Refuses incompatible settings."""


def setting(default: Any, help_: str, check: Check) -> Any:
    """Declares a field of a part of methods; its help has no full stop."""
    return dataclasses.field(default=default, metadata={"help": help_, "check": check})


@functools.cache
def checks_of(kind: type) -> dict[str, Check]:
    """The checks of the fields of a dataclass, by name; not all fields have one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    checks = {
        field.name: field.metadata.get("check") or _check_of(hints[field.name])
        for field in dataclasses.fields(kind)
    }
    return {name: check for name, check in checks.items() if check is not None}


def _check_of(hint: Any) -> Check | None:
    """The check of an annotation; None if there is none."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return next((item for item in inner[1:] if isinstance(item, Check)), None)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        if all(map(dataclasses.is_dataclass, kinds)):
            check: Check | None = instance(*kinds)
        else:
            check = _check_of(kinds[0]) if len(kinds) == 1 else None
        return check.or_none() if check and len(kinds) < len(inner) else check
    if origin in (tuple, Sequence):
        of_element = _check_of(inner[0])
        return None if of_element is None else each(of_element)
    if origin is Mapping:
        of_value = _check_of(inner[1])
        about = f", each value {of_value.description}" if of_value else ""
        return Check(
            f"a dictionary{about}",
            _unreadable,
            lambda value: (
                isinstance(value, Mapping)
                and (of_value is None or all(map(of_value.allows, value.values())))
            ),
            convert=lambda value: (
                value
                if of_value is None
                else {name: of_value.convert(each) for name, each in value.items()}
            ),
        )
    is_kind = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return instance(hint) if is_kind else _PLAIN.get(hint)


def fields_of(settings: Any) -> dict[str, dataclasses.Field]:
    """The declared settings of a dataclass or of an instance, in order."""
    return {field.name: field for field in dataclasses.fields(settings)}


def documented_attributes(docstring: str) -> dict[str, str]:
    """The entries under `Attributes` in a docstring by name, each on one line."""
    _, _, entries = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    section = re.split(r"\n\n?(?=\S)", entries, maxsplit=1)[0]
    texts = {}
    for entry in re.split(r"\n(?=  \S)", section):
        names, _, about = entry.strip().partition(": ")
        for name in names.split(", ") if names else ():
            texts[name] = " ".join(about.split())
    return texts


def check_settings(settings: Any, prefix: str) -> None:
    """Validates every setting of an instance, and converts lists to tuples.

    Messages name a setting with the prefix before it.
    """
    kind: Any = type(settings)
    for name, check in checks_of(kind).items():
        value = getattr(settings, name)
        check_value(prefix + name, value, check)
        if value is not None:
            object.__setattr__(settings, name, check.convert(value))


def check_value(name: str, value: object, check: Check) -> None:
    """Applies a check to an argument."""
    if not check.allows(value):
        raise UserError(f"{name} must be {check.description}, not {value!r}.")


def parse_value(name: str, text: str, check: Check) -> Any:
    """Reads an argument from text and applies a check to it."""
    try:
        value = check.parse(text)
    except ValueError:
        value = None
    if value is None or not check.accepts(value):
        raise UserError(f"{name} must be {check.description}, not {text!r}.")
    return value


def changed_settings(settings: Any) -> list[tuple[str, Any]]:
    """The settings whose values differ from their defaults, in order."""
    return [
        (name, getattr(settings, name))
        for name, field in fields_of(settings).items()
        if getattr(settings, name) != field.default
    ]


registered: dict[str, Callable[..., Any]] = {}
"""What `configurable` has registered, by name."""


def configurable(target: T) -> T:
    """Lets gin files set the arguments of a class or function, which stays as it is."""
    registered[target.__name__] = target
    if gin is not None:
        gin.register(target, module="bpd_jax")
    return target
