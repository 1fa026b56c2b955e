"""Products: WGMMA, mma.sync, and their operands in tiles of 8 x 8 numbers."""

from operator import attrgetter
from typing import Any

import numpy as np

from . import hopper
from .arithmetic import LANES
from .machine import Machine, Step, Warp, address_of, guarded, source
from .memory import EmulatorError
from .operands import local, shared_of
from .program import Instruction
from .waiting import group

# What a register of sums holds until the wait for its product: NaN.
_NOT_YET = np.full(LANES, 0xFFFFFFFF, np.uint32)


def matrix_rows(machine: Machine, instruction: Instruction) -> Step:
    """ldmatrix and stmatrix: tiles of 8 x 8 words of 16 bits."""
    parts, operands = instruction.parts, instruction.operands
    stores = parts[0] == "stmatrix"
    address, registers = operands if stores else reversed(operands)
    registers = registers if isinstance(registers, tuple) else (registers,)
    where, transposed = address_of(machine, address), "trans" in parts

    def step(warp: Warp, mask: Any) -> None:
        if mask is not None:
            raise EmulatorError("stmatrix and ldmatrix by some lanes of a warp")
        addresses = where(warp)[: 8 * len(registers)]
        shared = shared_of(warp, addresses)
        for i, register in enumerate(registers):
            rows = local(addresses[8 * i : 8 * i + 8])
            if stores:
                pairs = np.ascontiguousarray(warp.registers[register.index]).view(np.uint16)
                tile = pairs.reshape(8, 8)
                tile = tile.T if transposed else tile
                shared.store(rows, 2, [np.ascontiguousarray(tile[:, j]) for j in range(8)])
                warp.wrote(shared, rows)
            else:
                tile = np.stack(shared.load(rows, 2, 8), 1)
                tile = np.ascontiguousarray(tile.T if transposed else tile)
                warp.set(register, tile.reshape(-1).view(np.uint32), None)

    return guarded(instruction, step)


def wgmma(machine: Machine, instruction: Instruction) -> Step:
    """WGMMA, its fences, groups and waits."""
    if instruction.parts[1] == "fence":
        return guarded(instruction, lambda warp, mask: None)
    return group(instruction, attrgetter("products")) or _product(machine, instruction)


def _product(machine: Machine, instruction: Instruction) -> Step:
    parts, operands = instruction.parts, instruction.operands
    _, _, _, _, shape, _, kind, *_ = parts
    columns, depth = (int(x) for x in shape.removeprefix("m64n").split("k"))
    to, first, second, scale, *signs = operands
    flags = [int(x) for x in signs]
    transposed = flags[2:] if kind != "e4m3" else []
    of_first = 0 if isinstance(first, tuple) or not transposed else transposed[0]
    of_second = transposed[-1] if transposed else 0
    if parts[5:8] != ("f32", kind, kind) or kind not in ("f16", "bf16", "e4m3"):
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    if flags[:2] != [1, 1]:
        raise EmulatorError("WGMMA with negated operands is not known")
    reads = [source(machine, x, "b32") for x in first] if isinstance(first, tuple) else None
    at_first = None if reads else source(machine, first, "b64")
    at_second, keeps = source(machine, second, "b64"), source(machine, scale, "pred")
    row, column = hopper.fragment_places(columns)
    places = [x.index for x in to]

    def step(warp: Warp, mask: Any) -> None:
        if mask is not None:
            raise EmulatorError("WGMMA by some lanes of a warp")
        shared = warp.block.shared

        descriptors = [int(x(warp)[0]) for x in (at_first, at_second) if x is not None]

        def in_shared(check: Any = None) -> list[Any]:
            """The second operand, and the first if it is not in registers."""
            *of_a, of_b = map(hopper.Descriptor.decode, descriptors)
            sizes = (columns, depth, kind, bool(of_second))
            found = [hopper.read_matrix(shared, of_b, *sizes, check=check)]
            for x in of_a:
                sizes = (16, depth, kind, bool(of_first))
                rows = warp.number % 4 * 16
                found.append(hopper.read_matrix(shared, x, *sizes, rows, check=check))
            return found

        read = in_shared(warp.check_fenced)
        b, a = read[0], read[-1]
        if reads is not None:
            a = hopper.factor_from_registers([get(warp) for get in reads], kind)
        with np.errstate(all="ignore"):
            product = (a @ b.T)[row, column]
            if keeps(warp)[0]:
                late = warp.sums
                old = [late[i][1] if i in late else warp.registers[i] for i in places]
                product = product + np.stack(old).view(np.float32)
        sums = np.ascontiguousarray(product).view(np.uint32)
        this = object()
        for i, x in zip(places, sums, strict=True):
            warp.registers[i] = _NOT_YET
            warp.sums[i] = this, x

        def end() -> None:
            """What the tensor cores read must not have changed until the wait, which ends them."""
            if not all(
                np.array_equal(x, y, equal_nan=True) for x, y in zip(in_shared(), read, strict=True)
            ):
                raise EmulatorError("an operand of WGMMA was overwritten before its wait")

            for i in [i for i, (product, _) in warp.sums.items() if product is this]:
                warp.registers[i] = warp.sums.pop(i)[1]

        warp.products[-1].append(end)

    return guarded(instruction, step)


def warp_product(machine: Machine, instruction: Instruction) -> Step:
    """mma.sync: 16 rows by 8 columns, operands in registers."""
    parts = instruction.parts
    to, first, second, third = instruction.operands
    *_, to_kind, kind, _, _ = parts
    if to_kind != "f32" or kind not in ("f16", "bf16", "e4m3") or len(first) != 4:
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    reads = [source(machine, x, "b32") for x in first]
    columns = [source(machine, x, "b32") for x in second]
    sums = [source(machine, x, "b32") for x in third]
    row, column = hopper.fragment_places(8)

    def step(warp: Warp, mask: Any) -> None:
        if mask is not None:
            raise EmulatorError("mma.sync by some lanes of a warp")
        a = hopper.factor_from_registers([get(warp) for get in reads], kind)
        low, high = (get(warp) for get in columns)
        # lane 4n + t of the second factor holds what lane 4r + t of the first does
        b = hopper.factor_from_registers([low, low, high, high], kind)[:8]
        old = np.stack([get(warp) for get in sums]).view(np.float32)
        with np.errstate(all="ignore"):
            product = (a @ b.T)[row, column] + old
        for register, x in zip(to, product, strict=True):
            warp.set(register, np.ascontiguousarray(x).view(np.uint32), None)

    return guarded(instruction, step)
