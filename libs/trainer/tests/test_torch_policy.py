"""One answer, however it is batched: layouts, micro-batches, ranks, empty slots, resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from burnish_distributed import RaggedBatch, initialize_process_group, shard_batch
from burnish_losses.reduce import LossOutput, Metric, Term, masked_sum
from burnish_trainer import NonFiniteGradientError, TorchPolicy, latest_checkpoint
from burnish_trainer.checkpoint import delete_old_checkpoints
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
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
    "head_dim": 32,
    "initializer_range": 0.1,  # log-probs far from uniform, so that a wrong mask shows
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
}


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param]().save_pretrained(folder)
    return str(folder)


def weighted_nll(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    loss = -logprobs * columns["advantages"]
    total = masked_sum(loss, columns["token_mask"])
    largest = torch.where(columns["token_mask"], loss, -torch.inf).max().detach()
    metrics = {
        "nll": Metric(total.detach(), "tokens", "mean"),
        "largest": Metric(largest, None, "max"),
    }
    return LossOutput((Term(total, "tokens"),), metrics)


def drop_last_token(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
    mask = columns["token_mask"].clone()
    mask[-1] = False
    return weighted_nll(logprobs, {**columns, "token_mask": mask})


def recorded_batch() -> RaggedBatch:
    """Two prompts with three completions each, and one sequence on its own."""
    generator = np.random.default_rng(0)
    rows, ids, prefix = [], [], []
    for group, (num_prompt, completions) in enumerate([(7, (4, 9, 2)), (11, (3, 3, 8))]):
        prompt = generator.integers(0, 97, num_prompt)
        for length in completions:
            rows.append((prompt, generator.integers(0, 97, length)))
            ids.append(group)
            prefix.append(num_prompt)
    rows.append((generator.integers(0, 97, 5), generator.integers(0, 97, 6)))
    return RaggedBatch.from_rows(
        [
            {
                "token_ids": np.concatenate([prompt, completion]),
                "token_mask": np.arange(len(prompt) + len(completion)) >= len(prompt),
                "advantages": generator.normal(size=len(prompt) + len(completion)).astype("f4"),
            }
            for prompt, completion in rows
        ],
        {"prefix_ids": [*ids, -1], "prefix_lengths": [*prefix, 0]},
    )


def without_prefixes(batch: RaggedBatch) -> RaggedBatch:
    return RaggedBatch(batch.lengths, batch.token_columns)


ONE = [(0, 1, 2, 3, 4, 5, 6)]
SPLIT = [(0, 1, 2), (3, 4), (5,), (6,)]


def sgd_policy(checkpoint: str, **kwargs: Any) -> TorchPolicy:
    return TorchPolicy(
        checkpoint, learning_rate=0.1, optimizer="torch.optim.SGD", max_grad_norm=1e9, **kwargs
    )


def three_steps(
    policy: TorchPolicy, step: Callable[[TorchPolicy], dict[str, float]]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = [step(policy) for _ in range(3)]
    return metrics[0], {name: tensor.clone() for name, tensor in policy.named_weights()}


def assert_equal_run(
    got: tuple[dict[str, float], dict[str, Tensor]],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    start: Mapping[str, Tensor],
) -> None:
    """Loss, norm and metrics to 1e-5; weights after three SGD steps to 1e-5 of the way moved.

    Three roundings of the weight itself come on top: a norm's weight near 1 moves by thousandths.
    """
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    assert got[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        moved = (tensor - start[name]).abs().max()
        rounding = 3 * torch.finfo(torch.float32).eps * tensor.abs().max()
        assert (got[1][name] - tensor).abs().max() <= 1e-5 * moved + rounding, name


@pytest.fixture(scope="session")
def start(checkpoint: str) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in sgd_policy(checkpoint).named_weights()}


@pytest.fixture(scope="session")
def expected(checkpoint: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Every sequence in a micro-batch of its own, padded rows: nothing can leak."""
    batch = without_prefixes(recorded_batch())
    alone = [(i,) for i in range(7)]
    return three_steps(
        sgd_policy(checkpoint),
        lambda p: p.train_step(batch, alone, weighted_nll, layout="padded"),
    )


