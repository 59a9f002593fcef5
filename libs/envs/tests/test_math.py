import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from burnish_envs import MathEnvironment, MathVerifier, Rollout, Turn, Verdict
from burnish_envs.math_worker import final_answer

RIGHT, WRONG = Verdict(1.0, "ok"), Verdict(0.0, "ok")


@pytest.fixture(scope="module")
def verifier():
    with MathVerifier(timeout_s=10.0) as verifier:
        yield verifier


def worker_id(verifier: MathVerifier) -> int:
    return verifier._workers[0]._process.pid


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("text", "answer", "verdict"),
    [
        ("3 + 4 = 7", "7", RIGHT),
        ("3 + 4 = 8", "7", WRONG),
        ("The answer is 7.", "7", RIGHT),
        ("\\boxed{7}", "7", RIGHT),
        ("#### 7", "7", RIGHT),
        ("1,234", "1234", RIGHT),
        ("1234", "1,234", RIGHT),
        (" 7", "7", RIGHT),
        ("-7", "7", WRONG),
        ("Tom has 3 apples and gets 4, so he has 7 apples.", "7", RIGHT),
        ("She earns $18.", "18", RIGHT),
        ("0.5", "1/2", RIGHT),
        ("\\boxed{\\frac{1}{2}}", "0.5", RIGHT),
        ("\\boxed{5}, no: \\boxed{7}", "7", RIGHT),
        ("\\boxed{7}, no: \\boxed{5}", "7", WRONG),
        ("#### 5\n\n#### 7", "7", RIGHT),
        ("3 + 4 = 7\n#### 7\n\nNext: 5 + 5 = 10", "7", RIGHT),
        ("", "7", WRONG),
        ("  \n", "7", WRONG),
        ("I do not know.", "7", WRONG),
        ("\ud800 7 \x00", "7", RIGHT),
    ],
)
def test_verdicts(verifier, text, answer, verdict):
    assert verifier.verify([(text, answer)]) == [verdict]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 7.", "The answer is 7."),
        ("\\boxed{5} or \\boxed{\\frac{1}{2}} it is", "\\boxed{\\frac{1}{2}}"),
        ("\\boxed{5} #### 7", "7"),
        ("#### 7\n\\boxed{5}", "\\boxed{5}"),
        ("#### $1,234.", "$1,234"),
        ("#### Step 3: add\n7", "#### Step 3: add\n7"),
        ("#### 3. Add them\n7", "#### 3. Add them\n7"),
        ("cut off: \\boxed{7", "cut off: \\boxed{7"),
        ("#### 7 cut off: \\boxed{5", "#### 7 cut off: \\boxed{5"),
        ("#### 7\ncut off: \\boxed{5", "7"),
    ],
)
def test_the_last_stated_answer_is_the_final_one(text, answer):
    assert final_answer(text) == answer


def test_no_pairs(verifier):
    assert verifier.verify([]) == []


def test_an_answer_that_is_no_mathematics_is_an_error_and_not_a_zero(verifier):
    (verdict,) = verifier.verify([("7", "")])
    assert verdict.status == "error"
    assert math.isnan(verdict.score)


def test_a_hanging_text_is_killed_at_its_deadline_and_the_others_are_unharmed():
    with MathVerifier(timeout_s=1.0) as verifier:
        verifier.verify([("1", "1")])  # the start is not part of the measurement
        begin = time.monotonic()
        verdicts = verifier.verify([("7", "7"), ("9**9**9", "9"), ("8", "7"), ("8", "8")])
        assert verdicts == [RIGHT, Verdict(0.0, "timeout"), WRONG, RIGHT]
        assert time.monotonic() - begin < 30.0


def test_it_works_off_the_main_thread_with_more_workers():
    results = []

    def run() -> None:
        with MathVerifier(timeout_s=1.0, num_workers=2) as verifier:
            results.extend(verifier.verify([("9**9**9", "9"), *((str(n), "3") for n in range(6))]))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    assert results == [Verdict(0.0, "timeout"), WRONG, WRONG, WRONG, RIGHT, WRONG, WRONG]


def test_a_dead_worker_is_replaced(verifier):
    before = worker_id(verifier)
    os.kill(before, signal.SIGKILL)
    assert verifier.verify([("7", "7"), ("8", "7")]) == [RIGHT, WRONG]
    assert worker_id(verifier) != before


def test_a_text_that_kills_every_worker_is_an_error_of_its_own(monkeypatch):
    with MathVerifier() as verifier:
        worker = verifier._workers[0]
        ask = worker.ask

        def deadly_ask(pair):
            if pair[0] == "deadly":
                worker._wait_until_ready()
                os.kill(worker._process.pid, signal.SIGKILL)
                worker._process.wait()
            return ask(pair)

        monkeypatch.setattr(worker, "ask", deadly_ask)
        first, second = verifier.verify([("deadly", "7"), ("7", "7")])
        assert first.status == "error"
        assert math.isnan(first.score)
        assert second == RIGHT


def test_workers_that_never_live_are_a_clear_error():
    with MathVerifier() as verifier:
        verifier._workers[0]._command[1:] = ["-c", "pass"]
        os.kill(worker_id(verifier), signal.SIGKILL)
        with pytest.raises(RuntimeError, match="die whatever they are asked"):
            verifier.verify([("7", "7")])


