"""Errors that are reported in one line."""

from __future__ import annotations

from megarl.config.text import printable


class MegarlError(Exception):
    """Base of errors that are reported without a traceback."""

    on_every_rank = True  # all ranks raise it, and rank 0 reports it; else the raising rank reports it
    code = 2  # exit code of the command

    def __str__(self) -> str:
        """Return one printable line, also with a file name or a library's message in it."""
        return printable(" ".join(line.strip() for line in super().__str__().splitlines()))


def first_line(error: BaseException) -> str:
    """Return the first line of the message, or the class name if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(MegarlError):
    """A key is unknown, has a wrong value, or contradicts another one."""


class DataError(MegarlError):
    """A file of data or of a run is missing, damaged, or has no usable rows."""


class CheckpointError(MegarlError):
    """A model folder or checkpoint is missing, damaged, or of another run or model."""


class StorageError(MegarlError):
    """A required file cannot be read or written, e.g. as the disk is full."""


class LeaseError(MegarlError):
    """Another command has taken over the output folder, or may do so."""

    on_every_rank = False


class NumericalError(MegarlError):
    """A loss, gradient, log-prob or value is not finite; the update was not applied."""

    fatal = False  # a weight is not finite: only a checkpoint helps


class DeviceMemoryError(MegarlError):
    """A phase does not fit on the device, or its offloaded tensors on the host."""

    on_every_rank = False


class EngineError(MegarlError):
    """The rollout engine failed, hung, or returned a wrong answer."""

    on_every_rank = False


class EngineFailure(EngineError):
    """An EngineError after which the engine must be restarted."""


class WaitTimeout(MegarlError):
    """A wait reached its limit, or a rank cannot be reached."""

    on_every_rank = False


class MessageError(MegarlError):
    """A message is not signed by a rank of this job, or is not of the expected kind."""

    on_every_rank = False


class TransferError(MegarlError):
    """The engine's weights differ from the actor's after a transfer."""


class ParityError(MegarlError):
    """Engine and trainer log-probs differ by more than rounding errors; nothing was updated."""


class Interrupted(MegarlError):
    """The run was asked to stop, or its time is up. It is saved."""

    code = 75  # EX_TEMPFAIL of sysexits.h


def error_class(name: str) -> type[MegarlError]:
    """Return this module's error class, or EngineError."""
    candidate = globals().get(name)
    return candidate if isinstance(candidate, type) and issubclass(candidate, MegarlError) else EngineError
