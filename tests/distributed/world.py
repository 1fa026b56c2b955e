"""Processes of one gloo group that run many checks after a single start, and report on each."""

import datetime
import importlib
import json
import os
import pathlib
import traceback

import torch
import torch.distributed as dist


def run_checks(module, world_size, folder):
    """Run every check of `module.CHECKS` in `world_size` processes; what failed, by name."""
    args = (module.__name__, world_size, str(folder))
    context = torch.multiprocessing.start_processes(
        _member, args=args, nprocs=world_size, join=False, start_method="spawn"
    )
    for process in context.processes:
        process.join()
    outcomes = dict.fromkeys(module.CHECKS, "")
    for rank in range(world_size):
        path = pathlib.Path(folder) / f"rank{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for name in module.CHECKS:
            problem = found.get(name, "was not reached")
            if problem:
                outcomes[name] += f"rank {rank}:\n{problem}\n"
    return outcomes


def _member(rank, module_name, world_size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    # a rank that waits for another that has failed must not wait for long
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    found = {}
    for name, check in importlib.import_module(module_name).CHECKS.items():
        problem = ""
        try:
            check(rank, world_size, folder)
        except Exception:
            problem = traceback.format_exc()
        found[name] = problem
        pathlib.Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
        if problem:
            # the others may be inside of a collective: a closed connection ends them as well
            os._exit(1)
    dist.destroy_process_group()
