"""Block-sparse linear layers split among ranks: `ColwiseBSR` and `RowwiseBSR`.

Styles for `torch.distributed.tensor.parallel.parallelize_module`, beside torch's own. A rank holds
the blocks of its own outputs or inputs. They are one DTensor, `Shard(0)`, padded to the number of
blocks of the rank that has the most, so that optimizers, gradient clipping and FSDP2 treat them
like any other parameter that is split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..core.checks import (
    check_choice,
    check_dtype,
    check_has_data,
    check_shape,
    check_tensor,
    message,
)
from ..core.errors import BskError, InvalidInput, InvalidType, Unsupported
from ..core.sizes import cdiv
from ..masks.check import check_count
from ..matmul.api import matmul
from ..nn.bsr_linear import BSRLinear
from ..nn.bsr_weight import KEYS, check_state, is_strict, other_pattern
from ..sparse.matrix import BSRMatrix
from ..sparse.pattern import BSRPattern
from ..sparse.validate import VALUE_DTYPES
from .group import Members, agree, check_same, members_of, talking_device
from .plan import _longest_first

SIDES = ("rows", "columns")


@dataclass(frozen=True)
class FeatureSplit:
    """Which features each rank owns, in units that stay together.

    Layers that share features need the same split: the outputs of `gate` and `up` and the inputs of
    `down`, or the outputs of q, k, v and the inputs of the output projection.

    Parameters
    ----------
    unit : int
        Features of a unit: at least a block, or the features of a head.
    units : tuple of tuples of int
        The units of each rank, ascending; every rank has the same number, and each unit is owned
        once.

    Raises
    ------
    InvalidInput
        If ranks own different numbers of units, or a unit twice.

    Examples
    --------
    >>> FeatureSplit(16, ((0, 3), (1, 2))).features(0).tolist()[14:18]
    [14, 15, 48, 49]
    """

    unit: int
    units: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        op = "FeatureSplit"
        if not isinstance(self.unit, int) or self.unit < 1:
            raise InvalidInput(message(op, "unit", "is out of range", "an int >= 1", self.unit))
        if not isinstance(self.units, (tuple, list)) or not all(
            isinstance(owned, (tuple, list, range)) for owned in self.units
        ):
            expected = "the units of each rank, tuples of ints"
            raise InvalidType(message(op, "units", "are malformed", expected, self.units))
        # equality and hashing need tuples, whatever sequences came
        object.__setattr__(self, "units", tuple(tuple(owned) for owned in self.units))
        counts = {len(owned) for owned in self.units}
        listed = sorted(u for owned in self.units for u in owned)
        ascending = all(list(owned) == sorted(owned) for owned in self.units)
        if len(counts) != 1 or listed != list(range(len(listed))) or not ascending:
            expected = "each unit once, ascending, as many on every rank"
            raise InvalidInput(message(op, "units", "are no split", expected, self.units))

    @classmethod
    def contiguous(cls, features: int, unit: int, world_size: int) -> "FeatureSplit":
        """Runs of features, as torch's own styles split them.

        Examples
        --------
        >>> FeatureSplit.contiguous(64, 16, 2).units
        ((0, 1), (2, 3))
        """
        each = _units_per_rank("FeatureSplit.contiguous", features, unit, world_size)
        return cls(unit, tuple(tuple(range(r * each, r * each + each)) for r in range(world_size)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.units)

    @property
    def total(self) -> int:
        """Features of all ranks."""
        return self.unit * sum(len(owned) for owned in self.units)

    def features(self, rank: int) -> torch.Tensor:
        """The features of a rank, ascending, int64."""
        starts = torch.tensor(self.units[rank], dtype=torch.int64, device="cpu") * self.unit
        return (starts[:, None] + torch.arange(self.unit, device="cpu")).flatten()

    def order(self) -> torch.Tensor:
        """The features of all ranks, one rank after the other, int64 [total]."""
        return torch.cat([self.features(rank) for rank in range(self.world_size)])


def split_features(
    layers: Sequence[tuple[BSRLinear | BSRMatrix, str]],
    world_size: int,
    *,
    unit: int | None = None,
) -> FeatureSplit:
    """Split features that several weights share, so that ranks store equal numbers of blocks.

    Parameters
    ----------
    layers : sequence of (BSRLinear or BSRMatrix, "rows" or "columns")
        The weights, and whether the features are their rows (outputs) or columns (inputs).
    world_size : int
    unit : int, optional
        Features that stay together, such as those of a head or of all query heads of a KV head; a
        multiple of the blocks. By default the largest block.

    Returns
    -------
    FeatureSplit

    Raises
    ------
    InvalidInput
        If the layers have different numbers of features, or these do not split evenly.

    Examples
    --------
    >>> up, down = BSRLinear(64, 128, (16, 16)), BSRLinear(128, 64, (16, 16))
    >>> split = split_features([(up, "rows"), (down, "columns")], 2)
    >>> split.world_size, split.total
    (2, 128)
    """
    op = "split_features"
    if not layers:
        raise InvalidInput(message(op, "layers", "is empty", "at least one", layers))
    for pair in layers:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            expected, got = '(layer, "rows" or "columns")', type(pair).__name__
            raise InvalidType(message(op, "layers", "are not pairs", expected, got))
    weights = [(_pattern_of(op, layer), side) for layer, side in layers]
    for _, side in weights:
        check_choice(op, "side", side, SIDES)
    sizes = {pattern.shape[SIDES.index(side)] for pattern, side in weights}
    if len(sizes) != 1:
        problem = "have different numbers of shared features"
        raise InvalidInput(message(op, "layers", problem, "one", sorted(sizes)))
    blocks = [pattern.block_shape[SIDES.index(side)] for pattern, side in weights]
    unit = max(blocks) if unit is None else check_count(op, "unit", unit, at_least=1)
    for block in blocks:
        if unit % block:
            expected = f"a multiple of {block}, a block of the shared features"
            raise InvalidInput(message(op, "unit", "does not hold whole blocks", expected, unit))
    features = sizes.pop()
    each = _units_per_rank(op, features, unit, world_size)
    work = torch.zeros(each * world_size, dtype=torch.float64, device="cpu")
    for (pattern, side), block in zip(weights, blocks, strict=True):
        at = pattern.row_indices() if side == "rows" else pattern.indices
        bh, bw = pattern.block_shape
        area = torch.full((pattern.nnz_blocks,), float(bh * bw), dtype=torch.float64, device="cpu")
        work.index_add_(0, at.cpu().long() * block // unit, area)
    owned = _longest_first(work.tolist(), world_size)
    return FeatureSplit(unit, tuple(tuple(sorted(units)) for units in owned))


def _pattern_of(op: str, layer: Any) -> BSRPattern:
    if isinstance(layer, BSRMatrix):
        return layer.logical_pattern
    if isinstance(layer, BSRLinear):
        return layer.pattern
    got = type(layer).__name__
    raise InvalidType(message(op, "layers", "has a wrong type", "BSRLinear or BSRMatrix", got))


def _units_per_rank(op: str, features: int, unit: int, world_size: int) -> int:
    check_count(op, "features", features)
    check_count(op, "unit", unit, at_least=1)
    check_count(op, "world_size", world_size, at_least=1)
    if features % (unit * world_size):
        expected = f"a multiple of {unit} features for each of {world_size} ranks"
        raise InvalidInput(message(op, "features", "cannot be split evenly", expected, features))
    return features // (unit * world_size)


class _Parts:
    """How a weight is split: the whole pattern, and which of its blocks each rank holds."""

    def __init__(self, pattern: BSRPattern, split: FeatureSplit, side: str) -> None:
        self.pattern, self.split, self.side = pattern, split, side
        block = pattern.block_shape[SIDES.index(side)]
        rows, cols = pattern.row_indices().long(), pattern.indices.long()
        at = rows if side == "rows" else cols
        owner = torch.empty(split.total // block, dtype=torch.int64, device=at.device)
        place = torch.empty_like(owner)
        for rank in range(split.world_size):
            owned = (split.features(rank)[::block] // block).to(at.device)
            owner[owned] = rank
            place[owned] = torch.arange(owned.numel(), device=at.device)
        of_entry = owner[at]
        # blocks of each rank in the order of the whole pattern, which is also its own order
        self.entries = [torch.nonzero(of_entry == r).flatten() for r in range(split.world_size)]
        self.counts = [entries.numel() for entries in self.entries]
        self._rows = place[rows] if side == "rows" else rows
        self._cols = cols if side == "rows" else place[cols]

    @property
    def most(self) -> int:
        """Blocks of the rank that has the most, to which the others are padded."""
        return max(self.counts)

    def pattern_of(self, rank: int) -> BSRPattern:
        """The blocks of a rank, as a pattern of its own."""
        (height, width), share = self.pattern.shape, self.split.total // self.split.world_size
        shape = (share, width) if self.side == "rows" else (height, share)
        bh, _ = self.pattern.block_shape
        entries = self.entries[rank]
        rows, cols = self._rows[entries], self._cols[entries]
        counts = torch.bincount(rows, minlength=cdiv(shape[0], bh))
        indptr = nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return BSRPattern._from_parts(indptr, cols.int(), shape, self.pattern.block_shape)

    def values_of(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        """The blocks of a rank, padded with zeros."""
        local = values.new_zeros((self.most, *values.shape[1:]))
        local[: self.counts[rank]] = values[self.entries[rank]]
        return local

    def whole(self, padded: torch.Tensor) -> torch.Tensor:
        """The values of the whole weight from the values of all ranks, in the order of ranks."""
        values = padded.new_empty((self.pattern.nnz_blocks, *padded.shape[1:]))
        for rank, (entries, count) in enumerate(zip(self.entries, self.counts, strict=True)):
            values[entries] = padded[rank * self.most : rank * self.most + count]
        return values


class ParallelBSRLinear(BSRLinear):
    """A `BSRLinear` split over ranks; `ColwiseBSR` and `RowwiseBSR` make it.

    `in_features`, `out_features`, `weight` and `nnz_blocks` are those of this rank. `state_dict` is
    that of the whole layer, gathered, so a checkpoint loads into any number of ranks or into a
    plain `BSRLinear`; saving and loading are collectives.
    """

    _mesh: DeviceMesh
    _parts: _Parts
    _input_layout: Placement
    _output_layout: Placement
    _local_output: bool

    @property
    def weight(self) -> BSRMatrix:
        """This rank's part of the matrix; gradients reach `values`."""
        pattern = self.pattern
        local = _local(self.values)[: pattern.nnz_blocks]
        return BSRMatrix._from_parts(pattern, local)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the whole layer, in the layouts of the style."""
        by_rows = self._parts.side == "rows"
        y = self._colwise(x) if by_rows else self._rowwise(x)
        y = y.redistribute(placements=[self._output_layout])
        if not by_rows and self.bias is not None:
            # autocast leaves sums alone, and the product may be narrower than the bias
            y = cast(DTensor, y + self.bias.to(y.dtype))
        return y.to_local() if self._local_output else y

    def _colwise(self, x: torch.Tensor) -> DTensor:
        whole = self._placed(x).redistribute(placements=[Replicate()])
        # each rank finds the gradient through its own outputs
        local = whole.to_local(grad_placements=[Partial()])
        made = self._product(local)
        y = DTensor.from_local(made, self._mesh, [Shard(-1)], run_check=False)
        if self._output_layout in (Shard(-1), Shard(made.dim() - 1)):
            return y
        in_order = torch.argsort(self._parts.split.order()).to(made.device)
        gathered = y.redistribute(placements=[Replicate()]).to_local()
        natural = gathered.index_select(-1, in_order)
        return DTensor.from_local(natural, self._mesh, [Replicate()], run_check=False)

    def _rowwise(self, x: torch.Tensor) -> DTensor:
        placed = self._placed(x)
        if self._input_layout in (Shard(-1), Shard(x.dim() - 1)):
            local = placed.to_local()
        else:
            whole = placed.redistribute(placements=[Replicate()])
            if whole.shape[-1] != self._parts.split.total:
                # selecting features would silently ignore excess ones
                expected = f"[..., {self._parts.split.total}], the inputs of all ranks"
                got = list(whole.shape)
                raise InvalidInput(message("RowwiseBSR", "x", "does not fit", expected, got))
            own = self._parts.split.features(self._mesh.get_local_rank()).to(x.device)
            local = whole.to_local(grad_placements=[Partial()]).index_select(-1, own)
        made = self._product(local)
        return DTensor.from_local(made, self._mesh, [Partial()], run_check=False)

    def _product(self, local: torch.Tensor) -> torch.Tensor:
        """What this rank computes of its own inputs; `bsk.explain` of a model asks for it."""
        if self._parts.side == "columns":
            return matmul(local, self.weight.T, impl=self.impl)
        bias = None if self.bias is None else _local(self.bias)
        return matmul(local, self.weight.T, bias=bias, activation=self.activation, impl=self.impl)

    def _placed(self, x: torch.Tensor) -> DTensor:
        if isinstance(x, DTensor):
            return x.redistribute(placements=[self._input_layout])
        return DTensor.from_local(x, self._mesh, [self._input_layout], run_check=False)

    def reset_parameters(self) -> None:
        """Refused: initialise the layer before it is split."""
        self._refuse("reset_parameters")

    def to_linear(self) -> nn.Linear:
        """Refused: load the state dict of this layer into a plain `BSRLinear`."""
        self._refuse("to_linear")
        raise AssertionError

    def to_fp8(self) -> BSRLinear:
        """Refused: load the state dict of this layer into a plain `BSRLinear`, and round that."""
        self._refuse("to_fp8")
        raise AssertionError

    def keep_blocks_(self, entries: torch.Tensor) -> nn.Parameter:
        """Refused: prune the layer before it is split."""
        self._refuse("keep_blocks_")
        raise AssertionError

    def _refuse(self, name: str) -> None:
        expected = "a BSRLinear (its state_dict() is that of the whole layer)"
        problem = "does not apply to a layer that is split among ranks"
        raise Unsupported(message("ParallelBSRLinear", name, problem, expected, "one part"))

    def _take(self, values: torch.Tensor, bias: torch.Tensor | None, *, new: bool) -> None:
        """Keep this rank's part of the values and bias of the whole layer.

        With `new` they become parameters of their own; otherwise they are written into those that
        exist, where an optimizer, FSDP2 or DDP knows them.
        """
        rank, placed = self._mesh.get_local_rank(), self._placements()
        local = {"values": self._parts.values_of(rank, values)}
        if bias is not None:
            own = self._parts.split.features(rank).to(bias.device)
            local["bias"] = bias.index_select(0, own) if self._parts.side == "rows" else bias
        for name, part in local.items():
            old = getattr(self, name)
            if new or (name == "values" and self._length(old) != part.shape[0]):
                made = DTensor.from_local(part.clone(), self._mesh, [placed[name]], run_check=False)
                setattr(self, name, nn.Parameter(made, requires_grad=old.requires_grad))
            else:
                _write(old, part)

    def _placements(self) -> dict[str, Placement]:
        by_rows = self._parts.side == "rows"
        return {"values": Shard(0), "bias": Shard(0) if by_rows else Replicate()}

    def _length(self, values: torch.Tensor) -> int:
        """Blocks of one rank in `values`, padding included."""
        return values.shape[0] // (self._mesh.size() if isinstance(values, DTensor) else 1)

    def _whole_parameter(self, name: str) -> torch.Tensor:
        """The values or bias of all ranks, one rank after the other."""
        parameter = getattr(self, name).detach()
        if not isinstance(parameter, DTensor):
            # DDP holds plain tensors between forward passes
            placed = [self._placements()[name]]
            parameter = DTensor.from_local(parameter, self._mesh, placed, run_check=False)
        return parameter.full_tensor()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        parts, device = self._parts, self.values.device
        pattern = parts.pattern
        shape = torch.tensor(pattern.shape, dtype=torch.int64, device="cpu")
        values = parts.whole(self._whole_parameter("values"))
        whole = {"values": values, "weight_shape": shape.to(device)}
        whole |= {"indptr": pattern.indptr.clone(), "indices": pattern.indices.clone()}
        if self.bias is not None:
            bias = self._whole_parameter("bias")
            if parts.side == "rows":
                bias = bias.index_select(0, torch.argsort(parts.split.order()).to(bias.device))
            whole["bias"] = bias
        for name, x in whole.items():
            destination[prefix + name] = x

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = KEYS if self.bias is None else (*KEYS, "bias")
        found = {key: state_dict[prefix + key] for key in names if prefix + key in state_dict}
        if len(found) < len(names):
            missing_keys.extend(prefix + key for key in names if key not in found)
            return
        if strict:
            beyond = (key[len(prefix) :] for key in state_dict if key.startswith(prefix))
            unexpected_keys.extend(prefix + key for key in beyond if key not in names)
        try:
            self._load(found)
        except BskError as error:
            error_msgs.append(f"{prefix.rstrip('.') or 'the module'}: {error}")

    def _load(self, state: dict[str, Any]) -> None:
        parts = self._parts
        pattern = parts.pattern
        values = state["values"]
        bias: Any = state.get("bias")
        loaded = check_state(state, pattern.shape, pattern.block_shape)
        op = "BSRLinear.load_state_dict"
        # of all ranks: what is sharded otherwise cannot be cut into the parts of this layer
        check_tensor(op, "values", values)
        if self.bias is not None:
            check_tensor(op, "bias", bias)
            check_has_data(op, "bias", bias)
            check_dtype(op, "bias", bias, VALUE_DTYPES)
            check_shape(op, "bias", bias, pattern.shape[:1])
        device = self.values.device
        same = all(
            torch.equal(a.to(device), b)
            for a, b in ((loaded.indptr, pattern.indptr), (loaded.indices, pattern.indices))
        )
        if not same:
            if is_strict():
                blocks = pattern.rows_b * pattern.cols_b
                raise other_pattern(pattern.nnz_blocks, blocks, loaded)
            other = BSRPattern._from_parts(
                loaded.indptr.to(device), loaded.indices.to(device), pattern.shape,
                pattern.block_shape,
            )  # fmt: skip
            self._parts = _Parts(other, parts.split, parts.side)
            self._set_pattern(self._parts.pattern_of(self._mesh.get_local_rank()))
        dtype = self.values.dtype
        own_bias = None if bias is None else bias.to(device, dtype)
        self._take(values.to(device, dtype), own_bias, new=False)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _write(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Write the part of this rank into its parameter."""
    with torch.no_grad():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            # FSDP2 has cut the part of this rank once more
            mesh = parameter.device_mesh
            chunks = torch.chunk(local, mesh.size(0))
            place = mesh.get_local_rank(0)
            local = chunks[place] if place < len(chunks) else local[:0]
        _local(parameter).copy_(local)


