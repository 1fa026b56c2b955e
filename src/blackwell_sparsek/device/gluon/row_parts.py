"""Maxima and sums over rows of WGMMA accumulators, without exchanges that can wait.

Four threads hold a row, each of them two of every eight columns. Sums stay apart until the last
tile: `parts` [rows, 4]. Maxima are needed at once: first of 8, then of those, in short chains.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..softmax import weigh_below

HOLDERS = gl.constexpr(4)


@gluon.jit
def _apart(x):
    """`x` [rows, keys] with an axis of its own for the threads that share a row."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 32, 4, HOLDERS, 2])


@gluon.jit
def row_parts(x):
    """Sums [rows, 4] of what each thread has of a row."""
    return gl.sum(gl.sum(gl.sum(_apart(x), 4), 2), 1)


@gluon.jit
def softmax_step_parts(m_log2, parts, s, scale_log2):
    """As `softmax.softmax_step`, with sums in parts."""
    top = gl.max(gl.max(gl.max(gl.max(_apart(s), 4), 2), 1), 1)
    top = gl.convert_layout(top, m_log2.type.layout, assert_trivial=True)
    m_new, p, rescale = weigh_below(m_log2, top, s, scale_log2)
    rows: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
    factor = gl.convert_layout(rescale, rows, assert_trivial=True)
    return m_new, parts * factor[:, None] + row_parts(p), p, rescale
