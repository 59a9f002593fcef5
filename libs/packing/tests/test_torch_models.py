"""Packed, padded, shared-prefix and one by one are the same numbers on real model classes."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from burnish_packing.torch import (
    PackedBatch,
    Span,
    attention_forward,
    pack_sequences,
    pad_sequences,
)
from burnish_packing.torch.attention_mask import block_diagonal_mask
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 61
WINDOW = 4  # shorter than the longest sequences and than the longest prefix with a completion
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
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
}
WINDOWED = ("gemma3", "mistral")
BACKENDS = ("per_span", "block_diagonal", "flex")
for backend in BACKENDS:
    AttentionInterface.register(
        f"burnish_packing_{backend}", functools.partial(attention_forward, backend=backend)
    )
AttentionInterface.register("burnish_packing_default", attention_forward)
pytestmark = pytest.mark.filterwarnings(  # on the CPU it is only for tests
    "ignore:flex_attention called without torch.compile:UserWarning"
)


@pytest.fixture(scope="module")
def build() -> Callable[[str], nn.Module]:
    @functools.cache
    def built(name: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return MODELS[name]()

    return built


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, build) -> Iterator[nn.Module]:
    built = build(request.param)
    built.set_attn_implementation("burnish_packing_default")
    yield built
    built.zero_grad()


def random_tokens(num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    )


@dataclass(frozen=True)
class Case:
    """Sequences, flat, with the prefixes they share."""

    token_ids: Tensor
    lengths: list[int]
    token_mask: Tensor
    prefix_ids: list[int] | None = None
    prefix_lengths: list[int] | None = None

    def pack(self, **keywords) -> PackedBatch:
        return pack_sequences(
            self.token_ids,
            self.lengths,
            token_mask=self.token_mask,
            prefix_ids=self.prefix_ids,
            prefix_lengths=self.prefix_lengths,
            **keywords,
        )

    def pad(self, **keywords) -> PackedBatch:
        return pad_sequences(self.token_ids, self.lengths, token_mask=self.token_mask, **keywords)

    def pack_without_sharing(self, **keywords) -> PackedBatch:
        return replace(self, prefix_ids=None, prefix_lengths=None).pack(**keywords)

    def with_changed_token(self, index: int) -> "Case":
        changed = self.token_ids.clone()
        changed[index] = (changed[index] + 1) % VOCABULARY
        return replace(self, token_ids=changed)


def plain_case() -> Case:
    lengths = [5, 1, 9, 3]
    starts = torch.tensor([0, 5, 6, 15])
    mask = torch.ones(18, dtype=torch.bool)
    mask[starts] = False
    return Case(random_tokens(18), lengths, mask)


def shared_prefix_case() -> Case:
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
    return Case(torch.cat(parts), lengths, torch.cat(masks), ids, shared)


def logits_of(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Logits [M, V] of the scored tokens, in the flat order of the tokens."""
    output = model(
        batch.token_ids, position_ids=batch.position_ids, spans=batch.spans, use_cache=False
    )
    return output.logits.flatten(0, 1)[batch.score_positions]


def one_by_one(model: nn.Module, case: Case, attention: str = "sdpa") -> Tensor:
    """The reference: every sequence alone through transformers' own attention, [M, V]."""
    chosen = model.config._attn_implementation
    model.set_attn_implementation(attention)
    rows = []
    for row, mask in zip(
        case.token_ids.split(case.lengths), case.token_mask.split(case.lengths), strict=True
    ):
        logits = model(row[None], use_cache=False).logits[0]
        rows.append(logits[:-1][mask[1:]])
    model.set_attn_implementation(chosen)
    return torch.cat(rows)


def gradients(model: nn.Module, logits: Tensor, case: Case) -> dict[str, Tensor]:
    """Of a weighted sum of the log-probs of the scored tokens."""
    model.zero_grad()
    labels = case.token_ids[case.token_mask]
    logprobs = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    (logprobs * torch.linspace(-1, 1, len(labels))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: Tensor, expected: Tensor, name: str = "logits") -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert len(actual) > 10
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert_same(actual[name], gradient, name)


