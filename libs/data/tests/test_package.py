import json
import re
from pathlib import Path

import burnish_data
from transformers import PreTrainedTokenizerFast

TESTS = Path(__file__).parent


def test_the_readmes_examples_run(tmp_path, monkeypatch, capsys):
    golden = TESTS / "golden"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(golden / "smollm2.tokenizer.json"),
        chat_template=(golden / "smollm2.jinja").read_text(),
    )
    chats = [
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": f"Hello {n}"},
            ]
        }
        for n in range(20)
    ]
    bad = {"conversations": [{"from": "nobody", "value": "Hi"}]}
    lines = [json.dumps(row) for row in [*chats, bad]]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    scope: dict = {"tokenizer": tokenizer}
    examples = re.findall(
        r"```python\n(.*?)```", (TESTS.parent / "README.md").read_text(), re.DOTALL
    )
    assert len(examples) == 2
    for example in examples:
        exec(example.replace("num_workers=2", "num_workers=1"), scope)
    assert len(scope["dataset"]) == 20
    assert "chats.jsonl, line 21" in capsys.readouterr().out
    assert (scope["state"]["epoch"], scope["state"]["position"]) == (1, 0)


def test_every_public_name_exists():
    assert all(hasattr(burnish_data, name) for name in burnish_data.__all__)
    assert burnish_data.__version__ == "0.3.0"
