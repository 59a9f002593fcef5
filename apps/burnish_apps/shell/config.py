"""Recipes: YAML files and ``key=value`` overrides, merged and checked before anything starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Config = TypeVar("Config", bound=BaseModel)


class ConfigError(ValueError):
    """The configuration cannot run. ``problems`` holds every violation, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class Section(BaseModel):
    """A part of a config; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(Section):
    """Something made by a function that the recipe names: the path is code, and is imported.

    Attributes:
        source: ``package.module:function``.
        arguments: its keyword arguments.
    """

    source: str
    arguments: dict[str, Any] = Field(default_factory=dict)

    def problems(self, where: str, given: Sequence[str] = ()) -> list[str]:
        """Why the function cannot be called so: one sentence each. ``given`` comes from the app."""
        try:
            function = import_object(self.source)
        except ValueError as error:
            return [f"{where}.source: {error}"]
        return argument_problems(function, [*self.arguments, *given], f"{where}.arguments")

    def make(self, **arguments: Any) -> Any:
        """Call the function with the recipe's arguments and these."""
        return import_object(self.source)(**(self.arguments | arguments))


def import_object(path: str) -> Any:
    """What ``package.module:name`` names.

    Raises:
        ValueError: if nothing is there.
    """
    module, colon, name = path.partition(":")
    try:
        if not colon:
            raise ImportError("there is no colon in it")
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"must name package.module:function, got {path!r} ({error})") from error


def argument_problems(function: Callable[..., Any], names: Sequence[str], where: str) -> list[str]:
    """Misspelt and missing keyword arguments of ``function``."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters]
    problems = [f"{where}: {_unknown(name, known)}" for name in names if name not in known]
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in names]
    if missing:
        problems.append(f"{where}: {', '.join(missing)} must be given")
    return problems


def load_config(
    config_class: type[Config], recipes: Path, recipe: str, overrides: Sequence[str]
) -> Config:
    """A recipe, the recipes it builds on, and overrides, as a checked config.

    Args:
        config_class: the app's model.
        recipes: the app's folder of recipes.
        recipe: a name in that folder, or the path of a YAML file.
        overrides: ``key=value``, with dots for nesting; later ones win.

    Raises:
        ConfigError: with every violation at once; a misspelt key names its nearest match.
    """
    merged = _load_recipe(recipes, recipe, ())
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError([f"an override must be key=value, got {override!r}"])
    try:
        whole = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        content = OmegaConf.to_container(whole, resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError([f"the overrides cannot be merged: {error}"]) from error
    try:
        return config_class.model_validate(content)
    except ValidationError as error:
        raise ConfigError([_explain(config_class, dict(e)) for e in error.errors()]) from error


def save_config(config: BaseModel, path: Path) -> None:
    """Write the merged config as YAML that is itself a recipe; secrets are blanked."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_redact(config.model_dump(mode="json")))))


def _load_recipe(recipes: Path, recipe: str, seen: tuple[Path, ...]) -> Any:
    path = Path(recipe) if recipe.endswith((".yaml", ".yml")) else recipes / f"{recipe}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in recipes.glob("*.yaml"))
        raise ConfigError(
            [f"--recipe: {_unknown(recipe, names)}; there are {', '.join(names)}, or give a path"]
        )
    if path in seen:
        raise ConfigError([f"recipes must not build on themselves, got {path.name} twice"])
    try:
        content = OmegaConf.load(path)
    except (OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError([f"{path} must be a YAML recipe: {error}"]) from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):  # yaml's errors share no importable base
            raise ConfigError([f"{path} must be a YAML recipe: {error}"]) from error
        raise
    if not isinstance(content, DictConfig):
        raise ConfigError([f"{path} must be a YAML mapping of keys to values"])
    bases = content.pop("defaults", [])
    folder = path.parent
    merged: Any = OmegaConf.create({})
    for base in bases:
        merged = OmegaConf.merge(merged, _load_recipe(folder, str(base), (*seen, path)))
    return OmegaConf.merge(merged, content)


def _explain(config_class: type[BaseModel], error: dict[str, Any]) -> str:
    place = [str(part) for part in error["loc"]]
    where = ".".join(place)
    if error["type"] == "extra_forbidden":
        known = _keys_at(config_class, place[:-1])
        return f"{where}: {_unknown(place[-1], known)}"
    if error["type"] == "missing":
        return f"{where}: must be given"
    return f"{where or 'config'}: {error['msg']}, got {error['input']!r}"


def _keys_at(config_class: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Keys of the section at ``place``."""
    section: type[BaseModel] = config_class
    for name in place:
        annotation = section.model_fields[name].annotation
        options = [annotation, *get_args(annotation)]
        section = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return list(section.model_fields)


def _unknown(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(known)}"
    return f"unknown {name!r}; {hint}"


def _redact(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {k: _redact(v, str(k)) for k, v in value.items()}
    secret = any(word in key.lower() for word in ("password", "secret", "api_key", "access_token"))
    return "<redacted>" if secret and value is not None else value
