"""The model as a frontend knows it: a card, a tokenizer and a chat template. No weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastserve.errors import ContextLengthExceeded, InvalidRequest
from fastserve.frontend.pieces import Pieces
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

# Stands at the end of a message that is to be continued, while the template is rendered: no space
# that could be stripped, nothing that could be escaped.
_CONTINUED_HERE = "fastserveContinuesHere"


class Model:
    """Turns requests into prompts. Raises StartError when the card's files cannot be used."""

    def __init__(
        self,
        card: ModelCard,
        *,
        template_bytes_max: int,
        names: tuple[str, ...] = (),
        chat_template: str | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """`names`: what requests may call it, the first of them being the card's; none: that.

        `chat_template` stands for the card's own; the parsers are names of formats.
        """
        self.card = card
        self.names = names or (card.name,)
        self._made_of = {
            "template_bytes_max": template_bytes_max,
            "names": names,
            "chat_template": chat_template,
            "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
        }
        self.created = int(time.time())
        self.tokenizer = Tokenizer.from_file(card.tokenizer_path, vocab_size=card.vocab_size)
        # A token stands for so many characters at most, so a longer text cannot fit.
        longest = max(map(len, self.tokenizer.token_bytes), default=1)
        self._prompt_chars_max = card.max_seq_len * longest
        self._bos_ids: list[int] = []
        if card.add_bos:
            self._bos_ids = self.tokenizer.encode(card.bos_token, parse_special=True)
        self._eos_ids: list[int] = []
        if card.add_eos:
            self._eos_ids = self.tokenizer.encode(card.eos_token, parse_special=True)
        self.tool_format = TOOL_FORMATS.get(tool_parser or "")
        self.reasoning_format = REASONING_FORMATS.get(reasoning_parser or "")
        self._thoughts_shown = self._showing(self.reasoning_format)
        self._parts_shown = self._showing(self.reasoning_format, self.tool_format)
        self.pieces = Pieces(self.tokenizer.table, skip_special_tokens=True)
        self.pieces_all = Pieces(self.tokenizer.table, skip_special_tokens=False)
        self._template: ChatTemplate | None = None
        template = chat_template or card.chat_template
        if template is not None:
            self._template = ChatTemplate(
                template,
                bos_token=card.bos_token,
                eos_token=card.eos_token,
                output_bytes_max=template_bytes_max,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process it goes as what it is made of."""
        return _again, (self.card, self._made_of)

    @classmethod
    def told(cls, card: ModelCard, arguments: ModelArguments) -> Model:
        """The model of a card, with what the server's settings say of it. Raises StartError."""
        return cls(
            card,
            template_bytes_max=arguments.template_bytes_max,
            names=arguments.names,
            chat_template=arguments.chat_template,
            tool_parser=arguments.tool_parser,
            reasoning_parser=arguments.reasoning_parser,
        )

    def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Template and tokenize, unless the request has the tokens. Raises InvalidRequest."""
        return self.chat_tokens(self.chat_text(request), request)

    def chat_tokens(self, text: str, request: ChatRequest) -> list[int]:
        """The tokens of what a template made, or those of the request. Raises InvalidRequest."""
        ids = request.prompt_token_ids
        if ids is None:
            ids = self._encode(text, param="messages", cut=bool(request.truncate_prompt_tokens))
            if request.add_special_tokens:
                ids = self._bos_ids + ids
        return request.truncated(ids, max_seq_len=self.card.max_seq_len)

    def chat_text(self, request: ChatRequest) -> str:
        """What the template makes of a chat; guards are still in it. Raises InvalidRequest.

        "" where the request has the tokens.
        """
        if request.prompt_token_ids is not None:
            return ""
        if self._template is None:
            raise InvalidRequest(
                f"'{self.card.name}' has no chat template; use /v1/completions", param="messages"
            )
        # What a user says is text, also where it reads as a control token.
        messages = self.tokenizer.guard(request.messages)
        more: dict[str, Any] = self.tokenizer.guard(request.template_kwargs)
        if request.continue_final_message:
            messages[-1]["content"] = f"{messages[-1]['content']}{_CONTINUED_HERE}"
        rendered = self._template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            tools=self.tokenizer.guard(request.tools) or None,
            **more,
        )
        if not request.continue_final_message:
            return rendered
        # The last is ours, whatever the conversation says. What the template puts after a message
        # goes, and what it would strip at the end of one stays.
        prompt, found, _ = rendered.rpartition(_CONTINUED_HERE)
        if not found:
            raise InvalidRequest(
                "the model's chat template does not show the message that is to be continued",
                param="continue_final_message",
            )
        return prompt

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._template is not None and self._template.takes_tools

    @property
    def num_bos(self) -> int:
        """How many tokens are put before a plain prompt."""
        return len(self._bos_ids)

    def completion_prompt(
        self, prompt: str | list[int], *, special: bool, cut: bool = False
    ) -> list[int]:
        """Tokenize a text, with the tokens that begin one if `special`; ids are as they are.

        `cut`: it may be longer than the context, since not all of it is kept.
        """
        if not isinstance(prompt, str):
            return prompt
        ids = self._encode(prompt, param="prompt", cut=cut)
        return self._bos_ids + ids if special else ids

    def embedding_prompt(self, text: str | list[int]) -> list[int]:
        """Tokenize a text as it is to be embedded; ids are as they are.

        Raises ContextLengthExceeded: of a text that were cut, the rest would not count.
        """
        ids = text
        if isinstance(ids, str):
            ids = self._bos_ids + self._encode(ids, param="input") + self._eos_ids
        if len(ids) > self.card.max_seq_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.card.max_seq_len} tokens, but the "
                f"input has {len(ids)}.",
                param="input",
            )
        return ids

    @property
    def embeds(self) -> bool:
        """Whether it makes embeddings; such a model generates nothing."""
        return bool(self.card.embedding_size)

    def parsed_table(self, *, tools: bool) -> TokenTable:
        """What tokens are in an answer that is parsed, for calls of `tools` or only for thoughts.

        Parsers go by tokens that may be control tokens, which other answers do not show.
        """
        return self._parts_shown if tools else self._thoughts_shown

    def _showing(self, *formats: ToolFormat | ReasoningFormat | None) -> TokenTable:
        shown = [text for each in formats if each is not None for text in each.shown]
        token_ids = map(self.tokenizer.token_id, shown)
        return self.tokenizer.table.showing([each for each in token_ids if each is not None])

    def _encode(self, text: str, *, param: str, cut: bool = False) -> list[int]:
        if len(text) > self._prompt_chars_max and not cut:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.card.max_seq_len} tokens, and no"
                f" prompt of {len(text)} characters fits in it.",
                param=param,
            )
        return self.tokenizer.encode(text, parse_special=True)


def _again(card: ModelCard, made_of: dict[str, Any]) -> Model:
    return Model(card, **made_of)
