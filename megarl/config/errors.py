"""The errors that a user can cause. Each is one line: what is wrong, where, and what to do. The command ends
with code 2."""

from __future__ import annotations

from megarl.config.text import printable


class MegarlError(Exception):
    """Base of every error that is reported as one line, without a traceback."""

    on_every_rank = True  # all ranks meet it alike, and one reports it; else the rank that met it does
    code = 2  # exit code of the command that ends with it

    def __str__(self) -> str:
        """Return one printable line, whatever a file name or a library's message brings along."""
        return printable(" ".join(line.strip() for line in super().__str__().splitlines()))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; of one without a message, the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class ConfigError(MegarlError):
    """A key of the configuration is unknown, of the wrong type, or contradicts another one."""


class DataError(MegarlError):
    """A data file is missing, malformed, or holds no row that can be used."""


class CheckpointError(MegarlError):
    """A model folder or checkpoint is missing, damaged, or belongs to something else."""


class StorageError(MegarlError):
    """A file that a run cannot do without cannot be written: the disk is full, or gone."""


class LeaseError(MegarlError):
    """Another command has taken over the folder that this one writes into, or may do so now."""

    on_every_rank = False


class NumericalError(MegarlError):
    """A loss, gradient, log-probability or value is not finite; the update was not applied.

    fatal: a weight is not finite, which only a checkpoint mends."""

    fatal = False


class DeviceMemoryError(MegarlError):
    """The device has no room for what a phase needs, or the host for what leaves it; the message says what is
    there."""

    on_every_rank = False


class EngineError(MegarlError):
    """The rollout engine failed, hung, or answered something that it was not asked."""

    on_every_rank = False


class EngineFailure(EngineError):
    """The engine's processes have died, hang, or answer nonsense: they are to be started again."""


class WaitTimeout(MegarlError):
    """A wait reached its limit; the message says for what and for how long."""

    on_every_rank = False


class MessageError(MegarlError):
    """What claims to come from a rank of this job is not signed by one, or is not what that rank sends."""

    on_every_rank = False


class TransferError(MegarlError):
    """The engine's weights differ from the actor's after a transfer."""


class ParityError(MegarlError):
    """The engine's log-probs are further from the trainer's than rounding explains; nothing was updated."""


class Interrupted(MegarlError):
    """The run was told to stop, or its time is up. It is saved; the same command continues it."""

    code = 75  # EX_TEMPFAIL of sysexits.h: not done, try again


def error_class(name: str) -> type[MegarlError]:
    """Return the class of this name in this module; EngineError where there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, MegarlError) else EngineError
