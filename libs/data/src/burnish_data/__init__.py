"""Post-training data: rows in, token ids and masks out."""

from burnish_data.chat_template import render_prompt
from burnish_data.encode import Encoded, encode_chat, encode_chats
from burnish_data.encode_rows import encode_rows
from burnish_data.files import open_rows
from burnish_data.formats import (
    alpaca,
    guess_format,
    labelled,
    openai_chat,
    preference,
    preference_columns,
    prompt_response,
    ranked,
    sharegpt,
)
from burnish_data.inspect import Inspection, inspect_rows
from burnish_data.inspect_html import inspection_html
from burnish_data.loader import Loader, PromptLoader
from burnish_data.messages import (
    ChatRow,
    LabelledRow,
    Message,
    PreferenceRow,
    ProblemRow,
    RankedRow,
    Role,
    validate_messages,
)
from burnish_data.mixture import Mixture, mix, mix_streams
from burnish_data.multimodal import encode_images
from burnish_data.rows import (
    BadRowError,
    ConcatenatedRows,
    ListRows,
    Rows,
    Skipped,
    check_rows,
)
from burnish_data.sources import arithmetic, gsm8k
from burnish_data.stream import RowStream
from burnish_data.tasks import (
    encode_labelled,
    encode_labels,
    encode_preference,
    encode_preferences,
    encode_problem,
    encode_ranked,
    encode_rankings,
    ranked_to_pairs,
)

__version__ = "0.3.0"

__all__ = [
    "BadRowError",
    "ChatRow",
    "ConcatenatedRows",
    "Encoded",
    "Inspection",
    "LabelledRow",
    "ListRows",
    "Loader",
    "Message",
    "Mixture",
    "PreferenceRow",
    "ProblemRow",
    "PromptLoader",
    "RankedRow",
    "Role",
    "RowStream",
    "Rows",
    "Skipped",
    "alpaca",
    "arithmetic",
    "check_rows",
    "encode_chat",
    "encode_chats",
    "encode_images",
    "encode_labelled",
    "encode_labels",
    "encode_preference",
    "encode_preferences",
    "encode_problem",
    "encode_ranked",
    "encode_rankings",
    "encode_rows",
    "gsm8k",
    "guess_format",
    "inspect_rows",
    "inspection_html",
    "labelled",
    "mix",
    "mix_streams",
    "open_rows",
    "openai_chat",
    "preference",
    "preference_columns",
    "prompt_response",
    "ranked",
    "ranked_to_pairs",
    "render_prompt",
    "sharegpt",
    "validate_messages",
]
