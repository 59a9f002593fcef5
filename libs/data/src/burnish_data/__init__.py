"""Post-training data: rows in, token ids out."""

from burnish_data.chat_template import render_prompt
from burnish_data.loader import PromptLoader
from burnish_data.messages import Message, Role, Row, validate_messages
from burnish_data.sources import arithmetic, gsm8k

__version__ = "0.1.0"

__all__ = [
    "Message",
    "PromptLoader",
    "Role",
    "Row",
    "arithmetic",
    "gsm8k",
    "render_prompt",
    "validate_messages",
]
