"""The library's page: its tables and its API say what the code does."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import burnish_losses
import pytest
import torch
from torch import Tensor

TEXT = (Path(__file__).parents[3] / "docs" / "libraries" / "losses.md").read_text(encoding="utf-8")

T, N = 6, 2
COLUMNS: dict[str, Tensor] = {
    "token_mask": torch.tensor([False, True, True, False, True, True]),
    "nll_mask": torch.tensor([False, True, True, False, False, False]),
    "cu_seqlens": torch.tensor([0, 3, 6]),
    "pair_ids": torch.tensor([0, 0]),
    "chosen": torch.tensor([True, False]),
    "desirable": torch.tensor([True, False]),
    "margins": torch.tensor([0.5, 0.0]),
    "entropies": torch.ones(T, requires_grad=True),
    **{
        name: torch.linspace(-2, -1, T)
        for name in (
            "advantages",
            "old_logprobs",
            "sampled_logprobs",
            "reference_logprobs",
            "returns",
            "old_values",
        )
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "kto_loss": {"kl_baseline": 0.1},
    "dr_grpo_loss": {"num_tokens": 8},
    # With the SFT term, for the unit that the table has.
    "dpo_loss": {"nll_coefficient": 0.1},
    "simpo_loss": {"nll_coefficient": 0.1},
}


def tables() -> list[list[list[str]]]:
    """The cells of the page's tables, row by row, without their heads."""
    found = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", TEXT, flags=re.MULTILINE)
    return [[[c.strip() for c in row.split("|")[1:-1]] for row in t.splitlines()] for t in found]


def objectives() -> list[tuple[str, list[str]]]:
    return [(name.strip("`"), cells) for names, *cells in tables()[0] for name in words(names)]


def words(cell: str) -> list[str]:
    return [word for word in cell.split(", ") if word]


@pytest.mark.parametrize(("name", "cells"), objectives())
def test_the_table_says_what_an_objective_takes(name: str, cells: list[str]) -> None:
    first, required, optional, unit, metrics = cells
    objective = getattr(burnish_losses, name)
    argument, shape = re.fullmatch(r"(\w+) \[([TN])\]", first).groups()
    assert next(iter(inspect.signature(objective).parameters)) == argument
    values = torch.linspace(-3, -1, {"T": T, "N": N}[shape], requires_grad=True)
    settings = SETTINGS.get(name, {})

    output = objective(values, COLUMNS, **settings)
    assert {term.unit for term in output.terms} == set(words(unit))
    assert set(words(metrics)) <= output.metrics.keys()

    without_sft = {key: value for key, value in settings.items() if key != "nll_coefficient"}
    least = {column: COLUMNS[column] for column in words(required)}
    assert {term.unit for term in objective(values, least, **without_sft).terms} <= set(words(unit))
    for column in least:
        rest = {key: value for key, value in least.items() if key != column}
        with pytest.raises(ValueError, match=column):
            objective(values, rest, **without_sft)
    if optional and not optional.startswith("as above"):
        assert set(words(optional)) <= COLUMNS.keys() - least.keys()


def test_the_table_has_every_objective_and_every_column() -> None:
    functions = {name for name in burnish_losses.__all__ if name.endswith("_loss")}
    functions -= {name for name in functions if name.endswith("_pair_loss")}
    assert {name for name, _ in objectives()} == functions
    columns = {name.strip("`") for row in tables()[1] for name in row[0].split(", ")}
    assert columns == COLUMNS.keys()
    for names, shape, dtype, _ in tables()[1]:
        for name in names.replace("`", "").split(", "):
            tensor = COLUMNS[name]
            assert tensor.shape == ({"[T]": T, "[N]": N, "[N+1]": N + 1}[shape],)
            kind = "float" if tensor.is_floating_point() else str(tensor.dtype)[6:].rstrip("64")
            assert dtype.startswith(kind)


def test_every_public_name_is_in_the_api_once_and_nothing_else() -> None:
    documented = re.findall(r"autofunction:: burnish_losses\.(\w+)", TEXT)
    for module, options in re.findall(r"automodule:: burnish_losses\.(\w+)\n((?:   :.*\n)*)", TEXT):
        if ":no-members:" in options:
            continue
        excluded = set(re.findall(r"\w+", options.partition(":exclude-members:")[2]))
        members = vars(importlib.import_module(f"burnish_losses.{module}"))
        documented += [
            name
            for name, member in members.items()
            if getattr(member, "__module__", None) == f"burnish_losses.{module}"
            and isinstance(member, type) | inspect.isfunction(member)
            and not name.startswith("_")
            and name not in excluded
        ]
    public = [
        name
        for name in burnish_losses.__all__
        if str(getattr(getattr(burnish_losses, name), "__module__", "")).startswith("burnish_")
    ]
    assert len(documented) == len(set(documented))
    assert set(documented) - set(public) == set()  # to be excluded, or exported
    assert set(public) - set(documented) == set()
