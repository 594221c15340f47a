"""Whether ranks are in step: each process group counts the collectives that this rank has entered."""

from __future__ import annotations

from torch.distributed import distributed_c10d


def sequence_numbers() -> tuple[int, ...]:
    """Collectives entered so far, by process group, in the order in which the groups were made. Ranks with different
    numbers must enter no collective together any more: one would take the other's data for its own."""
    numbers = []
    for group in distributed_c10d._world.pg_map:
        try:
            numbers.append(group._get_sequence_number_for_group())  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError:  # before its first collective, or a backend that does not count
            numbers.append(-1)
    return tuple(numbers)
