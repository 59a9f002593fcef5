"""Which parameters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turn training off for the parameters whose names match one of the patterns.

    Args:
        model: changed in place.
        patterns: globs over Hugging Face names, such as ``model.embed_tokens.*`` or
            ``*.layers.0.*``; a tied weight has all its names.

    Raises:
        ValueError: if a pattern matches nothing (examples of names are told), or nothing is left to
            train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matched = [name for name in named if fnmatchcase(name, pattern)]
        if not matched:
            examples = ", ".join(list(named)[:: len(named) // 3 or 1])
            raise ValueError(
                f"a pattern of frozen parameters must match some, got {pattern!r}, which matches "
                f"none of {len(named)}; they are named like {examples}"
            )
        for name in matched:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(
            f"some parameters must be trained, got all frozen by {list(patterns)}; freeze fewer"
        )
