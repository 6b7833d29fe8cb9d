"""Text to tokens and back: tokenizer, chat template, detokenizer, stop strings.

Pure and synchronous. Knows nothing of HTTP, of lanes or of engines.
"""
