# mypy: ignore-errors
"""Programs (CTAs) of a cluster: multicast copies, remote barriers, exchange of sums.

Programs launched as a cluster can access each other's shared memory (distributed shared memory).
Gluon of Triton 3.6 cannot express that, so this is inline PTX. Addresses are those of
`warps.shared_address`: the same offset means the same place in every program of the cluster. Triton
does not know about any of these accesses and puts no barriers or fences around them; where that is
unsafe, the caller must order them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .warps import wait_at


@gluon.jit
def cluster_rank():
    """Rank of the program in its cluster."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r,r", [0], gl.int32, True, 1
    )


@gluon.jit
def cluster_barrier():
    """Wait for all threads of all programs of the cluster; every thread must call this.

    For the start of a program. It makes the initialisation of mbarriers visible to the cluster,
    which is all that other programs may touch from then on, and orders nothing else.
    """
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; "
        "barrier.cluster.wait; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def cluster_exit_barrier():
    """Wait for all threads of all programs of the cluster, the last thing that each of them does.

    Shared memory of a program is gone when it ends, and an arrival that comes later faults. The
    arrivals of a thread at barriers of other programs come before its release here; the acquire
    of the others comes after it, and they end only then. Asynchronous copies and stores
    to another program are not covered: that program must have waited for their bytes.
    """
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def copy_tile(parameter: gl.constexpr, coordinates, bar, address, programs):
    """TMA copy of a tile to `address`, with its bytes reported to the barrier at `bar`.

    `programs` is the bit mask of the ranks that receive it (multicast), each at its own `address`
    and `bar`; None means this program alone. `parameter` is the PTX name of the kernel parameter
    that holds the descriptor, because Triton 3.6 cannot pass one to inline assembly. There are two
    to four `coordinates`. Triton would fence a copy that it knows about from every other use of
    the same allocation, and such a fence waits for loads; it does not fence this one. Called by one
    warp.
    """
    many: gl.constexpr = programs is not None
    head: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 t; .reg .b16 m; .reg .b64 d; mov.u32 t, %laneid; "
        "setp.eq.u32 p, t, 0; cvt.u16.u32 m, $3; mov.b64 d, "
    )
    dims: gl.constexpr = ("2d", "3d", "4d")[len(coordinates) - 2]
    operands: gl.constexpr = ("{$5, $4}", "{$6, $5, $4}", "{$7, $6, $5, $4}")[len(coordinates) - 2]
    copy: gl.constexpr = "; cvta.param.u64 d, d; @p cp.async.bulk.tensor."
    kind: gl.constexpr = ".shared::cluster.global.mbarrier::complete_tx::bytes"
    to_many: gl.constexpr = ".multicast::cluster" if many else ""
    mask: gl.constexpr = ", m" if many else ""
    asm: gl.constexpr = (
        head
        + parameter
        + copy
        + dims
        + kind
        + to_many
        + " [$2], [d, "
        + operands
        + "], [$1]"
        + mask
        + "; mov.b32 $0, 0; }"
    )
    bits = programs if many else 0
    if len(coordinates) == 2:
        row, col = coordinates
        gl.inline_asm_elementwise(
            *(asm, "=r,r,r,r,r,r,~{memory}", [bar, address, bits, row, col]),
            *(gl.int32, False, 1),
        )
    elif len(coordinates) == 3:
        plane, row, col = coordinates
        gl.inline_asm_elementwise(
            *(asm, "=r,r,r,r,r,r,r,~{memory}", [bar, address, bits, plane, row, col]),
            *(gl.int32, False, 1),
        )
    else:
        slab, plane, row, col = coordinates
        gl.inline_asm_elementwise(
            *(asm, "=r,r,r,r,r,r,r,r,~{memory}", [bar, address, bits, slab, plane, row, col]),
            *(gl.int32, False, 1),
        )


@gluon.jit
def arrive_at_all(address, live, SIZE: gl.constexpr):
    """Arrive once for this warp at the barrier at `address` of each of SIZE programs.

    Memory order: the arrival says that this warp has finished reading a stage; it transfers no
    data. The products that read the stage were waited for, so a copy that another program
    starts after the arrival cannot reach them. Release at the scope of the program is therefore
    enough; at the scope of the cluster it would put a MEMBAR.GPU into every step.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .pred q; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; "
        "setp.lt.u32 p, t, $2; setp.ne.and.b32 q, $3, 0, p; bar.warp.sync -1; "
        "selp.b32 t, t, 0, p; mapa.shared::cluster.u32 a, $1, t; "
        "@q mbarrier.arrive.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,r,~{memory}", [address, SIZE, live.to(gl.int32)], gl.int32, False, 1),
    )


@gluon.jit
def arrive_at_rank(address, rank):
    """Arrive once for this warp at the barrier at `address` of the program with that rank.

    Memory order: as for `arrive_at_all`. What a warp has read with `read_shared` comes first, since
    an SM performs the shared memory instructions of a warp in order.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
        "bar.warp.sync -1; mapa.shared::cluster.u32 a, $1, $2; "
        "@p mbarrier.arrive.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [address, rank], gl.int32, False, 1),
    )


