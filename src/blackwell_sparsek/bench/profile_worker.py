"""Child process of `bsk profile`: one run of a case between the marks that ncu looks for."""

import sys
from typing import Any

import torch

from .suites import SUITES


def main(suite_name: str, case_name: str) -> None:
    """Build the case, warm up, run once more between the marks."""
    suite = SUITES[suite_name]
    case = next(case for case in suite.cases(False) if case.name == case_name)
    with torch.no_grad():
        run = suite.peers[suite.ours].prepare(case.build(torch.device("cuda"))).run
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        cudart: Any = torch.cuda.cudart
        profiler = cudart()
        profiler.cudaProfilerStart()
        run()
        torch.cuda.synchronize()
        profiler.cudaProfilerStop()


if __name__ == "__main__":
    main(*sys.argv[1:])
