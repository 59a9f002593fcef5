"""Open bins found by the seats they have left, without a look at those that have too few.

Only the distinct sizes of the units matter: a bin ranks by how many of these sizes it still has
seats for. Each rank has a structure of its own, and a search covers the ranks that are enough.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

_MAX_DENSE = 8  # distinct sizes for which trees are lists; of more, most nodes are not used


class SeatHeaps:
    """Entries, tuples that end with the seats left, least first among those of enough seats.

    One heap for each distinct size; a tree above them (that of rank r at width + r) holds the least
    entry under every node. Push and pop are O(log entries + log sizes). An entry of fewer seats
    than the smallest size is dropped.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._sizes = sorted(set(sizes))
        self._heaps: list[list[Any]] = [[] for _ in self._sizes]
        self._width = 1 << max(len(self._sizes) - 1, 0).bit_length()
        self._least: list[Any] = [None] * (2 * self._width)

    def push(self, entry: Any) -> None:
        """Add an entry."""
        if self._width == 1:  # as a rule
            if entry[-1] >= self._sizes[0]:
                heappush(self._heaps[0], entry)
            return
        rank = bisect_right(self._sizes, entry[-1]) - 1
        if rank >= 0:
            heap = self._heaps[rank]
            heappush(heap, entry)
            if heap[0] is entry:
                self._set_least(rank, entry)

    def pop(self, size: int) -> Any:
        """Take out the least entry of at least `size` seats, one of the sizes; None without one."""
        if self._width == 1:
            heap = self._heaps[0] if self._heaps else None
            return heappop(heap) if heap else None
        node = self._width + bisect_left(self._sizes, size)
        found = self._least[node]
        while node > 1:
            if not node & 1:
                found = _lesser(found, self._least[node + 1])
            node >>= 1
        if found is not None:
            rank = bisect_right(self._sizes, found[-1]) - 1
            heap = self._heaps[rank]
            heappop(heap)
            self._set_least(rank, heap[0] if heap else None)
        return found

    def _set_least(self, rank: int, entry: Any) -> None:
        least = self._least
        node = self._width + rank
        least[node] = entry
        while node > 1:
            node >>= 1
            least[node] = _lesser(least[2 * node], least[2 * node + 1])


def _lesser(entry: Any, other: Any) -> Any:
    if entry is None or (other is not None and other < entry):
        return other
    return entry


class RoomTrees:
    """Trees over the bins that know the largest room under every node (bin b at width + b).

    There is one for each node of a Fenwick tree over the ranks, so that the bins of enough seats
    for a unit are in few trees, and each bin in few: as a rule all are in one. Bins that are not
    open yet have all their room and seats; the room of a bin that a tree does not hold is -1.
    """

    def __init__(self, sizes: Iterable[int], width: int, capacity: int) -> None:
        self.sizes = sorted(set(sizes))
        num = len(self.sizes)
        trees: list[Any] = [_Uniform(-1) for _ in range(num)]
        for i in _upward(1, num):
            trees[i] = _Uniform(capacity)
        if num <= _MAX_DENSE:
            trees = [[tree.value] * (2 * width) for tree in trees]
        # A bin with seats for r of the sizes is at num + 1 - r in the Fenwick tree, from 1.
        self.holding = [tuple(trees[i] for i in _upward(num + 1 - r, num)) for r in range(num + 1)]
        self.to_search = {
            size: tuple(trees[i] for i in _downward(num - i)) for i, size in enumerate(self.sizes)
        }

    def move(self, leaf: int, rank_before: int, rank: int) -> None:
        """Take the bin at `leaf` out of the trees that hold only bins of its rank before."""
        for tree in self.holding[rank_before]:
            if not any(tree is kept for kept in self.holding[rank]):
                set_room(tree, leaf, -1)


class _Uniform(dict[int, int]):
    """A tree of which most nodes have the same value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def __missing__(self, node: int) -> int:
        return self.value


def set_room(rooms: Any, node: int, room: int) -> None:
    """Set a leaf of such a tree, and what depends on it."""
    rooms[node] = room
    while node > 1:
        node //= 2
        left, right = rooms[2 * node], rooms[2 * node + 1]
        largest = left if left > right else right
        if rooms[node] == largest:
            return
        rooms[node] = largest


def _downward(at: int) -> Iterator[int]:
    while at > 0:
        yield at - 1
        at -= at & -at


def _upward(at: int, num: int) -> Iterator[int]:
    while at <= num:
        yield at - 1
        at += at & -at
