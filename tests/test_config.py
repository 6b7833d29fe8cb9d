"""The settings of fastserve, and how they are found: flag > variable > file > default."""

from __future__ import annotations

import dataclasses
import pickle
import tomllib
from pathlib import Path

import pytest

from fastserve.config import Config, ServerConfig, config_toml, help_text, load_config
from fastserve.config_engine import EngineConfig
from fastserve.config_http import CORSConfig, HTTPConfig, TLSConfig
from fastserve.errors import ConfigError
from fastserve.frontend.access import CORS
from fastserve.frontend.response_store import StoreLimits
from fastserve.http1.limits import Limits
from fastserve.settings import HIDDEN, Setting, Value, all_settings, sections_of, settings_of
from fastserve.text.reasoning import REASONING_FORMATS
from fastserve.text.tool_calls.formats import TOOL_FORMATS

SETTINGS = all_settings(Config())
TOP = Path(__file__).parent.parent


def load(
    argv: str = "", environ: dict[str, str] | None = None, file: str = "", *, path: Path
) -> Config:
    """Load with `file` as the text of a file that --config names."""
    words = argv.split()
    if file:
        path = path / "my.toml"
        path.write_text(file)
        words = ["--config", str(path), *words]
    return load_config(words, environ or {})


def problems(
    argv: str = "", environ: dict[str, str] | None = None, file: str = "", *, path: Path
) -> list[str]:
    """The lines of the refusal, with the file's folder left out."""
    with pytest.raises(ConfigError) as refusal:
        load(argv, environ, file, path=path)
    return str(refusal.value).replace(f"{path}/", "").splitlines()


def test_with_nothing_given_everything_is_at_its_default() -> None:
    assert load_config([], {}) == Config()


@pytest.mark.parametrize(
    ("argv", "environ", "file", "port"),
    [
        ("--port 1", {"FASTSERVE_PORT": "2"}, "[server]\nport = 3", 1),
        ("", {"FASTSERVE_PORT": "2"}, "[server]\nport = 3", 2),
        ("", {}, "[server]\nport = 3", 3),
        ("", {}, "[server]\n", 8000),
        ("--port 1 --port 4", {}, "", 4),
        ("--port=5", {}, "", 5),
    ],
)
def test_the_closest_source_wins(
    argv: str, environ: dict[str, str], file: str, port: int, tmp_path: Path
) -> None:
    assert load(argv, environ, file, path=tmp_path).server.port == port


# Texts that mean something, and so may not be just any.
TEXTS = {"uds_mode": "0660", "root_path": "/llm", "otlp_endpoint": "http://a.example/v1/traces"}
LISTS = {
    "allow_origins": ("https://a.example", "http://b.example:8080"),
    "names": ("vllm", "trtllm"),
}
# What must be set as well, lest the combination be refused.
ALSO: dict[str, dict[str, Value]] = {
    "engine.stall_kill_s": {"engine.stall_unhealthy_s": 0.1, "lane.heartbeat_interval_s": 0.05},
    "engine.stall_unhealthy_s": {"lane.heartbeat_interval_s": 0.05},
    "http.bodies_bytes_max": {"http.body_bytes_max": 1024},
    "server.tcp": {"server.uds": "socket"},
    "tls.key": {"tls.certificate": "pem"},
    "tls.client_ca": {"tls.certificate": "pem"},
}


def another_value(one: Setting) -> Value:
    """A value that is not the default of `one`."""
    if one.kind is bool:
        return not one.default
    if one.listed:
        return LISTS.get(one.name, ("a", "b"))
    if one.choices:
        return next(choice for choice in one.choices if choice != one.default)
    if one.ranged:
        assert one.declaration.at_least is not None
        assert one.declaration.at_most is not None
        low, high = one.declaration.at_least, one.declaration.at_most
        value: int | float = one.kind(low + 1 if low + 1 < high else (low + high) / 2)
        return value if value != one.default else one.kind(high)
    return TEXTS.get(one.name, "text")