@gluon.jit
def read_shared(address):
    """Load an int32 from this program's shared memory.

    The load is hidden from Triton, which would put a fence between it and every copy to the same
    allocation.
    """
    return gl.inline_asm_elementwise(
        "ld.volatile.shared.b32 $0, [$1];", "=r,r,~{memory}", [address], gl.int32, False, 1
    )


@gluon.jit
def write_to_all(number, address, bar, SIZE: gl.constexpr):
    """Write an int32 to `address` of each of SIZE programs, and report it at their `bar`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; .reg .b32 b; mov.u32 t, %laneid; "
        "setp.lt.u32 p, t, $4; selp.b32 t, t, 0, p; mapa.shared::cluster.u32 a, $2, t; "
        "mapa.shared::cluster.u32 b, $3, t; "
        "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [a], $1, [b]; "
        "mov.b32 $0, 0; }",
        *("=r,r,r,r,r,~{memory}", [number, address, bar, SIZE], gl.int32, False, 1),
    )


# Split K over two programs: each sums its part of the products and finishes half the columns.
#
# Sums [64, columns] are in registers in WGMMA's layout. Each program writes the columns that its
# partner finishes to the partner's shared memory, where the threads that hold the same elements
# read them. A program does this once and may exit right after it: its partner does not write to its
# shared memory later.

# Bytes of four sums in each of 128 threads.
_QUADS_BYTES = gl.constexpr(2048)


@gluon.jit
def init_exchange(bar, nbytes):
    """Initialise the barrier at `bar` to expect `nbytes` of the partner's sums.

    The first thread of the program does this; a `cluster_barrier` must follow.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p mbarrier.init.shared::cta.b64 [$1], 1; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [bar, nbytes], gl.int32, False, 1),
    )


@gluon.jit
def exchange_halves(acc, buffer, bar, layout: gl.constexpr):
    """Sums of both programs for the half of the columns that this one finishes.

    `buffer` receives the partner's sums. `layout` is that of the result: WGMMA's for half the
    columns, at least 8. Called by the first four warps.
    """
    half: gl.constexpr = acc.shape[1] // 2
    whole_layout: gl.constexpr = acc.type.layout
    rank = cluster_rank()
    col = gl.arange(0, 2 * half, gl.SliceLayout(0, whole_layout))[None, :]
    col = col + gl.zeros(acc.shape, gl.int32, whole_layout)
    place = buffer + col % half // 8 * _QUADS_BYTES
    _send(acc, gl.where(col // half == rank, -1, place), col * 0 + bar)
    halves = acc.reshape([acc.shape[0], 2, half])
    side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, halves.type.layout)))
    own = gl.sum(gl.where(side[None, :, None] == rank, halves, 0.0), 1)
    col = gl.arange(0, half, gl.SliceLayout(0, layout))[None, :]
    place = buffer + col // 8 * _QUADS_BYTES + gl.zeros([acc.shape[0], half], gl.int32, layout)
    wait_at(bar, 0)
    return gl.convert_layout(own, layout) + _receive(place)


@gluon.jit
def _send(values, place, bar):
    """Write each thread's sums, four at a time, to the partner at `place`, unless it is -1."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; .reg .b32 b; .reg .b32 t; .reg .b32 r; "
        "setp.ge.s32 p, $8, 0; mov.u32 t, %tid.x; shl.b32 t, t, 4; add.u32 a, $8, t; "
        "mov.u32 r, %cluster_ctarank; xor.b32 r, r, 1; "
        "mapa.shared::cluster.u32 a, a, r; mapa.shared::cluster.u32 b, $12, r; "
        "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        "[a], {$4, $5, $6, $7}, [b]; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r,~{memory}",
        *([values, place, bar], gl.int32, False, 4),
    )


@gluon.jit
def _receive(place):
    """Read what the partner wrote for this thread at `place`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, %tid.x; shl.b32 a, a, 4; add.u32 a, a, $4; "
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; }",
        *("=f,=f,=f,=f,r,r,r,r,~{memory}", [place], gl.float32, False, 4),
    )
