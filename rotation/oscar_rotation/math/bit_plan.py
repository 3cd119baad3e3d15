"""Spending a budget of bits: every item takes one of several widths, the sum of losses is to be least.

What an item loses does not depend on the others, so this is a knapsack of small whole numbers and has an exact
solution: the least loss of the first items at every cost, item by item.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def spend(losses: torch.Tensor, widths: Sequence[int] | Sequence[Sequence[int]], budget: int) -> tuple[int, ...]:
    """The width of every item.

    Args:
        losses: [items, widths], of each item at each width; finite.
        widths: what each choice costs, ascending: of all items, or of each its own.
        budget: most that all items may cost together.

    Returns:
        one of its ``widths`` per item. Of plans that lose as much the cheapest.

    Raises:
        ValueError: the budget is below the cheapest plan, or a loss is not finite.

    >>> spend(torch.tensor([[9.0, 1.0], [5.0, 4.0], [6.0, 2.0]]), (2, 3), 8)
    (3, 2, 3)
    """
    items = len(losses)
    if not bool(losses.isfinite().all()):
        raise ValueError("losses must be finite")
    costs: list[Sequence[int]] = [widths if isinstance(widths[0], int) else widths[n] for n in range(items)]  # type: ignore[misc]
    cheapest = sum(row[0] for row in costs)
    if budget < cheapest:
        raise ValueError(f"{items} items cost {cheapest} at least, the budget is {budget}")
    room = min(budget, sum(row[-1] for row in costs)) - cheapest
    least = torch.full((room + 1,), torch.inf, dtype=torch.float64)
    least[0] = 0
    taken = torch.zeros(items, room + 1, dtype=torch.int64)
    for item, row in enumerate(losses.double()):
        trials = torch.full((len(row), room + 1), torch.inf, dtype=torch.float64)
        for choice, cost in enumerate(costs[item]):
            more = cost - costs[item][0]
            if more <= room:
                trials[choice, more:] = least[: room + 1 - more] + row[choice]
        least, taken[item] = trials.min(0)
    at, chosen = int(least.argmin()), []
    for item in reversed(range(items)):
        choice = int(taken[item, at])
        chosen.append(costs[item][choice])
        at -= costs[item][choice] - costs[item][0]
    return tuple(reversed(chosen))
