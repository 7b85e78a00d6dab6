"""The engine's log-probabilities against the trainer's, as metrics, and as factors of the policy loss where the configuration asks."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.histograms import difference_histogram
from megarl.algorithms.mismatch import mismatch_factors, mismatch_metrics, mismatch_sums
from megarl.config.schema import MismatchConfig
from megarl.data.experience import Experience
from megarl.parallel.comm import max_over_ranks, sum_over_replicas
from megarl.parallel.runtime import Runtime


def mismatch(experience: Experience, version: int, runtime: Runtime) -> dict[str, float]:
    """How far the engine's log-probabilities are from the trainer's, over responses that were drawn with the present weights,
    `version`: dynamic sampling's surplus of the step before was drawn with older ones."""
    sums, largest = mismatch_sums(experience["old_logprobs"], experience["engine_logprobs"], _present(experience, version))
    return mismatch_metrics(sum_over_replicas(runtime, sums), max_over_ranks(runtime, float(largest)))


def mismatch_histogram(experience: Experience, version: int, runtime: Runtime) -> dict[str, list[float]]:
    """{"tokens"}: of the same tokens, how many in each bin of `difference_histogram`, over all replicas."""
    counts = difference_histogram(experience["old_logprobs"], experience["engine_logprobs"], _present(experience, version))
    return {"tokens": sum_over_replicas(runtime, counts).tolist()}


def _present(experience: Experience, version: int) -> Tensor:
    return experience.response_mask & (experience["policy_version"] == version)[experience.sequence_ids]


def correct_mismatch(config: MismatchConfig, experience: Experience, runtime: Runtime) -> dict[str, float]:
    """Multiplies policy_weights [T] by `mismatch_factors` and gives the shares of response tokens that were truncated and masked;
    does nothing where both options are off. It so reaches the policy loss and the KL term, which are means over what the trainer's
    policy would sample, and not the positive-example loss, which imitates. Surplus of older weights is corrected like all the rest:
    its ratio holds the change of the weights as well."""
    if not config.enabled:
        return {}
    factors, counts = mismatch_factors(
        experience["old_logprobs"],
        experience["engine_logprobs"],
        experience.response_mask,
        experience.sequence_ids,
        weight=config.weight,
        cap=config.cap,
        keep=config.mask,
        bounds=(config.mask_low, config.mask_high),
    )
    experience["policy_weights"] = experience["policy_weights"] * factors
    tokens, truncated, masked = sum_over_replicas(runtime, counts).tolist()
    return {"mismatch/truncated": truncated / max(tokens, 1.0), "mismatch/masked": masked / max(tokens, 1.0)}
