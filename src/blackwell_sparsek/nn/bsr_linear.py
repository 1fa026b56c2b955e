"""`BSRLinear`: a linear layer whose weight has only some of its blocks."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..core.activations import ACTIVATIONS
from ..core.checks import (
    check_choice,
    check_dtype,
    check_has_data,
    check_shape,
    check_tensor,
    message,
)
from ..core.env import IMPLS
from ..core.errors import InvalidInput, InvalidType
from ..core.fp8 import E4M3
from ..fp8.multiply import matmul as multiply_in_fp8
from ..launch.launcher import cdiv
from ..matmul.api import matmul
from ..sparse.matrix import BSRMatrix
from ..sparse.pattern import BSRPattern
from ..sparse.scores import check_sparsity, choose_blocks, random_blocks
from ..sparse.validate import (
    VALUE_DTYPES,
    check_block_shape,
    check_pair,
    check_values,
    zero_padding,
)
from .bsr_weight import BSRWeight


class BSRLinear(BSRWeight):
    """`y = activation(x @ W.T + bias)` with a block-sparse W, for training and inference.

    Parameters
    ----------
    in_features, out_features : int
        W is [out_features, in_features], as in `torch.nn.Linear`.
    block_shape : int or (bh, bw)
        bh outputs by bw inputs. Need not divide the sizes.
    keep : Tensor bool [ceil(out_features / bh), ceil(in_features / bw)], optional
        The blocks that exist.
    sparsity : float in [0, 1]
        Without `keep`: the fraction of blocks that do not exist. They are chosen at random, and
        their numbers per block row differ by at most one. By default all blocks exist.
    bias : bool
    activation : None, "relu", "gelu" or "silu"
        Computed with the product.
    impl : str
        As in `blackwell_sparsek.matmul`.
    device, dtype : as in `torch.nn.Linear`

    Attributes
    ----------
    values : Parameter [nnz_blocks, bh, bw]
        The blocks, an ordinary parameter for optimizers, FSDP and checkpoints. The part of edge
        blocks beyond the sizes is zero and stays zero under the elementwise optimizers of
        `torch.optim` (with `eps > 0`). Whatever else writes to the values, such as an
        initialization of your own, must leave it zero: checkpoints with other values are refused.
    bias : Parameter [out_features] or None
    indptr, indices, weight_shape : buffers, saved with the values
    descale : buffer [nnz_blocks] of a layer in fp8 (`to_fp8`), saved as well; None in others
    weight : BSRMatrix (out_features, in_features)
        W, sharing `values`.

    Raises
    ------
    InvalidInput
        If sizes, `keep` or `sparsity` are wrong; in a call, if x does not fit.

    Notes
    -----
    Initial values are those of `torch.nn.Linear` with the actual fan-in of a row of outputs:
    uniform in +-1/sqrt(inputs in the blocks of that row), so that outputs keep their scale at any
    sparsity.

    The pattern is state: `load_state_dict` checks it and takes it from the checkpoint together with
    the values; `strict_patterns` refuses a different one. `values` stays the same Parameter, but
    its shape can change. Create a new optimizer if the number of blocks does.

    Buffers can be written in place, as DDP's broadcast and `torch.distributed.checkpoint` do; the
    next call checks and follows them. A write that PyTorch does not count
    (`torch.distributed.broadcast` of a buffer, `buffer.data.copy_`) goes unnoticed: assign the
    buffer again after it (`layer.indices = layer.indices.clone()`). A CUDA graph keeps the pattern
    that it was captured with.

    DDP broadcasts buffers in every forward pass, and the layer then compares them, which waits for
    the GPU. Set `ddp.broadcast_buffers = False` after the first broadcast to avoid that.
    `torch.optim.swa_utils.AveragedModel` must leave buffers alone (`use_buffers=False`, its
    default): averages of indices, rounded to integers, are other blocks.

    Examples
    --------
    >>> import torch
    >>> from blackwell_sparsek.nn import BSRLinear
    >>> layer = BSRLinear(256, 512, (32, 32), sparsity=0.75, activation="gelu")
    >>> layer
    BSRLinear(in_features=256, out_features=512, block_shape=(32, 32), nnz_blocks=32, \
density=0.25, bias=True, activation='gelu')
    >>> y = layer(torch.randn(8, 10, 256))
    >>> y.sum().backward()
    >>> y.shape, layer.values.grad.shape
    (torch.Size([8, 10, 512]), torch.Size([32, 32, 32]))
    """

    bias: torch.Tensor | None
    in_features: int
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        block_shape: int | tuple[int, int],
        *,
        keep: torch.Tensor | None = None,
        sparsity: float = 0.0,
        bias: bool = True,
        activation: str | None = None,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        op = "BSRLinear"
        shape = check_pair(op, "(out_features, in_features)", (out_features, in_features), 0)
        block = check_block_shape(op, block_shape)
        device = torch.get_default_device() if device is None else torch.device(device)
        pattern = initial_pattern(op, shape, block, keep, sparsity).to(device)
        values = torch.empty(pattern.nnz_blocks, *block, device=device, dtype=dtype)
        bias_values = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self._build(pattern, values, bias_values, activation, impl)
        self.reset_parameters()

    def _build(
        self,
        pattern: BSRPattern,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        impl: str,
        descale: torch.Tensor | None = None,
    ) -> None:
        check_choice("BSRLinear", "activation", activation, ACTIVATIONS)
        check_choice("BSRLinear", "impl", impl, IMPLS)
        if descale is None:
            check_dtype("BSRLinear", "values", values, VALUE_DTYPES)
        else:
            check_values("BSRLinear", values, descale)
        self._set_weight(pattern, values, descale)
        self.out_features, self.in_features = pattern.shape
        self.activation = activation
        self.impl = impl
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias))

    @classmethod
    def from_matrix(
        cls,
        matrix: BSRMatrix,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        impl: str = "auto",
    ) -> "BSRLinear":
        """Make a layer with `matrix` (out_features, in_features) as its weight.

        Values, bias [out_features] and metadata are copied. A transposed matrix is rearranged. A
        matrix in fp8 makes a layer for inference, as `to_fp8` does: its bias requires no gradient
        and keeps its dtype, except that float64 becomes float32.

        Raises
        ------
        InvalidInput
            If `bias` does not fit the matrix.

        Examples
        --------
        >>> import torch
        >>> from blackwell_sparsek.sparse.matrix import BSRMatrix
        >>> from blackwell_sparsek.nn import BSRLinear
        >>> w = BSRMatrix.from_mask(torch.randn(32, 48), torch.eye(2, 3, dtype=torch.bool))
        >>> BSRLinear.from_matrix(w, torch.zeros(32)).density
        0.3333333333333333
        """
        op = "BSRLinear.from_matrix"
        if not isinstance(matrix, BSRMatrix):
            got = type(matrix).__name__
            raise InvalidType(message(op, "matrix", "has a wrong type", "BSRMatrix", got))
        if bias is not None:
            check_tensor(op, "bias", bias)
            check_shape(op, "bias", bias, (matrix.shape[0],))
            dtype = matrix.dtype
            if matrix.descale is not None:
                # products in fp8 sum in float32 and take no wider bias
                dtype = torch.float32 if bias.dtype == torch.float64 else bias.dtype
            bias = bias.detach().to(matrix.device, dtype, copy=True)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        values = matrix.data.detach().clone(memory_format=torch.contiguous_format)
        descale = None if matrix.descale is None else matrix.descale.detach().clone()
        layer._build(matrix.logical_pattern, values, bias, activation, impl, descale)
        if descale is not None and layer.bias is not None:
            layer.bias.requires_grad_(False)
        return layer

    def to_fp8(self) -> "BSRLinear":
        """Return a copy of this layer for inference, with values rounded to float8_e4m3fn.

        Each block has a scale, the buffer `descale`. The layer rounds its inputs as well, 128
        channels of a token by a scale of their own, and multiplies in fp8; its outputs have the
        dtype of its inputs. It has no gradients: inputs that require one are refused. Moving it to
        another dtype, as with `model.half()`, leaves values and scales as they are; float64 and
        other dtypes that its inputs cannot have raise `InvalidType`.

        A subclass makes one of itself, by its own `from_matrix`, as it does in `from_linear`;
        attributes that it added are not copied.

        Examples
        --------
        >>> import torch
        >>> from blackwell_sparsek.nn import BSRLinear
        >>> layer = BSRLinear(256, 512, (128, 128), sparsity=0.5).to_fp8()
        >>> layer.values.dtype, layer.descale.shape
        (torch.float8_e4m3fn, torch.Size([4]))
        >>> with torch.no_grad():
        ...     layer(torch.randn(8, 256, dtype=torch.bfloat16)).dtype
        torch.bfloat16
        """
        with torch.no_grad():
            options = {"activation": self.activation, "impl": self.impl}
            layer = type(self).from_matrix(self.weight.to_fp8(), self.bias, **options)  # type: ignore[arg-type]
        return layer.train(self.training)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        block_shape: int | tuple[int, int],
        sparsity: float,
        method: str = "magnitude",
        *,
        inputs: torch.Tensor | None = None,
        activation: str | None = None,
        impl: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> "BSRLinear":
        """Prune a `torch.nn.Linear`.

        Parameters
        ----------
        linear : torch.nn.Linear, left as it is
        block_shape : int or (bh, bw), outputs by inputs
        sparsity : float in [0, 1], the fraction of blocks to drop
        method : "magnitude" (L2 norm), "wanda" or "random"
            For other methods, or other options of these, make `keep` yourself and use
            `BSRLinear.from_matrix(BSRMatrix.from_mask(linear.weight, keep, block_shape), bias)`.
        inputs : Tensor [in_features] or [..., in_features]
            As in `blackwell_sparsek.prune.wanda`; only for that method.
        activation, impl : as in the constructor
        dtype : of the values; torch.float8_e4m3fn for inference, see `to_fp8`

        Returns
        -------
        BSRLinear on the same device, with copies of the weights, in the same training mode.

        Raises
        ------
        InvalidInput
            If `sparsity`, `method` or `inputs` are wrong; `InvalidType` if this is no Linear.

        Examples
        --------
        >>> import torch
        >>> from blackwell_sparsek.nn import BSRLinear
        >>> dense = torch.nn.Linear(64, 64)
        >>> layer = BSRLinear.from_linear(dense, (16, 16), sparsity=0.5)
        >>> layer.nnz_blocks, layer.to_linear()
        (8, Linear(in_features=64, out_features=64, bias=True))
        """
        op = "BSRLinear.from_linear"
        _check_linear(op, linear)
        if dtype is not None:
            check_choice(op, "dtype", dtype, (*VALUE_DTYPES, E4M3))
        keep = choose_blocks(op, linear.weight, block_shape, sparsity, method, inputs)
        layer = cls._from_kept(linear, block_shape, keep, activation, impl)
        if dtype == E4M3:
            return layer.to_fp8()
        return layer if dtype is None else layer.to(dtype)

    @classmethod
    def from_dense_linear(
        cls,
        linear: nn.Linear,
        block_shape: int | tuple[int, int],
        *,
        activation: str | None = None,
        impl: str = "auto",
    ) -> "BSRLinear":
        """Convert a pruned `torch.nn.Linear`, keeping every block that is not all zero.

        Results equal those of `linear` up to rounding. What this saves depends on where the zeros
        are: the layer's `density` is the fraction of blocks that are left.

        Parameters
        ----------
        linear : torch.nn.Linear, left as it is
        block_shape : int or (bh, bw), outputs by inputs
        activation, impl : as in the constructor

        Returns
        -------
        BSRLinear on the same device, with copies of the weights, in the same training mode.

        Examples
        --------
        >>> import torch
        >>> from blackwell_sparsek.nn import BSRLinear
        >>> linear = torch.nn.Linear(64, 64)
        >>> linear.weight.data[:32] = 0
        >>> BSRLinear.from_dense_linear(linear, 16).density
        0.5
        """
        op = "BSRLinear.from_dense_linear"
        _check_linear(op, linear)
        block = check_block_shape(op, block_shape)
        matrix = BSRMatrix.from_dense(linear.weight.detach(), block)
        return cls._of_linear(linear, matrix, activation, impl)

    @classmethod
    def _from_kept(
        cls,
        linear: nn.Linear,
        block_shape: int | tuple[int, int],
        keep: torch.Tensor,
        activation: str | None = None,
        impl: str = "auto",
    ) -> "BSRLinear":
        """`from_linear` with the blocks of `keep`."""
        matrix = BSRMatrix.from_mask(linear.weight.detach(), keep, block_shape)
        return cls._of_linear(linear, matrix, activation, impl)

    @classmethod
    def _of_linear(
        cls, linear: nn.Linear, matrix: BSRMatrix, activation: str | None, impl: str
    ) -> "BSRLinear":
        """A layer with `matrix` as its weight and the rest of `linear`."""
        layer = cls.from_matrix(matrix, linear.bias, activation=activation, impl=impl)
        layer.values.requires_grad_(linear.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return a dense `torch.nn.Linear` with the same weights (copies). It has no activation."""
        if self.activation is not None:
            raise InvalidInput(
                message(
                    "BSRLinear.to_linear",
                    "activation",
                    "cannot be part of a torch.nn.Linear",
                    "a layer without one (set layer.activation = None)",
                    repr(self.activation),
                )
            )
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        weight = self.weight.to_dense().detach()
        if self.descale is not None and self.bias is not None:
            weight = weight.to(self.bias.dtype)
        linear.weight = nn.Parameter(weight, requires_grad=self.values.requires_grad)
        if self.bias is not None:
            bias = self.bias.detach().clone()
            linear.bias = nn.Parameter(bias, requires_grad=self.bias.requires_grad)
        return linear.train(self.training)

    def reset_parameters(self) -> None:
        """Draw new values for the current pattern; see the class."""
        if self.descale is not None:
            problem = "are in fp8, which is for inference"
            expected = "a layer before to_fp8()"
            got = self.values.dtype
            op = "BSRLinear.reset_parameters"
            raise InvalidInput(message(op, "values", problem, expected, got))
        if self.values.is_meta:
            # parameters may be there while the pattern has contents, as under accelerate's
            # `init_empty_weights`
            return
        pattern = self.pattern
        bound = initial_bounds(pattern)
        with torch.no_grad():
            scale = bound[pattern.row_indices().long()].to(self.values.dtype)
            values = torch.empty_like(self.values).uniform_(-1, 1) * scale[:, None, None]
            rows = pattern.row_indices()
            self.values.copy_(zero_padding(values, pattern.shape, rows, pattern.indices))
            if self.bias is not None:
                of_rows = bound.repeat_interleave(self.block_shape[0])[: self.out_features]
                self.bias.uniform_(-1, 1).mul_(of_rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`activation(x @ W.T + bias)` for x [..., in_features]; see `blackwell_sparsek.matmul`."""
        if self.descale is not None:
            options = {"bias": self.bias, "activation": self.activation, "impl": self.impl}
            return multiply_in_fp8(x, self.weight.T, **options)  # type: ignore[arg-type]
        return matmul(x, self.weight.T, bias=self.bias, activation=self.activation, impl=self.impl)

    def extra_repr(self) -> str:
        """Sizes, blocks and options, for `repr`."""
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"block_shape={self.block_shape}, nnz_blocks={self.nnz_blocks}, "
            f"density={self.density:.4g}, bias={self.bias is not None}{activation}"
            + (f", dtype={self.values.dtype}" if self.descale is not None else "")
        )


def _check_linear(op: str, linear: Any) -> None:
    if not isinstance(linear, nn.Linear):
        got = type(linear).__name__
        raise InvalidType(message(op, "linear", "has a wrong type", "torch.nn.Linear", got))


def initial_pattern(
    op: str,
    shape: tuple[int, int],
    block_shape: tuple[int, int],
    keep: torch.Tensor | None,
    sparsity: float,
) -> BSRPattern:
    """The blocks of `keep`, or random ones."""
    check_sparsity(op, sparsity)
    blocks = (cdiv(shape[0], block_shape[0]), cdiv(shape[1], block_shape[1]))
    if keep is None:
        keep = random_blocks(*blocks, sparsity)
    elif sparsity:
        got = f"keep and sparsity={sparsity}"
        raise InvalidInput(message(op, "keep/sparsity", "are both given", "one of them", got))
    check_tensor(op, "keep", keep)
    check_dtype(op, "keep", keep, (torch.bool,))
    check_shape(op, "keep", keep, blocks)
    check_has_data(op, "keep", keep)
    indptr = F.pad(keep.sum(1).cumsum(0, dtype=torch.int32), (1, 0))
    indices = keep.nonzero(as_tuple=True)[1].int()
    return BSRPattern._from_parts(indptr, indices, shape, block_shape)


def initial_bounds(pattern: BSRPattern) -> torch.Tensor:
    """float32 [rows_b]: 1/sqrt(inputs that a row of outputs reads), 0 where it reads none."""
    width = pattern.block_shape[1]
    inputs = pattern.indices.new_full((pattern.nnz_blocks,), width)
    if ragged := pattern.shape[1] % width:
        inputs.masked_fill_(pattern.indices == pattern.cols_b - 1, ragged)
    fan_in = inputs.new_zeros(pattern.rows_b).index_add_(0, pattern.row_indices(), inputs)
    return torch.where(fan_in > 0, fan_in.float().rsqrt(), 0.0)
