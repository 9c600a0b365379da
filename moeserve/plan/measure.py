"""The benchmark of `moeserve simulate --measure`: it times real steps for calibration.py.

It runs different numbers of streams, each of which sends one request after the other with mixed
lengths. Then it sends single prompts.
"""

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
from moeserve.hub.progress import TerminalProgress
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.messages import StepRecord
from moeserve.models.fetch import local_config
from moeserve.models.hf_config import read_model_spec
from moeserve.plan.calibration import GAP_TERMS, Calibration, StepSample, fit_calibration
from moeserve.sampling import SamplingParams

NUM_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of streams per engine
# Each number of streams runs for at least this long. Answers are aborted after twice as long.
MIN_STREAM_S = 2.5
MIN_STREAM_STEPS = 40  # and for at least this many steps per engine
PROMPT_LENGTHS = (16, 32, 64, 128, 256, 512)  # prompt tokens
MAX_ANSWER = 64  # generated tokens
IDLE_FACTOR = 20.0  # an engine was idle in a period of more step times than this


class RecordingStats(FrontStats):
    """Statistics that keep the record of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[StepRecord] = []

    def record_step(self, record: StepRecord) -> None:
        """Keep the record of a step."""
        super().record_step(record)
        self.records.append(record)


async def measure(config: Config, max_streams: int = 64) -> Calibration:
    """Start the engines of this config, measure their steps, and return the fitted calibration.

    This takes less than a minute if a step takes milliseconds.

    max_streams: limit of the streams per engine.
    """
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        model=replace(config.model, skip_tokenizer_init=True),
        parallel=replace(config.parallel, rebalance="off"),
    )
    with TerminalProgress() as progress:
        config = await local_config(config, progress)
    spec = read_model_spec(resolve_model_dir(config.model.model))
    dp = config.parallel.dp
    async with open_front_end(config, child=True) as front:
        ready = await front.wait_ready()
        stats = RecordingStats()
        front.stats = stats
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
        max_prompt = min(chunk, ready.max_model_len - MAX_ANSWER)
        prompts = [n for n in PROMPT_LENGTHS if n <= max_prompt]
        samples: list[StepSample] = []
        delays_s: list[float] = []
        max_total = dp * min(max_streams, config.scheduler.max_num_seqs)
        # Measure fewer streams than engines, too: an engine beside idle ones has the whole memory
        # bandwidth.
        totals_of_streams = {n for n in NUM_STREAMS if n < dp}
        totals_of_streams |= {dp * n for n in NUM_STREAMS if dp * n <= max_total}
        for num_streams in sorted(totals_of_streams):
            stats.records.clear()
            is_running = partial(
                _is_running, stats.records, MIN_STREAM_STEPS * dp, time.monotonic()
            )
            async with asyncio.TaskGroup() as group:
                for seed in range(num_streams):
                    group.create_task(_stream(front, random.Random(seed), prompts, is_running))
            samples += _step_samples(stats.records, limits.block_size)
        for num_prompt in prompts * 4:
            stats.records.clear()
            first_s = await _answer(front, random.Random(num_prompt), num_prompt, num_tokens=2)
            delays_s += [
                first_s - record.device_us / 1e6
                for record in stats.records
                if record.num_tokens == num_prompt
            ]
    fitted = fit_calibration(samples, unfitted)
    delay_s = 0.0
    if delays_s:
        # The simulation adds the time between two steps itself.
        gap_s, _, gap_of_prompt_s = (fitted.terms[name] for name in GAP_TERMS)
        delay_s = max(0.0, median(delays_s) - gap_s - gap_of_prompt_s)
    return msgspec.structs.replace(fitted, delay_s=delay_s)


def _step_samples(records: list[StepRecord], block_size: int) -> list[StepSample]:
    """Return the steps whose sizes are known from the records.

    These are steps with decodes only, and steps with decodes and one whole prompt.
    """
    steps = _group_by_step(records)
    samples = []
    has_prompt = [any(record.num_tokens > record.num_requests for record in step) for step in steps]
    for i, (before, step, second, third) in enumerate(
        zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
    ):
        most = max(step, key=lambda record: record.num_tokens)
        num_prompt = most.num_tokens - most.num_requests + 1
        if num_prompt > 1 and most.prompt_tokens != num_prompt:
            continue
        # On average, half of the last block of a request is empty. The null block is not used.
        num_used = most.num_blocks - 1 - most.num_free_blocks
        num_reads = block_size * (num_used - most.num_running / 2)
        # Each decoding row has as many pairs as reads. The prompt's queries read 1, 2, ... of its
        # positions.
        num_pairs = num_reads - num_prompt + num_prompt * (num_prompt + 1) / 2
        device_s = max(record.device_us for record in step) / 1e6
        # `at_s` is the time when a step was planned. With two steps in flight, a step is planned
        # when the one two before it ends. So the plans of the next two steps are one period of this
        # step apart, if there were requests to continue with.
        period_s = third[0].at_s - second[0].at_s
        is_followed = all(
            any(record.num_running for record in records_of_step)
            for records_of_step in (before, step, second)
        )
        samples.append(
            StepSample(
                num_tokens=most.num_tokens,
                num_rows=most.num_requests,
                num_reads=num_reads,
                num_pairs=num_pairs,
                other_tokens=sum(record.num_tokens for record in step) - most.num_tokens,
                num_others_busy=sum(record.num_tokens > 0 for record in step) - 1,
                device_s=device_s,
                period_s=period_s if is_followed and period_s < IDLE_FACTOR * device_s else None,
                is_after_prompt=has_prompt[i],
            )
        )
    return samples


def _group_by_step(records: list[StepRecord]) -> list[list[StepRecord]]:
    """Return the records of each step, ordered by time.

    Different engines' records are of one step if the step was planned on them within half of its
    duration.
    """
    steps: list[list[StepRecord]] = []
    for record in sorted(records, key=lambda record: record.at_s):
        last = steps[-1] if steps else []
        half_step_s = last[0].device_us / 2e6 if last else 0.0
        is_same_step = bool(last) and record.at_s - last[0].at_s < half_step_s
        if is_same_step and record.dp_rank not in {other.dp_rank for other in last}:
            last.append(record)
        else:
            steps.append([record])
    return steps


def _is_running(records: list[StepRecord], min_steps: int, begin_at_s: float, factor: int) -> bool:
    """Return whether `factor` times the least duration or number of steps is not reached yet."""
    return (
        time.monotonic() < begin_at_s + factor * MIN_STREAM_S or len(records) < factor * min_steps
    )


async def _stream(
    front: FrontEnd, rng: random.Random, prompts: list[int], is_running: Callable[[int], bool]
) -> None:
    """Send one request after the other."""
    while is_running(1):
        await _answer(front, rng, rng.choice(prompts), rng.randint(2, MAX_ANSWER), is_running)


async def _answer(
    front: FrontEnd,
    rng: random.Random,
    num_prompt: int,
    num_tokens: int,
    is_running: Callable[[int], bool] = bool,
) -> float:
    """Send a request, and return the seconds until its first token.

    The answer is read to its end, or aborted when the test has run for twice its duration.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = [rng.randrange(5, 200) for _ in range(num_prompt)]
    begin_at_s = time.monotonic()
    first_s = 0.0
    async with await front.generate(prompt, params) as deltas:
        async for _ in deltas:
            first_s = first_s or time.monotonic() - begin_at_s
            if not is_running(2):
                break
    return first_s
