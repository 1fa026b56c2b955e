import pytest
import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.kv_cache.memory import MODELS, KVModel, format_kv_memory_table


@pytest.mark.parametrize(
    ("name", "replicated", "grouped"),
    [
        ("Llama 3.1 8B", 8.6, 2.1),
        ("Mistral 7B", 8.6, 2.1),
        ("Qwen2.5 7B", 6.6, 0.9),
        ("MHA, 96 heads (GPT-3 175B)", 77.3, 77.3),
    ],
)
def test_the_family_at_16k_tokens(name, replicated, grouped):
    (row,) = (row for row in bsk.kv_memory_table() if row.model.name == name)
    assert round(row.replicated_bytes / 1e9, 1) == replicated
    assert round(row.grouped_bytes / 1e9, 1) == grouped


def test_bytes_are_those_of_a_cache():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        cache = bsk.KVCache(3, 2, 50, 16, head_dim_v=8, dtype=dtype)
        sizes = {"layers": 1, "heads_kv": 2, "head_dim": 16, "head_dim_v": 8}
        assert bsk.kv_cache_bytes(150, dtype=dtype, **sizes) == cache.memory_bytes


def test_latent_values_take_no_memory():
    sizes = {"heads_kv": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
    for cache in (
        bsk.KVCache(2, 1, 64, 576, head_dim_v=512, latent=True, dtype=torch.bfloat16),
        bsk.PagedKVCache(2, 64, 1, 576, head_dim_v=512, latent=True, dtype=torch.bfloat16),
    ):
        assert bsk.kv_cache_bytes(128, layers=1, **sizes) == cache.memory_bytes == 128 * 576 * 2
    for changes, error, text in (
        ({"head_dim_v": None}, bsk.InvalidInput, "kv_cache_bytes: head_dim_v is missing"),
        ({"latent": 1}, bsk.InvalidType, "kv_cache_bytes: latent is not a bool"),
        ({"dtype": torch.float8_e4m3fn}, bsk.Unsupported, "dtype is not for latent caches"),
    ):
        with pytest.raises(error, match=text):
            bsk.kv_cache_bytes(128, layers=1, **{**sizes, **changes})


def test_fp8_halves_every_row():
    wide, narrow = bsk.kv_memory_table(), bsk.kv_memory_table(dtype=torch.float8_e4m3fn)
    for a, b in zip(wide, narrow, strict=True):
        assert a.grouped_bytes == 2 * b.grouped_bytes and a.saving == b.saving


def test_text_is_aligned():
    lines = format_kv_memory_table(bsk.kv_memory_table()).splitlines()
    assert len(lines) == 1 + len(MODELS) and len({len(line) for line in lines}) == 1
    assert lines[1].split()[-5:] == ["8.6", "GB", "2.1", "GB", "4.0x"]


def test_wrong_sizes():
    with pytest.raises(bsk.InvalidInput, match="odd has a wrong number of query heads"):
        bsk.kv_memory_table([KVModel("odd", 1, 7, 2, 64)])
    with pytest.raises(bsk.InvalidInput, match="kv_cache_bytes: tokens is too small"):
        bsk.kv_cache_bytes(-1, layers=1, heads_kv=1, head_dim=1)
