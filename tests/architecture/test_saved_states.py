"""What `torch.load(weights_only=True)` makes of files with our classes, whatever is in them."""

import contextlib
import io
import pickle
import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import blackwell_sparsek as bsk
from blackwell_sparsek.core.errors import BskError
from blackwell_sparsek.sparse.matrix import BSRMatrix, BSRPattern

from .. import fuzzing


def _matrix():
    dense = torch.zeros(40, 50)
    dense[:16, 16:32] = dense[32:, :16] = 1.0
    return BSRMatrix.from_dense(dense, 16)


def _cache():
    cache = bsk.KVCache(2, 2, 10, 8)
    cache.append(torch.ones(2, 2, 3, 8), torch.ones(2, 2, 3, 8))
    return cache


def _paged():
    cache = bsk.PagedKVCache(6, 4, 2, 8, max_sequences=4, max_tokens=16)
    pair = cache.add_sequences(2)
    cache.append(pair, torch.ones(2, 2, 6, 8), torch.ones(2, 2, 6, 8), counts=[6, 3])
    return cache


def _latent():
    cache = bsk.KVCache(2, 1, 10, 8, head_dim_v=6, latent=True)
    cache.append(torch.ones(2, 1, 3, 8))
    return cache


def _latent_paged():
    cache = bsk.PagedKVCache(6, 4, 1, 8, head_dim_v=6, latent=True, max_sequences=4, max_tokens=16)
    cache.append(cache.add_sequences(2), torch.ones(2, 1, 6, 8), counts=[6, 3])
    return cache


def _selection():
    indices = torch.tensor([[[[2, 0], [1, -1]]]])
    return bsk.KeySelection.from_indices(indices, granularity=4, kv_len=10)


MAKERS = {
    "BSRMatrix": _matrix,
    "BSRMatrix in fp8": lambda: _matrix().to_fp8(),
    "BSRPattern": lambda: _matrix().pattern,
    "BlockMask": lambda: bsk.masks.causal((40, 50), 16),
    "KeySelection": _selection,
    "KVCache": _cache,
    "KVCache of latents": _latent,
    "PagedKVCache": _paged,
    "PagedKVCache of latents": _latent_paged,
}


def _places(value, path=()):
    yield path
    if isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, key))


def _replaced(state, path, value):
    if not path:
        return value
    first, *rest = path
    copied = dict(state) if isinstance(state, dict) else list(state)
    copied[first] = _replaced(copied[first], rest, value)
    return tuple(copied) if isinstance(state, tuple) else copied


def _used(x):
    """Everything that follows the indices of a loaded object."""
    repr(x)
    if isinstance(x, bsk.KVCache):
        x.append(*(torch.zeros_like(y[:, :, :1]) for y in ((x.k,) if x.latent else (x.k, x.v))))
    elif isinstance(x, bsk.PagedKVCache):
        x.add_sequences(1)
    elif x.device.type == "meta":
        return
    elif isinstance(x, BSRMatrix):
        x.validate()
        x.to_dense()
    elif isinstance(x, BSRPattern):
        x.validate()
        x.transposed().validate()
    else:
        x.to_dense()
        x.validate()


def _taken(kind, state):
    """Whether the state is taken; if not, it must be refused with one short sentence."""
    began = time.monotonic()
    made = kind.__new__(kind)
    try:
        made.__setstate__(state)
    except BskError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 1000
        return False
    finally:
        assert time.monotonic() - began < 10
    with contextlib.suppress(BskError):  # a full cache, or one without data
        _used(made)
    return True


def test_every_class_that_torch_loads_is_here():
    ours = {
        x.__name__
        for x in torch.serialization.get_safe_globals()
        if getattr(x, "__module__", "").startswith("blackwell_sparsek")
    }
    # `restored` makes a Quantized: tests/fp8/test_quantize.py
    assert ours == {name.split()[0] for name in MAKERS} | {"PageSummaries", "restored"}


@pytest.mark.parametrize(
    ("state", "got"), [([1], "got list"), ({"b": 1, "a": 2}, "got ['a', 'b']"), ({}, "got []")]
)
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_of_another_form_is_named(name, state, got):
    kind = type(MAKERS[name]())
    with pytest.raises(bsk.InvalidInput, match=f"does not fit; expected .*, {re.escape(got)}$"):
        kind.__new__(kind).__setstate__(state)


