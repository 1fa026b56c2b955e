"""`device.partials` for kernels that choose their layouts: parts of one softmax, put together.

Accumulators are [rows, columns] in any layout; indices are made in the layouts that follow from it.
Parts lie in memory as [slot, rows, columns] and [slot, 2, rows].
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..partials import MERGED_ROWS, PARTS
from ..softmax import init_state, join_states


@gluon.jit
def rows_of(acc):
    """Numbers of the rows of `acc`, in the layout of its row states."""
    return gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))


@gluon.jit
def columns_of(acc):
    """Numbers of the columns of `acc`."""
    return gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))


@gluon.jit
def store_part(acc_ptr, state_ptr, slot, m_log2, row_sum, acc, num_rows):
    """Write the state and the accumulators of a part; `num_rows` count."""
    TILE_M: gl.constexpr = acc.shape[0]
    TILE_DV: gl.constexpr = acc.shape[1]
    rows = rows_of(acc)
    live = rows < num_rows
    state_ptr += slot * (2 * TILE_M)
    gl.store(state_ptr + rows, m_log2, live)
    gl.store(state_ptr + TILE_M + rows, row_sum, live)
    offsets = rows[:, None] * TILE_DV + columns_of(acc)[None, :]
    gl.store(acc_ptr + slot.to(gl.int64) * (TILE_M * TILE_DV) + offsets, acc, live[:, None])


@gluon.constexpr_function
def _asm(count):
    """Load `count` neighbours if the first one's flag is set."""
    outs = ", ".join(f"${i}" for i in range(count))
    kind, outs = ("b32", outs) if count == 1 else (f"v{count}.b32", f"{{{outs}}}")
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, ${2 * count}, 0; {zeros} "
        f"@p ld.relaxed.gpu.global.{kind} {outs}, [${count}]; }}"
    )


@gluon.constexpr_function
def _operands(count):
    return ",".join(["=&r"] * count + ["l"] * count + ["r"] * count)


@gluon.jit
def _read(pointers, live, COUNT: gl.constexpr):
    """Read past the L1, which does not see what other SMs write; 0 where not live.

    All loads leave in a row: the compiler would put half of weak ones off until others have come.
    `COUNT` neighbours are as live as the first of them.
    """
    words = gl.inline_asm_elementwise(
        _asm(COUNT), _operands(COUNT), [pointers, live.to(gl.int32)], dtype=gl.int32,
        is_pure=False, pack=COUNT,
    )  # fmt: skip
    return words.to(gl.float32, bitcast=True)


@gluon.jit
def merge_parts(
    acc_ptr,
    state_ptr,
    first_program,
    num_parts,
    first_row,
    num_rows,
    TILE_M: gl.constexpr,
    TILE_DV: gl.constexpr,
):
    """State and accumulators [MERGED_ROWS, TILE_DV] of the rows from `first_row` on.

    Four warps; each takes a row, and each of its threads the same columns of all parts.
    """
    COLUMNS: gl.constexpr = TILE_DV // 32
    layout: gl.constexpr = gl.BlockedLayout([1, PARTS, COLUMNS], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    sums: gl.constexpr = gl.SliceLayout(1, layout)
    states: gl.constexpr = gl.SliceLayout(2, layout)
    offs_part = gl.arange(0, PARTS, gl.SliceLayout(0, states))[None, :]
    rows = first_row + gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, states))[:, None]
    offs_d = gl.arange(0, TILE_DV, gl.SliceLayout(0, sums))[None, None, :]
    m_log2, row_sum = init_state(gl.arange(0, MERGED_ROWS, gl.SliceLayout(1, sums))[:, None])
    acc = gl.zeros([MERGED_ROWS, TILE_DV], gl.float32, sums)
    for first in range(0, num_parts, PARTS):
        # `part_slot`, as distances that are known when this is compiled
        slot = 2 * (first_program + first)
        beyond = 2 * offs_part + gl.where((offs_part == 0) & (first == 0), 1, 0)
        live = (offs_part < num_parts - first) & (rows < num_rows)
        state = state_ptr + slot * (2 * TILE_M) + rows + beyond * (2 * TILE_M)
        place = acc_ptr + slot.to(gl.int64) * (TILE_M * TILE_DV) + rows * TILE_DV
        place = place + beyond * (TILE_M * TILE_DV)
        place = place[:, :, None] + offs_d
        wanted = (live.to(gl.int32)[:, :, None] + 0 * offs_d) != 0
        m_parts = _read(state, live, 1)
        sum_parts = _read(state + TILE_M, live, 1)
        parts = _read(place, wanted, COLUMNS)
        m_parts = gl.where(live, m_parts, -float("inf"))
        m_log2, row_sum, rescale, factors = join_states(
            m_log2, row_sum, m_parts[:, :, None], sum_parts[:, :, None]
        )
        acc = acc * rescale + gl.sum(parts * factors, 1)
    return gl.max(m_log2, 1), gl.max(row_sum, 1), acc
