import io

import pytest
from burnish_tracking import StepProgress
from rich.console import Console


def run(*, terminal: bool, first_step: int = 1, line: str = "reward 0.5") -> str:
    """Steps of 90 seconds each, two of them in a run of 10."""
    now_s = 0.0
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with StepProgress(10, first_step=first_step, console=console, clock=lambda: now_s) as progress:
        for _ in range(2):
            now_s += 90
            progress.advance(line)
    return output.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    assert run(terminal=False).splitlines() == [
        "[1/10] reward 0.5  (90.0 s/step, 0:13:30 left)",
        "[2/10] reward 0.5  (90.0 s/step, 0:12:00 left)",
    ]


def test_after_a_resume_the_rate_counts_only_new_steps() -> None:
    assert "[8/10] reward 0.5  (90.0 s/step, 0:03:00 left)" in run(terminal=False, first_step=7)


def test_a_bar_on_a_terminal() -> None:
    output = run(terminal=True)
    assert "[2/10] reward 0.5\n" in output.replace("\r", "")
    assert "2/10" in output
    assert "90.0 s/step, 0:12:00 left" in output


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_model_says_is_no_markup(terminal: bool) -> None:
    assert "[bold]7[/nonsense] :smile:" in run(terminal=terminal, line="[bold]7[/nonsense] :smile:")


def test_a_long_line_stays_one_line() -> None:
    assert len(run(terminal=False, line="x" * 500).splitlines()) == 2
