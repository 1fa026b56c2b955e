"""Two programs of a cluster that have summed parts of the same products: each finishes a half.

Sums [64, width] lie in registers as WGMMA leaves them. Each program sends the columns that the
other one finishes to that one's shared memory, its *mailbox*, from where the same threads take
them. This happens once, and a program may end with it: nobody writes to it afterwards. Nothing of
this is known to Triton, which would put barriers and fences around it; addresses are those of
`warps.shared_address`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .cluster import cluster_rank
from .warps import wait_at

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
