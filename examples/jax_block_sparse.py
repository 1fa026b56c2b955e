"""Train a small transformer in JAX with block-sparse attention and block-sparse weights.

    pip install 'blackwell-sparsek[jax]' flax optax
    python examples/jax_block_sparse.py --steps 200

The task is to copy: the second half of each sequence repeats the first, so a token has to look
back half a sequence. Attention sees a local window and, through a block mask, the blocks at that
distance, about a third of the causal square. The layers are Flax (nnx) modules; torch is not used.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import blackwell_sparsek.jax as bsk_jax
import jax

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCK = 16, 128, 64, 4, 8


def copy_mask() -> bsk_jax.BlockMask:
    """Blocks of the diagonal, the one before it, and those half a sequence back."""
    blocks = LENGTH // BLOCK
    distance = np.arange(blocks)[:, None] - np.arange(blocks)
    half = blocks // 2
    return bsk_jax.BlockMask.from_dense(np.isin(distance, (0, 1, half - 1, half)), BLOCK)


class BlockSparseAttention(nnx.Module):
    """Causal self-attention over the blocks of a mask."""

    def __init__(self, mask: bsk_jax.BlockMask, *, rngs: nnx.Rngs):
        # data of the module, but not a parameter: the optimiser leaves it alone
        self.mask = nnx.data(mask)
        self.project_in = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.project_out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, WIDTH] to the same."""
        batch, length, _ = x.shape
        heads = self.project_in(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = jnp.moveaxis(heads, (2, 3), (0, 2))
        out = bsk_jax.attention(q, k, v, causal=True, block_mask=self.mask)
        return self.project_out(out.swapaxes(1, 2).reshape(batch, length, WIDTH))


class BSRDense(nnx.Module):
    """A linear layer without bias whose weight is stored in blocks of a fixed pattern."""

    def __init__(self, inputs: int, outputs: int, density: float, *, rngs: nnx.Rngs):
        grid = (inputs // BLOCK, outputs // BLOCK)
        keep = np.array(jax.random.bernoulli(rngs.params(), density, grid))
        keep[np.arange(max(grid)) % grid[0], np.arange(max(grid)) % grid[1]] = True
        scale = (inputs * keep.mean()) ** -0.5
        dense = scale * jax.random.normal(rngs.params(), (inputs, outputs))
        weight = bsk_jax.BSRMatrix.from_mask(dense, keep, (BLOCK, BLOCK))
        self.data = nnx.Param(weight.data)
        self.indices, self.indptr, self.shape = weight.indices, weight.indptr, weight.shape

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] to [..., outputs]."""
        return x @ bsk_jax.BSRMatrix(self.data[...], self.indices, self.indptr, self.shape)


class Layer(nnx.Module):
    """Attention and an MLP, each after a normalisation and with a residual."""

    def __init__(self, mask: bsk_jax.BlockMask, *, rngs: nnx.Rngs):
        self.norm_attention = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = BlockSparseAttention(mask, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = BSRDense(WIDTH, 4 * WIDTH, 0.5, rngs=rngs)
        self.down = BSRDense(4 * WIDTH, WIDTH, 0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, S, WIDTH] to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))


class Model(nnx.Module):
    """Token and position embeddings, two layers, logits of the next token."""

    def __init__(self, *, rngs: nnx.Rngs):
        mask = copy_mask()
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(mask, rngs=rngs) for _ in range(2)])
        self.logits = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[B, LENGTH] to logits [B, LENGTH, VOCABULARY]."""
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)


def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the tokens that can be known: those of the second half."""
    logits = model(tokens[:, :-1])[:, LENGTH // 2 - 1 :]
    targets = tokens[:, LENGTH // 2 : LENGTH]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets).mean()


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step of the optimiser; returns the loss before it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def batch_of(rng: np.random.Generator, size: int) -> jax.Array:
    """Sequences of LENGTH + 1 tokens whose second half repeats the first."""
    first = rng.integers(VOCABULARY, size=(size, LENGTH // 2), dtype=np.int32)
    return jnp.asarray(np.concatenate([first, first, first[:, :1]], axis=1))


def train(steps: int, seed: int = 0) -> list[float]:
    """Losses of the steps."""
    model = Model(rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    rng = np.random.default_rng(seed)
    losses = []
    for step in range(steps):
        losses.append(float(train_step(model, optimizer, batch_of(rng, 16))))
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    train(parser.parse_args().steps)


if __name__ == "__main__":
    main()
