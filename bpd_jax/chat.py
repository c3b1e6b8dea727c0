"""Talks with a model: answers are streamed, with the speed of each.

    python -m bpd_jax.chat --model=smollm2
    echo "Why is the sky blue?" | python -m bpd_jax.chat --model=smollm2

Accepted draft tokens are green, or in brackets without colour. Lines that begin with a
slash are commands; /help lists them.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator

from absl import flags
from rich.console import Console
from rich.text import Text

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation import decode_flags
from bpd_jax.reporting.answers import print_answer, speed_of
from bpd_jax.reporting.terminal import standard_output
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path
from bpd_jax.training import process_flags

METHOD = flags.DEFINE_string(
    "method", None, "method, such as ngram:16; default: the fastest known one."
)
SYSTEM = flags.DEFINE_string("system", None, "instructions before the conversation.")

# An answer of the default of other commands, 64 tokens, ends in the middle.
_NEW_TOKENS = 512


@dataclasses.dataclass
class Conversation:
    """The state of a conversation.

    Attributes:
      method: the method of the next answer.
      messages: what was said, each with `role` and `content`, without `system`.
      system: instructions before it, or None.
    """

    lm: api.LanguageModel
    decoder: Decoder
    options: DecodeOptions
    method: Method
    system: str | None = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def prompt(self, message: str) -> str | list[dict[str, str]]:
        """The prompt of a message; without a chat template the message alone."""
        if self.lm.chat is None:
            return message
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, *self.messages, {"role": "user", "content": message}]

    def answer(self, message: str) -> None:
        """Decodes and prints an answer, and adds both to the conversation."""
        console = standard_output()
        tokens = self.lm.encode(self.prompt(message))
        task = self.decoder.prepare(self.method, [tokens], self.options)
        generation = print_answer(self.lm, task, tokens, console, marks=True)
        ids = generation.output_ids
        text = api.visible_text(self.lm, ids, self.options)
        self.messages += [
            {"role": "user", "content": message},
            {"role": "assistant", "content": text},
        ]
        speed = speed_of(len(ids), generation.serial_calls, generation.seconds)
        if len(ids) == self.options.max_new_tokens:
            speed += "; cut off, --max_new_tokens allows more"
        _say(f"{self.method.name}: {speed}")

    # ---- Commands: each gets the text after its name ----

    def use_plain(self, _: str) -> None:
        """decode without drafts, to compare speeds"""
        self.method = GREEDY
        _say("plain decoding")

    def use_method(self, name: str) -> None:
        """decode with a method, such as bpd; without a name the default"""
        method = parse_method(name) if name else self.decoder.default_method
        self.decoder.drafter(method)  # Checks that its models are there.
        self.method = method
        _say(f"method {method.name}")

    def set_system(self, text: str) -> None:
        """set instructions, and begin a new conversation"""
        if self.lm.chat is None:
            raise UserError("this model has no chat template, so no instructions.")
        self.system = text or None
        self.reset("")

    def reset(self, _: str) -> None:
        """begin a new conversation"""
        self.messages.clear()
        _say("a new conversation")

    def save(self, path: str) -> None:
        """write the conversation to a JSON file"""
        if not path:
            raise UserError("name a file, as in /save conversation.json.")
        if as_path(path).exists():
            raise UserError(f"{path} exists already: name another file.")
        begin = [{"role": "system", "content": self.system}] if self.system else []
        text = json.dumps([*begin, *self.messages], ensure_ascii=False, indent=1)
        files.write_text(path, text + "\n")
        _say(f"written to {path}")


_COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "plain": Conversation.use_plain,
    "method": Conversation.use_method,
    "system": Conversation.set_system,
    "reset": Conversation.reset,
    "save": Conversation.save,
}


def main() -> None:
    """Reads the flags, loads the model, and answers line by line."""
    config = decode_flags.config()
    if config.options.max_new_tokens == DecodeOptions.max_new_tokens:
        options = dataclasses.replace(config.options, max_new_tokens=_NEW_TOKENS)
        config = dataclasses.replace(config, options=options)
    name = METHOD.value or config.method
    method = parse_method(name) if name else None
    lm, decoder, config = decode_flags.load(config)
    conversation = Conversation(
        lm, decoder, config.options, method or decoder.default_method, SYSTEM.value
    )
    decoder.drafter(conversation.method)
    if lm.chat is None:
        _say("this model has no chat template: it continues each line by itself")
    failed = False
    for line in _lines():
        try:
            failed |= not _obey(conversation, line)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            _say("interrupted; Ctrl-D ends")
    if failed and not sys.stdin.isatty():
        sys.exit(1)


def _obey(conversation: Conversation, line: str) -> bool:
    """Runs a command or answers a message; whether it could be done."""
    try:
        if not line.startswith("/"):
            conversation.answer(line)
            return True
        name, _, rest = line[1:].partition(" ")
        if name == "help":
            for command, function in _COMMANDS.items():
                _say(f"/{command:<7} {function.__doc__}")
            _say("/quit    or Ctrl-D: end")
        elif name in _COMMANDS:
            _COMMANDS[name](conversation, rest.strip())
        else:
            raise UserError(f"there is no command /{name}: /help lists all.")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def _lines() -> Iterator[str]:
    """The lines that are typed, with a history, or read from a pipe; no empty ones."""
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives `input` a history)
        _say("a message, or /help; Ctrl-D ends")
    while True:
        try:
            line = input("> " if typed else "")
        except EOFError:
            if typed:
                print()
            return
        except KeyboardInterrupt:
            if not typed:
                raise
            print()
            continue
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line


def _say(text: str) -> None:
    """Prints a line that is no part of an answer, to standard error."""
    Console(stderr=True, soft_wrap=True).print(Text(text, style="dim"), highlight=False)


if __name__ == "__main__":
    process_flags.run(main)
