"""The exceptions of DeepSpec, and the exit code that each one becomes.

The codes are part of the interface, launch scripts read them: 0 done, 1 failure, 2 the user's mistake,
75 interrupted and saved.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 75


class DeepSpecError(Exception):
    """Base of every error that DeepSpec raises on purpose. Its text is meant for the user."""

    exit_code = EXIT_FAILURE


class UserError(DeepSpecError):
    """A mistake that the user can mend; the message names the key or the file to change."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """One or more mistakes in the configuration, all reported together."""

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(UserError):
    """A data file that cannot be used: missing, malformed, or without a usable sample."""


class TargetError(UserError):
    """A target model that cannot be loaded, or cannot be used as a target."""


class PackageError(UserError):
    """An inference package or checkpoint that does not say what it must, or contradicts itself."""


class TrainingError(DeepSpecError):
    """Training cannot go on: the loader failed, the loss stayed non-finite, the disk is full."""


class Interrupted(DeepSpecError):  # noqa: N818 - not an error: the run was asked to stop and has saved its state
    """The run was asked to stop; everything needed to go on is on disk."""

    exit_code = EXIT_INTERRUPTED
