"""Which prompts an iteration trains on, as a pure function of (seed, iteration).

Notation: P prompts in the pool, B prompts a step, k the iteration. The pool is dealt like a deck of cards: one endless
stream of permutations pi_0, pi_1, ... of 0..P-1, of which iteration k takes the positions kB .. kB + B - 1. No prompt
comes again before the pool is used up, also where B does not divide P.

A step that straddles two permutations would now and then deal a prompt twice. So the open step's remaining places are
filled with the first prompts of pi_{e+1} that the step does not hold yet; the others follow in their drawn order, and
pi_{e+1} stays a permutation. It thereby depends on the end of pi_e, but never further back than the last permutation
that starts with a step, which is one in B / gcd(P, B).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class PromptSampler(Sampler[list[int]]):
    """Batch sampler: the prompt indices of the iterations ``start .. iterations - 1``.

    Stateless: the same (seed, iteration) gives the same prompts whatever was drawn before, in whichever process, so a
    resumed run needs nothing but its iteration counter. ``len()`` is ``iterations``, the length of the whole run,
    because a resumed training loop counts the batches already done as well.

    Args:
        num_prompts: P >= 1.
        prompts_per_step: B >= 1. Only where B > P does a step hold a prompt more than once.
        iterations: length of the run, >= 1.
        seed: any integer.
        start: first iteration to deal, >= 0.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, iterations: int, seed: int, start: int = 0) -> None:
        for name, value, least in (
            ("num_prompts", num_prompts, 1),
            ("prompts_per_step", prompts_per_step, 1),
            ("iterations", iterations, 1),
            ("start", start, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give an integer of at least {least}")
        self.num_prompts = num_prompts
        self.prompts_per_step = prompts_per_step
        self.iterations = iterations
        self.seed = seed
        self.start = start
        self._latest: tuple[int, list[int]] | None = None  # (e, pi_e), saves drawing pi_e again for the next step

    def __len__(self) -> int:
        return self.iterations

    def __iter__(self) -> Iterator[list[int]]:
        return (self.indices(iteration) for iteration in range(self.start, self.iterations))

    def indices(self, iteration: int) -> list[int]:
        """The B prompt indices (0..P-1) of one iteration >= 0."""
        if iteration < 0:
            raise ValueError(f"iteration={iteration}: iterations are counted from 0")
        first = iteration * self.prompts_per_step
        stream = (divmod(position, self.num_prompts) for position in range(first, first + self.prompts_per_step))
        return [self._permutation(epoch)[place] for epoch, place in stream]

    def _permutation(self, epoch: int) -> list[int]:
        """pi_epoch, after the rule for straddling steps."""
        cycle = self.prompts_per_step // math.gcd(self.num_prompts, self.prompts_per_step)
        known = self._latest
        begin = epoch - epoch % cycle
        if known is not None and begin <= known[0] <= epoch:
            begin, order = known
        else:
            order = self._draw(begin)
        for e in range(begin + 1, epoch + 1):
            order = self._without_repeats(self._draw(e), order, taken=e * self.num_prompts % self.prompts_per_step)
        self._latest = (epoch, order)
        return order

    def _without_repeats(self, drawn: list[int], previous: list[int], taken: int) -> list[int]:
        """``drawn`` re-ordered so that the open step, of which ``previous`` fills ``taken`` places, repeats none."""
        if taken == 0 or self.prompts_per_step > self.num_prompts:
            return drawn
        held = set(previous[-taken:])
        head = [index for index in drawn if index not in held][: self.prompts_per_step - taken]
        return head + [index for index in drawn if index not in set(head)]

    def _draw(self, epoch: int) -> list[int]:
        digest = hashlib.blake2b(f"prompts/{self.seed}/{epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return torch.randperm(self.num_prompts, generator=generator).tolist()
