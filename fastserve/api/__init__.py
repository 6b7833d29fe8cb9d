"""The dialects: what clients say and hear, as pure functions from bytes to values and back.

requests.py reads a body into a request with definite values (body.py: JSON and its errors,
messages.py: chat messages, unsupported.py: what we refuse). chunks.py renders the events of a
stream, responses.py everything that is answered whole, logprobs.py the token details of both.
dialect.py says what a dialect is. Anthropic's (anthropic_*.py) and that of the Responses API
(response_*.py) are read into chats too, and differ in their answers. tokenizing.py has texts and
tokens, openapi.py the document of it all.

Knows nothing of sockets, clocks, tokenizers or the engine: ids, times and counts are passed in.
"""
