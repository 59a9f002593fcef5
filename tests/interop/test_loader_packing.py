"""data's loader under packing's plan: every micro-batch as planned, on every rank, also resumed."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch
from burnish_data.encode import encode_chats
from burnish_data.encode_rows import encode_rows
from burnish_data.loader import Loader
from burnish_data.rows import ListRows
from burnish_packing.torch.collate import PackedBatch
from burnish_packing.torch.loader import PlannedDataset, TokenBudgetBatchSampler
from burnish_packing.torch.rows import PackingCollator
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """40 chats of 5 to 24 tokens (a letter each, 2 turns of 2 special tokens)."""
    specials = ["<|user|>", "<|assistant|>", "<|end|>", "<unk>"]
    letters = {letter: i for i, letter in enumerate([*specials, *"abcdefghijklmnopqrstuvwxyz"])}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, extra_special_tokens=specials[:3], unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    rows = ListRows(
        [
            {
                "messages": [
                    {"role": "user", "content": "abcdefghijklmnopqrst"[: 1 + i % 13]},
                    {"role": "assistant", "content": "zyxwvuts"[: 1 + i % 7]},
                ]
            }
            for i in range(40)
        ]
    )
    encode = functools.partial(encode_chats, tokenizer=tokenizer)
    output = tmp_path_factory.mktemp("data") / "tokens"
    dataset, skipped = encode_rows(rows, encode, output=output, batch_rows=16, show_progress=False)
    assert skipped.total == 0
    assert dataset["length"][:] == [6 + i % 13 + i % 7 for i in range(40)]
    # The answer and what ends it.
    assert [sum(mask) for mask in dataset["token_mask"]] == [2 + i % 7 for i in range(40)]
    return dataset


def make_loader(dataset: Dataset, rank: int, num_workers: int = 0, seed: int = 0) -> Loader:
    sampler = TokenBudgetBatchSampler(
        dataset["length"][:],
        max_tokens=64,
        num_ranks=2,
        rank=rank,
        global_batch_size=16,
        seed=seed,
    )
    return Loader(
        PlannedDataset(dataset),
        batch_sampler=sampler,
        collate=PackingCollator(),
        num_workers=num_workers,
    )


def contents(batch: PackedBatch) -> tuple:
    return (
        batch.micro_batch.indices,
        batch.micro_batch.global_batch,
        batch.token_ids.tolist(),
        batch.labels.tolist(),
        batch.position_ids.tolist(),
    )


def test_every_rank_gets_its_plan_and_together_all_rows(dataset: Dataset):
    ranks = [[contents(batch) for batch in make_loader(dataset, rank)] for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == len(make_loader(dataset, 0))
    assert [batch[1] for batch in ranks[0]] == [batch[1] for batch in ranks[1]]
    indices = [index for batches in ranks for batch in batches for index in batch[0]]
    assert sorted(indices) == list(range(40))
    for batches in ranks:
        for indices, _, token_ids, _, _ in batches:
            expected = [token for index in indices for token in dataset[index]["token_ids"]]
            flat = torch.tensor(token_ids).flatten().tolist()
            assert flat[: len(expected)] == expected
            assert len(flat) <= 64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loop_gets_the_same_batches(dataset: Dataset, num_workers: int, tmp_path: Path):
    loader = make_loader(dataset, rank=1)
    whole = [contents(batch) for _ in range(2) for batch in loader]
    num_used = len(loader) + 2  # in the second epoch
    assert 0 < num_used < len(whole)
    assert whole[: len(loader)] != whole[len(loader) :]

    loader = make_loader(dataset, rank=1, num_workers=num_workers)
    batches = (contents(batch) for _ in range(2) for batch in loader)
    used = list(itertools.islice(batches, num_used))
    batches.close()
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))

    resumed = make_loader(dataset, rank=1, num_workers=num_workers)
    resumed.load_state_dict(json.loads((tmp_path / "state.json").read_text()))
    assert resumed.epoch == 1
    rest = [contents(batch) for batch in resumed]
    resumed.close()
    assert used + rest == whole


def test_the_state_is_the_same_on_all_ranks_and_refused_with_another_plan(dataset: Dataset):
    loaders = [make_loader(dataset, rank) for rank in range(2)]
    for loader in loaders:
        list(itertools.islice(loader, 2))
    # But for the checksum of this rank's own batches.
    first, second = ({**loader.state_dict(), "checksum": None} for loader in loaders)
    assert first == second
    other = make_loader(dataset, 0, seed=1)
    with pytest.raises(ValueError, match="the seed of its state, got 0 in the state and 1 here"):
        other.load_state_dict(loaders[0].state_dict())
    smaller = make_loader(dataset.select(range(39)), 0)
    with pytest.raises(ValueError, match=r"num_rows it was saved with, which was 40, .* has 39"):
        smaller.load_state_dict(loaders[0].state_dict())
