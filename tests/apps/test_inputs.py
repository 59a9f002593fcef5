"""Code and files of others: whatever they raise names the recipe's key, and nothing is started."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from burnish_apps.grpo import main, stages
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.inputs import enter_environment, load_rows, make_loader
from burnish_apps.shell import cli
from burnish_apps.shell import model as model_module
from burnish_apps.shell.config import ConfigError, load_config
from burnish_apps.shell.model import model_folder
from burnish_data import PromptLoader
from burnish_generation import Completion, Replicas
from test_config import WHOLE_STATE, write_state
from tiny_task import EvenTokens

Config = Callable[..., GrpoConfig]


@pytest.fixture
def config(tiny_recipe: Path) -> Config:
    return lambda *overrides: load_config(GrpoConfig, main.RECIPES, str(tiny_recipe), overrides)


def refuse(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def bad_syntax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "bad_syntax.py").write_text("def rows(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "bad_syntax:rows"


@pytest.mark.parametrize("key", ["data.source", "environment"])
def test_modules_that_cannot_be_imported(config: Config, bad_syntax: str, key: str) -> None:
    for source, why in [
        (bad_syntax, "SyntaxError"),
        ("hostile_task.raises:rows", "ZeroDivisionError: at import"),
    ]:
        problem = refuse(config(f"{key}.source='{source}'").check)
        assert problem.startswith(f"{key}.source: must name package.module:function")
        assert why in problem


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a_string", "must return a list of rows, got a str"),
        ("no_rows", "must return a list of rows, got a NoneType"),
        ("strings", "row 0 must be a dict with a prompt, got 'a', a str"),
        ("without_prompt", "row 0 must be a dict with a prompt"),
        ("number_as_prompt", "row 0, column 'prompt': expected a list of at least one message, g"),
        ("no_messages", "row 0, column 'prompt': expected a list of at least one message, got []"),
        ("bad_role", "row 0, column 'prompt[0].role': expected one of ('system', 'user', "),
        ("key_error", "KeyError: 'rows'"),
        ("leaves", "SystemExit: 3"),
    ],
)
def test_sources_that_return_no_rows(config: Config, name: str, why: str) -> None:
    one = config(f"data.source.source='hostile_task:{name}'")
    bare = one.data.model_copy(update={"train": {}, "validation": {}})
    problem = refuse(lambda: load_rows(one.model_copy(update={"data": bare})))
    assert problem.startswith("data.source: no problems for data.train: ")
    assert why in problem


def test_arguments_that_a_source_does_not_take(config: Config) -> None:
    problem = refuse(lambda: load_rows(config("data.validation.num_problems=x")))
    assert problem.startswith("data.source: no problems for data.validation: TypeError")


def entered(config: GrpoConfig) -> Any:
    with ExitStack() as stack:
        return enter_environment(config, stack)


def test_an_environment_itself_or_a_context_manager_of_one(config: Config) -> None:
    for source in ("hostile_task:plain_environment", "tiny_task:even_tokens"):
        assert isinstance(entered(config(f"environment.source='{source}'")), EvenTokens)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("hostile_task:NoStep", "environment.source: must return an environment"),
        ("hostile_task:no_rows", "a NoneType without prompt and step"),
        ("builtins:dict", "a dict without prompt and step"),
        ("builtins:memoryview", "environment: TypeError"),
        ("hostile_task:FailsToOpen", "environment: KeyError: 'judge'"),
        ("hostile_task:key_error", "environment: KeyError"),
    ],
)
def test_what_is_no_environment(config: Config, source: str, why: str) -> None:
    assert why in refuse(lambda: entered(config(f"environment.source='{source}'")))


def test_an_environment_without_workers(config: Config) -> None:
    one = config(
        "environment={source: 'burnish_envs.math:math_environment', arguments: {num_workers: 0}}"
    )
    assert refuse(lambda: entered(one)).startswith("environment: ")


def test_a_model_that_is_not_here_and_on_no_hub(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    one = config("model.source=models/typo")
    one.check()
    problem = refuse(lambda: model_folder(one.model))
    assert problem.startswith("model.source: there is no folder 'models/typo' here, and as a hub")


def test_the_models_name_is_printed_as_it_is(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_module, "resolve_model", lambda source, cache: Path(source))
    model_folder(config("model.source='/a/[red]x[/red]:smile:'").model)
    assert "model: /a/[red]x[/red]:smile: (fetched" in capsys.readouterr().out


def test_the_order_of_other_problems_is_refused(config: Config, tmp_path: Path) -> None:
    saved = PromptLoader([{"prompt": "x"}] * 10, 4, seed=0)
    next(saved)
    state = WHOLE_STATE | {"loader": saved.state_dict()}
    path = write_state(tmp_path / "step_000003", state)
    resumed = config(f"resume_from={path}")
    rows = [{"prompt": "x"}] * 10
    assert make_loader(resumed, rows).state_dict()["position"] == 4
    for problem, key in [
        (refuse(lambda: make_loader(resumed, rows[1:])), "num_rows"),
        (refuse(lambda: make_loader(config(f"resume_from={path}", "seed=1"), rows)), "seed"),
    ]:
        assert problem.startswith("resume_from: the order of the problems cannot be restored")
        assert key in problem


class Engine:
    """Answers at once."""

    def generate(self, prompts: Any, sampling: Any, seeds: Any) -> list[Completion]:
        return [Completion((2,), (-1.0,), "stop", 0) for _ in prompts]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything that would start processes is replaced; what was called."""
    called: list[str] = []
    monkeypatch.setattr(main, "ray_cluster", lambda *_, **__: _noted(called, "ray"))
    fake = (SimpleNamespace(), Replicas([Engine()]))  # type: ignore[list-item]
    monkeypatch.setattr(main.workers, "start", lambda *_: fake)
    return called