WAYS = {
    "packed": lambda: (plain_case(), plain_case().pack()),
    "packed and filled": lambda: (plain_case(), plain_case().pack(pad_multiple=8)),
    "padded": lambda: (plain_case(), plain_case().pad()),
    "padded and filled": lambda: (plain_case(), plain_case().pad(pad_multiple=8)),
    "shared": lambda: (shared_prefix_case(), shared_prefix_case().pack()),
    "shared and filled": lambda: (shared_prefix_case(), shared_prefix_case().pack(pad_multiple=16)),
    "not shared": lambda: (shared_prefix_case(), shared_prefix_case().pack_without_sharing()),
    "not packed": lambda: (shared_prefix_case(), shared_prefix_case().pad()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_by_one(model, way) -> None:
    case, batch = WAYS[way]()
    expected, actual = one_by_one(model, case), logits_of(model, batch)
    assert_same(actual, expected)
    assert_same_gradients(gradients(model, actual, case), gradients(model, expected, case))


def test_the_shared_prefix_case_shares() -> None:
    """27 positions instead of 37: 4 and 2 tokens of prompt lie once."""
    batch = shared_prefix_case().pack()
    assert batch.token_ids.shape == (1, 27)
    assert sum(shared_prefix_case().lengths) == 37
    assert sum(span.prefix_end > span.prefix_start for span in batch.spans) == 5


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("way", ["packed and filled", "shared and filled"])
def test_block_diagonal_equals_one_by_one(build, name, way) -> None:
    model = build(name)
    model.set_attn_implementation("burnish_packing_block_diagonal")
    case, batch = WAYS[way]()
    expected, actual = one_by_one(model, case), logits_of(model, batch)
    assert_same(actual, expected)
    assert_same_gradients(gradients(model, actual, case), gradients(model, expected, case))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("way", ["packed and filled", "shared and filled"])
@torch.no_grad()
def test_flex_equals_one_by_one(build, name, way) -> None:
    model = build(name)
    model.set_attn_implementation("burnish_packing_flex")
    case, batch = WAYS[way]()
    assert_same(logits_of(model, batch), one_by_one(model, case))


@torch.no_grad()
def test_the_references_agree(model) -> None:
    """transformers' eager and SDPA attention: the same windows, whoever masks."""
    case = shared_prefix_case()
    assert_same(one_by_one(model, case), one_by_one(model, case, "eager"))


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_changed_token_moves_only_its_own_sequence(model, backend) -> None:
    model.set_attn_implementation(f"burnish_packing_{backend}")
    case = plain_case()
    before = logits_of(model, case.pack())
    after = logits_of(model, case.with_changed_token(1).pack())
    assert len(before) == 4 + 0 + 8 + 2
    assert torch.equal(before[4:], after[4:])
    assert torch.equal(before[0], after[0])
    assert (before[1:4] - after[1:4]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_changed_completion_does_not_move_its_siblings(model, backend) -> None:
    model.set_attn_implementation(f"burnish_packing_{backend}")
    case = shared_prefix_case()
    before = logits_of(model, case.pack())
    after = logits_of(model, case.with_changed_token(4).pack())  # sequence 0's first own token
    assert torch.equal(before[3:], after[3:])
    assert torch.equal(before[0], after[0])  # that token's own score, from the prompt
    assert (before[1:3] - after[1:3]).abs().amax(1).min() > 1e-3


@torch.no_grad()
def test_padding_moves_nothing(model) -> None:
    case = plain_case()
    one, other = (case.pack(pad_multiple=8, pad_token_id=pad) for pad in (0, 7))
    assert one.token_ids.shape == (1, 24)
    assert not torch.equal(one.token_ids, other.token_ids)
    assert torch.equal(logits_of(model, one), logits_of(model, other))


@torch.no_grad()
def test_negative_control_one_span_over_the_whole_pack_leaks(model) -> None:
    """Restarted position ids alone do not separate sequences: the comparison must notice."""
    case = plain_case()
    packed = case.pack()
    whole = (Span(0, sum(case.lengths)),)
    leaking = replace(packed, layout=replace(packed.layout, spans=whole))
    difference = (logits_of(model, leaking) - one_by_one(model, case)).abs().amax(1)
    assert difference[:4].max() < 1e-4
    assert difference[4:].max() > 0.1


@torch.no_grad()
def test_negative_control_completions_without_their_prefix(model) -> None:
    case = shared_prefix_case()
    batch = case.pack()
    spans = tuple(Span(span.start, span.end) for span in batch.spans)
    difference = logits_of(
        model, replace(batch, layout=replace(batch.layout, spans=spans))
    ) - one_by_one(model, case)
    assert difference.abs().max() > 0.1


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("wrong", [WINDOW - 1, WINDOW + 1, None])
@torch.no_grad()
def test_negative_control_a_wrong_window(build, name, wrong) -> None:
    """One token more or less, or a layer's window forgotten, must be seen in every layout."""

    def forward(*arguments, sliding_window: int | None = None, **keywords):
        window = sliding_window and wrong
        return attention_forward(*arguments, sliding_window=window, **keywords)

    AttentionInterface.register("burnish_packing_wrong", forward)
    model = build(name)
    model.set_attn_implementation("burnish_packing_wrong")
    for way in ("packed", "padded", "shared"):
        case, batch = WAYS[way]()
        difference = logits_of(model, batch) - one_by_one(model, case)
        assert difference.abs().max() > 0.1


@torch.no_grad()
def test_negative_control_a_window_over_the_pack_and_not_the_sequence(build) -> None:
    """Behind a prefix that lies far away, distance in the pack is not distance in the sequence."""

    def forward(module, query, key, value, mask, *, spans, sliding_window, scaling, **_):
        visible = block_diagonal_mask(spans, device=query.device)
        visible = visible.triu(1 - sliding_window)
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None

    AttentionInterface.register("burnish_packing_by_place", forward)
    model = build("mistral")
    model.set_attn_implementation("burnish_packing_by_place")
    plain, shared = plain_case(), shared_prefix_case()
    assert_same(logits_of(model, plain.pack()), one_by_one(model, plain))
    difference = logits_of(model, shared.pack()) - one_by_one(model, shared)
    assert difference.abs().max() > 0.1


def test_a_batch_without_scored_tokens_has_zero_gradients(model) -> None:
    """What a rank runs in an empty slot, so that collectives stay in step."""
    case = Case(random_tokens(1), [1], torch.zeros(1, dtype=torch.bool))
    logits = logits_of(model, case.pack())
    assert logits.shape == (0, VOCABULARY)
    zero = gradients(model, logits, case)
    assert zero
    assert all(gradient.count_nonzero() == 0 for gradient in zero.values())


def test_a_sliding_window_shorter_than_a_sequence_is_computed() -> None:
    """Qwen2 has windows by its config only; with one as long as every sequence nothing changes."""

    def built(**config) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Qwen2ForCausalLM(
                Qwen2Config(**SIZES, attn_implementation="burnish_packing_default", **config)
            )

    windowed = built(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    full = built()
    mask = torch.ones(20, dtype=torch.bool)
    mask[0] = mask[8] = False
    fitting = Case(random_tokens(16), [8, 8], mask[:16])
    longer = Case(random_tokens(20), [8, 12], mask)
    for case, is_same in ((fitting, True), (longer, False)):
        logits = logits_of(windowed, case.pack())
        expected = one_by_one(windowed, case)
        assert_same(logits, expected)
        assert_same_gradients(
            gradients(windowed, logits, case), gradients(windowed, expected, case)
        )
        difference = (logits - logits_of(full, case.pack())).abs().max()
        assert (difference < 1e-4) == is_same
        assert (difference > 1e-2) != is_same
