"""Which tokens may come next in an answer that must match a grammar. The owner of llguidance.

Every request's grammar is compiled for itself: what the library learns of one while it is followed
counts against limits, and no request's outcome may depend on others'. That takes 0.5 to 30 ms, on
a thread of its own. A mask takes 0.02 to 0.3 ms, during the decode that it is for. Limits bound
both; a grammar that reaches one is refused, or ends its answer with an error.

JSON is written on one line, with one space after commas and colons: where any white space is
allowed, small models go on with it for ever. Knows nothing of logits or schedules.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from fastserve.engine.json_schemas import exact
from fastserve.engine.offload import Offload
from fastserve.errors import InvalidRequest
from fastserve.generation import GrammarKind
from fastserve.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from fastserve.generation import Grammar, RequestId
    from fastserve.lane.messages import Submit

log = get_logger("engine")

KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.EBNF)

# The reader of EBNF recurses in Python, as often as parentheses nest.
EBNF_DEPTH_MAX = 64

# Of the thread that makes a mask. The library counts its work, but not all of it: counters in the
# tens of thousands take seconds. Streams wait for it, so a request that reaches it ends.
MASK_CPU_S_MAX = 0.25

_LIMITS = llguidance.LLParserLimits(
    # 50,000 a millisecond while compiling, and 14,000 in a step.
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    # 20,000 a millisecond.
    step_max_items=50_000,
    # One to two KB each: the most that a request's grammar may hold is 40 MB.
    max_lexer_states=20_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

# Their type has a name in the library's stubs alone.
_JSON_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    # Approximations of what was asked for.
    "coerce_one_of": False,
    "lenient": False,
    # With these a text may have half a surrogate pair, which strict parsers refuse.
    "json_allow_general_unicode_escapes": False,
}

_ERROR_CHARS_MAX = 300


class Guide:
    """The way of one answer through its grammar."""

    __slots__ = ("_bits", "_failure", "_matcher", "_param", "_ready", "_vocab_size", "complete")

    def __init__(self, matcher: llguidance.LLMatcher, *, vocab_size: int, param: str) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._param = param
        self._bits = np.zeros((vocab_size + 31) // 32, np.int32)
        self._ready = False
        self._failure: InvalidRequest | None = None
        self.complete = False
        """Whether the text matches and nothing more can follow."""

    @property
    def accepting(self) -> bool:
        """Whether the text so far matches."""
        return bool(self._matcher.is_accepting())

    def prepare(self) -> None:
        """Make the next token's mask, if it is not made; `allowed` says what went wrong."""
        if self._ready:
            return
        self._ready = True
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        took_s = time.thread_time() - began_s
        if took_s > MASK_CPU_S_MAX:
            self._failure = self._error(f"it takes {took_s:.1f} s to find what may come next")
        self._look_for_error()

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token may come next: a fresh array of shape (vocab_size,).

        EOS may where the text matches. Raises InvalidRequest where nothing may, or a limit is hit.
        """
        self.prepare()
        if self._failure is not None:
            raise self._failure
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)

    def accept(self, token_id: int) -> None:
        """Go on by a token that is allowed; `allowed` says if that leads nowhere."""
        self._ready = False
        self._matcher.consume_token(token_id)
        self._look_for_error()
        self.complete = self._failure is None and bool(self._matcher.is_stopped())

    def dead_end(self) -> InvalidRequest:
        """The error for a text that does not match and that no token may follow."""
        return self._error("every token that it allows here is banned")

    def _look_for_error(self) -> None:
        if self._matcher.is_error():
            self._failure = self._error(self._matcher.get_error())

    def _error(self, reason: str) -> InvalidRequest:
        return refusal(f"the grammar cannot be followed: {_tidied(reason)}", param=self._param)


class Grammars:
    """The vocabulary as grammars see it."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        vocab_size: int,
        special_ids: Collection[int],
        eos_token_ids: Collection[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """`token_bytes`: of each id; of `vocab_size`, the others have none. Special ones are no
        text, whatever their bytes. `encode`: the ids of a text, none of them special."""
        self._vocab_size = vocab_size
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(
                _Vocabulary(
                    [*token_bytes, *(b"" for _ in range(vocab_size - len(token_bytes)))],
                    special_ids=[each for each in special_ids if each < vocab_size],
                    eos_token_id=min(eos_token_ids),
                    encode=encode,
                )
            ),
            n_vocab=vocab_size,
            eos_token=sorted(eos_token_ids),
        )

    def compile(self, grammar: Grammar) -> Guide:
        """A guide at the beginning of a text. Raises InvalidRequest.

        Takes up to a second for the worst that the limits allow; needs the interpreter for little
        of it.
        """
        try:
            source = _SOURCES[grammar.kind](grammar.source)
        except InvalidRequest as error:
            raise refusal(error.message, param=grammar.param) from error
        except RecursionError as error:
            raise refusal("the grammar nests too deeply", param=grammar.param) from error
        except ValueError as error:
            raise refusal(_tidied(str(error)), param=grammar.param) from error
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            reason = _tidied(matcher.get_error())
            raise refusal(f"this {_WORDS[grammar.kind]}: {reason}", param=grammar.param)
        guide = Guide(matcher, vocab_size=self._vocab_size, param=grammar.param)
        guide.allowed()  # What no text can match is refused now.
        return guide


