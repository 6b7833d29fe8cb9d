from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from fastserve.text.byte_level import BYTE_TO_CHARACTER, token_to_bytes


def test_the_alphabet_is_the_one_of_the_tokenizers_library() -> None:
    assert set(BYTE_TO_CHARACTER.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for character in map(chr, range(0x20000)):
        if not 0xD800 <= ord(character) < 0xE000:
            data = character.encode()
            written = "".join(BYTE_TO_CHARACTER[byte] for byte in data)
            if ord(character) < 0x300:
                assert cut.pre_tokenize_str(character)[0][0] == written
            assert token_to_bytes(written) == data


@pytest.mark.parametrize("token", [" ", "\n", "日本", "a\u00ad"])
def test_what_is_not_in_the_alphabet_is_not_bytes(token: str) -> None:
    assert token_to_bytes(token) is None
