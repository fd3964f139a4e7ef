"""Transport through shared memory, for CPU ranks on one host: the full buffer of a unit exists once.

    hosts    which ranks of a group share this host, and the first memory between them
    words    counters that one rank writes and others wait for, with a deadline, and an eye on processes that end
    blocks   memory that all of these ranks see, handed out to the same purpose on every one of them
    shared   the transport: gathers and reductions in blocks, between hosts by messages

[Note: nothing to clean up]
The memory has no name. It is made by `memfd_create`, and other ranks open it through the files of the process that made
it. So nothing is left in /dev/shm whichever way a rank ends, /dev/shm need not exist, and its size does not matter.
"""

from fullshard.runtime.collectives.shm.blocks import Block
from fullshard.runtime.collectives.shm.hosts import Neighbours, meet
from fullshard.runtime.collectives.shm.shared import Shared, column_of

__all__ = ["Block", "Neighbours", "Shared", "column_of", "meet"]
