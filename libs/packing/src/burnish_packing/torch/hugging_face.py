"""The edge to Hugging Face `transformers`: what a model must be given to keep sequences apart.

`transformers` is not a dependency: it is imported where a function needs it. Statements about it
were checked in the sources of version 5.19 and hold since 4.53.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from burnish_packing.torch.attention import Backend, attention_forward
from burnish_packing.torch.batch import PackedBatch
from burnish_packing.torch.collate import pack_sequences, pad_sequences

BY_POSITION_IDS = ("eager", "sdpa", "flex_attention")  # they find sequences in position_ids
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


class SequencesNotSeparateError(ValueError):
    """Something else than its own tokens moved the outputs of a sequence.

    Attributes:
        changed: index of the sequence whose tokens were changed, -1 for the padding, None if the
            sequence gave other outputs alone than in the batch.
        moved: index of the sequence whose outputs moved.
        difference: the largest change of an output.
    """

    def __init__(self, message: str, changed: int | None, moved: int, difference: float) -> None:
        super().__init__(message)
        self.changed = changed
        self.moved = moved
        self.difference = difference


def register_attention(name: str = "burnish_packed", *, backend: Backend | None = None) -> str:
    """Make `attention_forward` an `attn_implementation` of transformers; returns the name.

    Then `from_pretrained(..., attn_implementation=name)` or `model.set_attn_implementation(name)`,
    and `model(**model_kwargs(batch, model))`. Transformers builds no mask under this name: `spans`
    say who sees whom, and an `attention_mask` with a zero is refused. Registering a name again
    replaces its backend, for every model that has it.

    Raises:
        ValueError: the name is that of another attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    if name in (*BY_POSITION_IDS, *FLASH) or (_registered(name) and not _takes_spans(name)):
        raise ValueError(f"name must be free, got {name!r} of another attention; choose another")
    forward = functools.partial(attention_forward, backend=backend) if backend else None
    AttentionInterface.register(name, forward or attention_forward)
    AttentionMaskInterface.register(name, _refuse_padding_mask)
    return name


def model_kwargs(batch: PackedBatch, model: nn.Module | str) -> dict[str, Any]:
    """The keyword arguments with which a model treats the sequences of a batch as separate.

    Pass them as they are: `model(**model_kwargs(batch, model))`. An `attention_mask`, even of all
    ones, or a cache turns transformers' search for sequences in `position_ids` off, and then they
    see each other. Padding needs no mask: it lies behind all tokens of a row or is a span of its
    own, and causal attention does not look there. By attention:

    - the name that `register_attention` returned: `spans`, the only one with shared prefixes;
    - eager, sdpa, flex_attention: `position_ids` that start again at every sequence. A sequence
      begins where they do not go up by one: behind one token too, and at padding and fill;
    - flash_attention_2, 3, 4: cumulative lengths too (int32, on the device of the tokens), so that
      nothing is searched for in every layer.

    Layers that are not attention (state-space, linear attention, convolutions) may not look at any
    of these, and attention in fixed chunks counts them from the beginning of the pack:
    `check_separate` tells.

    Args:
        batch: packed, or padded rows (`spans` None), on the model's device.
        model: whose config names its attention; or that name, `attn_implementation`.

    Raises:
        ValueError: the attention cannot keep the sequences of this batch apart or is not known.
    """
    attn_implementation = attention_of(model)
    kwargs: dict[str, Any] = {
        "input_ids": batch.token_ids,
        "position_ids": batch.position_ids,
        "use_cache": False,
    }
    if _takes_spans(attn_implementation):
        return {**kwargs, "spans": batch.spans}
    kwargs["attention_mask"] = None
    if batch.spans is None:
        return kwargs
    if any(span.prefix_end > span.prefix_start for span in batch.spans):
        raise ValueError(
            f"sequences behind a shared prefix must run with the attention of register_attention, "
            f"got {attn_implementation!r}, which would not show them their prefix; load the model "
            f"with it, or pack without prefix_ids"
        )
    if attn_implementation in FLASH:
        cu_seqlens = batch.cu_seqlens.to(batch.token_ids.device)
        kwargs |= {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": batch.max_seqlen,
            "max_length_k": batch.max_seqlen,
        }
    return kwargs


