"""Every recipe that is shipped can run, as far as that can be told without its model."""

from __future__ import annotations

import pytest
from burnish_apps.dpo.config import DpoConfig
from burnish_apps.dpo.main import RECIPES as DPO_RECIPES
from burnish_apps.grpo.config import GrpoConfig
from burnish_apps.grpo.main import RECIPES, load_rows
from burnish_apps.rm.config import RmConfig
from burnish_apps.rm.main import RECIPES as RM_RECIPES
from burnish_apps.sft.config import SftConfig
from burnish_apps.sft.main import RECIPES as SFT_RECIPES
from burnish_apps.shell.config import load_config
from burnish_apps.supervised.config import SupervisedConfig

SUPERVISED = {
    "sft": (SftConfig, SFT_RECIPES),
    "rm": (RmConfig, RM_RECIPES),
    "dpo": (DpoConfig, DPO_RECIPES),
}
NAMES = sorted(path.stem for path in RECIPES.glob("[!_]*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_recipe_is_valid(name: str) -> None:
    config = load_config(GrpoConfig, RECIPES, name, ["seed=3"])
    config.check()
    assert config.name == name
    assert config.data.train["seed"] == 3


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-cpu")])
def test_held_out_problems_are_the_same_for_every_seed_and_never_trained_on(name: str) -> None:
    problems = []
    for seed in (0, 1):
        config = load_config(GrpoConfig, RECIPES, name, [f"seed={seed}"])
        train, validation = load_rows(config)
        assert not {str(row["prompt"]) for row in train} & {
            str(row["prompt"]) for row in validation
        }
        problems.append(validation)
    assert problems[0] == problems[1]


def test_the_demo_holds_out_200_problems_of_one_mix() -> None:
    train, validation = load_rows(load_config(GrpoConfig, RECIPES, "smollm2-arithmetic-cpu", []))
    assert len(validation) == 200
    for rows in (train, validation):
        tasks = [(row["task"], row["level"]) for row in rows]
        kinds = {("max_lines", 1), ("max_lines", 2), ("addition_story", 1), ("addition_story", 2)}
        assert {tasks.count(kind) for kind in kinds} == {len(rows) // 4}


@pytest.mark.parametrize(
    ("app", "name"),
    [
        (app, path.stem)
        for app, (_, recipes) in SUPERVISED.items()
        for path in sorted(recipes.glob("[!_]*.yaml"))
    ],
)
def test_recipe_of_a_supervised_app_is_valid(app: str, name: str) -> None:
    config_class: type[SupervisedConfig]
    config_class, recipes = SUPERVISED[app]
    config = load_config(config_class, recipes, name, ["seed=3"])
    config.check()
    assert (config.name, config.seed) == (name, 3)
    assert (config.launcher == "local") == name.endswith("-cpu")


@pytest.mark.parametrize("app", SUPERVISED)
def test_a_supervised_app_has_recipes_for_every_size(app: str) -> None:
    names = [path.stem for path in SUPERVISED[app][1].glob("[!_]*.yaml")]
    for size in ("-cpu", "-8gpu", "x8gpu"):
        assert any(name.endswith(size) for name in names), names
