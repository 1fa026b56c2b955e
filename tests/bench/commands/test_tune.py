import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from blackwell_sparsek import InvalidInput
from blackwell_sparsek.attention.triton import forward as fwd
from blackwell_sparsek.attention.triton import tuning as tuning
from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.commands import tune
from blackwell_sparsek.bench.suites.attention_problem import Attention
from blackwell_sparsek.bench.suites.matmul import Product
from blackwell_sparsek.calls.matmul import BsrProblem
from blackwell_sparsek.core.arch import Arch
from blackwell_sparsek.dispatch import tuned
from blackwell_sparsek.matmul.triton import spmm
from blackwell_sparsek.matmul.triton.tuning import spmm_config
from blackwell_sparsek.reference.attention import attention as oracle

CPU = torch.device("cpu")
FACTS = (90, 2, 128, None, "ieee")


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    tuned._tiles.cache_clear()
    yield
    tuned._tiles.cache_clear()


def test_what_is_written_is_used_only_where_asked_for(h200, tmp_path, monkeypatch):
    path = tmp_path / tuned.file_name("NVIDIA H200")
    tuned.write_tiles(path, "NVIDIA H200", {("attn_fwd", tuned.key_of(FACTS)): (64, 32, 4, 2)})
    monkeypatch.delenv("BSK_CONFIG_DIR", raising=False)
    assert tuned.tuned_tile("attn_fwd", FACTS) is None
    monkeypatch.setenv("BSK_CONFIG_DIR", str(tmp_path))
    assert tuned.tuned_tile("attn_fwd", FACTS) == (64, 32, 4, 2)
    assert tuned.tuned_tile("attn_fwd", (80, *FACTS[1:])) is None
    assert tuned.tuned_tile("other", FACTS) is None
    problem = SimpleNamespace(
        arch=SimpleNamespace(sm=90),
        dtype=torch.bfloat16,
        head_dim=128,
        head_dim_v=128,
        mask_block=None,
        bias=False,
    )
    config = tuning.attn_fwd_config(problem, "ieee")
    assert (config.tile_m, config.tile_n, config.num_warps, config.num_stages) == (64, 32, 4, 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert tuned.tuned_tile("attn_fwd", FACTS) is None


def test_files_keep_what_they_had(tmp_path):
    path = tmp_path / "x.json"
    tuned.write_tiles(path, "a", {("k", "1"): (64, 64, 4, 2)})
    tuned.write_tiles(path, "a", {("k", "2"): (128, 64, 8, 3)})
    assert tuned.read_tiles(path) == {("k", "1"): (64, 64, 4, 2), ("k", "2"): (128, 64, 8, 3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected what `bsk tune` writes, schema 1"),
        ('{"schema": 7}', "schema 1"),
        *(
            (
                json.dumps({"schema": 1, "tiles": {"k": {"1": tile}}}),
                "'k' '1': expected a tile, got",
            )
            for tile in (
                [64, 64, 4],
                [64, 64, 4, 0],
                [60, 64, 4, 2],
                [64, 64, 3, 2],
                [True, 64, 4, 2],
                "64",
            )
        ),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        tuned.read_tiles(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_candidates_begin_with_the_built_in_one_and_fit_the_mask():
    found = list(tune.candidates((128, 64, 8, 3), None))
    assert found[0] == (128, 64, 8, 3) and len(set(found)) == len(found) == 36
    assert all(tile[0] <= 64 for tile in tune.candidates((64, 64, 4, 2), 64))


def _search(monkeypatch, best, broken=()):
    """A search in which a tile takes as long as it is said to."""
    problem = Attention(1, 1, 64, 16, dtype=torch.float32, causal=True)

    def launch(call, out, lse, config):
        tile = (config.tile_m, config.tile_n, config.num_warps, config.num_stages)
        if tile in broken:
            raise RuntimeError("out of resource: shared memory")
        out.copy_(oracle(call.q, call.k, call.v, call.spec)[0])
        if tile == (64, 32, 4, 3):
            out.add_(1)  # the fastest of all, and wrong

    def time_all(runs, device, **more):
        def seconds(name):
            if name == str((64, 32, 4, 3)):
                return 0.1
            return best.get(name, 1.0)

        return {name: SimpleNamespace(median=seconds(name)) for name in runs}

    monkeypatch.setattr(fwd, "launch_attn_fwd", launch)
    said = []
    return tune.tune_attention(problem, CPU, said.append, time_all), said


def test_the_fastest_right_tile_wins(monkeypatch):
    tile = (128, 32, 4, 2)
    found, said = _search(monkeypatch, {str(tile): 0.5}, broken={(128, 128, 8, 4)})
    key, winner = found
    assert winner == tile and key.endswith("16 None ieee")
    assert any("out of resource" in line for line in said)
    assert any("AssertionError" in line and "(64, 32, 4, 3)" in line for line in said)
    assert "2.000x the built-in" in said[-1]


def test_a_small_gain_is_none(monkeypatch):
    found, _ = _search(monkeypatch, {str((128, 32, 4, 2)): 0.99})
    assert found is None


def test_tiles_of_products_are_searched(monkeypatch):
    best, right = (256, 32, 8, 3), []

    def launch(views, rows, bias, activation, plan, config):
        tile = (config.tile_n, config.tile_k, config.num_warps, config.num_stages)
        right.append(tile)
        views.out.copy_(inputs.dense @ inputs.x)
        if tile == (64, 32, 4, 3):
            views.out.add_(1)

    def time_all(runs, device, **more):
        times = {str(best): 0.5}
        return {name: SimpleNamespace(median=times.get(name, 1.0)) for name in runs}

    product = Product(256, 256, 256, (64, 64), 0.5, torch.float32)
    inputs = product.build(CPU)
    monkeypatch.setattr(spmm, "launch_spmm", launch)
    said = []
    key, winner = tune.tune_product(product, CPU, said.append, time_all)
    assert winner == best and key.endswith("4 64 64 ieee")
    assert len(set(right)) > 20 and "AssertionError" in said[0]
    tiles = list(tune.product_candidates((128, 32, 4, 4)))
    assert tiles[0] == (128, 32, 4, 4) and len(set(tiles)) == len(tiles) == 36


def test_a_tile_of_products_is_used_where_there_are_many_columns(h200, tmp_path, monkeypatch):
    facts = (90, 2, 64, 64, "ieee")
    path = tmp_path / tuned.file_name("NVIDIA H200")
    tuned.write_tiles(path, "NVIDIA H200", {("bsr_spmm", tuned.key_of(facts)): (128, 32, 8, 5)})
    monkeypatch.setenv("BSK_CONFIG_DIR", str(tmp_path))
    spmm_config.cache_clear()
    arch, half = Arch("cuda", 90, 132, 232448, False), torch.float16
    problem = BsrProblem("matmul", arch, half, half, (4096, 4096), (64, 64), 1024, 4096)
    config = spmm_config(problem, "ieee")
    assert (config.tile_m, config.tile_n, config.tile_k) == (64, 128, 32)
    assert (config.num_warps, config.num_stages) == (8, 5)
    narrow = spmm_config(replace(problem, n=16), "ieee")
    assert narrow.tile_n == 16
    spmm_config.cache_clear()


def test_the_command_writes_a_file_for_this_device(h200, tmp_path, monkeypatch, capsys):
    from blackwell_sparsek.bench.commands import tune as command

    answers = iter([("a", (64, 64, 4, 2)), None, None, None])
    monkeypatch.setattr(command, "tune_attention", lambda *args: next(answers))
    products = iter([None, ("b", (128, 64, 8, 4)), None, None])
    monkeypatch.setattr(command, "tune_product", lambda *args: next(products))
    assert cli.main(["tune", "-o", str(tmp_path)]) == 0
    assert "BSK_CONFIG_DIR" in capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    assert path.name == "device_name=NVIDIA_H200.json"
    assert tuned.read_tiles(path) == {
        ("attn_fwd", "a"): (64, 64, 4, 2),
        ("bsr_spmm", "b"): (128, 64, 8, 4),
    }
    monkeypatch.setattr(command, "tune_attention", lambda *args: None)
    monkeypatch.setattr(command, "tune_product", lambda *args: None)
    assert cli.main(["tune", "-o", str(tmp_path / "other")]) == 0
    assert "nothing written" in capsys.readouterr().out


def test_without_a_gpu_there_is_nothing_to_tune(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
