"""Every setting: its name, type, range, default and meaning, and what happens at a limit.

Declared here once: the flags, `fastserve.toml`, the FASTSERVE_ variables and `--help` derive from
it (settings.py, sources.py). The command line wins over the environment, the environment over the
file, the file over the defaults. Everything is read and checked before the first process starts.

Whoever needs a setting is given its section or its value, never this whole configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from fastserve.config_engine import EngineConfig, LlamaCppConfig, SimConfig
from fastserve.config_http import (
    GIB,
    HOUR_S,
    KIB,
    MIB,
    CORSConfig,
    HTTPConfig,
    ResponsesConfig,
    TLSConfig,
    seconds,
)
from fastserve.config_observing import LogConfig, MetricsConfig, TracingConfig
from fastserve.config_trtllm import TrtLlmConfig
from fastserve.errors import ConfigError
from fastserve.settings import Section, render_toml, setting
from fastserve.sources import (
    FILE_VARIABLE,
    CommandLine,
    from_environment,
    from_file,
    merge,
    parse_command_line,
    parser_of,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

OCTAL_MODE = re.compile(r"0?[0-7]{3}")
# Any visible ASCII but what ends a path; no empty part, so no "/" at the end either.
ROOT_PATH = re.compile(r"(?:/[!\"$-.0->@-~]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Section):
    """What is served, where, and by how many processes."""

    section: ClassVar[str] = "server"

    # A constant, not the number of cores: the same command gives the same process tree everywhere.
    # Two also keeps one acceptor answering while the other is respawned. 64 is the width of the
    # lane in a request id.
    frontends: int = setting(
        2,
        "Acceptor processes, each with an HTTP frontend.",
        at_least=1,
        at_most=64,
        aliases=("num_serve_frontends",),
    )
    model: str | None = setting(
        None,
        "The model: a GGUF file, a directory, or not set for the small model that comes with the "
        "llamacpp engine.",
        placeholder="PATH",
    )
    engine: Literal["llamacpp", "sim", "trtllm"] = setting(
        "llamacpp", "What generates: llama.cpp on the CPU, a simulation, or TensorRT-LLM."
    )
    dp_size: int = setting(
        1,
        "Ranks of the engine, each with the whole model, that requests are shared out to; more "
        "than one for llamacpp and sim, over MPI.",
        unit="ranks",
        at_least=1,
        at_most=64,
    )
    host: str = setting("127.0.0.1", "The address to listen on.", placeholder="ADDRESS")
    port: int = setting(
        8000, "The TCP port to listen on; 0: one that is free.", at_least=0, at_most=65_535
    )
    port_file: str | None = setting(
        None, "Write the port's number to this file once it is bound.", placeholder="PATH"
    )
    tcp: bool = setting(True, "Whether to listen on host and port; without, uds must be set.")
    uds: str | None = setting(
        None,
        "A Unix socket to listen on, too; always without TLS. One that a dead server left is "
        "replaced.",
        placeholder="PATH",
    )
    uds_mode: str = setting(
        "0600", "Who may connect to the Unix socket: its mode, in octal.", placeholder="MODE"
    )
    accept: Literal["shared", "reuseport"] = setting(
        "shared",
        "How connections reach the acceptors: all accept from one shared socket, or each has its "
        "own and the kernel spreads connections by their address.",
    )
    api_key: tuple[str, ...] = setting(
        (),
        "A key that clients must have for everything but /health and /ready; none: nobody needs "
        "one. Flags show in ps while the server starts: better in a variable or a file.",
        placeholder="KEY",
        secret=True,
    )
    api_key_file: str | None = setting(
        None,
        "A file with more keys, one a line; read anew for each acceptor that starts.",
        placeholder="PATH",
    )
    metrics_open: bool = setting(False, "Whether /metrics needs no key either.")
    page: bool = setting(
        True, "Whether / is a page to chat with the model and to watch the server."
    )
    root_path: str | None = setting(
        None,
        "A path in front of every route, for a proxy that does not strip it; both work then.",
        placeholder="/PATH",
    )
    served_model_name: tuple[str, ...] = setting(
        (),
        "A name of the model in requests, of which there may be several; the first is in answers. "
        "None: its own.",
        placeholder="NAME",
    )
    unknown_fields: Literal["ignore", "refuse"] = setting(
        "ignore",
        "What becomes of a request with a field that nobody knows: it is served all the same, and "
        "the field counted, or it is answered 400.",
    )
    chat_template: str | None = setting(
        None,
        "A file with the chat template to use; not set: the model's own.",
        placeholder="PATH",
    )
    tool_parser: (
        Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"] | None
    ) = setting(
        None,
        "How the model writes calls of tools; not set: calls that the model may or may not make "
        "are refused with 400.",
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = setting(
        None, "How the model writes its thoughts; not set: they are part of the answer's text."
    )
    run_directory: str | None = setting(
        None,
        "Where to make the private directory of the lanes' sockets; not set: in XDG_RUNTIME_DIR, "
        "or else in the directory for temporary files.",
        placeholder="PATH",
    )
    start_timeout_s: float = seconds(
        600.0, "An engine that is not ready by then stops the server.", at_least=1
    )
    drain_timeout_s: float = seconds(
        30.0,
        "How long SIGTERM lets requests in flight finish; what is left gets an error.",
        at_least=0,
    )
    terminate_timeout_s: float = seconds(
        5.0, "A process that has not exited this long after SIGTERM is killed.", at_most=HOUR_S
    )
    engine_dead_exit_timeout_s: float = seconds(
        5.0, "Once the engine is dead, every process is gone within this time.", at_most=HOUR_S
    )
    # The kernel cuts it to net.core.somaxconn, which is 4096 on Linux since 5.4.
    backlog: int = setting(
        4096,
        "Connections that may wait to be accepted; beyond it the kernel drops their SYN.",
        unit="connections",
        at_least=1,
        at_most=65_535,
    )
    progress: Literal["auto", "on", "off"] = setting(
        "auto", "Whether to show how far loading has come; auto: where stderr is a terminal."
    )

    def check(self) -> None:
        if not self.tcp and self.uds is None:
            raise ConfigError("server.tcp: without it server.uds must be set")
        if not self.tcp and self.port_file is not None:
            raise ConfigError("server.port_file: without server.tcp there is no port")
        if "" in self.served_model_name:
            raise ConfigError("server.served_model_name: a name is not empty")
        if self.dp_size > 1 and self.engine == "trtllm":
            raise ConfigError(
                f"server.dp_size: {self.dp_size} ranks are for llamacpp and sim; trtllm spreads by "
                "itself, see [trtllm]"
            )
        if not OCTAL_MODE.fullmatch(self.uds_mode):
            raise ConfigError(f"server.uds_mode: {self.uds_mode!r} is not octal, such as 0660")
        if self.root_path is not None and not ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"server.root_path: {self.root_path!r} does not begin with /, ends in it, or has "
                "what must be percent-encoded"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RespawnConfig(Section):
    """When acceptors that exit are started again, and when that is given up."""

    section: ClassVar[str] = "respawn"

    restarts_max: int = setting(
        5,
        "More acceptor exits than this within the window are a crash loop: the server stops with "
        "exit code 3.",
        unit="exits",
        at_least=0,
        at_most=1000,
    )
    window_s: float = seconds(60.0, "The window of restarts_max.", at_least=1)
    silent_timeout_s: float = seconds(
        10.0,
        "An acceptor whose event loop has not run for this long (stopped, or stuck) is killed and "
        "started again.",
        at_least=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(Section):
    """What a frontend takes on; all of it for each acceptor."""

    section: ClassVar[str] = "limits"

    requests_in_flight_max: int = setting(
        4096,
        "Requests in flight; one more is answered 429, overloaded.",
        unit="requests",
        at_least=1,
        at_most=1_000_000,
    )
    request_timeout_s: float = seconds(
        3600.0,
        "How long a request may take, from its arrival to its end; then 504, or an error event in "
        "a stream. Clients may ask for less: X-Request-Timeout-Ms. 0: no limit.",
        at_least=0,
    )
    sse_ping_interval_s: float = seconds(
        15.0,
        "A stream that is silent this long gets an SSE comment, so that proxies keep it open.",
        at_most=HOUR_S,
    )
    text_template_bytes_max: int = setting(
        4 * MIB,
        "The longest prompt that a chat template may render; beyond it 400.",
        unit="bytes",
        at_least=KIB,
        at_most=GIB,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneConfig(Section):
    """The message paths between acceptors and engine."""

    section: ClassVar[str] = "lane"

    in_flight_frames_max: int = setting(
        10_000,
        "The high water mark of a lane; beyond it the lane is full, and nothing blocks.",
        unit="frames",
        at_least=1,
        at_most=10_000_000,
    )
    full_timeout_s: float = seconds(
        5.0, "A lane that stays full for this long is treated as dead.", at_most=HOUR_S
    )
    heartbeat_interval_s: float = seconds(
        1.0, "How often the engine says that it is alive, and how busy.", at_most=60
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every section. It can be pickled: it goes to the children in their spawn arguments."""

    server: ServerConfig = field(default_factory=ServerConfig)
    tls: TLSConfig = field(default_factory=TLSConfig)
    cors: CORSConfig = field(default_factory=CORSConfig)
    respawn: RespawnConfig = field(default_factory=RespawnConfig)
    http: HTTPConfig = field(default_factory=HTTPConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
    lane: LaneConfig = field(default_factory=LaneConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    llamacpp: LlamaCppConfig = field(default_factory=LlamaCppConfig)
    trtllm: TrtLlmConfig = field(default_factory=TrtLlmConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        if self.engine.stall_unhealthy_s < 2 * self.lane.heartbeat_interval_s:
            raise ConfigError(
                f"engine.stall_unhealthy_s: {self.engine.stall_unhealthy_s:g} is less than two of "
                f"lane.heartbeat_interval_s, which is {self.lane.heartbeat_interval_s:g}"
            )


DESCRIPTION = """\
Serve a language model over the OpenAI API. Without a flag: a small model that is installed, on
this machine's processors, at http://127.0.0.1:8000/v1. Ctrl-C ends it."""

EPILOG = """\
A setting is, from the strongest to the weakest, a flag, an environment variable, a line of the file
that --config or FASTSERVE_CONFIG names, or its default. They are spelled alike:

  flag               --http-body-bytes-max 1048576      --port 80
  variable           FASTSERVE_HTTP_BODY_BYTES_MAX      FASTSERVE_PORT
  file               [http]                             [server]
                     body_bytes_max = 1048576           port = 80

No file is read unless one is named; `fastserve --print-config > fastserve.toml` makes one. An
empty value unsets what may be unset. Unknown settings and impossible values are refused with exit
code 2. Variables that Kubernetes makes for a service named fastserve are passed over."""

PREAMBLE = """\
Every setting of fastserve, what it means, and [its range; its default].

Read with `fastserve --config fastserve.toml`. A flag or a FASTSERVE_ variable wins over a line \
here; a line left out is at its default. `fastserve --print-config` shows what results."""


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the flags. Raises ConfigError where one lacks its value; unknown ones come later."""
    return parse_command_line(Config(), command_line_parser(), argv)


def resolve(command_line: CommandLine, environ: Mapping[str, str]) -> Config:
    """Find every setting's value. Reads the file, if one is named. Raises ConfigError."""
    defaults = Config()
    sources = [from_environment(defaults, environ), command_line.source]
    path = command_line.config_path
    if path is None:
        path = environ.get(FILE_VARIABLE, "")
    # Empty is "no file" here too: `--config ""` undoes the variable.
    if path:
        sources.insert(0, from_file(defaults, path))
    return merge(defaults, sources)


def load_config(argv: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The configuration that a command line and an environment amount to. Raises ConfigError."""
    return resolve(read_command_line(argv), environ)


def help_text() -> str:
    return command_line_parser().format_help()


def config_toml(config: Config) -> str:
    """`config` as a commented file that reads back as the same."""
    return render_toml(config, preamble=PREAMBLE)


def command_line_parser(
    *, prog: str = "fastserve", description: str = DESCRIPTION
) -> argparse.ArgumentParser:
    """Every flag that a server takes."""
    return parser_of(Config(), prog=prog, description=description, epilog=EPILOG)
