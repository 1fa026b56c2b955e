"""Padded caches as lists of tokens: through the eager path and the decode kernel itself."""

import pytest
import torch

from blackwell_sparsek import attention_decode
from blackwell_sparsek.integrations.huggingface.attention import as_token_pages
from blackwell_sparsek.integrations.huggingface.visible_keys import listed_tokens


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 1, 16, generator=generator)
    k, v = torch.randn(2, 3, 2, 70, 16, generator=generator)
    visible = torch.rand(3, 70, generator=generator) < 0.6
    visible[1] = False
    visible[2, :40] = False
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, visible[:, None, None], enable_gqa=True
    )
    return q, k, v, visible, torch.where(visible.any(1)[:, None, None, None], expected, 0.0)


def test_tokens_are_listed_in_order():
    visible = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]]).bool()
    tokens, counts = listed_tokens(visible)
    assert tokens.tolist() == [[1, 2, 4, 0, 0], [0, 0, 0, 0, 0]]
    assert counts.tolist() == [3, 0]
    assert tokens.dtype == counts.dtype == torch.int32


@pytest.mark.parametrize("impl", ["eager", "triton"])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_a_token_may_be_a_page(impl, layout, problem):
    q, k, v, visible, expected = problem
    if layout == "tokens first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    k_pages, v_pages, step = as_token_pages(k, v)
    assert k_pages.data_ptr() == k.data_ptr() and k_pages.shape[1:] == (1, 2, 16)
    tokens, counts = listed_tokens(visible)
    table = tokens + torch.arange(3, dtype=torch.int32)[:, None] * step
    found = attention_decode(q, k_pages, v_pages, cache_seqlens=counts, page_table=table, impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_strides_that_do_not_allow_it():
    k = torch.zeros(2, 2, 8, 16)
    uneven = torch.zeros(2, 300).as_strided((2, 2, 8, 16), (300, 128, 16, 1))
    assert as_token_pages(k, uneven) is None
    assert as_token_pages(k, k.transpose(1, 2).contiguous().transpose(1, 2)) is None