@pytest.mark.parametrize("micro_batches", [ONE, SPLIT, [*SPLIT, ()]], ids=["one", "four", "empty"])
@pytest.mark.parametrize("kind", ["padded", "packed", "shared-prefix"])
def test_every_layout_and_micro_batching_gives_the_same_step(
    checkpoint: str,
    start: dict[str, Tensor],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    kind: str,
    micro_batches: list[tuple[int, ...]],
) -> None:
    batch = recorded_batch() if kind == "shared-prefix" else without_prefixes(recorded_batch())
    layout = "padded" if kind == "padded" else "packed"
    got = three_steps(
        sgd_policy(checkpoint),
        lambda p: p.train_step(batch, micro_batches, weighted_nll, layout=layout),
    )
    assert_equal_run(got, expected, start)


def test_a_dropped_token_is_noticed(
    checkpoint: str,
    start: dict[str, Tensor],
    expected: tuple[dict[str, float], dict[str, Tensor]],
) -> None:
    got = three_steps(
        sgd_policy(checkpoint), lambda p: p.train_step(recorded_batch(), ONE, drop_last_token)
    )
    with pytest.raises(AssertionError):
        assert_equal_run(got, expected, start)


def test_loss_is_the_hand_computed_one(checkpoint: str) -> None:
    batch = recorded_batch()
    model = torch.nn.Module  # the plain transformers forward, sequence by sequence
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    total, num_tokens = 0.0, 0
    for ids, mask, advantages in zip(
        *(batch.sequences(n) for n in ("token_ids", "token_mask", "advantages")), strict=True
    ):
        with torch.no_grad():
            scores = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
        for t in np.flatnonzero(mask):
            total -= advantages[t] * float(scores[t - 1, ids[t]])
            num_tokens += 1
    metrics = sgd_policy(checkpoint).train_step(batch, ONE, weighted_nll)
    assert metrics["train/loss"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert metrics["nll"] == pytest.approx(metrics["train/loss"], rel=1e-6)
    assert metrics["train/num_tokens"] == num_tokens == 35
    assert metrics["train/num_sequences"] == 7


def _rank_main(rank: int, ranks: Any, checkpoint: str, folder: str, sabotage: bool) -> None:
    torch.set_num_threads(1)
    initialize_process_group(
        rank=rank, world_size=len(ranks), init_method=f"file://{folder}/rendezvous", timeout_s=60
    )
    shard, slots = shard_batch(recorded_batch(), ranks)[rank]
    policy = sgd_policy(checkpoint)
    loss_fn = drop_last_token if sabotage and rank == 1 else weighted_nll
    result = three_steps(policy, lambda p: p.train_step(shard, slots, loss_fn))
    scores = policy.logprobs(shard, slots)
    policy.save(Path(folder) / "step_000003", {"step": 3})
    if rank == 0:
        torch.save((*result, scores), Path(folder) / "result.pt")
    torch.distributed.destroy_process_group()


def spawn(function: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # The ranks import this module by the name pytest gave it: its path from the root.
        patch.syspath_prepend(Path(__file__).parents[3])
        mp.spawn(function, arguments, nprocs=num_ranks)


def run_ranks(
    checkpoint: str, folder: Path, ranks: Any, *, sabotage: bool = False
) -> tuple[dict[str, float], dict[str, Tensor], np.ndarray]:
    spawn(_rank_main, (ranks, checkpoint, str(folder), sabotage), len(ranks))
    return torch.load(folder / "result.pt", weights_only=False)


# Rank 1 has fewer sequences and an explicit empty slot.
TWO_RANKS = [[(0, 1, 2), (6,)], [(3, 4, 5), ()]]


def test_two_ranks_equal_one(
    checkpoint: str,
    start: dict[str, Tensor],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    metrics, weights, scores = run_ranks(checkpoint, tmp_path, TWO_RANKS)
    assert_equal_run((metrics, weights), expected, start)

    resumed = sgd_policy(checkpoint)
    assert resumed.load(tmp_path / "step_000003")["step"] == 3
    for name, tensor in resumed.named_weights():
        assert torch.equal(tensor, weights[name]), name
    own = recorded_batch().select([0, 1, 2, 6])
    np.testing.assert_allclose(resumed.logprobs(own, [(0, 1, 2, 3)]), scores, atol=1e-5)


def test_two_ranks_with_one_gradient_wrong_are_noticed(
    checkpoint: str,
    start: dict[str, Tensor],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    metrics, weights, _ = run_ranks(checkpoint, tmp_path, TWO_RANKS, sabotage=True)
    with pytest.raises(AssertionError):
        assert_equal_run((metrics, weights), expected, start)


def test_resumed_run_equals_uninterrupted_one_bit_for_bit(checkpoint: str, tmp_path: Path) -> None:
    build = partial(TorchPolicy, checkpoint, learning_rate=1e-2, schedule_args={"warmup_steps": 5})
    batch = recorded_batch()
    whole = build()
    losses = [whole.train_step(batch, ONE, weighted_nll) for _ in range(4)]

    first = build()
    for _ in range(2):
        first.train_step(batch, ONE, weighted_nll)
    first.save(tmp_path / "step_000002", {"step": 2})
    second = build()
    second.load(tmp_path / "step_000002")
    resumed = [second.train_step(batch, ONE, weighted_nll) for _ in range(2)]

    assert resumed == losses[2:]
    for (name, a), (_, b) in zip(whole.named_weights(), second.named_weights(), strict=True):
        assert torch.equal(a, b), name


def test_checkpoint_is_read_by_from_pretrained(checkpoint: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = sgd_policy(checkpoint)
    policy.train_step(recorded_batch(), ONE, weighted_nll)
    policy.save(tmp_path / "step_000001", {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000001" / "model")
    loaded = dict(model.named_parameters())
    for name, tensor in policy.named_weights():
        assert torch.equal(loaded[name], tensor), name


def test_latest_checkpoint_passes_over_incomplete_ones(checkpoint: str, tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    policy = sgd_policy(checkpoint)
    policy.save(tmp_path / "step_000002", {})
    (tmp_path / "step_000010.incomplete").mkdir()
    (tmp_path / "step_000011").mkdir()  # no state.json: something else wrote it
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000002"
    with pytest.raises(ValueError, match=r"must hold state\.json"):
        policy.load(tmp_path / "step_000011")


def test_failed_save_leaves_the_previous_checkpoint(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    policy.train_step(recorded_batch(), ONE, weighted_nll)
    policy.save(tmp_path / "step_000001", {"step": 1})

    def disk_full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.save", disk_full)
    with pytest.raises(OSError, match="No space left"):
        policy.save(tmp_path / "step_000002", {"step": 2})
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000001"


def test_non_finite_gradient_changes_nothing(checkpoint: str) -> None:
    policy = TorchPolicy(checkpoint, learning_rate=0.1)
    before = {name: tensor.clone() for name, tensor in policy.named_weights()}
    batch = recorded_batch()
    bad = batch.token_columns["advantages"].copy()
    bad[np.flatnonzero(batch.token_columns["token_mask"])[3]] = math.nan
    with pytest.raises(NonFiniteGradientError, match="step 0 from micro-batch 0 of rank 0"):
        policy.train_step(batch.with_token_column("advantages", bad), SPLIT, weighted_nll)
    for name, tensor in policy.named_weights():
        assert torch.equal(tensor, before[name]), name
    assert math.isfinite(policy.train_step(batch, ONE, weighted_nll)["train/loss"])


def test_nan_at_a_masked_token_is_harmless(checkpoint: str) -> None:
    batch = recorded_batch()
    bad = np.where(batch.token_columns["token_mask"], batch.token_columns["advantages"], np.nan)
    clean = sgd_policy(checkpoint).train_step(batch, ONE, weighted_nll)
    got = sgd_policy(checkpoint).train_step(
        batch.with_token_column("advantages", bad), ONE, weighted_nll
    )
    assert got == clean


def test_batch_with_nothing_to_train_is_refused(checkpoint: str) -> None:
    batch = recorded_batch()
    nothing = batch.with_token_column("token_mask", np.zeros(batch.num_tokens, dtype=bool))
    with pytest.raises(ValueError, match="at least one trained token"):
        sgd_policy(checkpoint).train_step(nothing, ONE, weighted_nll)


def test_reference_stays_while_the_policy_moves(checkpoint: str) -> None:
    policy = sgd_policy(checkpoint, reference=True)
    batch = recorded_batch()
    before = policy.logprobs(batch, ONE)
    np.testing.assert_array_equal(policy.reference_logprobs(batch, ONE), before)
    policy.train_step(batch, ONE, weighted_nll)
    np.testing.assert_array_equal(policy.reference_logprobs(batch, ONE), before)
    assert np.abs(policy.logprobs(batch, ONE) - before).max() > 1e-3


def test_temperature_is_that_of_the_distribution_sampled_from(checkpoint: str) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    batch = recorded_batch().select([6])
    ids = torch.tensor(batch.token_columns["token_ids"])
    with torch.no_grad():
        scores = (model(ids[None]).logits[0] / 0.7).log_softmax(-1)
    expected = scores[:-1].gather(-1, ids[1:, None])[:, 0].numpy()
    got = sgd_policy(checkpoint).logprobs(batch, [(0,)], temperature=0.7)
    np.testing.assert_allclose(got[5:], expected[4:], atol=1e-5)
    assert (got[:5] == 0).all()


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_carry_a_state_or_attend_in_chunks_are_refused(
    tmp_path: Path, kind: str
) -> None:
    FAMILIES["qwen2"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"] = ["full_attention", kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"full or sliding attention, got .*{kind}"):
        sgd_policy(str(tmp_path))


def test_attention_that_is_no_plain_softmax_is_refused(tmp_path: Path) -> None:
    Gemma2ForCausalLM(Gemma2Config(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a plain softmax, got softcap"):
        sgd_policy(str(tmp_path))


def test_capped_logits_are_those_of_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = {**SHAPE, "attn_logit_softcapping": None, "sliding_window": 8}
    for cap, name in ((1.0, "capped"), (None, "plain")):
        torch.manual_seed(0)
        config = Gemma2Config(**shape, final_logit_softcapping=cap)
        Gemma2ForCausalLM(config).save_pretrained(tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "capped")
    batch = recorded_batch().select([5])
    ids = torch.tensor(batch.token_columns["token_ids"])
    with torch.no_grad():
        expected = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    got, plain = (
        sgd_policy(str(tmp_path / name)).logprobs(batch, [(0,)]) for name in ("capped", "plain")
    )
    np.testing.assert_allclose(got[11:], expected[10:].numpy(), atol=1e-5)
    assert np.abs(plain - got).max() > 0.1


def test_a_misspelt_optimizer_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match=r"torch\.optim\.Adan"):
        TorchPolicy(checkpoint, learning_rate=0.1, optimizer="torch.optim.Adan")


def _rounding_main(rank: int, checkpoint: str, folder: str) -> None:
    """Twenty small AdamW steps in both dtypes; what share of the weights has moved."""
    torch.set_num_threads(1)
    initialize_process_group(rank=rank, world_size=1, init_method=f"file://{folder}/rendezvous")
    moved = {}
    for dtype in ("float32", "bfloat16"):
        policy = TorchPolicy(checkpoint, learning_rate=1e-6, dtype=dtype, device="cpu")
        before = {name: tensor.clone() for name, tensor in policy.named_weights()}
        for _ in range(20):
            policy.train_step(recorded_batch(), SPLIT, weighted_nll)
        change = {name: tensor - before[name] for name, tensor in policy.named_weights()}
        moved[dtype] = torch.cat([tensor.flatten() for tensor in change.values()])
    torch.save(moved, Path(folder) / "moved.pt")
    torch.distributed.destroy_process_group()


def test_small_steps_are_not_lost_in_bfloat16(checkpoint: str, tmp_path: Path) -> None:
    spawn(_rounding_main, (checkpoint, str(tmp_path)), 1)
    moved = torch.load(tmp_path / "moved.pt", weights_only=True)
    trained = moved["float32"] != 0
    assert (moved["bfloat16"][trained] != 0).float().mean() > 0.9
    ratio = moved["bfloat16"].norm() / moved["float32"].norm()
    assert 0.8 < ratio < 1.25


def test_bfloat16_without_a_process_group_is_refused(checkpoint: str) -> None:
    with pytest.raises(ValueError, match="bfloat16 needs a process group"):
        TorchPolicy(checkpoint, learning_rate=1e-6, dtype="bfloat16")


@pytest.mark.parametrize(
    ("micro_batches", "layout", "message"),
    [
        ([(0, 1, 2, 3, 4, 5)], "packed", "each of the 7 sequences exactly once"),
        ([*ONE, (0,)], "packed", "exactly once"),
        ([], "packed", "exactly once"),
        (ONE, "packd", "layout must be one of packed, padded, fixed"),
    ],
)
def test_a_plan_of_another_batch_is_refused(
    checkpoint: str, micro_batches: list[tuple[int, ...]], layout: str, message: str
) -> None:
    policy, batch = sgd_policy(checkpoint), recorded_batch()
    with pytest.raises(ValueError, match=message):
        policy.train_step(batch, micro_batches, weighted_nll, layout=layout)
    with pytest.raises(ValueError, match=message):
        policy.logprobs(batch, micro_batches, layout=layout)


def test_a_step_that_raised_leaves_no_gradient_behind(checkpoint: str) -> None:
    batch = recorded_batch()
    clean = sgd_policy(checkpoint).train_step(batch, SPLIT, weighted_nll)
    calls = []

    def fails_later(logprobs: Tensor, columns: Mapping[str, Tensor]) -> LossOutput:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the loss failed")
        return weighted_nll(logprobs, columns)

    policy = sgd_policy(checkpoint)
    with pytest.raises(RuntimeError, match="the loss failed"):
        policy.train_step(batch, SPLIT, fails_later)
    assert policy.train_step(batch, SPLIT, weighted_nll) == clean


def test_weights_that_are_not_the_configs_are_refused(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(ValueError, match=r"missing_keys: \['model.layers.2"):
        sgd_policy(str(tmp_path))


def test_stray_folders_and_leftovers_do_not_stop_deletion(checkpoint: str, tmp_path: Path) -> None:
    policy = sgd_policy(checkpoint)
    for step in (1, 2):
        policy.save(tmp_path / f"step_{step:06d}", {"step": step, "schema_version": 7})
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_best" / "state.json").write_text("{}")
    (tmp_path / "step_000001.incomplete").mkdir()
    (tmp_path / "step_000001.incomplete" / "left").write_text("over")
    delete_old_checkpoints(tmp_path, keep=1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000002"
    assert not (tmp_path / "step_000001").exists()
    assert policy.load(tmp_path / "step_000002")["step"] == 2


def test_the_old_checkpoint_stays_until_the_new_one_is_in_place(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = sgd_policy(checkpoint)
    policy.save(tmp_path / "step_000001", {"try": 1})
    rename = Path.rename

    def fails_to_appear(path: Path, target: Path) -> Path:
        if path.name == "step_000001.incomplete":
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails_to_appear)
    with pytest.raises(OSError, match="the disk is gone"):
        policy.save(tmp_path / "step_000001", {"try": 2})
    states = [json.loads(path.read_text())["try"] for path in tmp_path.glob("*/state.json")]
    assert sorted(states) == [1, 2]


def test_an_overwritten_checkpoint_is_the_new_one(checkpoint: str, tmp_path: Path) -> None:
    policy = sgd_policy(checkpoint)
    policy.save(tmp_path / "step_000001", {"try": 1})
    policy.save(tmp_path / "step_000001", {"try": 2})
    assert policy.load(tmp_path / "step_000001")["try"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
