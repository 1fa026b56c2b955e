"""What the Hopper products share: reading an item of the plan, and storing a finished tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...device.activations import activate
from ..sm90 import GROUP_ROWS

ROWS = gl.constexpr(GROUP_ROWS)


@gluon.jit
def read_item(items_ptr, piece, pieces_per_panel, total, CFG: gl.constexpr):
    """Read the plan's item behind a piece of work: (block row, begin, end, slot)."""
    live = piece < total
    item_ptr = items_ptr + 4 * ((piece % pieces_per_panel) // CFG.row_tiles)
    block_row = gl.load(item_ptr, mask=live, other=0)
    begin = gl.load(item_ptr + 1, mask=live, other=0)
    end = gl.load(item_ptr + 2, mask=live, other=0)
    slot = gl.load(item_ptr + 3, mask=live, other=-1)
    return block_row, begin, end, slot


@gluon.jit
def _halves(x):
    """Split [M, N] into its left and right half."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def store_chunk(acc, row, col, slot, out_desc, out_smem, extras, sizes, CFG: gl.constexpr):
    """Finish and store a [ROWS, chunk] piece of a tile; a partial sum goes to its slot as it is."""
    part_ptr, bias_ptr, residual_ptr, residual_strides = extras
    n_rows, n_cols = sizes
    chunk: gl.constexpr = CFG.out_chunk
    layout: gl.constexpr = CFG.accumulator_layout(chunk)
    activation: gl.constexpr = CFG.ACTIVATION
    acc = gl.convert_layout(acc, layout)
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, chunk, gl.SliceLayout(0, layout))
    if part_ptr is not None and slot >= 0:
        # a slot holds a whole block row
        part_rows = (slot * CFG.BLOCK_H + rows % CFG.BLOCK_H).to(gl.int64)
        offsets = part_rows[:, None] * n_cols + cols[None, :]
        gl.store(part_ptr + offsets, acc, mask=(cols < n_cols)[None, :])
    else:
        if bias_ptr is not None:
            present = (rows >= 0) & (rows < n_rows)
            bias = gl.load(bias_ptr + rows, mask=present, other=0.0)
            acc += bias.to(gl.float32)[:, None]
        acc = activate(acc, activation)
        if residual_ptr is not None:
            row_offsets = rows.to(gl.int64) * residual_strides[0]
            offsets = row_offsets[:, None] + (cols.to(gl.int64) * residual_strides[1])[None, :]
            inside = ((rows >= 0) & (rows < n_rows))[:, None] & (cols < n_cols)[None, :]
            acc += gl.load(residual_ptr + offsets, mask=inside, other=0.0).to(gl.float32)
        tile = acc.to(out_smem.dtype)
        # The copy that was started one chunk ago must have read the buffer.
        tma.store_wait(0)
        if CFG.OUT_TRANSPOSED:
            out_smem.permute((1, 0)).store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [col, row], out_smem)
        else:
            out_smem.store(tile)
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [row, col], out_smem)


@gluon.jit
def store_tile(acc, row, col, slot, out_desc, out_smem, extras, sizes, CFG: gl.constexpr):
    """Store an accumulator in OUT_CHUNKS column chunks through one buffer."""
    chunk: gl.constexpr = CFG.out_chunk
    gl.static_assert(CFG.OUT_CHUNKS == 2 or CFG.OUT_CHUNKS == 4)
    for half in gl.static_range(2):
        part = _halves(acc)[half]
        if CFG.OUT_CHUNKS == 2:
            store_chunk(part, row, col + half * chunk, slot, out_desc, out_smem, extras, sizes, CFG)
        else:
            for quarter in gl.static_range(2):
                first = col + (2 * half + quarter) * chunk
                store_chunk(
                    _halves(part)[quarter], row, first, slot, out_desc, out_smem, extras, sizes, CFG
                )
