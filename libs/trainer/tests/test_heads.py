"""Heads: what a model says through them is what transformers' own classes say, however batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from burnish_distributed import RaggedBatch
from burnish_losses.reduce import LossOutput, Term, masked_sum
from burnish_losses.reward_model import bradley_terry_loss
from burnish_losses.value import value_loss
from burnish_trainer import TorchPolicy
from burnish_trainer.heads import check_language_head
from burnish_trainer.loading import load_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.1,  # log-probs far from uniform, so that a wrong mask shows
    "pad_token_id": 0,
}
LENGTHS = (9, 14, 3, 6, 11, 8)
ONE = [(0, 1, 2, 3, 4, 5)]
PAIRS = [(4, 5), (0, 1), (2, 3)]  # pairs stay together
SPLIT = [(3, 0), (5,), (1, 2, 4)]


def recorded_batch() -> RaggedBatch:
    """Six sequences, the first three tokens of each (all but one of the third) untrained."""
    generator = np.random.default_rng(0)
    rows = []
    for length in LENGTHS:
        rows.append(
            {
                "token_ids": generator.integers(1, 97, length),  # 0 is padding to transformers
                "token_mask": np.arange(length) >= min(3, length - 1),
                "returns": generator.normal(size=length).astype("f4"),
            }
        )
    return RaggedBatch.from_rows(rows)


def pairs_batch() -> RaggedBatch:
    """The same sequences as three pairs, without a mask: a reward head reads none."""
    batch = recorded_batch()
    return RaggedBatch(
        batch.lengths,
        {"token_ids": batch.token_columns["token_ids"]},
        {
            "pair_ids": np.array([0, 0, 1, 1, 2, 2]),
            "chosen": np.array([True, False, False, True, True, False]),
        },
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def reward_checkpoint(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of transformers' own making, its head included."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("reward")
    own = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    own.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def value_checkpoint(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of transformers' own making, with the bias that its head has."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("value")
    own = AutoModelForTokenClassification.from_pretrained(checkpoint, num_labels=1)
    torch.nn.init.constant_(own.score.bias, 0.3)
    own.save_pretrained(folder)
    return str(folder)


def build(checkpoint: str, head: Any, **kwargs: Any) -> TorchPolicy:
    return TorchPolicy(
        checkpoint,
        head=head,
        **{"learning_rate": 0.05, "optimizer": "torch.optim.SGD", "max_grad_norm": None, **kwargs},
    )


def weights_of(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def own_scores(checkpoint: str | Path, batch: RaggedBatch) -> np.ndarray:
    """Of transformers' sequence classification, in float64, every sequence alone."""
    model, info = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, attn_implementation="sdpa", output_loading_info=True
    )
    assert not info["missing_keys"]
    model.double().eval()
    with torch.no_grad():
        rows = [model(torch.tensor(ids)[None]).logits for ids in batch.sequences("token_ids")]
    assert all(row.shape == (1, 1) for row in rows)
    return torch.cat(rows)[:, 0].numpy()


def own_values(checkpoint: str | Path, batch: RaggedBatch) -> np.ndarray:
    """Of transformers' token classification, in float64, at the position before each token."""
    model, info = AutoModelForTokenClassification.from_pretrained(
        checkpoint, attn_implementation="sdpa", output_loading_info=True
    )
    assert not info["missing_keys"]
    model.double().eval()
    rows = []
    with torch.no_grad():
        for ids in batch.sequences("token_ids"):
            states = model(torch.tensor(ids)[None]).logits[0, :, 0].numpy()
            rows.append(np.concatenate([[0], states[:-1]]))
    return np.where(batch.token_columns["token_mask"], np.concatenate(rows), 0)


