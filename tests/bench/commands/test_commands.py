import json
import re
import stat

import pytest
import torch

from blackwell_sparsek import InvalidInput, Unsupported
from blackwell_sparsek.bench import cli
from blackwell_sparsek.bench.commands import info, profile
from blackwell_sparsek.bench.commands import precompile as compiling
from blackwell_sparsek.bench.commands import profile as ncu
from blackwell_sparsek.bench.commands.profile import occupancy


def _printed(capsys, *args, status=0):
    assert cli.main(list(args)) == status
    return capsys.readouterr()


def test_info_names_device_versions_reasons_and_caches(capsys):
    out = _printed(capsys, "info").out
    assert f"torch {torch.__version__}" in out and "eager        runs" in out
    assert "needs sm_90, this is cpu" in out or torch.cuda.is_available()
    assert "flashinfer is not installed" in out and "sdpa             installed" in out
    found = json.loads(_printed(capsys, "info", "--json").out)
    assert found["implementations"]["matmul"] and found["cache"]["folder"]


def test_info_says_where_nothing_runs(capsys, monkeypatch):
    monkeypatch.setenv("BSK_IMPL", "dense")
    out = _printed(capsys, "info").out
    assert "nothing      runs" in out and "None" not in out


def test_overrides_of_triton_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/x/ptxas")
    out = _printed(capsys, "info").out
    assert "TRITON_PTXAS_PATH=/x/ptxas" in out


def test_info_says_whether_tuned_tiles_are_used(tmp_path, monkeypatch):
    monkeypatch.delenv("BSK_CONFIG_DIR", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert info._tuned_tiles(gpu) == "off (BSK_CONFIG_DIR is not set)"
    monkeypatch.setenv("BSK_CONFIG_DIR", str(tmp_path / "typo"))
    missing = f"{tmp_path / 'typo'} (no such folder; built-in tiles are used)"
    assert info._tuned_tiles(gpu) == missing
    monkeypatch.setenv("BSK_CONFIG_DIR", str(tmp_path))
    assert info._tuned_tiles(cpu) == f"{tmp_path} (not used on a CPU)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    missing = f"{tmp_path} (it has no device_name=NVIDIA_X.json; built-in tiles are used)"
    assert info._tuned_tiles(gpu) == missing
    (tmp_path / "device_name=NVIDIA_X.json").touch()
    assert info._tuned_tiles(gpu) == str(tmp_path)


def test_a_cache_that_others_can_write_is_unsafe(tmp_path):
    folder = tmp_path / "cache"
    assert info.cache_state(folder)["size"] == "does not exist yet"
    (tmp_path / "file").touch()
    assert info.cache_state(tmp_path / "file")["safety"] == "UNUSABLE: it is not a folder"
    folder.mkdir(mode=0o700)
    (folder / "kernel.cubin").write_bytes(b"x" * 2**20)
    state = info.cache_state(folder)
    assert state["size"] == "1.0 MiB" and state["safety"] == "only its owner can write to it"
    folder.chmod(0o777)
    assert info.cache_state(folder)["safety"] == f"UNSAFE: anyone can write to {folder}"
    folder.chmod(0o777 | stat.S_ISVTX)
    assert info.unsafe(folder) == f"UNSAFE: anyone can write to {folder}"
    folder.chmod(0o700)
    tmp_path.chmod(0o777)
    assert info.unsafe(folder) == f"UNSAFE: anyone can write to {tmp_path}"


def test_a_cache_that_a_group_can_write_is_unsafe(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    monkeypatch.setattr(info, "_OWN_GROUPS", (tmp_path.stat().st_gid,))
    assert info.unsafe(tmp_path) is None
    monkeypatch.setattr(info, "_OWN_GROUPS", ())
    group = tmp_path.stat().st_gid
    assert info.unsafe(tmp_path) == f"UNSAFE: the group {group} can write to {tmp_path}"


def test_a_cache_of_another_user_is_unsafe(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 7)
    reason = info.unsafe(tmp_path)
    if tmp_path.stat().st_uid == 0:
        assert reason is None  # root could write anyway
    else:
        assert reason.startswith("UNSAFE") and "belongs to another user" in reason


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["attention", "--q", "1x4x64x32", "--causal"], ["attn_fwd: eager", "not sm90"]),
        (["attention", "--q", "1x4x64x32", "--block", "16x16"], ["blocks 16 x 16"]),
        (
            ["attention", "--q", "2x4x64x32", "--kv-heads", "2", "--kv-length", "100"],
            ["heads 4:2", "keys 100"],
        ),
        (["attention", "--q", "1x1x8x8", "--impl", "sm90"], ["attn_fwd: nothing (impl='sm90')"]),
        (["matmul", "--weight", "128x64", "--n", "8", "--block", "16x32"], ["blocks (16, 32)"]),
        (["matmul", "--weight", "64x64", "--linear", "--density", "1"], ["X @ A"]),
        (["decode", "--q", "2x8x1x32", "--kv-length", "100"], ["attn_decode: eager", "up to 100"]),
        (["decode", "--q", "2x8x1x32", "--page-size", "16", "--kv-heads", "4"], ["pages of 16"]),
    ],
)
def test_explain(capsys, args, words):
    out = _printed(capsys, "explain", *args, "--device", "cpu").out
    assert all(word in out for word in words), out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["attention", "--q", "1x4x64"], "--q is '1x4x64'; expected 4 sizes such as 1x16x4096x128"),
        (["matmul", "--block", "axb"], "--block is 'axb'; expected 2 sizes such as 64x64"),
        (["matmul", "--device", "cpu:x"], "--device is 'cpu:x'; expected cpu or cuda"),
        (["matmul", "--density", "1.5"], "--density is 1.5; expected above 0, up to 1"),
        (["matmul", "--density", "0"], "--density is 0.0; expected above 0, up to 1"),
        (["matmul", "--device", "tpu"], "--device is 'tpu'; expected cpu or cuda"),
        (["matmul", "--weight", f"{10**8}x{10**8}"], "these sizes cannot be allocated here"),
        (["attention", "--q", f"1x1x{10**15}x64"], "these sizes cannot be allocated here"),
        (["decode", "--kv-length", f"{10**15}"], "these sizes cannot be allocated here"),
        (["attention", "--kv-heads", "3"], "16 query heads not divisible by 3 kv heads"),
    ],
)
def test_explain_says_what_it_does_not_understand(capsys, args, message):
    assert message in _printed(capsys, "explain", *args, status=2).err


