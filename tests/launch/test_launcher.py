"""Launches and their repetition, with a fake compiler and a fake GPU."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek.core import compat
from blackwell_sparsek.launch import templates, workspace
from blackwell_sparsek.launch.launcher import cdiv, launch, on_device_of
from blackwell_sparsek.launch.recording import recording
from blackwell_sparsek.launch.templates import RecordedLaunches
from blackwell_sparsek.launch.workspace import scratch

CPU = torch.device("cpu")
# grid, 1, 1, stream, and what `compat.kernel_launcher` puts before a kernel's own arguments
HEAD = 4 + 9
STREAM = 77


@dataclass
class Descriptor:
    base: torch.Tensor | None
    block: int = 64


class Kernel:
    """Compiles to something that notes what it is launched with."""

    def __init__(self, interpreted=False, descriptors=()):
        self.calls = []
        self.repeated = []
        launcher, tensordesc_meta = (lambda *args: self.repeated.append(list(args))), descriptors

        def wrapper(*args):
            return launcher(tensordesc_meta, *args)

        run = SimpleNamespace(
            launch=wrapper,
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )
        compiled = SimpleNamespace(run=run, function=7, packed_metadata="meta")
        self.compiled = None if interpreted else compiled

    def __getitem__(self, grid):
        def call(*args, **options):
            self.calls.append((grid, args, options))
            return self.compiled

        return call


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    state = SimpleNamespace(capturing=False, maps=[])

    def tensor_map(descriptor, meta):
        state.maps.append((descriptor.base.data_ptr(), meta))
        return [f"map of {descriptor.base.data_ptr()}", "size", "stride"]

    # the fake kernels have the launcher of this release, whichever is installed
    monkeypatch.setattr(compat, "triton_version", lambda: compat.LAUNCHER_TRITON)
    pytest.importorskip("triton")
    monkeypatch.setattr(templates, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(templates, "tensor_map", tensor_map)
    monkeypatch.setattr(workspace, "_zeros", {})
    monkeypatch.setattr(workspace, "_kept", {})
    return state


def record(kernel, args, roles, grid=5):
    with recording() as made:
        launch(kernel, grid, args)
    return RecordedLaunches.make(made, roles)


def at(*tensors):
    """Addresses, as a repetition takes them."""
    return [0 if x is None else x.data_ptr() for x in tensors]


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2)])
def test_cdiv(a, b, expected):
    assert cdiv(a, b) == expected


def test_a_cpu_tensor_needs_no_device():
    with on_device_of(torch.zeros(1)) as nothing:
        assert nothing is None


def test_launching_passes_grid_arguments_and_options():
    kernel = Kernel()
    x = torch.zeros(2)
    assert launch(kernel, 3, [x, 8], num_warps=4) is None
    ((grid, args, options),) = kernel.calls
    assert grid == (3,) and args[0] is x and args[1] == 8 and options == {"num_warps": 4}


def test_clusters_are_made_of_a_kernel_that_knows_nothing_of_them():
    kernel = Kernel()
    kernel.compiled.packed_metadata = (12, 1, 4096)
    kernel.warmup = lambda *args, grid, **options: kernel.compiled
    launch(kernel, 66, (1,), cluster=2, num_warps=4)
    assert kernel.compiled.packed_metadata == (12, 2, 4096)
    assert kernel.calls == [((66,), (1,), {"num_warps": 4})]


def test_only_what_happens_inside_is_recorded():
    kernel, x = Kernel(), torch.zeros(2)
    launch(kernel, 1, [x])
    with recording() as made:
        launch(kernel, 2, [x])
        scratch((2, 3), torch.float32, CPU)
        with recording() as inner:
            launch(kernel, 3, [x])
    launch(kernel, 4, [x])
    assert [step.grid for step in made.launches] == [2]
    assert [step.grid for step in inner.launches] == [3]
    assert len(made.scratch) == 1 and inner.scratch == []


def test_a_recording_ends_with_an_error():
    with pytest.raises(RuntimeError, match="stop"), recording() as made:
        raise RuntimeError("stop")
    launch(Kernel(), 1, [torch.zeros(1)])
    assert made.launches == []


def test_scratch():
    assert scratch([2, 3], torch.float16, CPU).shape == (2, 3)
    counters = scratch((4,), torch.int32, CPU, zero=True)
    assert counters.tolist() == [0, 0, 0, 0]
    with pytest.raises(AssertionError):
        scratch((4,), torch.float32, CPU, zero=True)


def test_a_repetition_has_the_new_tensors_and_the_old_rest():
    kernel = Kernel()
    x, out, table = torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    recorded = record(kernel, [out, 16, x, table, "const"], (out, x, None))
    new_x, new_out = torch.zeros(4), torch.zeros(4)
    recorded.repeat(at(new_out, new_x, None))
    (args,) = kernel.repeated
    assert args[:4] == [5, 1, 1, STREAM]
    assert args[4:HEAD] == [7, False, False, None, None, "meta", None, None, None]
    # the table had no role: it is part of the recording, by its address
    assert args[HEAD:] == [new_out.data_ptr(), 16, new_x.data_ptr(), table.data_ptr(), "const"]
    assert len(kernel.calls) == 1


def test_a_recording_keeps_alive_what_has_no_role_and_nothing_else():
    import gc
    import weakref

    kernel = Kernel()
    x, table = torch.zeros(4), torch.zeros(4)
    alive = weakref.ref(x), weakref.ref(table)
    recorded = record(kernel, [x, table], (x,))
    kernel.calls.clear()
    del x, table
    gc.collect()
    assert alive[0]() is None and alive[1]() is not None
    del recorded
    gc.collect()
    assert alive[1]() is None


def test_tensors_in_tuples_are_found():
    kernel = Kernel()
    x, y, table = (torch.zeros(4) for _ in range(3))
    recorded = record(kernel, [(x, 3, table), y], (x, y))
    new_x, new_y = torch.zeros(4), torch.zeros(4)
    recorded.repeat(at(new_x, new_y))
    recorded.repeat(at(new_y, new_x))
    first, second = (args[HEAD:] for args in kernel.repeated)
    assert first == [(new_x.data_ptr(), 3, table.data_ptr()), new_y.data_ptr()]
    assert second == [(new_y.data_ptr(), 3, table.data_ptr()), new_x.data_ptr()]


def test_tensors_in_tuples_of_tuples_are_found():
    kernel = Kernel()
    x, y, table = (torch.zeros(4) for _ in range(3))
    recorded = record(kernel, [(3, (x, (y, table)), (1, 2))], (x, y))
    new_x, new_y = torch.zeros(4), torch.zeros(4)
    recorded.repeat(at(new_x, new_y))
    (args,) = kernel.repeated
    inner = (new_y.data_ptr(), table.data_ptr())
    assert args[HEAD:] == [(3, (new_x.data_ptr(), inner), (1, 2))]


def test_no_recording_of_descriptors_in_tuples():
    x = torch.zeros(4)
    kernel = Kernel(descriptors=["meta"])
    assert record(kernel, [(1, (Descriptor(x),))], (x,)) is None


def test_descriptors_are_made_anew_for_new_addresses_only(fake_gpu):
    kernel = Kernel(descriptors=["meta of x"])
    x, out = torch.zeros(4), torch.zeros(4)
    recorded = record(kernel, [Descriptor(x), out], (x, out))
    assert fake_gpu.maps == [(x.data_ptr(), "meta of x")]
    others = [torch.zeros(4) for _ in range(2)]
    for other in (others[0], others[1], others[0]):
        recorded.repeat(at(other, out))
    assert fake_gpu.maps[1:] == [(other.data_ptr(), "meta of x") for other in others]
    rest = ["size", "stride", out.data_ptr()]
    expected = [[f"map of {others[i].data_ptr()}", *rest] for i in (0, 1, 0)]
    assert [args[HEAD:] for args in kernel.repeated] == expected


def test_few_tensor_maps_are_kept(fake_gpu):
    kernel = Kernel(descriptors=["meta"])
    x = torch.zeros(4)
    recorded = record(kernel, [Descriptor(x)], (x,))
    tensors = [torch.zeros(4) for _ in range(templates.MAX_TENSOR_MAPS + 1)]
    for tensor in tensors:
        recorded.repeat(at(tensor))
    made = len(fake_gpu.maps)
    recorded.repeat(at(tensors[-1]))
    assert len(fake_gpu.maps) == made
    recorded.repeat(at(tensors[0]))
    assert len(fake_gpu.maps) == made + 1


def scratched(kernel, shape=(8,), launches=1):
    """A recording of launches with two scratch tensors, the second of `shape`."""
    x = torch.zeros(4)
    with recording() as made:
        first = scratch((3,), torch.float16, CPU)
        second = scratch(shape, torch.float16, CPU)
        for _ in range(launches):
            launch(kernel, 1, [x, first, second])
    return RecordedLaunches.make(made, (x,)), x


def test_scratch_memory_is_that_of_the_stream(fake_gpu, monkeypatch):
    kernel = Kernel()
    recorded, x = scratched(kernel)
    recorded.repeat(at(x))
    recorded.repeat(at(x))
    memory = workspace._kept[(None, STREAM)].data_ptr()
    assert [args[HEAD:] for args in kernel.repeated] == [[*at(x), memory, memory + 512]] * 2
    monkeypatch.setattr(templates, "raw_stream", lambda device: STREAM + 1)
    recorded.repeat(at(x))
    other = workspace._kept[(None, STREAM + 1)].data_ptr()
    assert other != memory and kernel.repeated[-1][HEAD + 1] == other


@pytest.mark.parametrize("why", ["graph", "two launches", "large", "overlaps"])
def test_scratch_memory_of_one_call(fake_gpu, why):
    kernel = Kernel()
    kernel.compiled.run.launch_pdl = why == "overlaps"
    shape = (workspace.MOST_KEPT_BYTES // 2,) if why == "large" else (8,)
    recorded, x = scratched(kernel, shape, launches=2 if why == "two launches" else 1)
    fake_gpu.capturing = why == "graph"
    recorded.repeat(at(x))
    assert workspace._kept == {}
    # the launches of one call share its memory
    assert len({tuple(args[HEAD:]) for args in kernel.repeated}) == 1


def test_memory_of_a_stream_grows():
    small = workspace.stream_memory(100, CPU, STREAM)
    assert workspace.stream_memory(small.numel(), CPU, STREAM) is small
    large = workspace.stream_memory(small.numel() + 1, CPU, STREAM)
    assert large.numel() == 2 * small.numel()
    assert workspace.stream_memory(100, CPU, STREAM) is large


def test_constant_tuples_are_kept_as_they_are():
    kernel, x = Kernel(), torch.zeros(4)
    strides = ((1, 2), 3)
    record(kernel, [x, strides], (x,)).repeat(at(x))
    assert kernel.repeated[0][HEAD:] == [x.data_ptr(), strides]


def test_counters_are_handed_out_once_and_in_a_graph_zeroed_by_it(fake_gpu, monkeypatch):
    monkeypatch.setattr(workspace._Zeros, "WORDS", 8)
    kernel = Kernel()
    x = torch.zeros(4)
    with recording() as made:
        launch(kernel, 1, [x, scratch((3,), torch.int32, CPU, zero=True)])
    recorded = RecordedLaunches.make(made, (x,))
    for _ in range(2):
        recorded.repeat(at(x))
    pool = workspace._zeros[(0, STREAM)]
    base = pool.words.data_ptr()
    assert [args[HEAD + 1] - base for args in kernel.repeated] == [0, 12]
    # two words are left where three are needed: fresh memory, and a new pool for the next call
    recorded.repeat(at(x))
    assert (0, STREAM) not in workspace._zeros
    recorded.repeat(at(x))
    assert workspace._zeros[(0, STREAM)] is not pool
    used = workspace._zeros[(0, STREAM)].used
    fake_gpu.capturing = True
    recorded.repeat(at(x))
    assert workspace._zeros[(0, STREAM)].used == used == 3


def test_no_recording_where_tensors_cannot_be_told_apart():
    x, y = torch.zeros(4), torch.zeros(4)
    assert record(Kernel(), [x, y], (x, y)) is not None
    assert record(Kernel(), [x, x], (x, x)) is None
    assert record(Kernel(), [x, x[:2]], (x, x[:2])) is None


def test_no_recording_of_interpreted_kernels_or_of_nothing():
    x = torch.zeros(4)
    assert record(Kernel(interpreted=True), [x], (x,)) is None
    with recording() as made:
        pass
    assert RecordedLaunches.make(made, (x,)) is None


def test_no_recording_where_the_launcher_is_hidden():
    kernel, x = Kernel(), torch.zeros(4)
    kernel.compiled.run.global_scratch_size = 128
    assert record(kernel, [x], (x,)) is None


def test_no_recording_with_a_triton_whose_launcher_is_not_known(monkeypatch):
    kernel, x = Kernel(), torch.zeros(4)
    assert record(kernel, [x], (x,)) is not None
    monkeypatch.setattr(compat, "triton_version", lambda: (3, 99))
    assert record(kernel, [x], (x,)) is None


def test_no_recording_of_a_descriptor_without_a_role():
    x, table = torch.zeros(4), torch.zeros(4)
    kernel = Kernel(descriptors=["meta"])
    assert record(kernel, [Descriptor(table), x], (x,)) is None
    assert record(kernel, [Descriptor(x), table], (x,)) is not None


def test_threads_on_one_stream_get_different_counters(monkeypatch):
    class Slow(workspace._Zeros):
        """Lets other threads run between reading and writing how many words are used."""

        @property
        def used(self):
            value = self.__dict__["used"]
            time.sleep(1e-4)
            return value

        @used.setter
        def used(self, value):
            self.__dict__["used"] = value

    monkeypatch.setattr(workspace, "_Zeros", Slow)
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda _: workspace.zeroed_counters(1, CPU, STREAM, False), range(100))
        taken = [counters.address for counters in made]
    assert len(set(taken)) == 100
