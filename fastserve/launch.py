"""The process tree of a server, on one page.

    supervisor                 this process
      engine                   hosts one adapter; binds the ingress
        rank 1..N-1            MPI's, if there are several; the engine is rank 0
      acceptor 0..K-1          HTTP, text <-> tokens; each binds its lane

What the supervisor owns is made here, in the order in which things can be refused: credentials, the
port, the Unix socket, the run directory, the board. Whatever happens, all of it is gone when this
returns.

Exit codes: 0 orderly, 2 configuration, 3 crash loop, 70 engine dead, 130 and 143 forced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import resource
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from setproctitle import setproctitle

from fastserve import __version__
from fastserve import log as logging
from fastserve.engine.arguments import EngineArguments, EngineSettings, LauncherDescriptor
from fastserve.errors import ConfigError
from fastserve.frontend.arguments import AcceptorArguments, AccessArguments, ModelArguments
from fastserve.metrics.board import Board
from fastserve.metrics.catalog import RESPAWNS
from fastserve.metrics.exposition import ServerInfo
from fastserve.metrics.meter import Meter
from fastserve.supervisor.child import Child, ChildSpec
from fastserve.supervisor.display import Display
from fastserve.supervisor.launched import Place, apart
from fastserve.supervisor.listener import Listeners
from fastserve.supervisor.outcome import Deadlines
from fastserve.supervisor.policy import RespawnPolicy
from fastserve.supervisor.run_directory import RunDirectory
from fastserve.supervisor.signals import Signals
from fastserve.supervisor.supervisor import Supervisor
from fastserve.world import is_launched, refuse_copies, refuse_respawn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastserve.config import Config
    from fastserve.config_observing import LogConfig
    from fastserve.credentials import CredentialFiles

# OpenMP threads that wait in a spin would take the cores from the acceptors; the library reads this
# when it is loaded, so it must be in the environment by then.
_ENGINE_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}

# Whoever reads these in a child's /proc/PID/environ would have the keys.
_SECRET_VARIABLES = ("FASTSERVE_API_KEY",)

# What a process has open before its first connection, and the supervisor for each child.
_OWN_DESCRIPTORS = 64
_CHILD_DESCRIPTORS = 4
# As many as http.connections_max may be, and some.
_DESCRIPTORS_MAX = 1 << 20

# The tokenizer's library would start threads of its own for each process.
_ACCEPTOR_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}

# Of the time from SIGTERM to a kill, how much an acceptor lets its requests finish in. The rest is
# for the last words to those that have not.
_TERMINATED_DRAIN_SHARE = 0.6


def launch(config: Config) -> int:
    """Run a server until it ends; return its exit code. Raises ConfigError before any process."""
    if sys.platform != "linux":
        raise ConfigError("fastserve needs Linux: pidfd, memfd and epoll")
    place = Place.of_environment(os.environ)
    if config.server.dp_size == 1:
        return _serve(config)
    _check_ranks(config.server.dp_size, place)
    if place.size == 1:
        return _serve(config)
    if place.rank:
        os.environ.update(_ENGINE_ENVIRONMENT)
        be_rank: Callable[[int, LogConfig], int] = importlib.import_module(
            "fastserve.engine.rank"
        ).be_rank_of_world
        return be_rank(place.rank, config.log)
    return apart(lambda go_between: _serve(config, go_between=go_between))


def _check_ranks(dp_size: int, place: Place) -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            f"server.dp_size: {dp_size} ranks need MPI; pip install 'fastserve[mpi]' brings one"
        )
    if place.size not in (1, dp_size):
        raise ConfigError(
            f"server.dp_size: {dp_size} is not the number of ranks that the launcher has started, "
            f"{place.size}"
        )


def _serve(config: Config, *, go_between: int | None = None) -> int:
    """`go_between`: a pidfd of what the launcher knows, where the engine is part of its world."""
    if go_between is not None and config.engine.respawn:
        raise ConfigError("engine.respawn: a launcher does not start the ranks of an engine again")
    setproctitle("fastserve: supervisor")
    logging.configure(process="supervisor", level=config.log.level, format=config.log.format)
    logging.log_uncaught()
    check_model(config.server.model)
    check_tracing(config.tracing.otlp_endpoint)
    if config.server.engine == "trtllm":
        refuse_copies(os.environ)
        if config.engine.respawn:
            refuse_respawn(os.environ)
    for name in _SECRET_VARIABLES:
        os.environ.pop(name, None)
    credentials = credential_files(config)
    model = model_arguments(config)
    raise_descriptor_limit(frontends=config.server.frontends)
    with contextlib.ExitStack() as stack:
        # First: whoever tells us to stop while the rest is made, or removed, finds nothing left.
        signals = stack.enter_context(Signals())
        listeners = bind_listeners(config)
        stack.callback(listeners.close)
        run_directory = RunDirectory.make(config.server.run_directory)
        stack.callback(run_directory.close)
        if config.server.port_file is not None and listeners.tcp is not None:
            _write_port_file(Path(config.server.port_file), listeners.tcp.port)
            stack.callback(Path(config.server.port_file).unlink, missing_ok=True)
        url = listeners.url("https" if config.tls.certificate else "http")
        display = Display(url=url + (config.server.root_path or ""), shown=config.server.progress)
        stack.callback(display.close)
        shared = _Shared(
            config=config,
            listeners=listeners,
            credentials=credentials,
            model=model,
            run_directory=run_directory.path,
            key=secrets.token_bytes(32),
            board=Board.make(config.server.frontends, recent_max=config.metrics.perf_requests_max),
        )
        return _supervisor(shared, display, go_between=go_between).run(signals)


def bind_listeners(config: Config) -> Listeners:
    """Take the port, the Unix socket, or both. Raises ConfigError."""
    return Listeners.bind(
        address=(config.server.host, config.server.port) if config.server.tcp else None,
        uds=config.server.uds,
        uds_mode=int(config.server.uds_mode, 8),
        mode=config.server.accept,
        frontends=config.server.frontends,
        backlog=config.server.backlog,
    )


def credential_files(config: Config) -> CredentialFiles:
    """Where keys and certificates are read from, now and at every HUP."""
    # Here, since most of what it imports is OpenSSL's.
    from fastserve.credentials import CredentialFiles  # noqa: PLC0415

    return CredentialFiles(
        api_keys=config.server.api_key,
        api_key_file=config.server.api_key_file,
        certificate=config.tls.certificate,
        key=config.tls.key,
        client_ca=config.tls.client_ca,
    )


def raise_descriptor_limit(*, frontends: int) -> None:
    """Each connection is a descriptor. The usual soft limit, 1024, is there for select() alone.

    Raises ConfigError where not even the server's own would do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN_DESCRIPTORS + _CHILD_DESCRIPTORS * frontends
    if hard < needed:
        raise ConfigError(
            f"{hard} open files are too few, the least is {needed} and one more for each "
            "connection: ulimit -n 65536 (LimitNOFILE=, or --ulimit nofile=)"
        )
    # Some container runtimes set a thousand million, and MPI's launchers close as many at a start.
    raised = min(hard, max(soft, _DESCRIPTORS_MAX))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What the supervisor owns and its children are given a part of."""

    config: Config
    listeners: Listeners
    credentials: CredentialFiles
    model: ModelArguments
    run_directory: Path
    key: bytes
    board: Board


def _supervisor(shared: _Shared, display: Display, *, go_between: int | None) -> Supervisor:
    config, board = shared.config, shared.board
    counts = Meter(board.supervisor_numbers())

    def child(spec: ChildSpec) -> Child:
        return Child(spec, log_level=config.log.level, log_format=config.log.format)

    engine = child(_engine(shared, of_world=go_between is not None))
    return Supervisor(
        engine=engine,
        acceptors=[
            child(_acceptor(shared, lane, engine=engine)) for lane in range(config.server.frontends)
        ],
        policy=RespawnPolicy(
            restarts_max=config.respawn.restarts_max, window_s=config.respawn.window_s
        ),
        engine_policy=RespawnPolicy(
            restarts_max=config.engine.respawn, window_s=config.engine.respawn_window_s
        ),
        deadlines=_deadlines(config),
        on_progress=display.progress,
        on_ready=display.ready,
        on_gone=lambda engine: shared.listeners.turn_away(
            tls=bool(config.tls.certificate), engine_died=engine.reason if engine else None
        ),
        seen_s=lambda lane: board.seen_ns(lane) / 1e9,
        on_exit=lambda child: _row_of(child, board).clear_gauges(),
        on_respawn=lambda child, reason: counts.count(
            RESPAWNS, "engine" if child.spec.essential else "acceptor", reason
        ),
        go_between=go_between,
    )


def _row_of(child: Child, board: Board) -> Meter:
    """The row of metrics that `child` writes while it lives, and we clear when it has exited."""
    if child.spec.essential:
        return Meter(board.engine_numbers())
    return Meter(board.numbers(int(child.spec.name.rpartition("-")[2])))


def _engine(shared: _Shared, *, of_world: bool) -> ChildSpec:
    config = shared.config
    settings = engine_settings(config)
    return ChildSpec(
        name="engine",
        title="fastserve: engine",
        target="fastserve.engine.process:main",
        arguments=lambda incarnation: EngineArguments(
            run_directory=str(shared.run_directory),
            incarnation=incarnation,
            key=shared.key,
            board=shared.board,
            settings=settings,
            lane_config=config.lane,
            log=config.log,
            launcher=LauncherDescriptor.of_environment(),
            world_of_launcher=of_world,
        ),
        essential=True,
        own_session=True,
        keep_mpi=is_launched(os.environ),
        environment=_ENGINE_ENVIRONMENT,
    )


def engine_settings(config: Config) -> EngineSettings:
    """What of the configuration is the engine's concern."""
    return EngineSettings(
        server=replace(config.server, api_key=()),
        engine=config.engine,
        llamacpp=config.llamacpp,
        trtllm=config.trtllm,
        sim=config.sim,
    )


