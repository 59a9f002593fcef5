"""Who sees whom in a pack, as masks: dense for SDPA, blocks for FlexAttention."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from burnish_packing._checks import check_positive
from burnish_packing.layout import Span


def block_diagonal_mask(
    spans: Sequence[Span],
    *,
    sliding_window: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [T, T], True where the query (first axis) sees the key (second axis).

    Args:
        spans: in order and without gaps over [0, T), as `pack_sequences` makes them.
        sliding_window: W: a token sees itself and the W - 1 before it in its own sequence, the
            shared prefix counted in; None: all before it.
        device: of the mask.

    Raises:
        ValueError: the spans do not tile a row or the window is not an integer >= 1.
    """
    num_tokens = check_spans(spans)
    visible = _visibility(spans, sliding_window, device)
    positions = torch.arange(num_tokens, device=device)
    return visible(0, 0, positions[:, None], positions[None, :])


def flex_block_mask(
    spans: Sequence[Span],
    *,
    sliding_window: int | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The same as `block_diagonal_mask` for `torch.nn.attention.flex_attention.flex_attention`.

    Blocks of 128 x 128 in which nothing is seen are skipped by the compiled kernel (Dong et al.
    2024, arXiv 2412.05496). Making it takes T * T booleans for a moment.
    """
    num_tokens = check_spans(spans)
    visible = _visibility(spans, sliding_window, device)
    where = torch.get_default_device() if device is None else torch.device(device)
    return create_block_mask(visible, None, None, num_tokens, num_tokens, device=str(where))


def causal_mask(
    num_queries: int,
    num_keys: int,
    *,
    sliding_window: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """bool [num_queries, num_keys], aligned bottom right: the last query sees up to the last key.

    With a window, the last W of these; `num_keys` >= `num_queries`.
    """
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    last = num_keys - num_queries  # the key of the first query's own token
    visible = visible.tril(last)
    return visible if sliding_window is None else visible.triu(last - sliding_window + 1)


def check_spans(spans: Sequence[Span]) -> int:
    """The number of tokens they tile; ValueError unless each position lies in exactly one span.

    A prefix must be a whole span before, one without a prefix of its own: so a token's position in
    its sequence is known from its own span.
    """
    end = 0
    without_prefix: set[tuple[int, int]] = set()
    for span in spans:
        prefix = (span.prefix_start, span.prefix_end)
        alone = span.prefix_start == span.prefix_end
        known = alone or prefix in without_prefix
        if span.start != end or span.end <= span.start or not known:
            raise ValueError(
                f"spans must follow one another from 0 and prefixes lie before them, each a whole "
                f"span without a prefix of its own, got {span} after position {end}; take them "
                f"from pack_sequences"
            )
        end = span.end
        if alone:
            without_prefix.add((span.start, end))
    return end


def check_window(sliding_window: int | None) -> None:
    """ValueError unless it is None or an integer >= 1."""
    if sliding_window is not None:
        check_positive(sliding_window, "sliding_window")


def _visibility(
    spans: Sequence[Span], sliding_window: int | None, device: torch.device | str | None
) -> Callable[..., Tensor]:
    """A mask_mod of FlexAttention: (batch, head, query, key) to whether the query sees the key."""
    check_window(sliding_window)
    lengths = torch.tensor([span.end - span.start for span in spans])
    columns = [[span.start, span.prefix_start, span.prefix_end] for span in spans]
    of_tokens = torch.tensor(columns).view(-1, 3).repeat_interleave(lengths, dim=0)
    start, prefix_start, prefix_end = of_tokens.T.contiguous().to(device)

    def visible(_batch: object, _head: object, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= start[query]) & (key <= query)
        prefix = (key >= prefix_start[query]) & (key < prefix_end[query])
        if sliding_window is not None:
            # The window runs over the sequence, as if the prefix lay right before the span.
            gap = start[query] - prefix_end[query]
            own = own & (query - key < sliding_window)
            prefix = prefix & (query - key - gap < sliding_window)
        return own | prefix

    return visible