class Compiler:
    """Compiles the grammars of requests, on a thread of its own, in the order they came."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._offload: Offload[list[tuple[RequestId, Guide | InvalidRequest]]] = Offload("grammar")
        self._submits: dict[RequestId, Submit] = {}
        self._waiting: list[Submit] = []

    @property
    def fd(self) -> int:
        """Readable when there is something to take."""
        return self._offload.fd

    def __len__(self) -> int:
        return len(self._submits)

    def prompt_lengths(self) -> list[int]:
        """Of the requests whose grammars are compiled, in the order in which they came."""
        return [len(submit.prompt_token_ids) for submit in self._submits.values()]

    def add(self, submit: Submit) -> None:
        """Take a request, which has a grammar."""
        self._submits[submit.request_id] = submit
        self._waiting.append(submit)
        self._start()

    def remove(self, request_id: RequestId) -> None:
        """Forget a request. An unknown id is none."""
        self._submits.pop(request_id, None)

    def take(self) -> list[tuple[Submit, Guide | InvalidRequest]]:
        """The requests whose grammars are compiled, and those whose are none."""
        try:
            results = self._offload.result()
        except BlockingIOError:  # The thread is at it still.
            return []
        self._start()
        live = self._submits
        return [(live.pop(each), result) for each, result in results if each in live]

    def close(self, *, timeout_s: float) -> bool:
        """End the thread. False if a grammar takes longer than that."""
        self._submits.clear()
        return self._offload.close(timeout_s=timeout_s)

    def _start(self) -> None:
        if self._waiting and not self._offload.busy:
            batch, self._waiting = self._waiting, []
            self._offload.start(lambda: self._compile(batch))

    def _compile(self, batch: list[Submit]) -> list[tuple[RequestId, Guide | InvalidRequest]]:
        live = [submit for submit in batch if submit.request_id in self._submits]
        return [(submit.request_id, self._compile_one(submit)) for submit in live]

    def _compile_one(self, submit: Submit) -> Guide | InvalidRequest:
        grammar = submit.sampling.grammar
        assert grammar is not None, "only requests with a grammar are compiled"
        try:
            return self._grammars.compile(grammar)
        except InvalidRequest as error:
            return error
        # A panic of the library is no Exception; and one request's bad luck is not the others'.
        except BaseException:
            log.exception("a grammar cannot be compiled", id=submit.request_id)
            return refusal("the grammar cannot be compiled", param=grammar.param)


class _Vocabulary:
    """What the library asks of a tokenizer, by the library's names."""

    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        special_ids: Collection[int],
        eos_token_id: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        self.tokens = list(token_bytes)
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = eos_token_id
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def refusal(message: str, *, param: str) -> InvalidRequest:
    """The error for a grammar, which the request's field `param` has."""
    return InvalidRequest(f"'{param}': {message}", param=param, code="invalid_value")


def _from_json_schema(source: str) -> str:
    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(exact(json.loads(source))), overrides=_JSON_OPTIONS
    )
    return grammar


def _from_regex(source: str) -> str:
    # All of the text must match anyway, and the library knows no anchors.
    source = source.removeprefix("^")
    if source.endswith("$") and (len(source) - len(source[:-1].rstrip("\\"))) % 2:
        source = source[:-1]
    grammar: str = llguidance.LLMatcher.grammar_from_regex(source)
    return grammar


def _from_ebnf(source: str) -> str:
    if source.count("(") > EBNF_DEPTH_MAX and _depth(source) > EBNF_DEPTH_MAX:
        raise InvalidRequest(f"a grammar nests at most {EBNF_DEPTH_MAX} levels deep")
    try:
        grammar: str = llguidance.LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    # The reader raises plain exceptions, and an IndexError at an end that it does not expect.
    except Exception as error:
        raise InvalidRequest(f"this grammar is not valid: {_tidied(str(error))}") from error
    return grammar


def _depth(source: str) -> int:
    """How deep parentheses nest, those within literals included."""
    depth = deepest = 0
    for character in source:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


_SOURCES: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _from_json_schema,
    GrammarKind.REGEX: _from_regex,
    GrammarKind.EBNF: _from_ebnf,
}
_WORDS = {
    GrammarKind.JSON_SCHEMA: "schema cannot be enforced",
    GrammarKind.REGEX: "expression is not supported",
    GrammarKind.EBNF: "grammar is not valid",
}


# What the library says where no token can go on.
_NO_WAY_ON = "NoExtensionBias"


def _tidied(reason: str) -> str:
    """The library's words on one line, and not too many."""
    if reason.startswith("panic"):
        log.warning_burst("llguidance panicked", error=reason)
        return "the library failed"
    reason = reason.replace("<non-verbose/>", "").replace(_NO_WAY_ON, "nothing may follow")
    words = " ".join(reason.split())
    return words if len(words) <= _ERROR_CHARS_MAX else words[:_ERROR_CHARS_MAX] + "..."