class _Style(ParallelStyle):
    _side: str
    _defaults: tuple[Placement, Placement]

    def __init__(
        self,
        split: FeatureSplit | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        if split is not None and not isinstance(split, FeatureSplit):
            op, got = type(self).__name__, type(split).__name__
            raise InvalidType(message(op, "split", "has a wrong type", "FeatureSplit", got))
        self.split = split
        given, wanted = self._defaults
        self.input_layouts: Placement = given if input_layouts is None else input_layouts
        self.output_layouts: Placement = wanted if output_layouts is None else output_layouts
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        op = type(self).__name__
        members = members_of(op, device_mesh, None)
        split: FeatureSplit | None = None
        failure: Exception | None = None
        try:
            split = self._split_of(module, device_mesh.size())
        except Exception as error:
            failure = error
        pattern, values, bias = _of_first_rank(op, module, members, failure)
        assert split is not None
        parts = _Parts(pattern, split, self._side)
        local = parts.pattern_of(device_mesh.get_local_rank())
        module.__class__ = ParallelBSRLinear
        assert isinstance(module, ParallelBSRLinear)
        module._mesh, module._parts = device_mesh, parts
        module._input_layout, module._output_layout = self.input_layouts, self.output_layouts
        module._local_output = self.use_local_output
        module._shape = local.shape
        module.out_features, module.in_features = local.shape
        module._set_pattern(local)
        module._take(values, bias, new=True)
        return module

    def _split_of(self, module: nn.Module, ranks: int) -> FeatureSplit:
        """The split of a layer; raises for layers that this style does not take."""
        op = type(self).__name__
        if type(module) is not BSRLinear:
            got = type(module).__name__
            raise InvalidType(message(op, "module", "has a wrong type", "BSRLinear", got))
        if module.descale is not None:
            problem, expected = "are in fp8 with scales, which are not split", "wider values"
            raise Unsupported(message(op, "values", problem, expected, module.values.dtype))
        if self._side == "columns" and module.activation is not None:
            expected = "a layer without one (apply it to the sum over ranks)"
            problem = "cannot be computed on parts of a sum"
            raise Unsupported(message(op, "activation", problem, expected, module.activation))
        axis = SIDES.index(self._side)
        features, block = module._shape[axis], module.block_shape[axis]
        split = self.split
        if split is None:
            split = FeatureSplit.contiguous(features, block, ranks)
        if (split.total, split.world_size) != (features, ranks) or split.unit % block:
            expected = f"{features} features on {ranks} ranks in blocks of {block}"
            got = f"{split.total} on {split.world_size} in units of {split.unit}"
            raise InvalidInput(message(op, "split", "does not fit the layer", expected, got))
        return split


def _of_first_rank(
    op: str, module: nn.Module, members: Members, failure: Exception | None
) -> tuple[BSRPattern, torch.Tensor, torch.Tensor | None]:
    """Pattern, values and bias of the first rank, as torch's own styles take them.

    Raises on every rank if the layers differ, or if one of them has failed before.
    """
    text = ""
    if failure is None:
        assert isinstance(module, BSRLinear)
        sizes = (module._shape, module.block_shape, module.nnz_blocks, module.bias is not None)
        text = f"(shape, block, blocks, bias) {sizes} in {module.values.dtype}"
    check_same(op, agree(op, members, text, failure, talking_device(members)))
    assert isinstance(module, BSRLinear)
    bias = module.bias
    tensors = [module.values.detach().clone(), module.indptr.clone(), module.indices.clone()]
    if bias is not None:
        tensors.append(bias.detach().clone())
    for x in tensors:
        torch.distributed.broadcast(x, members.peer(0), group=members.group)
    values, indptr, indices, *rest = tensors
    pattern = BSRPattern._from_parts(indptr, indices, module._shape, module.block_shape)
    return pattern, values, rest[0] if rest else None


class ColwiseBSR(_Style):
    """Split the outputs of a `BSRLinear` among the ranks of a mesh.

    For `parallelize_module`, as torch's `ColwiseParallel` for a dense layer. The weights are those
    of the first rank.

    Parameters
    ----------
    split : FeatureSplit, optional
        Which outputs each rank owns; `split_features` makes one with even numbers of stored blocks.
        By default runs of outputs, as torch splits them, whose blocks may be uneven.
    input_layouts : Placement
        Of the input, `Replicate()` by default.
    output_layouts : Placement
        `Shard(-1)` by default: each rank returns its own outputs, in the order of the split. Other
        layouts have the outputs of the whole layer in their own order.
    use_local_output : bool
        Return a plain tensor instead of a DTensor.

    Raises
    ------
    InvalidInput
        When applied, if the split does not fit the layer.

    Examples
    --------
    In a group of one:

    >>> import torch.distributed as dist
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,))
    >>> mlp = torch.nn.Sequential(BSRLinear(64, 128, 16), BSRLinear(128, 64, 16))
    >>> split = split_features([(mlp[0], "rows"), (mlp[1], "columns")], mesh.size())
    >>> styles = {"0": ColwiseBSR(split), "1": RowwiseBSR(split)}
    >>> parallelize_module(mlp, mesh, styles)(torch.randn(3, 64)).shape
    torch.Size([3, 64])
    >>> dist.destroy_process_group()
    """

    _side = "rows"
    _defaults = (Replicate(), Shard(-1))


class RowwiseBSR(_Style):
    """Split the inputs of a `BSRLinear` among the ranks of a mesh; outputs are summed.

    See `ColwiseBSR`, also for an example: its default output is the default input here. The bias is
    added once, to the sum. A layer with an activation is refused.

    Parameters
    ----------
    split : FeatureSplit, optional
    input_layouts : Placement
        `Shard(-1)` by default: each rank passes its own inputs, in the order of the split.
    output_layouts : Placement
        `Replicate()` by default; `Shard(1)` leaves each rank a part of the sequence.
    use_local_output : bool
    """

    _side = "columns"
    _defaults = (Shard(-1), Replicate())
