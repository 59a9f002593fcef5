"""The page of recipes: each runs with nothing but its set-up, and computes what it says.

What a recipe makes of padded rows is compared with plain formulas on each row by itself.
"""

import contextlib
import copy
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PAGE = Path(__file__).parents[3] / "docs" / "libraries" / "losses-recipes.md"


def recipes() -> dict[str, str]:
    """The Python of each section of the page, by its heading."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        heading: "\n".join(re.findall(r"```python\n(.*?)```", body, flags=re.DOTALL))
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def execute(code: str, names: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, str(PAGE), "exec"), names)


class Recipe:
    """One recipe after its run, with nothing but the set-up before it."""

    def __init__(self, heading: str) -> None:
        code = recipes()
        self.names: dict[str, Any] = {}
        execute(code["Set-up"], self.names)
        keep = ("policy", "reference", "value_head", "reward_head")
        self.before = {name: copy.deepcopy(self.names[name]) for name in keep}
        execute(code[heading], self.names)

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def states(self, model: Any, row: int) -> Tensor:
        """[length, D] of one row by itself, not shifted, without padding."""
        ids = self["rows"]["token_ids"][row : row + 1, : int(self["rows"]["lengths"][row])]
        return model(ids)[0]

    def logprobs(self, model: Any, row: int, temperature: float = 1.0, shift: int = 1) -> Tensor:
        """[length - 2] of the completion's tokens, after the prompt of two."""
        logits = model.head(self.states(model, row)) / temperature
        ids = self["rows"]["token_ids"][row, : len(logits)]
        table = logits.log_softmax(-1)
        return torch.stack([table[t - shift, ids[t]] for t in range(2, len(ids))])

    def of_policy(self, row: int, **settings: Any) -> Tensor:
        return self.logprobs(self.before["policy"], row, **settings)

    def of_reference(self, row: int, **settings: Any) -> Tensor:
        return self.logprobs(self.before["reference"], row, **settings)

    def log_ratio(self, row: int) -> Tensor:
        return (self.of_policy(row) - self.of_reference(row)).sum()


def approx(value: Tensor) -> Any:
    return pytest.approx(value.item(), rel=1e-4, abs=1e-6)


RECIPES = [heading for heading in recipes() if heading != "Set-up"]


@pytest.mark.parametrize("heading", RECIPES)
def test_a_recipe_runs_alone_and_trains_the_policy(heading: str) -> None:
    recipe = Recipe(heading)
    metrics = recipe["metrics"]
    for numbers in metrics.values() if "dpo" in metrics else [metrics]:
        assert all(math.isfinite(number) for number in numbers.values())
    new, old = recipe["policy"].state_dict(), recipe.before["policy"].state_dict()
    moved = {name: float((new[name] - old[name]).abs().max()) for name in new}
    assert all(math.isfinite(distance) for distance in moved.values())
    # A reward model's head is another one.
    assert all(
        moved[name] > 0 for name in new if (name, heading) != ("head.weight", "Reward model")
    )
    for name, weight in recipe["reference"].state_dict().items():
        assert torch.equal(weight, recipe.before["reference"].state_dict()[name])


def test_supervised_fine_tuning() -> None:
    recipe = Recipe("Supervised fine-tuning")
    nll = -torch.cat([recipe.of_policy(row) for row in range(4)]).mean()
    assert recipe["metrics"]["nll"] == approx(nll)
    assert recipe["metrics"]["loss"] == approx(nll)
    unshifted = -torch.cat([recipe.of_policy(row, shift=0) for row in range(4)]).mean()
    assert abs(unshifted - nll) > 1e-2


def test_preference() -> None:
    recipe = Recipe("DPO, CPO, SimPO, ORPO")
    margins = [recipe.log_ratio(0) - recipe.log_ratio(1), recipe.log_ratio(2) - recipe.log_ratio(3)]
    dpo = -logsigmoid(0.1 * torch.stack(margins)).mean()
    assert recipe["metrics"]["dpo"]["loss"] == approx(dpo)
    assert int(recipe["rows"]["nll_mask"].sum()) == 6 + 5  # completions of the chosen
    assert "loss/nll" in recipe["metrics"]["cpo"].keys() & recipe["metrics"]["orpo"].keys()


