"""Report user code that blocks an engine's event loop, from a second thread.

Such code stops all responses of its engine, and cannot be interrupted from within."""

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

_CALLBACK = asyncio.Handle._run.__code__
# Python, megarl, and code without a file (templates, dataclasses).
_LIBRARIES = (str(Path(os.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep, "<")
_INSTALLED = ("/site-packages/", "/dist-packages/")


class LoopWatch:
    """Watches the running loop during a `with` block.

    who    the loop's owner, for messages
    home   file of the user's function, perhaps among the libraries
    limit  seconds of blocking until a report, once per function
    most   seconds until the process ends, not counting those while it was stopped

    Ignores libraries, megarl and engines."""

    def __init__(self, key: str, who: str, home: str | None, limit: float, most: float) -> None:
        self.key, self.who, self.home, self.limit, self.most = key, who, home, limit, most
        self._reported: set[tuple[str, str]] = set()
        self._end, self._checks = threading.Event(), 0

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.get_ident()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._timer.cancel()
        self._thread.join()

    def _beat(self) -> None:
        self._seen, self._checks = time.monotonic(), 0
        self._timer = self._loop.call_later(self.limit / 4, self._beat)

    def _watch(self) -> None:
        while not self._end.wait(self.limit / 4):
            self._checks += 1
            if (seconds := time.monotonic() - self._seen) > self.limit:
                self._check(seconds)

    def _check(self, seconds: float) -> None:
        frame = self._find_user_frame(sys._current_frames().get(self._watched))
        if frame is None:
            return
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        location = f"{name} ({file}:{frame.f_lineno})"
        what = f"has blocked the event loop of {self.who} for {seconds:.0f} s, and so all of its responses"
        message = f"{self.key}: {location} {what} (await there, or leave it to a process or a thread)"
        if self._checks * self.limit / 4 > self.most:
            if not write_error_file(message, EngineError.code):
                print(f"megarl: {message}", file=sys.stderr, flush=True)
            os._exit(EngineError.code)
        if (file, name) not in self._reported:
            self._reported.add((file, name))
            print(f"megarl: {message}", file=sys.stderr, flush=True)

    def _find_user_frame(self, frame: FrameType | None) -> FrameType | None:
        user_frame = None
        while frame is not None and frame.f_code is not _CALLBACK:
            file = frame.f_code.co_filename
            is_library = file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)
            if user_frame is None and (file == self.home or not is_library):
                user_frame = frame
            frame = frame.f_back
        return user_frame if frame is not None else None
