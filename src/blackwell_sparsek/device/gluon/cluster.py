"""Programs of a cluster that share copies, which Gluon of Triton 3.6 cannot express.

Neighbouring programs that are launched as a cluster reach each other's shared memory. A copy by
`multicast` arrives at the same place in each of them, and reports its bytes to each one's barrier.
All addresses are those of `warps.shared_address`.
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
    """Wait for all threads of all programs of the cluster; each has to call this."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; "
        "barrier.cluster.wait.acquire; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def cluster_arrive():
    """The first half of `cluster_barrier`, which waits for nobody."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def cluster_wait():
    """The second half of `cluster_barrier`."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire; mov.b32 $0, 0;",
        *("=r,r,~{memory}", [0], gl.int32, False, 1),
    )


@gluon.jit
def copy_to_first(address, nbytes, bar):
    """Copy shared memory to the same place of the cluster's first program, and report it at its
    `bar`. Called by four warps, whose first thread does it.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; .reg .b32 b; mov.u32 t, %tid.x; "
        "and.b32 t, t, 127; setp.eq.u32 p, t, 0; mapa.shared::cluster.u32 a, $1, 0; "
        "mapa.shared::cluster.u32 b, $3, 0; "
        "@p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [a], [$1], $2, "
        "[b]; mov.b32 $0, 0; }",
        *("=r,r,r,r,~{memory}", [address, nbytes, bar], gl.int32, False, 1),
    )


@gluon.jit
def multicast(parameter: gl.constexpr, coord, bar, address, mask):
    """Copy a tile to `address` of the programs in `mask`, and report it at their `bar`.

    `parameter` is the name of a kernel's parameter in PTX, a descriptor: Triton 3.6 hands none to
    assembly. `coord` has two or three coordinates. Called by one warp.
    """
    head: gl.constexpr = (
        "{ .reg .pred p; .reg .b32 t; .reg .b16 m; .reg .b64 d; mov.u32 t, %laneid; "
        "setp.eq.u32 p, t, 0; cvt.u16.u32 m, $3; mov.b64 d, "
    )
    if len(coord) == 2:
        gl.inline_asm_elementwise(
            head
            + parameter
            + "; cvta.param.u64 d, d; @p cp.async.bulk.tensor.2d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes.multicast::cluster [$2], [d, {$5, $4}], [$1], m; "
            "mov.b32 $0, 0; }",
            "=r,r,r,r,r,r,~{memory}",
            [bar, address, mask, coord[0], coord[1]],
            gl.int32,
            False,
            1,
        )
    else:
        gl.inline_asm_elementwise(
            head
            + parameter
            + "; cvta.param.u64 d, d; @p cp.async.bulk.tensor.3d.shared::cluster.global"
            ".mbarrier::complete_tx::bytes.multicast::cluster [$2], [d, {$6, $5, $4}], [$1], m; "
            "mov.b32 $0, 0; }",
            "=r,r,r,r,r,r,r,~{memory}",
            [bar, address, mask, coord[0], coord[1], coord[2]],
            gl.int32,
            False,
            1,
        )


@gluon.jit
def arrive_at_all(address, live, SIZE: gl.constexpr):
    """Arrive once for this warp at the barrier at `address` of each of SIZE programs."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .pred q; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; "
        "setp.lt.u32 p, t, $2; setp.ne.and.b32 q, $3, 0, p; bar.warp.sync -1; "
        "selp.b32 t, t, 0, p; mapa.shared::cluster.u32 a, $1, t; "
        "@q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,r,~{memory}", [address, SIZE, live.to(gl.int32)], gl.int32, False, 1),
    )


@gluon.jit
def arrive_at(address, program):
    """Arrive once for this warp at the barrier at `address` of one program of the cluster."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; .reg .b32 a; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; "
        "bar.warp.sync -1; mapa.shared::cluster.u32 a, $1, $2; "
        "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; mov.b32 $0, 0; }",
        *("=r,r,r,~{memory}", [address, program], gl.int32, False, 1),
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
