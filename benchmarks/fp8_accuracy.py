"""How far the fp8 attention of this package and of others is from fp64, measured on a GPU.

    python benchmarks/fp8_accuracy.py            # measures, writes benchmarks/fp8_accuracy.json
    python benchmarks/fp8_accuracy.py --write    # puts that file's table into docs/numerics.md

Inputs are those of `blackwell_sparsek.testing.fp8_accuracy`, here with 4096 tokens; the error is
the norm of the difference from fp64 on the tensors before rounding, over the norm of the result.
FlashAttention 3 has a scale for each head, cuDNN one for each tensor, which is all that they take.
A library that is not there, or refuses the call, is left out with the reason.
"""

import argparse
import json
import pathlib
from collections.abc import Callable

import torch

import blackwell_sparsek as bsk
from blackwell_sparsek.bench.suites.attention_peers import call_by_name, fa3_operator, fa3_options
from blackwell_sparsek.testing.fp8_accuracy import INPUTS, Inputs

ROOT = pathlib.Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs" / "numerics.md", ROOT / "benchmarks" / "fp8_accuracy.json"
BEGIN, END = "<!-- fp8 accuracy on a GPU: begin -->", "<!-- fp8 accuracy on a GPU: end -->"
HEADS, TOKENS, DIM, SEED = 2, 4096, 128, 20261116


def exact(inputs: Inputs) -> torch.Tensor:
    """Causal attention in fp64, by the oracle."""
    return bsk.attention(*(x.double() for x in inputs), causal=True, impl="reference")


def in_16_bits(inputs: Inputs) -> torch.Tensor:
    """`bsk.attention` without fp8."""
    return bsk.attention(*inputs, causal=True)


def ours(**options: bool) -> Callable[[Inputs], torch.Tensor]:
    """`bsk.fp8.attention` with these options."""
    return lambda inputs: bsk.fp8.attention(*inputs, causal=True, **options)


def per_tensor(inputs: Inputs) -> torch.Tensor:
    """`bsk.attention` over tensors that have one scale each, without smoothing."""
    made = [bsk.fp8.quantize(x, "tensor") for x in inputs]
    names = ("q_descale", "k_descale", "v_descale")
    scales = {name: x.descale.reshape(1) for name, x in zip(names, made, strict=True)}
    return bsk.attention(*(x.data for x in made), causal=True, **scales)


def flash_attention_3(inputs: Inputs) -> torch.Tensor:
    """vLLM's build of it, with a scale for each head."""
    made = [bsk.fp8.quantize(x, "head") for x in inputs]
    starts = torch.tensor([0, TOKENS], dtype=torch.int32, device=inputs.q.device)
    values = {
        name: x.data[0].transpose(0, 1).contiguous() for name, x in zip("qkv", made, strict=True)
    }
    values |= {f"{name}_descale": x.descale for name, x in zip("qkv", made, strict=True)}
    values |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "num_splits": 1}
    values |= {"max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}
    out = call_by_name(fa3_operator(), values | fa3_options(DIM, True))
    return out[0].view(1, TOKENS, HEADS, DIM).transpose(1, 2)


def cudnn_fp8(inputs: Inputs) -> torch.Tensor:
    """cuDNN through its front end, with a scale for each tensor; weights have the scale 256.

    It writes e4m3, here with the scale that the largest of the true results asks for.
    """
    import cudnn

    device = inputs.q.device
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32,
        handle=cudnn.create_handle(),
    )  # fmt: skip
    made = {name: bsk.fp8.quantize(x, "tensor") for name, x in zip("qkv", inputs, strict=True)}
    one = torch.ones(1, 1, 1, 1, device=device)
    largest = in_16_bits(inputs).abs().max().float()
    numbers = {f"descale_{name}": x.descale.reshape(1, 1, 1, 1) for name, x in made.items()}
    numbers |= {"scale_s": 256 * one, "descale_s": one / 256, "scale_o": 448 / largest * one}
    data = {name: x.data.contiguous() for name, x in made.items()}
    values = {}
    for name, x in {**data, **numbers}.items():
        kind = fp8 if name in data else fp32
        shape = {"dim": list(x.shape), "stride": list(x.stride()), "data_type": kind}
        values[name] = graph.tensor(name=name, **shape)
    out, _, amax_s, amax_o = graph.sdpa_fp8(
        **values, attn_scale=DIM**-0.5, use_causal_mask=True, generate_stats=False
    )
    result = torch.empty(inputs.q.shape, dtype=torch.float8_e4m3fn, device=device)
    out.set_output(True).set_dim(list(result.shape)).set_stride(list(result.stride()))
    out.set_data_type(fp8)
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    places = {values[name]: x for name, x in {**data, **numbers}.items()}
    found = {amax_s: torch.empty_like(one), amax_o: torch.empty_like(one)}
    graph.execute({**places, **found, out: result}, workspace)
    return result.float() / numbers["scale_o"]


LIBRARIES: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "`bsk.attention`, bf16": in_16_bits,
    "`bsk.attention`, a scale for each tensor": per_tensor,
    "`bsk.fp8.attention`": ours(),
    "`bsk.fp8.attention`, rotated": ours(hadamard=True),
    "FlashAttention 3, a scale for each head": flash_attention_3,
    "cuDNN, a scale for each tensor": cudnn_fp8,
}


def measure() -> None:
    """Write the errors in percent, or the reason why a library has none."""
    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = {name: make(HEADS, TOKENS, DIM) for name, make in INPUTS.items()}
    errors: dict[str, dict[str, float] | str] = {}
    for name, attend in LIBRARIES.items():
        found = {}
        try:
            for kind, inputs in made.items():
                inputs = Inputs(*(x.to(device) for x in inputs))
                want = exact(inputs)
                found[kind] = 100 * float((attend(inputs).double() - want).norm() / want.norm())
            errors[name] = found
        except Exception as error:  # any failure of a library is told, not raised
            errors[name] = f"{type(error).__name__}: {str(error)[:200]}"
        print(name, errors[name])
    device_name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    report = {"device": device_name, "torch": torch.__version__, "errors": errors}
    MEASURED.write_text(json.dumps(report, indent=1) + "\n")


def table() -> str:
    """The measured errors as markdown."""
    report = json.loads(MEASURED.read_text())
    where = f"{report['device']}, torch {report['torch']}"
    lines = [f"| {where} | {' | '.join(INPUTS)} |", "|---" * (len(INPUTS) + 1) + "|"]
    for name, found in report["errors"].items():
        cells = (f"{found[kind]:.2f}" for kind in INPUTS) if isinstance(found, dict) else [found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or write the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    if not parser.parse_args().write:
        measure()
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
