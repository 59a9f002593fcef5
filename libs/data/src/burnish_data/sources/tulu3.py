"""Tülu 3: what its models were fine-tuned on, and their preference pairs (arXiv:2411.15124)."""

from __future__ import annotations

from pathlib import Path

from burnish_data.formats import openai_chat, preference
from burnish_data.messages import ChatRow, PreferenceRow
from burnish_data.rows import Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.sources._records import Record, column
from burnish_data.stream import RowStream


@streamable
def tulu3_sft(
    source: str | Path = "allenai/tulu-3-sft-mixture",
    *,
    split: str = "train",
    streaming: bool = False,
) -> Rows[ChatRow] | RowStream[ChatRow]:
    """The Tülu 3 SFT mixture as chats.

    Columns id, messages, source. Licence: ODC-BY 1.0; some of its parts have terms of their own.

    Args:
        source: a hub id, or a file or folder of the same columns.
        split: "train" (939,343 rows) is the only one.
        streaming: read the rows one after the other, without a copy on disk.
    """
    rows = read(source, split=split, streaming=streaming, columns=("messages",))
    return rows.map(_chat)


@streamable
def tulu3_preference(
    source: str | Path = "allenai/llama-3.1-tulu-3-8b-preference-mixture",
    *,
    split: str = "train",
    streaming: bool = False,
) -> Rows[PreferenceRow] | RowStream[PreferenceRow]:
    """The Tülu 3 preference mixture of the 8B model as preference pairs.

    Columns id, source, prompt, chosen, rejected; the latter two are whole chats that share their
    beginning, which becomes the prompt. Licence: ODC-BY 1.0; some of its parts have terms of their
    own.

    Args:
        source: a hub id (another model's mixture has the same columns), or a file or folder.
        split: "train" is the only one.
        streaming: read the rows one after the other, without a copy on disk.
    """
    rows = read(source, split=split, streaming=streaming, columns=("chosen", "rejected"))
    return rows.map(_pair)


def _chat(record: Record) -> ChatRow:
    return openai_chat({"messages": column(record, "messages")})


def _pair(record: Record) -> PreferenceRow:
    # The column prompt is the last question as text; the chats say what was before it, too.
    return preference({name: column(record, name) for name in ("chosen", "rejected")})
