"""A short benchmark of real engines, from which `calibration.py` fits its terms: some streams, each
a request after the other, of all lengths mixed; and single prompts."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median

import msgspec

from moeserve.config import Config, Limits
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.open import open_front_end
from moeserve.frontend.stats import FrontStats
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import StepRecord
from moeserve.models.hf_config import read_model_spec
from moeserve.plan.calibration import GAPS, Calibration, StepSample, fit
from moeserve.sampling import SamplingParams

STREAMS = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    128,
    256,
)  # of each engine, and of all where that is fewer than there are
# for each number of streams, at least; they are broken off after twice as much
STREAM_S = 2.5
STREAM_STEPS = 40
PROMPTS = (16, 32, 64, 128, 256, 512)
LONGEST_ANSWER = 64
LATE = 20.0  # times a step's own time: what comes later has not followed it


class Records(FrontStats):
    """Keeps what engines say of their steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        """Note a step."""
        super().step(record)
        self.seen.append(record)


async def measure(config: Config, most_streams: int = 64) -> Calibration:
    """Run the engines of this config for less than a minute, where a step takes milliseconds.
    most_streams: of an engine."""
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        model=replace(config.model, skip_tokenizer_init=True),
        parallel=replace(config.parallel, rebalance="off"),
    )
    spec = read_model_spec(resolve_model_dir(config.model.model))
    dp = config.parallel.dp
    async with open_front_end(config, child=True) as front:
        ready = await front.wait_ready()
        records = front.stats = Records()
        chunk = config.scheduler.max_num_batched_tokens or max(
            512, config.scheduler.max_num_seqs + 256
        )
        limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=chunk,
            prefill_chunk=chunk,
            max_model_len=ready.max_model_len,
            block_size=ready.block_size,
            num_blocks=ready.num_blocks // dp,
            depth=config.scheduler.depth,
            enable_prefix_caching=False,
            itl_target_us=1000 * config.scheduler.itl_target_ms,
            watermark_blocks=int(config.scheduler.watermark * ready.num_blocks / dp),
        )
        unfitted = Calibration(
            model=spec.architecture,
            dp=dp,
            tp=config.parallel.tp,
            limits=asdict(limits),
            terms={},
            delay_s=0.0,
            num_samples=0,
            error=0.0,
        )
        longest = min(chunk, ready.max_model_len - LONGEST_ANSWER)
        prompts = [n for n in PROMPTS if n <= longest]
        samples: list[StepSample] = []
        delays: list[float] = []
        most = dp * min(most_streams, config.scheduler.max_num_seqs)
        # Fewer streams than engines, too: an engine beside idle ones has the memory's rate for
        # itself.
        for streams in sorted(
            {n for n in STREAMS if n < dp} | {dp * n for n in STREAMS if dp * n <= most}
        ):
            records.seen.clear()
            goes_on = partial(_goes_on, records.seen, STREAM_STEPS * dp, time.monotonic())
            async with asyncio.TaskGroup() as group:
                for seed in range(streams):
                    group.create_task(_stream(front, random.Random(seed), prompts, goes_on))
            samples += _samples(records.seen, limits.block_size)
        for prompt in prompts * 4:
            records.seen.clear()
            first_s = await _answer(front, random.Random(prompt), prompt, 2)
            delays += [first_s - r.device_us / 1e6 for r in records.seen if r.num_tokens == prompt]
    fitted = fit(samples, unfitted)
    delay_s = (
        max(0.0, median(delays) - fitted.terms[GAPS[0]] - fitted.terms[GAPS[2]]) if delays else 0.0
    )
    return msgspec.structs.replace(fitted, delay_s=delay_s)


def _samples(records: list[StepRecord], block_size: int) -> list[StepSample]:
    """Return the steps whose sizes the records tell: of decodes, and of decodes and one whole
    prompt.
    """
    steps: list[list[StepRecord]] = []
    for record in sorted(records, key=lambda r: r.at_s):
        last = steps[-1] if steps else []
        is_same = record.at_s - last[0].at_s < last[0].device_us / 2e6 if last else False
        if is_same and record.dp_rank not in {r.dp_rank for r in last}:
            last.append(record)
        else:
            steps.append([record])
    samples = []
    reading = [any(r.num_tokens > r.num_requests for r in step) for step in steps]
    for i, (before, step, second, third) in enumerate(
        zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
    ):
        most = max(step, key=lambda r: r.num_tokens)
        prompt = most.num_tokens - most.num_requests + 1
        if prompt > 1 and most.prompt_tokens != prompt:
            continue
        reads = block_size * (most.num_blocks - 1 - most.num_free_blocks - most.num_running / 2)
        pairs = reads - prompt + prompt * (prompt + 1) / 2
        device_s = max(r.device_us for r in step) / 1e6
        # A plan is made when the step before the one before it is over: these two are one step
        # apart, if requests were left to go on with.
        period_s = third[0].at_s - second[0].at_s
        followed = all(any(r.num_running for r in one) for one in (before, step, second))
        samples.append(
            StepSample(
                most.num_tokens,
                most.num_requests,
                reads,
                pairs,
                sum(r.num_tokens for r in step) - most.num_tokens,
                sum(r.num_tokens > 0 for r in step) - 1,
                device_s,
                period_s if followed and period_s < LATE * device_s else None,
                reading[i],
            )
        )
    return samples


def _goes_on(seen: list[StepRecord], steps: int, begin_s: float, parts: int) -> bool:
    return time.monotonic() < begin_s + parts * STREAM_S or len(seen) < parts * steps


async def _stream(
    front: FrontEnd, rng: random.Random, prompts: list[int], goes_on: Callable[[int], bool]
) -> None:
    """Ask for one answer after the other."""
    while goes_on(1):
        await _answer(front, rng, rng.choice(prompts), rng.randint(2, LONGEST_ANSWER), goes_on)


async def _answer(
    front: FrontEnd,
    rng: random.Random,
    num_prompt: int,
    num_tokens: int,
    goes_on: Callable[[int], bool] = bool,
) -> float:
    """Read one answer, to its end or as long as the test goes on; returns the seconds until its
    first token.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = [rng.randrange(5, 200) for _ in range(num_prompt)]
    begin_s = time.monotonic()
    first_s = 0.0
    async with await front.generate(prompt, params) as deltas:
        async for _ in deltas:
            first_s = first_s or time.monotonic() - begin_s
            if not goes_on(2):
                break
    return first_s
