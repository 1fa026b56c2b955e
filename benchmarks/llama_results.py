"""What `llama_end_to_end.py` found, as a results file that `bsk report` reads."""

import statistics

PEERS = {"blackwell_sparsek": "bsk"}
LABELS = {
    "bsk": "blackwell_sparsek",
    "sdpa": "transformers with SDPA",
    "sdpa_cropped": "SDPA over the tokens that are there, no mask",
    "eager": "transformers' eager attention",
}


def results_document(found, suite):
    """Timed scenarios become cases; what was compared becomes `checks`."""
    timed = [entry for entry in found["results"] if _is_timed(entry)]
    cases = {}
    for entry in timed:
        case = cases.setdefault(_name(entry), {"problem": _problem(entry), "peers": {}})
        peer = PEERS.get(entry["implementation"], entry["implementation"])
        case["peers"][peer] = {"label": LABELS.get(peer, peer), "rival": peer != "bsk"} | _figures(
            entry
        )
    return {
        **{key: value for key, value in found.items() if key != "results"},
        "schema": 2,
        "suite": suite,
        "unit": "ms",
        "cases": [
            {"name": name, **case, "clocks": {}, "ratios": _ratios(case["peers"])}
            for name, case in cases.items()
        ],
        "checks": [entry for entry in found["results"] if entry not in timed],
    }


def _is_timed(entry):
    return "median_s" in entry or "failed" in entry


def _name(entry):
    length = entry["length"]
    size = f"{length // 1024}k" if length % 1024 == 0 else str(length)
    batch = f", batch {entry['batch']}" if "batch" in entry else ""
    window = f", window {entry['window']}" if entry.get("window") else ""
    choice = f", {entry['choice']}" if "choice" in entry else ""
    return f"{entry['scenario']} {size}{batch}{window}{choice}"


def _problem(entry):
    return {
        key: entry[key]
        for key in ("scenario", "batch", "length", "window", "choice")
        if key in entry
    }


def _figures(entry):
    if "failed" in entry:
        return {"failed": entry["failed"], "times": {}}
    samples = sorted(entry.get("samples_s") or [entry["median_s"]])
    figures = {
        "quantiles_s": {"min": samples[0], "p50": statistics.median(samples), "max": samples[-1]},
        "rounds": len(samples),
        "tokens_per_s": entry["tokens_per_s"],
    }
    if entry.get("peak_gib"):
        figures["peak_gib"] = entry["peak_gib"]
    return {"times": {_mode(entry): figures}}


def _mode(entry):
    return "graph" if entry.get("mode") == "CUDA graph" else "eager"


def _ratios(peers):
    """Ours against the fastest other one, where both were timed the same way."""
    ratios = {}
    for mode, ours in peers.get("bsk", {}).get("times", {}).items():
        others = {
            name: peer["times"][mode]["quantiles_s"]["p50"]
            for name, peer in peers.items()
            if name != "bsk" and mode in peer["times"]
        }
        if others:
            best = min(others, key=others.get)
            ratios[mode] = {
                "best_peer": best,
                "over_best_peer": others[best] / ours["quantiles_s"]["p50"],
            }
    return ratios
