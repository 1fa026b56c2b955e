# mypy: ignore-errors
"""The warps of a Hopper forward and their roles: consumers, producer, scheduler."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .forward_producer import find_work, produce_scheduled, produce_tiles


@gluon.jit
def run_consumer(CONSUMER: gl.constexpr, consume, shared, number: gl.constexpr, CFG: gl.constexpr):
    """Call a function that was passed: `warp_specialize` takes no constants for functions."""
    CONSUMER(consume, shared, number, CFG)


@gluon.jit
def start_roles(CONSUMER: gl.constexpr, consume, produce, shared, begun, CFG: gl.constexpr):
    """Run each role in warps of its own until all work tiles are done.

    The first role runs in the warps of the launch. The others get additional warps: four for a
    consumer, one each for producer and scheduler.

    CONSUMER : the function of a consumer, called with (consume, shared, its number, CFG)
    consume, produce, shared : what is passed to consumers, to producer and scheduler, and to all
    begun : the barrier of the scheduler; None without one
    """
    consumers: gl.constexpr = CFG.CONSUMERS
    registers: gl.constexpr = CFG.CONSUMER_REGISTERS
    producer_registers: gl.constexpr = CFG.PRODUCER_REGISTERS
    if CFG.SCHEDULER_WARP and consumers == 1:
        gl.warp_specialize(
            [
                (run_consumer, (CONSUMER, consume, shared, 0, CFG)),
                (produce_scheduled, (produce, shared, begun, CFG)),
                (find_work, (produce, shared, begun, CFG)),
            ],
            [1, 1],
            [producer_registers, producer_registers],
        )
    elif CFG.SCHEDULER_WARP:
        gl.warp_specialize(
            [
                (run_consumer, (CONSUMER, consume, shared, 0, CFG)),
                (run_consumer, (CONSUMER, consume, shared, 1, CFG)),
                (produce_scheduled, (produce, shared, begun, CFG)),
                (find_work, (produce, shared, begun, CFG)),
            ],
            [4, 1, 1],
            [registers, producer_registers, producer_registers],
        )
    elif consumers == 1:
        gl.warp_specialize(
            [
                (run_consumer, (CONSUMER, consume, shared, 0, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [1],
            [producer_registers],
        )
    elif consumers == 2:
        gl.warp_specialize(
            [
                (run_consumer, (CONSUMER, consume, shared, 0, CFG)),
                (run_consumer, (CONSUMER, consume, shared, 1, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 1],
            [registers, producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (run_consumer, (CONSUMER, consume, shared, 0, CFG)),
                (run_consumer, (CONSUMER, consume, shared, 1, CFG)),
                (run_consumer, (CONSUMER, consume, shared, 2, CFG)),
                (produce_tiles, (produce, shared, CFG)),
            ],
            [4, 4, 1],
            [registers, registers, producer_registers],
        )
