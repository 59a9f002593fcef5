"""Sources of rows: each a function of where its records are.

Their rows are made when they are asked for (`Rows`), or come one after the other with
`streaming=True` (`RowStream`). Those of one's own are functions like these, named by dotted path.
"""

from burnish_data.sources.aime import aime24, aime25
from burnish_data.sources.answers import with_answer
from burnish_data.sources.arithmetic import arithmetic
from burnish_data.sources.arithmetic_pairs import arithmetic_pairs
from burnish_data.sources.dapo_math import dapo_math
from burnish_data.sources.deepscaler import deepscaler
from burnish_data.sources.generic import openai_chats, preferences, prompt_responses
from burnish_data.sources.gpqa import gpqa
from burnish_data.sources.gsm8k import gsm8k, gsm8k_solutions
from burnish_data.sources.gsm8k_preferences import gsm8k_preferences
from burnish_data.sources.helpsteer3 import helpsteer3
from burnish_data.sources.hendrycks_math import math500, math_hendrycks
from burnish_data.sources.mmlu import mmlu, mmlu_pro
from burnish_data.sources.oasst import oasst
from burnish_data.sources.openmathinstruct2 import openmathinstruct2, openmathinstruct2_problems
from burnish_data.sources.refcoco import refcoco
from burnish_data.sources.squad import squad
from burnish_data.sources.tulu3 import tulu3_preference, tulu3_sft
from burnish_data.sources.visual import clevr, geometry3k

__all__ = [
    "aime24",
    "aime25",
    "arithmetic",
    "arithmetic_pairs",
    "clevr",
    "dapo_math",
    "deepscaler",
    "geometry3k",
    "gpqa",
    "gsm8k",
    "gsm8k_preferences",
    "gsm8k_solutions",
    "helpsteer3",
    "math500",
    "math_hendrycks",
    "mmlu",
    "mmlu_pro",
    "oasst",
    "openai_chats",
    "openmathinstruct2",
    "openmathinstruct2_problems",
    "preferences",
    "prompt_responses",
    "refcoco",
    "squad",
    "tulu3_preference",
    "tulu3_sft",
    "with_answer",
]
