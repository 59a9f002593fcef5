"""Settings that cannot work are refused where they are made."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from burnish_generation import Sampling


def test_defaults_are_the_plain_distribution() -> None:
    sampling = Sampling(max_new_tokens=1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1, 1, 0, ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"max_new_tokens": -3}, "max_new_tokens must be at least 1, got -3"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or positive, got -0.1"),
        ({"temperature": math.nan}, "temperature must be .* got nan"),
        ({"temperature": math.inf}, "temperature must be .* got inf"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p must lie in \(0, 1\], got 1.01"),
        ({"top_p": math.nan}, r"top_p must lie in \(0, 1\], got nan"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be at least 1, got 2.5; give a whole"),
        ({"max_new_tokens": True}, "max_new_tokens must be .* got True"),
        ({"max_new_tokens": "8"}, "max_new_tokens must be .* got '8'"),
        ({"stop": "END"}, "stop must be a tuple of texts .* got 'END'; write one"),
        ({"stop": ("END", "")}, r"stop must be .* not empty, got \('END', ''\)"),
        ({"stop": (7,)}, r"stop must be a tuple of texts .* got \(7,\)"),
        ({"stop": None}, "stop must be a tuple of texts .* got None"),
        ({"top_k": -1}, r"top_k must be 0 \(all tokens\) or positive, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**{"max_new_tokens": 4, **change})


@pytest.mark.parametrize(
    "change", [{"temperature": 0}, {"top_p": 1}, {"top_k": 0}, {"stop": ["a"]}]
)
def test_settings_on_the_border_are_taken(change: dict[str, Any]) -> None:
    (name, value), sampling = *change.items(), Sampling(max_new_tokens=1, **change)
    assert getattr(sampling, name) == value
    assert sampling.max_new_tokens == 1


def test_importing_the_package_brings_no_engine() -> None:
    code = (
        "import sys, burnish_generation\n"
        "print(*sorted({'torch', 'vllm', 'numpy', 'ray'} & sys.modules.keys()))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == ""
