"""Virtual stages (`parallel.vpp`): the interleaved schedule gives the gradients of a single rank.

Its checkpoints can be read at any other layout. Layouts are (tp, pp, dp, ep, cp, vpp)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.parallel import jobs
from tests.parallel.rendezvous import rendezvous
from tests.parallel.test_engine_agreement import PROMPTS, changed_tensors
from tests.parallel.test_invariance import TERMS, VOCAB, make_batch, relative_difference
from tests.parallel.test_parity import hf_logprobs, sequences
from tests.ranks import SENT_AT_START, RankPool
from tests.tiny_models import make_tiny_model

Ranks = Callable[..., RankPool]
Layout = tuple[int, int, int, int, int, int]
ONE: Layout = (1, 1, 1, 1, 1, 1)
MORE: list[Layout] = [
    (1, 2, 2, 1, 1, 2),
    (2, 2, 1, 1, 1, 2),
    (1, 4, 1, 1, 1, 2),
    (1, 2, 1, 1, 2, 2),
    (1, 2, 1, 1, 1, 4),
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "layout",
    [(1, 2, 1, 1, 1, 2), pytest.param((2, 2, 1, 1, 1, 2), marks=SLOW)],
    ids=lambda layout: str(layout),
)
def test_logprobs_and_values_equal_hugging_face(layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    prompts, responses = sequences(307)
    arguments = {"prompts": prompts, "responses": responses}
    for family, options in (("qwen3", {"tied": True}), ("llama", {"rope": "llama3"})):
        # Each chunk has two layers, and tp does not divide the vocabulary.
        folder = make_tiny_model(tmp_path / family, family, vocab=307, layers=8, **options)  # type: ignore[arg-type]
        expected, entropy = hf_logprobs(folder, prompts, responses, 1.0)
        for found, found_entropy in ranks(*layout).run(jobs.logprobs, folder=folder, **arguments):
            assert (found - expected).abs().max() <= 1e-5, family
            assert (found_entropy - entropy).abs().max() <= 1e-5
    folder = make_tiny_model(tmp_path / "critic", "qwen2", vocab=307, layers=4, classification="token")
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        scores = [
            model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, 0]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    for found in ranks(*layout).run(jobs.values, folder=folder, **arguments):
        assert (found - torch.cat(scores)).abs().max() <= 1e-5


def gradients(
    ranks: Ranks, layout: Layout, folder: Path, which: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Return rank 0's result, after checking the gradient norm for clipping on every rank."""
    found = ranks(*layout).run(
        jobs.gradients, folder=folder, batch=make_batch(), which=which, options={"budget": 48, **options}
    )
    exact = float(torch.cat([x.flatten() for x in found[0]["gradients"].values()]).double().norm())
    for rank in found:
        assert rank["norm"] == pytest.approx(exact, rel=1e-5), layout
    return found[0]


