"""What a check finds: values, and how they are shown."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Verdict(enum.StrEnum):
    """OK; WARN: it starts, and may serve worse than it could; FAIL: it would not start."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`detail` says how `subject` is, `advice` what to do about it where it is not OK."""

    subject: str
    verdict: Verdict
    detail: str
    advice: str = ""


def ok(subject: str, detail: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.OK, detail=detail)


def warn(subject: str, detail: str, advice: str) -> Finding:
    return Finding(subject=subject, verdict=Verdict.WARN, detail=detail, advice=advice)


def fail(subject: str, detail: str, advice: str = "") -> Finding:
    return Finding(subject=subject, verdict=Verdict.FAIL, detail=detail, advice=advice)


def as_table(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one more for its advice."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:<4}  {finding.subject:<{width}}  {finding.detail}")
        if finding.advice:
            lines.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)
