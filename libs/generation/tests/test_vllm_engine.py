"""A real vLLM engine against the same weights in transformers, before and after an update."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from burnish_generation import Completion, Sampling

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "needs vLLM, which no extra can bring on a CPU (see the README)", allow_module_level=True
    )

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

MAX_MODEL_LEN = 96
EOS = 0
TEXT = "the quick brown fox jumps over the lazy dog and then the dog sleeps over there"
PROMPTS = [[5, 9, 200], [17], [33, 33, 33, 33, 80, 81, 82], list(range(40, 60))]
LONG_PROMPT = [3 + (7 * i) % 250 for i in range(70)]  # two whole cache blocks of 32, and a bit


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def write_model(folder: Path, *, tied: bool, seed: int) -> None:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.1,  # far from uniform, so that wrong log-probs show
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@dataclass
class Setup:
    """An engine in another process, and the checkpoints that it is given one after the other."""

    pool: ProcessPoolExecutor
    folders: list[Path]
    current: int = 0  # which of them the engine holds

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, seeds: list[int]
    ) -> list[Completion]:
        import engine_process

        return self.pool.submit(engine_process.call, "generate", prompts, sampling, seeds).result()

    def update(self, index: int | None, weight_version: int, **kwargs: Any) -> int:
        import engine_process

        file = "" if index is None else str(self.folders[index] / "model.safetensors")
        arguments = {"how": "callable", "extra": {}} | kwargs
        count = self.pool.submit(engine_process.update, file, weight_version, **arguments).result()
        self.current = self.current if index is None else index
        return count

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [T, V] of the weights that the engine should hold now."""
        model = AutoModelForCausalLM.from_pretrained(self.folders[self.current])
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="module", params=["tied", "untied"])
def setup(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    folders = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in (1, 2)]
    for seed, folder in enumerate(folders, start=1):
        write_model(folder, tied=request.param == "tied", seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        patch.setenv("OMP_NUM_THREADS", "1")  # read when the process starts
        import engine_process

        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            arguments = {
                "max_model_len": MAX_MODEL_LEN,
                "kv_cache_bytes": 1 << 25,
                "max_num_seqs": 64,
            }
            pool.submit(engine_process.build, str(folders[0]), arguments).result(timeout=300)
            yield Setup(pool, folders)


def assert_logprobs(
    setup: Setup,
    prompts: list[list[int]],
    completions: list[Completion],
    distribution: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """``distribution``: logits [K, V] -> log-probs [K, V] of what was sampled from."""
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion.token_ids]
        scores = distribution(setup.logits(ids)[len(prompt) - 1 : -1])
        expected = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        difference = (torch.tensor(completion.logprobs) - expected).abs().max()
        assert difference < 2e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    setup: Setup, temperature: float
) -> None:
    sampling = Sampling(max_new_tokens=12, temperature=temperature)
    completions = setup.generate(PROMPTS, sampling, [1, 2, 3, 4])
    assert_logprobs(
        setup, PROMPTS, completions, lambda logits: (logits / temperature).log_softmax(-1)
    )


def test_logprobs_of_a_cut_distribution_are_renormalised(setup: Setup) -> None:
    def top_5(logits: torch.Tensor) -> torch.Tensor:
        fifth = logits.topk(5).values[:, -1:]
        return torch.where(logits >= fifth, logits, -torch.inf).log_softmax(-1)

    completions = setup.generate(PROMPTS, Sampling(max_new_tokens=12, top_k=5), [1, 2, 3, 4])
    assert_logprobs(setup, PROMPTS, completions, top_5)


def test_greedy_takes_the_most_likely_token_and_reports_the_plain_softmax(setup: Setup) -> None:
    completions = setup.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0), [0] * 4)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits = setup.logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
        assert completion.token_ids == tuple(logits.argmax(-1).tolist())
    assert_logprobs(setup, PROMPTS, completions, lambda logits: logits.log_softmax(-1))


def test_a_seed_decides_its_sample_whatever_else_is_in_the_batch(setup: Setup) -> None:
    sampling = Sampling(max_new_tokens=12)
    (alone,) = setup.generate([PROMPTS[0]], sampling, [7])
    others = setup.generate(
        [PROMPTS[3], PROMPTS[0], PROMPTS[1], PROMPTS[0]], sampling, [1, 8, 2, 7]
    )
    assert others[3].token_ids == alone.token_ids
    assert others[3].logprobs == pytest.approx(alone.logprobs, abs=2e-5)
    assert others[1].token_ids != alone.token_ids


def test_same_seeds_give_the_same_samples_and_other_seeds_others(setup: Setup) -> None:
    sampling = Sampling(max_new_tokens=12)
    first = setup.generate([PROMPTS[0]] * 8, sampling, list(range(8)))
    again = setup.generate([PROMPTS[0]] * 8, sampling, list(range(8)))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 8


@pytest.mark.parametrize("num_stop_tokens", [1, 2])
def test_a_stop_text_ends_a_completion_and_stays_in_it(setup: Setup, num_stop_tokens: int) -> None:
    tokenizer = build_tokenizer()
    sampling = Sampling(max_new_tokens=24, temperature=2.0)  # flat enough for much plain text
    (free,) = setup.generate([PROMPTS[0]], sampling, [3])
    ids = free.token_ids
    texts = [tokenizer.decode(ids[i : i + num_stop_tokens]) for i in range(len(ids))]
    stop = next(text for text in texts[4:] if text.isascii() and text.strip())
    length = next(n for n in range(1, 25) if stop in tokenizer.decode(ids[:n]))
    sampling = Sampling(max_new_tokens=24, temperature=2.0, stop=("never@@@", stop))
    (stopped,) = setup.generate([PROMPTS[0]], sampling, [3])
    assert stopped.token_ids == ids[:length]
    assert stopped.logprobs == pytest.approx(free.logprobs[:length], abs=2e-5)
    assert stopped.finish_reason == "stop"