def _acceptor(shared: _Shared, lane: int, *, engine: Child) -> ChildSpec:
    config = shared.config
    return ChildSpec(
        name=f"acceptor-{lane}",
        title=f"fastserve: acceptor {lane}",
        target="fastserve.frontend.acceptor:main",
        arguments=lambda incarnation: AcceptorArguments(
            lane=lane,
            incarnation=incarnation,
            engine_incarnation=engine.incarnation,
            run_directory=str(shared.run_directory),
            key=shared.key,
            listeners=shared.listeners.sockets_for(lane),
            board=shared.board,
            info=_info(config),
            tracing=config.tracing,
            log_prompts=config.log.prompts,
            balanced=config.server.accept == "shared",
            access=_access(config, shared.credentials),
            http=config.http,
            limits=config.limits,
            model=shared.model,
            responses=config.responses,
            refuse_unknown_fields=config.server.unknown_fields == "refuse",
            lane_config=config.lane,
            log=config.log,
            stall_unhealthy_s=config.engine.stall_unhealthy_s,
            terminated_drain_s=_TERMINATED_DRAIN_SHARE * config.server.terminate_timeout_s,
        ),
        environment=_ACCEPTOR_ENVIRONMENT,
    )


def _info(config: Config) -> ServerInfo:
    """What /metrics says of this server; nothing here is a secret, or a path."""
    server, engine = config.server, config.engine
    return ServerInfo(
        version=__version__,
        python=platform.python_version(),
        engine=server.engine,
        settings={
            "frontends": str(server.frontends),
            "accept": server.accept,
            "max_num_seqs": str(engine.max_num_seqs),
            "max_seq_len": str(engine.max_seq_len or ""),
            "tensor_parallel_size": str(config.trtllm.tensor_parallel_size),
            "pipeline_parallel_size": str(config.trtllm.pipeline_parallel_size),
        },
        names=config.metrics.names,
    )


