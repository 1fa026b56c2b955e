"""Launches and their repetition, with a fake compiler and a fake GPU."""

import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek.launch import launcher, prepared, templates, workspace
from blackwell_sparsek.launch.descriptors import tensor_descriptor
from blackwell_sparsek.launch.launcher import cdiv, launch, on_device_of
from blackwell_sparsek.launch.recording import recording, unrecorded
from blackwell_sparsek.launch.templates import RecordedLaunches
from blackwell_sparsek.launch.workspace import scratch

from .fakes import FakeMap, fake_variants

CPU = torch.device("cpu")
# grid and stream come before a kernel's own arguments
HEAD = 2
STREAM = 77


class Kernel:
    """Its variants note what they are launched with."""

    def __init__(self):
        self.repeated = []
        self.variant = None

    def __getitem__(self, grid):
        raise AssertionError("no kernel here is launched by Triton's front end")


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    state = SimpleNamespace(capturing=False)
    kernels = []

    def note(grid, stream, values):
        kernels[-1].repeated.append([grid, stream, *values])

    pytest.importorskip("triton")
    fake_variants(monkeypatch, note)
    find = launcher.find_variant

    def find_for(kernel, args, cluster, options):
        if not isinstance(kernel, Kernel):
            return None
        kernels.append(kernel)
        found = find(kernel, args, cluster, options)
        kernel.variant = found.variant
        return found

    monkeypatch.setattr(launcher, "find_variant", find_for)
    monkeypatch.setattr(templates, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(templates, "empty_on_gpu", torch._C._dynamo.guards._empty_strided_cpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
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


class FrontEnd:
    """A kernel without a variant, such as an interpreted one."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((grid, args, options))


def test_the_front_end_gets_grid_arguments_and_options():
    kernel = FrontEnd()
    x = torch.zeros(2)
    assert launch(kernel, 3, [x, 8], num_warps=4) is None
    ((grid, args, options),) = kernel.calls
    assert grid == (3,) and args[0] is x and args[1] == 8
    assert options == {"enable_fp_fusion": True, "num_warps": 4}


def test_the_front_end_knows_no_clusters_of_single_programs():
    with pytest.raises(RuntimeError, match="clusters"):
        launch(FrontEnd(), 66, (1,), cluster=2, num_warps=4)


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


def test_what_is_built_once_and_kept_is_not_recorded():
    kernel, x = Kernel(), torch.zeros(2)
    with recording() as made:
        launch(kernel, 1, [x])
        with unrecorded():
            launch(kernel, 2, [x])
        launch(kernel, 3, [x])
    assert [step.grid for step in made.launches] == [1, 3]


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
    assert args[:HEAD] == [5, STREAM]
    # the table had no role: it is part of the recording, by its address
    assert args[HEAD:] == [new_out.data_ptr(), 16, new_x.data_ptr(), table.data_ptr(), "const"]


def test_a_recording_keeps_alive_what_has_no_role_and_nothing_else():
    import gc
    import weakref

    kernel = Kernel()
    x, table = torch.zeros(4), torch.zeros(4)
    alive = weakref.ref(x), weakref.ref(table)
    recorded = record(kernel, [x, table], (x,))
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


def descriptor(x):
    return tensor_descriptor(x, (4,))


def test_tensor_maps_are_made_anew_for_new_addresses_only():
    kernel = Kernel()
    x, out = torch.zeros(4), torch.zeros(4)
    recorded = record(kernel, [(descriptor(x), 3), out], (x, out))
    others = [torch.zeros(4) for _ in range(2)]
    for other in (others[0], others[1], others[0]):
        recorded.repeat(at(other, out))
    assert kernel.variant.encoded == at(*others)
    expected = [[(("map", others[i].data_ptr()), 3), out.data_ptr()] for i in (0, 1, 0)]
    assert [args[HEAD:] for args in kernel.repeated] == expected


def test_few_tensor_maps_are_kept():
    kernel = Kernel()
    x = torch.zeros(4)
    recorded = record(kernel, [descriptor(x)], (x,))
    tensors = [torch.zeros(4) for _ in range(prepared.MAX_TENSOR_MAPS + 1)]
    for tensor in tensors:
        recorded.repeat(at(tensor))
    made = len(kernel.variant.encoded)
    recorded.repeat(at(tensors[-1]))
    assert len(kernel.variant.encoded) == made
    recorded.repeat(at(tensors[0]))
    assert len(kernel.variant.encoded) == made + 1


def test_tensor_maps_live_until_the_launch():
    """Another thread may clear the maps of a descriptor between those of this launch."""
    kernel = Kernel()
    x, y = torch.zeros(4), torch.zeros(4)
    recorded = record(kernel, [descriptor(x), descriptor(y)], (x, y))
    (template,) = recorded._templates
    first, second = template._maps
    alive = []

    def encode(address, shape, strides):
        first.maps.clear()
        return FakeMap(address)

    template._maps = [first, second._replace(encode=encode)]
    note = kernel.variant.note
    kernel.variant.note = lambda *given: (alive.append(made() is not None), note(*given))
    others = [torch.zeros(4) for _ in range(2)]
    first.maps[others[0].data_ptr()] = FakeMap(others[0].data_ptr())
    made = weakref.ref(first.maps[others[0].data_ptr()])
    recorded.repeat(at(*others))
    assert alive == [True]


def scratched(kernel, shape=(8,), launches=1, overlaps=False):
    """A recording of launches with two scratch tensors, the second of `shape`."""
    x = torch.zeros(4)
    with recording() as made:
        first = scratch((3,), torch.float16, CPU)
        second = scratch(shape, torch.float16, CPU)
        for _ in range(launches):
            launch(kernel, 1, [x, first, second])
            kernel.variant.overlaps = overlaps
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
    shape = (workspace.MOST_KEPT_BYTES // 2,) if why == "large" else (8,)
    launches = 2 if why == "two launches" else 1
    recorded, x = scratched(kernel, shape, launches, overlaps=why == "overlaps")
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
    # kernels may be compiled for addresses that are multiples of 16
    assert [args[HEAD + 1] - base for args in kernel.repeated] == [0, 16]
    # no word is left: fresh memory, and a new pool for the next call
    recorded.repeat(at(x))
    assert (0, STREAM) not in workspace._zeros
    recorded.repeat(at(x))
    assert workspace._zeros[(0, STREAM)] is not pool
    used = workspace._zeros[(0, STREAM)].used
    fake_gpu.capturing = True
    recorded.repeat(at(x))
    assert workspace._zeros[(0, STREAM)].used == used == 4


def test_counters_of_captured_launches_are_aligned(monkeypatch):
    reserve = torch.zeros(16, dtype=torch.int32)
    monkeypatch.setitem(workspace._for_captures, 0, [reserve])
    taken = [workspace._captured(count, 0, CPU) for count in (1, 6, 3)]
    assert [x.data_ptr() - reserve.data_ptr() for x in taken] == [0, 16, 48]
    assert [x.numel() for x in taken] == [1, 6, 3]


def test_no_recording_where_tensors_cannot_be_told_apart():
    x, y = torch.zeros(4), torch.zeros(4)
    assert record(Kernel(), [x, y], (x, y)) is not None
    assert record(Kernel(), [x, x], (x, x)) is None
    assert record(Kernel(), [x, x[:2]], (x, x[:2])) is None


def test_no_recording_where_a_launch_takes_part_of_a_tensor():
    """The part lies elsewhere in the next call; only that which begins a tensor has its address."""
    x, table = torch.zeros(2, 4), torch.zeros(4)
    assert record(Kernel(), [x[0], table], (x,)) is not None
    assert record(Kernel(), [x[1], table], (x,)) is None


def test_no_recording_of_what_the_front_end_launched_or_of_nothing():
    x = torch.zeros(4)
    assert record(FrontEnd(), [x], (x,)) is None
    with recording() as made:
        pass
    assert RecordedLaunches.make(made, (x,)) is None


def test_no_recording_of_a_descriptor_without_a_role():
    x, table = torch.zeros(4), torch.zeros(4)
    assert record(Kernel(), [descriptor(table), x], (x,)) is None
    assert record(Kernel(), [descriptor(x), table], (x,)) is not None


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
