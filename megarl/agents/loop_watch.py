"""A thread beside an event loop on which a user's code runs: code that does not let go of the loop holds up
every response of its engine, and cannot be interrupted from within. It is named, with its line."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Self

from megarl.config.errors import EngineError
from megarl.parallel.launch import write_error_file

_CALLBACK = asyncio.Handle._run.__code__  # beneath it stands what the loop is doing
# Python's own, megarl's, and code without a file (templates, methods of dataclasses); and what is installed.
_LIBRARIES = (str(Path(os.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep, "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")


class LoopWatch:
    """Watches the running loop while the `with` block lasts.

    key    of the configuration that names the user's function
    who    has the loop
    home   the file of that function: it may lie among the libraries
    limit  seconds for which the loop may be held; then the line that holds it is said, once of each function
    most   seconds after which the process ends with that line: others wait for it

    Time in which the loop is in megarl's own code, or in an engine, is nobody's fault here. A process that
    was stopped from outside does not count that time towards `most`."""

    def __init__(self, key: str, who: str, home: str | None, limit: float, most: float) -> None:
        self.key, self.who, self.home, self.limit, self.most = key, who, home, limit, most
        self._said: set[tuple[str, str]] = set()
        self._end, self._looks = threading.Event(), 0  # looks since the loop's last turn

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._turn()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._timer.cancel()
        self._thread.join()

    def _turn(self) -> None:
        self._seen, self._looks = time.monotonic(), 0
        self._timer = self._loop.call_later(self.limit / 4, self._turn)

    def _watch(self) -> None:
        while not self._end.wait(self.limit / 4):
            self._looks += 1
            if (held := time.monotonic() - self._seen) > self.limit:
                self._look(held)

    def _look(self, held: float) -> None:
        frame = self._users(sys._current_frames().get(self._watched))
        if frame is None:
            return
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        place = f"{name} ({file}:{frame.f_lineno})"
        what = f"has held the event loop of {self.who} for {held:.0f} s, and with it all of its responses"
        line = f"{self.key}: {place} {what} (await there, or leave it to a process or a thread)"
        if self._looks * self.limit / 4 > self.most:
            if not write_error_file(line, EngineError.code):
                print(f"megarl: {line}", file=sys.stderr, flush=True)
            os._exit(EngineError.code)
        if (file, name) not in self._said:
            self._said.add((file, name))
            print(f"megarl: {line}", file=sys.stderr, flush=True)

    def _users(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the user's code in what the loop is doing; None where it is none, or
        the loop does nothing."""
        found = None
        while frame is not None and frame.f_code is not _CALLBACK:
            file = frame.f_code.co_filename
            library = file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
            if found is None and (file == self.home or not library):
                found = frame
            frame = frame.f_back
        return found if frame is not None else None
