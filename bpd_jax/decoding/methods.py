"""The decoding methods by name, with where each comes from.

A method is written as its name, then its size if it has one, then settings:

    ngram:16                         the 16 best drafts under heads and n-grams
    ngram:16:k=8:alpha=0.5           from 8 candidates per head, with weight 0.5
    medusa_ngram:64:search=best      the 64 most probable prefixes, as a tree
"""

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from bpd_jax.errors import UserError

# More drafts or nodes than this in one serial call are a slip of the finger.
MOST_DRAFTS = 1024


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of methods.

    Attributes:
      name: on the command line.
      summary: one line.
      reference: where it comes from.
      size: what the number after the name counts, or "" if it takes none.
      default_size: where none is given.
      settings: which fields of `Method` may be set.
      label: what people read in tables; `{size}` and `{order}` are filled in.
    """

    name: str
    summary: str
    reference: str
    label: str
    size: str = ""
    default_size: int = 1
    settings: tuple[str, ...] = ()


DRAFTS, NODES = "drafts P", "nodes M"
_LATTICE = ("k", "heads")
_ALPHA = (*_LATTICE, "alpha", "slope")
_SEARCH = ("search",)
_TREE = ("search", "lookup")

_KIM = "Kim et al. 2024"
KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "greedy",
            "one token per serial call: the reference",
            "plain decoding",
            "Greedy",
        ),
        Kind(
            "bpd",
            "every head's best token",
            "Stern et al. 2018",
            "BPD",
            settings=("heads", "lookup"),
        ),
        Kind(
            "zero_gram",
            "the P best drafts under the heads' own scores",
            f"{_KIM}, Table 4",
            "{size}-best 0-gram",
            DRAFTS,
            1,
            (*_LATTICE, *_TREE),
        ),
        Kind(
            "ngram",
            "the P best drafts under heads and an n-gram model, by the best engine",
            f"{_KIM}, section 7.2",
            "{size}-best {order}-gram",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "adaptive", "normalise"),
        ),
        Kind(
            "ngram_device",
            "the same, exact and inside the accelerator's loop",
            "bpd_jax",
            "{size}-best {order}-gram (device)",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "adaptive", "normalise"),
        ),
        Kind(
            "ngram_viterbi",
            "the same, exact on the host",
            "bpd_jax",
            "{size}-best {order}-gram (viterbi)",
            DRAFTS,
            1,
            (*_ALPHA, "lookup"),
        ),
        Kind(
            "ngram_fst",
            "the same by OpenFst, with back-off as an epsilon arc as in the paper",
            f"{_KIM}, section 7.2",
            "{size}-best {order}-gram (fst)",
            DRAFTS,
            1,
            (*_LATTICE, "alpha", "lookup"),
        ),
        Kind(
            "ngram_fst_exact",
            "the same by OpenFst with failure arcs; exact",
            "bpd_jax",
            "{size}-best {order}-gram (exact fst)",
            DRAFTS,
            1,
            (*_LATTICE, "alpha", "lookup"),
        ),
        Kind(
            "neural",
            "a small LM rescores the heads' candidates along the draft",
            f"{_KIM}, section 7.1, Algorithm 2",
            "{size}-best neural",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "mode", "normalise"),
        ),
        Kind(
            "neural_ngram",
            "the small LM and the n-gram model together",
            f"{_KIM}, sections 7.1 and 7.2",
            "{size}-best neural + {order}-gram",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "beta", "normalise"),
        ),
        Kind(
            "markov",
            "a trained low-rank bigram corrects the heads",
            "DSpark 2026",
            "{size}-best Markov head",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "normalise"),
        ),
        Kind(
            "recurrent",
            "a trained recurrent state corrects the heads along the draft",
            "Domino 2026",
            "{size}-best recurrent head",
            DRAFTS,
            1,
            (*_ALPHA, *_TREE, "normalise"),
        ),
        Kind(
            "medusa",
            "a tree of M nodes over the heads' best candidates",
            "Cai et al. 2024",
            "Medusa tree of {size}",
            NODES,
            32,
            (*_LATTICE, *_TREE),
        ),
        Kind(
            "medusa_ngram",
            "that tree over the lattice that an n-gram model has refined",
            f"{_KIM}, rebuttal",
            "Medusa tree of {size}, {order}-gram",
            NODES,
            32,
            (*_ALPHA, *_TREE, "adaptive", "normalise"),
        ),
        Kind(
            "medusa_neural",
            "that tree over the lattice that a small LM has refined",
            f"{_KIM}, rebuttal",
            "Medusa tree of {size}, neural",
            NODES,
            32,
            (*_ALPHA, *_TREE, "mode", "normalise"),
        ),
        Kind(
            "hydra",
            "heads that see the earlier draft tokens",
            "Ankner et al. 2024",
            "{size}-best Hydra",
            DRAFTS,
            1,
            (*_LATTICE, *_TREE),
        ),
        Kind(
            "prompt_lookup",
            "what followed the last occurrence of the text's end; needs no heads",
            "Saxena 2023",
            "Prompt lookup of {size}",
            "draft tokens",
            8,
            ("match",),
        ),
        Kind(
            "lookahead",
            "n-grams from parallel Jacobi iterations; needs no heads",
            "Fu et al. 2024",
            "Lookahead of {size}",
            "window",
            8,
            ("order", "guesses"),
        ),
        Kind(
            "draft_model",
            "a smaller model writes the draft",
            "Leviathan et al. 2023; Chen et al. 2023",
            "Draft model, {size} tokens",
            "draft tokens",
            5,
            ("k", "search", "drafts"),
        ),
        Kind(
            "oracle",
            "the best that the heads' lattice holds: an upper bound",
            f"{_KIM}, section 6.3",
            "Oracle",
            settings=_LATTICE,
        ),
        Kind(
            "auto",
            "whichever is measured to be fastest here, plain decoding included",
            "bpd_jax",
            "Automatic",
        ),
    )
}

SEARCHES = ("exact", "greedy", "beam", "best", "static")
_TREE_SEARCHES = (None, "best", "static")
SEQUENTIAL, PARALLEL = MODES = ("sequential", "parallel")


def _setting(
    help_: str, read: Callable[[str], Any], check: Callable[[Any], bool]
) -> Any:
    metadata = {"help": help_, "read": read, "check": check}
    return dataclasses.field(default=None, metadata=metadata)


def _count(help_: str) -> Any:
    return _setting(help_, int, lambda value: 1 <= value <= MOST_DRAFTS)


def _weight(help_: str) -> Any:
    return _setting(help_, float, lambda value: 0 <= value < float("inf"))


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method. A setting that is None is left to the decoder.

    Attributes:
      kind: a key of `KINDS`.
      size: drafts P, nodes M or draft tokens; see `counts`.
    """

    kind: str
    size: int | None = None
    k: int | None = _count("candidates per head, the paper's k")
    heads: int | None = _count("block heads used, head 1 included")
    alpha: float | None = _weight("weight of the second opinion, 0 or more")
    slope: float | None = _setting(
        "how alpha grows with a head's entropy", float, lambda value: abs(value) < 1e6
    )
    beta: float | None = _weight("weight of the n-gram model beside the neural one")
    search: str | None = _setting(
        f"how drafts are chosen: {', '.join(SEARCHES)}", str, lambda v: v in SEARCHES
    )
    mode: str | None = _setting(
        f"of the small LM: {', '.join(MODES)}", str, lambda value: value in MODES
    )
    adaptive: int | None = _setting(
        "1 mixes in the bigrams of the text so far", int, lambda value: value in (0, 1)
    )
    normalise: int | None = _setting(
        "1 normalises scores among the candidates of a path, 0 does not",
        int,
        lambda value: value in (0, 1),
    )
    lookup: int | None = _count("draft tokens of prompt lookup in the same tree")
    match: int | None = _setting(
        "the most tokens that prompt lookup seeks, 1 to 32",
        int,
        lambda value: 1 <= value <= 32,
    )
    order: int | None = _setting(
        "length of lookahead's n-grams, 2 to 32", int, lambda value: 2 <= value <= 32
    )
    guesses: int | None = _count("n-grams that lookahead checks per serial call")
    drafts: int | None = _count("drafts of the draft model")

    def __post_init__(self) -> None:
        if self.kind.startswith("medusa") and self.search not in _TREE_SEARCHES:
            raise UserError(
                f"{self.name}: {self.kind} drafts a tree, so that search is static or "
                "best."
            )
        several = (self.size if self.counts == DRAFTS else self.drafts) or 1
        if self.search == "greedy" and several > 1:
            raise UserError(
                f"{self.name}: search=greedy drafts one path: leave the number of "
                "drafts out or write 1."
            )

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        parts = [self.kind]
        if KINDS[self.kind].size:
            parts.append(str(self.count))
        parts += [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in self.settings
        ]
        return ":".join(parts)

    @property
    def count(self) -> int:
        """The size, or the kind's own."""
        return self.size or KINDS[self.kind].default_size

    @property
    def counts(self) -> str:
        """What the size counts: `DRAFTS`, `NODES`, what the kind says, or "".

        The trees of search=best and search=static are as large as their nodes are
        many.
        """
        size = KINDS[self.kind].size
        return NODES if size == DRAFTS and self.search in ("best", "static") else size

    @property
    def settings(self) -> list[tuple[str, Any]]:
        """What is set besides the size."""
        return [
            (field.name, value)
            for field in dataclasses.fields(self)[2:]
            if (value := getattr(self, field.name)) is not None
        ]

    def label(self, order: int | None = None) -> str:
        """What people read in tables.

        Args:
          order: of the n-gram model, if there is one.
        """
        label = KINDS[self.kind].label.format(size=self.count, order=order or "n")
        settings = dict(self.settings)
        best = f"{self.count}-best "
        if label.startswith(best) and self.search == "greedy":
            label = f"Greedy walk, {label.removeprefix(best)}"
            del settings["search"]
        elif label.startswith(best) and self.counts == NODES:
            label = f"Tree of {self.count}, {label.removeprefix(best)}"
            if self.search == "best":
                del settings["search"]
        words = [
            name if name == "adaptive" and value else f"{name} {value}"
            for name, value in settings.items()
        ]
        return f"{label} ({', '.join(words)})" if words else label


