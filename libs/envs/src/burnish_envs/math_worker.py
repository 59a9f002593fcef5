"""The process behind `MathVerifier`: one JSON line in, one JSON line out.

It is started as `python -m burnish_envs.math_worker TIMEOUT_S MEMORY_BYTES`. It writes a line when
it is ready, and leaves when its standard input closes.
"""

import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import sys

# GSM8K's mark. The end of the line is part of it, as "#### Step 3: add" is a Markdown heading.
_MARKED_ANSWER = re.compile(r"####[ \t]*(\$?-?\$?[\d.,/]*\d)\.?[ \t]*$", re.MULTILINE)

_INTEGER = re.compile(r"-?\d[\d,]*")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def main(timeout_s: float, memory_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes our input
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    logging.disable(logging.CRITICAL)  # Math-Verify warns of every expression it gives up
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may write among the replies

    score(r"\boxed{\frac{1}{2}}", "0.5")  # loads the grammar, so that no pair pays for it
    print(json.dumps({"status": "ready"}), file=replies, flush=True)
    for line in sys.stdin:
        text, answer = json.loads(line)
        # The parent kills us at the deadline. If it is gone, this does, also inside a C function.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1.0)
        try:
            reply = {"score": score(text, answer), "status": "ok"}
        except Exception as error:  # noqa: BLE001 - a worker's edge: it becomes a status
            reply = {"score": math.nan, "status": "error", "error": repr(error)}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        print(json.dumps(reply), file=replies, flush=True)


def score(text: str, answer: str) -> float:
    """1.0 if the final answer in `text` equals `answer`, else 0.0. ValueError: no such answer."""
    from math_verify import parse, verify  # the extra; nothing else in this library needs it

    # Math-Verify's own time-out would take the alarm that guards us, so it is off.
    gold = parse(rf"\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"An answer must be a mathematical expression, got {answer!r}.")
    stated = final_answer(text)
    if _INTEGER.fullmatch(answer.strip()) and not is_written(answer, stated):
        return 0.0  # Math-Verify works out what it reads: the question "12 + 45" is no answer
    found = parse(stated, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


def is_written(number: str, text: str) -> bool:
    """Whether an integer stands in `text` as a number, in any way of writing it (1,234 or 7.0)."""
    value = float(number.replace(",", ""))
    return any(float(found.replace(",", "")) == value for found in _NUMBER.findall(text))


def final_answer(text: str) -> str:
    r"""The part of `text` that states its last answer: `\boxed{...}`, `#### ...`, or all of it.

    In all of it Math-Verify looks for "the answer is ..." and then for the last expression.
    """
    box = text.rfind(r"\boxed{")
    end = _closing_brace(text, box + len(r"\boxed{")) if box >= 0 else None
    marked = list(_MARKED_ANSWER.finditer(text))
    if marked and (end is None or marked[-1].start() > box):
        return marked[-1].group(1)
    return text if end is None else text[box : end + 1]


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
