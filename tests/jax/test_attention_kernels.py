"""`impl="triton"` of attention in JAX: the kernels of torch, launched with what JAX plans.

Without a GPU the launches run in Triton's interpreter, and are compared with those of torch.
"""

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="blackwell_sparsek.jax needs jax, which is not installed")

import jax.numpy as jnp  # noqa: E402

import blackwell_sparsek as bsk  # noqa: E402
import blackwell_sparsek.jax as bsk_jax  # noqa: E402
from blackwell_sparsek import InvalidInput, Unsupported  # noqa: E402
from blackwell_sparsek.calls.attention import (  # noqa: E402
    AttentionCall,
    AttnGradients,
    AttnSpec,
    BackwardCall,
)
from blackwell_sparsek.jax import attention_triton  # noqa: E402
from blackwell_sparsek.masks.band import Band  # noqa: E402
from blackwell_sparsek.testing.captured_launches import captured_launches  # noqa: E402

from . import oracle  # noqa: E402
from .kernels import H200, interpret_kernels  # noqa: E402
from .test_attention import GOOD, check, normal, qkv, random_elements  # noqa: E402

ON_CPU = not torch.cuda.is_available()
interpreted = pytest.mark.skipif(not ON_CPU, reason="kernels are compiled on a GPU")


@interpreted
@pytest.mark.parametrize(
    ("sq", "sk", "options", "shown"),
    [
        (33, 65, {"causal": True}, {"causal": True}),
        (17, 40, {"window": (3, 9)}, {"window": (3, 9)}),
    ],
)
def test_bands(monkeypatch, sq, sk, options, shown):
    interpret_kernels(monkeypatch)
    visible = oracle.visible_elements(sq, sk, **shown)
    check(qkv(sq, sk), visible, {"impl": "triton", **options})


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(monkeypatch, dtype):
    interpret_kernels(monkeypatch)
    tensors = qkv(20, 37, dtype=dtype, dims=(24, 40))
    check(tensors, np.ones((20, 37), bool), {"impl": "triton"})


@interpreted
@pytest.mark.parametrize("masks", [(2, 1), (1, 4)])
def test_block_masks_broadcast(monkeypatch, masks):
    interpret_kernels(monkeypatch)
    visible = random_elements((*masks, 40, 56))
    mask = bsk_jax.BlockMask.from_element_mask(visible, 16)
    check(qkv(40, 56), visible, {"block_mask": mask, "impl": "triton"})


@interpreted
def test_all_options_together(monkeypatch):
    interpret_kernels(monkeypatch)
    elements = random_elements((2, 4, 40, 56))
    visible = elements & oracle.visible_elements(40, 56, window=(30, 2))
    tensors, (sinks,) = qkv(40, 56, dims=(16, 8)), normal(5, (4,))
    mask = bsk_jax.BlockMask.from_element_mask(elements, (16, 32))
    options = {"block_mask": mask, "window": (30, 2), "scale": 0.7, "softcap": 3.0}
    formula = {"scale": 0.7, "softcap": 3.0, "sinks": sinks}
    check(tensors, visible, {"impl": "triton", **options}, formula)


