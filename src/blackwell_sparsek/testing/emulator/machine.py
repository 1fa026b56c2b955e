"""Runs one kernel: clusters of programs, their warps, and what they wait for.

Warps take turns in an order drawn from a seed, and copies arrive after a time that is drawn too. A
kernel whose roles do not wait for each other as they must gives wrong results under some seeds, and
one that waits for what never comes ends in an error that says who waits where.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import hopper
from .arithmetic import LANES, UNSIGNED, operation
from .memory import (
    PARAMETERS_START,
    RANK_SHIFT,
    SHARED_START,
    EmulatorError,
    GlobalMemory,
    SharedMemory,
)
from .program import Address, Instruction, Program, Register

# Instructions that a warp runs before the others get their turn, and the longest delay of a copy in
# such turns.
_TURN = 400
_LONGEST_DELAY = 40
_POISON = {"pred": False, "b8": 0xFF, "b16": 0xFFFF, "b32": 0xFFFFFFFF, "b64": 2**64 - 1}


class Warp:
    """32 lanes with their registers; each lane has its own place once branches part them."""

    def __init__(self, block: "Block", number: int, kinds: Sequence[str]):
        self.block = block
        self.number = number
        poison = {kind: np.full(LANES, x, UNSIGNED[kind]) for kind, x in _POISON.items()}
        self.registers: list[Any] = [poison[kind] for kind in kinds]
        self.at = 0
        self.places: Any = None
        """The place of each lane, -1 once it has ended; None while all are at `at`."""
        self.waits: Any = None
        """What the warp waits for: a function that says whether it is over."""
        self.ended = False
        self.spins = -1
        """Where lanes wait in a loop, which others of the warp may have to end."""
        self.products: list[list[Any]] = [[]]
        self.sums: dict[int, tuple[Any, Any]] = {}
        """Of registers that hold NaN until a product is waited for: the product, and the sums."""
        self.stores: list[list[Any]] = [[]]
        self.copies: list[list[Any]] = [[]]
        self.cluster_round: Any = None
        self.index = block.index * block.machine.num_warps + number

    def fence(self) -> None:
        """Show the async proxy what this warp wrote, or has seen, of shared memory."""
        machine = self.block.machine
        machine.time += 1
        machine.fences[self.index] = machine.time

    def wrote(self, shared: SharedMemory, addresses: Any) -> None:
        """Note that threads of this warp wrote to shared memory."""
        shared.written(addresses, self.index, self.block.machine.time + 1)

    def check_fenced(self, addresses: Any) -> None:
        """Refuse to let the async proxy read what threads wrote without a fence since."""
        if self.block.shared.unfenced(addresses, self.index, self.block.machine.fences):
            raise EmulatorError("threads wrote to this tile, and none has run fence.proxy.async")

    def active(self) -> Any:
        """The lanes that run next, None if all do."""
        if self.places is None:
            return None
        alive = self.places[self.places >= 0]
        others = alive[alive != self.spins]
        self.at = int(others.min() if len(others) and self.spins >= 0 else alive.min())
        return self.places == self.at

    def move(self, lanes: Any, to: int) -> None:
        """Send lanes (None for all) to an instruction."""
        if lanes is None:
            self.at = to
            return
        if self.places is None:
            self.places = np.full(LANES, self.at)
        self.places[lanes] = to
        if (self.places == self.places[0]).all():
            self.at = int(self.places[0])
            self.places = None
            self.ended = self.at < 0
        elif (self.places < 0).all():
            self.ended = True

    def set(self, register: Any, values: Any, lanes: Any) -> None:
        """Write a register of some lanes."""
        if isinstance(register, Register):
            kind = UNSIGNED[register.kind]
            if values.dtype != kind:
                values = values.astype(kind)
            if lanes is not None:
                values = np.where(lanes, values, self.registers[register.index])
            elif self.sums:
                self.sums.pop(register.index, None)
            self.registers[register.index] = values


class Block:
    """One program: its warps, shared memory and barriers."""

    def __init__(self, machine: "Machine", index: int, rank: int):
        self.machine = machine
        self.index = index
        self.rank = rank
        self.shared = SharedMemory(machine.shared_bytes)
        self.barriers: dict[int, hopper.Barrier] = {}
        self.named: dict[int, list[Warp]] = {}
        self.warps = [Warp(self, i, machine.program.kinds) for i in range(machine.num_warps)]

    def barrier(self, address: int) -> hopper.Barrier:
        """The mbarrier at an address, which may be of another program of the cluster."""
        block, place = self.machine.place(self, address)
        if place not in block.barriers:
            raise EmulatorError(f"no mbarrier was set up at {place - SHARED_START} bytes")
        return block.barriers[place]


Step = Callable[[Warp, Any], None]


class Machine:
    """A launch of one kernel.

    Parameters
    ----------
    program : the kernel
    parameters : an int, float, or `hopper.TensorMap` for each parameter, packed as 8 bytes
    memory : the tensors that it may touch
    grid : programs
    num_warps : warps of each
    shared_bytes : shared memory of each
    cluster : programs of a cluster
    resident : programs that run at the same time, at least a cluster
    seed : draws the order of warps and the delays of copies
    compile_step : makes a function of an instruction, `instructions.compiled`
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[Any],
        memory: GlobalMemory,
        grid: int,
        num_warps: int,
        shared_bytes: int,
        cluster: int = 1,
        resident: int = 4,
        seed: int = 0,
        *,
        compile_step: "Callable[[Machine, Instruction], Step]",
    ):
        self.program = program
        self.num_warps = num_warps
        self.shared_bytes = shared_bytes
        self.grid = grid
        self.cluster = cluster
        self._resident = max(resident, cluster)
        self._random = random.Random(seed)
        self._places = {
            name: PARAMETERS_START + 256 * i for i, name in enumerate(program.parameters)
        }
        self.bind(parameters, memory)
        self.turn = 0
        # of writes and fences, and when each warp last ran a fence
        self.time = 0
        self.fences: Any = np.zeros(grid * num_warps, np.int64)
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._issued = 0
        self._steps: list[Step] = [compile_step(self, x) for x in program.instructions]
        # a loop that waits makes no progress by branching
        self._counts = [int(x.parts[0] != "bra") for x in program.instructions]
        self.executed = 0

    def bind(self, parameters: Sequence[Any], memory: GlobalMemory) -> None:
        """Take other parameters and tensors for the next run."""
        self.memory = memory
        self._parameters = dict(zip(self.program.parameters, parameters, strict=True))
        self.maps = {
            self._places[name]: value
            for name, value in self._parameters.items()
            if isinstance(value, hopper.TensorMap)
        }

    # What instructions ask for.

    def parameter(self, name: str) -> Any:
        """The value of a parameter."""
        return self._parameters[name]

    def symbol(self, name: str) -> int:
        """The address that a name stands for."""
        if name in self._places:
            return self._places[name]
        if name == "global_smem":
            return SHARED_START
        raise EmulatorError(f"the name {name} is not known")

    def place(self, block: Block, address: int) -> tuple[Block, int]:
        """The program whose shared memory an address means, and the address in it."""
        rank = address >> RANK_SHIFT
        if rank == 0:
            return block, address
        first = block.index - block.rank
        target = self._blocks.get(first + rank - 1)
        if target is None or all(w.ended for w in target.warps):
            raise EmulatorError("access to shared memory of a program that has ended")
        return target, address & (2**RANK_SHIFT - 1)

    def peers(self, block: Block) -> list[Block]:
        """All programs of a cluster."""
        first = block.index - block.rank
        return [self._blocks[first + i] for i in range(self.cluster)]

    def later(self, action: Callable[[], None]) -> None:
        """Do something in some turns."""
        self._issued += 1
        self._due.append((self.turn + self._random.randrange(_LONGEST_DELAY), self._issued, action))

    # The run.

    def run(self, seconds: float | None = None) -> None:
        """Run all programs to their end; TimeoutError after some seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        waiting = list(range(0, self.grid, self.cluster))
        self._blocks: dict[int, Block] = {}
        running: list[Warp] = []
        idle = 0
        while waiting or running or self._due:
            while (
                waiting and len({w.block.index for w in running}) + self.cluster <= self._resident
            ):
                first = waiting.pop(0)
                for rank in range(self.cluster):
                    block = self._blocks[first + rank] = Block(self, first + rank, rank)
                    running += block.warps
            self.turn += 1
            if end is not None and time.monotonic() > end:
                raise TimeoutError(
                    f"{self.program.name} takes more than {seconds} s in the emulator"
                )
            self._random.shuffle(running)
            before = self.executed
            arrived = self._arrive()
            with np.errstate(all="ignore"):
                for warp in running:
                    self._run_warp(warp)
            ended = [w for w in running if w.ended]
            if ended:
                running = [w for w in running if not w.ended]
                self._retire()
            idle = 0 if self.executed > before or arrived or ended else idle + 1
            if idle > _LONGEST_DELAY + 2 and not self._due:
                raise EmulatorError("all warps wait:\n" + "\n".join(map(self._describe, running)))

    def _retire(self) -> None:
        for block in list(self._blocks.values()):
            if block.rank == 0 and all(w.ended for b in self.peers(block) for w in b.warps):
                for peer in self.peers(block):
                    for warp in peer.warps:
                        for group in warp.stores:
                            for store in group:
                                store()
                    self._blocks.pop(peer.index)

    def _arrive(self) -> bool:
        due = [x for x in self._due if x[0] <= self.turn]
        self._due = [x for x in self._due if x[0] > self.turn]
        for _, _, action in sorted(due, key=lambda x: x[:2]):
            action()
        return bool(due)

    def _run_warp(self, warp: Warp) -> None:
        steps = self._steps
        for _ in range(_TURN):
            if warp.ended:
                return
            if warp.waits is not None:
                if not warp.waits():
                    return
                warp.waits = None
                self.executed += 1
            lanes = warp.active()
            at = warp.at
            warp.spins = -1
            try:
                steps[at](warp, lanes)
            except EmulatorError as error:
                raise EmulatorError(f"{error}\n{self._describe(warp, at)}") from None
            except (IndexError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise EmulatorError(
                    f"{type(error).__name__}: {error}\n{self._describe(warp, at)}"
                ) from error
            if warp.spins >= 0:
                return
            self.executed += self._counts[at]

    def _describe(self, warp: Warp, at: int | None = None) -> str:
        text = self.program.instructions[warp.at if at is None else at].text
        return f"program {warp.block.index}, warp {warp.number}: {' '.join(text.split())[:200]}"


def guarded(instruction: Instruction, step: Callable[[Warp, Any], None]) -> Step:
    """`step` for the lanes whose predicate holds, all of which then go on."""
    guard, negated = instruction.guard, instruction.negated
    if guard is None:

        def plain(warp: Warp, lanes: Any) -> None:
            at = warp.at
            step(warp, lanes)
            warp.at = at
            warp.move(lanes, at + 1)

        return plain
    index = guard.index

    def run(warp: Warp, lanes: Any) -> None:
        at = warp.at
        chosen = warp.registers[index]
        chosen = ~chosen if negated else chosen
        chosen = chosen if lanes is None else chosen & lanes
        if chosen.any():
            step(warp, None if chosen.all() else chosen)
        warp.at = at
        warp.move(lanes, at + 1)

    return run


def source(machine: Machine, operand: Any, kind: str) -> Callable[[Warp], Any]:
    """The value of an operand on all lanes, as words of `kind` if it is a constant."""
    if isinstance(operand, Register):
        index = operand.index
        return lambda warp: warp.registers[index]
    if isinstance(operand, tuple) and operand and operand[0] == "not":
        inner = operand[1].index
        return lambda warp: ~warp.registers[inner]
    if isinstance(operand, Address):
        return address_of(machine, operand)
    value = machine.symbol(operand) if isinstance(operand, str) else operand
    bits = 8 * np.dtype(UNSIGNED[kind]).itemsize
    constant = np.full(
        LANES, value & (2**bits - 1) if kind != "pred" else bool(value), UNSIGNED[kind]
    )
    return lambda warp: constant


def address_of(machine: Machine, operand: Address) -> Callable[[Warp], Any]:
    """The address that an operand in brackets means, on all lanes."""
    base, offset = operand.base, operand.offset
    if isinstance(base, Register):
        index, kind = base.index, UNSIGNED[base.kind]
        if offset == 0:
            return lambda warp: warp.registers[index]
        added = np.array(offset & (2 ** (8 * np.dtype(kind).itemsize) - 1), kind)
        return lambda warp: warp.registers[index] + added
    start = machine.symbol(base) if isinstance(base, str) else base
    constant = np.full(LANES, start + offset, np.uint64)
    return lambda warp: constant


def arithmetic(machine: Machine, instruction: Instruction) -> Step | None:
    """The step of an arithmetic instruction; None if it is none."""
    function = operation(instruction.parts)
    if function is None:
        return None
    to, *given = instruction.operands
    kinds = _source_kinds(instruction, len(given))
    read = [source(machine, x, kind) for x, kind in zip(given, kinds, strict=True)]

    def step(warp: Warp, lanes: Any) -> None:
        warp.set(to, function(*[get(warp) for get in read]), lanes)

    if instruction.parts[0] == "setp":
        first, second = to if isinstance(to, tuple) else (to, None)

        def both(warp: Warp, lanes: Any) -> None:
            result, opposite = function(*[get(warp) for get in read])
            warp.set(first, result, lanes)
            warp.set(second, opposite, lanes)

        return guarded(instruction, both)
    if isinstance(to, tuple):
        raise EmulatorError(f"{'.'.join(instruction.parts)} with two results is not known")
    return guarded(instruction, step)


def _source_kinds(instruction: Instruction, count: int) -> list[str]:
    """The widths of constants among the sources of an instruction."""
    name, *rest = instruction.parts
    types = [x for x in rest if (x[-1:].isdigit() and x[:1] in "bsufe") or x in ("pred", "bf16")]
    typed = types[-1] if types else "b32"
    digits = (
        "".join(c for c in typed.removeprefix("bf") if c.isdigit()) if "x" not in typed else "32"
    )
    kind = "pred" if typed == "pred" else f"b{digits or 16}"
    kinds = [kind] * count
    if name in ("shl", "shr"):
        kinds[1] = "b32"
    elif name in ("bfe", "bfi"):
        kinds[-2:] = ["b32", "b32"]
    elif name == "mad" and "wide" in rest:
        kinds[2] = "b64" if kind == "b32" else "b32"
    elif name == "selp" or (name == "setp" and count == 3):
        kinds[2] = "pred"
    elif name == "cvt" and typed == "f32":
        kinds = ["b32"] * count
    return kinds
