"""Prints tables of texts, drafts and streamed text to a terminal or a log file."""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

import rich.box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from bpd_jax.base.startup import shown
from bpd_jax.reporting import formatting
from bpd_jax.reporting.records import DecodeRecord, Step

T = TypeVar("T")

# Columns of output that is not a terminal.
_LOG_WIDTH = 100


def print_rows(
    headings: Sequence[str],
    rows: Iterable[Sequence[str] | None],
    *,
    title: str = "",
    caption: str = "",
    left: int = 1,
    strong: Collection[str] = (),
    frame: bool = True,
    console: Console | None = None,
) -> None:
    """Prints a table of texts.

    Args:
      headings: headings of the columns.
      rows: the cells of every row, or None for a line between rows.
      title: text above the table.
      caption: text below the table.
      left: number of columns that are aligned left, counted from the first; the others
        are aligned right.
      strong: first cells of the rows that are bold.
      frame: whether lines separate the columns and surround the table.
      console: output; by default `standard_output()`.
    """
    drawn = RichTable(
        title=title or None,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        box=rich.box.HEAVY_HEAD if frame else rich.box.SIMPLE_HEAD,
    )
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="left" if index < left else "right")
    for row in rows:
        if row is None:
            drawn.add_section()
        else:
            cells = [Text(shown(cell)) for cell in row]
            drawn.add_row(*cells, style="bold" if row[0] in strong else "")
    (console or standard_output()).print(drawn)


def print_steps(
    record: DecodeRecord, console: Console | None = None, *, limit: int = 12
) -> None:
    """Prints the drafts of one decoded prompt, one line per serial call.

    Accepted tokens are green, the first one, which is certain, in bold. Rejected tokens
    are red and struck through; a `✗` before the first one marks them without colour.

    Args:
      record: the prompt and method to print.
      console: output; by default `standard_output()`.
      limit: maximum number of serial calls.
    """
    console = console or standard_output()
    console.print(
        Text.assemble(
            (f"{record.method}, prompt {record.prompt_index + 1}", "bold"),
            f": {len(record.output_ids)} tokens in {record.serial_calls} serial "
            f"calls, block efficiency {record.block_efficiency:.2f}",
        )
    )
    for number, step in enumerate(record.steps[:limit], start=1):
        console.print(
            _step_line(number, step), no_wrap=True, overflow="ellipsis", crop=True
        )
    if (hidden := len(record.steps) - limit) > 0:
        console.print(Text(f"      … and {hidden} more serial calls", style="dim"))


def print_stream(
    pieces: Iterable[tuple[str, bool, T | None]], console: Console | None = None
) -> T | None:
    """Prints a text as it is decoded, and marks accepted draft tokens.

    Each serial call decodes one certain token; the accepted draft tokens after it are
    green, or in brackets without colour.

    Args:
      pieces: for every piece its text, whether it is marked, and a result or None.
      console: output; by default `standard_output()`.

    Returns:
      The last result that is not None.
    """
    console = console or standard_output()
    colour = console.color_system is not None and not console.no_color
    result = None
    for piece, marked, piece_result in pieces:
        result = result if piece_result is None else piece_result
        bare = piece.strip()
        if not marked or not bare:
            write(piece, console)
        elif colour:
            write(piece, console, "bold green")
        else:
            before, _, after = piece.partition(bare)
            write(f"{before}[{bare}]{after}", console)
        console.file.flush()
    console.print()
    return result


def write(text: str, console: Console, style: str = "") -> None:
    """Writes the text of a user or a model, without an end of line.

    A file or a pipe gets it verbatim. On a terminal it has a style, and its control
    characters are shown.
    """
    if not console.is_terminal:
        console.file.write(text)
        return
    # rich would turn a tab into spaces.
    for number, part in enumerate(shown(text).split("\t")):
        console.file.write("\t" * bool(number))
        console.print(Text(part, style), end="", soft_wrap=True)


def standard_output() -> Console:
    """A console on standard output; without colour if that is not a terminal."""
    if sys.stdout.isatty():
        return _Console()
    return _Console(width=_LOG_WIDTH, color_system=None)


class _Console(Console):
    """A console that shows control characters, and does not hide a closed pipe."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(shown(text), style)

    def on_broken_pipe(self) -> None:
        raise  # The `BrokenPipeError`, which `cli.exit_on_errors` knows.


def _step_line(number: int, step: Step) -> Text:
    """Returns `  3  2/4  x = ✗ y z` with the tokens in colour."""
    line = Text(f"{number:>4}  {step.accepted}/{len(step.draft)}  ", style="")
    for index, piece in enumerate(step.draft):
        # Spaces within tokens are distinguished from those between tokens.
        token = formatting.visible(piece).replace(" ", "·") or "∅"
        if index == step.accepted:
            line.append("✗ ", style="red")
        if index >= step.accepted:
            style = "red strike"
        else:
            style = "bold green" if index == 0 else "green"
        line.append(token, style=style)
        line.append(" ")
    if step.rank:
        line.append(f"(draft {step.rank + 1})", style="dim")
    return line