def test_a_worker_ignores_ctrl_c(verifier):
    verifier.verify([("7", "7")])
    before = worker_id(verifier)
    os.kill(before, signal.SIGINT)
    assert verifier.verify([("7", "7")]) == [RIGHT]
    assert worker_id(verifier) == before


def test_memory_is_bounded():
    with MathVerifier(memory_bytes=2 * 1024**3) as verifier:
        verifier.verify([("1", "1")])
        limits = Path(f"/proc/{worker_id(verifier)}/limits").read_text()
        (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
        assert line.split()[3:5] == [str(2 * 1024**3)] * 2


def test_close_ends_the_processes_and_may_be_called_twice():
    verifier = MathVerifier(num_workers=2)
    process_ids = [worker._process.pid for worker in verifier._workers]
    verifier.close()
    verifier.close()
    assert not any(map(is_alive, process_ids))


PARENT = """
import sys, threading, time
from burnish_envs import MathVerifier
verifier = MathVerifier(timeout_s=2.0)
verifier.verify([("1", "1")])
print(verifier._workers[0]._process.pid, flush=True)
verifier.verify([(sys.argv[1], "9")])
time.sleep(60)
"""


@pytest.mark.parametrize("text", ["1", "9**9**9"], ids=["idle", "busy"])
def test_a_killed_parent_leaves_no_worker(text):
    """SIGKILL runs no clean-up; a worker that is inside a C function reads no closed pipe."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, text], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    process_id = int(parent.stdout.readline())
    assert is_alive(process_id)
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    assert wait_until(lambda: not is_alive(process_id), timeout_s=15.0)


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"timeout_s must be positive .* got 0 and 1"):
        MathVerifier(timeout_s=0)
    with pytest.raises(ValueError, match=r"num_workers at least 1, got 5\.0 and 0"):
        MathVerifier(num_workers=0)


def test_a_missing_math_verify_is_named_at_once(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'burnish-envs\[math\]'"):
        MathVerifier()


def rollout(text: str, **row) -> Rollout:
    turn = Turn((1,), (2,), (-0.5,), "stop", 0, text)
    return Rollout({"prompt": "?", "answer": "7", **row}, 0, 0, (turn,))


def test_math_environment(verifier):
    environment = MathEnvironment(verifier)
    assert environment.prompt({"prompt": "3 + 4 =", "answer": "7"}) == "3 + 4 ="
    results = environment.step([rollout(" 7"), rollout(" 8"), rollout(" 7", answer="")])
    assert [r.done for r in results] == [True, True, True]
    assert [r.status for r in results] == ["ok", "ok", "error"]
    assert [r.reward for r in results[:2]] == [1.0, 0.0]
    assert math.isnan(results[2].reward)


def test_a_row_says_where_its_answer_stops(verifier):
    text = " 7\nmax(3, 9) = 9\n"
    results = MathEnvironment(verifier).step(
        [rollout(text), rollout(text, stop="\n"), rollout("\n7", stop="\n")]
    )
    assert [r.reward for r in results] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("12+45", "57", 0.0),
        ("45 - 12", "33", 0.0),
        ("5 * 9", "45", 0.0),
        (r"\boxed{50 + 7}", "57", 0.0),
        ("12 + 45 = 57", "57", 1.0),
        (r"\boxed{57}", "57", 1.0),
        ("So 1,234 in all", "1234", 1.0),
        ("#### 1,234", "1,234", 1.0),
        ("The answer is 7.0", "7", 1.0),
        ("It is -3.", "-3", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
    ],
)
def test_a_question_repeated_is_no_answer(
    verifier: MathVerifier, text: str, answer: str, score: float
) -> None:
    assert verifier.verify([(text, answer)])[0].score == score


@pytest.mark.parametrize(
    ("text", "reward"),
    [(" 45\n", 1.0), ("45", 1.0), (" 12, 45\n", 0.0), (" 12 or 45", 0.0), (" max(12, 45)", 0.0)],
)
def test_a_line_must_be_the_answer_and_nothing_else(
    verifier: MathVerifier, text: str, reward: float
) -> None:
    turn = Turn((1,), (2,), (-1.0,), "stop", 0, text)
    row = {"prompt": "max(12, 45) =", "answer": "45", "stop": "\n"}
    (result,) = MathEnvironment(verifier).step([Rollout(row, 0, 0, (turn,))])
    assert result.reward == reward


def test_a_row_without_an_answer_fails_alone(verifier: MathVerifier) -> None:
    turn = Turn((1,), (2,), (-1.0,), "stop", 0, "45")
    rows = [{"prompt": "a"}, {"prompt": "b", "answer": "45"}, {"prompt": "c", "answer": 45}]
    rollouts = [Rollout(row, i, 0, (turn,)) for i, row in enumerate(rows)]
    bad, good, number = MathEnvironment(verifier).step(rollouts)
    assert good.reward == 1.0
    assert math.isnan(bad.reward)
    assert math.isnan(number.reward)
    assert number.status == "error"
    assert "got 45" in number.info["error"]
