"""What is checked with model and data at hand, before any process starts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_task
from burnish_apps.grpo import preflight as preflight_module
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.main import RECIPES
from burnish_apps.grpo.preflight import kv_bytes, preflight
from burnish_apps.shell.config import ConfigError, load_config
from burnish_apps.shell.model import load_tokenizer, num_parameters
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig

# 2 layers of q, k, v, o (64 x 64 each), 3 MLP matrices (64 x 128), 2 norms; 300 x 64 embeddings,
# tied; the last norm.
NUM_PARAMETERS = 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 300 * 64 + 64
# 1 block of 128 tokens x (key and value) x 2 layers x 2 heads x 32 x 4 bytes
SEQUENCE_BYTES = 128 * 2 * 2 * 2 * 32 * 4

Config = Callable[..., GrpoConfig]


@pytest.fixture
def config(tiny_recipe: Path) -> Config:
    return lambda *overrides: load_config(GrpoConfig, RECIPES, str(tiny_recipe), overrides)


@pytest.fixture
def problems(tiny_model: Path) -> Callable[..., list[str]]:
    """What preflight says to a config, [] if nothing."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def check(config: GrpoConfig, rows: list[dict[str, Any]] | None = None) -> list[str]:
        rows = tiny_task.rows(3, seed=0) if rows is None else rows
        try:
            preflight(config, tiny_model, tokenizer, rows)
        except ConfigError as error:
            return error.problems
        return []

    return check


Problems = Callable[..., list[str]]


def test_kv_bytes_by_hand() -> None:
    model = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    # SmolLM2-135M: head_dim 576 / 9 = 64; 2 x 30 x 3 x 64 = 11520 numbers a token
    assert kv_bytes(model, 1, 4) == 128 * 11520 * 4
    assert kv_bytes(model, 128, 4) == 128 * 11520 * 4
    assert kv_bytes(model, 129, 2) == 256 * 11520 * 2
    model = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    assert kv_bytes(model, 100, 4) == 128 * 2 * 2 * 2 * 16 * 4


def test_num_parameters_by_hand(tiny_model: Path) -> None:
    assert num_parameters(tiny_model) == NUM_PARAMETERS


def test_a_good_config_passes(config: Config, problems: Problems) -> None:
    assert problems(config()) == []


def test_a_prompt_that_leaves_no_room_names_its_row(config: Config, problems: Problems) -> None:
    rows = [
        {"id": "short", "prompt": "x"},
        {"id": "long", "prompt": "#" * 121},
        {"id": "longest", "prompt": "#" * 122},
    ]
    (problem,) = problems(config(), rows)
    assert "at most 120 tokens" in problem
    assert "2 of 3 have more, 122 in row longest" in problem
    assert problems(config(), [{"prompt": "#" * 120}]) == []
    (problem,) = problems(config(), [{"prompt": "x"}, {"prompt": "#" * 121}])
    assert "121 in row 1" in problem


def test_a_context_that_the_model_was_not_made_for(config: Config, problems: Problems) -> None:
    longest = config("engine.max_model_len=256")
    assert problems(longest) == []
    (problem,) = problems(config("engine.max_model_len=257"))
    assert "at most the model's 256, got 257" in problem


def test_a_cache_that_holds_no_sequence(config: Config, problems: Problems) -> None:
    assert problems(config(f"engine.kv_cache_bytes={SEQUENCE_BYTES}")) == []
    (problem,) = problems(config(f"engine.kv_cache_bytes={SEQUENCE_BYTES - 1}"))
    assert f"{SEQUENCE_BYTES} bytes, got {SEQUENCE_BYTES - 1}" in problem
    (problem,) = problems(config("engine.kv_cache_bytes=null"))
    assert "must be given for an engine on a CPU" in problem
    assert str(SEQUENCE_BYTES) in problem


