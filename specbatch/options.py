"""Every option of `specbatch run`, declared once: flag, key in a config file, environment variable, help and target.

The command line, the help page, the config file and --print-config are all made from this table. Importing it is
cheap (no typer, rich, numpy); it knows how a value is written, not what is a good one: the dataclass named by
`field` checks that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal[
    "text", "path", "file", "int", "float", "switch", "choice", "duration", "size", "memory", "share", "list", "paths",
    "columns", "ints", "floats", "biases", "devices",
]  # fmt: skip

COLUMNS: Final = "Columns"
SAMPLING: Final = "Sampling"
MODEL: Final = "Model and device"
SPECULATION: Final = "Speculation"
MEMORY: Final = "Batching and memory"
OUTPUT: Final = "Output"
RUNNING: Final = "Resuming and stopping"
DISPLAY: Final = "What is shown"
SETTINGS: Final = "Settings"
PANELS: Final = (COLUMNS, SAMPLING, MODEL, SPECULATION, MEMORY, OUTPUT, RUNNING, DISPLAY, SETTINGS)


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option. `field` is "part.name"; the parts are the dataclasses job, sampling and engine, and the view."""

    name: str  # "max-tokens": --max-tokens, key max-tokens, SPECBATCH_MAX_TOKENS
    panel: str
    kind: Kind
    field: str
    help: str
    metavar: str = ""
    default: str = ""  # as the help page shows it; "" where nothing is the default
    choices: tuple[str, ...] = ()
    short: str = ""  # "-o"
    aliases: tuple[str, ...] = ()
    off: bool = False  # a switch that is on by default: the help page shows --no-NAME

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return "SPECBATCH_" + self.name.upper().replace("-", "_")

    @property
    def repeats(self) -> bool:
        return self.kind in ("list", "paths", "columns", "ints", "floats", "biases")


def _o(name: str, panel: str, kind: Kind, field: str, help: str, metavar: str = "", default: str = "", **more: object
       ) -> OptionSpec:  # fmt: skip
    return OptionSpec(name, panel, kind, field, help, metavar, default, **more)  # type: ignore[arg-type]


