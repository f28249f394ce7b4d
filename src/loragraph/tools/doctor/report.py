"""What a diagnosis found: findings in order, numbers, a verdict in plain words. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["problem", "warning", "fact"]

Progress = Callable[[str, int, int], None]
"""Gets what is being done, how much of it is done, and how much it is in all."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer: a fact, something to look at, or a problem."""

    level: Level
    check: str  # "fit", "coverage", "scale", "strength", "tied head", "text", "f16", "peft", …
    message: str


@dataclass(slots=True)
class Diagnosis:
    """All findings, in the order of the checks, and the numbers behind them."""

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, level: Level, check: str, message: str) -> None:
        """Appends a finding."""
        self.findings.append(Finding(level, check, message))

    def of(self, level: Level) -> list[Finding]:
        """The findings of a level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.of("problem")

    @property
    def verdict(self) -> str:
        """One sentence."""
        problems, warnings = self.of("problem"), self.of("warning")
        if any(finding.check == "fit" for finding in problems):
            return "It does not apply to this base: a load would refuse it."
        if problems:
            return f"It applies, but not as it should: {len(problems)} problems, see above."
        compared = self.numbers.get("peft") is not None
        strength = "at the strength it was trained at" if compared else "at a plausible strength"
        if warnings:
            return f"It applies, {strength}; {len(warnings)} points deserve a look, see above."
        return f"It applies to this base, {strength}."

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "findings": [
                {"level": one.level, "check": one.check, "message": one.message}
                for one in self.findings
            ],
            "numbers": self.numbers,
        }
