"""Bins filled exactly, one after the other, on the histogram of lengths.

Reference: K. Fleszar and K. S. Hindi, "New heuristics for one-dimensional bin-packing" (Computers &
Operations Research 29, 2002), whose minimum bin slack completes each bin with the subset that
leaves least room.
"""

from collections import Counter

import numpy as np

from burnish_packing._checks import IntArray
from burnish_packing._heuristics import Classes, Placing, Step, best_fit_decreasing

_MAX_FILLS = 100_000  # different fillings that are searched before best-fit takes the rest
_ALTERNATIVES = 8  # pieces tried before the last two of a bin

Filling = tuple[list[tuple[int, int]], int]  # (class, units of it) in one bin, times it is used


def fill_exactly(classes: Classes, capacity: int, seats: int, *, bulk: float = 0.75) -> Placing:
    """Bin after bin: the longest unit that is left, completed so that least room remains.

    Large pieces first: pieces are taken until two more (or three, among a few) fill the room
    exactly; else the filling of least room is kept. The filling is used as often as the counts
    allow, which is what searching again would find.

    Args:
        classes: of one sequence per unit.
        seats: sequences of a bin at most.
        bulk: which pieces fill the most of a bin: the longest that fits (1.0), or a place among
            those that fit, in order of length, which keeps the lengths that are left diverse.
    """
    fillings, stock = exact_fillings(classes, capacity, seats, bulk)
    rest = [stock.get(length, 0) if length else count for length, _, count in classes]
    return _with_rest(fillings, rest, classes, capacity, seats)


def exact_fillings(
    classes: Classes, capacity: int, seats: int, bulk: float
) -> tuple[list[Filling], dict[int, int]]:
    """The fillings of `fill_exactly`, and how many of each length > 0 they leave (mostly none)."""
    fillings: list[Filling] = []
    index_of = {length: i for i, (length, _, _) in enumerate(classes) if length}
    stock = {length: count for length, _, count in classes if length}
    left = np.array(sorted(stock), np.int64)
    while left.size and len(fillings) < _MAX_FILLS:
        filling = Counter(_fullest(left, stock, capacity, seats, bulk))
        times = min(stock[length] // count for length, count in filling.items())
        fillings.append(([(index_of[w], n) for w, n in filling.items()], times))
        for length, count in filling.items():
            stock[length] -= times * count
        for length in filling:
            if not stock[length]:
                gone = int(left.searchsorted(length))
                left[gone:-1] = left[gone + 1 :]
                left = left[:-1]
    return fillings, stock


def _fullest(
    left: IntArray, stock: dict[int, int], capacity: int, seats: int, bulk: float
) -> list[int]:
    """Lengths of one bin, the longest of `left` (ascending) among them."""
    content = [int(left[-1])]
    room = capacity - content[0]
    seats -= 1
    used = Counter(content)
    if stock[content[0]] == 1:
        left = left[:-1]
    best_room, best = room, content[:]
    reserve = 2 * int(left[-1]) if left.size else 0
    while seats and left.size and left[0] <= room:
        fitting = int(left.searchsorted(room, "right"))
        longest = int(left[fitting - 1])
        if 2 * longest >= room:
            tail, slack = _best_tail(left, stock, used, room, seats)
            if slack < best_room:
                best_room, best = slack, content + tail
            if not slack:
                break
        at = int(bulk * (fitting - 1)) if room > reserve else fitting - 1
        taken = int(left[at])
        content.append(taken)
        used[taken] += 1
        room -= taken
        seats -= 1
        left = left[: int(left.searchsorted(room, "right"))]  # a view, before it is copied
        if used[taken] == stock[taken] and at < len(left):
            left = np.delete(left, at)
    return content if room < best_room else best


def _best_tail(
    left: IntArray, stock: dict[int, int], used: Counter[int], room: int, seats: int
) -> tuple[list[int], int]:
    """One, two or three lengths that leave least of the room, and what they leave."""
    tail, slack = _best_pair(left, stock, used, room, seats)
    if slack and seats > 2:
        fitting = int(left.searchsorted(room, "right"))
        for first in left[max(fitting - _ALTERNATIVES, 0) : fitting][::-1].tolist():
            used[first] += 1
            others = left[: int(left.searchsorted(room - first, "right"))]  # few, as a rule
            if used[first] == stock[first]:
                others = others[others != first]
            pair, rest = _best_pair(others, stock, used, room - first, seats - 1)
            used[first] -= 1
            if rest < slack:
                tail, slack = [first, *pair], rest
            if not slack:
                break
    return tail, slack


def _best_pair(
    left: IntArray, stock: dict[int, int], used: Counter[int], room: int, seats: int
) -> tuple[list[int], int]:
    """One or two lengths that leave least of the room, the longer as long as may be."""
    fitting = int(left.searchsorted(room, "right"))
    if not fitting:
        return [], room
    longest = int(left[fitting - 1])
    if longest == room or seats < 2:
        return [longest], room - longest
    firsts = left[int(left.searchsorted((room + 1) // 2)) : fitting]
    if not firsts.size:
        firsts = left[fitting - 1 : fitting]
    partners = left.searchsorted(room - firsts, "right") - 1
    seconds = np.where(partners >= 0, left[partners], 0)
    same = firsts == seconds
    if same.any():
        lengths = firsts[same].tolist()
        seconds[same] = [w if stock[w] > used[w] + 1 else 0 for w in lengths]
    sums = (firsts + seconds)[::-1]
    at = len(sums) - 1 - int(sums.argmax())
    pair = [int(firsts[at]), int(seconds[at])]
    return pair if pair[1] else pair[:1], room - sum(pair)


def _with_rest(
    fillings: list[Filling], rest: list[int], classes: Classes, capacity: int, seats: int
) -> Placing:
    """The fillings as bins, and the units that none of them holds by best-fit-decreasing."""
    steps: list[Step] = []
    num_bins = 0
    has_zeros = classes[-1][0] == 0
    for content, times in fillings:
        steps += [(i, times * units, num_bins, units) for i, units in content]
        free = seats - sum(units for _, units in content)
        if has_zeros and free:  # sequences without tokens take the free seats
            full = min(times, rest[-1] // free)
            part = min(rest[-1] - full * free, free) if full < times else 0
            placed = [(full * free, num_bins, free), (part, num_bins + full, part)]
            steps += [(len(classes) - 1, *step) for step in placed if step[0]]
            rest[-1] -= full * free + part
        num_bins += times
    kept = [i for i, count in enumerate(rest) if count]
    last = [(*classes[i][:2], rest[i]) for i in kept]
    last_steps, last_bins = best_fit_decreasing(last, capacity, seats)
    steps += [(kept[i], units, num_bins + first, per) for i, units, first, per in last_steps]
    return steps, num_bins + last_bins
