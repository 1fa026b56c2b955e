import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import blackwell_sparsek as bsk
from blackwell_sparsek import Unsupported
from blackwell_sparsek.integrations import torch_sdpa as flash
from blackwell_sparsek.integrations.torch_sdpa import patch_sdpa, register_flash_attention
from blackwell_sparsek.testing.tolerance import assert_within_budget

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture
def x():
    return torch.randn(2, 4, 20, 16, generator=torch.Generator().manual_seed(0))


class TestPatch:
    def test_results_are_torchs(self, x):
        mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(1)) < 0.5
        mask |= torch.eye(20, dtype=torch.bool)
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.1}):
            with bsk.patch_sdpa() as patch:
                ours = F.scaled_dot_product_attention(x, x, x, **options)
            torch.testing.assert_close(ours, ORIGINAL(x, x, x, **options))
            assert patch.taken == 1 and not patch.left

    def test_torchs_function_is_back_afterwards(self, x):
        with pytest.raises(RuntimeError, match="inside"), patch_sdpa():
            assert F.scaled_dot_product_attention is not ORIGINAL
            raise RuntimeError("inside")
        assert F.scaled_dot_product_attention is ORIGINAL

    def test_patches_nest(self, x):
        with patch_sdpa() as outer:
            with patch_sdpa() as inner:
                F.scaled_dot_product_attention(x, x, x)
            F.scaled_dot_product_attention(x, x, x)
            assert (outer.taken, inner.taken) == (1, 1)
        assert F.scaled_dot_product_attention is ORIGINAL

    def test_what_is_left_to_torch_is_counted(self, x):
        bias = torch.randn(20, 20, requires_grad=True)
        with patch_sdpa() as patch:
            ours = F.scaled_dot_product_attention(x, x, x, bias)
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)
        torch.testing.assert_close(ours, ORIGINAL(x, x, x, bias))
        assert patch.taken == 0
        assert sorted(patch.left.values()) == [1, 2]
        assert any("bias that requires a gradient" in reason for reason in patch.left)
        assert any("dropout_p" in reason for reason in patch.left)
        assert "left={" in repr(patch)

    @pytest.mark.parametrize("shape", [(20, 20), (2, 1, 1, 20), (1, 4, 20, 20), (1, 20)])
    def test_float_masks(self, shape, x):
        """A bias of any shape that broadcasts, with -inf; gradients of queries, keys, values."""
        bias = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
        q, k, v = (x.roll(i, 2).clone().requires_grad_() for i in range(3))
        dout = torch.randn_like(x)
        with patch_sdpa() as patch:
            ours = F.scaled_dot_product_attention(q, k, v, bias)
        assert (patch.taken, patch.left) == (1, {})
        exact_in = [y.detach().double().requires_grad_() for y in (q, k, v)]
        exact = ORIGINAL(*exact_in, bias.double())
        plain = ORIGINAL(q, k, v, bias)
        assert_within_budget(ours, exact, plain)
        made, want, low = (
            torch.autograd.grad(out, given, dout.to(out.dtype))
            for out, given in ((ours, (q, k, v)), (exact, exact_in), (plain, (q, k, v)))
        )
        for got, expected, rough in zip(made, want, low, strict=True):
            assert_within_budget(got, expected, rough, factor=3.0)

    @pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
    @pytest.mark.parametrize("lengths", [(20, 20), (7, 20), (20, 7)])
    @pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
    def test_causal_biases(self, variant, lengths, x):
        """Their class compares the function called with torch's, which the patch replaces."""
        sq, sk = lengths
        bias, q, k = variant(sq, sk), x[:, :, :sq], x[:, :, :sk].flip(2)
        expected = ORIGINAL(q, k, k, bias)
        with patch_sdpa() as patch:
            ours = F.scaled_dot_product_attention(q, k, k, bias)
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, expected)
        assert (patch.taken, patch.left) == (1, {})

    @pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
    def test_causal_biases_that_are_left_to_torch(self, variant, x):
        q, bias = x[:, :, :7], variant(7, 20)
        torch.manual_seed(0)
        expected = ORIGINAL(q, x, x, bias, 0.5)
        torch.manual_seed(0)
        with patch_sdpa() as patch:
            ours = F.scaled_dot_product_attention(q, x, x, bias, 0.5)
        torch.testing.assert_close(ours, expected)
        assert sum(patch.left.values()) == 1 and "dropout" in next(iter(patch.left))

    def test_classes_with_their_own_rules_are_left_alone(self, x):
        class Doubled(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is ORIGINAL:
                    return "its own"
                return super().__torch_function__(func, types, args, kwargs or {})

        with patch_sdpa() as patch:
            assert F.scaled_dot_product_attention(x.as_subclass(Doubled), x, x) == "its own"
        assert "Doubled" in next(iter(patch.left))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        "shapes",
        [
            ((2, 3, 0, 8), (2, 3, 4, 8)),
            ((2, 3, 4, 8), (2, 3, 0, 8)),
            ((2, 0, 4, 8), (2, 0, 4, 8)),
            ((2, 3, 4, 0), (2, 3, 4, 0)),
            ((0, 8), (4, 8)),
        ],
    )
    def test_zero_sizes(self, shapes, causal):
        q, k = (torch.randn(shape) for shape in shapes)
        with patch_sdpa():
            ours = F.scaled_dot_product_attention(q, k, k, is_causal=causal)
        torch.testing.assert_close(ours, ORIGINAL(q, k, k, is_causal=causal))

    def test_torchs_own_results_without_key_heads(self):
        q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 0, 5, 8)
        with patch_sdpa() as patch:
            ours = F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        assert torch.equal(ours, ORIGINAL(q, k, k, enable_gqa=True))
        assert any("wrong number of heads" in reason for reason in patch.left)

    def test_torchscript(self, x):
        """What is compiled inside runs torch's kernels, inside and outside of the patch."""

        def run(q: torch.Tensor):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        with patch_sdpa() as patch:
            scripted = torch.jit.script(run)
            ours = scripted(x)
            layer = torch.jit.script(torch.nn.MultiheadAttention(16, 2, batch_first=True).eval())
            assert patch.taken == 0
        assert torch.equal(ours, ORIGINAL(x, x, x, is_causal=True))
        assert torch.equal(scripted(x), ours)
        assert layer(x[0], x[0], x[0])[0].shape == (4, 20, 16)

    def test_torchs_own_errors_stay(self, x):
        with patch_sdpa() as patch, pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(x, x[..., :8], x)
        assert sum(patch.left.values()) == 1

    def test_strict(self, x):
        with patch_sdpa(strict=True), pytest.raises(Unsupported, match="dropout_p asks for"):
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def test_other_threads_are_left_alone(self, x):
        inside, leave, found = threading.Event(), threading.Event(), {}

        def patched():
            with patch_sdpa() as patch:
                inside.set()
                leave.wait(10)
                F.scaled_dot_product_attention(x, x, x)
                found["taken"] = patch.taken

        thread = threading.Thread(target=patched)
        thread.start()
        inside.wait(10)
        F.scaled_dot_product_attention(x, x, x)
        leave.set()
        thread.join()
        assert found["taken"] == 1
        assert F.scaled_dot_product_attention is ORIGINAL

    def test_gradients_and_checkpoints(self, x):
        from torch.utils.checkpoint import checkpoint

        a, b = (x.double().requires_grad_() for _ in range(2))

        def run(q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

        with patch_sdpa() as patch:
            checkpoint(run, a, use_reentrant=False).backward()
            assert patch.taken == 2
        run(b).backward()
        torch.testing.assert_close(a.grad, b.grad)

    def test_compiled(self, x):
        def run(q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        with patch_sdpa():
            torch.testing.assert_close(compiled(x), run(x))
        torch.testing.assert_close(compiled(x), ORIGINAL(x, x, x, is_causal=True))


class TestCompiledDropIn:
    @pytest.mark.parametrize("shape", [(20, 20), (2, 1, 1, 20), (2, 4, 20, 20)])
    def test_bool_masks(self, shape, x):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
        mask[..., 0] = True

        def run(q, mask):
            return bsk.scaled_dot_product_attention(q, q, q, mask)

        found = torch.compile(run, fullgraph=True, backend="aot_eager")(x, mask)
        torch.testing.assert_close(found, ORIGINAL(x, x, x, mask))

    def test_fifty_lengths_compile_twice_at_most(self):
        from torch._dynamo.testing import CompileCounter

        torch._dynamo.reset()
        counter = CompileCounter()

        def run(q, k):
            return bsk.scaled_dot_product_attention(q, k, k, is_causal=True)

        compiled = torch.compile(run, fullgraph=True, backend=counter)
        for length in range(20, 70):
            q, k = torch.randn(1, 2, length, 8), torch.randn(1, 2, length + 3, 8)
            torch.testing.assert_close(compiled(q, k), ORIGINAL(q, k, k, is_causal=True))
        assert counter.frame_count <= 3


class TestFlash:
    """The functions that take the place of torch's kernels; on a GPU they are really installed."""

    def test_registered_but_not_active(self):
        name = register_flash_attention()
        assert name in torch.nn.attention.list_flash_attention_impls()
        assert torch.nn.attention.current_flash_attention_impl() != name

    @pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA it can be activated")
    @pytest.mark.skipif(torch.version.cuda is not None, reason="such a torch has the operator")
    def test_needs_cuda(self):
        name = register_flash_attention()
        with pytest.raises(Unsupported, match="no flash attention for CUDA"):
            torch.nn.attention.activate_flash_attention_impl(name)

    def test_dense(self, x):
        q, k, v, dout = (torch.randn_like(x) for _ in range(4))
        out, lse, *rest = flash.sdpa_forward(q, k, v, is_causal=True, scale=0.2)
        assert len(rest) == 7
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        expected = ORIGINAL(*inputs, is_causal=True, scale=0.2)
        expected.backward(dout)
        torch.testing.assert_close(out, expected)
        gradients = flash.sdpa_backward(
            dout, q, k, v, out, lse, None, None, 20, 20, 0.0, True, *rest[4:6], scale=0.2
        )
        for ours, given in zip(gradients, inputs, strict=True):
            torch.testing.assert_close(ours, given.grad)

    def test_results_look_as_torch_says(self, x):
        """Compiled models are traced with torch's description of them."""
        described = torch.ops.aten._scaled_dot_product_flash_attention(
            *[x.half().to("meta")] * 3, 0.0, True
        )
        made = flash.sdpa_forward(*[x.half()] * 3, is_causal=True)
        look, expected = (
            [(y.shape, y.dtype) if isinstance(y, torch.Tensor) else y for y in results]
            for results in (made, described)
        )
        assert look == expected

    @pytest.mark.parametrize("packed", [False, True])
    def test_windows(self, packed):
        generator = torch.Generator().manual_seed(0)
        q, k, v, dout = torch.randn(4, 1, 30, 2, 8, generator=generator)
        mask = torch.ones(30, 30).tril().triu(-6).bool()
        offsets = None
        if packed:
            q, k, v, dout = (t[0] for t in (q, k, v, dout))
            offsets = torch.tensor([0, 11, 30], dtype=torch.int32)
            document = (torch.arange(30) >= 11).int()
            mask &= document[:, None] == document
        window = {"window_size_left": 6, "window_size_right": 0}
        out, lse, rng, unused, _ = flash.flash_forward(
            q, k, v, offsets, offsets, 30, 30, 0.0, False, False, **window
        )
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        expected = ORIGINAL(*(t.transpose(-2, -3) for t in inputs), mask).transpose(-2, -3)
        expected.backward(dout)
        torch.testing.assert_close(out, expected)
        gradients = flash.flash_backward(
            dout, q, k, v, out, lse, offsets, offsets, 30, 30, 0.0, False, rng, unused, **window
        )
        for ours, given in zip(gradients, inputs, strict=True):
            torch.testing.assert_close(ours, given.grad)

    def test_through_the_dispatcher(self, x):
        """As torch calls them, with torch's derivative formulas above; here under the CPU's key."""
        library = torch.library.Library("aten", "IMPL")
        for name, route in flash._ROUTES.items():
            library.impl(name, flash._routed(route, None), "CPU", with_keyset=True)
        inputs = [torch.randn_like(x).requires_grad_() for _ in range(3)]
        try:
            out = torch.ops.aten._scaled_dot_product_flash_attention(*inputs, 0.0, True)[0]
            gradients = torch.autograd.grad(out.sum(), inputs)
        finally:
            library._destroy()
        expected = ORIGINAL(*inputs, is_causal=True)
        torch.testing.assert_close(out, expected)
        for ours, theirs in zip(
            gradients, torch.autograd.grad(expected.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(ours, theirs)

    def test_what_torch_should_compute(self, x):
        assert flash.sdpa_forward(x, x, x, 0.1) is None
        assert flash.sdpa_forward(x, x, x, return_debug_mask=True) is None
        sizes = (None, None, 4, 4)
        assert flash.flash_forward(x, x, x, *sizes, 0.1, False, False) is None
        slopes = {"alibi_slopes": torch.zeros(4)}
        assert flash.flash_forward(x, x, x, *sizes, 0.0, False, False, **slopes) is None
        packed = (torch.randn(20, 2, 8),) * 3
        dense = ((None, None, 20, 20), 0.0, False, False)
        assert flash.flash_forward_into(packed[0], *packed, *dense[0], *dense[1:]) is None


class TestVarlen:
    """`torch.nn.attention.varlen` through the dispatcher, here under the CPU's key."""

    OFFSETS = (0, 3, 4, 20)
    USED = (9, 30, 17)

    @pytest.fixture(autouse=True)
    def routed(self):
        self.varlen = pytest.importorskip("torch.nn.attention.varlen")
        library = torch.library.Library("aten", "IMPL")
        for name, route in flash._ROUTES.items():
            if hasattr(torch.ops.aten, name):
                library.impl(name, flash._routed(route, None), "CPU", with_keyset=True)
        yield
        library._destroy()

    def pages(self):
        generator = torch.Generator().manual_seed(1)
        q = torch.randn(20, 4, 16, generator=generator)
        pages = torch.randn(2, 8, 16, 2, 16, generator=generator)
        table = torch.tensor([[5, -1], [2, 7], [0, 3]], dtype=torch.int32)
        return q, pages, table

    def expected(self, q, pages, table, left, right):
        """Each sequence by itself, with the keys of its pages side by side."""
        results = []
        for b, used in enumerate(self.USED):
            rows = q[self.OFFSETS[b] : self.OFFSETS[b + 1]]
            chosen = table[b, : -(-used // 16)].long()
            k, v = (x[chosen].flatten(0, 1)[:used].repeat_interleave(2, 1) for x in pages)
            p = torch.arange(len(rows))[:, None] + used - len(rows)
            j = torch.arange(used)
            seen = (j >= p - left) & (j <= p + right)
            scores = torch.einsum("qhd,khd->hqk", rows, k) / 4
            scores = scores.masked_fill(~seen, -torch.inf)
            results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(results)

    @pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
    @pytest.mark.parametrize("into", [False, True])
    def test_pages(self, window, into):
        q, pages, table = self.pages()
        options = {"enable_gqa": True, "block_table": table, "window_size": window}
        options["seqused_k"] = torch.tensor(self.USED, dtype=torch.int32)
        arguments = (q, *pages, torch.tensor(self.OFFSETS, dtype=torch.int32), None, 16, 32)
        out = torch.full_like(q, torch.nan)
        if into:
            if not hasattr(self.varlen, "varlen_attn_out"):
                pytest.skip("this torch has no varlen_attn_out")
            self.varlen.varlen_attn_out(out, *arguments, **options)
        else:
            out = self.varlen.varlen_attn(*arguments, **options)
        sides = [100 if side < 0 else side for side in window]
        torch.testing.assert_close(out, self.expected(q, pages, table, *sides))

    def test_used_lengths_of_packed_keys(self):
        q, pages, table = self.pages()
        packed = [x[torch.tensor([5, 1, 2, 7, 0, 3])].flatten(0, 1) for x in pages]
        offsets = torch.tensor([0, 32, 64, 96], dtype=torch.int32)
        out = self.varlen.varlen_attn(
            q, *packed, torch.tensor(self.OFFSETS, dtype=torch.int32), offsets, 16, 32,
            enable_gqa=True, seqused_k=torch.tensor(self.USED, dtype=torch.int32),
            window_size=(-1, 0),
        )  # fmt: skip
        torch.testing.assert_close(out, self.expected(q, pages, table, 100, 0))

    def test_one_split_asks_for_results_that_do_not_depend_on_the_batch(self, monkeypatch):
        asked = []
        original = flash.attention_varlen

        def watched(*args, **options):
            asked.append(options["batch_invariant"])
            return original(*args, **options)

        monkeypatch.setattr(flash, "attention_varlen", watched)
        q, pages, _ = self.pages()
        k, v = (x.flatten(0, 1)[:20] for x in pages)
        offsets = torch.tensor(self.OFFSETS, dtype=torch.int32)
        arguments = (q, k, v, offsets, offsets, 16, 16)
        plain = self.varlen.varlen_attn(*arguments, enable_gqa=True)
        assert asked == []
        one = self.varlen.varlen_attn(*arguments, enable_gqa=True, num_splits=1)
        assert asked == [True]
        torch.testing.assert_close(one, plain)
