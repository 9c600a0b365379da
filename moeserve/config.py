"""The settings: a frozen tree of dataclasses whose fields carry flag, help and range.

`runner/limits.py` computes numbers that are None. Precedence: flag, then MOESERVE_* environment
variable (--help names it), then --config YAML, then the default here.
"""

import math
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from os import PathLike, fspath
from typing import Any, Literal

import msgspec

from moeserve.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Activations = Literal["auto", "float", "int8"]
Lossless = Literal["off", "experts", "all"]
DEMO = "demo"
# as in DeepEP's published bandwidths; leaves computation four fifths of an H100's or H200's 132 SMs
COMM_SMS = 24
INT4_GROUPS = (
    128,
    64,
    32,
)  # inputs that share a scale: the first number that divides a layer's inputs


def _opt(
    default: Any, help: str, *, flag: str | None = "", low: float = 0, high: float = math.inf
) -> Any:
    """Returns a dataclass field with its help text. flag: "" derives --the-name, None makes the
    field YAML-only. low, high: the range of a number, both ends included."""
    return field(default=default, metadata={"help": help, "flag": flag, "low": low, "high": high})


_yaml = partial(_opt, flag=None)  # a field that only YAML can set


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its number formats, and its text files."""

    model: str = _yaml(
        DEMO,
        "Hugging Face model directory, GGUF file (the first of several), or 'demo' for the "
        "built-in one",
    )
    served_model_name: str | None = _opt(
        None,
        "name in the API, and aliases behind commas (default: the directory's or file's name)",
    )
    load_format: Literal["auto", "dummy"] = _yaml(
        "auto", "auto: safetensors; dummy: random weights, from config.json alone, to measure with"
    )
    dtype: Dtype = _opt("auto", "weights and activations; auto: the checkpoint's own")
    quantization: Literal["none", "int8", "int4"] = _opt(
        "none",
        "bits of the linear layers' weights, rounded while they are read (checkpoints with 16 "
        "or 32 bits)",
    )
    activations: Activations = _yaml(
        "auto",
        "rows before weights of 4 and 8 bits (CPU); int8: rounded in blocks of 32; auto: if the "
        "checkpoint asks for "
        "it, as GGUF files do",
    )
    lossless_compression: Lossless = _yaml(
        "off",
        "whose bf16 weights are kept in 12 bits (CPU with AVX512-BF16): experts' or all linear "
        "layers'; the same "
        "tokens, and faster decoding of few requests",
    )
    packed_cache: str | None = _yaml(
        None,
        "folder for packed weights, which later starts map into memory (CPU; default: the "
        "user's cache folder, for "
        'models of 256 MiB or more), or "off"',
    )
    packed_cache_bytes: int | None = _yaml(
        None,
        "bytes in that folder (default: half of what it and the free disk have, at most 64 GiB)",
        low=1,
    )
    expert_memory: int | None = _yaml(
        None,
        "bytes of experts that each rank has in memory, e.g. 6GiB; the others are read from "
        "packed_cache's file when "
        "needed (CPU; default: all are in memory)",
        low=1,
    )
    max_model_len: int | None = _opt(
        None, "longest prompt plus answer in tokens (default: as much as fits)", low=1
    )
    chat_template: str | None = _opt(None, "Jinja file that replaces the model's own chat template")
    tool_format: str | None = _opt(
        None,
        "how answers write tool calls and reasoning (docs/tool-calls.md; default: as the chat "
        "template shows)",
    )
    generation_config: Literal["auto", "none"] = _yaml(
        "auto", "auto: the model's sampling defaults apply; none: moeserve's"
    )
    skip_tokenizer_init: bool = _yaml(False, "token ids in, token ids out; no text")
    logits_processors: tuple[str, ...] = _yaml(
        (),
        "NAME=package.module:attribute of functions that requests may name "
        "(docs/logits-processors.md)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache and the prefix cache."""

    block_size: int = _yaml(16, "tokens per KV block; divides or is a multiple of 64", low=1)
    kv_cache_dtype: Literal["auto", "int8"] = _yaml(
        "auto", "keys and values; auto: as activations; int8: half of bf16's bytes, rounded"
    )
    kv_cache_bytes: int | None = _opt(
        None, "bytes for KV blocks (default: from free memory), e.g. 2GiB", low=1
    )
    memory_utilization: float = _opt(
        0.9, "share of the memory limit that weights, work space and KV may use", low=0.01, high=1
    )
    enable_prefix_caching: bool = _opt(True, "reuse the KV blocks of equal prompt beginnings")
    state_share: float = _yaml(
        0.5,
        "share of the memory for KV blocks that states of recurrent layers may take",
        low=0.01,
        high=0.99,
    )
    host_store_bytes: int = _yaml(
        0, "host memory that keeps evicted prefix blocks, e.g. 1GiB; 0: off"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of requests and tokens per step."""

    max_num_seqs: int = _opt(256, "requests that run at once", low=1)
    max_num_batched_tokens: int | None = _opt(
        None,
        "tokens per step (default: 512 on CPUs, 2048 on GPUs; at least max_num_seqs + 256)",
        low=1,
    )
    prefill_chunk: int | None = _yaml(
        None, "most tokens of one request per step (default: the step's budget)", low=1
    )
    itl_target_ms: float = _yaml(
        0.0,
        "milliseconds that a step with both prompts and decodes may take, by fewer tokens of "
        "prompts; 0: any",
    )
    depth: int = _yaml(2, "steps in flight; 1 is for debugging", low=1, high=2)
    speculate: str | None = _opt(
        None,
        "guess tokens ahead and verify them together; no token changes: ngram:K, suffix[:K], "
        "mtp:K, model:DIR:K, "
        "eagle:DIR:K, or auto[:ONE OF THESE], which guesses less where it does not pay",
    )
    watermark: float = _yaml(0.01, "share of KV blocks kept free when admitting", high=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device, its kernels, and determinism."""

    device: str = _opt("auto", "where the model runs: auto, cpu, cuda, or a plugin's device")
    threads: int | None = _opt(
        None, "CPU threads of the model runner (default: the cores that the model can use)", low=1
    )
    determinism: Literal["auto", "fast", "batch", "full"] = _opt(
        "auto",
        "batch: a request's results do not depend on other requests (always so on CPU; slower "
        "on CUDA); full: nor on "
        "the number of ranks, with the same kernels today",
    )
    kernels: str = _yaml(
        "auto",
        "what computes: auto; native or torch on CPUs; triton or torch on CUDA; deep_gemm or "
        "flashinfer: triton, but experts by that package; a plugin's name: auto, but experts by it",
    )
    attention_backend: Literal["auto", "triton", "fa3"] = _yaml(
        "auto",
        "what computes attention beside Triton's kernels (CUDA); fa3: FlashAttention-3; auto: "
        "that, in steps in which "
        "`moeserve tune` found it faster",
    )
    graphs: Literal["auto", "full", "piecewise", "off"] = _yaml(
        "auto",
        "CUDA graphs for steps of few tokens; full: steps with one token per request; "
        "piecewise: graphs without "
        "attention; auto: the faster one for each step",
    )
    compile: bool = _yaml(
        False, "fuse the operations between attention and experts with torch.compile (CUDA)"
    )
    null_runner: bool = _yaml(False, "benchmarks only: made-up tokens instead of a model")
    null_step_ms: float = _yaml(0.0, "benchmarks only: milliseconds per step of the null runner")

    @property
    def exact(self) -> bool:
        """Whether results depend on the request alone, bit by bit, even where that costs speed."""
        return self.determinism in ("batch", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Processes, machines, expert parallelism and communication."""

    dp: int = _opt(1, "engines that share the requests (data parallel)", low=1, high=1024)
    tp: int = _opt(1, "processes per engine that share attention (tensor parallel)", low=1, high=64)
    ep: Literal["on", "off"] = _opt(
        "on", "on: experts are sharded over all dp x tp ranks; off: every rank has all"
    )
    all2all: str = _opt(
        "auto",
        "transport of tokens to experts: auto, or a backend's name (see "
        "docs/expert-parallelism.md)",
    )
    wire: Literal["auto", "fp8_b128"] = _yaml(
        "auto",
        "number format of dispatched tokens; auto: the model's own; fp8_b128: half the bytes, "
        "rounded",
    )
    dbo: Literal["auto", "on", "off"] = _opt(
        "auto",
        "dual-batch overlap: one half of the batch computes while the other half communicates",
    )
    comm_sms: int | None = _yaml(
        None,
        "GPU multiprocessors (SMs) that communication may use beside computation (CUDA; "
        "default: 24)",
        low=1,
        high=132,
    )
    redundant_experts: int = _opt(
        0, "physical experts beyond one per logical expert, for replicas of busy experts"
    )
    rebalance: Literal["auto", "off"] = _opt(
        "auto", "move experts between ranks when the load is uneven and it pays"
    )
    fork_server: Literal["on", "off"] = _yaml(
        "on",
        "on: fork engines from a process that has imported everything, so that restarts are "
        "fast (Linux)",
    )
    nnodes: int = _opt(1, "machines that serve together and share the dp engines", low=1, high=1024)
    node_rank: int = _opt(0, "number of this machine, from 0; machine 0 answers HTTP", high=1023)
    rendezvous: str | None = _opt(
        None, "HOST:PORT on machine 0 to which the other machines connect"
    )
    cluster_key_file: str | None = _opt(
        None, "file with the secret that all machines share (nnodes > 1)"
    )
    standby: bool = _opt(
        False, "a second front end stands by: if the first one dies, engines and requests go on"
    )
    encrypt_rows: bool = _opt(False, "encrypt tokens' rows between machines (AES-256-GCM; CPU)")

    @property
    def num_ranks(self) -> int:
        """Number of processes that run the model."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: address, keys, limits and logs."""

    host: str = _opt("127.0.0.1", "address to listen on")
    port: int = _opt(8000, "port to listen on; 0: any free one", high=65535)
    api_key: tuple[str, ...] = _opt((), "require one of these keys (better: --api-key-file)")
    api_key_file: str | None = _opt(
        None, "file with a key per line, or YAML with names and rates (docs/operations.md)"
    )
    ssl_certfile: str | None = _opt(
        None, "PEM certificate chain: serve HTTPS; read again when it changes"
    )
    ssl_keyfile: str | None = _opt(None, "its PEM key (default: in --ssl-certfile)")
    allowed_origins: tuple[str, ...] = _opt(
        (), "origins whose web pages may call the server (CORS), or *"
    )
    allowed_hosts: tuple[str, ...] = _yaml(
        (),
        "host names under which clients may call the server, beside localhost; * for any "
        "(default: any, but localhost alone on a local address without keys)",
    )
    admin_key_file: str | None = _opt(
        None, "file with the keys for administrative routes (default: those routes are off)"
    )
    max_queued_requests: int = _yaml(512, "requests that may wait before 503; 0: none may")
    max_queue_wait: float = _yaml(
        2.0,
        "seconds that a request may be expected to wait where every place is taken, else 503; "
        "0: any",
    )
    keepalive_timeout: float = _yaml(
        120.0,
        "seconds that an idle connection stays open; above that of clients and proxies",
        low=1,
        high=86_400,
    )
    request_timeout: float | None = _yaml(
        None,
        "seconds for a whole request, then 504; X-Request-Timeout may ask for less (default: no "
        "limit)",
        low=0.001,
    )
    resume_window: float = _yaml(
        0.0,
        "seconds for which a stream that lost its reader can be gone on with "
        "(docs/http-api.md); 0: off",
    )
    receipt_key: str | None = _yaml(
        None, "file with the key that signs receipts (docs/receipts.md)"
    )
    request_log: str | None = _yaml(
        None,
        "file for finished requests, prompts and answers included, for `moeserve replay` "
        "(default: none)",
    )
    max_request_bytes: int = _yaml(32 * 2**20, "largest request body", low=1)
    max_stored_responses: int = _yaml(
        0,
        "responses of /v1/responses that are kept in memory, to go on from and to be retrieved; "
        "0: none",
    )
    max_stored_bytes: int = _yaml(256 * 2**20, "memory for stored responses")
    files_dir: str | None = _yaml(
        None,
        "folder for /v1/files and /v1/batches, of this server alone (default: those routes are "
        "off)",
    )
    files_bytes: int = _yaml(4 * 2**30, "bytes that all files together may have", low=1)
    shutdown_timeout: float = _opt(30.0, "seconds that SIGTERM lets running requests finish")
    strict: bool = _yaml(False, "refuse unknown request fields instead of warning")
    log_level: Literal["debug", "info", "warning", "error"] = _opt("info", "log level")
    log_format: Literal["text", "json"] = _opt("text", "log lines for people or for machines")
    metrics_names: Literal["moeserve", "vllm"] = _opt(
        "moeserve", "names in /metrics; vllm: as vLLM's dashboards and routers expect them"
    )
    metrics_port: int | None = _yaml(
        None,
        "port that serves /metrics and the probes without a key (default: /metrics on --port "
        "alone)",
        low=1,
        high=65535,
    )
    access_log: str | None = _yaml(
        None, "file that gets a JSON line per finished request; '-': stdout"
    )
    otel_endpoint: str | None = _yaml(
        None, "OTLP collector that gets a span per request, e.g. http://HOST:4318"
    )
    ui: bool = _yaml(True, "serve a page for people at /")
    sse_ping_s: float = _yaml(
        15.0,
        "seconds of silence before an SSE comment keeps the connection open",
        low=0.1,
        high=3600,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree of settings, as the user gave them."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()


SECTIONS: dict[str, type[Any]] = {f.name: type(f.default) for f in fields(Config)}


def config_of(model: str | PathLike[str] | None = None, **settings: Any) -> Config:
    """Returns a Config from the keyword arguments of `LLM` and `AsyncEngine`, each named like its
    field.

    Raises ConfigError for an unknown name, with the nearest known one.
    """
    home = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind)}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if model is not None:
        settings["model"] = fspath(model)
    for name, value in settings.items():
        if name not in home:
            near = get_close_matches(name, home, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(home))}"
            raise ConfigError(f"unknown setting {name!r}{hint}")
        values[home[name]][name] = value
    config = _checked(
        Config(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    )
    for section in SECTIONS:
        for f in fields(getattr(config, section)):
            check_range(f, getattr(getattr(config, section), f.name), f.name)
    return config


def _checked(config: Config) -> Config:
    """Raises ConfigError for a wrong type or choice; `check_range` follows."""
    if str(config.device.kernels) == "onednn":
        raise ConfigError("kernels: onednn no longer exists; its successor is kernels: torch")
    try:
        return msgspec.convert(msgspec.to_builtins(config), Config)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(str(error).replace("$.", "")) from None


def check_range(setting: Field[Any], value: Any, origin: str) -> None:
    """Raises ConfigError if a number is outside of its field's range."""
    low = setting.metadata["low"]
    high = setting.metadata["high"]
    if isinstance(value, int | float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{origin}: must be {bounds}, got {value} ({setting.metadata['help']})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's limits, every number resolved. Counts of tokens, blocks and requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    max_model_len: int
    block_size: int
    num_blocks: int  # null block included
    watermark_blocks: int = 0
    depth: int = 2
    itl_target_us: float = 0.0  # of a step that both decodes and reads prompts; 0: any
    enable_prefix_caching: bool = True
    num_store_blocks: int = 0  # KV blocks that the host store can hold
    num_states: int = 0  # blocks of recurrent layers' states, the null block included
    num_store_states: int = 0  # those that the host store can hold
    num_drafts: int = 0  # most drafts of a row; 0: no speculation
    auto_drafts: bool = False  # fewer drafts where they do not pay
    draft_model: bool = False  # whether it takes the device's time to have drafts
