"""M2PO (arXiv 2510.01161): a bound of the second moment of log-ratios masks the farthest tokens.

megarl/training/methods/m2po.py selects them in the whole mini-batch."""

from __future__ import annotations

from megarl.algorithms.losses import Objective, Tokens


def m2po(t: Tokens) -> Objective:
    """Return r_t A_t, unclipped, and 0 on the selected tokens. Denominators count them."""
    assert t.selected is not None and t.counted is not None
    is_masked = t.selected & t.counted
    too_low, too_high = is_masked & (t.ratio < 1), is_masked & (t.ratio > 1)
    return Objective(t.ratio * t.advantage * ~t.selected, too_low, too_high, {"selected": is_masked.sum()})
