"""What instructions do that are not arithmetic: branches, moves, memory, exchanges in a warp."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from .arithmetic import LANES, UNSIGNED, values, words
from .machine import Machine, Step, Warp, address_of, arithmetic, guarded, source
from .memory import RANK_SHIFT, EmulatorError
from .operands import chosen_lanes, local, shared_of, word_bytes
from .products import matrix_rows, warp_product, wgmma
from .program import Instruction, Register
from .waiting import barrier, bulk, copy_words, mbarrier, store_and_signal

_LANE = np.arange(LANES)
# Nothing follows from these here: copies and stores are seen in the order in which they are made.
_NOTHING = {
    *("membar", "setmaxnreg", "griddepcontrol", "nanosleep", "prefetch", "prefetchu"),
    *("createpolicy", "applypriority", "discard", "pmevent"),
}


def _count(parts: tuple[str, ...]) -> int:
    return next((int(x[1:]) for x in parts if x in ("v2", "v4", "v8")), 1)


def _space(parts: tuple[str, ...]) -> str:
    return next((x.split("::")[0] for x in parts if x.split("::")[0] in _SPACES), "generic")


_SPACES = ("global", "shared", "param", "local", "const")


# Branches.


def _branch(machine: Machine, instruction: Instruction) -> Step:
    target = machine.program.labels[instruction.operands[0]]
    guard, negated = instruction.guard, instruction.negated

    def run(warp: Warp, mask: Any) -> None:
        if guard is None:
            warp.move(mask, target)
            return
        at = warp.at
        chosen = warp.registers[guard.index]
        chosen = ~chosen if negated else chosen
        if mask is None:
            if chosen.all():
                warp.at = target
            elif not chosen.any():
                warp.at = at + 1
            else:
                warp.places = np.where(chosen, target, at + 1)
            return
        warp.move(mask & ~chosen, at + 1)
        if warp.places is not None or not (mask & chosen).any():
            warp.move(mask & chosen, target)
        elif (mask & chosen).any():
            warp.places = np.full(LANES, warp.at)
            warp.move(mask & chosen, target)

    return run


def _branch_by_index(machine: Machine, instruction: Instruction) -> Step:
    index, table = instruction.operands
    if instruction.guard is not None:
        raise EmulatorError("brx.idx with a predicate is not known")
    targets = np.array([machine.program.labels[x] for x in table])

    def run(warp: Warp, mask: Any) -> None:
        chosen = targets[warp.registers[index.index][chosen_lanes(mask)].astype(np.int64)]
        if mask is None and (chosen == chosen[0]).all():
            warp.at = int(chosen[0])
            return
        places = np.full(LANES, warp.at) if warp.places is None else warp.places.copy()
        places[chosen_lanes(mask)] = chosen
        warp.places = places
        warp.move(np.zeros(LANES, np.bool_), 0)

    return run


def _end(machine: Machine, instruction: Instruction) -> Step:
    guard, negated = instruction.guard, instruction.negated

    def run(warp: Warp, mask: Any) -> None:
        at = warp.at
        if guard is None:
            if mask is None:
                warp.ended = True
                warp.at = -1
            else:
                warp.move(mask, -1)
            return
        chosen = warp.registers[guard.index] ^ negated
        chosen = chosen if mask is None else chosen & mask
        rest = ~chosen if mask is None else mask & ~chosen
        if warp.places is None:
            warp.places = np.full(LANES, at)
        warp.places = np.where(rest, at + 1, warp.places)
        warp.move(chosen, -1)

    return run


# Moves, loads and stores.


def _move(machine: Machine, instruction: Instruction) -> Step:
    to, given = instruction.operands
    kind = instruction.parts[1].replace("u", "b").replace("s", "b").replace("f", "b")
    if isinstance(to, tuple):
        return _unpack(machine, instruction, to, given)
    if isinstance(given, tuple) and given and given[0] != "not":
        return _pack(machine, instruction, to, given)
    if isinstance(given, str) and given.startswith("%"):
        return _special(machine, instruction, to, given)
    read = source(machine, given, "pred" if kind == "pred" else kind)
    index = given.index if isinstance(given, Register) else None

    def step(warp: Warp, mask: Any) -> None:
        sums = None if index is None else warp.sums.get(index)
        warp.set(to, read(warp), mask)
        # the compiler may rename sums before it waits for them
        if sums is not None:
            warp.sums[to.index] = sums

    return guarded(instruction, step)


def _unpack(machine: Machine, instruction: Instruction, to: Any, given: Any) -> Step:
    read = source(machine, given, instruction.parts[1])
    kinds = [x.kind if isinstance(x, Register) else None for x in to]
    kind = next(x for x in kinds if x is not None)

    def step(warp: Warp, mask: Any) -> None:
        parts = np.ascontiguousarray(read(warp)).view(UNSIGNED[kind]).reshape(LANES, -1)
        for i, register in enumerate(to):
            warp.set(register, np.ascontiguousarray(parts[:, i]), mask)

    return guarded(instruction, step)


def _pack(machine: Machine, instruction: Instruction, to: Any, given: Any) -> Step:
    bits = int(instruction.parts[1][1:]) // len(given)
    reads = [source(machine, x, f"b{bits}") for x in given]

    def step(warp: Warp, mask: Any) -> None:
        parts = np.stack([read(warp).astype(UNSIGNED[f"b{bits}"]) for read in reads], 1)
        whole = np.ascontiguousarray(parts).view(UNSIGNED[to.kind]).reshape(LANES)
        warp.set(to, whole, mask)

    return guarded(instruction, step)


def _special(machine: Machine, instruction: Instruction, to: Any, name: str) -> Step:
    def value(warp: Warp) -> Any:
        block = warp.block
        first = LANES * warp.number
        known: dict[str, Any] = {
            "%tid.x": first + _LANE,
            "%laneid": _LANE,
            "%warpid": warp.number,
            "%ctaid.x": block.index,
            "%nctaid.x": machine.grid,
            "%ntid.x": LANES * machine.num_warps,
            "%cluster_ctarank": block.rank,
            "%cluster_nctarank": machine.cluster,
            "%clusterid.x": block.index // machine.cluster,
            "%nclusterid.x": machine.grid // machine.cluster,
            "%cluster_ctaid.x": block.rank,
            "%smid": block.index % 132,
            "%globaltimer": machine.turn,
            "%clock": machine.turn,
            "%clock64": machine.turn,
        }
        if name in known:
            return known[name]
        if name.endswith((".y", ".z")):
            return 1 if name.startswith(("%n", "%cluster_n")) else 0
        raise EmulatorError(f"the register {name} is not known")

    def step(warp: Warp, mask: Any) -> None:
        warp.set(to, np.full(LANES, value(warp), UNSIGNED[to.kind]), mask)

    return guarded(instruction, step)


def _generic_address(machine: Machine, instruction: Instruction) -> Step:
    to, given = instruction.operands
    read = source(machine, given, to.kind)
    return guarded(instruction, lambda warp, mask: warp.set(to, read(warp), mask))


def _load(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    to, address = instruction.operands[:2]
    targets = to if isinstance(to, tuple) else (to,)
    size, count, space = word_bytes(parts), _count(parts), _space(parts)
    signed = parts[-1].startswith("s")
    if space == "param":
        if isinstance(to, tuple):
            raise EmulatorError(f"{'.'.join(parts)} is not known")
        return _load_parameter(machine, instruction, targets[0], address)
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        chosen = chosen_lanes(mask)
        addresses = where(warp)[chosen]
        if space == "shared":
            found = shared_of(warp, addresses).load(local(addresses), size, count)
        else:
            found = machine.memory.load(addresses, size, count)
        for register, x in zip(targets, found, strict=True):
            if not isinstance(register, Register):
                continue
            kind = UNSIGNED[register.kind]
            if signed and np.dtype(kind).itemsize > size:
                x = x.view(f"i{size}").astype(f"i{np.dtype(kind).itemsize}").view(kind)
            whole = np.zeros(LANES, kind)
            whole[chosen] = x
            warp.set(register, whole, mask)

    return guarded(instruction, step)


def _load_parameter(machine: Machine, instruction: Instruction, to: Any, address: Any) -> Step:
    size, bits = word_bytes(instruction.parts), 8 * np.dtype(UNSIGNED[to.kind]).itemsize
    signed = instruction.parts[-1].startswith("s")

    def step(warp: Warp, mask: Any) -> None:
        given = machine.parameter(address.base)
        if isinstance(given, float):
            content = struct.pack("<f", given)
        else:
            content = (int(given) & (2**64 - 1)).to_bytes(8, "little")
        value = int.from_bytes(content[address.offset :][:size], "little")
        if signed:
            value = (value - (value >> (8 * size - 1) << (8 * size))) & (2**bits - 1)
        warp.set(to, np.full(LANES, value, UNSIGNED[to.kind]), mask)

    return guarded(instruction, step)


def _store(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    address, given = instruction.operands[:2]
    size, space = word_bytes(parts), _space(parts)
    items = given if isinstance(given, tuple) else (given,)
    reads = [source(machine, x, f"b{8 * size}") for x in items]
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        chosen = chosen_lanes(mask)
        addresses = where(warp)[chosen]
        kind = UNSIGNED[f"b{8 * size}"]
        content = [read(warp)[chosen].astype(kind) for read in reads]
        if space == "shared":
            shared = shared_of(warp, addresses)
            changed = shared.store(local(addresses), size, content)
            # warp groups may write the same zeros while another has its product read them
            warp.wrote(shared, local(addresses)[changed])
        else:
            machine.memory.store(addresses, size, content)

    return guarded(instruction, step)


def _fence(machine: Machine, instruction: Instruction) -> Step:
    if instruction.parts[1:3] == ("proxy", "async"):
        return guarded(instruction, lambda warp, mask: warp.fence())
    return guarded(instruction, lambda warp, mask: None)


def _map_address(machine: Machine, instruction: Instruction) -> Step:
    to, address, rank = instruction.operands
    base, of = source(machine, address, "b32"), source(machine, rank, "b32")

    def step(warp: Warp, mask: Any) -> None:
        kind = UNSIGNED[to.kind]
        mapped = base(warp).astype(np.uint64) | (
            (of(warp).astype(np.uint64) + np.uint64(1)) << np.uint64(RANK_SHIFT)
        )
        warp.set(to, mapped.astype(kind), mask)

    return guarded(instruction, step)


_ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x,
    "min": min,
    "max": max,
    "exch": lambda old, x: x,
    "and": lambda old, x: old & x,
    "or": lambda old, x: old | x,
    "xor": lambda old, x: old ^ x,
}


def _atomic(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    if "async" in parts:
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    returns = parts[0] == "atom"
    if not returns and _count(parts) > 1:
        return _add_vector(machine, instruction)
    to, address, *given = instruction.operands if returns else (None, *instruction.operands)
    how = next(x for x in parts if x in (*_ATOMICS, "cas", "inc"))
    kind, size, space = parts[-1], word_bytes(parts), _space(parts)
    reads = [source(machine, x, f"b{8 * size}") for x in given]
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        found = np.zeros(LANES, UNSIGNED[f"b{8 * size}"])
        addresses, operands = where(warp), [read(warp) for read in reads]
        for lane in np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask):
            at = addresses[lane : lane + 1]
            memory = shared_of(warp, at) if space == "shared" else machine.memory
            at = local(at) if space == "shared" else at
            (old,) = memory.load(at, size, 1)
            found[lane] = old[0]
            x = operands[0][lane : lane + 1]
            if how == "cas":
                new = operands[1][lane : lane + 1] if old[0] == x[0] else old
            else:
                number = _ATOMICS[how](values(old, kind)[0], values(x, kind)[0])
                new = words(np.array([number]), kind)
            memory.store(at, size, [new])
        if returns:
            warp.set(to, found, mask)

    return guarded(instruction, step)


def _add_vector(machine: Machine, instruction: Instruction) -> Step:
    """red.add of two or four numbers next to each other."""
    parts = instruction.parts
    address, given = instruction.operands
    kind, size = parts[-1], word_bytes(parts)
    if "add" not in parts or _space(parts) != "global":
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    reads = [source(machine, x, f"b{8 * size}") for x in given]
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        addresses = where(warp)
        # one lane after the other: several may add to the same place
        for lane in np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask):
            at = addresses[lane : lane + 1]
            sums = [
                words(values(old, kind) + values(read(warp)[lane : lane + 1], kind), kind)
                for old, read in zip(machine.memory.load(at, size, len(reads)), reads, strict=True)
            ]
            machine.memory.store(at, size, sums)

    return guarded(instruction, step)


# Within a warp.


def _elect(machine: Machine, instruction: Instruction) -> Step:
    lane, chosen = instruction.operands[0]

    def step(warp: Warp, mask: Any) -> None:
        first = 0 if mask is None else int(np.flatnonzero(mask)[0])
        warp.set(lane, np.full(LANES, first, np.uint32), mask)
        warp.set(chosen, first == _LANE, mask)

    return guarded(instruction, step)


def _shuffle(machine: Machine, instruction: Instruction) -> Step:
    how = instruction.parts[2]
    to, given, by, bounds, *_ = instruction.operands
    within = None
    if isinstance(to, tuple):
        to, within = to
    read, offset, limits = (source(machine, x, "b32") for x in (given, by, bounds))

    def step(warp: Warp, mask: Any) -> None:
        x, b, c = read(warp), offset(warp).astype(np.int64) & 31, limits(warp).astype(np.int64)
        segment, clamp = c >> 8 & 31, c & 31
        most = (_LANE & segment) | (clamp & ~segment)
        least = _LANE & segment
        if how == "up":
            lane = _LANE - b
            inside = lane >= most
        elif how == "down":
            lane, inside = _LANE + b, _LANE + b <= most
        elif how == "bfly":
            lane, inside = _LANE ^ b, (_LANE ^ b) <= most
        else:
            lane = least | (b & ~segment)
            inside = lane <= most
        lane = np.where(inside, lane, _LANE)
        warp.set(to, x[lane], mask)
        if within is not None:
            warp.set(within, inside, mask)

    return guarded(instruction, step)


def _reduce(machine: Machine, instruction: Instruction) -> Step:
    to, given, _ = instruction.operands
    how, kind = instruction.parts[2], instruction.parts[3]
    read = source(machine, given, "b32")
    functions: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }  # fmt: skip

    def step(warp: Warp, mask: Any) -> None:
        x = values(read(warp)[chosen_lanes(mask)], kind)
        total = functions[how].reduce(x, dtype=x.dtype)
        warp.set(to, np.full(LANES, words(np.array([total], x.dtype), kind)[0]), mask)

    return guarded(instruction, step)


def _vote(machine: Machine, instruction: Instruction) -> Step:
    how = instruction.parts[2]
    to, given, *_ = instruction.operands
    read = source(machine, given, "pred")

    def step(warp: Warp, mask: Any) -> None:
        chosen = np.ones(LANES, np.bool_) if mask is None else mask
        holds = read(warp) & chosen
        if how == "ballot":
            bits = int((holds.astype(np.uint64) << _LANE.astype(np.uint64)).sum())
            warp.set(to, np.full(LANES, bits, np.uint32), mask)
            return
        result = {
            "any": holds.any(),
            "all": (holds | ~chosen).all(),
            "uni": holds.sum() in (0, chosen.sum()),
        }[how]
        warp.set(to, np.full(LANES, bool(result)), mask)

    return guarded(instruction, step)


def _active(machine: Machine, instruction: Instruction) -> Step:
    (to,) = instruction.operands

    def step(warp: Warp, mask: Any) -> None:
        chosen = np.ones(LANES, np.bool_) if mask is None else mask
        bits = int((chosen.astype(np.uint64) << _LANE.astype(np.uint64)).sum())
        warp.set(to, np.full(LANES, bits, np.uint32), mask)

    return guarded(instruction, step)


_HANDLERS: dict[str, Callable[[Machine, Instruction], Step]] = {
    "bra": _branch,
    "brx": _branch_by_index,
    "ret": _end,
    "exit": _end,
    "mov": _move,
    "cvta": _generic_address,
    "ld": _load,
    "st": _store,
    "mapa": _map_address,
    "atom": _atomic,
    "red": _atomic,
    "elect": _elect,
    "shfl": _shuffle,
    "redux": _reduce,
    "vote": _vote,
    "activemask": _active,
    "fence": _fence,
    "bar": barrier,
    "barrier": barrier,
    "mbarrier": mbarrier,
    "stmatrix": matrix_rows,
    "ldmatrix": matrix_rows,
    "wgmma": wgmma,
    "mma": warp_product,
}


def compiled(machine: Machine, instruction: Instruction) -> Step:
    """The step that runs one instruction; one that is not known fails when it is reached."""
    name = instruction.parts[0]
    try:
        if name in _NOTHING:
            return guarded(instruction, lambda warp, mask: None)
        if name == "cp":
            asked = bulk if "bulk" in instruction.parts else copy_words
            return asked(machine, instruction)
        if name == "st" and "async" in instruction.parts:
            return store_and_signal(machine, instruction)
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(machine, instruction)
        step = arithmetic(machine, instruction)
        if step is not None:
            return step
        reason = f"{'.'.join(instruction.parts)} is not known"
    except EmulatorError as error:
        reason = str(error)
    except (IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        reason = f"{'.'.join(instruction.parts)} is not known ({type(error).__name__}: {error})"

    def unknown(warp: Warp, mask: Any) -> None:
        raise EmulatorError(reason)

    return unknown
