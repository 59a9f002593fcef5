"""Packed, padded, shared-prefix and one by one are the same numbers on real model classes."""

import numpy as np
import pytest
import torch
from burnish_packing.torch import (
    PackedBatch,
    Span,
    attention_forward,
    empty_batch,
    pack_sequences,
    pad_sequences,
)
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
AttentionInterface.register("burnish_packing_test", attention_forward)


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    config_class, model_class = kinds[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Weights ten times the usual size: a leak must move logits by far more than rounding.
        config = config_class(
            **SIZES, initializer_range=0.2, attn_implementation="burnish_packing_test"
        )
        return model_class(config)


def random_tokens(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    )


def logits_of(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Logits [M, V] of the scored tokens."""
    output = model(
        batch.token_ids, position_ids=batch.position_ids, spans=batch.spans, use_cache=False
    )
    return output.logits.flatten(0, 1)[batch.score_positions]


def logprobs_of(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Log-probs of all flat tokens, 0 where not scored."""
    logprobs = logits_of(model, batch).log_softmax(-1)
    return batch.scatter(logprobs.gather(1, batch.labels[:, None]).squeeze(1))


def one_by_one(model: nn.Module, token_ids: Tensor, lengths: list[int]) -> Tensor:
    """The reference: every sequence alone through transformers' own attention, [T]."""
    model.set_attn_implementation("sdpa")
    columns = []
    for row in token_ids.split(lengths):
        logits = model(row[None], use_cache=False).logits[0, :-1]
        scored = logits.log_softmax(-1).gather(1, row[1:, None]).squeeze(1)
        columns.append(torch.cat([scored.new_zeros(1), scored]))
    model.set_attn_implementation("burnish_packing_test")
    return torch.cat(columns)


def gradients(model: nn.Module, logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (actual[name] - gradient).abs().max()
        assert difference <= 1e-5 * gradient.abs().max(), name


LENGTHS = [5, 1, 9, 3]


@pytest.mark.parametrize("collate", [pack_sequences, pad_sequences])
@pytest.mark.parametrize("pad_multiple", [1, 8])
def test_packed_and_padded_equal_one_by_one(model, collate, pad_multiple) -> None:
    token_ids = random_tokens(sum(LENGTHS))
    weights = torch.linspace(-1, 1, sum(LENGTHS))
    expected = one_by_one(model, token_ids, LENGTHS)
    actual = logprobs_of(model, collate(token_ids, LENGTHS, pad_multiple=pad_multiple))

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, actual, weights), gradients(model, expected, weights))


def shared_prefix_case() -> tuple[Tensor, list[int], Tensor, list[int], list[int]]:
    """Two prompts (4 and 2 tokens) with 3 and 2 completions, interleaved, and a lone sequence."""
    prompts = {0: random_tokens(4, seed=2), 1: random_tokens(2, seed=3)}
    parts, lengths, masks, ids, shared = [], [], [], [], []
    for i, (group, own) in enumerate([(0, 3), (1, 5), (0, 1), (-1, 6), (1, 2), (0, 4)]):
        row = random_tokens(own, seed=10 + i)
        if group >= 0:
            row = torch.cat([prompts[group], row])
        prefix = len(row) - own
        parts.append(row)
        lengths.append(len(row))
        masks.append(torch.arange(len(row)) >= max(prefix, 1))
        ids.append(group)
        shared.append(prefix)
    return torch.cat(parts), lengths, torch.cat(masks), ids, shared


@pytest.mark.parametrize("pad_multiple", [1, 16])
def test_shared_prefix_equals_one_by_one(model, pad_multiple) -> None:
    token_ids, lengths, mask, prefix_ids, prefix_lengths = shared_prefix_case()
    weights = torch.linspace(-1, 1, sum(lengths))
    expected = torch.where(mask, one_by_one(model, token_ids, lengths), 0)
    batch = pack_sequences(
        token_ids,
        lengths,
        token_mask=mask,
        prefix_ids=prefix_ids,
        prefix_lengths=prefix_lengths,
        pad_multiple=pad_multiple,
    )
    actual = logprobs_of(model, batch)

    assert batch.token_ids.shape == (1, -(-27 // pad_multiple) * pad_multiple)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(model, actual, weights), gradients(model, expected, weights))


def test_a_changed_token_moves_only_its_own_sequence(model) -> None:
    token_ids = random_tokens(sum(LENGTHS))
    changed = token_ids.clone()
    changed[1] = (changed[1] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (
            logprobs_of(model, pack_sequences(t, LENGTHS)) for t in (token_ids, changed)
        )
    assert torch.equal(before[5:], after[5:])
    assert (before[2:5] - after[2:5]).abs().min() > 1e-3


def test_a_changed_completion_does_not_move_its_siblings(model) -> None:
    token_ids, lengths, mask, prefix_ids, prefix_lengths = shared_prefix_case()
    changed = token_ids.clone()
    changed[4] = (changed[4] + 1) % VOCABULARY  # the first own token of sequence 0
    with torch.no_grad():
        before, after = (
            logprobs_of(
                model,
                pack_sequences(
                    t,
                    lengths,
                    token_mask=mask,
                    prefix_ids=prefix_ids,
                    prefix_lengths=prefix_lengths,
                ),
            )
            for t in (token_ids, changed)
        )
    assert torch.equal(before[7:], after[7:])
    assert (before[4:7] - after[4:7]).abs().min() > 1e-3


def test_negative_control_one_span_over_the_whole_pack_leaks(model) -> None:
    """Restarted position ids alone do not separate sequences: the comparison must notice."""
    token_ids = random_tokens(sum(LENGTHS))
    batch = pack_sequences(token_ids, LENGTHS)
    leaking = PackedBatch(**{**vars(batch), "spans": (Span(0, sum(LENGTHS)),)})
    with torch.no_grad():
        difference = logprobs_of(model, leaking) - one_by_one(model, token_ids, LENGTHS)
    assert difference[:5].abs().max() < 1e-5
    assert difference[6:].abs().max() > 0.1


def test_an_empty_batch_runs_and_has_zero_gradients(model) -> None:
    logprobs = logprobs_of(model, empty_batch(pad_token_id=3))
    assert logprobs.shape == (0,)
    zero = gradients(model, logprobs, torch.zeros(0))
    assert zero
    assert all(np.count_nonzero(gradient.numpy()) == 0 for gradient in zero.values())


def test_a_sliding_window_shorter_than_a_sequence_is_refused() -> None:
    config = Qwen2Config(
        **SIZES,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
        attn_implementation="burnish_packing_test",
    )
    model = Qwen2ForCausalLM(config)
    logprobs_of(model, pack_sequences(random_tokens(16), [8, 8]))
    with pytest.raises(ValueError, match="sliding window of 8 tokens, got one of 9"):
        logprobs_of(model, pack_sequences(random_tokens(17), [8, 9]))