@pytest.mark.parametrize(
    "args",
    [
        ["explain", "attention", "--kv-heads", "0"],
        ["explain", "decode", "--page-size", "0"],
        ["explain", "decode", "--kv-length=-1"],
        ["explain", "matmul", "--n", "many"],
        ["compile", "--jobs", "0"],
        ["memory", "--tokens=-4"],
    ],
)
def test_counts_are_positive(capsys, args):
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "expected a whole number of 1 or more" in capsys.readouterr().err


def test_errors_begin_with_the_command_once(capsys):
    err = _printed(capsys, "explain", "matmul", "--density", "1.5", status=2).err
    assert err.startswith("bsk explain: --density")
    err = _printed(capsys, "explain", "attention", "--window=-3", status=2).err
    assert err.startswith("bsk: attention: window sees no key")


def _record(**more):
    record = {"name": "k/a", "arch": 90, "registers": 168, "shared": 100000, "num_warps": 4}
    record |= {"spill_stores": 0, "spill_loads": 8, "seconds": 1.0, "problems": []}
    return record | {"counts": {"wgmma.mma_async": 12, "mma.sync": 0}} | more


def test_compile_builds_reports_and_fails_with_what_fails(capsys, monkeypatch):
    seen = []

    def fake(archs, contains, *, counts, jobs, progress):
        seen.append((archs, contains))
        progress(1, 1, _record())
        return [_record(problems=["spills 8 bytes"] if "bad" in contains else [])]

    monkeypatch.setattr(compiling, "compile_kernels", fake)
    out = _printed(capsys, "compile", "attn_fwd", "--arch", "sm_90", "--arch", "80")
    assert "1 of 1 built, into " in out.out and "[1/1] k/a sm_90" in out.err
    assert "collecting variants of attn_fwd for sm_90, sm_80" in out.err
    _printed(capsys, "compile", "attn_fwd/bad", "--arch", "sm_90", status=1)
    assert seen == [([90, 80], "attn_fwd"), ([90], "attn_fwd/bad")]


def test_a_compiler_that_does_not_start_is_told(capsys, monkeypatch):
    def fails(*args, **options):
        raise RuntimeError("the compiler process failed (1):\nTraceback\nImportError: libfoo.so\n")

    monkeypatch.setattr(compiling, "compile_kernels", fails)
    err = _printed(capsys, "compile", "--arch", "sm_90", status=2).err
    assert err.endswith("bsk: kernels cannot be compiled here: ImportError: libfoo.so\n")


def _must_not_run(*args, **options):
    raise AssertionError("nothing is to be compiled")


def test_a_benchmark_case_is_no_kernel(capsys, monkeypatch):
    monkeypatch.setattr(compiling, "compile_kernels", _must_not_run)
    err = _printed(capsys, "profile", "8192^3", "--arch", "sm_90", status=2).err
    assert "no kernel has '8192^3' in its name" in err
    assert "of the suite matmul_founding is a benchmark case, which can be profiled where" in err
    err = _printed(capsys, "profile", "atn_decode", "--arch", "sm_90", status=2).err
    assert err.startswith("bsk profile: no kernel has 'atn_decode' in its name; did you mean attn_")
    assert "benchmark" not in err and err.count("\n") == 1


