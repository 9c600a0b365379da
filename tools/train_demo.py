"""Train the built-in demo model from scratch.

    python tools/train_demo.py

The text comes from `tools/demo_corpus`, and the result goes to `moeserve/assets/demo`. It takes
about an hour on one CPU core with bf16 instructions. `--resume` continues from the last checkpoint.
A new model has no MTP head: `tools/train_demo_mtp.py` trains one.
"""

import argparse
import ctypes
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# Put large tensors on huge pages. torch reads this once, so it must come first.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo_corpus import Document, documents
from tools.demo_export import END, SPECIAL, TEXT_END, export, load, tensors
from tools.demo_model import DemoModel, Groups, Muon, Shape

ASSETS = Path(__file__).parents[1] / "moeserve" / "assets" / "demo"
Encoded = tuple[np.ndarray, np.ndarray]
IGNORE = -100


def keep_memory() -> None:
    """Make malloc keep freed memory: fresh pages for large tensors cost a third of the time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold = -1
        m_top_pad = -2
        m_mmap_max = -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 2**28)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2700)
    parser.add_argument("--docs", type=int, default=90_000, help="documents in the corpus")
    parser.add_argument("--batch", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument("--aux", type=float, default=0.01, help="weight of the balancing loss")
    parser.add_argument(
        "--start", type=Path, help="folder of a model to go on from, whose tokenizer stays"
    )
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moeserve-demo")
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def train_tokenizer(seed: int, vocab: int) -> Tokenizer:
    """Train byte-level BPE, which can encode any text, on a sample of the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (turn.text for doc in documents(seed, 15_000) for turn in doc.turns)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, doc: Document, limit: int) -> Encoded:
    """Return a document's token ids and labels; only the model's own messages have labels."""
    pieces: list[tuple[str, bool]] = []
    for turn in doc.turns:
        if turn.role == "text":
            pieces.append((turn.text + TEXT_END, True))
            continue
        said = turn.role == "assistant"
        pieces.append((f"{SPECIAL[1]}{turn.role}\n", False))
        pieces += [(turn.text + END, said), ("\n", False)]
    ids: list[int] = []
    labels: list[int] = []
    for text, learn in pieces:
        part = tokenizer.encode(text).ids
        ids += part
        labels += part if learn else [IGNORE] * len(part)
    return np.array(ids[:limit], np.int16), np.array(labels[:limit], np.int16)


def batch_at(docs: list[Encoded], picked: list[int]) -> tuple[Tensor, Tensor, Groups]:
    """Return flat ids and next-token labels of the picked documents.

    Documents of similar length share a group, so that few tokens are padding.
    """
    chosen = sorted((docs[i] for i in picked), key=lambda d: len(d[0]), reverse=True)
    groups: Groups = []
    all_ids = []
    all_labels = []
    at = 0
    while at < len(chosen):
        longest = len(chosen[at][0]) - 1
        rows = 1
        while at + rows < len(chosen) and len(chosen[at + rows][0]) - 1 > 0.88 * longest:
            rows += 1
        ids = np.zeros((rows, longest), np.int64)
        labels = np.full((rows, longest), IGNORE, np.int64)
        for row, (tokens, targets) in enumerate(chosen[at : at + rows]):
            ids[row, : len(tokens) - 1] = tokens[:-1]
            labels[row, : len(tokens) - 1] = targets[1:]
        groups.append((rows, longest))
        all_ids.append(ids.ravel())
        all_labels.append(labels.ravel())
        at += rows
    ids_t = torch.from_numpy(np.concatenate(all_ids))
    return ids_t, torch.from_numpy(np.concatenate(all_labels)), groups


def order(docs: list[Encoded], tokens: int, seed: int) -> Iterator[list[int]]:
    """Yield endless batches of document numbers; each pass has a new order."""
    rng = random.Random(seed)
    numbers = list(range(len(docs)))
    while True:
        rng.shuffle(numbers)
        picked: list[int] = []
        total = 0
        for number in numbers:
            picked.append(number)
            total += len(docs[number][0])
            if total >= tokens:
                yield picked
                picked = []
                total = 0


def optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and Adam for embedding, router and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        plain = p.ndim < 2 or name == "embed" or name.endswith("router")
        (others if plain else matrices).append(p)
    return [Muon(matrices, lr), torch.optim.AdamW(others, 0.15 * lr, (0.9, 0.95), weight_decay=0.0)]


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate.

    It warms up, stays, decays slowly, and from two thirds of the steps on falls to zero.
    """
    warm = min(60, steps // 10 + 1)
    slow_end = 35 * steps / 27
    slow = (slow_end - step) / (0.7 * slow_end)
    steep = (steps - step) / (0.46 * steps)
    return min((step + 1) / warm, 1.0, slow, steep)


def evaluate(model: DemoModel, docs: list[Encoded]) -> float:
    with torch.no_grad():
        parts = [docs[i : i + 32] for i in range(0, len(docs), 32)]
        losses = [model.loss(*batch_at(part, list(range(len(part)))))[0] for part in parts]
    return float(torch.stack(losses).mean())


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.shape = Shape()
        torch.manual_seed(args.seed)
        if args.start is None:
            self.tokenizer = train_tokenizer(args.seed, self.shape.vocab)
        else:
            self.tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
        limit = 1536
        corpus = documents(args.seed, args.docs)
        self.docs = [encode(self.tokenizer, doc, limit) for doc in corpus]
        held_out = documents(args.seed + 1_000_000, 256)
        self.held_out = [encode(self.tokenizer, doc, limit) for doc in held_out]
        self.model = DemoModel(self.shape)
        if args.start is not None:
            load(args.start, tensors(self.model))
        self.optimizers = optimizers(self.model, args.lr)
        self.step = 0
        self.seen = 0
        self.peak = [group["lr"] for opt in self.optimizers for group in opt.param_groups]
        self.checkpoint = args.work / "checkpoint.pt"

    def save(self) -> None:
        self.args.work.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "step": self.step,
            "seen": self.seen,
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)
        export(self.args.work / "export", self.model, self.tokenizer)

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for opt, saved in zip(self.optimizers, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        self.step = state["step"]
        self.seen = state["seen"]

    def one_step(self, picked: list[int]) -> tuple[float, float]:
        scale = rate(self.step, self.args.steps)
        groups = [group for opt in self.optimizers for group in opt.param_groups]
        for group, peak in zip(groups, self.peak, strict=True):
            group["lr"] = peak * scale
        ids, labels, rows = batch_at(self.docs, picked)
        loss, balance = self.model.loss(ids, labels, rows)
        (loss + self.args.aux * balance).backward()
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        self.step += 1
        self.seen += sum(len(self.docs[i][0]) for i in picked)
        return loss.item(), balance.item()

    def run(self) -> None:
        start = saved = time.time()
        losses: list[float] = []
        for number, picked in enumerate(order(self.docs, self.args.batch, self.args.seed)):
            if number < self.step:
                continue
            if self.step >= self.args.steps:
                break
            loss, balance = self.one_step(picked)
            losses.append(loss)
            if self.step % 20 == 0:
                mean = sum(losses) / len(losses)
                losses = []
                spent = time.time() - start
                print(
                    f"step {self.step}/{self.args.steps} loss {mean:.4f} balance {balance:.3f}"
                    f" tokens {self.seen / 1e6:.2f}M time {spent:.0f}s",
                    flush=True,
                )
            if time.time() - saved > self.args.save_every:
                saved = time.time()
                self.save()
                print(f"saved; held-out loss {evaluate(self.model, self.held_out):.4f}", flush=True)


def main() -> None:
    args = arguments()
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    start = time.time()
    trainer = Trainer(args)
    tokens = sum(len(ids) for ids, _ in trainer.docs)
    count = sum(p.numel() for p in trainer.model.parameters())
    spent = time.time() - start
    print(f"{tokens / 1e6:.1f}M tokens, {count / 1e6:.2f}M parameters, {spent:.0f}s", flush=True)
    if args.resume and trainer.checkpoint.exists():
        trainer.load()
    trainer.run()
    trainer.save()
    export(args.out, trainer.model, trainer.tokenizer)
    result = {"held_out_loss": evaluate(trainer.model, trainer.held_out), "tokens": trainer.seen}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