@pytest.mark.parametrize("name", MAKERS)
def test_any_wrong_value_is_refused_or_harmless(name):
    good = MAKERS[name]()
    state = good.__getstate__()
    assert _taken(type(good), state)
    refused = 0
    for place in _places(state):
        for value in fuzzing.ODD_STATES:
            try:
                refused += not _taken(type(good), _replaced(state, place, value))
            except Exception as error:
                raise AssertionError(f"{type(value)} at {place}") from error
    assert refused > 100


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=60)
@given(data=st.data())
def test_several_wrong_values_are_refused_or_harmless(name, data):
    good = MAKERS[name]()
    state = good.__getstate__()
    for _ in range(data.draw(st.integers(2, 3))):
        place = data.draw(st.sampled_from(list(_places(state))[1:] or [()]))
        state = _replaced(state, place, data.draw(st.sampled_from(fuzzing.ODD_STATES)))
        if not isinstance(state, dict):
            break
    _taken(type(good), state)


@pytest.mark.parametrize("kind", [BSRPattern, bsk.BlockMask])
def test_lists_beside_tensors_without_data_are_checked(kind):
    """A tensor on the meta device must not turn off the check of those that have contents."""
    name = "BSRPattern" if kind is BSRPattern else "BlockMask"
    state = MAKERS[name]().__getstate__()
    state["indices"] = torch.full_like(state["indices"], 2**30)
    without = "indptr" if kind is BSRPattern else "bits"
    with pytest.raises(bsk.InvalidInput, match="are on different devices"):
        kind.__new__(kind).__setstate__({**state, without: state[without].to("meta")})


LISTS = {"indptr": torch.zeros(1, dtype=torch.int32), "indices": torch.zeros(0, dtype=torch.int32)}
# states of a few bytes, which ask for gigabytes
SMALL_AND_LARGE = {
    "columns without rows": {**LISTS, "shape": (0, 2**27), "block_shape": (1, 1)},
    "expanded indptr": {
        "indptr": torch.zeros(1, dtype=torch.int32).expand(2**26 + 1),
        "indices": LISTS["indices"],
        "shape": (2**26, 16),
        "block_shape": (1, 16),
    },
    "expanded indices": {
        "indptr": torch.tensor([0, 2**27], dtype=torch.int32),
        "indices": torch.zeros(1, dtype=torch.int32).expand(2**27),
        "shape": (16, 16),
        "block_shape": (16, 16),
    },
}


class _Largest(TorchDispatchMode):
    """Finds the size of the largest tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("name", SMALL_AND_LARGE)
def test_a_small_file_does_not_make_a_large_pattern(name):
    """What a pattern allocates is bounded before it is allocated."""
    with _Largest() as largest, pytest.raises(bsk.InvalidInput, match=r"^BSRPattern: "):
        BSRPattern.__new__(BSRPattern).__setstate__(SMALL_AND_LARGE[name])
    assert largest.elements <= 1


class _Runs:
    """Unpickling this calls print."""

    def __reduce__(self):
        return print, ("code of a stranger ran",)


@pytest.mark.parametrize("name", MAKERS)
def test_code_in_a_file_is_refused_and_does_not_run(name, monkeypatch, capsys):
    good = MAKERS[name]()
    state = good.__getstate__()
    for place in state:
        buffer = io.BytesIO()
        with monkeypatch.context() as patch:
            bad = {**state, place: _Runs()}
            patch.setattr(type(good), "__getstate__", lambda self, bad=bad: bad)
            torch.save(good, buffer)
        buffer.seek(0)
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            torch.load(buffer, weights_only=True)
    assert capsys.readouterr().out == ""


@settings(max_examples=60)
@given(data=st.data())
def test_changed_bytes_of_a_saved_mask_never_give_a_wrong_one(data):
    buffer = io.BytesIO()
    # the older format: one stream, without the checksums of a zip file
    torch.save(MAKERS["BlockMask"](), buffer, _use_new_zipfile_serialization=False)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        loaded = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # what torch says of a broken stream is its own
        return
    if isinstance(loaded, bsk.BlockMask) and hasattr(loaded, "_bits"):
        loaded.validate()
