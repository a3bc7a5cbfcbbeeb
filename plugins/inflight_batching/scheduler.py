"""The scheduler: which sequences take part in the next step, with how many tokens (Orca, iteration-level scheduling).

First come, first served. Decodes go first, prefill chunks share what is left of ``max_num_tokens``. A sequence is
admitted once the blocks of all its tokens are free. When a decode finds no block, the sequence admitted last gives all
of its blocks up, returns to the front of the queue, and computes prompt and outputs again when its turn comes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plugins.inflight_batching.sequence import Sequence
from plugins.inflight_batching.step import EngineLimits, StepInputs
from plugins.paged_kv.block_pool import BlockPool
from plugins.paged_kv.block_tables import BlockTables

IntArray = npt.NDArray[np.int64]

_HEADROOM = 0.01  # of the pool stays free at admission, or the newcomer would be preempted in the next steps


@dataclass(frozen=True)
class StepPlan:
    """What one step computes, and for whom."""

    inputs: StepInputs
    slots: IntArray  # [num_seqs]
    num_new: IntArray  # [num_seqs]: new tokens of each
    sampled_slots: IntArray  # [num_logits]: slots that get a token from this step, in the order of the logits
    sampled: list[Sequence]  # [num_logits]: the sequences in these slots
    admitted: list[Sequence]  # took a slot in this step


class Scheduler:
    """Owns the block pool, the queue and the slots. Driven by the step thread alone."""

    def __init__(self, limits: EngineLimits) -> None:
        # Each running sequence can decode in every step, so none of them ever waits for a turn.
        max_seqs = min(limits.max_batch_size, limits.max_num_tokens)
        max_blocks_per_seq = min(-(-limits.max_seq_len // limits.tokens_per_block), limits.num_blocks)
        self.pool = BlockPool(limits.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preemptions = 0
        self._max_num_tokens = limits.max_num_tokens
        self._tables = BlockTables(self.pool, max_seqs, max_blocks_per_seq, limits.tokens_per_block)
        self._headroom = int(limits.num_blocks * _HEADROOM)
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._by_slot: list[Sequence | None] = [None] * max_seqs
        self._order = np.empty(0, dtype=np.int64)  # slots of ``running``, for the array operations
        self._num_known = np.zeros(max_seqs, dtype=np.int64)  # tokens of each slot, prompt and outputs
        self._num_cached = np.zeros(max_seqs, dtype=np.int64)  # those whose keys and values are in the cache
        self._last_token = np.zeros(max_seqs, dtype=np.int64)
        self._tokens_per_block = limits.tokens_per_block
        self._repeatable: StepPlan | None = None  # the last plan, if all running sequences decoded in it and are left

    @property
    def max_seqs(self) -> int:
        return len(self._by_slot)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that ``check_request`` let pass."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out and free its blocks. Never during a step."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do."""
        plan = self._repeat() or self._schedule()
        is_steady = plan is not None and len(plan.sampled) == len(plan.inputs.input_ids) == len(self.running)
        self._repeatable = plan if is_steady else None
        return plan

    def _repeat(self) -> StepPlan | None:
        """The last plan a token later, if the same sequences decode again; None where it takes more than that.

        Between two forward passes the caches are cold, and the operations saved here are a percent of a step.
        """
        last = self._repeatable
        if last is None or self.waiting:
            return None
        before = last.inputs
        past_lens = before.past_lens + 1
        blocks = before.block_indices, before.block_begins
        if not (past_lens % self._tokens_per_block).all():  # a sequence enters a new block
            num_tokens = self._num_known[last.slots]
            if not self._tables.grow(last.slots, num_tokens):
                return None
            blocks = self._tables.gather(last.slots, num_tokens)
        inputs = StepInputs(
            input_ids=self._last_token[last.slots],
            position_ids=before.position_ids + 1,
            query_starts=before.query_starts,
            past_lens=past_lens,
            block_indices=blocks[0],
            block_begins=blocks[1],
            logits_indices=before.logits_indices,
        )
        return StepPlan(inputs, last.slots, last.num_new, last.sampled_slots, last.sampled, [])

    def _schedule(self) -> StepPlan | None:
        decoding = self._grow_decodes()
        budget = self._max_num_tokens - len(decoding)
        chunks: list[tuple[Sequence, int]] = []
        for slot in self._order[self._num_known[self._order] - self._num_cached[self._order] > 1].tolist():
            budget = self._add_chunk(chunks, self._at(slot), budget)
        admitted: list[Sequence] = []
        while self.waiting and self._free_slots and budget and self._admit(self.waiting[0]):
            admitted.append(self.waiting.popleft())
            budget = self._add_chunk(chunks, admitted[-1], budget)
        return self._plan(decoding, chunks, admitted) if len(decoding) or chunks else None

    def advance(self, plan: StepPlan, token_ids: IntArray) -> None:
        """Record that a step ran and gave ``token_ids`` [num_logits] to its sampled slots."""
        self._num_cached[plan.slots] += plan.num_new
        self._num_known[plan.sampled_slots] += 1
        self._last_token[plan.sampled_slots] = token_ids

    def positions(self, plan: StepPlan) -> IntArray:
        """Positions [num_logits] that the tokens sampled in this step take in their sequences."""
        positions: IntArray = self._num_known[plan.sampled_slots]
        return positions

    def _grow_decodes(self) -> IntArray:
        """Slots that decode, each with room for one more token; preempts until there is room."""
        while True:
            order = self._order
            decoding: IntArray = order[self._num_known[order] - self._num_cached[order] == 1]
            if self._tables.grow(decoding, self._num_known[decoding]):
                return decoding
            self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.fold_outputs()
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Give the sequence a slot and the blocks of all its tokens, so that its prefill never waits for a block."""
        num_tokens = np.array([len(sequence.tokens)])
        needed = int(self._tables.num_blocks_for(num_tokens)[0])
        headroom = self._headroom if self.running else 0
        if needed + headroom > self.pool.num_free:
            return False
        slot = self._free_slots.pop()
        self._tables.grow(np.array([slot]), num_tokens)
        sequence.slot = slot
        self._by_slot[slot] = sequence
        self._num_known[slot] = len(sequence.tokens)
        self._num_cached[slot] = 0
        self._last_token[slot] = sequence.tokens[-1]
        self.running.append(sequence)
        self._order = np.append(self._order, slot)
        return True

    def _vacate(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self._repeatable = None
        self._tables.release(slot)
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        sequence.slot = -1
        self.running.remove(sequence)
        self._order = self._order[self._order != slot]

    def _add_chunk(self, chunks: list[tuple[Sequence, int]], sequence: Sequence, budget: int) -> int:
        """Schedule as much of the sequence's prompt as the budget allows; returns the budget left."""
        count = min(int(self._num_known[sequence.slot] - self._num_cached[sequence.slot]), budget)
        if count:
            chunks.append((sequence, count))
        return budget - count

    def _at(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        if sequence is None:
            raise RuntimeError(f"slot {slot} is scheduled and holds no sequence")
        return sequence

    def _plan(self, decoding: IntArray, chunks: list[tuple[Sequence, int]], admitted: list[Sequence]) -> StepPlan:
        num_decodes = len(decoding)
        slots = np.concatenate([decoding, np.array([sequence.slot for sequence, _ in chunks], dtype=np.int64)])
        num_new = np.ones(len(slots), dtype=np.int64)
        num_new[num_decodes:] = [count for _, count in chunks]
        past = self._num_cached[slots]
        ends = np.cumsum(num_new)
        begins = ends - num_new
        input_ids = np.empty(int(ends[-1]), dtype=np.int64)
        input_ids[:num_decodes] = self._last_token[decoding]
        for row, (sequence, count) in enumerate(chunks, start=num_decodes):
            input_ids[begins[row] : ends[row]] = sequence.tokens[past[row] : past[row] + count]
        is_sampled = past + num_new == self._num_known[slots]
        sampled_slots = slots[is_sampled]
        block_indices, block_begins = self._tables.gather(slots, past + num_new)
        inputs = StepInputs(
            input_ids=input_ids,
            position_ids=np.arange(len(input_ids)) + np.repeat(past - begins, num_new),
            query_starts=np.append(begins, ends[-1]).astype(np.int32),
            past_lens=past.astype(np.int32),
            block_indices=block_indices,
            block_begins=block_begins,
            logits_indices=ends[is_sampled] - 1,
        )
        sampled = [self._at(slot) for slot in sampled_slots.tolist()]
        return StepPlan(inputs, slots, num_new, sampled_slots, sampled, admitted)
