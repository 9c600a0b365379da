"""A short benchmark of real engines, from which `measured.py` fits its terms: batches that decode, and single prompts."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import asdict, replace
from statistics import median

from moeserve.config import Config, Limits
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.open import open_front_end
from moeserve.frontend.stats import FrontStats
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import StepRecord
from moeserve.models.hf_config import read_model_spec
from moeserve.plan.measured import Calibration, Sample, fit
from moeserve.sampling import SamplingParams

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # requests of each engine
DECODED = 48  # tokens of each answer
PROMPTS = (16, 32, 64, 128, 256, 512)
ROUNDS = 2


class Records(FrontStats):
    """Keeps what engines say of their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        """Notes a step."""
        super().step(record)
        self.seen.append(record)


async def measure(config: Config, most_batch: int = 64) -> Calibration:
    """Runs the engines of this config for less than a minute, where a step takes milliseconds. most_batch: requests of
    an engine at most."""
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        model=replace(config.model, skip_tokenizer_init=True),
        parallel=replace(config.parallel, rebalance="off"),
    )
    spec, dp = read_model_spec(resolve_model_dir(config.model.model)), config.parallel.dp
    async with open_front_end(config, child=True) as front:
        ready = await front.wait_ready()
        records = front.stats = Records()
        chunk = config.scheduler.max_num_batched_tokens or max(512, config.scheduler.max_num_seqs + 256)
        limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs, max_num_batched_tokens=chunk, prefill_chunk=chunk,
            max_model_len=ready.max_model_len, block_size=ready.block_size, num_blocks=ready.num_blocks // dp,
            depth=config.scheduler.depth, enable_prefix_caching=False,
            watermark_blocks=int(config.scheduler.watermark * ready.num_blocks / dp),
        )  # fmt: skip
        unfitted = Calibration(
            model=spec.architecture, dp=dp, tp=config.parallel.tp, num_experts=spec.num_experts,
            top_k=spec.experts_per_token, limits=asdict(limits), terms={}, gap=(0.0, 0.0), delay_s=0.0, num_samples=0,
            error=0.0,
        )  # fmt: skip
        longest = ready.max_model_len - DECODED
        await _answers(front, 4, 32, 8)
        samples: list[Sample] = []
        delays: list[float] = []
        for _ in range(ROUNDS):
            for batch in (n for n in BATCHES if n <= min(most_batch, config.scheduler.max_num_seqs)):
                for prompt in (32, min(512, longest)):
                    records.seen.clear()
                    await _answers(front, batch * dp, prompt, DECODED)
                    samples += _decoding(records.seen, batch, limits, dp)
            for prompt in (n for n in PROMPTS if n <= min(chunk, longest)):
                records.seen.clear()
                first_s = await _answers(front, 1, prompt, 2)
                samples += [
                    Sample(r.num_tokens, 1, prompt, prompt * (prompt + 1) / 2, prompt, r.device_us / 1e6)
                    for r in records.seen
                    if r.num_tokens == prompt
                ]
                delays += [first_s - r.device_us / 1e6 for r in records.seen if r.num_tokens == prompt]
    fitted = fit(samples, unfitted)
    delay_s = max(0.0, median(delays) - fitted.gap[0]) if delays else 0.0
    return Calibration(**{**{f: getattr(fitted, f) for f in Calibration.__struct_fields__}, "delay_s": delay_s})


def _decoding(records: list[StepRecord], batch: int, limits: Limits, dp: int) -> list[Sample]:
    """Returns the steps in which each request had one token, with the step behind each of them."""
    samples = []
    for rank in range(dp):
        steps = [r for r in records if r.dp_rank == rank]
        for one, two, three in zip(steps, steps[1:], steps[2:], strict=False):
            if not all(r.num_tokens == r.num_requests == batch for r in (one, two, three)):
                continue
            used = one.num_blocks - 1 - one.num_free_blocks
            reads = limits.block_size * (used - batch / 2)
            # A plan is made when the step before the one before it is over: these two are one step apart.
            host_s = three.at_s - two.at_s - one.device_us / 1e6
            samples.append(Sample(batch, batch, reads, reads, batch * dp, one.device_us / 1e6, host_s))
    return samples


async def _answers(front: FrontEnd, number: int, num_prompt: int, num_tokens: int) -> float:
    """Asks for so many answers at once; returns the seconds until the first token of all."""
    rng = random.Random(num_prompt)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    begin_s, first_s = time.monotonic(), 0.0

    async def read() -> None:
        """Reads one answer."""
        nonlocal first_s
        prompt = [rng.randrange(5, 200) for _ in range(num_prompt)]
        async with await front.generate(prompt, params) as deltas:
            async for _ in deltas:
                first_s = first_s or time.monotonic() - begin_s

    async with asyncio.TaskGroup() as group:
        for _ in range(number):
            group.create_task(read())
    return first_s
