"""What a grammar allows next, token by token, in a vocabulary small enough to try everything."""

from __future__ import annotations

import itertools
import json
import select
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fastserve.engine import guidance
from fastserve.engine.guidance import Compiler, Grammars, Guide
from fastserve.errors import InvalidRequest
from fastserve.generation import Grammar, GrammarKind, RequestId, SamplingParams
from fastserve.lane.messages import Submit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Every printable ASCII character is a token, so whatever is allowed can be said.
LETTERS = [bytes([code]) for code in range(0x20, 0x7F)]
WORDS = [b"ab", b"ba", b"abc", b"yes", b"no", b'": ', b'{"', b"\xc3", b"\xa9", b"\n", b"\t", b"  "]
# What reads as letters and is none of them: a control token, an end, and a token of no text.
SPECIAL = [b"a", b"yes", b""]
TOKENS = [*LETTERS, *WORDS, *SPECIAL]
EOS = TOKENS.index(b"yes", len(LETTERS) + len(WORDS))
CONTROL = len(LETTERS) + len(WORDS)
# Ids that the model has and the tokenizer has not.
VOCAB_SIZE = len(TOKENS) + 37


def encode(text: str) -> list[int]:
    """One letter at a time; what has no token vanishes."""
    letters = (bytes([code]) for code in text.encode())
    return [TOKENS.index(letter) for letter in letters if letter in TOKENS]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(
        TOKENS,
        vocab_size=VOCAB_SIZE,
        special_ids=[CONTROL, EOS],
        eos_token_ids=[EOS],
        encode=encode,
    )


def guide(grammars: Grammars, kind: str, source: object) -> Guide:
    text = source if isinstance(source, str) else json.dumps(source)
    return grammars.compile(Grammar(kind=GrammarKind(kind), source=text, param="p"))


def ids_allowed(guide: Guide) -> set[int]:
    return set(np.flatnonzero(guide.allowed()).tolist())


