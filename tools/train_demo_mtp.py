"""Train an MTP head for the built-in demo model.

    python tools/train_demo_mtp.py

The model stays unchanged. The head learns the model's own distributions, half of the time on
documents of `tools/demo_corpus` and half on answers that the model generates in their place. It
takes about 20 minutes on one CPU core. `--resume` continues from the last checkpoint; `--steps 0`
only measures the head in the folder.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))

from moeserve import LLM, SamplingParams
from tools.demo_corpus import Document, documents
from tools.demo_export import SPECIAL, export_mtp, load, mtp_tensors, tensors
from tools.demo_model import DemoModel, Shape
from tools.demo_mtp import Distillation, MTPHead, guesses, matches, tokens_a_step
from tools.train_demo import (
    ASSETS,
    IGNORE,
    Encoded,
    batch_at,
    encode,
    keep_memory,
    optimizers,
    order,
    rate,
)

LIMIT = 1536
STEPS = 3  # tokens that the head drafts in a row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, default=ASSETS, help="folder of the model, which gets the head"
    )
    parser.add_argument("--start", type=Path, help="folder of a model with a head to go on from")
    parser.add_argument("--steps", type=int, default=620)
    parser.add_argument("--docs", type=int, default=6_000, help="documents of the corpus")
    parser.add_argument("--sampled", type=int, default=3_000, help="documents that the model says")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02, help="peak learning rate of Muon")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "moeserve-demo-mtp"
    )
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def prompt(tokenizer: Tokenizer, doc: Document) -> list[int]:
    """Return the document up to its last answer; of plain text, the first words."""
    if doc.turns[-1].role == "text":
        return list(tokenizer.encode(doc.turns[-1].text).ids[:8])
    before, _ = encode(tokenizer, replace(doc, turns=doc.turns[:-1]), LIMIT)
    return [*before.tolist(), *tokenizer.encode(f"{SPECIAL[1]}assistant\n").ids]


def said(
    args: argparse.Namespace, tokenizer: Tokenizer, docs: Sequence[Document], temperature: float
) -> list[Encoded]:
    """Replace the last answer of each document by the model's own.

    Only these answers have labels.
    """
    prompts = [prompt(tokenizer, doc) for doc in docs]
    most = LIMIT - max(map(len, prompts))
    asked = [
        SamplingParams(max_tokens=most, temperature=temperature, seed=args.seed + i)
        for i in range(len(docs))
    ]
    settings = {"threads": args.threads, "max_model_len": LIMIT, "max_num_seqs": 128}
    with LLM(str(args.model), **settings) as llm:
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    found = []
    for before, answer in zip(prompts, answers, strict=True):
        new = list(answer.outputs[0].token_ids)
        labels = [IGNORE] * len(before) + new
        found.append((np.array(before + new, np.int16), np.array(labels, np.int16)))
    return found


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
        self.model = DemoModel(Shape(), torch.float32).requires_grad_(False)
        load(args.model, tensors(self.model))
        self.head = MTPHead(self.model.shape)
        if args.start is None:
            self.head.norm.load_state_dict(self.model.norm.state_dict())
        else:
            load(args.start, mtp_tensors(self.head))
        self.optimizers = optimizers(self.head, args.lr)
        self.peak = [group["lr"] for opt in self.optimizers for group in opt.param_groups]
        self.step = 0
        self.checkpoint = args.work / "checkpoint.pt"

    def batches(self) -> Iterator[tuple[list[Encoded], list[int]]]:
        """By turns of the corpus and of what the model says."""
        args = self.args
        corpus = [encode(self.tokenizer, doc, LIMIT) for doc in documents(args.seed, args.docs)]
        sampled = said(
            args, self.tokenizer, list(documents(args.seed + 1, args.sampled)), args.temperature
        )
        print(
            *(
                f"{sum(len(ids) for ids, _ in docs) / 1e6:.2f}M tokens"
                for docs in (corpus, sampled)
            ),
            flush=True,
        )
        for ours, theirs in zip(
            *(order(docs, args.batch, args.seed) for docs in (corpus, sampled)), strict=True
        ):
            yield corpus, ours
            yield sampled, theirs

    def save(self) -> None:
        self.args.work.mkdir(parents=True, exist_ok=True)
        optimizer_states = [opt.state_dict() for opt in self.optimizers]
        part = self.checkpoint.with_suffix(".part")
        torch.save(
            {"head": self.head.state_dict(), "optimizers": optimizer_states, "step": self.step},
            part,
        )
        part.replace(self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.head.load_state_dict(state["head"])
        for opt, saved in zip(self.optimizers, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        self.step = state["step"]

    def one_step(self, docs: list[Encoded], picked: list[int]) -> list[float]:
        """The loss of each step of the head."""
        scale = rate(self.step, self.args.steps)
        groups = [group for opt in self.optimizers for group in opt.param_groups]
        for group, peak in zip(groups, self.peak, strict=True):
            group["lr"] = peak * scale
        made, hidden, _ = guesses(self.model, self.head, *batch_at(docs, picked), STEPS)
        losses = Distillation.apply(made, hidden, self.model.embed, self.args.temperature)  # type: ignore[no-untyped-call]
        losses.sum().backward()
        for opt in self.optimizers:
            opt.step()
            opt.zero_grad(set_to_none=True)
        self.step += 1
        return [loss.item() for loss in losses.detach()]

    def run(self) -> None:
        start = saved = time.time()
        recent: list[list[float]] = []
        for number, (docs, picked) in enumerate(self.batches()):
            if number < self.step:
                continue
            if self.step >= self.args.steps:
                break
            recent.append(self.one_step(docs, picked))
            if self.step % 20 == 0:
                means = " ".join(
                    f"{sum(losses) / len(recent):.4f}" for losses in zip(*recent, strict=True)
                )
                print(
                    f"step {self.step}/{self.args.steps} losses {means} time "
                    f"{time.time() - start:.0f}s",
                    flush=True,
                )
                recent = []
            if time.time() - saved > self.args.save_every:
                saved = time.time()
                self.save()

    def measure(self, kind: str, temperature: float, count: int = 100) -> dict[str, list[float]]:
        """Over what the model says: the share of right guesses of step 1, 2, ..., and tokens a step
        with so many.
        """
        docs = [
            doc for doc in documents(self.args.seed + 1_000_000, 10 * count) if doc.kind == kind
        ][:count]
        answers = said(self.args, self.tokenizer, docs, temperature)
        noise = torch.Generator().manual_seed(self.args.seed)
        with torch.no_grad():
            made, hidden, labels = guesses(
                self.model, self.head, *batch_at(answers, list(range(len(answers)))), STEPS
            )
            found = matches(made, hidden, labels, self.model.embed, max(temperature, 1e-5), noise)
        tokens = [tokens_a_step(found, k + 1) for k in range(STEPS)]
        return {
            "right": [round(share.item(), 3) for share in found.float().mean(1)],
            "tokens": [round(t, 2) for t in tokens],
        }


def main() -> None:
    args = arguments()
    keep_memory()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    trainer = Trainer(args)
    if args.resume and trainer.checkpoint.exists():
        trainer.load()
    if args.steps:
        trainer.run()
        trainer.save()
        export_mtp(args.model, trainer.head)
    load(args.model, mtp_tensors(trainer.head))
    for kind in ("story", "fact", "tool"):
        for temperature in (0.8, 0.0):
            print(
                json.dumps(
                    {"kind": kind, "temperature": temperature} | trainer.measure(kind, temperature)
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