def as_text(value: Value) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def as_toml(value: Value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


def as_flags(one: Setting, value: Value, *, name: str) -> list[str]:
    if isinstance(value, bool):
        return [name if value else f"--no-{name.removeprefix('--')}"]
    return [word for each in (value if one.listed else [value]) for word in (name, str(each))]  # type: ignore[union-attr] # a listed value is a tuple


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.key)
def test_every_setting_can_be_set_by_flag_variable_and_file(one: Setting, tmp_path: Path) -> None:
    value = another_value(one)
    also = ALSO.get(one.key, {})
    flags = {each.key: each.flag for each in SETTINGS}
    rest = [word for key, more in also.items() for word in (flags[key], str(more))]
    path = tmp_path / "one.toml"
    path.write_text(f"[{one.section}]\n{one.name} = {as_toml(value)}\n")
    for config in (
        load_config([*as_flags(one, value, name=one.flag), *rest], {}),
        load_config([*as_flags(one, value, name="--" + one.flag[2:].replace("-", "_")), *rest], {}),
        load_config(rest, {one.variable: as_text(value)}),
        load_config(["--config", str(path), *rest], {}),
    ):
        assert _changed(config) == {one.key: value, **also}


def test_a_list_is_as_many_flags_or_one_with_commas() -> None:
    for argv in (["--api-key", "a", "--api-key", "b,c"], ["--api-key=a, b ,c"]):
        assert load_config(argv, {}).server.api_key == ("a", "b", "c")
    environ = {"FASTSERVE_API_KEY": "a,b"}
    assert load_config([], environ).server.api_key == ("a", "b")
    assert load_config(["--api-key", ""], environ).server.api_key == ()


def test_keys_are_not_shown_and_what_is_shown_is_no_key(tmp_path: Path) -> None:
    shown = config_toml(load_config(["--api-key", "hunter2,hunter3"], {}))
    assert "hunter" not in shown
    assert f'api_key = ["{HIDDEN}", "{HIDDEN}"]' in shown
    [problem] = problems(file=shown, path=tmp_path)
    assert problem.startswith("server.api_key: (not shown) stands for a secret")


def test_a_wrong_key_is_not_shown_either(tmp_path: Path) -> None:
    [problem] = problems(file='[server]\napi_key = "hunter2"', path=tmp_path)
    assert problem == "server.api_key: (not shown) is not a list of texts (from my.toml)"
    [problem] = problems(file='[server]\napi_key = ["hunter2\\u0000"]', path=tmp_path)
    assert "hunter" not in problem


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--no-tcp", "server.tcp: without it server.uds must be set"),
        ("--no-tcp --uds x --port-file y", "server.port_file: without server.tcp there is no port"),
        ("--uds-mode 0888", "server.uds_mode: '0888' is not octal, such as 0660"),
        ("--uds-mode 7", "server.uds_mode: '7' is not octal, such as 0660"),
        *(
            (f"--root-path {path}",
             (f"server.root_path: {path!r} does not begin with /, ends in it, or has what must be "
             "percent-encoded"))
            for path in ("llm", "/llm/", "/", "/a//b", "/a?b", "/a#b", "/é")
        ),
        ("--http-bodies-bytes-max 1024", ("http.bodies_bytes_max: 1024 is less than "
         "http.body_bytes_max, which is 33554432")),
        ("--tls-key k.pem", "tls.key: not without tls.certificate"),
        ("--tls-client-ca c.pem", "tls.client_ca: not without tls.certificate"),
        ("--cors-allow-origins * --cors-allow-credentials",
         "cors.allow_credentials: not with origin *: name the origins"),
        *(
            (f"--cors-allow-origins {origin}",
             f"cors.allow_origins: {origin!r} is not SCHEME://HOST[:PORT], null or *")
            for origin in ("a.example", "https://a.example/", "https://*.example", "HTTPS://a")
        ),
        ("--cors-allow-headers x:y", "cors.allow_headers: 'x:y' is not the name of a header"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(argv: str, problem: str, tmp_path: Path) -> None:
    assert problems(argv, path=tmp_path) == [problem]


@pytest.mark.parametrize(
    "origin", ["https://a.example", "http://[::1]:8080", "app://x", "null", "http://localhost:3000"]
)
def test_these_are_origins(origin: str) -> None:
    assert load_config(["--cors-allow-origins", origin], {}).cors.allow_origins == (origin,)


def test_what_access_is_given_of_cors_is_all_of_its_settings() -> None:
    names = {one.name for one in SETTINGS if one.section == "cors"}
    assert names == {each.name for each in dataclasses.fields(CORS)}
    assert CORSConfig().max_age_s == CORS().max_age_s
    assert TLSConfig().certificate is None


def _changed(config: Config) -> dict[str, object]:
    values = {one.key: _value(config, one.key) for one in SETTINGS}
    return {one.key: values[one.key] for one in SETTINGS if values[one.key] != one.default}


def _value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    ("argv", "environ", "model"),
    [
        ("", {}, "a.gguf"),
        ("--model=", {}, None),
        ("", {"FASTSERVE_MODEL": ""}, None),
        ("--model b.gguf", {"FASTSERVE_MODEL": ""}, "b.gguf"),
    ],
)
def test_an_empty_value_unsets_what_may_be_unset(
    argv: str, environ: dict[str, str], model: str | None, tmp_path: Path
) -> None:
    file = '[server]\nmodel = "a.gguf"'
    assert load(argv, environ, file, path=tmp_path).server.model == model