def go(guide: Guide, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        assert guide.allowed()[token_id]
        guide.accept(token_id)


def follows(guide: Guide, text: str) -> bool:
    """Whether the text, letter by letter, matches the grammar as a whole."""
    for token_id in encode(text):
        if guide.complete or token_id not in ids_allowed(guide):
            return False
        guide.accept(token_id)
    return guide.accepting


# ---- exactness


def test_the_mask_is_exactly_what_can_still_become_a_word(grammars: Grammars) -> None:
    words = {b"ab", b"abc", b"abab", b"ba", b"no", b"yes", b"yesno"}
    pattern = "|".join(sorted(word.decode() for word in words))

    def expected(said: bytes) -> set[int]:
        going_on = {
            token_id
            for token_id, token in enumerate(TOKENS)
            if token
            and token_id not in (CONTROL, EOS)
            and any(word.startswith(said + token) for word in words)
        }
        return going_on | ({EOS} if said in words else set())

    def explore(ids: list[int]) -> int:
        here = guide(grammars, "regex", pattern)
        for token_id in ids:
            here.accept(token_id)
        said = b"".join(TOKENS[token_id] for token_id in ids)
        going_on = expected(said) - {EOS}
        # Where nothing can follow there is nothing to choose.
        assert here.complete == (not going_on)
        if not here.complete:
            assert ids_allowed(here) == expected(said), said
        return 1 + sum(explore([*ids, token_id]) for token_id in going_on)

    assert explore([]) > 30


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        pytest.param("regex", "[0-9]{2}-[a-z]+", ["12-a", "34-xy"], ["1-a", "12-"], id="re"),
        pytest.param("regex", "^(a|b)$", ["a", "b"], ["^a", "a$", "c", "ab"], id="anchors"),
        pytest.param("regex", r"a\$", ["a$"], ["a"], id="a dollar"),
        pytest.param("regex", r"a\\$", ["a\\"], ["a", "a\\$"], id="a backslash at the end"),
        pytest.param("regex", "a/b", ["a/b"], ["ab"], id="a slash"),
        pytest.param(
            "ebnf",
            'root ::= sum ("+" sum)*  # comment\nsum ::= [0-9]+ | "(" root ")"',
            ["1", "1+2", "(1+22)+3"],
            ["+", "1+", "(1"],
            id="EBNF",
        ),
        pytest.param("json_schema", {"type": "object"}, ["{}", '{"a": 1}'], ["[]", "{"], id="{}"),
        pytest.param(
            "json_schema",
            {"properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "type": "object",
             "additionalProperties": False},
            ['{"a": 1}', '{"a": "x"}'],
            ["{}", '{"a": 2}', '{"a": 1, "b": 1}', '{"b": 1}'],
            id="properties",
        ),
        pytest.param("json_schema", True, ["1", '"a"', "[]", "null"], ["", "nul"], id="anything"),
    ],
)  # fmt: skip
def test_each_kind_of_grammar(
    grammars: Grammars, kind: str, source: object, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert follows(guide(grammars, kind, source), text), text
    for text in bad:
        assert not follows(guide(grammars, kind, source), text), text


def test_json_has_one_form_and_no_room_for_white_space(grammars: Grammars) -> None:
    for text in ('{"a":1}', '{ "a": 1}', '{"a": 1 }', '{"a": 1,"b": 2}', "{}\n", ' {"a": 1}'):
        assert not follows(guide(grammars, "json_schema", {"type": "object"}), text), text
    assert follows(guide(grammars, "json_schema", {"type": "object"}), '{"a": 1, "b": [2, 3]}')


def test_a_client_cannot_change_the_form_or_make_it_lenient(grammars: Grammars) -> None:
    own = {"x-guidance": {"whitespace_flexible": True, "lenient": True}, "type": "object"}
    assert not follows(guide(grammars, "json_schema", own), '{"a":1}')
    with pytest.raises(InvalidRequest, match="not"):
        guide(grammars, "json_schema", own | {"not": {"required": ["a"]}})


def test_half_a_surrogate_pair_cannot_be_escaped_into_a_text(grammars: Grammars) -> None:
    assert not follows(guide(grammars, "json_schema", {"type": "string"}), r'"\ud800"')
    assert follows(guide(grammars, "json_schema", {"type": "string"}), r'"\n\\"')


def test_half_a_character_must_be_completed(grammars: Grammars) -> None:
    here = guide(grammars, "regex", "[é]")
    assert ids_allowed(here) == {TOKENS.index(b"\xc3")}
    here.accept(TOKENS.index(b"\xc3"))
    assert ids_allowed(here) == {TOKENS.index(b"\xa9")}


def test_no_special_token_is_text_whatever_it_reads_as(grammars: Grammars) -> None:
    here = guide(grammars, "regex", "yes|a")
    assert not {CONTROL, EOS} & ids_allowed(here)
    assert not [token_id for token_id in ids_allowed(here) if token_id >= len(TOKENS)]


def test_an_end_may_come_where_the_text_matches(grammars: Grammars) -> None:
    here = guide(grammars, "regex", "a+")
    assert EOS not in ids_allowed(here)
    assert not here.accepting
    here.accept(TOKENS.index(b"a"))
    assert EOS in ids_allowed(here)
    assert here.accepting
    assert not here.complete


def test_the_mask_is_made_once_for_each_token(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = guide(grammars, "regex", "a+")
    here.accept(TOKENS.index(b"a"))
    here.prepare()
    before = here.allowed()
    before[:] = False  # a fresh array: nobody else's
    monkeypatch.setattr(time, "thread_time", lambda: pytest.fail("made anew"))
    assert TOKENS.index(b"a") in ids_allowed(here)


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        pytest.param("regex", "(a", "unclosed group", id="a bad expression"),
        pytest.param("regex", "a(?=b)", "look-around", id="looking ahead"),
        pytest.param("regex", "\x04", "nothing may follow", id="a byte that no token has"),
        pytest.param("ebnf", 'rot ::= "a"', "'root'", id="no root"),
        pytest.param("ebnf", "root ::= a b", "'a'", id="a rule that is not there"),
        pytest.param("ebnf", 'root ::= "a', "end of input", id="an open literal"),
        pytest.param("ebnf", "root ::= x\nx ::= x", "nothing may follow", id="a rule of itself"),
        pytest.param("ebnf", 'start: "a"', "::=", id="another language"),
        pytest.param("ebnf", "root ::= <|eos|>", "not valid", id="a special token"),
        pytest.param("ebnf", "root ::= " + "(" * 65 + '"a"' + ")" * 65, "64 levels", id="deep"),
        pytest.param("json_schema", {"not": {}}, "not", id="an unknown keyword"),
        pytest.param("json_schema", {"type": "nope"}, "nope", id="an unknown type"),
        pytest.param("json_schema", False, "no JSON value", id="nothing"),
        pytest.param("json_schema", {"$ref": "http://a.b/c"}, "a.b", id="a schema from elsewhere"),
        pytest.param("json_schema", {"$ref": "#/a"}, "/a", id="a reference to nothing"),
        pytest.param("json_schema", {"enum": []}, "empty", id="no value"),
        pytest.param("json_schema", {"minimum": 2, "maximum": 1, "type": "integer"}, "minimum",
                     id="an empty range"),
        pytest.param("json_schema", {"uniqueItems": True}, "uniqueItems", id="unique items"),
        pytest.param("json_schema", "{", "", id="no JSON"),
        pytest.param("json_schema", [[]] * 2, "no JSON value", id="no schema"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_refused(
    grammars: Grammars, kind: str, source: object, why: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        guide(grammars, kind, source)
    assert caught.value.param == "p"
    assert caught.value.message.startswith("'p': ")
    assert why in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_a_text_that_leads_nowhere_is_an_error_and_no_hang(grammars: Grammars) -> None:
    here = guide(grammars, "regex", "a\x04")
    here.accept(TOKENS.index(b"a"))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="nothing may follow"):
            here.allowed()
    assert not here.complete


def test_endless_nesting_is_an_error(grammars: Grammars) -> None:
    here = guide(
        grammars, "json_schema",
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"],
         "additionalProperties": False},
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="limit"):
        go(here, encode('{"a": {"a": {"a'))


def test_a_mask_that_takes_too_long_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = guide(grammars, "regex", "a+")
    here.accept(TOKENS.index(b"a"))
    clock = itertools.count(step=guidance.MASK_CPU_S_MAX + 1)
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    with pytest.raises(InvalidRequest, match=r"it takes 1\.2 s"):
        here.allowed()


def test_a_count_that_takes_seconds_is_refused_beforehand(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=r"it takes \d"):
        guide(grammars, "regex", "(a{1000}){1000}")


def test_a_panic_of_the_library_says_nothing_of_us() -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError(f"in {__file__}: {text}")

    some = Grammars(
        TOKENS, vocab_size=VOCAB_SIZE, special_ids=[EOS], eos_token_ids=[EOS], encode=broken
    )
    with pytest.raises(InvalidRequest) as caught:
        guide(some, "regex", "\x04")
    assert caught.value.message == "'p': the grammar cannot be followed: the library failed"


# What of the last letters was an "a" is a state of its own, and random letters meet most of them.
MANY_STATES = "[ab]*a[ab]{30}"


def random_letters() -> Iterator[int]:
    random = np.random.default_rng(0)
    return (TOKENS.index(letter) for letter in iter(lambda: random.choice([b"a", b"b"]), None))


def steps_until_refused(guide: Guide) -> int:
    steps = itertools.count()
    with pytest.raises(InvalidRequest, match="too many states"):
        go(guide, (letter for letter, _ in zip(random_letters(), steps, strict=False)))
    return next(steps)


def test_what_is_remembered_of_a_grammar_is_limited_for_each_request(grammars: Grammars) -> None:
    first = steps_until_refused(guide(grammars, "regex", MANY_STATES))
    assert 1000 < first < 50_000
    assert steps_until_refused(guide(grammars, "regex", MANY_STATES)) == first


# ---- the thread that compiles


@pytest.fixture
def compiler(grammars: Grammars) -> Iterator[Compiler]:
    one = Compiler(grammars)
    yield one
    assert one.close(timeout_s=60)


def submit(number: int, source: str) -> Submit:
    grammar = Grammar(kind=GrammarKind.REGEX, source=source)
    return Submit(
        request_id=RequestId(number),
        prompt_token_ids=[0],
        sampling=SamplingParams(max_tokens=1, grammar=grammar),
    )


def take_all(compiler: Compiler) -> dict[int, Guide | InvalidRequest]:
    taken: dict[int, Guide | InvalidRequest] = {}
    give_up_s = time.monotonic() + 30
    while compiler:
        assert time.monotonic() < give_up_s
        select.select((compiler.fd,), (), (), 1.0)
        taken |= {each.request_id: result for each, result in compiler.take()}
    return taken


def test_requests_come_back_with_their_guides_in_order(compiler: Compiler) -> None:
    assert not compiler
    assert compiler.take() == []
    for number, source in enumerate(("a", "(", "b")):
        compiler.add(submit(number, source))
    assert len(compiler) == 3
    taken = take_all(compiler)
    assert list(taken) == [0, 1, 2]
    assert [isinstance(result, Guide) for result in taken.values()] == [True, False, True]


def test_whoever_went_meanwhile_does_not_come_back(compiler: Compiler) -> None:
    for number in range(4):
        compiler.add(submit(number, "a"))
    compiler.remove(RequestId(0))
    compiler.remove(RequestId(2))
    compiler.remove(RequestId(99))
    assert list(take_all(compiler)) == [1, 3]


def test_a_panic_is_one_requests_bad_luck(
    compiler: Compiler, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As the library's own is."""

    real = grammars.compile

    def panicking(grammar: Grammar) -> Guide:
        if grammar.source == "bad":
            raise Panic
        return real(grammar)

    monkeypatch.setattr(grammars, "compile", panicking)
    compiler.add(submit(0, "bad"))
    compiler.add(submit(1, "a"))
    taken = take_all(compiler)
    assert isinstance(taken[0], InvalidRequest)
    assert isinstance(taken[1], Guide)