class _noted:  # noqa: N801  (used as a function)
    def __init__(self, called: list[str], name: str) -> None:
        self.called, self.name = called, name

    def __enter__(self) -> None:
        self.called.append(self.name)

    def __exit__(self, *_: object) -> None: ...


def test_a_judge_that_never_works_ends_the_run_at_once(
    config: Config, nothing_starts: list[str], tmp_path: Path
) -> None:
    one = config("environment.source='hostile_task:FailsAlways'", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(stages.RolloutError, match=r"all 4 failed in the first .* judge is away"):
        main.main(one)
    assert nothing_starts == ["ray"]


def test_an_environment_is_made_before_ray_and_the_run_directory(
    config: Config, nothing_starts: list[str], tmp_path: Path
) -> None:
    one = config("environment.source='hostile_task:FailsToOpen'", f"run_dir={tmp_path / 'run'}")
    assert refuse(lambda: main.main(one)) == "environment: KeyError: 'judge'"
    assert nothing_starts == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override",
    [
        "environment.source='hostile_task:no_rows'",
        "data.source.source='hostile_task.raises:x'",
        "model.source=/nowhere",
        "run_dir=${nowhere}",
        "training.gpus_per_rank=999",
        "training=[1]",
    ],
)
def test_the_command_says_so_without_a_traceback(
    tiny_recipe: Path,
    nothing_starts: list[str],
    override: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = f"run_dir={tmp_path / 'run'}"
    assert cli.main(["grpo", "--recipe", str(tiny_recipe), run_dir, override]) == 2
    said = capsys.readouterr().err
    assert said.startswith("burnish grpo: this cannot run:\n- ")
    assert "Traceback" not in said
    assert nothing_starts == []


def test_ctrl_c_while_importing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupt)
    assert cli.main(["grpo", "--recipe", "x"]) == 130
    assert capsys.readouterr().err == "burnish: ended by SIGINT\n"


def test_help_imports_no_app(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("burnish_apps.grpo")]:
        monkeypatch.delitem(sys.modules, name)
    for arguments in (["--help"], ["grpo", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        assert "Reinforcement learning of a language model" in capsys.readouterr().out
    assert "burnish_apps.grpo.main" not in sys.modules
