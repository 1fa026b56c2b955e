"""Barriers, groups and copies: named barriers, clusters, mbarriers, TMA and cp.async."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from . import hopper
from .arithmetic import LANES, UNSIGNED
from .machine import Machine, Step, Warp, address_of, guarded, source
from .memory import EmulatorError
from .operands import chosen_lanes, local, shared_of, word_bytes
from .program import Address, Instruction

# Barriers.


def barrier(machine: Machine, instruction: Instruction) -> Step:
    """Barriers of warps, named barriers of programs, and those of clusters."""
    parts = instruction.parts
    if parts[1] == "warp":
        return guarded(instruction, lambda warp, mask: None)
    if "cluster" in parts:
        return _cluster_barrier(machine, instruction)
    if "red" in parts:
        raise EmulatorError(f"{'.'.join(parts)} is not known")
    number, *count = instruction.operands or (0,)
    read = source(machine, number, "b32")
    size = None if not count else source(machine, count[0], "b32")
    arrives = "arrive" in parts

    def step(warp: Warp, mask: Any) -> None:
        if warp.places is not None and any(x >= 0 for x in set(warp.places.tolist()) - {warp.at}):
            raise EmulatorError("a barrier for lanes that took different branches")
        block, name = warp.block, int(read(warp)[0])
        needed = None if size is None else int(size(warp)[0])
        waiting = block.named.setdefault(name, [])
        waiting.append(warp)

        def over() -> bool:
            if block.named.get(name) is not waiting:
                return True
            if needed is None:
                # nobody waits for warps that have ended
                complete = all(w.ended or w in waiting for w in block.warps)
            else:
                complete = LANES * len(waiting) >= needed
            if complete:
                block.named[name] = []
            return complete

        if not over() and not arrives:
            warp.waits = over

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


def mbarrier(machine: Machine, instruction: Instruction) -> Step:
    """Everything that is done with an mbarrier."""
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
                if address % 8:
                    raise EmulatorError(f"misaligned mbarrier at {address:#x}")
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
    if "parity" not in instruction.parts:
        raise EmulatorError("a wait for a state of an mbarrier is not known")
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


# Groups: of copies, of stores, of products.


def group(instruction: Instruction, of: Callable[[Warp], list[list[Any]]]) -> Step | None:
    """commit_group, wait_group and wait_all for what a warp keeps in groups; None for others.

    `of` gives the groups, of which the last is open. What they hold is called in the wait for it
    and not before: as late as the kernel allows.
    """
    parts = instruction.parts
    if "commit_group" in parts:
        return guarded(instruction, lambda warp, mask: of(warp).append([]))
    if "wait_group" not in parts and "wait_all" not in parts:
        return None
    pending = 0 if "wait_all" in parts else instruction.operands[0]

    def wait(warp: Warp, mask: Any) -> None:
        groups = of(warp)
        if "wait_all" in parts:
            # for what no group has been made of as well
            groups.append([])
        while len(groups) > pending + 1:
            for finish in groups.pop(0):
                finish()

    return guarded(instruction, wait)


# Copies.


def bulk(machine: Machine, instruction: Instruction) -> Step:
    """cp.async.bulk: copies by the TMA unit, their groups and waits."""
    parts = instruction.parts
    if grouped := group(instruction, attrgetter("stores")):
        return grouped
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
    if adds and "add" not in instruction.parts:
        raise EmulatorError(f"{'.'.join(instruction.parts)} is not known")

    def step(warp: Warp, mask: Any) -> None:
        lane = _one_lane(mask)
        map_, start = read(warp, lane)
        address = int(where(warp)[lane])
        map_.check(address)
        places = map_.shared_places(address)
        warp.check_fenced(places)
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


def copy_words(machine: Machine, instruction: Instruction) -> Step:
    """cp.async of 4 to 16 bytes for each lane; the bytes arrive as late as the kernel allows."""
    if grouped := group(instruction, attrgetter("copies")):
        return grouped
    if "mbarrier" in instruction.parts:
        return _arrive_after_copies(machine, instruction)
    to, given, size, *rest = instruction.operands
    where, read = address_of(machine, to), address_of(machine, given)
    filled = source(machine, rest[0] if rest else size, "b32")

    def step(warp: Warp, mask: Any) -> None:
        chosen = chosen_lanes(mask)
        places, addresses = local(where(warp))[chosen], read(warp)[chosen]
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
                warp.wrote(shared, place)

        warp.copies[-1].append(copy)

    return guarded(instruction, step)


def _arrive_after_copies(machine: Machine, instruction: Instruction) -> Step:
    """An arrival of every lane, once the copies that it has started are there."""
    (address,) = instruction.operands
    where, counted = address_of(machine, address), "noinc" in instruction.parts

    def step(warp: Warp, mask: Any) -> None:
        chosen = np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask)
        signals = [warp.block.barrier(int(x)) for x in where(warp)[chosen]]
        if not counted:
            for signal in signals:
                signal.pending += 1
        started = [copy for group in warp.copies for copy in group]
        warp.copies = [[]]

        def arrive() -> None:
            for copy in started:
                copy()
            for signal in signals:
                signal.arrive()

        machine.later(arrive)

    return guarded(instruction, step)


def store_and_signal(machine: Machine, instruction: Instruction) -> Step:
    """st.async: a store to shared memory of the cluster that an mbarrier counts."""
    parts = instruction.parts
    to, given, barrier = instruction.operands
    size = word_bytes(parts)
    items = given if isinstance(given, tuple) else (given,)
    reads = [source(machine, x, f"b{8 * size}") for x in items]
    where, at = address_of(machine, to), address_of(machine, barrier)

    def step(warp: Warp, mask: Any) -> None:
        chosen = np.flatnonzero(np.ones(LANES, np.bool_) if mask is None else mask)
        addresses, signals = where(warp)[chosen], at(warp)[chosen]
        kind = UNSIGNED[f"b{8 * size}"]
        content = [get(warp)[chosen].astype(kind) for get in reads]
        # each lane may write to another program of the cluster
        memories = [shared_of(warp, addresses[i : i + 1]) for i in range(len(chosen))]
        places = local(addresses)
        counted = [warp.block.barrier(int(x)) for x in signals]

        def arrive() -> None:
            for i, (memory, signal) in enumerate(zip(memories, counted, strict=True)):
                memory.store(places[i : i + 1], size, [x[i : i + 1] for x in content])
                signal.receive(size * len(content))

        machine.later(arrive)

    return guarded(instruction, step)
