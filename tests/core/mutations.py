"""Deliberate faults in core/. Each must make the named property fail: a property that nothing can break proves nothing.

When code changes and a snippet is gone, write the fault anew in the new code; do not drop it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: What is wrong then.
        module: Module of core/, without the folder.
        snippet: Text that occurs exactly once in the module.
        replacement: What stands there instead.
        caught_by: Name of the property that must fail.
        saying: Part of the message, where a property checks many things.
    """

    name: str
    module: str
    snippet: str
    replacement: str
    caught_by: str
    saying: str = ""


_ANY_RUN = "test_any_run_is_valid"

LAYOUT = [
    Mutation(
        "rows are spread evenly instead of as torch.chunk does",
        "layout",
        "return min(rank * chunk, rows), min((rank + 1) * chunk, rows)",
        "return rows * rank // size, rows * (rank + 1) // size",
        "test_rows_are_those_of_torch_chunk",
    ),
    Mutation(
        "ranges go past the last row",
        "layout",
        "return min(rank * chunk, rows), min((rank + 1) * chunk, rows)",
        "return rank * chunk, (rank + 1) * chunk",
        "test_ranges_tile_every_parameter",
    ),
    Mutation(
        "a 0-d parameter is divided",
        "layout",
        "return (0, self.rows) if self.replicated else row_range(self.rows, size, rank)",
        "return row_range(self.rows, size, rank)",
        "test_special_parameters",
    ),
    Mutation(
        "the full buffer has no room for the padding of the last chunk",
        "layout",
        "full_offset += align(region.chunk_numel * size, itemsize)",
        "full_offset += align(spec.numel, itemsize)",
        "test_regions_overlap_in_no_buffer",
    ),
    Mutation(
        "chunks are padded, so rows are not where a rank puts them",
        "layout",
        "return self.chunk * self.row_numel",
        "return -(-self.chunk * self.row_numel // 4) * 4",
        "test_each_rank_writes_its_rows_at_its_chunk_of_the_full_buffer",
    ),
    Mutation(
        "offsets are not aligned",
        "layout",
        "return -(-numel // step) * step",
        "return numel",
        "test_every_shard_is_aligned",
    ),
    Mutation(
        "large parameters with unaligned chunks travel by themselves",
        "layout",
        " or chunk_bytes % ALIGN_BYTES != 0",
        "",
        "test_every_shard_is_aligned",
    ),
    Mutation(
        "every parameter takes a page",
        "layout",
        "ALIGN_BYTES = 16",
        "ALIGN_BYTES = 4096",
        "test_padding_is_bounded",
    ),
    Mutation(
        "frozen small parameters stand after trainable large ones",
        "layout",
        "(not packed(specs[i]), not specs[i].trainable, i)",
        "(not specs[i].trainable, not packed(specs[i]), i)",
        "test_packed_regions_are_a_prefix",
    ),
    Mutation(
        "frozen parameters stand between trainable ones",
        "layout",
        "(not packed(specs[i]), not specs[i].trainable, i)",
        "(not packed(specs[i]), i)",
        "test_trainable_regions_stand_before_frozen_ones",
    ),
    Mutation(
        "gradients take the room of frozen parameters too",
        "layout",
        "for r in self.regions if trainable[r.index]]",
        "for r in self.regions]",
        "test_gradients_are_a_prefix_of_the_flat_shard",
    ),
    Mutation(
        "a short chunk's missing rows are not zeroed",
        "layout",
        "end = region.shard_offset + region.rank_numel(self.size, rank)",
        "end = region.shard_offset + self.aligned(region.chunk_numel)",
        "test_gaps_are_what_gradients_leave",
    ),
    Mutation(
        "chunks are rounded up to powers of two",
        "layout",
        "return -(-rows // size)",
        "return 1 << (-(-rows // size) - 1).bit_length()",
        "test_a_smaller_group_fits_the_same_full_buffer",
    ),
    Mutation(
        "each parameter looks at all before it",
        "layout",
        "packed_numel = shard_offset",
        "packed_numel = max(align(r.shard_offset + r.chunk_numel, itemsize) for r in regions if r.packed)",
        "test_work_grows_with_the_number_of_parameters_only",
    ),
]

