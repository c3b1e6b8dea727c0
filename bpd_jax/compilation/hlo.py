"""Parses the text of a compiled program into computations and instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# A line of a computation; what follows is its shape.
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+\(.*->.*\{\s*$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|\S+)"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """The shape and layout of an array.

    Attributes:
      dtype: HLO's name of the dtype, such as `bf16`.
      dims: sizes of the dimensions.
      space: memory space; 0 is the HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes without the padding of its layout."""
        return -(-self.elements * _bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: unique name in its computation.
      opcode: operation, such as `fusion`.
      shapes: shapes of its result; several if it is a tuple.
      operands: names of instructions of the same computation.
      arguments: text between its parentheses.
      attributes: text after the parentheses.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs; for a loop only the body."""
        return tuple(
            name.strip().removeprefix("%")
            for match in _CALLED.findall(self.attributes)
            for name in match.rstrip(",").strip("{}").split(",")
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its result in the HBM."""
        return sum(shape.nbytes for shape in self.shapes if shape.space == 0)

    def word(self, attribute: str) -> str:
        """The text after `attribute=`, such as a name; empty if it is absent."""
        match = re.search(rf"\b{attribute}=%?\"?([\w.\->$]+)", self.attributes)
        return match[1] if match else ""

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `dimensions={1,2}`."""
        match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(map(int, match[1].split(","))) if match and match[1] else ()


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text; the last one is the root."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions that compute the operands."""
        return [self.instructions[name] for name in instruction.operands]

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        return {
            int(instruction.arguments): instruction
            for instruction in self.instructions.values()
            if instruction.opcode == "parameter"
        }

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use the result of each instruction."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users


@dataclasses.dataclass(frozen=True)
class Module:
    """A program."""

    computations: dict[str, Computation]
    entry: str

    def trips(self, around: Computation, loop: Instruction) -> int | None:
        """The trip count of a loop; None if it is unknown.

        The compilers for CPUs and GPUs annotate it. The TPU compiler does not; there it
        is derived from the loop, if that counts from a constant to a constant: the
        condition compares one element of the carried tuple with the limit, and the body
        adds the step to it.

        Args:
          around: the computation that contains the loop.
          loop: a `while`.
        """
        if written := _TRIPS.search(loop.attributes):
            return int(written[1])
        test = self.computations[loop.word("condition")]
        body = self.computations[loop.word("body")]
        compare = test.root
        if compare.opcode != "compare" or compare.word("direction") != "LT":
            return None
        carried = around.operands(loop)[0]
        if carried.opcode != "tuple":
            return None

        def start(element: Instruction) -> int | None:
            """The initial value of an element of the carried tuple."""
            index = int(element.word("index"))
            return _constant(around, around.operands(carried)[index])

        counter, limit = test.operands(compare)
        if counter.opcode != "get-tuple-element":
            return None
        first = start(counter)
        if limit.opcode == "get-tuple-element":
            last = start(limit)
        else:
            last = _constant(test, limit)
        index = int(counter.word("index"))
        step = 1
        if body.root.opcode == "tuple":
            after = body.operands(body.root)[index]
            if after.opcode == "add":
                steps = [_constant(body, x) for x in body.operands(after)]
                step = next((x for x in steps if x is not None), 1)
        if first is None or last is None:
            return None
        return max(0, -(-(last - first) // step))


def parse(text: str) -> Module:
    """Parses the result of `jax.stages.Compiled.as_text`."""
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    body: dict[str, Instruction] = {}
    root: Instruction | None = None
    for line in _joined(text):
        if header := _COMPUTATION.match(line):
            name, body, root = header[2], {}, None
            entry = name if header[1] else entry
        elif name and line == "}":
            assert root is not None
            computations[name] = Computation(name, body, root)
            name = ""
        elif name and (match := _INSTRUCTION.match(line)):
            instruction = _instruction(match[2], line[match.end() :])
            body[instruction.name] = instruction
            root = instruction if match[1] else root
    return Module(computations, entry)


def _joined(text: str) -> Iterator[str]:
    """Lines; attributes of kernels that span several lines are joined."""
    line = ""
    for part in text.splitlines():
        if part == "}" or _INSTRUCTION.match(part) or _COMPUTATION.match(part):
            yield line
            line = part
        else:
            line += part
    yield line


def _constant(within: Computation, instruction: Instruction) -> int | None:
    """The value of an integer constant or of a copy of one."""
    while instruction.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        instruction = within.operands(instruction)[0]
    match = re.fullmatch(r"-?\d+", instruction.arguments)
    return int(match[0]) if instruction.opcode == "constant" and match else None


def _instruction(name: str, text: str) -> Instruction:
    """Reads `shape opcode(arguments), attributes`."""
    end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:]
    opcode = _OPCODE.match(rest)
    assert opcode is not None, text
    rest = rest[opcode.end() - 1 :]
    close = _closing(rest)
    arguments = rest[1:close]
    return Instruction(
        name=name,
        opcode=opcode[1],
        shapes=tuple(_shapes(shape)),
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        attributes=rest[close + 1 :],
    )


def _closing(text: str) -> int:
    """The index of the parenthesis that closes the first one."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis does not close: {text[:80]}")


def _shapes(text: str) -> Iterator[ArrayShape]:
    # Comments number the parts of long tuples.
    for dtype, dims, layout in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", text)):
        space = re.search(r"S\((\d+)\)", layout)
        yield ArrayShape(
            dtype,
            tuple(int(size) for size in dims.split(",") if size),
            int(space[1]) if space else 0,
        )


def _bits(dtype: str) -> int:
    """Bits of an element; 0 for tokens and opaque values."""
    if dtype == "pred":
        return 8
    # f32, bf16, s8, u4, f8e4m3fn, c64
    match = re.fullmatch(r"(?:bf|f|s|u|c)(\d+)(?:e\w+)?", dtype)
    return int(match[1]) if match else 0