@pytest.mark.parametrize(
    ("term", "layouts"),
    [
        ("DAPO", [(1, 2, 1, 1, 1, 2)]),
        pytest.param("VAPO", MORE, marks=SLOW),
        pytest.param("value", MORE[:1], marks=SLOW),
    ],
)
def test_gradients_do_not_depend_on_virtual_stages(
    term: str, layouts: list[Layout], ranks: Ranks, tmp_path: Path
) -> None:
    """Micro-batches are padded to a multiple of the pipeline's ranks and to equal numbers on all replicas.

    The first layout, with replicas, has every number of micro-batches; each of the others two of them."""
    which, options = TERMS[term]
    kind: Any = "token" if which == "critic" else None
    folder = make_tiny_model(
        tmp_path / "model", "qwen3", vocab=VOCAB, layers=8, tied=True, classification=kind
    )
    expected = gradients(ranks, ONE, folder, which, {**options, "budget": 10_000})
    # A single micro-batch of all sequences, which needs padding; few; many.
    schedules = ((10_000, False), (48, True), (48, False), (20, True))
    for number, layout in enumerate(layouts):
        for budget, overlap in schedules if number == 0 else schedules[number % 2 :: 2]:
            settings = {**options, "budget": budget, "overlap_warmup_flush": overlap}
            found = gradients(ranks, layout, folder, which, settings)
            difference = relative_difference(found["gradients"], expected["gradients"])
            assert difference <= 1e-5, (layout, budget, overlap)
            for name, value in expected["sums"].items():
                assert found["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (layout, name)


@pytest.mark.parametrize(
    ("layout", "recompute", "optimizer"),
    [
        ((1, 2, 1, 1, 1, 2), "full", {"frozen": ["embeddings"], "frozen_layers": 1}),
        pytest.param((1, 2, 1, 1, 1, 2), "selective", {}, marks=SLOW),
        pytest.param((1, 2, 1, 1, 1, 2), "none", {"frozen": ["embeddings"], "frozen_layers": 3}, marks=SLOW),
        pytest.param((1, 2, 2, 1, 1, 2), "full", {"frozen": ["embeddings"], "frozen_layers": 3}, marks=SLOW),
    ],
)
def test_gradients_with_recomputation_and_frozen_layers(
    layout: Layout, recompute: str, optimizer: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB, layers=4, tied=True)
    expected = gradients(ranks, ONE, folder, "actor", {"optimizer": optimizer})
    options = {"optimizer": optimizer, "model": {"recompute": recompute}}
    found = gradients(ranks, layout, folder, "actor", options)
    assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5
    for name, gradient in expected["gradients"].items():
        assert bool(gradient.any()) == bool(found["gradients"][name].any()), name


def test_an_engine_gets_the_weights_of_every_chunk(ranks: Ranks, tmp_path: Path) -> None:
    """The engine's weights are bitwise the exported ones after an update, and its log-probs the trainer's."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=61, layers=4, tied=True)
    out = tmp_path / "out"
    answers = ranks(1, 2, 1, 1, 1, 2).run(jobs.rollout_after_update, folder=folder, out=out, prompts=PROMPTS)
    exported = changed_tensors(out, folder)
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for answer in answers:
        assert answer["parameters"].keys() == exported.keys()
        for name, tensor in answer["parameters"].items():
            assert torch.equal(tensor, exported[name]), name
        assert (answer["engine"] - answer["trainer"]).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("written", "read", "frozen"),
    [
        ((1, 2, 1, 1, 1, 2), [(1, 2, 1, 1, 1, 2), (1, 2, 1, 1, 1, 1), ONE], 0),
        pytest.param(
            (1, 2, 2, 1, 1, 2), [(1, 2, 2, 1, 1, 2), (2, 2, 1, 1, 1, 2), (1, 4, 1, 1, 1, 1)], 1, marks=SLOW
        ),
        pytest.param((1, 4, 1, 1, 1, 1), [(1, 2, 1, 1, 1, 2), (1, 2, 2, 1, 1, 2)], 0, marks=SLOW),
    ],
    ids=str,
)
def test_checkpoints_are_read_with_and_without_virtual_stages(
    written: Layout, read: list[Layout], frozen: int, ranks: Ranks, tmp_path: Path
) -> None:
    """Each direction once, and one of them with a frozen layer.

    The weights read are bitwise those written, and so are the next update's on the same layout.

    On other layouts the next update is nearly equal, which requires each layer to have its own Adam
    moments."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB, layers=4, tied=True)
    (checkpoint := tmp_path / "checkpoint").mkdir()

    def run(layout: Layout, read: bool) -> tuple[dict[str, Tensor], ...]:
        settings: dict[str, Any] = {"which": "actor", "read": read, "overlap": layout[2] > 1}
        settings["optimizer"] = {"frozen_layers": frozen}
        return ranks(*layout).run(jobs.partly_frozen, folder=folder, checkpoint=checkpoint, **settings)[0][
            "weights"
        ]

    _, between, after = run(written, read=False)
    assert any(not torch.equal(between[name], after[name]) for name in after)
    for layout in read:
        _, found, later = run(layout, read=True)
        for name, tensor in between.items():
            assert torch.equal(found[name], tensor), (layout, name)
            if layout == written:
                assert torch.equal(later[name], after[name]), name
            else:
                torch.testing.assert_close(later[name], after[name], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2, 2, 1, 1, 2), (1, 2, 2, 2, 1, 2)], ids=str)
