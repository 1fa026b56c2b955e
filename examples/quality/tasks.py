"""The tasks: to look up pairs, to predict a book, and to find a number in it."""

import pathlib

import torch
import torch.nn.functional as F

TEXT = pathlib.Path(__file__).with_name("alice.txt")
# Sequences of the trained models, in tokens.
LENGTH = 256

# Recall: tokens that encode a key and a value, among noise; then keys alone, which the model
# answers with the token that had that key.
KEYS, VALUES, NOISE, PAIRS, ASKED = 16, 8, 32, 8, 32
ASK = KEYS * VALUES
NOTHING = ASK + KEYS
RECALL_VOCABULARY = NOTHING + NOISE


def recall_batch(generator, batch, read=LENGTH - ASKED):
    """Tokens `[batch, read + ASKED]` and the answers `[batch, ASKED]` to the last ones."""
    shape = (batch, read + ASKED)
    tokens = torch.randint(NOTHING, NOTHING + NOISE, shape, generator=generator)
    places = torch.rand(batch, read, generator=generator).argsort(-1)[:, :PAIRS]
    keys = torch.rand(batch, KEYS, generator=generator).argsort(-1)[:, :PAIRS]
    pairs = keys * VALUES + torch.randint(VALUES, (batch, PAIRS), generator=generator)
    tokens.scatter_(1, places, pairs)
    asked = torch.randint(PAIRS, (batch, ASKED), generator=generator)
    tokens[:, read:] = ASK + keys.gather(1, asked)
    return tokens, pairs.gather(1, asked)


def recall_loss(logits_of, generator, batch, read=LENGTH - ASKED):
    """The loss of the answers of one batch."""
    tokens, answers = recall_batch(generator, batch, read)
    logits = logits_of(tokens)[:, read:]
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten())


def recall_accuracy(logits_of, batches=4, batch=16):
    """The share of right answers in sequences that no training run has seen."""
    generator = torch.Generator().manual_seed(1000)
    right = []
    for _ in range(batches):
        tokens, answers = recall_batch(generator, batch)
        right.append((logits_of(tokens)[:, -ASKED:].argmax(-1) == answers).float().mean())
    return torch.stack(right).mean().item()


# Text: the book as bytes; the last tenth is held out.


def book():
    """The text as one int64 tensor of bytes: what is trained on, and what is held out."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    held_out = len(data) // 10
    return data[:-held_out], data[-held_out:]


def text_loss(logits_of, data, generator, batch, length=LENGTH):
    """The loss over sequences that begin anywhere."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=generator)
    tokens = data[starts + torch.arange(length + 1)]
    logits = logits_of(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def perplexity(logits_of, data, length=LENGTH, batch=16, most=64):
    """Perplexity of the second halves of sequences, so that every token has a long context.

    Sequences begin half a length apart; `most` of them, spread over the data, are scored.
    """
    starts = torch.arange(0, len(data) - length, length // 2)
    if not len(starts):
        raise SystemExit(f"the text has {len(data)} tokens; give a --length below that")
    starts = starts[:: -(-len(starts) // most)]
    losses = []
    for group in starts.split(batch):
        tokens = data[group[:, None] + torch.arange(length + 1)]
        logits = logits_of(tokens[:, :-1])[:, length // 2 :]
        targets = tokens[:, 1:][:, length // 2 :]
        losses.append(F.cross_entropy(logits.mT.float(), targets, reduction="none"))
    return torch.cat(losses).mean().exp().item()


# Needle: a number that was told somewhere in the text, asked for at its end.

TOLD = " The pass key is {}. Remember it. "
ASKED_FOR = " What is the pass key? The pass key is "


def needle_accuracy(logits_of, encode, data, length, depths=(0.1, 0.3, 0.5, 0.7, 0.9), tries=2):
    """The share of numbers of which every token is the most probable one after those before it.

    `encode` makes a list of tokens from text; `data` holds those of the text around the number.
    """
    generator = torch.Generator().manual_seed(2000)
    right = []
    for depth in depths:
        for _ in range(tries):
            number = str(int(torch.randint(10000, 100000, (), generator=generator)))
            told, asked = encode(TOLD.format(number)), encode(ASKED_FOR)
            answer = encode(ASKED_FOR + number)[len(asked) :]
            room = length - len(told) - len(asked) - len(answer)
            if not 0 < room <= len(data):
                raise SystemExit(f"--length {length} leaves {room} of {len(data)} tokens of text")
            before = int(depth * room)
            start = int(torch.randint(len(data) - room + 1, (), generator=generator))
            text = data[start : start + room].tolist()
            tokens = torch.tensor([*text[:before], *told, *text[before:], *asked, *answer])
            found = logits_of(tokens[None])[0].argmax(-1)[-len(answer) - 1 : -1]
            right.append(found.tolist() == answer)
    return sum(right) / len(right)
