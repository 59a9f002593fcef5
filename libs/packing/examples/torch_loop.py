# ruff: noqa: T201  (it prints what it shows)
"""Packing inside a training loop of one's own: `pip install "burnish-packing[torch]"`, no more.

Trains a small transformer twice, one sequence at a time and packed; the losses are the same.
"""

import torch
from burnish_packing import plan_micro_batches
from burnish_packing.torch import PackedBatch, lay_out, packed_attention
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY, WIDTH, HEADS = 101, 64, 4


def random_rows(num_rows: int) -> list[Tensor]:
    """Token ids of sequences of 3 to 60 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 61, (num_rows,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]


def train(rows: list[Tensor], **plan_arguments) -> list[float]:
    """Train on the rows in order, 16 sequences a step; returns the loss of every step."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = plan_micro_batches([len(row) for row in rows], global_batch_size=16, **plan_arguments)
    losses = []
    for micro_batches in plan.steps(rank=0):
        num_scored = sum(length - 1 for m in micro_batches for length in m.lengths)
        loss = 0.0
        for micro_batch in micro_batches:
            batch = lay_out(micro_batch, rows)
            logits = model(batch).flatten(0, 1)[batch.score_positions]
            # One division, by the tokens of the whole step: the micro-batches do not matter.
            part = cross_entropy(logits, batch.labels, reduction="sum") / num_scored
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


class Transformer(nn.Module):
    """One layer, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.projection, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: PackedBatch) -> Tensor:
        hidden = self.tokens(batch.token_ids) + self.positions(batch.position_ids)
        heads = self.projection(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if batch.spans is None:  # padded rows
            attended = scaled_dot_product_attention(*heads, is_causal=True)
        else:
            attended = packed_attention(*heads, batch.spans)  # [1, HEADS, L, WIDTH / HEADS]
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(-2))
        return self.head(hidden + self.mlp(hidden))


def main() -> None:
    rows = random_rows(64)
    one_by_one = train(rows, mode="fixed", micro_batch_size=1)
    packed = train(rows, mode="packed", max_tokens=256)
    for step, (alone, together) in enumerate(zip(one_by_one, packed, strict=True)):
        print(f"step {step}: loss {alone:.6f} one by one, {together:.6f} packed")


if __name__ == "__main__":
    main()
