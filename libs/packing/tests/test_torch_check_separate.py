"""The check that a model keeps the sequences of a batch apart: what it must find, and leave be."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from burnish_packing.torch import PackedBatch, empty_batch, pack_sequences, pad_sequences
from burnish_packing.torch.hugging_face import (
    SequencesNotSeparateError,
    check_separate,
    model_kwargs,
    register_attention,
)
from torch import nn
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Ten times the usual size: a leak must move logits by far more than rounding.
    "initializer_range": 0.2,
}
PACKED = register_attention("burnish_packing_check_separate_test")
LENGTHS = [5, 1, 9, 1, 1, 3]
TOKENS = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(3))


def seeded(build) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    return seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)))


@pytest.fixture(scope="module")
def mamba() -> nn.Module:
    return seeded(
        lambda: MambaForCausalLM(
            MambaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                state_size=4,
                num_hidden_layers=2,
                initializer_range=0.5,
                use_mambapy=False,
            )
        )
    )


def with_cache(batch: PackedBatch) -> dict:
    return {"input_ids": batch.token_ids, "position_ids": batch.position_ids}


def with_mask_of_ones(batch: PackedBatch) -> dict:
    return {**model_kwargs(batch, "sdpa"), "attention_mask": torch.ones_like(batch.token_ids)}


def without_position_ids(batch: PackedBatch) -> dict:
    return {"input_ids": batch.token_ids, "use_cache": False}


@pytest.mark.parametrize("wrong", [with_cache, with_mask_of_ones, without_position_ids])
@pytest.mark.parametrize("given", [True, False])
def test_restarted_position_ids_alone_are_not_enough(qwen, wrong, given) -> None:
    """The cache on, or a mask of ones: sequence 0's tokens move those behind it by far."""
    qwen.set_attn_implementation("sdpa")
    batch = pack_sequences(TOKENS, LENGTHS) if given else None
    with pytest.raises(SequencesNotSeparateError, match="without attention_mask and cache") as info:
        check_separate(qwen, batch, make_kwargs=wrong)
    assert (info.value.changed, info.value.moved) == (0, 1)
    assert info.value.difference > 0.5
    assert f"sequence 1 moved by {info.value.difference:.3g}" in str(info.value)
    assert isinstance(info.value, ValueError)


def test_keywords_of_another_attention_are_found(qwen) -> None:
    """The model runs this library's attention but gets no spans."""
    qwen.set_attn_implementation(PACKED)
    with pytest.raises(ValueError, match="must say what is packed, got no spans"):
        check_separate(
            qwen, pack_sequences(TOKENS, LENGTHS), make_kwargs=lambda b: model_kwargs(b, "sdpa")
        )


def test_positions_that_do_not_restart_are_found() -> None:
    """Attention is separate, and still the sequences are not what they are alone."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = Qwen2Config(**SIZES, attn_implementation="sdpa")
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, input_ids, position_ids, **_unused):
            values = input_ids[..., None] + 7.0 * position_ids[..., None]
            return SimpleNamespace(logits=values)

    def counting_on(batch: PackedBatch) -> dict:
        positions = torch.arange(batch.token_ids.shape[1])[None]
        return {"input_ids": batch.token_ids, "position_ids": positions}

    check_separate(Positions())
    with pytest.raises(SequencesNotSeparateError, match="let position_ids start again") as info:
        check_separate(Positions(), make_kwargs=counting_on)
    assert (info.value.changed, info.value.moved) == (None, 1)
    assert info.value.difference == 7 * 6


@pytest.mark.parametrize("version", ["mamba", "mamba2"])
def test_state_space_models_are_refused(mamba, version) -> None:
    """The state carries one sequence into the next, whatever the position ids say."""
    model = mamba
    if version == "mamba2":
        config = Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=8,
            initializer_range=0.5,
        )
        model = seeded(lambda: Mamba2ForCausalLM(config))
    with pytest.raises(SequencesNotSeparateError, match="if it has state-space") as info:
        check_separate(model)
    assert (info.value.changed, info.value.moved) == (0, 1)
    # In rows of their own the sequences are separate.
    check_separate(model, pad_sequences(TOKENS, LENGTHS))


def test_what_the_padding_moves_is_found(qwen) -> None:
    """Rows padded on the left: tokens see the padding before them."""
    qwen.set_attn_implementation("sdpa")
    batch = pad_sequences(TOKENS, [12, 8])
    # Row 1 with its four positions of padding first.
    left = replace(
        batch,
        token_ids=torch.stack([batch.token_ids[0], batch.token_ids[1].roll(4)]),
        slots=torch.cat([batch.slots[:12], batch.slots[12:] + 4]),
    )
    with pytest.raises(SequencesNotSeparateError, match="the padding were changed") as info:
        check_separate(qwen, left)
    assert (info.value.changed, info.value.moved) == (-1, 1)


def test_nothing_is_left_behind(qwen) -> None:
    qwen.set_attn_implementation("sdpa")
    qwen.train()
    qwen.model.layers[0].mlp.eval()
    modes = [module.training for module in qwen.modules()]
    assert len(set(modes)) == 2
    for parameter in qwen.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state, use_cache = torch.get_rng_state(), qwen.config.use_cache
    check_separate(qwen)
    with pytest.raises(SequencesNotSeparateError):
        check_separate(qwen, make_kwargs=with_cache)
    assert [module.training for module in qwen.modules()] == modes
    assert all(bool((parameter.grad == 3).all()) for parameter in qwen.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert qwen.config.use_cache is use_cache
    assert torch.is_grad_enabled()
    qwen.zero_grad()


def test_dropout_is_off_while_checking() -> None:
    config = Qwen2Config(**SIZES, attention_dropout=0.5)
    model = seeded(lambda: Qwen2ForCausalLM(config)).train()
    check_separate(model)
    assert model.training


def test_a_model_without_a_head_and_in_half_precision() -> None:
    model = seeded(lambda: Qwen2Model(Qwen2Config(**SIZES)))
    check_separate(model)
    model = model.to(torch.bfloat16)
    check_separate(model)
    with pytest.raises(SequencesNotSeparateError):
        check_separate(model, make_kwargs=with_cache)


def test_a_check_that_can_tell_nothing_is_refused(qwen) -> None:
    with pytest.raises(ValueError, match="batch must hold a sequence"):
        check_separate(qwen, empty_batch())
    constant = seeded(lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    nn.init.zeros_(constant.lm_head.weight)
    with pytest.raises(ValueError, match="must depend on its tokens"):
        check_separate(constant)
    nn.init.constant_(constant.lm_head.weight, torch.nan)
    with pytest.raises(ValueError, match="outputs must be finite"):
        check_separate(constant)
    classifier = nn.Module()
    classifier.config = qwen.config
    classifier.weight = nn.Parameter(torch.ones(()))
    classifier.forward = lambda **_unused: (torch.zeros(1, 2),)
    with pytest.raises(ValueError, match=r"for all positions, \(1, 24\), got tuple"):
        check_separate(classifier)
