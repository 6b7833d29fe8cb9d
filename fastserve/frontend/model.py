"""The model as a frontend knows it: a card, a tokenizer and a chat template. No weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.text.chat_template import ChatTemplate
from fastserve.text.reasoning import REASONING_FORMATS
from fastserve.text.tokenizer import Tokenizer
from fastserve.text.tool_calls.formats import TOOL_FORMATS

if TYPE_CHECKING:
    from fastserve.api.requests import ChatRequest
    from fastserve.frontend.arguments import ModelArguments
    from fastserve.generation import ModelCard
    from fastserve.text.reasoning import ReasoningFormat
    from fastserve.text.token_table import TokenTable
    from fastserve.text.tool_calls.formats import ToolFormat


class Model:
    """Turns requests into prompts. Raises StartError when the card's files cannot be used."""

    def __init__(
        self,
        card: ModelCard,
        *,
        template_bytes_max: int,
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """`chat_template` stands for the card's own; the parsers are names of formats."""
        self.card = card
        self.created = int(time.time())
        self.tokenizer = Tokenizer.from_file(card.tokenizer_path, vocab_size=card.vocab_size)
        # A token stands for so many characters at most, so a longer text cannot fit.
        longest = max(map(len, self.tokenizer.token_bytes), default=1)
        self._prompt_chars_max = card.max_seq_len * longest
        self._bos_ids: list[int] = []
        if card.add_bos:
            self._bos_ids = self.tokenizer.encode(card.bos_token, parse_special=True)
        self.tool_format = TOOL_FORMATS.get(tool_parser or "")
        self.reasoning_format = REASONING_FORMATS.get(reasoning_parser or "")
        self._thoughts_shown = self._showing(self.reasoning_format)
        self._parts_shown = self._showing(self.reasoning_format, self.tool_format)
        self._template: ChatTemplate | None = None
        template = chat_template or card.chat_template
        if template is not None:
            self._template = ChatTemplate(
                template,
                bos_token=card.bos_token,
                eos_token=card.eos_token,
                output_bytes_max=template_bytes_max,
            )

    @classmethod
    def told(cls, card: ModelCard, arguments: ModelArguments) -> Model:
        """The model of a card, with what the server's settings say of it. Raises StartError."""
        return cls(
            card,
            template_bytes_max=arguments.template_bytes_max,
            chat_template=arguments.chat_template,
            tool_parser=arguments.tool_parser,
            reasoning_parser=arguments.reasoning_parser,
        )

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Template and tokenize. Raises InvalidRequest."""
        return self.chat_tokens(self.chat_text(request), request)

    def chat_text(self, request: ChatRequest) -> str:
        """What the template makes of a chat; guards are still in it. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                f"'{self.card.name}' has no chat template; use /v1/completions", param="messages"
            )
        # What a user says is text, also where it reads as a control token.
        messages = self.tokenizer.guard(request.messages)
        more: dict[str, Any] = self.tokenizer.guard(request.template_kwargs)
        return self._template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            tools=self.tokenizer.guard(request.tools) or None,
            **more,
        )

    def chat_tokens(self, text: str, request: ChatRequest) -> list[int]:
        """The tokens of what a template made. Raises InvalidRequest."""
        ids = self._encode(text, param="messages")
        return self._bos_ids + ids if request.add_special_tokens else ids

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._template is not None and self._template.takes_tools

    def completion_prompt(self, prompt: str | list[int], *, special: bool) -> list[int]:
        """Tokenize a text, with the tokens that begin one if `special`; ids are as they are."""
        if not isinstance(prompt, str):
            return prompt
        ids = self._encode(prompt, param="prompt")
        return self._bos_ids + ids if special else ids

    def parsed_table(self, *, tools: bool) -> TokenTable:
        """What tokens are in an answer that is parsed, for calls of `tools` or only for thoughts.

        Parsers go by tokens that may be control tokens, which other answers do not show.
        """
        return self._parts_shown if tools else self._thoughts_shown

    def _showing(self, *formats: ToolFormat | ReasoningFormat | None) -> TokenTable:
        shown = [text for each in formats if each is not None for text in each.shown]
        token_ids = map(self.tokenizer.token_id, shown)
        return self.tokenizer.table.showing([each for each in token_ids if each is not None])

    def _encode(self, text: str, *, param: str) -> list[int]:
        if len(text) > self._prompt_chars_max:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.card.max_seq_len} tokens, and no"
                f" prompt of {len(text)} characters fits in it.",
                param=param,
            )
        return self.tokenizer.encode(text, parse_special=True)
