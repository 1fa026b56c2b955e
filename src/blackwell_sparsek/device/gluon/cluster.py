"""Programs of a cluster that share copies, which Gluon of Triton 3.6 cannot express.

Neighbouring programs that are launched as a cluster reach each other's shared memory. One copy may
arrive at the same place in several of them, and report its bytes to each one's barrier. All
addresses are those of `warps.shared_address`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
