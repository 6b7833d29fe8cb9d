"""How text is cut into words before byte-level BPE, by the names that GGUF files give the ways.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the rule to the reader. The
rules are those of the models' own tokenizers, in the dialect of Oniguruma. A name is here only if
its rule was seen to cut as llama.cpp does: a model fed with other cuts still answers, but worse,
and nobody is told. (One difference is known, and the models' own rule kept: in those of GPT-4o
and Tekken a combining mark belongs to its word, for which llama.cpp's regular expressions have no
means.)
"""

from __future__ import annotations

from dataclasses import dataclass

_ENGLISH = "'s|'t|'re|'ve|'m|'ll|'d"
_ENGLISH_ANY_CASE = f"(?i:{_ENGLISH})"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = rf"\s*[\r\n]+|{_SPACES}"

_GPT2 = rf"{_ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _cl100k(digits: str) -> str:
    """The rule of GPT-4's first vocabulary, which later ones vary in how they cut numbers."""
    return rf"{_ENGLISH_ANY_CASE}|{_WORD}|{digits}|{_SIGNS}|{_LINES_AND_SPACES}"


_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _o200k(*, contraction: str, digits: str) -> str:
    """The rule of GPT-4o's vocabulary: words end where lower case turns into upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """Cut by each of `patterns` in turn; what lies between matches is a word too.

    `ignore_merges`: a word that is itself a token is that token, whatever the merges make of it.
    `add_bos`: what a file that does not say (`tokenizer.ggml.add_bos_token`) means.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2_WORDS = PreTokenizer(patterns=(_GPT2,))
_GPT2_WORDS_SINGLE_DIGITS = PreTokenizer(patterns=(r"\p{N}", _GPT2))
_LLAMA_3 = PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),))
_QWEN_2 = PreTokenizer(patterns=(_cl100k(r"\p{N}"),))
_QWEN_3_5 = PreTokenizer(
    patterns=(
        (
            rf"{_ENGLISH_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
        ),
    )
)
_SEED_CODER = PreTokenizer(
    patterns=(
        rf"{_ENGLISH_ANY_CASE}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}",
    )
)
_BAILING = PreTokenizer(
    patterns=(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            rf"|\s*[\r\n]|{_SPACES}"
        ),
    )
)
_TEKKEN = PreTokenizer(
    patterns=(_o200k(contraction="", digits=r"\p{N}"),), ignore_merges=True, add_bos=True
)
_O200K = PreTokenizer(patterns=(_o200k(contraction=f"{_ENGLISH_ANY_CASE}?", digits=r"\p{N}{1,3}"),))
_DEEPSEEK_3 = PreTokenizer(
    patterns=(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        (
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
        ),
    )
)
_MINICPM_5 = PreTokenizer(patterns=(r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True)
_FALCON = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))
# What llama.cpp does with a file that names none.
_UNNAMED = PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_NAMES = {
    # "" is a file that names none.
    _UNNAMED: ("", "default"),
    _GPT2_WORDS: (
        *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
        *("granite-docling", "exaone4"),
    ),
    _GPT2_WORDS_SINGLE_DIGITS: (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "mellum2",
    ),
    _LLAMA_3: (
        *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        "lfm2",
    ),
    _CL100K: ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    _QWEN_2: (
        *("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"),
        "grok-2",
    ),
    _QWEN_3_5: ("qwen35",),
    _SEED_CODER: ("seed-coder",),
    _BAILING: ("bailingmoe", "bailingmoe2", "llada-moe"),
    _TEKKEN: ("tekken",),
    _O200K: ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    _DEEPSEEK_3: ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    _MINICPM_5: ("minicpm5",),
    _FALCON: ("falcon",),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: rule for rule, names in _NAMES.items() for name in names
}
