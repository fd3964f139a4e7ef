"""Where ranks meet: a store that listens on loopback alone for those of one host, and nothing old in anybody's store.

torch's own rendezvous listens on every interface, whatever address it is given, and whoever reaches its port can read
and write what the ranks tell each other. Over several hosts torchrun makes the rendezvous, and the network is its
user's to protect.
"""

from __future__ import annotations

import socket
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.rendezvous import rendezvous

from fullshard.errors import PeerTimeoutError

LOOPBACK = "127.0.0.1"
BACKEND = "fullshard-loopback"


def meet(rank: int, size: int, timeout: timedelta) -> Store:
    """The store of this incarnation of the job, at the address that the launcher has left in the environment.

    Restarted ranks find the store of those who died, with the addresses where these listened: who is early would read
    one of them and wait there for the whole time limit. So the ranks first agree on a name that is new.
    """
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(fresh_name(PrefixStore("fullshard", store), rank, size, timeout.total_seconds()), store)


def fresh_name(store: Store, rank: int, size: int, limit_seconds: float) -> str:
    """A name that all living ranks know, whatever dead ones have left in the store.

    Every rank asks under a name that nobody has used. Only a living rank 0 answers that, with its own new name, and
    goes on until every rank has confirmed it.
    """
    own = uuid.uuid4().hex
    deadline = time.monotonic() + limit_seconds
    if rank:
        store.set(f"ask/{rank}", own)
        while not store.check([f"answer/{own}"]):
            _pause(deadline, [0], limit_seconds)
        name = store.get(f"answer/{own}").decode()
        store.set(f"heard/{rank}/{name}", "")
        return name
    waiting = list(range(1, size))
    while waiting:
        for each in waiting:
            if store.check([f"ask/{each}"]):  # perhaps of one who is dead: then a new one follows
                store.set(f"answer/{store.get(f'ask/{each}').decode()}", own)
        waiting = [each for each in waiting if not store.check([f"heard/{each}/{own}"])]
        if waiting:
            _pause(deadline, waiting, limit_seconds)
    return own


def _pause(deadline: float, missing: list[int], limit_seconds: float) -> None:
    """Between two looks at the store. A blocking `get` would keep signals, and so the launcher, waiting as well."""
    if time.monotonic() > deadline:
        raise PeerTimeoutError(f"rank(s) {missing} did not come to the rendezvous within {limit_seconds:.0f} s.")
    time.sleep(0.005)


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
