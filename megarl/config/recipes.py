"""Presets: values that `recipe: NAME` sets before the file and overrides.

The phases of a step follow from the values; only the name `sft` selects others."""

from typing import Any

# Published algorithms; `config/schema/algorithm.py` names each key's equation.
PRESETS: dict[str, dict[str, Any]] = {
    # Only the positive-example LM loss (VAPO eq. 9), on given responses. Their likelihood lowers entropy.
    "sft": {"algorithm": {"nll_weight": 1.0}, "guard": {"entropy_collapse": None}},
    # DAPO's "naive GRPO": sample-level loss, symmetric clip, no KL (DAPO section 2.3).
    "grpo": {"algorithm": {"advantage": "group", "aggregation": "sample", "clip_high": 0.2}},
    # DAPO eq. 8, 11, 13.
    "dapo": {
        "algorithm": {"advantage": "group", "aggregation": "token", "clip_high": 0.28},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
        "actor": {"warmup_steps": 20},
    },
    # VAPO's base, "vanilla PPO".
    "ppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 0.95,
            "lambda_policy": 0.95,
            "aggregation": "sample",
            "clip_high": 0.2,
        },
        "rollout": {"prompts": 8192, "group_size": 1},
    },
    # VAPO section 4, all techniques of Table 1. Overlong punishment is our choice.
    "vapo": {
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
    },
    # arXiv 2506.15050: VAPO on windows of responses, with values of the authors' verl pull request 3728.
    # Overlong punishment is our choice.
    "tppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 0.05,
            "lambda_floor": 0.95,
            "window_tail": 8,
            "whiten": True,
            "aggregation": "token",
            "clip_high": 0.28,
            "dual_clip": 10.0,
            "nll_weight": 0.1,
        },
        "rollout": {"window": 8192},
        "reward": {"overlong": {"soft_punishment": True}},
        "actor": {"lr": 8e-7, "weight_decay": 0.1},
        "critic": {"weight_decay": 0.1},
        "value_pretraining": {"steps": 10},
    },
    # arXiv 2510.01656 (abstract only). Values of a reimplementation for slime.
    "asyppo": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": 1.0,
            "clip_high": 0.28,
            "entropy_weight": 0.001,
            "agreement": {"mask": 0.1, "filter": 0.2},
        },
        "critic": {"count": 2},
    },
    "vc_ppo": {  # arXiv 2503.01491
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": 0.95,
            "aggregation": "sample",
        },
        "rollout": {"prompts": 8192, "group_size": 1},
        "value_pretraining": {"steps": 50},
    },
    "orz": {  # Open-Reasoner-Zero, arXiv 2503.24290
        "algorithm": {"advantage": "gae", "lambda_critic": 1.0, "lambda_policy": 1.0, "whiten": True},
        "rollout": {"prompts": 128, "group_size": 64},
    },
    # DeepSeek-R1-Zero, arXiv 2501.12948
    "r1_zero": {"algorithm": {"advantage": "group", "aggregation": "sample", "kl_weight": 0.001}},
    # arXiv 2503.20783
    "dr_grpo": {"algorithm": {"advantage": "group_mean", "aggregation": "constant"}},
    # arXiv 2402.14740; the sum over a response's tokens, up to one constant factor
    "rloo": {"algorithm": {"advantage": "leave_one_out", "aggregation": "constant"}},
    # arXiv 2501.03262
    "reinforce_pp": {"algorithm": {"advantage": "return", "whiten": True, "kl_reward": 0.001}},
    "gspo": {  # arXiv 2507.18071, section 5.1: four mini-batches a rollout, here of 8,192 responses
        "algorithm": {
            "advantage": "group",
            "surrogate": "gspo",
            "aggregation": "sample",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
        },
        "update": {"mini_batch": 2048},
    },
    "cispo": {  # MiniMax-M1, arXiv 2506.13585: no lower bound
        "algorithm": {"advantage": "group", "surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    "dppo": {  # arXiv 2602.04879 and its authors' example
        "algorithm": {
            "advantage": "group_mean",
            "aggregation": "constant",
            "surrogate": "dppo_tv",
            "old_logprobs": "engine",
            "clip_low": 0.15,
            "clip_high": 0.15,
        },
    },
    # arXiv 2511.20347
    "sapo": {"algorithm": {"advantage": "group", "surrogate": "sapo", "aggregation": "sample"}},
    "clip_cov": {  # arXiv 2505.22617 and its authors' scripts
        "algorithm": {"advantage": "group", "surrogate": "clip_cov", "clip_low": 1.0, "clip_high": 1.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
    },
    "kl_cov": {  # the same
        "algorithm": {"advantage": "group", "surrogate": "kl_cov"},
        "rollout": {"dynamic_sampling": {"enabled": True}},
    },
    "fipo": {  # arXiv 2603.19835
        "algorithm": {"advantage": "group", "surrogate": "fipo", "clip_high": 0.28, "dual_clip": 10.0},
        "rollout": {"dynamic_sampling": {"enabled": True}},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    # arXiv 2601.05242. The rewards are correctness and length.
    "gdpo": {
        "algorithm": {"advantage": "per_reward", "aggregation": "sample"},
        "reward": {"overlong": {"soft_punishment": True}},
    },
    # arXiv 2509.13232, with values of verl-recipe spo/train.sh: eight updates a rollout, here of 8,192
    # responses. Token-level loss is our choice.
    "spo": {
        "algorithm": {"advantage": "tracked", "aggregation": "token", "clip_high": 0.28, "dual_clip": 10.0},
        "rollout": {"prompts": 8192, "group_size": 1},
        "update": {"mini_batch": 1024},
    },
    # arXiv 2604.08865 and its 7B script (sustech-nlp/SPPO). Dual clip and the critic's weight decay are
    # verl's defaults.
    "sppo": {
        "algorithm": {"advantage": "prompt_value", "aggregation": "token", "dual_clip": 3.0},
        "rollout": {"prompts": 8192, "group_size": 1},
        "actor": {"weight_decay": 0.1},
        "critic": {"lr": 1e-5, "weight_decay": 0.01},
    },
    # arXiv 2607.07508, section 4.1, mathematics, as quoted by others. For code the clips are 0.8 and 3.0.
    "sao": {
        "algorithm": {
            "advantage": "gae",
            "lambda_critic": 1.0,
            "lambda_policy": "length_adaptive",
            "alpha": 1.5,
            "old_logprobs": "engine",
            "surrogate": "masked",
            "clip_low": 0.3,
            "clip_high": 5.0,
        },
        "rollout": {"prompts": 128, "group_size": 1},
        "update": {"mini_batch": 128},
        "critic": {"lr": 5e-6, "epochs": 2, "frozen": ["attention"]},
        "value_pretraining": {"steps": 10},
    },
}

# With `schedule.ahead` or `in_flight` the trainer's weights are newer than those that sampled; this corrects
# for it. It is not needed if the engine's log-probs are pi_old.
AHEAD_PRESET: dict[str, Any] = {"algorithm": {"mismatch": {"weight": "token"}}}
# An evaluation interrupts responses.
IN_FLIGHT_PRESET: dict[str, Any] = {"rollout": {"continue_partial": True}}