def test_overlaps_over_replicas_change_nothing(layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    """The overlaps reduce gradients and gather weights chunk by chunk, with and without experts."""
    make_tiny_model(tmp_path / "model", "qwen3" if layout[3] == 1 else "qwen3_moe", layers=4)
    found = {}
    switches = {"off": {}, "reduce": {"overlap_grad_reduce": True}, "both": {"overlap_param_gather": True}}
    if layout[3] > 1:
        del switches["reduce"]  # "both" has it, too
    for which, options in switches.items():
        (tmp_path / which).mkdir()
        found[which] = ranks(*layout).run(
            jobs.updates_with_overlap, folder=tmp_path / "model", checkpoint=tmp_path / which, **options
        )
    for rank, plain in enumerate(found["off"]):
        assert all(plain["alike"]) or layout[3] > 1  # replicas have different experts
        for which in switches.keys() - {"off"}:
            ours = found[which][rank]
            assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
            for name, weight in plain["weights"].items():
                torch.testing.assert_close(ours["weights"][name], weight, rtol=0, atol=2e-6)
                assert torch.equal(ours["back"][name], ours["weights"][name]), name
    if layout[3] == 1:
        assert found["both"][0]["alike"] == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2, 1, 1, 1, 2), (1, 2, 2, 2, 1, 2), (2, 2, 1, 2, 1, 2)], ids=str)
def test_gradients_of_a_mixture_of_experts(layout: Layout, ranks: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", vocab=VOCAB, layers=4)
    expected = gradients(ranks, ONE, folder, "actor", {"budget": 10_000})
    found = gradients(ranks, layout, folder, "actor", {})
    assert relative_difference(found["gradients"], expected["gradients"]) <= 1e-5


def gradients_by_rendezvous(runtime: Any, **arguments: Any) -> tuple[Any, ...]:
    """Compute gradients over gloo's messages and over messages that complete as NCCL's may.

    Returns both, the results of `rendezvous`, and the point-to-point messages sent at start."""
    plain = jobs.gradients(runtime, **arguments)
    with rendezvous() as (sent, waited):
        found = jobs.gradients(runtime, **arguments)
    return plain["gradients"], found["gradients"], sent, waited, SENT_AT_START


@pytest.mark.parametrize(
    "flush", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "warmup_flush"]
)
@pytest.mark.parametrize(
    "layout", [(1, 2, 1, 1, 1, 2), pytest.param((1, 4, 1, 1, 1, 2), marks=pytest.mark.slow)], ids=str
)
def test_stages_wait_for_none_that_waits_for_them(
    layout: Layout, flush: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """No deadlock occurs with NCCL's semantics.

    Sends complete only with their receiver, and synchronising the device waits for all of them. Each pair
    of ranks has exchanged point-to-point messages at start, where NCCL creates the pair's communicator."""
    folder = make_tiny_model(tmp_path / "model", "qwen3", vocab=VOCAB, layers=8, tied=True)
    arguments = {"folder": folder, "which": "actor", "batch": make_batch()}
    options = {"budget": 34, "overlap_warmup_flush": flush}
    answers = ranks(*layout).run(gradients_by_rendezvous, **arguments, options=options)
    assert relative_difference(answers[0][1], answers[0][0]) <= 1e-6
    for _, _, sent, waited, at_start in answers:
        assert sent and sent <= set(at_start)
        assert max(waited) > 2  # in addition to the messages with lengths
