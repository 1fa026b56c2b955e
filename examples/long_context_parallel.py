"""Train a small transformer on sequences that are split over several processes.

Each process holds some tiles of every sequence; only attention exchanges data between them. The
plan gives all processes the same number of tokens and the same attention work. FSDP2 shards the
parameters over the same processes and averages the gradients.

    torchrun --nproc-per-node 2 examples/long_context_parallel.py
    torchrun --nproc-per-node 8 examples/long_context_parallel.py --length 131072 --window 4096
    torchrun --nproc-per-node 2 examples/long_context_parallel.py --llama

With `--llama`, the model is a Llama of transformers, whose sequences are split in the same way.

On machines with GPUs the same script runs with NCCL, one GPU per process. It prints the losses,
which do not depend on the number of processes, and what each process sends.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import blackwell_sparsek as bsk
from blackwell_sparsek.distributed import Band, Shapes, balance, count_bytes, traffic

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 64, 4, 2, 16


def rotated(x, positions):
    """Rotary embedding of `x` [B, H, S, D] at `positions` [S]."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None] * speed
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """Attention and an MLP, each with a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, attend, positions):
        """`attend(q, k, v)` is the attention; `positions` are those of the tokens of `x`."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        y = attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A language model of two blocks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, attend, positions):
        """Logits of the next tokens."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, attend, positions)
        return self.head(x)


def llama(plan, mesh, options):
    """A Llama of the same sizes, or a Mistral if there is a window, and how to call it."""
    import transformers

    from blackwell_sparsek.integrations.huggingface import register_context_parallel

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "tie_word_embeddings": False,
        "max_position_embeddings": options.length,
    }  # fmt: skip
    if options.window:
        config = transformers.MistralConfig(**sizes, sliding_window=options.window)
        model = transformers.MistralForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    name = register_context_parallel(plan, mesh=mesh, method=options.method)
    model.set_attn_implementation(name)

    def logits(ids, positions):
        return model(ids, position_ids=positions[None], use_cache=False).logits

    return model, model.model.layers, logits


def small(plan, mesh, options):
    """The model above, and how to call it."""
    window = options.window or None
    model = Model()

    def attend(q, k, v):
        return bsk.distributed.attention(
            q, k, v, mesh=mesh, plan=plan, method=options.method, causal=True, window=window
        )

    def logits(ids, positions):
        return model(ids, attend, positions)

    return model, model.blocks, logits


def batch(step, length, device):
    """Token n is followed by 5 n + 3, except for a few surprises; ids and the next ids."""
    generator = torch.Generator().manual_seed(step)
    surprise = torch.rand(length + 1, generator=generator) < 0.05
    random = torch.randint(0, VOCABULARY, (length + 1,), generator=generator).tolist()
    ids = random[:1]
    for at in range(1, length + 1):
        ids.append(random[at] if surprise[at] else (5 * ids[-1] + 3) % VOCABULARY)
    ids = torch.tensor([ids], device=device)
    return ids[:, :-1], ids[:, 1:]


def train(options, mesh, device):
    """Train, and print what the first process sees."""
    window = options.window or None
    band = Band(None if window is None else window - 1, 0)
    plan = balance(band, mesh.size(), seq_length=options.length, tile=options.tile)
    positions = plan.positions(mesh.get_local_rank(), device=device)

    def say(text):
        if mesh.get_local_rank() == 0:
            print(text, flush=True)

    say(f"{mesh.size()} processes with {list(plan.lengths)} tokens, imbalance {plan.imbalance:.3f}")
    shapes = Shapes(1, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32)
    for method in ("allgather", "needed", "ring", "ulysses"):
        sent = max(traffic(plan, method, shapes, causal=True, window=window).forward)
        say(f"{method:10} sends {sent:,} bytes per layer and forward pass")

    torch.manual_seed(0)
    model, blocks, logits_of = (llama if options.llama else small)(plan, mesh, options)
    model.to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with count_bytes() as counter:
        for step in range(options.steps):
            ids, targets = (
                plan.shard(x, rank=mesh.get_local_rank())
                for x in batch(step, options.length, device)
            )
            logits = logits_of(ids, positions)
            share = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            # FSDP2 averages over processes, and the mean is over the tokens of all of them
            (share * mesh.size() / options.length).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = share.detach() / options.length
            dist.all_reduce(loss, group=mesh.get_group())
            if step % 10 == 0 or step == options.steps - 1:
                say(f"step {step:3} loss {loss.item():.5f}")
    say(f"attention sent {counter.total:,} bytes from the first process")


def main():
    """Parse the options and join the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--length", type=int, default=1000, help="tokens per sequence (default 1000)"
    )
    parser.add_argument(
        "--window", type=int, default=0, help="keys that each token sees (default 0: all)"
    )
    parser.add_argument(
        "--method", default="auto", help="method of bsk.distributed.attention (default auto)"
    )
    parser.add_argument(
        "--tile", type=int, default=16, help="tokens per tile of the plan (default 16)"
    )
    parser.add_argument("--llama", action="store_true", help="train a Llama of transformers")
    parser.add_argument("--steps", type=int, default=21, help="training steps (default 21)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 " + parser.prog)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        train(options, dist.init_device_mesh(kind, (dist.get_world_size(),)), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
