"""The example "Into a training step" of data's page, word for word, on a tiny random Llama."""

import contextlib
import json
import re
from pathlib import Path

import pytest
import torch
from burnish_data import encode_chats, open_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAGE = Path(__file__).parents[2] / "docs/libraries/data.md"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "abcdefghijklmnopqrst"[: 1 + i % 13]},
            {"role": "assistant", "content": "zyxwvuts"[: 1 + i % 7]},
        ]
    }
    for i in range(40)
]


def example() -> str:
    section = PAGE.read_text().partition("## Into a training step\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


def block_with(text: str) -> str:
    (block,) = (
        b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if text in b
    )
    return block


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<|user|>", "<|assistant|>", "<|end|>", "<unk>"]
    letters = {letter: i for i, letter in enumerate([*specials, *"abcdefghijklmnopqrstuvwxyz"])}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, extra_special_tokens=specials[:3], unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=30,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=64,
            )
        )


def mean_nll(model: LlamaForCausalLM, encoded: list) -> torch.Tensor:
    """Each sequence alone, by the model's own logits: nats per trained token."""
    sums, num = [], 0
    for row in encoded:
        ids, mask = torch.tensor(row["token_ids"]).long(), torch.tensor(row["token_mask"])
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        sums.append(-logprobs.gather(1, ids[1:, None])[:, 0][mask[1:]].sum())
        num += int(mask.sum())
    return torch.stack(sums).sum() / num


def test_the_example_trains(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    model = tiny_llama()
    encoded = encode_chats(CHATS, tokenizer)
    before = mean_nll(model, encoded).item()
    # 40 rows are less than a global batch, so that an epoch is one step over all of them.
    expected = dict(zip(dict(model.named_parameters()), grads(model, encoded), strict=True))
    steps = Recorder(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    names = {"tokenizer": tokenizer, "model": model, "optimizer": steps}
    # A small budget makes several micro-batches of it.
    exec(example().replace("max_tokens=8192", "max_tokens=128"), names)
    assert len(names["step"]) > 1
    assert len(steps.gradients) == 3
    for name, gradient in steps.gradients[0].items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    assert names["skipped"].total == 0
    assert (names["state"]["epoch"], names["state"]["num_used"]) == (3, 0)
    assert mean_nll(model, encoded).item() < 0.95 * before


def test_the_example_resumes_between_steps(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    code = example().replace("max_tokens=8192", "max_tokens=128")
    code = code.replace("global_batch_size=64", "global_batch_size=16")
    resumed = code.replace("for epoch", "loader.load_state_dict(saved)\nfor epoch", 1)

    def run(code: str, **more) -> tuple[list, dict]:
        model = tiny_llama()
        steps = Recorder(model, torch.optim.SGD(model.parameters(), lr=0.0), more.pop("stop", None))
        names = {"tokenizer": tokenizer, "model": model, "optimizer": steps, **more}
        with contextlib.suppress(StopIteration):
            exec(code, names)
        return steps.gradients, names

    whole, _ = run(code)
    assert len(whole) == 9  # 16, 16 and 8 rows in each of three epochs
    first, names = run(code, stop=5)  # the fifth step is not saved
    rest, _ = run(resumed, saved=json.loads(json.dumps(names["state"])))
    assert len(first[:4]) + len(rest) == 9
    for one, other in zip([*first[:4], *rest], whole, strict=True):
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=0, rtol=0)


def grads(model: LlamaForCausalLM, encoded: list) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(mean_nll(model, encoded), list(model.parameters()))


class Recorder:
    """An optimiser that keeps the gradients of its steps, and stops at one of them."""

    def __init__(self, model, optimizer, stop: int | None = None) -> None:
        self.model, self.optimizer, self.stop = model, optimizer, stop
        self.gradients: list[dict[str, torch.Tensor]] = []

    def step(self) -> None:
        named = self.model.named_parameters()
        self.gradients.append({name: value.grad.clone() for name, value in named})
        if len(self.gradients) == self.stop:
            raise StopIteration
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def test_the_repair_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answers = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    record = {"messages": [{"role": "user", "content": "Count."}, *answers]}
    Path("chats.jsonl").write_text(json.dumps(record) + "\n")
    names: dict = {}
    exec("from burnish_data import open_rows, openai_chat\n" + block_with("def joined"), names)
    assert names["rows"][0]["messages"] == [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": "One.\nTwo."},
    ]


def test_the_streams_of_the_page(tmp_path, tokenizer):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    names = {"stream": open_rows(path, streaming=True), "tokenizer": tokenizer}
    imports = "from itertools import islice\nfrom burnish_data import *\n"
    # `batched` is Python 3.12's.
    own = "def batched(rows, size):\n    rows = iter(rows)\n    yield tuple(islice(rows, size))\n"
    code = block_with("batched").replace("from itertools import batched  # Python 3.12\n", own)
    exec(imports + code, names)
    assert len(names["encoded"]) == 40
    assert all(one["token_mask"].any() for one in names["encoded"])
    assert len(names["first"]) == 40