def parse_method(text: str) -> Method:
    """Reads a method's name.

    >>> parse_method("ngram:16:k=8").name
    'ngram:16:k=8'

    Raises:
      UserError: there is no such method, size or setting.
    """
    name, *parts = text.strip().split(":")
    kind = KINDS.get(name)
    if name == "autoregressive":
        raise UserError("the method autoregressive is called greedy now.")
    if "@" in text:
        raise UserError(
            f"{text!r}: engines are methods of their own now, as in ngram_device:16."
        )
    if kind is None:
        close = difflib.get_close_matches(name, KINDS, n=1)
        hint = (
            f"did you mean {close[0]}" if close else f"choose from {', '.join(KINDS)}"
        )
        raise UserError(f"unknown method {text!r}: {hint}; --method=help lists all.")
    size = None
    if parts and "=" not in parts[0]:
        size = _read_size(kind, parts.pop(0), text)
    fields = {field.name: field for field in dataclasses.fields(Method)[2:]}
    settings: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in kind.settings or key in settings:
            known = ", ".join(kind.settings) or "nothing"
            raise UserError(
                f"{text!r}: {part!r} is no setting of {name}, which takes {known}, "
                "each once and written NAME=VALUE."
            )
        metadata = fields[key].metadata
        try:
            settings[key] = metadata["read"](value)
            good = metadata["check"](settings[key])
        except ValueError:
            good = False
        if not good:
            raise UserError(
                f"{text!r}: {key}={value} is not allowed; it is {metadata['help']}."
            )
    return Method(name, size, **settings)


def _read_size(kind: Kind, part: str, text: str) -> int:
    if not kind.size:
        raise UserError(f"{text!r}: method {kind.name} takes no number.")
    if not part.isdecimal() or not 1 <= int(part) <= MOST_DRAFTS:
        raise UserError(
            f"{text!r}: {part!r} is no number of {kind.size} between 1 and "
            f"{MOST_DRAFTS}."
        )
    return int(part)


def describe_methods() -> str:
    """Every method with one line, its reference and its settings."""
    lines = ["method              what it drafts", ""]
    for kind in KINDS.values():
        name = (
            f"{kind.name}:{kind.size.split()[-1][0].upper()}"
            if kind.size
            else kind.name
        )
        lines.append(f"{name:<20}{kind.summary} [{kind.reference}]")
    lines += ["", "setting (as in ngram:16:k=8:alpha=0.5)", ""]
    for field in dataclasses.fields(Method)[2:]:
        users = [kind.name for kind in KINDS.values() if field.name in kind.settings]
        lines.append(f"{field.name:<20}{field.metadata['help']} [{', '.join(users)}]")
    return "\n".join(lines)
