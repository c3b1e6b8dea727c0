"""Bytes that instructions read from and write to the memory of a device."""

import math

from bpd_jax.compilation.collectives import COLLECTIVES
from bpd_jax.compilation.hlo import Computation, Instruction, Module


def traffic(
    module: Module, computation: Computation, instruction: Instruction
) -> float:
    """Bytes that an instruction reads from and writes to the HBM."""
    operands = computation.operands(instruction)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            read = sum(x.nbytes for x in operands[1:])
            if operands[0].nbytes:
                read += sum(shape.nbytes for shape in instruction.shapes)
            return read + instruction.nbytes
        case "slice-start" | "dynamic-slice-start":
            # Its result is a tuple of source, slice and flag.
            part = instruction.shapes[1]
            read = part.nbytes if operands[0].nbytes else 0
            return read + (part.nbytes if part.space == 0 else 0)
        case "dynamic-update-slice":
            update = operands[1]
            written = sum(shape.nbytes for shape in update.shapes)
            return update.nbytes + (written if instruction.nbytes else 0)
        case "copy-start":
            # Its result is a tuple of both buffers and a flag.
            destination = instruction.shapes[0]
            return operands[0].nbytes + (
                destination.nbytes if destination.space == 0 else 0
            )
        case "fusion":
            inside = module.computations[instruction.called[0]]
            total = _written_inside(inside)
            for number, operand in enumerate(operands):
                name = inside.parameters[number].name
                total += min(operand.nbytes, _read_inside(module, inside, name))
            return total
    return sum(operand.nbytes for operand in operands) + instruction.nbytes


def _read_inside(module: Module, inside: Computation, name: str) -> float:
    """Bytes that a fusion reads of a parameter; only slices if it only slices it."""
    total = 0.0
    for user in inside.users[name]:
        first = user.operands[0] == name
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += sum(shape.nbytes for shape in user.shapes)
        elif user.opcode == "bitcast":
            total += _read_inside(module, inside, user.name)
        elif user.opcode == "fusion":
            nested = module.computations[user.called[0]]
            for number, operand in enumerate(user.operands):
                if operand == name:
                    parameter = nested.parameters[number].name
                    total += _read_inside(module, nested, parameter)
                    if _behind_bitcasts(nested, nested.root).name == parameter:
                        total += _read_inside(module, inside, user.name)
        elif not (
            # Updated in place, forwarded, or exchanged.
            (user.opcode == "dynamic-update-slice" and first)
            or user.opcode in ("tuple", "custom-call")
            or user.opcode in COLLECTIVES
        ):
            return math.inf
    return total


def _written_inside(inside: Computation) -> float:
    """Bytes that a fusion writes; only the updates for an in-place update."""
    root = inside.root
    written = 0.0
    for part in inside.operands(root) if root.opcode == "tuple" else [root]:
        made = _behind_bitcasts(inside, part)
        if made.opcode in ("parameter", "custom-call") or made.opcode in COLLECTIVES:
            continue
        if part.nbytes and made.opcode == "dynamic-update-slice":
            written += sum(x.nbytes for x in inside.operands(made)[1].shapes)
        else:
            written += part.nbytes
    return written


def _behind_bitcasts(inside: Computation, made: Instruction) -> Instruction:
    """The instruction behind bitcasts; for a reduce-scatter the collective."""
    while made.opcode in ("bitcast", "dynamic-slice"):
        source = inside.operands(made)[0]
        if made.opcode == "dynamic-slice" and source.opcode not in COLLECTIVES:
            break
        made = source
    return made
