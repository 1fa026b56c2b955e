# mypy: ignore-errors
"""Ordered TMA additions to memory, and prefetches to L2.

Programs that call `async_atomic_add` add to a tile in any order. For ordered accumulation, a
semaphore counts the additions: `acquire_semaphore`, `async_atomic_add`, `release_semaphore`.

Memory order: TMA adds through the async proxy. Before its release a program waits until its
additions are written, not only read from shared memory, and a proxy fence puts them before what
follows in the generic proxy. The next program starts its addition after it has acquired that
release. The semaphore is incremented by every program in turn, so each release is read by the one
acquire that it is for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def acquire_semaphore(semaphore_ptr, rank):
    """Wait until `rank` programs have released the semaphore; called by one warp."""
    current = gl.atomic_add(semaphore_ptr, 0, sem="acquire")
    while current != rank:
        current = gl.atomic_add(semaphore_ptr, 0, sem="acquire")


@gluon.jit
def release_semaphore(semaphore_ptr):
    """Wait until this warp's additions are in memory, then let the next program in."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, lane)
    # `tma.store_wait` would only wait until the tile has been read; here, all lanes wait until the
    # copy that one of them started is complete
    done = gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync -1; mov.b32 $0, $1;",
        "=r,r",
        [zero],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.atomic_add(semaphore_ptr, 1 + gl.max(done, 0), sem="release")


@gluon.jit
def bring_to_l2(address, nbytes):
    """Prefetch `nbytes`, a multiple of 16, into the L2 from each address that is not 0.

    The preceding kernel may still write them: its writes go to the L2 too, so an early prefetch
    cannot become stale.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s64 p, $1, 0; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        *("=r,l,r,~{memory}", [address, nbytes], gl.int32, False, 1),
    )