GROUPING_AND_SPEC = [
    Mutation(
        "tied names become parameters of their own",
        "grouping",
        "names.setdefault(occurrence.identity, [])",
        "names.setdefault((occurrence.identity, occurrence.name), [])",
        "test_tied_names_are_together",
    ),
    Mutation(
        "parameters of other units are taken again",
        "grouping",
        "if occurrence.identity not in skip:",
        "if occurrence.identity is not None:",
        "test_every_parameter_is_in_exactly_one_group",
    ),
    Mutation(
        "taken parameters are found by name",
        "grouping",
        "if occurrence.identity not in skip:",
        "if occurrence.name not in skip:",
        "test_a_parameter_that_another_unit_owns_is_left_out",
    ),
    Mutation(
        "the third of three tied names is lost",
        "grouping",
        "tuple(found[1:])",
        "tuple(found[1:2])",
        "test_groups_are_the_same_in_any_order_of_the_walk",
    ),
    Mutation(
        "groups are ordered by identity, which differs between ranks",
        "grouping",
        "for identity, found in names.items())",
        "for identity, found in sorted(names.items()))",
        "test_groups_come_in_the_order_of_the_walk",
    ),
    Mutation(
        "a missing last line is not a difference",
        "grouping",
        "range(max(len(mine), len(theirs)))",
        "range(min(len(mine), len(theirs)))",
        "test_first_difference_is_the_first",
    ),
    Mutation(
        "rows are counted on dim 0 whatever the sharded dim",
        "spec",
        "return self.shape[self.shard_dim] if self.shape else 1",
        "return self.shape[0] if self.shape else 1",
        "test_rows_times_row_size_is_the_parameter",
    ),
    Mutation(
        "a sharded dim past the last one is accepted",
        "spec",
        "if self.shape and not 0 <= self.shard_dim < len(self.shape):",
        "if self.shape and not 0 <= self.shard_dim <= len(self.shape):",
        "test_bad_specs_are_refused",
    ),
    Mutation(
        "a rank past the last one is accepted",
        "spec",
        "if not 0 <= self.rank < self.size:",
        "if not 0 <= self.rank <= self.size:",
        "test_world_checks_ranks",
    ),
]

TABLE = [
    Mutation(
        "a prefetched unit enters forward without waiting",
        "lifecycle",
        "(_P, Step.ENTER_FORWARD): (_F, (Op.WAIT_GATHER,))",
        "(_P, Step.ENTER_FORWARD): (_F, _NOTHING)",
        _ANY_RUN,
        "it is in use and not full",
    ),
    Mutation(
        "a kept unit is gathered again",
        "lifecycle",
        "(_K, Step.ENTER_BACKWARD): (_B, _NOTHING)",
        "(_K, Step.ENTER_BACKWARD): (_B, (Op.GATHER,))",
        "test_table_entries_do_what_their_states_say",
        "it has a full buffer already",
    ),
    Mutation(
        "an unfinished gather counts as full when backward enters",
        "lifecycle",
        "(_P, Step.ENTER_BACKWARD): (_B, (Op.WAIT_GATHER,))",
        "(_P, Step.ENTER_BACKWARD): (_B, _NOTHING)",
        "test_table_entries_do_what_their_states_say",
    ),
    Mutation(
        "nobody has thought of an unshard during backward",
        "lifecycle",
        "    (_B, Step.UNSHARD): (_B, _NOTHING),\n",
        "",
        "test_table_has_an_answer_to_everything_that_can_happen",
    ),
    Mutation(
        "an abort keeps the secondary shard",
        "lifecycle",
        "(_2, Step.ABORT): (_S, (Op.FREE,))",
        "(_2, Step.ABORT): (_2, _NOTHING)",
        "test_table_steps_go_where_their_names_say",
    ),
    Mutation(
        "what is held for the next use counts as kept",
        "lifecycle",
        "(_F, Step.EXIT_HOLD): (_H, _NOTHING)",
        "(_F, Step.EXIT_HOLD): (_K, _NOTHING)",
        "test_every_state_can_be_reached",
    ),
]