@pytest.mark.parametrize(
    ("overrides", "engines", "copies"),
    [
        ((), 1, 4),  # weights, gradient, two moments
        (("training.kl_coefficient=0.1",), 1, 5),  # and the reference
        (("engine.num_engines=3",), 3, 4),
    ],
)
def test_too_little_memory(
    config: Config,
    problems: Problems,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    engines: int,
    copies: int,
) -> None:
    needed = engines * (NUM_PARAMETERS * 4 + 16_000_000) + copies * NUM_PARAMETERS * 4
    monkeypatch.setattr(preflight_module, "available_bytes", lambda: needed)
    assert problems(config(*overrides)) == []
    monkeypatch.setattr(preflight_module, "available_bytes", lambda: needed - 1)
    (problem,) = problems(config(*overrides))
    assert "must fit this machine's free memory" in problem


def test_memory_of_other_machines_is_not_judged(
    config: Config, problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight_module, "available_bytes", lambda: 0)
    assert problems(config("ray_address=127.0.0.1:6379")) == []


def test_gpus_that_are_not_there(
    config: Config, problems: Problems, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert problems(config("training.gpus_per_rank=0.5", "engine.gpus_per_engine=0.5")) == []
    too_many = ("training.gpus_per_rank=1", "engine.gpus_per_engine=0.5")
    (problem,) = problems(config(*too_many))
    assert "this machine's 1 GPUs, got 1.5 for 1 engines and 1 ranks" in problem
    assert problems(config(*too_many, "ray_address=127.0.0.1:6379")) == []


def test_models_without_grouped_heads() -> None:
    model = PreTrainedConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    assert kv_bytes(model, 100, 4) == 128 * 2 * 2 * 2 * 32 * 4


def test_messages_need_a_chat_template(config: Config, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = None
    preflight(config(), tiny_model, tokenizer, [{"prompt": "x"}])
    with pytest.raises(ConfigError, match=r"model\.source: its tokenizer must have a chat templ"):
        preflight(config(), tiny_model, tokenizer, tiny_task.rows(2, seed=0))


def test_a_template_that_fails_names_the_row(config: Config, tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ConfigError, match=r"data\.source: the prompt of row tiny-0-1 fails.*never"):
        preflight(config(), tiny_model, tokenizer, tiny_task.rows(2, seed=0))


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_model, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[]", "its config cannot be used"),
        ("config.json", b"{", "its config cannot be used"),
        ("config.json", b'{"model_type": "no_such_type"}', "its config cannot be used"),
        ("model.safetensors", b"short", "its weights cannot be read"),
        ("model.safetensors", None, "its weights cannot be read"),
        ("tokenizer.json", b"[]", "its tokenizer cannot be read"),
    ],
)
def test_a_broken_model(
    config: Config, broken_model: Path, name: str, content: bytes | None, message: str
) -> None:
    (broken_model / name).unlink()
    if content is not None:
        (broken_model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"model.source: {message}"):
        preflight(config(), broken_model, load_tokenizer(broken_model), [{"prompt": "x"}])


def test_truncated_weights(config: Config, broken_model: Path) -> None:
    path = broken_model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.source: its weights .*whole safetensors file"):
        preflight(config(), broken_model, load_tokenizer(broken_model), [{"prompt": "x"}])


def test_a_model_that_would_not_be_computed_exactly(config: Config, broken_model: Path) -> None:
    path = broken_model / "config.json"
    content = json.loads(path.read_text())
    layers = ["linear_attention"] * content["num_hidden_layers"]
    path.write_text(json.dumps(content | {"layer_types": layers}))
    with pytest.raises(ConfigError, match=r"model\.source: its config .*'linear_attention'"):
        preflight(config(), broken_model, load_tokenizer(broken_model), [{"prompt": "x"}])


def test_lengths_and_memory_are_told_at_once(config: Config, problems: Problems) -> None:
    found = problems(config("engine.kv_cache_bytes=1"), [{"prompt": "#" * 200}])
    assert len(found) == 2
