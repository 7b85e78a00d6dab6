"""The rollout of a step: prompts in, judged groups of responses out, with dynamic sampling; and the evaluation on held-out problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.config.errors import DataError
from megarl.config.schema import Config
from megarl.data.prompts import Prompt
from megarl.rollout.batch import EvaluationResult, RolloutBatch, response_stats
from megarl.rollout.delivery import Failures
from megarl.rollout.engine import Completion, RolloutEngine, SamplingParams
from megarl.rollout.groups import Group, GroupCollector, prompt_from_state, prompt_state
from megarl.rollout.seeds import evaluation_seed, response_seed
from megarl.rollout.wave import Asked, Verifier, WaveRunner, give_up


class RolloutSampler:
    """Every rank has one and calls it alike; all take the same decisions, since they see the same gathered groups.

    draw        the next n prompts of the training data, the same on every rank
    rank, world this rank's engine among all engines
    gather      every rank's object, by rank, on every rank
    oversample  see GroupCollector
    recover     see WaveRunner

    Where the engine streams, prompts are drawn ahead as long as groups are missing, groups are accepted in the order of their prompts,
    and once there are enough what still runs is aborted: its prompts come first in the next step, with
    `rollout.continue_partial` with what there is of their responses.
    """

    def __init__(
        self,
        config: Config,
        engine: RolloutEngine,
        draw: Callable[[int], Sequence[Prompt]],
        verifier: Verifier,
        tokenizer: Any,
        rank: int = 0,
        world: int = 1,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        oversample: float = 1.0,
        recover: Callable[[Failures], None] = give_up,
    ) -> None:
        self.config, self.engine, self.draw, self.verifier, self.tokenizer = config, engine, draw, verifier, tokenizer
        self.rank, self.world, self.gather, self.oversample, self.recover = rank, world, gather, oversample, recover
        self.surplus: list[Group] = []
        self.returned: list[Asked] = []

    @property
    def params(self) -> SamplingParams:
        """How training responses are drawn."""
        rollout = self.config.rollout
        return SamplingParams(rollout.max_response_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.stop)

    @property
    def evaluation_params(self) -> SamplingParams:
        """How evaluation answers are drawn."""
        evaluation, rollout = self.config.evaluation, self.config.rollout
        return SamplingParams(rollout.max_response_tokens, evaluation.temperature, evaluation.top_p, 0, rollout.stop)

    def collect(self, step: int) -> RolloutBatch:
        """`rollout.prompts` groups for step `step`. reward/* and response/* count all responses generated in this step, whether
        their groups were accepted or not, so that dynamic sampling does not hide the policy's accuracy.

        Raises DataError at the limit of generation batches where the configuration says so, and what engine and verifiers raise."""
        rollout, runner = self.config.rollout, self._runner()
        collector = GroupCollector(rollout.prompts, rollout.dynamic_sampling, self.surplus, self.oversample)
        drawn: Counter[int] = Counter()
        while prompts := self._more(collector, runner):
            runner.submit(self._draw(prompts, step, drawn), self.params)
            while runner.running:
                runner.tick()
                while groups := runner.take(collector.missing if self.engine.streams else None):
                    collector.offer(groups)  # of which some may be rejected: then there is more to take
                if self.engine.streams:
                    if not collector.missing:
                        self.returned = runner.abort(rollout.continue_partial) + self.returned
                    elif more := self._more(collector, runner):
                        runner.submit(self._draw(more, step, drawn), self.params)
        groups, self.surplus = collector.result()
        responses = [r for group in collector.offered or groups for r in group.responses]
        errors = Counter(r.error for r in responses if r.error is not None)
        return RolloutBatch(step, groups, {**collector.stats(), **response_stats(responses)}, runner.seconds, dict(errors))

    def _more(self, collector: GroupCollector, runner: WaveRunner) -> int:
        return collector.refill(runner.ahead, runner.running) if self.engine.streams else collector.wave()

    def _draw(self, prompts: int, step: int, drawn: Counter[int]) -> list[Asked]:
        """The next prompts: those that were returned first. A prompt drawn again in one step goes on where it stopped."""
        asked, self.returned = self.returned[:prompts], self.returned[prompts:]
        asked += [Asked(prompt, ()) for prompt in (self.draw(prompts - len(asked)) if len(asked) < prompts else ())]
        size = self.config.rollout.group_size
        for i, (prompt, begun) in enumerate((a.prompt, a.begun) for a in asked):
            if not begun:
                first = drawn[prompt.uid] * size
                asked[i] = Asked(prompt, [response_seed(self.config.seed, step, prompt.uid, first + j) for j in range(size)])
            drawn[prompt.uid] += 1
        return asked

    def evaluate(self, problems: Sequence[Prompt], k: int | None = None, params: SamplingParams | None = None) -> EvaluationResult:
        """k answers (default `evaluation.samples`) to each problem. Raises DataError where there is no problem."""
        if not problems:
            raise DataError("data.eval: there is no problem to evaluate on (name a file that holds some)")
        k = k or self.config.evaluation.samples
        drawn: Counter[int] = Counter()
        seeds = []
        for problem in problems:
            first = drawn[problem.uid] * k
            seeds.append([evaluation_seed(self.config.seed, problem.uid, first + i) for i in range(k)])
            drawn[problem.uid] += 1
        return EvaluationResult(k, self._runner().run(problems, seeds, params or self.evaluation_params))

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs besides the weights and the prompts' order; lists and dicts only."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The present `state_dict`, put together when it is called: groups and prompts are never changed once they are made."""
        surplus, asked = list(self.surplus), list(self.returned)

        def state() -> dict[str, Any]:
            begun = [[completion and vars(completion) for completion in a.begun] for a in asked]
            returned = [{"prompt": prompt_state(a.prompt), "seeds": list(a.seeds), "begun": b} for a, b in zip(asked, begun, strict=True)]
            return {"surplus": [group.state_dict() for group in surplus], "returned": returned}

        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.surplus = [Group.from_state(group) for group in state["surplus"]]
        self.returned = [
            Asked(prompt_from_state(a["prompt"]), a["seeds"], [Completion(**c) if c else None for c in a["begun"]])
            for a in state.get("returned", ())
        ]

    def _runner(self) -> WaveRunner:
        return WaveRunner(
            self.rank,
            self.world,
            self.engine,
            self.verifier,
            self.tokenizer,
            self.gather,
            self.config.reward,
            tp=self.config.rollout.engine_tp,
            recover=self.recover,
        )