def test_kto() -> None:
    recipe = Recipe("KTO")
    ids, lengths = recipe["rows"]["token_ids"], recipe["rows"]["lengths"]
    sums = []
    for row in range(4):  # the completion of the row before follows this row's prompt
        source = (row - 1) % 4
        mixed = torch.cat([ids[row, :2], ids[source, 2 : lengths[source]]])
        tables = [
            model.head(model(mixed[None])[0]).log_softmax(-1)[:-1].gather(1, mixed[1:, None])[1:]
            for model in (recipe.before["policy"], recipe.before["reference"])
        ]
        sums.append((tables[0] - tables[1]).sum())
    baseline = torch.stack(sums).mean().clamp(min=0)
    assert recipe["baseline"] == approx(baseline)
    assert recipe["log_ratio_sum"].abs() > 1e-3
    signs = [1, -1, 1, -1]
    gains = [sign * (recipe.log_ratio(row) - baseline) for row, sign in enumerate(signs)]
    assert recipe["metrics"]["loss"] == approx(torch.sigmoid(-0.1 * torch.stack(gains)).mean())


def test_reward_model() -> None:
    recipe = Recipe("Reward model")
    head, policy = recipe.before["reward_head"], recipe.before["policy"]
    scores = torch.stack([head(recipe.states(policy, row)[-1])[0] for row in range(4)])
    torch.testing.assert_close(recipe["scores"], scores)
    loss = -logsigmoid(scores[::2] - scores[1::2]) + 0.01 * (scores[::2] + scores[1::2]) ** 2
    assert recipe["metrics"]["loss"] == approx(loss.mean())


def test_ppo() -> None:
    recipe = Recipe("PPO")
    returns, advantages = [], []
    for row in range(4):
        states = recipe.states(recipe.before["policy"], row)
        values = recipe.before["value_head"](states).squeeze(-1)[1:-1]
        rewards = -0.05 * (recipe.of_policy(row) - recipe.of_reference(row))
        rewards[-1] += recipe["rewards"][row]
        ahead = advantage = 0.0
        estimates: list[Tensor] = []
        for value, reward in zip(values.flip(0), rewards.flip(0), strict=True):
            advantage = reward + ahead - value + 0.95 * advantage
            ahead = value
            estimates.insert(0, advantage)
        advantages += estimates
        returns.append(torch.stack(estimates) + values)
    mask, rows = recipe["mask"], recipe["rows"]
    torch.testing.assert_close(rows["returns"][mask].float(), torch.cat(returns).detach())
    white = torch.stack(advantages).detach()
    white = (white - white.mean()) / white.std()
    torch.testing.assert_close(rows["advantages"][mask].float(), white, rtol=1e-4, atol=1e-5)
    assert {"loss/policy", "loss/value"} <= recipe["metrics"].keys()
    assert recipe["metrics"]["policy/ratio_max"] != 1  # of the second update


def test_grpo_corrected_for_the_engine() -> None:
    recipe = Recipe("GRPO, corrected for the engine")
    rows = recipe["rows"]
    assert int(rows["token_mask"].sum()) == 6 + 4 + 5  # the second group is left out
    advantages = (torch.tensor([1.0, 0.0, 0.0]) - 1 / 3) / 3**-0.5
    losses, penalties = [], []
    for row in range(3):
        policy = recipe.of_policy(row, temperature=0.7)
        reference = recipe.of_reference(row, temperature=0.7)
        sampled = rows["sampled_logprobs"].view(6, 8)[row, 2 : 2 + len(policy)]
        losses.append(-advantages[row] * (policy - sampled).exp().clamp(max=2))
        penalties.append((reference - policy).exp() - (reference - policy) - 1)
    loss = torch.cat(losses).mean() + 0.01 * torch.cat(penalties).mean()
    assert recipe["metrics"]["loss"] == approx(loss)


def test_on_policy_distillation() -> None:
    recipe = Recipe("On-policy distillation")
    losses = []
    for row in range(4):
        policy, teacher = recipe.of_policy(row), recipe.logprobs(recipe["teacher"], row)
        losses.append((policy - teacher) * policy)
    assert recipe["metrics"]["loss"] == approx(torch.cat(losses).mean())


def test_distillation_of_whole_distributions() -> None:
    recipe = Recipe("Distillation of whole distributions")
    divergences = []
    for row in range(4):
        p, q = (
            model.head(recipe.states(model, row)[1:-1]).softmax(-1)
            for model in (recipe.before["policy"], recipe["teacher"])
        )
        m = (p + q) / 2
        divergences.append((p * (p / m).log() + q * (q / m).log()).sum(-1) / 2)
    assert recipe["metrics"]["loss"] == approx(torch.cat(divergences).mean())
