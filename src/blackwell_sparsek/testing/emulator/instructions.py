"""What instructions do that are not arithmetic: memory, branches, barriers, copies, products."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from . import hopper
from .arithmetic import LANES, UNSIGNED, values, words
from .machine import Machine, Step, Warp, address_of, arithmetic, guarded, source
from .memory import RANK_SHIFT, EmulatorError
from .program import Address, Instruction, Register

_LANE = np.arange(LANES)
_WORD_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Nothing follows from these here: copies and stores are seen in the order in which they are made.
_NOTHING = {
    *("fence", "membar", "setmaxnreg", "griddepcontrol", "nanosleep", "prefetch", "prefetchu"),
    *("createpolicy", "applypriority", "discard", "pmevent"),
}


def _word_bytes(parts: tuple[str, ...]) -> int:
    return _WORD_BYTES[parts[-1][1:]]


def _count(parts: tuple[str, ...]) -> int:
    return next((int(x[1:]) for x in parts if x in ("v2", "v4", "v8")), 1)


def _space(parts: tuple[str, ...]) -> str:
    return next((x.split("::")[0] for x in parts if x.split("::")[0] in _SPACES), "generic")


_SPACES = ("global", "shared", "param", "local", "const")


def _lanes(mask: Any) -> Any:
    return slice(None) if mask is None else mask


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
    targets = np.array([machine.program.labels[x] for x in table])

    def run(warp: Warp, mask: Any) -> None:
        chosen = targets[warp.registers[index.index][_lanes(mask)].astype(np.int64)]
        if mask is None and (chosen == chosen[0]).all():
            warp.at = int(chosen[0])
            return
        places = np.full(LANES, warp.at) if warp.places is None else warp.places.copy()
        places[_lanes(mask)] = chosen
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
    return guarded(instruction, lambda warp, mask: warp.set(to, read(warp), mask))


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
    size, count, space = _word_bytes(parts), _count(parts), _space(parts)
    signed = parts[-1].startswith("s")
    if space == "param":
        return _load_parameter(machine, instruction, targets[0], address)
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        chosen = _lanes(mask)
        addresses = where(warp)[chosen]
        if space == "shared":
            found = _shared(warp, addresses).load(_local(addresses), size, count)
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
    given = machine.parameter(address.base)
    packed = np.array([given], np.float32 if isinstance(given, float) else None)
    if not isinstance(given, float):
        packed = np.array([int(given) & (2**64 - 1)], np.uint64)
    content = packed.view(np.uint8).tobytes()[address.offset :].ljust(8, b"\0")
    size = _word_bytes(instruction.parts)
    value = int.from_bytes(content[:size], "little")
    if instruction.parts[-1].startswith("s"):
        bits = 8 * np.dtype(UNSIGNED[to.kind]).itemsize
        value = (value - (value >> (8 * size - 1) << (8 * size))) & (2**bits - 1)
    constant = np.full(LANES, value, UNSIGNED[to.kind])
    return guarded(instruction, lambda warp, mask: warp.set(to, constant, mask))


def _store(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    address, given = instruction.operands[:2]
    size, space = _word_bytes(parts), _space(parts)
    items = given if isinstance(given, tuple) else (given,)
    reads = [source(machine, x, f"b{8 * size}") for x in items]
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        chosen = _lanes(mask)
        addresses = where(warp)[chosen]
        kind = UNSIGNED[f"b{8 * size}"]
        content = [read(warp)[chosen].astype(kind) for read in reads]
        if space == "shared":
            _shared(warp, addresses).store(_local(addresses), size, content)
        else:
            machine.memory.store(addresses, size, content)

    return guarded(instruction, step)


def _shared(warp: Warp, addresses: Any) -> Any:
    block, _ = warp.block.machine.place(warp.block, int(addresses.flat[0]))
    return block.shared


def _local(addresses: Any) -> Any:
    return addresses.astype(np.int64) & (2**RANK_SHIFT - 1)


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
    returns = parts[0] == "atom"
    to, address, *given = instruction.operands if returns else (None, *instruction.operands)
    how = next(x for x in parts if x in (*_ATOMICS, "cas", "inc"))
    kind, size, space = parts[-1], _word_bytes(parts), _space(parts)
    reads = [source(machine, x, f"b{8 * size}") for x in given]
    where = address_of(machine, address)

    def step(warp: Warp, mask: Any) -> None:
        found = np.zeros(LANES, UNSIGNED[f"b{8 * size}"])
        addresses, operands = where(warp), [read(warp) for read in reads]
        for lane in np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask):
            at = addresses[lane : lane + 1]
            memory = _shared(warp, at) if space == "shared" else machine.memory
            at = _local(at) if space == "shared" else at
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
        x = values(read(warp)[_lanes(mask)], kind)
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


# Barriers.


def _barrier(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts[1] == "warp":
        return guarded(instruction, lambda warp, mask: None)
    if "cluster" in parts:
        return _cluster_barrier(machine, instruction)
    number, *count = instruction.operands or (0,)
    read = source(machine, number, "b32")
    size = None if not count else source(machine, count[0], "b32")
    arrives = "arrive" in parts

    def step(warp: Warp, mask: Any) -> None:
        if warp.places is not None and any(x >= 0 for x in set(warp.places.tolist()) - {warp.at}):
            raise EmulatorError("a barrier for lanes that took different branches")
        block, name = warp.block, int(read(warp)[0])
        alive = LANES * sum(not w.ended for w in block.warps)
        needed = alive if size is None else int(size(warp)[0])
        waiting = block.named.setdefault(name, [])
        waiting.append(warp)
        if not arrives:
            warp.waits = lambda: block.named.get(name) is not waiting
        if LANES * len(waiting) >= needed:
            block.named[name] = []

    return guarded(instruction, step)


def _cluster_barrier(machine: Machine, instruction: Instruction) -> Step:
    arrives = "arrive" in instruction.parts

    def step(warp: Warp, mask: Any) -> None:
        first = machine.peers(warp.block)[0]
        if arrives:
            waiting = first.named.setdefault(-1, [])
            waiting.append(warp)
            warp.cluster_round = waiting
            if len(waiting) == machine.cluster * machine.num_warps:
                first.named[-1] = []
        else:
            round_ = warp.cluster_round
            warp.waits = lambda: first.named.get(-1) is not round_

    return guarded(instruction, step)


def _mbarrier(machine: Machine, instruction: Instruction) -> Step:
    parts, operands = instruction.parts, instruction.operands
    how = parts[1]
    if how in ("try_wait", "test_wait"):
        return _try_wait(machine, instruction)
    at = next(x for x in operands if isinstance(x, Address))
    where = address_of(machine, at)
    numbers = operands[operands.index(at) + 1 :]
    amount = source(machine, numbers[0] if numbers else 1, "b32")

    def step(warp: Warp, mask: Any) -> None:
        addresses, amounts = where(warp), amount(warp)
        for lane in np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask):
            address, count = int(addresses[lane]), int(amounts[lane])
            if how == "init":
                warp.block.barriers[address] = hopper.Barrier(count)
            elif how == "inval":
                warp.block.barriers.pop(address)
            elif how == "expect_tx":
                warp.block.barrier(address).expect(count)
            elif how == "arrive":
                barrier = warp.block.barrier(address)
                if "expect_tx" in parts:
                    barrier.expect(count)
                barrier.arrive(1 if "expect_tx" in parts else count)
            else:
                raise EmulatorError(f"mbarrier.{how} is not known")

    return guarded(instruction, step)


def _try_wait(machine: Machine, instruction: Instruction) -> Step:
    to, address, parity, *_ = instruction.operands
    where, of = address_of(machine, address), source(machine, parity, "b32")

    def step(warp: Warp, mask: Any) -> None:
        lane = 0 if mask is None else int(np.flatnonzero(mask)[0])
        barrier = warp.block.barrier(int(where(warp)[lane]))
        wanted = int(of(warp)[lane])
        passed = barrier.passed(wanted)
        if mask is None and not passed:
            # the instruction may wait before it answers
            warp.waits = lambda: barrier.passed(wanted)
            passed = True
        warp.set(to, np.full(LANES, passed), mask)
        if not passed:
            warp.spins = warp.at + 1

    return guarded(instruction, step)


# Copies.


def _bulk(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    if "commit_group" in parts:
        return guarded(instruction, lambda warp, mask: warp.stores.append([]))
    if "wait_group" in parts:
        (pending,) = instruction.operands

        def wait(warp: Warp, mask: Any) -> None:
            while len(warp.stores) > pending + 1:
                for store in warp.stores.pop(0):
                    store()

        return guarded(instruction, wait)
    if "prefetch" in parts:
        return guarded(instruction, lambda warp, mask: None)
    if "tensor" not in parts:
        return _copy_bytes(machine, instruction)
    if parts.index("global") < next(i for i, x in enumerate(parts) if x.startswith("shared")):
        return _store_tensor(machine, instruction)
    return _load_tensor(machine, instruction)


def _one_lane(mask: Any) -> int:
    lanes = np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask)
    if len(lanes) != 1:
        raise EmulatorError(f"{len(lanes)} lanes issue the same copy")
    return int(lanes[0])


def _map_and_start(machine: Machine, operand: Address) -> Callable[[Warp, int], Any]:
    base = address_of(machine, replace(operand, others=()))
    coordinates = [source(machine, x, "b32") for x in operand.others]

    def read(warp: Warp, lane: int) -> Any:
        found = machine.maps.get(int(base(warp)[lane]))
        if found is None:
            raise EmulatorError("a copy by something that is no tensor map of this launch")
        start = [int(x(warp)[lane].astype(np.int32)) for x in reversed(coordinates)]
        return found, start

    return read


def _load_tensor(machine: Machine, instruction: Instruction) -> Step:
    to, tensor, barrier, *others = instruction.operands
    where, at = address_of(machine, to), address_of(machine, barrier)
    read = _map_and_start(machine, tensor)
    multicast = any("multicast" in x for x in instruction.parts)
    mask_of = source(machine, others[0], "b16") if multicast else None

    def step(warp: Warp, mask: Any) -> None:
        lane = _one_lane(mask)
        map_, start = read(warp, lane)
        address, signal = int(where(warp)[lane]), int(at(warp)[lane])
        block = warp.block
        own, place = machine.place(block, address)
        _, signal_place = machine.place(block, signal)
        map_.check(place)
        targets = [own]
        if mask_of is not None:
            chosen = int(mask_of(warp)[lane])
            targets = [x for x in machine.peers(block) if chosen >> x.rank & 1]

        def arrive() -> None:
            content = hopper.load_box(map_, start, machine.memory)
            for target in targets:
                target.shared.set_bytes(map_.shared_places(place), content)
                signalled = target if multicast else machine.place(block, signal)[0]
                if signal_place not in signalled.barriers:
                    raise EmulatorError("a copy signals an mbarrier that is not set up")
                signalled.barriers[signal_place].receive(map_.nbytes)

        machine.later(arrive)

    return guarded(instruction, step)


def _store_tensor(machine: Machine, instruction: Instruction) -> Step:
    tensor, given, *_ = instruction.operands
    where, read = address_of(machine, given), _map_and_start(machine, tensor)
    adds = instruction.parts[1] == "reduce"

    def step(warp: Warp, mask: Any) -> None:
        lane = _one_lane(mask)
        map_, start = read(warp, lane)
        address = int(where(warp)[lane])
        map_.check(address)
        places = map_.shared_places(address)
        shared = warp.block.shared

        def store() -> None:
            hopper.store_box(map_, start, shared.bytes_at(places), machine.memory, adds)

        # as late as the kernel allows: a tile that is overwritten too early is stored wrong
        warp.stores[-1].append(store)

    return guarded(instruction, step)


def _copy_bytes(machine: Machine, instruction: Instruction) -> Step:
    """cp.async.bulk from global memory to shared memory, without a tensor map."""
    to, given, size, barrier, *_ = instruction.operands
    if not isinstance(barrier, Address) or not instruction.parts[3].startswith("shared"):
        raise EmulatorError(f"{'.'.join(instruction.parts)} is not known")
    where, at, read = (address_of(machine, x) for x in (to, barrier, given))
    length = source(machine, size, "b32")

    def step(warp: Warp, mask: Any) -> None:
        lane = _one_lane(mask)
        address, start, count = (int(get(warp)[lane]) for get in (where, read, length))
        block, place = machine.place(warp.block, address)
        signal = warp.block.barrier(int(at(warp)[lane]))
        if (address | start | count) & 15:
            raise EmulatorError("a bulk copy of addresses or sizes that 16 does not divide")

        def arrive() -> None:
            addresses = np.uint64(start) + np.arange(count, dtype=np.uint64)
            (content,) = machine.memory.load(addresses, 1, 1)
            block.shared.set_bytes(place + np.arange(count), content)
            signal.receive(count)

        machine.later(arrive)

    return guarded(instruction, step)


def _copy_words(machine: Machine, instruction: Instruction) -> Step:
    """cp.async of 4 to 16 bytes for each lane; the bytes arrive as late as the kernel allows."""
    parts, operands = instruction.parts, instruction.operands
    if "commit_group" in parts:
        return guarded(instruction, lambda warp, mask: warp.copies.append([]))
    if "wait_group" in parts or "wait_all" in parts:
        pending = operands[0] if operands else 0

        def wait(warp: Warp, mask: Any) -> None:
            if "wait_all" in parts:
                warp.copies.append([])
            while len(warp.copies) > pending + 1:
                for copy in warp.copies.pop(0):
                    copy()

        return guarded(instruction, wait)
    if "mbarrier" in parts:
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    to, given, size, *rest = operands
    where, read = address_of(machine, to), address_of(machine, given)
    filled = source(machine, rest[0] if rest else size, "b32")

    def step(warp: Warp, mask: Any) -> None:
        chosen = _lanes(mask)
        places, addresses = _local(where(warp))[chosen], read(warp)[chosen]
        bytes_of = filled(warp)[chosen]
        shared = warp.block.shared

        def copy() -> None:
            for place, address, count in zip(places, addresses, bytes_of, strict=True):
                if int(place) % size or (count and int(address) % size):
                    raise EmulatorError(f"misaligned copy of {size} bytes")
                content = np.zeros(size, np.uint8)
                if count:
                    at = np.uint64(address) + np.arange(int(count), dtype=np.uint64)
                    (content[: int(count)],) = machine.memory.load(at, 1, 1)
                shared.set_bytes(int(place) + np.arange(size), content)

        warp.copies[-1].append(copy)

    return guarded(instruction, step)


def _store_and_signal(machine: Machine, instruction: Instruction) -> Step:
    """st.async: a store to shared memory of the cluster that an mbarrier counts."""
    parts = instruction.parts
    to, given, barrier = instruction.operands
    size = _word_bytes(parts)
    items = given if isinstance(given, tuple) else (given,)
    reads = [source(machine, x, f"b{8 * size}") for x in items]
    where, at = address_of(machine, to), address_of(machine, barrier)

    def step(warp: Warp, mask: Any) -> None:
        chosen = np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask)
        addresses, signals = where(warp)[chosen], at(warp)[chosen]
        kind = UNSIGNED[f"b{8 * size}"]
        content = [get(warp)[chosen].astype(kind) for get in reads]
        memory, places = _shared(warp, addresses), _local(addresses)
        counted = [warp.block.barrier(int(x)) for x in signals]

        def arrive() -> None:
            memory.store(places, size, content)
            for signal in counted:
                signal.receive(size * len(content))

        machine.later(arrive)

    return guarded(instruction, step)


def _matrix_rows(machine: Machine, instruction: Instruction) -> Step:
    """ldmatrix and stmatrix: tiles of 8 x 8 words of 16 bits."""
    parts, operands = instruction.parts, instruction.operands
    stores = parts[0] == "stmatrix"
    address, registers = operands if stores else reversed(operands)
    registers = registers if isinstance(registers, tuple) else (registers,)
    where, transposed = address_of(machine, address), "trans" in parts

    def step(warp: Warp, mask: Any) -> None:
        if mask is not None:
            raise EmulatorError("stmatrix and ldmatrix by some lanes of a warp")
        addresses = where(warp)
        shared = _shared(warp, addresses)
        for i, register in enumerate(registers):
            rows = _local(addresses[8 * i : 8 * i + 8])
            if stores:
                pairs = np.ascontiguousarray(warp.registers[register.index]).view(np.uint16)
                tile = pairs.reshape(8, 8)
                tile = tile.T if transposed else tile
                shared.store(rows, 2, [np.ascontiguousarray(tile[:, j]) for j in range(8)])
            else:
                tile = np.stack(shared.load(rows, 2, 8), 1)
                tile = np.ascontiguousarray(tile.T if transposed else tile)
                warp.set(register, tile.reshape(-1).view(np.uint32), None)

    return guarded(instruction, step)


# Products.


def _wgmma(machine: Machine, instruction: Instruction) -> Step:
    parts = instruction.parts
    if parts[1] == "fence":
        return guarded(instruction, lambda warp, mask: None)
    if parts[1] == "commit_group":
        return guarded(instruction, lambda warp, mask: warp.products.append([]))
    if parts[1] == "wait_group":
        (pending,) = instruction.operands

        def wait(warp: Warp, mask: Any) -> None:
            while len(warp.products) > pending + 1:
                for unchanged in warp.products.pop(0):
                    unchanged()

        return guarded(instruction, wait)
    return _product(machine, instruction)


def _product(machine: Machine, instruction: Instruction) -> Step:
    parts, operands = instruction.parts, instruction.operands
    shape, kind = parts[4], parts[6]
    columns, depth = (int(x) for x in shape.removeprefix("m64n").split("k"))
    to, first, second, scale, *signs = operands
    flags = [int(x) for x in signs]
    transposed = flags[2:] if kind != "e4m3" else []
    of_first = 0 if isinstance(first, tuple) or not transposed else transposed[0]
    of_second = transposed[-1] if transposed else 0
    if flags[:2] != [1, 1]:
        raise EmulatorError("WGMMA with negated operands is not known")
    reads = [source(machine, x, "b32") for x in first] if isinstance(first, tuple) else None
    at_first = None if reads else source(machine, first, "b64")
    at_second, keeps = source(machine, second, "b64"), source(machine, scale, "pred")
    row, column = hopper.fragment_places(columns)

    def step(warp: Warp, mask: Any) -> None:
        if mask is not None:
            raise EmulatorError("WGMMA by some lanes of a warp")
        shared = warp.block.shared

        def operands_now() -> tuple[Any, Any]:
            if reads is not None:
                a = hopper.factor_from_registers([get(warp) for get in reads], kind)
            else:
                assert at_first is not None
                rows = warp.number % 4 * 16
                there = hopper.Descriptor.decode(int(at_first(warp)[0]))
                a = hopper.read_matrix(shared, there, 16, depth, kind, bool(of_first), rows)
            there = hopper.Descriptor.decode(int(at_second(warp)[0]))
            return a, hopper.read_matrix(shared, there, columns, depth, kind, bool(of_second))

        descriptors = [x(warp) for x in (at_first, at_second) if x is not None]
        a, b = operands_now()
        with np.errstate(all="ignore"):
            product = (a @ b.T)[row, column]
            if keeps(warp)[0]:
                old = np.stack([warp.registers[x.index] for x in to]).view(np.float32)
                product = product + old
        for register, x in zip(to, product, strict=True):
            warp.set(register, np.ascontiguousarray(x).view(np.uint32), None)

        def unchanged() -> None:
            """The tensor cores read until the wait: what they read must not have changed."""
            again = [hopper.Descriptor.decode(int(x[0])) for x in descriptors]
            now = hopper.read_matrix(shared, again[-1], columns, depth, kind, bool(of_second))
            if not np.array_equal(now, b, equal_nan=True):
                raise EmulatorError("an operand of WGMMA was overwritten before its wait")

        warp.products[-1].append(unchanged)

    return guarded(instruction, step)


def _warp_product(machine: Machine, instruction: Instruction) -> Step:
    """mma.sync: 16 rows by 8 columns, operands in registers."""
    parts = instruction.parts
    to, first, second, third = instruction.operands
    kind = parts[7]
    if parts[6] not in ("f32",) or kind not in ("f16", "bf16", "e4m3") or len(first) != 4:
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
    "bar": _barrier,
    "barrier": _barrier,
    "mbarrier": _mbarrier,
    "stmatrix": _matrix_rows,
    "ldmatrix": _matrix_rows,
    "wgmma": _wgmma,
    "mma": _warp_product,
}


def compiled(machine: Machine, instruction: Instruction, at: int) -> Step:
    """The step that runs one instruction; one that is not known fails when it is reached."""
    name = instruction.parts[0]
    try:
        if name in _NOTHING:
            return guarded(instruction, lambda warp, mask: None)
        if name == "cp":
            asked = _bulk if "bulk" in instruction.parts else _copy_words
            return asked(machine, instruction)
        if name == "st" and "async" in instruction.parts:
            return _store_and_signal(machine, instruction)
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(machine, instruction)
        step = arithmetic(machine, instruction)
        if step is not None:
            return step
        reason = f"{'.'.join(instruction.parts)} is not known"
    except EmulatorError as error:
        reason = str(error)

    def unknown(warp: Warp, mask: Any) -> None:
        raise EmulatorError(reason)

    return unknown
