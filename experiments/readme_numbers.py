"""Which numbers may the README state? Every figure of its text and tables, read from results/."""

import json
from statistics import mean, median
from typing import Any

from cache.placement import USUAL
from experiments.policies_report import budget_pairs, works
from experiments.results_io import RESULTS, ROOT, git


def load(name: str) -> Any:
    """One result as git has it, staged or committed; outside a checkout, the file on disk.

    So a run that nobody means to publish, of the demo say, changes nothing here.
    """
    path = RESULTS / name
    text = git("show", f":{path.relative_to(ROOT).as_posix()}")
    return json.loads(text if text is not None else path.read_text())


def claims() -> dict[str, str]:
    """Figure by name, as the README prints it."""
    bench, demo, mutations = (
        load(f"{name}.json") for name in ("bench_cpu", "warm_start", "mutations")
    )
    cold, warm, decode = bench["cold_prefill"], bench["warm"], bench["decode"]
    restore, host, machine = bench["restore"], bench["host_work"], bench["machine"]
    serial = [row for row in demo["requests"] if row["mode"] == "serial"]
    ratio = median(row["ttft_cold_ms"] / row["ttft_warm_ms"] for row in serial)
    mutants = mutations["mutations"]
    [rule] = (
        case
        for case in load("bench_kernels.json")["cases"]
        if (case["name"], case["shape"], case["sizes"]) == ("delta prefill", "9b", {"tokens": 2048})
    )
    others = rule["baselines"]
    drift = {row["fault"]: row for row in load("semantic_drift.json")["rows"]}
    [recall] = (
        row
        for row in load("recall_accuracy.json")["rows"]
        if (row["facts"], row["tokens"]) == (64, 4096)
    )
    longest = load("ttft_vs_prefix.json")["rows"][-1]
    regression = load("regression.json")
    exact = sum(row.get("outputs", 0) for row in regression["rows"] if row["server"] != "off")
    exact += sum(row["conversations"] for row in regression["conversations"] if row["exact"])
    served = {
        (row["mode"], row["workload"]): f"{row['ttft_p50_ratio']:.1f}"
        for row in regression["rows"]
        if row["server"] == "redirect" and row["client"] == "openai"
    }
    guesses = {
        row["guesses"]: row for row in load("mtp.json")["rows"] if row["sampling"] == "greedy"
    }
    kept = load("policies.json")["rows"]
    learnt, lru = (
        [mean(works(kept, "claude", name, slots, USUAL)) for slots in (64, 128)]
        for name in ("value", "lru")
    )
    in_one = [shared["work"] / best["work"] for best, shared in budget_pairs(kept)]
    binaries = load("aot.json")["kernels"]
    kernels = {row["kernel"] for row in binaries}
    return {
        "cpu": f"{machine['cores']} cores of an {machine['cpu']}",
        "threads": str(machine["threads"]),
        "machine_line": f"{machine['cores']} cores of an {machine['cpu']}, {machine['threads']} "
        f"threads, torch {machine['torch']}, Python {machine['python']}.",
        "cold_rate": f"{cold['caching_off_tokens_per_s']:.0f}",
        "cold_s": f"{(bench['prefix_tokens'] + 128) / cold['caching_off_tokens_per_s']:.1f}",
        "hf_rate": f"{cold['transformers_tokens_per_s']:.0f}",
        "cold_speedup": f"{cold['speedup_over_transformers']:.2f}",
        "cost_of_caching": f"{100 * cold['cost_of_caching']:+.1f} %",
        "shared_ms": f"{warm['shared_prefix_ms']:.0f}",
        "shared_over_bare": f"{warm['shared_prefix_over_bare_128']:.2f}",
        "hf_copy_ms": f"{warm['transformers_copy_ms']:.0f}",
        "identical_ms": f"{warm['identical_ms']:.0f}",
        "identical_over_bare": f"{warm['identical_over_bare_64']:.2f}",
        "decode_rate": f"{decode['engine_tokens_per_s']:.1f}",
        "decode_speedup": f"{decode['speedup_over_transformers']:.2f}",
        "slot_mib": f"{restore['slot_mib']:.1f}",
        "restore_ms": f"{restore['restore_ms']:.2f}",
        "restore_over_copy": f"{restore['restore_over_copy']:.2f}",
        "host_first_ms": f"{host['first_ms']:.1f}",
        "host_further_ms": f"{host['further_stride_median_ms']:.2f}",
        "demo_ratio": f"{ratio:.0f}",
        "demo_equal": str(sum(row["bits_equal"] for row in demo["requests"])),
        "demo_outputs": str(len(demo["requests"])),
        "demo_tokens": f"{max(row['prompt_tokens'] for row in demo['requests']):,}",
        "recall_exact": f"{100 * recall['exact']:.1f} % of {recall['asked']}",
        "drift_right": f"{100 * drift['none']['exact']:.0f} %",
        "drift_state_zero": f"zeroed {100 * drift['state_zero']['exact']:.0f} %",
        "drift_other": f"another document's {100 * drift['other_document']['exact']:.0f} %",
        "drift_earlier": f"one stride earlier {100 * drift['stride_earlier']['exact']:.0f} %",
        "drift_window_zero": f"window zeroed {100 * drift['window_zero']['exact']:.0f} %",
        "drift_kv_zero": f"K/V zeroed {100 * drift['kv_zero']['exact']:.0f} %",
        "longest_prefix": f"{longest['prefix_tokens']:,} shared tokens",
        "longest_warm": f"{longest['redirect_ms']:.0f} ms with redirect",
        "longest_copy": f"{longest['copy_ms']:.0f} ms with a copy",
        "longest_cold": f"{longest['cold_ms']:,.0f} ms cold",
        "served_shared": f"shared prefix {served['serial', 'shared-prefix']} and "
        f"{served['concurrent', 'shared-prefix']} times sooner",
        "served_turns": f"conversations {served['serial', 'multi-turn']} and "
        f"{served['concurrent', 'multi-turn']} times",
        "served_exact": f"all {exact:,} exact answers",
        "mtp_one": f"{guesses[1]['tokens_per_step']:.2f} tokens a step with one guess, "
        f"{guesses[3]['tokens_per_step']:.2f} with three",
        "kept": f"{learnt[0]:.2f} and {learnt[1]:.2f} times the least possible",
        "kept_by_lru": f"LRU {lru[0]:.2f} and {lru[1]:.2f}",
        "in_one": f"{min(in_one):.2f} to {max(in_one):.2f} times the best fixed split",
        "killed": str(sum(row["killed"] for row in mutants)),
        "mutants": str(len(mutants)),
        "rule_ms": f"{1e3 * rule['seconds']:.0f} ms, {100 * rule['fraction_of_roof']:.0f} %",
        "rule_over_fla": f"{others['fla naive chunk']['ratio']:.1f} times fla's naive rule",
        "rule_over_hf": f"{others['transformers torch']['ratio']:.1f} times transformers'",
        "binaries": f"{len(binaries)} binaries of {len(kernels)} kernels",
    }
