"""How many microbatches each batch of a run has, and which call is the last before a drain."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.core import num_microbatches_calculator


class Phase(NamedTuple):
    """Consecutive batches of one size."""

    first_sample: int
    """Training samples consumed before the first of them."""
    first_batch: int
    """How many batches come before it."""
    microbatches: int
    """Per batch and replica."""
    batch_size: int
    """Samples per batch, over all replicas."""


class BatchSizes:
    """The sizes of the batches of a run, asked of a calculator of its own, so that it can say the next one.

    Args:
        args: Megatron's arguments, validated.
        calculator: one that nobody else moves on.
    """

    def __init__(self, args: Any, calculator: Any) -> None:
        self._args = args
        self._calculator = calculator
        self._samples_per_microbatch = args.micro_batch_size * _replicas(args)

    @classmethod
    def of_arguments(cls, args: Any) -> BatchSizes:
        """Before Megatron has a calculator."""
        calculator = num_microbatches_calculator._build_num_microbatches_calculator(
            rank=-1,  # Rank 0 would log what Megatron logs a second time.
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            data_parallel_size=_replicas(args),
            decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
            step_batch_size_schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        )
        return cls(args, calculator)

    @classmethod
    def of_training(cls, args: Any) -> BatchSizes:
        """As Megatron's calculator says, even where a model has set another sequence length since then."""
        return cls(args, copy.deepcopy(num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR))

    def microbatches(self, samples: int) -> int:
        """Of a batch that begins after ``samples`` consumed samples."""
        self._calculator.update(samples, consistency_check=False)
        return self._calculator.get()

    def phases(self, samples: int, batches_done: int) -> Iterator[Phase]:
        """From the batch that begins after ``samples`` samples to the end of training; at least one.

        Raises:
            ValueError: a batch size that the replicas cannot share, or one smaller than that before it.
        """
        before = 0
        while True:
            phase = self._phase_at(samples, batches_done, before)
            yield phase
            batches = self._batches_of_one_size(phase)
            if batches is None or batches >= self._batches_left(phase, batches_done):
                return
            samples += batches * phase.batch_size
            batches_done += batches
            before = phase.microbatches

    def _batches_left(self, phase: Phase, batches_done: int) -> int:
        """In the rest of the run, if the size stayed that of ``phase``."""
        if self._args.train_iters:
            return self._args.train_iters - batches_done
        return -((phase.first_sample - (self._args.train_samples or 0)) // phase.batch_size)

    def _phase_at(self, samples: int, batches_done: int, microbatches_before: int) -> Phase:
        try:
            self._calculator.update(samples, consistency_check=True)
        except AssertionError as error:  # Megatron would find it when training gets there.
            raise ValueError(f"--step-batch-size-schedule, after {samples} samples: {error}") from error
        microbatches = self._calculator.get()
        if microbatches < microbatches_before:
            raise ValueError(
                f"--step-batch-size-schedule makes batches smaller after {samples} samples; Megatron stops there: "
                "let them grow only"
            )
        return Phase(samples, batches_done, microbatches, microbatches * self._samples_per_microbatch)

    def _batches_of_one_size(self, phase: Phase) -> int | None:
        """From the first of ``phase`` on; None where no later step of the schedule has another size."""
        for threshold, _ in getattr(self._calculator, "schedule", ()):  # In samples, in their order.
            batches = -((phase.first_sample - threshold) // phase.batch_size)
            after = phase.first_sample + batches * phase.batch_size
            if batches > 0 and self.microbatches(after) != phase.microbatches:
                return batches
        return None

    def left(self, microbatches: int, at_most: int) -> int | None:
        """Batches after the present one, of ``microbatches`` microbatches, that can run ahead; None for ``at_most``.

        Training ends or leaves after the last of them, or the next batch has another size or is skipped. Exits by
        signal or duration are not known here; what ran ahead is dropped then.
        """
        return next((after for after in range(at_most) if self._ends_with(after, microbatches)), None)

    def _ends_with(self, after: int, microbatches: int) -> bool:
        """Whether nothing can run ahead of the batch that comes ``after`` so many others, all of one size."""
        args, batches = self._args, after + 1
        done = args.curr_iteration + batches
        leaves = bool(args.exit_interval and done % args.exit_interval == 0)
        leaves = leaves or done >= args.train_iters or done in (args.phase_transition_iterations or ())
        consumed = args.consumed_train_samples + batches * microbatches * self._samples_per_microbatch
        is_skipped = done + 1 in args.iterations_to_skip  # Megatron counts these from 1.
        return leaves or is_skipped or self.microbatches(consumed) != microbatches


def _replicas(args: Any) -> int:
    return args.data_parallel_size * getattr(args, "gtp_weight_remat_size", 1)
