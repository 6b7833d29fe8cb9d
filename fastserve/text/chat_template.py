"""Messages to a prompt, by the Jinja template that comes with a model.

The dialect is that of Hugging Face's `apply_chat_template`, for which templates are written. A
template is code from a model file run on what a client sent, so it runs in Jinja's sandbox, and
what it may produce, how long it may take and how far it may count are bounded.

The sole owner of jinja2. Knows nothing of tokens (control_tokens.py) or of HTTP.
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from fastserve.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser

# Four times the largest body that a frontend reads by default: a template adds little to a message.
OUTPUT_BYTES_MAX = 16 << 20

# A render takes 50 us; one of a megabyte of messages some milliseconds.
RENDER_TIMEOUT_S = 5.0

# Templates count messages and tools. Loops in loops multiply, so it is the sum that is limited.
RANGE_ITEMS_MAX = 100_000

# Base and exponent; the result then fits in 64 bytes.
POWER_MAX = 64

# What a template can fail with on messages that it was not written for: a missing field, a list
# where it expects a string. All of it is the request's doing, as the template works for others.
_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template; any number of threads may render it at once."""

    __slots__ = ("_constants", "_monotonic", "_output_bytes_max", "_template", "takes_tools")

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        output_bytes_max: int = OUTPUT_BYTES_MAX,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile. Raises StartError if it does not.

        `now` is what `strftime_now` formats; `monotonic` (s) times a render.
        """
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            raise StartError(f"the model's chat template is faulty: {where}{error}") from error
        # As one mapping and not a chain of two, which each render would copy item by item.
        self._template.globals = dict(self._template.globals)
        # Whether the template has a place for tools: one that has not leaves them out in silence.
        self.takes_tools = "tools" in names
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        self._output_bytes_max = output_bytes_max
        self._monotonic = monotonic

    def render(
        self,
        messages: Sequence[Any],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **variables: object,
    ) -> str:
        """The prompt. `variables` are whatever else the template looks at ("enable_thinking").

        Raises InvalidRequest if the template refuses the messages, fails on them, or exceeds
        `output_bytes_max`, RENDER_TIMEOUT_S or RANGE_ITEMS_MAX.
        """
        context: Mapping[str, object] = {
            **variables,
            **self._constants,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "range": _Range(),
        }
        try:
            return self._collect(context)
        except _Refused as error:
            raise InvalidRequest(str(error), param="messages") from error
        except _TEMPLATE_FAILURES as error:
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {error}", param="messages"
            ) from error

    def _collect(self, context: Mapping[str, object]) -> str:
        deadline_s = self._monotonic() + RENDER_TIMEOUT_S
        pieces: list[str] = []
        room = self._output_bytes_max
        for piece in self._template.generate(context):
            pieces.append(piece)
            room -= len(piece) if piece.isascii() else len(piece.encode(errors="surrogatepass"))
            if room < 0:
                raise _Refused(f"the prompt exceeds {self._output_bytes_max} bytes")
            if self._monotonic() > deadline_s:
                raise _Refused(f"the chat template takes longer than {RENDER_TIMEOUT_S} s")
        return "".join(pieces)


class _Refused(Exception):
    """A template said no, or went past a limit; the message is for the client."""


_DICT_ATTRIBUTES = frozenset(dir(dict))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, without the operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**"})

    def getattr(self, obj: Any, attribute: str) -> Any:  # noqa: ANN401 (as call_binop)
        # `message.role`, which Jinja looks for among attributes first: no dict has it there.
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401 (a template's values have any type)
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if operator == "**" and max(abs(left), abs(right)) > POWER_MAX:
            raise _Refused(f"the chat template raises to a power with more than {POWER_MAX}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                size = len(repeated) * times
                if size > RANGE_ITEMS_MAX:
                    raise _Refused(f"the chat template repeats something to {size} items")
        return super().call_binop(context, operator, left, right)


class _Range:
    """`range`, up to RANGE_ITEMS_MAX items in one render."""

    __slots__ = ("_room",)

    def __init__(self) -> None:
        self._room = RANGE_ITEMS_MAX

    def __call__(self, *bounds: int) -> range:
        numbers = range(*bounds)
        # len() of a range beyond a machine word is an OverflowError, which refuses it too.
        self._room -= len(numbers)
        if self._room < 0:
            raise _Refused(f"the chat template counts beyond {RANGE_ITEMS_MAX} items")
        return numbers


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: where a model's own words are, which only training asks."""

    tags = {"generation"}  # noqa: RUF012 (the name and type that jinja2 wants)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it in training: jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)
