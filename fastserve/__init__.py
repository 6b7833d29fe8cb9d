"""fastserve: an OpenAI-compatible LLM server whose host side is never the bottleneck.

launch.py shows the process tree on one page, frontend/exchanges.py the path of a request.
"""

__version__ = "0.1.0"
