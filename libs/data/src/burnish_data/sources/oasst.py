"""OpenAssistant Conversations: trees of messages by people (arXiv:2304.07327)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish_data.files import open_rows
from burnish_data.messages import ChatRow, Message, Role, validate_messages
from burnish_data.rows import BadRowError, Rows
from burnish_data.sources._records import Record, column, text

_ROLES: dict[str, Role] = {"prompter": "user", "assistant": "assistant"}


def oasst(
    source: str | Path = "OpenAssistant/oasst2",
    *,
    split: str = "train",
    languages: Sequence[str] | None = None,
) -> Rows[ChatRow]:
    """OpenAssistant Conversations as chats, one for each tree: its best chain.

    The chain begins with the tree's prompt and follows, at each message, the reply of the lowest
    rank (0 is the best; of replies without a rank, the first). Deleted replies, and those that
    reviewers refused, are passed over. A prompt at the end, which nobody answered, is left out. A
    tree without an answer, or a message whose parent is not there, is a bad row, counted as "no
    answer" or "no parent".

    Columns message_id, parent_id, text, role (prompter or assistant), lang, rank, deleted,
    review_result, message_tree_id, ... (one message a row), or prompt with nested replies (one tree
    a row, the files that end in .trees.jsonl.gz). Licence: Apache-2.0. Rows of messages are read
    once to know the trees (88,838 in oasst1).

    Args:
        source: "OpenAssistant/oasst1" or "OpenAssistant/oasst2", or a file or folder.
        split: "train" or "validation".
        languages: only trees in these, such as ["en", "de"]; None is all.
    """
    rows = open_rows(source, split=split)
    first = rows[0]
    if "prompt" in first:
        if languages is not None:
            rows = rows.select(_trees_in(rows, languages))
        return rows.map(_tree_row)
    for name in ("message_id", "text", "role"):
        column(first, name)
    return _Chains(rows, _best_chains(rows, languages))


Chain = tuple[list[int], BadRowError | None]
"""The rows of a chain's messages; and, if it cannot be used, why."""


class _Chains(Rows[ChatRow]):
    """A chat for each chain of rows of messages."""

    def __init__(self, rows: Rows[dict[str, Any]], chains: Sequence[Chain]) -> None:
        self._rows, self._chains = rows, chains

    def __len__(self) -> int:
        return len(self._chains)

    def where(self, index: int) -> str:
        return self._rows.where(self._chains[index][0][0])

    def row(self, index: int) -> ChatRow:
        chain, fault = self._chains[index]
        if fault is not None:
            raise fault.with_traceback(None)
        try:
            return _chat([self._rows.row(position) for position in chain])
        except BadRowError as error:
            raise error.at(self.where(index)) from error


def _best_chains(rows: Rows[dict[str, Any]], languages: Sequence[str] | None) -> list[Chain]:
    """The best chain of each tree, in the order of the prompts, and the rows of no tree."""
    roots: list[int] = []
    replies: dict[str, list[tuple[bool, int, int]]] = {}  # parent -> (has no rank, rank, row)
    names: dict[int, str] = {}
    chains: list[Chain] = []
    for index in range(len(rows)):
        try:
            record = rows.row(index)
            names[index] = text(record, "message_id")
        except BadRowError as error:
            chains.append(([index], error.at(rows.where(index))))
            continue
        if _is_refused(record):
            continue
        if record.get("parent_id") is not None:
            key = _preference(record)
            replies.setdefault(record["parent_id"], []).append((*key, index))
        elif languages is None or record.get("lang") in languages:
            roots.append(index)
    for root in roots:
        chain = _follow(root, names, replies)
        fault = None if len(chain) > 1 else _no_answer("parent_id").at(rows.where(root))
        chains.append((chain, fault))
    for parent in replies.keys() - set(names.values()):
        for *_, index in replies[parent]:
            expected = "the id of a message that is there"
            lost = BadRowError(expected, parent, column="parent_id", reason="no parent")
            chains.append(([index], lost.at(rows.where(index))))
    return sorted(chains, key=lambda chain: chain[0])


def _no_answer(column: str) -> BadRowError:
    expected = "a prompt that someone answered"
    return BadRowError(expected, "no reply", column=column, reason="no answer")


def _trees_in(rows: Rows[dict[str, Any]], languages: Sequence[str]) -> list[int]:
    """Indices of the trees in these languages, and of bad rows, which are errors later."""
    kept = []
    for index in range(len(rows)):
        try:
            tree = rows.row(index)
            language = tree.get("lang", column(tree, "prompt").get("lang"))
        except BadRowError:
            kept.append(index)
            continue
        if language in languages:
            kept.append(index)
    return kept


def _follow(
    root: int, names: Mapping[int, str], replies: Mapping[str, list[tuple[bool, int, int]]]
) -> list[int]:
    chain = [root]
    while found := replies.get(names[chain[-1]]):
        chain.append(min(found)[-1])
    return chain[:-1] if len(chain) % 2 and len(chain) > 1 else chain  # nobody answered the last


def _tree_row(tree: Record) -> ChatRow:
    """The best chain of a tree of nested replies."""
    message = column(tree, "prompt")
    records = [message]
    while True:
        replies = [reply for reply in message.get("replies") or () if not _is_refused(reply)]
        if not replies:
            break
        message = min(replies, key=_preference)
        records.append(message)
    if len(records) % 2 and len(records) > 1:
        records.pop()
    if len(records) == 1:
        raise _no_answer("prompt.replies")
    return _chat(records)


def _chat(records: Sequence[Record]) -> ChatRow:
    messages: list[Message] = []
    for record in records:
        role = text(record, "role")
        if role not in _ROLES:
            raise BadRowError(f"one of {list(_ROLES)}", role, column="role")
        messages.append({"role": _ROLES[role], "content": text(record, "text")})
    return {"messages": validate_messages(messages)}


def _is_refused(record: Record) -> bool:
    return bool(record.get("deleted")) or record.get("review_result") is False


def _preference(record: Record) -> tuple[bool, int]:
    """Sorts the better reply first: by rank, and without one last."""
    rank = record.get("rank")
    return rank is None, int(rank or 0)