RUN_OPTIONS: Final[tuple[OptionSpec, ...]] = (
    _o("output", OUTPUT, "path", "job.output", "Directory for the answers, beside the input if not given.", "DIR",
       "INPUT.out", short="-o"),
    _o("format", OUTPUT, "choice", "job.format", "Shape of the answers.", "SHAPE", default="parquet",
       choices=("parquet", "openai-batch")),
    _o("keep-columns", OUTPUT, "columns", "job.keep_columns", "Input columns to copy to the output; all or none.",
       "A,B", "all"),
    _o("output-prefix", OUTPUT, "text", "job.output_prefix", "Put before the name of every added column.", "PREFIX"),
    _o("output-token-ids", OUTPUT, "switch", "job.output_token_ids", "Add the column completion_token_ids."),
    _o("logprobs", OUTPUT, "switch", "job.logprobs", "Add the column completion_logprobs."),
    _o("compression", OUTPUT, "choice", "job.compression", "Of the parts.", "CODEC", default="zstd",
       choices=("zstd", "snappy", "none")),
    _o("shard-rows", OUTPUT, "int", "job.shard_rows", "Rows of a shard, at least one row group.", "N", "10000"),

    _o("prompt-column", COLUMNS, "text", "job.prompt_column", "Column with the prompt.", "NAME", "found by name"),
    _o("messages-column", COLUMNS, "text", "job.messages_column", "Column with chat messages (list of role, content).",
       "NAME"),
    _o("template", COLUMNS, "text", "job.template", "Prompt made of columns: 'Summarise: {body}'.", "TEXT"),
    _o("chat", COLUMNS, "choice", "job.chat", "Whether prompts go through the chat template.", "MODE", default="auto",
       choices=("auto", "on", "off")),
    _o("system", COLUMNS, "text", "job.system_prompt", "System message put before every conversation.", "TEXT",
       aliases=("--system-prompt",)),
    _o("chat-template", COLUMNS, "file", "engine.chat_template", "Jinja file, instead of the model's own template.",
       "FILE"),
    _o("params-column", COLUMNS, "text", "job.params_column", "Column (struct or JSON) with sampling options.", "NAME"),
    _o("limit", COLUMNS, "int", "job.limit", "Only the first N rows.", "N"),
    _o("overlong", COLUMNS, "choice", "job.overlong", "For prompts that do not fit.", "POLICY", default="error",
       choices=("error", "truncate-left", "truncate-right", "skip")),
    _o("max-row-bytes", COLUMNS, "size", "job.max_row_bytes", "A larger cell is a row error.", "SIZE", "16MiB"),

    _o("max-tokens", SAMPLING, "int", "sampling.max_tokens", "Longest answer, in tokens.", "N", "128"),
    _o("min-tokens", SAMPLING, "int", "sampling.min_tokens", "Do not stop before this many tokens.", "N", "0"),
    _o("temperature", SAMPLING, "float", "sampling.temperature", "0 is greedy decoding.", "X", "0"),
    _o("top-k", SAMPLING, "int", "sampling.top_k", "Only the N most likely tokens; 0 is off.", "N", "0"),
    _o("top-p", SAMPLING, "float", "sampling.top_p", "Smallest set of tokens with this probability.", "X", "1"),
    _o("min-p", SAMPLING, "float", "sampling.min_p", "Only tokens this likely, relative to the likeliest.", "X", "0"),
    _o("repetition-penalty", SAMPLING, "float", "sampling.repetition_penalty", "Over prompt and answer; 1 is off.",
       "X", "1"),
    _o("presence-penalty", SAMPLING, "float", "sampling.presence_penalty", "Over the answer, -2 to 2.", "X", "0"),
    _o("frequency-penalty", SAMPLING, "float", "sampling.frequency_penalty", "Over the answer, -2 to 2.", "X", "0"),
    _o("logit-bias", SAMPLING, "biases", "sampling.logit_bias", "Add to a token's logit: 1234=-100.", "ID=BIAS"),
    _o("seed", SAMPLING, "int", "job.seed", "A rerun with the same seed gives the same answers.", "N", "0"),
    _o("stop", SAMPLING, "list", "sampling.stop", "End at this text (cut off).", "TEXT"),
    _o("stop-token-id", SAMPLING, "ints", "sampling.stop_token_ids", "End at this token.", "ID"),
    _o("ignore-eos", SAMPLING, "switch", "sampling.ignore_eos", "Go on after the model's end token."),
    _o("n", SAMPLING, "int", "job.n", "Answers a row; above 1 the columns become lists.", "N", "1", short="-n"),

    _o("model", MODEL, "text", "engine.model", "Folder of a checkpoint in Hugging Face layout.", "DIR",
       "the built-in model", short="-m"),
    _o("draft-model", MODEL, "text", "engine.draft_model", "A smaller model with the same tokenizer.", "DIR"),
    _o("device", MODEL, "text", "engine.device", "Where to run: auto, cpu, cuda or cuda:N.", "DEVICE", "auto"),
    _o("devices", MODEL, "devices", "engine.devices", "Several GPUs: 0,1 or all.", "LIST"),
    _o("dtype", MODEL, "choice", "engine.dtype", "Of weights and arithmetic; auto: the fastest here.", "TYPE",
       default="auto", choices=("auto", "float32", "bfloat16", "float16")),
    _o("quantize", MODEL, "choice", "engine.quantize", "int8: faster on a CPU; changes the answers.", "TYPE",
       default="none", choices=("none", "int8")),
    _o("attention", MODEL, "text", "engine.attention", "Attention backend.", "NAME", "auto"),
    _o("threads", MODEL, "int", "engine.threads", "CPU threads of the model.", "N", "the cores given to it"),

    _o("speculate", SPECULATION, "choice", "engine.speculate", "auto: measured live, used where it pays.",
       "HOW", default="auto", choices=("auto", "off", "ngram", "draft")),
    _o("num-speculative-tokens", SPECULATION, "int", "engine.num_speculative_tokens", "Drafts a step.", "K",
       "chosen live", short="-k"),
    _o("verification", SPECULATION, "choice", "engine.verification",
       "coupled: answers do not depend on drafts; rejection: accepts more.", "HOW", default="coupled",
       choices=("coupled", "rejection")),
    _o("profile", SPECULATION, "switch", "engine.profile", "Do not measure step times at start-up.", off=True),

    _o("max-num-seqs", MEMORY, "int", "engine.max_num_seqs", "Rows running at once.", "N", "what memory holds"),
    _o("max-num-batched-tokens", MEMORY, "int", "engine.max_num_batched_tokens", "Prompt tokens a step.", "N"),
    _o("max-model-len", MEMORY, "int", "engine.max_model_len", "Longest prompt and answer together.", "N",
       "the model's"),
    _o("kv-memory", MEMORY, "memory", "engine.kv_memory", "For the KV cache: auto, 4GiB or 50%.", "SIZE", "auto"),
    _o("block-size", MEMORY, "int", "engine.block_size", "Tokens a page.", "N"),
    _o("prefix-cache", MEMORY, "switch", "engine.prefix_cache", "Do not share the KV of equal prompt beginnings.",
       off=True),
    _o("cuda-graphs", MEMORY, "choice", "engine.cuda_graphs", "off: run every step eagerly.", "WHEN", default="auto",
       choices=("auto", "off")),
    _o("tokenizer-threads", MEMORY, "int", "job.tokenizer_threads", "Tokenise ahead in this many threads.", "N", "2"),
    _o("read-ahead-rows", MEMORY, "int", "job.read_ahead_rows", "Prepared rows held at most.", "N", "32768"),

    _o("restart", RUNNING, "switch", "job.restart", "Discard what the output holds and begin again."),
    _o("retry-failed", RUNNING, "switch", "job.retry_failed", "Compute rows again that ended with an error."),
    _o("reuse", RUNNING, "paths", "job.reuse", "Take equal rows' answers from this earlier output.", "DIR"),
    _o("deduplicate", RUNNING, "switch", "job.deduplicate", "Compute equal greedy rows each on its own.", off=True),
    _o("max-duration", RUNNING, "duration", "job.max_duration", "Stop in time (exit 5); the next start continues.",
       "TIME"),
    _o("grace", RUNNING, "duration", "job.grace", "For running rows after INT, TERM or max-duration.", "TIME", "20s"),
    _o("stall-timeout", RUNNING, "duration", "job.stall_timeout", "No progress for this long ends the run; 0: never.",
       "TIME", "10m"),
    _o("wait-lock", RUNNING, "duration", "job.wait_lock", "Wait for another run on the same output.", "TIME", "0s"),
    _o("max-errors", RUNNING, "int", "job.max_errors", "More row errors end the run (exit 4).", "N"),
    _o("max-error-rate", RUNNING, "share", "job.max_error_rate", "The same, as a share: 1% or 0.01.", "SHARE"),
    _o("yes", RUNNING, "switch", "view.yes", "Do not ask before discarding anything.", short="-y"),

    _o("show", DISPLAY, "int", "view.show", "Print the first N finished rows at the end.", "N", "0"),
    _o("json", DISPLAY, "switch", "view.json", "The result as one JSON object, last line of stdout."),
    _o("progress", DISPLAY, "choice", "view.progress", "auto: bar on a terminal, else line.", "HOW", default="auto",
       choices=("auto", "bar", "line", "json", "none")),
    _o("log-interval", DISPLAY, "duration", "view.log_interval", "Between two progress lines.", "TIME", "1m"),
    _o("log-format", DISPLAY, "choice", "view.log_format", "Of everything on stderr.", "FORMAT", default="text",
       choices=("text", "json")),
    _o("metrics-file", DISPLAY, "path", "view.metrics_file", "Write metrics for node-exporter here at the end.",
       "FILE.prom"),

    _o("config", SETTINGS, "path", "view.config", "TOML file with any of these options.", "FILE"),
    _o("print-config", SETTINGS, "switch", "view.print_config", "Print the settings in force and end."),
    _o("dry-run", SETTINGS, "switch", "view.dry_run", "Count rows and tokens, estimate time and disk, and end."),
)  # fmt: skip

BY_NAME: Final[dict[str, OptionSpec]] = {option.name: option for option in RUN_OPTIONS}
BY_FIELD: Final[dict[str, OptionSpec]] = {option.field: option for option in RUN_OPTIONS}