def _deadlines(config: Config) -> Deadlines:
    return Deadlines(
        start_timeout_s=config.server.start_timeout_s,
        stall_kill_s=config.engine.stall_kill_s,
        silent_timeout_s=config.respawn.silent_timeout_s,
        drain_timeout_s=config.server.drain_timeout_s,
        terminate_timeout_s=config.server.terminate_timeout_s,
        engine_dead_exit_timeout_s=config.server.engine_dead_exit_timeout_s,
    )


def _access(config: Config, credentials: CredentialFiles) -> AccessArguments:
    return AccessArguments(
        credentials=credentials.read(),
        cors=config.cors,
        root_path=config.server.root_path,
        metrics_open=config.server.metrics_open,
        page=config.server.page,
        handshake_timeout_s=config.tls.handshake_timeout_s,
    )


def model_arguments(config: Config) -> ModelArguments:
    """What frontends are told of the model. Raises ConfigError for a template that is not there."""
    path, template = config.server.chat_template, None
    if path is not None:
        try:
            template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"server.chat_template: cannot read {path}: {error}") from error
    return ModelArguments(
        template_bytes_max=config.limits.text_template_bytes_max,
        names=config.server.served_model_name,
        chat_template=template,
        tool_parser=config.server.tool_parser,
        reasoning_parser=config.server.reasoning_parser,
    )


def check_model(model: str | None) -> None:
    """Raise ConfigError for a path at which there is nothing, or nothing that we may read."""
    if model is None:
        return
    try:
        found = Path(model).expanduser().exists()
    # A directory on the way that we may not enter; a home that nobody knows.
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"server.model: {model}: {reason}") from error
    if not found:
        raise ConfigError(
            f"server.model: {model}: no such file or directory; nothing is downloaded, so give "
            "the path of a GGUF file or of a directory"
        )
    if not os.access(Path(model).expanduser(), os.R_OK):
        raise ConfigError(f"server.model: {model}: user {os.geteuid()} may not read it")


def check_tracing(otlp_endpoint: str | None) -> None:
    """Raise ConfigError if spans are asked for and OpenTelemetry is not installed."""
    if otlp_endpoint is None:
        return
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:  # of a package that it is in
        found = None
    if found is None:
        raise ConfigError(
            "tracing.otlp_endpoint: needs OpenTelemetry: pip install 'fastserve[otel]'"
        )


def _write_port_file(path: Path, port: int) -> None:
    """Write the port atomically: whoever sees the file reads a whole number."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{port}\n")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"server.port_file: cannot write {path}: {error.strerror}") from error
