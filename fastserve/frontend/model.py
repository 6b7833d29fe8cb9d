"""The model as a frontend knows it: a card, a tokenizer and a chat template. No weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.text.chat_template import ChatTemplate
from fastserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastserve.api.requests import ChatRequest
    from fastserve.generation import ModelCard


class Model:
    """Turns requests into prompts. Raises StartError when the card's files cannot be used."""

    def __init__(self, card: ModelCard, *, template_bytes_max: int) -> None:
        self.card = card
        self.created = int(time.time())
        self.tokenizer = Tokenizer.from_file(card.tokenizer_path, vocab_size=card.vocab_size)
        # A token stands for so many characters at most, so a longer text cannot fit.
        longest = max(map(len, self.tokenizer.token_bytes), default=1)
        self._prompt_chars_max = card.max_seq_len * longest
        self._bos_ids: list[int] = []
        if card.add_bos:
            self._bos_ids = self.tokenizer.encode(card.bos_token, parse_special=True)
        self._template: ChatTemplate | None = None
        if card.chat_template is not None:
            self._template = ChatTemplate(
                card.chat_template,
                bos_token=card.bos_token,
                eos_token=card.eos_token,
                output_bytes_max=template_bytes_max,
            )

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Template and tokenize. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                f"'{self.card.name}' has no chat template; use /v1/completions", param="messages"
            )
        # What a user says is text, also where it reads as a control token.
        messages = self.tokenizer.guard(request.messages)
        more: dict[str, Any] = self.tokenizer.guard(request.template_kwargs)
        rendered = self._template.render(
            messages, add_generation_prompt=request.add_generation_prompt, **more
        )
        ids = self._encode(rendered, param="messages")
        return self._bos_ids + ids if request.add_special_tokens else ids

    def completion_prompt(self, prompt: str | list[int], *, special: bool) -> list[int]:
        """Tokenize a text, with the tokens that begin one if `special`; ids are as they are."""
        if not isinstance(prompt, str):
            return prompt
        ids = self._encode(prompt, param="prompt")
        return self._bos_ids + ids if special else ids

    def _encode(self, text: str, *, param: str) -> list[int]:
        if len(text) > self._prompt_chars_max:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.card.max_seq_len} tokens, and no"
                f" prompt of {len(text)} characters fits in it.",
                param=param,
            )
        return self.tokenizer.encode(text, parse_special=True)