def attention_of(model: nn.Module | str) -> str:
    """The name of the model's attention, known to keep sequences apart; ValueError if it is not."""
    name = model if isinstance(model, str) else model.config._attn_implementation  # type: ignore[union-attr]
    if name not in (*BY_POSITION_IDS, *FLASH) and not _takes_spans(str(name)):
        raise ValueError(
            f"attn_implementation must be one of {', '.join((*BY_POSITION_IDS, *FLASH))} or a name "
            f"from register_attention, got {name!r}; load the model with one of these"
        )
    return str(name)


def check_separate(
    model: nn.Module,
    batch: PackedBatch | None = None,
    *,
    make_kwargs: Callable[[PackedBatch], Mapping[str, Any]] | None = None,
    seed: int = 0,
    tolerance: float | None = None,
) -> None:
    """Run a model on a batch and make sure that no sequence sees another, nor the padding.

    The tokens of one sequence after another are changed: only its own outputs may move. The same
    for the padding. Then each sequence runs alone and must give the outputs it has in the batch.
    That is 2 * N + 2 forward passes for N sequences, in evaluation mode and without gradients; the
    model's mode, its gradients and the global random state are as before.

    Args:
        model: takes and returns what Hugging Face models do: keyword arguments, and an object with
            `logits` or `last_hidden_state` [B, L, ...].
        batch: what to run; None: short sequences of random tokens and some fill, packed, two of
            them behind a shared prefix if the attention can. To see a window or a chunk of
            attention go wrong a sequence must be longer than it.
        make_kwargs: the keyword arguments your own loop makes of a batch, to check these; None:
            `model_kwargs`.
        seed: of the random tokens.
        tolerance: the largest change allowed, relative to the largest output; None: 1e-4, in half
            precision 0.05.

    Raises:
        SequencesNotSeparateError: a sequence's outputs moved with other tokens than its own.
        ValueError: nothing can be told: no sequences, or outputs that have another shape, are not
            finite or do not depend on the tokens.
    """
    make = make_kwargs or functools.partial(model_kwargs, model=model)
    takes_spans = _takes_spans(attention_of(model))
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    if batch is None:
        batch = _random_pack(vocabulary, seed, takes_spans, next(model.parameters()).device)
    if not batch.lengths:
        raise ValueError("batch must hold a sequence, got an empty one; pass another or None")
    with _undisturbed(model):
        before = _outputs(model, batch, make(batch))
        if tolerance is None:
            tolerance = 1e-4 if before[0].dtype.itemsize > 2 else 0.05
        limit = tolerance * max(float(values.abs().max()) for values in before)
        if not math.isfinite(limit):
            raise ValueError(
                "the model's outputs must be finite, got others at the tokens of the batch; check "
                "the model's weights and precision"
            )
        for changed in [*range(len(batch.lengths)), -1]:
            positions = _own_positions(batch, changed)
            if not len(positions):
                continue
            other = _with_other_tokens(batch, positions, vocabulary, seed)
            after = _outputs(model, other, make(other))
            _check_unmoved(before, after, changed, limit)
        _check_alone(model, batch, before, limit)


def _check_unmoved(before: list[Tensor], after: list[Tensor], changed: int, limit: float) -> None:
    """SequencesNotSeparateError if another sequence than the changed one moved."""
    differences = [_difference(x, y) for x, y in zip(before, after, strict=True)]
    if changed >= 0 and differences[changed] <= limit:
        raise ValueError(
            f"the outputs of a sequence must depend on its tokens, got none that moved by more "
            f"than {limit:.3g} when all tokens of sequence {changed} were changed; check the "
            f"model's weights, or lower tolerance"
        )
    for moved, difference in enumerate(differences):
        if moved != changed and not difference <= limit:  # a NaN is no answer
            what = "the padding" if changed < 0 else f"sequence {changed}"
            raise SequencesNotSeparateError(
                f"a sequence's outputs must move with its own tokens only, got sequence {moved} "
                f"moved by {difference:.3g} (allowed {limit:.3g}) when the tokens of {what} were "
                f"changed; pass the model exactly model_kwargs(batch, model), without "
                f"attention_mask and cache; if it has state-space, recurrent or convolution "
                f"layers, give each sequence a row (pad_sequences)",
                changed,
                moved,
                difference,
            )


