# mypy: ignore-errors
"""Programs of a cluster that share copies, which Gluon of Triton 3.6 cannot express.

Neighbouring programs that are launched as a cluster reach each other's shared memory. One copy may
arrive at the same place in several of them, and report its bytes to each one's barrier. All
addresses are those of `warps.shared_address`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .warps import wait_at


@gluon.jit
def cluster_rank():
    """Number of the program in its cluster."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r,r", [0], gl.int32, True, 1
    )


@gluon.jit
def cluster_barrier():
    """Wait for all threads of all programs of the cluster; each has to call this.

    Barriers that were set up before are known to all behind it. It orders nothing else: a release
    to the cluster waits for memory, a microsecond.
    """
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; "
        "barrier.cluster.wait; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def copy_tile(parameter: gl.constexpr, place, bar, address, programs):
    """Copy a tile to `address` of the programs whose bits are set, and report it at their `bar`.

    With None for `programs` to this program alone. `parameter` is the name of a kernel's parameter
    in PTX, a descriptor, since Triton 3.6 hands none to assembly; `place` are two or three
    coordinates. Triton does not see these copies: those that it does see it fences off from
    all that uses the same allocation, and a fence waits for loads. Called by one warp.
    """
    many: gl.constexpr = programs is not None
    head: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 t; .reg .b16 m; .reg .b64 d; mov.u32 t, %laneid; "
        "setp.eq.u32 p, t, 0; cvt.u16.u32 m, $3; mov.b64 d, "
    )
    dims: gl.constexpr = ("2d", "3d")[len(place) - 2]
    coordinates: gl.constexpr = ("{$5, $4}", "{$6, $5, $4}")[len(place) - 2]
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
        + coordinates
        + "], [$1]"
        + mask
        + "; mov.b32 $0, 0; }"
    )
    bits = programs if many else 0
    if len(place) == 2:
        gl.inline_asm_elementwise(
            *(asm, "=r,r,r,r,r,r,~{memory}", [bar, address, bits, place[0], place[1]]),
            *(gl.int32, False, 1),
        )
    else:
        gl.inline_asm_elementwise(
            *(asm, "=r,r,r,r,r,r,r,~{memory}", [bar, address, bits, place[0], place[1], place[2]]),
            *(gl.int32, False, 1),
        )


@gluon.jit
def arrive_at_all(address, live, SIZE: gl.constexpr):
    """Arrive once for this warp at the barrier at `address` of each of SIZE programs."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .pred q; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; "
        "setp.lt.u32 p, t, $2; setp.ne.and.b32 q, $3, 0, p; bar.warp.sync -1; "
        "selp.b32 t, t, 0, p; mapa.shared::cluster.u32 a, $1, t; "
        "@q mbarrier.arrive.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,r,~{memory}", [address, SIZE, live.to(gl.int32)], gl.int32, False, 1),
    )


@gluon.jit
def arrive_at(address, program):
    """Arrive once for this warp at the barrier at `address` of one program of the cluster."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
        "bar.warp.sync -1; mapa.shared::cluster.u32 a, $1, $2; "
        "@p mbarrier.arrive.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [address, program], gl.int32, False, 1),
    )


@gluon.jit
def read_shared(address):
    """An int32 of the program's shared memory, which Triton does not know to be read: it would
    put a fence between this and each copy to the same allocation.
    """
    return gl.inline_asm_elementwise(
        "ld.volatile.shared.b32 $0, [$1];", "=r,r,~{memory}", [address], gl.int32, False, 1
    )


@gluon.jit
def send_in_cluster(number, address, bar, SIZE: gl.constexpr):
    """Write an int32 to `address` of each of SIZE programs, and report it at their `bar`."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; .reg .b32 b; mov.u32 t, %laneid; "
        "setp.lt.u32 p, t, $4; selp.b32 t, t, 0, p; mapa.shared::cluster.u32 a, $2, t; "
        "mapa.shared::cluster.u32 b, $3, t; "
        "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [a], $1, [b]; "
        "mov.b32 $0, 0; }",
        *("=r,r,r,r,r,~{memory}", [number, address, bar, SIZE], gl.int32, False, 1),
    )


# Two programs of a cluster that have summed parts of the same products: each finishes a half.
#
# Sums [64, width] lie in registers as WGMMA leaves them. Each program sends the columns that the
# other one finishes to that one's shared memory, its *mailbox*, from where the same threads take
# them. This happens once, and a program may end with it: nobody writes to it afterwards. Nothing of
# this is known to Triton, which would put barriers and fences around it; addresses are those of
# `warps.shared_address`.

# Bytes that 128 threads with four sums each need.
_QUADS_BYTES = gl.constexpr(2048)


@gluon.jit
def open_mailbox(bar, nbytes):
    """Set up the barrier at `bar` for mail of so many bytes.

    By the first thread of the program, before a `cluster_barrier`.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
        "@p mbarrier.init.shared::cta.b64 [$1], 1; "
        "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [bar, nbytes], gl.int32, False, 1),
    )


@gluon.jit
def exchange_halves(acc, box, bar, layout: gl.constexpr):
    """The half of the columns of both programs' sums that this one finishes, as `layout`.

    That is WGMMA's for as many columns, at least 8. Called by the first four warps.
    """
    half: gl.constexpr = acc.shape[1] // 2
    whole_layout: gl.constexpr = acc.type.layout
    rank = cluster_rank()
    col = gl.arange(0, 2 * half, gl.SliceLayout(0, whole_layout))[None, :]
    col = col + gl.zeros(acc.shape, gl.int32, whole_layout)
    place = box + col % half // 8 * _QUADS_BYTES
    _send(acc, gl.where(col // half == rank, -1, place), col * 0 + bar)
    halves = acc.reshape([acc.shape[0], 2, half])
    side = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, halves.type.layout)))
    own = gl.sum(gl.where(side[None, :, None] == rank, halves, 0.0), 1)
    col = gl.arange(0, half, gl.SliceLayout(0, layout))[None, :]
    place = box + col // 8 * _QUADS_BYTES + gl.zeros([acc.shape[0], half], gl.int32, layout)
    wait_at(bar, 0)
    return gl.convert_layout(own, layout) + _receive(place)


@gluon.jit
def _send(values, place, bar):
    """Send each thread's sums, four at a time, to its own part of `place` unless that is -1."""
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
    """What came to each thread's part of `place`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, %tid.x; shl.b32 a, a, 4; add.u32 a, a, $4; "
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [a]; }",
        *("=f,=f,=f,=f,r,r,r,r,~{memory}", [place], gl.float32, False, 4),
    )
