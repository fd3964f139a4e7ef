"""Which transports the units of an engine communicate by."""

from __future__ import annotations

import torch.distributed as dist

from fullshard.runtime.collectives import Custom, CustomAllReduce, Transport, make_transport
from fullshard.runtime.device import BufferPool, Streams
from fullshard.runtime.params.place import Links, Place, Resources
from fullshard.runtime.unit import Unit


class Linker:
    """Makes transports, one per group and kind, shared by the units."""

    def __init__(self, pool: BufferPool, streams: Streams) -> None:
        self._pool = pool
        self.streams = streams
        self._made: dict[tuple[int, str], Transport] = {}

    def resources(self, unit: Unit) -> Resources:
        """What `unit` gets to work with."""
        # In one order on all ranks: to make a transport may take all of its ranks.
        places = dict.fromkeys((unit.place, *(flow.place for flow in unit.flows)))
        return Resources(self._pool, {place: self._link(unit, place) for place in places})

    def _link(self, unit: Unit, place: Place) -> Links:
        replicate, own = place.replicate_group, place == unit.place
        averages = replicate is not None and replicate.size() > 1
        return Links(
            self._custom(unit, place, place.shard_group),
            self._custom(unit, place, (unit.wishes.reduce_group if own else None) or place.shard_group),
            self._between_replicas(unit, place, replicate) if replicate is not None and averages else None,
            None if place.secondary is None else self._custom(unit, place, place.secondary),
        )

    def _custom(self, unit: Unit, place: Place, group: dist.ProcessGroup) -> Transport:
        transport, wishes = self._transport(place, group), unit.wishes
        if wishes.all_gather is None and wishes.reduce_scatter is None:
            return transport
        return Custom(transport, group, place.device, self.streams, (wishes.all_gather, wishes.reduce_scatter))

    def _between_replicas(self, unit: Unit, place: Place, group: dist.ProcessGroup) -> Transport:
        transport, hook = self._transport(place, group), unit.wishes.all_reduce
        return transport if hook is None else CustomAllReduce(transport, hook)

    @property
    def shared_bytes(self) -> int:
        """This rank's part of the memory that ranks of its host share."""
        shared = [made.shared for made in self._made.values() if made.shared is not None]
        return sum(each.blocks.nbytes // each.neighbours for each in shared)

    def _transport(self, place: Place, group: dist.ProcessGroup) -> Transport:
        key = (id(group), place.transport)
        if key not in self._made:
            self._made[key] = make_transport(place.transport, group, place.device, self._pool, self.streams)
        return self._made[key]
