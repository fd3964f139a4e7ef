"""`fullshard train` under torch's elastic agent, whose ranks are forked from a process that has imported everything.

A rank then starts in milliseconds instead of seconds, so a test can afford many restarts. Ranks that are to die kill
themselves with SIGKILL at moments drawn from a seed. Every other incarnation saves in the background. Run as a program:
elastic.py PLAN.json, where the plan is

    {"runs": [{"arguments": [...], "ranks": 2, "kills": 20, "seed": 1}, ...]}

Every rank that dies says so on stderr: "DEATH incarnation rank kind".
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.cli import main
from fullshard.train.trainer import RankNumbers, Trainer

FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.truncate", "shutil.rmtree")
KINDS = ("start", "step", "save", "save")


class Death:
    """When a rank of one incarnation dies. Only moments are random: what leads there is not touched."""

    def __init__(self, seed: int, incarnation: int, ranks: int) -> None:
        draw = random.Random(f"{seed}/{incarnation}")
        self.incarnation = incarnation
        self.rank = draw.randrange(ranks)
        self.kind = draw.choice(KINDS)
        most = {"step": 4, "start": 1, "save": 4 if self.rank else 16}[self.kind]  # rank 0 has more to do in a save
        self.count = draw.randint(1, most)
        self.delay = draw.uniform(0.0, 0.4) if self.kind == "start" else draw.choice([0.0, draw.uniform(0.0, 0.01)])

    def arm(self) -> None:
        if self.kind == "start":
            self.happen()
        elif self.kind == "step":
            step: Callable[[Trainer], RankNumbers] = Trainer.train_step

            def counted(trainer: Trainer) -> RankNumbers:
                self.hit()
                return step(trainer)

            Trainer.train_step = counted  # type: ignore[method-assign]
        else:
            sys.addaudithook(self.heard)

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Every use of the file system passes here: deaths between any two steps of saving."""
        if event in FILE_EVENTS and "checkpoint" in str(arguments[0]):
            self.hit()

    def hit(self) -> None:
        self.count -= 1
        if self.count == 0:
            self.happen()

    def happen(self) -> None:
        if self.delay:
            timer = threading.Timer(self.delay, self.now)
            timer.daemon = True
            timer.start()
        else:
            self.now()

    def now(self) -> None:
        os.write(2, f"DEATH {self.incarnation} {self.rank} {self.kind}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def run_rank(arguments: list[str], kills: int, seed: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handler, which a program started anew does not have
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if incarnation < kills:
        death = Death(seed, incarnation, int(os.environ["WORLD_SIZE"]))
        if death.rank == int(os.environ["RANK"]):
            death.arm()
    modes = ["--checkpoint.async_mode=async"] if incarnation % 2 else []
    code = main([*arguments, *modes])
    sys.stdout.flush()
    sys.stderr.flush()
    if code:  # as the command does: see fullshard.cli.run
        os._exit(code)


def launch(arguments: list[str], ranks: int, kills: int, seed: int) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        start_method="fork",
        max_restarts=kills + 1,
        monitor_interval=0.05,
    )
    elastic_launch(config, run_rank)(arguments, kills, seed)


if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text())["runs"]:
        launch(**run)
