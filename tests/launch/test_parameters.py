"""The parameters of compiled kernels, and what their PTX declares."""

from types import SimpleNamespace

import pytest

from blackwell_sparsek.launch import parameters
from blackwell_sparsek.launch.parameters import (
    MapParameters,
    UnknownParameters,
    declared_sizes,
    parameters_of,
)

PTX = """
.version 8.7
.target sm_90a
	// .globl	k
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u32 k_param_1,
	.param .u32 k_param_2,
	.param .u64 k_param_3,
	.param .u64 k_param_4,
	.param .u64 .ptr .global .align 1 k_param_5,
	.param .f32 k_param_6,
	.param .u8 k_param_7,
	.param .u64 .ptr .global .align 1 k_param_8,
	.param .u64 .ptr .global .align 1 k_param_9
)
.reqntid 128
{
	ld.param.b64 	%rd1, [k_param_5];
}
"""
SIZES = [128, 4, 4, 8, 8, 8, 4, 1, 8, 8]


@pytest.fixture(autouse=True)
def known_release(monkeypatch):
    monkeypatch.setattr(parameters, "why_no_launcher", lambda: None)


def compiled(ptx=PTX, signature=None, **changed):
    metadata = {
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_ctas": 1,
        "tensordesc_meta": [
            {"block_size": [64, 64], "swizzle": 3, "elem_type": 10, "fp4_padded": False}
        ],
    }
    signature = signature or {
        "x": "tensordesc<bf16[64, 64]>",
        "rest": ("*i32", ("fp32", "constexpr")),
        "flag": "u1",
        "C": "constexpr",
    }
    return SimpleNamespace(
        metadata=SimpleNamespace(**(metadata | changed)),
        src=SimpleNamespace(signature=signature),
        asm={"ptx": ptx},
    )


def test_sizes_that_ptx_declares():
    assert declared_sizes(PTX) == SIZES
    with pytest.raises(UnknownParameters, match="no entry"):
        declared_sizes(".version 8.7")


def test_tuples_are_flattened_constants_left_out_and_descriptors_expanded():
    found = parameters_of(compiled())
    assert found.formats == ("Q", "i4x", "i4x", "q", "q", "Q", "f4x", "B7x", "Q", "Q")
    assert found.maps == (MapParameters(0, (64, 64), 3),)
    assert found.pointers == (5,) and found.own == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"global_scratch_size": 64}, "workspace"),
        ({"profile_scratch_size": 64}, "workspace"),
        ({"num_ctas": 2}, "compiled for clusters by Triton"),
        ({"tensordesc_meta": []}, "no tiled tensor map"),
        ({"ptx": PTX.replace(".param .u32 k_param_2,", "")}, r"declares .* expected"),
        ({"ptx": PTX.replace(".u32 k_param_2", ".u64 k_param_2")}, r"declares .* expected"),
        ({"signature": {"x": "bf16"}}, "bf16 cannot be packed"),
    ],
)
def test_what_does_not_agree_with_the_kernel_is_refused(change, reason):
    with pytest.raises(UnknownParameters, match=reason):
        parameters_of(compiled(**change))


def test_an_unknown_release_is_refused(monkeypatch):
    monkeypatch.setattr(parameters, "why_no_launcher", lambda: "known for others")
    with pytest.raises(UnknownParameters, match="known for others"):
        parameters_of(compiled())
