"""Recipes and overrides: what wins, and what is refused, all at once and by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.inputs import load_rows
from burnish_apps.grpo.main import RECIPES
from burnish_apps.shell.config import ConfigError, load_config, save_config

Write = Callable[..., Path]

WHOLE_STATE = {"schema_version": 1, "step": 3, "weight_version": 3, "loader": {}}


def write_state(folder: Path, state: object) -> Path:
    """A checkpoint's folder with this state, and nothing in its model."""
    (folder / "model").mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def load(recipe: Path | str, *overrides: str, recipes: Path = RECIPES) -> GrpoConfig:
    return load_config(GrpoConfig, recipes, str(recipe), overrides)


def refused(recipe: Path | str, *overrides: str, recipes: Path = RECIPES) -> list[str]:
    """The problems that loading or checking reports."""
    with pytest.raises(ConfigError) as caught:
        load(recipe, *overrides, recipes=recipes).check()
    return caught.value.problems


class TestMerging:
    def test_later_defaults_win_then_the_recipe_then_overrides(
        self, tmp_path: Path, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        write_recipe(recipe_content, "base")
        write_recipe({"seed": 1, "training": {"num_steps": 11, "warmup_steps": 1}}, "first")
        write_recipe({"seed": 2, "training": {"num_steps": 12}}, "second")
        top = write_recipe(
            {"defaults": ["base", "first", "second"], "training": {"max_tokens": 513}}, "top"
        )
        config = load(top)
        assert (config.seed, config.training.num_steps) == (2, 12)
        assert (config.training.warmup_steps, config.training.max_tokens) == (1, 513)
        config = load(top, "training.num_steps=13", "seed=5", "seed=6")
        assert (config.seed, config.training.num_steps) == (6, 13)
        assert load("top", recipes=tmp_path) == load(top)

    def test_a_recipe_elsewhere_builds_on_the_apps_own(self, write_recipe: Write) -> None:
        path = write_recipe({"defaults": ["smollm2-arithmetic-cpu"], "seed": 7}, "mine")
        own = load("smollm2-arithmetic-cpu")
        assert load(path).model_dump() == {
            **own.model_dump(),
            "seed": 7,
            "data": {**own.data.model_dump(), "train": {**own.data.train, "seed": 7}},
        }

    def test_a_default_by_path_is_relative_to_the_recipe(
        self, tmp_path: Path, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        write_recipe(recipe_content, "base")
        (tmp_path / "sub").mkdir()
        top = write_recipe({"defaults": ["../base.yaml"], "seed": 3}, "sub/top")
        assert load(top).seed == 3

    def test_values_refer_to_each_other_after_the_overrides(
        self, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        recipe_content["data"]["train"]["seed"] = "${seed}"
        assert load(write_recipe(recipe_content), "seed=41").data.train["seed"] == 41

    def test_override_values_are_yaml(self, tiny_recipe: Path) -> None:
        config = load(
            tiny_recipe,
            "rollout.stop=[a,b]",
            "engine.engine_args={enforce_eager: true}",
            "training.learning_rate=1e-6",
            "run_dir=null",
        )
        assert config.rollout.stop == ("a", "b")
        assert config.engine.engine_args == {"enforce_eager": True}
        assert config.training.learning_rate == pytest.approx(1e-6)
        assert config.run_dir is None

    @pytest.mark.parametrize("name", [path.stem for path in RECIPES.glob("[!_]*.yaml")])
    def test_a_bundled_recipe_passes_its_checks(self, name: str) -> None:
        config = load(name)
        config.check()
        assert config.name == name

    def test_values_may_refer_to_a_default_of_the_model(
        self, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        del recipe_content["seed"]
        recipe_content["data"]["train"]["seed"] = "${seed}"
        path = write_recipe(recipe_content)
        assert load(path).data.train["seed"] == 0
        assert load(path, "seed=4").data.train["seed"] == 4

    def test_the_tiny_recipe_passes_its_checks(self, tiny_recipe: Path) -> None:
        load(tiny_recipe).check()


class TestRefusals:
    def test_an_unknown_recipe_names_the_nearest(self) -> None:
        (problem,) = refused("smollm2-aritmetic-cpu")
        assert "unknown 'smollm2-aritmetic-cpu'; did you mean 'smollm2-arithmetic-cpu'?" in problem

    def test_a_missing_file(self, tmp_path: Path) -> None:
        (problem,) = refused(tmp_path / "none.yaml")
        assert "none.yaml" in problem

    @pytest.mark.parametrize(
        ("override", "place", "nearest"),
        [
            ("sed=1", "sed", "seed"),
            ("trainning.num_steps=1", "trainning", "training"),
            ("training.num_stps=1", "training.num_stps", "num_steps"),
            ("data.source.argument={}", "data.source.argument", "arguments"),
        ],
    )
    def test_a_misspelt_key_names_the_nearest(
        self, tiny_recipe: Path, override: str, place: str, nearest: str
    ) -> None:
        (problem,) = refused(tiny_recipe, override)
        assert problem.startswith(f"{place}: unknown")
        assert f"did you mean {nearest!r}?" in problem

    def test_all_violations_come_at_once(self, tiny_recipe: Path) -> None:
        problems = refused(
            tiny_recipe,
            "sed=1",
            "training.num_steps=0",
            "rollout.group_size=1",
            "engine.kv_cache_bytes=many",
            "model.dtype=float16",
        )
        places = {problem.split(":")[0] for problem in problems}
        assert places == {
            "sed",
            "training.num_steps",
            "rollout.group_size",
            "engine.kv_cache_bytes",
            "model.dtype",
        }

    def test_all_contradictions_come_at_once(self, tiny_recipe: Path) -> None:
        problems = refused(
            tiny_recipe,
            "environment.source=tiny_task:evn_tokens",
            "data.train.num_problem=3",
            "model.source=/nowhere/model",
            "training.updates_per_step=3",
            "training.num_ranks=99",
            "rollout.max_new_tokens=128",
            "training.max_tokens=127",
        )
        for start in [
            "environment.source",
            "data.source.arguments",
            "model.source",
            "rollout.prompts_per_step",
            "every rank",
            "engine.max_model_len",
            "training.max_tokens",
        ]:
            assert sum(problem.startswith(start) for problem in problems) == 1, (start, problems)
        assert len(problems) == 7

    def test_missing_keys(self, write_recipe: Write, recipe_content: dict[str, Any]) -> None:
        del recipe_content["model"], recipe_content["training"]["max_tokens"]
        problems = refused(write_recipe(recipe_content))
        assert problems == ["model: must be given", "training.max_tokens: must be given"]

    @pytest.mark.parametrize("other", ["a", "./a.yaml"])
    def test_recipes_that_build_on_each_other(self, write_recipe: Write, other: str) -> None:
        path = write_recipe({"defaults": ["b"]}, "a")
        write_recipe({"defaults": [other]}, "b")
        (problem,) = refused(path)
        assert "must not build on themselves, got a.yaml twice" in problem

    @pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\tx: 1", "- 1\n- 2"])
    def test_files_that_are_no_recipes(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        (problem,) = refused(path)
        assert "bad.yaml must be a YAML" in problem

    @pytest.mark.parametrize("defaults", ["base", "null", "{base: 1}", "3"])
    def test_defaults_that_are_no_list(self, tmp_path: Path, defaults: str) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text(f"defaults: {defaults}\n")
        (problem,) = refused(path)
        assert "defaults must be a list of recipes" in problem

    @pytest.mark.parametrize("override", ["seed", "=1", "seed:1", ""])
    def test_overrides_that_are_not_key_value(self, tiny_recipe: Path, override: str) -> None:
        (problem,) = refused(tiny_recipe, override)
        assert problem == f"an override must be key=value, got {override!r}"

    @pytest.mark.parametrize("override", ["rollout.stop=[1", "seed=${nope}", "seed={a: 1"])
    def test_override_values_that_cannot_be_read(self, tiny_recipe: Path, override: str) -> None:
        (problem,) = refused(tiny_recipe, override)
        assert "cannot be merged" in problem

    def test_a_section_replaced_by_a_value(self, tiny_recipe: Path) -> None:
        (problem,) = refused(tiny_recipe, "training=3")
        assert problem.startswith("training: ")
        assert "got 3" in problem


class TestDottedPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "tiny_task.rows",
            "tiny_task:row",
            "tiny_tusk:rows",
            "tiny_task:",
            ":rows",
            ".tiny_task:rows",
            "tiny_task:NOT_A_FUNCTION",
        ],
    )
    def test_what_names_no_function(self, tiny_recipe: Path, path: str) -> None:
        problems = refused(tiny_recipe, f"data.source.source='{path}'")
        assert len(problems) == 1, problems
        assert problems[0].startswith("data.source.source: must name package.module:function")
        assert repr(path) in problems[0]

    def test_a_misspelt_argument_names_the_nearest(self, tiny_recipe: Path) -> None:
        problems = refused(tiny_recipe, "environment.arguments.pause_z=1")
        assert problems == ["environment.arguments: unknown 'pause_z'; did you mean 'pause_s'?"]

    def test_an_argument_without_a_value(
        self, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        del recipe_content["data"]["train"]["num_problems"]
        problems = refused(write_recipe(recipe_content))
        assert problems == ["data.source.arguments: num_problems must be given"]

    def test_a_function_that_takes_any_keyword(
        self, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        recipe_content["data"]["source"]["source"] = "tiny_task:anything"
        config = load(write_recipe(recipe_content))
        config.check()
        assert config.data.source.make(**config.data.train) == [
            {"prompt": "{'num_problems': 10, 'seed': 1}"}
        ]


class TestContradictions:
    def test_batch_sizes_that_do_not_divide(self, tiny_recipe: Path) -> None:
        (problem,) = refused(tiny_recipe, "training.updates_per_step=3")
        assert "multiple of training.updates_per_step, got 4 and 3" in problem

    def test_fewer_sequences_than_ranks(self, tiny_recipe: Path) -> None:
        load(tiny_recipe, "training.num_ranks=16").check()
        (problem,) = refused(tiny_recipe, "training.num_ranks=17")
        assert "got 16 sequences for 17 ranks" in problem
        (problem,) = refused(tiny_recipe, "training.num_ranks=9", "training.updates_per_step=2")
        assert "got 8 sequences for 9 ranks" in problem

    def test_micro_batches_that_hold_no_whole_sequence(self, tiny_recipe: Path) -> None:
        load(tiny_recipe, "training.max_tokens=128").check()
        (problem,) = refused(tiny_recipe, "training.max_tokens=127")
        assert "engine.max_model_len = 128, got 127" in problem

    def test_a_context_without_room_for_a_prompt(self, tiny_recipe: Path) -> None:
        load(tiny_recipe, "rollout.max_new_tokens=127").check()
        (problem,) = refused(tiny_recipe, "rollout.max_new_tokens=128")
        assert "must exceed rollout.max_new_tokens, got 128 and 128" in problem

    @pytest.mark.parametrize("source", ["/nowhere/model", "smollm3", "../model"])
    def test_a_model_that_is_nowhere(self, tiny_recipe: Path, source: str) -> None:
        (problem,) = refused(tiny_recipe, f"model.source={source}")
        assert problem.startswith("model.source: ")
        assert repr(source) in problem

    @pytest.mark.parametrize(
        ("override", "start", "message"),
        [
            ("optimizer=torch.optim.Adamm", "training.optimizer:", "torch.optim.Adamm"),
            ("optimizer_args.weight_deca=0", "training.optimizer_args:", "'weight_decay'"),
        ],
    )
    def test_an_optimizer_that_cannot_be_made(
        self, tiny_recipe: Path, override: str, start: str, message: str
    ) -> None:
        (problem,) = refused(tiny_recipe, f"training.{override}")
        assert problem.startswith(start)
        assert message in problem

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("schedule=burnish_trainer.schedules.cosin", "training.schedule: schedule must be a"),
            ("schedule=burnish_trainer.schedules", "training.schedule: schedule must be a"),
            ("schedule=math.floor", "training.schedule_args: unknown 'step'"),
            ("schedule_args={warmup_steps: 1}", "training.schedule_args: must not hold warmup"),
            ("schedule_args={num_steps: 9}", "training.schedule_args: must not hold num_steps"),
            ("schedule_args={finl: 0.1}", "training.schedule_args: unknown 'finl'"),
            (
                "schedule=burnish_trainer.schedules.warmup_stable_decay",
                "training.schedule_args: decay_steps must be given",
            ),
            (
                "schedule_args={final: x}",
                "training.schedule_args: burnish_trainer.schedules.cosine fails",
            ),
            (
                "schedule_args={final: -1}",
                "training.schedule_args: burnish_trainer.schedules.cosine fails",
            ),
        ],
    )
    def test_a_schedule_that_cannot_be_followed(
        self, tiny_recipe: Path, override: str, problem: str
    ) -> None:
        cosine = "training.schedule=burnish_trainer.schedules.cosine"
        load(tiny_recipe, cosine, "training.schedule_args={final: 0.1}").check()
        (found,) = refused(tiny_recipe, cosine, f"training.{override}")
        assert found.startswith(problem), found

    def test_a_schedule_is_told_the_steps_of_the_optimizer(self, tiny_recipe: Path) -> None:
        steps = ["training.num_steps=10", "training.updates_per_step=2", "training.warmup_steps=3"]
        constant = load(tiny_recipe, *steps).training
        assert constant.schedule_arguments(constant.num_updates) == {"warmup_steps": 3}
        path, args = "burnish_trainer.schedules.cosine", "training.schedule_args={final: 0.1}"
        cosine = load(tiny_recipe, *steps, f"training.schedule={path}", args).training
        arguments = cosine.schedule_arguments(cosine.num_updates)
        assert arguments == {"final": 0.1, "warmup_steps": 3, "num_steps": 20}

    @pytest.mark.parametrize(
        ("lora", "problem"),
        [
            ("{rank: 8}", "training.lora: lora must be arguments of peft.LoraConfig"),
            ("{r: 8, use_dora: true}", "training.lora: lora must be plain low-rank adapters"),
        ],
    )
    def test_adapters_that_cannot_be_made(self, tiny_recipe: Path, lora: str, problem: str) -> None:
        load(tiny_recipe, "training.lora={r: 8}", "training.frozen=['model.norm*']").check()
        (found,) = refused(tiny_recipe, f"training.lora={lora}")
        assert found.startswith(problem), found

    @pytest.mark.parametrize("part", ["train", "validation"])
    def test_no_data(self, tiny_recipe: Path, part: str) -> None:
        with pytest.raises(ConfigError, match="data must hold problems of both kinds, got"):
            load_rows(load(tiny_recipe, f"data.{part}.num_problems=0"))

    def test_data_that_is_not_there(
        self, write_recipe: Write, recipe_content: dict[str, Any]
    ) -> None:
        recipe_content["data"] = {
            "source": {"source": "burnish_data.sources.gsm8k:gsm8k"},
            "train": {"source": "/nowhere.jsonl", "split": "train"},
            "validation": {"source": "bundled", "split": "test"},
        }
        config = load(write_recipe(recipe_content))
        config.check()
        with pytest.raises(
            ConfigError, match=r"data.source: no problems for data.train: .*/nowhere.jsonl"
        ):
            load_rows(config)

    def test_nothing_left_to_do_after_resuming(self, tiny_recipe: Path, tmp_path: Path) -> None:
        path = write_state(tmp_path / "step_000003", WHOLE_STATE)
        (problem,) = refused(tiny_recipe, f"resume_from={path}")
        assert "training.num_steps must exceed the 3 steps of" in problem
        load(tiny_recipe, f"resume_from={path}", "training.num_steps=4").check()

    def test_a_checkpoint_to_resume_from_that_is_none(
        self, tiny_recipe: Path, tmp_path: Path
    ) -> None:
        (problem,) = refused(tiny_recipe, f"resume_from={tmp_path / 'step_000009'}")
        assert problem.startswith("resume_from: ")
        assert "step_000009" in problem

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ([], "state.json cannot be read"),
            ({"schema_version": 1}, "without step, weight_version, loader;"),
            ({**WHOLE_STATE, "step": "3"}, "without step;"),
            ({**WHOLE_STATE, "loader": None}, "without loader;"),
        ],
    )
    def test_a_state_that_does_not_say_where_to_go_on(
        self, tiny_recipe: Path, tmp_path: Path, state: object, message: str
    ) -> None:
        path = write_state(tmp_path / "step_000003", state)
        (problem,) = refused(tiny_recipe, f"resume_from={path}", "training.num_steps=9")
        assert problem.startswith("resume_from: ")
        assert message in problem

    def test_a_checkpoint_that_lacks_its_model(self, tiny_recipe: Path, tmp_path: Path) -> None:
        path = write_state(tmp_path / "step_000003", WHOLE_STATE)
        (path / "model").rmdir()
        (problem,) = refused(tiny_recipe, f"resume_from={path}", "training.num_steps=9")
        assert "without model;" in problem


class TestNumbers:
    @pytest.mark.parametrize(
        "override",
        [
            "training.learning_rate=.inf",
            "training.max_grad_norm=.nan",
            "training.clip_high=.inf",
            "seed=2147483648",
            "rollout.temperature=0.009",
            "rollout.stop=['']",
            "engine.gpus_per_engine=1.5",
            "training.gpus_per_rank=.nan",
            "name=a/b",
            "name=..",
            "name=''",
        ],
    )
    def test_values_out_of_range(self, tiny_recipe: Path, override: str) -> None:
        problems = refused(tiny_recipe, override)
        assert all(problem.startswith(override.partition("=")[0]) for problem in problems), problems

    @pytest.mark.parametrize(
        "override",
        [
            "seed=2147483647",
            "rollout.temperature=0.01",
            "engine.gpus_per_engine=0.5",
            "engine.gpus_per_engine=2",
            "training.optimizer_args={betas: [0.9, 0.95], weight_decay: 0.1}",
            "training.optimizer=torch.optim.SGD",
        ],
    )
    def test_values_at_the_edge(self, tiny_recipe: Path, override: str) -> None:
        load(tiny_recipe, override).check()

    @pytest.mark.parametrize(
        ("override", "start"),
        [
            ("optimizer_args={lr: 1}", "training.optimizer_args: must not hold lr"),
            ("optimizer_args={params: []}", "training.optimizer_args: must not hold params"),
            ("optimizer_args={weight_decay: abc}", "training.optimizer_args: torch.optim.AdamW"),
            ("optimizer_args={weight_decay: .nan}", "training.optimizer_args: torch.optim.AdamW"),
            ("optimizer_args={betas: [2, 3]}", "training.optimizer_args: torch.optim.AdamW"),
            ("optimizer_args={betas: 3}", "training.optimizer_args: torch.optim.AdamW"),
            ("optimizer=torch.optim", "training.optimizer: optimizer must be a dotted"),
            ("optimizer=hostile_task.syntax.Adam", "training.optimizer: "),
        ],
    )
    def test_optimizers_are_built_once(self, tiny_recipe: Path, override: str, start: str) -> None:
        (problem,) = refused(tiny_recipe, f"training.{override}")
        assert problem.startswith(start)

    def test_folders_in_the_home_folder(
        self, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        config = load(tiny_recipe, "run_dir=~/x", "resume_from=~/y/step_000001")
        assert (config.run_dir, config.resume_from) == (
            "/home/someone/x",
            "/home/someone/y/step_000001",
        )


class TestMergesThatFail:
    def test_a_mandatory_value(self, write_recipe: Write, recipe_content: dict[str, Any]) -> None:
        recipe_content["model"]["source"] = "???"
        path = write_recipe(recipe_content)
        load(path, "model.source=x")
        (problem,) = refused(path)
        assert problem.startswith("recipe and overrides cannot be merged: MissingMandatoryValue")

    def test_defaults_that_refer_to_nothing(self, write_recipe: Write) -> None:
        (problem,) = refused(write_recipe({"defaults": "${nope}"}))
        assert "defaults must be a list of recipes" in problem

    @pytest.mark.parametrize(("base", "top"), [({"a": [1]}, {"a": {"b": 1}}), ({"a": 1}, {3: 1})])
    def test_other_kinds_of_values(
        self, write_recipe: Write, recipe_content: dict[str, Any], base: Any, top: Any
    ) -> None:
        write_recipe({**recipe_content, **base}, "base")
        assert refused(write_recipe({"defaults": ["base"], **top}, "top"))

    @pytest.mark.parametrize("override", ["training.num_steps.x=1", "rollout.stop.x=1"])
    def test_keys_below_a_value(self, tiny_recipe: Path, override: str) -> None:
        assert refused(tiny_recipe, override)


class TestSavedConfig:
    def test_it_is_itself_a_recipe(self, tiny_recipe: Path, tmp_path: Path) -> None:
        config = load(tiny_recipe, r"rollout.stop=['\n','\${x}']", "training.clip_high=0.28")
        assert config.rollout.stop == ("\\n", "${x}")  # that text, no reference
        path = tmp_path / "config.yaml"
        save_config(config, path)
        assert load(path) == config

    def test_secrets_are_blanked_at_any_depth(self, tiny_recipe: Path, tmp_path: Path) -> None:
        secret = "sesame"
        config = load(
            tiny_recipe,
            f"engine.engine_args.hf_token={secret}",
            f"engine.engine_args.parts=[{{api_key: {secret}}}]",
            f"environment.arguments.judge_password={secret}",
            f"data.train.client_secret={secret}",
            "engine.engine_args.max_num_batched_tokens=512",
        )
        path = tmp_path / "config.yaml"
        save_config(config, path)
        text = path.read_text()
        assert secret not in text
        assert text.count("<redacted>") == 4
        saved = load(path)
        assert saved.engine.engine_args["max_num_batched_tokens"] == 512
        assert saved.training.max_tokens == config.training.max_tokens
