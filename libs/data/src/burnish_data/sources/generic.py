"""Data sets of anyone's in the usual forms: OpenAI's chats, prompts with responses, preferences.

A data set in another form is a function of your own, in a file of your own: it calls `open_rows`
and maps a function of a record over what comes. Recipes name it by its dotted path.
"""

from __future__ import annotations

from pathlib import Path

from burnish_data.formats import openai_chat, preference, prompt_response
from burnish_data.messages import ChatRow, PreferenceRow
from burnish_data.rows import Rows
from burnish_data.sources._reading import read, streamable
from burnish_data.stream import RowStream


@streamable
def openai_chats(
    source: str | Path,
    *,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Rows[ChatRow] | RowStream[ChatRow]:
    """Chats as OpenAI's fine-tuning files have them: messages, and tools if there are any.

    Args:
        source: a JSONL file, another file or folder, or a hub id; with a column messages.
        split: of a folder or a hub's data set.
        config: of a hub's data set.
        streaming: read the rows one after the other, without a copy on disk.
    """
    rows = read(source, split=split, config=config, streaming=streaming, columns=("messages",))
    return rows.map(openai_chat)


@streamable
def prompt_responses(
    source: str | Path,
    *,
    prompt: str = "prompt",
    response: str = "response",
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Rows[ChatRow] | RowStream[ChatRow]:
    """A prompt and a response a row, as chats.

    Args:
        source: a file, a folder or a hub id.
        prompt: the column of the prompts.
        response: the column of the responses.
        split: of a folder or a hub's data set.
        config: of a hub's data set.
        streaming: read the rows one after the other, without a copy on disk.
    """
    columns = (prompt, response)
    rows = read(source, split=split, config=config, streaming=streaming, columns=columns)
    return rows.map(prompt_response(prompt=prompt, response=response))


@streamable
def preferences(
    source: str | Path,
    *,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
) -> Rows[PreferenceRow] | RowStream[PreferenceRow]:
    """A better and a worse completion a row.

    Args:
        source: a file, a folder or a hub id, with columns chosen and rejected, and prompt unless
            those two are whole chats: text or messages.
        split: of a folder or a hub's data set.
        config: of a hub's data set.
        streaming: read the rows one after the other, without a copy on disk.
    """
    columns = ("chosen", "rejected")
    rows = read(source, split=split, config=config, streaming=streaming, columns=columns)
    return rows.map(preference)