SCHEDULE = [
    Mutation(
        "a backward frees what a forward computes with",
        "lifecycle",
        "(_F, Step.LEAVE_FREE): (_F, _NOTHING)",
        "(_F, Step.LEAVE_FREE): (_S, (Op.FREE,))",
        "test_what_is_in_use_is_left_only_by_its_end",
    ),
    Mutation(
        "recomputation frees what the backward around it needs",
        "lifecycle",
        "(_B, Step.EXIT_FREE): (_B, _NOTHING)",
        "(_B, Step.EXIT_FREE): (_S, (Op.FREE,))",
        _ANY_RUN,
        "it is in use and not full",
    ),
    Mutation(
        "kept parameters survive a change of the shards",
        "schedule",
        "            if not state.in_use:\n",
        "            if state is State.PREFETCHED:\n",
        _ANY_RUN,
        "units keep what was gathered before",
    ),
    Mutation(
        "one unit more than the budget is gathered ahead",
        "schedule",
        "used > budget:",
        "used - self.full_bytes[unit] > budget:",
        _ANY_RUN,
        "bytes ahead",
    ),
    Mutation(
        "without a budget everything is gathered ahead",
        "schedule",
        "            if budget is None:\n                break\n",
        "",
        _ANY_RUN,
        "are gathered ahead",
    ),
    Mutation(
        "the last unit's buffer is kept beyond the budget",
        "schedule",
        "ahead + self.full_bytes[unit] <= budget",
        "ahead <= budget",
        _ANY_RUN,
        "bytes ahead",
    ),
    Mutation(
        "prefetches that nobody wants stay",
        "schedule",
        "        self._drop_prefetched(wanted)\n",
        "",
        _ANY_RUN,
    ),
    Mutation(
        "prefetches outlive the backward",
        "schedule",
        "        self._drop_prefetched()\n",
        "",
        _ANY_RUN,
        "stays gathered ahead",
    ),
    Mutation(
        "what the user unsharded ahead is dropped as a wrong prefetch",
        "schedule",
        "unit not in wanted and unit not in self._pinned:",
        "unit not in wanted:",
        "test_what_a_user_unsharded_ahead_stays_until_its_use",
        "the user has unsharded it",
    ),
    Mutation(
        "one reduction too many is on the wire",
        "schedule",
        "self._advance_reduces(self.policy.reduces_in_flight - 1)",
        "self._advance_reduces(self.policy.reduces_in_flight)",
        _ANY_RUN,
        "too many on the wire",
    ),
    Mutation(
        "reductions never overlap",
        "schedule",
        "self._advance_reduces(self.policy.reduces_in_flight - 1)",
        "self._advance_reduces(0)",
        "test_as_many_reductions_overlap_as_allowed",
    ),
    Mutation(
        "a unit's second reduction overtakes its first",
        "schedule",
        "        if any(pending.unit == unit for pending in self._reducing):\n            self._drain()\n",
        "",
        _ANY_RUN,
        "its last reduction is not complete",
    ),
    Mutation(
        "reductions complete newest first",
        "schedule",
        "self._advance(self._reducing[0])",
        "self._advance(self._reducing[-1])",
        _ANY_RUN,
        "the oldest",
    ),
    Mutation(
        "the end of backward does not wait",
        "schedule",
        "        if event.last:\n            self._drain()\n",
        "",
        _ANY_RUN,
        "still on the wire",
    ),
    Mutation(
        "replicas are never summed",
        "schedule",
        "pending.op is Op.WAIT_REDUCE and self.policy.replicated",
        "pending.op is Op.WAIT_REDUCE and not self.policy.replicated",
        _ANY_RUN,
        "replicas",
    ),
    Mutation(
        "replicas are summed though that was turned off",
        "schedule",
        " and self.policies[pending.unit].sync_replicas",
        "",
        _ANY_RUN,
        "it is not to be summed over replicas now",
    ),
    Mutation(
        "accumulation without communication communicates",
        "schedule",
        "if not self.policies[unit].sync_gradients:",
        "if False:",
        _ANY_RUN,
        "its gradients are to be held",
    ),
    Mutation(
        "gradients of a unit whose inputs need none are lost",
        "schedule",
        "sorted(set(left) | set(event.units), reverse=True)",
        "sorted(left, reverse=True)",
        _ANY_RUN,
        "must be given to",
    ),
    Mutation(
        "a recomputation that was stopped early leaves its unit in forward",
        "schedule",
        "            if not self._depth[unit]:\n                self._move(unit, Step.EXIT_HOLD)\n            return\n",
        "            return\n",
        _ANY_RUN,
        "full and nothing needs it",
    ),
    Mutation(
        "an inner unit that failed keeps its buffer",
        "schedule",
        "        elif not self._depth[unit]:\n            self._move(unit, Step.ABORT)\n",
        "",
        _ANY_RUN,
        "keeps its buffer",
    ),
    Mutation(
        "units held for another module stay full after forward",
        "schedule",
        "            if state is State.HELD:\n",
        "            if False:\n",
        "test_modules_of_one_unit_share_one_gather",
        "for a next use that has not come",
    ),
    Mutation(
        "a secondary shard outlives a backward that did not use it",
        "schedule",
        "if kept or state in (State.HELD, State.SECONDARY):",
        "if kept or state is State.HELD:",
        "test_units_that_backward_did_not_use_are_sharded_after_it",
    ),
    Mutation(
        "a unit that is kept for backward outlives a backward that did not use it",
        "schedule",
        "kept = state is State.KEPT and not self.policies[unit].keep_after_backward",
        "kept = False",
        "test_every_step_ends_at_rest",
    ),
    Mutation(
        "the order depends on an address",
        "schedule",
        "        for unit in ahead:\n",
        "        for unit in sorted(ahead, key=lambda unit: hash((id(self), unit))):\n",
        "test_same_events_give_same_commands",
    ),
    Mutation(
        "an abort throws complete gradients away",
        "schedule",
        "        if event.inside_backward:\n            for pending",
        "        if event:\n            for pending",
        "test_abort_at_any_point_leads_to_rest",
    ),
    Mutation(
        "a forward gathers from the secondary shard ahead of time",
        "lifecycle",
        "(_2, Step.PREFETCH): (_P, (Op.FREE, Op.GATHER))",
        "(_2, Step.PREFETCH): (_P, (Op.GATHER_SECONDARY,))",
        "test_a_forward_prefetch_takes_the_primary_shard",
    ),
    Mutation(
        "an abort forgets reductions without ending them",
        "schedule",
        "                self._emit(Op.DISCARD, pending.unit)\n",
        "                pass\n",
        "test_abort_at_any_point_leads_to_rest",
    ),
    Mutation(
        "a module that was running at an abort is counted below zero",
        "schedule",
        "        if not self._depth[unit]:\n            return  # an ABORT came while it ran\n",
        "",
        "test_abort_at_any_point_leads_to_rest",
    ),
    Mutation(
        "an abort leaves modules counted as running",
        "schedule",
        "        self._depth = [0] * len(self.states)\n",
        "",
        "test_abort_at_any_point_leads_to_rest",
    ),
    Mutation(
        "backwards that an abort gave up are still expected",
        "schedule",
        "        self._reducing.clear()\n        self._to_backward.clear()\n",
        "        self._reducing.clear()\n",
        "test_abort_leaves_nothing_behind",
    ),
    Mutation(
        "the order of a forward that an abort cut short is expected next",
        "schedule",
        "        self._order.recorded = []\n",
        "",
        "test_abort_leaves_nothing_behind",
    ),
    Mutation(
        "a recomputed unit is expected in backward twice",
        "schedule",
        "if event.will_backward and not event.inside_backward:",
        "if event.will_backward and self.states[unit] is not State.BACKWARD:",
        "test_a_repeated_step_settles_and_wastes_nothing",
    ),
    Mutation(
        "an inner unit's buffer is kept though the unit around it comes first",
        "schedule",
        "self.prefetched_bytes() + sum(self.full_bytes[u] for u in around)",
        "self.prefetched_bytes()",
        "test_the_buffer_that_stays_after_forward_is_the_one_backward_needs_first",
    ),
    Mutation(
        "a unit that backward does not read is gathered for it",
        "schedule",
        " if self.policies[u].unshard_in_backward]",
        "]",
        "test_a_unit_that_backward_does_not_read_is_not_gathered_for_it",
    ),
    Mutation(
        "the recorded order is not used",
        "order",
        "self.expected = self.recorded",
        "self.expected = self.expected",
        "test_prefetch_follows_the_recorded_order",
    ),
    Mutation(
        "without a budget two units are gathered ahead",
        "schedule",
        "            if budget is None:\n                break\n",
        "            if budget is None and len(wanted) == 2:\n                break\n",
        "test_full_buffers_of_a_chain_are_the_root_one_in_use_and_those_ahead",
    ),
    Mutation(
        "a unit without parameters counts as a prefetch",
        "schedule",
        " or not self.full_bytes[unit]",
        "",
        "test_a_prefetch_does_not_wait_behind_units_without_parameters",
    ),
    Mutation(
        "expected backwards grow without bound",
        "schedule",
        "            del self._to_backward[: -MAX_RECORD_PER_UNIT * len(self.states)]\n",
        "",
        "test_records_stay_bounded",
    ),
    Mutation(
        "the recorded order grows without bound",
        "order",
        "if len(self.recorded) < limit:",
        "if limit:",
        "test_records_stay_bounded",
    ),
    Mutation(
        "parameters are freed after backward though they shall stay",
        "schedule",
        "Step.LEAVE_KEEP if self.policies[unit].keep_after_backward else Step.LEAVE_FREE",
        "Step.LEAVE_FREE",
        "test_parameters_kept_after_backward_are_not_gathered_again",
    ),
    Mutation(
        "each module of a unit gathers it anew",
        "schedule",
        "if event.more or (",
        "if (",
        "test_modules_of_one_unit_share_one_gather",
    ),
    Mutation(
        "backward gathers from the primary shards",
        "lifecycle",
        "(_2, Step.ENTER_BACKWARD): (_B, (Op.GATHER_SECONDARY, Op.WAIT_GATHER))",
        "(_2, Step.ENTER_BACKWARD): (_B, (Op.FREE, *_GATHER_NOW))",
        "test_a_secondary_shard_serves_backward_only",
    ),
    Mutation(
        "a unit in use can be resharded",
        "schedule",
        "if self.states[event.unit].in_use:",
        "if self.states[event.unit] is State.FORWARD:",
        "test_resharding_what_is_in_use_is_refused",
    ),
    Mutation(
        "units without settings are accepted",
        "schedule",
        "if len(full_bytes) != len(policies):",
        "if len(full_bytes) < len(policies):",
        "test_a_scheduler_needs_a_policy_for_every_unit",
    ),
    Mutation(
        "a log shows whole objects",
        "schedule",
        'return f"{self.op.name} {self.unit}"',
        "return repr(self)",
        "test_commands_are_short_in_a_log",
    ),
    Mutation(
        "an impossible event is ignored",
        "schedule",
        'raise AssertionError(f"unit {unit} in state',
        'return print(f"unit {unit} in state',
        "test_an_impossible_event_is_our_bug_and_says_so",
    ),
]

