"""Recipes: YAML files and ``key=value`` overrides, merged and checked before anything starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Config = TypeVar("Config", bound=BaseModel)

SECRET_WORDS = ("password", "secret", "api_key", "access_token", "auth_token", "hf_token")
MAX_CAUSE_CHARACTERS = 600


class ConfigError(ValueError):
    """The configuration cannot run. ``problems`` holds every violation, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


def cause(error: BaseException) -> str:
    """What went wrong, in one line; the texts of plain errors speak for themselves."""
    text = " ".join(str(error).split())[:MAX_CAUSE_CHARACTERS]
    is_plain = type(error) in (ValueError, RuntimeError) and text
    return text if is_plain else f"{type(error).__name__}: {text}"


@contextmanager
def blame(key: str) -> Iterator[None]:
    """Whatever is raised within the block is the fault of what the config's ``key`` names.

    For the places where the code and the files of others are met, which may raise anything.

    Raises:
        ConfigError: in the place of any other error; one that is raised within goes up as it is.
    """
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError([f"{key}: {cause(error)}"]) from error


class Section(BaseModel):
    """A part of a config; unknown keys are errors, and so are numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
        if not callable(function):
            return [
                f"{where}.source: must name package.module:function, got {self.source!r}, which "
                f"is a {type(function).__name__}"
            ]
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
            raise ValueError("there is no colon in it")
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        found = f"{path!r} ({cause(error)})"
        raise ValueError(f"must name package.module:function, got {found}") from error


def argument_problems(function: Callable[..., Any], names: Sequence[str], where: str) -> list[str]:
    """Misspelt and missing keyword arguments; none where a function does not tell its own."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [p.name for p in named]
    unknown = [] if takes_any else [name for name in names if name not in known]
    problems = [f"{where}: {_unknown(name, known)}" for name in unknown]
    missing = [p.name for p in named if p.default is p.empty and p.name not in names]
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

    A recipe's ``defaults`` are names beside it or in the app's folder, or paths relative to it.
    ``${key}`` refers to the merged value, or to the model's default of a plain top-level key.

    Raises:
        ConfigError: with every violation at once; a misspelt key names its nearest match.
    """
    path = _find_recipe(recipe, Path(), [recipes])
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            raise ConfigError([f"an override must be key=value, got {override!r}"])
    with blame("recipe and overrides cannot be merged"):
        merged = OmegaConf.merge(_plain_defaults(config_class), _load_recipe(path, recipes, ()))
        whole = OmegaConf.merge(merged, OmegaConf.from_dotlist(list(overrides)))
        content = OmegaConf.to_container(whole, resolve=True, throw_on_missing=True)
    try:
        return config_class.model_validate(content)
    except ValidationError as error:
        raise ConfigError([_explain(config_class, dict(e)) for e in error.errors()]) from error


def save_config(config: BaseModel, path: Path) -> None:
    """Write the merged config as YAML that is itself a recipe; secrets are blanked."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(_redact(config.model_dump(mode="json")))))


def _find_recipe(recipe: str, beside: Path, folders: Sequence[Path]) -> Path:
    """The file of a recipe: a path relative to ``beside``, or a name in one of the folders."""
    if recipe.endswith((".yaml", ".yml")):
        candidates = [beside / Path(recipe).expanduser()]
    else:
        candidates = [folder / f"{recipe}.yaml" for folder in folders]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        # _ marks a part that recipes share
        names = sorted({file.stem for folder in folders for file in folder.glob("[!_]*.yaml")})
        raise ConfigError(
            [f"--recipe: {_unknown(recipe, names)}; there are {', '.join(names)}, or give a path"]
        )
    return found.resolve()


def _load_recipe(path: Path, recipes: Path, seen: tuple[Path, ...]) -> Any:
    if path in seen:
        raise ConfigError([f"recipes must not build on themselves, got {path.name} twice"])
    with blame(f"{path} must be a YAML recipe"):
        content = OmegaConf.load(path)
    if not isinstance(content, DictConfig):
        raise ConfigError([f"{path} must be a YAML mapping of keys to values"])
    with blame(f"{path}: defaults must be a list of recipes"):
        bases = content.pop("defaults", OmegaConf.create([]))
    if not isinstance(bases, ListConfig):
        raise ConfigError([f"{path}: defaults must be a list of recipes, got {bases!r}"])
    merged: Any = OmegaConf.create({})
    for base in bases:
        base_path = _find_recipe(str(base), path.parent, [path.parent, recipes])
        merged = OmegaConf.merge(merged, _load_recipe(base_path, recipes, (*seen, path)))
    return OmegaConf.merge(merged, content)


def _plain_defaults(config_class: type[BaseModel]) -> dict[str, Any]:
    fields = config_class.model_fields.items()
    return {k: f.default for k, f in fields if isinstance(f.default, (bool, int, float, str))}


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
    """Secrets blanked at any depth, and ``${`` in texts escaped, since it was resolved before."""
    if value is not None and any(word in key.lower() for word in SECRET_WORDS):
        return "<redacted>"
    if isinstance(value, Mapping):
        return {k: _redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
