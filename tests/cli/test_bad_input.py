"""Mistakes of users: one line with the key or file, and exit code 2.

No rank has started and the run's folder is not claimed by then.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli.main import main
from megarl.config import load_config
from megarl.schedule.preflight import preflight
from megarl.weights.hf import HFFolder
from tests.cli.scene import Scene, write_jsonl
from tests.commands import run_command
from tests.tiny_models import LLAMA3_ROPE, make_tiny_model

NULL = object()


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key, NULL writes null."""
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps({key: None if value is NULL else value for key, value in kept.items()}))


class TestKeys:
    CASES = {
        "rollout.groupsize=2": (
            "command line: rollout.groupsize: unknown key (did you mean rollout.group_size?)"
        ),
        "rollout.prompts=many": "command line: rollout.prompts: must be a whole number (got 'many')",
        "noequals": (
            "command line: 'noequals': an override is written key=value, with dots in the key (e.g. "
            "actor.lr=2e-6)"
        ),
        "rollout.group_size=1": "{x}: rollout.group_size: must be >= 2 for algorithm.advantage group",
        "recipe=ppo rollout.group_size=1 rollout.prompts=8 rollout.dynamic_sampling.enabled=true": (
            "{x}: rollout.dynamic_sampling.enabled: needs rollout.group_size >= 2 (got 1)"
        ),
        "algorithm.lambda_policy=length_adaptive": (
            "{x}: algorithm.lambda_policy: length_adaptive needs a critic of all tokens (set "
        ),
        "update.mini_batch=3": "{x}: update.mini_batch: must divide the 8 responses of a step",
        "rollout.max_response_tokens=129": (
            "{x}: rollout.max_response_tokens: data.max_prompt_tokens 128 + 129 tokens exceed the 256 "
            "positions of {folder}/model"
        ),
        "parallel.tp=4": "parallel.tp: 4 does not divide the model's 2 key/value heads (possible: 1, 2)",
        "parallel.pp=3": "parallel.pp: 3 does not divide the model's 2 layers (possible: 1, 2)",
        "rollout.routing_replay=true": (
            "rollout.routing_replay: a qwen2 model has no experts (set it to false)"
        ),
        "algorithm.advantage=otb algorithm.old_logprobs=engine": (
            "{x}: algorithm.advantage: otb: no engine returns the sum of squared probabilities (set "
            "algorithm.old_logprobs=trainer)"
        ),
        "rollout.sampling_replay=true": (
            "{x}: rollout.sampling_replay: needs 1 < rollout.top_k <= 4096, as top_p alone limits no set "
            "(got 0; set top_k, or it to false)"
        ),
        "rollout.sampling_replay=true rollout.top_k=5 algorithm.surrogate=dppo_tv algorithm.dppo.top_k=4": (
            "{x}: algorithm.dppo.top_k: compares the whole distribution, not rollout.sampling_replay's sets "
            "(leave one of them out)"
        ),
        "rollout.routing_compare=true": (
            "{x}: rollout.routing_compare: needs rollout.routing_replay true and "
        ),
        "model.grouped_experts=true model.layers=portable": (
            "{x}: model.grouped_experts: needs Transformer Engine's layers, without FP8 (set it to false)"
        ),
        "model.permute_fusion=true model.layers=portable": (
            "{x}: model.permute_fusion: needs Transformer Engine's kernels, on a GPU (set it to false)"
        ),
        "model.attention=fused model.layers=portable": (
            "{x}: model.attention: needs Transformer Engine's layers (set it to auto)"
        ),
        "model.recompute_modules=mlp": (
            "{x}: model.recompute_modules: has no effect with model.recompute none (set model.recompute="
        ),
        "model.recompute=selective model.recompute_modules=[]": (
            "{x}: model.recompute_modules: must name the modules that model.recompute selective recomputes"
        ),
        "model.recompute=selective model.recompute_modules=moe": (
            "command line: model.recompute_modules: must be 'attention' or 'mlp' (got 'moe')"
        ),
        "parallel.grad_dtype=bf16": "{x}: parallel.grad_dtype: bf16 needs model.dtype bf16 (got fp32)",
        "model.grouped_experts=true": (
            "model.grouped_experts: needs a CUDA device and transformer-engine (make install-gpu, or set it"
        ),
        "actor.frozen_layers=3": (
            "actor.frozen_layers: 3, but the model has 2 layers (at most 2, with which the final norm and "
            "the head still learn)"
        ),
        "actor.lora.rank=4 actor.lora.targets=[q_proj,gate_up_proj]": (
            "actor.lora.targets: a qwen2 model has no gate_up_proj (it has q_proj, k_proj, v_proj, o_proj, "
            "gate_proj, up_proj, down_proj)"
        ),
        "actor.lora.alpha=8": (
            "{x}: actor.lora.alpha: has no effect while actor.lora.rank is null (set it, or leave this out)"
        ),
        "actor.muon.steps=3": (
            "{x}: actor.muon.steps: has no effect while actor.optimizer is adam (set it to muon, or leave "
        ),
        "actor.optimizer=muon actor.lora.rank=4": (
            "{x}: actor.optimizer: muon trains whole models, but actor.lora.rank freezes a part (set "
            "it to adam, or leave lora.rank out)"
        ),
        "actor.lora.rank=4 actor.frozen=attention": (
            "{x}: actor.frozen: LoRA freezes the whole model already (set it to [])"
        ),
        "actor.lora.rank=4 model.dtype=bf16 model.fp8.format=hybrid model.fp8.recipe=delayed": (
            "{x}: actor.lora.rank: adapter checkpoints lack the scaling histories of "
            "model.fp8.recipe delayed (choose another recipe, or set rank to null)"
        ),
        "reward.verifier=maths": (
            "reward.verifier: unknown verifier 'maths' "
            "(use code, code_all, dapo, math, judge or package.module:function)"
        ),
        "reward.verifier=judge": (
            "{x}: reward.verifier: judge needs an endpoint (set reward.judge.url and reward.judge.model)"
        ),
        "reward.judge.votes=3": (
            "{x}: reward.judge.votes: has no effect without a judge (set reward.judge.url)"
        ),
        "reward.judge.url=api.x/v1": "{x}: reward.judge.url: is no http or https address",
        "reward.judge.url=http://[::1/v1": "{x}: reward.judge.url: is no http or https address",
        "reward.judge.url=ftp://me:pw@api.x": (
            "{x}: reward.judge.url: must hold no user, password or query, because it is logged"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.max_calls=1"
        " parallel.rollout_ranks=2": (
            "{x}: reward.judge.max_calls: 1 leaves some of the 2 engines without calls (raise it)"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.max_tokens=1": (
            "{x}: reward.judge.max_tokens: 1 leaves some of the 2 engines without tokens (raise it)"
        ),
        "reward.judge.url=http://me:pw@api.x/v1": (
            "{x}: reward.judge.url: must hold no user, password or query, because it is logged"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1": (
            "{x}: reward.judge.model: must name the model of the endpoint"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.template=x": (
            "{x}: reward.judge.template: has no {response}, so the judge would see no response (add it)"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.pattern=Score": (
            "{x}: reward.judge.pattern: has no group around the score (write e.g. Score: (\\d+))"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.pattern=(": (
            "{x}: reward.judge.pattern: is no regular expression: "
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.lowest=10": (
            "{x}: reward.judge.lowest: must be below reward.judge.highest 10 (got 10)"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.votes=3": (
            "{x}: reward.judge.votes: 3 votes at temperature 0 are one answer"
        ),
        "reward.judge.url=http://127.0.0.1:9/v1 reward.judge.model=m reward.judge.key_variable=NO_SUCH_KEY": (
            "reward.judge.key_variable: the environment variable NO_SUCH_KEY is not set on "
        ),
        "reward.verifier=no_such_module:f": (
            "reward.verifier: no_such_module cannot be imported: ModuleNotFoundError"
        ),
        "reward.verifier=math:no_such_function": "reward.verifier: math has no function no_such_function",
        "reward.verifier=os:getcwd": (
            "reward.verifier: os:getcwd fails on a made-up response that gives the reference answer '0': "
            "TypeError: "
        ),
        "reward.verifier=tests.cli.verifiers:a_text": (
            "reward.verifier: tests.cli.verifiers:a_text fails on a made-up response that gives the "
            "reference answer '0': "
            "verifier returned str, not bool, number, (right, answer) or Verdict (it is called with "
        ),
        "reward.terms.x.function=no_such_module:f": (
            "reward.terms.x.function: no_such_module cannot be imported: ModuleNotFoundError"
        ),
        "reward.terms.x.function=os:getcwd": (
            "reward.terms.x: fails on a made-up response that gives the reference answer '0': TypeError: "
        ),
        "reward.verifier=tests.cli.verifiers:endless reward.timeout=0.5": (
            "reward.verifier: tests.cli.verifiers:endless fails on a made-up response that gives the "
            "reference answer '0': "
            "timeout after 0.5 s"
        ),
        "data.prompt_format=hello": "data.prompt_format: must contain {prompt}",
        "rollout.engine=sglang": (
            "rollout.engine: sglang is not installed (make install-gpu, or use transformers)"
        ),
        "model.layers=te": "model.layers: te needs a CUDA device and transformer-engine",
        "data.train=[]": "{x}: data.train: must name at least one file",
        "watchdog.limits.rolout=5": (
            "{x}: watchdog.limits: rolout is not part of a run (use one of start, choose a checkpoint, "
        ),
        "watchdog.limits.rollout=-5": "command line: watchdog.limits: must be greater than 0 (got -5)",
        "run_dir={folder}/model": (
            "{x}: run_dir: {folder}/model is inside model.path {folder}/model, which must not change"
        ),
        "run_dir={folder}/train.jsonl/../model/run": (
            "{x}: run_dir: {folder}/train.jsonl/../model/run is inside model.path"
        ),
        "model.path={folder}/run/hf": (
            "{x}: model.path: {folder}/run/hf is one of the folders that the run writes in run_dir"
        ),
        "recipe=vapo critic.path={folder}/run/critic_pretrained": (
            "{x}: critic.path: {folder}/run/critic_pretrained is one of"
        ),
        "recipe=vapo critic.path={folder}/c value_pretraining.rollouts={folder}/c": (
            "{x}: value_pretraining.rollouts: {folder}/c is inside critic.path {folder}/c, which "
            "must not change"
        ),
        "rollout.engine_options.trust_remote_code=true": (
            "{x}: rollout.engine_options: trust_remote_code: code in a model's folder"
        ),
        "rollout.engine_options.moe_runner_backend=flashinfer_trtllm": (
            "{x}: rollout.engine_options: moe_runner_backend: flashinfer_trtllm needs another order"
        ),
    }

    @pytest.mark.parametrize("overrides", CASES)
    def test_one_line(self, scene: Scene, overrides: str) -> None:
        if overrides == "rollout.engine=sglang" and find_spec("sglang"):
            pytest.skip("sglang is installed")
        expected = (
            self.CASES[overrides].replace("{x}", str(scene.config)).replace("{folder}", str(scene.folder))
        )
        given = overrides.replace("{folder}", str(scene.folder)).split()
        before = sorted(scene.folder.rglob("*"))
        assert scene.train_refused(*given).startswith(expected)
        assert sorted(scene.folder.rglob("*")) == before

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_mixtures(self, scene: Scene, tmp_path: Path) -> None:
        folder = make_tiny_model(tmp_path / "mixture", "qwen3_moe", experts=6, max_positions=256)
        where = f"model.path={folder}"
        line = scene.train_refused(where, "parallel.ep=4", "parallel.dp=2")
        assert line == "parallel.ep: 4 does not divide the model's 6 experts (possible: 1, 2, 3, 6)"
        line = scene.train_refused(where, "parallel.ep=3")
        assert line.startswith("parallel.ep: 3 does not divide the 2 processes of a pipeline stage")

    def test_judge_that_does_not_answer(self, scene: Scene) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
            keys = (f"reward.judge.url={url}", "reward.judge.model=m", "reward.judge.retries=0")
            line = scene.train_refused(*keys)  # the socket does not listen
        assert line.startswith(f"reward.judge.url: {url}: fails on a made-up response: no connection (")
        # A replay uses recorded rewards: it needs neither the endpoint nor the key.
        config = load_config(scene.config, [*keys, "reward.judge.key_variable=NO_SUCH_KEY"])
        preflight(config, str(scene.config), replay=True)

    def test_cuda_where_there_is_none(self, scene: Scene) -> None:
        assert scene.train_refused("parallel.device=cuda") == (
            "parallel.device: cuda was asked for, but torch sees no CUDA device (use auto or cpu)"
        )

    def test_tracker_that_is_not_installed(self, scene: Scene) -> None:
        try:
            import wandb  # noqa: F401
        except ImportError:
            assert scene.train_refused("log.wandb=true").startswith(
                "log.wandb: wandb is not installed (pip install 'megarl[track]'"
            )
        else:
            pytest.skip("wandb is installed")

    def test_heads_that_tp_does_not_divide(self, scene: Scene, tmp_path: Path) -> None:
        make_tiny_model(
            tmp_path / "m", "llama", heads=3, kv_heads=3, head_dim=8, hidden=24, max_positions=256
        )
        assert scene.train_refused(f"model.path={tmp_path}/m").startswith(
            "parallel.tp: 2 does not divide the model's 3 attention heads"
        )


class TestModelFolder:
    """Each test damages a copy of the model's folder; the message names model.path and the faulty file."""

    def test_missing(self, scene: Scene) -> None:
        assert scene.train_refused("model.path=/no/such/model") == (
            "model.path: /no/such/model: no such folder (it must be a Hugging Face folder: config.json, "
            "*.safetensors, tokenizer.json)"
        )

    def test_a_file(self, scene: Scene) -> None:
        assert scene.train_refused(f"model.path={scene.config}").startswith(
            f"model.path: {scene.config}: not a folder ("
        )

    def damaged(self, scene: Scene, folder: Path, key: str = "model.path") -> str:
        line = scene.train_refused(f"{key}={folder}", *(["recipe=vapo"] if key == "critic.path" else []))
        assert line.startswith(f"{key}: {folder}"), line
        return line.removeprefix(f"{key}: {folder}")

    def test_no_config(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "config.json").unlink()
        assert (
            self.damaged(scene, model_copy)
            == "/config.json: no such file (a Hugging Face model folder is expected)"
        )

    @pytest.mark.parametrize("content", ["", "{", "[1]", "\x00", "[" * 100_000])
    def test_config_that_is_none(self, scene: Scene, model_copy: Path, content: str) -> None:
        (model_copy / "config.json").write_text(content)
        assert self.damaged(scene, model_copy).startswith("/config.json: ")

    CONFIGS: list[tuple[dict[str, Any], str]] = [
        (
            {"model_type": "gpt2"},
            "/config.json: model_type: 'gpt2' is not a known family (known: qwen2, qwen3, qwen3_moe, llama, ",
        ),
        ({"model_type": None}, "/config.json: model_type: None is not a known family"),
        (
            {"architectures": ["Qwen2AudioModel"]},
            "/config.json: architectures: 'Qwen2AudioModel' is not supported",
        ),
        ({"hidden_size": "big"}, "/config.json: hidden_size: must be a positive integer (got 'big')"),
        (
            {"num_key_value_heads": 3},
            "/config.json: num_key_value_heads: 3 does not divide num_attention_heads = 4",
        ),
        (
            {"hidden_size": 64},
            (
                "/model.safetensors: model.embed_tokens.weight: shape (307, 32), but config.json asks for "
                "(307, 64)"
            ),
        ),
        ({"num_hidden_layers": 4}, ": model.layers.2."),
        ({"num_hidden_layers": 1}, "/model.safetensors: model.layers.1."),
        (
            {"num_hidden_layers": True},
            "/config.json: num_hidden_layers: must be a positive integer (got True)",
        ),
        ({"vocab_size": -307}, "/config.json: vocab_size: must be a positive integer (got -307)"),
        (
            {"intermediate_size": 48.0},
            "/config.json: intermediate_size: must be a positive integer (got 48.0)",
        ),
        ({"num_attention_heads": 64}, "/config.json: head_dim: must be a positive integer (got 0)"),
        ({"num_attention_heads": 0}, "/config.json: num_attention_heads: must be a positive integer (got 0)"),
        ({"head_dim": 7}, "/config.json: head_dim: must be even for rotary embeddings (got 7)"),
        (
            {"num_key_value_heads": None},
            "/model.safetensors: model.layers.0.self_attn.k_proj.weight: shape (16, 32)",
        ),
        ({"rope_theta": "big"}, "/config.json: rope_theta: must be a number > 0 (got 'big')"),
        ({"rope_theta": 0}, "/config.json: rope_theta: must be a number > 0 (got 0)"),
        (
            {"rms_norm_eps": "tiny"},
            "/config.json: rms_norm_eps: must be a number between 0 and 1 (got 'tiny')",
        ),
        ({"rms_norm_eps": -1}, "/config.json: rms_norm_eps: must be a number between 0 and 1 (got -1)"),
        (
            {"tie_word_embeddings": "no"},
            "/config.json: tie_word_embeddings: must be true or false (got 'no')",
        ),
        (
            {"max_position_embeddings": NULL},
            "/config.json: max_position_embeddings: must be a positive integer (got None)",
        ),
        (
            {"max_position_embeddings": "4k"},
            "/config.json: max_position_embeddings: must be a positive integer (got '4k')",
        ),
        ({"dtype": "float99"}, "/config.json: dtype: must be null or one of float32, bfloat16"),
        ({"torch_dtype": ["float32"]}, "/config.json: torch_dtype: must be null or one of float32, bfloat16"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "/config.json: layer_types: must be full_attention throughout",
        ),
        ({"rope_scaling": "yarn"}, "/config.json: rope_scaling: must be null or an object (got 'yarn')"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "/config.json: rope_type: 'yarn' scales attention by 1.1",
        ),
        (
            {"rope_scaling": {"type": "yarn"}},
            "/config.json: rope_scaling.factor: is missing, and rope_type yarn needs it",
        ),
        (
            {"rope_scaling": {"rope_type": "wavy"}},
            "/config.json: rope_scaling.rope_type: 'wavy' is not known (known: default,",
        ),
        (
            {"rope_scaling": {"rope_type": 3}},
            "/config.json: rope_scaling.rope_type: 3 is not known (known: default,",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope"}},
            "/config.json: rope_scaling.short_factor: is missing, and rope_type longrope",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": None}},
            "/config.json: rope_parameters.factor: must be a number > 0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "/config.json: rope_scaling.factor: is missing, and rope_type llama3 needs",
        ),
        (
            {"rope_scaling": LLAMA3_ROPE | {"factor": "8"}},
            "/config.json: rope_scaling.factor: must be a number > 0 (got '8')",
        ),
        (
            {"rope_scaling": LLAMA3_ROPE | {"low_freq_factor": 4}},
            "/config.json: rope_scaling.low_freq_factor: must be below high",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "/config.json: rope_parameters.full_attention: {} is not supported",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "/config.json: partial_rotary_factor: must be 1, as heads are rotated whole (got 0.5)",
        ),
        ({"attention_dropout": "some"}, "/config.json: not a configuration that transformers takes: "),
        ({"eos_token_id": "x"}, "/config.json: not a configuration that transformers takes: "),
        ({"rope_theta": 10**400}, "/config.json: rope_theta: must be a number > 0"),
        ({"rope_theta": 1e-300}, "/config.json: rope_theta: gives frequencies that are not finite"),
        ({"pad_token_id": 307}, "/config.json: pad_token_id: is outside the vocabulary of 307 (got 307)"),
        ({"use_cache": {}}, "/config.json: not a configuration that transformers takes: "),
        (
            {"auto_map": {"AutoModelForCausalLM": "m.M"}},
            "/config.json: auto_map: asks for code that lies in the folder, which",
        ),
    ]

    @pytest.mark.parametrize(("changes", "expected"), CONFIGS, ids=lambda value: str(value)[:40])
    def test_config_of_something_else(
        self, scene: Scene, model_copy: Path, changes: dict[str, Any], expected: str
    ) -> None:
        edit_json(model_copy / "config.json", **changes)
        assert self.damaged(scene, model_copy).startswith(expected)

    def test_no_weights(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "model.safetensors").unlink()
        assert self.damaged(scene, model_copy).startswith(
            ": neither model.safetensors nor model.safetensors.index.json is there"
        )

    @pytest.mark.parametrize("kept", [0, 4, 100, -1])
    def test_truncated_weights(self, scene: Scene, model_copy: Path, kept: int) -> None:
        whole = (model_copy / "model.safetensors").read_bytes()
        (model_copy / "model.safetensors").write_bytes(whole[:kept])
        assert self.damaged(scene, model_copy).startswith(
            "/model.safetensors: truncated or not a safetensors file"
        )

    def test_no_tokenizer(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "tokenizer.json").unlink()
        assert (
            self.damaged(scene, model_copy)
            == ": no tokenizer.json (the model's folder must hold its tokenizer)"
        )

    DAMAGED = {
        "": "cannot be read as JSON",
        "[": "cannot be read as JSON",
        "[]": "a JSON object is expected",
        "{}": "its tokenizer cannot be loaded: ",
        '{"model": {"type": "BPE"}}': "its tokenizer cannot be loaded: ",
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}': (
            "its tokenizer cannot be loaded: "
        ),
    }

    @pytest.mark.parametrize("content", DAMAGED)
    def test_damaged_tokenizer(self, scene: Scene, model_copy: Path, content: str) -> None:
        (model_copy / "tokenizer.json").write_text(content)
        assert self.damaged(scene, model_copy).startswith(f"/tokenizer.json: {self.DAMAGED[content]}")

    @pytest.mark.parametrize(
        "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
    )
    @pytest.mark.parametrize("content", ["", "{", "[1]"])
    def test_damaged_files_beside_it(self, scene: Scene, model_copy: Path, name: str, content: str) -> None:
        (model_copy / name).write_text(content)
        assert self.damaged(scene, model_copy).startswith(f"/{name}: ")

    @pytest.mark.parametrize(
        "changes",
        [{"eos_token": 3}, {"chat_template": 7}, {"model_max_length": "x"}, {"extra_special_tokens": 1}],
    )
    def test_settings_of_the_tokenizer_of_a_wrong_kind(
        self, scene: Scene, model_copy: Path, changes: dict[str, Any]
    ) -> None:
        (model_copy / "chat_template.jinja").unlink()
        edit_json(model_copy / "tokenizer_config.json", **changes)
        assert scene.train_refused(f"model.path={model_copy}")

    def test_a_token_beyond_the_vocabulary(self, scene: Scene, model_copy: Path) -> None:
        content = json.loads((model_copy / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary[next(token for token, number in vocabulary.items() if number == 200)] = 5000
        (model_copy / "tokenizer.json").write_text(json.dumps(content))
        expected = "/tokenizer.json: has a token of id 5000, but config.json's vocab_size is 307"
        assert self.damaged(scene, model_copy) == expected

    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
    def test_code_in_the_folder_is_never_run(
        self, scene: Scene, model_copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Even if the user would answer yes to transformers' question."""
        code = (
            f"open({str(model_copy / 'it ran')!r}, 'w')\nfrom transformers import Qwen2Config as C, "
            "PreTrainedTokenizerFast as T\n"
        )
        (model_copy / "code.py").write_text(code)
        for kind in ("AutoConfig", "AutoModelForCausalLM"):
            monkeypatch.setattr("builtins.input", lambda *_: "y")
            edit_json(model_copy / name, auto_map={kind: "code.C", "AutoTokenizer": ["code.T", "code.T"]})
            assert self.damaged(scene, model_copy).startswith(
                f"/{name}: auto_map: asks for code that lies in the folder, which is never"
            )
        edit_json(model_copy / name, auto_map=["code.T", "code.T"], tokenizer_class="T", model_type="own")
        self.damaged(scene, model_copy)
        assert not (model_copy / "it ran").exists()

    @pytest.mark.parametrize("sharded", [False, True])
    def test_a_tied_output_layer_of_its_own(self, scene: Scene, tmp_path: Path, sharded: bool) -> None:
        """transformers ties and silently drops the tensor; train, check, eval and convert refuse."""
        folder = make_tiny_model(
            tmp_path / "m", "qwen2", max_positions=256, max_shard_bytes=20_000 if sharded else None
        )
        edit_json(folder / "config.json", tie_word_embeddings=True)
        [path] = [file for file in folder.glob("*.safetensors") if "lm_head.weight" in load_file(file)]
        said = (
            f"{path}: lm_head.weight: differs from model.embed_tokens.weight, and {folder}/config.json "
            "says tie_word_embeddings: true "
            "(set it to false to use this tensor, or take the tensor out of the files)"
        )
        assert scene.train_refused(f"model.path={folder}") == f"model.path: {said}"
        assert (
            scene.refused("config", "check", str(scene.config), f"model.path={folder}")
            == f"model.path: {said}"
        )
        assert (
            scene.refused("eval", str(scene.config), "--checkpoint", str(folder)) == f"--checkpoint: {said}"
        )
        assert scene.refused("convert", "to-megatron", str(folder), str(tmp_path / "out")) == said
        edit_json(folder / "config.json", tie_word_embeddings=False)
        HFFolder(folder)
        edit_json(folder / "config.json", tie_word_embeddings=True)
        embedding = next(
            t["model.embed_tokens.weight"]
            for t in map(load_file, folder.glob("*.safetensors"))
            if "model.embed_tokens.weight" in t
        )
        save_file(load_file(path) | {"lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
        assert HFFolder(folder).extra == ("lm_head.weight",), "the same bits twice are the same model"

    def test_tokenizer_without_an_end(self, scene: Scene, tmp_path: Path) -> None:
        # transformers would invent one for Qwen
        folder = make_tiny_model(tmp_path / "m", "llama", max_positions=256)
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        assert self.damaged(scene, folder).startswith(
            ": its tokenizer has no end-of-sequence token (set eos_token"
        )

    def test_tokenizer_of_a_larger_model(self, scene: Scene, tmp_path: Path) -> None:
        small = make_tiny_model(tmp_path / "small", "qwen2", vocab=64, max_positions=256)
        (small / "tokenizer.json").write_bytes((scene.folder / "model" / "tokenizer.json").read_bytes())
        assert self.damaged(scene, small).startswith(
            ": its vocabulary of 64 does not hold the 261 tokens of the actor's tokenizer"
        )

    def test_no_chat_template(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "chat_template.jinja").unlink()
        line = scene.train_refused(f"model.path={model_copy}")
        assert line == (
            "data.template: the tokenizer has no chat template (set data.template=raw, or add one to "
            "the model's folder)"
        )

    def test_chat_template_that_fails(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}")
        line = scene.train_refused(f"model.path={model_copy}")
        assert line.startswith("data.template: the tokenizer's chat template fails: ") and line.endswith(
            "or set data.template=raw)"
        )
        (model_copy / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
        assert self.damaged(scene, model_copy).startswith(
            "/chat_template.jinja: its tokenizer cannot be loaded: "
        )
        (model_copy / "chat_template.jinja").write_text("{{ 1 / 0 }}")
        assert "template fails: ZeroDivisionError: division by zero (" in scene.train_refused(
            f"model.path={model_copy}"
        )

    def test_critic(self, scene: Scene, tmp_path: Path, model_copy: Path) -> None:
        assert scene.train_refused("recipe=vapo", "critic.path=/no/critic").startswith(
            "critic.path: /no/critic: no such folder"
        )
        small = make_tiny_model(
            tmp_path / "small", "qwen2", vocab=64, max_positions=256, classification="sequence"
        )
        assert self.damaged(scene, small, "critic.path").startswith(
            ": its vocabulary of 64 does not hold the 261 tokens"
        )
        short = make_tiny_model(tmp_path / "short", "qwen3", max_positions=100)
        assert f"exceed the 100 positions of {short}" in scene.train_refused(
            "recipe=vapo", f"critic.path={short}"
        )
        edit_json(model_copy / "config.json", model_type="bert")
        assert self.damaged(scene, model_copy, "critic.path").startswith(
            "/config.json: model_type: 'bert' is not a known family"
        )

    def test_reward_model(self, scene: Scene, tmp_path: Path, model_copy: Path) -> None:
        key = "reward.model.path"
        assert scene.train_refused(f"{key}=/no/model").startswith(f"{key}: /no/model: no such folder")
        line = scene.train_refused(f"{key}={model_copy}")
        assert line.startswith(f"{key}: {model_copy}: has no score.weight (a reward model is")
        sizes: dict[str, Any] = {"max_positions": 256, "classification": "sequence"}
        scorer = make_tiny_model(tmp_path / "scorer", "llama", **sizes)
        tokenizer, other = scorer / "tokenizer.json", f"{key}: {scorer}: its tokenizer is not the actor's: "
        whole = json.loads(tokenizer.read_text())

        def refused(**changes: Any) -> str:
            tokenizer.write_text(json.dumps(whole | changes))
            return scene.train_refused(f"{key}={scorer}")

        vocab = dict(whole["model"]["vocab"])
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        first, second = sorted((whole["model"]["vocab"][c], c) for c in "ab")
        assert refused(model=whole["model"] | {"vocab": vocab}).startswith(
            f"{other}{first[1]!r}, token {first[0]} of the actor, is number {second[0]} there (it is given"
        )
        assert refused(normalizer={"type": "Lowercase"}).startswith(f"{other}their normalisation differs")
        plain = [token | {"special": token["id"] < 3} for token in whole["added_tokens"]]
        (scorer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        assert refused(added_tokens=plain).startswith(f"{other}their special tokens differ")
        tokenizer.unlink()
        assert scene.train_refused(f"{key}={scorer}").startswith(f"{key}: {scorer}: its tokenizer cannot be")

    def test_top_k(self, scene: Scene) -> None:
        trainers = "recipe=dppo", "algorithm.old_logprobs=trainer"
        line = scene.train_refused(*trainers, "algorithm.dppo.top_k=4000")
        assert re.search(
            r"x\.yaml: algorithm\.dppo\.top_k: 4000 is more than the \d+ tokens that there", line
        )

    def test_teacher(self, scene: Scene, model_copy: Path) -> None:
        key = "teacher.path"
        assert scene.train_refused(f"{key}=/no/model").startswith(f"{key}: /no/model: no such folder")
        named = f"teacher.by_source.gsm8k={model_copy}"
        line = scene.train_refused(named, "teacher.top_k=4000")
        assert re.search(
            r"x\.yaml: teacher\.top_k: 4000 is more than the \d+ tokens that there are \(lower", line
        )
        row = '{"prompt": "1+1=", "answer": "2", "data_source": ["gsm8k"]}\n'
        (scene.folder / "listed.jsonl").write_text(row)  # a list is not a name
        line = scene.train_refused(named, f"data.train=[{scene.folder / 'listed.jsonl'}]")
        assert "teacher.by_source.gsm8k: no row of data.train has this data_source, whose" in line
        line = scene.train_refused(named, "teacher.top_k=4")
        assert "x.yaml: teacher.by_source.gsm8k: no row of data.train has this data_source, whose" in line
        config = json.loads((model_copy / "config.json").read_text())
        edit_json(model_copy / "config.json", max_position_embeddings=100)
        assert f"exceed the 100 positions of {model_copy}" in scene.train_refused(f"{key}={model_copy}")
        edit_json(model_copy / "config.json", **config)
        model = json.loads((model_copy / "tokenizer.json").read_text())["model"]
        model["vocab"] |= {"a": model["vocab"]["b"], "b": model["vocab"]["a"]}
        edit_json(model_copy / "tokenizer.json", model=model)
        line = scene.train_refused(f"{key}={model_copy}")
        assert (
            line.startswith(f"{key}: {model_copy}: its tokenizer is not the actor's: ")
            and "is number" in line
        )
        other = f"teacher.by_source.gsm8k: {model_copy}: its tokenizer is not the actor's: "
        assert scene.train_refused(named).startswith(other)

    def test_critic_with_two_labels(self, scene: Scene, tmp_path: Path) -> None:
        folder = make_tiny_model(tmp_path / "m", "qwen2", max_positions=256, classification="sequence")
        weights = load_file(folder / "model.safetensors")
        weights["score.weight"] = torch.cat([weights["score.weight"]] * 2)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        assert self.damaged(scene, folder, "critic.path").startswith(
            "/model.safetensors: score.weight: shape (2, 32)"
        )


class TestData:
    CASES: dict[str, tuple[str, str]] = {
        "empty.jsonl": ("", "holds no row"),
        "blank.jsonl": ("\n \n", "holds no row"),
        "malformed.jsonl": ("{\nnope\n", "no row can be used: 2 x malformed JSON"),
        "foreign.jsonl": ('{"text": "a"}\n', "no row can be used: 1 x no prompt in prompt or question"),
        "unanswered.jsonl": (
            '{"question": "a"}\n',
            "no row can be used: 1 x no answer in reward_model.ground_truth or answer",
        ),
        "malformed.parquet": ("PAR1 not really", "cannot be read: "),
        "empty.parquet": ("", "cannot be read: "),
        "table.csv": ("question,answer\na,b\n", "unknown kind of file '.csv' (use .parquet or .jsonl)"),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_files(self, scene: Scene, tmp_path: Path, name: str) -> None:
        content, expected = self.CASES[name]
        (tmp_path / name).write_text(content)
        assert scene.train_refused(f"data.train=[{tmp_path / name}]").startswith(
            f"{tmp_path / name}: {expected}"
        )
        # The same error in evaluation data, next to a good file.
        files = f"data.eval=[{scene.folder}/train.jsonl, {tmp_path / name}]"
        assert scene.train_refused(files).startswith(f"{tmp_path / name}: {expected}")

    @pytest.mark.parametrize("key", ["train", "eval"])
    def test_prompts_that_are_all_too_long(self, scene: Scene, tmp_path: Path, key: str) -> None:
        rows = [{"question": f"{number}" * 200, "answer": "1"} for number in range(3)]
        path = write_jsonl(tmp_path / "long.jsonl", rows)
        line = scene.train_refused(f"data.{key}=[{scene.folder}/train.jsonl, {path}]")
        assert line.startswith(
            f"{path}: no row can be used: 3 x longer than data.max_prompt_tokens 128 (see "
        )
        last = write_jsonl(tmp_path / "last.jsonl", [*rows, {"question": "1 + 1 = ?", "answer": "2"}])
        assert main(["config", "check", str(scene.config), f"data.{key}=[{last}]"]) == 0

    def test_missing(self, scene: Scene, tmp_path: Path) -> None:
        assert scene.train_refused("data.train=[/no/such.parquet]") == "/no/such.parquet: no such file"
        assert (
            scene.train_refused(f"data.train=[{tmp_path}]")
            == f"{tmp_path}: not a file (name the .parquet or .jsonl files)"
        )

    def test_pairs_without_responses(self, scene: Scene) -> None:
        # default keys: the scene's data is for sampled responses
        line = scene.train_refused("recipe=sft", "reward.overlong.buffer=4096")
        assert line.startswith(f"{scene.folder}/train.jsonl: no row can be used: 9 x no response in response")


class TestRunFolder:
    def test_below_a_file(self, scene: Scene, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for run_dir in (f"{tmp_path}/file/run", f"{tmp_path}/file"):
            line = scene.train_refused(f"run_dir={run_dir}")
            assert line.startswith(f"run_dir: {run_dir}: cannot be written: ") and line.endswith(
                " (choose another folder)"
            )

    def test_where_nobody_may_write(self, scene: Scene) -> None:
        assert scene.train_refused("run_dir=/proc/megarl").startswith(
            "run_dir: /proc/megarl: cannot be written: "
        )

    def test_name_too_long(self, scene: Scene) -> None:
        assert "cannot be written: File name too long" in scene.train_refused(f"run_dir=/tmp/{'x' * 300}")

    def test_a_link_to_the_models_folder(self, scene: Scene, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(scene.folder / "model")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert f"run_dir: {tmp_path}/link/run is inside model.path" in scene.train_refused(
            f"run_dir={tmp_path}/link/run"
        )
        assert scene.train_refused(f"run_dir={tmp_path}/loop").startswith(
            f"run_dir: {tmp_path}/loop: cannot be written: "
        )

    def test_used_already(self, scene: Scene, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text("")
        before = set(os.listdir(tmp_path))
        line = scene.train_refused(f"run_dir={tmp_path}")
        assert line.startswith(f"run_dir: {tmp_path}: already holds a run")
        assert set(os.listdir(tmp_path)) == before


class TestEvaluation:
    def refused(self, scene: Scene, *arguments: str) -> str:
        return scene.refused("eval", str(scene.config), *arguments)

    def test_what_is_asked_of_it(self, scene: Scene, tmp_path: Path) -> None:
        assert (
            self.refused(scene, "data.eval=[]")
            == f"{scene.config}: data.eval: must name at least one file to evaluate on"
        )
        assert self.refused(scene, "data.eval=[/no.jsonl]") == "/no.jsonl: no such file"
        two = "data.eval=[{path: a.jsonl, name: n}, {path: b.jsonl, name: n}]"
        assert self.refused(scene, two).startswith(f"{scene.config}: data.eval[1].name: data.eval[0] has the")
        assert self.refused(scene, "--checkpoint", "/no/model").startswith(
            "--checkpoint: /no/model: no such folder"
        )
        assert self.refused(scene, "model.path=/no/model").startswith("model.path: /no/model: no such folder")
        assert "exceed the 256 positions" in self.refused(scene, "rollout.max_response_tokens=1000")
        assert self.refused(scene, "reward.verifier=x:y").startswith("reward.verifier: x cannot be imported")
        (tmp_path / "file").write_text("")
        assert self.refused(scene, "--out", f"{tmp_path}/file").startswith(
            f"{tmp_path}/file: cannot be written: "
        )
        inside = f"{scene.folder}/model/answers"
        assert self.refused(scene, "--out", inside).startswith(
            f"{inside}: is in the model's folder {scene.folder}/model, where nothing"
        )
        assert not (scene.folder / "run").exists()

    def test_checkpoint_without_tokenizer(self, scene: Scene, model_copy: Path) -> None:
        (model_copy / "tokenizer.json").unlink()
        assert self.refused(scene, "--checkpoint", str(model_copy)).startswith(
            f"--checkpoint: {model_copy}: no tokenizer.json"
        )


class TestCommandLine:
    CASES = {
        "": "missing command (see megarl --help)",
        "trian x.yaml": "no such command 'trian'. Did you mean 'train'? (see megarl --help)",
        "train": "megarl train: missing argument 'config' (see megarl train --help)",
        "train x.yaml --actor.lr=3": (
            "megarl train: no such option: --actor.lr; an override has no dashes: actor.lr=... (see megarl "
            "train --help)"
        ),
        "train x.yaml --frobnicate": "megarl train: no such option: --frobnicate (see megarl train --help)",
        "train x.yaml --profil 2": "megarl train: no such option: --profil (Possible options: --profile)",
        "train x.yaml --profile": "option '--profile' requires an argument (see megarl --help)",
        "replay x": "megarl replay: missing option '--step' (see megarl replay --help)",
        "train /no/such.yaml": "/no/such.yaml: no such file",
        "config": "megarl config: missing command (see megarl config --help)",
        "config shwo x.yaml": "megarl config: no such command 'shwo'. Did you mean 'show'?",
        "config show": "megarl config show: missing argument 'config' (see megarl config show --help)",
        "config check /no/such.yaml": "/no/such.yaml: no such file",
        "report": "megarl report: missing argument 'RUN' (see megarl report --help)",
        "report /no/such/run": (
            "/no/such/run/metrics.jsonl: cannot be read: No such file or directory (is this the folder of "
            "a run?)"
        ),
        "watch x y": "megarl watch: got unexpected extra argument(s) (y) (see megarl watch --help)",
        "demo --recipe ppo": "megarl demo: invalid value for '--recipe': 'ppo' is not one of 'vapo', 'dapo',",
        "demo --seed x": "megarl demo: invalid value for '--seed': must be a whole number (got 'x')",
        "ablate vapo --seeds 0 x": "megarl ablate: invalid value for '--seeds': must be a whole number",
        "ablate vapo --seeds --fresh": "megarl ablate: invalid value for '--seeds': must be a whole number",
        "ablate vapo --rows": "option '--rows' requires an argument (see megarl --help)",
        "demo --folder /proc/megarl": "/proc/megarl",
        "demo --folder /usr": "/usr: exists and was not made by megarl demo",
        "demo --folder {here}": "{here}: not a folder (choose another --folder)",
        "demo --folder {tmp} rollout.groupsize=3": "command line: rollout.groupsize: unknown key",
        "demo --folder {tmp} rollout.group_size=7": (
            "{configs}/demos/vapo.yaml: update.mini_batch: must divide the 224 responses"
        ),
    }

    @pytest.mark.parametrize("command", CASES)
    def test_one_line(self, scene: Scene, tmp_path: Path, command: str) -> None:
        line = scene.refused(
            *command.replace("{tmp}", str(tmp_path / "demo")).replace("{here}", __file__).split()
        )
        expected = self.CASES[command].replace("{here}", __file__)
        assert (
            line.startswith(expected)
            if "{configs}" not in expected
            else expected.removeprefix("{configs}") in line
        )
        assert not (tmp_path / "demo").exists(), "the demo's mistakes are found before anything is made"

    def test_overrides_before_and_after_options(self, scene: Scene) -> None:
        line = scene.refused("eval", str(scene.config), "seed=1", "--out", "x", "seed=oops")
        assert line == "command line: seed: must be a whole number (got 'oops')"

    def test_report_of_an_empty_folder(self, scene: Scene, tmp_path: Path) -> None:
        assert scene.refused("report", str(tmp_path)).startswith(
            f"{tmp_path}/metrics.jsonl: cannot be read: No such file"
        )


def run(*arguments: str, forked: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, as a shell starts it, or forked (tests/commands.py)."""
    if forked:
        return run_command(arguments, cwd=Path.cwd(), env=os.environ | environment, timeout=120)
    command = [sys.executable, "-m", "megarl", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | environment
    )


class TestRealProcess:
    @pytest.mark.parametrize(
        "command",
        [
            lambda s: ("train", str(s.config), "rollout.prompts=many"),
            pytest.param(
                lambda s: ("train", str(s.config), "model.path=/no/such/model"), marks=pytest.mark.slow
            ),
            pytest.param(
                lambda s: ("eval", str(s.config), "--checkpoint", "/no/such/model"), marks=pytest.mark.slow
            ),
        ],
        ids=["key", "model", "eval"],
    )
    def test_one_line_and_code_2(self, scene: Scene, command: Callable[[Scene], tuple[str, ...]]) -> None:
        arguments = command(scene)
        done = run(*arguments, forked="rollout.prompts=many" not in arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("megarl: ")
        assert not (scene.folder / "run").exists()

    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: 'abc' is not a whole number (torchrun sets them all; "),
            ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK: must be 0 to 1, as WORLD_SIZE says (got 5; "),
        ],
    )
    def test_a_launcher_that_cannot_be(self, scene: Scene, variables: dict[str, str], said: str) -> None:
        done = run("train", str(scene.config), **variables)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith(f"megarl: {said}")
        assert not (scene.folder / "run").exists()

    @pytest.mark.slow
    def test_under_torchrun_rank_0_alone_says_it(self, scene: Scene) -> None:
        launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        said = [
            run("train", str(scene.config), "model.path=/no/model", forked=True, RANK=str(rank), **launched)
            for rank in (0, 1)
        ]
        assert [done.returncode for done in said] == [2, 2]
        assert (
            said[0].stderr.startswith("megarl: model.path: /no/model: no such folder")
            and said[0].stderr.count("\n") == 1
        )
        assert said[1].stderr == ""

    def test_a_reader_that_has_enough(self) -> None:
        command = f"{sys.executable} -m megarl config docs | head -n 1"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert (done.stdout, done.stderr) == ("recipe\n", "")


def test_a_row_that_is_no_row_does_not_stop_the_others(scene: Scene, tmp_path: Path) -> None:
    mixed = write_jsonl(
        tmp_path / "mixed.jsonl", [{"question": "a?"}, {"question": "What is 1 + 1?", "answer": "2"}]
    )
    assert scene.capsys is not None
    assert main(["config", "check", str(scene.config), f"data.train=[{mixed}]"]) == 0
    assert scene.capsys.readouterr().out == f"{scene.config}: the configuration is valid\n"
