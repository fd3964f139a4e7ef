"""The optimizer's step and clipping: flat and per-parameter fullshard, FSDP2, and plain tensors of the same sizes.

    python benchmarks/optimizer_step.py --workload a,b

Every rank holds, of one model, what each contender holds of it: its shards with gradients from one backward. "plain" is
what the same update costs without any engine: ordinary tensors in the sizes of this rank's shards, torch's fused AdamW
and torch's clipping. Round after round each contender in turn clips and steps a few times, the order turning by one
place; ratios are taken within a round, then their median. A step is over when its slowest rank is done.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from _common import RESULTS_FOLDER, Spread, machine_info, save_result, table
from llama import Llama, LlamaBlock
from ranks import RankGroup
from tasks import Handler
from workloads import WORKLOADS, Workload

CONTENDERS = ("plain", "flat", "per-parameter", "fsdp2")
MAX_NORM = 1.0
WARM_UP_STEPS = 3

Act = Callable[[], Any]


# -- in the ranks ------------------------------------------------------------------------------------------------------


def make_handler(rank: int, workload: str) -> Handler:
    """A rank that clips and steps as often as asked with one contender: "name:times" -> seconds of each part."""
    contenders = {name: _contender(name, WORKLOADS[workload], rank) for name in CONTENDERS}
    for clip, step in contenders.values():
        for _ in range(WARM_UP_STEPS):
            clip()
            step()

    def run(command: str) -> dict[str, list[float]]:
        name, _, times = command.partition(":")
        clip, step = contenders[name]
        clip()  # wakes caches up, not counted
        step()
        seconds: dict[str, list[float]] = {"clip": [], "step": []}
        for _ in range(int(times)):
            for part, act in (("clip", clip), ("step", step)):
                dist.barrier()
                start = time.perf_counter()
                act()
                seconds[part].append(time.perf_counter() - start)
        return seconds

    return run


def _contender(name: str, workload: Workload, rank: int) -> tuple[Act, Act]:
    """What clips and what steps; gradients stay, so that both can be repeated."""
    torch.manual_seed(0)
    model = Llama(workload.shape)
    if name == "plain":
        parameters = [_shard_of(p, workload.world_size, rank) for p in model.parameters()]
        optimizer = _adamw(_groups(parameters))
        return lambda: torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True), optimizer.step
    shard = _fsdp2() if name == "fsdp2" else fullshard.fully_shard
    for module in model.modules():
        if isinstance(module, LlamaBlock):
            shard(module)
    shard(model)
    tokens = torch.randint(workload.shape.vocabulary, (2, workload.batch, workload.positions))
    model(tokens[0], tokens[1]).backward()
    groups = _groups(list(model.parameters()))
    if name == "flat":
        flat = fullshard.optim.flat(torch.optim.AdamW, groups, lr=workload.learning_rate, fused=True)
        return lambda: fullshard.clip_grad_norm_(model, MAX_NORM), flat.step
    clip = torch.nn.utils.clip_grad_norm_ if name == "fsdp2" else fullshard.clip_grad_norm_
    return lambda: clip(model.parameters(), MAX_NORM), _adamw(groups).step


def _fsdp2() -> Callable[[nn.Module], Any]:
    from torch.distributed.fsdp import fully_shard

    return fully_shard


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weight decay on matrices only."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _shard_of(parameter: nn.Parameter, world_size: int, rank: int) -> nn.Parameter:
    """An ordinary parameter in the size of this rank's rows, with a gradient."""
    rows = torch.chunk(parameter.detach(), world_size)[rank].clone()
    made = nn.Parameter(rows)
    made.grad = torch.randn_like(rows)
    return made


# -- in the parent -----------------------------------------------------------------------------------------------------


def measure(workload: Workload, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """By contender and part ("clip", "step", "both") the median seconds of each round, of the slowest rank."""
    found: dict[str, dict[str, list[float]]] = {name: {"clip": [], "step": [], "both": []} for name in CONTENDERS}
    group = RankGroup(workload.world_size, "optimizer_step:make_handler", {"workload": workload.name})
    try:
        for number in range(rounds):
            turn = number % len(CONTENDERS)
            for name in CONTENDERS[turn:] + CONTENDERS[:turn]:
                ranks = group.send(f"{name}:{steps}")
                slowest = {
                    part: [max(times) for times in zip(*(rank[part] for rank in ranks), strict=True)]
                    for part in ("clip", "step")
                }
                slowest["both"] = [sum(pair) for pair in zip(slowest["clip"], slowest["step"], strict=True)]
                for part, times in slowest.items():
                    found[name][part].append(statistics.median(times))
    finally:
        group.close()
    return found


def summary(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Spreads of seconds, and of ratios to plain and to FSDP2 within rounds."""
    made: dict[str, dict[str, Any]] = {}
    for name, parts in found.items():
        made[name] = {f"{part}_seconds": asdict(Spread.of(times)) for part, times in parts.items()}
        for other in ("plain", "fsdp2"):
            pairs = zip(parts["both"], found[other]["both"], strict=True)
            made[name][f"over_{other}"] = asdict(Spread.of([mine / theirs for mine, theirs in pairs]))
    return made


def render(results: dict[str, dict[str, Any]]) -> str:
    """The table of one workload."""
    rows = []
    for name, values in results.items():
        times = [f"{values[f'{part}_seconds']['median'] * 1000:.2f}" for part in ("clip", "step", "both")]
        ratio = values["over_plain"]
        spread = f"{ratio['low']:.2f}-{ratio['high']:.2f}"
        rows.append([name, *times, f"{ratio['median']:.3f}", spread, f"{values['over_fsdp2']['median']:.3f}"])
    return table(["", "clip ms", "step ms", "both ms", "/ plain", "its middle half", "/ fsdp2"], rows)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="a", help=f"comma-separated, of {','.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=12, help="how often each contender has its turn")
    parser.add_argument("--steps", type=int, default=5, help="measured steps a turn")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine_info(), "rounds": arguments.rounds, "steps": arguments.steps}
    print(result["machine"])
    for name in arguments.workload.split(","):
        results = summary(measure(WORKLOADS[name], arguments.rounds, arguments.steps))
        result[name] = {"workload": asdict(WORKLOADS[name]), "contenders": results}
        print(f"({name}) {WORKLOADS[name].title}")
        print(render(results), flush=True)
    print(f"saved {save_result('optimizer_step', result, arguments.out)}")


if __name__ == "__main__":
    main()
