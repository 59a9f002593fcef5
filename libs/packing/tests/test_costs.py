"""FLOPs of a model by hand, by config, and against what torch counts."""

import pickle

import numpy as np
import pytest
from burnish_packing import plan_micro_batches, token_cost
from burnish_packing.costs import flops_cost, flops_cost_from_config

SIZES = {
    "hidden_size": 8,
    "num_layers": 2,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 10,
}
CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 10,
}


def test_flops_by_hand() -> None:
    # Weights of a layer: 8 * 8 queries, 2 * 8 * 4 keys and values, 8 * 8 output: 192; 3 * 8 * 16:
    # 384. Two layers and a head of 80: 1,232, each 6 FLOPs a token. Pairs: 12 * 2 * 4 * 2 layers.
    costs = flops_cost(**SIZES)(np.array([0, 1, 10]))
    assert costs.dtype == np.float64
    assert costs.tolist() == [0.0, 7392 + 192 / 2, 73920 + 192 * 100 / 2]
    # Without a gate 128 weights less in each layer; as many key-value heads as heads: 64 more.
    ungated = flops_cost(**SIZES, gated_mlp=False)
    assert ungated(np.array([1])) == 7392 + 96 - 6 * 2 * 128
    more = flops_cost(**{**SIZES, "num_key_value_heads": None, "head_dim": None})
    assert more(np.array([1])) == 7392 + 96 + 6 * 2 * 64
    # One layer of 16 and one of 48 neurons: 768 weights more.
    mixed = flops_cost(**{**SIZES, "intermediate_size": [16, 48]})
    assert mixed(np.array([1])) == 7392 + 96 + 6 * 768


def test_a_window_bounds_the_pairs() -> None:
    # 10 tokens and a window of 4: 4 * 10 - 8 = 32 pairs in place of 50; 3 tokens: none is missing.
    sliding = flops_cost(**SIZES, sliding_window=4, num_sliding_layers=1)
    assert sliding(np.array([3, 4, 10])).tolist() == [
        3 * 7392 + 192 * 9 / 2,
        4 * 7392 + 192 * 16 / 2,
        73920 + 96 * (50 + 32),
    ]
    everywhere = flops_cost(**SIZES, sliding_window=4)
    assert everywhere(np.array([10])) == 73920 + 96 * (32 + 32)


class Config:
    """Attributes, as a configuration object has them."""

    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize("make", [dict, Config])
@pytest.mark.parametrize(
    ("fields", "same_as"),
    [
        ({}, {"head_dim": 4}),
        ({"head_dim": 6}, {"head_dim": 6}),
        ({"num_key_value_heads": None}, {"num_key_value_heads": 2}),
        ({"model_type": "gpt2"}, {"gated_mlp": False}),
        # sliding windows
        ({"sliding_window": 4}, {"sliding_window": 4}),
        ({"sliding_window": 4, "use_sliding_window": False}, {}),
        (
            {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_window": 4, "num_sliding_layers": 1},
        ),
        (
            {"sliding_window": 4, "sliding_window_pattern": 2},
            {"sliding_window": 4, "num_sliding_layers": 1},
        ),
        (
            {"sliding_window": 4, "model_type": "gemma2"},
            {"sliding_window": 4, "num_sliding_layers": 1},
        ),
        (
            {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
            {"sliding_window": 4, "num_sliding_layers": 1},
        ),
        ({"sliding_window": 4, "layer_types": ["full_attention"] * 2}, {}),
        # mixtures of experts
        ({"num_experts_per_tok": 3}, {"intermediate_size": 48}),
        (
            {"num_experts_per_tok": 3, "moe_intermediate_size": 5, "n_shared_experts": 1},
            {"intermediate_size": 20},
        ),
        (
            {
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 5,
                "shared_expert_intermediate_size": 7,
                "mlp_only_layers": [1],
            },
            {"intermediate_size": [22, 16]},
        ),
        (
            {"num_experts_per_tok": 3, "moe_intermediate_size": 5, "decoder_sparse_step": 2},
            {"intermediate_size": [16, 15]},
        ),
        (
            {"num_experts_per_tok": 3, "moe_intermediate_size": 5, "first_k_dense_replace": 1},
            {"intermediate_size": [16, 15]},
        ),
    ],
)
def test_a_config_means_these_sizes(make, fields, same_as) -> None:
    lengths = np.array([1, 3, 10])
    got = flops_cost_from_config(make(**{**CONFIG, **fields}))(lengths)
    assert got.tolist() == flops_cost(**{**SIZES, **same_as})(lengths).tolist()
    nested = make(hidden_size=99, text_config=make(**{**CONFIG, **fields}))
    assert flops_cost_from_config(nested)(lengths).tolist() == got.tolist()


def test_a_cost_can_be_sent_and_planned_with() -> None:
    cost = pickle.loads(pickle.dumps(flops_cost(**SIZES)))
    assert plan_micro_batches([10], max_tokens=10, cost=cost).costs == ((73920 + 9600,),)
    assert token_cost(np.array([3, 4])).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**CONFIG, "vocab_size": None}, "must have vocab_size for its FLOPs"),
        (
            {**CONFIG, "layer_types": ["linear_attention", "full_attention"]},
            r"got \['linear_attention'\]",
        ),
        ({**CONFIG, "kv_lora_rank": 4}, "got kv_lora_rank"),
        ({**CONFIG, "hidden_size": 8.0}, "hidden_size must be an integer >= 1, got 8.0"),
        ({**CONFIG, "sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
    ],
)
def test_configs_that_the_formula_does_not_hold_for_are_refused(config, message) -> None:
    with pytest.raises(ValueError, match=message):
        flops_cost_from_config(config)


@pytest.mark.parametrize(
    "changed",
    [{"intermediate_size": [16]}, {"sliding_window": 4, "num_sliding_layers": 3}],
)
def test_sizes_that_do_not_go_together_are_refused(changed) -> None:
    with pytest.raises(ValueError, match="for each of 2 layers"):
        flops_cost(**{**SIZES, **changed})


def test_torch_counts_the_same() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=61,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    cost = flops_cost_from_config(config)
    for length in (16, 128):
        counter = FlopCounterMode(display=False)
        with counter:
            logits = model(torch.arange(length)[None] % 61, use_cache=False).logits
            logits.sum().backward()
        # Eager attention computes the half above the diagonal too: b * L**2 a second time.
        once, twice = cost(np.array([length, 2 * length]))
        expected = once + (twice - 2 * once) / 2
        # The counter also has the outer product of positions and rotary frequencies.
        assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)
        assert counter.get_total_flops() != pytest.approx(once, rel=1e-2)
