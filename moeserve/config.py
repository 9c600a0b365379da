"""All settings, as a frozen tree of dataclasses. Each field carries its flag, help text and range.

Precedence, highest first: command-line flag, MOESERVE_* environment variable (listed by --help),
--config YAML file, the default here. `runner/limits.py` computes the numbers that are left None.
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
Lossless = Literal["auto", "off", "experts", "all"]
KVCacheDtype = Literal["auto", "float", "int8"]
DEMO = "demo"
# The number of SMs in DeepEP's published bandwidths. It leaves four fifths of the 132 SMs of an
# H100 or H200 to computation.
COMM_SMS = 24
# Group sizes of int4 weights (inputs per scale). A layer uses the first that divides its inputs.
INT4_GROUPS = (128, 64, 32)


def _opt(
    default: Any, help: str, *, flag: str | None = "", low: float = 0, high: float = math.inf
) -> Any:
    """Return a dataclass field for a setting.

    flag: "" derives --the-name from the field's name; None makes the setting YAML-only.
    low, high: the allowed range of a number, inclusive.
    """
    return field(default=default, metadata={"help": help, "flag": flag, "low": low, "high": high})


_yaml = partial(_opt, flag=None)  # a setting without a flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its number formats, and its text files."""

    model: str = _yaml(
        DEMO,
        "name on a Hugging Face hub (owner/name[@REVISION][:QUANT]), model directory, GGUF file, "
        "or 'demo' for the built-in model",
    )
    served_model_name: str | None = _opt(
        None,
        "model name in the API; comma-separated aliases may follow (default: its own name)",
    )
    load_format: Literal["auto", "dummy"] = _yaml(
        "auto",
        "auto: load the model's files; dummy: random weights from config.json alone, for "
        "benchmarks",
    )
    dtype: Dtype = _opt("auto", "dtype of weights and activations; auto: the checkpoint's")
    quantization: Literal["none", "int8", "int4"] = _opt(
        "none",
        "weight-only quantization of the linear layers at load time (16- and 32-bit checkpoints)",
    )
    activations: Activations = _yaml(
        "auto",
        "activations that 4- and 8-bit weights are multiplied with (CPU); int8: rounded in blocks "
        "of 32; auto: int8 if the checkpoint format does so, as GGUF does",
    )
    lossless_compression: Lossless = _yaml(
        "auto",
        "which bf16 weights to compress to 12 bits (CPU with AVX512-BF16): experts or all linear "
        "layers; tokens are unchanged, and small batches decode faster; auto: none, unless --fit "
        "needs it",
    )
    packed_cache: str | None = _yaml(
        None,
        "directory that caches packed weights, which later starts map into memory (CPU; default: "
        'the user\'s cache directory, for models of 256 MiB or more), or "off"',
    )
    packed_cache_bytes: int | None = _yaml(
        None,
        "size limit of the packed cache (default: half of its size plus the free disk space, at "
        "most 64 GiB)",
        low=1,
    )
    expert_memory: int | None = _yaml(
        None,
        "bytes of experts that each rank keeps in memory, e.g. 6GiB; other experts are read from "
        "the packed cache on demand (CPU; default: all experts are in memory, unless --fit needs "
        "less)",
        low=1,
    )
    max_model_len: int | None = _opt(
        None, "maximum length of prompt plus answer in tokens (default: as much as fits)", low=1
    )
    fit: Literal["on", "off"] = _yaml(
        "on",
        "if the model does not fit into memory: on: choose settings with which it does, among "
        "those that are not given (docs/desktop.md); off: refuse to start",
    )
    chat_template: str | None = _opt(None, "Jinja file that replaces the model's own chat template")
    tool_format: str | None = _opt(
        None,
        "format of tool calls and reasoning in answers (docs/tool-calls.md; default: detected "
        "from the chat template)",
    )
    generation_config: Literal["auto", "none"] = _yaml(
        "auto",
        "sampling defaults; auto: from the model's generation_config.json; none: moeserve's own",
    )
    skip_tokenizer_init: bool = _yaml(
        False, "do not load a tokenizer: token ids in, token ids out, no text"
    )
    logits_processors: tuple[str, ...] = _yaml(
        (),
        "NAME=package.module:attribute of each logits processor that requests may use "
        "(docs/logits-processors.md)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache and the prefix cache."""

    block_size: int = _yaml(16, "tokens per KV block; must divide 64 or be a multiple of it", low=1)
    kv_cache_dtype: KVCacheDtype = _yaml(
        "auto",
        "dtype of the KV cache; float: that of activations; int8: quantized, half the bytes of "
        "bf16; auto: float, unless --fit needs int8",
    )
    kv_cache_bytes: int | None = _opt(
        None, "size of the KV cache, e.g. 2GiB (default: from free memory)", low=1
    )
    memory_utilization: float = _opt(
        0.9,
        "fraction of the memory limit for weights, workspace and KV cache",
        low=0.01,
        high=1,
    )
    enable_prefix_caching: bool = _opt(True, "share KV blocks among prompts with a common prefix")
    state_share: float = _yaml(
        0.5,
        "maximum fraction of the KV cache's memory for states of recurrent layers",
        low=0.01,
        high=0.99,
    )
    host_store_bytes: int = _yaml(0, "host memory for evicted prefix blocks, e.g. 1GiB; 0: off")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler, and speculative decoding."""

    max_num_seqs: int = _opt(256, "maximum number of running requests", low=1)
    max_num_batched_tokens: int | None = _opt(
        None,
        "maximum tokens per step (default: CPU 512, GPU 2048; at least max_num_seqs + 256)",
        low=1,
    )
    prefill_chunk: int | None = _yaml(
        None,
        "maximum prompt tokens of one request per step (default: max_num_batched_tokens)",
        low=1,
    )
    itl_target_ms: float = _yaml(
        0.0,
        "target duration in milliseconds of steps that mix prefill and decode; prefill chunks are "
        "shortened to meet it; 0: no target",
    )
    depth: int = _yaml(2, "steps in flight; 1 is for debugging", low=1, high=2)
    speculate: str | None = _opt(
        None,
        "speculative decoding, which changes no token: ngram:K, suffix[:K], mtp:K, model:DIR:K, "
        "eagle:DIR:K, or auto[:ONE OF THESE], which drafts fewer tokens when drafts do not pay",
    )
    watermark: float = _yaml(
        0.01, "fraction of KV blocks that admission of requests leaves free", high=0.5
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """The device, its kernels, and determinism."""

    device: str = _opt("auto", "device of the model: auto, cpu, cuda, or a plugin's device")
    threads: int | None = _opt(
        None, "CPU threads of the model runner (default: all cores that the model can use)", low=1
    )
    determinism: Literal["auto", "fast", "batch", "full"] = _opt(
        "auto",
        "batch: a request's results do not depend on other requests (always so on CPU; slower on "
        "CUDA); full: nor on the number of ranks (the same kernels as batch today)",
    )
    kernels: str = _yaml(
        "auto",
        "kernel backend: auto; native or torch on CPUs; triton or torch on CUDA; deep_gemm or "
        "flashinfer: triton, with experts from that package; a plugin's name: auto, with experts "
        "from the plugin",
    )
    attention_backend: Literal["auto", "triton", "fa3"] = _yaml(
        "auto",
        "attention kernels (CUDA); fa3: FlashAttention-3; auto: fa3 in steps for which "
        "`moeserve tune` measured it faster, otherwise Triton's",
    )
    graphs: Literal["auto", "full", "piecewise", "off"] = _yaml(
        "auto",
        "CUDA graphs for small steps; full: for steps with one token per request; piecewise: "
        "graphs without attention; auto: the faster of both for each step",
    )
    compile: bool = _yaml(
        False, "fuse the operations between attention and experts with torch.compile (CUDA)"
    )
    null_runner: bool = _yaml(False, "benchmarks only: made-up tokens instead of a model")
    null_step_ms: float = _yaml(0.0, "benchmarks only: milliseconds per step of the null runner")

    @property
    def exact(self) -> bool:
        """Whether results must be bitwise independent of other requests, even at a cost."""
        return self.determinism in ("batch", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Processes, machines, expert parallelism and communication."""

    dp: int = _opt(
        1, "data-parallel size: engines among which requests are shared", low=1, high=1024
    )
    tp: int = _opt(1, "tensor-parallel size: ranks per engine that share attention", low=1, high=64)
    ep: Literal["on", "off"] = _opt(
        "on", "on: shard experts over all dp x tp ranks; off: every rank has all experts"
    )
    all2all: str = _opt(
        "auto",
        "all-to-all backend that sends tokens to their experts: auto, or a backend's name "
        "(docs/expert-parallelism.md)",
    )
    wire: Literal["auto", "fp8_b128"] = _yaml(
        "auto",
        "dtype of dispatched activations; auto: the model's; fp8_b128: FP8 with a scale per 128 "
        "values, half the bytes of bf16",
    )
    dbo: Literal["auto", "on", "off"] = _opt(
        "auto",
        "dual-batch overlap: one micro-batch computes while the other communicates",
    )
    comm_sms: int | None = _yaml(
        None,
        "GPU multiprocessors (SMs) for communication that overlaps computation (CUDA; default: 24)",
        low=1,
        high=132,
    )
    redundant_experts: int = _opt(
        0, "physical experts beyond one per logical expert, for replicas of busy experts"
    )
    rebalance: Literal["auto", "off"] = _opt(
        "auto", "auto: move experts between ranks when the load is uneven and it pays"
    )
    fork_server: Literal["on", "off"] = _yaml(
        "on",
        "on: fork engines from a process that has imported everything, for fast restarts (Linux)",
    )
    nnodes: int = _opt(1, "machines that serve together and share the dp engines", low=1, high=1024)
    node_rank: int = _opt(0, "number of this machine, from 0; machine 0 serves HTTP", high=1023)
    rendezvous: str | None = _opt(
        None, "HOST:PORT on machine 0 to which the other machines connect"
    )
    cluster_key_file: str | None = _opt(
        None, "file with the secret that all machines share (nnodes > 1)"
    )
    standby: bool = _opt(
        False,
        "run a standby front end: if the first one dies, engines and requests continue",
    )
    encrypt_rows: bool = _opt(False, "encrypt activations sent between machines (AES-256-GCM; CPU)")

    @property
    def num_ranks(self) -> int:
        """The number of processes that run the model, over all engines."""
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: address, API keys, limits and logs."""

    host: str = _opt("127.0.0.1", "address to listen on")
    port: int = _opt(8000, "port to listen on; 0: any free one", high=65535)
    api_key: tuple[str, ...] = _opt((), "require one of these keys (better: --api-key-file)")
    api_key_file: str | None = _opt(
        None, "file with one key per line, or YAML with names and rates (docs/operations.md)"
    )
    ssl_certfile: str | None = _opt(
        None, "PEM certificate chain; enables HTTPS; reloaded when it changes"
    )
    ssl_keyfile: str | None = _opt(
        None, "PEM key of the certificate (default: read from --ssl-certfile)"
    )
    allowed_origins: tuple[str, ...] = _opt(
        (), "origins whose web pages may call the server (CORS), or * for any"
    )
    allowed_hosts: tuple[str, ...] = _yaml(
        (),
        "host names accepted in the Host header, in addition to localhost; * for any (default: "
        "any; but only localhost if the server has a local address and no keys)",
    )
    admin_key_file: str | None = _opt(
        None, "file with the keys for administrative routes (default: those routes are off)"
    )
    max_queued_requests: int = _yaml(
        512, "requests that may wait in the queue; further ones get status 503; 0: no queue"
    )
    max_queue_wait: float = _yaml(
        2.0,
        "when all slots are in use: expected wait in seconds above which a request gets status "
        "503; 0: no limit",
    )
    keepalive_timeout: float = _yaml(
        120.0,
        "seconds that an idle connection stays open; should exceed that of clients and proxies",
        low=1,
        high=86_400,
    )
    request_timeout: float | None = _yaml(
        None,
        "seconds until a request ends with status 504; the header X-Request-Timeout can lower it "
        "(default: no limit)",
        low=0.001,
    )
    resume_window: float = _yaml(
        0.0,
        "seconds during which a disconnected client can resume its stream (docs/http-api.md); "
        "0: off",
    )
    receipt_key: str | None = _yaml(
        None, "file with the key that signs receipts (docs/receipts.md)"
    )
    request_log: str | None = _yaml(
        None,
        "log file of finished requests, with prompts and answers, for `moeserve replay` "
        "(default: none)",
    )
    max_request_bytes: int = _yaml(32 * 2**20, "maximum size of a request body", low=1)
    max_stored_responses: int = _yaml(
        1000,
        "responses of /v1/responses kept in memory, for retrieval, previous_response_id and "
        "item_reference; 0: none",
    )
    max_stored_bytes: int = _yaml(64 * 2**20, "maximum memory for stored responses")
    files_dir: str | None = _yaml(
        None,
        "directory for /v1/files and /v1/batches, not shared with another server (default: those "
        "routes are off)",
    )
    files_bytes: int = _yaml(4 * 2**30, "maximum total size of the files", low=1)
    shutdown_timeout: float = _opt(
        30.0, "seconds after SIGTERM in which running requests may finish"
    )
    strict: bool = _yaml(False, "reject unknown request fields instead of warning")
    log_level: Literal["debug", "info", "warning", "error"] = _opt("info", "log level")
    log_format: Literal["text", "json"] = _opt("text", "format of log lines")
    metrics_names: Literal["moeserve", "vllm"] = _opt(
        "moeserve", "metric names in /metrics; vllm: the names that vLLM's dashboards expect"
    )
    metrics_port: int | None = _yaml(
        None,
        "extra port that serves /metrics and the probes without a key (default: none, /metrics "
        "is on --port)",
        low=1,
        high=65535,
    )
    access_log: str | None = _yaml(None, "file for a JSON line per finished request; '-': stdout")
    otel_endpoint: str | None = _yaml(
        None, "OTLP collector for a span per request, e.g. http://HOST:4318"
    )
    ui: bool = _yaml(True, "serve a web page at /")
    sse_ping_s: float = _yaml(
        15.0,
        "seconds without an event after which a stream sends an SSE comment as keep-alive",
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
    """Return the Config for the keyword arguments of `LLM` and `AsyncEngine`.

    Each keyword is the name of a field in one of the sections. Raises ConfigError for an unknown
    name (with the closest known one), a wrong type, and a value out of range.
    """
    section_of = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind)}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if model is not None:
        settings["model"] = fspath(model)
    for name, value in settings.items():
        if name not in section_of:
            if close := get_close_matches(name, section_of, 1):
                hint = f"did you mean {close[0]!r}?"
            else:
                hint = f"known: {', '.join(sorted(section_of))}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
        values[section_of[name]][name] = value
    config = _with_checked_types(
        Config(**{section: kind(**values[section]) for section, kind in SECTIONS.items()})
    )
    for section in SECTIONS:
        for f in fields(getattr(config, section)):
            check_range(f, getattr(getattr(config, section), f.name), f.name)
    return config


def _with_checked_types(config: Config) -> Config:
    """Return the config with converted values. Raises ConfigError for a wrong type or choice."""
    if str(config.device.kernels) == "onednn":
        raise ConfigError("kernels: onednn no longer exists; use kernels: torch instead")
    try:
        return msgspec.convert(msgspec.to_builtins(config), Config)
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(str(error).replace("$.", "")) from None


def check_range(setting: Field[Any], value: Any, origin: str) -> None:
    """Raise ConfigError if `value` is a number outside of the range of its field.

    origin: the name of the setting in the error message.
    """
    low = setting.metadata["low"]
    high = setting.metadata["high"]
    if isinstance(value, int | float) and not low <= value <= high:
        bounds = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{origin}: must be {bounds}, got {value} ({setting.metadata['help']})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of the scheduler, with every number resolved (`runner/limits.py`)."""

    max_num_seqs: int  # running requests
    max_num_batched_tokens: int  # tokens per step
    prefill_chunk: int  # prompt tokens of one request per step
    max_model_len: int  # tokens of prompt plus answer
    block_size: int  # tokens per KV block
    num_blocks: int  # KV blocks, including the null block
    watermark_blocks: int = 0  # KV blocks that admission leaves free
    depth: int = 2  # steps in flight
    itl_target_us: float = 0.0  # target duration of steps with prefill and decode; 0: none
    enable_prefix_caching: bool = True
    num_store_blocks: int = 0  # capacity of the host store in KV blocks
    num_states: int = 0  # slots for states of recurrent layers, including the null slot
    num_store_states: int = 0  # capacity of the host store in states of recurrent layers
    num_drafts: int = 0  # maximum draft tokens per request and step; 0: no speculative decoding
    auto_drafts: bool = False  # draft fewer tokens when drafts do not pay
    draft_model: bool = False  # proposing drafts takes device time
    diffusion_block: int = 0  # tokens that the model decodes together; 0: one after another
