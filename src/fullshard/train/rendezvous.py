"""Where the ranks that `fullshard train` starts on one host meet: a store that listens on loopback alone.

torch's own rendezvous listens on every interface, whatever address it is given, and whoever reaches its port can read
and write what the ranks tell each other. Over several hosts torchrun makes the rendezvous, and the network is its
user's to protect.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

LOOPBACK = "127.0.0.1"
BACKEND = "fullshard-loopback"


class LoopbackRendezvous(RendezvousHandler):
    """One node, which is complete at once. The store lives as long as the launcher."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self._run_id = run_id
        listener = socket.create_server((LOOPBACK, 0))
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to the store of the launcher; none of them makes one."""
        return True

    def get_backend(self) -> str:
        """Name under which torch's launcher finds this."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """This node, alone: rank 0 of 1."""
        where = RendezvousStoreInfo(LOOPBACK, self.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), rank=0, world_size=1, bootstrap_store_info=where)

    def is_closed(self) -> bool:
        """Never: nobody else may join, or leave."""
        return False

    def set_closed(self) -> None:
        """Nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits."""
        return 0

    def get_run_id(self) -> str:
        """The id that the launcher gave."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store goes with the process."""
        return True


def use_loopback_rendezvous() -> str:
    """Make torch's launcher know this rendezvous; returns the name for `rdzv_backend`."""
    rendezvous_handler_registry.register(BACKEND, _create)
    return BACKEND


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    seconds = parameters.get_as_int("timeout", 120)
    return LoopbackRendezvous(parameters.run_id, timedelta(seconds=seconds or 120))