@pytest.mark.exhaustive
def test_one_kernel_is_really_compiled(capsys):
    out = _printed(capsys, "profile", "merge_states/float16-d64", "--arch", "sm_90", status=0).out
    assert "sm_90" in out and "of 64" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["compile", "attn_fwd/nothing", "--arch", "90"], "no kernel variant"),
        (["profile", "attn_fwd/nothing", "--arch", "sm_90"], "no kernel variant"),
    ],
)
def test_compile_and_profile_say_what_they_do_not_understand(capsys, monkeypatch, args, message):
    monkeypatch.setattr(compiling, "compile_kernels", lambda *args, **more: [])
    assert message in _printed(capsys, *args, status=2).err


def test_without_a_gpu_the_architecture_must_be_said(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here; name one to compile for" in _printed(capsys, "compile", status=2).err


def test_compiling_without_triton(monkeypatch):
    monkeypatch.setattr(compiling, "why_triton_fails", lambda: "triton is not installed")
    with pytest.raises(Unsupported, match="cannot be compiled here: triton is not installed"):
        compiling.built("bsk compile", [90], "", 1, ())


def test_static_profiles_show_instructions_and_what_limits():
    text = profile.static_table([_record(), {"name": "b", "arch": 80, "problems": ["broken"]}])
    head, row, other, problem = text.splitlines()
    assert "wgmma.mma_async" in head and "mma.sync" not in head
    assert "8 of 64" in row and "shared memory" in row and row.endswith("12")
    assert other.startswith("b") and problem == "b sm_80: broken"


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((90, 32, 0, 4), (64, 64, "warps")),
        ((90, 255, 0, 4), (8, 64, "registers")),
        ((89, 32, 60000, 8), (8, 48, "shared memory")),
        ((90, 16, 0, 1), (32, 64, "blocks")),
    ],
)
def test_occupancy(numbers, expected):
    assert occupancy(*numbers) == expected


_CSV = (
    "==PROF== Connected\nsome print of the program\n"
    '"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum"\n'
    '"","","msecond","Gbyte","byte"\n'
    '"0","_attn_fwd_kernel","1,000.5","2.4","n/a"\n'
)


def test_ncu_is_read():
    (record,) = ncu.parse(_CSV)
    assert record["kernel"] == "_attn_fwd_kernel" and record["time"] == (1000.5, "msecond")
    assert record["read"] == (2.4, "Gbyte") and record["written"][0] != record["written"][0]
    assert ncu.parse("nothing here") == []


def test_measured_profiles_stand_against_the_roof():
    record = {"kernel": "k", "time": (1.0, "msecond"), "tensor cores": (71.0, "%")}
    record |= {"read": (2.4, "Gbyte"), "written": (0.0, "byte")}
    text = profile.measured_lines(record, "NVIDIA H200")
    assert text.startswith("k\n") and "tensor cores" in text
    assert text.endswith("50 % of 4.8 TB/s")
    assert "roof" not in profile.measured_lines(record, "abacus")


def _fake_ncu(tmp_path, monkeypatch, script):
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_ncu_runs_the_worker_of_a_case(tmp_path, monkeypatch, capsys):
    (tmp_path / "out.csv").write_text(_CSV)
    _fake_ncu(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args; cat {tmp_path}/out.csv')
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    out = _printed(capsys, "profile", "S16k D128 causal")
    assert "_attn_fwd_kernel" in out.out and "attention_dense: B1 H16 S16k D128 causal" in out.err
    args = (tmp_path / "args").read_text()
    assert "--profile-from-start off" in args and "commands.profile attention_dense B1 H16" in args


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", "may not read the GPU's counters"),
        ("echo broken >&2; exit 9", "ncu ended with status 9 and no kernels: broken"),
    ],
)
def test_what_goes_wrong_in_ncu_is_told(tmp_path, monkeypatch, script, message):
    _fake_ncu(tmp_path, monkeypatch, script)
    with pytest.raises(Unsupported, match=message):
        ncu.profile(["true"])


def test_a_case_nobody_has():
    with pytest.raises(InvalidInput, match="no benchmark case has 'S3 D7'"):
        profile.find_case("S3 D7")


def test_memory_of_known_models_and_of_ones_own(capsys):
    out = _printed(capsys, "memory").out
    assert re.search(r"Llama 3.1 8B .* 8\.6 GB +2\.1 GB +4\.0x", out)
    out = _printed(capsys, "memory", "--layers", "10", "--heads", "16:4", "--tokens", "1000").out
    assert re.search(r"this model +10 +16:4 +128 +1000 +bfloat16", out) and "Llama" not in out
    half = _printed(capsys, "memory", "--dtype", "float8_e4m3fn").out
    assert re.search(r"Llama 3.1 8B .* 4\.3 GB +1\.1 GB", half)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--heads", "32:8"], "--layers and --heads must be given together"),
        (["--layers", "2", "--heads", "a:b"], "--heads is 'a:b'; expected Q:KV, such as 32:8"),
        (["--layers", "2", "--heads", "32:5"], "a multiple of its 5 KV heads"),
    ],
)
def test_memory_says_what_it_does_not_understand(capsys, args, message):
    assert message in _printed(capsys, "memory", *args, status=2).err
