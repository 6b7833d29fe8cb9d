"""Where 1.2 has its fatal exception; EngineDeadError came later."""

from __future__ import annotations


class CppExecutorError(Exception):
    pass