def _check_alone(model: nn.Module, batch: PackedBatch, before: list[Tensor], limit: float) -> None:
    """SequencesNotSeparateError if a sequence gives other outputs alone, in a row of its own."""
    flat = batch.unpack(batch.token_ids)
    for i, token_ids in enumerate(flat.split(list(batch.lengths))):
        row = pad_sequences(token_ids, [len(token_ids)])
        (alone,) = _outputs(model, row, model_kwargs(row, model))
        difference = _difference(before[i], alone)
        if not difference <= limit:
            raise SequencesNotSeparateError(
                f"a sequence must give the same outputs in the batch and alone, got sequence {i} "
                f"apart by {difference:.3g} (allowed {limit:.3g}); let position_ids start again at "
                f"every sequence, pass the model exactly model_kwargs(batch, model), or give each "
                f"sequence a row (pad_sequences)",
                None,
                i,
                difference,
            )


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


def _outputs(model: nn.Module, batch: PackedBatch, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The model's outputs [n, ...] at the tokens of each sequence."""
    output = model(**kwargs)
    values = getattr(output, "logits", None)
    values = getattr(output, "last_hidden_state", None) if values is None else values
    if not isinstance(values, Tensor) or values.shape[:2] != batch.token_ids.shape:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(output).__name__
        raise ValueError(
            f"the model must return logits or last_hidden_state for all positions, "
            f"{tuple(batch.token_ids.shape)}, got {found}; pass the model without a pooling head"
        )
    return list(batch.unpack(values).split(list(batch.lengths)))


def _own_positions(batch: PackedBatch, sequence: int) -> Tensor:
    """Positions in the flattened row of what only this sequence has, or of padding for -1."""
    uses = torch.zeros(batch.token_ids.numel(), dtype=torch.int64, device=batch.slots.device)
    uses.index_add_(0, batch.slots, torch.ones_like(batch.slots))
    if sequence < 0:
        return (uses == 0).nonzero().squeeze(1)
    slots = batch.slots.split(list(batch.lengths))[sequence]
    return slots[uses[slots] == 1]  # the others are a prefix it shares


def _with_other_tokens(
    batch: PackedBatch, positions: Tensor, vocabulary: int, seed: int
) -> PackedBatch:
    """The batch with another token at each of the positions of the flattened row."""
    steps = torch.randint(
        1, vocabulary, positions.shape, generator=torch.Generator().manual_seed(seed + 1)
    )
    token_ids = batch.token_ids.clone()
    flat = token_ids.view(-1)
    flat[positions] = (flat[positions] + steps.to(positions.device)) % vocabulary
    return replace(batch, token_ids=token_ids)


def _random_pack(
    vocabulary: int, seed: int, with_prefix: bool, device: torch.device
) -> PackedBatch:
    """Four sequences and fill; with a prefix, two more that begin with the same three tokens."""
    lengths = [6, 1, 9, 4, 5, 7]
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]
    if not with_prefix:
        return pack_sequences(torch.cat(rows[:4]), lengths[:4], fill_to=24).to(device)
    rows[5][:3] = rows[4][:3]
    packed = pack_sequences(
        torch.cat(rows),
        lengths,
        prefix_ids=[-1, -1, -1, -1, 0, 0],
        prefix_lengths=[0, 0, 0, 0, 3, 3],
        fill_to=32,
    )
    return packed.to(device)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes and random state are put back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda):
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def _refuse_padding_mask(*_: Any, attention_mask: Tensor | None = None, **_unused: Any) -> None:
    """What transformers asks for a mask under our name: there is none to make."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask must have no zeros, got padding; this attention knows it by spans: "
            "pass exactly model_kwargs(batch, model)"
        )


def _registered(name: str) -> Any:
    """The attention function that transformers knows by this name, or None."""
    from transformers import AttentionInterface

    return AttentionInterface().get(name)


def _takes_spans(name: str) -> bool:
    """Whether this attention is this library's, registered by whatever function."""
    if name in (*BY_POSITION_IDS, *FLASH):
        return False
    forward = _registered(name)
    while isinstance(forward, functools.partial):
        forward = forward.func
    return forward is attention_forward