def own_logprobs(checkpoint: str | Path, batch: RaggedBatch) -> np.ndarray:
    """[T, V] in float64: the model's own distributions of each token; 0 for first ones."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").double()
    rows = []
    with torch.no_grad():
        for ids in batch.sequences("token_ids"):
            scores = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1).numpy()
            rows.append(np.concatenate([np.zeros_like(scores[:1]), scores[:-1]]))
    return np.concatenate(rows)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("micro_batches", [ONE, SPLIT])
def test_scores_are_those_of_sequence_classification(
    reward_checkpoint: str, layout: str, micro_batches: Any
) -> None:
    policy = build(reward_checkpoint, "reward")
    got = policy.scores(pairs_batch(), micro_batches, layout=layout)
    assert got.dtype == np.float32
    assert got.shape == (6,)
    np.testing.assert_allclose(got, own_scores(reward_checkpoint, pairs_batch()), atol=1e-5)
    assert got.std() > 0.1  # else any order of them would do


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("micro_batches", [ONE, SPLIT])
def test_values_are_those_of_token_classification_one_token_before(
    value_checkpoint: str, layout: str, micro_batches: Any
) -> None:
    policy, batch = build(value_checkpoint, "value"), recorded_batch()
    got = policy.values(batch, micro_batches, layout=layout)
    expected = own_values(value_checkpoint, batch)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert (got[~batch.token_columns["token_mask"]] == 0).all()
    assert np.abs(expected - np.roll(expected, 1)).max() > 0.1  # one token off would be seen


@pytest.mark.parametrize("head", ["reward", "value"])
def test_a_new_head_depends_on_the_seed_alone(checkpoint: str, head: str) -> None:
    heads = []
    for global_seed, seed in [(0, 5), (1, 5), (1, 6)]:
        torch.manual_seed(global_seed)
        heads.append(weights_of(build(checkpoint, head, seed=seed))["score.weight"])
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert heads[0].std() == pytest.approx(1 / 8, rel=0.4)  # 1 / sqrt(D)


@pytest.mark.parametrize(
    ("head", "own"), [("reward", own_scores), ("value", own_values)], ids=["reward", "value"]
)
def test_what_is_saved_is_read_by_transformers_and_again(
    checkpoint: str, tmp_path: Path, head: str, own: Callable[..., np.ndarray]
) -> None:
    batch = recorded_batch()
    batch = RaggedBatch(batch.lengths, batch.token_columns, pairs_batch().sequence_columns)
    policy = build(checkpoint, head)
    loss: Any = bradley_terry_loss if head == "reward" else unclipped_value_loss
    policy.train_step(batch, ONE, loss)  # the saved head is no new one
    policy.save(tmp_path / "step_000001", {})
    model = tmp_path / "step_000001" / "model"
    got = policy.values(batch, ONE) if head == "value" else policy.scores(batch, ONE)
    np.testing.assert_allclose(got, own(model, batch), atol=1e-5)
    again = build(str(model), head, seed=7)  # a seed that a new head would show
    for name, tensor in again.named_weights():
        assert torch.equal(tensor, weights_of(policy)[name]), name
    resumed = build(checkpoint, head, seed=7)
    resumed.load(tmp_path / "step_000001")
    assert torch.equal(weights_of(resumed)["score.weight"], weights_of(policy)["score.weight"])


def test_a_reward_model_with_adapters_trains_its_head_too(checkpoint: str, tmp_path: Path) -> None:
    policy = build(checkpoint, "reward", lora={"r": 4})
    start = weights_of(policy)
    for _ in range(2):
        policy.train_step(pairs_batch(), PAIRS, bradley_terry_loss)
    moved = {
        name for name, tensor in policy.named_weights() if not torch.equal(tensor, start[name])
    }
    assert "score.weight" in moved
    assert "model.layers.0.self_attn.q_proj.weight" in moved
    assert "model.embed_tokens.weight" not in moved
    policy.save(tmp_path / "step_000002", {})
    saved = own_scores(tmp_path / "step_000002" / "model", pairs_batch())
    np.testing.assert_allclose(policy.scores(pairs_batch(), ONE), saved, atol=1e-5)
    resumed = build(checkpoint, "reward", lora={"r": 4}, seed=7)
    resumed.load(tmp_path / "step_000002")
    np.testing.assert_array_equal(
        resumed.scores(pairs_batch(), ONE), policy.scores(pairs_batch(), ONE)
    )


def assert_equal_steps(runs: list[tuple[dict[str, float], dict[str, Tensor]]], start: Any) -> None:
    """Loss, norm and metrics to 1e-5, weights to 1e-5 of the way moved and three roundings."""
    for metrics, weights in runs[1:]:
        assert metrics == pytest.approx(runs[0][0], rel=1e-5, abs=1e-7)
        for name, tensor in runs[0][1].items():
            moved = (tensor - start[name]).abs().max()
            rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
            assert (weights[name] - tensor).abs().max() <= 1e-5 * moved + rounding, name


def three_steps(policy: TorchPolicy, *args: Any, **kwargs: Any) -> Any:
    metrics = [policy.train_step(*args, **kwargs) for _ in range(3)]
    return metrics[-1], weights_of(policy)


def test_a_reward_model_learns_the_same_however_its_pairs_are_batched(checkpoint: str) -> None:
    batch = pairs_batch()
    ways = [(ONE, "packed"), (ONE, "padded"), (PAIRS, "packed"), (PAIRS, "padded")]
    runs = [
        three_steps(build(checkpoint, "reward"), batch, plan, bradley_terry_loss, layout=layout)
        for plan, layout in ways
    ]
    start = weights_of(build(checkpoint, "reward"))
    assert_equal_steps(runs, start)
    chosen = batch.sequence_columns["chosen"]
    swapped = RaggedBatch(
        batch.lengths, batch.token_columns, {**batch.sequence_columns, "chosen": ~chosen}
    )
    other = three_steps(build(checkpoint, "reward"), swapped, ONE, bradley_terry_loss)
    with pytest.raises(AssertionError):
        assert_equal_steps([runs[0], other], start)


def test_the_reward_loss_is_bradley_terrys_and_falls(checkpoint: str) -> None:
    batch, policy = pairs_batch(), build(checkpoint, "reward")
    s = policy.scores(batch, ONE).astype("f8")
    gaps = np.array([s[0] - s[1], s[3] - s[2], s[4] - s[5]])
    first = policy.train_step(batch, PAIRS, bradley_terry_loss)
    assert first["train/loss"] == pytest.approx(np.log1p(np.exp(-gaps)).mean(), rel=1e-5)
    assert first["rewards/accuracy"] == pytest.approx((gaps > 0).mean())
    assert first["train/num_pairs"] == 3
    assert policy.evaluate(batch, ONE, bradley_terry_loss)["validation/loss"] < first["train/loss"]


def unclipped_value_loss(values: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    return value_loss(values, columns, clip=None)


def test_a_value_head_learns_the_same_in_every_layout(value_checkpoint: str) -> None:
    batch = recorded_batch()
    runs = [
        three_steps(
            build(value_checkpoint, "value"), batch, plan, unclipped_value_loss, layout=layout
        )
        for plan, layout in [(ONE, "packed"), (SPLIT, "padded"), (SPLIT, "packed")]
    ]
    start = weights_of(build(value_checkpoint, "value"))
    assert_equal_steps(runs, start)

    policy, mask = build(value_checkpoint, "value"), batch.token_columns["token_mask"]
    errors = policy.values(batch, ONE) - batch.token_columns["returns"]
    first = policy.train_step(batch, ONE, unclipped_value_loss)
    assert first["train/loss"] == pytest.approx((errors[mask] ** 2).mean() / 2, rel=1e-5)
    assert runs[0][0]["train/loss"] < first["train/loss"]
    moved = batch.with_token_column("returns", np.roll(batch.token_columns["returns"], 1))
    other = three_steps(build(value_checkpoint, "value"), moved, ONE, unclipped_value_loss)
    with pytest.raises(AssertionError):
        assert_equal_steps([runs[0], other], start)


@pytest.mark.parametrize("head", ["language", "value", "reward"])
def test_what_another_head_says_is_refused(checkpoint: str, head: str) -> None:
    policy, batch = build(checkpoint, head), recorded_batch()
    calls: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: policy.logprobs(batch, ONE),
        "values": lambda: policy.values(batch, ONE),
        "scores": lambda: policy.scores(batch, ONE),
    }
    own = {"language": "logprobs", "value": "values", "reward": "scores"}[head]
    assert np.isfinite(calls.pop(own)()).all()
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"{name} must come from .* got one with a {head}"):
            call()


def test_an_unknown_head_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="head must be one of language, value, reward, got 'rew'"):
        build(checkpoint, "rew")


def capped() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, head_dim=32, sliding_window=8, final_logit_softcapping=5.0)
    )


SCALED = {
    "gemma3": capped,
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)),
}


@pytest.mark.parametrize("family", SCALED)
def test_logits_are_capped_and_scaled_as_the_family_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    SCALED[family]().save_pretrained(tmp_path)
    batch = recorded_batch()
    ids, mask = batch.token_columns["token_ids"], batch.token_columns["token_mask"]
    expected = own_logprobs(tmp_path, batch)[np.arange(batch.num_tokens), ids]
    got = build(str(tmp_path), "language").logprobs(batch, SPLIT)
    np.testing.assert_allclose(got[mask], expected[mask], atol=2e-5)

    # A head that does not know of it: another answer, and refused.
    from burnish_trainer import heads

    plain = heads.language_head

    def unscaled(model: Any) -> heads.LanguageHead:
        return heads.LanguageHead(plain(model).weight, None, 1.0, None)

    monkeypatch.setattr(heads, "language_head", unscaled)
    with pytest.raises(ValueError, match=f"a '{family}.*' model; this family is not supported"):
        build(str(tmp_path), "language")


def test_a_model_that_shifts_its_logits_is_refused(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaForCausalLM.forward

    def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits + torch.linspace(0, 1, output.logits.shape[-1])
        return output

    model = load_model(Path(checkpoint))
    check_language_head(model)
    monkeypatch.setattr(LlamaForCausalLM, "forward", shifted)
    with pytest.raises(ValueError, match="logits must be the head's product"):
        check_language_head(model)


def test_a_head_with_a_bias_is_read_with_it(checkpoint: str) -> None:
    model: Any = load_model(Path(checkpoint))
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, 97))
    check_language_head(model)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("qwen")
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_topk_logprobs_are_the_largest_of_the_full_distribution(
    qwen: str, temperature: float
) -> None:
    batch = recorded_batch()
    mask = batch.token_columns["token_mask"]
    ids, logprobs = build(qwen, "language").topk_logprobs(batch, SPLIT, 4, temperature=temperature)
    full = torch.tensor(own_logprobs(qwen, batch) / temperature).log_softmax(-1)
    expected = full.topk(4)
    assert ids.dtype == np.int64
    assert logprobs.dtype == np.float32
    np.testing.assert_array_equal(ids[mask], expected.indices.numpy()[mask])
    np.testing.assert_allclose(logprobs[mask], expected.values.numpy()[mask], atol=1e-5)
    assert (logprobs[~mask] == 0).all()
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        build(qwen, "language").topk_logprobs(batch, SPLIT, 0)


def seen_by_the_loss(
    policy: TorchPolicy, batch: RaggedBatch, names: list[str], **kwargs: Any
) -> dict[str, np.ndarray]:
    """Columns that a step handed to its loss, all of the batch in one micro-batch."""
    seen = {}

    def keep(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
        seen["logprobs"] = logprobs.detach().numpy()
        for name in names:
            assert columns[name].requires_grad
            seen[name] = columns[name].detach().numpy()
        total = masked_sum(-logprobs, columns["token_mask"])
        return LossOutput((Term(total, "tokens"),), {})

    policy.train_step(batch, ONE, keep, **kwargs)
    return seen


@pytest.mark.parametrize("with_teacher", [False, True])
def test_entropies_are_those_of_the_full_distribution(qwen: str, with_teacher: bool) -> None:
    batch = recorded_batch()
    mask = batch.token_columns["token_mask"]
    if with_teacher:
        chosen = np.random.default_rng(1).integers(0, 97, (batch.num_tokens, 3))
        batch = batch.with_token_column("teacher_topk_ids", chosen)
    seen = seen_by_the_loss(build(qwen, "language"), batch, ["entropies"], with_entropy=True)
    full = own_logprobs(qwen, batch)
    expected = -(np.exp(full) * full).sum(-1)
    np.testing.assert_allclose(seen["entropies"][mask], expected[mask], atol=1e-5)
    assert (seen["entropies"][~mask] == 0).all()
    own = full[np.arange(batch.num_tokens), batch.token_columns["token_ids"]]
    np.testing.assert_allclose(seen["logprobs"][mask], own[mask], atol=1e-5)


def test_a_teachers_tokens_are_scored_by_the_student(qwen: str) -> None:
    batch = recorded_batch()
    mask = batch.token_columns["token_mask"]
    chosen = np.random.default_rng(1).integers(0, 97, (batch.num_tokens, 3))
    seen = seen_by_the_loss(
        build(qwen, "language"),
        batch.with_token_column("teacher_topk_ids", chosen),
        ["student_topk_logprobs"],
        temperature=0.7,
    )
    full = torch.tensor(own_logprobs(qwen, batch) / 0.7).log_softmax(-1).numpy()
    expected = np.take_along_axis(full, chosen, axis=1)
    got = seen["student_topk_logprobs"]
    np.testing.assert_allclose(got[mask], expected[mask], atol=1e-5)
    assert (got[~mask] == 0).all()
    other = np.take_along_axis(full, np.roll(chosen, 1, axis=0), axis=1)
    assert np.abs(got[mask] - other[mask]).max() > 1  # a token off would be seen


@pytest.mark.parametrize("head", ["reward", "value"])
def test_empty_slots_change_nothing(checkpoint: str, head: str) -> None:
    batch = recorded_batch()
    batch = RaggedBatch(batch.lengths, batch.token_columns, pairs_batch().sequence_columns)
    loss: Any = bradley_terry_loss if head == "reward" else unclipped_value_loss
    runs = [
        three_steps(build(checkpoint, head), batch, plan, loss) for plan in (PAIRS, [*PAIRS, ()])
    ]
    assert runs[0][0] == runs[1][0]
    for name, tensor in runs[0][1].items():
        assert torch.equal(tensor, runs[1][1][name]), name


def test_a_value_head_starts_from_a_reward_heads_weight(
    reward_checkpoint: str, value_checkpoint: str
) -> None:
    own = AutoModelForSequenceClassification.from_pretrained(reward_checkpoint)
    got = dict(build(reward_checkpoint, "value").named_weights())
    assert torch.equal(got["score.weight"], own.score.weight)
    assert got["score.bias"].tolist() == [0]
    with pytest.raises(ValueError, match=r"a reward head has no bias, got score\.bias"):
        build(value_checkpoint, "reward")


def test_a_reward_head_counts_whole_sequences(checkpoint: str) -> None:
    def squares(scores: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
        return LossOutput((Term(scores.square().sum(), "sequences"),), {})

    batch = recorded_batch()
    unmasked = RaggedBatch(batch.lengths, {"token_ids": batch.token_columns["token_ids"]})
    off = {**batch.token_columns, "token_mask": np.zeros(batch.num_tokens, dtype=bool)}
    judge = build(checkpoint, "reward")
    expected = float(np.square(judge.scores(unmasked, ONE)).mean())
    for columns in (unmasked.token_columns, batch.token_columns, off):
        metrics = judge.evaluate(RaggedBatch(batch.lengths, columns), SPLIT, squares)
        assert metrics["validation/loss"] == pytest.approx(expected, rel=1e-5)
        assert metrics["validation/num_sequences"] == 6
