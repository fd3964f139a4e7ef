"""One rank process of a benchmark: does what it is sent, in whatever environment its Python belongs to.

Orders come and replies go as lines of JSON through two pipes whose descriptors are the arguments, so that ranks of
different environments share no pickled objects, and libraries may print what they like. The first line says who this
process is and which handler to make ("module:function" and its options); each later line is a command for the handler.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

GROUP_TIMEOUT_SECONDS = 300.0


def main() -> None:
    """Serve until the pipe of orders ends."""
    orders, replies = (os.fdopen(int(number), mode) for number, mode in zip(sys.argv[1:], "rw", strict=True))

    def reply(ok: bool, value: Any) -> None:
        replies.write(json.dumps({"ok": ok, "value": value}) + "\n")
        replies.flush()

    try:
        first = json.loads(orders.readline())
        handler = start(first)
        reply(True, None)
        for line in orders:
            reply(True, handler(json.loads(line)))
    except BrokenPipeError:
        pass  # the parent is gone
    except BaseException:  # noqa: BLE001 - whatever it is, the parent prints it
        reply(False, traceback.format_exc())
    # Libraries that were interrupted, or keep threads, may hang or abort in a regular exit.
    sys.stderr.flush()
    os._exit(0)


def start(place: dict[str, Any]) -> Any:
    """Join the others and make the handler."""
    os.environ.update(
        GLOO_SOCKET_IFNAME=place["interface"],
        RANK=str(place["rank"]),
        WORLD_SIZE=str(place["world_size"]),
        LOCAL_RANK=str(place["local_rank"]),
        LOCAL_WORLD_SIZE=str(place["local_world_size"]),
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # one core a rank
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(place["store"], place["world_size"]),
        rank=place["rank"],
        world_size=place["world_size"],
        timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
    )
    module, _, function = place["handler"].partition(":")
    return getattr(importlib.import_module(module), function)(place["rank"], **place["options"])


if __name__ == "__main__":
    main()