SETTINGS_AND_NUMBERS = [
    Mutation(
        "a negative reshard_after_forward is accepted",
        "policy",
        "if not 1 <= reshard_after_forward <= shard_size",
        "if reshard_after_forward == 0 or not reshard_after_forward <= shard_size",
        "test_reshard_after_forward_takes_exactly_the_divisors",
    ),
    Mutation(
        "the size itself is not offered as a divisor",
        "policy",
        "for n in range(1, shard_size + 1) if",
        "for n in range(1, shard_size) if",
        "test_bad_settings_are_refused_with_what_to_do",
    ),
    Mutation(
        "a budget of nothing is refused",
        "policy",
        "self.prefetch_bytes < 0:",
        "self.prefetch_bytes <= 0:",
        "test_smallest_settings_are_accepted",
    ),
    Mutation(
        "gradients are a sum",
        "scaling",
        "return before, total / before",
        "return before, total",
        "test_sums_become_means",
    ),
    Mutation(
        "everything is divided before the sum",
        "scaling",
        "while before * before < total:",
        "while before < total:",
        "test_small_ranges_are_divided_evenly",
    ),
    Mutation(
        "gradients can be divided by infinity",
        "scaling",
        "if not total > 0 or isinf(total):",
        "if not total > 0:",
        "test_bad_divide_factors_are_refused",
    ),
    Mutation(
        "clipping leaves norms below the limit by another margin",
        "scaling",
        "1e-6",
        "1e-3",
        "test_clip_coefficient_is_that_of_torch",
    ),
    Mutation(
        "a NaN norm clips nothing",
        "scaling",
        "min(max_norm / (total_norm + 1e-6), 1.0)",
        "min(1.0, max_norm / (total_norm + 1e-6))",
        "test_clip_coefficient_of_bad_norms_is_that_of_torch",
    ),
    Mutation(
        "a secondary shard counts as a full buffer",
        "cost",
        "_RELEASE = (Op.FREE, Op.SHRINK)",
        "_RELEASE = (Op.FREE,)",
        "test_peak_bytes_by_hand",
    ),
    Mutation(
        "discarded gradients stay on the wire",
        "cost",
        "(Op.WAIT_REDUCE, Op.DISCARD))",
        "(Op.WAIT_REDUCE,))",
        "test_peak_bytes_by_hand",
    ),
    Mutation(
        "gradients count until replicas are summed",
        "cost",
        "(Op.WAIT_REDUCE, Op.DISCARD))",
        "(Op.WAIT_ALL_REDUCE, Op.DISCARD))",
        "test_gradients_on_the_wire_are_those_of_the_simulator",
    ),
    Mutation(
        "a gather from the secondary shard costs no memory",
        "cost",
        "_ACQUIRE = (Op.GATHER, Op.GATHER_SECONDARY)",
        "_ACQUIRE = (Op.GATHER,)",
        "test_peak_bytes_by_hand",
    ),
    Mutation(
        "the peak is taken before a gather",
        "cost",
        "            held.add(item.unit)\n            peak = max(peak, sum(sizes[unit] for unit in held))\n",
        "            peak = max(peak, sum(sizes[unit] for unit in held))\n            held.add(item.unit)\n",
        "test_peak_is_that_of_the_simulator",
    ),
    Mutation(
        "what was freed still counts",
        "cost",
        "            held.discard(item.unit)\n",
        "            pass\n",
        "test_peak_bytes_by_hand",
    ),
    Mutation(
        "transfers share no link",
        "cost",
        "link_free = max(now, link_free) + seconds",
        "link_free = now + seconds",
        "test_exposed_seconds_by_hand",
    ),
]

MUTATIONS = [*LAYOUT, *GROUPING_AND_SPEC, *TABLE, *SCHEDULE, *SETTINGS_AND_NUMBERS]
