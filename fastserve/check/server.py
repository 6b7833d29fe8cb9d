"""What a start would need, tried in the order in which a start would, and undone at once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fastserve.api.requests import parse_chat
from fastserve.check.findings import fail, ok, warn
from fastserve.engine.model_files import resolve_model
from fastserve.engine.registry import make_engine
from fastserve.errors import ConfigError, FastserveError, StartError
from fastserve.frontend.model import Model
from fastserve.launch import (
    bind_listeners,
    check_model,
    check_tracing,
    credential_files,
    engine_settings,
    model_arguments,
)
from fastserve.supervisor.run_directory import RunDirectory

if TYPE_CHECKING:
    from fastserve.check.findings import Finding
    from fastserve.config import Config
    from fastserve.generation import ModelCard

# The distribution that an engine's adapter drives; the simulated one has none.
_LIBRARIES = {"llamacpp": ("xllamacpp", "cpu"), "trtllm": ("tensorrt-llm", "trtllm")}
_HELLO = b'{"messages":[{"role":"user","content":"hello"}]}'
_HELLO_WITH_A_TOOL = (
    _HELLO[:-1] + b',"tools":[{"type":"function","function":{"name":"greet","parameters":{}}}]}'
)


def check_credentials(config: Config) -> Finding:
    """Keys and certificates: read as the acceptors will get them."""
    try:
        credentials = credential_files(config).read()
    except ConfigError as error:
        return fail("credentials", str(error))
    keys = len(credentials.api_keys)
    tls = "TLS" if credentials.certificates is not None else "no TLS"
    if not keys and config.server.host not in ("127.0.0.1", "::1", "localhost"):
        return warn(
            "credentials",
            f"no API key, {tls}, and {config.server.host} can be reached from elsewhere",
            "--api-key-file FILE, or a proxy that asks who comes",
        )
    return ok("credentials", f"{keys} API keys, {tls}")


def check_port(config: Config) -> Finding:
    """Bind what the server would listen on, and let go."""
    try:
        listeners = bind_listeners(config)
    except ConfigError as error:
        return fail("port", str(error))
    url = listeners.url("https" if config.tls.certificate else "http")
    listeners.close()
    return ok("port", f"{url} is free")


def check_run_directory(config: Config) -> Finding:
    """Make one, and remove it."""
    try:
        made = RunDirectory.make(config.server.run_directory)
    except ConfigError as error:
        return fail("run directory", str(error), "--run-directory DIRECTORY")
    made.close()
    return ok("run directory", f"in {made.path.parent}")


def check_spans(config: Config) -> list[Finding]:
    """What exports spans, where that is asked for."""
    endpoint = config.tracing.otlp_endpoint
    if endpoint is None:
        return []
    try:
        check_tracing(endpoint)
    except ConfigError as error:
        return [fail("tracing", str(error), "pip install 'fastserve[otel]'")]
    return [ok("tracing", f"spans go to {endpoint}")]


def check_library(config: Config) -> Finding:
    """The inference library of the engine."""
    engine = config.server.engine
    if engine not in _LIBRARIES:
        return ok("engine", f"{engine} needs no library")
    library, extra = _LIBRARIES[engine]
    try:
        return ok("engine", f"{engine}: {library} {importlib.metadata.version(library)}")
    except importlib.metadata.PackageNotFoundError:
        return fail("engine", f"{engine} needs {library}", f"pip install 'fastserve[{extra}]'")


def check_model_files(config: Config) -> tuple[Finding, ModelCard | None, int]:
    """The model as the engine would describe it; with its card, and its size in bytes."""
    try:
        check_model(config.server.model)
        path = resolve_model(config.server.model)
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            engine = make_engine(engine_settings(config), run_directory=Path(scratch))
            stack.callback(engine.close)
            card = engine.describe()
            # Here: what it describes may lie in the scratch directory.
            model = _read_text(config, card)
    except (FastserveError, ImportError, OSError) as error:
        return fail("model", str(error), "--model FILE.gguf, or a directory"), None, 0
    detail = (
        f"{card.name}: {card.vocab_size} tokens in its vocabulary, at most {card.max_seq_len} "
        f"in prompt and answer, {_template_words(config, card)}"
    )
    if config.server.tool_parser is not None and not model.takes_tools:
        finding = warn(
            "model",
            f"{detail} with no place for tools: --tool-parser {config.server.tool_parser} is in "
            "vain, and tools with tool_choice auto are refused with 400",
            "--chat-template FILE, one that has",
        )
    else:
        finding = ok("model", detail)
    return finding, card, _size_of(path)


def _template_words(config: Config, card: ModelCard) -> str:
    if config.server.chat_template is not None:
        return f"the chat template {config.server.chat_template}"
    return f"{'a' if card.chat_template else 'no'} chat template"


def _read_text(config: Config, card: ModelCard) -> Model:
    """Read the tokenizer, and say hello in the chat template, with a tool if there may be some."""
    try:
        model = Model.told(card, model_arguments(config))
        if card.chat_template is not None or config.server.chat_template is not None:
            with_tools = config.server.tool_parser is not None and model.takes_tools
            model.chat_prompt(parse_chat(_HELLO_WITH_A_TOOL if with_tools else _HELLO))
    except FastserveError as error:
        raise StartError(f"{card.name}: {error}") from error
    return model


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