@interpreted
@pytest.mark.parametrize(("sq", "sk", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_empty(monkeypatch, sq, sk, batch):
    interpret_kernels(monkeypatch)
    tensors = qkv(sq, sk, batch=batch)
    out, lse = bsk_jax.attention(*tensors, return_lse=True, impl="triton")
    assert out.shape == (batch, 4, sq, 16) and not np.any(out) and np.all(np.isneginf(lse))
    loss = lambda *x: bsk_jax.attention(*x, impl="triton").sum()  # noqa: E731
    assert not any(map(np.any, jax.grad(loss, (0, 1, 2))(*tensors)))


@interpreted
def test_a_mask_without_blocks(monkeypatch):
    interpret_kernels(monkeypatch)
    tensors, mask = (
        qkv(20, 20),
        bsk_jax.BlockMask.from_dense(np.zeros((2, 2), bool), (16, 16), (20, 20)),
    )
    loss = lambda *x: bsk_jax.attention(*x, block_mask=mask, impl="triton").sum()  # noqa: E731
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(*tensors)
    assert value == 0 and not any(map(np.any, gradients))


@interpreted
def test_vmap(monkeypatch):
    interpret_kernels(monkeypatch)
    q, k, v = qkv(18, 20, batch=1)
    arrays = (jnp.stack([q, 2 * q]), k, jnp.stack([v, -v]))

    @jax.jit
    def gradients(*arrays):
        def loss(q, k, v):
            return bsk_jax.attention(q, k, v, causal=True, impl="triton").sum()

        return jax.vmap(jax.grad(loss, (0, 1, 2)), (0, None, 0))(*arrays)

    queries, _, values = arrays
    found, visible = gradients(*arrays), oracle.visible_elements(18, 20, causal=True)
    dout, dlse = np.ones(q.shape), np.zeros(q.shape[:3])
    for entry in range(2):
        given = (queries[entry], k, values[entry], visible, dout, dlse)
        exact, plain = (oracle.gradients(*given, to=to) for to in (oracle.as64, oracle.as32))
        for ours, right, theirs in zip(found, exact, plain, strict=False):
            oracle.within_budget(ours[entry], right, theirs)


def as_noted(value):
    """An argument with dtypes for arrays; their strides are arguments of their own."""
    if hasattr(value, "shape"):
        # words of bits are int32 in torch and uint32 in JAX
        return str(value.dtype).removeprefix("torch.").removeprefix("u")
    return tuple(map(as_noted, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_jax_plans_what_torch_launches(masked, sinks):
    """Kernel, arguments in order, constants and options are those of torch's launcher."""
    shape_q, shape_kv = (2, 8, 300, 64), (2, 2, 500, 64)
    block_mask = None
    if masked:
        block_mask = bsk.BlockMask.from_dense(torch.rand(1, 8, 5, 4) < 0.6, (64, 128), (300, 500))
    mask = None if block_mask is None else bsk_jax.BlockMask.from_torch(block_mask)
    spec = AttnSpec(0.125, Band(None, 0), block_mask, 2.0, max_q=300, max_k=500)
    if sinks:
        spec = spec._replace(sinks=torch.zeros(8))
    with captured_launches(90) as launches:
        q, out, dout = (torch.zeros(shape_q, dtype=torch.bfloat16) for _ in range(3))
        k, v = (torch.zeros(shape_kv, dtype=torch.bfloat16) for _ in range(2))
        lse = torch.zeros(shape_q[:3])
        call = AttentionCall(q, k, v, spec)
        from blackwell_sparsek.attention.triton.backward import backward
        from blackwell_sparsek.attention.triton.forward import forward

        forward(call)
        wanted = AttnGradients(*map(torch.zeros_like, (q, k, v)), spec.sinks)
        backward(BackwardCall(call, dout, lse, out, lse, wanted))

    options = attention_triton.KernelOptions(0.125, 2.0, Band(None, 0), H200, "", "ieee")
    arrays = attention_triton.AttentionArrays()
    inputs = [jnp.zeros(s, jnp.bfloat16) for s in (shape_q, shape_kv, shape_kv)]
    described = arrays.add_call(
        options, (*inputs, jnp.zeros(8) if sinks else None, mask), transposed=True
    )
    rows = jnp.zeros(shape_q[:3])
    results = [
        arrays.add(n, x) for n, x in zip("olde", (inputs[0], rows, inputs[0], rows), strict=True)
    ]
    planned = attention_triton.plan_forward(options, described, mask)
    planned += attention_triton.plan_backward(options, described, results, mask)
    assert [x.kernel for x in planned] == [x.kernel for x in launches]
    assert [x.options for x in planned] == [x.options for x in launches]
    for ours, theirs in zip(planned, launches, strict=True):
        found, right = (
            dict(zip(x.kernel.arg_names, map(as_noted, x.args), strict=True))
            for x in (ours, theirs)
        )
        if masked and "mask_head_step" in right:
            # the lists of each head end with a row for what fills them up
            right["mask_head_step"] += 1
        assert found == right


def test_the_lists_are_those_of_torch():
    elements = torch.rand(2, 3, 70, 100) < torch.rand(2, 3, 70, 100).round() - 0.2
    elements[..., 16:32, :48] = True
    elements[1, 1] = False
    theirs = bsk.BlockMask.from_element_mask(elements, (16, 32))
    ours = bsk_jax.BlockMask.from_torch(theirs)
    for made, right in (
        (attention_triton.forward_lists(ours), theirs.forward),
        (attention_triton.transposed_lists(ours), theirs.transposed),
    ):
        masks, right = 6, type(right)(*(x.numpy() for x in right))
        # both bounds of the rows are one array
        indptr, partial_end = np.split(np.asarray(made.indptr), 2)
        assert made.partial_end is None
        made = made._replace(indptr=indptr, partial_end=partial_end)
        height = right.partial_end.size // masks
        for row in range(masks * height):
            # the lists of each mask end with a row for what fills them up
            mine = row + row // height
            begin, end = made.indptr[mine], made.indptr[mine + 1]
            first, last = right.indptr[row], right.indptr[row + 1]
            assert made.partial_end[mine] - begin == right.partial_end[row] - first
            for name in ("indices", "bits_id"):
                listed = getattr(right, name)[first:last]
                np.testing.assert_array_equal(np.asarray(getattr(made, name))[begin:end], listed)


def test_explicit_impl_says_why_not():
    arrays = [jnp.zeros(shape) for shape in GOOD.values()]
    with pytest.raises(
        InvalidInput, match="impl is unknown; expected one of auto, jnp, sm90, triton"
    ):
        bsk_jax.attention(*arrays, impl="cuda")
    if jax.default_backend() == "cpu":
        text = "attention: impl='triton' needs a CUDA GPU, the arrays are on cpu"
        with pytest.raises(Unsupported, match=text):
            bsk_jax.attention(*arrays, impl="triton")


@interpreted
def test_explain_says_why_not_by_itself(monkeypatch):
    interpret_kernels(monkeypatch)
    arrays = [jnp.zeros(shape) for shape in GOOD.values()]
    for impl, why in (("auto", "float32 has no 16-bit WGMMA"), ("triton", "was not asked for")):
        explained = bsk_jax.explain(bsk_jax.attention, *arrays, impl=impl)
        assert explained.chosen == "triton"
        assert explained.reasons == {"sm90": why, "jnp": "comes after triton"}
    mask = bsk_jax.BlockMask.from_dense(np.ones((1, 1), bool), 8)
    explained = bsk_jax.explain(bsk_jax.attention, *arrays, block_mask=mask)
    assert explained.chosen == "jnp" and "block sides among 16" in explained.reasons["triton"]
    with pytest.raises(Unsupported, match=r"block sides among 16, .*, got \(8, 8\)"):
        bsk_jax.attention(*arrays, block_mask=mask, impl="triton")
