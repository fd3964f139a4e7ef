"""What an accelerator gets from fullshard and FSDP2: copies, allocations, host time; and two ranks on it, for numbers.

    python benchmarks/accelerator.py --device cuda

One rank, and rank 0 of a world of 8 under torch's fake process group, whose messages cost nothing: what is left on the
device is computation and what an engine adds to it. Each engine runs in a process of its own. Counted by torch's
profiler over a settled step: kernels that copy or cast, their number and device time; by the clock: the host in forward
and backward until it has issued everything, and the step until the device is done; by the caching allocator:
allocations a step and the peak. Then two ranks share the device, with Gloo between them, and their losses are compared
with the plain model's.

With `--device cpu` it runs anywhere, to try the script itself: the columns of the device are empty then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from _common import RESULTS_FOLDER, machine_info, save_result, table
from host_time import shard_function
from llama import Llama, LlamaBlock, LlamaShape

SHAPES = {
    "small": (LlamaShape(width=256, blocks=4, hidden=512), 64),
    "large": (LlamaShape(width=4096, blocks=8, hidden=14336, heads=32), 2048),
}
WARM_UP_STEPS, STEPS = 3, 5
COPIES = ("copy", "memcpy", "cat", "split_with_sizes", "chunk_cat")


def make(engine: str, shape: LlamaShape, device: str, world_size: int) -> nn.Module:
    """A model in bf16 compute with fp32 parameters, a unit a block; the plain one for "plain"."""
    torch.manual_seed(0)
    model: nn.Module = Llama(shape).to(device)
    fully_shard = shard_function(engine)
    if fully_shard is None:
        return model
    if engine == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy
    else:
        from fullshard import MixedPrecisionPolicy
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (world_size,))
    for block in model.modules():
        if isinstance(block, LlamaBlock):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def batch(shape: LlamaShape, positions: int, rank: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [1, positions] each, another one on every rank."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(shape.vocabulary, (1, positions + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def one_rank(engine: str, size: str, device: str, world_size: int) -> dict[str, Any]:
    """Measure one engine in this process, which is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    shape, positions = SHAPES[size]
    model = make(engine, shape, device, world_size)
    tokens, targets = batch(shape, positions, 0, device)
    found: dict[str, list[float]] = {"forward host s": [], "backward host s": [], "step s": []}

    def step(keep: bool) -> None:
        started = time.perf_counter()
        loss = model(tokens, targets)
        between = time.perf_counter()
        loss.backward()
        issued = time.perf_counter()
        wait(device)
        ended = time.perf_counter()
        model.zero_grad()
        if keep:
            for key, seconds in zip(found, (between - started, issued - between, ended - started), strict=True):
                found[key].append(seconds)

    for _ in range(WARM_UP_STEPS):
        step(keep=False)
    before = allocations(device)
    for _ in range(STEPS):
        step(keep=True)
    after = allocations(device)
    result: dict[str, Any] = {key: statistics.median(values) for key, values in found.items()}
    result["allocations a step"] = (after["count"] - before["count"]) / STEPS
    result["peak bytes"] = after["peak"]
    result.update(copy_kernels(lambda: step(keep=False), device))
    dist.destroy_process_group()
    return result


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device != "cpu":
        torch.accelerator.synchronize()


def allocations(device: str) -> dict[str, int]:
    """Allocations so far and the peak in bytes, of the caching allocator; zeros on CPU."""
    if device != "cuda":
        return {"count": 0, "peak": 0}
    stats = torch.cuda.memory_stats()
    return {"count": stats["allocation.all.allocated"], "peak": stats["allocated_bytes.all.peak"]}


def copy_kernels(step: Any, device: str) -> dict[str, float]:
    """Number and device time of kernels of one step that only copy or cast; on CPU of operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    count = seconds = 0.0
    for event in profile.key_averages():
        on_device = getattr(event, "self_device_time_total", 0.0)
        microseconds = event.self_cpu_time_total if device == "cpu" else on_device
        if microseconds and any(word in event.key.lower() for word in COPIES):
            count += event.count
            seconds += microseconds / 1e6
    return {"copies a step": count, "copies s": seconds}


def two_ranks(rank: int, engine: str, size: str, device: str, folder: str) -> float:
    """Loss after three steps of SGD with two ranks on one device; of the plain model on the mean for "plain"."""
    if engine != "plain":
        store = dist.FileStore(f"{folder}/{engine}", 2)
        dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    shape, positions = SHAPES[size]
    model = make(engine, shape, device, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = (0, 1) if engine == "plain" else (rank,)
    loss = 0.0
    for _ in range(3):
        losses = []
        for each in ranks:
            with torch.autocast(device, torch.bfloat16, enabled=engine == "plain"):
                losses.append(model(*batch(shape, positions, each, device)))
        mean = torch.stack(losses).mean()
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = float(mean.detach())
    if engine != "plain":
        dist.destroy_process_group()
    return loss


def main() -> None:
    """Measure, print, save."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SHAPES, help="default: large on an accelerator, small on CPU")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder for the JSON file")
    arguments = parser.parse_args()
    size = arguments.size or ("small" if arguments.device == "cpu" else "large")
    context = multiprocessing.get_context("spawn")
    result: dict[str, Any] = {"machine": machine_info(), "device": arguments.device, "size": size, "one rank": {}}
    if arguments.device == "cuda":
        result["device"] = torch.cuda.get_device_name()
    for world_size in (1, 8):
        for engine in ("plain", "fsdp2", "fullshard"):
            with context.Pool(1) as pool:
                found = pool.apply(one_rank, (engine, size, arguments.device, world_size))
            result["one rank"][f"{engine}, world {world_size}"] = found
    rows = [[name, *(f"{value:.4g}" for value in found.values())] for name, found in result["one rank"].items()]
    print(table(["engine", *next(iter(result["one rank"].values()))], rows))
    result["loss of two ranks"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for engine in ("plain", "fsdp2", "fullshard"):
            count = 1 if engine == "plain" else 2
            with context.Pool(count) as pool:
                calls = [(rank, engine, size, arguments.device, folder) for rank in range(count)]
                losses = pool.starmap(two_ranks, calls, chunksize=1)
            result["loss of two ranks"][engine] = statistics.fmean(losses)
    print("mean loss after three steps:", result["loss of two ranks"])
    print(f"saved {save_result('accelerator', result, arguments.out)}")


if __name__ == "__main__":
    main()
