"""Runs what JAX would launch on a GPU in Triton's interpreter, on tensors of torch."""

import sys
from dataclasses import replace

import ml_dtypes
import numpy as np
import torch

import jax
from blackwell_sparsek.core.target import Arch
from blackwell_sparsek.jax import kernel_calls
from blackwell_sparsek.launch import description

H200 = Arch("gpu", 90, 132, 232448, False)
# Few SMs, so that few programs share the work of decoding.
INTERPRETED = replace(H200, num_sms=16)
# The functions of these names hide the modules.
MODULES = ["attention", "decode", "matmul"]


def as_tensor(x):
    x = np.array(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype == np.uint32:
        # words of bits, as `flat_kernels` casts their pointer
        x = x.view(np.int32)
    return torch.from_numpy(x)


def as_numpy(x):
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def poisoned(spec):
    """Memory as a launch finds it: NaN, or zeros where the description asks for them."""
    x = as_tensor(np.zeros(spec.memory, spec.dtype))
    if spec.role != "zeroed" and x.is_floating_point():
        x.fill_(float("nan"))
    return x


def with_tensors(value, tensors):
    """Arguments with tensors in place of descriptions, in the layout that these say."""
    if isinstance(value, description.ArraySpec):
        return tensors[value.name].as_strided(value.shape, value.strides, value.offset)
    if isinstance(value, tuple):
        items = [with_tensors(x, tensors) for x in value]
        return type(value)(*items)
    return value


def interpret(launch, used, given, written, arch, ran=None):
    """Stands in for `kernel_calls.launch_kernel`."""

    def on_host(*arrays):
        if ran is not None:
            ran.append(launch.programs)
        tensors = {n: as_tensor(x) for n, x in zip(given, arrays, strict=True)}
        tensors |= {n: poisoned(used[n]) for n in written if n not in given}
        args = tuple(with_tensors(x, tensors) for x in launch.args)
        planned = description.KernelLaunch(launch.kernel, launch.programs, args, launch.options)
        description.run(planned, next(iter(tensors.values())))
        return [as_numpy(tensors[n]) for n in written]

    shapes = [jax.ShapeDtypeStruct(used[n].memory, used[n].dtype) for n in written]
    return jax.pure_callback(on_host, shapes, *given.values())


def interpret_kernels(monkeypatch, launched=None, ran=None):
    """Let `impl="triton"` run on a CPU.

    The list `launched` gets the launches that are traced, `ran` the programs of those that ran.
    """

    def note(launch, *rest):
        if launched is not None:
            launched.append(launch)
        return interpret(launch, *rest, ran)

    monkeypatch.setattr(kernel_calls, "launch_kernel", note)
    for name in MODULES:
        module = sys.modules[f"blackwell_sparsek.jax.{name}"]
        monkeypatch.setattr(module, "why_no_kernels", lambda device, dtype: None)
        monkeypatch.setattr(module, "arch_of", lambda device: INTERPRETED)
