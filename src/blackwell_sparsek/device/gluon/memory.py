# mypy: ignore-errors
"""Ordered additions to memory, by TMA or from registers, and prefetches to L2.

Programs that call `async_atomic_add` or `add_vectors` add to a tile in any order. For ordered
accumulation, a semaphore counts the additions: `acquire_semaphore`, `async_atomic_add`,
`release_semaphore` by one warp, or the functions for a warp group around `add_vectors`.

Memory order: TMA adds through the async proxy, and a semaphore lives in the generic one. Before its
release a program waits until its additions are written, not only read from shared memory, and a
proxy fence puts them before the release. The next program acquires that release, and a proxy fence
puts its own addition after the acquire. Programs increment the semaphore one after another, so each
release is read by exactly the acquire that waits for it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import thread_barrier


@gluon.jit
def acquire_semaphore(semaphore_ptr, rank):
    """Wait until `rank` programs have released the semaphore; called by one warp."""
    current = gl.atomic_add(semaphore_ptr, 0, sem="acquire")
    while current != rank:
        current = gl.atomic_add(semaphore_ptr, 0, sem="acquire")
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r,~{memory}", [current], gl.int32, False, 1
    )


@gluon.jit
def release_semaphore(semaphore_ptr):
    """Wait until this warp's additions are in memory, then release the next program."""
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
def acquire_by_group(semaphore_ptr, rank):
    """Wait until the semaphore was released `rank` times; called by a whole warp group."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; again: ld.acquire.gpu.global.b32 t, [$1]; "
        "setp.ne.s32 p, t, $2; @p bra again; mov.b32 $0, t; }",
        *("=r,l,r,~{memory}", [semaphore_ptr.to(gl.int64), rank], gl.int32, False, 1),
    )


@gluon.jit
def release_by_group(semaphore_ptr):
    """Release the next program, once the additions of a whole warp group are in memory."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r,~{memory}", [thread], gl.int32, False, 1
    )
    thread_barrier()
    address = semaphore_ptr.to(gl.int64)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; "
        "@p red.release.gpu.global.add.s32 [$1], 1; mov.b32 $0, $2; }",
        *("=r,l,r,~{memory}", [address, thread], gl.int32, False, 1),
    )


@gluon.constexpr_function
def _writing(instruction):
    # operands: four unused results, the address four times, the four numbers
    results = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
    return f"{instruction} [$4], {{$8, $9, $10, $11}}; {results}"


@gluon.jit
def _write_vectors(ptr, x, INSTRUCTION: gl.constexpr):
    """Write fp32 `x` to contiguous memory, four neighbours by each instruction."""
    asm: gl.constexpr = _writing(INSTRUCTION)
    vectors = x.reshape([x.shape[0] * x.shape[1] // 512, 128, 4])
    layout: gl.constexpr = vectors.type.layout
    thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    groups: gl.constexpr = vectors.shape[0]
    group = gl.arange(0, groups, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    address = (ptr + thread * 4).to(gl.int64)[None, :, None]
    _, addresses = gl.broadcast(vectors, address + (group * 2048)[:, None, None])
    gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,l,l,l,l,f,f,f,f,~{memory}", [addresses, vectors], gl.int32, False, 4
    )


@gluon.jit
def add_vectors(ptr, x):
    """Add fp32 `x` to contiguous memory; each of 128 threads holds four neighbours of every 512."""
    _write_vectors(ptr, x, "red.relaxed.gpu.global.add.v4.f32")


@gluon.jit
def store_vectors(ptr, x):
    """Store fp32 `x` where `add_vectors` would add it."""
    _write_vectors(ptr, x, "st.relaxed.gpu.global.v4.f32")


@gluon.jit
def copy_to_shared(address, ptr, nbytes, barrier):
    """Start copying `nbytes` to an address in shared memory; the barrier there counts them.

    All but the barrier are multiples of 16 bytes. For a role of one warp.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; elect.sync _|p, -1; mov.b32 $0, 0; @p "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$1], [$2], $3, [$4]; }",
        *("=r,r,l,r,r,~{memory}", [address, ptr.to(gl.int64), nbytes, barrier], gl.int32, False, 1),
    )


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