def test_a_completion_ends_at_its_budget(setup: Setup) -> None:
    for count in (1, 5):
        completions = setup.generate(PROMPTS, Sampling(max_new_tokens=count), [11, 12, 13, 14])
        assert [len(c.token_ids) for c in completions] == [count] * 4
        assert {c.finish_reason for c in completions} == {"length"}


def test_a_completion_ends_at_the_models_limit(setup: Setup) -> None:
    sampling = Sampling(max_new_tokens=50)
    prompts = [[(7 * i) % 250 + 3 for i in range(MAX_MODEL_LEN - n)] for n in (1, 3)]
    completions = setup.generate([*prompts, PROMPTS[0]], sampling, [0, 0, 0])
    assert [len(c.token_ids) for c in completions[:2]] == [1, 3]
    assert [c.finish_reason for c in completions[:2]] == ["length", "length"]
    assert len(completions[2].token_ids) > 3  # the short one still has its budget


def test_an_end_of_sequence_exactly_at_the_limit_is_a_stop(setup: Setup) -> None:
    free = Sampling(max_new_tokens=32, temperature=2.0)
    seeds = list(range(256))
    completions = setup.generate([PROMPTS[0]] * 256, free, seeds)
    seed, ended = next(
        (s, c) for s, c in zip(seeds, completions, strict=True) if 2 < len(c.token_ids) < 32
    )
    assert (ended.token_ids[-1], ended.finish_reason) == (EOS, "stop")
    num_tokens = len(ended.token_ids)
    limits = [Sampling(max_new_tokens=num_tokens - n, temperature=2.0) for n in (0, 1)]
    (at_limit,), (before,) = (setup.generate([PROMPTS[0]], s, [seed]) for s in limits)
    assert (at_limit.token_ids, at_limit.finish_reason) == (ended.token_ids, "stop")
    assert (before.token_ids, before.finish_reason) == (ended.token_ids[:-1], "length")


@pytest.mark.parametrize(
    ("prompts", "seeds", "message"),
    [
        ([[5], []], [0, 0], r"1 to 95 tokens .* got 0 in prompt 1"),
        ([[5] * MAX_MODEL_LEN], [0], r"1 to 95 tokens .* got 96 in prompt 0"),
        ([[5], [6]], [0], "got 2 prompts, 1 seeds"),
    ],
    ids=["empty", "too long", "seeds"],
)
def test_requests_that_cannot_work_are_refused(
    setup: Setup, prompts: list[list[int]], seeds: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        setup.generate(prompts, Sampling(max_new_tokens=4), seeds)


def test_no_prompts_give_no_completions(setup: Setup) -> None:
    assert setup.generate([], Sampling(max_new_tokens=4), []) == []


def test_an_update_replaces_weights_cache_and_version(setup: Setup) -> None:
    """There and back, by a callable and by dotted path: what comes out is the new model's."""
    greedy = Sampling(max_new_tokens=8, temperature=0)
    prompts = [LONG_PROMPT, PROMPTS[0]]
    before = setup.generate(prompts, greedy, [0, 0])
    assert {c.weight_version for c in before} == {0}
    for index, weight_version, how in [(1, 5, "callable"), (0, 6, "dotted path")]:
        file = setup.folders[index] / "model.safetensors"
        from safetensors import safe_open

        with safe_open(file, framework="pt") as tensors:
            num_tensors = len(tensors.keys())
        assert setup.update(index, weight_version, how=how) == num_tensors
        after = setup.generate(prompts, greedy, [0, 0])
        assert {c.weight_version for c in after} == {weight_version}
        for prompt, completion in zip(prompts, after, strict=True):
            logits = setup.logits([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
            assert completion.token_ids == tuple(logits.argmax(-1).tolist())
        assert_logprobs(setup, prompts, after, lambda logits: logits.log_softmax(-1))
        if index == 1:
            assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_an_update_without_weights_is_an_error(setup: Setup) -> None:
    with pytest.raises(ValueError, match="must change the model, got 0 tensors"):
        setup.update(None, 9)
    (completion,) = setup.generate([[5]], Sampling(max_new_tokens=1), [0])
    assert completion.weight_version != 9


def test_an_unknown_weight_name_is_an_error(setup: Setup) -> None:
    unknown = {"model.layers.0.mlp.side_proj.weight": torch.zeros(2)}
    with pytest.raises((ValueError, KeyError), match="side_proj"):
        setup.update(setup.current, 9, extra=unknown)
    (completion,) = setup.generate([[5]], Sampling(max_new_tokens=1), [0])
    assert completion.weight_version != 9


@pytest.mark.parametrize("name", ["lm_head.side", "elsewhere.weight"])
def test_an_unknown_name_beside_the_layers_is_an_error(setup: Setup, name: str) -> None:
    with pytest.raises((ValueError, KeyError), match=name.split(".")[-1]):
        setup.update(setup.current, 9, extra={name: torch.zeros(2)})


def test_a_source_is_a_callable_or_a_dotted_path(setup: Setup) -> None:
    import engine_process

    resolved = setup.pool.submit(engine_process.resolved, "collections.abc:Mapping.get")
    with pytest.raises(AttributeError):
        resolved.result()
    resolved = setup.pool.submit(engine_process.resolved, "collections:OrderedDict")
    assert resolved.result() == "OrderedDict"
