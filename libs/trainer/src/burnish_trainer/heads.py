"""Heads on a decoder: which class of transformers carries one, and how logits come from it.

All three are transformers' own classes, so what is saved is read by `from_pretrained`:

- ``language``: the model's own, `AutoModelForCausalLM` (`AutoModelForImageTextToText` with images);
- ``value``: one number a token, `AutoModelForTokenClassification` with one label;
- ``reward``: one number a sequence, `AutoModelForSequenceClassification` with one label.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from burnish_losses.logprobs import logprobs_from_hidden
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from burnish_trainer.policy import Head

AUTO_CLASSES: dict[str, Any] = {
    "language": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
SCALAR_HEAD = "score."  # where transformers keeps the head of both classification classes


@dataclass(frozen=True)
class LanguageHead:
    """Logits are ``softcap(scale * hidden @ weight.T + bias)``."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    scale: float
    softcap: float | None


def language_head(model: PreTrainedModel) -> LanguageHead:
    """The head of a causal language model, with what its family does to logits afterwards.

    Gemma's `final_logit_softcapping`, Cohere's `logit_scale`, Granite's `logits_scaling`;
    `check_language_head` finds whatever other families do.
    """
    config = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (
        getattr(config, "logits_scaling", None) or 1.0
    )
    bias = getattr(head, "bias", None)
    return LanguageHead(head.weight, bias, scale, getattr(config, "final_logit_softcapping", None))


def head_arguments(
    head: LanguageHead, hidden: Tensor
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Arguments of the losses library's functions of hidden states [M, D] and a head."""
    scaled = hidden if head.scale == 1 else hidden * head.scale
    return (scaled, head.weight), {"bias": head.bias, "softcap": head.softcap}


def auto_class(config: PreTrainedConfig, head: str) -> Any:
    """The class of transformers for a head.

    Raises:
        ValueError: for an unknown head, or a value or reward head on a vision-language model.
    """
    if head not in AUTO_CLASSES:
        raise ValueError(f"head must be one of {', '.join(get_args(Head))}, got {head!r}")
    if getattr(config, "vision_config", None) is None:
        return AUTO_CLASSES[head]
    if head != "language":
        raise ValueError(
            f"a vision-language model must have a language head, got {head!r} for a "
            f"{config.model_type!r} model; train its value or reward model from a text model"
        )
    return AutoModelForImageTextToText


def head_overrides(head: str) -> dict[str, Any]:
    """Entries of the config that a value or reward head needs: one label, no dropout before it."""
    return {} if head == "language" else {"num_labels": 1, "classifier_dropout": 0.0}


def check_loaded(info: Mapping[str, Any], source: Path, head: str) -> list[str]:
    """Refuse a checkpoint whose weights are not those of its config.

    Args:
        info: what ``from_pretrained(..., output_loading_info=True)`` tells.
        source: the checkpoint's folder.
        head: a value or reward head may be missing, for it is then a new one, and the language
            head that it replaces may be left over.

    Returns:
        Names of the weights that are missing and therefore new.

    Raises:
        ValueError: if another weight is missing (it would be random), left over, or of another
            shape.
    """
    missing = sorted(map(str, info.get("missing_keys") or []))
    wrong = {
        "missing_keys": missing,
        "unexpected_keys": sorted(map(str, info.get("unexpected_keys") or [])),
        "mismatched_keys": sorted(map(str, info.get("mismatched_keys") or [])),
    }
    if head != "language":
        wrong["missing_keys"] = [n for n in missing if not n.startswith(SCALAR_HEAD)]
        wrong["unexpected_keys"] = [
            n for n in wrong["unexpected_keys"] if not n.startswith("lm_head.")
        ]
    if head == "reward" and f"{SCALAR_HEAD}bias" in wrong["unexpected_keys"]:
        raise ValueError(
            f"a reward head has no bias, got {SCALAR_HEAD}bias in {source}, a value model; train "
            "the reward model from its language model"
        )
    if any(wrong.values()):
        told = "; ".join(f"{kind}: {names[:3]}" for kind, names in wrong.items() if names)
        raise ValueError(
            f"the weights in {source} must be those of its config.json, got {told}; fetch or "
            "convert the checkpoint again"
        )
    return missing


def reset_head(model: PreTrainedModel, missing: Sequence[str], seed: int) -> None:
    """Give a new value or reward head its first weights, from a seed: normal, of std 1/sqrt(D).

    As TRL and Stiennon et al. 2020 ("Learning to summarize from human feedback", appendix B) do.
    What is not missing stays: a value head made from a reward head has its weight, and a bias of 0.
    """
    head: Any = model.score
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if f"{SCALAR_HEAD}weight" in missing:
            size = head.weight.shape
            head.weight.copy_(torch.randn(size, generator=generator) / (size[1] + 1) ** 0.5)
        if f"{SCALAR_HEAD}bias" in missing:
            head.bias.zero_()


def check_language_head(model: PreTrainedModel) -> None:
    """Make sure that log-probs from hidden states are those of the model's own logits.

    Four tokens go through the model once: a family that scales, caps or shifts its logits in a way
    that is not known here would otherwise be trained on other log-probs than it samples from.

    Raises:
        ValueError: if they differ.
    """
    size = model.config.get_text_config().vocab_size
    token_ids = (torch.arange(4) * (size // 5) + 1).to(model.device)
    with torch.no_grad():
        was_training = model.training
        model.eval()
        own = model(input_ids=token_ids[None], use_cache=False, spans=None).logits[0]
        base: Any = model.base_model
        hidden = base(input_ids=token_ids[None], use_cache=False, spans=None).last_hidden_state[0]
        tensors, settings = head_arguments(language_head(model), hidden)
        got = logprobs_from_hidden(*tensors, token_ids, **settings)
        model.train(was_training)
    expected = own.float().log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    if not torch.allclose(got, expected, rtol=1e-4, atol=1e-3):
        raise ValueError(
            "logits must be the head's product with the hidden states, scaled and capped as its "
            f"config says, got log-probs apart by {float((got - expected).abs().max()):.3g} in a "
            f"{model.config.model_type!r} model; this family is not supported"
        )


def write_head_config(model: PreTrainedModel, folder: Path, head: str) -> None:
    """Make a saved value or reward model one that its auto class of transformers reads."""
    if head == "language":
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
