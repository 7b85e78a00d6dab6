"""The verifiers `code` and `code_all`: run a Python answer on its problem's tests (docs/verifiers.md)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megarl.rewards.programs import Limits, ProgramError, Programs
from megarl.rewards.verdict import Verdict
from megarl_tasks.code_tests import (
    Assertions,
    Calls,
    Script,
    Tests,
    last_program,
    read_tests,
    same_output,
    same_result,
)
from megarl_verifier.answer import final_part

_CASE_SECONDS = 4.0  # of computation for a test
_WALL = 2.0  # seconds by the clock for one of computation, on a busy machine
_SHARE = 0.8  # of the time for an answer, for all its tests
_MAX_PROGRAM = 1 << 16  # characters
_END_SECONDS = 0.05  # less is too little to start a test


class CodeVerifier:
    """Grade an answer by its tests.

    Args:
        all_or_nothing: the score is 1 if all tests passed, else 0; False: the share that passed
        timeout: seconds for one answer
        memory_mib: data memory of a program, MiB
        allow_unconfined: also run programs where the kernel cannot confine them"""

    def __init__(
        self,
        *,
        all_or_nothing: bool = False,
        timeout: float = 10.0,
        memory_mib: int = 2048,
        allow_unconfined: bool = False,
    ) -> None:
        self._all_or_nothing, self._timeout, self._memory_mib = all_or_nothing, timeout, memory_mib
        self._programs = Programs(allow_unconfined=allow_unconfined)

    def with_limits(self, timeout: float, memory_mib: int, *, allow_unconfined: bool) -> CodeVerifier:
        """Return such a verifier with the limits of a worker process, which may start programs."""
        return CodeVerifier(
            all_or_nothing=self._all_or_nothing,
            timeout=timeout,
            memory_mib=memory_mib,
            allow_unconfined=allow_unconfined,
        )

    def close(self) -> None:
        """End the process that starts programs."""
        self._programs.close()

    def __call__(self, response: str, reference: str) -> Verdict:
        """Return the verdict of an answer. Raises UnusableError for an unusable reference."""
        tests = read_tests(reference)
        try:
            self._programs.start()
            program = last_program(final_part(response))
            if program is None or len(program) > _MAX_PROGRAM:
                return Verdict(False, score=0.0)
            try:
                passed, count = self._grade(program, tests)
            except ProgramError:  # something else may have ended it: try once more
                try:
                    passed, count = self._grade(program, tests)
                except ProgramError:  # if an empty program runs, the answer has ended it
                    self._programs.run("", "", Limits(1.0, 2.0, self._memory_mib), 0)
                    return Verdict(False, score=0.0)
        except ProgramError as error:
            return Verdict(False, error=str(error), graded=False)
        is_correct = passed == count
        return Verdict(is_correct, score=float(is_correct) if self._all_or_nothing else passed / count)

    def _grade(self, program: str, tests: Tests) -> tuple[int, int]:
        """Return how many tests passed, and how many there are."""
        end = time.monotonic() + _SHARE * self._timeout
        match tests:
            case Script(inputs, outputs):
                return self._grade_script(program, inputs, outputs, end), len(inputs)
            case Calls(name, arguments, results):
                expected = len(json.dumps(results))
                call = partial(self._programs.call, program, name, expected=expected)
                values = self._resume(arguments, call, end)
                return sum(
                    len(value) == 1 and same_result(value[0], result)
                    for value, result in zip(values, results, strict=True)
                ), len(arguments)
            case Assertions(before, codes, candidate):

                def test(some: Sequence[str], limits: Limits) -> list[Any]:
                    first = len(codes) - len(some)
                    return self._programs.test(program, before, codes, candidate, limits, first)

                return sum(map(bool, self._resume(codes, test, end))), len(codes)

    def _limits(self, end: float) -> Limits | None:
        """Return the limits of the next process; None if the answer has no more time."""
        left = end - time.monotonic()
        cpu = min(_CASE_SECONDS, self._timeout / 2)
        return Limits(cpu, min(_WALL * cpu, left), self._memory_mib) if left > _END_SECONDS else None

    def _grade_script(self, program: str, inputs: Sequence[str], outputs: Sequence[str], end: float) -> int:
        passed = 0
        for stdin, expected in zip(inputs, outputs, strict=True):
            if (limits := self._limits(end)) is None:
                break
            output = self._programs.run(program, stdin, limits, len(expected))
            is_passed = output.code == 0 and output.text is not None and same_output(output.text, expected)
            passed += is_passed
            if self._all_or_nothing and not is_passed:
                break
        return passed

    def _resume(
        self, cases: Sequence[Any], run: Callable[[Sequence[Any], Limits], list[Any]], end: float
    ) -> list[Any]:
        """Return a result for each case; [] for one on which its process ended.

        If a process ends early, a new one begins with the case that had no result. If it has none again, the
        next process skips it."""
        results = list[Any]()
        while len(results) < len(cases) and (limits := self._limits(end)) is not None:
            new_results = run(cases[len(results) :], limits)[: len(cases) - len(results)]
            results += new_results or [[]]
            if self._all_or_nothing and not new_results:
                break
        return results + [[]] * (len(cases) - len(results))


verify = CodeVerifier()
verify_all = CodeVerifier(all_or_nothing=True)
