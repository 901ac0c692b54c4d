"""`python -m bench NAME [options]`, as scripts/bench calls it. Each NAME is a module with `main(arguments) -> exit status`."""

from __future__ import annotations

import importlib
import sys

# name -> its folder, and what it measures
NAMES = {
    "train": ("training", "shardwise beside its peers on the same GPT"),
    "split": ("training", "every kind of splitting: bytes against its formula, seconds beside the nearest library"),
    "pipeline": ("training", "pipelines beside torch.distributed.pipelining, on small and large stages"),
    "out_of_core": ("memory", "what trains under a limit of memory, and how fast: GEMS, recomputation, offload"),
    "host": ("training", "the host's part of a step beside plain PyTorch, where kernels take next to nothing"),
    "gpu": ("training", "a 1.3 B GPT on one GPU beside plain PyTorch with torch.compile"),
    "collectives": ("collectives", "all-reduce on one host through shared memory, beside gloo and MPI"),
    "staleness": ("training", "late updates where ranks are late by chance"),
    "start": ("training", "seconds from the command to the end of the first step, beside plain PyTorch"),
    "soak": ("faults", "half an hour of faults"),
    "hosts": ("faults", "hosts that are lost, and the network between them harmed, in running trainings (needs root)"),
    "faults": ("faults", "ranks that are killed, stopped or hang: how long each fault is felt"),
    "protect": ("faults", "what it costs a step that the run loses none"),
    "interrupted": ("faults", "a step of many microbatches in which a rank is killed: gone on with, and made again"),
    "shares": ("training", "unequal shares of the batch where one rank is slower"),
    "picked": ("training", "the planner's pick for experts and long sequences beside data parallelism"),
    "branches": ("training", "ranks that own parallel branches beside data parallelism"),
    "loader": ("training", "batches beside torch's DataLoader, and how long a loop waits for them"),
    "preprocess": ("training", "data prepared on the processor beside a GPU: pandas and cuDF, scikit-learn and cuML, Pillow and DALI"),
    "saves": ("faults", "what a checkpoint costs training, waited for and beside it"),
    "draws": ("training", "what drawing random numbers costs in a step with dropout"),
    "plan": ("planning", "how long planning takes, and how that grows"),
    "planned": ("planning", "the plan chosen against the best of all plans run, over emulated networks (needs root)"),
    "memory": ("memory", "the fullest rank's memory, predicted against measured: 35 architectures in eight layouts"),
    "audit": ("audit", "audits of right and wrong training scripts of many frameworks, each with the verdict that it should get"),
    "serve": ("serving", "placements of workflows: price beside others, planning time"),
    "tiers": ("serving", "plans at work between network namespaces with shaped links, beside what was planned (needs root)"),
    "tensor-plans": ("planning", "where shardwise cuts weights beside the tensor plans that transformers ships, 144 models"),
    "coverage": (
        "planning",
        "docs/coverage.md, as scripts/verify_all --axes makes it: operators by labels, models by axes, shares divided",
    ),
    "prove": ("verify", "how long proofs without a tolerance take, by layers, ranks and axes, and for large plans"),
    "alpa": ("planning", "the 21 configurations of Alpa's evaluation, planned and priced"),
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names."""
    if not arguments or arguments[0] not in NAMES:
        known = "\n".join(f"  scripts/bench {name:8} {about}" for name, (_, about) in NAMES.items())
        wanted = arguments and arguments[0] in ("-h", "--help")
        told = "" if wanted or not arguments else f"unknown benchmark {arguments[0]!r}\n"
        print(f"{told}scripts/bench NAME [--json FILE] [--help]\n{known}", file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    status: int = importlib.import_module(f"bench.{NAMES[arguments[0]][0]}.{arguments[0].replace('-', '_')}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
