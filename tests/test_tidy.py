"""House rules that a formatter cannot check: who may import whom, and how long is too long."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fastserve"
FILES = sorted(PACKAGE.rglob("*.py"))

LEAVES = {"errors", "log", "generation"}

# layer -> the layers it may import, besides itself. A layer is the first name after "fastserve.".
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    "cli": {"config", "launch", "errors", "settings"},
    "config": {
        "config_engine",
        "config_http",
        "config_observing",
        "config_trtllm",
        "errors",
        "settings",
        "sources",
    },
    "config_engine": {"config_http", "errors", "settings"},
    "config_http": {"errors", "settings"},
    "config_observing": {"config_http", "errors", "settings"},
    "config_trtllm": {"settings"},
    "credentials": {"errors", "log"},
    "settings": {"errors"},
    "world": {"errors"},
    "sources": {"errors", "settings"},
    "launch": {
        "config",
        "config_observing",
        "credentials",
        "errors",
        "log",
        "metrics",
        "supervisor",
        "world",
    },
    "control": set(),
    "listening": set(),
    "readable": set(),
    "process": {"control", "errors", "log"},
    "supervisor": {"control", "process", "errors", "listening", "log"},
    "frontend": {
        "config",
        "config_http",
        "config_observing",
        "control",
        "credentials",
        "listening",
        "process",
        "readable",
        "http1",
        "api",
        "text",
        "lane",
        "metrics",
    }
    | LEAVES,
    "engine": {
        "config",
        "config_engine",
        "config_observing",
        "config_trtllm",
        "control",
        "process",
        "readable",
        "lane",
        "text",
        "metrics",
    }
    | LEAVES,
    "lane": {"generation", "errors"},
    "load": set(),
    "top": set(),
    # What a start would do, and undo again.
    "check": {"api", "config", "engine", "frontend", "launch", "supervisor"} | LEAVES,
    "binary": {"cli", "errors"},
    "completion": {"cli", "config", "settings"},
    "api": {"generation", "errors"},
    "text": {"errors"},
    "http1": set(),
    "metrics": set(),
    "generation": set(),
    "errors": set(),
    "log": {"errors"},
}

# Exceptions, each a file and what more it may import: light values that the supervisor hands on.
ALSO: dict[str, set[str]] = {
    "launch.py": {"fastserve.engine.arguments", "fastserve.frontend.arguments"},
}

# One owner per outside library: replacing it then means editing these files and no others.
OWNERS: dict[str, set[str]] = {
    "asyncio": {
        "engine/trtllm_loop.py",
        "frontend/accepting.py",
        "frontend/acceptor.py",
        "frontend/exchanges.py",
        "http1/connection.py",
        "http1/connections.py",
    },
    "ctypes": {"engine/libllama.py", "engine/llama.py", "process.py"},
    "httptools": {"http1/parser.py"},
    "jinja2": {"text/chat_template.py"},
    "llguidance": {"engine/guidance.py"},
    "mpi4py": {"engine/mpi_library.py"},
    "msgspec": {
        "api/anthropic_requests.py",
        "api/anthropic_turns.py",
        "api/answers.py",
        "api/body.py",
        "api/embeddings.py",
        "api/openapi.py",
        "api/prompts.py",
        "api/requests.py",
        "api/response_input.py",
        "api/response_requests.py",
        "api/structured.py",
        "api/tokenizing.py",
        "api/tools.py",
        "control.py",
        "engine/adapters/sim.py",
        "engine/adapters/trtllm.py",
        "engine/interface.py",
        "engine/trtllm_api.py",
        "frontend/prepare.py",
        "generation.py",
        "lane/messages.py",
    },
    "multiprocessing": {
        "binary/entry.py",
        "engine/arguments.py",
        "frontend/preparer.py",
        "metrics/board.py",
        "supervisor/child.py",
    },
    "numpy": {
        "engine/guidance.py",
        "engine/llama.py",
        "engine/prefixes.py",
        "engine/sampler.py",
    },
    "orjson": {
        "api/anthropic_answers.py",
        "api/body.py",
        "api/chat_parts.py",
        "api/chunks.py",
        "api/embeddings.py",
        "api/input_items.py",
        "api/openapi.py",
        "api/response_chunks.py",
        "api/response_objects.py",
        "api/responses.py",
        "api/structured.py",
        "api/tokenizing.py",
        "api/tools.py",
        "lane/codec.py",
        "metrics/perf.py",
    },
    "prometheus_client": {"metrics/exposition.py", "top/scrape.py"},
    "opentelemetry": {"frontend/tracing.py"},
    "psutil": {"engine/mpi_watch.py", "load/cpu.py", "supervisor/child.py"},
    "setproctitle": {"launch.py", "process.py"},
    "ssl": {"credentials.py", "frontend/accepting.py"},
    "tensorrt_llm": {"engine/trtllm_api.py"},
    "tokenizers": {"text/tokenizer.py"},
    "torch": {"engine/trtllm_api.py"},
    "uvloop": {"frontend/accepting.py", "frontend/acceptor.py"},
    "rich": {"top/command.py", "top/view.py"},
    "xllamacpp": set(),
    "zmq": {"lane/client.py", "lane/events.py", "lane/server.py"},
}

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
HEADER_LINES_MAX = 24


def imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the absolute import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_file_is_tidy(path: Path) -> None:
    name = path.relative_to(PACKAGE).as_posix()
    layer = name.split("/")[0].removesuffix(".py")
    source = path.read_text()
    tree = ast.parse(source)

    header = ast.get_docstring(tree)
    assert header, "say what this file is for, and what it must not know"
    assert header.count("\n") < HEADER_LINES_MAX, "a header is not a manual"
    assert source.count("\n") <= FILE_LINES_MAX

    for module in imported_modules(tree):
        package, *rest = module.split(".")
        if package == "fastserve":
            if not rest or rest[0] == "__version__":
                continue
            allowed = rest[0] in MAY_IMPORT[layer] | {layer}
            also = any(module.startswith(more) for more in ALSO.get(name, ()))
            assert allowed or also, f"{layer} may not import {module}"
            if rest[:2] == ["engine", "adapters"]:
                assert name == "engine/registry.py", f"{module} is named by the registry alone"
        elif package in OWNERS:
            assert name in OWNERS[package], f"only {sorted(OWNERS[package])} may import {package}"

    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES_MAX, f"{node.name}() is {length} lines"


def test_the_top_level_is_fixed() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    built = {"build", "dist", "fastserve.egg-info", "__pycache__"}
    assert names - built == {
        "fastserve",
        "tests",
        "bench",
        "fastserve.toml",
        "pyproject.toml",
        "README.md",
    }


@pytest.mark.parametrize("folder", ["http1", "api", "text", "lane", "metrics"])
def test_the_rooms_below_know_nothing_of_each_other(folder: str) -> None:
    siblings = {"http1", "api", "text", "lane"} - {folder}
    assert not MAY_IMPORT[folder] & siblings