def test_the_variable_names_the_file_unless_the_flag_does(tmp_path: Path) -> None:
    for port in (1, 2):
        (tmp_path / f"{port}.toml").write_text(f"[server]\nport = {port}")
    variable = {"FASTSERVE_CONFIG": str(tmp_path / "1.toml")}
    assert load_config([], variable).server.port == 1
    assert load_config(["--config", str(tmp_path / "2.toml")], variable).server.port == 2
    assert load_config(["--config", ""], variable).server.port == 8000
    assert load_config([], {"FASTSERVE_CONFIG": ""}).server.port == 8000


def test_no_file_is_read_that_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fastserve.toml").write_text("[server]\nport = 1")
    monkeypatch.chdir(tmp_path)
    assert load_config([], {}).server.port == 8000


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--frontends 65", "server.frontends: 65 is not from 1 to 64 (from --frontends)"),
        ("--port -1", "server.port: -1 is not from 0 to 65535 (from --port)"),
        ("--sim_step_ms nan", "sim.step_ms: nan is not from 0 to 60000 (from --sim-step-ms)"),
        ("--engine simm", ('server.engine: "simm" is not one of llamacpp, sim, trtllm; '
                          "did you mean sim? (from --engine)")),
        ("--prot 80", "--prot: no such flag; did you mean --port?"),
        ("--prot=80", "--prot: no such flag; did you mean --port?"),
        ("--step-ms 80", "--step-ms: no such flag; did you mean --sim-step-ms?"),
        ("--server-port 80", "--server-port: no such flag; did you mean --port?"),
        ("--zzzz", "--zzzz: no such flag; see --help"),
        ("-x", "-x: no such flag; see --help"),
        ("--fronten 2", "--fronten: no such flag; did you mean --frontends?"),
        ("model.gguf", '"model.gguf": not a flag; every setting is --NAME VALUE'),
        ("--port", "--port: expected one argument"),
        ("--port --host x", "--port: expected one argument"),
        ("--engine-stall-kill-s 10", ("engine.stall_kill_s: 10 is less than "
                                     "engine.stall_unhealthy_s, which is 30")),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused(argv: str, problem: str, tmp_path: Path) -> None:
    assert problems(argv, path=tmp_path) == [problem]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("FASTSERVE_FRONTENDS", "two",
         'server.frontends: "two" is not a whole number (from FASTSERVE_FRONTENDS)'),
        ("FASTSERVE_FRONTEND", "2",
         "FASTSERVE_FRONTEND: no such setting; did you mean FASTSERVE_FRONTENDS?"),
        ("FASTSERVE_SERVER_PORT", "2",
         "FASTSERVE_SERVER_PORT: no such setting; did you mean FASTSERVE_PORT?"),
        ("FASTSERVE_CONFIGS", "x",
         "FASTSERVE_CONFIGS: no such setting; did you mean FASTSERVE_CONFIG?"),
        ("FASTSERVE_ZZZZ", "x", "FASTSERVE_ZZZZ: no such setting; see --help"),
        ("FASTSERVE_", "x", "FASTSERVE_: no such setting; see --help"),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_refused(name: str, value: str, problem: str, tmp_path: Path) -> None:
    assert problems("", {name: value}, path=tmp_path) == [problem]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FASTSERVE_SERVICE_HOST", "10.0.0.1"),
        ("FASTSERVE_SERVICE_PORT", "8000"),
        ("FASTSERVE_SERVICE_PORT_HTTP", "8000"),
        ("FASTSERVE_PORT", "tcp://10.0.0.1:8000"),
        ("FASTSERVE_PORT_8000_TCP", "tcp://10.0.0.1:8000"),
        ("FASTSERVE_PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("FASTSERVE_CHAT_PORT", "tcp://10.0.0.1:8000"),
        ("FASTSERVE_CHAT_SERVICE_HOST", "10.0.0.1"),
        ("PORT", "x"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_this_name_is_passed_over(
    name: str, value: str
) -> None:
    assert load_config([], {name: value}) == Config()


KNOWN_RESPAWN = "known in [respawn]: restarts_max, silent_timeout_s, window_s"
SECTIONS = ", ".join(sections_of(Config()))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("[server]\nfrontends = 65",
         ["server.frontends: 65 is not from 1 to 64 (from my.toml)"]),
        ("[server]\nfrontends = true",
         ["server.frontends: true is not a whole number (from my.toml)"]),
        ('[server]\nport = "80"', ['server.port: "80" is not a whole number (from my.toml)']),
        ("[sim]\nstep_ms = inf", ["sim.step_ms: inf is not from 0 to 60000 (from my.toml)"]),
        ("[respawn]\nwindow = 1",
         ["my.toml: respawn.window: no such setting; did you mean respawn.window_s?; "
          + KNOWN_RESPAWN]),
        ("[respawn]\nport = 1",
         ["my.toml: respawn.port: no such setting; did you mean server.port?; " + KNOWN_RESPAWN]),
        ("[respawn]\nzzzz = 1", ["my.toml: respawn.zzzz: no such setting; " + KNOWN_RESPAWN]),
        ("[htp]\nport = 1",
         [f"my.toml: [htp]: no such section; did you mean http?; known: {SECTIONS}"]),
        ("port = 1", ["my.toml: port: stands outside any [section]; did you mean server.port?"]),
        ("server = 1", ["my.toml: server: is a section, to be written [server]"]),
        ("[[server]]\nport = 1", ["my.toml: server: is a section, to be written [server]"]),
        ("[server]\nport = 1\nport = 2\n",
         ["my.toml: not TOML: Cannot overwrite a value (at line 3, column 9)"]),
        ("[server]\nport = \n", ["my.toml: not TOML: Invalid value (at line 2, column 8)"]),
        ("zzzz = 1\n[server]\nfrontends = 0\nport = -1",
         ["my.toml: zzzz: stands outside any [section]",
          "server.frontends: 0 is not from 1 to 64 (from my.toml)",
          "server.port: -1 is not from 0 to 65535 (from my.toml)"]),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_all_that_is_wrong(
    file: str, expected: list[str], tmp_path: Path
) -> None:
    assert problems(file=file, path=tmp_path) == expected


def test_a_wrong_value_is_refused_even_where_another_source_wins(tmp_path: Path) -> None:
    assert problems("--port 80", file="[server]\nport = -1", path=tmp_path) == [
        "server.port: -1 is not from 0 to 65535 (from my.toml)"
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        (b"[server]\nhost = '\xff'", "not TOML: 'utf-8' codec can't decode byte 0xff"),
        (b"a = " + b"[" * 100_000, "not TOML: "),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(
    content: bytes | None, problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "my.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        load_config(["--config", str(path)], {})
    assert str(refusal.value).startswith(f"{path}: {problem}")


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": Is a directory$"):
        load_config(["--config", str(tmp_path)], {})


def test_a_configuration_can_be_sent_to_a_child() -> None:
    config = Config(server=ServerConfig(frontends=4, model="a.gguf"), engine=EngineConfig())
    assert pickle.loads(pickle.dumps(config)) == config


def test_fastserve_toml_is_the_default_configuration() -> None:
    assert (TOP / "fastserve.toml").read_text() == config_toml(Config())
    assert load_config(["--config", str(TOP / "fastserve.toml")], {}) == Config()


def test_a_printed_configuration_reads_back_as_the_same(tmp_path: Path) -> None:
    config = load_config(["--frontends", "64", "--model", 'a "b"\n', "--sim-step-ms", "0"], {})
    path = tmp_path / "printed.toml"
    path.write_text(config_toml(config))
    assert load_config(["--config", str(path)], {}) == config


def test_help_shows_every_setting_its_range_and_its_default() -> None:
    shown = " ".join(help_text().split())
    for one in SETTINGS:
        value = f"--no-{one.flag[2:]}" if one.kind is bool else one.placeholder
        assert f"{one.flag}{',' if one.kind is bool else ''} {value} " in shown
        assert f"[{one.remarks}]" in shown


@pytest.mark.parametrize("columns", ["80", "100", "300"])
def test_help_is_never_wide(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    # The examples at the end are as they are.
    assert max(map(len, help_text().splitlines())) <= 100


def test_every_number_has_a_unit_but_a_port_and_the_processes() -> None:
    bare = {one.key for one in SETTINGS if one.ranged and not one.declaration.unit}
    assert bare == {"server.frontends", "server.port"}
    assert all("default: " in one.remarks for one in SETTINGS)


def test_names_are_unique_and_say_their_unit() -> None:
    endings = {"seconds": "_s", "milliseconds": "_ms", "tokens per second": "_tokens_per_s"}
    flags = [flag for one in SETTINGS for flag in (one.flag, *one.alias_flags)]
    assert len(set(flags)) == len(flags)
    for one in SETTINGS:
        unit = one.declaration.unit
        assert one.name.endswith(endings.get(unit, "")), one.key
        assert (unit in ("bytes", "bytes per second")) == ("_bytes" in f"_{one.name}"), one.key
        assert one.declaration.meaning.endswith("."), one.key


def test_sections_are_named_as_their_fields_are() -> None:
    assert {name: section.section for name, section in sections_of(Config()).items()} == {
        name: name for name in tomllib.loads(config_toml(Config()))
    }


def test_the_limits_of_a_connection_are_settings_with_the_same_defaults() -> None:
    settings = HTTPConfig()
    for limit in dataclasses.fields(Limits):
        assert getattr(settings, limit.name) == limit.default, limit.name


def test_parsers_have_the_names_of_formats() -> None:
    names = {one.name: set(one.choices) for one in settings_of(ServerConfig)}
    assert names["tool_parser"] == TOOL_FORMATS.keys()
    assert names["reasoning_parser"] == REASONING_FORMATS.keys()
    assert ServerConfig(tool_parser=None).tool_parser is None


def test_the_store_of_responses_has_the_limits_of_its_settings() -> None:
    assert dataclasses.asdict(Config().responses) == dataclasses.asdict(StoreLimits())


def test_a_model_has_as_many_names_as_it_was_given(tmp_path: Path) -> None:
    argv = "--served-model-name small --served-model-name gpt-4o"
    assert load(argv, path=tmp_path).server.served_model_name == ("small", "gpt-4o")
    file = '[server]\nserved_model_name = ["small", "gpt-4o"]'
    assert load(file=file, path=tmp_path).server.served_model_name == ("small", "gpt-4o")
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerConfig(served_model_name=("small", ""))
