"""A plan behind torch's DataLoader: a sampler that plans each epoch, a data set that obeys it."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.data import Dataset, Sampler

from burnish_packing._checks import IntArray, as_integers, as_lengths, as_prefixes, check_positive
from burnish_packing.costs import Cost, token_cost
from burnish_packing.microbatches import MicroBatch, MicroBatchPlan, Order, plan_micro_batches
from burnish_packing.torch.rows import PlannedList

_SCHEMA_VERSION = 1


class PlannedDataset(Dataset[Any]):
    """A data set whose batches of rows bring along the micro-batch that they were planned as.

    `DataLoader` gives its `collate_fn` the rows alone; with this around the data set, it gives them
    as a `PlannedList`, so that the plan's shape and multiples need not be said again.

    Args:
        dataset: any with `__len__` and `__getitem__`; its `__getitems__` is used where it has one.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> PlannedList[Any]:
        micro_batch = getattr(indices, "micro_batch", None)
        if micro_batch is None:
            raise ValueError(
                "PlannedDataset must get its batches from TokenBudgetBatchSampler, got indices "
                "without a micro-batch; pass that as batch_sampler, or leave out PlannedDataset"
            )
        if indices and max(indices) >= len(self.dataset):
            raise ValueError(
                f"the data set must have the rows that were planned, got {len(self.dataset)} rows "
                f"for index {max(indices)}; give the sampler the lengths of this data set"
            )
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is None or not indices:
            return PlannedList([self.dataset[i] for i in indices], micro_batch)
        return PlannedList(fetch(list(indices)), micro_batch)


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """The micro-batches of one rank, epoch by epoch, within a budget of tokens::

        sampler = TokenBudgetBatchSampler(lengths, max_tokens=8192, num_ranks=8, rank=rank)
        loader = DataLoader(
            PlannedDataset(rows), batch_sampler=sampler, collate_fn=PackingCollator()
        )
        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)
            for _, step in groupby(loader, key=lambda batch: batch.micro_batch.global_batch):
                train_step(list(step))  # its batches on this rank: one step of the optimizer

    An epoch's order depends on nothing but (seed, epoch), and its plan (`plan_micro_batches`) on
    nothing but that order and the arguments: both are the same in every process, and `len()`, the
    micro-batches of this epoch, on every rank. A batch is the list of its data set indices; an
    empty slot, which keeps the ranks in step, is an empty list. These are the batches of this rank
    alone: nothing may divide them among ranks again, as accelerate does with a loader it prepares.

    **Optimizer steps.** A `PackedBatch` says its own: `batch.micro_batch.global_batch`, from 0 in
    every epoch. `global_batches` says them all: [start, end) of each, counted from the epoch's
    first batch, equal on all ranks.

    **Resume.** `DataLoader` workers fetch batches ahead of the loop, so the loop counts those it
    has used, from the epoch's first (after a resume from `sampler.start`), and gives the number:
    `state = sampler.state_dict(num_used)`. In the new process, `sampler.load_state_dict(state)`
    sets the epoch, and the next iteration begins with the first batch that was not used. The state
    is the same on all ranks.

    Args:
        lengths: int [N], tokens of each row of the data set, all >= 1.
        max_tokens: positions of a model call, padding included.
        num_ranks, rank: data-parallel ranks, and which of them this is.
        mode: `packed` into one row, or `padded` rows of similar lengths.
        global_batch_size: sequences of an optimizer step, over all ranks; None: the whole epoch.
        shuffle: a new order in every epoch; False keeps that of the data set.
        seed: of the orders, >= 0.
        drop_last: leave out the last global batch of an epoch if it is short; see `dropped`.
        units: int [N]; rows with equal units stay in one micro-batch and are shuffled as one. With
            global_batch_size, all units have the same size, and that divides it.
        prefix_ids, prefix_lengths: int [N], shared prefixes; rows of one are shuffled as one.
        pad_multiple, sequence_multiple, cost, order: as in `plan_micro_batches`.

    Raises:
        ValueError: an argument is out of range, or some row or unit does not fit.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        max_tokens: int,
        num_ranks: int = 1,
        rank: int = 0,
        mode: Literal["packed", "padded"] = "packed",
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad_multiple: int = 1,
        sequence_multiple: int = 1,
        cost: Cost = token_cost,
        order: Order = "as_given",
        units: ArrayLike | None = None,
        prefix_ids: ArrayLike | None = None,
        prefix_lengths: ArrayLike | None = None,
    ) -> None:
        self._lengths = _checked_lengths(lengths)
        check_positive(num_ranks, "num_ranks")
        _check_index(rank, "rank", num_ranks)
        _check_index(seed, "seed")
        for name, value in (
            ("max_tokens", max_tokens),
            ("pad_multiple", pad_multiple),
            ("sequence_multiple", sequence_multiple),
        ):
            check_positive(value, name)
        if global_batch_size is not None:
            check_positive(global_batch_size, "global_batch_size")
            global_batch_size = int(global_batch_size)
        if mode not in ("packed", "padded"):
            raise ValueError(f"mode must be packed or padded, got {mode!r}; choose one")
        self._rank, self._cost = rank, cost
        # What a state must agree on, beside the plan itself.
        self._settings: dict[str, Any] = {
            "seed": int(seed),
            "shuffle": bool(shuffle),
            "num_ranks": int(num_ranks),
            "max_tokens": int(max_tokens),
            "mode": mode,
            "global_batch_size": global_batch_size,
            "drop_last": bool(drop_last),
            "pad_multiple": int(pad_multiple),
            "sequence_multiple": int(sequence_multiple),
            "order": order,
        }
        self._groups, self._shared = as_prefixes(self._lengths, prefix_ids, prefix_lengths)
        self._units = None if units is None else as_integers(units, "units")
        if self._units is not None and len(self._units) != len(self._lengths):
            raise ValueError(
                f"units must have one entry for each of {len(self._lengths)} rows, got "
                f"{len(self._units)}; give a row that stands alone a unit of its own"
            )
        self._has_prefixes = prefix_ids is not None
        self.start = 0  # batches that the next iteration leaves out, used before a resume
        self._check_every_order()
        self._enter(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is of, from 0."""
        return self._epoch

    @property
    def plan(self) -> MicroBatchPlan:
        """This epoch's plan, for its metrics; its indices count in the order of this epoch."""
        return self._plan

    @property
    def global_batches(self) -> tuple[tuple[int, int], ...]:
        """[start, end) of the batches of each optimizer step, counted from the epoch's first."""
        return self._plan.global_batches

    @property
    def dropped(self) -> tuple[int, ...]:
        """Data set indices that this epoch leaves out: its last, short global batch."""
        return tuple(self._order[list(self._plan.dropped)].tolist())

    def micro_batches(self) -> list[MicroBatch]:
        """What this rank runs in this epoch, in data set indices, empty slots included."""
        return [
            replace(m, indices=tuple(self._order[list(m.indices)].tolist()))
            for m in self._plan.micro_batches(self._rank)
        ]

    def __len__(self) -> int:
        return self._plan.num_micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: DataLoader with workers makes two iterators and asks only one for batches,
        # so `start` must be taken at the first batch.
        start, self.start = self.start, 0
        for micro_batch in self.micro_batches()[start:]:
            yield PlannedList(micro_batch.indices, micro_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; the one it is in already goes on where `load_state_dict` put it."""
        _check_index(epoch, "epoch")
        if epoch != self._epoch:
            self._enter(epoch)
            self.start = 0

    def state_dict(self, num_used: int) -> dict[str, Any]:
        """Where the loop stands, for JSON: it has used `num_used` batches of this epoch."""
        _check_index(num_used, "num_used", len(self) + 1)
        return {
            "schema_version": _SCHEMA_VERSION,
            **self._identity(),
            "epoch": self._epoch,
            "num_used": int(num_used),
            "plan": _digest_of_plan(self._plan),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where another sampler stood, on the same data with the same arguments.

        Raises:
            ValueError: something differs, which is named, or a value is out of range. The sampler
                stays where it was.
        """
        for name, own in {"schema_version": _SCHEMA_VERSION, **self._identity()}.items():
            if state.get(name) != own:
                raise ValueError(
                    f"a sampler must go on with the {name} of its state, got {state.get(name)} in "
                    f"the state and {own} here; restore that, or start the epoch anew"
                )
        _check_index(state.get("epoch"), "epoch")
        order, plan = self._plan_of(state["epoch"])
        if state.get("plan") != _digest_of_plan(plan):
            raise ValueError(
                f"a sampler must go on with the plan of its state, got another one for epoch "
                f"{state['epoch']}; restore cost, units, prefixes and the versions of "
                f"burnish-packing and numpy, or start the epoch anew"
            )
        _check_index(state.get("num_used"), "num_used", plan.num_micro_batches + 1)
        self._epoch, self._order, self._plan = state["epoch"], order, plan
        self.start = state["num_used"]

    def _enter(self, epoch: int) -> None:
        try:
            self._order, self._plan = self._plan_of(epoch)
        except ValueError:
            # A row that does not fit is named by its place in the data set, not in this order.
            self._planned(np.arange(len(self._lengths)), None)
            raise
        self._epoch = int(epoch)

    def _plan_of(self, epoch: int) -> tuple[IntArray, MicroBatchPlan]:
        """The rows in the order of an epoch, int64 [N], and their plan."""
        order = np.arange(len(self._lengths))
        if self._settings["shuffle"]:
            generator = np.random.default_rng([self._settings["seed"], epoch])
            unit_of = self._shuffled_units()
            keys = generator.permutation(len(self._lengths))
            order = np.argsort(keys[unit_of], kind="stable")
        return order, self._planned(order, self._settings["global_batch_size"])

    def _planned(self, order: IntArray, global_batch_size: int | None) -> MicroBatchPlan:
        settings = self._settings
        return plan_micro_batches(
            self._lengths[order],
            max_tokens=settings["max_tokens"],
            num_ranks=settings["num_ranks"],
            mode=settings["mode"],
            pad_multiple=settings["pad_multiple"],
            sequence_multiple=settings["sequence_multiple"],
            cost=self._cost,
            global_batch_size=global_batch_size,
            drop_last=settings["drop_last"] and global_batch_size is not None,
            order=settings["order"],
            units=None if self._units is None else self._units[order],
            prefix_ids=self._groups[order] if self._has_prefixes else None,
            prefix_lengths=self._shared[order] if self._has_prefixes else None,
        )

    def _shuffled_units(self) -> IntArray:
        """int64 [N], equal for the rows that are shuffled as one, from 0."""
        alone = -1 - np.arange(len(self._lengths))
        labels = np.where(self._groups >= 0, self._groups, alone)
        if self._units is not None:
            labels = self._units
        return np.unique(labels, return_inverse=True)[1]

    def _check_every_order(self) -> None:
        """ValueError for what only some epoch's order would bring to light, days later."""
        size, drop_last = self._settings["global_batch_size"], self._settings["drop_last"]
        if drop_last and size is None:
            raise ValueError("drop_last must come with global_batch_size, got None; pass its size")
        if size is None:
            return
        if drop_last and len(self._lengths) % size:
            # The rows that this epoch drops must fit as well.
            self._planned(np.arange(len(self._lengths)), None)
        if self._units is not None and self._settings["shuffle"] and len(self._units):
            sizes = np.unique(np.unique(self._units, return_counts=True)[1])
            if len(sizes) > 1 or size % sizes[0]:
                raise ValueError(
                    f"units that are shuffled must have one size that divides global_batch_size = "
                    f"{size}, got sizes {sizes.tolist()}; else a unit would lie in two steps: "
                    f"choose another global_batch_size, or shuffle=False with an order that fits"
                )

    def _identity(self) -> dict[str, Any]:
        lengths = hashlib.sha256(self._lengths.tobytes()).hexdigest()[:16]
        return {**self._settings, "num_sequences": len(self._lengths), "lengths": lengths}


def _checked_lengths(lengths: ArrayLike) -> IntArray:
    array = as_lengths(lengths)
    if (array < 1).any():
        i = int(np.flatnonzero(array < 1)[0])
        raise ValueError(
            f"lengths must be >= 1, got lengths[{i}] = {array[i]}; drop that row from the data set"
        )
    return array


def _check_index(value: Any, name: str, end: int | None = None) -> None:
    """ValueError unless `value` is an integer in [0, end)."""
    valid = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0
    if not valid or (end is not None and value >= end):
        limit = "" if end is None else f" and < {end}"
        raise ValueError(
            f"{name} must be an integer >= 0{limit}, got {value!r}; pass one in that range"
        )


def _digest_of_plan(plan: MicroBatchPlan) -> str:
    """16 hexadecimal digits that differ when any micro-batch of any rank does."""
    digest = hashlib.sha256(repr(plan.global_batches).encode())
    for rank in plan.ranks:
        for slot in rank:
            digest.update(np.array([len(slot), *slot], np.int64).tobytes())
    return digest.hexdigest()[:16]
