# ruff: noqa: T201  (its tables are what it is for)
"""Attention over packs, forward and backward, in one run: `python bench_attention.py`.

Every span by itself against one masked softmax over the whole pack, and completions behind one
copy of their prompt against as many full sequences. Ratios are of times measured side by side.
"""

import argparse
import functools
from collections.abc import Callable

import numpy as np
import torch
from _baselines import fastest_s
from burnish_packing.layout import PackLayout, pack_layout
from burnish_packing.torch import attention_forward, packed_attention
from torch import Tensor

QUERY_HEADS, KEY_HEADS, HEAD_DIM = 8, 2, 64
SHARED_PREFIXES = (  # prompt tokens, completions, shortest and longest completion
    (512, 8, 64, 256),
    (1024, 8, 128, 512),
    (1024, 16, 128, 512),
)


def packs(sizes: list[int], repeats: int) -> None:
    print("\n### Packed attention, every span by itself, against a block-diagonal mask\n")
    print(f"{QUERY_HEADS} query and {KEY_HEADS} key heads of {HEAD_DIM}, 64 to 512 tokens each.\n")
    print("| sequences | tokens | window | scores: squares over all | per span | masked | ratio |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for num_sequences in sizes:
        lengths = np.random.default_rng(0).integers(64, 513, num_sequences)
        layout = pack_layout(lengths)
        for window in (None, 128):
            per_span_s, masked_s = (
                fastest_s(attention_call(layout, window, backend), repeats)
                for backend in ("per_span", "block_diagonal")
            )
            print(
                f"| {num_sequences} | {layout.num_positions:,} | {window or 'none'} "
                f"| {(lengths**2).sum() / lengths.sum() ** 2:.1%} | {per_span_s * 1e3:.0f} ms "
                f"| {masked_s * 1e3:.0f} ms | {masked_s / per_span_s:.1f}x |",
                flush=True,
            )


def short_spans(repeats: int) -> None:
    print("\n### Many short spans: what Python costs\n")
    print("| spans | tokens each | per span | time per span |")
    print("|---:|---|---:|---:|")
    rng = np.random.default_rng(0)
    for name, lengths in (
        ("1", np.ones(1024, np.int64)),
        ("16", np.full(512, 16)),
        ("1 to 64", rng.integers(1, 65, 512)),
    ):
        took_s = fastest_s(attention_call(pack_layout(lengths), None, "per_span"), repeats)
        print(
            f"| {len(lengths)} | {name} | {took_s * 1e3:.1f} ms "
            f"| {took_s / len(lengths) * 1e6:.0f} us |",
            flush=True,
        )


def shared_prefixes(repeats: int, with_model: bool) -> None:
    print("\n### Completions behind one prompt against full sequences\n")
    print("| prompt | completions | tokens | of full | attention | its ratio | Llama | its ratio |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    step = llama_step() if with_model else None
    for prompt, group, shortest, longest in SHARED_PREFIXES:
        own = np.random.default_rng(0).integers(shortest, longest + 1, group)
        full = pack_layout(prompt + own)
        shared = pack_layout(
            prompt + own, prefix_ids=np.zeros(group, np.int64), prefix_lengths=[prompt] * group
        )
        cells = []
        for call in (functools.partial(attention_call, window=None, backend="per_span"), step):
            if call is None:
                cells += ["", ""]
                continue
            shared_s, full_s = (fastest_s(call(layout), repeats) for layout in (shared, full))
            cells += [f"{shared_s * 1e3:.0f} ms", f"{full_s / shared_s:.1f}x"]
        print(
            f"| {prompt} | {group} of {shortest} to {longest} | {shared.num_positions:,} "
            f"| {shared.num_positions / full.num_positions:.0%} | " + " | ".join(cells) + " |",
            flush=True,
        )


def attention_call(layout: PackLayout, window: int | None, backend: str) -> Callable[[], None]:
    """Forward and backward of one attention over the pack, float32."""
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(1, number, layout.num_positions, HEAD_DIM, generator=generator)
        for number in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    ]
    heads = [x.requires_grad_() for x in heads]

    def call() -> None:
        output = packed_attention(*heads, layout.spans, sliding_window=window, backend=backend)
        torch.autograd.grad(output, heads, torch.ones_like(output))

    return call


def llama_step() -> Callable[[PackLayout], Callable[[], None]]:
    """A maker of calls: forward and backward of a small Llama over a pack, float32."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("burnish_packing_bench", attention_forward)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=QUERY_HEADS * HEAD_DIM,
            intermediate_size=1536,
            num_hidden_layers=2,
            num_attention_heads=QUERY_HEADS,
            num_key_value_heads=KEY_HEADS,
            attn_implementation="burnish_packing_bench",
        )
    )

    def of(layout: PackLayout) -> Callable[[], None]:
        token_ids = torch.arange(layout.num_positions)[None] % 2048
        position_ids = torch.from_numpy(layout.position_ids)[None]

        def call() -> None:
            model.zero_grad()
            logits: Tensor = model(
                token_ids, position_ids=position_ids, spans=layout.spans, use_cache=False
            ).logits
            logits.logsumexp(-1).sum().backward()

        return call

    return of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch.set_num_threads")
    parser.add_argument("--no-model", action="store_true", help="leave the Llama out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    packs(arguments.sizes, arguments.repeats)
    short_spans(arguments.repeats)
    shared_prefixes(arguments.repeats, not arguments.no_model)


if __name__ == "__main__":
    main()
