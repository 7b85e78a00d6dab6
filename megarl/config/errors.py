"""Errors that are reported in one line. The command exits with the error's code."""

from __future__ import annotations

from megarl.config.text import printable


class MegarlError(Exception):
    """Base of every error that is reported as one line, without a traceback."""

    on_every_rank = True  # raised on all ranks, and rank 0 reports it; else the raising rank reports it
    code = 2  # exit code of the command

    def __str__(self) -> str:
        """Return one printable line, also if a file name or a library's message is part of it."""
        return printable(" ".join(line.strip() for line in super().__str__().splitlines()))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(MegarlError):
    """A key of the configuration is unknown, of the wrong type, or contradicts another one."""


class DataError(MegarlError):
    """A data file is missing, malformed, or has no usable row."""


class CheckpointError(MegarlError):
    """A model folder or checkpoint is missing, damaged, or of another run or model."""


class StorageError(MegarlError):
    """A required file cannot be written: the disk is full or gone."""


class LeaseError(MegarlError):
    """Another command has taken over the output folder, or may do so now."""

    on_every_rank = False


class NumericalError(MegarlError):
    """A loss, gradient, log-probability or value is not finite; the update was not applied.

    fatal: a weight is not finite; only a checkpoint helps."""

    fatal = False


class DeviceMemoryError(MegarlError):
    """A phase does not fit on the device, or its offloaded tensors do not fit on the host."""

    on_every_rank = False


class EngineError(MegarlError):
    """The rollout engine failed, hung, or returned a wrong answer."""

    on_every_rank = False


class EngineFailure(EngineError):
    """An EngineError that needs a restart of the engine: its processes died, hang or return nonsense."""


class WaitTimeout(MegarlError):
    """A wait reached its limit. The message names the awaited thing and the time."""

    on_every_rank = False


class MessageError(MegarlError):
    """A message is not signed by a rank of this job, or is not of the expected kind."""

    on_every_rank = False


class TransferError(MegarlError):
    """The engine's weights differ from the actor's after a transfer."""


class ParityError(MegarlError):
    """The engine's log-probs are further from the trainer's than rounding explains; nothing was updated."""


class Interrupted(MegarlError):
    """The run was asked to stop, or its time is up. It is saved; the same command continues it."""

    code = 75  # EX_TEMPFAIL of sysexits.h


def error_class(name: str) -> type[MegarlError]:
    """Return this module's error class by name, or EngineError."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, MegarlError) else EngineError
