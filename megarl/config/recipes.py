"""Recipes: the published algorithms as settings of the same switches. A config or an override changes any of
them.

Each is one column of the papers' comparison; `config/schema.py` says at each switch which equation it stands
for.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

# Supervised warm start: the positive-example LM loss (VAPO eq. 9) alone, on given responses.
_SFT: Settings = {"algorithm": {"nll_weight": 1.0}}

# DAPO's first row, "naive GRPO": sample-level loss, symmetric clip, KL to the reference left out as in DAPO
# section 2.3.
_GRPO: Settings = {"algorithm": {"advantage": "group", "aggregation": "sample", "clip_high": 0.2}}

# DAPO eq. 8, 11, 13.
_DAPO: Settings = {
    "algorithm": {"advantage": "group", "aggregation": "token", "clip_high": 0.28},
    "rollout": {"dynamic_sampling": {"enabled": True}},
    "reward": {"overlong": {"soft_punishment": True}},
    "actor": {"warmup_steps": 20},
}

# VAPO's base, "vanilla PPO": one response a prompt, one lambda, sample-level loss, no value pretraining.
_PPO: Settings = {
    "algorithm": {
        "advantage": "gae",
        "lambda_critic": 0.95,
        "lambda_policy": 0.95,
        "aggregation": "sample",
        "clip_high": 0.2,
    },
    "rollout": {"prompts": 8192, "group_size": 1},
}

# VAPO section 4, all seven techniques of its Table 1. Overlong punishment as in DAPO is our choice: VAPO does
# not say.
_VAPO: Settings = {
    "algorithm": {
        "advantage": "gae",
        "lambda_critic": 1.0,
        "lambda_policy": "length_adaptive",
        "alpha": 0.05,
        "aggregation": "token",
        "clip_high": 0.28,
        "nll_weight": 0.1,
    },
    "reward": {"overlong": {"soft_punishment": True}},
    "value_pretraining": {"steps": 50},
}

PRESETS: dict[str, Settings] = {"sft": _SFT, "grpo": _GRPO, "dapo": _DAPO, "ppo": _PPO, "vapo": _VAPO}
